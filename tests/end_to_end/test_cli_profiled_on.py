"""``predict --profiled-on``: machine files and measurements of another machine, and unfit ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement

FROZEN = Path(__file__).parents[1] / "golden" / "frozen"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A machine, a step measured on it, its trace, and the same machine under another name."""
    found = {}
    for name, path in (
        ("there", "machine.json.gz"),
        ("measured", "measurement.json.gz"),
        ("step", "traces/lenet-16.json.gz"),
    ):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_bytes(gzip.decompress((FROZEN / path).read_bytes()))
    here = replace(Machine.load(found["there"]).cpu, model="a processor that no host has")
    found["here"] = tmp_path / "here.json"
    replace(Machine.load(found["there"]), cpu=here).save(found["here"])
    return found


@pytest.fixture
def predicted(dlperf: Callable, files: dict[str, Path]) -> Callable:
    def predict(*options: object) -> dict:
        on = ("--machine", files["here"], "--threads", "1", "--json", "-")
        done = dlperf("predict", files["step"], *on, *options)
        assert done.status == 0, done.err
        return dict(json.loads(done.out))

    return predict


def test_the_same_machine_predicts_nearly_the_same(
    predicted: Callable, files: dict[str, Path]
) -> None:
    usual, carried = predicted(), predicted("--profiled-on", files["there"])
    assert carried["profiled_on"] == str(files["there"])
    assert carried["step"]["total_s"] == pytest.approx(usual["step"]["total_s"], rel=0.1)


def test_a_measurement_there_is_the_base(predicted: Callable, files: dict[str, Path]) -> None:
    on = ("--profiled-on", files["there"], "--profiled-on", files["measured"])
    found, measured = predicted(*on), Measurement.load(files["measured"])
    # the machine is the same, so is the step; each layer moves by its own error
    assert found["step"]["total_s"] == pytest.approx(measured.step["total"].median, rel=0.1)
    backward = {row["layer"]: row["backward_s"] for row in found["layers"]}
    for row in measured.layers:
        if row.layer.startswith("conv"):
            samples = row.phase("backward")
            assert samples is not None
            assert backward[row.layer] == pytest.approx(samples.median, rel=0.15)


def test_epochs_and_factors_follow(predicted: Callable, files: dict[str, Path]) -> None:
    on = ("--profiled-on", files["there"])
    usual = predicted(*on, "--samples", "64")
    slow = predicted(*on, "--samples", "64", "--what-if", "flops=0.5", "overhead=2")
    assert slow["epoch"]["steps_s"] > 1.5 * usual["epoch"]["steps_s"]
    assert usual["epoch"]["steps_s"] == pytest.approx(4 * usual["step"]["total_s"], rel=0.2)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("measured",), "a measurement does not contain the roofs of its machine"),
        (("there", "here"), "give the other machine's file, and at most one measurement"),
        (("there", "measured", "measured"), "at most one measurement"),
        (("step",), "is no dlperf.machine file"),
        (("here", "measured"), "was measured on AMD EPYC, not on a processor that no host has"),
        (("missing",), "missing.json"),
    ],
    ids=" ".join,
)
def test_unfit_files(
    dlperf: Callable, files: dict[str, Path], tmp_path: Path, names: tuple[str, ...], said: str
) -> None:
    files["missing"] = tmp_path / "missing.json"
    options = [word for name in names for word in ("--profiled-on", files[name])]
    done = dlperf("predict", files["step"], "--machine", files["here"], *options)
    assert done.status == 2
    assert said in done.line


@pytest.mark.parametrize("text", ["", "{", '{"schema": "dlperf.machine"}', "[1]"])
def test_damaged_files(dlperf: Callable, files: dict[str, Path], tmp_path: Path, text: str) -> None:
    damaged = tmp_path / "damaged.json"
    damaged.write_text(text)
    on = ("--machine", files["here"], "--profiled-on", damaged)
    done = dlperf("predict", files["step"], *on)
    assert done.status == 2
    assert "damaged.json" in done.line


def test_a_measurement_of_another_step(
    dlperf: Callable, files: dict[str, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    on = ("--profiled-on", files["there"], "--profiled-on", files["measured"])
    for name, said in (
        ("lenet-inference-16", "is of a training step at batch size 16; a step is carried over"),
        ("mlp-32", "the point is of another network"),
    ):
        packed = (FROZEN / "traces" / f"{name}.json.gz").read_bytes()
        other.write_bytes(gzip.decompress(packed))
        done = dlperf("predict", other, "--machine", files["here"], *on)
        assert done.status == 2
        assert said in done.line


def test_options_that_exclude_one_another(dlperf: Callable, files: dict[str, Path]) -> None:
    on = ("predict", files["step"], "--machine", files["here"], "--profiled-on", files["there"])
    done = dlperf(*on, "--point", files["measured"])
    assert done.status == 2
    assert "--point is for viebke-a and viebke-b" in done.line
    done = dlperf(*on, "--predictor", "roofline")
    assert done.status == 2
    assert "'roofline' takes no kernels of another machine" in done.line

"""``dlperf validate`` from the command line: a small study, what it keeps, single ops in a process
of their own, the peers', and bad input.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dlperf.cli.op_timing import time_ops_apart
from dlperf.core.errors import WorkFailed
from dlperf.core.trace import Op, TensorSpec
from dlperf.studies.accuracy.baselines import COST_MODEL, NAIVE, REPLAY, ask_baselines
from dlperf.studies.accuracy.cases import Case

UNUSABLE, FAILED = 2, 1


@pytest.mark.process
def test_a_small_study_and_the_same_again(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    cache, folder = tmp_path / "kept", tmp_path / "accuracy"
    command = (
        "validate",
        f"{targets_file}:net@4",
        "--machine",
        machine_file,
        "--predictor",
        "roofline,calibrated",
        "--threads",
        "1",
        "--runs",
        "1",
        "--seconds",
        "0.05",
        "--cache",
        cache,
        "-o",
        folder,
        "--json",
        tmp_path / "study.json",
    )
    done = dlperf(*command)
    assert done.status == 0, done.err
    assert "sample_targets.py:net@4 t1" in done.out
    data = json.loads((tmp_path / "study.json").read_text())
    assert [(row["batch_size"], row["predictor"]) for row in data["cases"]] == [
        (4, "roofline"),
        (4, "calibrated"),
    ]
    assert all(row["actual_s"] > 0 for row in data["cases"])
    assert {path.name for path in folder.iterdir()} >= {
        "accuracy.md",
        "cases.csv",
        "layers.csv",
        "cases.png",
    }
    line = "run 1 of 1, case 1 of 1: sample_targets.py:net@4 t1"
    assert line in done.err
    lacks = f"{machine_file}: contains no reference state, so states have no effect"
    assert done.err.count(lacks) == 1
    assert "contains no reference state" in " ".join(done.out.split())  # a remark of the study
    assert "kept from before" not in done.err
    kept = {path: path.read_text() for path in cache.iterdir()}
    assert len(kept) == 1
    again = dlperf(*command)
    assert again.status == 0, again.err
    assert {path: path.read_text() for path in cache.iterdir()} == kept
    assert "1 of 1 measurements were kept" in again.out
    assert f"{line}: kept from before" in again.err
    assert [
        row["actual_s"] for row in json.loads((tmp_path / "study.json").read_text())["cases"]
    ] == [row["actual_s"] for row in data["cases"]]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["{file}:absent"], "absent"),
        (["missing.py:net"], "missing.py"),
        (["trace.json"], "trace.json: No such file"),
        (["{file}:net@0"], "batch size is 0"),
        (["{file}:net@x"], "x after the @ is no batch size"),
        (["lenet@16,-1"], "16,-1 after the @ is no batch size; give lenet@32"),
        (["{file}:net", "--predictor", "oracle"], "oracle"),
        (["{file}:net", "--threads", "0"], "--threads: '0'"),
        (["{file}:net", "--runs", "0"], "--runs: '0'"),
        (["{file}:net", "--seconds", "0"], "--seconds: '0'"),
        (["{file}:net", "--batch-size", "3", "--batch-sizes", "4"], "--batch-sizes"),
        (["{file}:net", "--seed", "3"], "--held-out-ops"),
        (["{file}:net", "--ops", "3"], "--held-out-ops"),
        (["--held-out-ops", "--ops", "0"], "--ops: '0'"),
        (["--held-out-ops", "--ops", "2001"], "--ops 2001 is more than 2000"),
        (["{file}:net", "-o", "{file}"], "is a file"),
        (["{file}:net", "-o", "-"], "-o - is no folder"),
        (["--held-out-ops", "--peers"], "--peers needs targets"),
        (["--held-out-ops", "--machine", "none.json"], "dlperf calibrate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(
    dlperf: Callable, targets_file: Path, machine_file: Path, arguments: list[str], names: str
) -> None:
    given = [argument.format(file=targets_file) for argument in arguments]
    machine = [] if "--machine" in given else ["--machine", machine_file]
    done = dlperf("validate", *given, *machine)
    assert done.status == UNUSABLE
    assert names in done.err.splitlines()[-1]
    assert len([line for line in done.err.splitlines() if "error" in line]) == 1
    assert done.out == ""


@pytest.mark.process
def test_a_model_that_fails_is_named_and_the_others_are_studied(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    tired = targets_file.parent / "tired.py"
    tired.write_text(
        targets_file.read_text()
        + "\n\nclass Tired(nn.Linear):\n    def forward(self, x):\n        if type(x) is"
        " torch.Tensor:\n            raise ValueError('really tired')\n        return"
        " super().forward(x)\n\n\ndef tired(batch_size):\n    return Tired(8, 4),"
        " (torch.zeros(batch_size, 8),), torch.sum\n"
    )
    done = dlperf(
        "validate",
        f"{tired}:tired@2",
        f"{tired}:net@2",
        "--machine",
        machine_file,
        "--predictor",
        "roofline",
        "--threads",
        "1",
        "--runs",
        "1",
        "--seconds",
        "0.05",
        "--cache",
        tmp_path / "kept",
    )
    assert done.status == FAILED
    assert "tired.py:tired@2 t1 could not be measured" in done.out
    assert "really tired" in done.out
    assert "tired.py:net@2 t1" in done.out


@pytest.mark.process
def test_single_ops_are_timed_in_a_process_of_their_own() -> None:
    spec = TensorSpec.contiguous(256)
    ops = [Op("aten.relu.default", (spec,)), Op("aten.nonsense.default", (spec,))]
    done: list[int] = []
    kernels, refused = time_ops_apart(ops, 1, done.append)
    assert [kernel.op.signature for kernel in kernels] == [ops[0].signature]
    assert kernels[0].samples.median > 0
    assert len(refused) == 1
    assert "nonsense" in refused[0]
    assert sum(done) == 2


@pytest.mark.process
def test_a_timing_process_that_dies_is_work_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(WorkFailed, match="status 1"):
        time_ops_apart([Op("aten.relu.default", (TensorSpec.contiguous(4),))], 1, lambda n: None)


@pytest.mark.process
def test_peers_are_asked_without_touching_this_process(targets_file: Path) -> None:
    import torch

    before = torch.cuda.is_available
    predicted = {
        estimate.baseline: estimate
        for estimate in ask_baselines(Case(f"{targets_file}:net", 16, 1), 1e9, 1e18, None)
    }
    assert torch.cuda.is_available is before
    # Linear(8, 4) and Linear(4, 2) on 16 samples: forward 2*16*(32 + 8) FLOP; backward twice that
    # less the first layer's input gradient, 2*16*32.
    assert predicted[NAIVE].forward_s == pytest.approx(1280e-9)
    assert predicted[NAIVE].total_s == pytest.approx((1280 + 2 * 1280 - 1024) * 1e-9)
    # With memory for nothing, its cost model is left with FLOPs / peak: neither halved nor at 0.75
    # of the peak.
    layers = {name: forward_s for name, forward_s, _ in predicted[COST_MODEL].layers}
    assert layers["0"] == pytest.approx(2 * 16 * 32 * 1e-9, rel=1e-3)
    assert (predicted[REPLAY].total_s or 0) > 0
    assert all(
        estimate.problem
        for name, estimate in predicted.items()
        if name.startswith("neural") and estimate.forward_s is None
    )

"""Measurements as data: medians, repeatability, frame, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_cases import cnn_measurement, cnn_trace

from dlperf.core.clock import Samples
from dlperf.core.errors import DlperfError
from dlperf.core.measurement import LayerTimes, Measurement


def small() -> Measurement:
    step = {
        "forward": Samples((1e-3, 3e-3, 2e-3)),
        "total": Samples((2e-3, 4e-3, 6e-3), 2),
        "backward": Samples((1e-3,)),
    }
    layers = (
        LayerTimes("fc", "Linear", Samples((1e-3, 2e-3, 3e-3)), Samples((5e-4,)), None),
        LayerTimes("odd", "Odd", None),
    )
    return Measurement(
        "net.py:net",
        8,
        2,
        step,
        layers,
        repeat=Samples((5e-3,)),
        noise={"faults": 3.0},
        notes=("n",),
        versions={"torch": "2"},
        machine="Some CPU",
    )


def test_the_floor_is_the_distance_of_two_medians() -> None:
    assert small().repeatability_frac == pytest.approx(0.25)  # |5 - 4| / 4
    assert replace(small(), repeat=None).repeatability_frac is None


def test_the_frame_has_medians_and_gaps() -> None:
    frame = small().frame
    assert list(frame.columns) == [
        "layer",
        "type",
        "forward_s",
        "forward_spread_frac",
        "backward_s",
        "backward_spread_frac",
        "optimizer_s",
        "optimizer_spread_frac",
    ]
    fc, odd = frame.to_dict("records")
    assert fc["forward_s"] == 2e-3
    assert fc["forward_spread_frac"] == pytest.approx(0.8)  # (2.8 - 1.2) / 2
    assert (fc["backward_s"], fc["backward_spread_frac"]) == (5e-4, 0.0)
    assert math.isnan(fc["optimizer_s"])
    assert all(math.isnan(odd[name]) for name in frame.columns[2:])
    assert list(replace(small(), layers=()).frame.columns) == list(frame.columns)


def test_a_step_has_a_total() -> None:
    step = {key: value for key, value in small().step.items() if key != "total"}
    with pytest.raises(DlperfError, match="the step has no 'total' samples"):
        replace(small(), step=step)


@pytest.mark.parametrize(
    "measurement",
    [
        small(),
        cnn_measurement(),
        cnn_measurement(inference=True),
        replace(small(), repeat=None, layers=()),
    ],
)
def test_a_file_gives_back_the_measurement(tmp_path: Path, measurement: Measurement) -> None:
    measurement.save(tmp_path / "a.json")
    again = Measurement.load(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert again.frame.equals(Measurement.load(tmp_path / "b.json").frame)
    assert again.step["total"].median == pytest.approx(
        measurement.step["total"].median, rel=1e-5
    )  # six digits are written
    assert (again.target, again.notes, again.noise, again.machine, again.inference) == (
        measurement.target,
        measurement.notes,
        measurement.noise,
        measurement.machine,
        measurement.inference,
    )


def test_short_numbers_survive_exactly(tmp_path: Path) -> None:
    small().save(tmp_path / "m.json")
    assert Measurement.load(tmp_path / "m.json") == small()
    row = json.loads((tmp_path / "m.json").read_text())["step"]["total"]
    assert row == {"median_s": 0.004, "samples_s": [0.002, 0.004, 0.006], "disturbed": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=9), "schema_version is 9"),
        (
            lambda d: d.update(schema_version=3),
            "schema_version is 3, this dlperf writes 5; make the file again",
        ),
        (lambda d: d.update(schema="dlperf.trace"), "is no dlperf.measurement file"),
        (
            lambda d: d["step"].pop("total"),
            r"step\.total is missing; expected an object\. Measure again\.",
        ),
        (
            lambda d: d["step"]["total"].update(samples_s=[]),
            r"step\.total\.samples_s is \[\]; expected a list of at least 1\. Measure again\.",
        ),
        (
            lambda d: d["step"]["total"].update(samples_s=[-1.0]),
            r"samples_s\[0\] is -1\.0; expected a finite number greater than 0",
        ),
        (
            lambda d: d["step"]["total"].update(samples_s=[math.nan]),
            r"samples_s\[0\] is nan; expected a finite number",
        ),
        (
            lambda d: d["step"]["total"].update(samples_s=["x"]),
            r"step\.total\.samples_s\[0\] is 'x'; expected a finite number",
        ),
        (
            lambda d: d["layers"][0]["forward"].update(disturbed=-1),
            r"layers\[0\]\.forward\.disturbed is -1; expected a whole number",
        ),
        (lambda d: d["layers"][0].pop("type"), r"layers\[0\]\.type is missing"),
        (lambda d: d.pop("step"), "step is missing"),
        (lambda d: d.update(layers=3), "layers is 3; expected a list"),
        (
            lambda d: d.update(layers=2 * d["layers"]),
            r"layers\[2\]\.layer is 'fc'; expected each of them once",
        ),
        (lambda d: d.update(inference="abc"), "inference is 'abc'; expected true or false"),
        (
            lambda d: d.update(batch_size=True),
            "batch_size is true; expected a whole number of at least 1",
        ),
        (
            lambda d: d.update(batch_size=1.5),
            r"batch_size is 1\.5; expected a whole number of at least 1",
        ),
        (
            lambda d: d.update(batch_size=1e308),
            r"batch_size is 1e\+308; expected a whole number of at most 9,007,199,254,740,992",
        ),
        (
            lambda d: d.update(noise={"a": 1.0, "b": math.nan}),
            r"noise\['b'\] is nan; expected a finite number",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, change: Any, message: str) -> None:
    data = small().to_json()
    change(data)
    file = tmp_path / "m.json"
    file.write_text(json.dumps(data))
    with pytest.raises(DlperfError, match=message) as error:
        Measurement.load(file)
    assert str(error.value).startswith(f"{file}: ")


def test_phases_by_name() -> None:
    times = small().layers[0]
    assert [times.phase(name) for name in ("forward", "backward", "optimizer")] == [
        times.forward,
        times.backward,
        None,
    ]


def test_a_measurement_contains_its_trace(tmp_path: Path) -> None:
    measurement = replace(cnn_measurement(), trace=cnn_trace())
    measurement.save(tmp_path / "m.json")
    assert Measurement.load(tmp_path / "m.json").trace == cnn_trace()
    data = json.loads((tmp_path / "m.json").read_text())
    del data["trace"]  # as older versions wrote it
    assert Measurement.from_json(data).trace is None
    for damage, message in (
        ({"batch_size": 31}, r"trace\.batch_size is 31; expected that of the measurement, 32"),
        ({"inference": True}, r"trace\.inference is true; expected that of the measurement, False"),
        ({"ops": [["aten.mm.default"]]}, r"trace\.ops\[0\] is .*; expected a list of 10 entries"),
        (
            {"arrivals": [[7, 0]]},
            r"trace\.arrivals\[0\]\.parameter is 7; expected one of the 0 parameters",
        ),
    ):
        with pytest.raises(DlperfError, match=message):
            Measurement.from_json({**data, "trace": {**cnn_trace().to_json(), **damage}})

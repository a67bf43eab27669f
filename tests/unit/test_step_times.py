"""Files that hold the sides of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from report_cases import cnn, cnn_measurement

from dlperf.__main__ import main
from dlperf.core.measurement import Measurement
from dlperf.report.comparison import compare
from dlperf.report.step_times import steps_of_file


def run_file(folder: Path, measured: Measurement, report: dict[str, Any] | None) -> str:
    """What ``dlperf run --json`` writes, of what a comparison reads."""
    data = {"schema": "dlperf.run", "schema_version": 2, "report": report}
    path = folder / "run.json"
    path.write_text(json.dumps(data | {"measurement": measured.to_json()}))
    return str(path)


def test_a_watched_run_is_a_side_with_and_without_a_prediction(tmp_path: Path) -> None:
    prediction, measured = cnn()
    path = run_file(tmp_path, measured, compare(prediction, measured).to_json())
    (found,) = steps_of_file(path)
    assert (found.how, found.total_s) == ("measured", measured.step["total"].median)
    assert {layer.layer for layer in found.layers} >= {row.layer for row in measured.layers}
    assert all(layer.work != (None, None) for layer in found.layers)
    path = run_file(tmp_path, measured, None)
    (bare,) = steps_of_file(path)
    assert [layer.layer for layer in bare.layers] == [row.layer for row in measured.layers]
    assert bare.total_s == found.total_s


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--threads 2", "--threads"),
        ("--batch-size 8", "--batch-size"),
        ("--predictor roofline", "--predictor"),
        ("--inference", "--inference"),
        ("--input 3,4,4", "--input"),
    ],
)
def test_options_that_change_nothing_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, named: str
) -> None:
    path = str(tmp_path / "m.json")
    cnn_measurement().save(path)
    assert main(["compare", path, path]) == 0
    capsys.readouterr()
    assert main(["compare", path, path, *option.split()]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert f"{named} changes nothing" in told

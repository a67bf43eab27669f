"""``dlperf explain`` from the command line, and one trial in a process of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from dlperf.advice.trials import measure_change
from dlperf.advice.variants import BASELINE, Edit, Variant
from dlperf.core.errors import WorkFailed

UNUSABLE = 2


@pytest.mark.slow
def test_explain_prints_parts_and_changes(
    dlperf: Callable, targets_file: Path, machine_file: Path
) -> None:
    done = dlperf("explain", f"{targets_file}:net", "--machine", machine_file, "--threads", "1")
    assert done.status == 0
    assert "what the step is made of" in done.out
    assert "fused optimizer" in done.out
    assert "considering" in done.err


@pytest.mark.slow
def test_explain_writes_json_and_folder(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "explained"
    for _ in range(2):  # the second time it finds its own files there
        done = dlperf(
            "explain",
            f"{targets_file}:net",
            "--machine",
            machine_file,
            "--threads",
            "1",
            "-o",
            folder,
            "--json",
            "-",
        )
        assert done.status == 0
    data = json.loads(done.out)
    assert data["schema"] == "dlperf.explanation"
    assert math.fsum(row["time_s"] for row in data["parts"]) == pytest.approx(
        data["step"]["total_s"]
    )
    assert sorted(path.name for path in folder.iterdir()) == [
        "breakdown.png",
        "changes.csv",
        "explanation.json",
        "explanation.md",
        "parts.csv",
    ]
    assert (
        json.loads((folder / "explanation.json").read_text())["suggestions"] == data["suggestions"]
    )


def test_a_trace_file_is_explained_without_its_code(
    dlperf: Callable, targets_file: Path, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "net.json"
    assert dlperf("trace", f"{targets_file}:net", "-o", path).status == 0
    done = dlperf("explain", path, "--machine", machine_file, "--threads", "1")
    assert done.status == 0
    assert "a trace file has no code to change" in " ".join(done.out.split())
    refused = dlperf("explain", path, "--try", "--machine", machine_file, "--threads", "1")
    assert refused.status == UNUSABLE
    assert "no code to try" in refused.line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:net"], "nowhere.py"),
        (["{machine}"], "is a machine file"),
        (["{targets}:net", "--runs", "3"], "--try"),
        (["{targets}:net", "-o", "-"], "no folder"),
        (["{targets}:net", "-o", "{targets}"], "is a file"),
        (["{targets}:net", "--runs", "0", "--try"], "0"),
    ],
)
def test_unusable_input(
    dlperf: Callable, targets_file: Path, machine_file: Path, arguments: list[str], said: str
) -> None:
    words = [word.format(machine=machine_file, targets=targets_file) for word in arguments]
    done = dlperf("explain", *words, "--machine", machine_file, "--threads", "1")
    assert done.status == UNUSABLE
    assert said in done.line
    assert done.out == ""


def test_dlperf_files_that_are_no_target_are_named(
    dlperf: Callable, machine_file: Path, tmp_path: Path
) -> None:
    prediction = tmp_path / "prediction.json"
    prediction.write_text(json.dumps({"schema": "dlperf.prediction", "schema_version": 1}))
    for command in (["report"], ["predict"], ["explain"], ["measure", "-o", tmp_path / "x.json"]):
        for path, what in ((machine_file, "is a machine file"), (prediction, "is a prediction")):
            done = dlperf(*command, path, "--machine", machine_file)
            assert done.status == UNUSABLE
            assert what in done.line
            assert "trace file has no code" not in done.line


def test_a_target_of_shapes_alone_is_predicted_and_said_so(
    dlperf: Callable, machine_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "shapes.py"
    path.write_text(
        "import torch\ndef net(n):\n    with torch.device('meta'):\n        return"
        " torch.nn.Linear(8, 4), (torch.zeros(n, 8),), lambda output: output.mean()\n"
    )
    done = dlperf("predict", f"{path}:net", "--machine", machine_file, "--threads", "1")
    assert done.status == 0
    assert "meta device" in done.err
    assert "meta device" in " ".join(done.out.split())
    refused = dlperf("measure", f"{path}:net", "-o", tmp_path / "m.json", "--threads", "1")
    assert refused.status == UNUSABLE
    assert "meta device" in refused.line


@pytest.mark.process
def test_one_trial_in_a_process_of_its_own(targets_file: Path) -> None:
    def apart(variant: Variant):
        return measure_change(
            variant,
            f"{targets_file}:talkative",
            4,
            threads=1,
            inference=False,
            input_shape=None,
            seconds=0.02,
        )

    measurement = apart(Variant("all", (Edit("fused"),), batch_size=8, malloc="tuned"))
    assert (measurement.batch_size, measurement.threads) == (8, 1)
    assert measurement.step["total"].median > 0
    assert not measurement.layers
    with pytest.raises(WorkFailed, match="no Conv2d"):
        apart(Variant("x", (Edit("channels-last"),)))
    assert BASELINE.edits == ()

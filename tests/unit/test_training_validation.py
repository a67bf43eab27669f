"""The study of trainings: arithmetic by hand, and its runs with commands that answer at once."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from calibrated_cases import machine as made_up

from dlperf.cli.validation import PARTS
from dlperf.core.conversion import convert
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.studies.accuracy.archive import Archive
from dlperf.studies.distributed import study as distributed_study
from dlperf.studies.results import Pair, Provenance
from dlperf.studies.trainings import page as training_page
from dlperf.studies.trainings.cases import (
    KINDS,
    ForecastTable,
    TrainingForecast,
    TrainingStudy,
)
from dlperf.studies.trainings.runs import BATCH_SIZE, TrainingRunner

PROVENANCE = Provenance(
    "Made-up CPU",
    "m.json",
    "full",
    "2026-01-01",
    {"torch": "2"},
    "dlperf validate --training",
    "2026-01-02",
    remarks=("a remark",),
)
ROWS = (
    TrainingForecast(
        "workers", "small, p = 1", (Pair(10.5, 10.0), Pair(10.5, 10.0)), "s", "small", 1
    ),
    TrainingForecast("workers", "small, p = 2", (Pair(5.0, 4.0), Pair(5.0, 5.0)), "s", "small", 2),
    TrainingForecast("memory", "small @ 16", (Pair(95e6, 100e6),), "bytes", "small"),
)


def test_errors_and_floors_of_a_row() -> None:
    assert ROWS[0].error_frac == pytest.approx(0.05)
    assert ROWS[1].error_frac == pytest.approx((0.25 + 0.0) / 2)
    assert ROWS[1].repeatability_frac == pytest.approx(1.0 / 4.5)
    assert ROWS[1].delta_frac == pytest.approx(0.5 / 5.0)  # it divides by the prediction
    assert ROWS[2].repeatability_frac is None


def test_summaries_judge_each_kind_by_its_own_bar() -> None:
    study = TrainingStudy(PROVENANCE, ROWS)
    workers, memory = study.summaries
    assert (workers.kind, workers.n, memory.kind, memory.n) == ("workers", 2, "memory", 1)
    assert workers.median_frac == pytest.approx((0.05 + 0.125) / 2)
    assert workers.worst_frac == pytest.approx(0.125)
    assert workers.within_frac == 0.5  # 5 % is within 7 %, 12.5 % is not
    assert workers.repeatability_frac == pytest.approx(1.0 / 9)
    assert memory.within_frac == 1.0


def test_page_and_folder(tmp_path: Path) -> None:
    table = ForecastTable("more workers", ("small",), ("1", "2"), ((120.0, None),))
    study = TrainingStudy(PROVENANCE, ROWS, (table,), ("large: diverged",))
    text = training_page.study_to_text(study, 120)
    assert "small, p = 2" in text
    assert "failed: large: diverged" in text
    written = training_page.write_study(study, tmp_path / "out")
    assert [path.name for path in written] == ["training.md", "training.csv", "workers-small.png"]
    assert (
        training_page.write_study(study, tmp_path / "out") == written
    )  # its own files it may replace
    page = written[0].read_text()
    assert "| small | 2.0 | - |" in page
    assert (
        "| small | 7.4 | 8.8 |" in page
    )  # Delta: (0.5 / 10.5 + 0.5 / 5) / 2; MAPE: (5 + 12.5) / 2
    assert "![workers-small.png](workers-small.png)" in page
    alone = TrainingStudy(PROVENANCE, ROWS[-1:])
    training_page.write_study(alone, tmp_path / "more")
    training_page.write_study(study, tmp_path / "more")
    training_page.write_study(alone, tmp_path / "more")
    assert not (tmp_path / "more" / "workers-small.png").exists()
    assert written[1].read_text().splitlines()[1] == 'workers,"small, p = 1",1,s,10.5,10.0'
    assert convert(json.loads(json.dumps(asdict(ROWS[1]))), TrainingForecast) == ROWS[1]


class Answers(TrainingRunner):
    """A runner whose commands answer from a script instead of running."""

    def run(self, *command: str) -> dict[str, Any]:
        """What the command would write."""
        self.issued.append(command)  # type: ignore[attr-defined]
        if "predict" in command:
            samples = int(command[command.index("--samples") + 1])
            return {
                "epoch": {
                    "epoch_s": samples * 1e-3,
                    "total_s": samples * 2e-3,
                    "first_step_s": 0.5,
                    "start_s": 0.25,
                }
            }
        if "run" in command:
            return {"forecast": {"epoch_s": 21.0, "epoch_measured_s": 20.0}}
        if "tune" in command:
            settings = {"threads": 1, "loader_workers": 0, "workers": 1}
            tried = [
                {
                    **settings,
                    "batch_size": size,
                    "measured_samples_per_s": rate,
                    "runs_samples_per_s": [rate],
                }
                for size, rate in ((16, 90.0), (64, 100.0))
            ]
            return {"best": {**settings, "batch_size": 16}, "tried": tried}
        if "cnn-large" in command:
            raise WorkFailed("a worker died")
        return {"total_s": 28.0, "data_s": 3.0}


@pytest.fixture
def runner(tmp_path: Path) -> Answers:
    """Two runs of 10 s on a machine of one core."""
    found = Answers(
        tmp_path,
        replace(made_up(), path="m.json"),
        2,
        10.0,
        Archive(tmp_path / "kept"),
        lambda line: None,
    )
    object.__setattr__(found, "issued", [])
    return found


def test_workers_are_forecast_and_run_with_the_same_counts(runner: Answers) -> None:
    row = runner.workers("cnn-small", 2)
    # an epoch of 10 s / 2 at 1 ms a sample: 5,000 samples, 157 batches
    n = BATCH_SIZE * 157
    assert row.pairs == (Pair(n * 2e-3, 25.0), Pair(n * 2e-3, 25.0))
    commands = [command for command in runner.issued if "--workers" in command]  # type: ignore[attr-defined]
    assert len(commands) == 3
    for command in commands:
        assert [
            command[command.index(f"--{name}") + 1]
            for name in ("samples", "epochs", "val-samples", "test-samples", "workers")
        ] == [
            str(n),
            "2",
            str(n // 5),
            str(n // 5),
            "2",
        ]


def test_a_networks_loader_is_sampled_once_for_all_its_cases(runner: Answers) -> None:
    rows = [runner.workers("cnn-small", p) for p in (1, 2, 4)]
    probes = [
        command for command in runner.issued if "predict" in command and "--workers" not in command
    ]  # type: ignore[attr-defined]
    assert (len(rows), len(probes)) == (3, 1)


def test_one_run_serves_both_forecasts_of_an_epoch(runner: Answers) -> None:
    wrapped, alone = [runner.epoch(kind, "lenet", 1) for kind in ("wrapped", "epoch")]
    assert (wrapped.kind, alone.kind) == ("wrapped", "epoch")
    assert wrapped.pairs[0] == Pair(21.0, 20.0)
    n = BATCH_SIZE * 688  # 22 s at 1 ms a sample, in batches
    assert alone.pairs[0] == Pair(n * 1e-3 + 0.5 + 0.25, 20.0)
    assert sum("run" in command for command in runner.issued) == 2  # type: ignore[attr-defined]


def test_the_choice_is_judged_against_the_fastest(runner: Answers) -> None:
    row = runner.choice("lenet")
    assert row.pairs == (Pair(90.0, 100.0),)
    assert row.error_frac == pytest.approx(-0.1)


def test_finished_cases_are_kept(runner: Answers) -> None:
    first = runner.choice("lenet")
    n = len(runner.issued)  # type: ignore[attr-defined]
    assert runner.choice("lenet") == first
    assert len(runner.issued) == n  # type: ignore[attr-defined]
    assert runner.archive.remark.startswith("1 of 2 measurements were kept from before")


def test_a_run_that_fails_keeps_nothing(runner: Answers) -> None:
    with pytest.raises(WorkFailed, match="a worker died"):
        runner.workers("cnn-large", 2)
    assert not list(runner.archive.folder.glob("*")) if runner.archive.folder.exists() else True


def test_the_command_line_knows_the_parts() -> None:
    assert {"--training": tuple(KINDS), "--distributed": distributed_study.PARTS} == PARTS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": []}, r"pairs is \[\]; expected a list of at least 1"),
        (
            {"pairs": [{"predicted": 1.0, "measured": 0.0}]},
            r"pairs\[0\]\.measured is 0\.0; expected a finite number greater than 0",
        ),
        ({"workers": "two"}, "workers is 'two'; expected a whole number of at least 1 or null"),
    ],
)
def test_a_damaged_row_is_refused(change, message) -> None:
    with pytest.raises(DlperfError, match=message):
        convert({**json.loads(json.dumps(asdict(ROWS[1]))), **change}, TrainingForecast)

"""The grid of configurations on made-up paces, so that every expected number can be checked in the
head.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.advice.grid import (
    EPOCH,
    INTERPOLATED,
    PREDICTED,
    THROUGHPUT,
    Axes,
    Configuration,
    Objective,
    Rate,
    ranked,
    spread_sizes,
    survey,
)
from dlperf.advice.plots import lines_of
from dlperf.advice.trials import (
    ConfigurationTrial,
    ConfigurationTrials,
    run_configuration_trials,
)
from dlperf.advice.tuning import (
    Tuning,
    page,
    tune,
    tuning_to_csv,
    tuning_to_json,
    write,
)
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.units import MIB
from dlperf.report.document import to_markdown, to_text


def rate_of(one: Configuration) -> Rate:
    """1 ms and 1 ms a sample, halved by two threads, twice as long with two workers beside each
    other; 100 MiB and 1 MiB a sample.
    """
    step_s = 1e-3 * (1 + one.batch_size) / one.threads * one.workers
    return Rate(step_s, 0.5 * one.loader_workers, (100 + one.batch_size) * MIB, "compute")


def best(axes: Axes, objective: Objective) -> Configuration:
    return ranked(survey(axes, rate_of, axes.batch_sizes, objective), objective)[0].configuration


def found(axes: Axes, objective: Objective, n_exact: int = 1) -> Tuning:
    return tune("net", "cpu", axes, objective, rate_of, n_exact=n_exact)


def test_throughput_of_a_configuration() -> None:
    (row,) = survey(Axes((2,), (9,), (0,), (3,)), rate_of, [9], Objective())
    assert row.step_s == pytest.approx(0.015)  # 10 ms / 2 threads * 3 workers
    assert row.samples_per_s == pytest.approx(3 * 9 / 0.015)
    assert row.peak_memory_bytes == 3 * 109 * MIB
    assert row.epoch_s is None


def test_an_epoch_is_the_steps_of_a_workers_share_and_what_comes_once() -> None:
    (row,) = survey(Axes((1,), (9,), (1,), (3,)), rate_of, [9], Objective(EPOCH, samples=100))
    assert row.epoch_s == pytest.approx(
        4 * 0.030 + 0.5
    )  # ceil(34 / 9) = 4 steps of 10 ms * 3, and 0.5 s for the loading worker


def test_workers_that_vary_wait_for_the_slowest_of_them() -> None:
    axes, objective = Axes((1,), (9,), (0,), (2,)), Objective(EPOCH, samples=90)
    (steady,) = survey(axes, rate_of, [9], objective)
    (contended,) = survey(
        axes, lambda one: replace(rate_of(one), sigma=0.1, n_apart=2), [9], objective
    )
    assert steady.epoch_s == pytest.approx(5 * 0.020)
    assert contended.epoch_s == pytest.approx(
        (1 + 0.0564) * steady.epoch_s, rel=3e-3
    )  # the mean of the slower of two lies 0.564 deviations above the mean
    assert contended.samples_per_s == steady.samples_per_s


def test_the_objective_decides() -> None:
    axes = Axes((1,), (10, 64))
    assert (
        best(axes, Objective(THROUGHPUT)).batch_size == 64
    )  # 64 / 65 samples a ms against 10 / 11
    assert (
        best(axes, Objective(EPOCH, samples=70)).batch_size == 10
    )  # 7 steps of 11 ms against 2 of 65 ms


def test_a_configuration_that_does_not_fit_is_never_proposed() -> None:
    axes, objective = Axes((1,), (8, 64), (0,), (1, 2)), Objective(memory_limit_bytes=164 * MIB)
    rows = survey(axes, rate_of, (8, 64), objective)
    assert [row.fits for row in rows] == [
        True,
        True,
        False,
        False,
    ]  # 108 and 164 MiB; twice as much with two workers: 216 and 328
    assert best(axes, objective) == Configuration(1, 1, 0, 64)
    assert best(axes, Objective(memory_limit_bytes=164 * MIB - 1)) == Configuration(1, 1, 0, 8)


def test_nothing_fits() -> None:
    axes, objective = Axes((1,), (8, 64)), Objective(memory_limit_bytes=100 * MIB)
    with pytest.raises(
        DlperfError,
        match=(
            r"nothing fits into 100 MiB: the smallest need is 108 MiB \(threads 1, batch size 8,"
            r" loader workers 0, workers 1\)"
        ),
    ):
        best(axes, objective)


def test_ties_go_to_the_simpler_configuration() -> None:
    # Two workers at twice the step each are as fast as one; 0.3 % between 100/101 and 150/151
    # samples a ms is a tie as well, 1.3 % to 50/51 none.
    assert best(Axes((1,), (100, 150), (0,), (1, 2)), Objective()) == Configuration(1, 1, 0, 100)
    assert best(Axes((1,), (50, 100, 150), (0, 1), (1, 2)), Objective()) == Configuration(
        1, 1, 0, 100
    )


def test_between_recorded_sizes_everything_is_linear() -> None:
    rows = survey(Axes((1,), (8, 12, 16)), rate_of, [8, 16], Objective())
    assert [row.source for row in rows] == [PREDICTED, INTERPOLATED, PREDICTED]
    assert rows[1].step_s == pytest.approx(0.013)  # half way between 9 and 17 ms
    assert rows[1].peak_memory_bytes == 112 * MIB


def test_nothing_is_said_outside_of_the_recorded_sizes() -> None:
    assert [
        row.configuration.batch_size
        for row in survey(Axes((1,), (4, 8, 12, 32)), rate_of, [8, 16], Objective())
    ] == [8, 12]


def test_batches_larger_than_a_share_are_left_out() -> None:
    rows = survey(Axes((1,), (8, 16), (0,), (1, 2)), rate_of, [8, 16], Objective(EPOCH, samples=20))
    assert [(row.configuration.workers, row.configuration.batch_size) for row in rows] == [
        (1, 8),
        (1, 16),
        (2, 8),
    ]  # shares of 20 and 10
    with pytest.raises(DlperfError, match="the grid is empty"):
        found(Axes((1,), (64,)), Objective(EPOCH, samples=20))


def test_what_is_proposed_is_predicted_and_not_interpolated() -> None:
    asked: list[int] = []

    def humped(one: Configuration) -> Rate:
        """As fast as its batch is near 33: 1 s a step there, longer by a tenth of the distance."""
        asked.append(one.batch_size)
        return Rate(one.batch_size * (1 + 0.1 * abs(one.batch_size - 33)), 0.0, MIB, "DRAM")

    tuning = tune("net", "cpu", Axes((1,), tuple(range(1, 65))), Objective(), humped)
    assert tuning.best.source == PREDICTED
    assert tuning.best.configuration.batch_size in asked
    assert len(asked) == len(set(asked)) < 64
    assert tuning.recorded == tuple(sorted(set(asked)))


def test_the_best_few_that_are_tried_are_predicted_too() -> None:
    tuning = found(Axes((1,), tuple(range(1, 65))), Objective(), n_exact=3)
    assert [row.source for row in tuning.best_rows[:3]] == [PREDICTED] * 3


def test_spread_sizes() -> None:
    assert spread_sizes(tuple(range(1, 129)), 8) == (1, 2, 4, 8, 16, 32, 64, 128)
    assert spread_sizes((3, 5), 8) == (3, 5)


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ({"threads": (), "batch_sizes": (8,)}, "threads: there is nothing to choose from"),
        ({"threads": (0,), "batch_sizes": (8,)}, "threads holds 0"),
        ({"threads": (1,), "batch_sizes": (10**9,)}, "batch sizes holds 1000000000"),
        (
            {
                "threads": (1,),
                "batch_sizes": tuple(range(1, 2000)),
                "loader_workers": tuple(range(1000)),
            },
            "has 1999000 configurations",
        ),
    ],
)
def test_axes_that_make_no_sense(axes: dict[str, tuple[int, ...]], text: str) -> None:
    with pytest.raises(DlperfError, match=text):
        Axes(**axes)


def test_a_wish_without_samples() -> None:
    with pytest.raises(DlperfError, match="give --samples N"):
        Objective(EPOCH)
    with pytest.raises(DlperfError, match="objective 'speed' is unknown"):
        Objective("speed")


# -- the trials -----------------------------------------------------------------------------------

ONE, TWO = Configuration(1, 1, 0, 32), Configuration(1, 2, 0, 32)


def test_trials_go_in_turns_and_back() -> None:
    order: list[Configuration] = []
    rates = {ONE: [90.0, 110.0, 95.0], TWO: [100.0, 80.0, 105.0]}

    def measure(one: Configuration) -> float:
        order.append(one)
        return rates[one].pop(0)

    trials = run_configuration_trials([ONE, TWO], measure, n_runs=3)
    assert order == [ONE, TWO, TWO, ONE, ONE, TWO]
    assert [one.samples_per_s for one in trials.trials] == [95.0, 100.0]  # medians
    assert trials.fastest is trials.trials[1]
    assert trials.loss_frac == pytest.approx(0.05)


def test_a_configuration_that_fails_keeps_its_error() -> None:
    def measure(one: Configuration) -> float:
        if one == ONE:
            raise WorkFailed("out of memory")
        return 10.0

    trials = run_configuration_trials([ONE, TWO], measure, n_runs=2)
    assert trials.trials == (
        ConfigurationTrial(ONE, (), "out of memory"),
        ConfigurationTrial(TWO, (10.0, 10.0)),
    )
    assert trials.loss_frac is None
    assert trials.fastest is trials.trials[1]


def test_interrupted_trials_keep_what_was_finished() -> None:
    def measure(one: Configuration) -> float:
        if one == TWO:
            raise KeyboardInterrupt
        return 10.0

    trials = run_configuration_trials([ONE, TWO], measure, n_runs=2)
    assert trials.is_interrupted
    assert trials.trials[0].runs_samples_per_s == (10.0,)


# -- what is shown ---------------------------------------------------------------------------------


def test_json_has_the_agreed_fields() -> None:
    data = tuning_to_json(
        found(Axes((1, 2), (8, 64), (0,), (1, 2)), Objective(memory_limit_bytes=164 * MIB))
    )
    assert (data["schema"], data["schema_version"]) == ("dlperf.tuning", 1)
    assert data["best"] == {"threads": 2, "batch_size": 64, "loader_workers": 0, "workers": 1}
    assert data["predicted_samples_per_s"] == pytest.approx(64 / 0.0325)  # 65 ms / 2
    assert [row["fits"] for row in data["rows"]] == [True] * 4 + [False] * 4
    rates = [row["samples_per_s"] for row in data["rows"][:4]]
    assert rates == sorted(rates, reverse=True)
    assert data["tried"] is None


def test_csv_is_the_same_rows() -> None:
    tuning = found(Axes((1, 2), (8, 64)), Objective(EPOCH, samples=1000))
    rows = list(csv.DictReader(io.StringIO(tuning_to_csv(tuning))))
    assert [int(row["batch_size"]) for row in rows] == [
        row.configuration.batch_size for row in tuning.best_rows
    ]
    assert float(rows[0]["epoch_s"]) == pytest.approx(16 * 0.0325)  # ceil(1000 / 64) steps


def test_text_shows_ten_and_says_what_it_is_not() -> None:
    tuning = found(Axes((1, 2), tuple(range(1, 65))), Objective(memory_limit_bytes=150 * MIB))
    text = to_text(page(tuning), 120)
    said = " ".join(text.split())
    assert (
        "best: threads 2, batch size 40" in said
    )  # 50 fits and takes 51/50 ms a sample; 41/40 is within 0.5 % of that, 40/39 is not
    # batch sizes 51 to 64, twice
    assert "Left out, with more memory than the limit: 28 configurations." in said
    assert "the best 10 of 100 configurations" in said
    assert "not the one that learns best" in said
    assert "compute" in text
    header = next(
        index for index, line in enumerate(text.splitlines()) if line.startswith("threads")
    )
    rows = text.splitlines()[header + 1 : header + 12]  # ten rows, then the remarks
    assert [line.split()[:1] for line in rows] == [["2"]] * 10 + [[]]
    assert "| 40 |" in to_markdown("tuning", page(tuning))


def test_a_single_configuration_is_one() -> None:
    text = to_text(page(found(Axes((1,), (8,)), Objective())), 120)
    assert "among 1 configuration," in text
    assert "The table has" not in text
    # 9 ms from batch to batch; the prediction's own step has no loading
    assert "step + loading" in text


def test_trials_are_told() -> None:
    tuning = found(Axes((1, 2), (32,)), Objective())
    trials = (ConfigurationTrial(TWO, (95.0,)), ConfigurationTrial(ONE, (100.0,)))
    text = to_text(page(replace(tuning, trials=ConfigurationTrials(trials))), 120)
    assert "the proposed one was 5.0 % slower" in " ".join(text.split())
    trials = (ConfigurationTrial(TWO, (95.0,)), ConfigurationTrial(ONE, (90.0,)))
    text = to_text(page(replace(tuning, trials=ConfigurationTrials(trials))), 120)
    assert "also the fastest of 2 measured ones" in " ".join(text.split())


def test_a_line_a_combination_of_what_is_not_the_batch_size() -> None:
    lines = lines_of(found(Axes((1, 2), (8, 64), (0, 1)), Objective()))
    assert list(lines) == [
        "1 thread, 1 worker, loader 0",
        "1 thread, 1 worker, loader 1",
        "2 threads, 1 worker, loader 0",
        "2 threads, 1 worker, loader 1",
    ]
    assert [row.configuration.batch_size for row in lines["1 thread, 1 worker, loader 0"]] == [
        8,
        64,
    ]


def test_a_folder_with_everything(tmp_path: Path) -> None:
    written = write(
        found(Axes((1, 2), (8, 64)), Objective(memory_limit_bytes=164 * MIB)), tmp_path / "out"
    )
    assert [path.name for path in written] == [
        "tuning.md",
        "tuning.json",
        "tuning.csv",
        "landscape.png",
    ]
    assert all(path.stat().st_size for path in written)
    assert written[-1].read_bytes().startswith(b"\x89PNG")
    write(found(Axes((1, 2), (8, 64)), Objective()), tmp_path / "out")  # its own files are replaced
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(DlperfError, match=r"mine.txt, which dlperf did not write"):
        write(found(Axes((1, 2), (8, 64)), Objective()), tmp_path / "out")

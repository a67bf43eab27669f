"""No line of any text is wider than the terminal, whatever names, paths and notes it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import calibrated_cases
import pytest
import report_cases as cases
import test_advice
import test_communication_replay as replaying
import test_distributed_validation as distributed
import test_ranks
import test_scaling as scaling
import test_training_validation as training
import test_tuning as tuning
import test_validation as validation

from dlperf.advice.explanation_page import explanation_page
from dlperf.advice.grid import Axes, Objective
from dlperf.advice.tuning import page as tuning_page
from dlperf.core.cluster import Cluster, Collective, Link
from dlperf.core.text import fit
from dlperf.distributed.cluster_summary import ClusterSummary
from dlperf.distributed.communication_replay import replay_communication
from dlperf.report.comparison import compare
from dlperf.report.document import to_text
from dlperf.report.machine_check import compare_machines
from dlperf.report.machine_summary import summarize
from dlperf.report.scaling_pages import scaling_to_text
from dlperf.report.step_pages import measurement_to_text, prediction_to_text
from dlperf.studies.accuracy import page
from dlperf.studies.distributed import page as distributed_page
from dlperf.studies.distributed.cases import DistributedStudy
from dlperf.studies.papers.reproduction import PAPERS, reproduce
from dlperf.studies.trainings import page as training_page
from dlperf.studies.trainings.cases import TrainingStudy

WIDTHS = (60, 80, 120, 200)
NAME = "a_package_of_somebody.with.modules.of_long_names.network_of_many_words_" * 4
NOTE = "a note of many words that somebody wrote about " + NAME


def reports() -> Iterator[str | Callable[[int], str]]:
    for prediction, measurement in (
        cases.cnn(),
        cases.wide(60),
        cases.single(),
        cases.hostile(NAME),
    ):
        warned = replace(prediction, warnings=(NOTE,))
        yield compare([warned, warned], measurement, command=NAME).to_text
        yield lambda width, one=warned: prediction_to_text(one, width=width)
        yield lambda width, one=measurement: measurement_to_text(one, width)
    prediction, _ = cases.cnn()
    epoch = replace(prediction.epoch(60_000, 70), notes=(NOTE,))
    yield lambda width: prediction_to_text(prediction, epoch, width)


def forecasts() -> Iterator[Callable[[int], str]]:
    found = scaling.ask((1, 2, 4), samples=1000)
    yield lambda width: scaling_to_text(replace(found, target=NAME, notes=(NOTE,)), width)
    cluster = replaying.cluster()
    trace = replaying.record(replaying.EVEN, replaying.CALLS, cluster, replaying.HOSTS)
    replay = replace(
        replay_communication(trace, cluster, cluster, ranks=(2, 8)), target=NAME, notes=(NOTE,)
    )
    yield lambda width: scaling_to_text(replay, width)
    grid = tuning.found(Axes((1, 2), tuple(range(1, 65))), Objective(samples=1000))
    yield lambda width: to_text(tuning_page(replace(grid, target=NAME, notes=(NOTE,))), width)
    explanation = test_advice.explained(
        test_advice.optimizers(1e-3, 1e-6), test_advice.make_target(test_advice.mlp)
    )
    named = replace(explanation.prediction.trace, target=NAME, notes=(NOTE,))
    prediction = replace(explanation.prediction, trace=named)
    yield lambda width: to_text(
        explanation_page(replace(explanation, prediction=prediction)), width
    )
    recorded = test_ranks.recorded(5)
    team = test_ranks.team(test_ranks.found(0, recorded), test_ranks.found(1, recorded))
    yield lambda width: "\n".join(team.lines(width))


def studies() -> Iterator[Callable[[int], str]]:
    study = validation.whole_study()
    yield lambda width: page.study_to_text(study.with_remark(NOTE), width)
    trainings = TrainingStudy(training.PROVENANCE, training.ROWS, (), (NOTE,))
    yield lambda width: training_page.study_to_text(trainings, width)
    rows = (distributed.row("step", (0.1, 0.11), case=NAME), distributed.row("replay", (0.1, 0.2)))
    ranks = DistributedStudy(distributed.PROVENANCE, NAME, rows, (), (NOTE,))
    yield lambda width: distributed_page.study_to_text(ranks, width)
    for paper in PAPERS:
        for table in reproduce(paper):
            yield table.to_text


def files() -> Iterator[Callable[[int], str]]:
    machine = replace(calibrated_cases.machine(), path=NAME, notes=(NOTE,))
    yield lambda width: fit(summarize(machine).to_text(), width)
    yield lambda width: fit(compare_machines(machine, machine).to_text(), width)
    collective = Collective("all_reduce", 1 << 20, 2, 1, samples_s=[1e-3])
    link = Link("network", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    cluster = Cluster((link,), (collective,), path=NAME, notes=(NOTE,))
    yield ClusterSummary(cluster).to_text


@pytest.mark.parametrize(
    "make", [reports, forecasts, studies, files], ids=lambda make: make.__name__
)
def test_no_line_is_wider_than_the_terminal(
    make: Callable[[], Iterator[Callable[[int], str]]],
) -> None:
    for render in make():
        for width in WIDTHS:
            text = render(width)
            wide = [line for line in text.splitlines() if len(line) > width]
            assert not wide, (width, wide[0])
            assert len(text) > 40


def test_wrapped_lines_keep_their_words_and_indentation() -> None:
    assert fit("  a b c\n  a bb ccc dddd", 10) == "  a b c\n  a bb ccc\n    dddd"
    assert fit("x" * 25, 10).replace("\n  ", "") == "x" * 25

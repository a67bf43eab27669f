"""``repr`` of data is one line, ``str`` fits a screen, notebooks get it escaped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import report_cases as cases
import test_advice
import test_communication_replay as replaying
import test_scaling as scaling
import test_tuning as tuning

from dlperf.advice.grid import Axes, Objective
from dlperf.core.cluster import Cluster, Collective, Link, Rank
from dlperf.core.text import text_width
from dlperf.distributed.communication_replay import replay_communication
from dlperf.report.comparison import compare
from dlperf.report.step_difference import compare_steps
from dlperf.report.step_times import step_of_prediction
from dlperf.report.summaries import one_line, page

SCREEN = 70
"""Lines; pages without tables have at most SHORT."""
SHORT = 20
NAME = "<b>a</b>"


def machine() -> Any:
    one = cases.machine()
    return replace(one, notes=("busy",) * 300, kernels=one.kernels * 1000, path="machine.json")


def cluster() -> Cluster:
    link = Link("network", latency_s=1e-5, bandwidth_bytes_per_s=1e9)
    many = tuple(Collective("all_reduce", 1 << k, 2, 1, samples_s=[1e-3] * 50) for k in range(20))
    return Cluster((link,), many, ranks=(Rank("a"), Rank("b")), notes=("slow",) * 99)


def explanation() -> Any:
    return test_advice.explained(
        test_advice.optimizers(1e-3, 1e-6), test_advice.make_target(test_advice.mlp)
    )


def replay() -> Any:
    links = replaying.cluster()
    trace = replaying.record(replaying.EVEN, replaying.CALLS, links, replaying.HOSTS)
    return replay_communication(trace, links, links)


def difference() -> Any:
    prediction = cases.wide(400)[0]
    steps = [step_of_prediction(prediction, title) for title in ("one", "other")]
    return compare_steps(steps[:1], steps[1:])[0]


SHORT_ONES = {
    "machine": (machine, "2,000 kernels"),
    "trace": (lambda: cases.wide(400)[0].trace, "401 layers"),
    "measurement": (lambda: cases.wide(400)[1], "400 layers in .frame"),
    "cluster": (cluster, "2 ranks on 2 hosts"),
    "epoch": (lambda: cases.cnn()[0].epoch(64, 3), "3 epochs"),
}
TABLES = {
    "prediction": (lambda: cases.wide(400)[0], "smaller"),
    "report": (lambda: compare(*cases.wide(400)), "smaller"),
    "tuning": (lambda: tuning.found(Axes((1, 2), (8, 64)), Objective()), "batch size"),
    "scaling": (scaling.ask, "efficiency"),
    "replay": (replay, "replayed"),
    "explanation": (explanation, "changes that would pay"),
    "comparison": (difference, "layers differ by less than"),
}


@pytest.mark.parametrize("name", [*SHORT_ONES, *TABLES])
def test_data_fits_on_a_screen(name: str) -> None:
    make, says = {**SHORT_ONES, **TABLES}[name]
    value = make()
    line, text = repr(value), str(value)
    assert line.startswith(f"<{type(value).__name__} ")
    assert "\n" not in line
    assert len(line) <= 250
    assert len(text.splitlines()) <= (SHORT if name in SHORT_ONES else SCREEN)
    assert max(map(len, text.splitlines())) <= text_width()
    assert says in text
    assert f"{value}" == text


@pytest.mark.parametrize("name", TABLES)
def test_notebooks_get_tables_as_html(name: str) -> None:
    html = TABLES[name][0]()._repr_html_()
    assert "<table>" in html
    assert "<h1>" not in html  # a notebook has its own title
    assert "<body>" not in html


def test_notebooks_obey_no_name_of_somebody_else() -> None:
    prediction, measurement = cases.hostile(NAME)
    hostile = (
        prediction,
        measurement,
        prediction.trace,
        compare(prediction, measurement),
        replace(machine(), path=NAME),
        replace(cluster(), path=NAME),
    )
    for value in hostile:
        html = value._repr_html_()
        assert NAME not in html
        assert "&lt;b&gt;a&lt;/b&gt;" in html


def test_no_control_characters_in_one_line() -> None:
    prediction, measurement = cases.hostile("evil\x1b[31m\nname")
    for value in (prediction, measurement, prediction.trace, compare(prediction, measurement)):
        assert "\x1b" not in repr(value) + str(value)
        assert "\n" not in repr(value)


def test_data_is_still_compared_and_hashed_by_its_values() -> None:
    assert cases.cnn_measurement() == cases.cnn_measurement()
    assert cluster() == cluster()
    assert cluster() != replace(cluster(), backend="nccl")


@pytest.mark.parametrize("describe", [one_line, page])
def test_what_nobody_put_into_words_is_named(describe: Any) -> None:
    with pytest.raises(TypeError, match="no words for int"):
        describe(3)

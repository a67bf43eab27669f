"""Timelines: the rules of the Trace Event format, and sums that equal those of the tables."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_cases as cases
import test_scaling as scaling_cases

from dlperf.core.machine import Machine
from dlperf.core.measurement import STEP_PHASES, Measurement
from dlperf.core.prediction import Item
from dlperf.core.trace import Storage, Trace
from dlperf.distributed.scaling import Scaling, StepTimeLine
from dlperf.forecast.prediction import predict
from dlperf.models.overlap import TimeLine
from dlperf.report.comparison import Report, compare
from dlperf.report.layer_comparison import phases_of
from dlperf.report.layer_table import OWN, SUM
from dlperf.report.timeline import MEMORY, MOST_RANKS, rank_timeline, timeline

FROZEN = Path(__file__).resolve().parents[1] / "golden" / "frozen"
KEYS = {
    "X": {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "ph", "pid", "tid", "args"},
    "C": {"name", "ph", "ts", "pid", "tid", "args"},
}
"""Phases of events and their keys: complete, metadata, counter."""
NAMED = {"process_name": str, "thread_name": str, "process_sort_index": int}
NS = 1e-9

Event = dict[str, Any]


def checked(data: dict[str, Any]) -> list[Event]:
    """The events of a timeline that keeps the rules of the format."""
    text = json.dumps(data, allow_nan=False)
    assert text.startswith('{"traceEvents": [')
    assert data["schema"] == "dlperf.timeline"
    assert "displayTimeUnit" not in data  # times are microseconds in any case
    events: list[Event] = data["traceEvents"]
    for event in events:
        assert event.keys() == KEYS[event["ph"]], event
        assert all(isinstance(event[key], int) for key in ("pid", "tid"))
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 1) > 0
        if event["ph"] == "M":
            ((key, value),) = event["args"].items()
            assert isinstance(value, NAMED[event["name"]])
            assert key == ("sort_index" if event["name"].endswith("index") else "name")
        if event["ph"] == "C":
            assert all(isinstance(value, int) and value >= 0 for value in event["args"].values())
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= named
    for track in named:
        own = [e for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track]
        for to_ns in (int, round):  # readers of both kinds
            check_nesting([(to_ns(e["ts"] * 1000), to_ns(e["dur"] * 1000)) for e in own])
    return events


def check_nesting(slices: Iterable[tuple[int, int]]) -> None:
    """Slices in the order of their start, the outer first; none overlaps another in part."""
    ends: list[int] = []
    before = 0
    for start, duration in slices:
        assert start >= before
        before = start
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or start + duration <= ends[-1]
        ends.append(start + duration)


def seconds_of(events: Iterable[Event], category: str, pid: int) -> dict[tuple[str, str], float]:
    """Seconds of a process' slices by name and phase."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for event in events:
        if event["ph"] == "X" and event["cat"] == category and event["pid"] == pid:
            found[event["name"], event["args"].get("phase", "")] += event["dur"] * 1e-6
    return found


def check_sums(report: Report) -> list[Event]:
    """Every line of the tables, every phase and the step is a sum of slices."""
    events = checked(timeline([(report.predictions, report.measurement)]))
    assert timeline([(report.predictions, report.measurement)])["traceEvents"] == events
    n_ns = len(events) * NS  # each slice is rounded to one
    measured = len(report.predictions) + 1
    for pid, (label, prediction) in enumerate(zip(report.predictors, report.predictions), 1):
        layers, phases, steps = (
            {process: seconds_of(events, category, process) for process in (pid, measured)}
            for category in ("layer", "phase", "step")
        )
        for line in report.layer_tree(label):
            for phase in phases_of(report.inference) if line.kind not in (SUM, OWN) else ():
                times = line.phase(phase)
                assert times is not None
                for process, known_s in ((pid, times.predicted_s), (measured, times.actual_s)):
                    own_s = layers[process].get((line.layer, phase), 0.0)
                    assert own_s == pytest.approx(known_s or 0.0, abs=n_ns), (line.layer, phase)
        medians = {name: one.median for name, one in report.measurement.step.items()}
        for process, known in (
            (pid, {name: getattr(prediction.step, f"{name}_s") for name in STEP_PHASES}),
            (measured, medians),
        ):
            wanted = {name: known_s for name, known_s in known.items() if known_s}
            found = {name: own_s for (name, _), own_s in phases[process].items()}
            if ("step", "") in steps[process]:
                found["total"] = steps[process]["step", ""]
            assert found == pytest.approx(wanted, abs=n_ns)
    return events


@pytest.mark.parametrize(
    "make",
    [
        lambda: compare(*cases.cnn()),
        lambda: compare(*cases.wide(12)),
        lambda: compare(*cases.single()),
        lambda: compare([cases.cnn()[0], cases.gemm_table()], cases.cnn_measurement()),
        lambda: compare(*cases.hostile("\x1b[31m層 <b>")),
    ],
    ids=["cnn", "wide", "one layer, inference", "unsupported layers", "hostile name"],
)
def test_sums_are_those_of_the_tables(make: Any) -> None:
    check_sums(make())


@pytest.mark.parametrize("name", ["click-predictor-16", "segmenter-4", "autocast-16"])
def test_recorded_steps(name: str) -> None:
    """Negative items, modules called several times, ops that serve several layers."""
    trace, machine = (
        kind.from_json(json.loads(gzip.decompress((FROZEN / file).read_bytes())))
        for kind, file in ((Trace, f"traces/{name}.json.gz"), (Machine, "machine.json.gz"))
    )
    prediction = predict(trace, machine, threads=1)
    total = cases.around(1.0)
    events = check_sums(
        compare(prediction, Measurement("", trace.batch_size, 1, {"total": total}, ()))
    )
    counted = [event for event in events if event["ph"] == "C"]
    assert len({event["args"]["bytes"] for event in counted}) > 10
    assert counted[-1]["ts"] * 1e-6 == pytest.approx(prediction.step.total_s, abs=NS)


def test_layers_contain_their_ops() -> None:
    """One track, from the step down to the op: a container, its layer, the layer's kernel."""
    events = checked(timeline([([cases.cnn()[0]], None)]))
    outer: list[Event] = []
    stacks = []
    for event in (event for event in events if event["ph"] == "X"):
        while outer and outer[-1]["ts"] + outer[-1]["dur"] < event["ts"] + event["dur"] - 1e-6:
            outer.pop()
        outer.append(event)
        stacks.append([one["name"] for one in outer])
    assert ["step", "forward", "Net", "features", "features.0", "kernel"] in stacks
    assert ["step", "zero_grad", "zero_grad"] in stacks
    assert not any("Net" in stack and "(loss)" in stack for stack in stacks)


def test_negative_items_shorten_the_others_of_their_layer() -> None:
    """60 - 20 + 40 us: the positive items keep 80 % of their time."""
    items = [
        Item("Net", "forward", us * cases.US, "overhead", "measured", what)
        for us, what in ((60, "a"), (-20, "b"), (40, "c"))
    ]
    events = checked(timeline([([cases.prediction(cases.cnn_trace(), items)], None)]))
    found = {e["name"]: e["dur"] for e in events if e.get("cat") in ("op", "phase")}
    assert found == pytest.approx({"forward": 80, "a": 48, "c": 32})


def test_live_memory() -> None:
    """100 bytes from before the step, 30 for ops 1 and 2, 7 from op 9 on."""
    storages = (Storage(100), Storage(30, born=1, dies=3), Storage(7, born=9))
    trace = replace(cases.cnn_trace(), storages=storages)
    items = [
        Item(op.layer, op.phase, 10 * cases.US, "L2", "measured", op=index)
        for index, op in enumerate(trace.ops)
    ]
    events = checked(timeline([([cases.prediction(trace, items)], None)]))
    live = [(e["ts"], e["args"]["bytes"]) for e in events if e["name"] == MEMORY]
    n_bytes = [100, 130, 130, 100, 100, 100, 100, 100, 100, 107, 107]
    assert [own for _, own in live] == n_bytes
    assert [ts for ts, _ in live] == pytest.approx([10 * place for place in range(11)])


def test_a_measurement_alone() -> None:
    """Layers have a track of their own, since medians do not add up to the phase."""
    measurement = cases.cnn_measurement()
    data = timeline([((), measurement)])
    events = checked(data)
    names = [e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")]
    assert names == ["nets.py:cnn, batch size 32: measured", "step", "phases", "layers"]
    starts = {e["name"]: e["ts"] for e in reversed(events) if e.get("cat") in ("phase", "layer")}
    assert starts["forward"] == starts["features"] == pytest.approx(10)  # zero_grad takes 10 us
    assert seconds_of(events, "layer", 1)["features", "forward"] == pytest.approx(300e-6)
    assert math.isclose(seconds_of(events, "step", 1)["step", ""], 1235e-6)
    assert data["otherData"]["cases"][0]["measured_on"] == "Made-up CPU"


def test_several_cases() -> None:
    """A process for each prediction and measurement, in that order, and what they are of."""
    two = cases.cnn(), cases.single()
    data = timeline([([prediction], measurement) for prediction, measurement in two])
    events = checked(data)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names[:2] == [
        "nets.py:cnn, batch size 32: predicted (calibrated)",
        "nets.py:cnn, batch size 32: measured",
    ]
    assert sorted({e["pid"] for e in events}) == [1, 2, 3, 4]
    first, second = data["otherData"]["cases"]
    assert (first["target"], first["machine"], first["predictors"], second["inference"]) == (
        "nets.py:cnn",
        "Made-up CPU",
        ["calibrated"],
        True,
    )


# -- ranks -----------------------------------------------------------------------------------------


def of_ranks(*ranks: int) -> tuple[Scaling, list[Event]]:
    found = scaling_cases.ask(ranks or (1, 2))
    return found, checked(rank_timeline(found))


def slices(events: list[Event], pid: int, category: str) -> list[tuple[str, float, float]]:
    return [
        (e["name"], e["ts"] * 1e-6, (e["ts"] + e["dur"]) * 1e-6)
        for e in events
        if e["ph"] == "X" and (e["pid"], e["cat"]) == (pid, category)
    ]


def test_ranks_compute_and_wait_while_collectives_run() -> None:
    """See test_two_ranks_hide_what_they_can: forward 3 s, backward 6 s, buckets of 1 s and 2 s."""
    found, events = of_ranks()
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["rank 0 of 2: predicted", "rank 1 of 2: predicted"]
    for pid in (1, 2):
        ((_, begin_s, end_s),) = slices(events, pid, "step")
        assert (begin_s, end_s) == (0.0, pytest.approx(found.rows[1].step_s, abs=NS))
        phases = {name: (a, b) for name, a, b in slices(events, pid, "phase")}
        assert phases["forward"] == (0.0, pytest.approx(3.0, abs=1e-2))
        assert phases["backward"] == pytest.approx((3.0, 11.0), abs=1e-2)  # its waits included
        assert phases["optimizer"] == pytest.approx((11.0, 12.0), abs=1e-2)
        collectives = slices(events, pid, "collective")
        assert [name for name, _, _ in collectives] == [
            "all_reduce 1.00 MiB",
            "all_reduce 2.00 MiB",
        ]
        spent_s = sum(b - a for _, a, b in collectives)
        assert spent_s == pytest.approx(found.rows[1].communication_s, abs=1e-6)
        ((name, from_s, until_s),) = slices(events, pid, "wait")
        assert name == "wait: all_reduce 2.00 MiB"
        assert (from_s, until_s) == pytest.approx((9.0, 11.0), abs=1e-2)
        assert until_s == pytest.approx(collectives[1][2], abs=1e-6)
        computed_s = sum(b - a for _, a, b in slices(events, pid, "compute"))
        assert computed_s == pytest.approx(end_s - (until_s - from_s), abs=1e-6)


def test_one_rank_has_a_step_and_many_are_not_all_written() -> None:
    _, events = of_ranks(1)
    assert [(name, a, b) for name, a, b in slices(events, 1, "compute")] == [("compute", 0.0, 10.0)]
    assert not slices(events, 1, "collective")
    _, events = of_ranks(4, 64)
    assert {e["pid"] for e in events} == set(range(1, MOST_RANKS + 1))
    assert events[0]["args"]["name"] == "rank 0 of 64: predicted"


def test_collectives_that_overlap_have_tracks_of_their_own() -> None:
    line = TimeLine(4.0, 0.0, ((0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (math.nan, math.nan)))
    step = StepTimeLine(2, line, (("all_reduce", 4),) * 4)
    events = checked(rank_timeline(replace(scaling_cases.ask(), step=step)))
    tracks = {e["args"]["number"]: e["tid"] for e in events if e.get("cat") == "collective"}
    assert tracks == {0: 2, 1: 3, 2: 2}

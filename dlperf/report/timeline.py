"""Timelines of predicted and measured steps in the Trace Event format, which Perfetto and
chrome://tracing open.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dlperf.core.errors import DlperfError
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import PHASES, Item
from dlperf.core.trace import LOSS, Trace
from dlperf.core.units import format_bytes
from dlperf.forecast.prediction import Prediction
from dlperf.report.layer_comparison import root_of

if TYPE_CHECKING:
    from dlperf.distributed.scaling import Scaling, StepTimeLine
    from dlperf.models.overlap import TimeLine

SCHEMA, SCHEMA_VERSION = "dlperf.timeline", 1
STEP_PHASES = ("zero_grad", *PHASES)
MOST_RANKS = 8
"""Ranks that a timeline contains."""
MEMORY = "live memory"
"""Name of the counter of the bytes that a step's tensors hold."""

Event = dict[str, Any]
Case = tuple[Sequence[Prediction], Measurement | None]
"""The predictions of a step, and its measurement."""


@dataclass(frozen=True)
class Slice:
    """A slice without its times.

    `category` is ``step``, ``phase``, ``layer`` or ``op``; of a rank also ``compute``, ``wait`` or
    ``collective``.
    """

    category: str
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


class Piece(NamedTuple):
    """A part of a track: the slices that contain it, the outermost first, its start and end."""

    slices: tuple[Slice, ...]
    start_ns: int
    end_ns: int


Part = tuple[tuple[Slice, ...], float]
"""The slices of a piece, and its seconds."""


def timeline(cases: Iterable[Case]) -> dict[str, Any]:
    """The timeline in the object form of the Trace Event format: a process for each prediction and
    each measurement.

    A prediction has one track: the step, its phases, layers and ops, nested. A measurement has one
    track for the step, one for its phases and one for its layers, since medians do not add up. The
    slices of a layer in a phase add up to the layer's line in the tables, what it contains
    included. An op that serves several layers has a slice in each. A step or phase without a
    prediction has no slice. Times are rounded to nanoseconds.
    """
    events: list[Event] = []
    facts = []
    pids = itertools.count(1)
    for predictions, measurement in cases:
        facts.append(_facts(predictions, measurement))
        title = f"{facts[-1]['target']}, batch size {facts[-1]['batch_size']}"
        for prediction in predictions:
            pid = next(pids)
            events += _named(pid, f"{title}: predicted ({prediction.predictor})", ("step",))
            events += _predicted(prediction, pid)
        if measurement is not None:
            pid = next(pids)
            trace = predictions[0].trace if predictions else measurement.trace
            events += _named(pid, f"{title}: measured", ("step", "phases", "layers"))
            events += _measured(measurement, trace, pid)
    return _document(events, facts)


def _document(events: list[Event], facts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "traceEvents": events,  # first: readers may stop at a key that they do not know
        "otherData": {"cases": facts},
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
    }


def _facts(predictions: Sequence[Prediction], measurement: Measurement | None) -> dict[str, Any]:
    """The step, the machines, the predictors and the versions behind a case."""
    facts: dict[str, Any] = {"predictors": [p.predictor for p in predictions]}
    for prediction in predictions[:1]:
        trace = prediction.trace
        facts |= {
            "target": trace.target,
            "batch_size": trace.batch_size,
            "inference": trace.inference,
            "threads": prediction.threads,
            "machine": prediction.machine.cpu.model,
            "versions": dict(trace.versions),
        }
    if measurement is not None:
        facts |= {
            "target": measurement.target,
            "batch_size": measurement.batch_size,
            "inference": measurement.inference,
            "threads": measurement.threads,
            "measured_on": measurement.machine,
            "versions": dict(measurement.versions),
        }
    return facts


# -- a prediction ---------------------------------------------------------------------------------


def _predicted(prediction: Prediction, pid: int) -> Iterator[Event]:
    trace, step, root = prediction.trace, prediction.step, root_of(prediction.trace)
    types = {layer.name: layer.type for layer in trace.layers}
    items = _in_order(prediction)
    parts: list[Part] = []
    for item, seconds in items:
        slices = [Slice("step", "step")] if step.total_s is not None else []
        if getattr(step, f"{item.phase}_s") is not None:
            slices.append(Slice("phase", item.phase))
        if item.phase != "zero_grad":
            slices += _layer_slices(item.layer, item.phase, root, types)
        parts.append(((*slices, _op_slice(item, trace)), seconds))
    pieces = _in_a_row(parts)
    yield from _slice_events(pieces, pid, 1)
    if trace.storages and pieces:
        starts_ns = {
            item.op: piece.start_ns for (item, _), piece in reversed([*zip(items, pieces)])
        }
        live_bytes = _live_bytes(trace)
        moments = [(ns, live_bytes[op]) for op, ns in starts_ns.items() if op >= 0]
        for ns, n_bytes in sorted([*moments, (pieces[-1].end_ns, live_bytes[-1])]):
            args = {"bytes": int(n_bytes)}
            yield {"name": MEMORY, "ph": "C", "ts": _us(ns), "pid": pid, "tid": 1, "args": args}


def _op_slice(item: Item, trace: Trace) -> Slice:
    args: dict[str, Any] = {"bound": item.bound, "source": item.source}
    if item.op < 0:
        return Slice("op", item.what, args)
    args |= {"what": item.what, "op": item.op, "share": item.share}
    return Slice("op", trace.ops[item.op].name, args)


def _in_order(prediction: Prediction) -> list[tuple[Item, float]]:
    """The items and their seconds in the order of execution.

    An item without an op stands before the first op of its layer or of what the layer contains;
    where there is none in its phase, before that of the next layer. A negative item (page faults
    that the usual step has and the mean step lacks) shortens the others of its layer and phase.
    """
    trace, items = prediction.trace, prediction.prices.items
    root, n_ops = root_of(trace), len(trace.ops)
    rank = {layer.name: number for number, layer in enumerate(trace.layers)}
    first: dict[tuple[str, str], int] = {}
    parts_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in items:
        parts_s[item.phase, item.layer].append(item.seconds)
        for layer in _with_containers(item.layer, root) if item.op >= 0 else ():
            first[item.phase, layer] = min(item.op, first.get((item.phase, layer), n_ops))
    for phase in STEP_PHASES:
        following = n_ops
        for layer in (LOSS, *reversed(rank)):
            following = first.setdefault((phase, layer), following)

    def order(item: Item) -> tuple[int, int, int, int]:
        index = item.op if item.op >= 0 else first.get((item.phase, item.layer), n_ops)
        return STEP_PHASES.index(item.phase), index, rank.get(item.layer, len(rank)), item.op

    shortened_frac = {
        key: max(math.fsum(own), 0.0) / (math.fsum(s for s in own if s > 0) or 1.0)
        for key, own in parts_s.items()
    }
    return [
        (item, max(item.seconds, 0.0) * shortened_frac[item.phase, item.layer])
        for item in sorted(items, key=order)
    ]


def _live_bytes(trace: Trace) -> npt.NDArray[np.int64]:
    """Bytes that are live while each op runs, and at the end of the step."""
    changes = np.zeros(len(trace.ops) + 1, dtype=np.int64)
    for storage in trace.storages:
        changes[max(storage.born, 0)] += storage.nbytes
        if storage.dies is not None:
            changes[storage.dies] -= storage.nbytes
    return np.cumsum(changes)


# -- a measurement --------------------------------------------------------------------------------


def _measured(measurement: Measurement, trace: Trace | None, pid: int) -> Iterator[Event]:
    """The medians. Layers begin with their phase, or where those of the phase before end."""
    root = "" if trace is None else root_of(trace)
    types = {layer.name: layer.type for layer in (trace.layers if trace is not None else ())}
    types |= {times.layer: times.type for times in measurement.layers}
    step: list[Part] = [((Slice("step", "step"),), measurement.step["total"].median)]
    phases: list[Part] = []
    layers: list[Part] = []
    for phase in STEP_PHASES:
        begun_s, placed_s = (math.fsum(seconds for _, seconds in own) for own in (phases, layers))
        layers.append(((), max(begun_s - placed_s, 0.0)))
        if phase in measurement.step:
            phases.append(((Slice("phase", phase),), measurement.step[phase].median))
        rows = measurement.layers if phase in PHASES else ()
        for times in reversed(rows) if phase == "backward" else rows:
            if (samples := times.phase(phase)) is not None:
                slices = _layer_slices(times.layer, phase, root, types)
                layers.append((slices, max(samples.median, 0.0)))
    for tid, parts in enumerate((step, phases, layers), 1):
        yield from _slice_events(_in_a_row(parts), pid, tid)


# -- ranks ----------------------------------------------------------------------------------------


def rank_timeline(scaling: Scaling) -> dict[str, Any]:
    """The predicted step on the largest number of ranks: a process for each rank.

    Its first track is what the rank computes, and what it waits for. Collectives that overlap have
    further tracks. All ranks are as slow as the slowest, so at most MOST_RANKS are written. Raises
    DlperfError without a step.
    """
    step = scaling.step
    if step is None:
        raise DlperfError(f"{scaling.target}: the forecast contains no step to write")
    names = [f"{kind} {format_bytes(n_bytes)}" for kind, n_bytes in step.collectives]
    lanes = _lanes(step)
    tracks = ("step", *(f"collectives {n}" for n in range(1, len(lanes) + 1)))
    events: list[Event] = []
    for rank in range(min(step.n_ranks, MOST_RANKS)):
        title = f"rank {rank} of {step.n_ranks}: predicted"
        events += _named(rank + 1, title, tracks)
        events += _slice_events(_computing(step.line, names), rank + 1, 1)
        for tid, spans in enumerate(lanes, 2):
            pieces = []
            for n in spans:
                args = {"number": n, "bytes": step.collectives[n][1]}
                start_ns, end_ns = map(_ns, step.line.spans_s[n])
                pieces.append(Piece((Slice("collective", names[n], args),), start_ns, end_ns))
            events += _slice_events(pieces, rank + 1, tid)
    facts = {
        "target": scaling.target,
        "batch_size": scaling.batch_size,
        "scaling": scaling.scaling,
        "ranks": step.n_ranks,
        "threads": scaling.threads,
        "machine": scaling.machine,
        "cluster": scaling.cluster,
        "what_if": dict(scaling.what_if),
        "versions": dict(scaling.versions),
    }
    return _document(events, [facts])


def _lanes(step: StepTimeLine) -> list[list[int]]:
    """The numbers of collectives that ran, in as few tracks as they need to not overlap."""
    lanes: list[list[int]] = []
    spans_s = step.line.spans_s
    ran = (n for n, (start_s, end_s) in enumerate(spans_s) if end_s > start_s)
    for number in sorted(ran, key=lambda n: spans_s[n]):
        start_s = spans_s[number][0]
        lane = next((own for own in lanes if spans_s[own[-1]][1] <= start_s), None)
        if lane is None:
            lanes.append([number])
        else:
            lane.append(number)
    return lanes


def _computing(line: TimeLine, names: Sequence[str]) -> list[Piece]:
    """The rank's step, its phases, and inside them computing and waiting in turn."""
    ends_s = dict(zip(("forward", "backward", "optimizer"), (*line.marks_s, line.total_s)))
    times_s = {0.0, line.total_s, *line.marks_s}
    times_s |= {time_s for wait in line.waits for time_s in (wait.from_s, wait.until_s)}
    pieces = []
    for start_s, end_s in itertools.pairwise(sorted(times_s)):
        slices = [Slice("step", "step")]
        if line.marks_s:
            phase = next(name for name, until_s in ends_s.items() if start_s < until_s)
            slices.append(Slice("phase", phase))
        waits = (wait for wait in line.waits if wait.from_s <= start_s < wait.until_s)
        wait = next(waits, None)
        if wait is None:
            slices.append(Slice("compute", "compute"))
        else:
            number = {"number": wait.operation}
            slices.append(Slice("wait", f"wait: {names[wait.operation]}", number))
        pieces.append(Piece(tuple(slices), _ns(start_s), _ns(end_s)))
    return pieces


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


# -- slices and events ----------------------------------------------------------------------------


def _with_containers(layer: str, root: str) -> list[str]:
    """The layer and the modules that contain it, the outermost first.

    >>> _with_containers("features.0", "Net"), _with_containers("Net", "Net")
    (['Net', 'features', 'features.0'], ['Net'])
    """
    if layer == LOSS:
        return [LOSS]
    parts = [] if layer in ("", root) else layer.split(".")
    names = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return [*filter(None, [root]), *names]


def _layer_slices(layer: str, phase: str, root: str, types: Mapping[str, str]) -> tuple[Slice, ...]:
    return tuple(
        Slice("layer", name, {"phase": phase, "type": types.get(name, "")})
        for name in _with_containers(layer, root)
    )


def _in_a_row(parts: Sequence[Part]) -> list[Piece]:
    """The parts one after the other from time 0."""
    ends_ns = [round(1e9 * end_s) for end_s in itertools.accumulate(own_s for _, own_s in parts)]
    return [
        Piece(slices, start_ns, end_ns)
        for (slices, _), start_ns, end_ns in zip(parts, [0, *ends_ns], ends_ns)
    ]


def _slice_events(pieces: Iterable[Piece], pid: int, tid: int, depth: int = 0) -> Iterator[Event]:
    """A complete event for each run of pieces in the same slices, before those inside it."""
    for outer, run in itertools.groupby(pieces, lambda piece: piece.slices[depth : depth + 1]):
        inside = list(run)
        start_ns, end_ns = inside[0].start_ns, inside[-1].end_ns
        for own in outer if end_ns > start_ns else ():
            yield {
                "name": own.name,
                "cat": own.category,
                "ph": "X",
                "ts": _us(start_ns),
                "dur": _us(end_ns - start_ns),
                "pid": pid,
                "tid": tid,
                "args": dict(own.args),
            }
            yield from _slice_events(inside, pid, tid, depth + 1)


def _us(ns: int) -> float:
    """Microseconds of which a reader that truncates to nanoseconds makes the same nanoseconds; it
    may drop slices that do not nest to the nanosecond.

    >>> _us(1000), _us(1001) * 1000 >= 1001
    (1.0, True)
    """
    us = ns / 1000
    return us if us * 1000 >= ns else math.nextafter(us, math.inf)


def _named(pid: int, name: str, tracks: Sequence[str]) -> Iterator[Event]:
    """Metadata events that name a process and its tracks."""
    for kind, tid, args in (
        ("process_name", 0, {"name": name}),
        ("process_sort_index", 0, {"sort_index": pid}),
        *(("thread_name", tid, {"name": track}) for tid, track in enumerate(tracks, 1)),
    ):
        yield {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}

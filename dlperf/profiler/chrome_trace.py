"""A Chrome trace that torch.profiler exported becomes the measurement of a recorded step.

The operators of each profiled step are aligned with those of the recorded one, phase by phase, in
their order. So their times come to layers. They contain the profiler's own time.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Struct, field

from dlperf.core.clock import Samples
from dlperf.core.errors import DlperfError
from dlperf.core.measurement import LAYER_PHASES, LayerTimes, Measurement, OpTimes
from dlperf.core.trace import LOSS, Op, Trace
from dlperf.core.units import format_seconds

UNMATCHED = "(not matched)"
"""The row of operators that the recorded step does not contain."""
_OUTSIDE = "outside"
_NODE, _STEP = "autograd::engine::evaluate_function", "ProfilerStep#"
_PHASES = {
    "Optimizer.zero_grad#": "zero_grad",
    "Optimizer.step#": "optimizer",
    "enumerate(DataLoader)#": _OUTSIDE,
    _NODE: "backward",
}
"""The phase of an event by the beginning of its name."""
_HIDDEN = "aten.detach"
"""The recorder sees autograd detach what it saves; a profile does not."""
_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_LEAST_MATCHED_FRAC, _MOST_RESHAPED_FRAC = 0.5, 0.1
_MOST_NAMES = 8
_US = 1e-6


class _Arguments(Struct, rename={"shapes": "Input Dims"}):
    shapes: list[list[Any]] = []


class _Event(Struct):
    """An event of the file, in microseconds, and those `inside` it."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    args: _Arguments = field(default_factory=_Arguments)
    inside: list[_Event] = []

    @property
    def end(self) -> float:
        return self.ts + self.dur

    @property
    def phase(self) -> str:
        """The phase; ``forward`` where the name does not tell."""
        return next((p for begin, p in _PHASES.items() if self.name.startswith(begin)), "forward")


class _File(Struct, rename={"events": "traceEvents"}):
    events: list[_Event]


@dataclass(eq=False)
class _Part:
    """A part of a step, in microseconds: `took` since the end of the part before, `own` inside.

    `name` is the operator, or what else ran; empty for an autograd node without an operator of its
    own. `op` is that operator of the recorded step.
    """

    name: str
    phase: str
    end: float
    own: float
    shapes: Sequence[Any]
    took: float = 0.0
    op: Op | None = None

    @property
    def reshaped(self) -> tuple[list[list[int]], list[list[int]]] | None:
        """The shapes of the inputs, profiled and recorded, where the profile has others."""
        ran = [*_shapes(self.shapes)]
        recorded = [[*t.shape] for t in (self.op.inputs if self.op else ()) if t.shape]
        return (ran, recorded) if self.op and ran and ran != recorded else None


@dataclass(frozen=True)
class _Step:
    """A profiled step; `missing` are recorded operators that it does not contain."""

    parts: list[_Part]
    wall_s: float
    missing: Counter[str]

    @property
    def unmatched(self) -> list[_Part]:
        """Operators of the step's phases that the recorded step does not contain."""
        return [p for p in self.parts if p.op is None and p.name and p.phase in LAYER_PHASES]

    @property
    def n_differences(self) -> int:
        """By how many operators it differs from the recorded step."""
        n_reshaped = sum(part.reshaped is not None for part in self.parts)
        return self.missing.total() + len(self.unmatched) + n_reshaped

    @property
    def phases_s(self) -> dict[str, float]:
        """Seconds by phase."""
        return _sums((part.phase, part.took) for part in self.parts if part.phase != _OUTSIDE)


def _sums(pairs: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Seconds by key, of microseconds."""
    found: dict[Any, float] = defaultdict(float)
    for key, us in pairs:
        found[key] += us * _US
    return found


def _shapes(inputs: Iterable[Any]) -> Iterator[list[int]]:
    """The shapes of tensors with dimensions; those of a list of tensors one by one."""
    for shape in inputs:
        if shape:
            yield from _shapes(shape) if isinstance(shape[0], list) else [shape]


@dataclass(frozen=True)
class ChromeTrace:
    """The outermost events of a profile in the order of their start, its ``ProfilerStep`` events,
    and the number of all events.
    """

    path: str
    events: list[_Event]
    steps: list[_Event]
    n_events: int

    @classmethod
    def load(cls, path: str | Path) -> ChromeTrace:
        """Read a profile, gzipped or not. Raises DlperfError for what is none, or of a GPU."""
        try:
            data = Path(path).read_bytes()
            data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
            events = msgspec.json.decode(data, type=_File).events
        except (
            OSError,
            EOFError,
            ValueError,
            RecursionError,
            zlib.error,
            msgspec.DecodeError,
        ) as e:
            what = "is neither a measurement nor a whole profile of torch.profiler"
            raise DlperfError(f"{path}: {getattr(e, 'strerror', None) or f'{what} ({e})'}") from e
        kinds = {event.cat for event in events if event.dur}
        if kinds & _ON_GPU:
            raise DlperfError(f"{path}: is a profile of a GPU; profile the step on the CPU")
        if "cpu_op" not in kinds:
            raise DlperfError(
                f"{path}: contains no operators (events of category cpu_op); export it from"
                " torch.profiler.profile(activities=[ProfilerActivity.CPU])"
            )
        named = (*_PHASES, _STEP)
        kept = [e for e in events if e.cat == "cpu_op" or (e.dur and e.name.startswith(named))]
        outermost, stacks = list[_Event](), defaultdict[Any, list[_Event]](list)
        for event in sorted(kept, key=lambda event: (event.ts, -event.dur)):
            stack = stacks[event.pid, event.tid, event.name.startswith(_STEP)]
            while stack and stack[-1].end <= event.ts:
                stack.pop()
            (stack[-1].inside if stack else outermost).append(event)
            stack.append(event)
        own = [event for event in outermost if not event.name.startswith(_STEP)]
        steps = [event for event in outermost if event.name.startswith(_STEP)]
        return cls(str(path), list(_opened(own)), steps, len(kept))

    @property
    def inference(self) -> bool:
        """Whether nothing was trained."""
        return {event.phase for event in self.events}.isdisjoint(("backward", "optimizer"))

    def measurement(self, trace: Trace, threads: int) -> Measurement:
        """The measurement of the recorded step `trace`. `threads` is the number that the step ran
        with, which a profile does not tell.

        A step is a ``ProfilerStep``; without them it ends with ``Optimizer.step``; without these it
        is the whole profile. Steps that differ more from the recorded one than others are left out,
        and the first one, if the profiler did not warm up before it. Raises DlperfError where most
        operators of a phase are missing, or have other shapes.
        """
        found = [_profiled_step(events, wall_s, trace) for events, wall_s in self._split()]
        if not found:
            raise DlperfError(f"{self.path}: no operator ran in its steps; export it again")
        differences = [step.n_differences for step in found]
        kept = [s for s, number in zip(found, differences) if number == min(differences)]
        is_cold = not self.steps or self.steps[0].name == f"{_STEP}0"
        kept = kept[is_cold and kept[0] is found[0] and len(kept) > 1 :]
        self._check(kept[0], trace)
        times = [step.phases_s for step in kept]
        phases = [p for p in ("zero_grad", *LAYER_PHASES) if p in times[0]]
        step = {p: Samples(tuple(one.get(p, 0.0) for one in times)) for p in phases}
        return Measurement(
            target=trace.target,
            batch_size=trace.batch_size,
            threads=threads,
            step={**step, "total": Samples(tuple(math.fsum(one.values()) for one in times))},
            layers=_layer_times(kept, trace),
            inference=trace.inference,
            notes=tuple(self._notes(kept[0], len(found), len(found) - len(kept))),
            trace=trace,
            ops=_op_times(kept),
        )

    def _split(self) -> Iterator[tuple[list[_Event], float]]:
        """The events of each step, and its wall time."""
        ends = [event.end for event in self.events if event.phase == "optimizer"]
        ends = ends or [max(event.end for event in self.events)]
        cuts = [(step.ts, step.end) for step in self.steps]
        for start, end in cuts or zip([self.events[0].ts, *ends], ends):
            if own := [event for event in self.events if start <= event.ts < end]:
                yield own, (end - start) * _US

    def _check(self, step: _Step, trace: Trace) -> None:
        """Refuse another step than the recorded one."""
        target = f"{trace.target or 'the target'} at batch size {trace.batch_size}"
        way_out = "give the target and the batch size that were profiled"
        for phase in LAYER_PHASES:
            n_ran = sum(part.op is not None for part in step.parts if part.phase == phase)
            n_wanted = sum(op.phase == phase and op.packet != _HIDDEN for op in trace.ops)
            if n_ran < _LEAST_MATCHED_FRAC * n_wanted:
                raise DlperfError(
                    f"{self.path}: contains {n_ran} of the {n_wanted} {phase} operators of"
                    f" {target}; {way_out}"
                )
        reshaped = [(part.name, *part.reshaped) for part in step.parts if part.reshaped]
        if len(reshaped) > _MOST_RESHAPED_FRAC * len(trace.ops):
            name, own, recorded = reshaped[0]
            raise DlperfError(
                f"{self.path}: {name} has inputs {own}, in {target} {recorded}; {way_out}"
            )

    def _notes(self, step: _Step, n_steps: int, n_left_out: int) -> Iterator[str]:
        """What a reader of the measurement should know."""
        yield (
            "torch.profiler adds a microsecond or more to each of its"
            f" {self.n_events / n_steps:.0f} events a step: small operators take less without it"
        )
        if n_left_out:
            yield (
                f"{n_left_out} of the {n_steps} profiled steps are left out: a first one, or such"
                " with other operators"
            )
        if step.missing:
            yield f"predicted, not in the profile: {_listed(step.missing.elements())}"
        if step.unmatched:
            took_s = math.fsum(part.took for part in step.unmatched) * _US
            names = _listed(part.name for part in step.unmatched)
            yield f"in the profile, not predicted: {format_seconds(took_s)} a step, {names}"
        if not any(part.shapes for part in step.parts):
            yield "the profile has no shapes (record_shapes=True) to check the batch size by"
        outside_s = step.wall_s - math.fsum(step.phases_s.values())
        names = _listed(part.name for part in step.parts if part.phase == _OUTSIDE)
        yield f"outside the step: {format_seconds(outside_s)}{names and ', '}{names}"


def _opened(events: Iterable[_Event]) -> Iterator[_Event]:
    """The events. What a closure runs in an optimizer's step, up to its backward, stands before
    it.
    """
    for event in events:
        nodes = [n for n, inner in enumerate(event.inside, 1) if inner.phase == "backward"]
        if event.phase == "optimizer" and nodes:
            yield from event.inside[: nodes[-1]]
            start = event.inside[nodes[-1] - 1].end
            event.inside, event.ts, event.dur = event.inside[nodes[-1] :], start, event.end - start
        yield event


def _profiled_step(events: Sequence[_Event], wall_s: float, trace: Trace) -> _Step:
    """A step's parts, aligned with the recorded operators."""
    recorded: dict[str, list[Op]] = defaultdict(list)
    for op in trace.ops:
        recorded[op.phase] += [] if op.packet == _HIDDEN else [op]
    parts, cursor = list[_Part](), events[0].ts
    for event, following in zip(events, [*events[1:], events[0]]):
        phase = event.phase
        if event.name == "aten::ones_like" and following.phase == "backward":
            phase = "backward"  # the gradient of the loss
        for part in _parts(event, phase, {_name(op.packet) for op in recorded[phase]}):
            since = event.ts if phase == "zero_grad" else cursor
            part.took, cursor = max(0.0, part.end - since), max(cursor, part.end)
            parts.append(part)
    missing = Counter[str]()
    for phase in LAYER_PHASES:
        ran = [part for part in parts if part.phase == phase and part.name]
        wanted = tuple(_name(op.packet) for op in recorded[phase])
        places = dict(_aligned(wanted, tuple(part.name for part in ran)))
        for number, part in enumerate(ran):
            part.op = recorded[phase][places[number]] if number in places else None
        missing += Counter(wanted) - Counter(wanted[place] for place in places.values())
    matched = [n for n, part in enumerate(parts) if part.phase == "forward" and part.op]
    for number, part in enumerate(parts):
        if part.phase == "forward" and not (matched and matched[0] <= number <= matched[-1]):
            part.phase = _OUTSIDE
    return _Step(parts, wall_s, missing)


def _parts(event: _Event, phase: str, known: set[str]) -> list[_Part]:
    """The outermost operators of an event that the recorded phase knows, else the event. What an
    event does behind its last operator belongs to that.
    """

    def inner(one: _Event) -> list[_Part]:
        if _name(one.name) in known:
            return [_Part(_name(one.name), phase, one.end, one.dur, one.args.shapes)]
        found = [part for child in one.inside for part in inner(child)]
        if found:
            found[-1].end = one.end
        return found

    is_hidden = event.name.startswith(_NODE) or _name(event.name) == _HIDDEN
    name = "" if is_hidden else event.name.replace("::", ".")
    return inner(event) or [_Part(name, phase, event.end, event.dur, ())]


def _name(name: str) -> str:
    """An operator's name as in a recorded step, without the mark of an in-place one: autograd and
    linear layers add in place where nobody watches them.

    >>> _name("aten::add_")
    'aten.add'
    """
    return name.replace("::", ".", 1).rstrip("_")


@lru_cache(maxsize=64)
def _aligned(wanted: tuple[str, ...], ran: tuple[str, ...]) -> list[tuple[int, int]]:
    """The indices of names that ran, each with that of the wanted one."""
    blocks = SequenceMatcher(None, wanted, ran, autojunk=False).get_matching_blocks()
    return [(block.b + n, block.a + n) for block in blocks for n in range(block.size)]


def _layer_times(steps: Sequence[_Step], trace: Trace) -> tuple[LayerTimes, ...]:
    """A row for each layer, and one for operators that were not matched. A layer without operators
    in the recorded forward has 0 there: its time is that of the next layer.
    """
    sums = [_sums(_by_layer(step)) for step in steps]
    types = {layer.name: layer.type for layer in trace.layers} | {LOSS: "Loss", UNMATCHED: "-"}
    at_work = {layer for op in trace.ops for layer, _ in op.layer_shares if op.phase == "forward"}
    ran = {(layer.name, "forward") for layer in trace.layers if layer.name not in at_work}
    ran |= {key for one in sums for key in one}

    def samples(layer: str, phase: str) -> Samples | None:
        own = tuple(one.get((layer, phase), 0.0) for one in sums)
        return Samples(own) if (layer, phase) in ran else None

    rows = (
        LayerTimes(layer, types.get(layer, "-"), *(samples(layer, p) for p in LAYER_PHASES))
        for layer in dict.fromkeys((*types, *sorted(layer for layer, _ in ran)))
    )
    return tuple(row for row in rows if any(map(row.phase, LAYER_PHASES)))


def _by_layer(step: _Step) -> Iterator[tuple[tuple[str, str], float]]:
    """Layer and phase of each part, and its microseconds. A node without an operator belongs to
    the layer of the part before.
    """
    shares: tuple[tuple[str, float], ...] = ((LOSS, 1.0),)
    for part in step.parts:
        if part.name:
            shares = part.op.layer_shares if part.op else ((UNMATCHED, 1.0),)
        for layer, share_frac in shares if part.phase in LAYER_PHASES else ():
            yield (layer, part.phase), share_frac * part.took


def _op_times(steps: Sequence[_Step]) -> tuple[OpTimes, ...]:
    """The operators by kind and phase."""
    parts = [
        [
            ((part.op.packet if part.op else part.name, part.phase), part.own)
            for part in step.parts
            if part.name and part.phase in LAYER_PHASES
        ]
        for step in steps
    ]
    sums = [_sums(own) for own in parts]
    counts = Counter(key for key, _ in parts[0])
    return tuple(
        OpTimes(*key, n_calls, Samples(tuple(one.get(key, 0.0) for one in sums)))
        for key, n_calls in counts.items()
    )


def _listed(names: Iterable[str]) -> str:
    """The most frequent names with their numbers."""
    counts = Counter(filter(None, names))
    shown = [f"{name} x{count}" for name, count in counts.most_common(_MOST_NAMES)]
    more = len(counts) - _MOST_NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")

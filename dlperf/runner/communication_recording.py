"""The calls of one rank, put into the steps of its training: data and arithmetic, without torch.

Launches are exact, and so are waits in Python. Code in C++ that issues calls and blocks for them (a
:class:`WaitRegion`: DistributedDataParallel's backward, its broadcast of buffers) shows the start
and end of its wait, not the call it waits for. It waits in the order of the launches, so each wait
ends when its call was complete. The rest of the region (copying buckets back) is computation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlperf.core.communication import LAUNCH, WAIT, Event, RankStep, step_from_json, step_to_json
from dlperf.core.records.communication import Kind, Operation


@dataclass(slots=True)
class CollectiveCall:
    """A call on a process group, on the rank's clock.

    `group`: its name in torch. `peer`: the other end or the root, as a rank of the world. `region`:
    the code in C++ that may wait for it. `waits`: waits in Python, (from, until).
    """

    kind: Kind
    n_bytes: int
    group: str
    at: float
    until: float
    peer: int | None = None
    region: tuple[str, int] | None = None
    done: float | None = None
    waits: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class WaitRegion:
    """The time in which code in C++ waited for its calls."""

    at: float
    until: float


@dataclass(frozen=True, slots=True)
class StepMark:
    """The end of an optimizer's step at `ended`; from `begun` on the next one is timed.

    `began`: the first call of the model for it, None if unknown. `plain`: no hooks but the
    recording's. `own_s`: zero_grad, forward, backward and optimizer, without what lies between.
    """

    optimizer: int
    ended: float
    begun: float
    plain: bool = False
    began: float | None = None
    own_s: float = 0.0


WHOLE_RUN = -1
"""The number of the only "step" of a program without optimizer: first call to last call."""


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. `number`: of the optimizer's steps from 0, or :data:`WHOLE_RUN`.

    `own_s`: the step without what the loop does around it. `own_communication_s`: the part of it
    spent in launches and waits.
    """

    number: int
    step: RankStep
    own_s: float = 0.0
    own_communication_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The step as JSON data."""
        return {
            "number": self.number,
            "own_s": self.own_s,
            "own_communication_s": self.own_communication_s,
            "step": step_to_json(self.step),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RecordedStep:
        """The step that :meth:`to_json` wrote."""
        return cls(
            data["number"], step_from_json(data["step"]), data["own_s"], data["own_communication_s"]
        )


def assemble(
    calls: Iterable[CollectiveCall],
    regions: dict[tuple[str, int], WaitRegion],
    marks: Sequence[StepMark],
    optimizer: int | None,
    first_began: float | None,
    groups: Sequence[str],
) -> tuple[RecordedStep, ...]:
    """The first step of `optimizer`, from `first_began` on, and its plain ones.

    `groups`: the groups' names in the order of their numbers. A wait for a call of a step not kept
    is left out. An event begins no earlier than the one before ends (several threads). Without any
    optimizer step all calls make one step, :data:`WHOLE_RUN`.
    """
    ordered = sorted(calls, key=lambda call: call.at)
    _wait_in_regions(ordered, regions)
    numbers = {name: number for number, name in enumerate(groups)}
    if not marks:
        if not ordered:
            return ()
        begin = ordered[0].at
        end = max(max([call.until, *(until for _, until in call.waits)]) for call in ordered)
        events = _events(ordered, numbers, begin, math.nextafter(end, math.inf), set())
        return (RecordedStep(WHOLE_RUN, RankStep(begin, end, tuple(events), first=False)),)
    own = [mark for mark in marks if mark.optimizer == optimizer]
    spans = [] if first_began is None or not own else [(0, first_began, own[0], True)]
    spans += [
        (number, own[number - 1].begun, own[number], False)
        for number in range(1, len(own))
        if own[number].plain
    ]
    found = []
    kept: set[int] = set()
    for number, begin, mark, first in spans:
        events = _events(ordered, numbers, begin, mark.ended, kept)
        step = RankStep(begin, max(begin, mark.ended), tuple(events), first)
        since = 0.0 if mark.began is None else mark.began - begin
        found.append(
            RecordedStep(
                number,
                step,
                mark.own_s,
                sum(event.seconds for event in events if event.at_s >= since),
            )
        )
    return tuple(found)


def _wait_in_regions(
    ordered: Sequence[CollectiveCall], regions: dict[tuple[str, int], WaitRegion]
) -> None:
    """Give calls without a wait in Python the waits of their regions."""
    reached: dict[tuple[str, int], float] = {}
    for call in ordered:
        if call.waits or call.region is None or call.region not in regions:
            continue
        region = regions[call.region]
        at = max(region.at, call.until, reached.get(call.region, region.at))
        until = max(at, region.until if call.done is None else min(call.done, region.until))
        reached[call.region] = until
        call.waits.append((at, until))


def _events(
    ordered: Sequence[CollectiveCall],
    numbers: dict[str, int],
    begin: float,
    end: float,
    kept: set[int],
) -> list[Event]:
    """Launches and waits between `begin` and `end`, relative to `begin`, one after another.

    `kept`: the calls launched so far in steps kept.
    """
    seen: list[tuple[float, float, Operation, int, CollectiveCall]] = []
    for number, call in enumerate(ordered):
        if begin <= call.at < end:
            kept.add(number)
            seen.append((call.at, call.until, LAUNCH, number, call))
        if number in kept:
            seen += [
                (at, until, WAIT, number, call) for at, until in call.waits if begin <= at < end
            ]
    events: list[Event] = []
    reached = begin
    for at, until, op, number, call in sorted(seen, key=lambda one: (one[0], one[3], one[2])):
        at, until = max(at, reached), max(min(until, end), reached)
        reached = until
        done = None if op == WAIT or call.done is None else call.done - begin
        group, kind = numbers[call.group], call.kind
        events.append(
            Event(op, number, kind, call.n_bytes, group, at - begin, until - begin, call.peer, done)
        )
    return events

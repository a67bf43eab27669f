"""The length of a run: what loops and counters in its source tell while it goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from dlperf.runner.counters import Counter
from dlperf.runner.evaluation import Evaluation
from dlperf.runner.loops import RunningLoop, iterates


def place_in(loops: Sequence[RunningLoop]) -> tuple[int, int]:
    """The round that the program is in, and their number, over nested loops.

    >>> place_in([RunningLoop(3, 10), RunningLoop(1, 2)])
    (13, 20)
    """
    index, length = 0, 1
    for loop in loops:
        index, length = index + loop.index * length, length * loop.length
    return index, length


@dataclass(frozen=True)
class SeenLoops:
    """The loops and the counters around the program's step number `n_steps`."""

    n_steps: int
    loops: tuple[RunningLoop, ...] = ()
    counters: tuple[Counter, ...] = ()


@dataclass(frozen=True)
class BegunPass:
    """Where a loader's pass began: the loops and the evaluation around it, the stack's `lines`."""

    loops: tuple[RunningLoop, ...] = ()
    lines: frozenset[tuple[str, int]] = frozenset()
    evaluation: Evaluation | None = None

    def is_inside(self, now: SeenLoops) -> bool:
        """Whether it begins in an outer one of the loops around a step, and not in the inner."""
        return 0 < len(self.loops) < len(now.loops)

    def is_drawn_from(
        self, frame: FrameType, before: SeenLoops, now: SeenLoops, passes: int
    ) -> bool:
        """Whether loops of steps draw from the pass with ``next``, and no ``for`` iterates over it.

        Each round of the loops around `frame` is a step, or one of the `passes` of a step. A loop
        that may end with the loader does not count.
        """
        is_counted = rounds_left(before, now, passes) is not None
        inner = now.loops[: len(now.loops) - len(self.loops)]
        may_end = self.is_inside(now) and any(loop.may_end_early for loop in inner)
        return is_counted and not may_end and bool(self.lines) and not iterates(frame, self.lines)


def rounds_left(before: SeenLoops, now: SeenLoops, passes: int) -> float | None:
    """The further steps by the loops, where rounds and steps advance alike; else None.

    Each round is a step, or one of the `passes` of a step. Rounds before the first step count not.

    >>> before, now = RunningLoop(65, 400), RunningLoop(82, 400)
    >>> rounds_left(SeenLoops(2, (before,)), SeenLoops(19, (now,)), passes=1)
    317.0
    """
    n_steps = now.n_steps - before.n_steps
    index, length = place_in(now.loops)
    n_rounds = index - place_in(before.loops)[0]
    if n_rounds > 0 and n_rounds in (n_steps, n_steps * passes):
        return (length - 1 - index) * n_steps / n_rounds
    return None


def steps_left(before: SeenLoops, now: SeenLoops, passes: int) -> list[tuple[float, Counter]]:
    """The further steps until each counter ends its loop; without those that did not advance.

    A counter advances as it did between the two steps. One that began anew meanwhile advances once
    for each of the `passes` of a step.
    """
    left_before = {counter.place: counter.left for counter in before.counters}
    found = []
    for counter in now.counters:
        advance = left_before.get(counter.place, counter.left) - counter.left
        per_step = advance / max(1, now.n_steps - before.n_steps)
        if per_step < 0 and counter.restarts:
            per_step = passes
        if per_step > 0:
            found.append((counter.left / per_step, counter))
    return found


class RoundLength:
    """The steps of a round (an epoch without a loader), from the round after a number of steps.

    In round i, from 0, the n-th step has i s < n <= (i + 1) s, for rounds of s steps. `steps`: a
    length that holds until the rounds contradict it.

    >>> rounds = RoundLength()
    >>> rounds.steps(0, 19), rounds.steps(0, 95), rounds.steps(1, 110), rounds.steps(2, 201)
    (None, None, 102.0, 97.5)
    """

    def __init__(self, steps: float | None = None) -> None:
        self._known = steps
        self._least, self._most = 0.0, math.inf

    @property
    def unsure(self) -> float:
        """By how many steps the length may be wrong."""
        is_estimated = self._known is None and self._most < math.inf
        return (self._most - self._least) / 2 if is_estimated else 0.0

    def steps(self, index: int | None, n_steps: int) -> float | None:
        """The length, given round `index` after `n_steps`; None where no round has ended.

        `index` is None where no loop tells it.
        """
        if index is None:
            return self._known
        least, most = n_steps / (index + 1), (n_steps - 1) / index if index else math.inf
        if self._known is not None:
            if math.floor(least) <= self._known and (not index or self._known <= math.ceil(most)):
                return self._known
            self._known = None
        self._least, self._most = max(self._least, least), min(self._most, most)
        if self._least > self._most:  # rounds differ: by the latest
            self._least, self._most = least, most
        return (self._least + self._most) / 2 if self._most < math.inf else None

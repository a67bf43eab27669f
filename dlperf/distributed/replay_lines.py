"""What came of replaying a recording: each rank's steps, and what they are made of."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from dlperf.distributed.programs import COMPUTING, Kept, Spell
from dlperf.distributed.scaling import Shares
from dlperf.models.communication_replay import Mark, Replayed


@dataclass(frozen=True)
class Lines:
    """The spells of a recording with the time lines that a replay gave them."""

    spells: tuple[tuple[Spell, Replayed], ...]

    @cached_property
    def firsts(self) -> list[bool]:
        """For each step whether it is the first after wrapping."""
        return [first for spell, _ in self.spells for first in spell.firsts]

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(len(self.spells[0][0].pieces))

    @cached_property
    def steps_s(self) -> list[list[float]]:
        """By rank, then step."""
        return [
            [b - a for _, line in self.spells for a, b in pairwise(line.marks_s[rank])]
            for rank in self.ranks
        ]

    def usual(self, values: Sequence[float]) -> list[float]:
        """Those of the steps that are not the first after wrapping; all, where there is no other."""
        return [value for value, first in zip(values, self.firsts) if not first] or list(values)

    @property
    def step_s(self) -> float:
        """The slowest rank's median step."""
        return max(statistics.median(self.usual(steps)) for steps in self.steps_s)

    @property
    def first_s(self) -> float | None:
        """The slowest rank's first step after wrapping."""
        found = [step for steps in self.steps_s for step, first in zip(steps, self.firsts) if first]
        return max(found, default=None)

    @property
    def paces_s(self) -> list[float]:
        """Each usual step, the mean over the ranks."""
        return self.usual([statistics.fmean(steps) for steps in zip(*self.steps_s)])

    def busy_s(self, rank: int) -> float:
        """The median over the steps of how long at least one call of the rank was running."""
        found = []
        for spell, line in self.spells:
            spans = [
                (span.start_s, span.end_s)
                for call, span in zip(spell.calls, line.spans)
                if rank in call.ranks and span.end_s > span.start_s
            ]
            found += [_covered_s(spans, a, b) for a, b in pairwise(line.marks_s[rank])]
        return statistics.median(self.usual(found))

    def shares(self, rank: int) -> Shares:
        """The medians of the rank's steps."""
        waiting, blocked, kept = [], [], []
        for spell, line in self.spells:
            marks = line.marks_s[rank]
            for a, b in pairwise(marks):
                inside = [
                    wait for wait in line.waits[rank] if a <= wait.from_s and wait.until_s <= b
                ]
                waiting.append(
                    math.fsum(wait.for_ranks_s(line.spans[wait.operation]) for wait in inside)
                )
                blocked.append(math.fsum(wait.until_s - wait.from_s for wait in inside))
            kept += _kept_s(spell, rank)
        steps = self.steps_s[rank]
        exposed = [all_of_it - late + own for all_of_it, late, own in zip(blocked, waiting, kept)]
        computing = [step - late - shown for step, late, shown in zip(steps, waiting, exposed)]
        return Shares(
            *(
                statistics.median(self.usual(values))
                for values in (steps, computing, exposed, waiting)
            )
        )


def _kept_s(spell: Spell, rank: int) -> list[float]:
    """For each step what issuing and leaving calls took in the recording."""
    found: list[float] = []
    total = math.nan
    for piece in spell.pieces[rank]:
        if isinstance(piece, Kept):
            total += piece.end_s - piece.begin_s if piece.what != COMPUTING else 0.0
        elif isinstance(piece, Mark):
            found.append(total)
            total = 0.0
    return found[1:]


def _covered_s(spans: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    covered, until = 0.0, begin_s
    for start, end in sorted(spans):
        covered += max(0.0, min(end, end_s) - max(start, until))
        until = max(until, min(end, end_s))
    return covered

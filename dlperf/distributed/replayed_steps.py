"""Replayed steps of each rank and their parts: computing, exposed communication, waiting."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from dlperf.distributed.programs import LocalWork, Segment
from dlperf.distributed.scaling import Shares
from dlperf.models.communication_replay import Mark, Replayed, covered_s

T = TypeVar("T")


@dataclass(frozen=True)
class ReplayedSteps:
    """The segments of a recording with their replayed time lines."""

    segments: tuple[tuple[Segment, Replayed], ...]

    @cached_property
    def firsts(self) -> list[bool]:
        """For each step whether it is the first after wrapping."""
        return [first for segment, _ in self.segments for first in segment.firsts]

    @property
    def ranks(self) -> range:
        """The ranks."""
        return range(len(self.segments[0][0].pieces))

    @cached_property
    def steps_s(self) -> list[list[float]]:
        """By rank, then step."""
        return [
            [b - a for _, line in self.segments for a, b in pairwise(line.marks_s[rank])]
            for rank in self.ranks
        ]

    def steady(self, values: Sequence[T]) -> list[T]:
        """The values without the first step after wrapping, if there are others."""
        return [value for value, first in zip(values, self.firsts) if not first] or list(values)

    @property
    def step_s(self) -> float:
        """The slowest rank's median step."""
        return max(statistics.median(self.steady(steps)) for steps in self.steps_s)

    @property
    def first_s(self) -> float | None:
        """The slowest rank's first step after wrapping."""
        found = [step for steps in self.steps_s for step, first in zip(steps, self.firsts) if first]
        return max(found, default=None)

    @property
    def mean_steps_s(self) -> list[float]:
        """Each steady-state step, the mean over the ranks."""
        return self.steady([statistics.fmean(steps) for steps in zip(*self.steps_s)])

    def busy_s(self, rank: int) -> float:
        """Seconds of a step in which a call of the rank runs: the median over the steps."""
        found = []
        for segment, line in self.segments:
            spans = [
                (span.start_s, span.end_s)
                for call, span in zip(segment.calls, line.spans)
                if rank in call.ranks and span.end_s > span.start_s
            ]
            found += [covered_s(spans, a, b) for a, b in pairwise(line.marks_s[rank])]
        return statistics.median(self.steady(found))

    def shares(self, rank: int) -> Shares:
        """The medians of the rank's steps."""
        rows = []
        for segment, line in self.segments:
            steps = zip(pairwise(line.marks_s[rank]), _local_s(segment, rank))
            for (begin, end), local_s in steps:
                waits = [w for w in line.waits[rank] if begin <= w.from_s and w.until_s <= end]
                waiting_s = math.fsum(w.for_ranks_s(line.spans[w.operation]) for w in waits)
                exposed_s = math.fsum(w.until_s - w.from_s for w in waits) - waiting_s + local_s
                step_s = end - begin
                rows.append((step_s, step_s - waiting_s - exposed_s, exposed_s, waiting_s))
        return Shares(*(statistics.median(self.steady(column)) for column in zip(*rows)))


def _local_s(segment: Segment, rank: int) -> list[float]:
    """For each step the recorded seconds of issuing and leaving calls."""
    between_marks = [0.0]
    for piece in segment.pieces[rank]:
        if isinstance(piece, Mark):
            between_marks.append(0.0)
        elif isinstance(piece, LocalWork) and not piece.is_computing:
            between_marks[-1] += piece.end_s - piece.begin_s
    return between_marks[1:-1]

"""A trace of communication as programs to replay: each rank's work between its calls, and the calls
of the ranks matched and timed; and the replayed steps of each rank with their parts.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

from dlperf.core.communication import LAUNCH, MESSAGES, Communication, Event, Meeting
from dlperf.core.text import counted
from dlperf.distributed.rank_shares import clock_offsets, depends, first_waits
from dlperf.distributed.scaling import Shares
from dlperf.models.communication_replay import (
    GLOO_LANES,
    LEAST_COMPUTE_RATE,
    NCCL_LANES,
    Compute,
    Launch,
    Mark,
    Replayed,
    Task,
    Wait,
    covered_s,
)

_GAP_FRAC = 1e-3
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or message of a segment with its recorded time, in seconds of rank 0's clock. It
    starts when all ranks have launched it and a lane of its group is free.
    """

    kind: str
    n_bytes: int
    ranks: tuple[int, ...]
    group: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.end_s - self.start_s

    @property
    def queue(self) -> int | None:
        """The group that it waits in; a message waits in none."""
        return None if self.is_message else self.group

    @property
    def is_message(self) -> bool:
        """Whether it joins two ranks, the sender first."""
        return self.kind in MESSAGES


@dataclass(frozen=True, slots=True)
class LocalWork:
    """A rank's own work, in seconds of rank 0's clock: the script's computing, or issuing a call,
    or leaving a wait whose call is over (waking up, copying a result).
    """

    begin_s: float
    end_s: float
    is_computing: bool = False


Piece = LocalWork | Launch | Wait | Mark
Stolen = Callable[[Call], float]


@dataclass(frozen=True)
class Segment:
    """Consecutive steps. A rank's `pieces` begin with a mark and have one after each step. `firsts`
    marks the first step after wrapping.
    """

    firsts: tuple[bool, ...]
    calls: tuple[Call, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    starts_s: tuple[float, ...]

    def programs(self, stolen: Stolen, slow: float = 1.0) -> list[list[Task]]:
        """Each rank's work without interference: a call beside it took `stolen(call)` seconds of
        its processor, evenly over its recorded time. `slow` is a slowdown of the script's
        computing.
        """
        rates = [(call, stolen(call) / call.seconds) for call in self.calls if call.seconds > 0]
        programs = []
        for rank, pieces in enumerate(self.pieces):
            disturbing = sorted(
                (call.start_s, call.end_s, rate)
                for call, rate in rates
                if rank in call.ranks and rate > 0
            )
            programs.append([_task(piece, disturbing, slow) for piece in pieces])
        return programs


def lanes_of(backend: str) -> int:
    """Number of collectives of one group that a backend runs at once."""
    return NCCL_LANES if backend == "nccl" else GLOO_LANES


def recorded_segments(trace: Communication) -> tuple[tuple[Segment, ...], list[str]]:
    """The trace as segments of consecutive steps, all ranks on rank 0's clock
    (:func:`dlperf.distributed.rank_shares.clock_offsets`), and notes.

    A call ends at its completion: the mean over its ranks, for a rooted collective or message the
    last rank that needs the data; without a completion at the end of the first wait of those. A
    wait for a call that was launched before the segment, or not by all ranks, keeps its recorded
    time. Raises DlperfError where the ranks' calls do not match.
    """
    known = clock_offsets(trace)
    notes = [
        f"the offset of rank {rank}'s clock from rank 0's is unknown: its first step is taken to"
        " begin with rank 0's"
        for rank, offset in enumerate(known)
        if offset is None
    ]
    offsets = [
        trace.steps[0][0].begin_s - steps[0].begin_s if offset is None else offset
        for steps, offset in zip(trace.steps, known)
    ]
    builder = _Builder(trace, offsets)
    segments = tuple(builder.segment(indices) for indices in _consecutive(trace))
    if builder.n_unmatched:
        notes.append(
            f"{counted(builder.n_unmatched, 'wait')} for calls that were not launched by all ranks"
            " within the watched steps keep their recorded time"
        )
    return segments, notes


def _consecutive(trace: Communication) -> Iterator[range]:
    """Ranges of steps that begin, on every rank, where the previous step ended."""
    begin = 0
    for index in range(1, trace.n_steps + 1):
        if index == trace.n_steps or any(
            steps[index].begin_s - steps[index - 1].end_s > _GAP_FRAC * steps[index].seconds
            for steps in trace.steps
        ):
            yield range(begin, index)
            begin = index


class _Builder:
    def __init__(self, trace: Communication, offsets: Sequence[float]) -> None:
        self.trace, self.offsets = trace, offsets
        self.n_unmatched = 0
        self.waits = {
            (rank, call): offsets[rank] + end_s
            for (rank, call), end_s in first_waits(trace).items()
        }

    def time(self, rank: int, place: int, seconds: float) -> float:
        """A time of a rank's step on rank 0's clock."""
        return self.offsets[rank] + self.trace.steps[rank][place].begin_s + seconds

    def segment(self, places: range) -> Segment:
        meetings = sorted(
            (
                m
                for m in self.trace.meetings
                if m.complete and all(index in places for _, index, _ in m.launches)
            ),
            key=lambda m: min(
                self.time(rank, index, event.at_s) for rank, index, event in m.launches
            ),
        )
        calls = self.calls(meetings)
        numbers = {
            (rank, event.call): number
            for number, meeting in enumerate(meetings)
            for rank, _, event in meeting.launches
        }
        pieces = tuple(
            tuple(self.pieces(rank, places, numbers, calls)) for rank in range(self.trace.n_ranks)
        )
        starts = tuple(self.time(rank, places.start, 0.0) for rank in range(self.trace.n_ranks))
        return Segment(
            tuple(self.trace.steps[0][index].first for index in places), calls, pieces, starts
        )

    def calls(self, meetings: Sequence[Meeting]) -> tuple[Call, ...]:
        """The meetings in the order of their first launches, with their recorded times."""
        ends: dict[int, list[float]] = defaultdict(list)
        n_lanes = lanes_of(self.trace.backend)
        found = []
        for meeting in meetings:
            start = max(
                self.time(rank, index, event.at_s) for rank, index, event in meeting.launches
            )
            if meeting.kind not in MESSAGES and len(ends[meeting.group]) >= n_lanes:
                start = max(start, sorted(ends[meeting.group])[-n_lanes])
            end = max(start, self.end_s(meeting, start))
            if meeting.kind not in MESSAGES:
                ends[meeting.group].append(end)
            senders_first = sorted(
                meeting.launches, key=lambda launch: (launch[2].kind == "recv", launch[0])
            )
            found.append(
                Call(
                    meeting.kind,
                    meeting.n_bytes,
                    tuple(rank for rank, _, _ in senders_first),
                    meeting.group,
                    start,
                    end,
                )
            )
        return tuple(found)

    def end_s(self, meeting: Meeting, start_s: float) -> float:
        needing = [
            launch for launch in meeting.launches if _needs_the_data(meeting, launch[0], launch[2])
        ] or list(meeting.launches)
        waited = {
            rank: self.waits[rank, event.call]
            for rank, _, event in needing
            if (rank, event.call) in self.waits
        }
        # a completion may be told late, yet no wait for the call ends before it
        done = [
            min(self.time(rank, index, event.done_s), waited.get(rank, math.inf))
            for rank, index, event in needing
            if event.done_s is not None
        ]
        if done:
            return (
                max(done)
                if meeting.root is not None or meeting.kind in MESSAGES
                else statistics.fmean(done)
            )
        return min(waited.values(), default=start_s)

    def pieces(
        self, rank: int, places: range, numbers: dict[tuple[int, int], int], calls: Sequence[Call]
    ) -> Iterator[Piece]:
        now = self.time(rank, places.start, 0.0)
        yield Mark()
        for index in places:
            for event in self.trace.steps[rank][index].events:
                at, until = (
                    self.time(rank, index, event.at_s),
                    self.time(rank, index, event.until_s),
                )
                yield LocalWork(now, max(now, at), is_computing=True)
                number = numbers.get((rank, event.call))
                if number is None:
                    self.n_unmatched += event.op != LAUNCH
                elif event.op == LAUNCH:
                    yield Launch(number)
                else:
                    yield Wait(number)
                    at = min(max(at, calls[number].end_s), until)
                yield LocalWork(at, until)
                now = until
            end = self.time(rank, index, self.trace.steps[rank][index].seconds)
            yield LocalWork(now, max(now, end), is_computing=True)
            yield Mark()
            now = end


def _needs_the_data(meeting: Meeting, rank: int, event: Event) -> bool:
    """Whether a rank's wait lasts until the call ends: not for a sender whose data others need."""
    return event.kind != "send" and any(
        depends(meeting, rank, other) for other, _, _ in meeting.launches
    )


def _task(piece: Piece, disturbing: Sequence[tuple[float, float, float]], slow: float) -> Task:
    """A piece as a task; recorded work without the calls beside it, (start, end, share of the
    processor taken) each.
    """
    if not isinstance(piece, LocalWork):
        return piece
    over = [
        (max(start, piece.begin_s), min(end, piece.end_s), rate)
        for start, end, rate in disturbing
        if start < piece.end_s and end > piece.begin_s
    ]
    cuts = {piece.begin_s, piece.end_s, *(cut for start, end, _ in over for cut in (start, end))}
    seconds = math.fsum(
        (b - a)
        * max(
            LEAST_COMPUTE_RATE,
            1.0 - math.fsum(rate for start, end, rate in over if start <= a and end >= b),
        )
        for a, b in pairwise(sorted(cuts))
    )
    return Compute(slow * seconds if piece.is_computing else seconds)


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

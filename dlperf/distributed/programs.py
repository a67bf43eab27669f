"""A trace of communication as programs that can be replayed: what each rank did between its calls,
which calls belong together, how long they took.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlperf.core.communication import LAUNCH, MESSAGES, Communication, Event, Meeting
from dlperf.distributed.rank_shares import clock_offsets
from dlperf.models.communication_replay import Launch, Mark, Task, Wait
from dlperf.models.overlap import GLOO_LANES, LEAST_COMPUTE_RATE, NCCL_LANES, Compute

COMPUTING, ISSUING, LEAVING = "computing", "issuing", "leaving"
"""What a rank does on its own: the script's work; issuing a call; leaving a wait whose call is over
(waking up, copying a result).
"""
_GAP_FRAC = 1e-3


@dataclass(frozen=True, slots=True)
class Call:
    """A collective or message of a spell, and when it ran in the recording (seconds of rank 0's
    clock): from its start, once all had launched it and its group's lanes were free, until its end.
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
    def is_message(self) -> bool:
        """Whether it joins two ranks, the sender first."""
        return self.kind in MESSAGES


@dataclass(frozen=True, slots=True)
class Kept:
    """Time that is the rank's own; seconds of rank 0's clock."""

    begin_s: float
    end_s: float
    what: str


Piece = Kept | Launch | Wait | Mark
Stolen = Callable[[Call], float]


@dataclass(frozen=True)
class Spell:
    """Steps that followed one another. A rank's `pieces` begin with a mark and have one after each
    step. `firsts` tells which is the first after wrapping.
    """

    firsts: tuple[bool, ...]
    calls: tuple[Call, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    starts_s: tuple[float, ...]

    def programs(self, stolen: Stolen, slow: float = 1.0) -> list[list[Task]]:
        """What each rank does, undisturbed: calls that ran beside its computing had taken
        `stolen(call)` seconds of its processor over their recorded life.

        `slow` is a factor on the script's own computing.
        """
        return [self._program(rank, stolen, slow) for rank in range(len(self.pieces))]

    def _program(self, rank: int, stolen: Stolen, slow: float) -> list[Task]:
        rates = [
            (call.start_s, call.end_s, stolen(call) / call.seconds)
            for call in self.calls
            if rank in call.ranks and call.seconds > 0
        ]
        disturbing = sorted((start, end, rate) for start, end, rate in rates if rate > 0)
        program: list[Task] = []
        for piece in self.pieces[rank]:
            if isinstance(piece, Kept):
                seconds = _undisturbed_s(piece, disturbing)
                program.append(Compute(slow * seconds if piece.what == COMPUTING else seconds))
            else:
                program.append(piece)
        return program


@dataclass(frozen=True)
class Recording:
    """A trace as spells, and what is to be said of it."""

    spells: tuple[Spell, ...]
    notes: tuple[str, ...]


def lanes_of(backend: str) -> int:
    """How many collectives of one group a backend runs at once."""
    return NCCL_LANES if backend == "nccl" else GLOO_LANES


def recording_of(trace: Communication) -> Recording:
    """The trace as spells of steps that followed one another, all ranks on rank 0's clock
    (:func:`dlperf.distributed.rank_shares.clock_offsets`).

    When a call ended is what its completion says: the mean over its ranks, of a rooted collective
    or message the last rank that needs the data; where no completion was seen, the end of the first
    wait of those. A wait for a call that was launched before the spell, or that not all ranks
    launched in it, is kept as it was. Raises DlperfError where the ranks' calls do not fit
    together.
    """
    notes: list[str] = []
    offsets = []
    for rank, offset in enumerate(clock_offsets(trace)):
        if offset is None:
            notes.append(
                f"nothing tells how the clock of rank {rank} stands to that of rank 0: its first"
                " step is taken to begin with rank 0's"
            )
            offset = (
                trace.steps[0][0].begin_s - trace.steps[rank][0].begin_s if trace.n_steps else 0.0
            )
        offsets.append(offset)
    builder = _Builder(trace, offsets)
    spells = tuple(builder.spell(places) for places in _consecutive(trace))
    if builder.n_kept:
        notes.append(
            f"{builder.n_kept} wait(s) for calls that were not launched by all ranks within the"
            " watched steps are kept as they were"
        )
    return Recording(spells, tuple(notes))


def _consecutive(trace: Communication) -> Iterator[range]:
    """Places of steps that begin, on every rank, where the one before ended."""
    begin = 0
    for place in range(1, trace.n_steps + 1):
        if place == trace.n_steps or any(
            steps[place].begin_s - steps[place - 1].end_s > _GAP_FRAC * steps[place].seconds
            for steps in trace.steps
        ):
            yield range(begin, place)
            begin = place


class _Builder:
    def __init__(self, trace: Communication, offsets: Sequence[float]) -> None:
        self.trace, self.offsets = trace, offsets
        self.n_kept = 0
        self.meetings: dict[range, list[Meeting]] = defaultdict(list)
        self.waits: dict[tuple[int, int], float] = {}
        for rank, steps in enumerate(trace.steps):
            for place, step in enumerate(steps):
                for event in step.waits:
                    self.waits.setdefault((rank, event.call), self.time(rank, place, event.until_s))

    def time(self, rank: int, place: int, seconds: float) -> float:
        """A time of a rank's step on rank 0's clock."""
        return self.offsets[rank] + self.trace.steps[rank][place].begin_s + seconds

    def spell(self, places: range) -> Spell:
        meetings = [
            m
            for m in self.trace.meetings
            if m.complete and all(place in places for _, place, _ in m.launches)
        ]
        meetings.sort(
            key=lambda m: min(
                self.time(rank, place, event.at_s) for rank, place, event in m.launches
            )
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
        return Spell(
            tuple(self.trace.steps[0][place].first for place in places), calls, pieces, starts
        )

    def calls(self, meetings: Sequence[Meeting]) -> tuple[Call, ...]:
        """The meetings in the order in which they were first launched, with the times when they
        ran.
        """
        ends: dict[int, list[float]] = defaultdict(list)
        n_lanes = lanes_of(self.trace.backend)
        found = []
        for meeting in meetings:
            start = max(
                self.time(rank, place, event.at_s) for rank, place, event in meeting.launches
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
            min(self.time(rank, place, event.done_s), waited.get(rank, math.inf))
            for rank, place, event in needing
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
        for place in places:
            for event in self.trace.steps[rank][place].events:
                at, until = (
                    self.time(rank, place, event.at_s),
                    self.time(rank, place, event.until_s),
                )
                yield Kept(now, max(now, at), COMPUTING)
                number = numbers.get((rank, event.call))
                if event.op == LAUNCH:
                    if number is not None:
                        yield Launch(number)
                    yield Kept(at, until, ISSUING)
                elif number is None:
                    self.n_kept += 1
                    yield Kept(at, until, LEAVING)
                else:
                    yield Wait(number)
                    yield Kept(min(max(at, calls[number].end_s), until), until, LEAVING)
                now = until
            end = self.time(rank, place, self.trace.steps[rank][place].seconds)
            yield Kept(now, max(now, end), COMPUTING)
            yield Mark()
            now = end


def _needs_the_data(meeting: Meeting, rank: int, event: Event) -> bool:
    """Whether a rank is through only when the call is: not who sends, where others receive."""
    if meeting.kind in MESSAGES:
        return event.kind == "recv"
    if meeting.kind in ("broadcast", "scatter"):
        return rank != meeting.root
    return meeting.kind not in ("reduce", "gather") or rank == meeting.root


def _undisturbed_s(piece: Kept, disturbing: Sequence[tuple[float, float, float]]) -> float:
    """The work in a piece of recorded time: its integral of the rate that calls beside it had left,
    (start, end, share taken) each.
    """
    over = [
        (max(start, piece.begin_s), min(end, piece.end_s), rate)
        for start, end, rate in disturbing
        if start < piece.end_s and end > piece.begin_s
    ]
    if not over:
        return piece.end_s - piece.begin_s
    cuts = sorted(
        {piece.begin_s, piece.end_s, *(start for start, _, _ in over), *(end for _, end, _ in over)}
    )
    return math.fsum(
        (b - a)
        * max(
            LEAST_COMPUTE_RATE,
            1.0 - math.fsum(rate for start, end, rate in over if start <= a and end >= b),
        )
        for a, b in pairwise(cuts)
    )

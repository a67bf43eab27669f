"""Shares of each rank's step, from a trace of communication: computation, exposed communication and
waiting for slower ranks.

Cardwell 2019, Figure 2.4, shows the share of communication in the time of an algorithm on so many
ranks; here it is measured, rank by rank.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass

from dlperf.core.communication import MESSAGES, ROOTED, Communication, Event, Meeting, RankStep


@dataclass(frozen=True)
class StepShares:
    """One step of one rank, in seconds: step = compute + exposed + waiting.

    `waiting_s` is the blocking for a call before the last rank's launch; 0 where the offset of the
    ranks' clocks is unknown. `exposed_s` is the rest of the blocking, and issuing calls.
    `communication_frac` is the share of both in the step.
    """

    step_s: float
    compute_s: float
    exposed_s: float
    waiting_s: float
    communication_frac: float


@dataclass(frozen=True)
class RankShares(StepShares):
    """One rank: the medians of its steps' seconds and shares, each taken by itself, so that the
    parts may differ from the step by what steps vary.
    """

    rank: int
    host: str


def rank_shares(trace: Communication) -> tuple[RankShares, ...]:
    """Every rank's shares, over all steps but the first after wrapping (that one counts where there
    is no other).

    Raises DlperfError where the ranks' calls do not fit together.
    """
    rows = []
    for rank, steps in enumerate(step_shares(trace)):
        usual = [
            shares for shares, step in zip(steps, trace.steps[rank]) if not step.first
        ] or steps
        columns = zip(*map(astuple, usual or [StepShares(0.0, 0.0, 0.0, 0.0, 0.0)]))
        medians = StepShares(*map(statistics.median, columns))
        rows.append(RankShares(**asdict(medians), rank=rank, host=trace.hosts[rank]))
    return tuple(rows)


def step_shares(trace: Communication) -> tuple[tuple[StepShares, ...], ...]:
    """The shares of each step of each rank. Raises DlperfError where the ranks' calls do not fit
    together.
    """
    offsets = clock_offsets(trace)
    met = {
        (rank, event.call): meeting
        for meeting in trace.meetings
        for rank, _, event in meeting.launches
    }

    def shares(rank: int, step: RankStep) -> StepShares:
        communicating = sum(event.seconds for event in step.events)
        waiting = sum(
            _waiting_s(trace, met[rank, event.call], rank, event, step.begin_s, offsets)
            for event in step.waits
        )
        return StepShares(
            step.seconds,
            step.seconds - communicating,
            communicating - waiting,
            waiting,
            communicating / step.seconds if step.seconds else 0.0,
        )

    return tuple(
        tuple(shares(rank, step) for step in steps) for rank, steps in enumerate(trace.steps)
    )


def _waiting_s(
    trace: Communication,
    meeting: Meeting,
    rank: int,
    wait: Event,
    begin_s: float,
    offsets: Sequence[float | None],
) -> float:
    """How much of a wait passed before the ranks that it depends on had launched theirs."""
    own = offsets[rank]
    if own is None:
        return 0.0
    start = own + begin_s + wait.at_s
    launched = [
        offset + trace.steps[other][index].begin_s + launch.at_s
        for other, index, launch in meeting.launches
        if (offset := offsets[other]) is not None and depends(meeting, rank, other)
    ]
    return min(max([start, *launched]) - start, wait.seconds)


def depends(meeting: Meeting, rank: int, other: int) -> bool:
    """Whether a rank cannot be through before the other one has come."""
    if meeting.kind in ("broadcast", "scatter"):
        return other == meeting.root != rank
    return other != rank and (meeting.kind not in ("reduce", "gather") or rank == meeting.root)


def clock_offsets(trace: Communication) -> tuple[float | None, ...]:
    """Seconds to add to each rank's own clock to have rank 0's; None where no collective links the
    rank to others that are known.

    A collective that needs every rank (all but rooted ones and messages) ends on all of them at
    about the same time, so the median over such collectives of how far two ranks' ends lie apart is
    how far their clocks do. No rank can end before another has launched, which bounds the
    difference from both sides; an estimate beyond these bounds (a script may ask for a result long
    after it is there) is put on them. Ends are the completion where it was seen, else the end of
    the first wait. The error is how unevenly collectives end: about a message's latency.
    """
    ends = _ends(trace)
    offsets: list[float | None] = [0.0] + [None] * (trace.n_ranks - 1)
    while True:
        links = [
            (len(common), -known, rank, offset)
            for rank in range(trace.n_ranks)
            if offsets[rank] is None
            for known, offset in enumerate(offsets)
            if offset is not None and (common := set(ends[rank]) & set(ends[known]))
        ]
        if not links:
            return tuple(offsets)
        _, known, rank, offset = max(links)
        offsets[rank] = offset + _apart_s(ends[-known], ends[rank])


def _ends(trace: Communication) -> list[dict[int, tuple[float, float]]]:
    """For each rank, launch and end of each collective that needs every rank, by the meeting's
    number, on the rank's own clock.
    """
    waits = first_waits(trace)
    found: list[dict[int, tuple[float, float]]] = [{} for _ in trace.steps]
    for number, meeting in enumerate(trace.meetings):
        if meeting.kind in MESSAGES or meeting.kind in ROOTED or not meeting.complete:
            continue
        for rank, index, launch in meeting.launches:
            begin_s = trace.steps[rank][index].begin_s
            end_s = (
                waits.get((rank, launch.call)) if launch.done_s is None else begin_s + launch.done_s
            )
            if end_s is not None:
                found[rank][number] = (begin_s + launch.at_s, end_s)
    return found


def first_waits(trace: Communication) -> dict[tuple[int, int], float]:
    """The end of the first wait for each call, by rank and call, on the rank's own clock."""
    waits: dict[tuple[int, int], float] = {}
    for rank, steps in enumerate(trace.steps):
        for step in steps:
            for event in step.waits:
                waits.setdefault((rank, event.call), step.begin_s + event.until_s)
    return waits


def _apart_s(known: dict[int, tuple[float, float]], other: dict[int, tuple[float, float]]) -> float:
    pairs = [(known[number], other[number]) for number in set(known) & set(other)]
    estimate = statistics.median(a[1] - b[1] for a, b in pairs)
    least, most = max(a[0] - b[1] for a, b in pairs), min(a[1] - b[0] for a, b in pairs)
    return (least + most) / 2 if least > most else min(max(estimate, least), most)

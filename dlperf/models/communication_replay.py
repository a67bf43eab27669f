"""The time lines of several ranks that compute and meet in collectives and messages: a discrete
replay.

Each rank is one thread that goes through a program of its own: it computes, launches an operation,
waits for one. Trace-driven prediction of the whole of a distributed run is
Choi et al. 2020 (section 3: recorded calls over a model of another network, computation kept as it
was); what they add to it, a constant overhead, is for the caller to measure.

- An operation starts once its last rank has launched it. Operations of one queue (a process group)
  start in the order of their launches, at most `n_lanes` of them at a time (gloo: two worker
  threads a group; NCCL: one stream). One without a queue, a message, waits for its two ranks alone.
- Operations that share a port (the link of a node) share its rate: each wants it for `link_frac` of
  its time alone, and where the sum passes 1 all slow down alike. An operation is as slow as at the
  most crowded of its ports.
- A port that has rested stores as many seconds, up to the bucket's, and spares them the next
  operation, if all of its ports do (a token bucket: clouds and tc shape traffic so). An operation
  ends so much sooner, up to its own `spared_s`.
- An operation takes `stolen_s` of processor time over its life from each of its ranks, though never
  more than half of a rank's processor in all, as the scheduler is fair. It waits for its threads to
  be run: it takes `delayed_s` longer where all its ranks compute all the time, and a share of that
  where some do.

Assumptions: an operation ends on all its ranks at once (a rank that leaves a ring or a tree early
is kept too long), and its progress is even. Events are exact; nothing is stepped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dlperf.core.errors import DlperfError
from dlperf.models.arguments import FROM_ONE, Checked

GLOO_LANES, NCCL_LANES = 2, 1
LEAST_COMPUTE_RATE = 0.5
"""The share of its processor that a computing rank keeps, whatever runs beside it."""


@dataclass(frozen=True, slots=True)
class Collective(Checked):
    """A collective alone, over a link that has not rested: its `duration_s`, the fraction of it in
    which it needs the link, the processor time that it takes from its rank, how much longer it
    takes beside computing, and how much of it a rested link can spare it. Raises DlperfError for a
    negative value.
    """

    duration_s: float
    link_frac: float = 1.0
    stolen_s: float = 0.0
    delayed_s: float = 0.0
    spared_s: float = 0.0

    def after_rest(self, stored_s: float) -> tuple[Collective, float]:
        """The collective over a link that has stored so much, and how much of that it uses.

        >>> Collective(4.0, 0.75, spared_s=2.0).after_rest(1.0)
        (Collective(duration_s=3.0, link_frac=0.6666666666666666, stolen_s=0.0, delayed_s=0.0,
        spared_s=0.0), 1.0)
        """
        used_s = min(self.spared_s, stored_s, self.link_frac * self.duration_s)
        if not used_s:
            return self, 0.0
        duration_s, needed_s = self.duration_s - used_s, self.link_frac * self.duration_s - used_s
        return (
            Collective(
                duration_s,
                needed_s / duration_s if duration_s else 0.0,
                self.stolen_s,
                self.delayed_s,
            ),
            used_s,
        )


@dataclass(frozen=True, slots=True)
class Compute:
    """The rank's thread computes for so long, if nothing disturbs it."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective or message of several ranks: what it takes alone, the queue it stands in (None:
    none), the ports it occupies (None: one of each rank's own).

    Raises DlperfError without a rank, or with one twice.
    """

    ranks: tuple[int, ...]
    collective: Collective
    queue: int | None = None
    ports: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise DlperfError(
                f"an operation has the ranks {self.ranks}; it needs one at least, each once"
            )


@dataclass(frozen=True, slots=True)
class Launch:
    """The rank issues its part of an operation (a place in the list of operations) and goes on."""

    operation: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits until the operation has ended."""

    operation: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The rank notes the time."""


Task = Compute | Launch | Wait | Mark


@dataclass(frozen=True, slots=True)
class Span:
    """When an operation was launched by the last of its ranks, when it started and when it ended;
    seconds, NaN where that never happened.
    """

    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank stood still for an operation; seconds."""

    operation: int
    from_s: float
    until_s: float

    def for_ranks_s(self, span: Span) -> float:
        """The part of it until the operation's last rank had launched it; the rest is
        communication.
        """
        return max(0.0, min(self.until_s, span.ready_s) - self.from_s)


@dataclass(frozen=True)
class Replayed:
    """What came of the programs: the end of each, the times of its marks and its waits (those that
    took time), and the span of each operation; seconds.
    """

    ends_s: tuple[float, ...]
    marks_s: tuple[tuple[float, ...], ...]
    waits: tuple[tuple[Waiting, ...], ...]
    spans: tuple[Span, ...]


def covered_s(spans_s: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Seconds between `begin_s` and `end_s` that at least one of the spans covers."""
    covered, until = 0.0, begin_s
    for start, end in sorted(spans_s):
        covered += max(0.0, min(end, end_s) - max(start, until))
        until = max(until, min(end, end_s))
    return covered


@dataclass
class _Rank:
    program: Sequence[Task]
    left_s: float
    launched: set[int] = field(default_factory=set)
    marks: list[float] = field(default_factory=list)
    waits: list[Waiting] = field(default_factory=list)
    waits_for: int = -1
    end_s: float = math.nan


@dataclass(eq=False)
class _State:
    operation: Operation
    collective: Collective
    ports: tuple[int, ...]
    missing: set[int]
    ready_s: float = math.nan
    start_s: float = math.nan
    end_s: float = math.nan
    left_frac: float = 1.0
    whole_s: float = math.nan

    @property
    def has_ended(self) -> bool:
        return not math.isnan(self.end_s)


class _Replay:
    def __init__(
        self,
        programs: Sequence[Sequence[Task]],
        operations: Sequence[Operation],
        n_lanes: int,
        starts_s: Sequence[float],
        bucket_s: float,
        rested_s: float,
    ) -> None:
        self.n_lanes, self.bucket_s = n_lanes, bucket_s
        self.now_s = min(starts_s, default=0.0)
        # who starts later computes until then, undisturbed by any rule: nothing of its own can be
        # running
        self.ranks = [
            _Rank(program, start_s - self.now_s) for program, start_s in zip(programs, starts_s)
        ]
        self.runs = [self.run(who, rank) for who, rank in enumerate(self.ranks)]
        self.states = [
            _State(
                one,
                one.collective,
                one.ranks if one.ports is None else tuple(dict.fromkeys(one.ports)),
                set(one.ranks),
            )
            for one in operations
        ]
        self.stored_s = dict.fromkeys(
            (port for state in self.states for port in state.ports), min(bucket_s, rested_s)
        )
        self.queues: dict[int | None, list[_State]] = defaultdict(list)
        self.running: list[_State] = []
        self.n_ended = 0

    def run(self, who: int, rank: _Rank) -> Iterator[None]:
        """Go through a rank's program. Yields while the rank computes or waits."""
        while rank.left_s > 0:
            yield
        for task in rank.program:
            if isinstance(task, Compute):
                if not 0 <= task.seconds < math.inf:
                    raise DlperfError(f"work is {task.seconds} s; it must be finite and at least 0")
                rank.left_s = task.seconds
                while rank.left_s > 0:
                    yield
            elif isinstance(task, Launch):
                rank.launched.add(task.operation)
                self.launch(self.states[task.operation], who, task.operation)
            elif isinstance(task, Mark):
                rank.marks.append(self.now_s)
            else:
                if task.operation not in rank.launched:
                    raise DlperfError(
                        f"rank {who} waits for operation {task.operation}, which it did not launch"
                    )
                from_s, rank.waits_for = self.now_s, task.operation
                while not self.states[task.operation].has_ended:
                    yield
                if self.now_s > from_s:
                    rank.waits.append(Waiting(task.operation, from_s, self.now_s))
        rank.end_s = self.now_s

    def launch(self, state: _State, who: int, number: int) -> None:
        ranks, queue = state.operation.ranks, state.operation.queue
        if who not in state.missing:
            raise DlperfError(
                f"rank {who} launches operation {number}, whose ranks are {ranks}, once too often"
            )
        if queue is not None and len(state.missing) == len(ranks):
            self.queues[queue].append(state)
        state.missing.discard(who)
        if state.missing:
            return
        state.ready_s = self.now_s
        if queue is None:
            self.start(state)
        self.fill_lanes(queue)

    def fill_lanes(self, queue: int | None) -> None:
        """Start what is among the first of its queue and has been launched by all. What takes no
        time leaves at once and makes room.
        """
        n_ended = -1
        while n_ended != self.n_ended:
            n_ended = self.n_ended
            for state in self.queues[queue][: self.n_lanes]:
                if not state.missing and math.isnan(state.start_s):
                    self.start(state)

    def start(self, state: _State) -> None:
        state.start_s = self.now_s
        state.collective, used_s = state.collective.after_rest(
            min((self.stored_s[port] for port in state.ports), default=0.0)
        )
        for port in state.ports:
            self.stored_s[port] -= used_s
        if state.collective.duration_s > 0:
            self.running.append(state)
        else:
            self.end(state)

    def end(self, state: _State) -> None:
        state.end_s = self.now_s
        self.n_ended += 1
        if state.operation.queue is not None:
            self.queues[state.operation.queue].remove(state)

    def advance(self) -> bool:
        """Go on to the next event; False where nothing goes on any more."""
        n_ended = -1
        while n_ended != self.n_ended:  # what takes no time lets other ranks go on
            n_ended = self.n_ended
            for run in self.runs:
                next(run, None)
        computing = [rank.left_s > 0 for rank in self.ranks]
        if not self.running and not any(computing):
            return False
        crowd: dict[int, float] = defaultdict(float)
        for state in self.running:
            for port in state.ports:
                crowd[port] += state.collective.link_frac
        stolen = [0.0] * len(self.ranks)
        for state in self.running:
            one, members = state.collective, state.operation.ranks
            sharing = max([1.0, *(crowd[port] for port in state.ports)])
            computing_frac = sum(computing[who] for who in members) / len(members)
            state.whole_s = sharing * one.duration_s + one.delayed_s * computing_frac
            for who in members:
                stolen[who] += one.stolen_s / state.whole_s
        busy = [
            (rank, max(LEAST_COMPUTE_RATE, 1.0 - lost))
            for rank, lost, is_busy in zip(self.ranks, stolen, computing)
            if is_busy
        ]
        lasts = [state.left_frac * state.whole_s for state in self.running]
        step_s = min([*lasts, *(rank.left_s / rate for rank, rate in busy)])
        self.now_s += step_s
        for port in self.stored_s if self.bucket_s else ():
            if port not in crowd:
                self.stored_s[port] = min(self.bucket_s, self.stored_s[port] + step_s)
        for rank, rate in busy:
            rank.left_s = 0.0 if rank.left_s / rate <= step_s else rank.left_s - step_s * rate
        ended = [state for state, last_s in zip(self.running, lasts) if last_s <= step_s]
        self.running = [state for state in self.running if state not in ended]
        for state in self.running:
            state.left_frac -= step_s / state.whole_s
        for state in ended:
            self.end(state)
        for queue in {state.operation.queue for state in ended}:
            self.fill_lanes(queue)
        return True

    def check_ended(self) -> None:
        """Raises DlperfError where a rank waits for ever, naming for whom."""
        for who, rank in enumerate(self.ranks):
            if math.isnan(rank.end_s):
                missing = sorted(self.states[rank.waits_for].missing)
                ranks = f"rank{'s' * (len(missing) != 1)} {', '.join(map(str, missing))}"
                reason = (
                    f"{ranks} never launch"
                    if missing
                    else "waits behind one that is not launched by all its ranks"
                )
                raise DlperfError(
                    f"rank {who} waits for ever for operation {rank.waits_for}, which {reason}"
                )


def replay(
    programs: Sequence[Sequence[Task]],
    operations: Sequence[Operation],
    n_lanes: int = GLOO_LANES,
    starts_s: Sequence[float] | None = None,
    bucket_s: float = 0.0,
    rested_s: float = math.inf,
) -> Replayed:
    """The time lines of the programs, one for each rank; `starts_s` are the times when they start
    (0). Ports store up to `bucket_s`, and have rested for `rested_s` when the programs begin.

    What is still running when all have ended goes on in the background, and delays nothing. Raises
    DlperfError for fewer than one lane, negative work, waiting for what a rank did not launch, and
    ranks that wait for ever for one another.

    >>> both = Operation((0, 1), Collective(2.0))
    >>> # the first waits 3 s for the second, then both 2 s
    >>> programs = [[Compute(seconds), Launch(0), Wait(0)] for seconds in (1.0, 4.0)]
    >>> replay(programs, [both]).ends_s
    (6.0, 6.0)
    """
    FROM_ONE.check("n_lanes", n_lanes)
    starts = [0.0] * len(programs) if starts_s is None else list(starts_s)
    if len(starts) != len(programs):
        raise DlperfError(
            f"starts_s has {len(starts)} times for {len(programs)} programs; it has one for each"
        )
    for number, one in enumerate(operations):
        if not set(one.ranks) <= set(range(len(programs))):
            raise DlperfError(
                f"operation {number} has the ranks {one.ranks}, and there are {len(programs)}"
                " programs"
            )
    line = _Replay(programs, operations, n_lanes, starts, bucket_s, rested_s)
    while line.advance():
        pass
    line.check_ended()
    return Replayed(
        tuple(rank.end_s for rank in line.ranks),
        tuple(tuple(rank.marks) for rank in line.ranks),
        tuple(tuple(rank.waits) for rank in line.ranks),
        tuple(Span(state.ready_s, state.start_s, state.end_s) for state in line.states),
    )

"""The time line of a rank that computes while collectives run in the background.

A rank is one thread that goes through a program: it computes, launches a collective, waits for one.
Collectives start in the order in which they were launched, at most `n_lanes` at a time (gloo has
two worker threads a process group, ProcessGroupGloo.cpp; a NCCL communicator one stream).

- Collectives that run at once share the link: each wants it for `link_frac` of its time alone, and
  where the sum passes 1 all slow down alike.
- A collective takes processor time from the computation: `stolen_s` seconds over its whole life.
  More than half of the processor it does not get, as the scheduler is fair.
- A collective waits for its threads to be run while the rank computes: it takes `delayed_s` longer
  where the rank computes all the time.
- A link that has rested may let the next bytes pass at once (a token bucket: clouds and tc shape
  traffic so). While nothing uses it, it stores as many seconds as pass, up to the bucket's; a
  collective that starts ends so much sooner, up to its own `spared_s`.

Assumptions: all ranks are alike and start together (put the slowest rank's times in), and a
collective's progress is even. Errs low where ranks drift apart within a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dlperf.core.errors import DlperfError
from dlperf.models.arguments import check_fields
from dlperf.models.buckets import Bucket

GLOO_LANES, NCCL_LANES = 2, 1
LEAST_COMPUTE_RATE = 0.5
"""The share of its processor that a computing rank keeps, whatever runs beside it."""


@dataclass(frozen=True, slots=True)
class Collective:
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

    def __post_init__(self) -> None:
        check_fields(self)

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
class Launch:
    """The rank puts a collective into the queue, under a name, and goes on."""

    name: int
    collective: Collective


@dataclass(frozen=True, slots=True)
class Wait:
    """The rank waits until the collective of this name has ended."""

    name: int


Task = Compute | Launch | Wait


@dataclass(frozen=True)
class TimeLine:
    """What came of a program: its end, the start and end of each collective (in the order of their
    launch) and how long the rank waited; seconds.
    """

    total_s: float
    waited_s: float
    spans_s: tuple[tuple[float, float], ...]

    @property
    def communication_s(self) -> float:
        """How long at least one collective was running."""
        busy, until = 0.0, 0.0
        for start, end in sorted(self.spans_s):
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy


@dataclass
class _Running:
    place: int
    collective: Collective
    left_frac: float = 1.0


@dataclass
class _Rank:
    """The state of a simulation; :meth:`advance` moves time to the next event."""

    n_lanes: int
    bucket_s: float
    stored_s: float
    now_s: float = 0.0
    waited_s: float = 0.0
    running: list[_Running] = field(default_factory=list)
    queue: list[_Running] = field(default_factory=list)
    spans: list[list[float]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)

    def launch(self, name: int, collective: Collective) -> None:
        self.places[name] = len(self.spans)
        self.spans.append([math.nan, math.nan])
        self.queue.append(_Running(self.places[name], collective))
        self._fill_lanes()

    def _fill_lanes(self) -> None:
        while self.queue and len(self.running) < self.n_lanes:
            one = self.queue.pop(0)
            self.spans[one.place][0] = self.now_s
            one.collective, used_s = one.collective.after_rest(self.stored_s)
            self.stored_s -= used_s
            if one.collective.duration_s > 0:
                self.running.append(one)
            else:
                self.spans[one.place][1] = self.now_s

    def has_ended(self, name: int) -> bool:
        if name not in self.places:
            raise DlperfError(f"the program waits for collective {name}, which it did not launch")
        return not math.isnan(self.spans[self.places[name]][1])

    def advance(self, work_s: float | None) -> float:
        """Go on to the next event: the work (None: the rank waits) or a collective ends. Returns
        the work that is left.
        """
        sharing = max(1.0, math.fsum(one.collective.link_frac for one in self.running))
        whole_s = [
            sharing * one.collective.duration_s
            + (0.0 if work_s is None else one.collective.delayed_s)
            for one in self.running
        ]
        rate = max(
            LEAST_COMPUTE_RATE,
            1.0
            - math.fsum(
                one.collective.stolen_s / whole for one, whole in zip(self.running, whole_s)
            ),
        )
        ends = [one.left_frac * whole for one, whole in zip(self.running, whole_s)]
        step_s = min([*ends, *([] if work_s is None else [work_s / rate])])
        self.now_s += step_s
        if not self.running:
            self.stored_s = min(self.bucket_s, self.stored_s + step_s)
        still = []
        for one, end_s, whole in zip(self.running, ends, whole_s):
            if end_s <= step_s:
                self.spans[one.place][1] = self.now_s
            else:
                one.left_frac -= step_s / whole
                still.append(one)
        self.running = still
        self._fill_lanes()
        if work_s is None:
            self.waited_s += step_s
            return 0.0
        return 0.0 if work_s / rate <= step_s else work_s - step_s * rate


def simulate(
    program: Iterable[Task],
    n_lanes: int = GLOO_LANES,
    bucket_s: float = 0.0,
    rested_s: float = math.inf,
) -> TimeLine:
    """The time line of a program. What is still running at its end goes on in the background and
    delays nothing.

    The link stores up to `bucket_s`, and has rested for `rested_s` when the program begins. Raises
    DlperfError for fewer than one lane, negative work, or waiting for what was never launched.

    >>> simulate([Compute(1.0), Launch(0, Collective(2.0)), Compute(1.5), Wait(0)]).total_s
    3.0
    """
    if n_lanes < 1:
        raise DlperfError(f"n_lanes is {n_lanes}; it must be at least 1")
    rank = _Rank(n_lanes, bucket_s, min(bucket_s, rested_s))
    for task in program:
        if isinstance(task, Launch):
            rank.launch(task.name, task.collective)
        elif isinstance(task, Wait):
            while not rank.has_ended(task.name):
                rank.advance(None)
        else:
            if not 0 <= task.seconds < math.inf:
                raise DlperfError(f"work is {task.seconds} s; it must be finite and at least 0")
            left_s = task.seconds
            while left_s > 0:
                left_s = rank.advance(left_s)
    end_s = rank.now_s
    while rank.running:
        rank.advance(None)
    return TimeLine(
        end_s,
        rank.waited_s - (rank.now_s - end_s),
        tuple((start, end) for start, end in rank.spans),
    )


@dataclass(frozen=True)
class Computation:
    """What a rank computes in a step, seconds.

    `before_s` until the backward begins; `arrivals`: (seconds of the backward's computing,
    parameter), in order, as gradients are accumulated; `backward_s` all of the backward; `after_s`
    the optimizer. `copy_in_s` and `copy_out_s`, by parameter, are DDP's: dividing a gradient by the
    number of ranks into its bucket, and putting the sum back. `hook_s` is what DDP does besides at
    each gradient that it sends, `sync_s` once in each step that sends.
    """

    before_s: float
    arrivals: tuple[tuple[float, int], ...]
    backward_s: float
    after_s: float
    copy_in_s: tuple[float, ...] = ()
    copy_out_s: tuple[float, ...] = ()
    hook_s: float = 0.0
    sync_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """The step without synchronisation."""
        return self.before_s + self.backward_s + self.after_s

    def scaled(self, factor: float) -> Computation:
        """The same, `factor` times as slow."""
        return Computation(
            factor * self.before_s,
            tuple((factor * at, index) for at, index in self.arrivals),
            factor * self.backward_s,
            factor * self.after_s,
            tuple(factor * s for s in self.copy_in_s),
            tuple(factor * s for s in self.copy_out_s),
            factor * self.hook_s,
            factor * self.sync_s,
        )


@dataclass(frozen=True)
class Synchronisation:
    """What DDP sends in a step: `buckets` in the order of their reduction with the all-reduce of
    each, the broadcasts of buffers before the forward (`buffers`), what follows the last bucket
    (`closing`: the map of used parameters), the copies of buffers into and out of their broadcast.
    """

    buckets: tuple[Bucket, ...]
    reductions: tuple[Collective, ...]
    buffers: tuple[Collective, ...] = ()
    buffer_copies_s: float = 0.0
    closing: tuple[Collective, ...] = ()
    unused: tuple[int, ...] = ()
    delayed: bool = False
    """All copies and reductions after the backward: the first iteration of a static graph."""

    def __post_init__(self) -> None:
        if len(self.buckets) != len(self.reductions):
            raise DlperfError(
                f"{len(self.buckets)} buckets have {len(self.reductions)} reductions; each has one"
            )


def ddp_program(computation: Computation, sync: Synchronisation) -> list[Task]:
    """What a rank of DistributedDataParallel does in one step, in order (reducer.cpp).

    Buffers are broadcast and waited for before the forward. An arriving gradient is copied into its
    bucket; a bucket that is full is reduced once all earlier ones have been launched. After the
    backward each bucket is waited for and copied out, in order, and then the optimizer steps.
    """
    names = iter(range(10**9))
    program: list[Task] = (
        [Compute(computation.sync_s + sync.buffer_copies_s)] if sync.buckets else []
    )
    sent = [(next(names), collective) for collective in sync.buffers]
    program += [Launch(name, collective) for name, collective in sent]
    program += [Wait(name) for name, _ in sent]
    program.append(Compute(computation.before_s))
    in_s, out_s = _by_index(computation.copy_in_s), _by_index(computation.copy_out_s)
    reducing = [next(names) for _ in sync.buckets]
    waiting = [set(bucket) for bucket in sync.buckets]
    n_launched, done_s = 0, 0.0
    arrivals = [(at, index) for at, index in computation.arrivals]
    if sync.delayed:
        arrivals = [(computation.backward_s, index) for _, index in arrivals]
    if arrivals and sync.unused:  # they are marked when the first gradient arrives
        arrivals = [*((arrivals[0][0], index) for index in sync.unused), *arrivals]
    for at, index in arrivals:
        program.append(
            Compute(
                max(0.0, at - done_s)
                + (in_s.get(index, 0.0) + computation.hook_s if sync.buckets else 0.0)
            )
        )
        done_s = max(done_s, at)
        for bucket in waiting:
            bucket.discard(index)
        while n_launched < len(waiting) and not waiting[n_launched]:
            program.append(Launch(reducing[n_launched], sync.reductions[n_launched]))
            n_launched += 1
    if n_launched < len(waiting):
        raise DlperfError(
            f"bucket {n_launched} waits for parameters that get no gradient:"
            f" {sorted(waiting[n_launched])}"
        )
    closing = [(next(names), collective) for collective in sync.closing]
    program += [Launch(name, collective) for name, collective in closing]
    program.append(Compute(max(0.0, computation.backward_s - done_s)))
    for name, bucket_indices in zip(reducing, sync.buckets):
        program += [
            Wait(name),
            Compute(math.fsum(out_s.get(index, 0.0) for index in bucket_indices)),
        ]
    program += [Wait(name) for name, _ in closing]
    program.append(Compute(computation.after_s))
    return program


def _by_index(seconds: Sequence[float]) -> Mapping[int, float]:
    return dict(enumerate(seconds))

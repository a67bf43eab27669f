"""The time line of a rank that computes while collectives run in the background.

A rank is one thread that goes through a program: it computes, launches a collective, waits for one.
Collectives start in the order in which they were launched, at most `n_lanes` at a time (gloo has
two worker threads a process group, ProcessGroupGloo.cpp; a NCCL communicator one stream).

The rules are those of :mod:`dlperf.models.communication_replay` with one rank and one link.

Assumptions: all ranks are alike and start together (put the slowest rank's times in), and a
collective's progress is even. Errs low where ranks drift apart within a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.models.buckets import Bucket
from dlperf.models.communication_replay import (
    GLOO_LANES,
    Collective,
    Compute,
    Mark,
    Operation,
    Wait,
    Waiting,
    covered_s,
    replay,
)
from dlperf.models.communication_replay import Launch as LaunchOperation


@dataclass(frozen=True, slots=True)
class Launch(LaunchOperation):
    """The rank puts a collective into the queue and goes on; collectives are numbered from 0 in
    the order of their launch.
    """

    collective: Collective


Task = Compute | Launch | Wait | Mark


@dataclass(frozen=True)
class TimeLine:
    """What came of a program: its end, the start and end of each collective (in the order of their
    launch) and how long the rank waited; its waits, and the times of its marks; seconds.
    """

    total_s: float
    waited_s: float
    spans_s: tuple[tuple[float, float], ...]
    waits: tuple[Waiting, ...] = ()
    marks_s: tuple[float, ...] = ()

    @property
    def communication_s(self) -> float:
        """How long at least one collective was running."""
        return covered_s(self.spans_s, 0.0, math.inf)


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
    tasks = list(program)
    operations = [
        Operation((0,), task.collective, queue=0) for task in tasks if isinstance(task, Launch)
    ]
    line = replay([tasks], operations, n_lanes, bucket_s=bucket_s, rested_s=rested_s)
    return TimeLine(
        line.ends_s[0],
        math.fsum(wait.until_s - wait.from_s for wait in line.waits[0]),
        tuple((span.start_s, span.end_s) for span in line.spans),
        line.waits[0],
        line.marks_s[0],
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
    backward each bucket is waited for and copied out, in order, and then the optimizer steps. Marks
    stand where the backward begins and ends, its waits included.
    """
    first, end = len(sync.buffers), len(sync.buffers) + len(sync.buckets)
    program: list[Task] = (
        [Compute(computation.sync_s + sync.buffer_copies_s)] if sync.buckets else []
    )
    program += [Launch(number, one) for number, one in enumerate(sync.buffers)]
    program += [*map(Wait, range(first)), Compute(computation.before_s), Mark()]
    in_s, out_s = dict(enumerate(computation.copy_in_s)), dict(enumerate(computation.copy_out_s))
    waiting = [set(bucket) for bucket in sync.buckets]
    n_launched, done_s = 0, 0.0
    arrivals = [
        (computation.backward_s if sync.delayed else at, index)
        for at, index in computation.arrivals
    ]
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
        for missing in waiting:
            missing.discard(index)
        while n_launched < len(waiting) and not waiting[n_launched]:
            program.append(Launch(first + n_launched, sync.reductions[n_launched]))
            n_launched += 1
    if n_launched < len(waiting):
        raise DlperfError(
            f"bucket {n_launched} waits for parameters that get no gradient:"
            f" {sorted(waiting[n_launched])}"
        )
    program += [Launch(number, one) for number, one in enumerate(sync.closing, end)]
    program.append(Compute(max(0.0, computation.backward_s - done_s)))
    for number, bucket in enumerate(sync.buckets, first):
        out_of_bucket_s = math.fsum(out_s.get(index, 0.0) for index in bucket)
        program += [Wait(number), Compute(out_of_bucket_s)]
    closing = map(Wait, range(end, end + len(sync.closing)))
    return [*program, *closing, Mark(), Compute(computation.after_s)]

"""Recordings of runs that never were: programs replayed over a made-up cluster by the model, and
written down as a trace as their ranks' clocks would have it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dlperf.core.cluster import Cluster
from dlperf.core.communication import Communication, Event, RankStep
from dlperf.distributed.collective_costs import CallCosts, interference_of
from dlperf.distributed.collective_times import LinkFactors
from dlperf.distributed.programs import Call
from dlperf.models.communication_replay import Compute, Launch, Mark, Replayed, Task, Wait, replay

Programs = Sequence[Sequence[Task]]
"""For each rank its tasks; a mark ends each step."""


def call(
    kind: str = "all_reduce", n_bytes: int = 2**20, ranks: tuple[int, ...] = (0, 1), group: int = 0
) -> Call:
    return Call(kind, n_bytes, ranks, group, 0.0, 0.0)


def run(
    programs: Programs,
    calls: Sequence[Call],
    cluster: Cluster,
    hosts: Sequence[str],
    factors: LinkFactors = LinkFactors(),
) -> Replayed:
    """What the programs really take over a cluster."""
    nodes = [list(dict.fromkeys(hosts)).index(host) for host in hosts]
    costs = CallCosts(cluster, calls, nodes, factors, interference_of(cluster, 1))
    return replay(
        [[Mark(), *program] for program in programs], [costs.operation(one) for one in calls]
    )


def steps_s(line: Replayed) -> list[list[float]]:
    """By rank, then step."""
    return [[b - a for a, b in pairwise(marks)] for marks in line.marks_s]


def record(
    programs: Programs,
    calls: Sequence[Call],
    cluster: Cluster,
    hosts: Sequence[str],
    groups: Sequence[tuple[int, ...]] = (),
    seen: bool = True,
    origins: Sequence[float] = (),
    firsts: Sequence[int] = (),
    extra_s: float = 0.0,
) -> Communication:
    """The trace of the run; `extra_s` is an overhead that every step has and no program tells of,
    spent when its last wait is over.
    """
    plain = [[task for one in program for task in (one, Mark())] for program in programs]
    line = run(plain, calls, cluster, hosts)
    steps = []
    for rank, program in enumerate(programs):
        origin = origins[rank] if origins else 0.0
        times = line.marks_s[rank]
        begin, late, events, own = times[0], 0.0, [], []
        mark = 0
        for task in program:
            at, until = times[mark], times[mark + 1]
            mark += 2 if isinstance(task, Mark) else 1
            if isinstance(task, (Launch, Wait)):
                one = calls[task.operation]
                op, number = (
                    ("launch", task.operation)
                    if isinstance(task, Launch)
                    else ("wait", task.operation)
                )
                kind = "recv" if one.kind == "send" and rank == one.ranks[1] else one.kind
                peer = (
                    next(other for other in one.ranks if other != rank)
                    if one.kind == "send"
                    else one.ranks[0]
                    if one.kind == "broadcast"
                    else None
                )
                done = line.spans[number].end_s - begin if seen and op == "launch" else None
                events.append(
                    Event(
                        op,
                        number,
                        kind,
                        one.n_bytes,
                        one.group,
                        at - begin,
                        until - begin,
                        peer,
                        done,
                    )
                )
            elif isinstance(task, Mark):
                own.append(
                    RankStep(
                        origin + begin + late,
                        origin + at + late + extra_s,
                        tuple(events),
                        len(own) in firsts,
                    )
                )
                late += extra_s
                begin, events = at, []
            else:
                assert isinstance(task, Compute)
        steps.append(tuple(own))
    world = tuple(range(len(programs)))
    return Communication(tuple(hosts), (world, *groups), tuple(steps), "train.py", "gloo")

"""The oracles of :mod:`dlperf.models.overlap` and :mod:`dlperf.models.communication_replay`: the
same ranks followed in small steps of time.

Their rules are written down once more, and no event is in sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlperf.models import communication_replay
from dlperf.models.communication_replay import Collective, Compute, Wait
from dlperf.models.overlap import Launch, Task


def rested(one: Collective, stored_s: float) -> tuple[Collective, float]:
    """A collective over a link that has stored so much, and what the link keeps."""
    needed_s = one.duration_s * one.link_frac
    spared_s = min(stored_s, one.spared_s, needed_s)
    left_s = one.duration_s - spared_s
    return (
        replace(
            one, duration_s=left_s, link_frac=(needed_s - spared_s) / left_s if left_s > 0 else 0.0
        ),
        stored_s - spared_s,
    )


def step_through(
    program: Sequence[Task], n_lanes: int, dt_s: float, bucket_s: float = 0.0
) -> float:
    """Seconds until the program has ended, good to about `dt_s` for each task and collective."""
    stored_s, begun = bucket_s, set[int]()
    done = {
        task.operation: 0.0 for task in program if isinstance(task, Launch)
    }  # fraction, by name
    collectives = {task.operation: task.collective for task in program if isinstance(task, Launch)}
    launched: list[int] = []
    clock, index = 0.0, 0
    worked = 0.0
    while True:
        while index < len(program):
            task = program[index]
            if isinstance(task, Launch):
                launched.append(task.operation)
            elif isinstance(task, Wait):
                if done[task.operation] < 1 and collectives[task.operation].duration_s > 0:
                    break
            elif worked < task.seconds:
                break
            else:
                worked -= task.seconds  # what a step computed too much belongs to the next task
                if index + 1 < len(program) and not isinstance(program[index + 1], Compute):
                    worked = 0.0
            index += 1
        if index == len(program):
            return clock
        computing = isinstance(program[index], Compute)
        open_ones = [
            name for name in launched if done[name] < 1 and collectives[name].duration_s > 0
        ][:n_lanes]
        for name in open_ones:
            if name not in begun:
                collectives[name], stored_s = rested(collectives[name], stored_s)
                begun.add(name)
        if not open_ones:
            stored_s = min(bucket_s, stored_s + dt_s)
        wanted = sum(collectives[name].link_frac for name in open_ones)
        crowd = wanted if wanted > 1 else 1.0
        lost = 0.0
        for name in open_ones:
            one = collectives[name]
            whole_s = one.duration_s * crowd + (one.delayed_s if computing else 0.0)
            done[name] += dt_s / whole_s
            lost += one.stolen_s / whole_s
        if computing:
            worked += dt_s * max(0.5, 1 - lost)
        clock += dt_s


def step_ranks_through(
    programs: Sequence[Sequence[communication_replay.Task]],
    operations: Sequence[communication_replay.Operation],
    n_lanes: int,
    dt_s: float,
    bucket_s: float = 0.0,
) -> list[float]:
    """Seconds until each rank's program has ended, good to about `dt_s` for each task and operation
    of all ranks.
    """
    operations, begun = list(operations), set[int]()
    stored_s = {
        port: bucket_s
        for one in operations
        for port in (one.ranks if one.ports is None else one.ports)
    }
    indices, worked, ends = [0] * len(programs), [0.0] * len(programs), [0.0] * len(programs)
    done = [0.0] * len(operations)
    came: list[set[int]] = [set() for _ in operations]
    order: list[int] = []  # operations as their first rank launches them
    clock = 0.0

    def is_over(number: int) -> bool:
        return number in running_or_over and (
            done[number] >= 1 or operations[number].collective.duration_s == 0
        )

    while True:
        running_or_over: set[int] = set()
        moved = True
        while moved:
            moved = False
            for number in order:
                if number in running_or_over or len(came[number]) < len(operations[number].ranks):
                    continue
                queue = operations[number].queue
                before = [
                    other
                    for other in order[: order.index(number)]
                    if queue is not None and operations[other].queue == queue and not is_over(other)
                ]
                if done[number] > 0 or len(before) < n_lanes:
                    running_or_over.add(number)
                    moved = True
            for rank, program in enumerate(programs):
                while indices[rank] < len(program):
                    task = program[indices[rank]]
                    if isinstance(task, communication_replay.Launch):
                        came[task.operation].add(rank)
                        if task.operation not in order:
                            order.append(task.operation)
                    elif isinstance(task, communication_replay.Wait):
                        if not is_over(task.operation):
                            break
                    elif isinstance(task, communication_replay.Compute):
                        if worked[rank] < task.seconds:
                            break
                        worked[rank] = 0.0
                    indices[rank] += 1
                    ends[rank] = clock
                    moved = True
        if all(index == len(program) for index, program in zip(indices, programs)):
            return ends
        busy = [
            index < len(program) and isinstance(program[index], communication_replay.Compute)
            for index, program in zip(indices, programs)
        ]
        for number in running_or_over - begun:
            ports = (
                operations[number].ranks
                if operations[number].ports is None
                else operations[number].ports
            )
            least_s = min(stored_s[port] for port in ports)
            own, kept_s = rested(operations[number].collective, least_s)
            operations[number] = replace(operations[number], collective=own)
            stored_s.update((port, stored_s[port] - (least_s - kept_s)) for port in ports)
        begun |= running_or_over
        open_ones = [number for number in running_or_over if not is_over(number)]
        resting = set(stored_s) - {
            port
            for number in open_ones
            for port in operations[number].ports or operations[number].ranks
        }
        stored_s.update((port, min(bucket_s, stored_s[port] + dt_s)) for port in resting)
        lost = [0.0] * len(programs)
        for number in open_ones:
            own = operations[number]
            crowd = 1.0
            for port in own.ranks if own.ports is None else own.ports:
                users = (
                    operations[other]
                    for other in open_ones
                    if port in (operations[other].ports or operations[other].ranks)
                )
                crowd = max(crowd, sum(other.collective.link_frac for other in users))
            whole_s = own.collective.duration_s * crowd + own.collective.delayed_s * sum(
                busy[rank] for rank in own.ranks
            ) / len(own.ranks)
            done[number] += dt_s / whole_s
            for rank in own.ranks:
                lost[rank] += own.collective.stolen_s / whole_s
        for rank, is_busy in enumerate(busy):
            if is_busy:
                worked[rank] += dt_s * max(0.5, 1 - lost[rank])
        clock += dt_s

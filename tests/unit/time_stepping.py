"""The oracle of :mod:`dlperf.laws.overlap`: the same rank followed in small steps of time, with its rules written down once more and no event in sight."""
from __future__ import annotations

from collections.abc import Sequence

from dlperf.laws.overlap import Compute, Launch, Task, Wait


def step_through(program: Sequence[Task], n_lanes: int, dt_s: float) -> float:
    """Seconds until the program has ended, good to about `dt_s` for each task and collective."""
    done = {task.name: 0.0 for task in program if isinstance(task, Launch)}  # fraction, by name
    collectives = {task.name: task.collective for task in program if isinstance(task, Launch)}
    launched: list[int] = []
    clock, place = 0.0, 0
    worked = 0.0
    while True:
        while place < len(program):
            task = program[place]
            if isinstance(task, Launch):
                launched.append(task.name)
            elif isinstance(task, Wait):
                if done[task.name] < 1 and collectives[task.name].duration_s > 0:
                    break
            elif worked < task.seconds:
                break
            else:
                worked -= task.seconds  # what a step computed too much belongs to the next task
                if place + 1 < len(program) and not isinstance(program[place + 1], Compute):
                    worked = 0.0
            place += 1
        if place == len(program):
            return clock
        computing = isinstance(program[place], Compute)
        open_ones = [name for name in launched if done[name] < 1 and collectives[name].duration_s > 0][:n_lanes]
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

"""Re-times some kernels of a machine file, and reads the machine's state meanwhile: how far its
speed has moved since the file was made.

``python -m dlperf.microbench.refresh`` is the fresh process that measures; :func:`measure` starts
it.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlperf.core import host
from dlperf.core.child_process import Child
from dlperf.core.clock import MAX_EXTENSION, Clock, CoreSpeed, Repeats, Sampler
from dlperf.core.conversion import convert
from dlperf.core.machine import Kernel, Machine
from dlperf.core.state import LEAST, Reading, reading_of
from dlperf.core.state_probe import StateProbe
from dlperf.microbench.job import Say, do_job

N_ANCHORS = 6
"""Kernels of a family that are timed again."""
ROUNDS = 3
LONGEST_S = 0.02
"""Longest anchor: all of them are to be timed in some seconds."""
BUDGET_S = 7.0
"""How long the rounds may take; beside them are some 4 s for torch's import and readings."""
_SETTLE_S = 0.2
_PROBES = 16
"""Rounds of the probe in a reading."""
_REPEATS = Repeats(sample_s=1e-3, n_samples=1)


@dataclass(frozen=True)
class Retimed:
    """A kernel of the machine file, timed again: its least sample in seconds, and the least
    readings (their quantile :data:`dlperf.core.state.LEAST`) before and after the round in which it
    was taken.
    """

    kernel: Kernel
    seconds: float
    readings: tuple[Reading, Reading]


def anchors(machine: Machine, threads: int) -> tuple[Kernel, ...]:
    """Kernels of each family at quantiles of their length, the shortest and the longest included.

    Families take turns, so that each has some where time runs out.
    """
    chosen = []
    for family in machine.families(threads):
        kernels = sorted(machine.family(family, threads), key=lambda kernel: kernel.seconds)
        short = [kernel for kernel in kernels if kernel.seconds <= LONGEST_S] or kernels[:1]
        last, n = len(short) - 1, min(N_ANCHORS, len(short))
        places = [round(last * number / max(1, n - 1)) for number in range(n)]
        chosen += list(enumerate(short[place] for place in places))
    return tuple(kernel for _, kernel in sorted(chosen, key=lambda pair: pair[0]))


def measure(
    machine: Machine, threads: int, budget_s: float = BUDGET_S
) -> tuple[tuple[Retimed, ...], tuple[Reading, ...]]:
    """The anchors of a machine file timed again in a process of their own, and the readings before,
    between and after. Raises WorkFailed where that fails.
    """
    from dlperf.microbench.worker import environment

    kernels = anchors(machine, threads)
    part = Machine(machine.cpu, kernels=kernels).to_json()
    job = {"threads": threads, "budget_s": budget_s, "part": part}
    variables = {**os.environ, **environment(threads)}
    with Child("dlperf.microbench.refresh", environment=variables) as process:
        found = process.answer(job)
    readings, least = (
        tuple(convert(row, Reading) for row in found[name]) for name in ("readings", "least")
    )
    retimed = tuple(
        Retimed(kernels[index], seconds, (least[number], least[number + 1]))
        for index, seconds, number in found["rows"]
    )
    return retimed, readings


# -- the process -----------------------------------------------------------------------------------


def run(job: dict[str, Any], say: Say) -> None:
    """Time the anchors of a job."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    speed = CoreSpeed(back_off_s=1.0)
    speed.settle(_SETTLE_S)
    kernels = Machine.from_json(job["part"]).kernels
    probe = StateProbe(host.this_cpu())
    say(time_anchors(kernels, probe, Clock(speed.now, speed).within(job["budget_s"])))


def time_anchors(kernels: Sequence[Kernel], probe: StateProbe, clock: Clock) -> dict[str, Any]:
    """A sample of each kernel in each round, as many as there is time for; ``readings`` before each
    round and after the last, and the ``least`` of each. The ``rows`` hold a kernel's index, its
    least undisturbed sample in seconds (its least one where all are disturbed), and the number of
    that sample's round.
    """
    from dlperf.microbench.operator_benchmark import Unplayable, build

    readings = [probe.rounds(_PROBES)]
    taken: dict[int, list[tuple[bool, float, int]]] = defaultdict(list)
    for number in range(ROUNDS):
        for index, kernel in enumerate(kernels):
            if clock.is_late:
                break
            try:
                call = build(kernel.op)
            except (Unplayable, MemoryError):
                continue
            call()
            sampler = Sampler(call, _REPEATS, clock)
            sampler.take(MAX_EXTENSION)
            ((seconds, is_disturbed),) = sampler.pairs
            taken[index].append((is_disturbed, seconds, number))
        readings.append(probe.rounds(_PROBES))
        if clock.is_late:
            break
    rows = [[index, *min(samples)[1:]] for index, samples in sorted(taken.items())]
    return {
        "readings": [vars(reading_of(probes)) for probes in readings],
        "least": [vars(reading_of(probes, LEAST)) for probes in readings],
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(do_job(run))

"""Allocator simulation of a trace: page faults of a steady step, peak memory, and whose memory
each tensor takes over.

glibc (malloc/malloc.c, 2.36): a request of at least ``mmap_threshold`` bytes is a mapping of its
own, every page of it faulted in anew; freeing one raises the threshold to its size (up to 32 MiB)
and ``trim_threshold`` to twice that. Other requests, and such as a free piece can serve, come from
the heap: best fit among free chunks, which coalesce, else the top. The top is given back to the
system once it exceeds ``trim_threshold``, and faults again when it grows. Whether it can be is
decided by small requests, which keep free chunks apart
(:mod:`dlperf.predictors.allocator.small_requests`). Other policies stand in
:mod:`dlperf.predictors.allocator.policies`. Assumed: one arena, every chunk is touched whole, the
step's loss is let go at its end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlperf.core.clock import quantile
from dlperf.core.trace import Op, Trace
from dlperf.predictors.allocator.memory_map import Owners
from dlperf.predictors.allocator.policies import policy_of
from dlperf.predictors.allocator.process import Script, StepPages
from dlperf.predictors.allocator.stages import Scratch

N_PROCESSES = 15
"""Processes simulated where memory is given back, each with other small requests before it."""
N_REQUESTS, N_REQUESTS_OTHERWISE = 2_500_000, 500_000
"""About as many requests for memory are simulated under the default policy and under another, which
is mostly for a recommendation; about 3 us each (AMD EPYC of Zen 4). Where a process has many, there
are fewer processes.
"""


@dataclass(frozen=True)
class AllocatorSimulation:
    """A steady step as malloc sees it.

    `steps` are steps of processes, without the quarter of fewest faults and that of most: few
    processes have several times as many as others. `faults` are first touches of 4 KiB pages by op,
    on average over them, `huge_faults` those of 2 MiB pages; `released[i]` are pages of 4 KiB given
    back before op i, the last entry those at the step's end. `predecessors[s]` are the owners whose
    memory storage `s` took over in the process of median faults, `predecessors_of_blocks[i]` those
    of the blocks that op i allocates within itself. `peak_bytes` is the most that was resident in
    the first steps, in the median of the processes. Of first touches in a step
    `faults_of_a_step` are the mean, between the 10 and 90 % quantiles of all processes' median
    steps.
    """

    faults: tuple[float, ...]
    predecessors: tuple[Owners, ...]
    predecessors_of_blocks: tuple[Owners, ...]
    peak_bytes: int
    faults_of_a_step: tuple[float, float, float]
    huge_faults: tuple[float, ...] = ()
    released: tuple[float, ...] = ()
    steps: tuple[StepPages, ...] = ()


def simulate(
    trace: Trace,
    scratch_bytes: Callable[[Op], Scratch],
    policy: str = "default",
    kept: Sequence[tuple[int, int]] = (),
    lasting: Sequence[tuple[int, int]] = (),
) -> AllocatorSimulation:
    """Simulate a trace's allocations over steps of several processes; the last steps count.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout
    conversions, workspaces); `kept` are (storage, bytes) of memory whose size no recording could
    know, `lasting` (op, bytes) of blocks that are made once for good. What is given back, and so
    faults again, is decided by small requests between the tensors
    (:mod:`dlperf.predictors.allocator.small_requests`). It differs from process to process and from
    step to step.

    Raises DlperfError for an unknown policy.
    """
    chosen = policy_of(policy)
    script = Script(trace, scratch_bytes, kept, lasting)
    varies = not (chosen.purges or chosen.keeps)
    runs = [script.run(chosen)]
    if varies:
        n_requests = N_REQUESTS if policy == "default" else N_REQUESTS_OTHERWISE
        n_processes = min(N_PROCESSES, n_requests // runs[0].n_requests)
        runs += [script.run(chosen, seed) for seed in range(1, n_processes)]
        runs.sort(key=lambda run: run.usual_faults)
    peak_bytes = round(statistics.median(run.peak_bytes for run in runs))
    by_process = [run.usual_faults for run in runs]
    likely = runs[(len(runs) - 1) // 2]
    n_apart = len(runs) // 4
    steps = tuple(step for run in runs[n_apart : len(runs) - n_apart] for step in run.steps)
    if chosen.keeps:  # the memory that small requests keep apart is there from some step on
        steps = (min(steps, key=lambda step: sum(step.faults)),)
        by_process = [sum(steps[0].faults)]
    faults = _means([step.faults for step in steps])
    return AllocatorSimulation(
        faults,
        likely.predecessors,
        likely.predecessors_of_blocks,
        peak_bytes,
        (
            quantile(by_process, 0.1),
            math.fsum(faults),
            quantile(by_process, 0.9),
        ),
        _means([step.huge_faults for step in steps]),
        _means([step.released for step in steps]),
        steps,
    )


def _means(rows: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Mean of every column."""
    return tuple(sum(column) / len(rows) for column in zip(*rows))

"""Allocator simulation of a trace: page faults of a steady step, peak memory, and whose memory
each tensor takes over.

glibc (malloc/malloc.c, 2.36): a request of at least ``mmap_threshold`` bytes is a mapping of its
own, every page of it faulted in anew; freeing one raises the threshold to its size (up to 32 MiB)
and ``trim_threshold`` to twice that. Other requests, and such as a free piece can serve, come from
the heap: best fit among free chunks, which coalesce, else the top. The top is given back to the
system once it exceeds ``trim_threshold``, and faults again when it grows. Other policies stand in
:mod:`dlperf.predictors.allocator.policies`. Assumed: one arena, every chunk is touched whole; bins'
order among equal sizes is not modelled, chunks below 1 KiB only by what they keep apart.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlperf.core.trace import Op, Trace
from dlperf.predictors.allocator.heap import NONE, PAGE_BYTES, Heap, Jemalloc, allocator_of
from dlperf.predictors.allocator.policies import POLICIES, Policy, policy_of
from dlperf.predictors.allocator.steps import Scratch, Script, StepPages

__all__ = [
    "N_PROCESSES",
    "PAGE_BYTES",
    "POLICIES",
    "AllocatorSimulation",
    "Heap",
    "Jemalloc",
    "Policy",
    "Scratch",
    "StepPages",
    "allocator_of",
    "policy_of",
    "simulate",
]

N_PROCESSES = 8
"""Processes simulated where memory is given back, each with small blocks in other places."""


@dataclass(frozen=True)
class AllocatorSimulation:
    """A steady step as malloc sees it.

    `steps` are steps of several processes. `faults` are first touches of 4 KiB pages by op, on
    average over them, `huge_faults` those of 2 MiB pages; `released[i]` are pages of 4 KiB given
    back before op i, the last entry those at the step's end, `released_late` those that small
    blocks gave back as they went, on average too. `predecessor[s]` is the storage whose memory
    storage `s` took over in the process of median faults (-1: memory fresh from the system, or
    never used before). `peak_bytes` is the most that was resident in the first steps, in the median
    of the processes. Between `fewest_faults` and `most_faults` lie eight of ten steps.
    """

    faults: tuple[float, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int
    fewest_faults: float
    most_faults: float
    huge_faults: tuple[float, ...] = ()
    released: tuple[float, ...] = ()
    released_late: float = 0.0
    steps: tuple[StepPages, ...] = ()


def simulate(
    trace: Trace,
    scratch_bytes: Callable[[Op], Scratch],
    policy: str = "default",
    kept: Sequence[tuple[int, int]] = (),
) -> AllocatorSimulation:
    """Simulate a trace's allocations over steps of several processes; the last steps count.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout
    conversions, workspaces); `kept` are (storage, bytes) of memory whose size no recording could
    know. What is given back, and so faults again, is decided by the small blocks that lie between
    the tensors (:class:`dlperf.predictors.allocator.heap.Heap`), which differ from process to
    process and step to step.

    Raises DlperfError for an unknown policy.
    """
    chosen = policy_of(policy)
    script = Script(trace, scratch_bytes, kept)
    runs = [script.run(chosen, seed) for seed in range(1 if chosen.purges else N_PROCESSES)]
    peak_bytes = round(statistics.median(run.peak_bytes for run in runs))
    if (
        chosen.keeps
    ):  # what small blocks keep apart takes more memory, which is there from some step on
        runs = [script.run(chosen, small=NONE)]
    totals = [statistics.median(sum(step.faults) for step in run.steps) for run in runs]
    likely = runs[totals.index(statistics.median_low(totals))]
    steps = tuple(step for run in runs for step in run.steps)
    fewest, most = np.quantile([sum(step.faults) for step in steps], (0.1, 0.9)).tolist()
    return AllocatorSimulation(
        _means([step.faults for step in steps]),
        likely.predecessor,
        peak_bytes,
        fewest,
        most,
        _means([step.huge_faults for step in steps]),
        _means([step.released for step in steps]),
        statistics.fmean(step.released_late for step in steps),
        steps,
    )


def _means(rows: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Mean of every column."""
    return tuple(sum(column) / len(rows) for column in zip(*rows))

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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from dlperf.core.clock import quantile
from dlperf.core.trace import Op, Trace
from dlperf.core.units import KIB
from dlperf.predictors.allocator.caching import CachingAllocator
from dlperf.predictors.allocator.heap import (
    NONE,
    PAGE_BYTES,
    Heap,
    Jemalloc,
    SmallBlocks,
    allocator_of,
)
from dlperf.predictors.allocator.policies import POLICIES, Policy, policy_of

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

Scratch = tuple[tuple[int, ...], ...]
"""Blocks that an op allocates and frees within itself, in stages: those of a stage live together, a
result is allocated while the first stage does.
"""

SMALL_BYTES = 1024
"""Storages below are left out."""
N_STEPS, N_COUNTED = 8, 4
"""Steps run and the last of them, which are counted; the thresholds settle within the first few."""
PEAK_STEPS = 3
"""Steps whose peak counts."""
IMPORTED_BYTES = 943 * KIB
"""The largest mapping that a process has freed which has imported torch (2.13, Python 3.11): from
there glibc's thresholds start.
"""
USUAL = SmallBlocks(taken=0.4, freed_with_the_block=0.5, lasting=0.3)
"""Chosen among a few values by the faults, the memory and the layers' times of random networks
(benchmarks/page_faults.py draws such).
"""


@dataclass(frozen=True)
class StepPages:
    """One step of a process by op: faults of 4 KiB and 2 MiB pages, and pages given back before it
    (`released` has a place more, for the step's end).

    `released_late` are pages given back as the small blocks between tensors went, some time in the
    backward.
    """

    faults: tuple[int, ...]
    huge_faults: tuple[int, ...]
    released: tuple[int, ...]
    released_late: int


@dataclass(frozen=True)
class Process:
    """The counted steps of one process; `predecessor` (of the last of them) and `peak_bytes` as in
    :class:`AllocatorSimulation`.
    """

    steps: tuple[StepPages, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int


class Script:
    """A trace's allocations by op, ready to be run by any allocator. `kept` are (storage, bytes) of
    memory whose size no recording could know. Storages below `smallest_bytes` are left out.
    `lasting` are (op, bytes) of blocks that the first run of an op makes and nothing frees.
    """

    def __init__(
        self,
        trace: Trace,
        scratch_bytes: Callable[[Op], Scratch],
        kept: Sequence[tuple[int, int]] = (),
        smallest_bytes: int = SMALL_BYTES,
        lasting: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        for index, n_bytes in kept:
            self._sizes[index] = max(self._sizes[index], n_bytes)
        self._n_ops = len(trace.ops)
        self._before: list[int] = []  # there before the first step and after the last
        # Made in the first step alone, before an op.
        self._once: dict[int, list[int]] = defaultdict(list)
        self._born: dict[int, list[int]] = defaultdict(list)
        self._dying: dict[int, list[int]] = defaultdict(list)
        # The optimizer's state comes with gradients alive and activations gone.
        first_optimizer = next(
            (index for index, op in enumerate(trace.ops) if op.phase == "optimizer"), self._n_ops
        )
        for index, storage in enumerate(trace.storages):
            if self._sizes[index] < smallest_bytes:
                continue
            if storage.born >= 0:
                self._born[storage.born].append(index)
            elif storage.kind == "optimizer":
                self._once[first_optimizer].append(index)
            elif storage.dies is None:
                self._before.append(index)
            if storage.dies is not None:
                self._dying[storage.dies].append(index)
        for index, n_bytes in lasting:
            self._once[index].append(len(self._sizes))
            self._sizes.append(n_bytes)
        self._scratch = {index: scratch_bytes(op) for index, op in enumerate(trace.ops)}
        found = {index for index, stages in self._scratch.items() if stages}
        found |= {*self._born, *self._dying, *self._once}
        self._active = sorted(index for index in found if index < self._n_ops)
        self._survivors = _survivors(trace)

    def run(self, policy: Policy, seed: int = 0, small: SmallBlocks = USUAL) -> Process:
        """Run the steps in a fresh process; `seed` decides where there are small blocks."""
        heap = allocator_of(policy, small, seed)
        if policy.adapts:
            heap.free(heap.allocate(IMPORTED_BYTES)[0])
        return self.run_on(heap)

    def run_on(
        self,
        heap: Heap | Jemalloc | CachingAllocator,
        watch: Callable[[int, Collection[int]], None] | None = None,
    ) -> Process:
        """Run the steps on a fresh allocator. `watch` gets each op that allocates or frees, and the
        storages that live while it runs.
        """
        address = {index: heap.allocate(self._sizes[index])[0] for index in self._before}
        last_at: dict[int, int] = {}
        predecessor = [-1] * len(self._sizes)
        peak = heap.resident_bytes
        steps = []

        def released_by(storages: Iterable[int]) -> int:
            before = heap.released_pages
            for storage in storages:
                if storage in address:
                    heap.free(address.pop(storage))
            return heap.released_pages - before

        for step in range(N_STEPS):
            faults, huge_faults = [0] * self._n_ops, [0] * self._n_ops
            released = [0] * (self._n_ops + 1)
            for index in self._active:
                released[index] += released_by(self._dying[index])
                n_huge, n_released = heap.huge_faults, heap.released_pages
                if step == 0 and index in self._once:
                    address |= {
                        one: heap.allocate(self._sizes[one])[0] for one in self._once[index]
                    }
                for number, stage in enumerate(self._scratch[index] or ((),)):
                    blocks = [heap.allocate(n_bytes) for n_bytes in stage]
                    faults[index] += sum(n_faults for _, n_faults in blocks)
                    for storage in self._born[index] if number == 0 else ():
                        # It may have outlived the last step: no trace shows who frees it.
                        released_by((storage,))
                        at, n_faults = heap.allocate(self._sizes[storage])
                        address[storage] = at
                        faults[index] += n_faults
                        predecessor[storage] = -1 if n_faults else last_at.get(at, -1)
                        last_at[at] = storage
                    if watch is not None:
                        watch(index, address.keys())
                    if step < PEAK_STEPS:
                        peak = max(peak, heap.resident_bytes)
                    for at, _ in blocks:
                        heap.free(at)
                huge_faults[index] = heap.huge_faults - n_huge
                released[index + 1] += heap.released_pages - n_released  # by the op itself
            released[self._n_ops] += released_by(self._dying[self._n_ops])
            n_released = heap.released_pages
            heap.end_step()
            late = heap.released_pages - n_released
            steps.append(StepPages(tuple(faults), tuple(huge_faults), tuple(released), late))
            # Survivors of this step are what the next step expects from before it.
            for new, old in self._survivors.items():
                if new in address and old not in address:
                    address[old] = address.pop(new)
        return Process(tuple(steps[-N_COUNTED:]), tuple(predecessor), peak)


def _survivors(trace: Trace) -> dict[int, int]:
    """Storages that outlive the step, each matched to one of equal size that was there before and
    dies in it (a gradient to the last one).
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    matched = {}
    for index, storage in enumerate(trace.storages):
        if storage.born < 0 and storage.dies is not None:
            waiting[storage.nbytes].append(index)
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.dies is None and waiting[storage.nbytes]:
            matched[index] = waiting[storage.nbytes].pop(0)
    return matched


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
    fewest, most = (quantile([sum(step.faults) for step in steps], part) for part in (0.1, 0.9))
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

"""A trace's allocations, run through an allocator for some steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dlperf.core.trace import Op, Trace
from dlperf.core.units import KIB
from dlperf.predictors.allocator.heap import SmallBlocks, allocator_of
from dlperf.predictors.allocator.policies import Policy

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
    :class:`dlperf.predictors.allocator.simulation.AllocatorSimulation`.
    """

    steps: tuple[StepPages, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int


class Script:
    """A trace's allocations by op, ready to be run under any policy by any process. `kept` are
    (storage, bytes) of memory whose size no recording could know.
    """

    def __init__(
        self,
        trace: Trace,
        scratch_bytes: Callable[[Op], Scratch],
        kept: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        for index, n_bytes in kept:
            self._sizes[index] = max(self._sizes[index], n_bytes)
        self._n_ops = len(trace.ops)
        self._before: list[int] = []  # there before the first step and after the last
        # Made by the first optimizer step, with gradients alive and activations gone.
        self._late: list[int] = []
        self._born: dict[int, list[int]] = defaultdict(list)
        self._dying: dict[int, list[int]] = defaultdict(list)
        for index, storage in enumerate(trace.storages):
            if self._sizes[index] < SMALL_BYTES:
                continue
            if storage.born >= 0:
                self._born[storage.born].append(index)
            elif storage.kind == "optimizer":
                self._late.append(index)
            elif storage.dies is None:
                self._before.append(index)
            if storage.dies is not None:
                self._dying[storage.dies].append(index)
        self._first_optimizer = next(
            (index for index, op in enumerate(trace.ops) if op.phase == "optimizer"), self._n_ops
        )
        self._scratch = {index: scratch_bytes(op) for index, op in enumerate(trace.ops)}
        found = {index for index, stages in self._scratch.items() if stages}
        found |= {*self._born, *self._dying, self._first_optimizer}
        self._active = sorted(index for index in found if index < self._n_ops)
        self._survivors = _survivors(trace)

    def run(self, policy: Policy, seed: int = 0, small: SmallBlocks = USUAL) -> Process:
        """Run the steps in a fresh process; `seed` decides where there are small blocks."""
        heap = allocator_of(policy, small, seed)
        if policy.adapts:
            heap.free(heap.allocate(IMPORTED_BYTES)[0])
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
                if step == 0 and index == self._first_optimizer:
                    address |= {one: heap.allocate(self._sizes[one])[0] for one in self._late}
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

"""A trace's allocations as a list of events, run through an allocator for some steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlperf.core.trace import Op, Trace
from dlperf.core.units import KIB
from dlperf.predictors.allocator.heap import Heap, SmallBlocks, allocator_of
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
class Event:
    """What happens to memory at one op: storages that die before it, its scratch, storages that it
    makes.
    """

    index: int
    dying: tuple[int, ...]
    scratch: Scratch
    born: tuple[int, ...]


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


class _Counts:
    """One step's pages by op."""

    def __init__(self, n_ops: int) -> None:
        self.faults, self.huge_faults, self.released = [0] * n_ops, [0] * n_ops, [0] * (n_ops + 1)
        self.released_late = 0

    def as_step(self) -> StepPages:
        """As it is kept."""
        return StepPages(
            tuple(self.faults), tuple(self.huge_faults), tuple(self.released), self.released_late
        )


class Script:
    """A trace's events, ready to be run under any policy by any process. `kept` are (storage,
    bytes) of memory whose size no recording could know.
    """

    def __init__(
        self,
        trace: Trace,
        scratch_bytes: Callable[[Op], Scratch],
        kept: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        for place, n_bytes in kept:
            self._sizes[place] = max(self._sizes[place], n_bytes)
        self._n_ops = len(trace.ops)
        self._before: list[int] = []  # there before the first step and after the last
        self._late: list[
            int
        ] = []  # made by the first optimizer step, with gradients alive and activations gone
        born: dict[int, list[int]] = defaultdict(list)
        dying: dict[int, list[int]] = defaultdict(list)
        for index, storage in enumerate(trace.storages):
            if self._sizes[index] < SMALL_BYTES:
                continue
            if storage.born >= 0:
                born[storage.born].append(index)
            elif storage.kind == "optimizer":
                self._late.append(index)
            elif storage.dies is None:
                self._before.append(index)
            if storage.dies is not None:
                dying[storage.dies].append(index)
        self._first_optimizer = _first(trace, "optimizer", self._n_ops)
        self._events = tuple(_events(trace, born, dying, scratch_bytes, {self._first_optimizer}))
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
        counted: list[_Counts] = []
        for step in range(N_STEPS):
            counts = _Counts(self._n_ops)
            for event in self._events:
                index = event.index
                released = heap.released_pages
                for storage in event.dying:
                    if storage in address:
                        heap.free(address.pop(storage))
                counts.released[index] += heap.released_pages - released
                if index == self._n_ops:
                    break
                huge_faults, released = heap.huge_faults, heap.released_pages
                if step == 0 and index == self._first_optimizer:
                    for storage in self._late:
                        address[storage] = heap.allocate(self._sizes[storage])[0]
                for number, stage in enumerate(event.scratch):
                    blocks = []
                    for n_bytes in stage:
                        place, n_faults = heap.allocate(n_bytes)
                        blocks.append(place)
                        counts.faults[index] += n_faults
                    for storage in event.born if number == 0 else ():
                        if (
                            storage in address
                        ):  # outlived the last step although the trace does not say who frees it
                            heap.free(address.pop(storage))
                        place, n_faults = heap.allocate(self._sizes[storage])
                        address[storage] = place
                        counts.faults[index] += n_faults
                        predecessor[storage] = -1 if n_faults else last_at.get(place, -1)
                        last_at[place] = storage
                    if step < PEAK_STEPS:
                        peak = max(peak, heap.resident_bytes)
                    for place in blocks:
                        heap.free(place)
                counts.huge_faults[index] = heap.huge_faults - huge_faults
                counts.released[index + 1] += heap.released_pages - released  # by the op itself
            if isinstance(heap, Heap):
                released = heap.released_pages
                heap.end_step()
                counts.released_late = heap.released_pages - released
            counted.append(counts)
            # Survivors of this step stand where the next step expects what was there before it.
            for new, old in self._survivors.items():
                if new in address and old not in address:
                    address[old] = address.pop(new)
        return Process(
            tuple(counts.as_step() for counts in counted[-N_COUNTED:]), tuple(predecessor), peak
        )


def _first(trace: Trace, phase: str, default: int) -> int:
    return next((index for index, op in enumerate(trace.ops) if op.phase == phase), default)


def _events(
    trace: Trace,
    born: dict[int, list[int]],
    dying: dict[int, list[int]],
    scratch_bytes: Callable[[Op], Scratch],
    marks: set[int],
) -> Iterator[Event]:
    """The ops at which something happens, and the step's end."""
    for index, op in enumerate(trace.ops):
        scratch = scratch_bytes(op)
        if scratch or index in born or index in dying or index in marks:
            yield Event(
                index, tuple(dying.get(index, ())), scratch or ((),), tuple(born.get(index, ()))
            )
    yield Event(len(trace.ops), tuple(dying.get(len(trace.ops), ())), (), ())


def _survivors(trace: Trace) -> dict[int, int]:
    """Storages that outlive the step, each matched to one of equal size that was there before and
    dies in it (a gradient to the last one).
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if storage.born < 0 and storage.dies is not None:
            waiting[storage.nbytes].append(index)
    matched = {}
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.dies is None and waiting.get(storage.nbytes):
            matched[index] = waiting[storage.nbytes].pop(0)
    return matched

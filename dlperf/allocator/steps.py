"""A trace's allocations as a list of events, run through an allocator for some steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dlperf.allocator.heap import Allocator, Heap, allocator_of
from dlperf.allocator.policies import Policy
from dlperf.trace import Op, Trace

Scratch = tuple[tuple[int, ...], ...]
"""Blocks that an op allocates and frees within itself, in stages: those of a stage live together, a result is allocated while the first stage does."""

SMALL_BYTES = 1024
"""Storages below are left out."""
N_STEPS = 6
"""Steps run; the thresholds settle within the first few, the last two are counted."""
PEAK_STEPS = 3
"""Steps whose peak counts."""
SPREAD = 1.55
"""What a step's part of glibc's heap takes up, against the replay's: small blocks that no trace holds keep free pieces apart.

Chosen among a few values by the peaks of random networks (benchmarks/page_faults.py)."""


@dataclass(frozen=True)
class History:
    """What happened on the heap before and during the first steps.

    `holes` are free pieces, in bytes, that importing and building left below the top; where `pinned`, small blocks that stay came to lie above what
    a forward leaves to its backward. `weight` is the share of such processes.
    """

    holes: tuple[int, ...]
    pinned: bool
    weight: float


@dataclass(frozen=True)
class Event:
    """What happens to memory at one op: storages that die before it, its scratch, storages that it makes."""

    index: int
    dying: tuple[int, ...]
    scratch: Scratch
    born: tuple[int, ...]


@dataclass(frozen=True)
class Steady:
    """The last steps of one history: faults of 4 KiB and 2 MiB pages and pages given back, by op (`released` has a place more, for the step's end).

    `predecessor` and `peak_bytes` as in :class:`dlperf.allocator.Replay`.
    """

    faults: tuple[float, ...]
    huge_faults: tuple[float, ...]
    released: tuple[float, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int


class _Counts:
    """One step's pages by op."""

    def __init__(self, n_ops: int) -> None:
        self.faults, self.huge_faults, self.released = [0] * n_ops, [0] * n_ops, [0] * (n_ops + 1)


class Script:
    """A trace's events, ready to be run under any policy and history. `kept` are (storage, bytes) of memory whose size no recording could know."""

    def __init__(self, trace: Trace, scratch_bytes: Callable[[Op], Scratch], kept: Sequence[tuple[int, int]] = ()) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        for place, n_bytes in kept:
            self._sizes[place] = max(self._sizes[place], n_bytes)
        self._n_ops = len(trace.ops)
        self._before: list[int] = []  # there before the first step and after the last
        self._late: list[int] = []  # made by the first optimizer step, with gradients alive and activations gone
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
        self._first_backward = _first(trace, "backward", -1)
        self._events = tuple(_events(trace, born, dying, scratch_bytes, {self._first_optimizer, self._first_backward}))
        self._survivors = _survivors(trace)

    def run(self, policy: Policy, history: History) -> Steady:
        """Run the steps in a fresh process."""
        heap = allocator_of(policy)
        pinned = history.pinned and isinstance(heap, Heap)
        if isinstance(heap, Heap):
            heap.leave_holes(history.holes)
        resident_before = heap.resident_bytes
        address = {index: heap.allocate(self._sizes[index])[0] for index in self._before}
        last_at: dict[int, int] = {}
        predecessor = [-1] * len(self._sizes)
        lasting = peak = heap.resident_bytes
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
                if pinned and step == 1 and index == self._first_backward and isinstance(heap, Heap):
                    heap.pin()
                if step == 0 and index == self._first_optimizer:
                    for storage in self._late:
                        address[storage] = heap.allocate(self._sizes[storage])[0]
                        lasting += self._sizes[storage]
                for number, stage in enumerate(event.scratch):
                    blocks = []
                    for n_bytes in stage:
                        place, n_faults = heap.allocate(n_bytes)
                        blocks.append(place)
                        counts.faults[index] += n_faults
                    for storage in event.born if number == 0 else ():
                        if storage in address:  # outlived the last step although the trace does not say who frees it
                            heap.free(address.pop(storage))
                        place, n_faults = heap.allocate(self._sizes[storage])
                        address[storage] = place
                        counts.faults[index] += n_faults
                        predecessor[storage] = -1 if n_faults else last_at.get(place, -1)
                        last_at[place] = storage
                    if step < PEAK_STEPS:
                        peak = max(peak, _spread_bytes(heap, lasting))
                    for place in blocks:
                        heap.free(place)
                counts.huge_faults[index] = heap.huge_faults - huge_faults
                counts.released[index + 1] += heap.released_pages - released  # by the op itself
            counted.append(counts)
            # Survivors of this step stand where the next step expects what was there before it.
            for new, old in self._survivors.items():
                if new in address and old not in address:
                    address[old] = address.pop(new)
        before, last = counted[-2:]
        return Steady(
            _means(before.faults, last.faults), _means(before.huge_faults, last.huge_faults), _means(before.released, last.released),
            tuple(predecessor), peak - resident_before,
        )  # fmt: skip


def _spread_bytes(heap: Allocator, lasting: int) -> int:
    """What is resident, with the step's part of glibc's heap spread out; `lasting` bytes of it stay from step to step and lie close."""
    if not isinstance(heap, Heap):
        return heap.resident_bytes
    return heap.resident_bytes + round((SPREAD - 1.0) * max(0, heap.resident_bytes - heap.mapped_bytes - lasting))


def _first(trace: Trace, phase: str, default: int) -> int:
    return next((index for index, op in enumerate(trace.ops) if op.phase == phase), default)


def _events(
    trace: Trace, born: dict[int, list[int]], dying: dict[int, list[int]], scratch_bytes: Callable[[Op], Scratch], marks: set[int]
) -> Iterator[Event]:
    """The ops at which something happens, and the step's end."""
    for index, op in enumerate(trace.ops):
        scratch = scratch_bytes(op)
        if scratch or index in born or index in dying or index in marks:
            yield Event(index, tuple(dying.get(index, ())), scratch or ((),), tuple(born.get(index, ())))
    yield Event(len(trace.ops), tuple(dying.get(len(trace.ops), ())), (), ())


def _means(one: Sequence[int], other: Sequence[int]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(one, other))


def _survivors(trace: Trace) -> dict[int, int]:
    """Storages that outlive the step, each matched to one of equal size that was there before and dies in it (a gradient to the last one)."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if storage.born < 0 and storage.dies is not None:
            waiting[storage.nbytes].append(index)
    matched = {}
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.dies is None and waiting.get(storage.nbytes):
            matched[index] = waiting[storage.nbytes].pop(0)
    return matched

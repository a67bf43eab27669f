"""malloc's policy replayed on a trace: page faults of a steady step, peak memory, and whose memory each tensor takes over.

glibc (malloc/malloc.c, 2.35): a request of at least ``mmap_threshold`` bytes is a mapping of its own, every page of it
faulted in anew; freeing one raises the threshold to its size (up to 32 MiB) and ``trim_threshold`` to twice that.
Smaller requests come from the heap: best fit among free chunks, which coalesce, else the top. The top is given back to
the system once it exceeds ``trim_threshold``, and faults again when it grows. Assumed: one arena, every chunk is
touched whole; bins' order among equal sizes and chunks below 1 KiB are not modelled.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from dlperf.trace import Op, Trace
from dlperf.units import KIB, MIB

PAGE_BYTES = 4096
_MMAP_THRESHOLD, _MMAP_THRESHOLD_MAX = 128 * KIB, 32 * MIB
_TOP_PAD = 128 * KIB
_OVERHEAD = 64 + 48  # posix_memalign(64) asks for the alignment and a smallest chunk on top (c10/core/impl/alloc_cpu.cpp)
_SMALL = 1024
FREE_TOP_WEIGHT = 1 / 3
"""Weight of the history in which the heap's top is free, against that in which it is pinned."""
N_STEPS = 6
"""Steps replayed; the thresholds settle within the first few, the last two are counted."""


Scratch = tuple[tuple[int, ...], ...]
"""Blocks that an op allocates and frees within itself, in stages: those of a stage live together, a result is allocated while the first stage does."""


class Heap:
    """glibc's main arena, by addresses and page counts alone.

    >>> heap = Heap()
    >>> block, faults = heap.allocate(2**20)     # above 128 KiB: a mapping of its own, 256 pages and the alignment
    >>> faults
    257
    >>> heap.free(block)                         # raises the threshold above 1 MiB
    >>> heap.free(heap.allocate(2**20)[0]); heap.allocate(2**20)[1]    # now from the heap, whose pages stay
    0
    """

    def __init__(self) -> None:
        self.mmap_threshold, self.trim_threshold = _MMAP_THRESHOLD, _MMAP_THRESHOLD
        self._free_by_size: list[tuple[int, int]] = []  # (size, address), sorted
        self._free_at: dict[int, int] = {}  # address -> size
        self._free_end: dict[int, int] = {}  # end -> address
        self._used: dict[int, tuple[int, bool]] = {}  # address -> (size, is mapping)
        self._top = 0  # where the unused top begins
        self._break = 0  # where the heap ends
        self._touched = 0  # pages below are resident
        self._next_mapping = 1 << 46
        self.mapped_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the arena and the mappings hold in memory."""
        return self._touched + self.mapped_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a new block."""
        size = (max(n_bytes, 1) + _OVERHEAD + 15) // 16 * 16
        if size >= self.mmap_threshold:
            pages = math.ceil(size / PAGE_BYTES)
            address = self._next_mapping
            self._next_mapping += pages * PAGE_BYTES
            self._used[address] = (pages * PAGE_BYTES, True)
            self.mapped_bytes += pages * PAGE_BYTES
            return address, pages
        place = bisect.bisect_left(self._free_by_size, (size, -1))
        if place < len(self._free_by_size):
            found, address = self._free_by_size[place]
            self._take(address)
            if found - size >= 32:
                self._put(address + size, found - size)
                found = size
            self._used[address] = (found, False)
            return address, 0
        address = self._top
        self._top += size
        if self._top > self._break:
            self._break = math.ceil((self._top + _TOP_PAD) / PAGE_BYTES) * PAGE_BYTES
        new_touched = math.ceil(self._top / PAGE_BYTES) * PAGE_BYTES
        faults = max(0, new_touched - self._touched) // PAGE_BYTES
        self._touched = max(self._touched, new_touched)
        self._used[address] = (size, False)
        return address, faults

    def free(self, address: int) -> None:
        """Give a block back; may unmap it, or trim the top of the heap."""
        size, is_mapping = self._used.pop(address)
        if is_mapping:
            self.mapped_bytes -= size
            if self.mmap_threshold < size <= _MMAP_THRESHOLD_MAX:
                self.mmap_threshold, self.trim_threshold = size, 2 * size
            return
        before = self._free_end.get(address)
        if before is not None:
            size += self._free_at[before]
            self._take(before)
            address = before
        after = self._free_at.get(address + size)
        if after is not None:
            self._take(address + size)
            size += after
        if address + size == self._top:
            self._top = address
            if self._break - self._top >= self.trim_threshold:
                self._break = math.ceil((self._top + _TOP_PAD) / PAGE_BYTES) * PAGE_BYTES
                self._touched = min(self._touched, self._break)
        else:
            self._put(address, size)

    def pin(self) -> None:
        """Put a small block at the top that is never freed: below it the heap cannot be given back."""
        self._top += _OVERHEAD
        self._break = max(self._break, math.ceil(self._top / PAGE_BYTES) * PAGE_BYTES)

    def _put(self, address: int, size: int) -> None:
        bisect.insort(self._free_by_size, (size, address))
        self._free_at[address] = size
        self._free_end[address + size] = address

    def _take(self, address: int) -> None:
        size = self._free_at.pop(address)
        del self._free_end[address + size]
        del self._free_by_size[bisect.bisect_left(self._free_by_size, (size, address))]


@dataclass(frozen=True)
class Replay:
    """A steady step as malloc sees it.

    `faults` are page faults by op (means over histories, so not whole); `predecessor[s]` is the storage whose memory
    storage `s` took over (-1: memory fresh from the system, or never used before). `peak_bytes` is the most that was resident.
    `fewest_faults` and `most_faults` are totals a step over the replayed histories of a process.
    """

    faults: tuple[float, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int
    fewest_faults: int
    most_faults: int


def replay(trace: Trace, scratch_bytes: Callable[[Op], Scratch]) -> Replay:
    """Replay the trace's storages for some steps, and tell the last ones.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout conversions, workspaces).
    Two histories are replayed: in one nothing else lives on the heap, and its top is given back after each step; in the
    other small blocks that stay (the engine's, a cached primitive's, the script's own) came to lie at the top when it
    was highest, and what is below stays. Processes of the same step are seen in either state and between them: the
    faults are a mean of both, with the weight that counting the faults of random networks gave
    (benchmarks/page_faults.py), and what the histories differ by is uncertain.
    """
    free, pinned = (_run(trace, scratch_bytes, pinned) for pinned in (False, True))
    totals = [round(sum(run.faults)) for run in (free, pinned)]
    faults = tuple(FREE_TOP_WEIGHT * one + (1.0 - FREE_TOP_WEIGHT) * other for one, other in zip(free.faults, pinned.faults))
    return Replay(faults, free.predecessor, max(free.peak_bytes, pinned.peak_bytes), min(totals), max(totals))


def _run(trace: Trace, scratch_bytes: Callable[[Op], Scratch], pinned: bool) -> Replay:
    storages, n_ops = trace.storages, len(trace.ops)
    heap = Heap()
    address: dict[int, int] = {}
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    first_optimizer = next((index for index, op in enumerate(trace.ops) if op.phase == "optimizer"), n_ops)
    first_backward = next((index for index, op in enumerate(trace.ops) if op.phase == "backward"), -1)
    late: list[int] = []
    for index, storage in enumerate(storages):
        if storage.nbytes < _SMALL:
            continue
        if storage.born >= 0:
            born[storage.born].append(index)
        elif storage.kind == "optimizer":
            late.append(index)  # the first step makes it, with gradients alive and activations gone
        elif storage.dies is None:
            address[index] = heap.allocate(storage.nbytes)[0]
        if storage.dies is not None:
            dying[storage.dies].append(index)
    survivors = _survivors(trace)
    scratch = {index: stages for index, op in enumerate(trace.ops) if (stages := scratch_bytes(op))}
    last_at: dict[int, int] = {}
    predecessor = [-1] * len(storages)
    peak = 0
    counted: list[list[int]] = []
    for step in range(N_STEPS):
        faults = [0] * n_ops
        for index in range(n_ops + 1):
            for storage_index in dying.get(index, ()):
                if storage_index in address:
                    heap.free(address.pop(storage_index))
            if index == n_ops:
                break
            if pinned and step == 1 and index == first_backward:
                heap.pin()
            if step == 0 and index == first_optimizer:
                for storage_index in late:
                    address[storage_index] = heap.allocate(storages[storage_index].nbytes)[0]
            stages = scratch.get(index, ((),))
            for number, stage in enumerate(stages):
                blocks = []
                for n_bytes in stage:
                    place, n_faults = heap.allocate(n_bytes)
                    blocks.append(place)
                    faults[index] += n_faults
                for storage_index in born.get(index, ()) if number == 0 else ():
                    if storage_index in address:  # outlived the last step although the trace does not say who frees it
                        heap.free(address.pop(storage_index))
                    place, n_faults = heap.allocate(storages[storage_index].nbytes)
                    address[storage_index] = place
                    faults[index] += n_faults
                    predecessor[storage_index] = -1 if n_faults else last_at.get(place, -1)
                    last_at[place] = storage_index
                peak = max(peak, heap.resident_bytes)
                for place in blocks:
                    heap.free(place)
        counted.append(faults)
        if pinned and step < 2:
            heap.pin()
        # Survivors of this step stand where the next step expects what was there before it.
        for new, old in survivors.items():
            if new in address and old not in address:
                address[old] = address.pop(new)
    last = [sum(pair) // 2 for pair in zip(*counted[-2:])]
    return Replay(tuple(last), tuple(predecessor), peak, sum(last), sum(last))


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

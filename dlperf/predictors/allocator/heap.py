"""Allocators by addresses and page counts alone: glibc's heap with its mappings, jemalloc's
extents.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass
from typing import Protocol

from dlperf.core.units import KIB, MIB
from dlperf.predictors.allocator.policies import POLICIES, Policy

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB
_MAPPING_BYTES_MAX = 32 * MIB
_ALIGNMENT = 64  # c10/core/impl/alloc_cpu.cpp, through posix_memalign
_HEADER, _SMALLEST = 16, 32
_REUSED_BYTES = 1040  # chunks up to here are kept for small requests (tcache)
_CONSOLIDATED_BYTES = (
    64 * KIB
)  # FASTBIN_CONSOLIDATION_THRESHOLD: only freeing what grows to as much looks at the top
_FIRST_MAPPING = 1 << 46
_SLAB_BYTES = 16 * KIB


class Allocator(Protocol):
    """Something that hands out addresses and counts pages.

    `huge_faults` and `released_pages` are what has happened so far: first touches of pages of 2
    MiB, and pages of 4 KiB given back.
    """

    huge_faults: int
    released_pages: int

    @property
    def resident_bytes(self) -> int:
        """Bytes held in memory."""
        ...

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, faults of 4 KiB pages at first touch) of a new block."""
        ...

    def free(self, address: int) -> None:
        """Give a block back."""
        ...


class _Extents:
    """Free pieces of address space: the smallest that fits, and which of them touch each other."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, address), sorted
        self._at: dict[int, int] = {}  # address -> size
        self._ending: dict[int, int] = {}  # end -> address

    @property
    def n_bytes(self) -> int:
        return sum(self._at.values())

    def best(self, size: int) -> tuple[int, int] | None:
        """(address, size) of the smallest piece of at least `size`, the lowest of equal ones; taken
        out.
        """
        place = bisect.bisect_left(self._by_size, (size, -1))
        if place == len(self._by_size):
            return None
        found, address = self._by_size[place]
        self.take(address)
        return address, found

    def first(self, size: int) -> tuple[int, int] | None:
        """(address, size) of the lowest piece of at least `size`; taken out."""
        place = bisect.bisect_left(self._by_size, (size, -1))
        address = min((address for _, address in self._by_size[place:]), default=None)
        return None if address is None else (address, self.take(address))

    def put(self, address: int, size: int) -> None:
        bisect.insort(self._by_size, (size, address))
        self._at[address] = size
        self._ending[address + size] = address

    def take(self, address: int) -> int:
        size = self._at.pop(address)
        del self._ending[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        return size

    def merged(self, address: int, size: int) -> tuple[int, int]:
        """The piece together with its free neighbours, which are taken out."""
        before = self._ending.get(address)
        if before is not None:
            size += self.take(before)
            address = before
        if address + size in self._at:
            size += self.take(address + size)
        return address, size


@dataclass(frozen=True)
class SmallBlocks:
    """Shares of the remainders beside aligned blocks that small blocks take, of these that are
    freed with the block, and of the others that last from one step to the next.
    """

    taken: float
    freed_with_the_block: float
    lasting: float


NONE = SmallBlocks(0.0, 0.0, 0.0)


class Heap:
    """glibc's main arena.

    posix_memalign takes a chunk that is larger by the alignment and a smallest chunk, and frees
    what lies before and behind the aligned block. Such remainders serve small requests (a tensor's
    record, an autograd node, a library's descriptors), which no trace holds: `small` are the shares
    of them that do, and as long as they do, the block beside them, freed, does not grow together
    with what lies beyond, so that the next block of its size does not fit.

    >>> heap = Heap()
    >>> block, faults = heap.allocate(2**20)  # a mapping: 256 pages and the alignment
    >>> faults
    257
    >>> heap.free(block)                         # raises the threshold above 1 MiB
    >>> heap.free(heap.allocate(2**20)[0])  # from the heap, whose pages stay
    >>> heap.allocate(2**20)[1]
    0
    """

    def __init__(
        self, policy: Policy = POLICIES["default"], small: SmallBlocks = NONE, seed: int = 0
    ) -> None:
        self._policy = policy
        self.mmap_threshold, self.trim_threshold = policy.mapping_bytes, policy.trim_bytes
        self._free = _Extents()
        self._used: dict[
            int, tuple[int, int]
        ] = {}  # address -> (size of the chunk, bytes touched of a mapping of its own or 0)
        self._small, self._dice = small, random.Random(seed)
        self._beside: dict[
            int, list[tuple[int, int]]
        ] = {}  # by block, remainders beside it that small blocks took, (address, size)
        self._alone: list[tuple[int, int]] = []  # such whose block is gone
        self._top = 0  # where the unused top begins
        self._break = 0  # where the heap ends
        self._touched = 0  # pages below are resident
        self._advised: list[
            tuple[int, int]
        ] = []  # (begin, end) of the heap's parts that may have huge pages, sorted and apart
        self._next_mapping = _FIRST_MAPPING
        self.mapped_bytes = 0
        self.huge_faults = 0
        self.released_pages = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the arena and the mappings hold in memory."""
        return self._touched + self.mapped_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a new block."""
        huge = self._policy.huge_bytes is not None and n_bytes >= self._policy.huge_bytes
        alignment = PAGE_BYTES if huge else _ALIGNMENT
        size = _chunk_bytes(n_bytes)
        wanted, n_faults = _chunk_bytes(size + alignment + _SMALLEST), 0
        found = self._free.best(wanted)
        if found is not None:
            start, room = found
            if room - wanted >= _SMALLEST:
                self._free.put(start + wanted, room - wanted)
                room = wanted
        else:
            lacks = self._break - self._top < wanted + _SMALLEST
            if (
                lacks and wanted >= self.mmap_threshold
            ):  # only what neither a free chunk nor the top can serve is a mapping (sysmalloc)
                return self._map(wanted, n_bytes, alignment, huge)
            start, room = self._top, wanted
            self._top += wanted
            if lacks:
                self._break = (
                    math.ceil((self._top + self._policy.top_pad_bytes) / PAGE_BYTES) * PAGE_BYTES
                )
        address = math.ceil((start + _HEADER) / alignment) * alignment - _HEADER
        if 0 < address - start < _SMALLEST:
            address += alignment
        if huge:
            self._advise(address, n_bytes)
        if found is None:
            n_faults = self._touch(math.ceil(self._top / PAGE_BYTES) * PAGE_BYTES)
        behind = start + room - address - size
        self._used[address] = (size if behind > _SMALLEST else size + behind, 0)
        for remainder in (
            (start, address - start),
            (address + size, behind if behind > _SMALLEST else 0),
        ):
            if remainder[1]:
                self._leave(address, *remainder)
        return address, n_faults

    def _leave(self, block: int, address: int, size: int) -> None:
        """What is left beside an aligned block."""
        if size <= _REUSED_BYTES and self._dice.random() < self._small.taken:
            self._beside.setdefault(block, []).append((address, size))
        else:
            self._put(address, size)

    def free(self, address: int) -> None:
        """Give a block back; may unmap it, or trim the top of the heap."""
        size, touched = self._used.pop(address)
        if touched:
            self.mapped_bytes -= touched
            self.released_pages += touched // PAGE_BYTES
            if self._policy.adapts and self.mmap_threshold < size <= _MAPPING_BYTES_MAX:
                self.mmap_threshold, self.trim_threshold = size, 2 * size
            return
        for piece in self._beside.pop(address, ()):
            if self._dice.random() < self._small.freed_with_the_block:
                self._put(*piece)
            else:
                self._alone.append(piece)
        if self._put(address, size) >= _CONSOLIDATED_BYTES:
            self._trim()

    def end_step(self) -> None:
        """Most of the small blocks go."""
        for pieces in (self._alone, *self._beside.values()):
            held = pieces[:]
            pieces.clear()
            for piece in held:
                if self._dice.random() < self._small.lasting:
                    pieces.append(piece)
                elif self._put(*piece) >= _CONSOLIDATED_BYTES:
                    self._trim()

    def _put(self, address: int, size: int) -> int:
        """The size that a free piece has grown to, with its free neighbours or the top."""
        address, size = self._free.merged(address, size)
        if address + size != self._top:
            self._free.put(address, size)
            return size
        self._top = address
        return self._break - address

    def _trim(self) -> None:
        if self._break - self._top >= self.trim_threshold:
            self._break = (
                math.ceil((self._top + self._policy.top_pad_bytes) / PAGE_BYTES) * PAGE_BYTES
            )
            self.released_pages += max(0, self._touched - self._break) // PAGE_BYTES
            self._touched = min(self._touched, self._break)
            self._advised = [
                (begin, min(end, self._break))
                for begin, end in self._advised
                if begin < self._break
            ]

    def _map(self, size: int, n_bytes: int, alignment: int, huge: bool) -> tuple[int, int]:
        mapped = math.ceil((size + _HEADER // 2) / PAGE_BYTES) * PAGE_BYTES
        address = self._next_mapping
        self._next_mapping += mapped
        # What the alignment skips at the front is no part of the chunk, whose size becomes the
        # threshold when it is freed. With the alignment of a page the next request of the same size
        # exceeds that, and is a mapping once more.
        pages = math.ceil((alignment + n_bytes) / PAGE_BYTES)
        self._used[address] = (mapped - (alignment - _HEADER), pages * PAGE_BYTES)
        self.mapped_bytes += pages * PAGE_BYTES
        # Mappings begin at any page: one of n huge pages' size holds n - 1 whole ones.
        n_huge = max(0, round(size / HUGE_PAGE_BYTES) - 1) if huge else 0
        self.huge_faults += n_huge
        return address, pages - n_huge * (HUGE_PAGE_BYTES // PAGE_BYTES)

    def _advise(self, address: int, n_bytes: int) -> None:
        """madvise(MADV_HUGEPAGE) on a block's pages; advised ranges stay and merge."""
        begin = address // PAGE_BYTES * PAGE_BYTES + PAGE_BYTES
        end = begin + math.ceil(n_bytes / PAGE_BYTES) * PAGE_BYTES
        apart = []
        for one in self._advised:
            if one[1] < begin or one[0] > end:
                apart.append(one)
            else:
                begin, end = min(begin, one[0]), max(end, one[1])
        self._advised = sorted([*apart, (begin, end)])

    def _touch(self, end: int) -> int:
        """Faults of small pages when the heap is touched up to `end`; a huge page takes its 2 MiB
        at once.
        """
        faults = 0
        while self._touched < end:
            window = self._touched // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            after = window + HUGE_PAGE_BYTES
            if self._touched == window and any(
                low <= window and after <= high for low, high in self._advised
            ):
                self.huge_faults += 1
                self._touched = after
            else:
                reached = min(end, after)
                faults += (reached - self._touched) // PAGE_BYTES
                self._touched = reached
        return faults


def _chunk_bytes(n_bytes: int) -> int:
    """The chunk that serves a request (request2size). posix_memalign's inner request, for a chunk's
    size and the alignment's room, is rounded once more.
    """
    return max(_SMALLEST, (n_bytes + _HEADER // 2 + 15) // 16 * 16)


class Jemalloc:
    """jemalloc's extents: a large request of its own is purged when freed, and so is every free
    extent that has grown to as much.

    Dirty extents are taken before purged ones, the lowest that fits first (eset_first_fit). Sizes
    are rounded to four classes a doubling, and a page is added (cache-oblivious placement). Blocks
    below 16 KiB share slabs, whose pages stay: they are not modelled.

    >>> heap = Jemalloc()
    >>> heap.free(heap.allocate(2**22)[0]); heap.allocate(2**22)[1]    # kept dirty
    0
    >>> heap.free(heap.allocate(2**24)[0]); heap.allocate(2**24)[1]    # purged
    4097
    """

    def __init__(self, policy: Policy = POLICIES["jemalloc"]) -> None:
        self._policy = policy
        self._dirty, self._purged = _Extents(), _Extents()
        self._used: dict[int, tuple[int, int]] = {}  # address -> (size, resident pages)
        self._end = 0
        self._next_oversize, self._next_small = _FIRST_MAPPING, 2 * _FIRST_MAPPING
        self._used_pages = 0
        self.huge_faults = 0
        self.released_pages = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes in use and bytes freed but kept."""
        return self._used_pages * PAGE_BYTES + self._dirty.n_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a new block; 0 faults below 16 KiB."""
        if n_bytes < _SLAB_BYTES:
            self._next_small += PAGE_BYTES
            return self._give(self._next_small, 0, 0), 0
        size = size_class(n_bytes)
        pages = math.ceil(n_bytes / PAGE_BYTES) + 1
        if size >= self._policy.mapping_bytes:
            address, self._next_oversize = (
                self._next_oversize,
                self._next_oversize + size + PAGE_BYTES,
            )
            return self._give(address, size, pages), pages
        size += PAGE_BYTES
        found = self._dirty.first(size)
        if found is not None:
            self._split(self._dirty, *found, size)
            return self._give(found[0], size, size // PAGE_BYTES), 0
        found = self._purged.first(size)
        if found is None:
            found = self._end, size
            self._end += size
        self._split(self._purged, *found, size)
        return self._give(found[0], size, pages), pages

    def free(self, address: int) -> None:
        """Give a block back: kept dirty, or purged where its free extent is large."""
        size, pages = self._used.pop(address)
        self._used_pages -= pages
        if address >= _FIRST_MAPPING:
            self.released_pages += pages
            return
        address, size = self._dirty.merged(address, size)
        if size >= self._policy.trim_bytes:
            self.released_pages += size // PAGE_BYTES
            self._purged.put(*self._purged.merged(address, size))
        else:
            self._dirty.put(address, size)

    def _give(self, address: int, size: int, pages: int) -> int:
        self._used[address] = (size, pages)
        self._used_pages += pages
        return address

    @staticmethod
    def _split(extents: _Extents, address: int, room: int, size: int) -> None:
        if room > size:
            extents.put(address + size, room - size)


def size_class(n_bytes: int) -> int:
    """jemalloc's size class of a request of more than a page: whole pages, four classes a doubling.

    >>> size_class(5 * 2**20 + 1) // 2**20
    6
    """
    pages = max(1, math.ceil(n_bytes / PAGE_BYTES))
    step = 1 << max(0, (pages - 1).bit_length() - 3)
    return math.ceil(pages / step) * step * PAGE_BYTES


def allocator_of(policy: Policy, small: SmallBlocks = NONE, seed: int = 0) -> Allocator:
    """A fresh process' allocator under a policy; `small` and `seed` as :class:`Heap` takes them."""
    return Jemalloc(policy) if policy.purges else Heap(policy, small, seed)

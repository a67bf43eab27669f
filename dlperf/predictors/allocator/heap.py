"""Allocators by addresses and page counts alone: glibc's heap with its mappings, jemalloc's
extents.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections import defaultdict
from dataclasses import dataclass

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


class Counting:
    """Blocks in use, and what has happened so far: first touches of pages of 2 MiB, and pages of 4
    KiB given back.

    A block has its size, and the bytes touched of a mapping of its own (glibc), its resident pages
    (jemalloc) or whether it is small (a device).
    """

    def __init__(self) -> None:
        self._used: dict[int, tuple[int, int]] = {}
        self.huge_faults = 0
        self.released_pages = 0


class Extents:
    """Free pieces of address space: the smallest that fits, and which of them touch each other."""

    def __init__(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (size, address), sorted
        self._at: dict[int, int] = {}  # address -> size
        self._ending: dict[int, int] = {}  # end -> address

    @property
    def n_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(self._at.values())

    def take_fitting(self, size: int, lowest: bool = False) -> tuple[int, int] | None:
        """(address, size) of the smallest piece of at least `size`, the lowest of equal ones, or of
        the `lowest` of all; taken out.
        """
        fitting = self._by_size[bisect.bisect_left(self._by_size, (size, -1)) :]
        if not fitting:
            return None
        address = min(address for _, address in fitting) if lowest else fitting[0][1]
        return address, self.take(address)

    def size_at(self, address: int) -> int | None:
        """Size of the piece that begins at an address; None where none does."""
        return self._at.get(address)

    def put(self, address: int, size: int) -> None:
        """Add a piece."""
        bisect.insort(self._by_size, (size, address))
        self._at[address] = size
        self._ending[address + size] = address

    def take(self, address: int) -> int:
        """Take the piece at an address out; its size."""
        size = self._at.pop(address)
        del self._ending[address + size]
        del self._by_size[bisect.bisect_left(self._by_size, (size, address))]
        return size

    def merged(self, address: int, size: int) -> tuple[int, int]:
        """The piece together with its free neighbours, which are taken out."""
        if address in self._ending:
            before = self._ending[address]
            address, size = before, size + self.take(before)
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


class Heap(Counting):
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
        super().__init__()
        self._policy = policy
        self.mmap_threshold, self.trim_threshold = policy.mapping_bytes, policy.trim_bytes
        self._free = Extents()
        self._small, self._dice = small, random.Random(seed)
        # By block, remainders beside it that small blocks took, (address, size).
        self._beside: dict[int, list[tuple[int, int]]] = defaultdict(list)
        self._alone: list[tuple[int, int]] = []  # such whose block is gone
        self._top = 0  # where the unused top begins
        self._break = 0  # where the heap ends
        self._touched = 0  # pages below are resident
        # (begin, end) of the heap's parts that may have huge pages, sorted and apart.
        self._advised: list[tuple[int, int]] = []
        self._next_mapping = _FIRST_MAPPING
        self.mapped_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the arena and the mappings hold in memory."""
        return self._touched + self.mapped_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a new block."""
        huge = self._policy.huge_bytes is not None and n_bytes >= self._policy.huge_bytes
        alignment = PAGE_BYTES if huge else _ALIGNMENT
        size = _chunk_bytes(n_bytes)
        wanted = _chunk_bytes(size + alignment + _SMALLEST)
        found = self._free.take_fitting(wanted)
        if found is not None:
            start, room = found
            if room - wanted >= _SMALLEST:
                self._free.put(start + wanted, room - wanted)
                room = wanted
        else:
            lacks = self._break - self._top < wanted + _SMALLEST
            # Only what neither a free chunk nor the top can serve is a mapping (sysmalloc).
            if lacks and wanted >= self.mmap_threshold:
                return self._map(wanted, n_bytes, alignment, huge)
            start, room = self._top, wanted
            self._top += wanted
            if lacks:
                self._break = _page_end(self._top + self._policy.top_pad_bytes)
        address = math.ceil((start + _HEADER) / alignment) * alignment - _HEADER
        if 0 < address - start < _SMALLEST:
            address += alignment
        if huge:
            self._advise(address, n_bytes)
        n_faults = self._touch(_page_end(self._top)) if found is None else 0
        before, behind = address - start, start + room - address - size
        if behind <= _SMALLEST:
            size, behind = size + behind, 0
        self._used[address] = (size, 0)
        for piece in ((start, before), (address + size, behind)):
            if 0 < piece[1] <= _REUSED_BYTES and self._dice.random() < self._small.taken:
                self._beside[address].append(piece)
            elif piece[1]:
                self._put(*piece)
        return address, n_faults

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
            lasting = [self._dice.random() < self._small.lasting for _ in pieces]
            held, pieces[:] = pieces[:], itertools.compress(pieces, lasting)
            for piece, lasts in zip(held, lasting):
                if not lasts and self._put(*piece) >= _CONSOLIDATED_BYTES:
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
            self._break = _page_end(self._top + self._policy.top_pad_bytes)
            self.released_pages += max(0, self._touched - self._break) // PAGE_BYTES
            self._touched = min(self._touched, self._break)
            self._advised = [
                (begin, min(end, self._break))
                for begin, end in self._advised
                if begin < self._break
            ]

    def _map(self, size: int, n_bytes: int, alignment: int, huge: bool) -> tuple[int, int]:
        mapped = _page_end(size + _HEADER // 2)
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
        ranges = [*self._advised, (begin, begin + _page_end(n_bytes))]
        self._advised = []
        for low, high in sorted(ranges):
            if self._advised and low <= self._advised[-1][1]:
                low, before = self._advised.pop()
                high = max(high, before)
            self._advised.append((low, high))

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


def _page_end(n_bytes: int) -> int:
    return math.ceil(n_bytes / PAGE_BYTES) * PAGE_BYTES


def _chunk_bytes(n_bytes: int) -> int:
    """The chunk that serves a request (request2size). posix_memalign's inner request, for a chunk's
    size and the alignment's room, is rounded once more.
    """
    return max(_SMALLEST, (n_bytes + _HEADER // 2 + 15) // 16 * 16)


class Jemalloc(Counting):
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
        super().__init__()
        self._policy = policy
        self._dirty, self._purged = Extents(), Extents()
        self._end = 0
        self._next_oversize, self._next_small = _FIRST_MAPPING, 2 * _FIRST_MAPPING

    @property
    def resident_bytes(self) -> int:
        """Bytes in use and bytes freed but kept."""
        return sum(pages for _, pages in self._used.values()) * PAGE_BYTES + self._dirty.n_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a new block; 0 faults below 16 KiB."""
        pages = n_faults = math.ceil(n_bytes / PAGE_BYTES) + 1
        size = size_class(n_bytes)
        if n_bytes < _SLAB_BYTES:
            size = pages = n_faults = 0
            address = self._next_small = self._next_small + PAGE_BYTES
        elif size >= self._policy.mapping_bytes:
            address = self._next_oversize
            self._next_oversize += size + PAGE_BYTES
        else:
            size += PAGE_BYTES
            extents, found = self._dirty, self._dirty.take_fitting(size, lowest=True)
            if found is not None:
                pages, n_faults = size // PAGE_BYTES, 0
            else:
                extents, found = self._purged, self._purged.take_fitting(size, lowest=True)
            if found is None:
                found = self._end, size
                self._end += size
            address, room = found
            if room > size:
                extents.put(address + size, room - size)
        self._used[address] = (size, pages)
        return address, n_faults

    def free(self, address: int) -> None:
        """Give a block back: kept dirty, or purged where its free extent is large."""
        size, pages = self._used.pop(address)
        if address >= _FIRST_MAPPING:
            self.released_pages += pages
            return
        address, size = self._dirty.merged(address, size)
        if size >= self._policy.trim_bytes:
            self.released_pages += size // PAGE_BYTES
            self._purged.put(*self._purged.merged(address, size))
        else:
            self._dirty.put(address, size)

    def end_step(self) -> None:
        """Nothing: dirty pages stay."""


def size_class(n_bytes: int) -> int:
    """jemalloc's size class of a request of more than a page: whole pages, four classes a doubling.

    >>> size_class(5 * 2**20 + 1) // 2**20
    6
    """
    pages = max(1, math.ceil(n_bytes / PAGE_BYTES))
    step = 1 << max(0, (pages - 1).bit_length() - 3)
    return math.ceil(pages / step) * step * PAGE_BYTES


def allocator_of(policy: Policy, small: SmallBlocks = NONE, seed: int = 0) -> Heap | Jemalloc:
    """A fresh process' allocator under a policy; `small` and `seed` as :class:`Heap` takes them."""
    return Jemalloc(policy) if policy.purges else Heap(policy, small, seed)

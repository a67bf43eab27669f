"""Allocators by addresses and page counts alone: what they share, and jemalloc's extents."""

from __future__ import annotations

import bisect
import math

from dlperf.core.units import KIB, MIB
from dlperf.predictors.allocator.policies import POLICIES, Policy

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 * MIB
_FIRST_MAPPING = 1 << 46
_SLAB_BYTES = 16 * KIB


class Counting:
    """Blocks in use, and what has happened so far: requests of a heap, first touches of pages of
    2 MiB, those of pages of 4 KiB by which a heap grew, and pages of 4 KiB given back.

    A block has its size, and the bytes touched of a mapping of its own (glibc), its resident pages
    (jemalloc) or whether it is small (a device).
    """

    def __init__(self) -> None:
        self._used: dict[int, tuple[int, int]] = {}
        self.n_requests = 0
        self.huge_faults = self.heap_faults = 0
        self.released_pages = 0

    def malloc(self, n_bytes: int) -> int | None:
        """The address of a small request of the program's own; None where an allocator keeps these
        apart from tensors. A negative number of bytes is aligned to 64.
        """
        return None


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


def size_class(n_bytes: int) -> int:
    """jemalloc's size class of a request of more than a page: whole pages, four classes a doubling.

    >>> size_class(5 * 2**20 + 1) // 2**20
    6
    """
    pages = max(1, math.ceil(n_bytes / PAGE_BYTES))
    step = 1 << max(0, (pages - 1).bit_length() - 3)
    return math.ceil(pages / step) * step * PAGE_BYTES

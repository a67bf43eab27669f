"""glibc's main arena (malloc/malloc.c, 2.36) by addresses and page counts alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from functools import cache

from dlperf.core.units import KIB, MIB
from dlperf.predictors.allocator.heap import HUGE_PAGE_BYTES, PAGE_BYTES, Counting
from dlperf.predictors.allocator.policies import POLICIES, Policy

_MAPPING_BYTES_MAX = 32 * MIB  # DEFAULT_MMAP_THRESHOLD_MAX on 64 bits
_ALIGNMENT = 64  # c10/core/impl/alloc_cpu.cpp, through posix_memalign
_HEADER, _SMALLEST = 16, 32
_TCACHE_BYTES, _TCACHE_COUNT = 1040, 7
_FASTBIN_BYTES = 128
_LARGE_BYTES = 1024
_CONSOLIDATED_BYTES = 64 * KIB  # FASTBIN_CONSOLIDATION_THRESHOLD: only freeing what grows to as
# much looks at the top
_FIRST_MAPPING = 1 << 46


class Heap(Counting):
    """glibc's main arena and its mappings, chunk by chunk.

    A request of at least ``mmap_threshold`` bytes that neither a free chunk nor the top can serve
    is a mapping of its own. Small chunks that are freed stay in the thread's cache (at most seven
    of a size) or in a fastbin, where they keep their free neighbours apart; fastbins are emptied
    when 64 KiB or more are freed, and before a large request is served. Other free chunks coalesce
    and wait in the unsorted list until the next request sorts them into bins. The smallest chunk
    that fits is taken, else the top.

    posix_memalign takes a chunk that is larger by the alignment and a smallest chunk, and frees
    what lies before and behind the aligned block.

    >>> heap = Heap()
    >>> block, faults = heap.allocate(2**20)  # a mapping: 256 pages and the alignment
    >>> faults
    257
    >>> heap.free(block)  # raises the threshold above 1 MiB
    >>> heap.allocate(2**20)[1], heap.mapped_bytes  # from the heap
    (257, 0)
    """

    def __init__(self, policy: Policy = POLICIES["default"]) -> None:
        super().__init__()
        self._policy = policy
        self.mmap_threshold, self.trim_threshold = policy.mapping_bytes, policy.trim_bytes
        self._chunks: dict[int, int] = {}  # size of each chunk in use, in the cache or a fastbin
        self._tcache: defaultdict[int, list[int]] = defaultdict(list)
        self._fastbins: defaultdict[int, list[int]] = defaultdict(list)
        self._n_fast = 0
        self._free: dict[int, int] = {}  # size of each free chunk that coalesces
        self._ending: dict[int, int] = {}  # its end -> its address
        self._unsorted: dict[int, None] = {}  # in the order in which they were freed
        self._bins: dict[int, list[int]] = {}  # by size, in the order of glibc's lists
        self._sizes: list[int] = []  # of the bins that hold chunks, sorted
        self._last_remainder = -1
        self._top = 0  # where the unused top begins
        self._break = 0  # where the heap ends
        self._touched = 0  # pages below are resident
        # (begin, end) of the heap's parts that may have huge pages, sorted and apart.
        self._advised: list[tuple[int, int]] = []
        self._next_mapping = _FIRST_MAPPING
        self._n_faults = 0
        self.mapped_bytes = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the arena and the mappings hold in memory."""
        return self._touched + self.mapped_bytes

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, page faults at first touch) of a tensor's memory (posix_memalign)."""
        self.n_requests += 1
        before = self._n_faults
        huge = self._policy.huge_bytes is not None and n_bytes >= self._policy.huge_bytes
        alignment = PAGE_BYTES if huge else _ALIGNMENT
        size = _chunk_bytes(n_bytes)
        wanted = _chunk_bytes(size + alignment + _SMALLEST)
        start = self._take(wanted)
        if start is None:
            return self._map(wanted, n_bytes, alignment, huge), self._n_faults - before
        address = -(-(start + _HEADER) // alignment) * alignment - _HEADER
        if 0 < address - start < _SMALLEST:
            address += alignment
        room = self._chunks.pop(start) - (address - start)
        self._chunks[address] = room
        if address > start:
            self._chunks[start] = address - start
            self._free_chunk(start)
        if huge:
            self._advise(address, n_bytes)
        if room > size + _SMALLEST:
            self._chunks[address] = size
            self._chunks[address + size] = room - size
            self._free_chunk(address + size)
        if self._top + _HEADER > self._touched:
            self._touch(_page_end(self._top + _HEADER))
        return address, self._n_faults - before

    def malloc(self, n_bytes: int) -> int:
        """The address of a small request of the program's own (malloc), below `mmap_threshold`; of
        negative bytes one that is aligned (posix_memalign).
        """
        if n_bytes < 0:
            return self.allocate(-n_bytes)[0]
        self.n_requests += 1
        size = _chunk_bytes(n_bytes)
        cached = self._tcache.get(size)
        if cached:
            return cached.pop()
        address = self._take(size, may_map=False)
        assert address is not None
        return address

    def fill_cache(self) -> None:
        """Fill the thread's cache of small chunks, as in a process that has run for a while."""
        for n_bytes in range(_SMALLEST - _HEADER // 2, _TCACHE_BYTES, 16):
            for address in [self.malloc(n_bytes) for _ in range(_TCACHE_COUNT)]:
                self._free_chunk(address)

    def free(self, address: int) -> None:
        """Give a block back; may unmap it, or trim the top of the heap. Raises KeyError for what is
        not in use.
        """
        if address < _FIRST_MAPPING:
            self._free_chunk(address)
            return
        size, touched = self._used.pop(address)
        self.mapped_bytes -= touched
        self.released_pages += touched // PAGE_BYTES
        if self._policy.adapts and self.mmap_threshold < size <= _MAPPING_BYTES_MAX:
            self.mmap_threshold, self.trim_threshold = size, 2 * size

    def _take(self, size: int, may_map: bool = True) -> int | None:
        """A chunk of at least `size` (_int_malloc); None where it has to be a mapping. What is no
        tensor's (not `may_map`) is touched at once.
        """
        if size <= _FASTBIN_BYTES and self._fastbins.get(size):
            return self._take_fast(size)
        if size < _LARGE_BYTES:
            if size in self._bins:
                return self._take_small(size)
        elif self._n_fast:
            self._consolidate()
        while True:
            address = self._sort(size)
            if address is not None:
                return address
            place = bisect_left(self._sizes, size)
            if place < len(self._sizes):
                return self._take_fitting(self._sizes[place], size)
            if self._break - self._top >= size + _SMALLEST:
                break
            if self._n_fast:
                self._consolidate()
                continue
            if may_map and size >= self.mmap_threshold:  # sysmalloc
                return None
            self._break = _page_end(self._top + size + self._policy.top_pad_bytes + _SMALLEST)
            break
        address = self._top
        self._top += size
        self._chunks[address] = size
        if not may_map:
            self._touch(_page_end(self._top + _HEADER))
        return address

    def _take_fast(self, size: int) -> int:
        """The last chunk of a fastbin; others of it fill the cache."""
        fastbin, cached = self._fastbins[size], self._tcache[size]
        address = fastbin.pop()
        self._n_fast -= 1
        while fastbin and len(cached) < _TCACHE_COUNT:
            cached.append(fastbin.pop())
            self._n_fast -= 1
        return address

    def _take_small(self, size: int) -> int:
        """The oldest chunk of a small bin; others of it fill the cache."""
        address = self._from_bin(size)
        cached = self._tcache[size]
        while size in self._bins and len(cached) < _TCACHE_COUNT:
            cached.append(self._from_bin(size))
        return address

    def _from_bin(self, size: int, place: int = -1) -> int:
        """A chunk of a bin, now in use: of a list as glibc keeps it, that at `place`."""
        chunks = self._bins[size]
        address = chunks.pop(place)
        if not chunks:
            self._drop_bin(size)
        self._chunks[address] = self._forget(address)
        return address

    def _put(self, size: int, address: int) -> None:
        """Sort a chunk into its bin: a small one in front, a large one behind the first of its
        size.
        """
        if size not in self._bins:
            self._bins[size] = []
            insort(self._sizes, size)
        self._bins[size].insert(int(size >= _LARGE_BYTES), address)

    def _sort(self, size: int) -> int | None:
        """Sort the unsorted chunks into bins until one of the very size comes (returned)."""
        unsorted, cached = self._unsorted, False
        while unsorted:
            address = next(iter(unsorted))
            found = self._free[address]
            del unsorted[address]
            if (
                size < _LARGE_BYTES
                and not unsorted
                and address == self._last_remainder
                and found > size + _SMALLEST
            ):
                self._forget(address)
                self._chunks[address] = size
                self._remember(address + size, found - size)
                self._last_remainder = address + size
                return address
            if found != size:
                self._put(found, address)
                continue
            self._chunks[address] = self._forget(address)
            waiting = self._tcache[size]
            if size > _TCACHE_BYTES or len(waiting) >= _TCACHE_COUNT:
                return address
            waiting.append(address)
            cached = True
        return self._tcache[size].pop() if cached else None

    def _take_fitting(self, found: int, size: int) -> int:
        """A chunk of size `found`, cut to `size`. Of equal ones: the one behind the first where the
        request's own bin holds them, else the last.
        """
        is_own = size >= _LARGE_BYTES and _bin_number(size) == _bin_number(found)
        address = self._from_bin(found, min(1, len(self._bins[found]) - 1) if is_own else -1)
        if found - size >= _SMALLEST:
            self._chunks[address] = size
            self._remember(address + size, found - size)
            if size < _LARGE_BYTES:
                self._last_remainder = address + size
        return address

    def _free_chunk(self, address: int) -> None:
        """_int_free: into the cache, a fastbin, or together with free neighbours."""
        size = self._chunks[address]
        if size <= _TCACHE_BYTES:
            cached = self._tcache[size]
            if len(cached) < _TCACHE_COUNT:
                cached.append(address)
                return
            if size <= _FASTBIN_BYTES:
                self._fastbins[size].append(address)
                self._n_fast += 1
                return
        del self._chunks[address]
        if self._coalesce(address, size) >= _CONSOLIDATED_BYTES:
            if self._n_fast:
                self._consolidate()
            self._trim()

    def _consolidate(self) -> None:
        """malloc_consolidate: what waits in fastbins grows together with its free neighbours."""
        for size in sorted(self._fastbins):
            fastbin = self._fastbins[size]
            while fastbin:
                address = fastbin.pop()
                self._coalesce(address, self._chunks.pop(address))
        self._n_fast = 0

    def _coalesce(self, address: int, size: int) -> int:
        """The size that a free chunk has grown to, with its free neighbours or the top."""
        before = self._ending.get(address)
        if before is not None:
            address, size = before, size + self._unlink(before)
        if address + size in self._free:
            size += self._unlink(address + size)
        if address + size == self._top:
            self._top = address
            return self._break - address
        self._remember(address, size)
        return size

    def _remember(self, address: int, size: int) -> None:
        self._free[address] = size
        self._ending[address + size] = address
        self._unsorted[address] = None

    def _forget(self, address: int) -> int:
        size = self._free.pop(address)
        del self._ending[address + size]
        return size

    def _unlink(self, address: int) -> int:
        """Take a free chunk out of its list; its size."""
        size = self._forget(address)
        if address in self._unsorted:
            del self._unsorted[address]
        else:
            self._bins[size].remove(address)
            if not self._bins[size]:
                self._drop_bin(size)
        return size

    def _drop_bin(self, size: int) -> None:
        del self._bins[size]
        del self._sizes[bisect_left(self._sizes, size)]

    def _trim(self) -> None:
        """systrim: the top above the padding goes back to the system."""
        room = self._break - self._top
        if room < self.trim_threshold:
            return
        extra = (room - _SMALLEST - 1 - self._policy.top_pad_bytes) // PAGE_BYTES * PAGE_BYTES
        if extra > 0:
            self._break -= extra
            self.released_pages += max(0, self._touched - self._break) // PAGE_BYTES
            self._touched = min(self._touched, self._break)
            self._advised = [
                (begin, min(end, self._break))
                for begin, end in self._advised
                if begin < self._break
            ]

    def _map(self, size: int, n_bytes: int, alignment: int, huge: bool) -> int:
        mapped = _page_end(size + _HEADER // 2)
        address = self._next_mapping
        self._next_mapping += mapped
        # What the alignment skips at the front is no part of the chunk, whose size becomes the
        # threshold when it is freed. With the alignment of a page the next request of the same size
        # exceeds that, and is a mapping once more.
        pages = -(-(alignment + n_bytes) // PAGE_BYTES)
        self._used[address] = (mapped - (alignment - _HEADER), pages * PAGE_BYTES)
        self.mapped_bytes += pages * PAGE_BYTES
        # Mappings begin at any page: one of n huge pages' size holds n - 1 whole ones.
        n_huge = max(0, round(size / HUGE_PAGE_BYTES) - 1) if huge else 0
        self.huge_faults += n_huge
        self._n_faults += pages - n_huge * (HUGE_PAGE_BYTES // PAGE_BYTES)
        return address

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

    def _touch(self, end: int) -> None:
        """Fault the heap's pages in up to `end`; a huge page takes its 2 MiB at once."""
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
                n_pages = (reached - self._touched) // PAGE_BYTES
                self._n_faults += n_pages
                self.heap_faults += n_pages
                self._touched = reached


def _page_end(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


def _bin_number(size: int) -> int:
    """The bin of large chunks that holds a size (largebin_index_64)."""
    for shift, most, first in ((6, 48, 48), (9, 20, 91), (12, 10, 110), (15, 4, 119), (18, 2, 124)):
        if size >> shift <= most:
            return first + (size >> shift)
    return 126


@cache
def _chunk_bytes(n_bytes: int) -> int:
    """The chunk that serves a request (request2size)."""
    return max(_SMALLEST, (n_bytes + _HEADER // 2 + 15) // 16 * 16)

"""PyTorch's caching allocator of a CUDA device: segments from the device, blocks in segments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.units import KIB, MIB, format_bytes
from dlperf.predictors.allocator.heap import Counting, Extents


class OutOfDeviceMemory(DlperfError):
    """An allocation for which the device has no memory left."""


@dataclass(frozen=True)
class SegmentSizes:
    """Sizes that decide where a block lies.

    A block of at most `small_bytes` is small. Small blocks are rounded to `rounding_bytes`, large
    ones to `large_rounding_bytes`. Small blocks share segments of `small_segment_bytes`. Large
    blocks below `packed_bytes` share segments of `packed_segment_bytes`; others get a segment of
    their size, rounded to `segment_rounding_bytes`.

    The defaults are those of PyTorch 1.1 to 2.13 (c10/cuda/CUDACachingAllocator.cpp; since 2.10
    c10/core/AllocatorConfig.h).
    """

    rounding_bytes: int = 512
    small_bytes: int = MIB
    small_segment_bytes: int = 2 * MIB
    large_rounding_bytes: int = 512
    packed_bytes: int = 10 * MIB
    packed_segment_bytes: int = 20 * MIB
    segment_rounding_bytes: int = 2 * MIB

    def block_bytes(self, n_bytes: int) -> int:
        """Size of the block for a request.

        >>> SegmentSizes().block_bytes(1), SegmentSizes().block_bytes(4_000_000)
        (512, 4000256)
        """
        rounded = _rounded(max(1, n_bytes), self.rounding_bytes)
        if rounded <= self.small_bytes:
            return rounded
        return _rounded(n_bytes, self.large_rounding_bytes)

    def segment_bytes(self, block_bytes: int) -> int:
        """Size of a new segment for a block.

        >>> [SegmentSizes().segment_bytes(n * 2**20) // 2**20 for n in (1, 2, 11)]
        [2, 20, 12]
        """
        if block_bytes <= self.small_bytes:
            return self.small_segment_bytes
        if block_bytes < self.packed_bytes:
            return self.packed_segment_bytes
        return _rounded(block_bytes, self.segment_rounding_bytes)


SIZES = SegmentSizes()


class CachingAllocator(Counting):
    """PyTorch's caching allocator on one stream of a CUDA device, in its default configuration.

    A request takes the smallest free block that fits. A block of the small pool is split where at
    least `rounding_bytes` remain, one of the large pool where more than `small_bytes` remain. Free
    neighbours in a segment become one. Where no block fits, a new segment comes from the device. If
    the device has no memory left, all segments without a block in use go back first.

    `capacity_bytes` is what the device can give; without it there is no limit. Attributes:
    `allocated_bytes` and `reserved_bytes` (``torch.cuda.memory_allocated``, ``memory_reserved``),
    `peak_allocated_bytes` and `peak_reserved_bytes` (``max_memory_...``), `n_retries`. Not
    simulated: several streams, CUDA graphs, `PYTORCH_CUDA_ALLOC_CONF`.

    >>> device = CachingAllocator()
    >>> first = device.allocate(4_000_000)[0]           # a segment of 20 MiB
    >>> device.allocated_bytes, device.reserved_bytes
    (4000256, 20971520)
    >>> device.free(first); device.allocate(8_000_000)[1]  # nothing new from the device
    0

    Raises DlperfError for a capacity or a request that is no positive number of bytes.
    """

    def __init__(self, capacity_bytes: int | None = None, sizes: SegmentSizes = SIZES) -> None:
        super().__init__()
        if capacity_bytes is not None:
            _check_bytes("capacity", capacity_bytes)
        self._capacity_bytes, self._sizes = capacity_bytes, sizes
        self._small, self._large = Extents(), Extents()
        self._segments: dict[int, int] = {}  # address -> size
        self._next_segment = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.n_retries = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes that the device has given."""
        return self.reserved_bytes

    @property
    def n_segments(self) -> int:
        """Number of segments."""
        return len(self._segments)

    def allocate(self, n_bytes: int) -> tuple[int, int]:
        """(address, bytes newly taken from the device) of a new block. Raises OutOfDeviceMemory."""
        _check_bytes("request", n_bytes)
        size = self._sizes.block_bytes(n_bytes)
        is_small = size <= self._sizes.small_bytes
        pool = self._small if is_small else self._large
        taken = 0
        found = pool.take_fitting(size)
        if found is None:
            taken = self._sizes.segment_bytes(size)
            found = self._new_segment(taken, n_bytes), taken
        address, room = found
        least = self._sizes.rounding_bytes if is_small else self._sizes.small_bytes + 1
        if room - size >= least:
            pool.put(address + size, room - size)
            room = size
        self._used[address] = (room, is_small)
        self.allocated_bytes += room
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return address, taken

    def free(self, address: int) -> None:
        """Give a block back to its pool; its segment stays. Raises KeyError for no block in use."""
        size, is_small = self._used.pop(address)
        self.allocated_bytes -= size
        pool = self._small if is_small else self._large
        pool.put(*pool.merged(address, size))

    def empty_cache(self) -> None:
        """Give all segments without a block in use back to the device
        (``torch.cuda.empty_cache``).
        """
        for address, size in list(self._segments.items()):
            for pool in (self._small, self._large):
                if pool.size_at(address) == size:
                    pool.take(address)
                    del self._segments[address]
                    self.reserved_bytes -= size

    def _new_segment(self, size: int, n_bytes: int) -> int:
        limit = math.inf if self._capacity_bytes is None else self._capacity_bytes
        if self.reserved_bytes + size > limit:
            self.empty_cache()
            self.n_retries += 1
        if self.reserved_bytes + size > limit:
            raise OutOfDeviceMemory(
                f"out of device memory: {format_bytes(n_bytes)} asked for;"
                f" {format_bytes(self.allocated_bytes)} allocated,"
                f" {format_bytes(self.reserved_bytes)} reserved"
                f" of {format_bytes(self._capacity_bytes or 0)}"
            )
        address = self._next_segment
        self._next_segment += size + KIB  # segments do not touch, so their blocks stay apart
        self._segments[address] = size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return address


def _rounded(n_bytes: int, to_bytes: int) -> int:
    return (n_bytes + to_bytes - 1) // to_bytes * to_bytes


def _check_bytes(what: str, n_bytes: object) -> None:
    if isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 1:
        raise DlperfError(
            f"device memory: the {what} is {n_bytes!r}; give a positive whole number of bytes"
        )

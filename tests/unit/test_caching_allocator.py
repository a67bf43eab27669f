"""The caching allocator of a device: published logs, PyTorch's own tests, another implementation."""

from __future__ import annotations

import random

import pytest

from dlperf.core.errors import DlperfError
from dlperf.core.units import KIB, MIB
from dlperf.predictors.allocator.caching import (
    SIZES,
    CachingAllocator,
    OutOfDeviceMemory,
    SegmentSizes,
)

# -- published logs --------------------------------------------------------------------------------

PYTORCH_1_0 = SegmentSizes(
    small_segment_bytes=MIB,
    large_rounding_bytes=128 * KIB,
    packed_bytes=0,
    segment_rounding_bytes=128 * KIB,
)
"""Before pytorch pull request 17120: large blocks, each in a segment of its own, were rounded to
128 KiB; small ones shared 1 MiB.
"""
GENERATOR_BYTES = 865_280
"""0.8251953125 MiB: what the first line has beside the tensor of 3.875 MiB, made by the first draw
of a random number.
"""
KEPT = (
    (4.7001953125, 4.875),
    (12.4501953125, 12.625),
    (20.0751953125, 24.125),
    (27.7001953125, 39.5),
    (35.3251953125, 58.625),
    (42.9501953125, 81.625),
    (50.5751953125, 108.375),
    (58.2001953125, 139.0),
    (65.8251953125, 173.375),
    (73.4501953125, 211.625),
)
DELETED = (
    (4.7001953125, 4.875),
    (8.5751953125, 12.625),
    (12.3251953125, 24.125),
    (16.2001953125, 39.5),
    (19.9501953125, 58.625),
    (23.8251953125, 81.625),
)


@pytest.mark.parametrize(("printed", "deletes"), [(KEPT, False), (DELETED, True)])
def test_growing_tensors(printed: tuple[tuple[float, float], ...], deletes: bool) -> None:
    """facebookresearch/maskrcnn-benchmark issue 182 (2018-11-27) prints the peaks of allocated and
    cached memory in MiB for ``a = torch.rand(1000, 1000, i + 1, device="cuda")``, i = 0, 1, ...,
    where the last `a` lives until the next is made, and where it is deleted before.
    """
    device = CachingAllocator(sizes=PYTORCH_1_0)
    device.allocate(GENERATOR_BYTES)
    found, last = [], None
    for number in range(1, len(printed) + 1):
        block, _ = device.allocate(4_000_000 * number)
        found.append((device.peak_allocated_bytes / MIB, device.peak_reserved_bytes / MIB))
        if last is not None:
            device.free(last)
        last = None if deletes else block
        if deletes:
            device.free(block)
    assert found == list(printed)


def test_a_segment_with_one_block_in_use_stays() -> None:
    """discuss.pytorch.org/t/138814 (2021) prints MiB of two forwards without gradients: a
    convolution of 3 to 28 channels (3 x 3) and two max poolings (3, stride 2, padding 1) on 512
    images of 224 x 224, with ``torch.cuda.empty_cache()`` after each.
    """
    images = 512 * 3 * 224 * 224 * 4
    convolved = 512 * 28 * 222 * 222 * 4
    pooled = [512 * 28 * side * side * 4 for side in (111, 56)]  # and an index of 8 bytes each
    device = CachingAllocator()
    for n_bytes in (28 * 27 * 4, 28 * 4):  # weight and bias
        device.allocate(n_bytes)

    def forward(x: int) -> int:
        y = device.allocate(convolved)[0]
        for n_bytes in pooled:
            z, indices = device.allocate(n_bytes)[0], device.allocate(2 * n_bytes)[0]
            device.free(indices)
            device.free(y)
            y = z
        return y

    def printed() -> tuple[int, int]:
        return device.reserved_bytes // MIB, device.allocated_bytes // MIB

    x = device.allocate(images)[0]
    assert printed() == (296, 294)
    prediction = forward(x)
    assert printed() == (5014, 465)
    device.empty_cache()
    assert printed() == (1644, 465)
    following = device.allocate(images)[0]
    device.free(x)
    old, prediction = prediction, forward(following)
    device.free(old)
    assert printed() == (5688, 465)


SMALL, PACKED_FROM = MIB, 10 * MIB


@pytest.mark.parametrize(
    ("n_bytes", "n_segments", "reserved", "at_the_end"),
    [
        (512, 1, 2 * MIB, 2 * MIB),
        (SMALL, 2, 4 * MIB, 2 * MIB),
        (SMALL + 512, 1, 20 * MIB, 20 * MIB),
        (PACKED_FROM - 512, 2, 40 * MIB, 20 * MIB),
        (PACKED_FROM + 512, 3, 36 * MIB, 12 * MIB),
    ],
)
def test_segments_of_sums(n_bytes: int, n_segments: int, reserved: int, at_the_end: int) -> None:
    """test/test_cuda.py of PyTorch, test_graph_memory_stats_and_use_result_after_destroy_graph:
    ``b = a.clone()``, then five times ``b = b.clone() + 1`` in a pool of their own.
    """
    device = CachingAllocator()
    b = device.allocate(n_bytes)[0]
    for _ in range(5):
        clone, total = device.allocate(n_bytes)[0], device.allocate(n_bytes)[0]
        device.free(clone)
        device.free(b)
        b = total
    assert (device.n_segments, device.reserved_bytes) == (n_segments, reserved)
    assert device.allocated_bytes == n_bytes
    device.empty_cache()
    assert (device.n_segments, device.reserved_bytes) == (1, at_the_end)


# -- rules -----------------------------------------------------------------------------------------


def test_large_blocks_keep_a_remainder_of_a_mebibyte() -> None:
    device = CachingAllocator()
    device.free(device.allocate(12 * MIB)[0])
    block = device.allocate(11 * MIB)[0]
    assert device.allocated_bytes == 12 * MIB  # the block is counted whole
    device.free(block)
    device.allocate(11 * MIB - 512)
    assert device.allocated_bytes == 11 * MIB - 512


def test_the_smallest_free_block_that_fits() -> None:
    device = CachingAllocator()
    large, small = (device.allocate(n * MIB)[0] for n in (40, 30))
    device.free(large)
    device.free(small)
    assert device.allocate(30 * MIB)[0] == small
    assert device.allocate(30 * MIB)[0] == large


def test_blocks_of_two_segments_stay_apart() -> None:
    device = CachingAllocator()
    for block in [device.allocate(12 * MIB)[0] for _ in range(2)]:
        device.free(block)
    assert device.allocate(24 * MIB)[1] == 24 * MIB


def test_cached_segments_go_back_before_an_allocation_fails() -> None:
    device = CachingAllocator(40 * MIB)
    device.free(device.allocate(30 * MIB)[0])
    device.allocate(32 * MIB)
    assert (device.reserved_bytes, device.n_retries) == (32 * MIB, 1)
    assert device.peak_reserved_bytes == 32 * MIB
    with pytest.raises(OutOfDeviceMemory, match=r"20\.0 MiB asked for; 32\.0 MiB allocated"):
        device.allocate(20 * MIB)


def test_a_split_segment_does_not_go_back() -> None:
    device = CachingAllocator(40 * MIB)
    whole = device.allocate(30 * MIB)[0]
    device.free(whole)
    device.allocate(12 * MIB)  # the first part of the segment of 30 MiB
    with pytest.raises(OutOfDeviceMemory):
        device.allocate(19 * MIB)
    device.allocate(18 * MIB)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "1"])
def test_what_is_no_number_of_bytes_is_refused(wrong: object) -> None:
    with pytest.raises(DlperfError, match=r"request is .*; give a positive whole number"):
        CachingAllocator().allocate(wrong)  # type: ignore[arg-type]
    with pytest.raises(DlperfError, match=r"capacity is .*; give a positive whole number"):
        CachingAllocator(wrong)  # type: ignore[arg-type]


def test_what_is_freed_twice_is_refused() -> None:
    device = CachingAllocator()
    block = device.allocate(1)[0]
    device.free(block)
    with pytest.raises(KeyError):
        device.free(block)


# -- another implementation ------------------------------------------------------------------------


class Lists:
    """Segments as lists of [bytes, block or None], searched from end to end."""

    def __init__(self) -> None:
        self.segments: list[list[list[int | None]]] = []

    def allocate(self, block: int, n_bytes: int) -> None:
        size = max(1, -(-n_bytes // 512)) * 512
        fitting = [
            (free, number, place)
            for number, segment in enumerate(self.segments)
            for place, (free, owner) in enumerate(segment)
            if owner is None
            and free is not None
            and free >= size
            and (_total(segment) == 2 * MIB) == (size <= MIB)
        ]
        if fitting:
            free, number, place = min(fitting)
        else:
            free = 2 * MIB if size <= MIB else 20 * MIB if size < 10 * MIB else -(-size // MIB)
            if size >= 10 * MIB:
                free = (free + 1) // 2 * 2 * MIB
            self.segments.append([[free, None]])
            number, place = len(self.segments) - 1, 0
        left = free - size
        split = left >= 512 if size <= MIB else left > MIB
        parts: list[list[int | None]] = [[size if split else free, block]]
        self.segments[number][place : place + 1] = parts + [[left, None]] * split

    def free(self, block: int) -> None:
        for segment in self.segments:
            for part in segment:
                if part[1] == block:
                    part[1] = None
            merged: list[list[int | None]] = []
            for size, owner in segment:
                if owner is None and merged and merged[-1][1] is None:
                    merged[-1] = [(merged[-1][0] or 0) + (size or 0), None]
                else:
                    merged.append([size, owner])
            segment[:] = merged

    @property
    def reserved_bytes(self) -> int:
        return sum(_total(segment) for segment in self.segments)

    @property
    def allocated_bytes(self) -> int:
        return sum(size or 0 for segment in self.segments for size, owner in segment if owner)


def _total(segment: list[list[int | None]]) -> int:
    return sum(size or 0 for size, _ in segment)


@pytest.mark.parametrize("seed", range(6))
def test_as_lists_do(seed: int) -> None:
    draw = random.Random(seed)
    device, lists = CachingAllocator(), Lists()
    live: dict[int, int] = {}
    for block in range(1, 200):
        n_bytes = int(2 ** draw.uniform(4, 26))
        live[block], taken = device.allocate(n_bytes)
        before = lists.reserved_bytes
        lists.allocate(block, n_bytes)
        assert taken == lists.reserved_bytes - before
        while live and draw.random() < 0.49:
            gone = draw.choice(list(live))
            device.free(live.pop(gone))
            lists.free(gone)
        assert device.reserved_bytes == lists.reserved_bytes
        assert device.allocated_bytes == lists.allocated_bytes
    for address in live.values():
        device.free(address)
    device.empty_cache()
    assert (device.allocated_bytes, device.reserved_bytes, device.n_segments) == (0, 0, 0)


def test_sizes() -> None:
    assert [SIZES.block_bytes(n) for n in (1, 512, 513, MIB, MIB + 1)] == [
        512,
        512,
        1024,
        MIB,
        MIB + 512,
    ]
    assert [SIZES.segment_bytes(n) // MIB for n in (MIB, MIB + 512, 10 * MIB, 10 * MIB + 512)] == [
        2,
        20,
        10,
        12,
    ]

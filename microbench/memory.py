"""What a page costs at its first touch, and what giving memory back costs."""

from __future__ import annotations

import mmap

import numpy as np

from dlperf.clock import Clock, Samples, undisturbed
from dlperf.machine import Cost

_SIZES = (2**20, 2**22, 2**24, 2**26)


def _touch(size: int, clock: Clock) -> tuple[float, bool]:
    """Seconds a page for mapping, writing and unmapping `size` bytes, beyond writing them when they are there.

    All bytes are written, as kernels do: the system's zeroing brings a fresh page into the cache, which spares the kernel
    that writes to it a part of what it pays for memory farther away.
    """
    before = clock.switches()
    begin = clock.now()
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # as malloc maps; the default is shared memory
    words = np.frombuffer(region, dtype=np.float32)
    words[:] = 1  # writing alone: reading first would map the zero page and fault twice
    faulted = clock.now()
    words[:] = 2
    again = clock.now()
    del words
    region.close()
    end = clock.now()
    return max(0.0, (faulted - begin) - (again - faulted) + (end - again)) / (size // mmap.PAGESIZE), clock.switches() != before


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Seconds a page fault (4 KiB page, anonymous memory, zeroed by the kernel), unmapping included."""
    repeats = 5 if mode == "quick" else 15
    pairs = [_touch(size, clock) for _ in range(repeats) for size in _SIZES]
    samples = undisturbed(pairs)
    return [Cost("page_fault", threads, Samples(samples.values, samples.n_disturbed))]

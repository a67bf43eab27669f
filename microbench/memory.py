"""What a page costs: at its first touch, when it is given back, and as one of 2 MiB."""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from dlperf.core.clock import Clock, Samples, minor_faults, quantile, undisturbed
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Footprint

_SIZES = (2**20, 2**22, 2**24, 2**26)
_HUGE_PAGE_BYTES = 2**21
_HUGE_SIZES = (2**22, 2**24, 2**26)


@dataclass(frozen=True)
class _Touch:
    """Seconds a page for mapping `size` bytes and writing them, for writing them again, and for
    unmapping them; `faults` is how many were taken.
    """

    size: int
    first_s: float
    again_s: float
    release_s: float
    faults: int
    disturbed: bool


def _touch(size: int, clock: Clock, huge: bool = False) -> _Touch:
    """Map, write, write again and unmap `size` bytes.

    All bytes are written, as kernels do: the system's zeroing brings a fresh page into the cache,
    which spares the kernel that writes to it a part of what it pays for memory farther away. The
    team of threads writes, as kernels do: two take 0.5 to 0.6 of one's time (AMD EPYC, Zen 5).
    """
    before = clock.switches()
    begin = clock.now()
    # Private, as malloc maps; the default is shared memory. Huge pages begin at multiples of their
    # size, which leaves up to one unused.
    region = mmap.mmap(
        -1, size + (_HUGE_PAGE_BYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if huge:
        region.madvise(mmap.MADV_HUGEPAGE)
    words = np.frombuffer(region, dtype=np.float32)
    if huge:
        start = -words.ctypes.data % _HUGE_PAGE_BYTES // words.itemsize
        words = words[start : start + size // words.itemsize]
    values = torch.from_numpy(words)
    taken = minor_faults()
    values.fill_(1.0)  # writing alone: reading first would map the zero page and fault twice
    faulted = clock.now()
    taken = minor_faults() - taken
    again_from = clock.now()
    values.fill_(2.0)
    again = clock.now()
    del words, values
    unmap_from = clock.now()
    region.close()
    end = clock.now()
    n_pages = size // (_HUGE_PAGE_BYTES if huge else mmap.PAGESIZE)
    return _Touch(
        size,
        (faulted - begin) / n_pages,
        (again - again_from) / n_pages,
        max(0.0, end - unmap_from) / n_pages,
        taken,
        clock.switches() != before,
    )


def _faults_s(touches: Sequence[_Touch]) -> list[float]:
    """Seconds a page for touching a fresh mapping beyond writing it again, by touch. What writing
    takes is the lower quartile of the size's: on two threads (AMD EPYC, Zen 5) it took longer than
    the first touch in every third sample, while the host had the cores far from each other.
    """
    again_s = {
        size: quantile([touch.again_s for touch in touches if touch.size == size], 0.25)
        for size in {touch.size for touch in touches}
    }
    return [max(0.0, touch.first_s - again_s[touch.size]) for touch in touches]


def _samples(values: Sequence[float], touches: Sequence[_Touch]) -> Samples:
    return undisturbed([(value, touch.disturbed) for value, touch in zip(values, touches)])


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Seconds of a ``page_fault`` (4 KiB, anonymous memory, zeroed by the kernel), a
    ``page_release`` and, where the system has them, a ``huge_page_fault`` (2 MiB, from the mapping
    to giving it back).

    The cost of a page hardly depends on how many are taken in a row (within a fifth between 1 and
    64 MiB), that of a huge page does: the zeros of a few stay in the cache. Sizes count alike.
    """
    repeats = 5 if mode == "quick" else 15
    small = [_touch(size, clock) for _ in range(repeats) for size in _SIZES]
    costs = [
        Cost(CostKey("page_fault"), threads, _samples(_faults_s(small), small)),
        Cost(
            CostKey("page_release"), threads, _samples([touch.release_s for touch in small], small)
        ),
    ]
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            huge = [_touch(size, clock, huge=True) for _ in range(repeats) for size in _HUGE_SIZES]
        except OSError:  # a kernel without them refuses the advice
            return costs
        # Where they are switched off the advice is heard and nothing comes of it: then each 2 MiB
        # take 512 faults.
        if (
            statistics.median(touch.faults for touch in huge)
            <= 2 * max(_HUGE_SIZES) // _HUGE_PAGE_BYTES
        ):
            costs.append(
                Cost(
                    CostKey("huge_page_fault"),
                    threads,
                    _samples(
                        [
                            fault_s + touch.release_s
                            for fault_s, touch in zip(_faults_s(huge), huge)
                        ],
                        huge,
                    ),
                )
            )
    return costs


def measure_footprints() -> list[Footprint]:
    """Bytes that torch takes for itself, beside any tensor, in a process that has only imported it:
    its code and kernels' code at the first ``forward`` pass, what ``training`` imports and starts,
    a ``convolution``'s library, and on average the code that each further ``operator`` reads at its
    first call. Nothing where the system does not tell.

    A process of its own runs layers of a few KiB; what it grows by is nearly the same every time
    (within 1 MiB).
    """
    if not os.path.exists("/proc/self/status"):
        return []
    command = [sys.executable, "-m", "dlperf.microbench.first_steps"]
    sizes = subprocess.check_output(command, text=True).split()
    return [
        Footprint(name, max(0, int(size)))
        for name, size in zip(("forward", "training", "convolution", "operator"), sizes)
    ]

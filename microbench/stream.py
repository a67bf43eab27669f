"""Memory bandwidth: STREAM's four kernels over working sets from the first cache to DRAM, through
torch.

copy b = a, scale b = s a, add c = a + b, triad c = a + s b (McCalpin). The bytes are STREAM's: 2,
2, 3, 3 arrays; write-allocate is not counted. The cost of the call itself, measured on one element,
is subtracted, so that small working sets show their cache and not the dispatcher.

STREAM comes back to every byte at once. A cache that others share forgets what is not touched for a
while, and a step that computes in between finds less of it: :func:`measure_residency` shows how
much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

from dlperf.core.clock import (
    Clock,
    Repeats,
    Sampler,
    Samples,
    sample_in_turns,
    take_turns,
    timed,
    undisturbed,
)
from dlperf.core.costs import CACHE_RESIDENCY, Cost, CostKey
from dlperf.core.machine import STREAM_BYTES_PER_ELEMENT, Bandwidth
from dlperf.microbench.plan import log_sizes

_ITEM_BYTES = 4


PAUSES_MS = {
    "quick": (4, 16),
    "full": (1, 2, 4, 6, 8, 12, 16, 32, 64),
    "thorough": (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128),
}
"""How long nothing touches the shared cache, for :func:`measure_residency`."""
_SIDE = 256

_STAGGER = 5168
"""Elements by which the arrays are shifted against each other, more than a page and no multiple of
a line's neighbours: arrays that start at the same place of their pages alias in the store buffer,
which costs up to a fifth of the rate (STREAM's OFFSET is for the same).
"""


_LARGE_BYTES = 2**27
"""Sets beyond it are swept less often: one sweep takes tens of milliseconds."""
_QUICK_BYTES = 2**27
"""The largest set of a quick calibration. A step's tensors seldom lie farther apart, and a virtual
machine's part of a last cache of 480 MiB is far smaller.
"""


def arrays(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three arrays of n float32 elements that do not alias."""
    a, b, c = (torch.ones(n + 3 * _STAGGER)[number * _STAGGER :][:n] for number in range(3))
    return a, b, c


def kernel(name: str, n: int) -> Callable[[], object]:
    """One sweep of a STREAM kernel over arrays of n float32 elements."""
    a, b, c = arrays(n)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: c.copy_(a),
        "scale": lambda: torch.mul(a, 3.0, out=c),
        "add": lambda: torch.add(a, b, out=c),
        "triad": lambda: triad(a, b, c),
    }
    return calls[name]


def triad(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """c = a + 3 b, as torch computes it."""
    return torch.add(a, b, alpha=3.0, out=c)


def working_sets(mode: str, last_cache_bytes: int, name: str = "triad") -> list[int]:
    """Bytes of all arrays together of a kernel: from 12 KiB to four times the last cache (STREAM's
    rule) or more.

    The triad, after whose sweep bytes are priced, is also measured in between, unless quick: a
    virtual machine's part of the last cache ends anywhere below its size. The other kernels, of
    which the roofs alone are asked, are not; when quick they are measured on the largest set alone.
    """
    largest = largest_set(mode, last_cache_bytes)
    if name != "triad":
        return [largest] if mode == "quick" else [*log_sizes(12 * 2**10, 2**24, 0.5), largest]
    if mode == "quick":
        return [*log_sizes(12 * 2**10, 2**24, 0.5), largest]
    return [*log_sizes(12 * 2**10, 2**24, 1.5), *log_sizes(2**24, largest, 1.5)[1:]]


def largest_set(mode: str, last_cache_bytes: int) -> int:
    """Bytes of the set that stands for DRAM: four times the last cache (STREAM's rule), at least 64
    MiB, and no more than a quick calibration has time for.

    >>> largest_set("full", 2**25) == largest_set("quick", 480 * 2**20) == 2**27
    True
    """
    largest = max(4 * last_cache_bytes, 2**26)
    return min(largest, _QUICK_BYTES) if mode == "quick" else largest


def repeats_of(mode: str, set_bytes: int, usual: int) -> Repeats:
    """How a sweep over so many bytes is sampled: `usual` times, half as often when quick or large,
    twice when both.
    """
    is_quick, is_large = mode == "quick", set_bytes > _LARGE_BYTES
    if is_quick and is_large:
        return Repeats(5e-4, 2, warmup=1)
    return Repeats(5e-4, math.ceil(usual / 2) if is_quick or is_large else usual, warmup=2)


def measure(
    threads: int, mode: str, caches_bytes: tuple[int, int, int], clock: Clock = Clock()
) -> list[Bandwidth]:
    """The sweeps of all kernels."""
    found = []
    sets = {name: working_sets(mode, caches_bytes[2], name) for name in STREAM_BYTES_PER_ELEMENT}
    left = sum(map(len, sets.values()))
    for name, n_arrays in STREAM_BYTES_PER_ELEMENT.items():
        call_s = sample_in_turns([kernel(name, 1)], Repeats(1e-3, 5), clock)[0].median
        for working_set in sets[name]:
            n = working_set // (n_arrays * _ITEM_BYTES)
            repeats = repeats_of(mode, working_set, 10)
            sampler = Sampler(kernel(name, n), repeats, clock.part(1 / left))
            left -= 1
            sampler.warm_up()
            take_turns([sampler])
            raw = sampler.result()
            net = Samples(
                tuple(max(value - call_s, 0.02 * value) for value in raw.values), raw.n_disturbed
            )
            found.append(Bandwidth(name, threads, working_set, n_arrays * _ITEM_BYTES * n, net))
    return found


def measure_residency(
    threads: int,
    mode: str,
    caches_bytes: tuple[int, int, int],
    clock: Clock = Clock(),
    sweep: Callable[[], object] | None = None,
) -> list[Cost]:
    """``cache_residency``: slowdown of a `sweep` of data in the shared cache (default: STREAM's
    triad) after a given number of milliseconds of computing, relative to sweeps in a row. Empty for
    processors without a known shared cache.
    """
    own = threads * max(caches_bytes[:2])
    set_bytes = min(8 * own, caches_bytes[2] // 4)
    if not own or set_bytes < 2 * own:
        return []
    sweep = sweep or kernel("triad", set_bytes // (STREAM_BYTES_PER_ELEMENT["triad"] * _ITEM_BYTES))
    compute_for = computing(clock)
    n_samples = 5 if mode == "quick" else 7
    found = []
    for pause_ms in PAUSES_MS[mode]:
        usual_s = statistics.median(timed(sweep, clock)[0] for _ in range(3 * n_samples))
        pairs = []
        for _ in range(1 + n_samples):
            compute_for(pause_ms)
            took_s, disturbed = timed(sweep, clock)
            pairs.append((took_s / usual_s, disturbed))
        samples = undisturbed(pairs[1:], least_frac=0.0)
        found.append(Cost(CostKey(CACHE_RESIDENCY, at=pause_ms), threads, samples))
    return found


def computing(clock: Clock) -> Callable[[float], None]:
    """A call that computes in a core's own caches for a given number of milliseconds."""
    a, out = torch.rand(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)

    def compute_for(ms: float) -> None:
        end = clock.now() + 1e-3 * ms
        while clock.now() < end:
            torch.mm(a, a, out=out)

    return compute_for

"""Memory bandwidth: STREAM's four kernels over working sets from the first cache to DRAM, through torch.

copy b = a, scale b = s a, add c = a + b, triad c = a + s b (McCalpin). The bytes are STREAM's: 2, 2, 3, 3 arrays;
write-allocate is not counted. The cost of the call itself, measured on one element, is subtracted, so that small
working sets show their cache and not the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dlperf.clock import Clock, Repeats, Sampler, Samples, take_turns
from dlperf.machine import STREAM_BYTES_PER_ELEMENT, Bandwidth
from microbench.plan import log_sizes

_ITEM_BYTES = 4


_STAGGER = 5168
"""Elements by which the arrays are shifted against each other, more than a page and no multiple of a line's neighbours: arrays that
start at the same place of their pages alias in the store buffer, which costs up to a fifth of the rate (STREAM's OFFSET is for the same)."""


def arrays(n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three arrays of n float32 elements that do not alias."""
    a, b, c = (torch.rand(n + 3 * _STAGGER)[place * _STAGGER :][:n] for place in range(3))
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


def working_sets(mode: str, last_cache_bytes: int) -> list[int]:
    """Bytes of all arrays together: from 12 KiB to four times the last cache (STREAM's rule) or more."""
    largest = max(4 * last_cache_bytes, 2**26)
    inner = log_sizes(12 * 2**10, 2**24, 0.5 if mode == "quick" else 1.5)
    return [*inner, *([largest // 2] if mode != "quick" else []), largest]


def measure(threads: int, mode: str, last_cache_bytes: int, clock: Clock = Clock()) -> list[Bandwidth]:
    """The sweep of all kernels; triad alone where quick, but for the largest set, on which all run."""
    found = []
    largest = working_sets(mode, last_cache_bytes)[-1]
    for name, n_arrays in STREAM_BYTES_PER_ELEMENT.items():
        floor = Sampler(kernel(name, 1), Repeats(1e-3, 5), clock)
        take_turns([floor])
        call_s = floor.result().median
        for working_set in working_sets(mode, last_cache_bytes):
            if mode == "quick" and name != "triad" and working_set != largest:
                continue
            n = working_set // (n_arrays * _ITEM_BYTES)
            repeats = Repeats(5e-4, 5 if mode == "quick" else 10, warmup=2)
            sampler = Sampler(kernel(name, n), repeats, clock)
            sampler.warm_up()
            take_turns([sampler])
            raw = sampler.result()
            net = Samples(tuple(max(value - call_s, 0.02 * value) for value in raw.values), raw.n_disturbed)
            found.append(Bandwidth(name, threads, working_set, n_arrays * _ITEM_BYTES * n, net))
    return found

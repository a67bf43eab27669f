"""Ceilings of the hierarchical roofline that neither STREAM nor matrix products show: bandwidth of
the caches, arithmetic without multiply-adds.

A sweep of a set that fits the first cache takes tens of nanoseconds, the call of a torch operator a
thousand. So these kernels go over their set many times in one call, which operands with a stride of
0 make possible:

- ``sum``: the row sums of a float64 set repeated R times (a tensor expanded to R rows): one read
  and one addition an element;
- ``bag``: sums of 4096 or more rows of a table (embedding_bag): the same with other code, which
  keeps more sums in flight;
- ``update``: c += s a for R equal rows a (index_add_): two reads and a write an element. It wakes
  no team for small sets.

Each thread goes over the whole set, so its size is to be held against a core's own caches. The same
sums, and products of all elements, are the arithmetic that cannot be fused: FLOP/s of additions
alone and of products alone, in a set of half the first cache. They err low where loading the
operand, not adding it, is what limits. There is no arithmetic in bfloat16 but products of pairs:
sums convert and add in float32, which is what they show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from dlperf.core.clock import Clock, sample_in_turns
from dlperf.core.costs import ARITHMETIC, Cost, CostKey
from dlperf.core.machine import Bandwidth
from dlperf.microbench.plan import log_sizes
from dlperf.microbench.stream import largest_set, repeats_of

_CALL_BYTES = 2**22
"""A call goes over so many bytes or its set once, whichever is more: at 100 GB/s some 40 times as
long as the call itself.
"""
_BAG_ROWS, _BAG_COLUMNS, _N_BAGS = 4096, 512, 4
_DEFAULT_L1_BYTES = 32 * 2**10
DTYPES = ("float32", "float64", "bfloat16")


def _n_repeats(set_bytes: int, threads: int) -> int:
    """Rows, a multiple of the threads, so that each gets as many."""
    return threads * max(1, _CALL_BYTES // set_bytes)


def _values(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Values whose products neither vanish nor overflow: half below and half above 1, reciprocals
    of each other.
    """
    half = torch.rand(max(1, (n + 1) // 2)) * 0.5 + 0.75
    return torch.cat((half, 1 / half))[:n].to(dtype)


def reduction(
    name: str, set_bytes: int, dtype: torch.dtype, threads: int, dim: int = 1
) -> tuple[Callable[[], object], int]:
    """``sum`` or ``prod`` of each of R equal rows (`dim` 1) or of each of their columns (0), and
    how many elements one call takes.
    """
    n = max(1, set_bytes // dtype.itemsize)
    n_rows = _n_repeats(set_bytes, threads)
    rows, out = _values(n, dtype).expand(n_rows, n), torch.empty((n, n_rows)[dim], dtype=dtype)
    if name == "sum":
        return lambda: torch.sum(rows, dim, out=out), n * n_rows
    return lambda: torch.prod(rows, dim, out=out), n * n_rows


def bag(set_bytes: int, threads: int) -> tuple[Callable[[], object], int]:
    """The sums of rows of a float32 table of `set_bytes`, in equal numbers a thread, and how many
    elements one call takes.
    """
    n_rows = max(1, set_bytes // (4 * _BAG_COLUMNS))
    columns = min(_BAG_COLUMNS, max(1, set_bytes // 4))
    table = torch.rand(n_rows, columns)
    n_bags = _N_BAGS * threads
    rows_a_bag = max(_BAG_ROWS, -(-n_rows // _N_BAGS))  # a thread's bags together see every row
    indices = torch.arange(rows_a_bag * n_bags) % n_rows
    offsets = torch.arange(0, rows_a_bag * n_bags, rows_a_bag)
    return (
        lambda: torch.embedding_bag(table, indices, offsets, False, 0),
        rows_a_bag * n_bags * columns,
    )


def update(set_bytes: int) -> tuple[Callable[[], object], int]:
    """c += 0.5 a over and over, both of half the set in float32, and how many elements one call
    takes.
    """
    n = max(1, set_bytes // 8)
    n_rows = _n_repeats(set_bytes, 1)
    c, a, rows = (
        torch.zeros(1, n),
        torch.rand(n).expand(n_rows, n),
        torch.zeros(n_rows, dtype=torch.int64),
    )
    return lambda: c.index_add_(0, rows, a, alpha=0.5), n * n_rows


def working_sets(mode: str, caches_bytes: tuple[int, int, int]) -> list[int]:
    """Bytes of the sets: a few well inside each cache that the processor has, and one that stands
    for DRAM.
    """
    sizes: list[int] = []
    inner, largest = 4 * 2**10, largest_set(mode, max(caches_bytes))
    for size in (min(size, largest) for size in caches_bytes):
        if size > 2 * inner:
            sizes += log_sizes(2 * inner, size // 2, 0.5 if mode == "quick" else 1.0)
            inner = size
    return sorted({*sizes, largest})


def measure(
    threads: int, mode: str, caches_bytes: tuple[int, int, int], clock: Clock = Clock()
) -> tuple[list[Bandwidth], list[Cost]]:
    """The cache bandwidths by kernel and set, and the seconds per FLOP of additions and of products
    by dtype.
    """
    repeats = repeats_of(mode, 0, 9)
    often = replace(repeats, n_samples=2 * repeats.n_samples)
    bandwidths = []
    sets = working_sets(mode, caches_bytes)
    for number, set_bytes in enumerate(sets):
        own = clock.part(1 / (len(sets) - number + 1))  # the arithmetic below counts as one set
        kernels = {  # with the bytes moved for an element
            "sum": (8, partial(reduction, "sum", set_bytes, torch.float64, threads)),
            "bag": (4, partial(bag, set_bytes, threads)),
            "update": (12, partial(update, set_bytes)),
        }
        for name, (moved, make) in kernels.items():
            call, n_elements = make()
            (samples,) = sample_in_turns([call], repeats_of(mode, set_bytes, 9), own)
            bandwidths.append(Bandwidth(name, threads, set_bytes, moved * n_elements, samples))
    costs = []
    half_bytes = (caches_bytes[0] or _DEFAULT_L1_BYTES) // 2
    for dtype in DTYPES:
        kind: torch.dtype = getattr(torch, dtype)
        adders = [reduction("sum", half_bytes, kind, threads, dim) for dim in (0, 1)] + (
            [bag(half_bytes, threads)] if dtype == "float32" else []
        )
        products = [reduction("prod", half_bytes, kind, threads)]
        for name, calls in (("add", adders), ("mul", products)):
            each = [sample_in_turns([call], often, clock)[0].minus(0.0, n) for call, n in calls]
            best = min(each, key=lambda samples: samples.minimum)
            costs.append(Cost(CostKey(ARITHMETIC, name, variant=dtype), threads, best))
    return bandwidths, costs

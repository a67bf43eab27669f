"""What seven parallel algorithms compute, move and send, per process: Table 2.4 of Cardwell 2019.

Each function gives numerator and both denominators of its row, so OI = F / B_M and CAI = F / B_N
follow (equations 2.2, 2.4), in FLOP per byte. N = `n` is the problem size, P = `n_ranks`; |V| =
`n_vertices`, |E| = `n_edges`. Arguments may be numbers or arrays that broadcast.

The table leaves open; read so here:

- log is binary. Where it counts the stages of a collective (log P, in denominators of CAI) it is
  rounded up, as section 2.3.3 states; log N and log |V| are not;
- one process sends nothing, also where the printed formula does not vanish at P = 1 (stencil, MST);
- cache-oblivious counts (SUMMA, MST, Dijkstra) are in elements, B times a number of cache lines; an
  element has 8 bytes, B = 8 of them a line of 64 bytes, and M = 16 KiB / 8 = 2,048 are the first
  data cache ("16MB" is a slip). SUMMA's OI then tends to 2 sqrt(M) / 8 = 11.3 FLOP per byte, where
  the text reads "approximately 8" off its figure;
- Sort(E) is the cache-oblivious bound of Frigo et al. 1999, 1 + (E/B) (1 + log_M E) cache lines;
- Dijkstra's B (n + (M/B) log(n/B)) has the form of the bounds for cache-oblivious shortest paths, n
  + (m/B) log(n/B) with n vertices and m edges (the paper's reference 28 is on them): n is |V|, and
  this M is |E|, not the cache.

They hold as orders of magnitude for large problems: graph "FLOPs" are comparisons and additions,
and constants are left out. All raise DlperfError for sizes or ranks that are no whole numbers of
their range.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlperf.models.arguments import Quantity, count, formula, plain
from dlperf.models.collectives import stages
from dlperf.models.ridgeline import arithmetic_intensity, network_intensity

ELEMENT_BYTES = 8
LINE_ELEMENTS = 8
"""B: doubles in a cache line of 64 bytes."""
CACHE_ELEMENTS = 2_048
"""M: doubles in the first data cache of Big Red II."""


@dataclass(frozen=True, slots=True)
class Work:
    """F = `flops` [FLOP], B_M = `memory_bytes`, B_N = `network_bytes` [bytes] of one process."""

    flops: Quantity
    memory_bytes: Quantity
    network_bytes: Quantity

    @property
    def operational_intensity(self) -> Quantity:
        """OI in FLOP per byte of memory."""
        return arithmetic_intensity(self.flops, self.memory_bytes)

    @property
    def communication_intensity(self) -> Quantity:
        """CAI in FLOP per byte of network; infinite where nothing is sent."""
        return network_intensity(self.flops, self.network_bytes)


@formula()
def summa(
    n: Quantity, n_rows: Quantity, n_columns: Quantity, cache_elements: float = CACHE_ELEMENTS
) -> Work:
    """SUMMA, C <- alpha A B + beta C of N x N doubles on a grid of processes.

    F = (2 N^3 + 2 N^2) / P; B_M = 8 (B + N^2 + N^3 / sqrt(M)) / P; B_N = 8 N^2 / P (r ceil(log r) +
    c ceil(log c)) for `n_rows` r and `n_columns` c: each process takes part in c broadcasts along
    its row and r along its column, of its block's size. With r = c = sqrt(P) that is the printed 2
    sqrt(P) (8 (N / sqrt(P))^2 log sqrt(P)); the paper's grids are square.

    >>> round(summa(10**9, 1, 1).operational_intensity, 1)  # 2 sqrt(2048) / 8
    11.3
    """
    lines = LINE_ELEMENTS + n**2 + n**3 / np.sqrt(cache_elements)
    trees = n_rows * stages(n_rows) + n_columns * stages(n_columns)
    n_ranks = n_rows * n_columns
    return _work(
        (2 * n**3 + 2 * n**2) / n_ranks,
        ELEMENT_BYTES * lines / n_ranks,
        ELEMENT_BYTES * n**2 / n_ranks * trees,
    )


@formula()
def dgemv(n: Quantity, n_ranks: Quantity) -> Work:
    """y <- alpha A x + beta y with N x N doubles: F = (2 N^2 + 2 N) / P, B_M = (8 N^2 + 24 N) / P,
    B_N = 8 (N / P) (P - 1), the all-gather of x.

    >>> dgemv(10, 2)  # 220 / 2, 1040 / 2, 8 x 5
    Work(flops=110.0, memory_bytes=520.0, network_bytes=40.0)
    """
    return _work(
        (2 * n**2 + 2 * n) / n_ranks, (8 * n**2 + 24 * n) / n_ranks, 8 * n / n_ranks * (n_ranks - 1)
    )


@formula()
def ddot(n: Quantity, n_ranks: Quantity) -> Work:
    """x^T y of N doubles: F = 2 (N / P) - 1, B_M = 16 (N / P) + 8, B_N = 8 ceil(log P).

    >>> ddot(64, 4)
    Work(flops=31.0, memory_bytes=264.0, network_bytes=16.0)
    """
    return _work(2 * n / n_ranks - 1, 16 * n / n_ranks + 8, 8 * stages(n_ranks))


@formula(n=count(2))
def fft(n: Quantity, n_ranks: Quantity) -> Work:
    """1D FFT of N complex doubles: F = 5 N log N / P, B_M = 48 N / P, B_N = 32 (N / P) ceil(log P),
    two transposes.

    >>> fft(1024, 4)  # 5 x 10 x 256, 48 x 256, 32 x 256 x 2
    Work(flops=12800.0, memory_bytes=12288.0, network_bytes=16384.0)
    """
    own = n / n_ranks
    return _work(5 * own * np.log2(n), 48 * own, 32 * own * stages(n_ranks))


@formula(n=count(3))
def stencil(n: Quantity, n_ranks: Quantity) -> Work:
    """One sweep of the 5-point stencil over N x N doubles, rows shared: F = 4 (N - 2)^2 / P, B_M =
    56 (N - 2)^2 / P, B_N = 32 N.

    B_N is that of an inner process: a row to and from each of two neighbours. At most N - 2
    processes.

    >>> stencil(66, 4).operational_intensity  # 4 / 56, whatever the size
    0.07142857142857142
    """
    points = (n - 2) ** 2 / n_ranks
    return _work(4 * points, 56 * points, np.where(n_ranks > 1, 32 * n, 0.0))


@formula(n_vertices=count(2))
def boruvka(n_vertices: Quantity, n_edges: Quantity, n_ranks: Quantity) -> Work:
    """Boruvka's minimum spanning tree: F = |E| log|V| / P, B_M = 8 B Sort(|E|) log|V| / P, B_N = 12
    |V| (log|V| / 2) ceil(log P) + 12 |V| log|V|.

    >>> # 1 / (8 (1 + 24/11)): an element is moved 1 + log_M E times
    >>> round(boruvka(2**20, 2**24, 1).operational_intensity, 4)
    0.0393
    """
    rounds = np.log2(n_vertices)
    sort_lines = 1 + n_edges / LINE_ELEMENTS * (1 + np.log2(n_edges) / np.log2(CACHE_ELEMENTS))
    sent = 12 * n_vertices * rounds / 2 * stages(n_ranks) + 12 * n_vertices * rounds
    return _work(
        n_edges * rounds / n_ranks,
        ELEMENT_BYTES * LINE_ELEMENTS * sort_lines * rounds / n_ranks,
        np.where(n_ranks > 1, sent, 0.0),
    )


@formula(n_vertices=count(16))
def dijkstra(n_vertices: Quantity, n_edges: Quantity, n_ranks: Quantity) -> Work:
    """Dijkstra's shortest paths: F = (|E| + |V| log|V|) / P, B_M = 8 B (|V| + |E|/B log(|V|/B)) /
    P, B_N = 16 |V| ceil(log P) + 4 (|V|/P) ceil(log P).

    For |V| of at least 16, so that log(|V|/B) is at least 1.

    >>> dijkstra(16, 256, 2)  # (256 + 64) / 2, 8 x 8 x (16 + 32) / 2, 16 x 16 + 4 x 8
    Work(flops=160.0, memory_bytes=1536.0, network_bytes=288.0)
    """
    lines = n_vertices + n_edges / LINE_ELEMENTS * np.log2(n_vertices / LINE_ELEMENTS)
    return _work(
        (n_edges + n_vertices * np.log2(n_vertices)) / n_ranks,
        ELEMENT_BYTES * LINE_ELEMENTS * lines / n_ranks,
        (16 * n_vertices + 4 * n_vertices / n_ranks) * stages(n_ranks),
    )


def _work(flops: Quantity, memory_bytes: Quantity, network_bytes: Quantity) -> Work:
    return Work(plain(flops), plain(memory_bytes), plain(network_bytes))

"""Cardwell 2019, chapter 2, the roofline with communication: Table 2.3's ridge points, Table 2.4 at
the sizes of Table 2.5, the method of Table 2.6.

The measured points behind Table 2.6 were never published, so its numbers cannot be recomputed; the
method can be run anew (:mod:`dlperf.studies.cardwell_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.units import GIGA
from dlperf.models import parallel_algorithms as algorithms
from dlperf.models.ridgeline import RESOURCES, Rates, bounding_resource, projected_s
from dlperf.models.roofline import ridge_point
from dlperf.studies.papers.tables import Row, Table, row

PAPER = "Cardwell 2019"


@dataclass(frozen=True, slots=True)
class ParallelSystem:
    """A row of Table 2.3: memory and network bandwidth in GB/s, peak in GFLOP/s, as printed."""

    name: str
    memory_gb_per_s: str
    network_gb_per_s: str
    peak_gflops_per_s: str

    @property
    def rates(self) -> Rates:
        """The same in SI units."""
        return Rates(
            float(self.peak_gflops_per_s) * GIGA,
            float(self.memory_gb_per_s) * GIGA,
            float(self.network_gb_per_s) * GIGA,
        )


TABLE_2_3 = (
    ParallelSystem("Big Red II", "13.4", "5.7", "14.7"),
    ParallelSystem("Karst", "13.9", "1.2", "22"),
    ParallelSystem("Jetstream", "13.1", "0.34", "43.4"),
)

N_RANKS, GRID = 128, 11
"""Processes on Big Red II and Karst: 128, and 11 x 11 for SUMMA (section 2.6.1)."""
EDGES_PER_VERTEX = 16
"""Of the MST's graphs; the paper does not say. Dijkstra's are taken as complete, |E| = |V|^2."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A row of Table 2.4: its counts at a problem size, and Big Red II's smallest and largest size
    of Table 2.5.
    """

    name: str
    work: Callable[[int], algorithms.Work]
    sizes: tuple[int, int]


ALGORITHMS = (
    Algorithm("SUMMA", lambda n: algorithms.summa(n, GRID, GRID), (242, 61_952)),
    Algorithm("DGEMV", lambda n: algorithms.dgemv(n, N_RANKS), (256, 524_288)),
    Algorithm("DDOT", lambda n: algorithms.ddot(n, N_RANKS), (256, 1_073_741_824)),
    Algorithm("1D FFT", lambda n: algorithms.fft(n, N_RANKS), (256, 536_870_912)),
    Algorithm("Stencil", lambda n: algorithms.stencil(n, N_RANKS), (256, 131_072)),
    Algorithm(
        "MST", lambda v: algorithms.boruvka(v, EDGES_PER_VERTEX * v, N_RANKS), (65_536, 67_108_864)
    ),
    Algorithm("Dijkstra", lambda v: algorithms.dijkstra(v, v * v, N_RANKS), (256, 32_768)),
)

TABLE_2_6 = {
    "SUMMA": ("58.6", "95.1", "99.1"),
    "1D FFT": ("90", "98.1", "99.4"),
    "Stencil": ("33.3", "85.4", "96"),
    "MST": ("100", "100", "100"),
    "DGEMV": ("-12.9", "21.2", "89.9"),
    "DDOT": ("75.7", "85.1", "96.6"),
    "Dijkstra": ("87.1", "98.2", "99.6"),
}
"""Percentage change by algorithm, on Big Red II, Karst and Jetstream, as printed."""


def mape_percent(actual: Sequence[float], predicted: Sequence[float]) -> float:
    """Mean absolute percentage error, 100/n sum |(actual - predicted) / actual| (equation 2.6).
    Raises DlperfError for no points or unequal numbers of them.

    >>> mape_percent([2.0, 4.0], [3.0, 4.0])
    25.0
    """
    if not actual or len(actual) != len(predicted):
        raise DlperfError(
            f"{len(actual)} measured and {len(predicted)} predicted points; a mean error needs as"
            " many of both, and at least one"
        )
    return 100.0 * sum(abs(a - p) / a for a, p in zip(actual, predicted)) / len(actual)


def percentage_change(original_mape: float, new_mape: float) -> float:
    """The improvement of the error, 100 (original - new) / original.

    Section 2.6.2 prints the other sign, but calls 100 the best value and negative ones worse, as
    Table 2.6 uses it.

    >>> percentage_change(200.0, 50.0), percentage_change(50.0, 55.0)
    (75.0, -10.0)
    """
    return 100.0 * (original_mape - new_mape) / original_mape


def ridge_points() -> Table:
    """The ridge points that follow from Table 2.3, in FLOP per byte of memory (OI) and of network
    traffic (CAI).
    """
    return Table(
        PAPER,
        "ridge points of Table 2.3",
        ("system", "memory_GB/s", "network_GB/s", "GFLOP/s"),
        ("OI_FLOP/byte", "CAI_FLOP/byte"),
        tuple(
            row(
                (s.name, s.memory_gb_per_s, s.network_gb_per_s, s.peak_gflops_per_s),
                ridge_point(s.rates.peak_flops_per_s, s.rates.memory_bytes_per_s),
                ridge_point(s.rates.peak_flops_per_s, s.rates.network_bytes_per_s),
            )
            for s in TABLE_2_3
        ),
        ("The paper draws the ridge points (Figure 2.3) and prints their inputs only.",),
    )


def _intensity_row(algorithm: Algorithm, size: int) -> Row:
    work = algorithm.work(size)
    counts = (work.flops, work.memory_bytes, work.network_bytes)
    bounds = (RESOURCES[int(bounding_resource(*counts, system.rates))] for system in TABLE_2_3)
    return row(
        (algorithm.name, f"{size:,}", "/".join(bounds)),
        work.operational_intensity,
        work.communication_intensity,
        *(work.flops / projected_s(*counts, system.rates) / GIGA for system in TABLE_2_3),
    )


def intensities() -> Table:
    """Table 2.4 evaluated at the smallest and largest sizes of Table 2.5 (Big Red II), with what
    each system may reach (equation 2.5) and what bounds it.
    """
    return Table(
        PAPER,
        "Table 2.4 at the sizes of Table 2.5",
        ("algorithm", "size", "bound"),
        ("OI", "CAI", *(f"{system.name}_GFLOP/s" for system in TABLE_2_3)),
        tuple(
            _intensity_row(algorithm, size) for algorithm in ALGORITHMS for size in algorithm.sizes
        ),
        (
            (
                f"{N_RANKS} processes, SUMMA {GRID} x {GRID}; readings of Table 2.4 are in"
                " dlperf/models/parallel_algorithms.py. GFLOP/s of one process (equation 2.5)."
            ),
            (
                f"The size of MST and Dijkstra is |V|; |E| is unsaid, {EDGES_PER_VERTEX} |V| for"
                " MST and |V|^2 for Dijkstra here."
            ),
            (
                "SUMMA's OI tends to 2 sqrt(2048) / 8 = 11.3 as printed; the text reads"
                ' "approximately 8" off its figure.'
            ),
        ),
    )


def _error_ratio(change: str) -> float:
    """How many times smaller the error is, from a printed percentage change; 100 is rounded."""
    return 100.0 / (100.0 - min(float(change), 99.95 if "." in change else 99.5))


def improvements() -> Table:
    """Ratios of errors that follow from Table 2.6: that of the original roofline over that of the
    communication roofline.
    """
    names = tuple(system.name for system in TABLE_2_3)
    return Table(
        PAPER,
        "Table 2.6, percentage change",
        ("algorithm", *(f"{name}_%" for name in names)),
        tuple(f"{name}_ratio" for name in names),
        tuple(
            row((name, *printed), *map(_error_ratio, printed))
            for name, printed in TABLE_2_6.items()
        ),
        (
            (
                "MAPE of the original roofline / MAPE of the communication roofline, which follows"
                " from the printed change; 100 is rounded, so at least 200."
            ),
            (
                "The measured points were not published. torchrun --nproc-per-node 2 -m"
                " dlperf.studies.cardwell_kernels measures such a table anew."
            ),
        ),
    )


def tables() -> list[Table]:
    """Chapter 2."""
    return [ridge_points(), intensities(), improvements()]

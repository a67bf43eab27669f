"""Yang, Kurth, Williams, "Hierarchical Roofline Analysis for GPUs: Accelerating Performance
Optimization for the NERSC-9 Perlmutter System", CUG 2019.

The paper prints few numbers and draws many. What is recomputed, and from what:

- the roofs and the GPP kernel's points (nw = 1..6) are those of the authors' own plotting example
  (github.com/cyanguwa/nersc-roofline, Plotting/data_hierarchical.txt), the data of Figures 1 to 3:
  by section II.A those of L2, HBM and FP64 with and without FMA are measured (ERT), that of L1 is
  theoretical;
- the data sheet is NVIDIA's for the Tesla V100 SXM2 (80 multiprocessors at 1.53 GHz boost: 7.8
  TFLOP/s FP64, 900 GB/s HBM2, 125 TFLOP/s tensor cores);
- a rate measured in the paper's run (GPP's, conv2d's) is compared with a bound and enters none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlperf.core.units import GIGA, MEGA, TERA
from dlperf.models import memory_hierarchy
from dlperf.models.roofline import ridge_point
from dlperf.ops import gpu_kernels
from dlperf.ops.gpu_kernels import Instructions, KernelWork
from dlperf.ops.roofs import Ceiling, Roof, Roofs
from dlperf.studies.papers.tables import Entry, Row, Table, row

PAPER = "Yang, Kurth, Williams 2019"
LEVELS = ("L1", "L2", "HBM")
LEVEL_GB_PER_S = ("14336", "2996.77", "828.758")
FMA_GFLOPS_PER_S, NO_FMA_GFLOPS_PER_S = "7068.86", "3535.79"
"""FP64, as printed in the authors' example."""


V100_UNITS, V100_BOOST_HZ = 80, 1.53 * GIGA
"""Multiprocessors and boost clock of the Tesla V100 SXM2, by its data sheet."""
V100_L1_BYTES_PER_CYCLE, V100_HBM_BYTES_PER_S = 128, 900 * GIGA
V100_FP64_FLOPS_PER_S = 2.0 * V100_UNITS * 32 * V100_BOOST_HZ
"""Units x multiply-adds a cycle x 2 FLOP x boost clock."""
V100_TENSOR_FLOPS_PER_S = 2.0 * V100_UNITS * 512 * V100_BOOST_HZ
"""The same with the tensor cores' multiply-adds."""


class Point(NamedTuple):
    """A GPP run: its intensity at each level (L1, L2, HBM) in FLOP per byte and its rate in
    GFLOP/s, as the example prints them.
    """

    nw: int
    intensities: tuple[float, float, float]
    gflops_per_s: float


GPP = (
    Point(1, (0.865326481, 2.250285265, 2.584785579), 2085.756683),
    Point(2, (1.556526957, 3.34359685, 4.738878073), 3593.593112),
    Point(3, (2.222121895, 3.245471837, 6.892970567), 4381.739349),
    Point(4, (2.863508257, 3.766406852, 9.047063062), 4625.535516),
    Point(5, (3.446245893, 4.356477696, 11.08619259), 4599.764097),
    Point(6, (4.034947498, 5.182021625, 13.21154434), 4692.209405),
)

GPP_MIX = Instructions(n_add=20, n_mul=20, n_fma=60)
"""Section IV.A: 60 of 100 instructions are multiply-adds; how many of the others add is open."""
V100 = Roofs(
    tuple(
        Roof(level, float(rate) * GIGA, "ERT")
        for level, rate in zip(gpu_kernels.LEVELS, LEVEL_GB_PER_S)
    ),
    (
        Ceiling(
            "float64",
            float(FMA_GFLOPS_PER_S) * GIGA,
            float(FMA_GFLOPS_PER_S) * GIGA / 2,
            "half of FMA",
        ),
    ),
)
"""The example's roofs; without FMA half of the peak, as in equation 7."""


def roofs() -> Table:
    """Figure 1's roofs and the ridge points that follow, in FLOP per byte; the machine balance that
    section IV.B speaks of is HBM's.
    """
    peaks = np.array([FMA_GFLOPS_PER_S, NO_FMA_GFLOPS_PER_S], dtype=float)
    return Table(
        PAPER,
        "Figure 1, ridge points",
        ("level", "GB/s"),
        ("ridge_FMA_FLOP/byte", "ridge_no_FMA_FLOP/byte"),
        tuple(
            row((level, rate), *np.asarray(ridge_point(peaks, float(rate))))
            for level, rate in zip(LEVELS, LEVEL_GB_PER_S)
        ),
        (
            (
                f"FP64 peaks: FMA {FMA_GFLOPS_PER_S}, no FMA {NO_FMA_GFLOPS_PER_S} GFLOP/s. The"
                " paper draws the ridge points and prints their inputs only."
            ),
        ),
    )


def data_sheet() -> Table:
    """The V100's peaks worked out from its data sheet, in the units that the paper and its example
    print.
    """
    fma, no_fma = float(FMA_GFLOPS_PER_S), float(NO_FMA_GFLOPS_PER_S)
    l1_gb_per_s, _, hbm_gb_per_s = map(float, LEVEL_GB_PER_S)
    l1_ghz = l1_gb_per_s / (V100_UNITS * V100_L1_BYTES_PER_CYCLE)
    return Table(
        PAPER,
        "section II, measured and data sheet",
        ("quantity", "value"),
        ("value",),
        (
            row(("tensor cores, TFLOP/s", "II.B"), Entry("125", V100_TENSOR_FLOPS_PER_S / TERA)),
            row(("no FMA / FMA, measured", "II.A: half"), Entry("0.5", no_fma / fma)),
            row(
                ("FP64 peak over measured, %", "II.A: about 10 %"),
                100 * (V100_FP64_FLOPS_PER_S / GIGA / fma - 1),
            ),
            row(("clock behind the L1 roof, GHz", "II.A: theoretical"), l1_ghz),
            row(
                ("HBM peak over measured, %", "II.A: about 10 %"),
                100 * (V100_HBM_BYTES_PER_S / GIGA / hbm_gb_per_s - 1),
            ),
        ),
        (
            (
                "FP64 7834 GFLOP/s = 80 x 32 x 2 x 1.53 GHz; tensor cores 80 x 512 x 2 x 1.53 GHz;"
                " HBM2 900 GB/s; L1 80 x 128 byte a cycle."
            ),
        ),
    )


def fma_mix() -> Table:
    """Equations 6 and 7 and what section IV.A concludes of GPP at nw = 6."""
    peak, no_fma = float(FMA_GFLOPS_PER_S), float(NO_FMA_GFLOPS_PER_S)
    alpha = float(
        memory_hierarchy.fma_fraction(60, 40)
    )  # of 100 instructions, as nvprof counted them
    beta = float(memory_hierarchy.fma_mix_fraction(alpha))
    measured = GPP[-1].gflops_per_s
    return Table(
        PAPER,
        "section IV.A, FMA mix",
        ("quantity", "value"),
        ("value",),
        (
            row(("alpha, %", "equation 6, 60 of 100 instructions"), Entry("60", 100 * alpha)),
            row(("beta, %", "equation 7"), Entry("80", 100 * beta)),
            row(
                ("GPP at nw = 6 of the FMA peak, %", "IV.A: roughly 66 %"),
                Entry("66", 100 * measured / peak),
            ),
            row(("ceiling beta x FMA, GFLOP/s", "drawn in Figure 3"), beta * peak),
            row(
                ("ceiling with no FMA as measured, GFLOP/s", "not in the paper"),
                memory_hierarchy.mixed_flops_per_s(alpha, peak, no_fma),
            ),
            row(
                ("GPP at nw = 6 of its ceiling, %", "not in the paper"),
                100 * measured / (beta * peak),
            ),
        ),
    )


def _gpp_row(point: Point) -> Row:
    flops = GPP_MIX.flops
    rate = point.gflops_per_s * GIGA
    work = KernelWork(
        flops / rate,
        {"double": GPP_MIX},
        None,
        False,
        {level: flops / x for level, x in zip(gpu_kernels.LEVELS, point.intensities)},
    )
    place = gpu_kernels.placement(work, V100)
    assert place is not None  # no count and no roof is unknown
    lowest = {"compute": "FMA mix", "DRAM": "HBM"}.get(place.bound, place.bound)
    return row(
        (point.nw, lowest, f"{point.gflops_per_s:.1f}"),
        place.attainable_flops_per_s / GIGA,
        100 * rate / place.attainable_flops_per_s,
        *(point.nw / np.array(point.intensities) * GPP[0].intensities),
    )


def gpp() -> Table:
    """Figure 2: GPP under the hierarchical roofline, equation 1 at every level. The lowest roof
    includes the mix of nw = 6 for all nw.
    """
    return Table(
        PAPER,
        "Figure 2, GPP (nw = 1..6)",
        ("nw", "lowest roof", "GFLOP/s"),
        ("attainable_GFLOP/s", "reached_%", *(f"{level}_bytes_rel" for level in LEVELS)),
        tuple(map(_gpp_row, GPP)),
        (
            (
                "Section IV.A: bound by HBM at low nw, never by L1 or L2; L1 and HBM move roughly"
                " constant bytes, L2 more and more."
            ),
            "Bytes are relative to nw = 1, the FLOPs growing as nw.",
        ),
    )


def statements() -> Table:
    """Single numbers of sections III and IV that follow from others."""
    # II.A: linear extrapolation from FP64
    fp32_tflops_per_s = 2 * float(FMA_GFLOPS_PER_S) * GIGA / TERA
    return Table(
        PAPER,
        "sections III and IV",
        ("quantity", "value"),
        ("value",),
        (
            row(("FP16 conv2d, 100 of 125 TFLOP/s, %", "IV.C"), Entry("80", 100 * 100 / 125)),
            row(
                (
                    "FP32 conv2d, 13 TFLOP/s of the FP32 FMA peak, %",
                    "IV.C: even closer to the peak",
                ),
                100 * 13 / fp32_tflops_per_s,
            ),
            row(
                ("GSRB stencils of a 128^3 box, millions", "III.B: 128^3 / 2"),
                Entry("1", 128**3 / 2 / MEGA),
            ),
            row(("stride 4 in double complex words, bytes", "IV.A"), Entry("64", 4 * 16)),
            row(("stride 2 in double complex words, bytes", "IV.A"), Entry("32", 2 * 16)),
            *(
                row(
                    (
                        f"HPGMG intensity left by ghost zones, {dim}^3 boxes",
                        "IV.B: dim^3 / (dim + 4)^3",
                    ),
                    dim**3 / (dim + 4) ** 3,
                )
                for dim in (16, 32, 64, 128)
            ),
        ),
    )


def tables() -> list[Table]:
    """Every number of the paper that can be recomputed."""
    return [roofs(), data_sheet(), fma_mix(), gpp(), statements()]

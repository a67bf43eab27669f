"""The hierarchical roofline: one roof per level of the memory, ceilings for instructions that are
no fused multiply-add.

Yang, Kurth, Williams, "Hierarchical Roofline Analysis for GPUs: Accelerating Performance
Optimization for the NERSC-9 Perlmutter System", CUG 2019; the levels after Koskela et al., ISC
2018. The last axis of an argument called ``level_...`` runs over the levels of the memory,
innermost first; everything else is a number or an array that broadcasts against the other axes. SI
base units.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.models.arguments import POSITIVE, Quantity, formula

COMPUTE = -1
"""What :func:`binding_level` answers where no memory binds."""


@formula()
def level_intensities(flops: Quantity, level_bytes: ArrayLike) -> NDArray[np.float64]:
    """Arithmetic intensity at every level: AI_level = FLOPs / Bytes_level, in FLOP per byte.

    Yang et al. 2019, equation 2. `flops` [FLOP] of shape (...), `level_bytes` [bytes] of shape
    (..., levels): what each level moved to and from its inner neighbour. A level that moved nothing
    has infinite intensity, without FLOPs too: it limits nothing. Raises DlperfError for negative
    counts.

    >>> level_intensities(8.0, [4.0, 2.0, 0.0]).tolist()
    [2.0, 4.0, inf]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        intensities = np.divide(np.asarray(flops)[..., None], level_bytes)
    return np.where(np.greater(level_bytes, 0), intensities, np.inf)


@formula()
def attainable_flops_per_s(
    level_intensity: ArrayLike, peak_flops_per_s: Quantity, level_bytes_per_s: ArrayLike
) -> Quantity:
    """Attainable performance in FLOP/s under all roofs: min(peak, min over levels of bandwidth x
    intensity).

    Yang et al. 2019, equation 1 with the bandwidths of section II.A. `level_intensity` [FLOP/byte]
    of shape (..., levels), infinite where a level moves nothing; `peak_flops_per_s` of shape (...);
    `level_bytes_per_s` of shape (levels,). An upper bound: every level is supposed to move at its
    full rate while the others and the arithmetic do. Latency is in no roof. Raises DlperfError for
    negative intensities, or rates that are not positive.

    >>> float(attainable_flops_per_s([0.5, 2.0], 100.0, [80.0, 10.0]))  # min(100, 40, 20)
    20.0
    """
    slopes = np.multiply(level_intensity, level_bytes_per_s)
    return np.asarray(np.minimum(peak_flops_per_s, slopes.min(axis=-1)))


@formula()
def time_s(compute_s: Quantity, level_bytes: ArrayLike, level_bytes_per_s: ArrayLike) -> Quantity:
    """Least time in seconds: max(compute, max over levels of bytes / bandwidth).

    The model of :func:`attainable_flops_per_s` solved for time; the arithmetic comes in as seconds,
    so that its parts may run under different ceilings (:func:`compute_s`). Shapes (...), (...,
    levels), (levels,). Raises as there.

    >>> float(time_s(0.5, [80.0, 20.0], [80.0, 10.0]))
    2.0
    """
    memory_s = np.divide(level_bytes, level_bytes_per_s)
    return np.asarray(np.maximum(compute_s, memory_s.max(axis=-1)))


@formula()
def binding_level(
    compute_s: Quantity, level_bytes: ArrayLike, level_bytes_per_s: ArrayLike
) -> NDArray[np.int64]:
    """Which roof is the lowest: the place of a level on the last axis, or :data:`COMPUTE`; of
    equals the arithmetic, then the inner level.

    Arguments as for :func:`time_s`.

    >>> [int(binding_level(s, [80.0, 20.0], [80.0, 10.0])) for s in (0.5, 3.0)]
    [1, -1]
    """
    memory_s = np.divide(level_bytes, level_bytes_per_s)
    return np.where(memory_s.max(axis=-1) > compute_s, memory_s.argmax(axis=-1), COMPUTE)


@formula()
def fma_fraction(fma_instructions: Quantity, other_instructions: Quantity) -> Quantity:
    """alpha: the share of fused multiply-adds among floating-point instructions.

    Yang et al. 2019, equation 6. Instructions of equal width, predicated ones left out. Raises
    DlperfError for negative counts, or none at all.

    >>> fma_fraction(60, 40)
    0.6
    """
    total = fma_instructions + other_instructions
    return fma_instructions / POSITIVE.check("the number of floating-point instructions", total)


@formula()
def fma_mix_fraction(alpha: Quantity) -> Quantity:
    """beta: the share of the FMA peak that an instruction mix can reach, (2 alpha + (1 - alpha)) /
    2.

    Yang et al. 2019, equation 7. A fused multiply-add is 2 FLOP, any other instruction 1, and all
    issue at the same rate. Holds where the "no FMA" ceiling is half of the peak; a processor with
    adders beside its multiply-add units, or with kernels that do not fill them, has another one,
    which :func:`mixed_flops_per_s` takes as measured. Raises DlperfError for an alpha outside 0..1.

    >>> fma_mix_fraction(0.6)
    0.8
    """
    return (alpha * 2 + (1 - alpha)) / 2


@formula()
def compute_s(
    fma_flops: Quantity,
    other_flops: Quantity,
    fma_flops_per_s: Quantity,
    other_flops_per_s: Quantity,
) -> Quantity:
    """Least time of arithmetic in seconds, multiply-adds at their peak and all else at its own:
    F_fma / P_fma + F_other / P_other.

    Equation 7 of Yang et al. 2019 with the ceiling for other instructions as measured instead of
    P_fma / 2, to which it reduces. The two kinds are supposed not to overlap: errs high where
    adders and multiply-add units work side by side. Raises DlperfError for negative counts or rates
    that are not positive.

    >>> compute_s(40.0, 10.0, fma_flops_per_s=20.0, other_flops_per_s=10.0)
    3.0
    """
    return fma_flops / fma_flops_per_s + other_flops / other_flops_per_s


@formula()
def mixed_flops_per_s(
    alpha: Quantity, fma_flops_per_s: Quantity, other_flops_per_s: Quantity
) -> Quantity:
    """The ceiling of a mix of instructions in FLOP/s: (1 + alpha) / (2 alpha / P_fma + (1 - alpha)
    / P_other).

    Per instruction the mix has 2 alpha + (1 - alpha) FLOP, in the time of :func:`compute_s`. With
    P_other = P_fma / 2 it is beta P_fma (Yang et al. 2019, equation 7). Raises DlperfError for an
    alpha outside 0..1 or rates that are not positive.

    >>> mixed_flops_per_s(0.6, 100.0, 50.0)
    80.0
    """
    seconds = compute_s(2 * alpha, 1 - alpha, fma_flops_per_s, other_flops_per_s)
    return (1 + alpha) / seconds

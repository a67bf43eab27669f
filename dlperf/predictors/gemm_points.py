"""Measured matrix products of a machine file: size, dtype, orientation, time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Kernel, Machine
from dlperf.core.trace import Op, TensorSpec
from dlperf.ops.roofs import roofs_of

_FIRST_MATRIX = {"aten.mm": 0, "aten.addmm": 1, "aten._addmm_activation": 1, "aten.linear": 0}
"""Operators that are one matrix product of a fully connected layer, with the index of its left
matrix among the tensors.
"""


@dataclass(frozen=True, slots=True)
class GemmSize:
    """(m x k) times (k x n): k is contracted. `orientation` is BLAS's pair of N and T, `dtype` the
    first matrix's.
    """

    m: int
    k: int
    n: int
    dtype: str
    orientation: str

    @property
    def flops(self) -> int:
        """2 m k n."""
        return 2 * self.m * self.k * self.n

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(m, k, n)."""
        return self.m, self.k, self.n


def _letter(matrix: TensorSpec) -> str:
    """T where the rows are contiguous in memory only after a transposition."""
    rows, columns = matrix.strides
    return "T" if rows == 1 and columns != 1 else "N"


def gemm_size(op: Op) -> GemmSize | None:
    """The matrix product that an op is; None if it is none.

    A linear layer on more than two dimensions contracts the last one; the others together are m.
    """
    first, is_linear = _FIRST_MATRIX.get(op.packet), op.packet == "aten.linear"
    if first is None or len(op.inputs) < first + 2:
        return None
    left, right = op.inputs[first : first + 2]
    if len(right.shape) != 2 or not left.shape or not (is_linear or len(left.shape) == 2):
        return None
    k, n = left.shape[-1], right.shape[0 if is_linear else 1]
    orientation = "NT" if is_linear else _letter(left) + _letter(right)
    return GemmSize(left.numel // max(k, 1), k, n, left.dtype, orientation)


def measured_gemms(machine: Machine, threads: int) -> tuple[tuple[GemmSize, Kernel], ...]:
    """The measured matrix products at the thread count nearest to `threads` (the lower one of two).

    Raises DlperfError where the machine file holds none at all.
    """
    counts = {kernel.threads for kernel in machine.kernels if kernel.family == "gemm"}
    if not counts:
        raise _no_products(machine)
    nearest = min(counts, key=lambda count: (abs(math.log(count / threads)), count))
    return tuple(
        (size, kernel)
        for kernel in machine.family("gemm", nearest)
        if (size := gemm_size(kernel.op)) is not None and size.flops
    )


def peak_flops_per_s(machine: Machine, threads: int) -> dict[str, float]:
    """The highest rate of any measured matrix product, by dtype, in FLOP/s: 2 m k n / least sample.

    Raises DlperfError where the machine file holds no matrix product.
    """
    peaks = {one.dtype: one.fma_flops_per_s for one in roofs_of(machine, threads).ceilings}
    if not peaks:
        raise _no_products(machine)
    return peaks


def _no_products(machine: Machine) -> DlperfError:
    return DlperfError(
        f"{machine.path or 'machine'}: holds no matrix products; run dlperf calibrate"
    )

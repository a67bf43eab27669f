"""Measured matrix products of a machine file: size, dtype, orientation, time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Kernel, Machine
from dlperf.core.trace import Op, TensorSpec
from dlperf.ops import counts as work

_FIRST_MATRIX = {"aten.mm": 0, "aten.addmm": 1, "aten._addmm_activation": 1, "aten.linear": 0}
PRODUCTS = frozenset(_FIRST_MATRIX)
"""Operators that are one matrix product of a fully connected layer."""


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
    first = _FIRST_MATRIX.get(op.packet)
    if first is None or len(op.args) < first + 2:
        return None
    left, right = op.args[first], op.args[first + 1]
    if (
        not isinstance(left, TensorSpec)
        or not isinstance(right, TensorSpec)
        or len(right.shape) != 2
        or not left.shape
    ):
        return None
    if op.packet == "aten.linear":
        k = left.shape[-1]
        return GemmSize(left.numel // max(k, 1), k, right.shape[0], left.dtype, "NT")
    if len(left.shape) != 2:
        return None
    return GemmSize(
        left.shape[0], left.shape[1], right.shape[1], left.dtype, _letter(left) + _letter(right)
    )


def measured_gemms(machine: Machine, threads: int) -> tuple[tuple[GemmSize, Kernel], ...]:
    """The measured matrix products at the thread count nearest to `threads` (the lower one of two).

    Raises DlperfError where the machine file holds none at all.
    """
    counts = {kernel.threads for kernel in machine.kernels if kernel.family == "gemm"}
    if not counts:
        raise DlperfError(
            f"{machine.path or 'machine'}: holds no matrix products; run dlperf calibrate"
        )
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
    peaks: dict[str, float] = {}
    for size, kernel in measured_gemms(machine, threads):
        rate = (work.op_flops(kernel.op) or 0) / kernel.samples.minimum
        peaks[size.dtype] = max(rate, peaks.get(size.dtype, 0.0))
    if not peaks:
        raise DlperfError(
            f"{machine.path or 'machine'}: holds no matrix products; run dlperf calibrate"
        )
    return peaks

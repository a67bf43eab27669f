"""Cardwell 2019, chapter 3: the parameterised roofline, exactly as published.

The forward pass of fully connected, ReLU and sigmoid layers:

- fully connected: P = min{f(k, m, n), OI x M_peak} (equation 3.1), time 2 m k n / P. f is the
  measured rate of a matrix product of exactly that size, OI counts inputs, weights and outputs
  once, M_peak is STREAM; the bias is free;
- ReLU: 4 x batch x n / M_peak seconds; sigmoid: 30 x 4 x batch x n / M_peak seconds.

It says nothing of other layers, of the loss, of the backward pass, or of the optimizer: those are
null. Reshaping is free, as in the paper.

One thing is added, since the paper contains nothing of sizes that are not in its table: the rate is
then interpolated between the nearest measured sizes, and such an op says ``interpolated``
(``extrapolated`` outside the measured range).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlperf.core.machine import Machine, lacks
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import ITEM_BYTES, Op, TensorSpec, Trace
from dlperf.models.roofline import activation_s, operational_intensity, parameterised_flops_per_s
from dlperf.ops import counts
from dlperf.ops.blocking import matrices_of
from dlperf.ops.roofs import roofs_of
from dlperf.predictors.base import register


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
    def moved_bytes(self) -> int:
        """Bytes of the three matrices."""
        n_elements = self.m * self.k + self.k * self.n + self.m * self.n
        return ITEM_BYTES.get(self.dtype, 4) * n_elements

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
    matrices, is_linear = matrices_of(op), op.packet == "aten.linear"
    if matrices is None:
        return None
    left, right = matrices
    if len(right.shape) != 2 or not (is_linear or len(left.shape) == 2):
        return None
    k, n = left.shape[-1], right.shape[0 if is_linear else 1]
    orientation = "NT" if is_linear else _letter(left) + _letter(right)
    return GemmSize(left.numel // max(k, 1), k, n, left.dtype, orientation)


def peak_flops_per_s(machine: Machine, threads: int) -> dict[str, float]:
    """The highest rate of any measured matrix product, by dtype, in FLOP/s: 2 m k n / least sample.

    Raises DlperfError where the machine file holds no matrix product.
    """
    peaks = {one.dtype: one.fma_flops_per_s for one in roofs_of(machine, threads).ceilings}
    if not peaks:
        raise lacks(machine, "matrix products")
    return peaks


ACTIVATION_WEIGHTS = {"aten.relu": 1, "aten.relu_": 1, "aten.sigmoid": 30, "aten.sigmoid_": 30}
"""How much an element of each activation weighs; an elementary function counts as 30."""
N_NEIGHBOURS = 8
"""Measured sizes that an interpolated rate rests on."""


@register
class GemmTable:
    """The published predictor.

    A product whose size is in the machine file says ``measured``, everything else ``interpolated``
    or ``extrapolated`` (an activation is never priced by its own measurement). Bounds are
    ``compute`` and ``DRAM``.
    """

    name = "gemm-table"

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list of the forward pass; layers that do anything else in it are named in
        `unsupported`.

        Raises DlperfError where the machine file holds no memory bandwidth, or no matrix product
        though the network has one.
        """
        forward = [
            (index, op)
            for index, op in enumerate(trace.ops)
            if op.phase == "forward" and not _is_free(op)
        ]
        unsupported = tuple(
            dict.fromkeys(
                op.layer
                for _, op in forward
                if gemm_size(op) is None and op.packet not in ACTIVATION_WEIGHTS
            )
        )
        bandwidth = machine.dram_bytes_per_s(threads)
        priced = [(index, op) for index, op in forward if op.layer not in unsupported]
        table = GemmRates(machine, threads) if any(gemm_size(op) for _, op in priced) else None
        items, notes = [], set()
        for index, op in priced:
            size = gemm_size(op)
            if size is None or table is None:
                weight = ACTIVATION_WEIGHTS[op.packet]
                seconds = float(activation_s(op.inputs[0].numel, bandwidth, weight))
                items.append(Item(op.layer, "forward", seconds, "DRAM", "interpolated", op=index))
                continue
            rate, source = table.rate(size)
            if size.dtype not in table.dtypes:
                notes.add(
                    f"gemm-table: no {size.dtype} matrix product in the machine file;"
                    f" {table.fallback} stands for it"
                )
            seconds, bound = fully_connected_s(size, rate, bandwidth)
            by_time = seconds or 1.0
            needs = (
                ("compute", size.flops / rate / by_time),
                ("DRAM", size.moved_bytes / bandwidth / by_time),
            )
            items.append(Item(op.layer, "forward", seconds, bound, source, op=index, needs=needs))
        priced_layers = {item.layer for item in items} | set(unsupported)
        for index, op in enumerate(trace.ops):
            if op.phase == "forward" and op.layer not in priced_layers:
                # A layer that only reshapes has its row, and takes no time.
                priced_layers.add(op.layer)
                items.append(
                    Item(op.layer, "forward", 0.0, "DRAM", "interpolated", what="reshape", op=index)
                )
        return Prices(
            tuple(items), phases=("forward",), unsupported=unsupported, notes=tuple(sorted(notes))
        )


def _is_free(op: Op) -> bool:
    return counts.is_view(op) or (counts.op_flops(op) == 0 and counts.op_bytes(op) == 0)


def fully_connected_s(
    size: GemmSize, gemm_flops_per_s: float, bytes_per_s: float
) -> tuple[float, str]:
    """Time of a fully connected layer in seconds and what bounds it, by equation 3.1.

    Cardwell 2019: F / min{f, OI x M_peak}, F = 2 m k n FLOP, OI = F / M with M the bytes of inputs,
    weights and outputs.

    >>> size = GemmSize(2, 10, 5, "float32", "NN")  # 200 FLOP
    >>> fully_connected_s(size, gemm_flops_per_s=100.0, bytes_per_s=1e9)
    (2.0, 'compute')
    """
    if not size.flops:
        return 0.0, "compute"
    intensity = operational_intensity(size.flops, size.moved_bytes)
    rate = float(parameterised_flops_per_s(gemm_flops_per_s, intensity, bytes_per_s))
    return size.flops / rate, "compute" if rate == gemm_flops_per_s else "DRAM"


class GemmRates:
    """f(k, m, n): measured rates of matrix products by size, in FLOP/s, from medians.

    The paper's f knows only sizes. Where the same size was measured in several orientations the
    op's own comes first, then that of a linear layer's forward (NT), then any.
    """

    def __init__(self, machine: Machine, threads: int) -> None:
        counts = {kernel.threads for kernel in machine.kernels if kernel.family == "gemm"}
        if not counts:
            raise lacks(machine, "matrix products")
        # The lower one of two counts as near.
        nearest = min(counts, key=lambda count: (abs(math.log(count / threads)), count))
        self._points = [
            (size, size.flops / kernel.seconds)
            for kernel in machine.family("gemm", nearest)
            if (size := gemm_size(kernel.op)) is not None and size.flops
        ]
        self.dtypes = {size.dtype for size, _ in self._points}
        self.fallback = "float32" if "float32" in self.dtypes else min(self.dtypes)

    def rate(self, size: GemmSize) -> tuple[float, str]:
        """The rate at `size`, and whether it was ``measured``, ``interpolated`` or
        ``extrapolated``.
        """
        dtype = size.dtype if size.dtype in self.dtypes else self.fallback
        points = [(at, rate) for at, rate in self._points if at.dtype == dtype]
        same = {at.orientation: rate for at, rate in points if at.sizes == size.sizes}
        if same:
            orientation = next((o for o in (size.orientation, "NT") if o in same), min(same))
            return same[orientation], "measured" if dtype == size.dtype else "extrapolated"
        alike = [(at, rate) for at, rate in points if at.orientation == size.orientation] or points
        wanted = np.log2(np.maximum(size.sizes, 1))
        sizes = np.log2(np.maximum([at.sizes for at, _ in alike], 1))
        rates = np.array([rate for _, rate in alike])
        is_within = np.all((sizes.min(axis=0) <= wanted) & (wanted <= sizes.max(axis=0)))
        # The rates of the nearest sizes, weighted by 1 / distance^2; distances and the mean are
        # taken of logarithms. The mean stays between the least and the greatest of them.
        distances = ((sizes - wanted) ** 2).sum(axis=1)
        near = np.lexsort((rates, distances))[:N_NEIGHBOURS]
        weights = 1.0 / np.maximum(distances[near], 1e-9)
        rate = float(np.exp(np.average(np.log(rates[near]), weights=weights)))
        is_known = is_within and dtype == size.dtype
        return rate, "interpolated" if is_known else "extrapolated"

"""Cache model: penalties of operands and code by reuse distance, and bandwidth by working set.

All quantities are interpolated between the costs of a machine file, which the micro-benchmarks of
``microbench/cold_start.py`` and ``microbench/stream.py`` measure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlperf.core.code_footprint import UNIT_BYTES, code_of
from dlperf.core.costs import (
    CACHE_MISS,
    CACHE_RESIDENCY,
    CODE_EVICTION,
    COLD_START,
    COLD_STARTS,
    LONG_ROW_BYTES,
    PAGE_EVICTION,
    SHORT_ROW_BYTES,
)
from dlperf.core.machine import Machine
from dlperf.core.trace import Op
from dlperf.ops.roofs import LEVELS, Roofs

Array = npt.NDArray[np.float64]
IN_ORDER = "next"
_ORDERS = {
    "aten.mm": "aten.mm",
    "aten.addmm": "aten.mm",
    "aten.convolution": "aten.convolution",
    "aten.native_batch_norm": "aten.native_batch_norm",
    "aten.native_batch_norm_backward": "aten.native_batch_norm_backward",
    "aten.sum": "aten.sum",
    "aten.mean": "aten.sum",
    "aten.embedding": "aten.embedding",
    "aten.embedding_dense_backward": "aten.embedding",
}
"""The measured operator that touches its operands in the same order, by an operator's code."""


def order_of(packet: str) -> str:
    """The measured operator whose cache misses stand for those of this one.

    >>> order_of("aten.bmm"), order_of("aten.tanh")
    ('aten.mm', 'next')
    """
    return _ORDERS.get(code_of(packet), IN_ORDER)


def short_rows_frac(op: Op) -> float:
    """By which part an operator's cache misses are those of short rows, linear in the logarithm of
    its rows' bytes: a batch norm's backward, whose rows are images, one channel after the other.

    >>> from dlperf.core.trace import TensorSpec
    >>> images, channel = TensorSpec.contiguous(48, 96, 6, 6), TensorSpec.contiguous(96)
    >>> short_rows_frac(Op("aten.native_batch_norm_backward.default", (images, images, channel)))
    1.0
    """
    if order_of(op.packet) != "aten.native_batch_norm_backward":
        return 0.0
    images = op.inputs[0]
    if len(images.shape) > 2 and images.strides[1] == 1:  # channels last: all is in order
        return 0.0
    row_bytes = max(images.nbytes // max(math.prod(images.shape[:2]), 1), SHORT_ROW_BYTES)
    longest = LONG_ROW_BYTES / SHORT_ROW_BYTES
    return max(0.0, math.log(LONG_ROW_BYTES / row_bytes) / math.log(longest))


@dataclass(frozen=True)
class ReuseDistance:
    """What a step touches between two uses of the same code or data.

    Bytes touched, the relative code footprint that ran (:mod:`dlperf.core.code_footprint`), and the
    bytes touched on new pages.
    """

    n_bytes: float = 0.0
    code_size: int = 0
    fresh_bytes: float = 0.0


@dataclass(frozen=True)
class CacheModel:
    """Cache penalties of one machine at one measured thread count."""

    machine: Machine
    threads: int
    roofs: Roofs

    @cached_property
    def bytes_per_s(self) -> dict[str, float]:
        """Bandwidth by level of the memory hierarchy; a level without a measurement has that of
        the next outer one.

        Raises DlperfError where the file holds no memory measurement.
        """
        measured = {roof.level: roof.bytes_per_s for roof in self.roofs.bandwidths}
        outer = measured.get("DRAM") or self.machine.dram_bytes_per_s(self.threads)
        found: dict[str, float] = {}
        for level in reversed(LEVELS):
            outer = found[level] = measured.get(level, outer)
        return found

    def level_numbers(self, n_bytes: Array) -> npt.NDArray[np.int64]:
        """Indices in LEVELS of the innermost level that holds `n_bytes` (n,)."""
        fits = [n_bytes <= (size or -1) for size in self.machine.cpu.caches_bytes]
        return np.asarray(np.argmax([*fits, np.ones(len(n_bytes), dtype=bool)], axis=0))

    @cached_property
    def _sweep(self) -> tuple[Array, Array]:
        """log2 of working sets, and seconds per byte of STREAM triad over them, non-decreasing."""
        points = self.machine.bandwidth_curve("triad", self.threads)
        if not points:
            return np.zeros(1), np.full(1, 1.0 / self.bytes_per_s["DRAM"])
        # Interference only adds: a smaller working set takes at most what a larger one takes.
        costs = np.minimum.accumulate(
            [1.0 / point.median_bytes_per_s for point in reversed(points)]
        )[::-1]
        return np.log2([point.working_set_bytes for point in points]), costs

    def seconds_per_byte(self, n_bytes: Array) -> Array:
        """Seconds per byte at working sets `n_bytes` (n,), by the STREAM triad sweep, linear in the
        logarithm.
        """
        return np.interp(_log2(n_bytes), *self._sweep)

    @property
    def private_bytes(self) -> float:
        """Size of the caches that no other core shares, in bytes; 0 where unknown."""
        return float(self.threads * max(self.machine.cpu.caches_bytes[:2]))

    @cached_property
    def _penalties(self) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
        """Coordinates and penalties in seconds, by kind and code, non-decreasing. Of cold starts by
        bytes and by instruction-cache pressure it is one curve over the code footprint.
        """
        points: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for cost in self.machine.costs_of(*COLD_STARTS, CACHE_MISS, threads=self.threads):
            kind, code, amount = cost.key.kind, cost.key.of, float(cost.key.at)
            if kind == COLD_START:
                amount /= UNIT_BYTES
            kind = COLD_START if kind == CODE_EVICTION else kind
            points[kind, code].append((math.log2(amount), cost.value))
        curves = {}
        for name, measured in points.items():
            coordinates, seconds = np.array(sorted(measured)).T
            # A quarter of the smallest measured amount evicts nothing of a call's own code.
            curves[name] = [coordinates[0] - 2.0, *coordinates], [0.0, *_rising(seconds)]
        return curves

    def miss_s_per_byte(
        self,
        n_bytes: Array,
        own_bytes: Array,
        seconds: Array | float = 0.0,
        own_s: Array | float = 0.0,
        order: str = IN_ORDER,
    ) -> Array:
        """Cache-miss penalty of an operand over the warm time of its kernel, in seconds per byte.

        `n_bytes` (n,) is the reuse distance in bytes, `seconds` (n,) in time: co-tenants evict part
        of a shared cache meanwhile. `order` is how it is touched (:func:`order_of`).

        A kernel on `own_bytes` (n,) in all that is repeated every `own_s` (n,) finds its operands
        in the caches, except for the part that STREAM triad over as many bytes takes from DRAM. The
        bytes that pass besides its own drive out no more than as many of its operands.
        """
        curves = (self._penalties.get((CACHE_MISS, of)) for of in (order, IN_ORDER))
        curve = next((one for one in curves if one is not None), None)
        if curve is None:
            return np.zeros(len(n_bytes))
        largest = curve[1][-1]
        warm = self._dram_frac(own_bytes) * largest
        driven_out = np.clip(n_bytes / np.maximum(own_bytes, 1.0) - 1.0, 0.0, 1.0)
        far = warm + driven_out * np.maximum(np.interp(_log2(n_bytes), *curve) - warm, 0.0)
        far += self._evicted_frac(seconds, n_bytes) * (largest - far)
        warm += self._evicted_frac(own_s, own_bytes) * (largest - warm)
        return np.asarray(np.maximum(far - warm, 0.0))

    def _dram_frac(self, n_bytes: Array) -> Array:
        """Part of `n_bytes` (n,) that STREAM triad over them takes from DRAM, by its time."""
        shared_s, dram_s = self._shared_s_per_byte, self._sweep[1][-1]
        beyond_s = np.maximum(self.seconds_per_byte(n_bytes) - shared_s, 0.0)
        span_s = max(dram_s, 1.0 / self.bytes_per_s["DRAM"]) - shared_s
        return beyond_s / span_s if span_s > 0 else np.zeros(len(n_bytes))

    def operator_cold_start_s(self, packet: str, since: ReuseDistance) -> float:
        """Cold-start penalty of an operator's own code, in seconds; that of an elementwise operator
        where its code was not measured.
        """
        code = code_of(packet)
        return self.cold_start_s(code if (COLD_START, code) in self._penalties else "next", since)

    def cold_start_s(self, code: str, since: ReuseDistance) -> float:
        """Cold-start penalty in seconds of some code: an operator (``first`` of a step, ``next``,
        ``aten.NAME``, ``convolution_kernel``), a ``module``, ``optimizer``, ``backward`` or
        ``zero_grad``.

        The larger of the penalties by what passed and by page-allocation eviction. Data and code
        share a core's own caches: bytes count as code.
        """
        largest = 0.0
        for kind, amount in (
            (COLD_START, since.code_size + since.n_bytes / UNIT_BYTES),
            (PAGE_EVICTION, since.fresh_bytes),
        ):
            curve = self._penalties.get((kind, code))
            if curve is None or amount <= 0:
                continue
            largest = max(largest, float(np.interp(math.log2(amount), *curve)))
        return largest

    @cached_property
    def _residency(self) -> tuple[Array, Array]:
        """Pauses in milliseconds and slowdowns of data after them, both rising; 1 without
        measurements.
        """
        costs = self.machine.costs_of(CACHE_RESIDENCY, threads=self.threads)
        points = sorted((float(cost.key.at), cost.value) for cost in costs)
        pauses, slowdowns = np.array([(0.0, 1.0), *points]).T
        return pauses, _rising(slowdowns)

    def _evicted_frac(self, seconds: Array | float, n_bytes: Array) -> Array:
        """Part of data at reuse distances `n_bytes` (n,) that co-tenants evict from the shared
        cache within `seconds` (n,); none of what lies in the core's own caches.
        """
        slowdown = np.interp(1e3 * np.asarray(seconds), *self._residency)
        evicted = np.minimum(1.0, self._evicted_frac_at_2 * (slowdown - 1.0))
        return np.where(n_bytes > self.private_bytes, evicted, 0.0)

    @cached_property
    def _evicted_frac_at_2(self) -> float:
        """Evicted fraction of data whose sweep takes twice the time of the shared cache; 0 where
        DRAM is as fast.
        """
        dram_s, shared_s = self._sweep[1][-1], self._shared_s_per_byte
        return float(shared_s / (dram_s - shared_s)) if dram_s > shared_s else 0.0

    @cached_property
    def _shared_s_per_byte(self) -> float:
        """Seconds per byte of STREAM triad in the shared cache."""
        return float(self.seconds_per_byte(np.array([8 * self.private_bytes]))[0])


def _log2(n_bytes: Array) -> Array:
    return np.asarray(np.log2(np.clip(n_bytes, 1.0, 2.0**60)))


def _rising(values: Array) -> Array:
    """Mean of the upper and the lower non-decreasing envelope: an outlier raises no other value as
    far.

    >>> [float(value) for value in _rising(np.array([1.0, 4.0, 2.0, 8.0]))]
    [1.0, 3.0, 3.0, 8.0]
    """
    upper, lower = np.maximum.accumulate(values), np.minimum.accumulate(values[::-1])[::-1]
    return np.asarray((upper + lower) / 2)

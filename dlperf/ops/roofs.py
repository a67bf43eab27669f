"""A machine's roofs as measured: bandwidth of every level of the memory, peak arithmetic by
precision with and without multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlperf.core.costs import ARITHMETIC
from dlperf.core.data_sheet import DataSheet
from dlperf.core.machine import STREAM_BYTES_PER_ELEMENT, Machine
from dlperf.core.state import State
from dlperf.ops import counts

LEVELS = ("L1", "L2", "L3", "DRAM")
CACHE_KERNELS = ("sum", "bag", "update")
"""Memory kernels that go over a working set many times in one call
(:mod:`dlperf.microbench.ceilings`).
"""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Peak arithmetic of one dtype in FLOP/s: the fastest matrix product, and the fastest kernel of
    additions or of products alone.

    `other_source` says where the second comes from: ``add`` or ``mul`` if it was measured, ``half
    of FMA`` if not (Yang et al. 2019, section II.A).
    """

    dtype: str
    fma_flops_per_s: float
    other_flops_per_s: float
    other_source: str

    @property
    def is_measured(self) -> bool:
        """Whether the rate without multiply-adds was measured."""
        return self.other_source != _HALF


_HALF = "half of FMA"
_DATA_SHEET = "data sheet"


@dataclass(frozen=True, slots=True)
class Roof:
    """Bandwidth of a level in bytes/s and the kernel that reached it."""

    level: str
    bytes_per_s: float
    kernel: str


@dataclass(frozen=True, slots=True)
class Roofs:
    """Everything that a hierarchical roofline is drawn from; either part may be empty where a
    machine file lacks it.
    """

    bandwidths: tuple[Roof, ...]
    ceilings: tuple[Ceiling, ...]

    def ceiling(self, dtype: str) -> Ceiling | None:
        """The ceiling of a dtype; of one that was not measured the highest ceiling, which bounds
        from above. None where there are none.
        """
        return next(
            (c for c in self.ceilings if c.dtype == dtype),
            self.ceilings[0] if self.ceilings else None,
        )

    def at_state(self, state: State) -> Roofs:
        """The roofs at a state of the machine, relative to the one that they were measured in."""
        return Roofs(
            tuple(
                replace(roof, bytes_per_s=roof.bytes_per_s / state.factor(roof.level))
                for roof in self.bandwidths
            ),
            tuple(
                replace(
                    one,
                    fma_flops_per_s=one.fma_flops_per_s / state.core,
                    other_flops_per_s=one.other_flops_per_s / state.core,
                )
                for one in self.ceilings
            ),
        )


def roofs_of(machine: Machine, threads: int) -> Roofs:
    """The roofs at the measured thread count nearest to `threads`.

    A level's bandwidth is the best of the memory kernels at working sets well inside it (the median
    over these sets of the best sample). For caches those of :mod:`dlperf.microbench.ceilings` speak
    alone where the file holds them, since STREAM's sweeps of small sets are shorter than the call
    that makes them; for DRAM all do. What comes from farther out passes through a level, so none
    counts as slower than the next one outwards. A device has the roofs of its data sheet.
    """
    if machine.data_sheet is not None:
        return _of_data_sheet(machine.data_sheet)
    return Roofs(tuple(_bandwidths(machine, threads)), tuple(_ceilings(machine, threads)))


def _of_data_sheet(sheet: DataSheet) -> Roofs:
    """The bandwidths that a data sheet states, and its peaks with matrix units."""
    rates = zip(LEVELS, (*sheet.caches_bytes_per_s, sheet.dram_bytes_per_s))
    peaks = {
        dtype: sheet.peak_flops_per_s(dtype, contraction=True)
        for dtype in (*sheet.flops_per_s, *sheet.matrix_flops_per_s)
    }
    ceilings = [
        Ceiling(dtype, peak, sheet.peak_flops_per_s(dtype, contraction=False) / 2, _HALF)
        for dtype, peak in peaks.items()
    ]
    return Roofs(
        tuple(Roof(level, rate, _DATA_SHEET) for level, rate in rates if rate),
        tuple(sorted(ceilings, key=lambda one: -one.fma_flops_per_s)),
    )


def _bandwidths(machine: Machine, threads: int) -> list[Roof]:
    curves = {
        name: curve for name in CACHE_KERNELS if (curve := machine.bandwidth_curve(name, threads))
    }
    beyond = [
        name
        for name, curve in curves.items()
        if machine.level_of(curve[-1].working_set_bytes) == "DRAM"
    ]
    found: list[Roof] = []
    for level in reversed(LEVELS):
        kernels = (
            (*beyond, *STREAM_BYTES_PER_ELEMENT) if level == "DRAM" else tuple(curves) or ("triad",)
        )
        rates = [
            (rate, name)
            for name in kernels
            if (rate := machine.level_bytes_per_s(level, threads, name))
        ]
        if rates:
            best, outer = Roof(level, *max(rates)), found[-1] if found else None
            if outer is not None and outer.bytes_per_s > best.bytes_per_s:
                best = replace(outer, level=level)
            found.append(best)
    return found[::-1]


def _ceilings(machine: Machine, threads: int) -> list[Ceiling]:
    if not machine.threads:
        return []
    nearest = machine.nearest_threads(threads)
    best: dict[str, float] = {}
    for kernel in machine.family("gemm", nearest):
        flops = counts.op_flops(kernel.op)
        if flops and kernel.op.inputs:
            dtype = kernel.op.inputs[-1].dtype
            best[dtype] = max(best.get(dtype, 0.0), flops / kernel.seconds)
    found = []
    for dtype, peak in sorted(best.items(), key=lambda pair: -pair[1]):
        measured = [
            (1 / cost.value, cost.key.of)
            for cost in machine.costs_of(ARITHMETIC, threads=nearest)
            if cost.key.variant == dtype and cost.value
        ]
        found.append(Ceiling(dtype, peak, *max(measured, default=(peak / 2, _HALF))))
    return found

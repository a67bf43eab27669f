"""Layers under the hierarchical roofline: what each moves at every level, and what the roofs allow
it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from dlperf.core.machine import Machine
from dlperf.core.trace import Op, Trace
from dlperf.models import memory_hierarchy
from dlperf.ops.roofs import Roofs
from dlperf.predictors.traffic import trace_traffic


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """A layer in one phase: FLOPs, those of them that are multiply-adds, bytes by level (aligned
    with `levels`, innermost first).

    `dtype` is that of most of its FLOPs (of its bytes, where it has none). `compute_s` is the least
    time of its arithmetic under the ceilings of each op's dtype, multiply-adds and the rest apart;
    None where the machine file holds no matrix product.
    """

    layer: str
    phase: str
    dtype: str
    flops: float
    fma_flops: float
    levels: tuple[str, ...]
    level_bytes: tuple[float, ...]
    compute_s: float | None = None

    def bytes_at(self, level: str) -> float | None:
        """Bytes moved at a level; None for one that the processor is not known to have."""
        return dict(zip(self.levels, self.level_bytes)).get(level)

    def intensity(self, level: str) -> float | None:
        """FLOP per byte of a level; None without FLOPs, or where the level moves nothing."""
        moved = self.bytes_at(level)
        return self.flops / moved if moved and self.flops else None

    @property
    def fma_frac(self) -> float | None:
        """alpha: fused multiply-adds among floating-point instructions (an FMA is 2 FLOP, any other
        1); None without FLOPs.
        """
        return (
            float(memory_hierarchy.fma_fraction(self.fma_flops / 2, self.flops - self.fma_flops))
            if self.flops
            else None
        )

    def binding(self, roofs: Roofs) -> str | None:
        """The lowest roof over the layer: ``compute`` or a level's name; None where nothing is
        moved or no roof is known.
        """
        rates, moved, names = self._aligned(roofs)
        if self.compute_s is None or not rates or not (self.flops or any(moved)):
            return None
        place = int(memory_hierarchy.binding_level(self.compute_s, moved, rates))
        return "compute" if place == memory_hierarchy.COMPUTE else names[place]

    def least_s(self, roofs: Roofs) -> float | None:
        """The least time under all roofs, in seconds; None where no roof is known."""
        rates, moved, _ = self._aligned(roofs)
        return (
            None
            if self.compute_s is None or not rates
            else float(memory_hierarchy.time_s(self.compute_s, moved, rates))
        )

    def attainable_flops_per_s(self, roofs: Roofs) -> float | None:
        """FLOPs over the least time; None without FLOPs."""
        seconds = self.least_s(roofs)
        return self.flops / seconds if seconds and self.flops else None

    def _aligned(self, roofs: Roofs) -> tuple[list[float], list[float], list[str]]:
        """Bandwidths, bytes and names of the levels that have a roof."""
        both = [
            (roof.bytes_per_s, moved, roof.level)
            for roof in roofs.bandwidths
            if (moved := self.bytes_at(roof.level)) is not None
        ]
        return (
            [rate for rate, _, _ in both],
            [moved for _, moved, _ in both],
            [name for _, _, name in both],
        )


def layer_traffic(
    trace: Trace, machine: Machine, threads: int, roofs: Roofs
) -> tuple[LayerTraffic, ...]:
    """One entry per layer and phase that did work, in the order of execution; an op that serves
    several layers counts in each by its share.
    """
    traffic = trace_traffic(trace, machine.cpu, threads)
    flops, moved = traffic.flops, traffic.moved_bytes
    compute_s = _compute_times(trace, flops, traffic.fma_flops, roofs)
    amounts = np.column_stack((flops, traffic.fma_flops, compute_s, moved))
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(amounts.shape[1]))
    weight: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for index, op in enumerate(trace.ops):
        if not flops[index] and not moved[index].any():
            continue
        for layer, share in op.shares or ((op.layer, 1.0),):
            sums[layer, op.phase] += share * amounts[index]
            weight[layer, op.phase][_dtype(op)] += share * (flops[index] + 1e-9 * moved[index, 0])
    return tuple(
        LayerTraffic(
            layer,
            phase,
            max((value, name) for name, value in weight[layer, phase].items())[1],
            float(n_flops),
            float(n_fma),
            traffic.levels,
            tuple(map(float, level_bytes)),
            float(seconds) if roofs.ceilings else None,
        )
        for (layer, phase), (n_flops, n_fma, seconds, *level_bytes) in sums.items()
    )


def _compute_times(trace: Trace, flops: np.ndarray, fma: np.ndarray, roofs: Roofs) -> np.ndarray:
    """Seconds of each op's arithmetic at the ceilings of its dtype; zeros where there are no
    ceilings.
    """
    ceilings = [roofs.ceiling(_dtype(op)) for op in trace.ops]
    if not ceilings or ceilings[0] is None:
        return np.zeros(len(trace.ops))
    peaks = np.array([(c.fma_flops_per_s, c.other_flops_per_s) for c in ceilings if c is not None])
    return np.asarray(memory_hierarchy.compute_s(fma, flops - fma, peaks[:, 0], peaks[:, 1]))


def _dtype(op: Op) -> str:
    """The dtype that an op computes in: its first floating-point operand's."""
    specs = (*op.inputs, *op.outputs)
    return next(
        (spec.dtype for spec in specs if spec.dtype.startswith(("float", "bfloat", "complex"))),
        specs[0].dtype if specs else "float32",
    )

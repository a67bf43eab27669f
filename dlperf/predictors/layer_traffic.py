"""Layers under the hierarchical roofline: bytes that every op of a trace moves at every level of a
machine's memory, modelled from footprints and reuse distances, and what the roofs allow a layer.

Bytes of a level are what passes between it and its inner neighbour; the inner neighbour of the
first cache are the registers. Assumptions:

- Bytes are STREAM's: reads and writes of data. The read of a line that is about to be written
  (write-allocate) is not counted, so that they go with bandwidths in STREAM's bytes. A written line
  counts where its memory lay before: in a step that repeats, each line brought in leaves once.
- L1: all that an op reads and writes (:mod:`dlperf.ops.counts`), and for contractions the loads
  that a tile of the size of the register file needs.
- Outwards: an operand lies in the innermost level that holds all the bytes that went by since it
  was last touched and the op's own; it crosses every level up to that one, and none beyond. Caches
  replace the least recently used line, hold any line anywhere, and are not shared with other
  processes; the first two belong to a core and are multiplied by the threads, the third is shared.
  An outer cache holds at least what an inner does.
- A contraction that crosses a level crosses it as often as its tiling needs
  (:mod:`dlperf.ops.blocking`), the tile taking half of the level inside; its operands share this
  traffic in proportion to their sizes. Contractions without a spelled-out shape move Hong and
  Kung's bound.
- Scratch memory (oneDNN's reordered copies) and parameters of the framework's own code are not
  counted.
- Where a trace does not know the memory of its tensors, everything comes from DRAM.

ReuseDistances count bytes touched twice as two, so operands may seem farther away than they are.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.machine import Cpu, Machine
from dlperf.core.trace import Op, Trace
from dlperf.models import memory_hierarchy
from dlperf.ops import counts
from dlperf.ops.blocking import bound_bytes, is_contraction, products_of
from dlperf.ops.roofs import LEVELS, Roofs
from dlperf.predictors.analysis import analyse
from dlperf.predictors.kernels.onednn import block_of

TILE_FRAC = 0.5
"""The part of a cache that a tile takes; the rest is for what streams past it (Goto and van de
Geijn 2008, section 4.2).
"""
_REGISTER_BYTES = ("avx512f", 32 * 64), ("avx2", 16 * 32)
_LEAST_REGISTER_BYTES = 16 * 16
PRIVATE = ("L1", "L2")
"""Levels of which every core has its own."""


def register_bytes(cpu: Cpu) -> int:
    """Bytes of the vector registers that a kernel can name: 32 of 64 bytes with AVX-512, 16 of 32
    with AVX2, else 16 of 16.
    """
    return next(
        (size for flag, size in _REGISTER_BYTES if flag in cpu.flags), _LEAST_REGISTER_BYTES
    )


@dataclass(frozen=True)
class TraceTraffic:
    """Bytes moved by the ops of a trace: `moved_bytes[i, j]` by op i at level j; `levels` are the
    levels' names, innermost first.

    `flops[i]` are the op's FLOPs (0 where unknown), `fma_flops[i]` those of them that are
    multiply-adds. Never more bytes farther out.
    """

    levels: tuple[str, ...]
    moved_bytes: npt.NDArray[np.float64]
    flops: npt.NDArray[np.float64]
    fma_flops: npt.NDArray[np.float64]


def trace_traffic(trace: Trace, cpu: Cpu, threads: int = 1) -> TraceTraffic:
    """The traffic of a trace on a processor with `threads` threads; see the module for what is
    assumed.
    """
    analysis = analyse(trace, "default", block_of(cpu.flags))
    cores = max(1, min(threads, cpu.n_cores))
    caches = [(name, size) for name, size in zip(LEVELS, cpu.caches_bytes) if size]
    # What all threads together keep in each cache; what a tile may take inside of each level.
    held = np.maximum.accumulate(
        [float(size * (cores if name in PRIVATE else 1)) for name, size in caches]
    )
    tiles = [float(register_bytes(cpu)), *(TILE_FRAC * size for _, size in caches)]
    inside = np.maximum.accumulate(tiles).tolist()
    flops, n_bytes = (np.array(column, dtype=float) for column in counts.totals(trace))
    contracts = np.array([is_contraction(op) for op in trace.ops], dtype=bool)
    crossed = np.repeat(n_bytes[:, None], len(inside), axis=1)
    by_signature: dict[str, list[float]] = {}
    for index in np.flatnonzero(contracts):
        op = trace.ops[index]
        if op.signature not in by_signature:
            by_signature[op.signature] = _contraction_bytes(op, flops[index], inside)
        crossed[index] = np.maximum(crossed[index], by_signature[op.signature])
    # The share of an op's operands that lies beyond each inner level; of the first cache all, as
    # nothing stays in registers between ops.
    needed = analysis.operand_distance + analysis.working_bytes[analysis.operand_op]
    share = np.ones_like(crossed)
    for level, capacity_bytes in enumerate(held, 1):
        outside = np.bincount(
            analysis.operand_op,
            analysis.operand_bytes * (~analysis.operand_is_blocks & (needed > capacity_bytes)),
            minlength=len(trace.ops),
        )
        known = analysis.known_bytes
        known_frac = np.minimum(outside / np.where(known > 0, known, 1.0), 1.0)
        share[:, level] = np.where(known > 0, known_frac, 1.0)
    return TraceTraffic(
        (*(name for name, _ in caches), "DRAM"),
        crossed * share,
        flops,
        np.where(contracts, flops, 0.0),
    )


def _contraction_bytes(op: Op, flops: float, fast: list[float]) -> list[float]:
    if products := products_of(op):
        return [
            sum(product.moved_bytes(size, unfolded=not level) for product in products)
            for level, size in enumerate(fast)
        ]
    item_bytes = op.inputs[0].item_bytes if op.inputs else 4
    return [bound_bytes(flops, item_bytes, size) for size in fast]


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
        index = int(memory_hierarchy.binding_level(self.compute_s, moved, rates))
        return "compute" if index == memory_hierarchy.COMPUTE else names[index]

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
        for layer, share in op.layer_shares:
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

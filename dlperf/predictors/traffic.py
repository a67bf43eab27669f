"""Bytes that every op of a trace moves at every level of a machine's memory, modelled from
footprints and reuse distances.

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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.machine import Cpu
from dlperf.core.trace import Op, Trace
from dlperf.ops import counts
from dlperf.ops.blocking import bound_bytes, is_contraction, products_of
from dlperf.ops.roofs import LEVELS
from dlperf.predictors.analysis import analyse

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
    analysis = analyse(trace)
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
    known: dict[str, list[float]] = {}
    for index in np.flatnonzero(contracts):
        op = trace.ops[index]
        if op.signature not in known:
            known[op.signature] = _contraction_bytes(op, flops[index], inside)
        crossed[index] = np.maximum(crossed[index], known[op.signature])
    # The share of an op's operands that lies beyond each inner level; of the first cache all, as
    # nothing stays in registers between ops.
    needed = analysis.operand_distance + analysis.working_bytes[analysis.operand_op]
    share = np.ones_like(crossed)
    for level, capacity_bytes in enumerate(held, 1):
        outside = np.bincount(
            analysis.operand_op,
            analysis.operand_bytes * (needed > capacity_bytes),
            minlength=len(trace.ops),
        )
        working = analysis.working_bytes
        known_frac = np.minimum(outside / np.where(working > 0, working, 1.0), 1.0)
        share[:, level] = np.where(working > 0, known_frac, 1.0)
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

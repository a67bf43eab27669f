"""What bounds each op of a step, and the shares of its time by resource."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.items import KEPT_FRAC, Shares
from dlperf.core.trace import Trace
from dlperf.ops.roofs import LEVELS
from dlperf.predictors.analysis import Analysis
from dlperf.predictors.kernel_cost_model import KernelCostModel

Array = npt.NDArray[np.float64]
SMALL_S = 1e-5
"""Time above which an op counts as bound by its kernel, whatever fraction of the peak it has."""
SMALL_FRAC = 0.25
_SHARED = tuple(LEVELS.index(level) for level in ("L3", "DRAM"))


@dataclass(frozen=True)
class Resources:
    """Bound of each op, and its parts and needs (:class:`dlperf.core.items.Item`)."""

    bounds: list[str]
    parts: list[Shares]
    needs: list[Shares]


def resources_of(
    trace: Trace,
    cost_model: KernelCostModel,
    analysis: Analysis,
    seconds: Sequence[float],
    overheads_s: Sequence[float],
    operands_s: Array,
) -> Resources:
    """Resources of each op, which takes so many `seconds`: overhead, a level of the memory, or
    compute.

    `overheads_s` is the overhead of each op's call, `operands_s` the cache-miss penalty of each
    operand of `analysis`. An op that a level bounds has the bytes at the level's bandwidth as its
    main part, or the penalty where that is longer; the rest is arithmetic. The penalties of other
    ops are parts of theirs, and kernels move with the bound. Needs are FLOPs at the measured peak,
    and bytes at the bandwidths of the shared levels that they cross.
    """
    n, caches = len(trace.ops), cost_model.caches
    rates = np.array([caches.bytes_per_s[level] for level in LEVELS])
    levels = caches.level_numbers(np.maximum(analysis.n_bytes, analysis.farthest))
    memory_s = analysis.n_bytes / rates[levels]
    compute_s = analysis.flops / _peaks(trace, cost_model)
    total_s = np.array(seconds)
    small = np.maximum(memory_s, compute_s) < SMALL_FRAC * total_s
    small &= total_s < SMALL_S
    moving = ~small & (memory_s >= KEPT_FRAC * total_s) & (memory_s >= compute_s)

    op = analysis.operand_op
    missed_s = np.zeros((n, len(LEVELS)))
    np.add.at(missed_s, (op, caches.level_numbers(analysis.operand_distance)), operands_s)
    own = (np.arange(n), levels)
    main_s = np.where(moving, np.maximum(memory_s, missed_s[own]), 0.0)
    missed_s[own] = np.where(moving, 0.0, missed_s[own])
    called_s = np.where(small, 0.0, np.maximum(overheads_s, 0.0))
    left_s = total_s - called_s - missed_s.sum(axis=1) - main_s
    computed_s = np.where(moving, np.maximum(left_s, 0.0), 0.0)
    parts_s = np.column_stack((called_s, computed_s, missed_s))

    crossed = caches.level_numbers(analysis.operand_distance + analysis.working_bytes[op])
    whole = np.where(analysis.known_bytes > 0, -1, caches.level_numbers(analysis.n_bytes))
    needs_s = [compute_s]
    for level in _SHARED:
        passed = analysis.n_bytes * (whole >= level)  # of ops whose operands are unknown
        passed += np.bincount(op, analysis.operand_bytes * (crossed >= level), minlength=n)
        needs_s.append(passed / rates[level])

    by_time = np.where(total_s > 0, total_s, 1.0)[:, None]
    names = "overhead", "compute", *LEVELS
    needed = "compute", *(LEVELS[level] for level in _SHARED)
    return Resources(
        [
            "overhead" if s else LEVELS[level] if m else "compute"
            for s, m, level in zip(small, moving, levels)
        ],
        _shares(names, parts_s / by_time),
        _shares(needed, np.minimum(np.column_stack(needs_s) / by_time, 1.0)),
    )


def _peaks(trace: Trace, cost_model: KernelCostModel) -> Array:
    """Measured peak of each op's dtype in FLOP/s, the highest of an unknown one's."""
    peaks = cost_model.peak_flops_per_s
    highest = max(peaks.values(), default=math.inf)
    dtypes = [op.inputs[0].dtype if op.inputs else "" for op in trace.ops]
    return np.array([peaks.get(dtype, highest) for dtype in dtypes])


def _shares(names: Sequence[str], fracs: Array) -> list[Shares]:
    return [
        tuple((name, frac) for name, frac in zip(names, row) if frac > 0.0)
        for row in fracs.tolist()
    ]

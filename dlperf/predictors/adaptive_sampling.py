"""Adaptive sampling: the operations that a calibration measures after its planned points."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dlperf.core.machine import Machine
from dlperf.core.trace import Op
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.predictors.kernel_model import one_blas_thread
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.description import KernelDescription, stacked

_UNKNOWN = 1.0
"""Standard deviation of ln t of a variant with fewer than three points; these come first."""


@one_blas_thread
def least_certain(
    machine: Machine, threads: int, pool: Mapping[str, Sequence[Op]], n_ops: int
) -> dict[str, list[int]]:
    """Indices, by group, of the `n_ops` operations of a `pool` with the largest expected errors.

    Active learning by variance (MacKay 1992, sec. 3): the posterior standard deviation of each
    kernel model, times its interval calibration factor.

    >>> from dlperf.core.machine import Cpu
    >>> least_certain(Machine(Cpu("", 1)), 1, {"one": ()}, 5)
    {}
    """
    cost_model = KernelCostModel(replace(machine, kernel_models=()), threads)
    members: dict[tuple[str, ...], list[tuple[str, int, KernelDescription]]] = defaultdict(list)
    for name, ops in pool.items():
        for index, op in enumerate(ops):
            if (description := describe(op, threads)) is not None:
                members[description.variant].append((name, index, description))
    scored = [
        (score, name, index)
        for variant, rows in members.items()
        for score, (name, index, _) in zip(
            _errors(cost_model, variant, [description for _, _, description in rows]), rows
        )
    ]
    found: dict[str, list[int]] = defaultdict(list)
    for _, name, index in heapq.nlargest(n_ops, scored):
        found[name].append(index)
    return {name: sorted(indices) for name, indices in found.items()}


def _errors(
    cost_model: KernelCostModel, variant: tuple[str, ...], descriptions: Sequence[KernelDescription]
) -> list[float]:
    """Standard deviations of ln t at descriptions of one variant."""
    if variant not in cost_model.kernels:
        return [_UNKNOWN] * len(descriptions)
    kernel_model = cost_model.refit(variant)
    if not len(kernel_model.leave_one_out):
        return [_UNKNOWN] * len(descriptions)
    return [
        float(value) for value in np.sqrt(np.diag(kernel_model.covariance(*stacked(descriptions))))
    ]

"""Fits that end a calibration: hyperparameters of all kernel models, and where these are unsure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dlperf.core.blas import one_blas_thread
from dlperf.core.machine import EXACT, KernelModelFit, Machine
from dlperf.core.trace import Op
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.predictors.kernels.description import KernelDescription, stacked

_UNKNOWN_ERROR = 1.0
"""Standard deviation of ln t of a variant with fewer than three points; these come first."""


@one_blas_thread
def fit_kernel_models(machine: Machine) -> Machine:
    """The machine with hyperparameters and leave-one-out errors of all variants, which end a
    calibration.

    Operations measured for a target do not count in the errors: they are no sample of their family.
    """
    fits = []
    filed = Machine.from_json(machine.to_json())  # with the digits of a file
    for threads in machine.threads:
        cost_model = KernelCostModel(replace(filed, kernel_models=()), threads)
        for variant, rows in cost_model.kernels.items():
            model = cost_model.refit(variant)
            fitted, errors = model.hyperparameters, model.leave_one_out
            sampled = [i for i, (_, kernel) in enumerate(rows) if kernel.family != EXACT]
            fracs = np.abs(np.expm1(errors))[sampled].tolist() if len(errors) else []
            fits.append(
                KernelModelFit(
                    variant,
                    cost_model.family(variant),
                    threads,
                    fitted.length_scales,
                    fitted.signal,
                    fitted.noise,
                    tuple(fracs),
                    tuple(model.weights.tolist()),
                    tuple(model.noise.tolist()),
                    cost_model.checksum(variant),
                )
            )
    return replace(machine, kernel_models=tuple(fits))


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
            if (description := cost_model.describe(op)) is not None:
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
        return [_UNKNOWN_ERROR] * len(descriptions)
    kernel_model = cost_model.refit(variant)
    if not len(kernel_model.leave_one_out):
        return [_UNKNOWN_ERROR] * len(descriptions)
    return [
        float(value) for value in np.sqrt(np.diag(kernel_model.covariance(*stacked(descriptions))))
    ]

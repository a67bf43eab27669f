"""How kernels respond to a core that a co-tenant shares, and to cores that are far from each other:
by their variant, family and length.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dlperf.core.costs import SHARED_CORE
from dlperf.core.machine import Kernel
from dlperf.core.state import OF_SHARING

if TYPE_CHECKING:
    from dlperf.predictors.kernel_cost_model import KernelCostModel, PricedKernel, Variant

Array = npt.NDArray[np.float64]
_PRIOR_WEIGHT = 0.75
"""Weight of all kernels' response beside those of the family, and of the family's beside the
variant's, of which one as long has 1. Left out one by one (AMD EPYC, Zen 5), parts differ in the
mean of absolute values by 0.085 on a shared core (2,861 kernels with one thread, mean 0.13), and by
0.21 with cores far from each other (298 with two threads, mean 0.35); of kernels of more than
0.3 ms by 0.040 and 0.124, their bias is 0.00 and +0.02. With weights that fall as slowly as the
inverse square of octaves, and without the prior of all, it was 0.01 and +0.04.
"""
_LEAST_WEIGHT = 1e-4
"""Weight of a kernel far shorter or longer: it counts where there is no other."""
_MOST_RESPONSE = 3.0
"""Largest response; one kernel's is noise above."""


def _weights(octaves: Array) -> Array:
    """Weights (n,) of kernels that take so many octaves longer; of none as long some of all."""
    return np.asarray(np.exp(-0.5 * octaves**2) + _LEAST_WEIGHT / (1.0 + octaves**2))


class CoreResponses:
    """Responses of the kernels of a cost model to a core that a co-tenant shares, and to cores that
    are far from each other.
    """

    def __init__(self, cost_model: KernelCostModel) -> None:
        self._cost_model = cost_model
        self._shared = _Responses(cost_model, _shared_part)
        self._between = _Responses(cost_model, lambda kernel: kernel.core_to_core)

    def of(self, priced: PricedKernel | None, seconds: float) -> float | None:
        """By which part an op of `seconds` takes longer on a shared core where short work does by 1
        (:attr:`dlperf.core.items.Item.response`). None where the calibration met no co-tenant.
        """
        part = self._shared.of(priced, seconds) if self._probes > 0.0 else None
        return None if part is None else min(max(part, 0.0) / self._probes, _MOST_RESPONSE)

    def between(self, priced: PricedKernel | None, seconds: float) -> float:
        """By which part an op of `seconds` takes longer where a short parallel region does by 1
        (:attr:`dlperf.core.items.Item.response_between`); 0 where the calibration saw no such.
        """
        return self._between.of(priced, seconds) or 0.0

    @cached_property
    def _probes(self) -> float:
        """By which part the probes of short work take longer, in the mean; 0 where that was not
        seen of both.
        """
        costs = self._cost_model.machine.costs_of(SHARED_CORE, threads=self._cost_model.threads)
        parts = [cost.value - 1.0 for cost in costs if cost.key.of in OF_SHARING]
        return max(0.0, statistics.fmean(parts)) if len(parts) == len(OF_SHARING) else 0.0


def _shared_part(kernel: Kernel) -> float | None:
    """By which part a kernel takes longer on a shared core; None where that was not seen."""
    return kernel.shared_core - 1.0 if kernel.shared_core else None


class _Responses:
    """By which part an op takes longer: a mean of kernels of which that was seen, of the variants
    of its sub-kernels, those that take about as long the more.
    """

    def __init__(
        self, cost_model: KernelCostModel, part_of: Callable[[Kernel], float | None]
    ) -> None:
        self._cost_model, self._part_of = cost_model, part_of

    def of(self, priced: PricedKernel | None, seconds: float) -> float | None:
        """By which part an op of `seconds` takes longer; None where it was seen of no kernel."""
        if not self._by_family:
            return None
        pieces = [] if priced is None else priced.sub_kernels
        longer_s = math.fsum(one.seconds * self._part(one.variant, one.seconds) for one in pieces)
        whole_s = math.fsum(one.seconds for one in pieces)
        return longer_s / whole_s if whole_s > 0 else self._part(None, seconds)

    @cached_property
    def _by_family(self) -> dict[str, tuple[Array, Array]]:
        """Of kernels of which it was seen log2 of seconds (n,), and by which part they took longer
        (n,), by family; of all under no name.
        """
        found: dict[str, list[Kernel]] = defaultdict(list)
        for one in self._cost_model.machine.kernels:
            if one.threads == self._cost_model.threads and self._part_of(one) is not None:
                found[one.family].append(one)
                found[""].append(one)
        return {name: self._points(of) for name, of in found.items()}

    def _part(self, variant: Variant | None, seconds: float) -> float:
        """By which part a kernel of a variant takes longer."""
        at, cost_model = math.log2(max(seconds, 1e-9)), self._cost_model
        rows = [] if variant is None else cost_model.rows(variant)
        family = cost_model.family(variant) if variant is not None and rows else ""
        logs, parts = self._by_family[""]
        found = np.average(parts, weights=_weights(logs - at))
        of_variant = self._points(kernel for _, kernel in rows)
        # Of a family of which nothing was seen, nothing was of the variant: both are empty.
        for logs, parts in (self._by_family.get(family, of_variant), of_variant):
            found = np.average([found, *parts], weights=[_PRIOR_WEIGHT, *_weights(logs - at)])
        return float(found)

    def _points(self, kernels: Iterable[Kernel]) -> tuple[Array, Array]:
        """Of kernels of which it was seen log2 of seconds (n,), and what they took longer (n,)."""
        seen = [(one.seconds, self._part_of(one)) for one in kernels]
        known = [(seconds, part) for seconds, part in seen if part is not None]
        logs, parts = np.array(known, dtype=float).reshape(-1, 2).T
        return np.log2(logs), parts

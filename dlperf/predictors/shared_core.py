"""How kernels respond to a core that a co-tenant shares: by their variant, family and length."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlperf.core.costs import SHARED_CORE
from dlperf.predictors.kernel_cost_model import KernelCostModel, PricedKernel, Variant

Array = npt.NDArray[np.float64]
_PROBES = ("private_cache", "interpreter")
"""Probes of :attr:`dlperf.core.state.State.sharing`."""
_FAMILY_WEIGHT = 0.2
"""Weight of a family's response beside the variant's own kernels, of which one as long has 4."""
_MOST_RESPONSE = 3.0


class CoreResponses:
    """Responses of the kernels of a cost model."""

    def __init__(self, cost_model: KernelCostModel) -> None:
        self._cost_model = cost_model

    def of(self, priced: PricedKernel | None, seconds: float) -> float | None:
        """By which part an op of `seconds` takes longer on a shared core where short work does by 1
        (:attr:`dlperf.core.items.Item.response`): a mean of kernels that met a co-tenant, of the
        variants of its sub-kernels, those that take about as long the more. None where the
        calibration met none.
        """
        if self._probes <= 0.0 or not self._by_family:
            return None
        pieces = [] if priced is None else priced.sub_kernels
        longer_s = math.fsum(one.seconds * self._part(one.variant, one.seconds) for one in pieces)
        whole_s = math.fsum(one.seconds for one in pieces)
        part = longer_s / whole_s if whole_s > 0 else self._part(None, seconds)
        return min(max(part, 0.0) / self._probes, _MOST_RESPONSE)

    @cached_property
    def _probes(self) -> float:
        """By which part the probes of short work take longer, in the mean; 0 where that was not
        seen of both.
        """
        costs = self._cost_model.machine.costs_of(SHARED_CORE, threads=self._cost_model.threads)
        parts = [cost.value - 1.0 for cost in costs if cost.key.of in _PROBES]
        return max(0.0, statistics.fmean(parts)) if len(parts) == len(_PROBES) else 0.0

    @cached_property
    def _by_family(self) -> dict[str, tuple[Array, Array]]:
        """Of kernels that met a co-tenant log2 of seconds (n,), and by which part they took longer
        (n,), by family; of all under no name.
        """
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for one in self._cost_model.machine.kernels:
            if one.shared_core and one.threads == self._cost_model.threads:
                point = math.log2(one.seconds), one.shared_core - 1.0
                found[one.family].append(point)
                found[""].append(point)
        return {name: (np.array(of)[:, 0], np.array(of)[:, 1]) for name, of in found.items()}

    def _part(self, variant: Variant | None, seconds: float) -> float:
        """By which part a kernel of a variant takes longer."""
        at, cost_model = math.log2(max(seconds, 1e-9)), self._cost_model
        rows = [] if variant is None else cost_model.rows(variant)
        family = cost_model.family(variant) if variant is not None and rows else ""
        logs, parts = self._by_family.get(family) or self._by_family[""]
        prior = float(np.average(parts, weights=1.0 / (0.5 + np.abs(logs - at)) ** 2))
        own = [
            (1.0 / (0.5 + abs(math.log2(kernel.seconds) - at)) ** 2, kernel.shared_core - 1.0)
            for _, kernel in rows
            if kernel.shared_core
        ]
        weights = [_FAMILY_WEIGHT, *(weight for weight, _ in own)]
        return float(np.average([prior, *(part for _, part in own)], weights=weights))

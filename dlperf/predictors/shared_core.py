"""How kernels respond to a core that a co-tenant shares: by their variant, family and length."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dlperf.core.costs import SHARED_CORE
from dlperf.core.machine import Kernel
from dlperf.core.state import OF_SHARING
from dlperf.predictors.kernel_model import nearness

if TYPE_CHECKING:
    from dlperf.predictors.kernel_cost_model import KernelCostModel, PricedKernel, Variant

Array = npt.NDArray[np.float64]
_FAMILY_WEIGHT = 3.0
"""Weight of a family's response beside the variant's own kernels, of which one as long has 4. Left
out one by one, parts of 1,279 kernels then differed by 0.24 (root mean square, two calibrations)
from those measured for 150 s (mean 0.65); with a weight of 0.2 by 0.24 and 0.27, with 100 by 0.25
and 0.24.
"""
_MOST_RESPONSE = 3.0
"""Largest response; one kernel's is noise above."""


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
        parts = [cost.value - 1.0 for cost in costs if cost.key.of in OF_SHARING]
        return max(0.0, statistics.fmean(parts)) if len(parts) == len(OF_SHARING) else 0.0

    @cached_property
    def _by_family(self) -> dict[str, tuple[Array, Array]]:
        """Of kernels that met a co-tenant log2 of seconds (n,), and by which part they took longer
        (n,), by family; of all under no name.
        """
        found: dict[str, list[Kernel]] = defaultdict(list)
        for one in self._cost_model.machine.kernels:
            if one.shared_core and one.threads == self._cost_model.threads:
                found[one.family].append(one)
                found[""].append(one)
        return {name: _points(of) for name, of in found.items()}

    def _part(self, variant: Variant | None, seconds: float) -> float:
        """By which part a kernel of a variant takes longer."""
        at, cost_model = math.log2(max(seconds, 1e-9)), self._cost_model
        rows = [] if variant is None else cost_model.rows(variant)
        family = cost_model.family(variant) if variant is not None and rows else ""
        logs, parts = self._by_family.get(family) or self._by_family[""]
        prior = np.average(parts, weights=nearness(np.abs(logs - at)))
        own_logs, own_parts = _points(kernel for _, kernel in rows)
        weights = [_FAMILY_WEIGHT, *nearness(np.abs(own_logs - at))]
        return float(np.average([prior, *own_parts], weights=weights))


def _points(kernels: Iterable[Kernel]) -> tuple[Array, Array]:
    """Of kernels that met a co-tenant log2 of seconds (n,), and what they took longer (n,)."""
    met = [one for one in kernels if one.shared_core]
    parts = np.array([one.shared_core for one in met]) - 1.0
    return np.log2([one.seconds for one in met]), parts

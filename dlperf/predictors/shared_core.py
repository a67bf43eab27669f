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
        logs, parts = self._by_family.get(family) or self._by_family[""]
        prior = np.average(parts, weights=nearness(np.abs(logs - at)))
        own_logs, own_parts = self._points(kernel for _, kernel in rows)
        weights = [_FAMILY_WEIGHT, *nearness(np.abs(own_logs - at))]
        return float(np.average([prior, *own_parts], weights=weights))

    def _points(self, kernels: Iterable[Kernel]) -> tuple[Array, Array]:
        """Of kernels of which it was seen log2 of seconds (n,), and what they took longer (n,)."""
        seen = [(one.seconds, self._part_of(one)) for one in kernels]
        known = [(seconds, part) for seconds, part in seen if part is not None]
        logs, parts = np.array(known, dtype=float).reshape(-1, 2).T
        return np.log2(logs), parts

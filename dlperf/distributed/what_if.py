"""What if a machine or its links were faster or slower: factors on a prediction's items and on a
cluster's wires.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.prediction import Item
from dlperf.distributed.collective_times import LinkFactors
from dlperf.forecast.prediction import Prediction
from dlperf.predictors.kernel_cost_model import cost_model_of

NAMES = ("flops", "memory_bandwidth", "link_bandwidth", "link_latency")
_MEMORY = ("DRAM",)
_COMPUTING = ("compute", "L1", "L2")


@dataclass(frozen=True)
class WhatIf:
    """So many times the arithmetic (with the caches of the core, which share its clock), the
    memory's bandwidth, the links' bandwidth and latency.
    """

    flops: float = 1.0
    memory_bandwidth: float = 1.0
    link_bandwidth: float = 1.0
    link_latency: float = 1.0

    @classmethod
    def of(cls, factors: Mapping[str, float]) -> WhatIf:
        """The factors by name. Raises DlperfError for an unknown name, and for a factor that is not
        finite and positive.
        """
        for name, factor in factors.items():
            if name not in NAMES:
                raise DlperfError(
                    f"--what-if {name}={factor:g}: {name!r} is unknown; known are"
                    f" {', '.join(NAMES)}"
                )
            if not 0 < factor < math.inf:
                raise DlperfError(
                    f"--what-if {name}={factor:g}: the factor must be finite and above 0; 2 is"
                    " twice as much"
                )
        return cls(**factors)

    @property
    def links(self) -> LinkFactors:
        """The factors of the links."""
        return LinkFactors(self.link_bandwidth, self.link_latency)

    @property
    def changed(self) -> dict[str, float]:
        """The factors that are not 1, by name."""
        return {name: getattr(self, name) for name in NAMES if getattr(self, name) != 1.0}

    def apply(self, prediction: Prediction) -> Prediction:
        """The prediction with other arithmetic and memory.

        Items that compute take 1/flops of their time, those that DRAM bounds 1/memory_bandwidth,
        but none less than the other resource allows: an operation's bytes at DRAM's rate where they
        exceed the caches, its FLOPs at the measured peak. What the framework's Python costs stays
        as it is.
        """
        if self.flops == self.memory_bandwidth == 1.0:
            return prediction
        cost_model = cost_model_of(prediction.machine, prediction.threads)
        peak = max(cost_model.peak_flops_per_s.values(), default=math.inf)
        cache_bytes, rate = (
            max(prediction.machine.cpu.caches_bytes),
            cost_model.caches.bytes_per_s["DRAM"],
        )
        table = prediction.ops
        flops, n_bytes = (
            np.asarray(table["flops"], dtype=float),
            np.asarray(table["bytes"], dtype=float),
        )
        items = tuple(
            self._changed(
                item,
                float(flops[place]) / peak,
                float(n_bytes[place]) / rate if n_bytes[place] > cache_bytes else 0.0,
            )
            for place, item in enumerate(prediction.prices.items)
        )
        note = "what if: " + ", ".join(
            f"{name} x {factor:g}" for name, factor in self.changed.items()
        )
        return replace(
            prediction,
            prices=replace(prediction.prices, items=items, notes=(*prediction.prices.notes, note)),
        )

    def _changed(self, item: Item, compute_s: float, memory_s: float) -> Item:
        if item.bound in _COMPUTING:
            return replace(
                item,
                seconds=max(
                    item.seconds / self.flops, min(item.seconds, memory_s) / self.memory_bandwidth
                ),
            )
        if item.bound in _MEMORY:
            return replace(
                item,
                seconds=max(
                    item.seconds / self.memory_bandwidth, min(item.seconds, compute_s) / self.flops
                ),
            )
        return item

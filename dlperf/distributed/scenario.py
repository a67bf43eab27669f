"""What a scaling forecast is asked: numbers of ranks, batch size, and what-if factors on the
machine and its links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.core.prediction import Item
from dlperf.distributed.collective_times import FACTORS, LinkFactors
from dlperf.forecast.prediction import Prediction
from dlperf.models.arguments import count
from dlperf.models.buckets import ReducerOptions
from dlperf.predictors.kernel_cost_model import cost_model_of

MOST_RECORDINGS = 5
_MEMORY = ("DRAM",)
_COMPUTING = ("compute", "L1", "L2")


@dataclass(frozen=True)
class WhatIf(LinkFactors):
    """Factors on links, on arithmetic (with the core's caches, which share its clock) and on memory
    bandwidth.
    """

    flops: float = 1.0
    memory_bandwidth: float = 1.0

    @classmethod
    def of(cls, factors: Mapping[str, float]) -> WhatIf:
        """The factors by name. Raises DlperfError for an unknown name, and for a factor that is not
        finite and positive.
        """
        for name, factor in factors.items():
            if name not in FACTORS:
                raise DlperfError(
                    f"--what-if {name}={factor:g}: {name!r} is unknown; known are"
                    f" {', '.join(FACTORS)}"
                )
            if not 0 < factor < math.inf:
                raise DlperfError(
                    f"--what-if {name}={factor:g}: the factor must be finite and above 0; 2 is"
                    " twice as much"
                )
        return cls(**factors)

    def apply(self, prediction: Prediction) -> Prediction:
        """The prediction with other arithmetic and memory.

        Items that compute take 1/flops of their time, those that DRAM bounds 1/memory_bandwidth.
        The other resource is a lower bound: the bytes of an operation at DRAM's bandwidth where
        they exceed the caches, its FLOPs at the measured peak. Framework overhead does not change.
        """
        if self.flops == self.memory_bandwidth == 1.0:
            return prediction
        cost_model = cost_model_of(prediction.machine, prediction.threads)
        peak = max(cost_model.peak_flops_per_s.values(), default=math.inf)
        cache_bytes = max(prediction.machine.cpu.caches_bytes)
        rate = cost_model.caches.bytes_per_s["DRAM"]
        items = tuple(
            self._changed(
                item, float(flops) / peak, float(n_bytes) / rate if n_bytes > cache_bytes else 0.0
            )
            for item, flops, n_bytes in zip(
                prediction.prices.items, prediction.ops["flops"], prediction.ops["bytes"]
            )
        )
        note = "what if: " + ", ".join(
            f"{name} x {factor:g}" for name, factor in self.changed.items()
        )
        return replace(
            prediction,
            prices=replace(prediction.prices, items=items, notes=(*prediction.prices.notes, note)),
        )

    def _changed(self, item: Item, compute_s: float, memory_s: float) -> Item:
        own, other, other_s = self.flops, self.memory_bandwidth, memory_s
        if item.bound in _MEMORY:
            own, other, other_s = other, own, compute_s
        elif item.bound not in _COMPUTING:
            return item
        seconds = max(item.seconds / own, min(item.seconds, other_s) / other)
        return replace(item, seconds=seconds)


@dataclass(frozen=True)
class ScalingScenario:
    """Numbers of ranks, ranks per node, and weak or strong scaling of `batch_size` (per rank, or of
    all ranks).

    Raises DlperfError for an unknown scaling, counts below 1, ranks that do not fill their nodes,
    and a batch that is smaller than the ranks that share it.
    """

    ranks: tuple[int, ...]
    batch_size: int
    scaling: str = "weak"
    ranks_per_node: int = 1
    hosts_per_system: int = 1
    what_if: WhatIf = WhatIf()
    options: ReducerOptions = ReducerOptions()
    samples: int | None = None

    def __post_init__(self) -> None:
        if self.scaling not in ("weak", "strong"):
            raise DlperfError(f"scaling {self.scaling!r} is unknown; known are weak, strong")
        if not self.ranks or min(self.ranks) < 1:
            raise DlperfError(
                f"ranks are {self.ranks}; name at least one number of ranks, from 1 on"
            )
        count().check("ranks_per_node", self.ranks_per_node)
        for n in self.ranks:
            if n > self.ranks_per_node and n % self.ranks_per_node:
                raise DlperfError(
                    f"{n} ranks do not fill nodes of {self.ranks_per_node}; choose a multiple, or"
                    " another --ranks-per-node"
                )
            if self.scaling == "strong" and n > self.batch_size:
                raise DlperfError(
                    f"a batch of {self.batch_size} is smaller than {n} ranks; give a larger"
                    " --batch-size, or fewer ranks"
                )

    def own_batch_size(self, n: int) -> int:
        """The batch of the rank with the most samples."""
        return self.batch_size if self.scaling == "weak" else math.ceil(self.batch_size / n)

    def step_samples(self, n: int) -> int:
        """Samples of one step of all ranks."""
        return self.options.accumulate * (
            self.batch_size * n if self.scaling == "weak" else self.batch_size
        )

    def side_by_side(self, n: int) -> int:
        """Ranks that run on one computer."""
        return min(n, self.ranks_per_node * self.hosts_per_system)

    def recorded_sizes(self) -> tuple[int, ...]:
        """The batch sizes to record: all where they are few, else a sample with the smallest and
        the largest, even in log size.
        """
        sizes = sorted({self.own_batch_size(n) for n in (1, *self.ranks)})
        if len(sizes) <= MOST_RECORDINGS:
            return tuple(sizes)
        ratio = (sizes[-1] / sizes[0]) ** (1 / (MOST_RECORDINGS - 1))
        return tuple(
            sorted(
                {
                    min(sizes, key=lambda size: abs(math.log(size / (sizes[0] * ratio**index))))
                    for index in range(MOST_RECORDINGS)
                }
            )
        )


def ranks_per_node_of(cluster: Cluster | None, ranks: Sequence[int]) -> int:
    """The default ranks per node: those that were measured on one host; all where no link leaves
    it.
    """
    if cluster is None:
        return 1
    return max(ranks) if is_one_computer(cluster) else min(max(ranks), cluster.ranks_per_host)


def is_one_computer(cluster: Cluster) -> bool:
    """Whether no link leaves a node."""
    return bool(cluster.links) and cluster.link("network") is None


def hosts_per_system_of(cluster: Cluster | None) -> int:
    """Hosts (namespaces, containers) of a measured cluster on one computer; 1 where unknown."""
    return 1 if cluster is None else max(1, cluster.ranks_per_system // cluster.ranks_per_host)

"""What a scaling forecast is asked: numbers of ranks, batch size, and what-if factors on the
machine and its links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.core.what_if import MachineFactors
from dlperf.distributed.collective_times import LinkFactors
from dlperf.models.arguments import count
from dlperf.models.buckets import ReducerOptions

MOST_RECORDINGS = 5


@dataclass(frozen=True)
class WhatIf(LinkFactors, MachineFactors):
    """Factors on links and on the machine."""


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

"""Costs of the collectives of a step over a cluster: time alone, use of the link, interference with
computation; by shape (CollectiveCosts) and for recorded calls (CallCosts).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dlperf.core.cluster import Cluster
from dlperf.core.units import KIB
from dlperf.core.variation import log_sigma
from dlperf.distributed.collective_times import (
    LinkFactors,
    Path,
    collective_s,
    find_path,
    message_s,
)
from dlperf.distributed.programs import Call
from dlperf.models.communication_replay import Collective, Operation

_SHORTEST_BYTES = 4
_LONG_BYTES = 256 * KIB
_MEMORY_FRAC = 0.5
"""Share of the computation that waits for memory, which a trace does not contain."""


class Shape(NamedTuple):
    """What decides the time of a collective, or of a message."""

    kind: str
    n_bytes: int
    n_ranks: int
    ranks_per_node: int
    between_nodes: bool


@dataclass(frozen=True)
class Interference:
    """Interference of an all-reduce with a rank's computation, in seconds per byte that the rank
    sends: where memory bounds the computation, where arithmetic does, and the collective's delay.
    """

    memory_s_per_byte: float = 0.0
    compute_s_per_byte: float = 0.0
    delayed_s_per_byte: float = 0.0


def interference_of(cluster: Cluster, threads: int) -> Interference | None:
    """The interference measured at the nearest number of threads; None where there is none, as in a
    hand-written file.

    It is per byte that a rank sends, 2 (n - 1) / n of the vector, and so holds for other numbers of
    ranks.
    """
    if not cluster.interferences:
        return None
    nearest = min((abs(i.threads - threads), i.threads) for i in cluster.interferences)[1]
    at = [i for i in cluster.interferences if i.threads == nearest]
    sent_bytes = [2 * (i.n_ranks - 1) / i.n_ranks * i.n_bytes for i in at]
    stolen: dict[str, list[float]] = defaultdict(list)
    for i, sent in zip(at, sent_bytes):
        stolen[i.kernel].append(i.stolen_s_per_byte * i.n_bytes / sent)
    both = [*stolen["stream"], *stolen["gemm"]] or [0.0]
    delayed = [
        max(0.0, i.collective_together.samples.median - i.collective_alone.samples.median) / sent
        for i, sent in zip(at, sent_bytes)
    ]
    memory, compute = (statistics.median(stolen[kernel] or both) for kernel in ("stream", "gemm"))
    return Interference(memory, compute, statistics.median(delayed))


def mean_excess_s(cluster: Cluster, kind: str, between_nodes: bool) -> float:
    """Mean less median of one collective, in seconds, at least 0: the median over the measured
    sizes.

    On a busy processor gloo's threads sometimes wait for the scheduler, whatever the size. Most
    single collectives do not, but over the collectives of a step the mean adds up.
    """
    at = [
        c
        for c in cluster.collectives
        if c.kind == kind
        and (c.n_ranks > c.ranks_per_node) == between_nodes
        and len(c.samples.values) > 2
    ]
    return max(0.0, statistics.median([c.samples.mean - c.samples.median for c in at] or [0.0]))


def link_sigma(cluster: Cluster) -> float:
    """Variation of the links: standard deviation of log time, the median over the measured
    all-reduces from 256 KiB up; 0 where none was measured.

    The scheduler decides the variation of shorter ones (:func:`mean_excess_s`).
    """
    found = [
        log_sigma(c.samples)
        for c in cluster.collectives
        if c.kind == "all_reduce" and len(c.samples.values) > 2 and c.n_bytes >= _LONG_BYTES
    ]
    return statistics.median(found or [0.0])


class CollectiveCosts:
    """Collectives and messages of the given shapes, over links with what-if factors.

    Raises DlperfError as :func:`dlperf.distributed.collective_times.collective_s`: no such link,
    ranks that do not fill their nodes.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        shapes: Iterable[Shape],
        factors: LinkFactors = LinkFactors(),
        interference: Interference | None = None,
    ) -> None:
        self.cluster, self.interference = cluster, interference or Interference()
        self._paths: dict[bool, Path] = {}
        self._mean_excess: dict[tuple[str, bool], float] = {}
        self._seconds: dict[Shape, float] = {}
        wanted: dict[tuple[str, int, bool], set[tuple[int, int]]] = defaultdict(set)
        for kind, n_bytes, n, per_node, far in shapes:
            if n > 1:
                wanted[kind, per_node, far] |= {(n_bytes, n), (_SHORTEST_BYTES, n)}
        if cluster is None:
            return
        for (kind, per_node, far), pairs in wanted.items():
            sizes, ranks = np.array(sorted(pairs)).T
            times = (
                message_s(cluster, sizes, far, factors)
                if kind == "message"
                else collective_s(cluster, kind, sizes, ranks, per_node, factors)
            )
            self._paths[far] = find_path(cluster, far).changed(factors)
            self._mean_excess[kind, far] = mean_excess_s(cluster, kind, far)
            for (n_bytes, n), seconds in zip(sorted(pairs), times):
                self._seconds[Shape(kind, n_bytes, n, per_node, far)] = float(seconds)

    def seconds(self, shape: Shape) -> float:
        """Seconds of one alone, its ranks together and idle; 0 for one rank."""
        return 0.0 if shape.n_ranks == 1 else self._seconds[shape]

    def bucket_s(self, between_nodes: bool = True) -> float:
        """Seconds that an idle link saves at most; 0 inside a node."""
        return self._paths[between_nodes].stored_s if between_nodes in self._paths else 0.0

    def sent_bytes(self, shape: Shape) -> float:
        """Bytes that a rank sends; in a rooted call, the rank that sends most."""
        kind, n_bytes, n, _, _ = shape
        if n == 1 or kind == "barrier":
            return 0.0
        if kind in ("message", "broadcast"):
            return float(n_bytes)
        on_gloo = self.cluster is not None and self.cluster.backend == "gloo"
        rounds = 2 if kind == "all_reduce" or (kind == "reduce_scatter" and on_gloo) else 1
        return rounds * (n - 1) / n * n_bytes

    def stolen_s(self, shape: Shape, memory_frac: float = _MEMORY_FRAC) -> float:
        """Processor time that it takes from each of its ranks, `memory_frac` of whose computation
        waits for memory.
        """
        cost = self.interference
        return self.sent_bytes(shape) * (
            memory_frac * cost.memory_s_per_byte + (1 - memory_frac) * cost.compute_s_per_byte
        )

    def collective(
        self, shape: Shape, memory_frac: float = _MEMORY_FRAC, factor: float = 1.0
    ) -> Collective:
        """The collective as the time line takes it: its mean time, the link's share of it, what it
        takes from the processor, and what an idle link saves; `factor` is a slowdown.

        It needs the link for its time alone less that of the shortest message, and at least for the
        time of its bytes: a pipeline of messages hides latency.
        """
        alone_s = factor * self.seconds(shape)
        if alone_s <= 0:
            return Collective(0.0)
        path, sent = self._paths[shape.between_nodes], self.sent_bytes(shape)
        shortest_s = factor * self._seconds[shape._replace(n_bytes=_SHORTEST_BYTES)]
        duration_s = alone_s + self._mean_excess[shape.kind, shape.between_nodes]
        needed_s = max(alone_s - shortest_s, factor * sent * path.s_per_byte)
        return Collective(
            duration_s,
            min(alone_s, needed_s) / duration_s,
            self.stolen_s(shape, memory_frac),
            sent * self.interference.delayed_s_per_byte,
            # ping-pongs were measured with pauses
            0.0 if shape.kind == "message" else path.spared_s(sent, shortest_s),
        )


class CallCosts(CollectiveCosts):
    """Recorded calls over a cluster; `nodes` are the nodes of the ranks.

    With `n_ranks` the groups of the recorded world have that many ranks, `ranks_per_node` on a
    node.
    """

    def __init__(
        self,
        cluster: Cluster,
        calls: Iterable[Call],
        nodes: Sequence[int],
        factors: LinkFactors = LinkFactors(),
        interference: Interference | None = None,
        n_ranks: int | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.nodes, self.n_ranks, self.ranks_per_node = nodes, n_ranks, ranks_per_node
        super().__init__(cluster, map(self.shape, calls), factors, interference)

    def shape(self, call: Call) -> Shape:
        """What decides the call's time. A group with unequal numbers of ranks on its nodes counts
        as one rank per node.
        """
        counts = Counter(self.nodes[rank] for rank in call.ranks)
        n, per_node, far = len(call.ranks), set(counts.values()), len(counts) > 1
        if call.is_message:
            return Shape("message", call.n_bytes, n, 1, far)
        if self.n_ranks is not None:
            n, per_node = self.n_ranks, {self.ranks_per_node}
            far = n > self.ranks_per_node
        return Shape(call.kind, call.n_bytes, n, per_node.pop() if len(per_node) == 1 else 1, far)

    def operation(self, call: Call, factor: float = 1.0) -> Operation:
        """The call as the replay takes it; `factor` is a slowdown."""
        shape = self.shape(call)
        collective = self.collective(shape, factor=factor)
        return Operation(call.ranks, collective, call.queue, self._ports(call, shape))

    def _ports(self, call: Call, shape: Shape) -> tuple[int, ...] | None:
        """Links in both directions: between nodes those of each node, inside a node those of each
        rank (numbered after the nodes').
        """
        far = shape.between_nodes
        first = 0 if far else 2 * len(self.nodes)
        ends = [first + 2 * (self.nodes[rank] if far else rank) for rank in call.ranks]
        if call.is_message:
            return ends[0], ends[1] + 1
        return tuple(dict.fromkeys(end + way for end in ends for way in (0, 1)))


def as_recorded(call: Call, stolen_s: float) -> Operation:
    """The call with its recorded time."""
    return Operation(
        call.ranks,
        Collective(call.seconds, 0.0, stolen_s if call.seconds > 0 else 0.0),
        call.queue,
    )

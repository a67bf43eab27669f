"""The calls of a recording over a cluster: what each takes alone, what it takes from its ranks'
processors, and the links that it occupies.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from dlperf.core.cluster import Cluster
from dlperf.distributed.calls import call_s, message_s
from dlperf.distributed.collective_costs import (
    Interference,
    link_frac,
    mean_excess_s,
    passing_s_per_byte,
)
from dlperf.distributed.collective_times import LinkFactors, burst_of
from dlperf.distributed.programs import Call
from dlperf.models.communication_replay import Operation
from dlperf.models.overlap import Collective

_SHORTEST_BYTES = 4
_MEMORY_FRAC = 0.5
"""A trace does not say whether computing waits for memory or for arithmetic; half of each is taken.
"""
_Shape = tuple[str, int, int, int, bool]
"""Kind, bytes, ranks, ranks a node, and whether it leaves a node."""


class CallCosts:
    """The calls over a cluster whose nodes hold the ranks as `nodes` says (the node of each);
    `n_ranks` others than the recorded ones make groups of so many ranks of the recorded world,
    `ranks_per_node` on a node.

    Raises DlperfError where the cluster lacks a link that is needed, or the ranks do not fill their
    nodes.
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
        self.cluster, self.nodes, self.interference = cluster, nodes, interference or Interference()
        self.n_ranks, self.ranks_per_node = n_ranks, ranks_per_node
        self._seconds: dict[_Shape, float] = {}
        self._unsteady: dict[tuple[str, bool], float] = {}
        wanted: dict[tuple[str, int, bool], set[tuple[int, int]]] = defaultdict(set)
        for call in calls:
            kind, n_bytes, n, per_node, far = self.shape(call)
            wanted[kind, per_node, far] |= {(n_bytes, n), (_SHORTEST_BYTES, n)}
        needed = {far for (_, _, far), pairs in wanted.items() if any(n > 1 for _, n in pairs)}
        self._passing = {far: passing_s_per_byte(cluster, far, factors) for far in needed}
        self._bursts = {far: burst_of(cluster, far, factors) for far in needed}
        for (kind, per_node, far), pairs in wanted.items():
            ordered = sorted(pairs)
            sizes, ranks = (np.array(column, dtype=float) for column in zip(*ordered))
            times = (
                message_s(cluster, sizes, far, factors)
                if kind == "message"
                else call_s(cluster, kind, sizes, ranks, per_node, factors)
            )
            self._unsteady[kind, far] = mean_excess_s(cluster, kind, far)
            for (n_bytes, n), seconds in zip(ordered, times):
                self._seconds[kind, n_bytes, n, per_node, far] = float(seconds)

    @property
    def bucket_s(self) -> float:
        """What a link between nodes stores while it rests; links inside a node store nothing."""
        return self._bursts[True].stored_s if True in self._bursts else 0.0

    def shape(self, call: Call) -> _Shape:
        """What decides the call's time."""
        if call.is_message:
            return (
                "message",
                call.n_bytes,
                2,
                1,
                self.nodes[call.ranks[0]] != self.nodes[call.ranks[1]],
            )
        if self.n_ranks is not None:
            return (
                call.kind,
                call.n_bytes,
                self.n_ranks,
                self.ranks_per_node,
                self.n_ranks > self.ranks_per_node,
            )
        counts = Counter(self.nodes[rank] for rank in call.ranks)
        even = len(set(counts.values())) == 1
        return (
            call.kind,
            call.n_bytes,
            len(call.ranks),
            next(iter(counts.values())) if even else 1,
            len(counts) > 1,
        )

    def seconds(self, call: Call) -> float:
        """The call alone, its ranks together and idle; nodes that hold unequal parts of a group are
        taken for one rank a node.
        """
        shape = self.shape(call)
        return 0.0 if shape[2] == 1 else self._seconds[shape]

    def stolen_s(self, call: Call) -> float:
        """Processor time that the call takes from each of its ranks."""
        cost = self.interference
        return self.sent_bytes(call) * (
            _MEMORY_FRAC * cost.memory_s_per_byte + (1 - _MEMORY_FRAC) * cost.compute_s_per_byte
        )

    def sent_bytes(self, call: Call) -> float:
        """What a rank sends of the call; of a rooted one, the rank that sends most."""
        _, n_bytes, n, _, _ = self.shape(call)
        rounds = (
            2
            if call.kind == "all_reduce"
            or (call.kind == "reduce_scatter" and self.cluster.backend == "gloo")
            else 1
        )
        if call.is_message or call.kind == "broadcast":
            return float(n_bytes) if n > 1 else 0.0
        if call.kind == "barrier":
            return 0.0
        return rounds * (n - 1) / n * n_bytes

    def operation(self, call: Call, factor: float = 1.0) -> Operation:
        """The call as the replay takes it, `factor` times as slow as usual.

        As in :meth:`dlperf.distributed.collective_costs.CollectiveCosts.collective` it takes its mean, and the link
        for its bytes.
        """
        shape = self.shape(call)
        kind, _, n, per_node, far = shape
        alone = factor * self.seconds(call)
        if alone <= 0:
            return Operation(call.ranks, Collective(0.0), self._queue(call))
        duration = alone + self._unsteady[kind, far]
        sent = self.sent_bytes(call)
        shortest = factor * self._seconds[kind, _SHORTEST_BYTES, n, per_node, far]
        needed = link_frac(alone, shortest, factor * sent * self._passing[far], duration)
        spared = (
            0.0 if call.is_message else self._bursts[far].spared_s(sent, shortest)
        )  # ping-pongs were measured with rests
        collective = Collective(
            duration,
            needed,
            self.stolen_s(call),
            sent * self.interference.delayed_s_per_byte,
            spared,
        )
        return Operation(call.ranks, collective, self._queue(call), self._ports(call, far))

    def _queue(self, call: Call) -> int | None:
        return None if call.is_message else call.group

    def _ports(self, call: Call, far: bool) -> tuple[int, ...]:
        """Links in both directions: between nodes those of each node on the way, inside a node
        those of each rank (numbered after the nodes').
        """
        first = 0 if far else 2 * len(self.nodes)
        places = [self.nodes[rank] if far else rank for rank in call.ranks]
        if call.is_message:
            return first + 2 * places[0], first + 2 * places[1] + 1
        return tuple(dict.fromkeys(first + 2 * place + way for place in places for way in (0, 1)))


def as_recorded(call: Call, stolen_s: float) -> Operation:
    """The call as long as it took in the recording."""
    return Operation(
        call.ranks,
        Collective(call.seconds, 0.0, stolen_s if call.seconds > 0 else 0.0),
        None if call.is_message else call.group,
    )

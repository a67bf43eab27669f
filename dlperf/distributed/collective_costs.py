"""Costs of the collectives of a step over a cluster: time alone, use of the link, interference with
computation; for a forecast (CollectiveCosts) and for recorded calls (CallCosts).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlperf.core.cluster import Cluster
from dlperf.core.units import KIB
from dlperf.core.variation import log_sigma
from dlperf.distributed.collective_times import (
    Burst,
    LinkFactors,
    burst_of,
    call_s,
    collective_s,
    link_bytes_per_s,
    message_s,
)
from dlperf.distributed.programs import Call
from dlperf.models.communication_replay import GLOO_LANES, NCCL_LANES, Collective, Operation

_SHORTEST_BYTES = 4
_LONG_BYTES = 256 * KIB
_MEMORY_FRAC = 0.5
"""Share of the computation that waits for memory, which a trace does not contain."""
_Shape = tuple[str, int, int, int, bool]
"""Kind, bytes, ranks, ranks a node, and whether it leaves a node."""


@dataclass(frozen=True)
class Interference:
    """Interference of an all-reduce with a rank's computation, in seconds per byte that the rank
    sends: where memory bounds the computation, where arithmetic does, and the collective's delay.
    """

    memory_s_per_byte: float = 0.0
    compute_s_per_byte: float = 0.0
    delayed_s_per_byte: float = 0.0

    def stolen_s(self, sent_bytes: float, memory_frac: float) -> float:
        """Processor time that a collective takes from a rank, `memory_frac` of whose computation
        waits for memory.
        """
        return sent_bytes * (
            memory_frac * self.memory_s_per_byte + (1 - memory_frac) * self.compute_s_per_byte
        )


def interference_of(cluster: Cluster, threads: int) -> Interference | None:
    """The interference measured at the nearest number of threads; None where there is none, as in a
    hand-written file.

    It is per byte that a rank sends, 2 (n - 1) / n of the vector, and so holds for other numbers of
    ranks.
    """
    if not cluster.interferences:
        return None
    nearest = min((abs(i.threads - threads), i.threads) for i in cluster.interferences)[1]
    stolen: dict[str, list[float]] = {"stream": [], "gemm": []}
    delayed = []
    for i in cluster.interferences:
        if i.threads == nearest:
            sent = 2 * (i.n_ranks - 1) / i.n_ranks * i.n_bytes
            stolen.setdefault(i.kernel, []).append(i.stolen_s_per_byte * i.n_bytes / sent)
            later_s = i.collective_together.median - i.collective_alone.median
            delayed.append(max(0.0, later_s) / sent)
    both = [*stolen["stream"], *stolen["gemm"]]
    memory, compute = (
        statistics.median(stolen[kernel] or both or [0.0]) for kernel in ("stream", "gemm")
    )
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


def link_frac(alone_s: float, shortest_s: float, passing_s: float, duration_s: float) -> float:
    """Share of a collective's `duration_s` in which it needs the link: its time alone less that of
    the shortest message.

    It is at least the time of its bytes on the link: a pipeline of messages hides latency.
    """
    return min(alone_s, max(alone_s - shortest_s, passing_s)) / duration_s


def passing_s_per_byte(cluster: Cluster, between_nodes: bool, factors: LinkFactors) -> float:
    """Seconds per byte of the slowest link of a ring."""
    return 1 / (link_bytes_per_s(cluster, between_nodes, factors) or math.inf)


def _collective(
    alone_s: float,
    shortest_s: float,
    excess_s: float,
    sent_bytes: float,
    link_s: float,
    stolen_s: float,
    delayed_s: float,
    burst: Burst | None,
) -> Collective:
    """A collective as the time line takes it: its mean time, the link's share of it, what it takes
    from the processor, and what an idle link saves. `link_s` are its bytes' seconds on the link.
    """
    duration_s = alone_s + excess_s
    needed_frac = link_frac(alone_s, shortest_s, link_s, duration_s)
    saved_s = burst.spared_s(sent_bytes, shortest_s) if burst is not None else 0.0
    return Collective(duration_s, needed_frac, stolen_s, delayed_s, saved_s)


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
    """All-reduces and broadcasts of given sizes over given numbers of ranks.

    Raises DlperfError as :func:`dlperf.distributed.collective_times.collective_s`: no such link,
    ranks that do not fill their nodes.
    """

    def __init__(
        self,
        cluster: Cluster | None,
        reduced_bytes: Iterable[int],
        broadcast_bytes: Iterable[int],
        ranks: Sequence[int],
        ranks_per_node: int,
        factors: LinkFactors,
        threads: int,
    ) -> None:
        self.n_lanes = (
            NCCL_LANES if cluster is not None and cluster.backend == "nccl" else GLOO_LANES
        )
        self._interference = None if cluster is None else interference_of(cluster, threads)
        self._ranks_per_node = ranks_per_node
        self._mean_excess: dict[tuple[str, bool], float] = {}
        self._passing: dict[bool, float] = {}
        self._bursts: dict[bool, Burst] = {}
        self._times: dict[tuple[str, int, int], float] = {}
        several = [n for n in ranks if n > 1]
        if cluster is None or not several:
            return
        self._mean_excess = {
            (kind, far): mean_excess_s(cluster, kind, far)
            for kind in ("all_reduce", "broadcast")
            for far in (False, True)
        }
        distances = {n > ranks_per_node for n in several}
        self._passing = {far: passing_s_per_byte(cluster, far, factors) for far in distances}
        self._bursts = {far: burst_of(cluster, far, factors) for far in distances}
        for kind, wanted in (("all_reduce", reduced_bytes), ("broadcast", broadcast_bytes)):
            sizes = sorted({_SHORTEST_BYTES, *wanted})
            times = collective_s(
                cluster,
                kind,
                np.array(sizes, dtype=float)[:, None],
                np.array(several)[None, :],
                ranks_per_node,
                factors,
            )
            for row, size in enumerate(sizes):
                for column, n in enumerate(several):
                    self._times[kind, size, n] = float(times[row, column])

    def seconds(self, kind: str, n_bytes: int, n_ranks: int) -> float:
        """One collective alone; 0 for one rank."""
        return 0.0 if n_ranks == 1 else self._times[kind, n_bytes, n_ranks]

    def bucket_s(self, n_ranks: int) -> float:
        """Seconds that an idle link between so many ranks saves at most."""
        burst = self._bursts.get(n_ranks > self._ranks_per_node)
        return 0.0 if burst is None else burst.stored_s

    def collective(
        self, kind: str, n_bytes: int, n_ranks: int, memory_frac: float = 0.0, factor: float = 1.0
    ) -> Collective:
        """The collective as the time line takes it; `factor` is a slowdown.

        `memory_frac` of the computation that gloo's threads disturb waits for memory.
        """
        seconds = factor * self.seconds(kind, n_bytes, n_ranks)
        if seconds <= 0:
            return Collective(0.0)
        far = n_ranks > self._ranks_per_node
        cost = self._interference or Interference()
        sent = (2 * (n_ranks - 1) / n_ranks if kind == "all_reduce" else 1.0) * n_bytes
        return _collective(
            seconds,
            factor * self.seconds(kind, _SHORTEST_BYTES, n_ranks),
            self._mean_excess[kind, far],
            sent,
            factor * sent * self._passing[far],
            cost.stolen_s(sent, memory_frac),
            sent * cost.delayed_s_per_byte,
            self._bursts[far],
        )


class CallCosts:
    """Recorded calls over a cluster; `nodes` are the nodes of the ranks.

    With `n_ranks` the groups of the recorded world have that many ranks, `ranks_per_node` on a
    node.

    Raises DlperfError where the cluster lacks a needed link, or the ranks do not fill their nodes.
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
        self._mean_excess: dict[tuple[str, bool], float] = {}
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
            self._mean_excess[kind, far] = mean_excess_s(cluster, kind, far)
            for (n_bytes, n), seconds in zip(ordered, times):
                self._seconds[kind, n_bytes, n, per_node, far] = float(seconds)

    @property
    def bucket_s(self) -> float:
        """Seconds that an idle link between nodes saves at most; 0 inside a node."""
        return self._bursts[True].stored_s if True in self._bursts else 0.0

    def shape(self, call: Call) -> _Shape:
        """Kind, bytes, ranks, ranks per node and distance, which decide the call's time."""
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
        """Seconds of the call alone, its ranks together and idle. A group with unequal numbers of
        ranks on its nodes counts as one rank per node.
        """
        shape = self.shape(call)
        return 0.0 if shape[2] == 1 else self._seconds[shape]

    def stolen_s(self, call: Call) -> float:
        """Processor time that the call takes from each of its ranks."""
        return self.interference.stolen_s(self.sent_bytes(call), _MEMORY_FRAC)

    def sent_bytes(self, call: Call) -> float:
        """Bytes that a rank sends; in a rooted call, the rank that sends most."""
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
        """The call as the replay takes it; `factor` is a slowdown."""
        kind, _, n, per_node, far = self.shape(call)
        alone = factor * self.seconds(call)
        if alone <= 0:
            return Operation(call.ranks, Collective(0.0), _queue(call))
        sent = self.sent_bytes(call)
        collective = _collective(
            alone,
            factor * self._seconds[kind, _SHORTEST_BYTES, n, per_node, far],
            self._mean_excess[kind, far],
            sent,
            factor * sent * self._passing[far],
            self.stolen_s(call),
            sent * self.interference.delayed_s_per_byte,
            None if call.is_message else self._bursts[far],  # ping-pongs were measured with pauses
        )
        return Operation(call.ranks, collective, _queue(call), self._ports(call, far))

    def _ports(self, call: Call, far: bool) -> tuple[int, ...]:
        """Links in both directions: between nodes those of each node, inside a node those of each
        rank (numbered after the nodes').
        """
        first = 0 if far else 2 * len(self.nodes)
        places = [self.nodes[rank] if far else rank for rank in call.ranks]
        if call.is_message:
            return first + 2 * places[0], first + 2 * places[1] + 1
        return tuple(dict.fromkeys(first + 2 * place + way for place in places for way in (0, 1)))


def _queue(call: Call) -> int | None:
    return None if call.is_message else call.group


def as_recorded(call: Call, stolen_s: float) -> Operation:
    """The call with its recorded time."""
    return Operation(
        call.ranks,
        Collective(call.seconds, 0.0, stolen_s if call.seconds > 0 else 0.0),
        _queue(call),
    )

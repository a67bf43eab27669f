"""The collectives of a step over a cluster, for many rank counts at once."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dlperf.core.cluster import Cluster
from dlperf.distributed.collective_times import (
    Burst,
    LinkFactors,
    burst_of,
    collective_s,
    link_bytes_per_s,
)
from dlperf.models.overlap import GLOO_LANES, NCCL_LANES, Collective

_SHORTEST_BYTES = 4


@dataclass(frozen=True)
class Interference:
    """What a byte of an all-reduce costs a rank that computes, where memory bounds the computation
    and where arithmetic does, and what it is delayed by; seconds a byte that a rank sends.
    """

    memory_s_per_byte: float = 0.0
    compute_s_per_byte: float = 0.0
    delayed_s_per_byte: float = 0.0


def interference_of(cluster: Cluster, threads: int) -> Interference | None:
    """The measured interference at the nearest number of threads; None where there is none, as in a
    file written by hand.

    It goes by the bytes that a rank sends, 2 (n - 1) / n of the vector, so that it carries over to
    other rank counts.
    """
    if not cluster.interferences:
        return None
    nearest = min((abs(i.threads - threads), i.threads) for i in cluster.interferences)[1]
    at = [i for i in cluster.interferences if i.threads == nearest]

    def sent(n_bytes: int, n_ranks: int) -> float:
        return 2 * (n_ranks - 1) / n_ranks * n_bytes

    stolen = {
        kernel: [
            i.stolen_s_per_byte * i.n_bytes / sent(i.n_bytes, i.n_ranks)
            for i in at
            if i.kernel == kernel
        ]
        for kernel in ("stream", "gemm")
    }
    delayed = [
        max(0.0, i.collective_together.median - i.collective_alone.median)
        / sent(i.n_bytes, i.n_ranks)
        for i in at
    ]
    both = [value for values in stolen.values() for value in values]
    memory, compute = (
        statistics.median(stolen[kernel] or both or [0.0]) for kernel in ("stream", "gemm")
    )
    return Interference(memory, compute, statistics.median(delayed))


def mean_excess_s(cluster: Cluster, kind: str, between_nodes: bool) -> float:
    """How much longer one collective takes on average than usually: the median over the measured
    sizes of mean less median, not below 0; seconds.

    On a processor that computes, gloo's threads now and then wait for the scheduler, whatever the
    size. A single message usually does not meet that, but in a step with several, between ranks
    that drift apart, it is the mean that adds up.
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
    """Share of a collective's `duration_s` for which it needs the link: alone it takes all but what
    the shortest message takes.

    It is never less than its bytes take to pass: where messages follow one another through a
    pipeline, latency hides behind them.
    """
    return min(alone_s, max(alone_s - shortest_s, passing_s)) / duration_s


def passing_s_per_byte(cluster: Cluster, between_nodes: bool, factors: LinkFactors) -> float:
    """Seconds that a byte takes to pass the slowest link of a ring."""
    return 1 / (link_bytes_per_s(cluster, between_nodes, factors) or math.inf)


class CollectiveCosts:
    """Times of all-reduces and broadcasts of given sizes over given rank counts, worked out
    together.

    Raises DlperfError as :func:`dlperf.distributed.collective_times.collective_s` does: no such link, ranks that do not
    fill their nodes.
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
        self._unsteady: dict[tuple[str, bool], float] = {}
        self._passing: dict[bool, float] = {}
        self._bursts: dict[bool, Burst] = {}
        self._times: dict[tuple[str, int, int], float] = {}
        several = [n for n in ranks if n > 1]
        if cluster is None or not several:
            return
        self._unsteady = {
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
        """What the link between so many ranks stores while it rests."""
        burst = self._bursts.get(n_ranks > self._ranks_per_node)
        return 0.0 if burst is None else burst.stored_s

    def collective(
        self, kind: str, n_bytes: int, n_ranks: int, memory_frac: float = 0.0, factor: float = 1.0
    ) -> Collective:
        """The collective as the time line takes it; `factor` times as slow as usual.

        It takes its mean (:func:`mean_excess_s`), and the link as :func:`link_frac` says. gloo's
        threads take the rank's processor; `memory_frac` of what they disturb waits for memory.
        """
        seconds = factor * self.seconds(kind, n_bytes, n_ranks)
        if seconds <= 0:
            return Collective(0.0)
        far = n_ranks > self._ranks_per_node
        duration = seconds + self._unsteady[kind, far]
        shortest = factor * self.seconds(kind, _SHORTEST_BYTES, n_ranks)
        cost = self._interference or Interference()
        sent = (2 * (n_ranks - 1) / n_ranks if kind == "all_reduce" else 1.0) * n_bytes
        stolen = sent * (
            memory_frac * cost.memory_s_per_byte + (1 - memory_frac) * cost.compute_s_per_byte
        )
        needed = link_frac(seconds, shortest, factor * sent * self._passing[far], duration)
        return Collective(
            duration,
            needed,
            stolen,
            sent * cost.delayed_s_per_byte,
            self._bursts[far].spared_s(sent, shortest),
        )

"""The time of any call that a trace of communication can hold: the collectives that a cluster file
measures, those that it does not, and messages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from dlperf.core.cluster import KINDS, PING_PONG, Cluster
from dlperf.core.errors import DlperfError
from dlperf.distributed.collective_times import LinkFactors, Reals, collective_s, find_path
from dlperf.distributed.link_fits import level_s
from dlperf.models import gloo
from dlperf.models.point_to_point import postal_s

UNMEASURED = ("reduce", "gather", "scatter", "all_to_all", "barrier")
"""Collectives that no cluster file holds measurements of."""
_SHORTEST_BYTES = 4


def call_s(
    cluster: Cluster,
    kind: str,
    n_bytes: ArrayLike,
    n_ranks: ArrayLike,
    ranks_per_node: int = 1,
    what_if: LinkFactors = LinkFactors(),
) -> Reals:
    """Seconds of a collective of any kind, started together, while none computes; `n_bytes` and
    `n_ranks` broadcast.

    :func:`dlperf.distributed.collective_times.collective_s` for the measured kinds; the others by gloo's algorithms (:mod:`dlperf.models.gloo`; NCCL sends the same messages, and its
    barrier is a shortest all-reduce) over the slowest link, without any correction, because nobody measured them. Raises DlperfError as there.
    """
    if kind in KINDS:
        return collective_s(cluster, kind, n_bytes, n_ranks, ranks_per_node, what_if)
    if kind not in UNMEASURED:
        raise DlperfError(
            f"collective {kind!r} is unknown; known are {', '.join((*KINDS, *UNMEASURED))}"
        )
    if kind == "barrier" and cluster.backend == "nccl":
        return collective_s(
            cluster,
            "all_reduce",
            np.full(np.shape(n_bytes), float(_SHORTEST_BYTES)),
            n_ranks,
            ranks_per_node,
            what_if,
        )
    sizes, ranks = np.broadcast_arrays(
        np.asarray(n_bytes, dtype=np.float64), np.asarray(n_ranks, dtype=np.float64)
    )
    result = np.zeros(sizes.shape)
    for between_nodes in (False, True):
        chosen = (ranks > 1) & ((ranks > ranks_per_node) == between_nodes)
        if not np.any(chosen):
            continue
        path = find_path(cluster, between_nodes).changed(what_if)
        link = (path.latency_s, path.s_per_byte)
        if kind == "barrier":
            result[chosen] = gloo.barrier_s(ranks[chosen], path.latency_s)
        elif kind == "reduce":
            result[chosen] = gloo.reduce_s(
                sizes[chosen], ranks[chosen], *link, path.reduce_s_per_byte
            )
        else:
            result[chosen] = gloo.gather_s(
                sizes[chosen], ranks[chosen], *link
            )  # scatter and all-to-all are as long
    return result


def message_s(
    cluster: Cluster, n_bytes: ArrayLike, between_nodes: bool, what_if: LinkFactors = LinkFactors()
) -> Reals:
    """Seconds of one message from one rank to another, both of them ready: the postal law over the
    link, corrected by its measured ping-pongs.

    The correction is measured over the law, interpolated in the logarithm of the size and constant
    beyond the measured ones; factors change the wire's part of the law. An empty message takes the
    link's latency. Raises DlperfError for negative bytes, and where the file holds no such link.
    """
    path = find_path(cluster, between_nodes)
    sizes = np.asarray(n_bytes, dtype=np.float64)
    changed = path.changed(what_if)
    law = np.asarray(postal_s(sizes, changed.latency_s, changed.s_per_byte), dtype=np.float64)
    links = [link for link in cluster.links if (link.distance == "network") == between_nodes]
    by_size: dict[int, float] = {}
    for link in links:
        for m in link.messages:
            if (
                m.what == PING_PONG and m.n_pairs == 1
            ):  # of several links inside a node the slowest, as the path has it
                by_size[m.n_bytes] = max(by_size.get(m.n_bytes, 0.0), level_s(m.n_bytes, m.samples))
    if not by_size:
        return law
    known = np.array(sorted(by_size), dtype=np.float64)
    plain_law = np.asarray(postal_s(known, path.latency_s, path.s_per_byte), dtype=np.float64)
    times = np.array([by_size[int(size)] for size in known])
    ratio = np.divide(times, plain_law, out=np.ones(known.shape), where=plain_law > 0)
    return np.asarray(
        law
        * np.interp(
            np.log(np.maximum(sizes, _SHORTEST_BYTES)),
            np.log(np.maximum(known, _SHORTEST_BYTES)),
            ratio,
        )
    )

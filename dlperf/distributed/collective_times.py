"""Times of collectives and messages over a cluster: the backend's algorithm with the cluster's
parameters, corrected by its measurements.

The same transfer inside one host (distance `socket`) has no wire. It separates the processor's part
of a link's time per byte from the wire's. Bytes are copied while others are on the wire, so the
slower part counts. What-if factors change the wire alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import ArrayLike

from dlperf.core.cluster import DISTANCES, KINDS, PING_PONG, Cluster
from dlperf.core.errors import DlperfError
from dlperf.distributed.link_fits import fit_link, level_s
from dlperf.models import backends, gloo
from dlperf.models.arguments import AMOUNT, Checked, Quantity, Reals, count
from dlperf.models.backends import LinkParameters
from dlperf.models.point_to_point import postal_s

_SHORTEST_BYTES = 4
UNMEASURED = ("reduce", "gather", "scatter", "all_to_all", "barrier")
"""Collectives that no cluster file holds measurements of."""


@dataclass(frozen=True)
class LinkFactors(Checked):
    """What-if factors on the bandwidth and the latency of the links between nodes.

    Raises DlperfError unless both are finite and positive.
    """

    link_bandwidth: float = 1.0
    link_latency: float = 1.0

    @property
    def changed(self) -> dict[str, float]:
        """The factors that are not 1, by name."""
        return {name: factor for name, factor in asdict(self).items() if factor != 1.0}

    def times(self, other: LinkFactors) -> LinkFactors:
        """The products of both factors.

        >>> LinkFactors(2.0, 3.0).times(LinkFactors(2.0, 0.5))
        LinkFactors(link_bandwidth=4.0, link_latency=1.5)
        """
        return LinkFactors(
            self.link_bandwidth * other.link_bandwidth, self.link_latency * other.link_latency
        )


@dataclass(frozen=True)
class Path:
    """Latency and seconds per byte of the slowest link of a ring.

    `wire_latency_s` and `wire_s_per_byte` are the link's part, `local_latency_s` and
    `local_s_per_byte` the processor's. `reduce_s_per_byte` is the time of the reduction.
    `burst_bytes` pass an idle wire at once.
    """

    local_latency_s: float
    wire_latency_s: float
    local_s_per_byte: float
    wire_s_per_byte: float
    reduce_s_per_byte: float = 0.0
    burst_bytes: float = 0.0

    @property
    def latency_s(self) -> float:
        """Both parts of the latency: they follow each other."""
        return self.local_latency_s + self.wire_latency_s

    @property
    def s_per_byte(self) -> float:
        """The slower part: they overlap."""
        return max(self.local_s_per_byte, self.wire_s_per_byte)

    @property
    def bytes_per_s(self) -> float | None:
        """Bandwidth for long messages in one direction; None where a message takes no time per
        byte.
        """
        return 1 / self.s_per_byte if self.s_per_byte > 0 else None

    @property
    def spared_s_per_byte(self) -> float:
        """Time per byte that an idle wire's token bucket saves: its bytes do not wait for the
        wire.
        """
        return max(0.0, self.wire_s_per_byte - self.local_s_per_byte)

    @property
    def stored_s(self) -> float:
        """Time that the bucket saves in all; it saves no more than the wire was idle."""
        return self.burst_bytes * self.spared_s_per_byte

    def spared_s(self, sent_bytes: float, measured_after_s: float) -> float:
        """Time saved for a collective of so many sent bytes after a long idle time, beyond the
        saving in its measurement, which began so long after another collective.
        """
        spared_s = min(sent_bytes * self.spared_s_per_byte, self.stored_s)
        return max(0.0, spared_s - measured_after_s)

    def changed(self, factors: LinkFactors) -> Path:
        """The path with other wires."""
        return replace(
            self,
            wire_latency_s=self.wire_latency_s * factors.link_latency,
            wire_s_per_byte=self.wire_s_per_byte / factors.link_bandwidth,
        )


def find_path(cluster: Cluster, between_nodes: bool) -> Path:
    """The path of a ring's slowest link: between nodes, or inside one, without a wire.

    Raises DlperfError where the file contains no such link.
    """
    fits = {link.distance: fit_link(link) for link in cluster.links}
    inside = [fits[distance] for distance in DISTANCES[:2] if distance in fits]
    sums = [r.samples.median / r.n_bytes for r in cluster.reductions]
    reduce_s_per_byte = min(sums, default=0.0)
    held = ", ".join(sorted(fits)) or "none"
    if not between_nodes:
        if not inside:
            raise DlperfError(
                f"{cluster.path or 'cluster'}: contains no link inside a node (it has {held}); add"
                " one with distance socket, or ask for one rank a node"
            )
        slowest = max(inside, key=lambda fit: (fit.s_per_byte, fit.latency_s))
        latency_s = max(fit.latency_s for fit in inside)
        return Path(latency_s, 0.0, slowest.s_per_byte, 0.0, reduce_s_per_byte)
    if "network" not in fits:
        raise DlperfError(
            f"{cluster.path or 'cluster'}: contains no link between nodes (it has {held}); measure"
            " on several, add one with distance network, or keep ranks together (--ranks-per-node)"
        )
    network, local = fits["network"], fits.get("socket")
    software_s = min(local.latency_s, network.latency_s) if local else 0.0
    return Path(
        software_s,
        network.latency_s - software_s,
        min(local.s_per_byte, network.s_per_byte) if local else 0.0,
        network.s_per_byte,
        reduce_s_per_byte,
        network.burst_bytes,
    )


def collective_s(
    cluster: Cluster,
    kind: str,
    n_bytes: ArrayLike,
    n_ranks: ArrayLike,
    ranks_per_node: int = 1,
    what_if: LinkFactors = LinkFactors(),
) -> Reals:
    """Seconds of a collective whose ranks start together and do not compute; `n_bytes` and
    `n_ranks` broadcast.

    T = m' (1 + (e - c) / m) + c. m is the time of the backend's algorithm over the slowest link
    (:mod:`dlperf.models.gloo`; NCCL: a ring), m' the same with the what-if factors. e = (r - 1) m
    is the measured excess over it. c is the excess inside one host, where there is no link: copies
    and waking threads, which another link does not change. r is the ratio of measurement and model,
    interpolated in log size and log ranks, constant beyond the measured ones, and 1 without
    measurements. At a measured point, without factors, T is the measurement. UNMEASURED kinds take
    m'; NCCL's barrier is a shortest all-reduce.

    `ranks_per_node` ranks share a node; a ring enters and leaves each node once. Inside a node
    there is no wire, and factors change nothing. The link was idle for no longer than a barrier, as
    in the measurement (:meth:`Path.spared_s` is what more could save). One rank costs nothing.

    Raises DlperfError for an unknown kind, negative bytes, ranks that are no whole numbers or do
    not fill their nodes, and where the file lacks the link.
    """
    if kind not in (*KINDS, *UNMEASURED):
        known = ", ".join((*KINDS, *UNMEASURED))
        raise DlperfError(f"collective {kind!r} is unknown; known are {known}")
    if kind == "barrier" and cluster.backend == "nccl":
        kind, n_bytes = "all_reduce", np.zeros(np.shape(n_bytes))
    count().check("ranks_per_node", ranks_per_node)
    sizes, ranks = np.broadcast_arrays(
        AMOUNT.check("n_bytes", n_bytes), count().check("n_ranks", n_ranks)
    )
    far = ranks > ranks_per_node
    uneven = ranks[far & (ranks % ranks_per_node != 0)]
    if uneven.size:
        raise DlperfError(
            f"{uneven[0]:g} ranks do not fill nodes of {ranks_per_node}; choose a multiple, or"
            " another number of ranks a node"
        )
    result = np.zeros(sizes.shape)
    for between_nodes in (False, True):
        chosen = (ranks > 1) & (far == between_nodes)
        if np.any(chosen):
            result[chosen] = _uniform_s(
                cluster, kind, sizes[chosen], ranks[chosen], ranks_per_node, between_nodes, what_if
            )
    return result


def _uniform_s(
    cluster: Cluster,
    kind: str,
    sizes: Reals,
    ranks: Reals,
    ranks_per_node: int,
    between_nodes: bool,
    what_if: LinkFactors,
) -> Reals:
    path = find_path(cluster, between_nodes)
    changed = model_s(cluster.backend, kind, sizes, ranks, path.changed(what_if))
    if kind in UNMEASURED:
        return changed
    as_measured = model_s(cluster.backend, kind, sizes, ranks, path)
    if not np.all(as_measured > 0):
        line = (
            "the messages of its links tell neither latency nor bandwidth; expected single"
            " ping-pongs of two sizes up to 8 KiB, or above"
        )
        raise DlperfError(f"{cluster.path or 'cluster'}: {line}. Measure again, or edit the file.")
    excess = _excess_s(cluster, kind, sizes, ranks, ranks_per_node, between_nodes, path)
    own = np.zeros(sizes.shape)
    if between_nodes and cluster.link("socket") is not None:
        inside = find_path(cluster, between_nodes=False)
        local = _excess_s(cluster, kind, sizes, ranks, 1, False, inside)
        own = np.clip(excess, 0.0, np.maximum(local, 0.0))
    return np.asarray(changed * (1 + (excess - own) / as_measured) + own)


def model_s(backend: str, kind: str, n_bytes: Reals, n_ranks: Reals | float, path: Path) -> Reals:
    """The backend's algorithm without correction, in seconds. An empty message of a measured kind
    counts as one of a few bytes.

    The other kinds follow gloo; NCCL sends the same messages.
    """
    sizes = np.maximum(n_bytes, _SHORTEST_BYTES)
    link = LinkParameters(path.latency_s, path.s_per_byte, path.reduce_s_per_byte)
    alpha_beta = (link.latency_s, link.s_per_byte)
    if kind == "barrier":
        seconds = gloo.barrier_s(n_ranks, link.latency_s)
    elif kind == "reduce":
        seconds = gloo.reduce_s(n_bytes, n_ranks, *alpha_beta, link.reduce_s_per_byte)
    elif kind in UNMEASURED:  # scatter and all-to-all are as long as a gather
        seconds = gloo.gather_s(n_bytes, n_ranks, *alpha_beta)
    elif backend == "gloo":
        seconds = backends.collective_s(kind, sizes, n_ranks, link)
    elif kind == "broadcast":  # a ring of small chunks: the vector passes each link once
        seconds = (n_ranks - 1) * link.latency_s + sizes * link.s_per_byte
    else:
        seconds = backends.collective_s(kind, sizes, n_ranks, link, "textbook", "ring")
    return np.asarray(seconds)


def message_s(
    cluster: Cluster, n_bytes: ArrayLike, between_nodes: bool, what_if: LinkFactors = LinkFactors()
) -> Reals:
    """Seconds of one message between two ready ranks: the postal model of the link, corrected by
    its measured ping-pongs.

    The correction is the ratio of measurement and model, interpolated in log size and constant
    beyond the measured sizes. Factors change the wire's part of the model. An empty message takes
    the link's latency. Raises DlperfError where the file contains no such link.
    """
    path = find_path(cluster, between_nodes)
    changed = path.changed(what_if)
    sizes = AMOUNT.check("n_bytes", n_bytes)
    model = np.asarray(postal_s(sizes, changed.latency_s, changed.s_per_byte))
    by_size: dict[int, float] = {}
    for link in cluster.links:
        for m in link.messages if (link.distance == "network") == between_nodes else ():
            if m.what == PING_PONG and m.n_pairs == 1:
                # of several links inside a node the slowest, as the path has it
                by_size[m.n_bytes] = max(by_size.get(m.n_bytes, 0.0), level_s(m.n_bytes, m.samples))
    if not by_size:
        return model
    postal = partial(postal_s, latency_s=path.latency_s, s_per_byte=path.s_per_byte)
    return model * _ratio(by_size, postal, sizes)


def _excess_s(
    cluster: Cluster,
    kind: str,
    sizes: Reals,
    ranks: Reals,
    ranks_per_node: int,
    between_nodes: bool,
    path: Path,
) -> Reals:
    """Measured less modelled time; 0 where unmeasured. Their ratio is interpolated in log size for
    each measured rank count, then in log ranks.
    """
    measured = [
        c
        for c in cluster.collectives
        if c.kind == kind and (c.n_ranks > c.ranks_per_node) == between_nodes
    ]
    if not measured:
        return np.zeros(sizes.shape)
    nearest = min(
        (c.ranks_per_node for c in measured),
        key=lambda per_node: (abs(math.log(per_node / ranks_per_node)), per_node),
    )
    by_ranks: dict[int, dict[int, float]] = defaultdict(dict)
    for c in measured:
        if not between_nodes or c.ranks_per_node == nearest:
            by_ranks[c.n_ranks][c.n_bytes] = c.samples.median
    counts = sorted(by_ranks)
    rows = [
        _ratio(
            by_ranks[n], partial(model_s, cluster.backend, kind, n_ranks=float(n), path=path), sizes
        )
        for n in counts
    ]
    log_counts = np.log(counts)
    ratio = [
        np.interp(x, log_counts, column) for x, column in zip(np.log(ranks), np.transpose(rows))
    ]
    model = model_s(cluster.backend, kind, sizes, ranks, path)
    return np.asarray((np.array(ratio) - 1) * model)


def _ratio(by_size: dict[int, float], model: Callable[[Reals], Quantity], sizes: Reals) -> Reals:
    """Measured over modelled time, interpolated in log size and constant beyond the measured
    sizes.
    """
    known = np.array(sorted(by_size), dtype=np.float64)
    modelled = np.asarray(model(known))
    times = np.array([by_size[size] for size in sorted(by_size)])
    ratio = np.divide(times, modelled, out=np.ones(known.shape), where=modelled > 0)
    return np.asarray(np.interp(_log(sizes), _log(known), ratio))


def _log(sizes: Reals) -> Reals:
    return np.asarray(np.log(np.maximum(sizes, _SHORTEST_BYTES)))

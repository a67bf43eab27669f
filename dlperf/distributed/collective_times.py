"""Times of collectives and messages over a cluster: the backend's algorithm with the cluster's
parameters, corrected by its measurements.

The same transfer inside one host (distance `socket`) has no wire. It separates the processor's part
of a link's time per byte from the wire's. Bytes are copied while others are on the wire, so the
slower part counts. What-if factors change the wire alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.cluster import DISTANCES, KINDS, PING_PONG, Cluster, Collective
from dlperf.core.errors import DlperfError
from dlperf.distributed.link_fits import fit_link, level_s
from dlperf.models import backends, gloo
from dlperf.models.backends import LinkParameters
from dlperf.models.point_to_point import postal_s

Reals = NDArray[np.float64]
_SHORTEST_BYTES = 4
UNMEASURED = ("reduce", "gather", "scatter", "all_to_all", "barrier")
"""Collectives that no cluster file holds measurements of."""


@dataclass(frozen=True)
class LinkFactors:
    """What-if factors on the bandwidth and the latency of the links between nodes.

    Raises DlperfError unless both are finite and positive.
    """

    link_bandwidth: float = 1.0
    link_latency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("link_bandwidth", "link_latency"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise DlperfError(f"{name} is {value!r}; a factor must be finite and positive")

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
                f"{_name(cluster)}: contains no link inside a node (it has {held}); add one with"
                " distance socket, or ask for one rank a node"
            )
        slowest = max(inside, key=lambda fit: (fit.s_per_byte, fit.latency_s))
        latency_s = max(fit.latency_s for fit in inside)
        return Path(latency_s, 0.0, slowest.s_per_byte, 0.0, reduce_s_per_byte)
    if "network" not in fits:
        raise DlperfError(
            f"{_name(cluster)}: contains no link between nodes (it has {held}); measure on several,"
            " add one with distance network, or keep ranks together (--ranks-per-node)"
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


def link_bytes_per_s(
    cluster: Cluster, between_nodes: bool, what_if: LinkFactors = LinkFactors()
) -> float | None:
    """Bandwidth of the slowest link of a ring for long messages, one direction, bytes per second;
    None where a message takes no time per byte.

    Raises DlperfError where the file contains no such link.
    """
    s_per_byte = find_path(cluster, between_nodes).changed(what_if).s_per_byte
    return 1 / s_per_byte if s_per_byte > 0 else None


@dataclass(frozen=True)
class Burst:
    """Time that an idle link's token bucket saves: in all, and per byte. It saves no more than the
    link was idle.
    """

    stored_s: float
    s_per_byte: float

    def spared_s(self, sent_bytes: float, measured_after_s: float) -> float:
        """Time saved for a collective of so many sent bytes after a long idle time, beyond the
        saving in its measurement, which began so long after another collective.
        """
        return max(0.0, min(sent_bytes * self.s_per_byte, self.stored_s) - measured_after_s)


def burst_of(cluster: Cluster, between_nodes: bool, what_if: LinkFactors = LinkFactors()) -> Burst:
    """The token bucket of the slowest link of a ring: its bytes do not wait for the wire. Zero
    inside a node.

    Its size is fitted (:class:`dlperf.distributed.link_fits.LinkFit`) and does not depend on the
    bandwidth. Raises DlperfError where the file contains no such link.
    """
    path = find_path(cluster, between_nodes).changed(what_if)
    spared = max(0.0, path.wire_s_per_byte - path.local_s_per_byte)
    return Burst(path.burst_bytes * spared, spared)


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
    measurements. At a measured point, without factors, T is the measurement.

    `ranks_per_node` ranks share a node; a ring enters and leaves each node once. Inside a node
    there is no wire, and factors change nothing. The link was idle for no longer than a barrier, as
    in the measurement (:func:`burst_of` is what more could save). One rank costs nothing.

    Raises DlperfError for an unknown kind, negative bytes, ranks that are no whole numbers or do
    not fill their nodes, and where the file lacks the link.
    """
    if kind not in KINDS:
        raise DlperfError(f"collective {kind!r} is unknown; known are {', '.join(KINDS)}")
    sizes, ranks = np.broadcast_arrays(
        np.asarray(n_bytes, dtype=np.float64), np.asarray(n_ranks, dtype=np.float64)
    )
    if not np.all(sizes >= 0):
        raise DlperfError(f"n_bytes is {n_bytes!r}; it must be at least 0")
    if ranks_per_node < 1 or ranks_per_node != int(ranks_per_node):
        raise DlperfError(
            f"ranks_per_node is {ranks_per_node}; it must be a whole number of at least 1"
        )
    if not np.all((ranks >= 1) & (ranks == np.floor(ranks))):
        raise DlperfError(f"n_ranks is {n_ranks!r}; ranks are whole numbers of at least 1")
    if not np.all((ranks <= ranks_per_node) | (ranks % ranks_per_node == 0)):
        uneven = int(ranks[(ranks > ranks_per_node) & (ranks % ranks_per_node != 0)].flat[0])
        raise DlperfError(
            f"{uneven} ranks do not fill nodes of {ranks_per_node}; choose a multiple, or another"
            " number of ranks a node"
        )
    result = np.zeros(sizes.shape)
    for between_nodes in (False, True):
        chosen = (ranks > 1) & ((ranks > ranks_per_node) == between_nodes)
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
    as_measured = model_s(cluster.backend, kind, sizes, ranks, path)
    if not np.all(as_measured > 0):
        line = (
            "the messages of its links tell neither latency nor bandwidth; expected single"
            " ping-pongs of two sizes up to 8 KiB, or above"
        )
        raise DlperfError(f"{_name(cluster)}: {line}. Measure again, or edit the file.")
    changed = model_s(cluster.backend, kind, sizes, ranks, path.changed(what_if))
    excess = (
        _ratio(cluster, kind, sizes, ranks, ranks_per_node, between_nodes, path) - 1
    ) * as_measured
    own = (
        np.clip(excess, 0.0, _local_excess_s(cluster, kind, sizes, ranks))
        if between_nodes
        else np.zeros(sizes.shape)
    )
    return np.asarray(changed * (1 + (excess - own) / as_measured) + own)


def _local_excess_s(cluster: Cluster, kind: str, sizes: Reals, ranks: Reals) -> Reals:
    """Excess of the same collective inside one host over the model, in seconds, at least 0; 0 where
    unmeasured.
    """
    if (
        not any(c.kind == kind and c.n_ranks <= c.ranks_per_node for c in cluster.collectives)
        or cluster.link("socket") is None
    ):
        return np.zeros(sizes.shape)
    path = find_path(cluster, between_nodes=False)
    model = model_s(cluster.backend, kind, sizes, ranks, path)
    return np.asarray(
        np.maximum(_ratio(cluster, kind, sizes, ranks, 1, False, path) - 1, 0.0) * model
    )


def model_s(backend: str, kind: str, n_bytes: Reals, n_ranks: Reals, path: Path) -> Reals:
    """The backend's algorithm without correction, in seconds. An empty message counts as one of a
    few bytes.
    """
    sizes = np.maximum(n_bytes, _SHORTEST_BYTES)
    link = LinkParameters(path.latency_s, path.s_per_byte, path.reduce_s_per_byte)
    if backend == "gloo":
        return np.asarray(backends.collective_s(kind, sizes, n_ranks, link), dtype=np.float64)
    if kind == "broadcast":  # a ring of small chunks: the vector passes each link once
        return np.asarray(
            (n_ranks - 1) * link.latency_s + sizes * link.s_per_byte, dtype=np.float64
        )
    return np.asarray(
        backends.collective_s(kind, sizes, n_ranks, link, "textbook", "ring"), dtype=np.float64
    )


def call_s(
    cluster: Cluster,
    kind: str,
    n_bytes: ArrayLike,
    n_ranks: ArrayLike,
    ranks_per_node: int = 1,
    what_if: LinkFactors = LinkFactors(),
) -> Reals:
    """Seconds of a collective of any kind whose ranks start together and do not compute; `n_bytes`
    and `n_ranks` broadcast.

    Measured kinds: :func:`collective_s`. The others follow gloo's algorithms
    (:mod:`dlperf.models.gloo`) over the slowest link, without correction. NCCL sends the same
    messages, and its barrier is a shortest all-reduce. Raises DlperfError as :func:`collective_s`.
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
    """Seconds of one message between two ready ranks: the postal model of the link, corrected by
    its measured ping-pongs.

    The correction is the ratio of measurement and model, interpolated in log size and constant
    beyond the measured sizes. Factors change the wire's part of the model. An empty message takes
    the link's latency. Raises DlperfError where the file contains no such link.
    """
    path = find_path(cluster, between_nodes)
    sizes = np.asarray(n_bytes, dtype=np.float64)
    changed = path.changed(what_if)
    model = np.asarray(postal_s(sizes, changed.latency_s, changed.s_per_byte), dtype=np.float64)
    links = [link for link in cluster.links if (link.distance == "network") == between_nodes]
    by_size: dict[int, float] = {}
    for link in links:
        for m in link.messages:
            if (
                m.what == PING_PONG and m.n_pairs == 1
            ):  # of several links inside a node the slowest, as the path has it
                by_size[m.n_bytes] = max(by_size.get(m.n_bytes, 0.0), level_s(m.n_bytes, m.samples))
    if not by_size:
        return model
    known = np.array(sorted(by_size), dtype=np.float64)
    plain_law = np.asarray(postal_s(known, path.latency_s, path.s_per_byte), dtype=np.float64)
    times = np.array([by_size[int(size)] for size in known])
    ratio = np.divide(times, plain_law, out=np.ones(known.shape), where=plain_law > 0)
    return np.asarray(
        model
        * np.interp(
            np.log(np.maximum(sizes, _SHORTEST_BYTES)),
            np.log(np.maximum(known, _SHORTEST_BYTES)),
            ratio,
        )
    )


def _ratio(
    cluster: Cluster,
    kind: str,
    sizes: Reals,
    ranks: Reals,
    ranks_per_node: int,
    between_nodes: bool,
    path: Path,
) -> Reals:
    """Measured over modelled time, interpolated in log size for each measured rank count, then in
    log ranks.
    """
    measured = [
        c
        for c in cluster.collectives
        if c.kind == kind and (c.n_ranks > c.ranks_per_node) == between_nodes
    ]
    if not measured:
        return np.ones(sizes.shape)
    if between_nodes:
        nearest = min(
            (c.ranks_per_node for c in measured),
            key=lambda per_node: (abs(math.log(per_node / ranks_per_node)), per_node),
        )
        measured = [c for c in measured if c.ranks_per_node == nearest]
    counts = sorted({c.n_ranks for c in measured})
    rows = np.stack(
        [
            _ratio_by_size(
                cluster.backend, [c for c in measured if c.n_ranks == count], sizes, path
            )
            for count in counts
        ]
    )
    place = np.interp(np.log(ranks), np.log(counts), np.arange(len(counts), dtype=np.float64))
    low = np.floor(place).astype(int)
    high = np.minimum(low + 1, len(counts) - 1)
    columns, weight = np.arange(sizes.size), place - low
    return np.asarray(rows[low, columns] * (1 - weight) + rows[high, columns] * weight)


def _ratio_by_size(backend: str, measured: list[Collective], sizes: Reals, path: Path) -> Reals:
    by_size = {c.n_bytes: c for c in sorted(measured, key=lambda c: c.n_bytes)}
    known = np.array(list(by_size), dtype=np.float64)
    times = np.array([c.samples.median for c in by_size.values()])
    model = model_s(
        backend, measured[0].kind, known, np.full(known.shape, float(measured[0].n_ranks)), path
    )
    return np.asarray(np.interp(_log(sizes), _log(known), times / model))


def _log(sizes: Reals) -> Reals:
    return np.asarray(np.log(np.maximum(sizes, _SHORTEST_BYTES)))


def _name(cluster: Cluster) -> str:
    return cluster.path or "cluster"

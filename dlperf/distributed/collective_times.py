"""The time of a collective over a measured or described cluster: the backend's own algorithm with
this cluster's parameters, corrected by what was measured.

Of a link's time per byte the wire's part and the processor's are told apart by the same transfer
inside one host (distance `socket`), which has no wire: bytes are copied while others are under way,
so the slower of the two counts. What-if factors change the wire alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.cluster import DISTANCES, KINDS, Cluster, Collective
from dlperf.core.errors import DlperfError
from dlperf.distributed.link_fits import fit_link
from dlperf.models import backends
from dlperf.models.backends import LinkParameters

Reals = NDArray[np.float64]
_SHORTEST_BYTES = 4


@dataclass(frozen=True)
class LinkFactors:
    """What if the links between nodes had so many times the bandwidth, and so many times the
    latency. Raises DlperfError unless both are positive.
    """

    link_bandwidth: float = 1.0
    link_latency: float = 1.0

    def __post_init__(self) -> None:
        for name in ("link_bandwidth", "link_latency"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise DlperfError(f"{name} is {value!r}; a factor must be finite and positive")

    def times(self, other: LinkFactors) -> LinkFactors:
        """Both factors one after the other.

        >>> LinkFactors(2.0, 3.0).times(LinkFactors(2.0, 0.5))
        LinkFactors(link_bandwidth=4.0, link_latency=1.5)
        """
        return LinkFactors(
            self.link_bandwidth * other.link_bandwidth, self.link_latency * other.link_latency
        )

    @classmethod
    def of(cls, factors: Mapping[str, float]) -> LinkFactors:
        """The factors by name; names that are not about links are left to others."""
        return cls(factors.get("link_bandwidth", 1.0), factors.get("link_latency", 1.0))


@dataclass(frozen=True)
class Path:
    """What the slowest link of a ring costs: seconds until a message's last byte has arrived, and
    seconds a byte that its port is taken.

    `wire_latency_s` and `wire_s_per_byte` are the link's part, `local_latency_s` and
    `local_s_per_byte` the processor's; `reduce_s_per_byte` is the sum. `burst_bytes` pass a wire
    that has rested at once.
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
        return Path(
            self.local_latency_s,
            self.wire_latency_s * factors.link_latency,
            self.local_s_per_byte,
            self.wire_s_per_byte / factors.link_bandwidth,
            self.reduce_s_per_byte,
            self.burst_bytes,
        )


def find_path(cluster: Cluster, between_nodes: bool) -> Path:
    """The path of a ring's slowest link: between nodes, or inside one, where all is the processor's
    and nothing the wire's.

    Raises DlperfError where the file holds no such link.
    """
    fits = {link.distance: fit_link(link) for link in cluster.links}
    inside = [fits[distance] for distance in DISTANCES[:2] if distance in fits]
    sums = [r.samples.median / r.n_bytes for r in cluster.reductions]
    reduce_s_per_byte = min(sums, default=0.0)
    if not between_nodes:
        if not inside:
            held = ", ".join(sorted(fits)) or "none"
            raise DlperfError(
                f"{_name(cluster)}: holds no link inside a node (it has {held}); add one with"
                " distance socket, or ask for one rank a node"
            )
        slowest = max(inside, key=lambda fit: (fit.s_per_byte, fit.latency_s))
        return Path(
            max(fit.latency_s for fit in inside), 0.0, slowest.s_per_byte, 0.0, reduce_s_per_byte
        )
    if "network" not in fits:
        held = ", ".join(sorted(fits)) or "none"
        cure = (
            "measure on several, add one with distance network, or keep ranks together"
            " (--ranks-per-node)"
        )
        raise DlperfError(f"{_name(cluster)}: holds no link between nodes (it has {held}); {cure}")
    network, local = fits["network"], fits.get("socket")
    if local is None:
        return Path(
            0.0, network.latency_s, 0.0, network.s_per_byte, reduce_s_per_byte, network.burst_bytes
        )
    software = min(local.latency_s, network.latency_s)
    local_s_per_byte = min(local.s_per_byte, network.s_per_byte)
    return Path(
        software,
        network.latency_s - software,
        local_s_per_byte,
        network.s_per_byte,
        reduce_s_per_byte,
        network.burst_bytes,
    )


def link_bytes_per_s(
    cluster: Cluster, between_nodes: bool, what_if: LinkFactors = LinkFactors()
) -> float | None:
    """Bandwidth of the slowest link of a ring for long messages, one direction, bytes per second;
    None where a message takes no time per byte.

    Raises DlperfError where the file holds no such link.
    """
    s_per_byte = find_path(cluster, between_nodes).changed(what_if).s_per_byte
    return 1 / s_per_byte if s_per_byte > 0 else None


@dataclass(frozen=True)
class Burst:
    """What a link that has rested spares: seconds in all, and for each byte. No second is spared
    that the link has not rested.
    """

    stored_s: float
    s_per_byte: float

    def spared_s(self, sent_bytes: float, measured_after_s: float) -> float:
        """What a collective that sends so many bytes is spared after a long rest, beyond what it
        was in its measurement, which began so long after another.
        """
        return max(0.0, min(sent_bytes * self.s_per_byte, self.stored_s) - measured_after_s)


def burst_of(cluster: Cluster, between_nodes: bool, what_if: LinkFactors = LinkFactors()) -> Burst:
    """The token bucket of the slowest link of a ring: its bytes wait for the processor alone, not
    for the wire. Nothing inside a node.

    The bucket's bytes were fitted (:class:`dlperf.distributed.link_fits.LinkFit`) and stay the same
    on a link of another bandwidth. Raises DlperfError where the file holds no such link.
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
    """Seconds that a collective takes; `n_bytes` and `n_ranks` broadcast. All ranks start together,
    and none computes meanwhile.

    T = law(what-if) (1 + (e - c) / law) + c, where `law` is the backend's algorithm
    (:mod:`dlperf.models.gloo`; NCCL: a ring) over the slowest link on the way, e = (r - 1) law what
    was measured beyond it, and c of that what the same collective takes beyond the law inside one
    host, where there is no link: copies and waking threads, which stay as they are when the link
    changes. r is the measured time over the law's, interpolated in log size and log ranks and
    constant beyond the measured ones. So at a measured size and rank count the answer without
    factors is the measurement. With no measured collective of this kind r is 1.

    `ranks_per_node` ranks share a node; a ring enters and leaves each node once. Inside a node
    there is no wire, and factors change nothing. The link has not rested before for longer than a
    barrier takes (:func:`burst_of` is what it could spare otherwise), as when it was measured. One
    rank costs nothing.

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
    as_measured = law_s(cluster.backend, kind, sizes, ranks, path)
    if not np.all(as_measured > 0):
        line = (
            "the messages of its links tell neither latency nor bandwidth; expected single"
            " ping-pongs of two sizes up to 8 KiB, or above"
        )
        raise DlperfError(f"{_name(cluster)}: {line}. Measure again, or edit the file.")
    changed = law_s(cluster.backend, kind, sizes, ranks, path.changed(what_if))
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
    """What the same collective takes inside one host beyond the law, seconds, not below 0; 0 where
    the file does not know.
    """
    if (
        not any(c.kind == kind and c.n_ranks <= c.ranks_per_node for c in cluster.collectives)
        or cluster.link("socket") is None
    ):
        return np.zeros(sizes.shape)
    path = find_path(cluster, between_nodes=False)
    law = law_s(cluster.backend, kind, sizes, ranks, path)
    return np.asarray(
        np.maximum(_ratio(cluster, kind, sizes, ranks, 1, False, path) - 1, 0.0) * law
    )


def law_s(backend: str, kind: str, n_bytes: Reals, n_ranks: Reals, path: Path) -> Reals:
    """The backend's algorithm without any correction, seconds. An empty message counts as one of a
    few bytes: somebody has to say that it is empty.
    """
    sizes = np.maximum(n_bytes, _SHORTEST_BYTES)
    link = LinkParameters(path.latency_s, path.s_per_byte, path.reduce_s_per_byte)
    if backend == "gloo":
        return np.asarray(backends.collective_s(kind, sizes, n_ranks, link), dtype=np.float64)
    if (
        kind == "broadcast"
    ):  # NCCL's is a ring of many small chunks: once the pipeline is full, the vector passes each link once
        return np.asarray(
            (n_ranks - 1) * link.latency_s + sizes * link.s_per_byte, dtype=np.float64
        )
    return np.asarray(
        backends.collective_s(kind, sizes, n_ranks, link, "textbook", "ring"), dtype=np.float64
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
    """Measured over the law, interpolated in log size for each measured rank count, and then in log
    ranks.
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
    law = law_s(
        backend, measured[0].kind, known, np.full(known.shape, float(measured[0].n_ranks)), path
    )
    return np.asarray(np.interp(_log(sizes), _log(known), times / law))


def _log(sizes: Reals) -> Reals:
    return np.asarray(np.log(np.maximum(sizes, _SHORTEST_BYTES)))


def _name(cluster: Cluster) -> str:
    return cluster.path or "cluster"

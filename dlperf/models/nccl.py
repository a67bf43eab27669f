"""What NCCL's tuner expects of its collectives, in seconds: ring or tree, protocol LL, LL128 or
Simple, and which of them it would choose.

Source: github.com/NVIDIA/nccl, src/graph/tuning.cc at commit b647562: its tables of latencies and
limits, and its rules, said anew here. time = latency + bytes / bandwidth, with the latency from
tables by algorithm, protocol and kind of link, and the bandwidth from that of the links (which NCCL
finds in the topology) less each protocol's overhead. `n_bytes` is the whole vector, as in
:mod:`dlperf.models.collectives`.

It is what NCCL decides by, no measurement: its authors fitted the tables to their machines (Volta,
Ampere, Hopper). In-network reduction (CollNet, NVLS) is left out. The launch of the kernel is in
the latencies as far as the authors' measurements had it. Tree latency is stepped in the number of
nodes (floor of log2), and the tree's correction by size is too, so more bytes can take less time by
this model just as they do for the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.units import GIGA
from dlperf.models.arguments import Quantity, Reals, check_fields, formula

ALGORITHMS = ("tree", "ring")
PROTOCOLS = ("LL", "LL128", "Simple")
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
_COMBINATIONS = tuple(product(ALGORITHMS, PROTOCOLS))
_MICRO = 1e-6
_BASE_US = {"tree": (6.8, 14.0, 0.0), "ring": (6.6, 14.0, 8.4)}
_HOP_US = {
    ("nvlink", "tree"): (0.6, 1.25, 28.0),
    ("nvlink", "ring"): (0.6, 1.9, 3.4),
    ("pci", "tree"): (1.0, 1.9, 28.0),
    ("pci", "ring"): (1.0, 2.5, 5.7),
    ("network", "tree"): (5.0, 8.5, 28.0),
    ("network", "ring"): (2.7, 4.0, 14.0),
}
# GB/s for 1, 2, and more nodes; by generation Volta, Ampere, Hopper
_LL_MAX = ((39.0, 39.0, 20.4), (87.7, 22.5, 19.0), (87.7, 22.5, 19.0))
_RING_LL128_MAX = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 36.7))
_TREE_LL128_MAX = ((20.0, 20.0, 20.0), (20.0, 20.0, 20.0), (36.7, 36.7, 29.0))
_TREE_MAX = ((26.5, 18.5, 10.0), (24.0, 23.6, 17.8), (38.7, 41.4, 36.0))
# what a tree reaches of its bandwidth, for 64 B, 128 B, ... 256 MiB
_TREE_SHARE = {
    "LL": (
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.7,
        0.7,
        0.7,
        0.7,
        0.6,
        0.5,
        0.4,
        0.4,
        0.5,
        0.6,
        0.7,
        0.8,
        0.9,
        1,
        1,
        1,
        1,
    ),
    "LL128": (
        1,
        1,
        1,
        1,
        1,
        0.9,
        0.8,
        0.8,
        0.8,
        0.7,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.6,
        0.8,
        0.9,
        0.9,
        0.9,
        0.9,
        1,
        1,
    ),
    "Simple": (
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.9,
        0.8,
        0.7,
        0.6,
        0.6,
        0.5,
        0.5,
        0.5,
        0.5,
        0.6,
        0.7,
        0.8,
        0.7,
        0.7,
        0.8,
        0.9,
        0.9,
    ),
}


@dataclass(frozen=True, slots=True)
class NcclSystem:
    """GPUs and links as NCCL's topology search reports them (`NCCL_DEBUG=INFO`,
    `NCCL_DEBUG_SUBSYS=GRAPH`).

    `intra_bytes_per_s`, `inter_bytes_per_s`: bandwidth of one channel inside and between nodes;
    `n_channels` of them work at once. `compute_capability`: 70 Volta, 80 Ampere, 90 Hopper, one for
    all GPUs. `network_latency_s`: what the network's adapter adds. `ll128`: whether it is enabled;
    NCCL does so with NVLink on these three where GPU and adapter share a PCI switch. Raises
    DlperfError for ranks that do not fill the nodes, or values that are not positive.
    """

    n_ranks: int
    n_nodes: int
    n_channels: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    nvlink: bool = True
    compute_capability: int = 80
    amd_cpu: bool = False
    network_latency_s: float = 0.0
    ll128: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.n_ranks % self.n_nodes:
            raise DlperfError(
                f"{self.n_ranks} ranks cannot be divided among {self.n_nodes} nodes; change n_ranks"
                " or n_nodes"
            )

    @property
    def generation(self) -> int:
        """Row of the tables: 0 Volta and older, 1 Ampere, 2 Hopper and younger."""
        return (self.compute_capability >= 80) + (self.compute_capability >= 90)


def bandwidth_bytes_per_s(kind: str, algorithm: str, protocol: str, system: NcclSystem) -> float:
    """Bytes of the vector per second that the tuner expects ("algorithm bandwidth"); 0 where the
    combination does not exist.

    tuning.cc, ncclTopoTuneModel: channels x bandwidth of a channel, less the protocol's flags,
    limited by table; a ring of p ranks then carries p / steps of it (2 (p-1) steps for an
    all-reduce, p for a broadcast, else p-1), a tree half. Raises DlperfError for unknown names.

    >>> # 200 x 8 / 14
    >>> system = NcclSystem(8, 1, 10, 20e9, 20e9)
    >>> bandwidth_bytes_per_s("all_reduce", "ring", "Simple", system) / 1e9
    114.28571428571429
    """
    _known(kind, algorithm, protocol)
    if (algorithm == "tree" and kind != "all_reduce") or (
        protocol == "LL128" and not (system.ll128 and system.nvlink)
    ):
        return 0.0
    few = min(system.n_nodes, 3) - 1
    channel = (system.intra_bytes_per_s if system.n_nodes <= 2 else system.inter_bytes_per_s) / GIGA
    bus, row = system.n_channels * channel, system.generation
    ll_max = _LL_MAX[row if system.n_nodes == 1 else int(system.amd_cpu)][few]
    if algorithm == "tree":
        bus = min(bus * 0.92, system.n_channels * _TREE_MAX[row][few])
        if protocol == "LL":
            bus = min(bus / 3.8, ll_max)
        elif protocol == "LL128":
            bus = min(
                bus * (7 / 9 if system.n_nodes == 1 else 120 / 128),
                system.n_channels * _TREE_LL128_MAX[row][few],
            )
        return bus / 2 * GIGA
    if protocol == "LL":
        bus = min(ll_max, bus / (4 if system.n_nodes > 1 or kind == "all_reduce" else 3))
    elif protocol == "LL128":
        bus = min(
            bus * (0.7 if system.n_ranks < 2 * system.n_nodes else 0.92),
            system.n_channels * _RING_LL128_MAX[row][few],
        )
    return bus * system.n_ranks / max(_steps(kind, system.n_ranks), 1) * GIGA


def latency_s(kind: str, algorithm: str, protocol: str, system: NcclSystem) -> float:
    """Latency that the tuner expects, in seconds, before the ring's correction for long vectors
    (:func:`algorithm_s`).

    tuning.cc, ncclTopoTuneModel: a base and, for a ring, as many hops inside nodes and between them
    as it has steps; for a tree a chain in the node and log2 of the nodes, up and down; a broadcast
    has one hop (its channels being alike). Raises DlperfError for unknown names.

    >>> # 6.6 + 14 x 0.6
    >>> round(latency_s("all_reduce", "ring", "LL", NcclSystem(8, 1, 10, 20e9, 20e9)) * 1e6, 3)
    15.0
    """
    _known(kind, algorithm, protocol)
    index, inside = PROTOCOLS.index(protocol), "nvlink" if system.nvlink else "pci"
    intra, inter = _HOP_US[inside, algorithm][index], _HOP_US["network", algorithm][index]
    inter += (
        system.network_latency_s / _MICRO * (2 if protocol == "Simple" else 1)
    )  # Simple flushes as well
    per_node = system.n_ranks // system.n_nodes
    if algorithm == "tree":
        hops = 2 * ((per_node - 1) * intra + (system.n_nodes.bit_length() - 1) * inter)
    elif kind == "broadcast":
        hops = _HOP_US["network" if system.n_nodes > 1 else inside, algorithm][index]
    else:
        n_inter = (
            0
            if system.n_nodes == 1
            else 2 * system.n_nodes
            if kind == "all_reduce"
            else system.n_nodes - 1
        )
        if system.n_nodes > 1:
            intra = max(
                intra, (2.0 if system.amd_cpu else 1.0) * (3 if protocol == "Simple" else 1)
            )  # posting to the network
        hops = (_steps(kind, system.n_ranks) - n_inter) * intra + n_inter * inter
    return (_BASE_US[algorithm][index] + hops) * _MICRO


@formula()
def algorithm_s(
    kind: str, n_bytes: Quantity, algorithm: str, protocol: str, system: NcclSystem
) -> Quantity:
    """Time in seconds that the tuner expects of one algorithm and protocol; infinite where the
    combination does not exist.

    tuning.cc, ncclTopoGetAlgoTime: latency + n / bandwidth; trees reach a share of theirs that
    depends on the size, and between nodes a ring's latency is 1.4 times (1.9 before Ampere) from 64
    bytes a channel and rank on, with Simple. Raises DlperfError for unknown names, negative bytes.

    >>> system = NcclSystem(8, 1, 10, 20e9, 20e9)
    >>> # 8.4 + 14 x 3.4 + 8e6 / 114.3e3
    >>> algorithm_s("all_reduce", 8e6, "ring", "Simple", system) * 1e6
    126.0
    """
    rate = bandwidth_bytes_per_s(kind, algorithm, protocol, system)
    if system.n_ranks == 1:
        return 0.0 * n_bytes
    if rate == 0:
        return np.full(np.shape(n_bytes), np.inf)
    seconds: Quantity = latency_s(kind, algorithm, protocol, system)
    if algorithm == "tree":
        table = np.array((*_TREE_SHARE[protocol], 1.0))
        doublings = np.floor(np.log2(np.maximum(n_bytes // 64, 1)))
        rate = rate * table[np.minimum(doublings, len(table) - 1).astype(int)]
    elif protocol == "Simple" and kind == "all_reduce" and system.n_nodes > 1:
        is_long = n_bytes // (system.n_channels * system.n_ranks) >= 64
        longer = 1.4 if system.compute_capability >= 80 else 1.9
        seconds = seconds * np.where(is_long, longer, 1.0)
    return seconds + n_bytes / rate


@formula()
def collective_s(kind: str, n_bytes: Quantity, system: NcclSystem) -> Quantity:
    """Time in seconds of what the tuner would choose: the least over algorithms and protocols. One
    rank costs nothing.

    Raises DlperfError as :func:`algorithm_s`.

    >>> # ring LL: 15 + 1024 / 50 x 7 / 4 ns
    >>> round(collective_s("all_reduce", 1024, NcclSystem(8, 1, 10, 20e9, 20e9)) * 1e6, 2)
    15.04
    """
    return np.asarray(_times(kind, n_bytes, system).min(axis=0))


def choose(kind: str, n_bytes: float, system: NcclSystem) -> tuple[str, str]:
    """The algorithm and protocol that the tuner would choose for one size. Raises DlperfError as
    :func:`algorithm_s`.

    >>> system = NcclSystem(8, 1, 10, 20e9, 20e9)
    >>> choose("all_reduce", 1024, system), choose("all_reduce", 1e9, system)
    (('ring', 'LL'), ('ring', 'Simple'))
    """
    return _COMBINATIONS[int(np.argmin(_times(kind, n_bytes, system)))]


def _times(kind: str, n_bytes: Quantity, system: NcclSystem) -> Reals:
    return np.stack([algorithm_s(kind, n_bytes, *pair, system) for pair in _COMBINATIONS])


def _steps(kind: str, n_ranks: int) -> int:
    return {"all_reduce": 2 * (n_ranks - 1), "broadcast": n_ranks}.get(kind, n_ranks - 1)


def _known(kind: str, algorithm: str, protocol: str) -> None:
    for name, value, known in (
        ("collective", kind, KINDS),
        ("algorithm", algorithm, ALGORITHMS),
        ("protocol", protocol, PROTOCOLS),
    ):
        if value not in known:
            raise DlperfError(f"{name} {value!r} is unknown; known are {', '.join(known)}")

"""Collectives in two levels, in seconds: inside the nodes and between them, by rings.

The reduce-scatter - all-reduce - all-gather of Cho et al., "BlueConnect", MLSys 2019, which Horovod
and NCCL-based libraries have as hierarchical all-reduce. N = `n_nodes`, k = `ranks_per_node`;
inside a node a message of m bytes takes alpha_i + beta_i m, between nodes alpha_e + beta_e m while
one rank of the node sends. All k ranks of a node send at once and share `n_links` links of it: k /
n_links times beta_e. Ports as in :mod:`dlperf.models.collectives`, whose conventions of bytes and
of one rank hold. With one rank a node, or with one node, they are the flat rings. Messages inside a
node are supposed not to share anything; where they go through one memory, put in what one gets
while all send.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.models.arguments import Checked, Quantity, formula
from dlperf.models.collectives import (
    binomial_broadcast_s,
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)


@dataclass(frozen=True, slots=True)
class TwoLevels(Checked):
    """Links inside a node (`intra_`) and between nodes (`inter_`), and how many links a node has to
    the others.

    Raises DlperfError for negative values, or no link.
    """

    intra_latency_s: float
    intra_s_per_byte: float
    inter_latency_s: float
    inter_s_per_byte: float
    n_links: int = 1

    @property
    def intra(self) -> tuple[float, float]:
        """Latency and seconds per byte inside a node."""
        return self.intra_latency_s, self.intra_s_per_byte

    def inter(self, ranks_per_node: Quantity = 1) -> tuple[float, Quantity]:
        """Latency and seconds per byte of one rank while all of its node send."""
        share = np.maximum(ranks_per_node / np.float64(self.n_links), 1.0)
        return self.inter_latency_s, self.inter_s_per_byte * share


@formula()
def split(n_ranks: Quantity, ranks_per_node: Quantity) -> Quantity:
    """The number of nodes. Raises DlperfError where ranks do not fill them: a ring in each node
    needs the same number.

    >>> split(8, 4)
    2.0
    """
    if not np.all(n_ranks % ranks_per_node == 0):
        raise DlperfError(
            f"{n_ranks:g} ranks cannot be divided among nodes of {ranks_per_node:g}; change n_ranks"
            " or ranks_per_node"
        )
    return n_ranks / ranks_per_node


@formula()
def all_reduce_s(
    n_bytes: Quantity,
    n_nodes: Quantity,
    ranks_per_node: Quantity,
    levels: TwoLevels,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Two-level all-reduce: reduce-scatter in every node, k all-reduces of n/k bytes between nodes
    at once, all-gather in every node.

    (k-1)(2 alpha_i + n/k (2 beta_i + gamma)) + (N-1)(2 alpha_e + n/kN (2 beta_e k/links + gamma)).
    A flat ring over the same nodes sends about as many bytes over the link, but waits 2 (Nk - 1)
    times for it. Raises DlperfError for negative arguments or counts below one.

    >>> # the node sends 400 bytes in all, in two steps
    >>> all_reduce_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    6.0
    """
    n, k = n_bytes, ranks_per_node
    return (
        ring_reduce_scatter_s(n, k, *levels.intra, reduce_s_per_byte)
        + ring_all_reduce_s(n / k, n_nodes, *levels.inter(k), reduce_s_per_byte)
        + ring_all_gather_s(n, k, *levels.intra)
    )


@formula()
def reduce_scatter_s(
    n_bytes: Quantity,
    n_nodes: Quantity,
    ranks_per_node: Quantity,
    levels: TwoLevels,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Two-level reduce-scatter: in every node, then k of n/k bytes between nodes at once. Raises as
    :func:`all_reduce_s`.

    >>> reduce_scatter_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    3.0
    """
    n, k = n_bytes, ranks_per_node
    return ring_reduce_scatter_s(n, k, *levels.intra, reduce_s_per_byte) + ring_reduce_scatter_s(
        n / k, n_nodes, *levels.inter(k), reduce_s_per_byte
    )


@formula()
def all_gather_s(
    n_bytes: Quantity, n_nodes: Quantity, ranks_per_node: Quantity, levels: TwoLevels
) -> Quantity:
    """Two-level all-gather: :func:`reduce_scatter_s` backwards, without sums.

    >>> all_gather_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    3.0
    """
    return reduce_scatter_s(n_bytes, n_nodes, ranks_per_node, levels)


@formula()
def broadcast_s(
    n_bytes: Quantity, n_nodes: Quantity, ranks_per_node: Quantity, levels: TwoLevels
) -> Quantity:
    """Two-level broadcast: a binomial tree over the nodes (one rank of each, so no link is shared),
    then one in every node. Raises as :func:`all_reduce_s`.

    >>> broadcast_s(100, 4, 2, TwoLevels(0.0, 0.01, 1.0, 0.01))  # two steps of 2 s, one of 1 s
    5.0
    """
    between_s = binomial_broadcast_s(n_bytes, n_nodes, *levels.inter())
    return between_s + binomial_broadcast_s(n_bytes, ranks_per_node, *levels.intra)

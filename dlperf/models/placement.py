"""Which messages of a pattern leave their node: the K_inter and K_total of Choi et al. 2020,
section 3.1, from where the ranks are placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.errors import DlperfError
from dlperf.models.point_to_point import k_model_senders

Messages = NDArray[np.int64]
"""Of shape (messages, 2): sender and receiver."""


@dataclass(frozen=True, slots=True)
class MessageCounts:
    """What nodes send: K_inter = `n_inter`, K_total = `n_total` (each the most of any node), k' =
    `n_senders` (the most ranks of a node that send).
    """

    n_inter: int
    n_total: int
    n_senders: int

    @property
    def k(self) -> float:
        """The k of the K-model (equation 4); 0 where nothing is sent."""
        return (
            float(k_model_senders(self.n_inter, self.n_total, self.n_senders))
            if self.n_total
            else 0.0
        )


def blocks(n_ranks: int, ranks_per_node: int) -> list[int]:
    """The node of every rank when nodes are filled one after another; the last one may be part
    filled. Raises DlperfError for counts below one.

    >>> blocks(5, 2)
    [0, 0, 1, 1, 2]
    """
    if n_ranks < 1 or ranks_per_node < 1:
        raise DlperfError(
            f"n_ranks is {n_ranks}, ranks_per_node {ranks_per_node}; both must be at least 1"
        )
    return [rank // ranks_per_node for rank in range(n_ranks)]


def count_messages(messages: ArrayLike, node_of_rank: Sequence[int]) -> MessageCounts:
    """K_inter, K_total and k' of a pattern of messages under a placement (Choi et al. 2020, section
    3.1).

    `messages`: rows of sender and receiver, one for every message of the phase (or of the program:
    only the ratio enters); `node_of_rank`: the node of every rank. Of each node all its ranks'
    messages are summed, then the largest node is taken, for K_inter and K_total alike; those may be
    different nodes. A message of a rank to itself counts as one inside the node. Raises DlperfError
    for a rank that has no node.

    >>> # node 0 sends 3, one of them to node 1
    >>> count_messages([(0, 1), (1, 0), (1, 2), (2, 1)], node_of_rank=[0, 0, 1])
    MessageCounts(n_inter=1, n_total=3, n_senders=2)
    """
    pairs = np.asarray(messages, dtype=np.int64).reshape(-1, 2)
    _, nodes = np.unique(np.asarray(node_of_rank), return_inverse=True)
    if pairs.size and not (pairs.min() >= 0 and pairs.max() < len(nodes)):
        worst = int(pairs.min() if pairs.min() < 0 else pairs.max())
        raise DlperfError(
            f"rank {worst} sends or receives, but node_of_rank names the nodes of ranks 0 to"
            f" {len(nodes) - 1}; give every rank's node"
        )
    if not pairs.size:
        return MessageCounts(0, 0, 0)
    sender, receiver = nodes[pairs[:, 0]], nodes[pairs[:, 1]]
    sending = np.bincount(nodes[np.unique(pairs[:, 0])])
    return MessageCounts(
        int(np.bincount(sender, weights=sender != receiver).max()),
        int(np.bincount(sender).max()),
        int(sending.max()),
    )


def ring(n_ranks: int) -> Messages:
    """Every rank sends to its successor; nothing is sent by a single rank.

    >>> ring(3).tolist()
    [[0, 1], [1, 2], [2, 0]]
    """
    ranks = np.arange(n_ranks if n_ranks > 1 else 0)
    return np.stack((ranks, (ranks + 1) % max(n_ranks, 1)), axis=1)


def halo(shape: Sequence[int], periodic: bool = True, corners: bool = False) -> Messages:
    """A halo exchange on a Cartesian grid: a message to every neighbour, one for each direction.

    `shape`: ranks along each axis, the last axis fastest (C order, as MPI_Cart_create places them).
    Neighbours share a face (4 in two dimensions, 6 in three), with `corners` also an edge or a
    corner (8, 26). On a `periodic` axis of two ranks both directions lead to the same neighbour,
    and both are sent; on one of a single rank they would lead to the sender and are left out.
    Raises DlperfError for sizes below one.

    >>> len(halo((6, 8))), len(halo((6, 8), periodic=False)), len(halo((4, 4, 4), corners=True))
    (192, 164, 1664)
    """
    if not shape or min(shape) < 1:
        raise DlperfError(f"shape is {tuple(shape)}; every axis needs at least one rank")
    most_axes = len(shape) if corners else 1
    offsets = [
        offset
        for offset in product((-1, 0, 1), repeat=len(shape))
        if 1 <= np.count_nonzero(offset) <= most_axes
    ]
    ranks = np.arange(int(np.prod(shape)))
    positions = np.stack(np.unravel_index(ranks, tuple(shape)))
    there = positions[:, None] + np.array(offsets).T[:, :, None]  # axes, offsets, ranks
    neighbours = np.ravel_multi_index(tuple(there), tuple(shape), mode="wrap")
    senders = np.broadcast_to(ranks, neighbours.shape)
    sizes = np.reshape(shape, (-1, 1, 1))
    sent = (neighbours != senders) & (periodic | np.all((there >= 0) & (there < sizes), axis=0))
    return np.stack((senders[sent], neighbours[sent]), axis=1)

"""The time of one message between two processes: postal, LogGP, max-rate with two and with three
parameters, K-model; and the message counts that the K-model takes.

Every argument may be a number or an array; arrays broadcast against each other. SI base units:
seconds, bytes, bytes/s, seconds per byte. Parameters hold for one distance (same socket, other
socket, other node) and one protocol or band of sizes, for which they were fitted. A message of zero
bytes costs its latency. Congestion inside the network and the number of hops are in none of these
models; they err low there.

Which messages of a pattern leave their node (the K_inter and K_total of Choi et al. 2020, section
3.1) follows from where the ranks are placed: :func:`count_messages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.errors import DlperfError
from dlperf.models.arguments import FROM_ONE, Quantity, formula

Messages = NDArray[np.int64]
"""Of shape (messages, 2): sender and receiver."""


@formula()
def postal_s(n_bytes: Quantity, latency_s: Quantity, s_per_byte: Quantity) -> Quantity:
    """Time of a message in seconds by the postal model: T = alpha + beta n.

    Bar-Noy and Kipnis 1992; Choi et al. 2020, equation 1. alpha = `latency_s`, the time to start
    it; beta = `s_per_byte`; n = `n_bytes`. One pair of processes has the network to itself; with
    several of a node it errs low, by up to 59 % in Choi et al.'s runs. Raises DlperfError for
    negative arguments.

    >>> postal_s([0, 1000], latency_s=0.5, s_per_byte=0.001).tolist()
    [0.5, 1.5]
    """
    return latency_s + s_per_byte * n_bytes


@formula(n_messages=FROM_ONE)
def loggp_s(
    n_bytes: Quantity,
    latency_s: Quantity,
    overhead_s: Quantity,
    gap_per_byte_s: Quantity,
    gap_s: Quantity = 0.0,
    n_messages: Quantity = 1,
) -> Quantity:
    """Time in seconds until the last of a train of messages is received, by LogGP: o + (k-1) G +
    (m-1) (max(g, o) + (k-1) G) + L + o.

    Alexandrov, Ionescu, Schauser, Scheiman 1995 (JPDC 44, 1997). L = `latency_s`, o = `overhead_s`
    (a processor is busy so long with sending, and again with receiving), G = `gap_per_byte_s`, g =
    `gap_s` (from the last byte of a message to the first of the next), k = `n_bytes`, m =
    `n_messages` of the same size, one after another. One message takes o + (k-1) G + L + o. The
    first byte travels within L and o, so an empty message costs as much as one of a byte; with
    several messages the overhead of the next is spent while G of the last runs out.

    Holds between two processes without contention; receiving (o a message) is supposed to keep up.
    Where sending copies the message, o grows with k and LogGP errs low. Raises DlperfError for
    negative arguments, or fewer than one message.

    >>> loggp_s(101, latency_s=5.0, overhead_s=1.0, gap_per_byte_s=0.1)  # 1 + 100 x 0.1 + 5 + 1
    17.0
    >>> # 2 + 10 later
    >>> loggp_s(101, latency_s=5.0, overhead_s=1.0, gap_per_byte_s=0.1, gap_s=2.0, n_messages=2)
    29.0
    """
    bytes_s = np.maximum(n_bytes - 1, 0) * gap_per_byte_s
    further_s = (n_messages - 1) * (np.maximum(gap_s, overhead_s) + bytes_s)
    return np.asarray(overhead_s + bytes_s + further_s + latency_s + overhead_s)


@formula()
def max_rate_s(
    n_bytes: Quantity,
    latency_s: Quantity,
    base_bytes_per_s: Quantity,
    added_bytes_per_s: Quantity,
    n_senders: Quantity = 1,
    injection_bytes_per_s: Quantity = np.inf,
) -> Quantity:
    """Time of a message in seconds while k processes of its node send: T = alpha + k n / min(R_N,
    R_Cb + (k - 1) R_Ci).

    Gropp, Olson, Samfass 2016; Choi et al. 2020, equation 2, is the case without R_N (it is never
    the smaller there). alpha = `latency_s`, R_Cb = `base_bytes_per_s` (one process alone), R_Ci =
    `added_bytes_per_s` (what each further process adds), k = `n_senders`, R_N =
    `injection_bytes_per_s` (what the node's link takes), n = `n_bytes` sent by each.

    With the k of :func:`k_model_senders`, which need not be whole, it is the K-model for eager and
    rendezvous messages. For k = 1 it is the postal model with beta = 1 / R_Cb. All k are supposed
    to send at once, over the network: errs high where some of their messages stay inside the node.
    Raises DlperfError for negative arguments, or a rate that is not positive (a fraction of a
    sender can make it so).

    >>> # 1 + 300 / 100
    >>> max_rate_s(100, latency_s=1.0, base_bytes_per_s=60.0, added_bytes_per_s=20.0, n_senders=3)
    4.0
    >>> max_rate_s(100, 1.0, 60.0, 20.0, n_senders=3, injection_bytes_per_s=75.0)  # 1 + 300 / 75
    5.0
    """
    rate = base_bytes_per_s + (n_senders - 1) * added_bytes_per_s
    if not np.all(rate > 0):
        raise DlperfError(
            f"the rate of {n_senders} senders is {rate} bytes/s; it must be positive, so"
            " base_bytes_per_s must exceed added_bytes_per_s"
        )
    return np.asarray(latency_s + n_senders * n_bytes / np.minimum(rate, injection_bytes_per_s))


@formula()
def max_rate_short_s(
    n_bytes: Quantity, latency_s: Quantity, s_per_byte: Quantity, n_senders: Quantity = 1
) -> Quantity:
    """Time of a short message in seconds while k processes of its node send: T = alpha + k n beta.

    Choi et al. 2020, equation 3: the max-rate model with two parameters, for the short protocol,
    where a fit of three turns negative. alpha = `latency_s`, beta = `s_per_byte`, k = `n_senders`,
    n = `n_bytes`. The node's link is shared and nothing is gained by a second sender; errs high
    where it is. With the k of :func:`k_model_senders` it is equation 5. Raises DlperfError for
    negative arguments.

    >>> max_rate_short_s(100, latency_s=1.0, s_per_byte=0.01, n_senders=3)
    4.0
    """
    return latency_s + n_senders * n_bytes * s_per_byte


@formula()
def k_model_senders(n_inter: Quantity, n_total: Quantity, n_senders: Quantity) -> Quantity:
    """The K-model's number of senders, k = K_inter / K_total x k'.

    Choi et al. 2020, equation 4. K_inter = `n_inter`, the most messages that any node sends to
    others; K_total = `n_total`, the most that any node sends at all; k' = `n_senders`, processes of
    a node that communicate. Both K follow from a pattern and a placement
    (:func:`count_messages`). Put into :func:`max_rate_s` or
    :func:`max_rate_short_s`.

    Messages are counted, whatever their size, and the two largest nodes may be different ones; so
    it holds for phases of like messages. No node's messages go to others: k = 0. Raises DlperfError
    for negative counts, no messages at all, or more to other nodes than in all.

    >>> k_model_senders(12, 24, 6)  # the 6 x 8 halo exchange of the paper's Figure 1
    3.0
    """
    if not np.all(n_inter <= n_total):
        raise DlperfError(
            f"n_inter is {n_inter:g}, n_total {n_total:g}; a node cannot send more messages to"
            " other nodes than in all"
        )
    return n_inter / n_total * n_senders


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

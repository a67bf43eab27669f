"""Collectives as the textbooks have them, in seconds: ring, recursive doubling and halving,
Rabenseifner, Bruck, binomial tree; flat, and in two levels.

Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
experience", CCPE 2007; Thakur, Rabenseifner, Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 2005, also for ranks that are no power of two.

A message of n bytes takes alpha + n beta (alpha = `latency_s`, beta = `s_per_byte`) and occupies
one port of its sender and one of its receiver for all that time; a rank can send and receive at
once, one message each. gamma = `reduce_s_per_byte` is the time to add two vectors, per byte of
result; it overlaps with nothing. p = `n_ranks`. `n_bytes` is the whole vector: what each rank puts
into an all-reduce, reduce-scatter or broadcast, and what it gets from an all-gather. One rank costs
nothing; a vector of zero bytes costs the messages' latency.

All pairs of ranks are supposed to be equally far apart and to start together, and vectors to be
divisible. No library runs exactly these (see :mod:`dlperf.models.gloo`, :mod:`dlperf.models.nccl`);
they are the common ground for comparing algorithms. Arguments may be numbers or arrays that
broadcast. All raise DlperfError for negative arguments, or ranks that are no whole number above
zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.models.arguments import Checked, Quantity, formula


@formula()
def ring_reduce_scatter_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Ring reduce-scatter in seconds: (p-1) (alpha + n/p (beta + gamma)). Chan et al. 2007, bucket
    algorithm. Least bytes, most messages.

    >>> ring_reduce_scatter_s(400, 4, latency_s=1.0, s_per_byte=0.01)  # 3 x (1 + 1)
    6.0
    """
    return (n_ranks - 1) * (latency_s + n_bytes / n_ranks * (s_per_byte + reduce_s_per_byte))


@formula()
def ring_all_gather_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """Ring all-gather in seconds: (p-1) (alpha + n/p beta). Chan et al. 2007, bucket algorithm.

    >>> ring_all_gather_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    6.0
    """
    return ring_reduce_scatter_s(n_bytes, n_ranks, latency_s, s_per_byte)


@formula()
def ring_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Ring all-reduce in seconds: 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma;
    reduce-scatter, then all-gather.

    Chan et al. 2007; Patarasuk and Yuan 2009, who show that no algorithm sends fewer bytes. Its
    latency grows with p: errs in nothing, but is a bad choice for short vectors.

    >>> # 2 x (1 + 2), 6 x (1 + 1)
    >>> ring_all_reduce_s(400, [1, 2, 4], latency_s=1.0, s_per_byte=0.01).tolist()
    [0.0, 6.0, 12.0]
    """
    return ring_reduce_scatter_s(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte
    ) + ring_all_gather_s(n_bytes, n_ranks, latency_s, s_per_byte)


@formula()
def recursive_doubling_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """All-reduce by recursive doubling in seconds: log2 p (alpha + n (beta + gamma)).

    Thakur et al. 2005. Ranks beyond the largest power of two first give their vector to a neighbour
    and get the result from it in the end, which adds 2 alpha + n (2 beta + gamma). For short
    vectors: the whole vector goes in every step.

    >>> # two steps of 2 s; two more
    >>> recursive_doubling_all_reduce_s(100, [4, 5], latency_s=1.0, s_per_byte=0.01).tolist()
    [4.0, 8.0]
    """
    step_s = latency_s + n_bytes * (s_per_byte + reduce_s_per_byte)
    return _floor_log2(n_ranks) * step_s + _folded(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte
    )


@formula()
def rabenseifner_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Rabenseifner's all-reduce in seconds: 2 log2 p alpha + 2 (p-1)/p n beta + (p-1)/p n gamma.

    Thakur et al. 2005: reduce-scatter by recursive halving, all-gather by recursive doubling. As
    few bytes as the ring with few messages, but partners are far apart, which costs more on a real
    network than here. Ranks beyond a power of two as in :func:`recursive_doubling_all_reduce_s`.

    >>> # four messages, 600 bytes
    >>> rabenseifner_all_reduce_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    10.0
    """
    steps = _floor_log2(n_ranks)
    moved_bytes = (1 - 2.0**-steps) * n_bytes
    return (
        2 * steps * latency_s
        + moved_bytes * (2 * s_per_byte + reduce_s_per_byte)
        + _folded(n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte)
    )


@formula()
def recursive_halving_reduce_scatter_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Reduce-scatter by recursive halving in seconds: log2 p alpha + (p-1)/p n (beta + gamma).
    Thakur et al. 2005.

    Raises DlperfError besides for ranks that are no power of two.

    >>> recursive_halving_reduce_scatter_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    5.0
    """
    steps = _floor_log2(n_ranks)
    if not np.all(n_ranks == 2**steps):
        raise DlperfError(
            f"n_ranks is {np.asarray(n_ranks).astype(int)}; recursive halving and doubling need a"
            " power of two. Take the ring, or Bruck's all-gather"
        )
    return steps * latency_s + (n_ranks - 1) / n_ranks * n_bytes * (s_per_byte + reduce_s_per_byte)


@formula()
def recursive_doubling_all_gather_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """All-gather by recursive doubling in seconds: log2 p alpha + (p-1)/p n beta. Thakur et al.
    2005. Raises as recursive halving does.

    >>> recursive_doubling_all_gather_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    5.0
    """
    return recursive_halving_reduce_scatter_s(n_bytes, n_ranks, latency_s, s_per_byte)


@formula()
def bruck_all_gather_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """Bruck's all-gather in seconds: ceil(log2 p) alpha + (p-1)/p n beta, for any p. Bruck et al.
    1997; Thakur et al. 2005.

    The final rotation of the blocks in memory is not in it.

    >>> bruck_all_gather_s(500, 5, latency_s=1.0, s_per_byte=0.01)  # 1, 2 and 1 blocks
    7.0
    """
    return stages(n_ranks) * latency_s + (n_ranks - 1) / n_ranks * n_bytes * s_per_byte


@formula()
def binomial_broadcast_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """Broadcast by a binomial tree in seconds: ceil(log2 p) (alpha + n beta). Chan et al. 2007,
    minimum spanning tree. For short vectors.

    >>> binomial_broadcast_s(100, [2, 3, 4], latency_s=1.0, s_per_byte=0.01).tolist()
    [2.0, 4.0, 4.0]
    """
    return binomial_reduce_s(n_bytes, n_ranks, latency_s, s_per_byte)


@formula()
def binomial_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Sum at one rank by a binomial tree in seconds: ceil(log2 p) (alpha + n (beta + gamma)). Chan
    et al. 2007.

    >>> binomial_reduce_s(100, 4, latency_s=1.0, s_per_byte=0.01, reduce_s_per_byte=0.01)
    6.0
    """
    return stages(n_ranks) * (latency_s + n_bytes * (s_per_byte + reduce_s_per_byte))


@formula()
def binomial_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """All-reduce by a binomial tree up and down in seconds: ceil(log2 p) (2 alpha + n (2 beta +
    gamma)). Chan et al. 2007.

    >>> binomial_all_reduce_s(100, 4, latency_s=1.0, s_per_byte=0.01)
    8.0
    """
    return binomial_reduce_s(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte
    ) + binomial_broadcast_s(n_bytes, n_ranks, latency_s, s_per_byte)


@formula()
def scatter_all_gather_broadcast_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """Broadcast of a long vector in seconds: (ceil(log2 p) + p - 1) alpha + 2 (p-1)/p n beta.

    van de Geijn's: a binomial tree scatters the vector, a ring gathers it everywhere. Chan et al.
    2007.

    >>> # five messages, 600 bytes
    >>> scatter_all_gather_broadcast_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    11.0
    """
    steps = stages(n_ranks) + n_ranks - 1
    return steps * latency_s + 2 * (n_ranks - 1) / n_ranks * n_bytes * s_per_byte


@formula()
def double_binary_tree_broadcast_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    n_blocks: Quantity | None = None,
) -> Quantity:
    """Broadcast by two binary trees in seconds, each with half of the vector in b blocks: 2 (h + b
    - 1) (alpha + beta n / 2b), h = ceil(log2 p).

    Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    Parallel Computing 2009. A rank that is an inner node of one tree is a leaf of the other, so
    ports are busy all the time: n beta for long vectors, where a single binary tree takes 2 n beta.
    b = `n_blocks`; by default the best, sqrt((h-1) beta n / 2 alpha), at least one and at most one
    a byte, *not rounded*.

    An upper bound: a block goes down a level in two steps, often in one. Sanders' schedule takes
    0.75 to 1.0 of it for more than two ranks, the more blocks the closer; sending whatever is ready
    instead takes up to 1.6 times it, because messages of both trees then meet at a port.

    >>> # 12 messages of 100 bytes
    >>> double_binary_tree_broadcast_s(800, 8, latency_s=1.0, s_per_byte=0.01, n_blocks=4)
    24.0
    """
    return _two_trees_s(n_bytes, n_ranks, latency_s, s_per_byte, n_blocks)


@formula()
def double_binary_tree_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
    n_blocks: Quantity | None = None,
) -> Quantity:
    """All-reduce by two binary trees in seconds: up with sums, then down: 4 (h + b - 1) (alpha +
    beta n / 2b) + 2 (h + b - 1) gamma n / 2b.

    Sanders et al. 2009; NCCL's tree is built likewise, but begins to send down before all is
    summed. Blocks, bound and symbols as in :func:`double_binary_tree_broadcast_s`. Latency grows
    with log2 p only, bytes tend to 2 n beta.

    >>> double_binary_tree_all_reduce_s(800, 8, latency_s=1.0, s_per_byte=0.01, n_blocks=4)
    48.0
    """
    return _two_trees_s(
        n_bytes, n_ranks, latency_s, s_per_byte + reduce_s_per_byte, n_blocks
    ) + _two_trees_s(n_bytes, n_ranks, latency_s, s_per_byte, n_blocks)


@dataclass(frozen=True, slots=True)
class TwoLevels(Checked):
    """Links of collectives in two levels, by rings: inside a node (`intra_`) and between nodes
    (`inter_`), and how many links a node has to the others.

    The reduce-scatter - all-reduce - all-gather of Cho et al., "BlueConnect", MLSys 2019, which
    Horovod and NCCL-based libraries have as hierarchical all-reduce. N = `n_nodes`, k =
    `ranks_per_node`; inside a node a message of m bytes takes alpha_i + beta_i m, between nodes
    alpha_e + beta_e m while one rank of the node sends. All k ranks of a node send at once and
    share `n_links` links of it: k / n_links times beta_e. With one rank a node, or with one node,
    they are the flat rings. Messages inside a node are supposed not to share anything; where they
    go through one memory, put in what one gets while all send. Raises DlperfError for negative
    values, or no link.
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
def two_level_all_reduce_s(
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
    >>> two_level_all_reduce_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    6.0
    """
    n, k = n_bytes, ranks_per_node
    return (
        ring_reduce_scatter_s(n, k, *levels.intra, reduce_s_per_byte)
        + ring_all_reduce_s(n / k, n_nodes, *levels.inter(k), reduce_s_per_byte)
        + ring_all_gather_s(n, k, *levels.intra)
    )


@formula()
def two_level_reduce_scatter_s(
    n_bytes: Quantity,
    n_nodes: Quantity,
    ranks_per_node: Quantity,
    levels: TwoLevels,
    reduce_s_per_byte: Quantity = 0.0,
) -> Quantity:
    """Two-level reduce-scatter: in every node, then k of n/k bytes between nodes at once. Raises as
    :func:`two_level_all_reduce_s`.

    >>> two_level_reduce_scatter_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    3.0
    """
    n, k = n_bytes, ranks_per_node
    return ring_reduce_scatter_s(n, k, *levels.intra, reduce_s_per_byte) + ring_reduce_scatter_s(
        n / k, n_nodes, *levels.inter(k), reduce_s_per_byte
    )


@formula()
def two_level_all_gather_s(
    n_bytes: Quantity, n_nodes: Quantity, ranks_per_node: Quantity, levels: TwoLevels
) -> Quantity:
    """Two-level all-gather: :func:`two_level_reduce_scatter_s` backwards, without sums.

    >>> two_level_all_gather_s(400, 2, 2, TwoLevels(0.0, 0.0, 1.0, 0.01))
    3.0
    """
    return two_level_reduce_scatter_s(n_bytes, n_nodes, ranks_per_node, levels)


@formula()
def two_level_broadcast_s(
    n_bytes: Quantity, n_nodes: Quantity, ranks_per_node: Quantity, levels: TwoLevels
) -> Quantity:
    """Two-level broadcast: a binomial tree over the nodes (one rank of each, so no link is shared),
    then one in every node. Raises as :func:`two_level_all_reduce_s`.

    >>> # two steps of 2 s, one of 1 s
    >>> two_level_broadcast_s(100, 4, 2, TwoLevels(0.0, 0.01, 1.0, 0.01))
    5.0
    """
    between_s = binomial_broadcast_s(n_bytes, n_nodes, *levels.inter())
    return between_s + binomial_broadcast_s(n_bytes, ranks_per_node, *levels.intra)


def stages(n_ranks: Quantity) -> Quantity:
    """Stages of a tree: ceil(log2 p)."""
    return np.asarray(np.ceil(np.log2(n_ranks)))


def _two_trees_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    n_blocks: Quantity | None,
) -> Quantity:
    depth, each = stages(n_ranks), s_per_byte * n_bytes / 2
    if n_blocks is None:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            best = np.sqrt(np.where(each > 0, np.maximum(depth - 1, 0) * each / latency_s, 0.0))
        n_blocks = np.clip(np.nan_to_num(best, nan=1.0), 1.0, np.maximum(n_bytes, 1.0))
    return np.where(n_ranks > 1, 2 * (depth + n_blocks - 1) * (latency_s + each / n_blocks), 0.0)


def _floor_log2(n_ranks: Quantity) -> Quantity:
    return np.asarray(np.floor(np.log2(n_ranks)))


def _folded(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity,
) -> Quantity:
    """What ranks beyond the largest power of two cost."""
    fold_s = 2 * latency_s + n_bytes * (2 * s_per_byte + reduce_s_per_byte)
    return np.where(n_ranks > 2 ** _floor_log2(n_ranks), fold_s, 0.0)

"""The collectives of gloo as torch.distributed runs them, in seconds, from the parameters of one
link.

Sources: github.com/pytorch/gloo (gloo/allreduce.cc, allgather.cc, broadcast.cc, reduce.cc,
gather.cc, scatter.cc, alltoall.cc, barrier.cc) and torch's ProcessGroupGloo.cpp.

- **All-reduce** is the ring, at any size. The vector is cut into segments of at most 1 MiB, the
  same number for every rank and at least two; two are in flight, and an unthreaded loop adds a
  segment to the vector when it has arrived. First the sums are formed (reduce-scatter), then handed
  round (all-gather); the pipeline runs empty between the two. The bcube algorithm is there too, but
  torch never asks for it.
- **All-gather** is a ring with two halves of a contribution in flight; **broadcast** a binomial
  tree that sends the vector whole; **reduce-scatter** (as of torch 2.3, where it came) an
  all-reduce of a copy, of which every rank keeps its part.
- **Reduce** forms the sums as an all-reduce does, and each rank sends its part to the root.
  **Gather**, **scatter** and **all-to-all** send every part straight to where it belongs, all at
  once; the **barrier** disseminates empty messages.

A message of n bytes occupies the sender's and the receiver's port for beta n seconds and arrives
alpha seconds after its last byte has left: alpha = `latency_s`, beta = `s_per_byte` of a
full-duplex link, for messages as large as a segment (:func:`segments`). Before a byte moves, the
receiver's word that its buffer is ready must have reached the sender: `handshake_s`, as far as a
link's latency does not hold it already. gamma = `reduce_s_per_byte` is the unthreaded sum per byte
of result. `n_bytes` is the whole vector: what each rank puts into an all-reduce, reduce-scatter or
broadcast, and what each gets from an all-gather, the root from a gather, and what a rank puts into
a scatter or an all-to-all. One rank costs nothing; so does an empty all-reduce or all-gather, while
an empty broadcast costs its messages' latency.

Ranks are supposed to start together, and all links of the ring to be alike (put in the slowest).
Copies that torch makes before and after are not in here, nor the threads' waking, where latency_s
does not hold it. Arguments may be numbers or arrays that broadcast.
"""

from __future__ import annotations

import numpy as np

from dlperf.core.units import MIB
from dlperf.models.arguments import Quantity, Reals, formula, plain
from dlperf.models.collectives import stages

MAX_SEGMENT_BYTES = MIB
"""kMaxSegmentSize in allreduce.h; torch leaves it as it is."""


@formula()
def segments(
    n_bytes: Quantity,
    n_ranks: Quantity,
    item_bytes: Quantity = 4,
    max_segment_bytes: Quantity = MAX_SEGMENT_BYTES,
) -> tuple[Quantity, Quantity]:
    """How the ring cuts a vector: number of segments, and bytes of a segment (the last ones may be
    shorter, or empty and then not sent).

    gloo/allreduce.cc, `ring`: enough segments of at most `max_segment_bytes`, at least two for
    every rank, rounded up to a multiple of the ranks; their size rounded up to whole elements of
    `item_bytes`. Raises DlperfError for negative bytes or counts below one.

    >>> # five segments of 1 MiB become six
    >>> segments(4 * 2**20, 2), segments(2**20, 2), segments(5 * 2**20, 2)
    ((4.0, 1048576.0), (4.0, 262144.0), (6.0, 873816.0))
    """
    most = item_bytes * np.maximum(1, np.floor(max_segment_bytes / item_bytes))
    each = np.ceil(np.maximum(np.ceil(n_bytes / most), 2 * n_ranks) / n_ranks)
    n_segments = each * n_ranks
    length = np.ceil(np.ceil(n_bytes / n_segments) / item_bytes) * item_bytes
    return plain(n_segments), plain(length)


@formula()
def all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
    handshake_s: Quantity = 0.0,
    item_bytes: Quantity = 4,
) -> Quantity:
    """Time of gloo's ring all-reduce in seconds.

    Source, symbols and what is left out: the module's text. With N = (p-1)/p x segments for p =
    `n_ranks`, l bytes of a segment, x = beta l, a = alpha + handshake, g = gamma l, the time of a
    half is that of N messages of which two are in flight (:func:`_two_in_flight_s`), once with g
    and once without. For long vectors on a slow link it tends to 2 (p-1)/p beta n; for short ones
    to 2 (p-1) (alpha + handshake).

    All segments are taken for full ones: errs high by less than a segment a round where the vector
    cannot be divided. *Not monotone*: where a further round of segments begins they become smaller,
    and the last one is waited for and added sooner. Raises DlperfError for negative arguments, or
    ranks that are no whole number above zero.

    >>> # two halves of 2 segments of 1 MiB, 1 s each
    >>> all_reduce_s(4 * 2**20, 2, latency_s=0.0, s_per_byte=1 / 2**20)
    4.0
    >>> # the last segment's sum is waited for
    >>> all_reduce_s(4 * 2**20, 2, 0.0, s_per_byte=2**-20, reduce_s_per_byte=2**-21)
    4.5
    """
    sums_s, copies_s = _halves_s(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte, handshake_s, item_bytes
    )
    return sums_s + copies_s


@formula()
def reduce_scatter_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
    handshake_s: Quantity = 0.0,
    item_bytes: Quantity = 4,
) -> Quantity:
    """Time of torch's reduce-scatter over gloo in seconds: that of :func:`all_reduce_s`, because it
    is one, of which every rank keeps its part.

    torch's ProcessGroupGloo.cpp, `reduce_scatter_tensor_coalesced`. The copies before and after are
    not in it. Arguments and Raises as there.

    >>> reduce_scatter_s(4 * 2**20, 2, latency_s=0.0, s_per_byte=1 / 2**20)
    4.0
    """
    return all_reduce_s(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte, handshake_s, item_bytes
    )


@formula()
def all_gather_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    handshake_s: Quantity = 0.0,
) -> Quantity:
    """Time of gloo's all-gather in seconds; `n_bytes` is the gathered vector, of which every rank
    brings n / p.

    gloo/allgather.cc: a ring of 2 (p-1) messages of half a contribution, two in flight: max(a +
    (2p-2) x, (p-1) (a + x) + x) with x = beta n / 2p and a = alpha + handshake. The contribution's
    copy into the result is not in it. Raises DlperfError as :func:`all_reduce_s`.

    >>> all_gather_s(800, 2, latency_s=1.0, s_per_byte=0.01)  # two messages of 200 bytes
    5.0
    """
    transfer_s = s_per_byte * n_bytes / (2 * n_ranks)
    time_s = _two_in_flight_s(2 * (n_ranks - 1), latency_s + handshake_s, transfer_s, 0.0)
    return np.where(np.logical_and(n_ranks > 1, n_bytes > 0), time_s, 0.0)


@formula()
def broadcast_s(
    n_bytes: Quantity, n_ranks: Quantity, latency_s: Quantity, s_per_byte: Quantity
) -> Quantity:
    """Time of gloo's broadcast in seconds, until the last rank has the vector.

    gloo/broadcast.cc: a binomial tree; rank r (counted from the root) hears from r without its
    highest bit, and then sends to r + 2^i for every higher bit i, the lowest first, without waiting
    in between. So r has it after (floor(log2 r) + 1) beta n + bits(r) alpha, and the largest
    counts: d (alpha + beta n) for 2^d ranks. Receivers are ready from the start, so there is no
    handshake. Raises DlperfError as :func:`all_reduce_s`.

    >>> # ranks 3 and 4 are the last
    >>> broadcast_s(100, [1, 2, 4, 5], latency_s=1.0, s_per_byte=0.01).tolist()
    [0.0, 2.0, 4.0, 4.0]
    """
    transfer_s, depth = s_per_byte * n_bytes, stages(n_ranks)
    last = np.vectorize(_most_bits, otypes=[np.float64])(n_ranks)
    # rank 2^(d-1) - 1 hears early, but by the most hops
    below_s = np.maximum(depth - 1, 0) * (latency_s + transfer_s)
    return np.asarray(np.maximum(depth * transfer_s + last * latency_s, below_s))


@formula()
def reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
    handshake_s: Quantity = 0.0,
    item_bytes: Quantity = 4,
) -> Quantity:
    """Time of gloo's reduce in seconds, until the root has the sum: the first half of
    :func:`all_reduce_s`, then :func:`gather_s`.

    gloo/reduce.cc. Arguments and Raises as :func:`all_reduce_s`.

    >>> # 2 segments of 1 MiB, then the other half of the vector
    >>> reduce_s(4 * 2**20, 2, latency_s=0.0, s_per_byte=1 / 2**20)
    4.0
    """
    sums_s, _ = _halves_s(
        n_bytes, n_ranks, latency_s, s_per_byte, reduce_s_per_byte, handshake_s, item_bytes
    )
    return sums_s + gather_s(n_bytes, n_ranks, latency_s, s_per_byte, handshake_s)


@formula()
def gather_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    handshake_s: Quantity = 0.0,
) -> Quantity:
    """Time of gloo's gather in seconds, and of its scatter: alpha + handshake + (p-1)/p beta n, all
    of it through the root's port.

    gloo/gather.cc, scatter.cc: as many messages of n / p, all at once. Raises DlperfError as
    :func:`all_reduce_s`.

    >>> gather_s(400, [1, 4], latency_s=1.0, s_per_byte=0.01).tolist()
    [0.0, 4.0]
    """
    moved_s = (n_ranks - 1) / n_ranks * s_per_byte * n_bytes
    return np.where(n_ranks > 1, latency_s + handshake_s + moved_s, 0.0)


@formula()
def all_to_all_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    handshake_s: Quantity = 0.0,
) -> Quantity:
    """Time of gloo's all-to-all in seconds: as :func:`gather_s`, because every port takes as much
    in and out as a gather's root takes in.

    gloo/alltoall.cc: p - 1 messages of n / p from every rank, all at once; they are supposed to
    share the ports evenly. Errs low, by less than a factor of 2, where a port carries one message
    at a time, and where a switch cannot carry them all. Raises DlperfError as there.

    >>> all_to_all_s(400, 4, latency_s=1.0, s_per_byte=0.01)
    4.0
    """
    return gather_s(n_bytes, n_ranks, latency_s, s_per_byte, handshake_s)


@formula()
def barrier_s(n_ranks: Quantity, latency_s: Quantity, handshake_s: Quantity = 0.0) -> Quantity:
    """Time of gloo's barrier in seconds: ceil(log2 p) rounds of an empty message, alpha + handshake
    each.

    gloo/barrier.cc: the dissemination barrier of Hensgen, Finkel, Manber 1988. Raises DlperfError
    as :func:`all_reduce_s`.

    >>> barrier_s([1, 2, 5], latency_s=1.0).tolist()
    [0.0, 1.0, 3.0]
    """
    return stages(n_ranks) * (latency_s + handshake_s)


@formula()
def bcube_all_reduce_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity = 0.0,
    handshake_s: Quantity = 0.0,
) -> Quantity:
    """Time of gloo's bcube all-reduce in seconds (`AllreduceOptions::Algorithm::BCUBE`, which torch
    does not use).

    gloo/allreduce.cc, `bcube`: ranks are factorised into twos and one odd rest; a step with groups
    of g exchanges g - 1 pieces of the part in hand, adds them, and the part shrinks by g; then the
    way back without sums. A step costs alpha + handshake + (g-1)/g l (beta + gamma) for a part of l
    bytes, so in all 2 steps (alpha + handshake) + (p-1)/p n (2 beta + gamma). With 2^d ranks it is
    recursive halving and doubling. Pieces are taken for equal ones. In an odd group all ranks send
    to the lowest first, so it errs low there, up to a third, where a port carries one message at a
    time. Raises DlperfError as :func:`all_reduce_s`.

    >>> # 8: three steps each way, 2 x 7/8 x 4
    >>> bcube_all_reduce_s(400, [1, 2, 4, 8], latency_s=1.0, s_per_byte=0.01).tolist()
    [0.0, 6.0, 10.0, 13.0]
    """
    wait_s = 2 * np.vectorize(_n_bcube_steps)(n_ranks) * (latency_s + handshake_s)
    moved_s = (n_ranks - 1) / n_ranks * n_bytes * (2 * s_per_byte + reduce_s_per_byte)
    return np.where(n_bytes > 0, wait_s + moved_s, 0.0)


def _halves_s(
    n_bytes: Quantity,
    n_ranks: Quantity,
    latency_s: Quantity,
    s_per_byte: Quantity,
    reduce_s_per_byte: Quantity,
    handshake_s: Quantity,
    item_bytes: Quantity,
) -> tuple[Quantity, Quantity]:
    """Seconds of the two halves of a ring all-reduce: parts are summed on their way round, then the
    sums go round.
    """
    n_segments, length = segments(n_bytes, n_ranks, item_bytes)
    n_messages, moves = n_segments / n_ranks * (n_ranks - 1), (n_ranks > 1) & (n_bytes > 0)
    sums_s, copies_s = (
        _two_in_flight_s(n_messages, latency_s + handshake_s, s_per_byte * length, work_s)
        for work_s in (reduce_s_per_byte * length, 0.0)
    )
    return np.where(moves, sums_s, 0.0), np.where(moves, copies_s, 0.0)


def _two_in_flight_s(
    n_messages: Quantity, wait_s: Quantity, transfer_s: Quantity, work_s: Quantity
) -> Reals:
    """N messages round a ring, two in flight: message i is sent when message i - 2 of the neighbour
    has arrived and been worked on.

    With S_i the time when i is sent and D_i when it has left the port: D_i = max(S_i, D_(i-1)) + x,
    S_i = max(S_(i-1), D_(i-2) + a) + g, S_0 = S_1 = 0, and the end is S_(N+1). (The handshake lies
    between S_i and D_i, so on every path as often as the latency, and stands in a.) The longest
    path through these equations goes round c = a + x + g (two messages on) at least once, and then
    takes whatever is most for the N - 1 messages left: the port or the work, max(x, g) each, or c
    for every two. Exact.
    """
    both = wait_s + transfer_s + work_s
    each = np.maximum(transfer_s, work_s)
    left = np.maximum(n_messages - 1, 0)
    pairs = np.floor(left / 2)
    return np.asarray(both + np.maximum(left * each, pairs * both + (left - 2 * pairs) * each))


def _most_bits(n_ranks: float) -> int:
    """The most bits set in a rank of those that have the highest bit of the last one; 0 for a
    single rank.
    """
    last = int(n_ranks) - 1
    tops = [last] + [
        (last >> bit) - 1 << bit | (1 << bit) - 1
        for bit in range(1, last.bit_length() - 1)
        if last >> bit & 1
    ]
    return max(top.bit_count() for top in tops)


def _n_bcube_steps(n_ranks: float) -> int:
    rest, n_steps = int(n_ranks), 0
    while rest % 2 == 0:
        rest, n_steps = rest // 2, n_steps + 1
    return n_steps + (rest > 1)

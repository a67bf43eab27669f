"""Boruvka's minimum spanning tree and Dijkstra's shortest paths over distributed graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlperf.studies.cardwell_kernels.dense import share
from dlperf.studies.cardwell_kernels.wire import Wire

_NO_EDGE = 2**62
_WEIGHT_SHIFT = 32


@dataclass(frozen=True)
class Forest:
    """A minimum spanning forest: the sum of its weights, how many edges it has, and how many rounds
    found it.
    """

    weight: int
    n_edges: int
    n_rounds: int


def boruvka(wire: Wire, n_vertices: int, ends: Tensor, weights: Tensor, first_edge: int) -> Forest:
    """The minimum spanning forest of a graph whose edges are shared out, its vertices known to all;
    the same on all ranks.

    `ends` (E/P, 2) and `weights` (whole numbers from 0 to 2^30) are this rank's edges, `first_edge`
    the number of its first one, of less than 2^32. Equal weights are told apart by the edges'
    numbers. A round joins each component by its lightest outgoing edge: 8 bytes a vertex to find
    its key, 4 to find the component at its other end, the paper's 12.
    """
    numbers = torch.arange(first_edge, first_edge + len(weights))
    keys = (weights.to(torch.int64) << _WEIGHT_SHIFT) | numbers
    component = torch.arange(n_vertices)
    total, n_edges, n_rounds = 0, 0, 0
    while True:
        a, b = component[ends[:, 0]], component[ends[:, 1]]
        outgoing = a != b
        a, b, own = a[outgoing], b[outgoing], keys[outgoing]
        best = torch.full((n_vertices,), _NO_EDGE).scatter_reduce_(
            0, torch.cat((a, b)), torch.cat((own, own)), "amin"
        )
        wire.all_reduce(best, "min")
        if int(best.min()) == _NO_EDGE:
            return Forest(total, n_edges, n_rounds)
        partner = torch.full((n_vertices,), -1, dtype=torch.int32)
        for near, far in ((a, b), (b, a)):
            chosen = best[near] == own
            partner[near[chosen]] = far[chosen].to(torch.int32)
        wire.all_reduce(partner, "max")
        taken = torch.unique(best[best != _NO_EDGE])  # two components may have chosen the same edge
        total += int((taken >> _WEIGHT_SHIFT).sum())
        n_edges += len(taken)
        n_rounds += 1
        component = _joined(partner.to(torch.int64))[component]


def _joined(partner: Tensor) -> Tensor:
    """Each component's new one: the root of its tree. Partners make trees whose only cycles are
    pairs that chose one edge.
    """
    number = torch.arange(len(partner))
    parent = torch.where(partner >= 0, partner, number)
    parent = torch.where((parent[parent] == number) & (number < parent), number, parent)
    while True:
        further = parent[parent]
        if torch.equal(further, parent):
            return parent
        parent = further


def dijkstra(wire: Wire, lengths: Tensor, source: int, n_vertices: int) -> Tensor:
    """Distances from `source` to every vertex, infinite where there is no way; the same on all
    ranks.

    `lengths` (V/P, V) are the edges into the vertices of its share, infinite where there is none.
    In each of V steps the ranks agree on the nearest open vertex (16 bytes a rank: distance and
    number) and shorten the ways to their own; in the end the distances are gathered.
    """
    mine = share(n_vertices, wire.rank, wire.n_ranks)
    distance = torch.full((len(mine),), torch.inf, dtype=torch.float64)
    open_distance = distance.clone()
    if source in mine:
        open_distance[source - mine.start] = distance[source - mine.start] = 0.0
    closed = torch.zeros(len(mine), dtype=torch.bool)
    into = lengths.t().contiguous()
    for _ in range(n_vertices):
        nearest = torch.tensor([[torch.inf, -1.0]], dtype=torch.float64)
        if len(mine):
            least, place = torch.min(open_distance, 0)
            nearest[0, 0], nearest[0, 1] = least, place + mine.start
        found = wire.all_gather(nearest)
        reached, vertex = found[int(torch.argmin(found[:, 0]))].tolist()
        if reached == torch.inf:
            break
        if int(vertex) in mine:
            closed[int(vertex) - mine.start] = True
        torch.minimum(distance, into[int(vertex)] + reached, out=distance)
        open_distance = distance.masked_fill(closed, torch.inf)
    widest = -(-n_vertices // wire.n_ranks)
    padded = torch.full((widest,), torch.inf, dtype=torch.float64)
    padded[: len(mine)] = distance
    rows = wire.all_gather(padded).reshape(wire.n_ranks, widest)
    return torch.cat(
        [rows[rank, : len(share(n_vertices, rank, wire.n_ranks))] for rank in range(wire.n_ranks)]
    )

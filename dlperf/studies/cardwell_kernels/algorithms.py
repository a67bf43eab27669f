"""The seven algorithms: SUMMA, DGEMV, DDOT, 1D FFT and the 2D 5-point stencil in double precision,
Boruvka's minimum spanning tree and Dijkstra's shortest paths; each rank holds its share. They
talk through a wire: collectives with a meter on them.

:func:`share` names which rows are a rank's. Every function returns this rank's part of the result;
nothing is random here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Meter:
    """Seconds spent inside calls, bytes that this rank put into and took out of them (the larger of
    both), and messages that had to follow one another.

    Bytes are those of the payload as the calls move it, and collectives count a message per stage
    of a tree, ceil(log2 P).
    """

    seconds: float = 0.0
    n_bytes: float = 0.0
    n_messages: int = 0


class Wire:
    """The calls that the algorithms use, over torch.distributed; `ranks` are those of its group.
    One rank alone needs no process group.

    All ranks of a wire make the same calls in the same order; tensors are contiguous.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: Any,
        own: int,
        meter: Meter,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._group, self._own, self._now = list(ranks), group, own, now
        self.rank, self.n_ranks, self.meter = self._ranks.index(own), len(ranks), meter
        self._stages = math.ceil(math.log2(self.n_ranks))

    def broadcast(self, values: Tensor, source: int) -> None:
        """Rank `source`'s values into everyone's `values`."""
        self._metered(
            lambda: dist.broadcast(values, self._ranks[source], group=self._group),
            values.nbytes,
            self._stages,
        )

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        """Everyone's values joined by ``sum``, ``min`` or ``max``, in place."""
        how = getattr(dist.ReduceOp, operation.upper())
        sent = 2 * values.nbytes * (self.n_ranks - 1) / self.n_ranks  # a ring's
        self._metered(lambda: dist.all_reduce(values, how, self._group), sent, self._stages)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """Everyone's values, of one size, one after another along the first axis."""
        gathered = values.repeat(self.n_ranks, *[1] * (values.dim() - 1))
        parts = list(gathered.chunk(self.n_ranks))
        self._metered(
            lambda: dist.all_gather(parts, values, group=self._group),
            values.nbytes * (self.n_ranks - 1),
            self._stages,
        )
        return gathered

    def all_to_all(self, values: Tensor) -> Tensor:
        """Part q of the first axis goes to rank q; the parts that came, by rank."""
        came = values.clone()
        self._metered(
            lambda: dist.all_to_all_single(came, values, group=self._group),
            values.nbytes * (self.n_ranks - 1) / self.n_ranks,
            self.n_ranks - 1,
        )
        return came

    def exchange(
        self, up: Tensor | None, down: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends `up` to the rank before and `down` to the one behind; what came from them. None at
        the ends.
        """
        sent = {
            peer: t for peer, t in ((self.rank - 1, up), (self.rank + 1, down)) if t is not None
        }
        came = {peer: torch.empty_like(values) for peer, values in sent.items()}

        def call() -> None:
            pairs = [(dist.isend, sent), (dist.irecv, came)]
            works = [
                move(values, self._ranks[peer], group=self._group)
                for move, tensors in pairs
                for peer, values in tensors.items()
            ]
            for work in filter(None, works):
                work.wait()

        self._metered(call, sum(values.nbytes for values in sent.values()), 1)
        return came.get(self.rank - 1), came.get(self.rank + 1)

    def split(self, groups: Sequence[Sequence[int]]) -> Wire:
        """This rank's own among disjoint groups that hold every rank; rank numbers in it count from
        0. Every rank makes every group, as torch.distributed asks.
        """
        mine: Wire | None = None
        for ranks in groups:
            members = [self._ranks[rank] for rank in ranks]
            group = dist.new_group(members) if len(members) > 1 else None
            if self._own in members:
                mine = Wire(members, group, self._own, self.meter, self._now)
        assert mine is not None, "groups of a split hold every rank"
        return mine

    def barrier(self) -> None:
        """Until all ranks are here. Not metered."""
        if self.n_ranks > 1:
            dist.barrier(self._group)

    def _metered(self, call: Callable[[], Any], n_bytes: float, n_messages: int) -> None:
        if self.n_ranks == 1:
            return
        begin = self._now()
        call()
        self.meter.seconds += self._now() - begin
        self.meter.n_bytes += n_bytes
        self.meter.n_messages += n_messages


# -- dense -----------------------------------------------------------------------------------------


def share(n: int, rank: int, n_ranks: int) -> range:
    """A rank's rows of n, as even as can be.

    >>> [list(share(5, rank, 2)) for rank in (0, 1)]
    [[0, 1], [2, 3, 4]]
    """
    return range(n * rank // n_ranks, n * (rank + 1) // n_ranks)


def grid_of(n_ranks: int) -> tuple[int, int]:
    """(rows, columns) of the squarest grid of a given number of ranks; the paper's is square.

    >>> grid_of(121), grid_of(2), grid_of(12)
    ((11, 11), (1, 2), (3, 4))
    """
    rows = max(r for r in range(1, math.isqrt(n_ranks) + 1) if n_ranks % r == 0)
    return rows, n_ranks // rows


@dataclass(frozen=True)
class Grid:
    """A rank's place on the grid and the wires along its row and its column."""

    n_rows: int
    n_columns: int
    row: int
    column: int
    along_row: Wire
    along_column: Wire

    @property
    def n_panels(self) -> int:
        """Panels of the contracted dimension, each within one block of A and one of B. N has to be
        a multiple of it.
        """
        return math.lcm(self.n_rows, self.n_columns)


def make_grid(wire: Wire) -> Grid:
    """The squarest grid over all ranks, row by row."""
    r, c = grid_of(wire.n_ranks)
    along_row = wire.split([range(row * c, row * c + c) for row in range(r)])
    along_column = wire.split([range(column, r * c, c) for column in range(c)])
    return Grid(r, c, wire.rank // c, wire.rank % c, along_row, along_column)


def summa(grid: Grid, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
    """This rank's block of C <- alpha A B + beta C (van de Geijn and Watts 1997); blocks of N/rows
    x N/columns. `c` is overwritten.
    """
    n = b.shape[0] * grid.n_rows
    width = n // grid.n_panels
    c.mul_(beta)
    for panel in range(grid.n_panels):
        column, row = (
            panel // (grid.n_panels // grid.n_columns),
            panel // (grid.n_panels // grid.n_rows),
        )
        left = _panel(a, 1, panel * width - column * a.shape[1], width, column == grid.column)
        right = _panel(b, 0, panel * width - row * b.shape[0], width, row == grid.row)
        grid.along_row.broadcast(left, column)
        grid.along_column.broadcast(right, row)
        c.addmm_(left, right, alpha=alpha)
    return c


def _panel(block: Tensor, axis: int, start: int, width: int, is_mine: bool) -> Tensor:
    """The owner's panel, contiguous to be sent; an empty one of its shape on other ranks."""
    if is_mine:
        return block.narrow(axis, start, width).contiguous()
    return torch.empty_like(block.narrow(axis, 0, width).contiguous())


def dgemv(wire: Wire, a: Tensor, x: Tensor, y: Tensor, alpha: float, beta: float) -> Tensor:
    """This rank's part of y <- alpha A x + beta y: its rows of A, its parts of x and y, all of N/P.
    `y` is overwritten.
    """
    return y.mul_(beta).addmv_(a, wire.all_gather(x), alpha=alpha)


def ddot(wire: Wire, x: Tensor, y: Tensor) -> float:
    """x^T y of the parts that the ranks hold; the same on all."""
    return float(wire.all_reduce(torch.dot(x, y).reshape(1), "sum"))


def fft_shape(n: int, n_ranks: int) -> tuple[int, int]:
    """N = N1 x N2 as near to square as both being multiples of P allows. Raises ValueError where
    they cannot.

    >>> fft_shape(2**10, 2), fft_shape(2**9, 4)
    ((32, 32), (16, 32))
    """
    for n1 in range(math.isqrt(n), 0, -1):
        if n % n1 == 0 and n1 % n_ranks == 0 and (n // n1) % n_ranks == 0:
            return n1, n // n1
    raise ValueError(f"a transform of {n} cannot be shared by {n_ranks} ranks")


def twiddles(wire: Wire, n: int) -> Tensor:
    """exp(-2 pi i n2 k1 / N) for this rank's n2, shape (N2/P, N1); made before the transform is
    timed.
    """
    n1, n2 = fft_shape(n, wire.n_ranks)
    mine = torch.tensor(share(n2, wire.rank, wire.n_ranks), dtype=torch.float64)
    return torch.polar(
        torch.ones(len(mine), n1, dtype=torch.float64),
        -2 * math.pi / n * torch.outer(mine, torch.arange(n1, dtype=torch.float64)),
    )


def fft(wire: Wire, x: Tensor, factors: Tensor) -> Tensor:
    """Forward transform of N complex numbers of which each rank holds N/P in a row, by two
    transposes (Bailey 1990), out of place.

    With x as a matrix of N1 rows and N2 columns, X[k1 + N1 k2] is the transform over n1, times
    :func:`twiddles`, and the transform over n2. The result is this rank's k1 by all k2, shape
    (N1/P, N2): transposed order, as the paper's two transposes leave it.
    """
    n2_mine, n1 = factors.shape
    n2 = n2_mine * wire.n_ranks
    columns = _transpose(wire, x.reshape(n1 // wire.n_ranks, n2))
    turned = _transpose(wire, torch.fft.fft(columns, dim=1).mul_(factors))
    return torch.fft.fft(turned, dim=1)  # type: ignore[no-any-return]


def _transpose(wire: Wire, rows: Tensor) -> Tensor:
    """A matrix of which each rank holds some rows, transposed: each rank holds as large a part of
    its columns, as rows.
    """
    n_mine, n_columns = rows.shape
    width = n_columns // wire.n_ranks
    parts = rows.reshape(n_mine, wire.n_ranks, width).permute(1, 2, 0).contiguous()
    came = torch.view_as_complex(wire.all_to_all(torch.view_as_real(parts)))
    return came.permute(1, 0, 2).reshape(width, n_mine * wire.n_ranks)


def stencil(wire: Wire, values: Tensor, room: Tensor, n_sweeps: int) -> Tensor:
    """Jacobi sweeps: each inner point becomes the mean of its four neighbours; 4 FLOP a point.

    `values` are this rank's inner rows with one more above and below (the neighbours', or the
    border's), N columns wide; `room` is a copy of it. Both are overwritten; the result is one of
    them. Every rank has a row of its own.
    """
    first, last = wire.rank == 0, wire.rank == wire.n_ranks - 1
    for _ in range(n_sweeps):
        above, below = wire.exchange(None if first else values[1], None if last else values[-2])
        if above is not None:
            values[0] = above
        if below is not None:
            values[-1] = below
        inner = room[1:-1, 1:-1]
        torch.add(values[:-2, 1:-1], values[2:, 1:-1], out=inner)
        inner.add_(values[1:-1, :-2]).add_(values[1:-1, 2:]).mul_(0.25)
        values, room = room, values
    return values


# -- graphs ----------------------------------------------------------------------------------------

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
    the number of its first one, of less than 2^32. Equal weights are distinguished by the edges'
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
            least, index = torch.min(open_distance, 0)
            nearest[0, 0], nearest[0, 1] = least, index + mine.start
        found = wire.all_gather(nearest)
        reached, vertex = found[int(torch.argmin(found[:, 0]))].tolist()
        if reached == torch.inf:
            break
        if int(vertex) in mine:
            closed[int(vertex) - mine.start] = True
        torch.minimum(distance, into[int(vertex)] + reached, out=distance)
        open_distance = distance.masked_fill(closed, torch.inf)
    room = -(-n_vertices // wire.n_ranks) - len(mine)
    parts = wire.all_gather(torch.nn.functional.pad(distance, (0, room))).chunk(wire.n_ranks)
    shares = (share(n_vertices, rank, wire.n_ranks) for rank in range(wire.n_ranks))
    return torch.cat([part[: len(own)] for part, own in zip(parts, shares)])

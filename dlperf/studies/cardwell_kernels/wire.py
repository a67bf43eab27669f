"""What the algorithms talk through: collectives with a meter on them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Wire(Protocol):
    """The calls that the algorithms use. All ranks of a wire make the same calls in the same order;
    tensors are contiguous.
    """

    rank: int
    n_ranks: int

    def broadcast(self, values: Tensor, source: int) -> None:
        """Rank `source`'s values into everyone's `values`."""

    def all_reduce(self, values: Tensor, operation: str) -> None:
        """Everyone's values joined by ``sum``, ``min`` or ``max``, in place."""

    def all_gather(self, values: Tensor) -> Tensor:
        """Everyone's values, of one size, one after another along the first axis."""

    def all_to_all(self, values: Tensor) -> Tensor:
        """Part q of the first axis goes to rank q; the parts that came, by rank."""

    def exchange(
        self, up: Tensor | None, down: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Sends `up` to the rank before and `down` to the one behind; what came from them. None at
        the ends.
        """

    def split(self, groups: Sequence[Sequence[int]]) -> Wire:
        """This rank's own among disjoint groups that hold every rank; rank numbers in it count from
        0.
        """


class ProcessWire:
    """A wire over torch.distributed; `ranks` are those of its group. One rank alone needs no
    process group.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: Any,
        own: int,
        meter: Meter,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.rank, self.n_ranks = list(ranks).index(own), len(ranks)
        self._ranks, self._group, self._own, self.meter, self._now = (
            list(ranks),
            group,
            own,
            meter,
            now,
        )
        self._stages = math.ceil(math.log2(self.n_ranks))

    def broadcast(self, values: Tensor, source: int) -> None:
        """See :class:`Wire`."""
        self._metered(
            lambda: dist.broadcast(values, self._ranks[source], group=self._group),
            _size(values),
            self._stages,
        )

    def all_reduce(self, values: Tensor, operation: str) -> None:
        """See :class:`Wire`."""
        how = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}[
            operation
        ]
        sent = 2 * _size(values) * (self.n_ranks - 1) / self.n_ranks  # a ring's
        self._metered(
            lambda: dist.all_reduce(values, op=how, group=self._group), sent, self._stages
        )

    def all_gather(self, values: Tensor) -> Tensor:
        """See :class:`Wire`."""
        gathered = torch.empty(
            (self.n_ranks * values.shape[0], *values.shape[1:]), dtype=values.dtype
        )
        parts = list(gathered.chunk(self.n_ranks))
        self._metered(
            lambda: dist.all_gather(parts, values, group=self._group),
            _size(values) * (self.n_ranks - 1),
            self._stages,
        )
        return gathered if self.n_ranks > 1 else values.clone()

    def all_to_all(self, values: Tensor) -> Tensor:
        """See :class:`Wire`."""
        came = torch.empty_like(values)
        sent = _size(values) * (self.n_ranks - 1) / self.n_ranks
        self._metered(
            lambda: dist.all_to_all_single(came, values, group=self._group), sent, self.n_ranks - 1
        )
        return came if self.n_ranks > 1 else values.clone()

    def exchange(
        self, up: Tensor | None, down: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """See :class:`Wire`."""
        came: list[Tensor | None] = [
            None if values is None else torch.empty_like(values) for values in (up, down)
        ]

        def call() -> None:
            works = []
            for peer, values, room in zip((self.rank - 1, self.rank + 1), (up, down), came):
                if values is not None and room is not None:
                    works += [
                        dist.isend(values, self._ranks[peer], group=self._group),
                        dist.irecv(room, self._ranks[peer], group=self._group),
                    ]
            for work in works:
                if work is not None:
                    work.wait()

        self._metered(call, sum(_size(values) for values in (up, down) if values is not None), 1)
        return came[0], came[1]

    def split(self, groups: Sequence[Sequence[int]]) -> ProcessWire:
        """See :class:`Wire`. Every rank makes every group, as torch.distributed asks."""
        mine: ProcessWire | None = None
        for ranks in groups:
            members = [self._ranks[rank] for rank in ranks]
            group = dist.new_group(members) if len(members) > 1 else None
            if self._own in members:
                mine = ProcessWire(members, group, self._own, self.meter, self._now)
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


def _size(values: Tensor) -> int:
    return values.numel() * values.element_size()

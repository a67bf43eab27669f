"""What the algorithms talk through: collectives with a meter on them."""

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

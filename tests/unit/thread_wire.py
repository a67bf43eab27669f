"""Ranks as threads of this process: a wire without torch.distributed, to test the algorithms of
many ranks in one process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_JOIN = {
    "sum": lambda stack: stack.sum(0),
    "min": lambda stack: stack.amin(0),
    "max": lambda stack: stack.amax(0),
}


class Board:
    """Where the threads lay down what they say."""

    def __init__(self, n_ranks: int) -> None:
        self.barrier = threading.Barrier(n_ranks, timeout=20)
        self.said: list[Any] = [None] * n_ranks
        self.boards: dict[tuple[int, ...], Board] = {}
        self.lock = threading.Lock()


class ThreadWire:
    """See :class:`dlperf.studies.cardwell_kernels.algorithms.Wire`."""

    def __init__(self, rank: int, n_ranks: int, board: Board) -> None:
        self.rank, self.n_ranks, self._board = rank, n_ranks, board

    def _say(self, what: Any) -> list[Any]:
        self._board.said[self.rank] = what
        self._board.barrier.wait()
        heard = list(self._board.said)
        self._board.barrier.wait()
        return heard

    def broadcast(self, values: Tensor, source: int) -> None:
        values.copy_(self._say(values.clone())[source])

    def all_reduce(self, values: Tensor, operation: str) -> Tensor:
        return values.copy_(_JOIN[operation](torch.stack(self._say(values.clone()))))

    def all_gather(self, values: Tensor) -> Tensor:
        return torch.cat(self._say(values.clone()))

    def all_to_all(self, values: Tensor) -> Tensor:
        assert values.is_contiguous()
        return torch.cat(
            [sent.chunk(self.n_ranks)[self.rank] for sent in self._say(values.clone())]
        )

    def exchange(
        self, up: Tensor | None, down: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        heard = self._say(
            (up.clone() if up is not None else None, down.clone() if down is not None else None)
        )
        return (
            heard[self.rank - 1][1] if self.rank else None,
            heard[self.rank + 1][0] if self.rank < self.n_ranks - 1 else None,
        )

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadWire:
        own = next(tuple(ranks) for ranks in groups if self.rank in ranks)
        with self._board.lock:
            board = self._board.boards.setdefault(own, Board(len(own)))
        return ThreadWire(own.index(self.rank), len(own), board)


def on_ranks(n_ranks: int, call: Callable[[ThreadWire], Any]) -> list[Any]:
    """What `call` returns on each of so many ranks."""
    board, found, errors = Board(n_ranks), [None] * n_ranks, []

    def work(rank: int) -> None:
        try:
            found[rank] = call(ThreadWire(rank, n_ranks, board))
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next(
            (error for error in errors if not isinstance(error, threading.BrokenBarrierError)),
            errors[0],
        )
    return found

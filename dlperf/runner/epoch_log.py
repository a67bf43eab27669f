"""When epochs began and how many steps they took: two light hooks that stay for the whole run."""
from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data

from dlperf.clock import Clock


@dataclass
class EpochTimes:
    """One pass of a data loader during which an optimizer stepped: its length in batches, the steps, and its time up to the last step."""

    n_batches: int | None
    began: float
    ended: float
    n_steps: int = 0

    @property
    def seconds(self) -> float:
        """From the start of the loader to the end of the last optimizer step."""
        return self.ended - self.began


class EpochLog:
    """Passes of data loaders and optimizer steps. One call an epoch and one addition a step are all it costs.

    A pass without an optimizer step (validation) leaves no epoch. Once `optimizer` is set, only its steps count.
    """

    def __init__(self, clock: Clock = Clock()) -> None:
        self._clock = clock
        self._current: EpochTimes | None = None
        self._epochs: list[EpochTimes] = []
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self.optimizer: Any = None
        self.first_step: float | None = None
        self.last_step: float | None = None
        self.n_steps = 0

    def install(self) -> None:
        """Set both hooks."""
        original = data.DataLoader.__iter__
        log, now, own = self, self._clock.now, self._thread

        @functools.wraps(original)
        def begin(loader: Any) -> Any:
            at = now()
            iterator = original(loader)
            if threading.get_ident() == own:
                log._begin(loader, at)
            return iterator

        data.DataLoader.__iter__ = begin  # type: ignore[method-assign]

        def count(optimizer: Any, _args: Any, _kwargs: Any) -> None:
            if log.optimizer is not None and log.optimizer is not optimizer:
                return
            at = now()
            log.n_steps += 1
            log.last_step = at
            if log.first_step is None:
                log.first_step = at
            current = log._current
            if current is not None:
                current.n_steps += 1
                current.ended = at

        handle = register_optimizer_step_post_hook(count)

        def undo() -> None:
            handle.remove()
            if data.DataLoader.__iter__ is begin:
                data.DataLoader.__iter__ = original  # type: ignore[method-assign]

        self._undo.append(undo)

    def remove(self) -> None:
        """Take both out."""
        for undo in self._undo:
            undo()
        self._undo = []

    def _begin(self, loader: Any, at: float) -> None:
        try:
            n_batches = len(loader)
        except Exception:  # an iterable dataset without a length, or whatever a foreign one raises
            n_batches = None
        self._close()
        self._current = EpochTimes(n_batches, at, at)

    def _close(self) -> None:
        if self._current is not None and self._current.n_steps:
            self._epochs.append(self._current)
        self._current = None

    @property
    def epochs(self) -> list[EpochTimes]:
        """The passes that trained, the running one included."""
        return [*self._epochs, *([self._current] if self._current is not None and self._current.n_steps else [])]



"""Start and number of steps of each epoch, by two light hooks that stay for the whole run."""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import data

from dlperf.core.clock import Clock
from dlperf.core.patching import wrap_attribute


@dataclass
class EpochTimes:
    """One pass of a data loader in which an optimizer stepped, up to the last step.

    `n_batches`: its length. `worth`: its length in whole batches, a smaller last one as its
    fraction. `first`: the end of the first step.
    """

    n_batches: int | None
    began: float
    ended: float
    n_steps: int = 0
    first: float | None = None
    worth: float | None = None
    iterator: Callable[[], Any] = field(default=lambda: None, repr=False)
    n_yielded: int = 0

    @property
    def seconds(self) -> float:
        """Time from the start of the loader to the end of the last optimizer step."""
        return self.ended - self.began


@dataclass(frozen=True)
class LoaderProgress:
    """Batches that a loader's `n_workers` have made (None: no workers, or unknown).

    `is_idle`: they may make no more ahead.
    """

    n_made: int | None = None
    is_idle: bool = False
    n_workers: int = 1


class EpochLog:
    """Passes of data loaders, and optimizer steps.

    Its overhead is a call per epoch, a clock reading and an addition per step. A pass without an
    optimizer step (validation) makes no epoch and does not end the one that it interrupts.
    Until :meth:`follow` every optimizer's steps count; those in other threads never do. `on_pass`
    is called with each pass that begins, its loader, and the frame that began it; it may not raise.
    """

    def __init__(self, clock: Clock = Clock()) -> None:
        self._clock = clock
        self._current: EpochTimes | None = None
        self._interrupted: EpochTimes | None = None
        self._epochs: list[EpochTimes] = []
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self._due = math.inf
        self._then: Callable[[float], None] | None = None
        self.on_pass: Callable[[EpochTimes, Any, FrameType], None] | None = None
        self._last: Any = None
        self._every, self._turn, self._n_seen = 1, 0, 0
        self.began: float | None = None  # the first step's first call of a model, where seen
        self.first_step: float | None = None
        self.last_step: float | None = None
        self.n_steps = self.n_in_other_threads = 0
        self.updates_per_step = 1
        self.n_ahead = 0  # further steps that have begun when one is counted

    def install(self) -> None:
        """Set both hooks."""
        self._undo = [
            wrap_attribute(data.DataLoader, "__iter__", self._iterate),
            register_optimizer_step_post_hook(self._stepped).remove,
        ]

    def remove(self) -> None:
        """Remove both hooks."""
        undo, self._undo = self._undo, []
        for action in undo:
            action()
        self.call_at(math.inf, None)
        self.on_pass = None

    def _iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        at = self._clock.now()
        iterator = original(loader)
        if threading.get_ident() == self._thread:
            epoch = self.begin(loader, iterator, at)
            if self.on_pass is not None:
                self.on_pass(epoch, loader, sys._getframe(1))
        return iterator

    def _stepped(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            self.n_in_other_threads += 1
            return
        self._n_seen += 1
        if self._last is None or self._last is optimizer:
            self._turn = (self._turn + 1) % self._every
            if not self._turn:
                self.count(self._clock.now())

    def follow(self, optimizers: Sequence[Any], n_backwards: int = 0) -> None:
        """From now on, count periods: `optimizers` step in one, in this order; none: by hand.

        The periods before count, too; the one that ends now is counted next, and calls what
        :meth:`call_at` set. `n_backwards`: those so far.
        """
        self._last = optimizers[-1] if optimizers else ()
        self.n_ahead = 0 if optimizers else 1  # the next forward ends an update by hand
        self.updates_per_step = max(1, len(optimizers))
        self._every, self._turn = max(1, sum(one is self._last for one in optimizers)), -1
        n_steps = ((self._n_seen + 1) // len(optimizers) if optimizers else n_backwards) - 1
        n_more, self.n_steps = n_steps - self.n_steps, n_steps
        current = self._current
        if current is not None and n_more:
            if not current.n_steps:
                current = self._resume_or_open(current, self._clock.now())
            if current is not None:
                current.n_steps = max(0, current.n_steps + n_more)
        self._due = -math.inf

    def count_backwards(self) -> None:
        """From now on, every backward is a step."""

        def counted(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self.count(self._clock.now())
            return result

        self.n_ahead = 0
        self._undo.append(wrap_attribute(torch.autograd, "backward", counted))

    def call_at(self, at: float, then: Callable[[float], None] | None) -> None:
        """The first step that ends at `at` or later calls ``then(now)``, which may not raise."""
        self._due, self._then = at, then

    def begin(self, loader: Any, iterator: Any, at: float) -> EpochTimes:
        """A loader's pass begins."""
        n_batches = length_of(loader)
        current = self._current
        if current is not None and current.n_steps:
            self._suspend(current, iterator)
        self._current = EpochTimes(
            n_batches, at, at, worth=_worth(loader, n_batches), iterator=_weakly(iterator)
        )
        return self._current

    def count(self, at: float) -> None:
        """A step has ended."""
        self.n_steps += 1
        self.last_step = at
        current = self._current
        if current is not None and not current.n_steps:
            current = self._resume_or_open(current, at)
        if current is not None:
            current.n_steps += 1
            current.ended = at
        if self.first_step is None:
            self.first_step = at
        if at >= self._due:
            then, self._due = self._then, math.inf
            if then is not None and threading.get_ident() == self._thread:
                then(at)

    def _suspend(self, current: EpochTimes, iterator: Any) -> None:
        old = current.iterator()
        if old is None or old is iterator:
            self._epochs.append(current)  # its iterator is gone, or begins again
        else:
            current.n_yielded = getattr(old, "_num_yielded", 0)
            self._interrupted = current

    def _resume_or_open(self, current: EpochTimes, at: float) -> EpochTimes | None:
        """The pass of the first step after a pass began.

        It is the one before where that goes on after a validation, and None where both are over.
        """
        before, self._interrupted = self._interrupted, None
        if before is not None:
            if getattr(before.iterator(), "_num_yielded", 0) > before.n_yielded:
                self._current = before
                return before
            self._epochs.append(before)
        if current.iterator() is None:  # a validation or single batch; a training without loader
            self._current = None
            return None
        current.first = at
        return current

    def leave_out(self, seconds: float) -> None:
        """Time that passed right now, for a reading of the machine's state, is in no pass: all that
        was seen so far moves by it.
        """
        running = [epoch for epoch in (self._interrupted, self._current) if epoch is not None]
        for epoch in (*self._epochs, *running):
            epoch.began, epoch.ended = epoch.began + seconds, epoch.ended + seconds
            epoch.first = None if epoch.first is None else epoch.first + seconds
        for name in ("began", "first_step", "last_step"):
            if (at := getattr(self, name)) is not None:
                setattr(self, name, at + seconds)

    @property
    def loaded(self) -> LoaderProgress:
        """The progress of the workers of the running pass's loader."""
        iterator = None if self._current is None else self._current.iterator()
        if iterator is None or not hasattr(iterator, "_task_info"):
            return LoaderProgress()
        try:
            waiting = sum(len(task) == 2 for task in list(iterator._task_info.values()))
            n_made = iterator._rcvd_idx + waiting + iterator._data_queue.qsize()
            return LoaderProgress(n_made, n_made >= iterator._send_idx, iterator._num_workers)
        except Exception:  # another release of torch, or a system whose queues have no size
            return LoaderProgress()

    @property
    def whole(self) -> EpochTimes:
        """All steps as one pass, from the first call of a model on (from the first step's end,
        where that was not seen).
        """
        first, last = self.first_step or 0.0, self.last_step or 0.0
        began = first if self.began is None else self.began
        return EpochTimes(None, began, last, self.n_steps, first)

    @property
    def epochs(self) -> list[EpochTimes]:
        """The passes that trained, the running one included."""
        recent = [epoch for epoch in (self._interrupted, self._current) if epoch is not None]
        return [*self._epochs, *(epoch for epoch in recent if epoch.n_steps)]


_UNKNOWN = object()


def _weakly(iterator: Any) -> Callable[[], Any]:
    """A weak reference to the iterator: a strong one would keep its worker processes alive."""
    try:
        return weakref.ref(iterator)
    except TypeError:  # a foreign one
        return lambda: _UNKNOWN


def length_of(loader: Any) -> int | None:
    """Batches in a pass; None for a loader without a length."""
    name = "_IterableDataset_len_called"  # torch warns about wrong lengths where it is set
    before = getattr(loader, name, None)
    try:
        return len(loader)
    except Exception:
        return None
    finally:
        if getattr(loader, name, None) is not before:
            setattr(loader, name, before)


def _worth(loader: Any, n_batches: int | None) -> float | None:
    """Whole batches in a pass, a smaller last one as its fraction; None where unknown."""
    try:
        worth = len(loader.sampler) / loader.batch_size
    except Exception:  # no batch size, a sampler without a length, a foreign loader
        return n_batches
    return worth if n_batches is not None and math.ceil(worth) == n_batches else n_batches

"""Watched steps -> how long the epoch and the run will take. Numbers in, numbers out: no clock, no torch.

An epoch sums the means of its parts: what has passed already (warm-up and watching included), and for every step to come the mean
interval from one step's end to the next, so with loading and whatever else the loop does.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dlperf.clock import quantile

_Interval = tuple[float | None, float | None, float | None]
_OUTLIER = 2.0
"""Intervals beyond so many times their 75th percentile happen once (a checkpoint written, a page printed), and not in every step."""
_CONFIDENCE = 1.645
"""Standard errors on either side of a 90 % interval."""
_DRAINED = 2
"""Batches by which the store of the loader's workers must have shrunk before they count as the slower side; one may be chance."""


@dataclass(frozen=True)
class SeenStep:
    """One watched step: its interval, the part of it that it waited for the loader, both in seconds, and what the loader's workers had done by its end.

    `n_loaded`: batches that they have made so far (None: no workers, or they do not tell); `idle`: they have made all they may make ahead.
    """

    interval_s: float
    waiting_s: float = 0.0
    n_loaded: int | None = None
    idle: bool = False


@dataclass(frozen=True)
class Rate:
    """The mean interval between steps, in seconds, with a 90 % interval for it, from `n` steps. `by_loader`: the loader's workers set it."""

    step_s: float
    low_s: float
    high_s: float
    n: int
    by_loader: bool = False


def typical_s(intervals_s: Sequence[float]) -> float | None:
    """The mean of intervals, those beyond twice their 75th percentile left out (a checkpoint written, a page printed); None if empty.

    >>> typical_s([1.0, 1.0, 2.0, 1.0, 50.0])
    1.25
    """
    kept = _without_outliers(intervals_s)
    return statistics.fmean(kept) if kept else None


def _without_outliers(values: Sequence[float]) -> list[float]:
    return [value for value in values if value <= _OUTLIER * quantile(values, 0.75)] if values else []


def rate_of(steps: Sequence[SeenStep], passes: int = 1, unrest: float = 1.0) -> Rate | None:
    """The pace that a training will keep, from its first steps; None without any.

    Without workers it is the mean interval, outliers left out. Workers have made some batches before the first step: while that store
    lasts, intervals are too short. So where it has shrunk, the pace is the larger of a step without waiting and the time over the
    batches made in it, since the workers last were idle, times `passes` batches a step. A store that shrank by one batch may be chance: it widens the
    interval alone. `unrest`: how much longer than at best this machine usually takes; steps may be watched in a good or in a bad moment.
    """
    kept = _without_outliers([step.interval_s for step in steps])
    if not kept:
        return None
    mean_s = statistics.fmean(kept)
    half = _CONFIDENCE * _standard_error(kept) / mean_s + max(0.0, unrest - 1.0) if mean_s else 0.0
    loading = _loading(steps, passes)
    if loading is not None:
        made, drained, seconds = loading
        busy_s = statistics.fmean(_without_outliers([step.interval_s - step.waiting_s for step in steps]))
        loaded_s = passes * seconds / made
        slowest_s = passes * seconds / max(1, made - 1)
        if drained >= _DRAINED and loaded_s > busy_s:
            return Rate(loaded_s, max(busy_s, passes * seconds / (made + 1)) * max(0.0, 1 - half), slowest_s * (1 + half), made // passes, by_loader=True)
        if drained > 0 and loaded_s > mean_s:
            return Rate(mean_s, mean_s * max(0.0, 1 - half), loaded_s * (1 + half), len(kept))
    return Rate(mean_s, mean_s * max(0.0, 1 - half), mean_s * (1 + half), len(kept))


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _loading(steps: Sequence[SeenStep], passes: int) -> tuple[int, int, float] | None:
    """Since the workers last were idle: batches made, batches taken beyond those, seconds. None without workers, or where they are idle at the end."""
    if len(steps) < 2 or any(step.n_loaded is None for step in steps) or steps[-1].idle:
        return None
    begin = max((place for place, step in enumerate(steps) if step.idle), default=0)
    made = (steps[-1].n_loaded or 0) - (steps[begin].n_loaded or 0)
    n_steps = len(steps) - 1 - begin
    return (made, n_steps * passes - made, sum(step.interval_s for step in steps[begin + 1 :])) if made > 0 else None


@dataclass(frozen=True)
class Past:
    """What a run has done so far. Times in seconds since the start of the first epoch, steps those of the watched optimizer.

    `epochs_s`: the finished epochs, each to its last step; `pauses_s`: from an epoch's last step to the next one's start (validation,
    checkpoints); `starts_s`: from an epoch's start to the end of its first step, where known and no warm-up. `running_s`: since the running
    epoch's start. `steps` is an epoch's length, None where it cannot be told; `n_epochs` that of the run.
    """

    now_s: float
    after_steps: int
    running_s: float
    n_running: int
    steps: float | None
    n_epochs: int | None = None
    epochs_s: tuple[float, ...] = ()
    pauses_s: tuple[float, ...] = ()
    starts_s: tuple[float, ...] = ()
    epochs_before: int = 0

    @property
    def number(self) -> int:
        """Of the running epoch, from 1; those of an earlier run that this one resumed are counted."""
        return self.epochs_before + len(self.epochs_s) + 1


@dataclass(frozen=True)
class Outlook:
    """A forecast, in seconds: the running epoch to its last step, and the run with the pauses that are known; each with a 90 % interval.

    None where the length of an epoch, or their number, is not known. `number` is the running epoch's, `n_running` its steps so far; `pause_s` is what
    follows an epoch (None: none was seen yet, and none is in the forecast). `left_s` is to the end of the run, or else of the epoch.
    """

    after_steps: int
    number: int
    n_epochs: int | None
    n_running: int
    steps: float | None
    step_s: float
    epoch_s: float | None
    low_s: float | None
    high_s: float | None
    run_s: float | None
    run_low_s: float | None
    run_high_s: float | None
    left_s: float | None
    pause_s: float | None

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        names = ("after_steps", "number", "n_epochs", "step_s", "epoch_s", "low_s", "high_s", "run_s", "run_low_s", "run_high_s", "left_s", "pause_s")
        return {name: getattr(self, name) for name in names}


def look_ahead(past: Past, rate: Rate) -> Outlook:
    """The epoch and the run: what has passed, and `rate` for each step to come.

    epoch = passed + (steps - done) step; run = passed + rest of the epoch + pause, and for each further epoch start + (steps - 1) step + pause.
    """
    step_s = rate.step_s
    epoch: _Interval = (None, None, None)
    run: _Interval = (None, None, None)
    left_s: float | None = None
    pause_s = statistics.fmean(past.pauses_s) if past.pauses_s else None
    if past.steps is not None:
        left_s = max(0.0, past.steps - past.n_running) * step_s
        epoch = _around(past.running_s, left_s, rate)
        if past.n_epochs is not None:
            start_s = statistics.fmean(past.starts_s) if past.starts_s else step_s
            further = max(0, past.n_epochs - past.number)
            pauses_s = (further + 1) * (pause_s or 0.0)
            steps_s = left_s + further * (start_s + max(0.0, past.steps - 1) * step_s)
            left_s = steps_s + pauses_s
            run = _around(past.now_s + pauses_s, steps_s, rate)
    return Outlook(past.after_steps, past.number, past.n_epochs, past.n_running, past.steps, step_s, *epoch, *run, left_s, pause_s)


def _around(certain_s: float, steps_s: float, rate: Rate) -> _Interval:
    """What is certain and what steps at this rate will take, with the least and the most that they may."""
    low, high = (rate.low_s / rate.step_s, rate.high_s / rate.step_s) if rate.step_s else (1.0, 1.0)
    return certain_s + steps_s, certain_s + low * steps_s, certain_s + high * steps_s


@dataclass(frozen=True)
class Stretch:
    """`n` steps in a row that took `seconds`, watched by nothing but a counter."""

    seconds: float
    n: int


def pooled(first: Rate, stretches: Sequence[Stretch]) -> Rate:
    """The mean interval over the watched steps and all since. The interval's width comes from how far the stretches differ, once there are some.

    Every step since counts, outliers too: whatever comes back is part of an epoch. Where the loader's workers had set the first pace, it stands
    back as soon as as many steps were seen.
    """
    n = sum(stretch.n for stretch in stretches)
    if not n:
        return first
    weight = first.n if not first.by_loader else max(0, first.n - n)
    seconds = sum(stretch.seconds for stretch in stretches)
    step_s = (first.step_s * weight + seconds) / (weight + n)
    paces = [stretch.seconds / stretch.n for stretch in stretches if stretch.n]
    half = (first.high_s - first.low_s) / 2 / first.step_s if first.step_s else 0.0
    half /= math.sqrt(1 + n / max(1, first.n))
    if len(paces) >= 4:
        half = _CONFIDENCE * _standard_error(paces) / step_s if step_s else 0.0
    return Rate(step_s, step_s * max(0.0, 1 - half), step_s * (1 + half), weight + n)

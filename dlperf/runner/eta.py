"""WatchedTraining steps -> how long the epoch and the run will take. Numbers in, numbers out: no clock, no
torch.

An epoch sums the means of its parts: what has passed already (warm-up and watching included), and
for every step to come the mean interval from one step's end to the next, so with loading and
whatever else the loop does.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dlperf.core.clock import quantile
from dlperf.core.variation import Z90

_Interval = tuple[float | None, float | None, float | None]
_OUTLIER = 2.0
"""Intervals beyond so many times their 75th percentile happen once (a checkpoint written, a page
printed), and not in every step.
"""
_CERTAIN = 2.576
"""Standard errors beyond which a store of batches does not shrink by chance (once in a hundred)."""
_WAITS_FRAC = 0.1
"""A program that has no processor for so much of its time beside loading workers waits for them."""
_PRIOR_STRETCHES = 2.0
"""The first forecast, which knows the usual pace, weighs as much as so many stretches; less and
less while further ones come.
"""
_PRIOR_FREEDOM = 3
"""Its doubt weighs as much as so many stretches in the spread between stretches, and so does the
next number.
"""
_PRIOR_CORRELATION = 0.5
"""How much stretches that follow one another are alike, until they tell themselves."""
_MOST_CORRELATION = 0.9
_FEWEST_POINTS = 3


@dataclass(frozen=True)
class ObservedStep:
    """One watched step: its interval, the part of it that it waited for the loader, both in
    seconds, and what the loader's workers had done by its end.

    `n_loaded`: batches that the `n_workers` have made so far (None: no workers, or they do not
    tell); `idle`: they have made all they may make ahead. `busy_frac`: the part of the interval in
    which the program had a processor. `probed`: it was slowed down by instruments.
    """

    interval_s: float
    waiting_s: float = 0.0
    n_loaded: int | None = None
    idle: bool = False
    n_workers: int = 1
    busy_frac: float = 1.0
    probed: bool = False

    @property
    def waited_s(self) -> float:
        """What it stood still for the loader's workers; taking over what they have made is work of
        its own.
        """
        return (
            0.0
            if self.n_loaded is None
            else min(self.waiting_s, (1.0 - min(1.0, self.busy_frac)) * self.interval_s)
        )


@dataclass(frozen=True)
class Rate:
    """The mean interval between steps, in seconds, with a 90 % interval for it, from `n` steps.
    `by_loader`: the pace of the loader's workers, while the steps still lived on what these had
    made ahead.

    `busy_frac`: the part of it that takes longer on a slower core; `floor_s`: the least that it
    takes on any, as the workers make no more.
    """

    step_s: float
    low_s: float
    high_s: float
    n: int
    by_loader: bool = False
    busy_frac: float = 1.0
    floor_s: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the training waits for its loader's workers, now or once their store is used up."""
        return self.floor_s > 0.0

    def on_core(self, factor: float) -> Rate:
        """The rate where the core takes `factor` times as long.

        >>> Rate(2.0, 1.0, 3.0, 8, busy_frac=0.5).on_core(1.5).step_s, Rate(2.0, 2.0, 2.0, 8, busy_frac=0.9, floor_s=2.0).on_core(0.5).step_s
        (2.5, 2.0)
        """
        busy_s = self.busy_frac * self.step_s
        step_s = (
            max(self.floor_s, busy_s * factor)
            if self.floor_s
            else self.step_s + busy_s * (factor - 1.0)
        )
        scale = step_s / self.step_s if self.step_s else 1.0
        return replace(self, step_s=step_s, low_s=scale * self.low_s, high_s=scale * self.high_s)


def typical_s(intervals_s: Sequence[float], waiting_s: Sequence[float] = ()) -> float | None:
    """The mean of intervals, those beyond twice their 75th percentile left out (a checkpoint
    written, a page printed); None if empty.

    What of them was `waiting_s` for the loader makes no outlier: batches of several workers come
    several at once, with a long wait before.

    >>> typical_s([1.0, 1.0, 2.0, 1.0, 50.0]), typical_s([1.0, 1.0, 1.0, 5.0], [0.0, 0.0, 0.0, 4.0])
    (1.25, 2.0)
    """
    kept = _without_outliers(intervals_s, waiting_s)
    return statistics.fmean(kept) if kept else None


def _without_outliers(values: Sequence[float], waiting_s: Sequence[float] = ()) -> list[float]:
    own = (
        [value - waited for value, waited in zip(values, waiting_s)] if waiting_s else list(values)
    )
    most = _OUTLIER * quantile(own, 0.75) if own else 0.0
    return [value for value, part in zip(values, own) if part <= most]


def rate_of(steps: Sequence[ObservedStep], passes: int = 1, doubt_frac: float = 0.0) -> Rate | None:
    """The pace that a training will keep, from its first steps; None without any.

    Without workers it is the mean interval of those without instruments, outliers left out. Workers
    have made some batches before the first step: while that store lasts, intervals are too short.
    Once it is empty (a step has waited), the batches of W workers come W at once, and the pace is
    that of whole rounds of them. Before, where it shrinks (:func:`arrivals`), the pace is the
    larger of a step without waiting and what the workers take for its `passes` batches; a store
    that may have shrunk by chance widens the interval alone. `doubt_frac`: half the width of a 90 %
    interval for what a few steps say of all, see :attr:`dlperf.runner.core_speed.CoreState.half_frac`.
    """
    timed = [step for step in steps if not step.probed]
    if not timed:
        return None
    waited_s = [step.waited_s for step in timed]
    own_s = statistics.fmean(
        _without_outliers([step.interval_s - waited for step, waited in zip(timed, waited_s)])
    )
    rounds = _rounds(steps, passes)
    if rounds:
        mean_s, n = statistics.fmean(rounds), len(rounds)
        stairs = 1 / math.sqrt(12) / n if steps[-1].n_workers > 1 else 0.0
        half = math.hypot(Z90 * max(_standard_error(rounds) / mean_s, stairs), doubt_frac)
        return Rate(
            mean_s,
            mean_s * max(0.0, 1 - half),
            mean_s * (1 + half),
            len(timed),
            busy_frac=min(1.0, own_s / mean_s),
            floor_s=mean_s,
        )
    kept = _without_outliers([step.interval_s for step in timed], waited_s)
    mean_s, busy_frac = (
        statistics.fmean(kept),
        min(1.0, statistics.fmean(step.busy_frac for step in timed)),
    )
    half = math.hypot(Z90 * _standard_error(kept) / mean_s, doubt_frac) if mean_s else 0.0
    least, most = max(0.0, 1 - half), 1 + half
    made = arrivals(steps, passes) or arrivals(timed, passes)
    if made is not None:
        loaded_s, slowest_s, fastest_s = (
            passes / per_s for per_s in (made.per_s, made.least_per_s, made.most_per_s)
        )
        if made.drains and loaded_s > own_s:
            return Rate(
                loaded_s,
                max(own_s, fastest_s) * least,
                slowest_s * most,
                len(kept),
                True,
                own_s / loaded_s,
                loaded_s,
            )
        if made.drain > 0 and slowest_s > mean_s:
            return Rate(mean_s, mean_s * least, slowest_s * most, len(kept), busy_frac=busy_frac)
    return Rate(mean_s, mean_s * least, mean_s * most, len(kept), busy_frac=busy_frac)


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _rounds(steps: Sequence[ObservedStep], passes: int) -> list[float]:
    """Mean intervals of rounds of steps, a batch of each worker in a round, since the first step
    that found the workers' store empty.

    Empty where none did, or where fewer steps than a round came after it, or where these hardly
    waited.
    """
    first = next(
        (
            place
            for place, step in enumerate(steps)
            if step.waited_s > _WAITS_FRAC * step.interval_s
        ),
        len(steps),
    )
    length = max(1, round(steps[-1].n_workers / passes))
    since = steps[first + 1 :]
    since = since[len(since) % length :]
    if sum(step.waited_s for step in since) <= _WAITS_FRAC * sum(step.interval_s for step in since):
        return []
    return [
        statistics.fmean(step.interval_s for step in since[place : place + length])
        for place in range(0, len(since), length)
    ]


@dataclass(frozen=True)
class Arrivals:
    """What the loader's workers make: batches per second, the least and most that may be (90 %), by
    how many batches their store shrank each step, and whether that was no chance.
    """

    per_s: float
    least_per_s: float
    most_per_s: float
    drain: float
    drains: bool


def arrivals(steps: Sequence[ObservedStep], passes: int = 1) -> Arrivals | None:
    """The pace of the loader's workers since they last were idle: the line of least squares through
    the batches made by each step's end.

    None without workers, with too few steps, and where they are idle at the end and so can do more.
    W workers that began together end together, so the count goes up in stairs of at most W batches:
    the standard error of a line through n of its points is W / sqrt(12) / sqrt(sum (i - mean)^2).
    """
    if any(step.n_loaded is None for step in steps) or steps[-1].idle:
        return None
    begin = max((place for place, step in enumerate(steps) if step.idle), default=0)
    counts = [float(step.n_loaded or 0) for step in steps[begin:]]
    times = list(
        itertools.accumulate((step.interval_s for step in steps[begin + 1 :]), initial=0.0)
    )
    if len(counts) < _FEWEST_POINTS or counts[-1] == counts[0] or times[-1] <= 0:
        return None
    per_step, per_s = _slope(range(len(counts)), counts), _slope(times, counts)
    if min(per_step, per_s) <= 0:
        return None
    middle = (len(counts) - 1) / 2
    error = steps[-1].n_workers / math.sqrt(
        12 * math.fsum((place - middle) ** 2 for place in range(len(counts)))
    )
    off = Z90 * error / per_step
    drain = passes - per_step
    return Arrivals(
        per_s,
        per_s * max(1 / len(counts), 1 - off),
        per_s * (1 + off),
        drain,
        drain > _CERTAIN * error,
    )


def _slope(places: Sequence[float], values: Sequence[float]) -> float:
    middle, mean = statistics.fmean(places), statistics.fmean(values)
    return math.fsum((x - middle) * (y - mean) for x, y in zip(places, values)) / math.fsum(
        (x - middle) ** 2 for x in places
    )


@dataclass(frozen=True)
class Progress:
    """What a run has done so far. Times in seconds since the start of the first epoch, steps those
    of the watched optimizer.

    `epochs_s`: the finished epochs, each to its last step; `pauses_s`: from an epoch's last step to
    the next one's start (validation, checkpoints); `starts_s`: from an epoch's start to the end of
    its first step, where known and no warm-up. `running_s`: since the running epoch's start.
    `steps` is an epoch's length, None where it cannot be told; `n_epochs` that of the run.
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

    @property
    def n_further(self) -> int:
        """Epochs after the running one, where their number is known."""
        return 0 if self.n_epochs is None else max(0, self.n_epochs - self.number)

    @property
    def steps_left(self) -> float | None:
        """To the end of the run, or else of the epoch."""
        return (
            None
            if self.steps is None
            else max(0.0, self.steps - self.n_running) + self.n_further * self.steps
        )


@dataclass(frozen=True)
class Eta:
    """A forecast, in seconds: the running epoch to its last step, and the run with the pauses that
    are known; each with a 90 % interval.

    None where the length of an epoch, or their number, is not known. `number` is the running
    epoch's, `n_running` its steps so far; `pause_s` is what follows an epoch (None: none was seen
    yet, and none is in the forecast). `left_s` is to the end of the run, or else of the epoch.
    `by_loader`: the loader's workers make batches more slowly than steps use them.
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
    by_loader: bool = False

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        names = (
            "after_steps",
            "number",
            "n_epochs",
            "step_s",
            "epoch_s",
            "low_s",
            "high_s",
            "run_s",
            "run_low_s",
            "run_high_s",
            "left_s",
            "pause_s",
        )
        return {name: getattr(self, name) for name in names}


def estimate_eta(past: Progress, rate: Rate) -> Eta:
    """The epoch and the run: what has passed, and `rate` for each step to come.

    epoch = passed + (steps - done) step; run = passed + rest of the epoch + pause, and for each
    further epoch start + (steps - 1) step + pause.
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
            pauses_s = (past.n_further + 1) * (pause_s or 0.0)
            steps_s = left_s + past.n_further * (start_s + max(0.0, past.steps - 1) * step_s)
            left_s = steps_s + pauses_s
            run = _around(past.now_s + pauses_s, steps_s, rate)
    return Eta(
        past.after_steps,
        past.number,
        past.n_epochs,
        past.n_running,
        past.steps,
        step_s,
        *epoch,
        *run,
        left_s,
        pause_s,
        rate.waits,
    )


def _around(certain_s: float, steps_s: float, rate: Rate) -> _Interval:
    """What is certain and what steps at this rate will take, with the least and the most that they
    may.
    """
    low, high = (rate.low_s / rate.step_s, rate.high_s / rate.step_s) if rate.step_s else (1.0, 1.0)
    return certain_s + steps_s, certain_s + low * steps_s, certain_s + high * steps_s


@dataclass(frozen=True)
class StepBlock:
    """`n` steps in a row that took `seconds`, watched by nothing but a counter."""

    seconds: float
    n: int


def pooled_rate(first: Rate, stretches: Sequence[StepBlock], left_s: float = math.inf) -> Rate:
    """The mean interval over the watched steps and all since, with a 90 % interval for that of the
    next `left_s` seconds.

    Every step since counts, outliers too: whatever comes back is part of an epoch. The first
    forecast weighs as its steps do, and at first as two stretches, since it knows more than these:
    how the machine usually is. Where the loader's workers had set it, it stands back as soon as as
    many steps were seen.

    The interval is that of batch means (Law and Kelton): the spread v between stretches, which
    resemble their neighbours by r, gives k of them a mean with the variance v (1 + r) / (1 - r) /
    k, and the m to come one of their own, at most v each; with Student's t for as few as there are.
    """
    n = sum(stretch.n for stretch in stretches)
    if not n:
        return first
    k, seconds = len(stretches), math.fsum(stretch.seconds for stretch in stretches)
    weight = (
        max(0.0, first.n - n)
        if first.by_loader
        else max(first.n, n / k * (_PRIOR_STRETCHES - k / 4))
    )
    step_s = (first.step_s * weight + seconds) / (weight + n)
    if not step_s:
        return replace(first, n=round(weight + n))
    off = [stretch.seconds / stretch.n * n / seconds - 1.0 for stretch in stretches if stretch.n]
    doubt = (first.high_s - first.low_s) / 2 / first.step_s / Z90 if first.step_s else 0.0
    variance = (_PRIOR_FREEDOM * doubt**2 + math.fsum(value**2 for value in off)) / (
        _PRIOR_FREEDOM + k - 1
    )
    inflation = (1 + (alike := _correlation(off))) / (1 - alike)
    to_come = max(1.0, left_s / (seconds / k))
    half = _student(_PRIOR_FREEDOM + k - 1) * math.sqrt(
        variance * (min(1.0, inflation / k) + min(1.0, inflation / to_come))
    )
    return replace(
        first,
        step_s=step_s,
        low_s=step_s * max(0.0, 1 - half),
        high_s=step_s * (1 + half),
        n=round(weight + n),
    )


def _correlation(off: Sequence[float]) -> float:
    """Of neighbours in a series of deviations from its mean; a short series says too little of it
    by (1 + 4 r) / n (Kendall 1954).
    """
    k, squares = len(off), math.fsum(value**2 for value in off)
    found = math.fsum(a * b for a, b in itertools.pairwise(off)) / squares if squares else 0.0
    found += (1 + 4 * found) / k
    mixed = (_PRIOR_FREEDOM * _PRIOR_CORRELATION + k * found) / (_PRIOR_FREEDOM + k)
    return min(_MOST_CORRELATION, max(0.0, mixed))


def _student(freedom: int) -> float:
    """Student's t at 95 % (Abramowitz and Stegun 26.7.5, two terms; 2 % low at three degrees of
    freedom, its least here).
    """
    z = Z90
    return z + (z**3 + z) / 4 / freedom + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2

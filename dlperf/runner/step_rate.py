"""The rate of optimizer steps, estimated from watched ones; numbers only, no clock and no torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlperf.core.clock import quantile
from dlperf.core.variation import Z90

_OUTLIER = 2.0  # over the 75th percentile: a checkpoint written, a page printed
_CERTAIN = 2.576  # standard errors that chance exceeds once in a hundred
_WAITS_FRAC = 0.1  # time without a processor, beside loading workers, from which on it is waiting
_PRIOR_BLOCKS = 2.0  # weight of the first rate, which knows the usual core speed, in blocks
_PRIOR_FREEDOM = 3  # weight of the first rate's interval in the spread of blocks, and of _PRIOR_R
_PRIOR_R = 0.5  # correlation of successive blocks
_MOST_R = 0.9
_FEWEST_POINTS = 3


@dataclass(frozen=True)
class ObservedStep:
    """One watched step: its interval, and the part of it spent waiting for the loader, in seconds.

    `n_loaded`: batches that the `n_workers` have made by its end (None: no workers, or unknown).
    `idle`: they may make no more ahead. `busy_frac`: the part of the interval with a processor.
    `probed`: hooks slowed it down.
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
        """Time without work, waiting for the loader's workers."""
        if self.n_loaded is None:
            return 0.0
        return min(self.waiting_s, (1.0 - min(1.0, self.busy_frac)) * self.interval_s)


@dataclass(frozen=True)
class Rate:
    """The mean interval between `n` steps, in seconds, with a 90 % interval.

    `by_loader`: it is the workers' rate, seen while steps still used batches made ahead.
    `busy_frac`: the part that takes longer on a slower core. `floor_s`: its least value, where the
    loader's workers limit it.
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
        """Whether the training waits for its loader's workers, now or later."""
        return self.floor_s > 0.0

    def on_core(self, factor: float) -> Rate:
        """The rate where the core takes `factor` times as long.

        >>> Rate(2.0, 1.0, 3.0, 8, busy_frac=0.5).on_core(1.5).step_s
        2.5
        >>> Rate(2.0, 2.0, 2.0, 8, busy_frac=0.9, floor_s=2.0).on_core(0.5).step_s
        2.0
        """
        busy_s = self.busy_frac * self.step_s
        step_s = self.step_s + busy_s * (factor - 1.0)
        if self.floor_s:
            step_s = max(self.floor_s, busy_s * factor)
        scale = step_s / self.step_s if self.step_s else 1.0
        return replace(self, step_s=step_s, low_s=scale * self.low_s, high_s=scale * self.high_s)


def typical_s(intervals_s: Sequence[float], waiting_s: Sequence[float] = ()) -> float | None:
    """The mean interval without outliers (beyond twice the 75th percentile); None if empty.

    `waiting_s` for the loader makes no outlier: batches of several workers come at once, after a
    long wait.

    >>> typical_s([1.0, 1.0, 2.0, 1.0, 50.0]), typical_s([1.0, 1.0, 1.0, 5.0], [0.0, 0.0, 0.0, 4.0])
    (1.25, 2.0)
    """
    kept = _without_outliers(intervals_s, waiting_s)
    return statistics.fmean(kept) if kept else None


def _without_outliers(values: Sequence[float], waiting_s: Sequence[float] = ()) -> list[float]:
    waiting_s = waiting_s or [0.0] * len(values)
    own = [value - waited for value, waited in zip(values, waiting_s)]
    most = _OUTLIER * quantile(own, 0.75) if own else 0.0
    return [value for value, part in zip(values, own) if part <= most]


def rate_of(steps: Sequence[ObservedStep], passes: int = 1, doubt_frac: float = 0.0) -> Rate | None:
    """The rate that a training will keep, from its first steps; None without any.

    Without workers it is the mean interval of the unprobed steps, outliers left out. Workers make
    batches ahead: while this store lasts, intervals are too short. Once it is empty (a step has
    waited), the batches of W workers come W at once, and the rate is that of whole rounds. While
    the store shrinks (:func:`arrivals`), the interval is the larger of a step without waiting and
    of the workers' time for its `passes` batches. A store that may have shrunk by chance only
    widens the 90 % interval. `doubt_frac`: half the width of a 90 % interval, see
    :attr:`dlperf.runner.core_speed.CoreState.half_frac`.
    """
    timed = [step for step in steps if not step.probed]
    if not timed:
        return None
    waited_s = [step.waited_s for step in timed]
    intervals_s = [step.interval_s for step in timed]
    own_s = statistics.fmean(
        _without_outliers([value - waited for value, waited in zip(intervals_s, waited_s)])
    )
    rounds = _rounds(steps, passes)
    if rounds:
        mean_s, n = statistics.fmean(rounds), len(rounds)
        stairs = 1 / math.sqrt(12) / n if steps[-1].n_workers > 1 else 0.0
        half = math.hypot(Z90 * max(_standard_error(rounds) / mean_s, stairs), doubt_frac)
        low_s, high_s = mean_s * max(0.0, 1 - half), mean_s * (1 + half)
        busy_frac = min(1.0, own_s / mean_s)
        return Rate(mean_s, low_s, high_s, len(timed), busy_frac=busy_frac, floor_s=mean_s)
    kept = _without_outliers(intervals_s, waited_s)
    mean_s = statistics.fmean(kept)
    busy_frac = min(1.0, statistics.fmean(step.busy_frac for step in timed))
    half = math.hypot(Z90 * _standard_error(kept) / mean_s, doubt_frac) if mean_s else 0.0
    least, most = max(0.0, 1 - half), 1 + half
    rate = Rate(mean_s, mean_s * least, mean_s * most, len(kept), busy_frac=busy_frac)
    made = arrivals(steps, passes) or arrivals(timed, passes)
    if made is None:
        return rate
    loaded_s, slowest_s = passes / made.per_s, passes / made.least_per_s
    if made.drains and loaded_s > own_s:
        low_s = max(own_s, passes / made.most_per_s) * least
        high_s, busy_frac = slowest_s * most, own_s / loaded_s
        return Rate(loaded_s, low_s, high_s, len(kept), True, busy_frac, loaded_s)
    if made.drain > 0 and slowest_s > mean_s:
        return replace(rate, high_s=slowest_s * most)
    return rate


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _rounds(steps: Sequence[ObservedStep], passes: int) -> list[float]:
    """Mean intervals of rounds (a batch of each worker), since a step found the store empty.

    Empty where no step did, where fewer steps than a round followed, or where these hardly waited.
    """
    waits = [step.waited_s > _WAITS_FRAC * step.interval_s for step in steps]
    since = steps[waits.index(True) + 1 :] if True in waits else []
    length = max(1, round(steps[-1].n_workers / passes))
    since = since[len(since) % length :]
    if sum(step.waited_s for step in since) <= _WAITS_FRAC * sum(step.interval_s for step in since):
        return []
    return [
        statistics.fmean(step.interval_s for step in since[index : index + length])
        for index in range(0, len(since), length)
    ]


@dataclass(frozen=True)
class Arrivals:
    """Batches per second of the loader's workers, with the least and most of a 90 % interval.

    `drain`: batches by which their store shrank each step. `drains`: that was no chance.
    """

    per_s: float
    least_per_s: float
    most_per_s: float
    drain: float
    drains: bool


def arrivals(steps: Sequence[ObservedStep], passes: int = 1) -> Arrivals | None:
    """The rate of the loader's workers since they were idle: a least-squares line of batches made.

    None without workers, with too few steps, or where the workers are idle at the end. W workers
    that began together end together: the count rises in stairs of at most W batches, and the
    standard error of the slope through n points is W / sqrt(12) / sqrt(sum (i - mean)^2).
    """
    if any(step.n_loaded is None for step in steps) or steps[-1].idle:
        return None
    begin = max((index for index, step in enumerate(steps) if step.idle), default=0)
    counts = [float(step.n_loaded or 0) for step in steps[begin:]]
    intervals_s = [step.interval_s for step in steps[begin + 1 :]]
    times = list(itertools.accumulate(intervals_s, initial=0.0))
    if len(counts) < _FEWEST_POINTS or counts[-1] == counts[0] or times[-1] <= 0:
        return None
    indices = range(len(counts))
    per_step = statistics.linear_regression(indices, counts).slope
    per_s = statistics.linear_regression(times, counts).slope
    if min(per_step, per_s) <= 0:
        return None
    squares = math.fsum((index - statistics.fmean(indices)) ** 2 for index in indices)
    error = steps[-1].n_workers / math.sqrt(12 * squares)
    off, drain = Z90 * error / per_step, passes - per_step
    least_per_s = per_s * max(1 / len(counts), 1 - off)
    return Arrivals(per_s, least_per_s, per_s * (1 + off), drain, drain > _CERTAIN * error)


@dataclass(frozen=True)
class StepBlock:
    """`n` successive steps that took `seconds`, without hooks but a counter."""

    seconds: float
    n: int


def pooled_rate(first: Rate, blocks: Sequence[StepBlock], left_s: float = math.inf) -> Rate:
    """The mean interval of the watched steps and all since, with a 90 % interval.

    The interval is for the mean of the next `left_s` seconds. Every step since counts, outliers
    too: what recurs is part of an epoch. The first rate weighs as its steps do, and at first as two
    blocks, since it knows the usual core speed. Where the loader's workers set it, it loses its
    weight as soon as as many steps were seen.

    The interval is that of batch means (Law and Kelton). With the variance v of blocks and the
    correlation r of neighbours, the mean of k blocks has the variance v (1 + r) / (1 - r) / k, that
    of the m to come likewise, each at most v; Student's t accounts for few blocks.
    """
    n = sum(block.n for block in blocks)
    if not n:
        return first
    k, seconds = len(blocks), math.fsum(block.seconds for block in blocks)
    weight = max(first.n, n / k * (_PRIOR_BLOCKS - k / 4))
    if first.by_loader:
        weight = max(0.0, first.n - n)
    step_s = (first.step_s * weight + seconds) / (weight + n)
    if not step_s:
        return replace(first, n=round(weight + n))
    off = [block.seconds / block.n * n / seconds - 1.0 for block in blocks if block.n]
    doubt = (first.high_s - first.low_s) / 2 / first.step_s / Z90 if first.step_s else 0.0
    freedom = _PRIOR_FREEDOM + k - 1
    squares = math.fsum(value**2 for value in off)
    variance = (_PRIOR_FREEDOM * doubt**2 + squares) / freedom
    r = _correlation(off)
    inflation, to_come = (1 + r) / (1 - r), max(1.0, left_s / (seconds / k))
    half = _student(freedom) * math.sqrt(
        variance * (min(1.0, inflation / k) + min(1.0, inflation / to_come))
    )
    low_s, high_s = step_s * max(0.0, 1 - half), step_s * (1 + half)
    return replace(first, step_s=step_s, low_s=low_s, high_s=high_s, n=round(weight + n))


def _correlation(off: Sequence[float]) -> float:
    """Correlation of neighbours in a series of deviations from its mean.

    A series of n errs low by (1 + 4 r) / n (Kendall 1954).
    """
    k, squares = len(off), math.fsum(value**2 for value in off)
    found = math.fsum(a * b for a, b in itertools.pairwise(off)) / squares if squares else 0.0
    found += (1 + 4 * found) / k
    mixed = (_PRIOR_FREEDOM * _PRIOR_R + k * found) / (_PRIOR_FREEDOM + k)
    return min(_MOST_R, max(0.0, mixed))


def _student(freedom: int) -> float:
    """Student's t at 95 % (Abramowitz and Stegun 26.7.5, two terms).

    It is 2 % low at three degrees of freedom, the fewest here.
    """
    z = Z90
    return z + (z**3 + z) / 4 / freedom + (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2

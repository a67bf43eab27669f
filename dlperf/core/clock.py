"""Sampling: warm-up, adaptive repeats, disturbed samples, statistics. The clock is a parameter, so
that tests can hold it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dlperf.core.conversion import PositiveSamplesRecord, SamplesRecord
from dlperf.core.device_clock import DeviceClock
from dlperf.core.errors import DlperfError

try:
    import resource
except ImportError:  # Windows has none; there no sample is ever called disturbed
    resource = None  # type: ignore[assignment]


def involuntary_switches() -> int:
    """How often the kernel took the core away from this process so far; 0 where the system does not
    tell.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


def minor_faults() -> int:
    """Page faults that this process had so far without disk access; 0 where the system does not
    tell.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


@dataclass(frozen=True)
class Clock:
    """Time and disturbances of a measurement; tests give their own.

    `switches` counts disturbances: an interval in which it grows is disturbed. `back_off` runs
    after a disturbed sample and may wait. `best_s` is the least time so far of the work by which
    `switches` judges. After `until` samples are repeated only as often as is necessary. With a
    `device` its events time what it computes.
    """

    now: Callable[[], float] = time.perf_counter
    switches: Callable[[], int] = involuntary_switches
    device: DeviceClock | None = None
    back_off: Callable[[], object] | None = None
    best_s: Callable[[], float] = lambda: 0.0
    until: float = math.inf

    @property
    def is_late(self) -> bool:
        """Whether the time for repeated samples is over."""
        return self.until < math.inf and self.now() >= self.until

    @property
    def left_s(self) -> float:
        """Seconds left for repeated samples."""
        return max(0.0, self.until - self.now())

    def within(self, seconds: float) -> Clock:
        """The same clock with at most `seconds` from now for repeated samples."""
        return (
            self
            if seconds == math.inf
            else replace(self, until=min(self.until, self.now() + seconds))
        )

    def part(self, fraction: float) -> Clock:
        """The same clock with a `fraction` of the time that is left for repeated samples."""
        return self if self.until == math.inf else self.within(fraction * self.left_s)


SLOW, SLOWEST = 1.35, 2.5
"""Times of a fixed piece of work relative to its best: above SLOW the core is shared or throttled;
above SLOWEST it was taken away. A co-tenant on the same core makes it 1.5 and more (AMD Zen 3). It
is 1.02 to 1.31 for a second at a time (AMD Zen 5, quiet) while long products take 1.03 times their
least: a limit of 1.25 called half of their samples disturbed.
"""
THROUGHOUT = 2
"""Disturbances of an interval that begins and ends on a slow core."""
_WORK_LOOPS = 300
_MAX_BACK_OFF_S = 0.5
_LONGEST_GAP_S = 0.05


@dataclass
class CoreSpeed:
    """Core speed, sampled by timing a fixed piece of work.

    An SMT sibling at work for a co-tenant up to doubles times here for seconds, without a context
    switch. An instance is a `switches` counter for :class:`Clock`: it counts intervals that begin
    or end on a slow core, and lost cores. `best_s` is the least time of the work; give that of an
    earlier process. `back_off_s` is the time left for :meth:`back_off`.
    """

    now: Callable[[], float] = time.perf_counter
    switches: Callable[[], int] = involuntary_switches
    sleep: Callable[[float], None] = time.sleep
    best_s: float = math.inf
    back_off_s: float = 0.0
    n_slow: int = 0
    _was_slow: bool = field(default=False, repr=False)
    _sampled_s: float | None = field(default=None, repr=False)
    _sampled: tuple[float, float] = field(default=(0.0, 0.0), repr=False)

    def sample(self) -> float:
        """One speed sample, in seconds."""
        _spin()  # the interpreter's own code may have left the caches
        begin = self.now()
        _spin()
        took = self.now() - begin
        self.best_s = min(self.best_s, took)
        # Back-off samples a slow core more often: a sample's weight is the time since the last one.
        gap_s = 0.0 if self._sampled_s is None else min(begin - self._sampled_s, _LONGEST_GAP_S)
        weights_s, weighted = self._sampled
        weighted += gap_s * min(took, SLOWEST * self.best_s)
        self._sampled, self._sampled_s = (weights_s + gap_s, weighted), begin + took
        return took

    @property
    def mean_s(self) -> float:
        """Mean time of the work over the sampled time, at most SLOWEST times its best each."""
        weights_s, weighted = self._sampled
        return weighted / weights_s if weights_s else self.best_s

    def slow(self) -> bool:
        """Whether the core is slow now."""
        return self.sample() > SLOW * self.best_s

    def __call__(self) -> int:
        """Disturbances so far. A slow core counts for the interval that ends here and for the one
        that begins: an interval between two of them has :data:`THROUGHOUT`.
        """
        slow = self.slow()
        self.n_slow += slow + self._was_slow
        self._was_slow = slow
        return self.n_slow + self.switches()

    def settle(self, seconds: float) -> None:
        """Sample the speed for a given number of seconds, so that `best_s` is known."""
        end = self.now() + seconds
        while self.now() < end:
            self.slow()
            self.sleep(0.005)

    def back_off(self) -> None:
        """Wait while the core is slow, at most for `back_off_s`."""
        begin = now = self.now()
        while self.slow() and now - begin < min(self.back_off_s, _MAX_BACK_OFF_S):
            self.sleep(0.01)
            now = self.now()
        self.back_off_s -= now - begin

    def clock(self) -> Clock:
        """A clock that keeps this speed."""
        return Clock(self.now, self, back_off=self.back_off, best_s=lambda: self.best_s)


def _spin() -> int:
    total = 0
    for number in range(_WORK_LOOPS):
        total += number
    return total


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity, in the order taken, and how many more were dropped as
    disturbed.

    Raises DlperfError for an empty series and for values that are negative or not finite.
    """

    values: tuple[float, ...]
    n_disturbed: int = 0

    def __post_init__(self) -> None:
        if not self.values:
            raise DlperfError("samples: none was taken")
        for value in self.values:
            if not 0 <= value < float("inf"):
                raise DlperfError(
                    f"samples: {value!r} is no measured value; it must be finite and not negative"
                )

    @property
    def median(self) -> float:
        """The middle value: what a user will see."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The least value: the time on a core of one's own."""
        return min(self.values)

    @property
    def mean(self) -> float:
        """The average; sums over many steps need it."""
        return statistics.fmean(self.values)

    def joined(self, more: Samples) -> Samples:
        """These and those of another moment."""
        return Samples((*self.values, *more.values), self.n_disturbed + more.n_disturbed)

    def minus(self, amount: float, parts: float = 1.0) -> Samples:
        """What each sample exceeds an amount by (0 where it does not), divided by `parts`.

        >>> Samples((1.0, 5.0)).minus(3.0, 2.0).values
        (0.0, 1.0)
        """
        values = tuple(max(0.0, value - amount) / parts for value in self.values)
        return Samples(values, self.n_disturbed)

    @property
    def spread_frac(self) -> float:
        """(90th - 10th percentile) / median; 0 for a single sample.

        >>> Samples((1.0, 1.0, 1.0, 1.0, 1.0)).spread_frac
        0.0
        """
        middle = self.median
        return (quantile(self.values, 0.9) - quantile(self.values, 0.1)) / middle if middle else 0.0


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, linear between neighbours (numpy's
    default).

    >>> quantile([1.0, 2.0, 3.0], 0.75)
    2.5
    """
    ordered = sorted(values)
    index = fraction * (len(ordered) - 1)
    low = int(index)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (index - low) * (ordered[high] - ordered[low])


def undisturbed(pairs: Sequence[tuple[float, bool]], least_frac: float = 0.5) -> Samples:
    """Undisturbed values of (value, disturbed) pairs; all values where fewer than `least_frac`
    are undisturbed.

    Disturbed samples measure the co-tenant. A training whose steps are mostly disturbed runs on a
    busy machine, which its median has to show; a calibration wants the undisturbed ones, however
    few.
    """
    clean = tuple(value for value, disturbed in pairs if not disturbed)
    if len(clean) >= least_frac * len(pairs) and clean:
        return Samples(clean, len(pairs) - len(clean))
    return Samples(tuple(value for value, _ in pairs), 0)


def counting(pairs: Sequence[tuple[float, bool]]) -> list[bool]:
    """Of (value, disturbed) pairs whether each counts: what is undisturbed, and what is shorter
    than all of that, since disturbances only add; all where none is undisturbed.

    >>> counting([(2.0, False), (1.0, True), (3.0, True)])
    [True, True, False]
    """
    least = min((value for value, disturbed in pairs if not disturbed), default=math.inf)
    return [not disturbed or value < least for value, disturbed in pairs]


PART_S = 1.25e-4
"""Length of the parts of a raw sample that are judged one by one. Interference comes and goes
within a millisecond, so few whole samples of a millisecond are undisturbed.
"""
MAX_EXTENSION = 12.0
"""Longest extension of a raw sample without undisturbed parts, relative to its length: 12 ms
outlast most interference.
"""
_CLEAN_PARTS = 2
"""A raw sample goes on until a given number of parts were undisturbed, for a limited time."""


@dataclass(frozen=True)
class Repeats:
    """How to sample: raw samples of at least `sample_s` (several calls where one is shorter),
    `n_samples` of them, after `warmup` calls.
    """

    sample_s: float = 1e-3
    n_samples: int = 5
    warmup: int = 1
    max_calls: int = 1_000_000


class Sampler:
    """Samples one function piecewise, so that a plan can interleave many: each :meth:`take` adds
    one raw sample.

    A raw sample of short calls is taken in parts of :data:`PART_S`. Its value is the median of its
    undisturbed parts; only where it has none is it disturbed.

    `pairs` are all raw samples so far in seconds a call, each with whether it was disturbed.
    `slowed` has the median of the parts of a raw sample that were disturbed throughout, and how
    many times that of the undisturbed ones it is, of each that has both; `slow_s` has that
    median of each that has such parts. `n_calls` is the number of calls in a raw sample, 0 before
    the first.

    >>> ticks = iter(range(100))
    >>> clock = Clock(now=lambda: float(next(ticks)), switches=lambda: 0)
    >>> sampler = Sampler(lambda: None, Repeats(sample_s=0.5, n_samples=2), clock)
    >>> sampler.take(); sampler.take(); sampler.result().median
    1.0
    """

    def __init__(
        self,
        call: Callable[[], object],
        repeats: Repeats = Repeats(),
        clock: Clock = Clock(),
        n_calls: int = 0,
    ) -> None:
        self._call, self.repeats, self._clock = call, repeats, clock
        self.pairs: list[tuple[float, bool]] = []
        self.slowed: list[tuple[float, float]] = []
        self.slow_s: list[float] = []
        self.n_calls = n_calls  # where an earlier sampler has not found it, warming up does

    @property
    def is_late(self) -> bool:
        """Whether it has a sample, and its clock no time for another."""
        return bool(self.pairs) and self._clock.is_late

    @property
    def n_clean(self) -> int:
        """Undisturbed raw samples so far."""
        return sum(not disturbed for _, disturbed in self.pairs)

    def _time(self, n_calls: int) -> float:
        """Seconds of a given number of calls."""
        call, clock = self._call, self._clock
        if clock.device is not None:
            return clock.device.time(call, n_calls)
        begin = clock.now()
        for _ in range(n_calls):
            call()
        return clock.now() - begin

    def warm_up(self) -> None:
        """Warm calls, and the number of calls that make a raw sample long enough."""
        for _ in range(max(1, self.repeats.warmup)):
            self._time(1)
        n_calls = 1
        while n_calls < self.repeats.max_calls:
            seconds = self._time(n_calls)
            each = seconds / n_calls
            if seconds >= self.repeats.sample_s:
                break
            n_calls = min(
                self.repeats.max_calls,
                max(
                    2 * n_calls,
                    min(
                        16 * n_calls,
                        int(1.1 * self.repeats.sample_s / each) if each > 0 else 16 * n_calls,
                    ),
                ),
            )
        self.n_calls = n_calls

    def take(self, extension: float = 0.0) -> None:
        """One raw sample; the first call warms up before. Without two undisturbed parts it goes on
        for at most `extension` times its length.
        """
        if not self.n_calls:
            self.warm_up()
        # A device is waited for once a sample, so that its queue does not run dry in between.
        n_parts = (
            1
            if self._clock.device is not None
            else max(1, min(self.n_calls, round(self.repeats.sample_s / PART_S)))
        )
        part = math.ceil(self.n_calls / n_parts)
        extension_s = extension * self.repeats.sample_s
        clean, slow = list[float](), list[float]()
        whole_s = spent_s = seconds = 0.0
        n_done = 0
        disturbances = self._clock.switches()
        while n_done < self.n_calls or (
            len(clean) < min(n_parts, _CLEAN_PARTS) and spent_s - whole_s + seconds < extension_s
        ):
            n_calls, before = (
                min(part, self.n_calls - n_done) if n_done < self.n_calls else part,
                disturbances,
            )
            seconds, disturbances = self._time(n_calls), self._clock.switches()
            whole_s += seconds if n_done < self.n_calls else 0.0
            spent_s, n_done = spent_s + seconds, n_done + n_calls
            if disturbances == before:
                clean.append(seconds / n_calls)
            elif disturbances - before >= THROUGHOUT:
                slow.append(seconds / n_calls)
        if slow:
            self.slow_s.append(statistics.median(slow))
        if clean and slow and (least_s := statistics.median(clean)):
            self.slowed.append((self.slow_s[-1], self.slow_s[-1] / least_s))
        self.pairs.append(
            (statistics.median(clean), False) if clean else (whole_s / self.n_calls, True)
        )
        if not clean and self._clock.back_off is not None:
            self._clock.back_off()

    def result(self) -> Samples:
        """The undisturbed samples, in seconds a call, and what is shorter than all of them, since
        disturbances only add; all where none was undisturbed.
        """
        values = tuple(
            value for (value, _), counts in zip(self.pairs, counting(self.pairs)) if counts
        )
        return Samples(values, len(self.pairs) - len(values))


_MOST_TURNS = 2
LEAST_TURNS = 2
"""Single calls of each kind, however short the time is: one alone may be the very first of its
code.
"""


def take_turns(samplers: Sequence[Sampler]) -> None:
    """Sample many functions in turn, so that drift meets all alike, until each has its wanted
    number of undisturbed samples.

    A function that is disturbed again and again gets twice its wanted number of turns, no more; one
    whose time is over gets none but its first.
    """
    turns = _MOST_TURNS * max((sampler.repeats.n_samples for sampler in samplers), default=0)
    for turn in range(turns):
        lacking = [
            sampler
            for sampler in samplers
            if sampler.n_clean < sampler.repeats.n_samples
            and turn < _MOST_TURNS * sampler.repeats.n_samples
        ]
        if not lacking or all(sampler.is_late for sampler in lacking):
            return
        for sampler in lacking:
            sampler.take(0.0 if sampler.is_late else MAX_EXTENSION)


def sample_in_turns(
    calls: Sequence[Callable[[], object]], repeats: Repeats, clock: Clock
) -> list[Samples]:
    """Samples of each call, taken in turns (:func:`take_turns`)."""
    samplers = [Sampler(call, repeats, clock) for call in calls]
    take_turns(samplers)
    return [sampler.result() for sampler in samplers]


def timed(call: Callable[[], object], clock: Clock) -> tuple[float, bool]:
    """Seconds of one call, and whether it was disturbed."""
    before, begin = clock.switches(), clock.now()
    call()
    end = clock.now()
    return end - begin, clock.switches() != before


def take_single(
    prepare: Callable[[], Callable[[], object]], n_wanted: int, clock: Clock
) -> Samples:
    """Single calls, each prepared anew by an untimed `prepare`, until `n_wanted` are undisturbed,
    twice as many were tried, or the time is over.
    """
    pairs: list[tuple[float, bool]] = []
    while (
        sum(not disturbed for _, disturbed in pairs) < n_wanted
        and len(pairs) < _MOST_TURNS * n_wanted
        and (len(pairs) < LEAST_TURNS or not clock.is_late)
    ):
        pairs.append(timed(prepare(), clock))
        if pairs[-1][1] and clock.back_off is not None:
            clock.back_off()
    return undisturbed(pairs, least_frac=0.0)


# -- files -----------------------------------------------------------------------------------------


def samples_to_json(samples: Samples) -> dict[str, Any]:
    """Samples as JSON data of their own, or a part of a larger entry's."""
    return {
        "samples_s": [float(f"{value:.6g}") for value in samples.values],
        "disturbed": samples.n_disturbed,
    }


def samples_from_record(record: SamplesRecord | PositiveSamplesRecord) -> Samples:
    """The samples that :func:`samples_to_json` wrote."""
    return Samples(tuple(record.samples_s), record.disturbed)

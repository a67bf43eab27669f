"""Sampling: warm-up, adaptive repeats, disturbed samples, statistics. The clock is a parameter, so that tests can hold it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlperf.errors import DlperfError

try:
    import resource
except ImportError:  # Windows has none; there no sample is ever called disturbed
    resource = None  # type: ignore[assignment]


def involuntary_switches() -> int:
    """How often the kernel took the core away from this process so far; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw if resource else 0


def minor_faults() -> int:
    """Page faults that this process had so far without disk access; 0 where the system does not tell."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


@dataclass(frozen=True)
class Clock:
    """Where time and disturbance come from. Tests give their own."""

    now: Callable[[], float] = time.perf_counter
    switches: Callable[[], int] = involuntary_switches
    synchronize: Callable[[], None] | None = None


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one quantity, in the order taken, and how many more were dropped as disturbed.

    Raises DlperfError for an empty series and for values that are negative or not finite.
    """

    values: tuple[float, ...]
    n_disturbed: int = 0

    def __post_init__(self) -> None:
        if not self.values:
            raise DlperfError("samples: none was taken")
        for value in self.values:
            if not 0 <= value < float("inf"):
                raise DlperfError(f"samples: {value!r} is no measured value; it must be finite and not negative")

    @property
    def median(self) -> float:
        """The middle value: what a user will see."""
        return statistics.median(self.values)

    @property
    def minimum(self) -> float:
        """The least value: the ceiling of what the machine can do."""
        return min(self.values)

    @property
    def mean(self) -> float:
        """The average; sums over many steps need it."""
        return statistics.fmean(self.values)

    @property
    def spread_frac(self) -> float:
        """(90th - 10th percentile) / median; 0 for a single sample.

        >>> Samples((1.0, 1.0, 1.0, 1.0, 1.0)).spread_frac
        0.0
        """
        middle = self.median
        return (quantile(self.values, 0.9) - quantile(self.values, 0.1)) / middle if middle else 0.0


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, linear between neighbours (numpy's default).

    >>> quantile([1.0, 2.0, 3.0], 0.75)
    2.5
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def undisturbed(pairs: Sequence[tuple[float, bool]]) -> Samples:
    """The values of (value, disturbed) pairs without the disturbed ones, if at least half survive; else all of them.

    A sample during which the kernel took the core away measures the neighbour. Where most are disturbed the
    machine is busy, and leaving only the lucky ones would pretend that it is not.
    """
    clean = tuple(value for value, disturbed in pairs if not disturbed)
    if 2 * len(clean) >= len(pairs) and clean:
        return Samples(clean, len(pairs) - len(clean))
    return Samples(tuple(value for value, _ in pairs), 0)


@dataclass(frozen=True)
class Repeats:
    """How to sample: raw samples of at least `sample_s` (several calls where one is shorter), `n_samples` of them, after `warmup` calls.

    Before a raw sample of fewer than `prime_below` calls one call goes untimed: between samples other kernels may have
    taken the caches, and a sample of few calls would show that.
    """

    sample_s: float = 1e-3
    n_samples: int = 5
    warmup: int = 1
    prime_below: int = 0
    max_calls: int = 1_000_000


class Sampler:
    """Samples one function piecewise, so that a plan can interleave many: each :meth:`take` adds one raw sample.

    >>> ticks = iter(range(100))
    >>> sampler = Sampler(lambda: None, Repeats(sample_s=0.5, n_samples=2), Clock(now=lambda: float(next(ticks)), switches=lambda: 0))
    >>> sampler.take(); sampler.take(); sampler.result().median
    1.0
    """

    def __init__(self, call: Callable[[], object], repeats: Repeats = Repeats(), clock: Clock = Clock()) -> None:
        self._call, self._repeats, self._clock = call, repeats, clock
        self._pairs: list[tuple[float, bool]] = []
        self._n_calls = 0

    @property
    def n_taken(self) -> int:
        """Raw samples so far, disturbed ones included."""
        return len(self._pairs)

    def _time(self, n_calls: int) -> tuple[float, bool]:
        call, clock = self._call, self._clock
        before = clock.switches()
        begin = clock.now()
        for _ in range(n_calls):
            call()
        if clock.synchronize is not None:
            clock.synchronize()
        end = clock.now()
        return (end - begin) / n_calls, clock.switches() != before

    def warm_up(self) -> None:
        """Warm calls, and the number of calls that make a raw sample long enough."""
        for _ in range(max(1, self._repeats.warmup)):
            self._time(1)
        n_calls = 1
        while n_calls < self._repeats.max_calls:
            each, _ = self._time(n_calls)
            if each * n_calls >= self._repeats.sample_s:
                break
            n_calls = min(self._repeats.max_calls, max(2 * n_calls, min(16 * n_calls, int(1.1 * self._repeats.sample_s / each) if each > 0 else 16 * n_calls)))
        self._n_calls = n_calls

    def take(self) -> None:
        """One raw sample; the first call warms up before."""
        if not self._n_calls:
            self.warm_up()
        if self._n_calls < self._repeats.prime_below:
            self._call()
        self._pairs.append(self._time(self._n_calls))

    def result(self) -> Samples:
        """What has been taken, as :func:`undisturbed` sees it, in seconds a call."""
        return undisturbed(self._pairs)

"""What shows how far a machine file can be relied on: the points of its plan that it holds, and how
it predicted steps that were timed.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Annotated

from msgspec import Meta

from dlperf.core.conversion import (
    Name,
    PositiveSeconds,
    Seconds,
    Threads,
    Whole,
    refuse,
)
from dlperf.core.text import counted
from dlperf.core.units import format_percent, format_seconds

_LEAST_HALF_WIDTH = 1e-3
_LEAST_MEASURED_FRAC = 0.1
"""Kernels' measured over predicted time, at least: where overhead alone takes longer than the step,
nothing is known of them.
"""
WORST_FACTOR = 1.5
"""Predicted over measured time, up or down, above which a self-test has failed."""
WORST_MEDIAN_FRAC = 0.3
"""Median error above which a self-test has failed."""
FIRST_CHECK_SEED = 2**31
"""Seeds from this one on are those of a check, lower ones those of a calibration."""
_ENOUGH_TESTS = 9
"""Tests below which intervals never become narrower."""
_SD_OF_MEDIAN = 1.0 / NormalDist().inv_cdf(0.75)
"""Standard deviation of a normal distribution over its median absolute deviation."""
_Z90_OF_MEDIAN = _SD_OF_MEDIAN * NormalDist().inv_cdf(0.95)
"""Half width of a 90 % interval of a normal distribution over its median absolute deviation."""
_BIAS_SD = 0.06
"""Standard deviation, over machines, of what kernels in steps are biased by, in logarithms: medians
of -7, -3 and -8 % were seen on an Intel Xeon, an AMD EPYC of Zen 3 and one of Zen 5.
"""
_PAGE_FACTOR, _PAGE_SD = 1.3, 0.1
"""Factor on pages' cost assumed beforehand and its standard deviation over machines, in logarithms:
1.2 to 1.55 were seen in nine calibrations of an AMD EPYC of Zen 5, more on an Intel Xeon. Plain
scripts there took 1.3 to 1.5 us a page, 1.15 to 1.35 times as long as alone: small networks, as
most tests are, lose more to pages than large ones.
"""
_MOST_PAGES_FRAC = 0.3
"""Part of a step that pages take from which on a test of their cost weighs no more."""
_INTERVAL_FACTOR, _OF_SEVERAL_THREADS = 0.9, 1.4
"""Interval calibration factor assumed beforehand, with one thread and with several, for which no
state says how cores work together. Seven calibrations of an AMD EPYC of Zen 5 had 0.6 to 1.1 with
one thread; two with two threads 1.1 and 1.2 by the median of their tests, 1.9 by the mean square.
"""
_PRIOR_SD, _PRIOR_TESTS = 0.1, 4
"""Standard deviation of single tests assumed beforehand, and as how many tests what is assumed
counts.
"""
_INDEPENDENT_TESTS = 4
"""Tests of one calibration that count at most: they share its minute."""


@dataclass(frozen=True)
class Coverage:
    """How many of a calibration's planned points of a group of kernels were measured with `threads`
    threads; `sampled_once` where the measurement ended after their first samples.
    """

    group: Name  #: Group of kernels.
    threads: Threads  #: Number of threads.
    n_measured: Whole  #: Measured points.
    n_planned: Whole  #: Planned points.
    sampled_once: bool = False  #: Interrupted before further samples.


@dataclass(frozen=True)
class Disturbance:
    """A group of measurements that co-tenants disturbed: involuntary context switches per second
    (0 where they were few), and kernels without a sample on an undisturbed core (0 likewise).

    >>> Disturbance("conv", 1, 72.0, n_unsteady=0, n_kernels=9).note
    'busy while measuring conv with 1 thread: the core was taken away 72 times a second'
    """

    group: Name  #: Group of kernels.
    threads: Threads  #: Number of threads.
    switches_per_s: Annotated[float, Meta(ge=0, le=1e12)]  #: Involuntary context switches.
    n_unsteady: Whole  #: Kernels without an undisturbed sample.
    n_kernels: Whole  #: Kernels of the group.

    @property
    def note(self) -> str:
        """The disturbance in one line."""
        found = []
        if self.switches_per_s:
            found.append(f"the core was taken away {self.switches_per_s:.0f} times a second")
        if self.n_unsteady:
            found.append(
                f"{self.n_unsteady} of {counted(self.n_kernels, 'kernel')} never"
                " had the core's full speed"
            )
        return (
            f"busy while measuring {self.group} with {counted(self.threads, 'thread')}:"
            f" {'; '.join(found)}"
        )


@dataclass(frozen=True)
class SelfTest:
    """A training step of a network drawn at random, predicted by the file and timed at the end of
    the calibration, or by a check of the file.

    `predicted_s`, with its 90 % interval `low_s`..`high_s`, rests on the machine file without any
    self-test and is at the state of the measurement where the file has a reference; `overhead_s` is
    the part of it that no kernel takes. `measured_s` is the median step.
    """

    name: Name  #: Kind of network.
    threads: Threads  #: Number of threads.
    seed: Whole  #: Seed of its sizes.
    predicted_s: PositiveSeconds  #: Predicted step.
    low_s: PositiveSeconds  #: Lower end of the 90 % interval.
    high_s: PositiveSeconds  #: Upper end of the 90 % interval.
    measured_s: PositiveSeconds  #: Measured step.
    overhead_s: Seconds = 0.0  #: Overhead in the predicted step.

    @property
    def is_check(self) -> bool:
        """Whether it belongs to a check of the file, not to the calibration."""
        return self.seed >= FIRST_CHECK_SEED

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def half_widths(self) -> float:
        """How many half widths of its interval the measured step lies from the predicted one, by
        logarithms.
        """
        end_s = self.high_s if self.measured_s > self.predicted_s else self.low_s
        half_width = max(_LEAST_HALF_WIDTH, abs(math.log(end_s / self.predicted_s)))
        return abs(math.log(self.measured_s / self.predicted_s)) / half_width

    @property
    def kernels_s(self) -> float:
        """Kernels' part of the predicted step."""
        return self.predicted_s - self.overhead_s

    @property
    def kernel_error(self) -> float:
        """Logarithm of the kernels' predicted over their measured time, which is all but the
        predicted overhead.
        """
        least_s = _LEAST_MEASURED_FRAC * self.kernels_s
        return math.log(self.kernels_s / max(self.measured_s - self.overhead_s, least_s))

    def with_kernels(self, factor: float) -> SelfTest:
        """The test with another prediction: its kernels take so many times as long."""
        longer = 1.0 + (factor - 1.0) * self.kernels_s / self.predicted_s
        times = (longer * seconds for seconds in (self.predicted_s, self.low_s, self.high_s))
        predicted_s, low_s, high_s = times
        return replace(self, predicted_s=predicted_s, low_s=low_s, high_s=high_s)

    def describe(self) -> str:
        """The step predicted and measured, in words.

        >>> SelfTest("MLP", 1, 7, 1.31e-3, 1.2e-3, 1.5e-3, 1.27e-3).describe()
        'MLP, 1 thread: predicted 1.31 ms, measured 1.27 ms: +3.1 %'
        """
        return (
            f"{self.name}, {counted(self.threads, 'thread')}: predicted"
            f" {format_seconds(self.predicted_s)}, measured {format_seconds(self.measured_s)}:"
            f" {format_percent(self.error_frac, signed=True)}"
        )

    @property
    def factor(self) -> float:
        """Predicted over measured time or its inverse, whichever is above 1."""
        return max(self.predicted_s / self.measured_s, self.measured_s / self.predicted_s)


@dataclass(frozen=True)
class PageTest:
    """A training step of a network drawn at random, timed without page faults and, right after
    that, with a malloc that gives back all it can. `page_faults` are how many more a step took
    then.
    """

    name: Name  #: Kind of network.
    threads: Threads  #: Number of threads.
    seed: Whole  #: Seed of its sizes.
    measured_s: PositiveSeconds  #: Measured step with page faults.
    tuned_s: PositiveSeconds  #: Measured step without page faults.
    page_faults: Annotated[float, Meta(ge=0, le=1e12)]  #: Page faults more.


def check_tests(tests: Sequence[SelfTest]) -> None:
    """Raise DlperfError for a test of a file whose interval does not contain its prediction, or
    that has more overhead than time.
    """
    for number, test in enumerate(tests):
        entry, predicted = f"self_tests[{number}]", f"predicted_s, {test.predicted_s!r}"
        if test.low_s > test.predicted_s:
            refuse(f"{entry}.low_s", test.low_s, f"at most {predicted}")
        if test.high_s < test.predicted_s:
            refuse(f"{entry}.high_s", test.high_s, f"at least {predicted}")
        if test.overhead_s >= test.predicted_s:
            refuse(f"{entry}.overhead_s", test.overhead_s, f"less than {predicted}")


def conformal_bound(values: Sequence[float]) -> float:
    """Split-conformal bound of one further value that is exchangeable with these n: it lies at or
    below the bound with a probability of at least 90 % (Vovk, Gammerman and Shafer 2005,
    Algorithmic Learning in a Random World).

    The bound is the value of rank ceil(0.9 (n + 1)). Below 9 values it is the largest, which
    promises less: n / (n + 1).

    >>> [conformal_bound(range(1, n + 1)) for n in (1, 3, 9, 10, 19, 22, 39)]
    [1, 3, 9, 10, 18, 21, 36]
    """
    rank = -(-9 * (len(values) + 1) // 10)
    return sorted(values)[min(rank, len(values)) - 1]


def _weighted_median(weighted: Sequence[tuple[float, float]]) -> float:
    """The median of (value, weight): the mean of both values where half of the weight lies below
    one and half above the other.

    >>> _weighted_median([(3.0, 1.0), (1.0, 1.0), (2.0, 1.0)]), _weighted_median([(1, 2), (2, 2)])
    (2.0, 1.5)
    """
    known = sorted(weighted)
    below = list(itertools.accumulate(weight for _, weight in known))
    lower, upper = (bisect(below, below[-1] / 2) for bisect in (bisect_left, bisect_right))
    return (known[lower][0] + known[min(upper, len(known) - 1)][0]) / 2


def _mean_square(usual: float, found: float, n_tests: float) -> float:
    """Square of what is assumed beforehand and of what so many tests give, averaged."""
    return (_PRIOR_TESTS * usual**2 + n_tests * found**2) / (_PRIOR_TESTS + n_tests)


def _estimate(weighted: Sequence[tuple[float, float]], usual: float, sd: float) -> float:
    """What (value, weight up to 1) of tests tell of a machine whose like have `usual` on average
    and deviate from it by `sd`: the mean of the posterior of a normal prior (Efron and Morris
    1973).

    Both the tests' mean and their scatter are taken from medians: one test that is far off moves
    neither.

    >>> values = [1.0, 1.1, 1.2]
    >>> [round(_estimate([(x, 1.0) for x in (*values, far)], 0.0, 0.1), 3) for far in (1.3, 9.0)]
    [0.822, 0.822]
    """
    n_tests = math.fsum(weight**2 for _, weight in weighted)
    if not n_tests:
        return usual
    middle = _weighted_median(weighted)
    scatter = _SD_OF_MEDIAN * _weighted_median([(abs(one - middle), by) for one, by in weighted])
    variance = _mean_square(_PRIOR_SD, scatter, n_tests) / min(n_tests, _INDEPENDENT_TESTS)
    return usual + (middle - usual) * sd**2 / (sd**2 + variance)


def page_factor(tests: Sequence[PageTest], page_s: float) -> float:
    """Factor on `page_s`, the seconds that touching and giving back a page of a mapping take by
    themselves, for a page of the heap in steps: there the system also trims the heap and forgets
    where other pages are, and its zeros drive data out of the caches. A test's weight is the
    square of how much of the step its pages take, up to 30 %: below, its error is in proportion to
    the step, above, to the pages.

    >>> test = PageTest("MLP", 1, 7, 12e-3, 10e-3, page_faults=1000)
    >>> [round(page_factor([test] * n, 1e-6), 2) for n in (0, 1, 9, 36)]
    [1.3, 1.31, 1.36, 1.5]
    """
    weighted = []
    for test in tests:
        if (pages_s := test.page_faults * page_s) > 0:
            times = max(_LEAST_MEASURED_FRAC, (test.measured_s - test.tuned_s) / pages_s)
            weight = min(1.0, pages_s / test.tuned_s / _MOST_PAGES_FRAC)
            weighted.append((math.log(times), weight**2))
    return max(1.0, math.exp(_estimate(weighted, math.log(_PAGE_FACTOR), _PAGE_SD)))


def kernel_factor(tests: Sequence[SelfTest]) -> float:
    """Factor on the kernels of predicted steps: the inverse of the tests' median predicted over
    measured time of kernels, as far as it can be relied on. A test weighs as much as its kernels
    take of it.

    >>> test = SelfTest("MLP", 1, 7, 0.9, 0.8, 1.0, 1.0)
    >>> [round(kernel_factor([test] * n), 3) for n in (0, 3, 19)]
    [1.0, 1.071, 1.099]
    """
    weighted = [(test.kernel_error, test.kernels_s / test.predicted_s) for test in tests]
    return math.exp(-_estimate(weighted, 0.0, _BIAS_SD))


def interval_factor(tests: Sequence[SelfTest]) -> float:
    """Interval calibration factor: the scale of the errors that :func:`kernel_factor` leaves of the
    tests, in half widths of their intervals, so that 90 % of normal errors of that scale lie
    within. It is taken from their median, and its square is averaged with what is assumed
    beforehand.

    >>> test = SelfTest("MLP", 1, 7, 1.0, 0.9, 1.1, 1.0)
    >>> wide = [replace(test, seed=n, measured_s=1.0 + 0.01 * (n - 9)) for n in range(19)]
    >>> [round(interval_factor(some), 2) for some in ((), [test] * 3, wide)]
    [1.0, 1.0, 1.05]
    """
    if not tests:
        return 1.0
    usual = _INTERVAL_FACTOR if tests[0].threads == 1 else _OF_SEVERAL_THREADS
    factor = kernel_factor(tests)
    scale = _Z90_OF_MEDIAN * median(test.with_kernels(factor).half_widths for test in tests)
    square = _mean_square(usual, scale, min(len(tests), _INDEPENDENT_TESTS))
    return max(1.0 if len(tests) < _ENOUGH_TESTS else 0.0, math.sqrt(square))


def why_failed(tests: Sequence[SelfTest]) -> str:
    """The rules that the tests break, each with its number and threshold; empty where they pass.

    The conformal bound of their factors must be at most WORST_FACTOR, their median error at most
    WORST_MEDIAN_FRAC.

    >>> test = SelfTest("MLP", 1, 7, 1.4e-3, 1e-3, 2e-3, 1e-3)
    >>> why_failed([test] * 3)
    '3 steps with 1 thread: the median error of 40.0 % is above 30 %'
    >>> why_failed([replace(test, measured_s=1.4e-3)] * 2 + [test.with_kernels(2.0)])
    'MLP, 1 thread: predicted 2.80 ms, measured 1.00 ms: +180.0 %, a factor of 2.80, is above 1.5'
    """
    if not tests:
        return ""
    found = []
    bound = conformal_bound([test.factor for test in tests])
    if bound > WORST_FACTOR:
        step = next(test for test in tests if test.factor == bound)
        found.append(f"{step.describe()}, a factor of {bound:.2f}, is above {WORST_FACTOR:g}")
    error_frac = median(abs(test.error_frac) for test in tests)
    if error_frac > WORST_MEDIAN_FRAC:
        found.append(
            f"{counted(len(tests), 'step')} with {counted(tests[0].threads, 'thread')}: the median"
            " error of"
            f" {format_percent(error_frac)} is above {100 * WORST_MEDIAN_FRAC:g} %"
        )
    return "; ".join(found)


def has_failed(tests: Sequence[SelfTest]) -> bool:
    """Whether the tests break a rule (:func:`why_failed`)."""
    return bool(why_failed(tests))

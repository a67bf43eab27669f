"""The raw samples of one kernel, and what they say of it: its undisturbed time or an estimate of
that, how much longer it takes beside a co-tenant on the same core, and on cores that are far apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dlperf.core.clock import Samples, counting

MOST_TIMES = 2
"""A kernel gets so many times the samples that it is to have, where most are disturbed."""
_AGREE_FRAC = 0.02
_SAME_SPEED = 1.2
"""Least times of the core's work, relative to each other, that are of the same undisturbed core: on
AMD Zen 3 they are up to 1.18, beside a co-tenant on the same core 1.5 and more.
"""
LEAST_ALIKE, _MOST_ALIKE = 5, 15
"""Kernels with undisturbed and disturbed parts that tell how much longer those took that were
disturbed from begin to end.
"""
_MOST_SHARED = 2.5
"""How many times longer a call takes at most because a co-tenant has the same core, half of its
time. What takes longer waited: on two virtual cores (AMD EPYC, Zen 5) up to 210 times for a thread
that had no core. With one thread the longest of 3,084 kernels took 2.07 times.
"""
_NEAR, _FAR = 1.25, 1.35
"""Times of a parallel region relative to the least up to which cores are near each other, and from
which they are far apart: on two virtual cores (AMD EPYC, Zen 5) 1.0 to 1.1 and 1.6 to 2.0.
"""
_MOST_RESPONSE, _LEAST_FACTOR = 3.0, 0.5
"""Largest response of a kernel to how far cores are apart, one kernel's is noise above; and the
least slowdown that an estimate assumes.
"""
_MOST_EXCESSES = 25
"""Kernels with more samples that tell by how much: those that take about as long, since long calls
have fewer undisturbed samples (AMD Zen 3, busy: from 0.6 ms on an excess of 4 %, below of none).
"""


@dataclass(frozen=True)
class RawSample:
    """A raw sample: seconds a call, whether it was disturbed, the number of the machine's reading
    before it, the least time of the core's work, by which it was judged, the number of its pass,
    whether it is one more than a kernel gets in a pass, the seconds of a parallel region before and
    after it (0 of one thread), and whether a disturbed one was so from begin to end.
    """

    seconds: float
    disturbed: bool
    reading: int | None
    best_s: float
    number: int
    is_extra: bool = False
    regions_s: tuple[float, float] = (0.0, 0.0)
    throughout: bool = True


def _agree(seconds: Sequence[float], count: int) -> bool:
    """Whether there are so many times, the least of which agree.

    >>> _agree([1.0, 2.0, 1.01], 2), _agree([1.0, 2.0, 1.01], 3), _agree([1.0], 2)
    (True, False, False)
    """
    least = sorted(seconds)[:count]
    return len(least) == count and least[-1] <= (1 + _AGREE_FRAC) * least[0]


def _least_by_pass(raw: Sequence[RawSample]) -> list[RawSample]:
    """The least sample of each pass."""
    found: dict[int, RawSample] = {}
    for one in sorted(raw, key=lambda one: one.seconds):
        found.setdefault(one.number, one)
    return [*found.values()]


@dataclass
class KernelSamples:
    """Raw samples of one kernel, and the number of calls in one.

    `slow_s` has seconds a call of parts that were disturbed throughout, the median of each sample,
    and `slowed_parts` these and how many times the undisturbed ones of the same sample they are.
    """

    raw: list[RawSample] = field(default_factory=list)
    slowed_parts: list[tuple[float, float]] = field(default_factory=list)
    n_calls: int = 0
    is_long: bool = False
    slow_s: list[float] = field(default_factory=list)

    def clean(self, best_s: float) -> list[RawSample]:
        """The undisturbed samples, where an undisturbed core does its work in `best_s`. What was
        judged by a much longer time was judged beside a co-tenant.
        """
        return [one for one in self.raw if not one.disturbed and one.best_s <= _SAME_SPEED * best_s]

    def least_s(self, best_s: float) -> float:
        """The least undisturbed sample; 0 without any."""
        return min((one.seconds for one in self.clean(best_s)), default=0.0)

    def wants(self, n_samples: int, best_s: float) -> bool:
        """Whether it is to be sampled again: `n_samples` times in two passes or more, half as often
        where a call takes long, and further while most are disturbed, but no more once the least
        undisturbed ones of half as many passes agree.
        """
        usual = self.usual()
        clean = usual.clean(best_s)
        if _agree([one.seconds for one in _least_by_pass(clean)], max(2, n_samples // 2)):
            return False
        n_wanted = math.ceil(n_samples / 2) if self.is_long else n_samples
        n_passes = len({one.number for one in usual.raw})
        if len(usual.raw) < n_wanted or n_passes < min(2, n_wanted):
            return True
        return len(usual.raw) < MOST_TIMES * n_wanted and 2 * len(clean) < n_wanted

    def is_sure(self, number: int, best_s: float) -> bool:
        """Whether two usual undisturbed samples of a pass agree."""
        clean = self.usual().clean(best_s)
        return _agree([one.seconds for one in clean if one.number == number], 2)

    def usual(self) -> KernelSamples:
        """What a kernel has that gets one sample in a pass."""
        return replace(self, raw=[one for one in self.raw if not one.is_extra])

    def slowed(self, best_s: float) -> list[tuple[float, float]]:
        """Seconds when disturbed throughout, and how many times the undisturbed ones these are: of
        parts of samples, and of the least such sample over the least undisturbed one. Waits do not
        count.
        """
        slow_s = [one.seconds for one in self.raw if one.disturbed and one.throughout]
        least_s = self.least_s(best_s)
        whole = [(min(slow_s), min(slow_s) / least_s)] if slow_s and least_s else []
        return [pair for pair in (*self.slowed_parts, *whole) if pair[1] <= _MOST_SHARED]

    def shared_core(self, best_s: float) -> float:
        """How many times longer a call takes while a co-tenant has the same core: the median of
        such parts of samples, but for waits, over the least undisturbed sample, at least 1; 0 where
        there are not both.
        """
        least_s = self.least_s(best_s)
        shared_s = [seconds for seconds in self.slow_s if seconds <= _MOST_SHARED * least_s]
        if not shared_s:
            return 0.0
        return float(f"{max(1.0, statistics.median(shared_s) / least_s):.3g}")

    def near_and_far(
        self, best_s: float, region_s: float
    ) -> tuple[list[RawSample], list[RawSample]]:
        """The undisturbed samples between parallel regions of cores that are near each other, and
        between those of cores that are far apart, where the least region takes `region_s`.
        """
        clean = self.clean(best_s)
        near = [one for one in clean if max(one.regions_s) <= _NEAR * region_s]
        return near, [one for one in clean if min(one.regions_s) > _FAR * region_s]

    def core_to_core(self, best_s: float, region_s: float) -> float | None:
        """By which part a call takes longer where a parallel region takes twice as long; None
        without samples of both.
        """
        near, far = self.near_and_far(best_s, region_s)
        if not (near and far):
            return None
        near_s, far_s = (min(one.seconds for one in samples) for samples in (near, far))
        longer = statistics.median(min(one.regions_s) for one in far) / region_s - 1.0
        response = (far_s / near_s - 1.0) / longer if near_s else 0.0
        return float(f"{max(-1.0, min(_MOST_RESPONSE, response)):.3g}")

    def result(
        self,
        best_s: float,
        slowed: Sequence[tuple[float, float]],
        region_s: float = 0.0,
        responses: Sequence[tuple[float, float]] = (),
    ) -> tuple[Samples, tuple[int, ...]]:
        """The undisturbed samples of cores near each other and what is shorter than all of them,
        since disturbances only add, in the order taken, and the readings before them.

        Without any, an estimate: the least undisturbed sample of cores far apart, by the median of
        the `responses` of kernels that take about as long; what the disturbed samples say
        (:meth:`_without_disturbances`) by the median slowdown of the kernels `slowed` that take
        about as long; all samples where too few kernels show one.
        """
        clean = self.clean(best_s)
        near, far = self.near_and_far(best_s, region_s)
        least = min(far or self.raw, key=lambda one: one.seconds)
        if far and not near and len(responses) >= LEAST_ALIKE:
            response = statistics.median(_alike(responses, least.seconds, _MOST_ALIKE))
            longer = min(least.regions_s) / region_s - 1.0
            factor = max(_LEAST_FACTOR, 1.0 + response * longer)
        elif not clean and len(slowed) >= LEAST_ALIKE and least.seconds > 0:
            slowdown = max(1.0, statistics.median(_alike(slowed, least.seconds, _MOST_ALIKE)))
            factor = least.seconds / self._without_disturbances(slowdown)
        else:
            others = [one for one in clean if one not in near] if near else []
            raw = [one for one in self.raw if one not in others]
            counts = counting([(one.seconds, one not in (near or clean)) for one in raw])
            rows = [one for one, counted in zip(raw, counts) if counted]
            samples = Samples(tuple(one.seconds for one in rows), len(self.raw) - len(rows))
            return samples, _readings_of(rows)
        n_disturbed = len(self.raw) - (least in clean)
        return Samples((least.seconds / factor,), n_disturbed), _readings_of([least])

    def _without_disturbances(self, slowdown: float) -> float:
        """Seconds of a call whose samples were all disturbed, by a `slowdown` while that lasts.

        Two estimates, or their mean: the least of the samples that were disturbed throughout; and
        the least of n others, which had a co-tenant at one end, for a part of their time that
        nobody knows. Where every part is as likely, the least one's is 1 / (n + 1). Beside
        simulated co-tenants that come and go in 5 ms to 5 s (calls of 5 to 25 ms) the mean errs by
        4 to 9 % (root mean square), 1 to 3 % long on average; the least of all over the slowdown by
        5 to 13 %, up to 7 % short.
        """
        # What counts as undisturbed was judged by a slow core.
        parts = [one.disturbed and not one.throughout for one in self.raw]
        throughout = [one.seconds for one, part in zip(self.raw, parts) if not part]
        partly = [one.seconds for one, part in zip(self.raw, parts) if part]
        found = [min(throughout) / slowdown] if throughout else []
        if partly:
            found.append(min(partly) / (1.0 + (slowdown - 1.0) / (len(partly) + 1)))
        return statistics.fmean(found)


def _readings_of(rows: Sequence[RawSample]) -> tuple[int, ...]:
    """The readings before these samples."""
    return tuple(one.reading for one in rows if one.reading is not None)


def _alike(known: Sequence[tuple[float, float]], seconds: float, most: int) -> list[float]:
    """The second numbers of the pairs whose first ones are nearest to `seconds` by ratio."""
    ordered = sorted(known, key=lambda pair: abs(math.log(pair[0] / seconds)))
    return [value for _, value in ordered[:most]]


def excess_of_few(known: Sequence[tuple[float, float]], seconds: float) -> float:
    """How many times the least of many samples that of few is, at this length of a call.

    >>> round(excess_of_few([(1e-5, 0.0)] * 25 + [(1e-3, 0.1)] * 25, 2e-3), 3)
    1.105
    """
    logs = _alike(known, max(seconds, 1e-9), _MOST_EXCESSES)
    return math.exp(max(0.0, statistics.fmean(logs))) if logs else 1.0

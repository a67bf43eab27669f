"""Times a group of kernels in passes that may lie minutes apart, one raw sample of each kernel in
each.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dlperf.core.clock import Clock, Sampler, Samples, counting
from dlperf.core.machine import Kernel
from dlperf.microbench.plan import Group, Point

_ONE_CALL_S = 0.005
"""A call that takes as long is a raw sample by itself, and sampled half as often."""
_MOST_TIMES = 2
_AGREE_FRAC = 0.02
_FIRST_EXTENSION, _EXTENSION = 1.0, 6.0
"""Longest extension of a kernel's first raw sample and of later ones, relative to its length: every
kernel is to be sampled at all, and beside a busy co-tenant a later pass finds the core undisturbed
more likely than the next milliseconds.
"""
_SAME_SPEED = 1.2
"""Least times of the core's work, relative to each other, that are of the same undisturbed core: on
AMD Zen 3 they are up to 1.18, beside a co-tenant on the same core 1.5 and more.
"""
_LEAST_ALIKE, _MOST_ALIKE = 5, 15
"""Kernels with undisturbed and disturbed parts that tell how much longer those took that were
disturbed from begin to end.
"""
_APART, _EXTRA = 25, 2
"""One of so many points of a group gets so many more samples in each pass: it tells by how much the
least of few samples exceeds that of many.
"""
_ELSEWHERE = 5
"""For how many points of a group those of all groups count together."""
_MOST_EXCESS = math.log(2.0)
"""Largest excess of one point, up or down, so that a single one decides little."""
_LEAST_POINTS = 12
"""Points of a group that are sampled however short the time is: a curve through fewer says nothing.
"""


@dataclass(frozen=True)
class Timed:
    """A group's kernels, what could not be called on its own, how many kernels have no undisturbed
    sample, and how many points there was no time for.
    """

    kernels: tuple[Kernel, ...] = ()
    refused: tuple[str, ...] = ()
    n_unsteady: int = 0
    n_left_out: int = 0


@dataclass(frozen=True)
class _Raw:
    """A raw sample: seconds a call, whether it was disturbed, the number of the machine's reading
    before it, the least time of the core's work, by which it was judged, and whether it is one more
    than a kernel gets in a pass.
    """

    seconds: float
    disturbed: bool
    reading: int | None
    best_s: float
    is_extra: bool = False


@dataclass
class _Taken:
    """Raw samples of one kernel, and the number of calls in one.

    `slowed_parts` has seconds of the disturbed parts of samples, and how many times the undisturbed
    ones of the same sample these are.
    """

    raw: list[_Raw] = field(default_factory=list)
    slowed_parts: list[tuple[float, float]] = field(default_factory=list)
    n_calls: int = 0
    is_long: bool = False

    def clean(self, best_s: float) -> list[_Raw]:
        """The undisturbed samples, where an undisturbed core does its work in `best_s`. What was
        judged by a much longer time was judged beside a co-tenant.
        """
        return [one for one in self.raw if not one.disturbed and one.best_s <= _SAME_SPEED * best_s]

    def wants(self, n_samples: int, best_s: float) -> bool:
        """Whether it is to be sampled again: `n_samples` times, half as often where a call takes
        long, and further while most are disturbed, but no more once the least undisturbed ones
        agree, half as many as samples are wanted.
        """
        usual = self.usual()
        clean_s = sorted(one.seconds for one in usual.clean(best_s))
        n_agreeing = max(2, n_samples // 2)
        if len(clean_s) >= n_agreeing and clean_s[n_agreeing - 1] <= (1 + _AGREE_FRAC) * clean_s[0]:
            return False
        n_wanted = math.ceil(n_samples / 2) if self.is_long else n_samples
        return len(usual.raw) < n_wanted or (
            len(usual.raw) < _MOST_TIMES * n_wanted and 2 * len(clean_s) < n_wanted
        )

    def usual(self) -> _Taken:
        """What a kernel has that gets one sample in a pass."""
        return replace(self, raw=[one for one in self.raw if not one.is_extra])

    def slowed(self, best_s: float) -> list[tuple[float, float]]:
        """Seconds when disturbed, and how many times the undisturbed ones these are: of parts of
        samples, and of the usual disturbed sample over the least undisturbed one.
        """
        slow_s = [one.seconds for one in self.raw if one.disturbed]
        least_s = min((one.seconds for one in self.clean(best_s)), default=0.0)
        if not slow_s or not least_s:
            return self.slowed_parts
        usual_s = statistics.median(slow_s)
        return [*self.slowed_parts, (usual_s, usual_s / least_s)]

    def result(
        self, best_s: float, slowed: Sequence[tuple[float, float]]
    ) -> tuple[Samples, tuple[int, ...]]:
        """The undisturbed samples and what is shorter than all of them, since disturbances only
        add, in the order taken, and the readings before them.

        Without any, an estimate: the median sample, of an even number the lower one, over the
        median slowdown of the kernels `slowed` that take about as long; all samples where too few
        kernels show one.
        """
        clean = self.clean(best_s)
        counts = counting([(one.seconds, one not in clean) for one in self.raw])
        rows = [one for one, counted in zip(self.raw, counts) if counted]
        samples = Samples(tuple(one.seconds for one in rows), len(self.raw) - len(rows))
        if not clean and len(slowed) >= _LEAST_ALIKE:
            usual = sorted(self.raw, key=lambda one: one.seconds)[(len(self.raw) - 1) // 2]
            if usual.seconds > 0:
                alike = sorted(slowed, key=lambda pair: abs(math.log(pair[0] / usual.seconds)))
                factor = statistics.median(factor for _, factor in alike[:_MOST_ALIKE])
                samples = Samples((usual.seconds / max(1.0, factor),), len(self.raw))
                rows = [usual]
        return samples, tuple(one.reading for one in rows if one.reading is not None)


@dataclass
class Timing:
    """A group of kernels being timed: :meth:`take` points until none is :attr:`lacking`, then read
    the :meth:`result`.

    Interference lasts from parts of a second to minutes, and the placement of operands in the
    caches matters; samples in a row share both. So a pass takes one sample of each kernel, in
    memory of its own, and passes are to be some time apart. `reading` returns the number of a
    present reading of the machine's state.
    """

    group: Group
    threads: int
    clock: Clock = field(default_factory=Clock)
    reading: Callable[[], int] | None = None
    _taken: dict[int, _Taken] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)
    _n_passes: int = 0
    _n_further: int = 0

    def extend(self, points: Sequence[Point]) -> None:
        """Add points for the passes to come, which do not count as left out."""
        self.group = replace(self.group, points=(*self.group.points, *points))
        self._n_further += len(points)

    def unsampled(self, most_rank: float = math.inf) -> list[int]:
        """Indices of the points without any sample, of those of a rank up to `most_rank`."""
        known = self._taken.keys() | self._refused.keys()
        return [
            index
            for index, point in enumerate(self.group.points)
            if point.rank <= most_rank and index not in known
        ]

    @property
    def lacking(self) -> list[int]:
        """Indices of the points without any sample, and of those that want more."""
        if self._n_passes >= _MOST_TIMES * self.group.repeats.n_samples:
            return []  # what there is no memory for any more would be wanted for ever
        best_s = self.clock.best_s()
        return self.unsampled() + [
            index
            for index, taken in self._taken.items()
            if taken.wants(self.group.repeats.n_samples, best_s)
        ]

    @property
    def unsteady(self) -> list[int]:
        """Indices of the points with samples, none of them undisturbed."""
        best_s = self.clock.best_s()
        return [index for index, taken in self._taken.items() if not taken.clean(best_s)]

    def excesses(self, elsewhere: Sequence[tuple[float, float]] = ()) -> list[float]:
        """Logarithms of how many times the least of all samples that of the usual ones is, of each
        point with more samples.
        """
        best_s, slowed = self.clock.best_s(), self._slowed_with(elsewhere)
        found = []
        for taken in self._taken.values():
            usual = taken.usual()
            if usual.raw and len(usual.raw) < len(taken.raw):
                least_s, usual_s = (one.result(best_s, slowed)[0].minimum for one in (taken, usual))
                if least_s > 0:
                    excess = math.log(usual_s / least_s)
                    found.append(max(-_MOST_EXCESS, min(_MOST_EXCESS, excess)))
        return found

    @property
    def slowed(self) -> list[tuple[float, float]]:
        """Seconds of disturbed calls, and how many times the undisturbed ones these are."""
        best_s = self.clock.best_s()
        return [pair for taken in self._taken.values() for pair in taken.slowed(best_s)]

    def take(
        self, indices: Sequence[int], progress: Callable[[int], None], allowance_s: float = math.inf
    ) -> None:
        """A sample of each of these points, in about `allowance_s` at most. `progress` is told of
        each that is done.
        """

        best_s = self.clock.best_s()

        def urgency(index: int) -> tuple[int, int]:
            n_clean = len(self._taken[index].clean(best_s)) if index in self._taken else 0
            return n_clean, self.group.points[index].rank

        order = list(indices)
        shuffled = random.Random(self._n_passes)
        shuffled.shuffle(order)  # any part of a rank covers its space
        order.sort(key=urgency)  # those without an undisturbed sample first
        samples = [(float(place), index, False) for place, index in enumerate(order)]
        samples += [
            (shuffled.uniform(place, len(order)), index, True)
            for place, index in enumerate(order)
            if index % _APART == _APART // 2
            for _ in range(_EXTRA)
        ]
        self._n_passes += 1
        begin = self.clock.now()
        for _, index, is_extra in sorted(samples):
            if len(self._taken) >= _LEAST_POINTS and self.clock.now() - begin > allowance_s:
                return
            self._sample(index, is_extra)
            progress(not is_extra)

    def _sample(self, index: int, is_extra: bool) -> None:
        from dlperf.microbench.operator_benchmark import Unplayable, build

        reading = None if self.reading is None else self.reading()  # it touches all caches
        try:
            call = build(self.group.points[index].op)
        except (Unplayable, MemoryError) as error:
            if index not in self._taken:
                self._refused[index] = str(error)
            return
        taken = self._taken.setdefault(index, _Taken())
        begin = self.clock.now()
        # in every pass: the memory is new, and what a library made for this shape and kept may be
        # gone since
        call()
        repeats, call_s = replace(self.group.repeats, n_samples=1), self.clock.now() - begin
        if not taken.n_calls:
            taken.is_long = call_s >= _ONE_CALL_S
            n_calls = math.ceil(repeats.sample_s / call_s) if call_s > 0 else repeats.max_calls
            taken.n_calls = 1 if taken.is_long else min(n_calls, repeats.max_calls)
        # The next pass is soon enough: nothing waits here.
        clock = replace(self.clock, back_off=None)
        sampler = Sampler(call, repeats, clock, taken.n_calls)
        sampler.take(_EXTENSION if taken.raw else _FIRST_EXTENSION)
        best_s = self.clock.best_s()
        taken.raw += [_Raw(*pair, reading, best_s, is_extra) for pair in sampler.pairs]
        taken.slowed_parts += sampler.slowed

    def _slowed_with(self, elsewhere: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The slowdowns of the group's kernels, with those elsewhere where these are too few."""
        slowed = self.slowed
        return slowed if len(slowed) >= _LEAST_ALIKE else [*slowed, *elsewhere]

    def result(
        self, elsewhere: Sequence[tuple[float, float]] = (), excesses: Sequence[float] = ()
    ) -> Timed:
        """What the passes so far found: the undisturbed samples of each kernel, or an estimate for
        one that has none, by the slowdowns of the group's kernels, or those `elsewhere` where these
        are too few.

        They are divided by the mean excess of the least of few samples over that of many
        (:meth:`excesses`), of the group and of all groups. A kernel with more samples has none.
        """
        best_s, slowed = self.clock.best_s(), self._slowed_with(elsewhere)
        own = self.excesses(elsewhere)
        known = [*own, *[statistics.fmean(excesses)] * _ELSEWHERE] if excesses else own
        excess = math.exp(max(0.0, statistics.fmean(known))) if known else 1.0
        kernels = []
        for index, taken in sorted(self._taken.items()):
            point = self.group.points[index]
            samples, readings = taken.result(best_s, slowed)
            if not any(one.is_extra for one in taken.raw):
                samples = samples.minus(0.0, excess)
            kernels.append(Kernel(point.op, point.family, self.threads, samples, readings))
        n_planned = len(self.group.points) - self._n_further
        return Timed(
            tuple(kernels),
            tuple(self._refused.values()),
            len(self.unsteady),
            sum(index < n_planned for index in self.unsampled()),
        )


def time_group(
    group: Group, threads: int, progress: Callable[[int], None], clock: Clock = Clock()
) -> Timed:
    """All passes over a group, one after the other."""
    timing = Timing(group, threads, clock)
    timing.take(timing.lacking, progress)
    while indices := timing.lacking:
        timing.take(indices, lambda _: None)
    return timing.result()

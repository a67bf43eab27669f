"""Times a group of kernels in passes that may lie minutes apart, one raw sample of each kernel in
each.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dlperf.core.clock import MAX_EXTENSION, Clock, Sampler, Samples, undisturbed
from dlperf.core.machine import Kernel
from dlperf.microbench.plan import Group, Point

_ONE_CALL_S = 0.005
"""A call that takes as long is a raw sample by itself, and sampled half as often."""
_MOST_TIMES = 2
_AGREE_FRAC = 0.02
_LEAST_ALIKE, _MOST_ALIKE = 5, 15
"""Kernels with samples of both kinds that tell how much longer those took that were disturbed from
begin to end.
"""
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


@dataclass
class _Taken:
    """Raw samples of one kernel, each with whether it was disturbed and the number of the machine's
    reading before it, and the number of calls in one.
    """

    pairs: list[tuple[float, bool]] = field(default_factory=list)
    readings: list[int] = field(default_factory=list)
    n_calls: int = 0
    is_long: bool = False

    @property
    def clean(self) -> list[float]:
        return sorted(value for value, disturbed in self.pairs if not disturbed)

    def wants(self, n_samples: int) -> bool:
        """Whether it is to be sampled again: `n_samples` times, half as often where a call takes
        long, and further while most are disturbed, but no more once the least undisturbed ones
        agree, half as many as samples are wanted.
        """
        clean, n_agreeing = self.clean, max(2, n_samples // 2)
        if len(clean) >= n_agreeing and clean[n_agreeing - 1] <= (1 + _AGREE_FRAC) * clean[0]:
            return False
        n_wanted = math.ceil(n_samples / 2) if self.is_long else n_samples
        return len(self.pairs) < n_wanted or (
            len(self.pairs) < _MOST_TIMES * n_wanted and 2 * len(clean) < n_wanted
        )

    def readings_of(self, samples: Samples) -> tuple[int, ...]:
        """The readings before the undisturbed samples; where there are none, before all, or that of
        the median one, of which an estimate was made.
        """
        rows = list(zip(self.readings, self.pairs))
        clean = [reading for reading, (_, disturbed) in rows if not disturbed]
        if clean or len(samples.values) == len(self.pairs):
            return tuple(clean or self.readings)
        by_time = sorted((value, reading) for reading, (value, _) in rows)
        return tuple(reading for _, reading in by_time[len(by_time) // 2 :][:1])

    @property
    def slowed(self) -> tuple[float, float] | None:
        """Seconds of the usual disturbed sample, and how many times the least undisturbed one that
        is; None without samples of both kinds.
        """
        clean, slow = self.clean, [value for value, disturbed in self.pairs if disturbed]
        if not clean or not slow or clean[0] == 0:
            return None
        usual_s = statistics.median(slow)
        return usual_s, usual_s / clean[0]


def _without(taken: _Taken, slowed: Sequence[tuple[float, float]]) -> Samples:
    """An estimate for a kernel without undisturbed samples: its median over the median slowdown of
    kernels of the group that take about as long; its samples unchanged where too few kernels show
    one.
    """
    values = [value for value, _ in taken.pairs]
    usual_s = statistics.median(values)
    if len(slowed) < _LEAST_ALIKE or usual_s == 0:
        return Samples(tuple(values))
    alike = sorted(slowed, key=lambda pair: abs(math.log(pair[0] / usual_s)))[:_MOST_ALIKE]
    return Samples(
        (usual_s / max(1.0, statistics.median(factor for _, factor in alike)),), len(values)
    )


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
        return self.unsampled() + [
            index
            for index, taken in self._taken.items()
            if taken.wants(self.group.repeats.n_samples)
        ]

    def take(
        self, indices: Sequence[int], progress: Callable[[int], None], allowance_s: float = math.inf
    ) -> None:
        """A sample of each of these points, in about `allowance_s` at most. `progress` is told of
        each that is done.
        """

        def urgency(index: int) -> tuple[int, int]:
            n_clean = len(self._taken[index].clean) if index in self._taken else 0
            return n_clean, self.group.points[index].rank

        order = list(indices)
        random.Random(self._n_passes).shuffle(order)  # any part of a rank covers its space
        order.sort(key=urgency)  # those without an undisturbed sample first
        self._n_passes += 1
        begin = self.clock.now()
        for index in order:
            if len(self._taken) >= _LEAST_POINTS and self.clock.now() - begin > allowance_s:
                return
            self._sample(index)
            progress(1)

    def _sample(self, index: int) -> None:
        from dlperf.microbench.operator_benchmark import Unplayable, build

        reading = [] if self.reading is None else [self.reading()]  # it touches all caches
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
        if not taken.n_calls:
            taken.is_long = self.clock.now() - begin >= _ONE_CALL_S
        n_calls = 1 if taken.is_long else taken.n_calls
        sampler = Sampler(
            call,
            replace(self.group.repeats, n_samples=1),
            replace(self.clock, back_off=None),
            n_calls,
        )  # the next pass is soon enough
        sampler.take(
            MAX_EXTENSION if taken.pairs else 0.0
        )  # at first every kernel is to be sampled at all
        taken.n_calls = sampler.n_calls
        taken.pairs += sampler.pairs
        taken.readings += reading * len(sampler.pairs)

    def result(self) -> Timed:
        """What the passes so far found: the undisturbed samples of each kernel, or what
        :func:`_without` makes of one that has none.
        """
        slowed = [pair for taken in self._taken.values() if (pair := taken.slowed) is not None]
        kernels = []
        for index, taken in sorted(self._taken.items()):
            point = self.group.points[index]
            samples = (
                undisturbed(taken.pairs, least_frac=0.0) if taken.clean else _without(taken, slowed)
            )
            kernels.append(
                Kernel(point.op, point.family, self.threads, samples, taken.readings_of(samples))
            )
        n_planned = len(self.group.points) - self._n_further
        return Timed(
            tuple(kernels),
            tuple(self._refused.values()),
            sum(not taken.clean for taken in self._taken.values()),
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

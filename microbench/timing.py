"""Times a group of kernels in passes that may lie minutes apart, each a few raw samples of each
kernel.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dlperf.core.clock import Clock, Sampler
from dlperf.core.machine import Kernel
from dlperf.core.state_probe import ParallelRegion
from dlperf.microbench.kernel_samples import (
    LEAST_ALIKE,
    MOST_TIMES,
    KernelSamples,
    RawSample,
    excess_of_few,
)
from dlperf.microbench.plan import Group, Point

_ONE_CALL_S = 0.005
"""A call that takes as long is a raw sample by itself, and sampled half as often."""
_EXTENSION = 1.0
"""Longest extension of a raw sample, relative to its length: beside a busy co-tenant a later round
finds the core undisturbed more likely than the next milliseconds.
"""
_ROUNDS, _TOGETHER, _TOGETHER_BYTES = 3, 100, 2**28
"""Raw samples of a kernel in a pass, in turns with those of so many others or of so many bytes:
making a kernel's tensors takes longer than a sample.
"""
_WARM_CALLS, _SHORTER = 5, 0.97
"""Calls before a sample, at most, and the part of the time before by which one gets shorter: what a
shared cache holds it got from the cores' own, over several calls (AMD Zen 4, operands of 11 MiB
that come from DRAM: 1.20, 0.68, 0.53, 0.43, 0.37, 0.36 ms).
"""
_LEAST_ROUND_S = 0.03
"""Length of a round below which the next one would meet the same interference: then a pass has one.
"""
_REGIONS = 3, 6
"""Parallel regions before and after a sample: those that wake the team, and those that count."""
_APART, _EXTRA = 25, 2
"""One of so many points of a group gets so many more samples in each pass: it tells by how much the
least of few samples exceeds that of many.
"""
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
class _Call:
    """A call of the point `index`, whose tensors take `n_bytes`."""

    index: int
    call: Callable[[], object]
    n_bytes: int
    is_extra: bool


@dataclass
class Timing:
    """A group of kernels being timed: :meth:`take` points until none is :attr:`lacking`, then read
    the :meth:`result`.

    Interference lasts from parts of a second to minutes, and the placement of operands in the
    caches matters; samples in a row share both. So a pass takes a few samples of each kernel, each
    after those of others, in memory of its own, and passes are to be some time apart. `reading`
    returns the number of a present reading of the machine's state. With several threads `region`
    tells at each sample how far apart their cores are.
    """

    group: Group
    threads: int
    clock: Clock = field(default_factory=Clock)
    reading: Callable[[], int] | None = None
    region: ParallelRegion | None = None
    _taken: dict[int, KernelSamples] = field(default_factory=dict)
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
        if self._n_passes >= MOST_TIMES * self.group.repeats.n_samples:
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

    def excesses(self, elsewhere: Sequence[tuple[float, float]] = ()) -> list[tuple[float, float]]:
        """Seconds of each point with more samples, and the logarithm of how many times the least of
        all samples that of the usual ones is.
        """
        best_s, slowed = self.clock.best_s(), self._slowed_with(elsewhere)
        region_s, found = self._least_region_s, []
        for taken in self._taken.values():
            usual = taken.usual()
            if usual.raw and len(usual.raw) < len(taken.raw):
                least_s, usual_s = (
                    one.result(best_s, slowed, region_s)[0].minimum for one in (taken, usual)
                )
                if least_s > 0:
                    excess = math.log(usual_s / least_s)
                    found.append((least_s, max(-_MOST_EXCESS, min(_MOST_EXCESS, excess))))
        return found

    @property
    def slowed(self) -> list[tuple[float, float]]:
        """Seconds of disturbed calls, and how many times the undisturbed ones these are."""
        best_s = self.clock.best_s()
        return [pair for taken in self._taken.values() for pair in taken.slowed(best_s)]

    @property
    def responses(self) -> list[tuple[float, float]]:
        """Seconds of kernels that were sampled with cores near each other and far apart, and by
        which part they take longer where a parallel region takes twice as long.
        """
        best_s, region_s = self.clock.best_s(), self._least_region_s
        found = [
            (taken.least_s(best_s), taken.core_to_core(best_s, region_s))
            for taken in self._taken.values()
        ]
        return [(seconds, part) for seconds, part in found if seconds and part is not None]

    @property
    def _least_region_s(self) -> float:
        return 0.0 if self.region is None else self.region.least_s

    def _region_s(self) -> float:
        """Seconds of a parallel region now, 0 of one thread."""
        return 0.0 if self.region is None else self.region.seconds(*_REGIONS)

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
        visits = [(float(place), index, False) for place, index in enumerate(order)]
        visits += [
            (shuffled.uniform(place, len(order)), index, True)
            for place, index in enumerate(order)
            if index % _APART == _APART // 2
            for _ in range(_EXTRA)
        ]
        self._n_passes += 1
        begin, together, n_bytes = self.clock.now(), list[_Call](), 0
        round_s = 2 * self.group.repeats.sample_s * min(len(visits), _TOGETHER)
        n_rounds = _ROUNDS if round_s >= _LEAST_ROUND_S else 1
        each_s = 2 * n_rounds * self.group.repeats.sample_s
        for _, index, is_extra in sorted(visits):
            ahead_s = self.clock.now() - begin + each_s * len(together)
            if len(self._taken) >= _LEAST_POINTS and ahead_s > allowance_s:
                break
            reading = self._read()
            made = self._made(index, is_extra)
            progress(not is_extra)
            if made is None:
                continue
            if self._taken[index].is_long:
                self._sample(made, reading)
                continue
            together.append(made)
            n_bytes += made.n_bytes
            if len(together) == _TOGETHER or n_bytes >= _TOGETHER_BYTES:
                self._sample_in_turns(together, n_rounds)
                together, n_bytes = [], 0
        self._sample_in_turns(together, n_rounds)

    def _made(self, index: int, is_extra: bool) -> _Call | None:
        """A warm call of a point, the number of calls in a raw sample known; None if refused."""
        from dlperf.microbench.operator_benchmark import Unplayable, build

        op = self.group.points[index].op
        try:
            call = build(op)
        except (Unplayable, MemoryError) as error:
            if index not in self._taken:
                self._refused[index] = str(error)
            return None
        taken = self._taken.setdefault(index, KernelSamples())
        if not taken.n_calls:
            begin = self.clock.now()
            call()
            repeats, call_s = self.group.repeats, self.clock.now() - begin
            taken.is_long = call_s >= _ONE_CALL_S
            n_calls = math.ceil(repeats.sample_s / call_s) if call_s > 0 else repeats.max_calls
            taken.n_calls = 1 if taken.is_long else min(n_calls, repeats.max_calls)
        return _Call(index, call, sum(one.nbytes for one in op.inputs), is_extra)

    def _sample_in_turns(self, calls: Sequence[_Call], n_rounds: int) -> None:
        """Rounds of a raw sample of each call, of those that want one."""
        n_samples, best_s = self.group.repeats.n_samples, self.clock.best_s()
        for _ in range(n_rounds):
            for one in calls:
                taken = self._taken[one.index]
                if not one.is_extra and (
                    taken.is_sure(self._n_passes, best_s) or not taken.wants(n_samples, best_s)
                ):
                    continue
                reading = self._read()
                self._warm_up(one.call)
                self._sample(one, reading)

    def _warm_up(self, call: Callable[[], object]) -> None:
        """Call until that gets no shorter: the operands may have left the caches, and what a
        library made for them.
        """
        last_s = math.inf
        for _ in range(_WARM_CALLS):
            begin = self.clock.now()
            call()
            seconds = self.clock.now() - begin
            if seconds > _SHORTER * last_s:
                return
            last_s = seconds

    def _read(self) -> int | None:
        """The number of a present reading of the machine's state, which touches all caches."""
        return None if self.reading is None else self.reading()

    def _sample(self, made: _Call, reading: int | None) -> None:
        """A raw sample."""
        taken = self._taken[made.index]
        # The next round is soon enough: nothing waits here.
        clock = replace(self.clock, back_off=None)
        sampler = Sampler(made.call, replace(self.group.repeats, n_samples=1), clock, taken.n_calls)
        before_s = self._region_s()
        sampler.take(_EXTENSION)
        best_s, regions_s = self.clock.best_s(), (before_s, self._region_s())
        throughout = bool(sampler.slow_s)  # what counts where no part was undisturbed
        taken.raw += [
            RawSample(*pair, reading, best_s, self._n_passes, made.is_extra, regions_s, throughout)
            for pair in sampler.pairs
        ]
        taken.slowed_parts += sampler.slowed
        taken.slow_s += sampler.slow_s

    def _slowed_with(self, elsewhere: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        """The slowdowns of the group's kernels, with those elsewhere where these are too few."""
        slowed = self.slowed
        return slowed if len(slowed) >= LEAST_ALIKE else [*slowed, *elsewhere]

    def result(
        self,
        elsewhere: Sequence[tuple[float, float]] = (),
        excesses: Sequence[tuple[float, float]] = (),
        responses: Sequence[tuple[float, float]] = (),
    ) -> Timed:
        """What the passes so far found: the undisturbed samples of each kernel, or an estimate for
        one that has none, by the slowdowns of the group's kernels, or those `elsewhere` where these
        are too few.

        They are divided by the mean excess of the least of few samples over that of many, of the
        kernels of all groups that take about as long (`excesses`, by default the group's own). A
        kernel with more samples has none.
        """
        best_s, slowed = self.clock.best_s(), self._slowed_with(elsewhere)
        known, region_s = excesses or self.excesses(elsewhere), self._least_region_s
        own = self.responses
        responses = own if len(own) >= LEAST_ALIKE else [*own, *responses]
        kernels = []
        for index, taken in sorted(self._taken.items()):
            point = self.group.points[index]
            samples, readings = taken.result(best_s, slowed, region_s, responses)
            if not any(one.is_extra for one in taken.raw):
                samples = samples.minus(0.0, excess_of_few(known, samples.minimum))
            kernels.append(
                Kernel(
                    point.op,
                    point.family,
                    self.threads,
                    samples,
                    readings,
                    shared_core=taken.shared_core(best_s),
                    core_to_core=taken.core_to_core(best_s, region_s),
                )
            )
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

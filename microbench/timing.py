"""Times a group of kernels in passes that may lie minutes apart, one raw sample of each kernel in each."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dlperf.clock import Clock, Sampler, undisturbed
from dlperf.machine import Kernel
from microbench.plan import Group

_LONG_CALL_S = 0.005
_MOST_TIMES = 2
_LEAST_POINTS = 12
"""Points of a group that are sampled however short the time is: a curve through fewer says nothing."""


@dataclass(frozen=True)
class Timed:
    """A group's kernels, what could not be called on its own, how many kernels have no undisturbed sample, how many points there was no time for,
    and, of each kernel, the median and the mean of all its raw samples in seconds, disturbed ones included."""

    kernels: tuple[Kernel, ...] = ()
    refused: tuple[str, ...] = ()
    n_unsteady: int = 0
    n_left_out: int = 0
    usual_s: tuple[float, ...] = ()
    mean_s: tuple[float, ...] = ()


@dataclass
class _Taken:
    """Raw samples of one kernel, each with whether it was disturbed, and the number of calls in one."""

    pairs: list[tuple[float, bool]] = field(default_factory=list)
    n_calls: int = 0
    is_long: bool = False

    @property
    def n_clean(self) -> int:
        return sum(not disturbed for _, disturbed in self.pairs)

    def wants(self, n_samples: int) -> bool:
        """Whether it is to be sampled again: `n_samples` times, half as often where a call takes long, and further while most are disturbed."""
        n_wanted = math.ceil(n_samples / 2) if self.is_long else n_samples
        return len(self.pairs) < n_wanted or (len(self.pairs) < _MOST_TIMES * n_wanted and 2 * self.n_clean < n_wanted)


@dataclass
class Timing:
    """A group of kernels being timed: call :meth:`take` until nothing is :attr:`lacking`, then ask for the :meth:`result`.

    A neighbour on the same core slows it down for parts of a second to minutes, and the place of the operands in the caches matters, too: samples taken
    in a row share both. So a pass takes one sample of each kernel, in memory of its own, and the passes are to be some time apart.
    """

    group: Group
    threads: int
    clock: Clock = field(default_factory=Clock)
    _taken: dict[int, _Taken] = field(default_factory=dict)
    _refused: dict[int, str] = field(default_factory=dict)
    _n_passes: int = 0

    @property
    def lacking(self) -> Sequence[int]:
        """Places of the points that the next pass takes: all of them at first, later those of the first that want more samples."""
        if self._n_passes == 0:
            return range(len(self.group.points))
        if self._n_passes >= _MOST_TIMES * self.group.repeats.n_samples:
            return ()  # what there is no memory for any more would be wanted for ever
        return [place for place, taken in self._taken.items() if taken.wants(self.group.repeats.n_samples)]

    def take(self, progress: Callable[[int], None], allowance_s: float = math.inf) -> None:
        """The next pass, in about `allowance_s` at most. `progress` is told of each point that is done."""
        order = list(self.lacking)
        random.Random(self._n_passes).shuffle(order)  # any part of a rank covers its space
        order.sort(key=lambda place: self.group.points[place].rank)
        self._n_passes += 1
        begin = self.clock.now()
        for place in order:
            if len(self._taken) >= _LEAST_POINTS and self.clock.now() - begin > allowance_s:
                return
            self._sample(place)
            progress(1)

    def _sample(self, place: int) -> None:
        from microbench.replay import Unplayable, build

        try:
            call = build(self.group.points[place].op)
        except (Unplayable, MemoryError) as error:
            if place not in self._taken:
                self._refused[place] = str(error)
            return
        taken = self._taken.setdefault(place, _Taken())
        begin = self.clock.now()
        call()
        taken.is_long = taken.is_long or self.clock.now() - begin >= _LONG_CALL_S
        n_calls = 1 if taken.is_long else taken.n_calls
        sampler = Sampler(call, replace(self.group.repeats, n_samples=1), replace(self.clock, rest=None), n_calls)  # the next pass is soon enough
        sampler.take()
        taken.n_calls = sampler.n_calls
        taken.pairs += sampler.pairs

    def result(self) -> Timed:
        """What the passes so far found: the undisturbed samples of each kernel, or all of one that has none."""
        kernels, n_unsteady = [], 0
        for place, taken in sorted(self._taken.items()):
            point = self.group.points[place]
            kernels.append(Kernel(point.op, point.family, self.threads, undisturbed(taken.pairs, least_frac=0.0)))
            n_unsteady += not taken.n_clean
        raw = [[value for value, _ in self._taken[place].pairs] for place in sorted(self._taken)]
        return Timed(
            tuple(kernels), tuple(self._refused.values()), n_unsteady, len(self.group.points) - len(kernels) - len(self._refused),
            tuple(map(statistics.median, raw)), tuple(map(statistics.fmean, raw)),
        )  # fmt: skip


def time_group(group: Group, threads: int, progress: Callable[[int], None], clock: Clock = Clock()) -> Timed:
    """All passes over a group, one after the other."""
    timing = Timing(group, threads, clock)
    timing.take(progress)
    while timing.lacking:
        timing.take(lambda _: None)
    return timing.result()

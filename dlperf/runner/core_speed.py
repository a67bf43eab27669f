"""Core speed while a training is watched, and its usual value.

Co-tenants slow a core down for seconds (:class:`dlperf.core.clock.CoreSpeed`): a few steps meet one
state of it, an epoch several. A speed sample is a fixed piece of work, some 60 us in all, at the
start of the program, after the import of torch, and after each watched step.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core import host
from dlperf.core.clock import CoreSpeed
from dlperf.core.costs import CORE_SPEED
from dlperf.core.machine import Machine
from dlperf.core.variation import Z90, initial_state_frac, machine_log_sigma

_ELASTICITY = 0.65
# Beside a co-tenant, steps of two convolutional networks took 1.28 and 1.38 times as long where the
# piece of work took 1.5 times as long: ln 1.28 / ln 1.5 = 0.61, ln 1.38 / ln 1.5 = 0.79. Nearly the
# lower one: a correction that is too large errs on both sides.
_SLOW = 1.25  # up to which a step counts as undisturbed
_FILE_SECONDS = 2.0  # the weight of the machine file's usual speed, in seconds with a sample
_UNSURE_FRAC = 0.5
# Half of a 90 % interval for 20 s of steps, over the usual slowdown beyond the best: 0.17 of 0.24
# and 0.16 of 0.32 in two such series, rounded down since the file's spread is added.
_REPETITIONS = 4


def is_traced() -> bool:
    """Whether a tracer or profiler of this thread (coverage, a debugger) slows Python code down."""
    return sys.gettrace() is not None or sys.getprofile() is not None


@dataclass(frozen=True)
class UsualSpeed:
    """The core speed in a machine file.

    `best_s`: the least time of the piece of work. `slowdown`: the mean slowdown of the core, None
    where the file has no readings. `sigma`: its standard deviation.
    """

    best_s: float = math.inf
    slowdown: float | None = None
    sigma: float = 0.0


def usual_speed(machine: Machine, threads: int) -> UsualSpeed:
    """The core speed in a machine's file."""
    best_s = machine.cost_value(CORE_SPEED, threads, math.inf)
    if not machine.states:
        return UsualSpeed(best_s)
    slowdown = machine.usual_state.core * machine.mean_slowdown
    return UsualSpeed(best_s, slowdown, machine_log_sigma(machine))


def own_usual_speed(machine: Machine | None, threads: int) -> UsualSpeed:
    """The core speed in the machine file; unknown where it is of another machine or torch."""
    from dlperf.core.machine_doubts import find_mismatches

    if machine is None or find_mismatches(machine, host.this_cpu(), host.versions()):
        return UsualSpeed()
    return usual_speed(machine, threads)


def slowdown(ratio: float) -> float:
    """Slowdown of a step where the piece of work takes `ratio` times its best: ratio ** 0.65.

    It is 1 up to 1.25.

    >>> slowdown(1.2), round(slowdown(1.5), 2)
    (1.0, 1.3)
    """
    return ratio**_ELASTICITY if ratio > _SLOW else 1.0


@dataclass(frozen=True)
class CoreState:
    """Slowdown of the core while steps were watched, and its usual one.

    `half_frac`: half the width of a 90 % interval of the usual one, given the watched one.
    """

    slowdown: float = 1.0
    usual: float = 1.0
    half_frac: float = 0.0

    def factor(self, seconds: float) -> float:
        """Mean time of a step over the next `seconds`, over that of the watched steps.

        The present state lasts a while (:func:`dlperf.core.variation.initial_state_frac`); then the
        usual one follows.

        >>> state = CoreState(slowdown=1.5, usual=1.2)
        >>> state.factor(0.0), round(state.factor(1e9), 6)
        (1.0, 0.8)
        """
        stays = initial_state_frac(seconds)
        return (stays * self.slowdown + (1.0 - stays) * self.usual) / self.slowdown


class SpeedSamples:
    """Samples of the core speed: seconds of a fixed piece of work, each with its time."""

    def __init__(self, speed: CoreSpeed | None = None) -> None:
        self._speed = CoreSpeed() if speed is None else speed
        self._taken: list[tuple[float, float]] = []

    def take(self) -> float:
        """Take a sample: the least of some repetitions, the first of which meets cold caches."""
        took = min(self._speed.sample() for _ in range(_REPETITIONS))
        self._taken.append((self._speed.now(), took))
        return took

    def core_state(self, watched: Sequence[float], usual: UsualSpeed = UsualSpeed()) -> CoreState:
        """The state in the `watched` samples, and the usual one.

        The usual slowdown is the mean over the seconds of this run that have a sample, and over the
        machine file's.
        """
        if not watched:
            return CoreState()
        best_s = min(usual.best_s, min(took for _, took in self._taken))
        seconds: dict[int, list[float]] = defaultdict(list)
        for at, took in self._taken:
            seconds[math.floor(at)].append(slowdown(took / best_s))
        seen = [statistics.fmean(factors) for factors in seconds.values()]
        in_file = 1.0 if usual.slowdown is None else usual.slowdown
        weight = 0.0 if usual.slowdown is None else _FILE_SECONDS
        mean = (weight * in_file + math.fsum(seen)) / (weight + len(seen))
        half_frac = math.hypot(Z90 * usual.sigma, _UNSURE_FRAC * (max(in_file, mean) - 1.0))
        return CoreState(
            statistics.fmean(slowdown(took / best_s) for took in watched), mean, half_frac
        )

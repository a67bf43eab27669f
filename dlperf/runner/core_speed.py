"""How fast the core is while a training is watched, and how fast it usually is.

Neighbours slow a core down for seconds at a stretch (:class:`dlperf.core.clock.CoreSpeed`), so a few
steps see one state of it, and an epoch several. SpeedSamples are cheap: a fixed piece of work, some 60 us
in all, at the start of the program, when torch has been imported, and after each watched step.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core.clock import SLOW, CoreSpeed
from dlperf.core.machine import CONTENTION, CORE_SPEED, Machine
from dlperf.core.variation import Z90, initial_state_frac, machine_log_sigma

_ELASTICITY = 0.65
"""On a core whose neighbour came and went, steps of two convolutional networks took 1.28 and 1.38
times as long where the piece of work took 1.5 times as long: ln 1.28 / ln 1.5 = 0.61, ln 1.38 / ln
1.5 = 0.79. The lower of them, nearly: a correction that goes too far errs on both sides.
"""
_FILE_SECONDS = 2.0
"""What the machine file says of the usual speed weighs as much as so many seconds with a look."""
_UNSURE_FRAC = 0.5
"""By so much of what things usually take beyond the best may 20 s of steps differ from the usual
(90 %): 0.17 of 0.24 and 0.16 of 0.32 in two such series, rounded down as the file's spread is
added.
"""
_GOES = 4


@dataclass(frozen=True)
class UsualSpeed:
    """What a machine file says of its machine's speed: the least time of the piece of work, how many
    times as long as at best things usually took while it was measured, and the standard deviation
    of that over the groups, some seconds each.
    """

    best_s: float = math.inf
    slowdown: float | None = None
    sigma: float = 0.0


def usual_speed(machine: Machine, threads: int) -> UsualSpeed:
    """The speed of a machine as its file has it."""
    best_s = machine.cost_s(CORE_SPEED, threads, math.inf)
    if not any(cost.name.startswith(f"{CONTENTION}/") for cost in machine.costs):
        return UsualSpeed(best_s)
    return UsualSpeed(
        best_s,
        machine.contention_slowdown(threads) * machine.mean_slowdown(threads),
        machine_log_sigma(machine, threads),
    )


def slowdown(ratio: float) -> float:
    """How many times as long a step takes where the piece of work takes `ratio` times its best; 1
    up to :data:`dlperf.core.clock.SLOW`.

    >>> slowdown(1.2), round(slowdown(1.5), 2)
    (1.0, 1.3)
    """
    return ratio**_ELASTICITY if ratio > SLOW else 1.0


@dataclass(frozen=True)
class CoreState:
    """How slow the core was while steps were watched, and how slow it usually is, as factors over
    its best; `half_frac` is half the width of a 90 % interval for what the former says of the
    latter.
    """

    slowed: float = 1.0
    usual: float = 1.0
    half_frac: float = 0.0

    def factor(self, seconds: float) -> float:
        """How many times as long as when they were watched steps will take over the next `seconds`.

        The state of the core lasts a while (:func:`dlperf.core.variation.initial_state_frac`), then it
        is the usual one.

        >>> CoreState(slowed=1.5, usual=1.2).factor(0.0), round(CoreState(slowed=1.5, usual=1.2).factor(1e9), 6)
        (1.0, 0.8)
        """
        stays = initial_state_frac(seconds)
        return (stays * self.slowed + (1.0 - stays) * self.usual) / self.slowed


class SpeedSamples:
    """Speed samples of the core, in seconds of a fixed piece of work, each with its time."""

    def __init__(self, speed: CoreSpeed | None = None) -> None:
        self._speed = CoreSpeed() if speed is None else speed
        self._taken: list[tuple[float, float]] = []

    def take(self) -> float:
        """Look; the least that the piece of work took. The first go after other code meets cold
        caches, and what costs one go time is no state of the core.
        """
        took = min(self._speed.sample() for _ in range(_GOES))
        self._taken.append((self._speed.now(), took))
        return took

    def moment(self, watched: Sequence[float], usual: UsualSpeed = UsualSpeed()) -> CoreState:
        """The state during the `watched` looks, beside the usual one: what all looks of this run
        say, a second each, and the machine file.
        """
        if not watched:
            return CoreState()
        best_s = min(usual.best_s, min(took for _, took in self._taken))
        seconds: dict[int, list[float]] = defaultdict(list)
        for at, took in self._taken:
            seconds[math.floor(at)].append(slowdown(took / best_s))
        seen = [statistics.fmean(factors) for factors in seconds.values()]
        weight = _FILE_SECONDS if usual.slowdown is not None else 0.0
        usually = (weight * (usual.slowdown or 1.0) + math.fsum(seen)) / (weight + len(seen))
        slowed = statistics.fmean(slowdown(took / best_s) for took in watched)
        beyond = max(usual.slowdown or 1.0, usually) - 1.0
        return CoreState(slowed, usually, math.hypot(Z90 * usual.sigma, _UNSURE_FRAC * beyond))

"""The speed of the core while steps are watched, and forecasts of trainings whose speed is that of a
noisy machine: all on a clock held in the hand.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterator

import pytest

from dlperf.core.clock import Clock, CoreSpeed, Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Cpu, Machine
from dlperf.core.state import Reading
from dlperf.core.variation import log_sigma
from dlperf.runner.core_speed import (
    CoreState,
    SpeedSamples,
    UsualSpeed,
    is_traced,
    slowdown,
    usual_speed,
)
from dlperf.runner.epoch_log import EpochLog
from dlperf.runner.live_eta import LiveEta
from dlperf.runner.step_rate import ObservedStep, rate_of

CPU = Cpu("x", 2, 1)


class Hand:
    """A clock in the hand, and a core that takes `slow(at)` times as long."""

    def __init__(self, slow: Callable[[float], float] = lambda at: 1.0) -> None:
        self.now, self.slow = 1000.0, slow

    def looks(self) -> SpeedSamples:
        hand = self

        class Seen(CoreSpeed):
            def sample(self) -> float:
                return 1e-5 * hand.slow(hand.now)

        return SpeedSamples(Seen(now=lambda: self.now))


def test_a_slow_core_is_told_from_the_usual_one() -> None:
    hand = Hand(lambda at: 1.0 if at < 1002 else 1.6)
    looks = hand.looks()
    for _ in range(2):  # two seconds with a look, quick
        looks.take()
        hand.now += 1
    watched = [looks.take() for _ in range(8)]
    found = looks.core_state(watched)
    slow = slowdown(1.6)
    assert slow == pytest.approx(1.6**0.65)
    assert found.slowdown == pytest.approx(slow)
    assert found.usual == pytest.approx(
        (1 + 1 + slow) / 3
    )  # a second each, however many looks were taken in it
    assert found.half_frac == pytest.approx((found.usual - 1) / 2)
    with_file = looks.core_state(watched, UsualSpeed(1e-5, 1.1, 0.05))
    assert with_file.usual == pytest.approx(
        (2 * 1.1 + 1 + 1 + slow) / 5
    )  # the file counts as two seconds
    assert with_file.half_frac == pytest.approx(
        math.hypot(1.645 * 0.05, (max(1.1, with_file.usual) - 1) / 2)
    )


def test_the_files_best_shows_a_core_that_was_slow_throughout() -> None:
    looks = Hand(lambda at: 1.5).looks()
    watched = [looks.take() for _ in range(8)]
    assert looks.core_state(watched).slowdown == 1.0  # nothing to compare with
    assert looks.core_state(watched, UsualSpeed(1e-5, 1.0)).slowdown == pytest.approx(slowdown(1.5))
    assert looks.core_state([]) == CoreState()


def test_a_state_lasts_some_seconds() -> None:
    state = CoreState(slowdown=1.4, usual=1.1)
    assert state.factor(0.0) == 1.0
    assert state.factor(5.0) == pytest.approx(((1 - math.exp(-1)) * 1.4 + math.exp(-1) * 1.1) / 1.4)
    assert state.factor(1e6) == pytest.approx(1.1 / 1.4, rel=1e-4)


def test_what_a_machine_file_says() -> None:
    """Readings of the core whose median is 1.1 and whose mean 1.15."""
    best = Cost(CostKey("core_speed"), 1, Samples((8e-6,)))
    factors = (1.0, 1.0, 1.1, 1.1, 1.2, 1.5)
    readings = tuple(Reading(1e-3 * factor, *(1e-3,) * 5) for factor in factors)
    file = Machine(CPU, costs=(best,), readings=readings, reference=Reading(*(1e-3,) * 6))
    found = usual_speed(file, 1)
    assert (found.best_s, found.slowdown) == (8e-6, pytest.approx(1.15))
    # medians of three in a row: 1.0, 1.1, 1.1, 1.2
    assert found.sigma == pytest.approx(log_sigma(Samples((1.0, 1.1, 1.1, 1.2))))
    assert usual_speed(Machine(CPU, costs=(best,)), 1) == UsualSpeed(8e-6)
    assert usual_speed(Machine(CPU), 1) == UsualSpeed()


def test_a_tracer_and_a_profiler_are_noticed() -> None:
    before = sys.gettrace(), sys.getprofile()
    found = []
    try:
        for trace, profile in ((None, None), (lambda *_: None, None), (None, lambda *_: None)):
            sys.settrace(trace)
            sys.setprofile(profile)
            found.append(is_traced())
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    assert found == [False, True, True]


# -- forecasts -------------------------------------------------------------------------------------


class Loader:
    batch_size = 1

    def __init__(self, n_batches: int) -> None:
        self.sampler = range(n_batches)

    def __len__(self) -> int:
        return len(self.sampler)


class Pass:
    _num_yielded = 0


def contended_intervals(
    seed: int, slow: float = 1.7, quick_s: float = 5.0, slow_s: float = 5.0
) -> Callable[[float], float]:
    """A core that is quick and slow in turn, for exponential times."""
    draw = random.Random(seed)
    ends = list(
        itertools.accumulate(
            draw.expovariate(1 / (quick_s, slow_s)[index % 2]) for index in range(400)
        )
    )
    offset = draw.uniform(0, 30)
    return lambda at: (1.0, slow)[sum(end < at - 1000 + offset for end in ends[:60]) % 2]


def epoch_of(
    slow: Callable[[float], float],
    step_s: float = 0.02,
    n_steps: int = 1500,
    usual: UsualSpeed = UsualSpeed(1e-5, 1.0),
    noise: float = 0.05,
    seed: int = 0,
) -> LiveEta:
    """An epoch on such a core: 11 steps, 8 watched ones, and the rest; the program starts three
    seconds before, and torch is there after two of them.
    """
    hand, draw = Hand(slow), random.Random(seed)
    log, looks, watched = EpochLog(Clock(now=lambda: hand.now)), hand.looks(), list[float]()
    live = LiveEta(log, Clock(now=lambda: hand.now), None, 1)
    for pause_s in (2.0, 1.0):
        looks.take()
        hand.now += pause_s
    iterator = Pass()
    log.begin(Loader(n_steps), iterator, hand.now)
    intervals: list[float] = []
    for number in range(n_steps):
        intervals.append(step_s * slowdown(slow(hand.now)) * draw.uniform(1 - noise, 1 + noise))
        hand.now += intervals[-1]
        if number == 18:
            live.begin(
                [ObservedStep(s) for s in intervals[11:19]],
                1,
                core_state=functools.partial(looks.core_state, watched, usual),
            )
        log.count(hand.now)
        if number < 19:
            took = looks.take()
            watched += [took] if number >= 11 else []
    live.finish()
    return live


def inside(live: LiveEta) -> bool:
    assert live.first is not None
    assert live.first.low_s is not None
    assert live.first.high_s is not None
    assert live.epoch.measured_s is not None
    return live.first.low_s <= live.epoch.measured_s <= live.first.high_s


def test_a_steady_core() -> None:
    runs = [epoch_of(lambda at: 1.0, seed=seed) for seed in range(10)]
    assert all(abs(live.epoch.error_frac or 0.0) < 0.03 for live in runs)
    assert sum(map(inside, runs)) >= 8
    assert all(
        live.first
        and (live.first.high_s or 0) - (live.first.low_s or 0) < 0.06 * (live.first.epoch_s or 0)
        for live in runs
    )


def test_a_core_that_gets_slower_is_followed() -> None:
    live = epoch_of(lambda at: 1.0 + (at - 1003) / 100)  # beyond 1.25 after 25 s of 30
    assert live.first is not None
    assert abs(live.epoch_at_half.error_frac or 1.0) < 0.03
    assert live.epoch.measured_s is not None
    final = live.history[-1]
    assert final.epoch_s == pytest.approx(live.epoch.measured_s, rel=0.01)


def long_run_mean(slow: float) -> float:
    return (1 + slowdown(slow)) / 2


@pytest.mark.parametrize("slow", [1.3, 1.7])
def test_spells_of_a_slow_core(slow: float) -> None:
    """Half of the time the core is slow, for five seconds on average; an epoch lasts 30 s. The file
    knows the mean.
    """
    usual = UsualSpeed(1e-5, long_run_mean(slow), 0.07)
    runs = [epoch_of(contended_intervals(seed, slow), usual=usual, seed=seed) for seed in range(60)]
    errors = [abs(live.epoch.error_frac or 0.0) for live in runs]
    # what the watched steps alone would have said
    blind = [abs(_blind_s(live) / (live.epoch.measured_s or 1.0) - 1) for live in runs]
    assert statistics.fmean(errors) < 0.8 * statistics.fmean(blind)
    assert max(errors) < max(blind)
    assert sum(map(inside, runs)) >= 0.8 * len(runs)


def _blind_s(live: LiveEta) -> float:
    first = live.first
    assert first is not None
    assert first.steps is not None
    assert first.epoch_s is not None
    left = first.steps - first.n_running
    return (
        first.epoch_s
        - left * first.step_s
        + left
        * first.step_s
        / live.core_state.factor(left * first.step_s / live.core_state.factor(1e3))
    )


def test_intervals_hold_while_the_run_goes_on() -> None:
    """Half way, the spread between stretches tells how sure the mean is."""
    runs = [
        epoch_of(
            contended_intervals(seed, 1.7, 2.0, 2.0),
            usual=UsualSpeed(1e-5, long_run_mean(1.7), 0.07),
            seed=seed,
            n_steps=3000,
        )
        for seed in range(40)
    ]
    held = [
        live.half.low_s <= live.epoch.measured_s <= live.half.high_s
        for live in runs
        if live.half and live.half.low_s and live.half.high_s and live.epoch.measured_s
    ]
    assert len(held) == 40
    assert sum(held) >= 0.8 * 40
    assert statistics.fmean(
        abs(live.epoch_at_half.error_frac or 0.0) for live in runs
    ) < statistics.fmean(abs(live.epoch.error_frac or 0.0) for live in runs)


def test_a_file_of_a_noisy_hour_does_little_harm_in_a_quiet_one() -> None:
    live = epoch_of(lambda at: 1.0, usual=UsualSpeed(1e-5, 1.15, 0.07))
    assert (
        0.0 < (live.epoch.error_frac or 0.0) < 0.07
    )  # the file's 15 % count for two of five seconds, and that for what is not sure to last
    assert inside(live)


# -- loaders ---------------------------------------------------------------------------------------


def loaded_steps(
    step_s: float, made_s: float, n_workers: int, ahead: int, n: int, probed: range
) -> Iterator[ObservedStep]:
    """A training beside workers that make a batch in `made_s` each and begin together, each with at
    most `ahead` of them waiting or in the making.

    The queue is full when the first step begins, as it is where the first steps of a program, which
    are slow, come before.
    """
    limit = n_workers * ahead
    ready = [0.0] * limit
    free = [0.0] * n_workers
    now, begun = 0.0, 0
    for index in range(n):
        start = now
        now = max(now, ready[index])  # the batch
        taken_at = now
        waited = now - start
        worker = index % n_workers  # it is told its next one, of `limit` ahead
        free[worker] = max(free[worker], taken_at) + made_s
        ready.append(free[worker])
        own_s = step_s + (0.003 if index in probed else 0.0)
        now += own_s
        begun = len(ready)
        made = sum(at <= now for at in ready)
        yield ObservedStep(
            now - start,
            waited,
            made,
            made >= begun,
            n_workers,
            own_s / (now - start),
            index in probed,
        )


LOADERS = [(0.03, 1), (0.014, 1), (0.06, 2), (0.05, 4), (0.2, 4), (0.015, 2), (0.005, 1)]


@pytest.mark.parametrize("n_before", [0, 1, 5, 20])
@pytest.mark.parametrize(("made_s", "n_workers"), LOADERS)
def test_the_loaders_pace_shows_among_the_first_steps(
    made_s: float, n_workers: int, n_before: int
) -> None:
    """Steps of 10 ms, the last six of fourteen with instruments that take 3 ms more; later ones
    take 10 ms, or as long as the workers take.
    """
    steps = list(
        loaded_steps(0.01, made_s, n_workers, 2, 2000, probed=range(n_before + 8, n_before + 14))
    )
    truth = statistics.fmean(step.interval_s for step in steps[400:])
    assert truth == pytest.approx(max(0.01, made_s / n_workers), rel=0.01)
    rate = rate_of(steps[n_before : n_before + 14])
    assert rate is not None
    # where both take nearly the same, steps with instruments let the workers get ahead again, and
    # the interval has to hold both
    assert rate.step_s == pytest.approx(truth, rel=0.25 if 0.01 < truth < 0.013 else 0.1)
    assert rate.low_s <= truth * 1.03
    assert rate.high_s >= truth * 0.97
    assert rate.waits == (truth > 0.0101) or truth < 0.013

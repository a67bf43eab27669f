"""Sampling under a fake clock: warm-up, length of raw samples, priming, disturbed samples."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_device import EVENT_S, MadeUpDevice

from dlperf.core.clock import (
    PART_S,
    THROUGHOUT,
    Clock,
    CoreSpeed,
    Repeats,
    Sampler,
    Samples,
    involuntary_switches,
    minor_faults,
    quantile,
    take_single,
    take_turns,
    undisturbed,
)
from dlperf.core.errors import DlperfError


class Fake:
    """A function that takes `cost_s` by a clock that only it moves; `disturb` names the calls (from
    1) that lose the core.
    """

    def __init__(self, cost_s: float, disturb: Sequence[int] = (), first_s: float = 0.0) -> None:
        self.cost_s, self.disturb, self.first_s = cost_s, disturb, first_s
        self.n_calls = self.n_switches = 0
        self.time_s = 0.0

    def __call__(self) -> None:
        self.n_calls += 1
        self.time_s += self.cost_s + (self.first_s if self.n_calls == 1 else 0.0)
        if self.n_calls in self.disturb:
            self.n_switches += 1
            self.time_s += 1.0

    def clock(self) -> Clock:
        return Clock(lambda: self.time_s, lambda: self.n_switches)


def sample(fake: Fake, repeats: Repeats) -> tuple[Samples, list[int]]:
    """The result, and how many calls each raw sample took (priming included)."""
    sampler = Sampler(fake, repeats, fake.clock())
    sampler.warm_up()
    calls = []
    for _ in range(repeats.n_samples):
        before = fake.n_calls
        sampler.take()
        calls.append(fake.n_calls - before)
    return sampler.result(), calls


# -- raw samples -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost_s", "sample_s"), [(1e-3, 1e-3), (1e-3, 2.5e-3), (1e-6, 1e-3), (7e-7, 1e-4), (1.0, 1e-3)]
)
def test_raw_samples_are_long_enough_and_not_much_longer(cost_s: float, sample_s: float) -> None:
    fake = Fake(cost_s)
    result, calls = sample(fake, Repeats(sample_s, 3))
    assert result.values == pytest.approx((cost_s,) * 3)
    assert all(n * cost_s >= 0.999999 * sample_s for n in calls)
    assert all(n * cost_s <= max(2.3 * sample_s, cost_s) for n in calls)


def test_a_call_that_takes_no_time_ends() -> None:
    result, calls = sample(Fake(0.0), Repeats(1e-3, 2, max_calls=500))
    assert result.values == (0.0, 0.0)
    assert calls == [500, 500]


def test_warm_up_calls_are_not_in_the_samples() -> None:
    fake = Fake(1e-2, first_s=5.0)
    assert sample(fake, Repeats(1e-3, 2, warmup=3))[0].values == pytest.approx((1e-2, 1e-2))
    assert fake.n_calls == 3 + 1 + 2  # warm-up, finding the length, two samples


def test_take_warms_up_by_itself() -> None:
    fake = Fake(1e-2, first_s=5.0)
    sampler = Sampler(fake, Repeats(1e-3, 1), fake.clock())
    sampler.take()
    assert sampler.result().values == pytest.approx((1e-2,))


def test_a_length_that_is_known_is_not_sought_again() -> None:
    fake = Fake(1e-2, first_s=1e-2)
    first = Sampler(fake, Repeats(2.9e-2, 1), fake.clock())
    first.take()
    before = fake.n_calls
    again = Sampler(fake, Repeats(2.9e-2, 1), fake.clock(), first.n_calls)
    again.take()
    assert fake.n_calls - before == again.n_calls == first.n_calls
    assert again.pairs == [(pytest.approx(1e-2), False)]


def test_an_accelerator_is_waited_for_once_a_sample() -> None:
    device = MadeUpDevice()
    sampler = Sampler(lambda: None, Repeats(EVENT_S, 1), Clock(device=device.clock()))
    sampler.warm_up()
    before = device.log.count("wait")
    sampler.take()
    assert device.log.count("wait") == before + 1
    assert sampler.result().values == pytest.approx((EVENT_S,))


# -- disturbed samples -----------------------------------------------------------------------------


def test_disturbed_samples_are_dropped() -> None:
    # calls 1 and 2 warm up; the fourth sample (call 6) loses the core and is a second longer
    result, _ = sample(Fake(1e-2, disturb=(6,)), Repeats(1e-3, 5))
    assert result.values == pytest.approx((1e-2,) * 4)
    assert result.n_disturbed == 1


def test_the_few_undisturbed_samples_of_a_busy_machine_count() -> None:
    result, _ = sample(Fake(1e-2, disturb=(3, 4, 5)), Repeats(1e-3, 5))
    assert sorted(result.values) == pytest.approx([1e-2, 1e-2])
    assert result.n_disturbed == 3


def test_where_every_sample_is_disturbed_all_stay() -> None:
    result, _ = sample(Fake(1e-2, disturb=range(3, 8)), Repeats(1e-3, 5))
    assert result.values == pytest.approx((1.01,) * 5)
    assert result.n_disturbed == 0


def test_a_disturbed_part_of_a_raw_sample_leaves_the_others() -> None:
    fake = Fake(1e-5)
    sampler = Sampler(fake, Repeats(1e-3, 1), fake.clock())
    sampler.warm_up()
    fake.disturb = (fake.n_calls + 5,)
    sampler.take()
    assert sampler.pairs == [(pytest.approx(1e-5), False)]


@pytest.mark.parametrize(
    ("n_first", "n_more", "disturbed"),
    [(6, 0, False), (7, 1, False), (8, 2, False), (31, 24, False), (99, 24, True)],
)
def test_a_raw_sample_goes_on_until_two_parts_are_undisturbed_but_not_for_ever(
    n_first: int, n_more: int, disturbed: bool
) -> None:
    """Of eight parts of one call each, the first ones run on a core that others slow."""
    fake = Fake(PART_S)
    sampler = Sampler(
        fake,
        Repeats(7.999 * PART_S, 1),
        Clock(lambda: fake.time_s, lambda: min(fake.n_calls - begun, n_first)),
        n_calls=8,
    )
    begun = fake.n_calls
    sampler.take(extension=24.001 / 7.999)
    assert fake.n_calls - begun == 8 + n_more
    assert sampler.pairs == [(pytest.approx(PART_S), disturbed)]


def test_turns_are_taken_until_each_has_its_samples() -> None:
    fakes = Fake(1e-2, disturb=(3, 5)), Fake(2e-2)  # calls 1 and 2 warm up
    samplers = [Sampler(fake, Repeats(1e-3, 3), fake.clock()) for fake in fakes]
    take_turns(samplers)
    assert [sampler.n_clean for sampler in samplers] == [3, 3]
    assert [fake.n_calls for fake in fakes] == [2 + 5, 2 + 3]


def test_turns_end_where_nothing_is_undisturbed() -> None:
    fake = Fake(1e-2, disturb=range(100))
    take_turns([Sampler(fake, Repeats(1e-3, 3), fake.clock())])
    assert fake.n_calls == 2 + 2 * 3


def test_single_calls_are_prepared_and_retried() -> None:
    fake = Fake(1e-2, disturb=(2,))
    prepared: list[int] = []

    def prepare() -> Fake:
        prepared.append(fake.n_calls)
        return fake

    found = take_single(prepare, 3, fake.clock())
    assert found.values == pytest.approx((1e-2,) * 3)
    assert (found.n_disturbed, prepared) == (1, [0, 1, 2, 3])


# -- the core's speed -------------------------------------------------------------------------------


class Core:
    """A clock on which a look at the speed takes what `paces` says next, in seconds."""

    def __init__(self, *paces: float) -> None:
        self.paces, self.time_s, self.slept_s, self.looking = iter(paces), 0.0, 0.0, False

    def now(self) -> float:
        self.looking = not self.looking
        if not self.looking:
            self.time_s += next(self.paces)
        return self.time_s

    def speed(self, **options: float) -> CoreSpeed:
        return CoreSpeed(now=self.now, switches=lambda: 7, sleep=self.sleep, **options)

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


def test_a_core_is_slow_beside_its_best() -> None:
    speed = Core(2.0, 2.5, 2.75, 1.0, 2.0).speed()
    assert [speed.slow() for _ in range(5)] == [
        False,
        False,
        True,
        False,
        True,
    ]  # 2.7 is the line, then 1.35
    assert speed.best_s == 1.0


def test_the_usual_pace_is_an_average_over_time() -> None:
    core = Core(1e-5, 2e-5, 2e-5, 1e-5, 1e-5, 1e-3)
    speed = core.speed()
    assert speed.mean_s == math.inf  # never looked at
    for gap_s in (
        0.0,
        1e-4,
        1e-4,
        8e-4,
        9.0,
        1e-3,
    ):  # whoever waits for a fast core looks often while it is slow
        core.time_s += gap_s
        speed.sample()
    assert speed.mean_s == pytest.approx(
        (2e-4 * 2e-5 + (8e-4 + 0.05) * 1e-5 + 1e-3 * 2.5e-5) / (2e-4 + 8e-4 + 0.05 + 1e-3)
    )


def test_an_interval_that_begins_or_ends_slowly_is_disturbed() -> None:
    speed = Core(1.0, 1.0, 2.0, 2.0, 1.0, 1.0).speed(best_s=1.0)
    counts = [speed() for _ in range(6)]
    found = [after - before for before, after in itertools.pairwise(counts)]
    assert found == [0, 1, THROUGHOUT, 1, 0]
    assert counts[0] == 7  # the lost cores that the system counts


@given(st.lists(st.tuples(st.floats(0, 1e9), st.booleans()), min_size=1, max_size=20))
def test_either_the_clean_ones_or_all(pairs: list[tuple[float, bool]]) -> None:
    found = undisturbed(pairs)
    clean = [value for value, disturbed in pairs if not disturbed]
    if len(clean) >= len(pairs) / 2:
        assert (list(found.values), found.n_disturbed) == (clean, len(pairs) - len(clean))
    else:
        assert (list(found.values), found.n_disturbed) == ([value for value, _ in pairs], 0)


# -- statistics ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(), (-1.0,), (math.nan,), (math.inf,), (1.0, -1e-12)])
def test_what_was_not_measured_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(DlperfError, match="samples: "):
        Samples(values)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.floats(0, 1))
def test_statistics_are_numpys(values: list[float], fraction: float) -> None:
    samples = Samples(tuple(values))
    assert samples.median == pytest.approx(np.median(values))
    assert samples.minimum == min(values)
    assert samples.mean == pytest.approx(np.mean(values))
    assert quantile(values, fraction) == pytest.approx(
        np.quantile(values, fraction), rel=1e-9, abs=1e-9
    )


def test_spread() -> None:
    # quantiles 0.1 and 0.9 of 1..11 are 2 and 10, the median is 6
    assert Samples(tuple(float(v) for v in range(1, 12))).spread_frac == pytest.approx(8 / 6)
    assert Samples((3.0,)).spread_frac == 0.0
    assert Samples((0.0, 0.0)).spread_frac == 0.0


def test_the_real_counters_count() -> None:
    before = minor_faults()
    block = bytearray(64 * 2**20)  # a mapping of its own, 16384 pages
    assert minor_faults() >= before
    assert len(block) == 64 * 2**20
    switches = involuntary_switches()
    assert Clock().now is time.perf_counter
    assert involuntary_switches() >= switches >= 0


def test_disturbed_samples_are_remembered() -> None:
    ends = iter([0.0, 1.0, 10.0, 11.0, 20.0, 22.0])  # begin and end of each
    switches = iter([0, 0, 0, 1, 1, 1])
    sampler = Sampler(
        lambda: None,
        Repeats(sample_s=0.01, n_samples=3, warmup=1),
        Clock(lambda: next(ends), lambda: next(switches)),
        n_calls=1,
    )
    for _ in range(3):
        sampler.take()
    assert sampler.pairs == [(1.0, False), (1.0, True), (2.0, False)]
    assert sampler.result().values == (1.0, 2.0)


def test_after_the_time_is_over_everything_is_sampled_once_and_nothing_twice() -> None:
    now_s = [0.0]

    def call() -> None:
        now_s[0] += 1.0

    clock = Clock(lambda: now_s[0], lambda: 0)
    assert clock.within(math.inf) is clock
    assert clock.part(0.5) is clock
    late = clock.within(0.0)
    samplers = [Sampler(call, Repeats(sample_s=0.5, n_samples=7), late) for _ in range(3)]
    take_turns(samplers)
    assert [len(sampler.pairs) for sampler in samplers] == [1, 1, 1]
    assert len(take_single(lambda: call, 5, late).values) == 2
    now_s[0] = 100.0
    some = clock.within(10.0).part(0.5)
    assert some.until == 105.0
    assert some.within(50.0).until == 105.0
    assert len(take_single(lambda: call, 50, some).values) == 5


def test_a_disturbed_sample_that_is_shorter_than_all_others_counts() -> None:
    sampler = Sampler(lambda: None)
    sampler.pairs = [
        (4e-4, False),
        (3e-5, True),
        (5e-4, True),
    ]  # one long undisturbed moment says less than a short disturbed one
    assert sampler.result() == Samples((4e-4, 3e-5), 1)
    sampler.pairs = [(2e-5, False), (3e-5, True)]
    assert sampler.result() == Samples((2e-5,), 1)
    sampler.pairs = [(2e-5, True), (3e-5, True)]
    assert sampler.result() == Samples((2e-5, 3e-5), 0)

"""The state of a machine: readings, the probe on a clock held in the hand, and prices at a state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from dlperf.core import state_probe
from dlperf.core.machine import Cpu, Machine
from dlperf.core.prediction import BOUNDS, Item, Prices
from dlperf.core.state import REFERENCE, Reading, State, reading_of, usual_state
from dlperf.core.state_probe import StateProbe, working_sets_bytes

KIB, MIB = 2**10, 2**20
CPU = Cpu("Made-up CPU", 2, (32 * KIB, MIB, 32 * MIB))
ONES = Reading(*(1.0,) * 6)
MIXED = State(1.1, 1.2, 1.3, 1.4, 1.5, 1.6)
FACTORS = {
    "compute": 1.1,
    "L1": 1.1,
    "L2": 1.3,
    "L3": 1.4,
    "DRAM": 1.5,
    "overhead": 1.2,
    "page-faults": 1.6,
    "network": 1.0,
}


# -- readings and states ---------------------------------------------------------------------------


def test_a_state_is_a_reading_over_the_reference() -> None:
    found = Reading(2.0, 3.0, 4.0, 5.0, 6.0, 7.0).over(Reading(1.0, 2.0, 1.0, 2.0, 1.0, 2.0))
    assert found == State(2.0, 1.5, 4.0, 2.5, 6.0, 3.5)
    assert ONES.over(ONES) == REFERENCE


def test_quantiles_are_taken_probe_by_probe() -> None:
    readings = [
        Reading(core, 1.0, 1.0, 1.0, dram, 1.0, created)
        for core, dram, created in ((3.0, 1.0, "a"), (1.0, 2.0, "b"), (2.0, 9.0, "c"))
    ]
    assert reading_of(readings) == Reading(2.0, 1.0, 1.0, 1.0, 2.0, 1.0, "c")
    lowest = reading_of(readings, 0.0)
    assert (lowest.core_s, lowest.dram_s) == (1.0, 1.0)


def test_every_bound_has_its_factor() -> None:
    assert {bound: MIXED.factor(bound) for bound in BOUNDS} == FACTORS


def test_of_several_states_the_median_counts_of_two_the_mean() -> None:
    states = [State(core=1.0), State(core=1.2, dram=4.0), State(core=2.0, dram=1.0)]
    assert usual_state(states) == State(core=1.2, dram=1.0)
    assert usual_state(states[:2]) == State(core=pytest.approx(1.1), dram=2.5)
    assert usual_state(()) == REFERENCE


def test_a_burst_that_spoils_one_reading_of_four_changes_no_state() -> None:
    quiet = State(interpreter=1.02, dram=1.3)
    spoiled = replace(quiet, interpreter=1.8, core=1.1)
    assert usual_state([quiet, spoiled, quiet, quiet]) == quiet


def team(region_s: float, threads: int = 2) -> Reading:
    return replace(ONES, parallel_region_s={threads: region_s})


def test_a_parallel_region_is_compared_with_that_of_as_many_threads() -> None:
    reference = replace(ONES, parallel_region_s={2: 2e-6, 4: 3e-6})
    assert team(3e-6).over(reference) == State(core_to_core=1.5)
    assert team(3e-6, 4).over(reference) == REFERENCE
    assert team(3e-6, 8).over(reference) == ONES.over(reference) == REFERENCE
    waited = team(1e-3).over(reference)  # for a core that was not there
    assert waited.core_to_core == 3.0
    found = reading_of([team(1e-6), ONES, team(3e-6), team(5e-6, 4)])
    assert found.parallel_region_s == pytest.approx({2: 2e-6, 4: 5e-6})


def test_readings_of_one_thread_have_the_regions_of_others_in_turns() -> None:
    """Of two levels the mean is usual: a median would jump between them."""
    readings = (ONES, team(1.0), ONES, team(1.6), ONES, team(1.0), team(1.6))
    machine = Machine(CPU, readings=readings, reference=team(1.0))
    factors = [state.core_to_core for state in machine.states]
    assert factors == [1.0, 1.0, 1.6, 1.6, 1.0, 1.0, 1.6]
    assert machine.usual_state == State(core_to_core=pytest.approx(8.8 / 7))
    alone = replace(machine, readings=(ONES,) * 3)
    assert alone.usual_state == REFERENCE


# -- the probe -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_probe, "DRAM_BYTES", 2 * MIB)


def test_working_sets_lie_in_the_caches_that_they_stand_for() -> None:
    assert working_sets_bytes(CPU) == (768 * KIB, 4 * MIB, 128 * MIB)
    # Half of a small shared cache; a shared cache of hundreds of MiB; unknown caches.
    assert working_sets_bytes(Cpu("x", 2, (32 * KIB, MIB, 6 * MIB)))[1] == 3 * MIB
    assert working_sets_bytes(Cpu("x", 2, (32 * KIB, 2 * MIB, 480 * MIB)))[1] == 8 * MIB
    assert working_sets_bytes(Cpu("x", 2, (0, 0, 0))) == (768 * KIB, 4 * MIB, 128 * MIB)


@pytest.mark.usefixtures("small")
def test_a_reading_is_a_quantile_of_rounds_after_some_that_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([9.0, 8.0, 7.0, 3.0, 1.0, 2.0, 0.1])
    probe = StateProbe(CPU)
    monkeypatch.setattr(probe, "_round", lambda: Reading(*(next(rounds),) * 6))
    found = probe.read(3)
    assert found.seconds == (pytest.approx(1.8),) * 6  # the 0.4 quantile
    assert found.created
    assert next(rounds) == 0.1  # six rounds in all


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("round_s", "n_rounds"), [(0.01, 203), (0.05, 203), (0.5, 21), (5.0, 12)])
def test_a_reading_ends_where_rounds_take_far_too_long(
    monkeypatch: pytest.MonkeyPatch, round_s: float, n_rounds: int
) -> None:
    """203 rounds of 0.05 s are 10.15 s; nine after the three that are dropped are always taken."""
    now_s = [0.0]
    probe = StateProbe(CPU, lambda: now_s[0])

    def take() -> Reading:
        now_s[0] += round_s
        return Reading(*(1.0,) * 6)

    monkeypatch.setattr(probe, "_round", take)
    probe.read(200)
    assert now_s[0] == pytest.approx(n_rounds * round_s)


@pytest.mark.usefixtures("small")
def test_a_round_takes_each_probe_once_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[str, int, int]] = []
    probe = StateProbe(CPU)
    threads = [1]

    class Region:
        threads = property(lambda _: threads[0])
        seconds = staticmethod(lambda: 7.0)

    monkeypatch.setattr(probe, "_region", Region())

    def time_call(call: Callable[[], object], count: int = 1, n_before: int = 1) -> float:
        name = call.func.__name__ if isinstance(call, partial) else "code"
        taken.append((name, count, n_before))
        return float(len(taken))

    monkeypatch.setattr(probe, "_time", time_call)
    monkeypatch.setattr(probe, "_touch_s", lambda: 6.0)
    assert probe._round() == Reading(3.0, 5.0, 4.0, 1.0, 2.0, 6.0)
    # Cached copies move 8 MiB: 8 of 1 MiB (half of the small DRAM probe), 4 of 2.
    assert taken == [
        ("copyto", 8, 8),
        ("copyto", 4, 8),
        ("matmul", 3, 1),
        ("matmul", 2, 1),
        ("code", 2, 4),
    ]
    threads[0] = 4
    assert probe._round().parallel_region_s == {4: 7.0}


def test_a_region_is_the_median_of_those_after_the_team_woke() -> None:
    torch = pytest.importorskip("torch")
    taken_s = iter([9.0] * 3 + [1.0, 5.0, 2.0] + [9.0] * 3 + [4.0] * 3)
    now_s, calls = [0.0], [0]

    def now() -> float:
        calls[0] += 1
        if calls[0] % 2 == 0:
            now_s[0] += next(taken_s)
        return now_s[0]

    region = state_probe.ParallelRegion(now)
    assert region.threads == torch.get_num_threads()
    assert region.least_s == math.inf
    assert [region.seconds(3, 3), region.seconds(3, 3)] == [2.0, 4.0]
    assert region.least_s == 2.0


@pytest.mark.usefixtures("small")
def test_a_time_is_that_of_one_call_with_warm_caches() -> None:
    now_s, calls, n_cold = [10.0], [], [1]

    def now() -> float:
        return now_s[0]

    def call() -> None:
        calls.append(now_s[0])
        now_s[0] += 5.0 if len(calls) <= n_cold[0] else 2.0  # the first ones find the caches cold

    probe = StateProbe(CPU, now)
    assert probe._time(call, 3) == 2.0
    assert len(calls) == 4
    assert probe._time(call) == 2.0
    assert len(calls) == 5
    calls.clear()
    n_cold[0] = 8
    assert probe._time(call, 2, 8) == 2.0


@pytest.mark.usefixtures("small")
def test_only_the_touches_of_new_pages_are_timed() -> None:
    ticks = iter(range(100))
    assert StateProbe(CPU, lambda: float(next(ticks)))._touch_s() == 1.0
    assert next(ticks) == 2


@pytest.mark.usefixtures("small")
def test_probes_tell_how_much_longer_they_take_on_a_shared_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A co-tenant comes and goes: short calls take 1.6 times as long beside it."""
    is_slow = [False]
    probe = StateProbe(CPU, is_slow=lambda: is_slow[0])
    monkeypatch.setattr(probe, "_time", lambda *_: 1.6 if is_slow[0] else 1.0)
    monkeypatch.setattr(probe, "_touch_s", lambda: 1.0)
    for number in range(27):
        assert probe.shared_core() == {}
        is_slow[0] = number % 3 == 0
        probe._round()
    is_slow[0] = True
    probe._round()
    assert probe.shared_core() == pytest.approx({"private_cache": 1.6, "interpreter": 1.6})


# -- prices at a state -----------------------------------------------------------------------------


def items(**seconds: float) -> tuple[Item, ...]:
    return tuple(Item("a", "forward", value, bound, "measured") for bound, value in seconds.items())


def prices(seconds: dict[str, float], **rest: Any) -> Prices:
    return Prices(items(**seconds), **rest)


def test_items_move_by_what_bounds_them() -> None:
    moved = prices(dict.fromkeys(BOUNDS, 2.0)).at_state(MIXED)
    assert [item.seconds for item in moved.items] == pytest.approx(
        [2.0 * FACTORS[bound] for bound in BOUNDS]
    )
    same = prices({"DRAM": 1.0}, low_factor=0.8, high_factor=1.3)
    assert same.at_state(REFERENCE) == same


def test_a_kernel_moves_with_a_shared_core_by_its_response() -> None:
    """Half of a second is arithmetic, a quarter waits for DRAM, a quarter is the call. Short work
    takes 1.5 times as long: the kernel 1.3 times with a response of 0.6, whatever the core's probe
    says. What-if factors move it with its bound.
    """
    parts = (("DRAM", 0.25), ("overhead", 0.25))
    item = Item("fc", "forward", 1.0, "compute", "measured", parts=parts, response=0.6)
    at = State(core=1.7, interpreter=1.6, private_cache=1.4, dram=1.2)
    (moved,) = Prices((item,)).at_state(at).items
    assert moved.seconds == pytest.approx(0.5 * 1.3 + 0.25 * 1.2 + 0.25 * 1.6)
    assert moved.response is None
    faster = Prices((item,)).by_bound().at_state(State(core=0.5)).items[0]
    assert faster.seconds == pytest.approx(0.75)
    need = replace(item, parts=(), needs=(("compute", 1.0), ("DRAM", 1.0)))
    assert Prices((need,)).at_state(at).items[0].seconds == pytest.approx(1.3)
    assert Prices((need,)).at_state(replace(at, dram=2.0)).items[0].seconds == pytest.approx(2.0)


def test_a_kernel_moves_with_how_far_cores_are_apart() -> None:
    """By its response, with all of its parts and needs, whatever else moves it."""
    parts = (("DRAM", 0.25),)
    item = Item(
        "fc", "forward", 1.0, "compute", "measured", parts=parts, response=0.6, response_between=0.2
    )
    far = State(core_to_core=1.5)
    (moved,) = Prices((item,)).at_state(far).items
    assert moved.seconds == pytest.approx(1.1)
    assert moved.response_between == 0.0
    busy = State(private_cache=1.5, interpreter=1.5, dram=1.2, core_to_core=1.5)
    (moved,) = Prices((item,)).at_state(busy).items
    assert moved.seconds == pytest.approx(0.75 * 1.3 + 0.25 * 1.2 + 0.1)
    more_cache = replace(item, response_between=-0.4, needs=(("DRAM", 1.0),))
    assert Prices((more_cache,)).at_state(far).items[0].seconds == pytest.approx(0.8)
    assert Prices((item,)).by_bound().at_state(far).items[0].seconds == pytest.approx(1.0)


def test_the_interval_contains_most_of_the_other_states() -> None:
    """1 s of arithmetic and 1 s of DRAM: 2.2 s at the state; of the 21 others one takes 2.0 s, one
    2.6, and the rest as much as the state, but for a second one at either end. The 5th percentile
    of 21 is the second of them, the 95th the last but one.
    """
    step = prices({"compute": 1.0, "DRAM": 1.0}, low_factor=0.9, high_factor=1.1)
    at = State(core=1.2)
    others = [REFERENCE] * 2 + [at] * 17 + [State(core=1.2, dram=1.4)] * 2
    found = step.at_state(at, others)
    low, high = found.low_factor, found.high_factor
    assert low == pytest.approx(1 - math.hypot(0.1, 1 - 2.0 / 2.2))
    assert high == pytest.approx(1 + math.hypot(0.1, 2.6 / 2.2 - 1))
    same = step.at_state(at, [at] * 5)
    assert (same.low_factor, same.high_factor) == (pytest.approx(0.9), pytest.approx(1.1))
    slower = step.at_state(at, [State(core=2.0, dram=2.0)] * 5)  # none is faster
    assert slower.low_factor == pytest.approx(0.9)
    bare = prices({"compute": 1.0}).at_state(at, others)
    assert (bare.low_factor, bare.high_factor) == (None, None)

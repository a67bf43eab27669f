"""Properties of what-if factors: exact at 1, monotone, and never below what a resource needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from calibrated_cases import machine, mm, relu, step_keys, trace

from dlperf import Prediction, predict
from dlperf.core.items import BOUNDS, Item, ItemTimes
from dlperf.core.prediction import Prices
from dlperf.core.trace import Op
from dlperf.core.what_if import MachineFactors

FACTOR = st.floats(0.01, 100.0)
RATES = ("flops", "memory_bandwidth", "l3_bandwidth")
COSTS = ("overhead", "page_faults")
FACTORS = st.fixed_dictionaries({}, optional=dict.fromkeys((*RATES, *COSTS), FACTOR))
MACHINE = machine(dict.fromkeys(step_keys(), 1e-6))


@st.composite
def items(draw: st.DrawFn) -> Item:
    fracs = st.dictionaries(st.sampled_from(BOUNDS), st.floats(0.0, 1.0), max_size=4)
    parts = draw(fracs)
    left = max(1.0, sum(parts.values()))
    return Item(
        "a",
        "forward",
        draw(st.floats(1e-7, 10.0)),
        draw(st.sampled_from(BOUNDS)),
        "measured",
        parts=tuple((bound, frac / left) for bound, frac in parts.items()),
        needs=tuple(draw(fracs).items()),
    )


OPS = st.lists(
    st.one_of(
        st.builds(mm, st.integers(16, 512), st.integers(16, 512), st.integers(16, 512)),
        st.builds(relu, st.integers(64, 2**22)),
    ),
    min_size=1,
    max_size=4,
)


def seconds(item: Item, factors: dict[str, float]) -> float:
    return float(ItemTimes([item]).seconds(MachineFactors.of(factors).state)[0])


@given(items())
def test_nothing_moves_at_1(item: Item) -> None:
    assert seconds(item, {}) == pytest.approx(item.seconds)


@given(items(), FACTORS, st.sampled_from((*RATES, *COSTS)), st.floats(1.0, 10.0))
def test_more_of_a_resource_never_takes_longer(
    item: Item, factors: dict[str, float], name: str, more: float
) -> None:
    changed = {**factors, name: factors.get(name, 1.0) * more}
    one, other = seconds(item, factors), seconds(item, changed)
    if name in RATES:
        one, other = other, one
    assert one <= other * (1 + 1e-12)


@given(items(), FACTORS)
def test_no_item_takes_less_than_a_need(item: Item, factors: dict[str, float]) -> None:
    state = MachineFactors.of(factors).state
    found = seconds(item, factors)
    for bound, frac in item.needs:
        assert found >= frac * item.seconds * state.factor(bound) * (1 - 1e-12)
    highest = max(map(state.factor, BOUNDS))
    assert found <= highest * item.seconds * (1 + 1e-9)


@given(st.lists(items(), min_size=1, max_size=5), FACTORS)
def test_the_moved_items_have_these_times_and_stay_items(
    found: list[Item], factors: dict[str, float]
) -> None:
    state = MachineFactors.of(factors).state
    times = ItemTimes(found)
    moved = times.moved(state)
    assert [item.seconds for item in moved] == pytest.approx(times.seconds(state).tolist())
    for item in moved:
        assert sum(frac for _, frac in item.parts) <= 1 + 1e-9
        assert all(frac <= 1 + 1e-9 for _, frac in item.needs)


@given(st.lists(items(), min_size=1, max_size=5), FACTORS)
def test_the_interval_holds_the_extremes(found: list[Item], factors: dict[str, float]) -> None:
    state = MachineFactors.of(factors).state
    prices = Prices(tuple(found), low_factor=0.9, high_factor=1.1).at_state(state)
    total = sum(item.seconds for item in prices.items)
    assert prices.low_factor is not None
    assert prices.high_factor is not None
    for seconds in ItemTimes(found).extremes(state):
        assert max(0.05, prices.low_factor) * total <= max(seconds, 0.05 * total) * (1 + 1e-9)
        assert seconds <= prices.high_factor * total * (1 + 1e-9)


def predicted(ops: list[Op], factors: dict[str, float]) -> Prediction:
    return predict(trace(*ops), MACHINE, threads=1, what_if=factors)


@settings(deadline=None, max_examples=40)
@given(OPS, FACTORS, st.sampled_from(RATES), st.floats(1.0, 10.0))
def test_predictions_are_monotone_and_rows_add_up(
    ops: list[Op], factors: dict[str, float], name: str, more: float
) -> None:
    found = predicted(ops, factors)
    better = predicted(ops, {**factors, name: factors.get(name, 1.0) * more})
    total = found.step.total_s or 0.0
    assert (better.step.total_s or 0.0) <= total * (1 + 1e-9)
    assert found.layers["forward_s"].sum() == pytest.approx(total)
    assert (found.step.low_s or 0.0) < total < (found.step.high_s or 0.0)


@settings(deadline=None, max_examples=20)
@given(OPS)
def test_a_prediction_at_1_is_the_prediction(ops: list[Op]) -> None:
    usual, same = predicted(ops, {}), predicted(ops, dict.fromkeys((*RATES, *COSTS), 1.0))
    assert usual.prices == same.prices

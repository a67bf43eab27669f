"""What-if factors: names and values, how items move, and what else a prediction changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
from calibrated_cases import CALL_S, LEVELS, PEAK_FLOPS_PER_S, machine, mm, relu, step_keys, trace

import dlperf
from dlperf.core.items import Item, ItemTimes
from dlperf.core.prediction import Prices
from dlperf.core.state import REFERENCE, State
from dlperf.core.what_if import MachineFactors
from dlperf.distributed.scenario import WhatIf
from dlperf.forecast.loop import Loop

NAMES = ("flops", "memory_bandwidth", "l3_bandwidth", "overhead", "page_faults")


def of(**factors: float) -> State:
    return MachineFactors.of(factors).state


def moved(item: Item, **factors: float) -> Item:
    (found,) = ItemTimes([item]).moved(of(**factors))
    return found


# -- names and values ------------------------------------------------------------------------------


def test_factors_are_slowdowns_of_a_state() -> None:
    found = of(flops=2.0, memory_bandwidth=0.5, l3_bandwidth=4.0, overhead=3.0, page_faults=0.1)
    assert found == State(0.5, 3.0, 0.5, 0.25, 2.0, 0.1)
    assert MachineFactors().state == REFERENCE
    assert MachineFactors.of({"flops": 1, "overhead": 2}).changed == {"overhead": 2.0}


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"speed": 2.0}, f"'speed' is unknown; known are {', '.join(NAMES)}$"),
        ({"link_bandwidth": 2.0}, "'link_bandwidth' is unknown"),
        ({"flops": 0.0}, "flops=0: the factor must be finite and above 0"),
        ({"flops": -1}, "flops=-1"),
        ({"overhead": math.nan}, "overhead=nan: the factor must be finite"),
        ({"overhead": math.inf}, "overhead=inf"),
        ({"flops": "2"}, "flops=2: the factor must be finite"),
        ({"flops": True}, "flops=True"),
        ({"flops": 10**400}, "the factor must be finite"),
        ([("flops", 2.0)], "expected factors by name"),
    ],
)
def test_factors_that_make_no_sense(factors: Any, message: str) -> None:
    with pytest.raises(dlperf.DlperfError, match=message):
        dlperf.predict(trace(relu(64)), machine(), 1, what_if=factors)


def test_scale_knows_the_same_names_and_its_links() -> None:
    found = WhatIf.of({"link_latency": 2.0, "memory_bandwidth": 3.0})
    assert found.machine == MachineFactors(memory_bandwidth=3.0)
    with pytest.raises(dlperf.DlperfError, match=f"{', '.join(NAMES)}, link_bandwidth, link_lat"):
        WhatIf.of({"speed": 2.0})


# -- items -----------------------------------------------------------------------------------------


def test_the_bound_changes_where_another_need_is_larger() -> None:
    """10 s of arithmetic, whose bytes need 2 s: at a tenth of the bandwidth they need 20 s."""
    item = Item("a", "forward", 10.0, "compute", "measured", needs=(("DRAM", 0.2),))
    slow = moved(item, memory_bandwidth=0.1)
    assert (slow.seconds, slow.bound) == (pytest.approx(20.0), "DRAM")
    same = moved(item, memory_bandwidth=0.5)
    assert (same.seconds, same.bound) == (10.0, "compute")
    fast = moved(item, flops=100.0)
    assert (fast.seconds, fast.bound) == (pytest.approx(2.0), "DRAM")
    assert moved(item, flops=2.0).seconds == pytest.approx(5.0)


def test_a_factor_that_does_not_concern_an_item_leaves_its_bound() -> None:
    item = Item("a", "forward", 10.0, "compute", "measured", parts=(("overhead", 0.7),))
    for name in NAMES[1:3]:
        assert moved(item, **{name: 2.0}) == item
    assert moved(item, flops=0.5).bound == "compute"
    assert moved(item, flops=1.001).bound == "compute"
    assert moved(item, flops=10.0).bound == "overhead"


def test_parts_move_each_with_its_own() -> None:
    """10 s: 6 of DRAM, 3 of arithmetic, 1 of the call."""
    parts = ("compute", 0.3), ("overhead", 0.1)
    item = Item("a", "forward", 10.0, "DRAM", "measured", parts=parts, needs=(("compute", 0.25),))
    assert moved(item, memory_bandwidth=0.5).seconds == pytest.approx(6 / 0.5 + 3 + 1)
    assert moved(item, flops=3.0).seconds == pytest.approx(6 + 3 / 3 + 1)
    assert moved(item, overhead=5.0).seconds == pytest.approx(6 + 3 + 5)
    fast = moved(item, memory_bandwidth=1e9)
    assert (fast.seconds, fast.bound) == (pytest.approx(4.0), "compute")
    # a second change starts from the first: 6 / 3 + 3 + 1 = 6, then back
    there = moved(item, memory_bandwidth=3.0)
    assert moved(there, memory_bandwidth=1 / 3).seconds == pytest.approx(10.0)


def test_the_interval_contains_both_assumptions_on_overlap() -> None:
    """At half the bandwidth, 10 s of arithmetic with a need of 4 s: 10 s if all overlaps, 14 s if
    nothing does. 10 s of DRAM with 4 s of arithmetic: 6 / 0.5 + 4 = 16 s, 20 s or 10 + 6.
    """
    computing = Item("a", "forward", 10.0, "compute", "measured", needs=(("DRAM", 0.4),))
    found = Prices((computing,), low_factor=0.9, high_factor=1.1).at_state(of(memory_bandwidth=0.5))
    assert found.low_factor == pytest.approx(0.9)
    assert found.high_factor == pytest.approx(1 + math.hypot(0.1, 0.4))
    waiting = Item("a", "forward", 10.0, "DRAM", "measured", parts=(("compute", 0.4),))
    found = Prices((waiting,), low_factor=0.9, high_factor=1.1).at_state(of(memory_bandwidth=0.5))
    assert found.high_factor == pytest.approx(1 + math.hypot(0.1, 20 / 16 - 1))


# -- predictions -----------------------------------------------------------------------------------


def step_s(step: dlperf.Trace, predictor: str = "calibrated", **factors: float) -> float:
    found = dlperf.predict(step, machine(), 1, predictor, what_if=factors).step
    assert found.low_s is None or found.low_s < found.total_s < found.high_s  # type: ignore[operator]
    return found.total_s or 0.0


def test_a_product_becomes_memory_bound_and_back() -> None:
    """1024^3: 0.215 s at 10 GFLOP/s; 12.6 MB, at most 1.26 ms at DRAM's 10 GB/s."""
    step = trace(mm(1024, 1024, 1024))
    usual = step_s(step)
    assert step_s(step, flops=0.5) == pytest.approx(2 * usual, rel=0.01)
    assert step_s(step, memory_bandwidth=0.5, l3_bandwidth=0.5) == pytest.approx(usual, rel=0.05)
    slow = dlperf.predict(step, machine(), 1, what_if={"l3_bandwidth": 1e-3})
    least_s = 3 * 4 * 1024**2 / LEVELS["L3"] * 1e3
    assert slow.step.total_s == pytest.approx(least_s, rel=0.01)
    assert slow.layers["bound"].iloc[-1] == "L3"


def test_the_roofline_has_its_new_maximum() -> None:
    """64 x 64 x 64: 2^19 FLOP at 10 GFLOP/s, 3 x 16 KiB at DRAM's 10 GB/s."""
    step = trace(mm(64, 64, 64))
    compute_s, memory_s = 2**19 / PEAK_FLOPS_PER_S, 3 * 2**14 / LEVELS["DRAM"]
    base_s = step_s(step, "roofline")
    compute_s = max(base_s, compute_s)  # the peak is that of the products' rate, call included
    for flops, memory in ((1.0, 1.0), (2.0, 1.0), (100.0, 1.0), (1.0, 0.01), (50.0, 0.5)):
        found = step_s(step, "roofline", flops=flops, memory_bandwidth=memory)
        assert found == pytest.approx(max(compute_s / flops, memory_s / memory))


@pytest.mark.parametrize("predictor", ["calibrated", "roofline", "viebke-a", "viebke-b"])
def test_every_predictor_of_a_step_follows(predictor: str) -> None:
    step = trace(mm(256, 256, 256), relu(2**20))
    assert step_s(step, predictor, flops=0.1) > 2 * step_s(step, predictor)
    assert step_s(step, predictor, flops=1.0) == step_s(step, predictor)


def test_the_cardwell_table_follows() -> None:
    step = trace(mm(256, 256, 256))
    usual, fast = (
        dlperf.predict(step, machine(), 1, "gemm-table", what_if=factors).step.forward_s
        for factors in ({}, {"flops": 2.0})
    )
    assert fast == pytest.approx(usual / 2)  # type: ignore[operator]


def test_the_answer_names_the_factors() -> None:
    found = dlperf.predict(trace(relu(64)), machine(), 1, what_if={"flops": 2, "overhead": 1})
    assert found.to_json()["what_if"] == {"flops": 2.0}
    assert "what if: flops x 2" in str(found)
    usual = dlperf.predict(trace(relu(64)), machine(), 1)
    assert usual.to_json()["what_if"] == {}
    assert "what if" not in str(usual)


def test_roofs_move_too() -> None:
    factors = {"flops": 2.0, "memory_bandwidth": 3.0}
    usual, other = (
        dlperf.predict(trace(relu(64)), machine(), 1, what_if=what_if).roofs
        for what_if in ({}, factors)
    )
    ratios = {
        new.level: new.bytes_per_s / old.bytes_per_s
        for old, new in zip(usual.bandwidths, other.bandwidths)
    }
    assert ratios == pytest.approx({"L1": 2.0, "L2": 2.0, "L3": 1.0, "DRAM": 3.0})
    assert other.ceilings[0].fma_flops_per_s == 2 * usual.ceilings[0].fma_flops_per_s


def test_an_epoch_moves_with_its_loop() -> None:
    """The loop reads the loss at each batch, for 1 ms; the loader's bytes move with memory."""
    costs = dict.fromkeys(step_keys(), CALL_S) | {"loop_item": 1e-3, "loop_accuracy": 2e-3}

    def loop_s(**factors: float) -> float:
        found = dlperf.predict(trace(relu(64)), machine(costs), 1, what_if=factors)
        return found.epoch(10, **vars(Loop(accuracy=True))).loop_s

    usual = loop_s()
    assert usual == pytest.approx(10 * 3e-3)
    assert loop_s(overhead=2.0) == pytest.approx(2 * usual)
    assert loop_s(flops=2.0) == pytest.approx(usual)

"""What a step is made of: every item counts once, under the right heading."""

from __future__ import annotations

import dataclasses
import math

import calibrated_cases as cases
import pytest
import report_cases

from dlperf.advice.breakdown import PARTS, break_down, part_of
from dlperf.core.errors import DlperfError
from dlperf.core.prediction import BOUNDS, Item
from dlperf.forecast.prediction import predict

US = 1e-6


def test_headings():
    assert part_of(Item("fc", "backward", 1.0, "DRAM", "measured")) == "DRAM"
    assert part_of(Item("fc", "zero_grad", 1.0, "overhead", "measured")) == "overhead"
    assert part_of(Item("fc", "forward", 1.0, "DRAM", "unpriced")) == "unpriced"
    assert part_of(Item("fc", "optimizer", 1.0, "DRAM", "unpriced")) == "optimizer"
    assert set(PARTS) == {*BOUNDS, "unpriced", "optimizer"}


def test_the_parts_are_those_of_the_items():
    prediction, _ = report_cases.cnn()
    found = break_down(prediction)
    # report_cases.CNN: forward 450, backward 865, optimizer 60 us; a quarter of each is overhead,
    # the rest compute forward and L2 backward; zero_grad 15 us
    assert dict(found.parts_s) == pytest.approx(
        {
            "compute": 0.75 * 450 * US,
            "L2": 0.75 * 865 * US,
            "overhead": 0.25 * (450 + 865) * US + 15 * US,
            "optimizer": 60 * US,
        }
    )
    assert [row.layer for row in found.layers] == [
        "Net",
        "features.0",
        "features.1",
        "classifier",
        "(loss)",
    ]
    conv = found.layers[1]
    assert (conv.type, conv.total_s) == ("Conv2d", pytest.approx(920 * US))
    assert conv.part_s("optimizer") == pytest.approx(20 * US)
    assert conv.part_s("DRAM") == 0
    assert found.share_frac("L2") == pytest.approx(0.75 * 865 / 1390)


@pytest.mark.parametrize(
    "prediction",
    [report_cases.cnn()[0], report_cases.wide()[0], report_cases.single()[0]],
    ids=["cnn", "wide", "single"],
)
def test_parts_and_layers_add_up_to_the_step(prediction):
    found = break_down(prediction)
    total_s = prediction.step.total_s
    assert found.total_s == total_s
    assert math.fsum(seconds for _, seconds in found.parts_s) == pytest.approx(total_s, rel=1e-12)
    assert math.fsum(row.total_s for row in found.layers) == pytest.approx(total_s, rel=1e-12)
    assert math.fsum(expense.seconds for expense in found.expenses) == pytest.approx(
        total_s, rel=1e-12
    )
    for part, seconds in found.parts_s:
        assert math.fsum(row.part_s(part) for row in found.layers) == pytest.approx(
            seconds, rel=1e-12
        )


def test_a_prediction_of_the_calibrated_predictor_adds_up():
    costs = {"module_call": 3e-6, "page_fault": 1e-6, "native_call": 1e-6}
    trace = cases.trace(
        cases.mm(256, 256, 256),
        cases.relu(2**16),
        dataclasses.replace(cases.relu(8), name="aten.unheard_of.default"),
    )
    prediction = predict(trace, cases.machine(costs), 1)
    found = break_down(prediction)
    assert math.fsum(seconds for _, seconds in found.parts_s) == pytest.approx(
        prediction.step.total_s, rel=1e-12
    )
    assert dict(found.parts_s)["unpriced"] > 0
    dearest = found.expenses[0]
    assert (dearest.layer, dearest.what, dearest.bound) == (
        "fc",
        "aten.mm",
        "compute",
    )  # 2 * 256^3 / 10 GFLOP/s = 3.4 ms, relu 2^16 / 10^9 = 66 us


def test_a_predictor_of_single_layers_has_no_step_to_take_apart():
    with pytest.raises(DlperfError, match=r"gemm-table.*whole step"):
        break_down(report_cases.gemm_table())

"""What is left of the error, by operator: made-up items against made-up measurements; expected
numbers are worked out beside them.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest
from report_cases import (
    US,
    around,
    cnn_items,
    cnn_measurement,
    cnn_trace,
    prediction,
)

from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.prediction import Item
from dlperf.core.trace import LOSS
from dlperf.studies.accuracy.cases import Case, Reference, join
from dlperf.studies.accuracy.residuals import (
    NOTHING,
    RESIDUAL_COLUMNS,
    REST,
    measured_parts,
    residual_table,
    residuals_of,
)

CASE = Case("nets.py:cnn", 32, 1)


def reference(measurement: Measurement | None = None) -> Reference:
    return join([cnn_measurement() if measurement is None else measurement])


def attributed(*items: Item, of: Reference | None = None) -> dict[tuple[str, str, str], tuple]:
    """Predicted, measured and absolute microseconds by layer, operator and phase."""
    found = residuals_of(CASE, of or reference(), prediction(cnn_trace(), items))
    return {
        (row.layer, row.operator, row.phase): (
            pytest.approx(row.predicted_s / US),
            pytest.approx(row.measured_s / US),
            pytest.approx(row.absolute_s / US),
        )
        for row in found.itertuples()
    }


def test_parts_add_up_to_the_measured_step() -> None:
    found = measured_parts(reference())
    assert sum(found.values()) == pytest.approx(1235 * US)
    assert found["features.0", "forward"] == pytest.approx(250 * US)
    assert found[REST, "forward"] == pytest.approx(0.0)  # 430 of layers that take 430
    assert found[REST, "optimizer"] == pytest.approx(75 * US)  # its layers are dlperf's division
    assert found[REST, "zero_grad"] == pytest.approx(10 * US)


def test_phases_are_scaled_to_the_step_and_layers_to_no_more_than_their_phase() -> None:
    whole = reference()
    found = measured_parts(replace(whole, total_s=2 * whole.total_s))
    assert found["classifier", "forward"] == pytest.approx(110 * US)
    assert found[REST, "forward"] == pytest.approx(430 * US)  # 860 less the layers' 430
    found = measured_parts(replace(whole, total_s=0.5 * whole.total_s))
    assert found["classifier", "forward"] == pytest.approx(55 * US)
    assert found[REST, "forward"] == 0.0
    assert sum(found.values()) == pytest.approx(0.5 * 1235 * US)


def test_a_layers_time_belongs_to_its_items_in_proportion() -> None:
    found = attributed(
        Item("classifier", "forward", 60 * US, "compute", "measured", op=2),
        Item("classifier", "forward", 20 * US, "overhead", "measured", "module call"),
    )
    # 110 measured for 80 predicted: 3 : 1 of the time and of the residual of 30.
    assert found["classifier", "aten.mm", "forward"] == (60, 82.5, 22.5)
    assert found["classifier", "module call", "forward"] == (20, 27.5, 7.5)
    assert found["features.1", NOTHING, "backward"] == (0, 50, 50)
    assert found[REST, NOTHING, "zero_grad"] == (0, 10, 10)


def test_items_without_a_measured_layer_share_the_rest_of_their_phase() -> None:
    found = attributed(
        Item("features.0", "optimizer", 30 * US, "DRAM", "measured", op=8),
        Item("classifier", "optimizer", 20 * US, "overhead", "measured", "optimizer loop"),
        Item("Net", "forward", 5 * US, "overhead", "measured", "module call"),
    )
    # The optimizer's 75 for 50 predicted; the forward has no rest beside its layers.
    assert found["features.0", "aten.add_", "optimizer"] == (30, 45, 15)
    assert found["classifier", "optimizer loop", "optimizer"] == (20, 30, 10)
    assert found["Net", "module call", "forward"] == (5, 0, 5)


@pytest.mark.parametrize("missing", [(), ("features.0",), ("classifier", LOSS)])
def test_residuals_add_up_to_predicted_minus_measured(missing: tuple[str, ...]) -> None:
    measured = reference(cnn_measurement(without=missing))
    predicted = prediction(cnn_trace(), cnn_items())
    found = residual_table([residuals_of(CASE, measured, predicted)])
    assert found.residual_s.sum() == pytest.approx((1390 - 1235) * US)
    assert found.predicted_s.sum() == pytest.approx(1390 * US)
    assert found.measured_share_frac.sum() == pytest.approx(1.0)
    assert found.residual_share_frac.sum() == pytest.approx(1.0)
    assert found.absolute_s.is_monotonic_decreasing


def test_a_forward_alone_adds_up_too() -> None:
    predicted = prediction(cnn_trace(inference=True), cnn_items(inference=True))
    measured = reference(cnn_measurement(inference=True))
    found = residual_table([residuals_of(CASE, measured, predicted)])
    assert found.residual_s.sum() == pytest.approx((450 - 430) * US)
    assert set(found.phase) == {"forward"}


def test_cases_are_joined_by_operator_phase_and_bound() -> None:
    def case(layer: str, predicted_us: float, measured_us: float, batch_size: int) -> pd.DataFrame:
        measured = Measurement(
            "t",
            batch_size,
            1,
            {"forward": around(measured_us * US), "total": around(measured_us * US)},
            (LayerTimes(layer, "Linear", around(measured_us * US)),),
            inference=True,
        )
        items = (Item(layer, "forward", predicted_us * US, "compute", "measured", op=2),)
        trace = cnn_trace(inference=True)
        return residuals_of(
            Case("t", batch_size, 1, True), join([measured]), prediction(trace, items)
        )

    found = residual_table([case("a", 120, 100, 1), case("a", 270, 300, 2), case("b", 9, 0.1, 2)])
    assert list(found.columns) == RESIDUAL_COLUMNS
    (row,) = found.itertuples()
    assert (row.operator, row.phase, row.bound, row.n_layers) == (
        "aten.mm",
        "forward",
        "compute",
        3,
    )
    # Signed +20 - 30 + 8.9 of 400.1; absolute 20 + 30 + 8.9.
    assert row.error_frac == pytest.approx(-1.1 / 400.1)
    assert row.absolute_s == pytest.approx(58.9 * US)


def test_without_a_case_there_is_an_empty_table() -> None:
    found = residual_table([])
    assert found.empty
    assert list(found.columns) == RESIDUAL_COLUMNS

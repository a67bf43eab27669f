"""Strategies (a) and (b) of Viebke et al. 2019 as predictors of a step."""

from __future__ import annotations

from dataclasses import replace

import calibrated_cases
import pytest
from report_cases import CNN, US, T, cnn_measurement, cnn_trace, machine

from dlperf import predict
from dlperf.core.errors import DlperfError
from dlperf.core.measurement import Measurement
from dlperf.core.trace import LOSS, Op, Trace
from dlperf.forecast.prediction import Prediction
from dlperf.models.threads import ImageTimes, Workload, training_time
from dlperf.predictors.registry import evaluates_by_forward, get

TOTAL_US = 430 + 720 + 75 + 10  # forward, backward, optimizer, zero_grad of cnn_measurement
PRODUCT, LINEAR = (
    2 * 32 * 64 * 128,
    2 * 32 * 10 * 64,
)  # FLOP of features.0 and of the classifier, forward and backward each


def say(
    name: str, trace: Trace | None = None, point: Measurement | None = None, threads: int = 1
) -> Prediction:
    return predict(
        trace or cnn_trace(),
        machine(),
        threads=threads,
        predictor=name,
        point=point or cnn_measurement(),
    )


def total_flops(prediction: Prediction) -> float:
    return float(prediction.layers["flops"].sum())


# -- (a) -------------------------------------------------------------------------------------------


def test_a_divides_the_measured_step_by_flops() -> None:
    found = say("viebke-a")
    rows = found.layers.set_index("layer")
    # Conv 2 x 524,288, ReLU 2 x 4,096, Linear 2 x 40,960, loss 2 x 32; the optimizer's additions 1
    # for each of 8,192 + 640 (a scale factor is not counted)
    each_s = TOTAL_US * US / (2 * (PRODUCT + 4096 + LINEAR + 32) + 8192 + 640)
    assert rows["forward_s"].to_dict() == pytest.approx(
        {name: each_s * flops for name, flops in zip(CNN, (PRODUCT, 4096, LINEAR, 32))}
    )
    assert rows.loc["features.0", "optimizer_s"] == pytest.approx(each_s * 8192)
    assert found.step.total_s == pytest.approx(TOTAL_US * US)
    assert set(rows["source"]) == {"interpolated"}
    assert set(rows["bound"]) == {"compute"}
    assert (
        f"{each_s:.4g} s per FLOP, fitted to the measurement of nets.py:cnn at batch size 32 with"
        " 1 thread" in found.prices.notes[0]
    )


def test_a_at_another_batch_size_is_fitted_to_the_flops_of_the_point() -> None:
    # a step of 64 images took so long: the trace's 32 do half of its forward and backward, and the
    # same optimizer's work
    found = say("viebke-a", point=cnn_measurement(batch_size=64))
    both, optimizer = 2 * (PRODUCT + 4096 + LINEAR + 32), 8192 + 640
    assert found.step.total_s == pytest.approx(
        TOTAL_US * US * (both + optimizer) / (2 * both + optimizer)
    )
    assert set(found.layers["source"]) == {"extrapolated"}


def test_a_of_a_forward_takes_the_forward_of_a_step() -> None:
    found = say("viebke-a", cnn_trace(inference=True))
    assert found.step.total_s == found.step.forward_s == pytest.approx(430 * US)
    assert "its forward pass alone" in found.prices.notes[0]
    assert set(found.layers["source"]) == {"extrapolated"}


def test_a_leaves_ops_without_a_formula_out_of_its_fit() -> None:
    trace = cnn_trace()
    trace = replace(
        trace,
        ops=(
            *trace.ops,
            Op("mine.mystery.default", (T(25_000),), outputs=(T(25_000),), layer="features.1"),
        ),
    )
    found = say("viebke-a", trace)
    # 2 x 25,000 x 4 bytes at the 10 GB/s of a triad over 256 MiB, rated 3 x n bytes in 3 n / 10
    # GB/s
    (row,) = found.ops[found.ops["source"] == "unpriced"]["seconds"]
    assert row == pytest.approx(200_000 / 10e9)
    assert found.unpriced == {"mine.mystery": 1}
    assert found.step.total_s == pytest.approx(TOTAL_US * US)


def test_a_without_a_point_takes_the_calibrated_step() -> None:
    trace = calibrated_cases.trace(calibrated_cases.mm(64, 64, 64), calibrated_cases.relu(1024))
    one, other = (
        predict(trace, calibrated_cases.machine(), threads=1, predictor=name)
        for name in ("calibrated", "viebke-a")
    )
    assert other.step.total_s == pytest.approx(one.step.total_s)
    assert (other.step.low_s, other.step.high_s) == pytest.approx((one.step.low_s, one.step.high_s))
    assert other.step.peak_memory_bytes == one.step.peak_memory_bytes
    # by FLOPs: 2 x 64^3 to 1024
    seconds = other.layers.set_index("layer")["forward_s"]
    assert seconds["fc"] / seconds["act"] == pytest.approx(2 * 64**3 / 1024)
    assert "fitted to the step that calibrated predicts" in other.prices.notes[0]


# -- (b) -------------------------------------------------------------------------------------------


def test_b_is_the_measurement() -> None:
    found = say("viebke-b")
    rows = found.layers.set_index("layer")
    assert rows["forward_s"].to_dict() == pytest.approx(
        {name: row[4] * US for name, row in CNN.items()}
    )
    assert rows["backward_s"].to_dict() == pytest.approx(
        {name: row[5] * US for name, row in CNN.items()}
    )
    assert rows["optimizer_s"].to_dict() == pytest.approx(
        {name: (row[6] or 0) * US for name, row in CNN.items()}
    )
    assert found.step.zero_grad_s == pytest.approx(10 * US)
    assert found.step.total_s == pytest.approx(TOTAL_US * US)
    assert set(rows["source"]) == {"measured"}


def test_b_scales_images_but_not_the_optimizer() -> None:
    step = say("viebke-b", point=cnn_measurement(batch_size=64)).step
    assert (step.forward_s, step.backward_s) == pytest.approx((215 * US, 360 * US))
    assert (step.optimizer_s, step.zero_grad_s) == pytest.approx((75 * US, 10 * US))
    other_threads = say("viebke-b", threads=2)
    assert set(other_threads.layers["source"]) == {"extrapolated"}


def test_b_without_times_by_layer_says_the_step() -> None:
    found = say("viebke-b", point=replace(cnn_measurement(), layers=()))
    assert found.step.forward_s == pytest.approx(430 * US)
    assert list(found.layers["layer"]) == ["Net"]


def test_b_without_a_point_is_the_calibrated_step() -> None:
    trace = calibrated_cases.trace(calibrated_cases.mm(64, 64, 64))
    one, other = (
        predict(trace, calibrated_cases.machine(), threads=1, predictor=name)
        for name in ("calibrated", "viebke-b")
    )
    assert other.step == one.step
    assert (
        other.prices.notes[0] == "viebke-b: T_FProp and T_BProp are those that calibrated predicts"
    )


def test_a_step_becomes_a_run() -> None:
    step = say("viebke-b").step
    assert step.forward_s is not None
    assert step.total_s is not None
    times = ImageTimes.of_step(step.forward_s, step.total_s, 32)
    run = training_time(Workload(2, 64, 64, 32), times, n_workers=2)
    # 64/2 images are one step's worth an epoch: 2 steps, 2 forwards to validate, 2 x 32/2 images to
    # test
    assert run.total_s == pytest.approx(2 * TOTAL_US * US + 2 * 430 * US + 430 * US)


# -- what they cannot take -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["viebke-a", "viebke-b"])
def test_a_point_of_another_network_is_refused(name: str) -> None:
    trace = cnn_trace()
    other = replace(
        trace,
        target="other",
        layers=tuple(layer for layer in trace.layers if layer.name != "classifier"),
    )
    with pytest.raises(
        DlperfError,
        match=(
            r"another network: its layer 'classifier' \(Linear\) is not in other; dlperf measure"
            r" other -o FILE"
        ),
    ):
        say(name, other)
    other = replace(
        trace,
        layers=tuple(
            replace(layer, type="Tanh") if layer.name == "features.1" else layer
            for layer in trace.layers
        ),
    )
    with pytest.raises(DlperfError, match=r"'features.1' \(ReLU\) is Tanh in"):
        say(name, other)


def test_b_needs_a_backward() -> None:
    with pytest.raises(DlperfError, match="says nothing of T_BProp"):
        say("viebke-b", point=cnn_measurement(inference=True))


def test_a_needs_something_to_count() -> None:
    trace = Trace(
        "t",
        1,
        cnn_trace().layers,
        (Op("aten.clone.default", (T(4),), outputs=(T(4),), layer="features.0"),),
        inference=True,
    )
    with pytest.raises(DlperfError, match="OperationFactor needs at least one"):
        say("viebke-a", trace, cnn_measurement(inference=True, without=(LOSS,)))


def test_other_predictors_take_no_point() -> None:
    with pytest.raises(
        DlperfError,
        match="'roofline' takes no measured point; those that do are viebke-a, viebke-b",
    ):
        get("roofline", cnn_measurement())


def test_which_predictors_validate_by_the_forward_of_a_step() -> None:
    assert [
        evaluates_by_forward(name) for name in ("calibrated", "roofline", "viebke-a", "viebke-b")
    ] == [False, False, True, True]

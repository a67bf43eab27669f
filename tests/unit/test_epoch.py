"""Epochs by hand."""
from __future__ import annotations

from dataclasses import replace

import pytest
from report_cases import cnn, cnn_items, cnn_trace, gemm_table, prediction

from dlperf.epoch import Epoch
from dlperf.errors import DlperfError
from dlperf.prediction import Prediction

STEP_S = 1390e-6  # 1375 us of the layers and 15 us of zero_grad
FORWARD_S = 450e-6  # 300 + 40 + 100 + 10


def training() -> Prediction:
    return cnn()[0]


def test_an_epoch_is_its_steps() -> None:
    # 1000 samples in batches of 32: 31.25, so 32 steps
    found = training().epoch(1000, epochs=3)
    assert found == Epoch(1000, 3, pytest.approx(32 * STEP_S), pytest.approx(96 * STEP_S), 32)


def test_whole_batches_are_not_rounded_up() -> None:
    assert training().epoch(64).steps_per_epoch == 2
    assert training().epoch(65).steps_per_epoch == 3
    assert training().epoch(1).steps_per_epoch == 1


def test_validation_in_every_epoch_and_one_test_at_the_end() -> None:
    # 100 samples of validation: 4 batches; 33 of test: 2
    found = training().epoch(320, epochs=5, val_samples=100, test_samples=33)
    assert found.epoch_s == pytest.approx(10 * STEP_S + 4 * FORWARD_S)
    assert found.total_s == pytest.approx(5 * (10 * STEP_S + 4 * FORWARD_S) + 2 * FORWARD_S)


def test_evaluation_has_a_prediction_of_its_own() -> None:
    evaluation = prediction(cnn_trace(inference=True), cnn_items(inference=True, factor=0.5))
    found = training().epoch(320, val_samples=100, test_samples=33, evaluation=evaluation)
    assert found.total_s == pytest.approx(10 * STEP_S + 6 * FORWARD_S / 2)


@pytest.mark.parametrize(("name", "value", "least"), [("samples", 0, 1), ("samples", -5, 1), ("epochs", 0, 1), ("val_samples", -1, 0), ("test_samples", -1, 0)])
def test_impossible_counts_are_named(name: str, value: int, least: int) -> None:
    with pytest.raises(DlperfError, match=f"{name} is {value}; it must be at least {least}"):
        training().epoch(**{"samples": 1, name: value})


def test_a_predictor_without_a_step_has_no_epoch() -> None:
    with pytest.raises(DlperfError, match="'gemm-table' predicts no whole step, so no epoch; use calibrated or roofline"):
        gemm_table().epoch(100)
    with pytest.raises(DlperfError, match="no epoch"):
        training().epoch(100, evaluation=replace(gemm_table(), trace=cnn_trace(inference=True)))

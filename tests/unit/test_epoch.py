"""Epochs by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from calibrated_cases import cost
from report_cases import cnn, cnn_items, cnn_trace, gemm_table, machine, prediction
from test_loading import IN_PROCESS, WORKERS

from dlperf.core.errors import DlperfError
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.state import Reading, State
from dlperf.forecast.epoch import last_batch_size
from dlperf.forecast.loading import pipeline_s
from dlperf.forecast.prediction import Prediction

STEP_S = 1390e-6  # 1375 us of the layers and 15 us of zero_grad
FORWARD_S = 450e-6  # 300 + 40 + 100 + 10


def training() -> Prediction:
    return cnn()[0]


def test_an_epoch_is_its_steps() -> None:
    # 1000 samples in batches of 32: 31.25, so 32 steps
    found = training().epoch(1000, epochs=3)
    assert (found.samples, found.epochs, found.steps_per_epoch) == (1000, 3, 32)
    assert found.epoch_s == found.steps_s == pytest.approx(32 * STEP_S)
    assert found.total_s == pytest.approx(96 * STEP_S)


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


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("samples", 0, 1),
        ("samples", -5, 1),
        ("epochs", 0, 1),
        ("val_samples", -1, 0),
        ("test_samples", -1, 0),
    ],
)
def test_impossible_counts_are_named(name: str, value: int, least: int) -> None:
    with pytest.raises(DlperfError, match=f"{name} is {value}; it must be at least {least}"):
        training().epoch(**{"samples": 1, name: value})


def test_a_predictor_without_a_step_has_no_epoch() -> None:
    with pytest.raises(
        DlperfError,
        match="'gemm-table' predicts no whole step, so no epoch; use calibrated or roofline",
    ):
        gemm_table().epoch(100)
    with pytest.raises(DlperfError, match="no epoch"):
        training().epoch(100, evaluation=replace(gemm_table(), trace=cnn_trace(inference=True)))


# -- the loop around the steps ---------------------------------------------------------------------

US = 1e-6
LOOP = {
    "item": 2 * US,
    "accuracy": 20 * US,
    "scheduler": 5 * US,
    "clip_call": 10 * US,
    "clip_tensor": 3 * US,
    "clip_byte": 1e-9,
    "save_call": 1e-3,
    "save_tensor": 50 * US,
    "save_byte": 1e-9,
    "first_convolution": 2e-3,
    "first_step": 0.05,
}
EVERYTHING = IN_PROCESS | WORKERS | {f"loop_{name}": s for name, s in LOOP.items()}
ITEM_S = LOOP["item"]


def with_costs(found: Prediction, costs: Mapping[Any, float] = EVERYTHING) -> Prediction:
    return replace(
        found,
        machine=replace(
            machine(),
            costs=tuple(cost(key, seconds) for key, seconds in costs.items()),
        ),
    )


def full() -> Prediction:
    return with_costs(training())


def loader(batch_s: float, **rest: object) -> SampledLoader:
    return SampledLoader("l", 32, batch_s, (1024,), 40, **rest)  # type: ignore[arg-type]


def test_parts_add_up() -> None:
    found = full().epoch(
        1000, 3, 100, 33, loader_workers=2, clip=True, checkpoint=True, loader=loader(1e-3)
    )
    assert found.loading_s is not None
    assert found.first_step_s is not None
    assert found.epoch_s == pytest.approx(
        found.steps_s + found.loop_s + found.loading_s + found.evaluation_s + found.pauses_s
    )
    assert found.total_s == pytest.approx(
        found.first_step_s + found.start_s + 3 * found.epoch_s + found.test_s
    )
    assert all(
        part > 0
        for part in (
            found.loop_s,
            found.loading_s,
            found.evaluation_s,
            found.pauses_s,
            found.first_step_s,
            found.test_s,
        )
    )


def test_a_loader_without_costs_is_left_out_and_named() -> None:
    found = training().epoch(320)
    assert found.loading_s is None
    assert found.first_step_s is None
    assert [note.split(";")[0] for note in found.notes] == [
        "machine: holds no costs of loading data, which is not part of the forecast",
        "the overhead of a first step is not part of the forecast",
    ]


def test_a_loader_that_is_asked_for_needs_its_costs() -> None:
    for options in ({"loader_workers": 0}, {"loader_workers": 2}, {"loader": loader(1e-3)}):
        with pytest.raises(
            DlperfError, match="holds no costs of loading data; dlperf calibrate adds them"
        ):
            training().epoch(320, **options)


@pytest.mark.parametrize("option", ["clip", "scheduler", "accuracy", "checkpoint"])
def test_what_the_file_does_not_hold_is_named(option: str) -> None:
    with pytest.raises(
        DlperfError,
        match=(
            r"machine: holds no cost of '(clip|scheduler|accuracy|save)'; dlperf calibrate adds it"
        ),
    ):
        training().epoch(320, **{option: True})


def test_batches_in_memory_are_fetched_between_steps() -> None:
    # the made-up trace reads nothing from outside: a tensor of a byte, whose copying is that of the
    # smallest size measured
    fetch_s = (30 + 6 + 32 * (1 + 2 + 0.1)) * US + 32 * 2e-10
    found = full().epoch(320)
    assert found.loading_s == pytest.approx(10 * fetch_s)
    assert found.epoch_s == pytest.approx(10 * (STEP_S + ITEM_S + fetch_s))


def test_a_sampled_loader_with_workers() -> None:
    take_s, hand_s = (500 + 300) * US + 1024 * 4e-10, (700 + 200) * US + 1024 * 1e-9
    once_s = 0.02 + 2 * 0.015 + 0.007 + 2 * 0.001  # started and ended in every epoch
    found = full().epoch(3200, loader_workers=2, loader=loader(0.02))
    with_loading_s = pipeline_s(100, STEP_S + ITEM_S + take_s, 0.02 + hand_s + take_s, 2, 1, 2)
    assert found.bound == "loader"
    assert found.epoch_s == pytest.approx(with_loading_s + once_s)
    assert found.start_s == 0.0
    stays = full().epoch(3200, 4, loader_workers=2, loader=loader(0.02), persistent_workers=True)
    assert stays.start_s == pytest.approx(once_s)
    assert stays.epoch_s == pytest.approx(with_loading_s + 0.002 * 3 / 4)
    assert full().epoch(3200, loader_workers=2, loader=loader(0.0001)).bound == "step"


def test_the_last_batch_has_a_prediction_of_its_own() -> None:
    last = with_costs(prediction(cnn_trace(batch_size=8), cnn_items(factor=0.5)))
    half_s = (1375 * 0.5 + 15 * 0.5) * US
    assert full().epoch(328, last=last).steps_s == pytest.approx(10 * STEP_S + half_s)
    with pytest.raises(
        DlperfError,
        match="last: is predicted at batch size 8; the last batch of 320 samples has 32",
    ):
        full().epoch(320, last=last)


def test_dropping_the_last_batch() -> None:
    assert full().epoch(351, drop_last=True).steps_per_epoch == 10
    with pytest.raises(
        DlperfError, match="samples is 31, fewer than a batch of 32, and drop_last leaves no step"
    ):
        full().epoch(31, drop_last=True)
    assert last_batch_size(351, 32, drop_last=True) is None


def test_accumulation_shares_the_optimizer() -> None:
    # 10 batches to 3 updates (4 + 4 + 2): forward 450, backward 865, optimizer 60, zero_grad 15 us;
    # 7 times gradients are added to gradients
    found = full().epoch(320, accumulate=4)
    assert found.steps_s == pytest.approx((10 * (450 + 865) + 3 * (60 + 15)) * US)
    assert full().epoch(320, accumulate=1).steps_s == pytest.approx(10 * STEP_S)
    with pytest.raises(DlperfError, match="accumulate is 0; it must be at least 1"):
        full().epoch(320, accumulate=0)


def test_what_a_loop_does_besides() -> None:
    assert full().epoch(320, look=False).loop_s == 0.0
    # looked at and counted in each of 10 batches; clipped (a call: the made-up layers own no
    # parameters) and scheduled at each of 3 updates
    found = full().epoch(320, accumulate=4, accuracy=True, clip=True, scheduler=True)
    assert found.loop_s == pytest.approx((10 * (2 + 20) + 3 * (10 + 5)) * US)
    assert full().epoch(320, checkpoint=True).pauses_s == pytest.approx(1e-3)


def test_unknown_words_are_named() -> None:
    with pytest.raises(
        DlperfError, match="epoch: loaders is unknown; a loop has accumulate, drop_last"
    ):
        full().epoch(320, loaders=3)


def test_epochs_sum_means_at_the_state_of_the_step() -> None:
    """The interpreter at 1.1. Readings of the core have a mean of 1.2 and a median of 1: all takes
    1.2 times as long.
    """
    ones = Reading(*(1.0,) * 6)
    readings = (*(ones,) * 3, replace(ones, core_s=2.0))
    step = with_costs(training(), EVERYTHING)
    machine = replace(step.machine, reference=ones, readings=(*readings, ones))
    found = replace(step, machine=machine, state=State(interpreter=1.1)).epoch(320)
    plain = full().epoch(320)
    assert found.steps_s == pytest.approx(1.2 * plain.steps_s)
    assert found.loop_s == pytest.approx(1.2 * 1.1 * plain.loop_s)
    assert found.loading_s is not None
    assert plain.loading_s is not None
    assert 1.2 * plain.loading_s < found.loading_s < 1.2 * 1.1 * plain.loading_s  # bytes


def test_the_first_step() -> None:
    assert full().epoch(320).first_step_s == pytest.approx(
        0.05
    )  # no convolution by name, and no memory in the made-up trace

"""The published strategies as forecasts of a run, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrated_cases import machine as made_up
from calibrated_cases import relu
from calibrated_cases import trace as trace_of

from dlperf.core.clock import Samples
from dlperf.core.co_run import PREPARATION, CoRun
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Cpu, Machine
from dlperf.core.prediction import Item, Prices
from dlperf.forecast.prediction import Prediction
from dlperf.forecast.worker_processes import forecast_published

CPU = Cpu("Made-up CPU", 2, (2**15, 2**20, 2**25), n_physical_cores=2)


def file(**slowdowns: float) -> Machine:
    """Two workers that slow each other down by these factors, and take 3 s to start (one alone 2
    s).
    """
    kinds = [
        CoRun(work, 2, Samples((factor,)), Samples((1.0,)))
        for work, factor in {"overhead": 1.0, **slowdowns}.items()
    ]
    return replace(
        made_up(),
        cpu=CPU,
        co_runs=(*kinds, CoRun(PREPARATION, 2, Samples((3.0,)), Samples((2.0,)))),
    )


def prediction(machine: Machine) -> Prediction:
    """A batch of 10: forward 2 s, backward 3 s, both computing."""
    items = (
        Item("fc", "forward", 2.0, "compute", "measured"),
        Item("fc", "backward", 3.0, "compute", "measured"),
    )
    return Prediction(
        replace(trace_of(relu(64)), batch_size=10, inference=False),
        machine,
        1,
        "viebke-b",
        Prices(items),
    )


def test_one_process_has_neither_preparation_nor_contention() -> None:
    run = forecast_published(
        prediction(file(compute=1.5)), None, samples=100, epochs=2, val_samples=50, test_samples=20
    )
    assert run.steps_s == pytest.approx(100 * 0.5)
    assert run.evaluation_s == pytest.approx(50 * 0.2)
    assert run.test_s == pytest.approx(20 * 0.2)
    assert run.total_s == pytest.approx(2 * (50 + 10) + 4)


def test_two_workers_share_the_images_and_pay_for_contention() -> None:
    # each of two cores' images takes 1.5 times as long: MemoryContention = (1.5 - 1) 5 s / 10
    # images
    run = forecast_published(prediction(file(compute=1.5)), 2, samples=100, epochs=2)
    assert run.steps_s == pytest.approx(50 * 0.5 + 50 * 0.25)
    assert (run.preparation_s, run.steps_per_epoch) == (3.0, 5)
    assert run.total_s == pytest.approx(3 + 2 * 37.5)


def test_contention_is_not_negative() -> None:
    assert forecast_published(
        prediction(file(compute=0.9)), 2, samples=100
    ).steps_s == pytest.approx(50 * 0.5)


def test_a_prediction_of_that_predictor_follows_its_law() -> None:
    assert prediction(file(compute=1.5)).epoch(100, 2, 50, 20) == forecast_published(
        prediction(file(compute=1.5)), None, 100, 2, 50, 20
    )


@pytest.mark.parametrize(
    ("workers", "samples", "complaint"),
    [(2, 0, "samples is 0"), (0, 10, "at least 1"), (11, 10, "more than the 10 training images")],
)
def test_runs_that_cannot_be(workers: int, samples: int, complaint: str) -> None:
    with pytest.raises(DlperfError, match=complaint):
        prediction(file(compute=1.5)).epoch(samples, workers=workers)

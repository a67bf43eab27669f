"""Prediction -> training run: an epoch is its steps and its evaluation passes."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlperf.errors import DlperfError, check_count

if TYPE_CHECKING:
    from dlperf.prediction import Prediction


@dataclass(frozen=True)
class Epoch:
    """A forecast: `epoch_s` is one epoch (training and validation), `total_s` all of them and the test pass."""

    samples: int
    epochs: int
    epoch_s: float
    total_s: float
    steps_per_epoch: int


def forecast(
    training: Prediction, samples: int, epochs: int = 1, val_samples: int = 0, test_samples: int = 0, evaluation: Prediction | None = None
) -> Epoch:
    """Time of an epoch and of the whole run, in seconds.

    T_epoch = ceil(samples / batch) T_step + ceil(val_samples / batch) T_eval;
    T = epochs T_epoch + ceil(test_samples / batch) T_eval. A last, smaller batch counts as a whole one, so the
    forecast errs high by less than one step. `evaluation` is the prediction of the inference pass; without it
    T_eval is the training step's forward, which errs high by the cost of recording for the backward.
    Loading of data is not part of it.

    Raises DlperfError for counts below 0 (1 for samples and epochs), or a predictor that gives no step.
    """
    for name, value, least in (("samples", samples, 1), ("epochs", epochs, 1), ("val_samples", val_samples, 0), ("test_samples", test_samples, 0)):
        check_count(name, value, least)
    batch = training.trace.batch_size
    step_s = training.step.total_s
    evaluation_s = evaluation.step.total_s if evaluation is not None else training.step.forward_s
    if step_s is None or evaluation_s is None:
        raise DlperfError(f"predictor {training.predictor!r} predicts no whole step, so no epoch; use calibrated or roofline")
    n_steps = math.ceil(samples / batch)
    epoch_s = n_steps * step_s + math.ceil(val_samples / batch) * evaluation_s
    return Epoch(samples, epochs, epoch_s, epochs * epoch_s + math.ceil(test_samples / batch) * evaluation_s, n_steps)

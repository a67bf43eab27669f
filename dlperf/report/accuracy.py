"""How right a prediction was: the step's error and the mean absolute percentage error over its
layers, beside what a repetition would differ by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from dlperf.report.layer_comparison import MEASURED, LayerComparison, phases_of

if TYPE_CHECKING:
    from dlperf.core.measurement import Measurement
    from dlperf.forecast.prediction import Prediction

SHARE_FRAC = 0.01
"""The least share of its phase that lets a layer into the headline MAPE: below it, timing noise
would be averaged at full weight.
"""


@dataclass(frozen=True)
class PhaseAccuracy:
    """One predictor in one phase of the step (``step`` is the whole).

    `error_frac` is predicted / actual - 1 of the phase; `repeatability_frac` what a repeated measurement of
    the step differed by. `mape_frac` is the mean of abs(predicted / actual - 1) over the `n_layers`
    layers that take at least 1 % of the phase, `mape_all_frac` the same over all `n_all` measured
    layers; `weighted_frac` is the sum of abs(predicted - actual) over the sum of actual.
    `spread_frac` is the mean over the `n_layers` of (90th - 10th percentile) / median of their own
    samples. `seen_frac` is the share of the phase that the measurement attributes to layers. A
    measured layer without a predicted row is `n_missing` and counts as a prediction of 0 (an error
    of 100 %); a row that the predictor does not speak of is `n_unsupported` and drops out. Everything
    is None where a side does not know.
    """

    predictor: str
    phase: str
    predicted_s: float | None = None
    actual_s: float | None = None
    error_frac: float | None = None
    repeatability_frac: float | None = None
    mape_frac: float | None = None
    mape_all_frac: float | None = None
    weighted_frac: float | None = None
    spread_frac: float | None = None
    seen_frac: float | None = None
    n_layers: int = 0
    n_all: int = 0
    n_missing: int = 0
    n_unsupported: int = 0


def accuracy_of(
    rows: Sequence[LayerComparison],
    prediction: Prediction,
    measurement: Measurement,
    predictor: str,
) -> tuple[PhaseAccuracy, ...]:
    """The accuracy of one predictor's rows: each phase, zero_grad (training only), and the step
    last.
    """
    step = prediction.step
    predicted = {
        "forward": step.forward_s,
        "backward": step.backward_s,
        "optimizer": step.optimizer_s,
        "zero_grad": step.zero_grad_s,
    }
    found = []
    for phase in (
        *phases_of(prediction.trace.inference),
        *(() if prediction.trace.inference else ("zero_grad",)),
    ):
        samples = measurement.step.get(phase)
        actual_s = samples.median if samples is not None else None
        in_layers = (
            None
            if phase == "zero_grad"
            else _layers(rows, phase, actual_s, phase in prediction.prices.phases)
        )
        found.append(_accuracy(predictor, phase, predicted[phase], actual_s, None, in_layers))
    found.append(
        _accuracy(
            predictor,
            "step",
            step.total_s,
            measurement.step["total"].median,
            measurement.repeatability_frac,
            None,
        )
    )
    return tuple(found)


@dataclass(frozen=True)
class _Layers:
    mape_frac: float | None
    mape_all_frac: float | None
    weighted_frac: float | None
    spread_frac: float | None
    seen_frac: float | None
    n_layers: int
    n_all: int
    n_missing: int
    n_unsupported: int


def _layers(
    rows: Sequence[LayerComparison], phase: str, phase_s: float | None, spoken: bool
) -> _Layers | None:
    seen = [
        (row, times)
        for row in rows
        if (times := row.phase(phase)) is not None and times.actual_s is not None
    ]
    if not phase_s or not seen:
        return None
    seen_frac = math.fsum(times.actual_s or 0.0 for _, times in seen) / phase_s
    if not spoken:
        return _Layers(None, None, None, None, seen_frac, 0, 0, 0, len(seen))
    judged = []
    n_missing = n_unsupported = 0
    for row, times in seen:
        actual_s = times.actual_s or 0.0
        if row.side == MEASURED:
            n_missing += 1
            judged.append((0.0, actual_s, times.spread_frac))
        elif times.predicted_s is None:
            n_unsupported += 1
        else:
            judged.append((times.predicted_s, actual_s, times.spread_frac))
    if len(judged) == n_missing:  # nothing that the predictor speaks of was measured
        return _Layers(None, None, None, None, seen_frac, 0, 0, n_missing, n_unsupported)
    positive = [entry for entry in judged if entry[1] > 0]
    large = [entry for entry in positive if entry[1] >= SHARE_FRAC * phase_s]
    spreads = [spread for _, _, spread in large if spread is not None]
    actual_sum = math.fsum(actual_s for _, actual_s, _ in judged)
    return _Layers(
        mape_frac=fmean(abs(p / a - 1) for p, a, _ in large) if large else None,
        mape_all_frac=fmean(abs(p / a - 1) for p, a, _ in positive) if positive else None,
        weighted_frac=(
            math.fsum(abs(p - a) for p, a, _ in judged) / actual_sum if actual_sum else None
        ),
        spread_frac=fmean(spreads) if spreads else None,
        seen_frac=seen_frac,
        n_layers=len(large),
        n_all=len(positive),
        n_missing=n_missing,
        n_unsupported=n_unsupported,
    )


def _accuracy(
    predictor: str,
    phase: str,
    predicted_s: float | None,
    actual_s: float | None,
    repeatability_frac: float | None,
    layers: _Layers | None,
) -> PhaseAccuracy:
    error_frac = predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None
    if layers is None:
        return PhaseAccuracy(
            predictor, phase, predicted_s, actual_s, error_frac, repeatability_frac
        )
    return PhaseAccuracy(
        predictor,
        phase,
        predicted_s,
        actual_s,
        error_frac,
        repeatability_frac,
        layers.mape_frac,
        layers.mape_all_frac,
        layers.weighted_frac,
        layers.spread_frac,
        layers.seen_frac,
        layers.n_layers,
        layers.n_all,
        layers.n_missing,
        layers.n_unsupported,
    )

"""Accuracy of a prediction: error of the step, mean absolute percentage error over its layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dlperf.core.measurement import Measurement
from dlperf.forecast.prediction import Prediction
from dlperf.report.layer_comparison import MEASURED, LayerComparison, phases_of

SHARE_FRAC = 0.01
"""Least share of its phase with which a layer counts in the headline MAPE. Below it, timing noise
would count at full weight.
"""


@dataclass(frozen=True)
class PhaseAccuracy:
    """One predictor's accuracy in one phase of the step (``step`` is the whole).

    `error_frac` is predicted / actual - 1 of the phase; `repeatability_frac` the difference of a
    repeated measurement of the step. `mape_frac` is the mean of abs(predicted / actual - 1) over
    the `n_layers` layers that take at least 1 % of the phase, `mape_all_frac` the same over all
    `n_all` measured layers. `weighted_frac` is the sum of abs(predicted - actual) over the sum of
    actual. `spread_frac` is the mean over the `n_layers` of (90th - 10th percentile) / median of
    their samples. `seen_frac` is the share of the phase that the measurement attributes to layers.
    `n_missing` measured layers have no predicted row and count as a prediction of 0 (an error of
    100 %); `n_unsupported` rows that the predictor does not support drop out. None where unknown.
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
    """One predictor's accuracy: each phase, zero_grad (in training), the step last."""
    phases = phases_of(prediction.trace.inference)
    found = []
    for phase in (*phases, *(() if prediction.trace.inference else ("zero_grad",)), "step"):
        samples = measurement.step.get("total" if phase == "step" else phase)
        actual_s = samples.median if samples is not None else None
        predicted_s = getattr(prediction.step, "total_s" if phase == "step" else f"{phase}_s")
        supported = phase in prediction.prices.phases
        found.append(
            PhaseAccuracy(
                predictor,
                phase,
                predicted_s,
                actual_s,
                predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None,
                measurement.repeatability_frac if phase == "step" else None,
                **(_over_layers(rows, phase, actual_s, supported) if phase in phases else {}),
            )
        )
    return tuple(found)


def _over_layers(
    rows: Sequence[LayerComparison], phase: str, phase_s: float | None, supported: bool
) -> dict[str, Any]:
    """The fields of PhaseAccuracy that the phase's layers give."""
    seen = [
        (row, times, times.actual_s)
        for row in rows
        if (times := row.phase(phase)) is not None and times.actual_s is not None
    ]
    if not phase_s or not seen:
        return {}
    seen_frac = math.fsum(actual_s for _, _, actual_s in seen) / phase_s
    if not supported:
        return {"seen_frac": seen_frac, "n_unsupported": len(seen)}
    judged = [
        (0.0 if row.side == MEASURED else times.predicted_s, actual_s, times.spread_frac)
        for row, times, actual_s in seen
    ]
    n_missing = sum(row.side == MEASURED for row, _, _ in seen)
    known = [(p, a, spread) for p, a, spread in judged if p is not None]
    found = {
        "seen_frac": seen_frac,
        "n_missing": n_missing,
        "n_unsupported": len(judged) - len(known),
    }
    if len(known) == n_missing:  # no layer that the predictor supports was measured
        return found
    positive = [entry for entry in known if entry[1] > 0]
    large = [entry for entry in positive if entry[1] >= SHARE_FRAC * phase_s]
    spreads = [spread for _, _, spread in large if spread is not None]
    actual_sum = math.fsum(actual_s for _, actual_s, _ in known)
    errors_sum = math.fsum(abs(p - a) for p, a, _ in known)
    return {
        **found,
        "mape_frac": fmean(abs(p / a - 1) for p, a, _ in large) if large else None,
        "mape_all_frac": fmean(abs(p / a - 1) for p, a, _ in positive) if positive else None,
        "weighted_frac": errors_sum / actual_sum if actual_sum else None,
        "spread_frac": fmean(spreads) if spreads else None,
        "n_layers": len(large),
        "n_all": len(positive),
    }

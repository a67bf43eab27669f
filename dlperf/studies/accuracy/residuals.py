"""What is left of the error at the state of each measurement, by operator, phase and bound."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from dlperf.studies.accuracy.cases import PHASES, Case, Reference
from dlperf.studies.accuracy.scoring import joined

if TYPE_CHECKING:
    from dlperf.forecast.prediction import Prediction

REST = "(rest)"
"""The layer of what a phase takes outside of its measured layers."""
NOTHING = "(nothing predicted)"
"""The operator of measured time without a predicted item."""
N_SHOWN = 15
"""Rows of the table in a page; the CSV has all."""

_KEY = ["operator", "phase", "bound"]
ATTRIBUTED_COLUMNS = ["case", "layer", *_KEY, "predicted_s", "measured_s", "absolute_s"]
RESIDUAL_COLUMNS = [
    *(*_KEY, "n_layers", "predicted_s", "measured_s", "residual_s", "absolute_s"),
    *("measured_share_frac", "error_frac", "residual_share_frac"),
]


def measured_parts(reference: Reference) -> dict[tuple[str, str], float]:
    """Measured seconds of a step by (layer, phase); the layer REST is what a phase takes outside of
    its measured layers. They add up to the step.

    The phases' medians are scaled to the median of the step. The layers were timed in another pass:
    those that add up to more than their phase are scaled to it.
    """
    known = {name: getattr(reference, f"{name}_s") for name in ("zero_grad", *PHASES)}
    medians = {name: seconds for name, seconds in known.items() if seconds is not None}
    scale = reference.total_s / math.fsum(medians.values())
    layers: dict[str, dict[str, float]] = defaultdict(dict)
    for row in reference.layers.itertuples():
        layers[str(row.phase)][str(row.layer)] = float(row.actual_s)
    found = {}
    for phase, median_s in medians.items():
        own, phase_s = layers[phase], scale * median_s
        own_s = math.fsum(own.values())
        fits = min(1.0, phase_s / own_s) if own_s else 1.0
        found.update({(layer, phase): fits * seconds for layer, seconds in own.items()})
        found[REST, phase] = max(0.0, phase_s - fits * own_s)
    return found


def residuals_of(case: Case, reference: Reference, prediction: Prediction) -> pd.DataFrame:
    """Predicted and measured seconds of a case by layer and item, a frame of ATTRIBUTED_COLUMNS.

    The measured time of a layer in a phase belongs to its predicted items in proportion to their
    seconds, and so does the absolute residual, abs(predicted - measured) of the layer. Items of
    layers without a measured row share the REST of their phase. Measured time without an item
    stands under the operator NOTHING.
    """
    measured = measured_parts(reference)
    ops = prediction.trace.ops
    seconds: dict[tuple[str, str], dict[tuple[str, str, str], float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for item in prediction.prices.items:
        part = (item.layer, item.phase)
        part = part if part in measured else (REST, item.phase)
        operator = ops[item.op].packet if item.op >= 0 else item.what
        seconds[part][item.layer, operator, item.bound] += item.seconds
    rows = []
    for layer, phase in dict.fromkeys((*measured, *seconds)):
        items = seconds.get((layer, phase), {})
        predicted_s, measured_s = math.fsum(items.values()), measured.get((layer, phase), 0.0)
        absolute_s = abs(predicted_s - measured_s)
        if not predicted_s:
            items, predicted_s = {(layer, NOTHING, ""): 0.0}, 0.0
        for (owner, operator, bound), own_s in items.items():
            share = own_s / predicted_s if predicted_s else 1.0
            names = (case.label, owner, operator, phase, bound)
            rows.append((*names, own_s, share * measured_s, share * absolute_s))
    frame = pd.DataFrame(rows, columns=ATTRIBUTED_COLUMNS)
    return frame[(frame.predicted_s > 0) | (frame.measured_s > 0)]


def residual_table(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """All cases by operator, phase and bound, a frame of RESIDUAL_COLUMNS, the largest part of the
    absolute residuals first.

    ``residual_s`` is predicted - measured, ``error_frac`` that over measured;
    ``measured_share_frac`` and ``residual_share_frac`` are shares of all measured seconds and of
    all absolute residuals.
    """
    rows = joined(frames, ATTRIBUTED_COLUMNS)
    if rows.empty:
        return pd.DataFrame(columns=RESIDUAL_COLUMNS)
    found = rows.groupby(_KEY)[["predicted_s", "measured_s", "absolute_s"]].sum()
    layers = rows.drop_duplicates(["case", "layer", *_KEY])
    residual_s = found.predicted_s - found.measured_s
    found = found.assign(
        n_layers=layers.groupby(_KEY).size(),
        residual_s=residual_s,
        measured_share_frac=found.measured_s / found.measured_s.sum(),
        error_frac=(residual_s / found.measured_s).where(found.measured_s > 0),
        residual_share_frac=found.absolute_s / (found.absolute_s.sum() or 1.0),
    )
    found = found.sort_values("absolute_s", ascending=False, kind="stable")
    return found.reset_index()[RESIDUAL_COLUMNS]

"""Each layer's predicted and measured times, side by side, and their accuracy: error of the step,
mean absolute percentage error over its layers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import numpy as np

from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.trace import LOSS, Trace
from dlperf.forecast.prediction import Prediction
from dlperf.ops import counts as op_counts

PHASES = ("forward", "backward", "optimizer")
BOTH, PREDICTED, MEASURED = "both", "predicted only", "measured only"
SHARE_FRAC = 0.01
"""Least share of its phase with which a layer counts in the headline MAPE. Below it, timing noise
would count at full weight.
"""


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted and measured seconds of a part of a step; None where unknown.

    `spread_frac` is (90th - 10th percentile) / median of the measured samples. `has_work` is False
    where nothing runs (a ReLU in the optimizer), so that None is no gap. `predicted_is_part` and
    `actual_is_part` mark sums that lack an unknown part: lower bounds.
    """

    predicted_s: float | None = None
    actual_s: float | None = None
    spread_frac: float | None = None
    has_work: bool = True
    predicted_is_part: bool = False
    actual_is_part: bool = False

    @property
    def error_frac(self) -> float | None:
        """predicted / actual - 1; None unless both sides are known and whole.

        >>> Times(1.5, 1.0).error_frac, Times(1.5, None).error_frac
        (0.5, None)
        """
        predicted_s, actual_s = self.whole_s
        return predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None

    @property
    def whole_s(self) -> tuple[float | None, float | None]:
        """The predicted and the measured time; None for a sum that lacks a part."""
        return (
            None if self.predicted_is_part else self.predicted_s,
            None if self.actual_is_part else self.actual_s,
        )


def add(parts: Iterable[Times]) -> Times:
    """The sum of the known times, marked as a part where an unknown one is missing.

    >>> total = add([Times(1.0, 2.0), Times(None, 3.0)])
    >>> total.predicted_s, total.predicted_is_part, total.actual_s, total.actual_is_part
    (1.0, True, 5.0, False)
    """
    parts = tuple(parts)
    predicted = [t.predicted_s for t in parts if t.predicted_s is not None]
    actual = [t.actual_s for t in parts if t.actual_s is not None]
    return Times(
        math.fsum(predicted) if predicted else None,
        math.fsum(actual) if actual else None,
        has_work=any(t.has_work for t in parts),
        predicted_is_part=any(
            t.predicted_is_part or (t.predicted_s is None and t.has_work) for t in parts
        ),
        actual_is_part=any(t.actual_is_part or (t.actual_s is None and t.has_work) for t in parts),
    )


@dataclass(frozen=True)
class LayerComparison:
    """One layer as one predictor predicts it, beside its measurement.

    `backward` and `optimizer` are None in inference. `flops` and `bytes` are those of all phases,
    `work` those by phase; None and nothing without a trace. `level_bytes` are the bytes that each
    level of the memory moves in all phases (:mod:`dlperf.predictors.layer_traffic`). `bound` and
    `source` belong to the largest share of the predicted time; `shares` are all of them, (bound,
    source, seconds). `side` is the side that contains the layer: ``both``, ``predicted only`` or
    ``measured only``.
    """

    layer: str
    type: str
    predictor: str
    forward: Times
    backward: Times | None
    optimizer: Times | None
    bound: str | None = None
    source: str | None = None
    flops: int | None = None
    bytes: int | None = None
    work: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    level_bytes: Mapping[str, float] = field(default_factory=dict)
    shares: tuple[tuple[str, str, float], ...] = ()
    side: str = BOTH

    def phase(self, name: str) -> Times | None:
        """The times of ``forward``, ``backward`` or ``optimizer``."""
        times: Times | None = getattr(self, name)
        return times

    @property
    def total(self) -> Times:
        """The sum of the phases."""
        return add(t for t in (self.forward, self.backward, self.optimizer) if t is not None)


def phases_of(inference: bool) -> tuple[str, ...]:
    """The phases that a report has columns for."""
    return ("forward",) if inference else PHASES


def rows_of(
    prediction: Prediction, measurement: Measurement | None, predictor: str
) -> tuple[LayerComparison, ...]:
    """One row per layer: the predicted ones in the order of execution, those that only the
    measurement contains, the loss.

    `predictor` is the predictor's name in the rows. The times of a layer that the measurement
    contains twice are summed.
    """
    trace = prediction.trace
    phases = phases_of(trace.inference)
    work: dict[str, dict[str, Any]] = defaultdict(lambda: defaultdict(lambda: np.zeros(2)))
    for op, *counts in zip(trace.ops, *op_counts.totals(trace)):
        for layer, share_frac in op.layer_shares:
            work[layer][op.phase] += share_frac * np.array(counts)
    moved: dict[str, Any] = defaultdict(float)
    for traffic in prediction.layer_traffic:
        if traffic.phase != "zero_grad":
            moved[traffic.layer] += np.array(traffic.level_bytes)
    levels = prediction.layer_traffic[0].levels if prediction.layer_traffic else ()
    measured: dict[str, list[LayerTimes]] = defaultdict(list)
    for entry in measurement.layers if measurement is not None else ():
        measured[entry.layer].append(entry)

    def row_of(layer: str, type_name: str, data: Mapping[str, Any], **more: Any) -> LayerComparison:
        times = {}
        for phase in phases:
            predicted_s = _known(data.get(f"{phase}_s"))
            actual_s, spread_frac = _actual(measured.get(layer, ()), phase)
            has_work = phase in work.get(layer, ()) or bool(predicted_s)
            has_work = has_work if data else actual_s is not None
            times[phase] = Times(predicted_s, actual_s, spread_frac, has_work)
        own = times["forward"], times.get("backward"), times.get("optimizer")
        return LayerComparison(layer, type_name, predictor, *own, **more)

    rows = []
    for data in prediction.layer_rows:
        layer = str(data["layer"])
        shares = prediction.layer_shares.get(layer, {})
        row = row_of(
            layer,
            str(data["type"]),
            data,
            bound=_text(data["bound"]),
            source=_text(data["source"]),
            flops=int(data["flops"]),
            bytes=int(data["bytes"]),
            work=work.get(layer, {}),
            level_bytes=dict(zip(levels, np.broadcast_to(moved.get(layer, 0.0), len(levels)))),
            shares=tuple((*names, seconds) for names, seconds in shares.items()),
            side=BOTH if measurement is None or layer in measured else PREDICTED,
        )
        rows.append(row)
    predicted = {row.layer for row in rows}
    rows += [
        row_of(layer, entries[0].type, {}, side=MEASURED)
        for layer, entries in measured.items()
        if layer not in predicted
    ]
    return tuple(sorted(rows, key=lambda row: row.layer == LOSS))


@dataclass(frozen=True)
class PhaseAccuracy:
    """One predictor's accuracy in one phase of the step (``step`` is the whole).

    `error_frac` is predicted / actual - 1 of the phase; `repeatability_frac` the difference of a
    repeated measurement of the step. `mape_frac` is the mean of abs(predicted / actual - 1) over
    the `n_layers` layers that take at least 1 % of the phase, `mape_all_frac` the same over all
    `n_all` measured layers. `weighted_frac` is the sum of abs(predicted - actual) over the sum of
    actual. `spread_frac` is the mean over the `n_layers` of (90th - 10th percentile) / median of
    their samples. `seen_frac` is the sum of the layers' measured times over the phase's; layers are
    timed in passes of their own, so that it can exceed 1.
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
        name = "total" if phase == "step" else phase
        actual_s = measurement.step[name].median if name in measurement.step else None
        times = Times(getattr(prediction.step, f"{name}_s"), actual_s)
        supported = phase in prediction.prices.phases
        found.append(
            PhaseAccuracy(
                predictor,
                phase,
                times.predicted_s,
                times.actual_s,
                times.error_frac,
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
        (row.side == MEASURED, times.predicted_s, times.actual_s, times.spread_frac)
        for row in rows
        if (times := row.phase(phase)) is not None and times.actual_s is not None
    ]
    if not phase_s or not seen:
        return {}
    seen_frac = math.fsum(actual_s for _, _, actual_s, _ in seen) / phase_s
    if not supported:
        return {"seen_frac": seen_frac, "n_unsupported": len(seen)}
    n_missing = sum(is_missing for is_missing, *_ in seen)
    known = [
        (p or 0.0, a, spread) for is_missing, p, a, spread in seen if is_missing or p is not None
    ]
    found = {
        "seen_frac": seen_frac,
        "n_missing": n_missing,
        "n_unsupported": len(seen) - len(known),
    }
    if len(known) == n_missing:  # no layer that the predictor supports was measured
        return found
    positive = [entry for entry in known if entry[1] > 0]
    least_s = SHARE_FRAC * max(phase_s, seen_frac * phase_s)  # layers are of other, noisier steps
    large = [entry for entry in positive if entry[1] >= least_s]
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


def root_of(trace: Trace) -> str:
    """The name of the root's row: the first module that the step itself called, or the container of
    several such modules.

    >>> root_of(Trace("t", 1, (), ()))
    'model'
    """
    for layer in trace.layers:
        if not layer.callers and not layer.is_leaf and layer is trace.layers[0]:
            return layer.name  # several models, or the parts of one that is never called
        if layer.name != LOSS and any(caller == "" for caller, _ in layer.callers):
            return layer.name
    return "model"


def names_of(rows: Sequence[LayerComparison], side: str) -> tuple[str, ...]:
    """The layers of that side, each once."""
    return tuple(dict.fromkeys(row.layer for row in rows if row.side == side))


def _known(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _actual(entries: Sequence[LayerTimes], phase: str) -> tuple[float | None, float | None]:
    samples = [found for entry in entries if (found := entry.phase(phase)) is not None]
    if not samples:
        return None, None
    return math.fsum(s.median for s in samples), max(s.spread_frac for s in samples)

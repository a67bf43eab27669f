"""Each layer's predicted and measured times, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.trace import LOSS, Trace
from dlperf.forecast.prediction import Prediction
from dlperf.ops import counts as op_counts

PHASES = ("forward", "backward", "optimizer")
BOTH, PREDICTED, MEASURED = "both", "predicted only", "measured only"


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
        predicted_s, actual_s = self.whole_predicted_s, self.whole_actual_s
        return predicted_s / actual_s - 1 if predicted_s is not None and actual_s else None

    @property
    def whole_predicted_s(self) -> float | None:
        """The predicted time; None for a sum that lacks a part."""
        return None if self.predicted_is_part else self.predicted_s

    @property
    def whole_actual_s(self) -> float | None:
        """The measured time; None for a sum that lacks a part."""
        return None if self.actual_is_part else self.actual_s


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
    the ``forward_`` and ``backward_`` ones those of one; None without a trace. `level_bytes` are
    the bytes that each level of the memory moves in all phases, innermost first
    (:mod:`dlperf.predictors.layer_traffic`). `bound` and `source` belong to the largest share of
    the predicted time; `shares` are all of them, (bound, source, seconds). `side` tells which side
    contains the layer: ``both``, ``predicted only`` or ``measured only``.
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
    forward_flops: int | None = None
    forward_bytes: int | None = None
    backward_flops: int | None = None
    backward_bytes: int | None = None
    level_bytes: tuple[tuple[str, float], ...] = ()
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
    counts: dict[tuple[str, str], tuple[float, float]] = {}
    for op, flops, n_bytes in zip(trace.ops, *op_counts.totals(trace)):
        for layer, share_frac in op.shares or ((op.layer, 1.0),):
            before = counts.get((layer, op.phase), (0.0, 0.0))
            counts[layer, op.phase] = (
                before[0] + share_frac * flops,
                before[1] + share_frac * n_bytes,
            )
    levels: dict[str, dict[str, float]] = {}
    for traffic in prediction.layer_traffic:
        if traffic.phase != "zero_grad":
            sums = levels.setdefault(traffic.layer, dict.fromkeys(traffic.levels, 0.0))
            for level, moved in zip(traffic.levels, traffic.level_bytes):
                sums[level] += moved
    nothing = {level: 0.0 for traffic in prediction.layer_traffic[:1] for level in traffic.levels}
    measured: dict[str, list[LayerTimes]] = {}
    for entry in measurement.layers if measurement is not None else ():
        measured.setdefault(entry.layer, []).append(entry)

    def times_of(
        layer: str, entries: list[LayerTimes], predicted: Mapping[str, Any]
    ) -> tuple[Times, Times | None, Times | None]:
        times = {}
        for phase in phases:
            predicted_s = _known(predicted.get(f"{phase}_s"))
            actual_s, spread_frac = _actual(entries, phase)
            has_work = (layer, phase) in counts or bool(predicted_s)
            if not predicted:
                has_work = actual_s is not None
            times[phase] = Times(predicted_s, actual_s, spread_frac, has_work)
        return times["forward"], times.get("backward"), times.get("optimizer")

    rows = []
    for data in prediction.layers.astype(object).to_dict("records"):
        layer = str(data["layer"])
        entries = measured.pop(layer, [])
        forward, backward = (counts.get((layer, p), (0.0, 0.0)) for p in ("forward", "backward"))
        rows.append(
            LayerComparison(
                layer,
                str(data["type"]),
                predictor,
                *times_of(layer, entries, data),
                bound=_text(data["bound"]),
                source=_text(data["source"]),
                flops=int(data["flops"]),
                bytes=int(data["bytes"]),
                forward_flops=round(forward[0]),
                forward_bytes=round(forward[1]),
                backward_flops=round(backward[0]),
                backward_bytes=round(backward[1]),
                level_bytes=tuple(levels.get(layer, nothing).items()),
                shares=tuple(
                    (*names, seconds)
                    for names, seconds in prediction.layer_shares.get(layer, {}).items()
                ),
                side=BOTH if entries or measurement is None else PREDICTED,
            )
        )
    for layer, entries in measured.items():
        times = times_of(layer, entries, {})
        rows.append(LayerComparison(layer, entries[0].type, predictor, *times, side=MEASURED))
    rows.sort(key=lambda row: row.layer == LOSS)
    return tuple(rows)


def root_of(trace: Trace) -> str:
    """The name of the root's row: the first module that the step itself called.

    >>> root_of(Trace("t", 1, (), ()))
    'model'
    """
    for layer in trace.layers:
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

"""Operators of a step, predicted and measured, of a measurement that has their times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core.measurement import Measurement
from dlperf.core.text import printable
from dlperf.core.units import format_seconds
from dlperf.forecast.prediction import Prediction
from dlperf.report.document import Column, format_error
from dlperf.report.layer_comparison import Times

BETWEEN, FAULTS, WHOLE = "(between operators)", "(page faults)", "(whole)"
"""Rows of what is no operator. Page faults are predicted apart and measured inside operators."""
OPS_NOTE = (
    "All calls of an operator in a phase. (between operators): Python, autograd, module calls."
    " (page faults) are measured inside the operators. The rows add up to the step."
)
_BY_OPERATOR = ("forward", "backward")


@dataclass(frozen=True)
class OpComparison:
    """All calls of one operator in one phase as one predictor predicts them, beside their
    measurement. The numbers of calls are None for a row that is no operator.
    """

    op: str
    phase: str
    predictor: str
    n_predicted: int | None
    n_measured: int | None
    times: Times


def op_rows_of(
    prediction: Prediction, measurement: Measurement, predictor: str
) -> tuple[OpComparison, ...]:
    """One row per operator and phase, the longest first; zero_grad and the optimizer are whole.

    None where no operator was measured, or where the predictor does not support the whole step.
    """
    if not measurement.ops or prediction.step.total_s is None:
        return ()
    ops = prediction.trace.ops
    predicted: dict[tuple[str, str], float] = defaultdict(float)
    for item in prediction.prices.items:
        name = ops[item.op].packet if item.op >= 0 else BETWEEN
        name = FAULTS if item.bound == "page-faults" else name
        predicted[name if item.phase in _BY_OPERATOR else WHOLE, item.phase] += item.seconds
    measured = {(o.op, o.phase): o for o in measurement.ops if o.phase in _BY_OPERATOR}
    actual = {key: one.times.median for key, one in measured.items()}
    for phase, samples in measurement.step.items():
        own_s = sum(one.times.median for (_, of), one in measured.items() if of == phase)
        key = (BETWEEN if phase in _BY_OPERATOR else WHOLE, phase)
        actual |= {key: max(0.0, samples.median - own_s)} if phase != "total" else {}
    n_predicted = Counter((op.packet, op.phase) for op in ops)
    rows = [
        OpComparison(
            *key,
            predictor,
            n_predicted.get(key),
            measured[key].n_calls if key in measured else None,
            Times(predicted.get(key), actual.get(key)),
        )
        for key in dict.fromkeys((*predicted, *actual))
    ]
    return tuple(sorted(rows, key=_longest_s, reverse=True))


def _longest_s(row: OpComparison) -> float:
    return max(row.times.predicted_s or 0.0, row.times.actual_s or 0.0)


def op_columns(rows: Sequence[OpComparison]) -> tuple[Column, ...]:
    """The columns of the operators' table."""
    calls = (
        f"{row.n_measured or 0} of {row.n_predicted or 0}"
        if row.n_predicted != row.n_measured
        else str(row.n_predicted or "")
        for row in rows
    )
    return (
        Column("operator", tuple(printable(row.op) for row in rows), align_left=True),
        Column("phase", tuple(row.phase for row in rows), align_left=True),
        Column("calls", tuple(calls)),
        Column("pred", tuple(format_seconds(row.times.predicted_s) for row in rows)),
        Column("actual", tuple(format_seconds(row.times.actual_s) for row in rows)),
        Column("err", tuple(format_error(row.times.error_frac) for row in rows)),
    )

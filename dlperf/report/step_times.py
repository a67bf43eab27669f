"""Sides of a comparison: the step and layers of a prediction, a measurement or a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from dlperf.core.conversion import Name, Positive, Seconds, Text, Threads, Whole, convert
from dlperf.core.errors import DlperfError
from dlperf.core.files import kind_of, read_json, schema_of
from dlperf.core.measurement import SCHEMA as MEASUREMENT
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import PHASES
from dlperf.forecast.prediction import SCHEMA as PREDICTION
from dlperf.forecast.prediction import Prediction
from dlperf.report import step_comparison as export
from dlperf.report.step_pages import step_title


class _Layer(Struct):
    """Entries of a layer that a prediction and a report have alike; a report's times have longer
    names.
    """

    layer: Name
    type: Text | None = None
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    forward_actual_s: Seconds | None = None
    backward_actual_s: Seconds | None = None
    optimizer_actual_s: Seconds | None = None
    predictor: Text = ""
    flops: float | None = None
    bytes: float | None = None
    bound: Text | None = None


class _Step(Struct):
    total_s: Seconds | None = None
    low_s: Seconds | None = None
    high_s: Seconds | None = None
    zero_grad_s: Seconds | None = None
    forward_s: Seconds | None = None
    backward_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    peak_memory_bytes: Whole | None = None


class _Measured(Struct):
    step: _Step
    repeatability_frac: float | None = None


class _Prediction(Struct):
    """What a comparison takes of a prediction file."""

    target: Text
    batch_size: Positive
    threads: Threads
    inference: bool
    step: _Step
    layers: list[_Layer]
    versions: dict[str, Text] = {}
    predictor: Text = ""


class _Report(Struct):
    """What a comparison takes of a report file."""

    target: Text
    batch_size: Positive
    threads: Threads
    inference: bool
    machine: Text
    measured: _Measured
    layers: list[_Layer]


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer by phase; None where unknown. `work` is its FLOPs and bytes."""

    layer: str
    type: str
    seconds: dict[str, float | None]
    bound: str | None = None
    work: tuple[float | None, float | None] = (None, None)

    @property
    def total_s(self) -> float:
        """The sum of the known phases."""
        return math.fsum(value for value in self.seconds.values() if value is not None)


@dataclass(frozen=True)
class StepTimes:
    """One side of a comparison: a step and its layers.

    `how` is ``predicted (PREDICTOR)`` or ``measured``. `low_s`..`high_s` is the interval of the
    step, None where it has none: 90 % of a prediction; of a measurement, its repeatability on both
    sides.
    """

    name: str
    how: str
    target: str
    batch_size: int
    threads: int
    inference: bool
    machine: str
    phases: dict[str, float | None]
    total_s: float
    low_s: float | None
    high_s: float | None
    layers: tuple[LayerTimes, ...]
    peak_memory_bytes: int | None = None

    @property
    def title(self) -> str:
        """The step in one line."""
        title = step_title(
            self.target,
            self.inference,
            self.batch_size,
            self.threads,
            self.machine,
            f", {self.how}",
        )
        return title if self.name == self.target else f"{self.name}: {title}"


def step_of_prediction(prediction: Prediction, name: str) -> StepTimes:
    """The side that a prediction is. Raises DlperfError where it has no whole step."""
    return _step_of_data(prediction.to_json(), name)


def step_of_measurement(measurement: Measurement, name: str) -> StepTimes:
    """The side that a measurement is."""
    total = measurement.step["total"].median
    layers = []
    for times in measurement.layers:
        samples = {phase: times.phase(phase) for phase in PHASES}
        seconds = {phase: own.median if own else None for phase, own in samples.items()}
        layers.append(LayerTimes(times.layer, times.type, seconds))
    return StepTimes(
        name,
        "measured",
        measurement.target,
        measurement.batch_size,
        measurement.threads,
        measurement.inference,
        measurement.machine,
        {phase: samples.median for phase, samples in measurement.step.items() if phase != "total"},
        total,
        *_around(total, measurement.repeatability_frac),
        tuple(layers),
        measurement.peak_memory_bytes,
    )


def steps_of_file(path: str) -> list[StepTimes]:
    """The sides that a file of a prediction, a measurement, reports or a watched run holds.

    Raises DlperfError for a file of another kind, and naming an unfit entry.
    """
    schema = schema_of(path)
    if schema == MEASUREMENT:
        return [step_of_measurement(Measurement.load(path), path)]
    if schema not in _VERSIONS:
        raise DlperfError(f"{path}: is {kind_of(str(schema))}, which holds no step to compare")
    data = read_json(path, schema, _VERSIONS[schema])
    try:
        if schema == PREDICTION:
            return [_step_of_data(data, path)]
        if schema == RUN and data.get("report") is None:
            return [step_of_measurement(Measurement.from_json(data.get("measurement", {})), path)]
        data = data["report"] if schema == RUN else data
        reports = data.get("reports", []) if schema == export.SET_SCHEMA else [data]
        return [_step_of_report(report, path) for report in reports]
    except DlperfError as error:
        raise DlperfError(f"{path}: {error}. Make it again.") from error


RUN = "dlperf.run"
_VERSIONS = {
    PREDICTION: 1,
    RUN: 2,
    export.SCHEMA: export.SCHEMA_VERSION,
    export.SET_SCHEMA: export.SCHEMA_VERSION,
}


def _step_of_data(data: dict[str, Any], name: str) -> StepTimes:
    found = convert(data, _Prediction)
    step = found.step
    if not step.total_s:
        raise DlperfError(
            f"step.total_s is {step.total_s}: {found.predictor} predicts no whole step"
        )
    return StepTimes(
        name,
        f"predicted ({found.predictor})",
        found.target,
        found.batch_size,
        found.threads,
        found.inference,
        found.versions.get("machine", ""),
        {phase: getattr(step, f"{phase}_s") for phase in ("zero_grad", *PHASES)},
        step.total_s,
        step.low_s,
        step.high_s,
        _layers(found.layers, "_s"),
        step.peak_memory_bytes,
    )


def _step_of_report(data: Any, name: str) -> StepTimes:
    """The measured side of a report; FLOPs, bytes and bounds are those of its first predictor."""
    found = convert(data, _Report)
    step, repeats_frac = found.measured.step, found.measured.repeatability_frac
    if not step.total_s:
        raise DlperfError("measured.step.total_s is missing")
    rows = [row for row in found.layers if row.predictor == found.layers[0].predictor]
    return StepTimes(
        name,
        "measured",
        found.target,
        found.batch_size,
        found.threads,
        found.inference,
        found.machine,
        {phase: getattr(step, f"{phase}_s") for phase in ("zero_grad", *PHASES)},
        step.total_s,
        *_around(step.total_s, repeats_frac),
        _layers(rows, "_actual_s"),
    )


def _layers(rows: Sequence[_Layer], ending: str) -> tuple[LayerTimes, ...]:
    """Layers of a file; the names of their times end with `ending`."""
    return tuple(
        LayerTimes(
            row.layer,
            row.type or "",
            {phase: getattr(row, phase + ending) for phase in PHASES},
            row.bound,
            (row.flops, row.bytes),
        )
        for row in rows
    )


def _around(total_s: float, repeats_frac: float | None) -> tuple[float | None, float | None]:
    if repeats_frac is None:
        return None, None
    return total_s * (1 - repeats_frac), total_s * (1 + repeats_frac)

"""The format of a measurement file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dlperf.core.records.conversion import (
    Name,
    Positive,
    PositiveSamplesRecord,
    SamplesRecord,
    Text,
    Threads,
    Whole,
)
from dlperf.core.records.trace import TraceRecord

Noise = Annotated[float, Meta(ge=-1e15, le=1e15)]


class StepRecord(Struct, gc=False, forbid_unknown_fields=True, kw_only=True):
    """Samples of a step's phases."""

    zero_grad: SamplesRecord | None = None
    forward: PositiveSamplesRecord
    backward: SamplesRecord | None = None
    optimizer: SamplesRecord | None = None
    total: PositiveSamplesRecord


class LayerTimesRecord(Struct, gc=False):
    """Samples of a layer's phases; null where a phase is unknown."""

    layer: Name
    type: Name
    forward: SamplesRecord | None
    backward: SamplesRecord | None
    optimizer: SamplesRecord | None


class MeasurementRecord(Struct, gc=False):
    """A measured step, with its trace where it was recorded."""

    target: Text
    batch_size: Positive
    threads: Threads
    inference: bool
    machine: Text
    versions: dict[str, Text]
    notes: list[Text]
    noise: dict[str, Noise]
    step: StepRecord
    repeat: PositiveSamplesRecord | None
    layers: list[LayerTimesRecord]
    peak_memory_bytes: Whole | None = None
    trace: TraceRecord | None = None

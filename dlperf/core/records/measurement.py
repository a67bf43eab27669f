"""The format of a measurement file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dlperf.core.conversion import (
    Name,
    Positive,
    PositiveSamplesRecord,
    SamplesRecord,
    Text,
    Threads,
    Whole,
)
from dlperf.core.device_clock import DevicePeaks
from dlperf.core.records.trace import TraceRecord
from dlperf.core.state import Reading

Noise = Annotated[float, Meta(ge=-1e15, le=1e15)]


class StepRecord(Struct, gc=False, forbid_unknown_fields=True, kw_only=True):
    """Samples of a step's phases."""

    zero_grad: SamplesRecord | None = None  #: Gradients set to none.
    forward: PositiveSamplesRecord  #: Forward, loss included.
    backward: SamplesRecord | None = None  #: Backward.
    optimizer: SamplesRecord | None = None  #: Step of the optimizer.
    total: PositiveSamplesRecord  #: The whole step.


class LayerTimesRecord(Struct, gc=False):
    """Samples of a layer's phases; null where a phase is unknown."""

    layer: Name  #: Name of the layer.
    type: Name  #: Class.
    forward: SamplesRecord | None  #: Its forward.
    backward: SamplesRecord | None  #: Its backward.
    optimizer: SamplesRecord | None  #: Its share of the optimizer.


class OpTimesRecord(Struct, gc=False):
    """Samples of an operator's calls in a phase, summed."""

    op: Name  #: Operator, such as `aten.addmm`.
    phase: Name  #: Phase.
    n_calls: Positive  #: Calls a step.
    times: SamplesRecord  #: All calls of a step.


class MeasurementRecord(Struct, gc=False):
    """A measured step, with its trace where it was recorded."""

    target: Text  #: What the user named.
    batch_size: Positive  #: Samples of the step.
    threads: Threads  #: Number of threads.
    inference: bool  #: One forward pass instead of a step.
    machine: Text  #: Processor.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    notes: list[Text]  #: Remarks of the step profiler.
    noise: dict[str, Noise]  #: Counts of disturbed samples and faults.
    states: tuple[Reading, ...]  #: The machine's state before and after.
    step: StepRecord  #: Steps without instruments.
    repeat: PositiveSamplesRecord | None  #: An independent repetition of `step.total`.
    layers: list[LayerTimesRecord]  #: Layers, the instruments' cost subtracted.
    peak_memory_bytes: Whole | None = None  #: Peak resident memory of three steps.
    trace: TraceRecord | None = None  #: The recorded step.
    ops: list[OpTimesRecord] = []  #: Operators, of a profile of torch.profiler.
    device_memory: DevicePeaks | None = None  #: Memory on an accelerator.

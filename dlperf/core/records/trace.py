"""The format of a trace file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from dlperf.core.records.conversion import Fraction, IndexOrNone, Name, Positive, Text, Whole

Phase = Literal["zero_grad", "forward", "backward", "optimizer"]


class TensorRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A tensor; without strides a row-major one."""

    shape: Annotated[list[Whole], Meta(max_length=64)]
    strides: Annotated[list[Whole], Meta(max_length=64)] | None
    dtype: Name
    storage: IndexOrNone


class ShareRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A layer's fraction of an operator call."""

    layer: Text
    share: Fraction


class OpRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """An operator call; tensors by number."""

    name: Name
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[Whole]
    phase: Phase
    layer: Text
    node: IndexOrNone
    grad: bool
    shares: list[ShareRecord]


class CallerRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """The number of calls by one caller."""

    name: Text
    count: Positive


class NamedTensorRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A tensor with its name."""

    name: Name
    tensor: Whole


class LayerRecord(Struct, gc=False):
    """A called module."""

    name: Name
    type: Name
    leaf: bool
    callers: list[CallerRecord]
    inputs: list[Whole]
    outputs: list[Whole]
    parameters: list[NamedTensorRecord]


class ParameterRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A parameter of the model."""

    name: Name
    layer: Text
    tensor: Whole
    trained: bool
    sparse: bool


class ArrivalRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A gradient's accumulation: the parameter's number, and the number of operators before."""

    parameter: Whole
    n_ops: Whole


class StorageRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A piece of memory: size in bytes, lifetime in operator numbers, kind."""

    n_bytes: Whole
    born: IndexOrNone
    dies: Whole | None
    kind: Text


class OptimizerRecord(Struct, gc=False):
    """The optimizer of the step."""

    type: Name
    implementation: Name
    n_tensors: Whole


class TraceRecord(Struct, gc=False):
    """A recorded step."""

    target: Text
    batch_size: Positive
    inference: bool
    recorded_on: Text
    notes: list[Text]
    versions: dict[str, Text]
    optimizer: OptimizerRecord | None
    layers: list[LayerRecord]
    ops: list[OpRecord]
    storages: list[StorageRecord]
    tensors: list[TensorRecord]
    parameters: list[ParameterRecord] = []
    buffers: list[NamedTensorRecord] = []
    arrivals: list[ArrivalRecord] = []

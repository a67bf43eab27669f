"""The format of a trace file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from dlperf.core.conversion import Fraction, IndexOrNone, Name, Positive, Text, Whole

Phase = Literal["zero_grad", "forward", "backward", "optimizer"]


class TensorRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A tensor; without strides a row-major one."""

    shape: Annotated[list[Whole], Meta(max_length=64)]  #: Sizes.
    strides: Annotated[list[Whole], Meta(max_length=64)] | None  #: In elements; null if row-major.
    dtype: Name  #: Number format.
    storage: IndexOrNone  #: Number of its storage; -1 if unknown.


class ShareRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A layer's fraction of an operator call."""

    layer: Text  #: Name of the layer.
    share: Fraction  #: Its fraction of the call.


class OpRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """An operator call; tensors by number."""

    name: Name  #: Name in torch.ops.
    args: list[Any]  #: Positional arguments; tensors by number.
    kwargs: dict[str, Any]  #: Keyword arguments.
    outputs: list[Whole]  #: Numbers of its tensors.
    phase: Phase  #: Phase of the step.
    layer: Text  #: Layer that owns it.
    node: IndexOrNone  #: Autograd node; -1 for none.
    grad: bool  #: Whether autograd records it.
    shares: list[ShareRecord]  #: Layers that share it.
    from_cpp: bool = False  #: Whether C++ code called it, not Python.


class CallerRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """The number of calls by one caller."""

    name: Text  #: Layer whose forward calls; empty for the step.
    count: Positive  #: Number of calls.


class NamedTensorRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A tensor with its name."""

    name: Name  #: Name in the module.
    tensor: Whole  #: Number of the tensor.


class InstructionsRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """Instructions that Python executes in a module's forward."""

    executed: Whole = 0  #: Over all calls; 0 if not counted.
    distinct: Whole = 0  #: Places in the code.


class LayerRecord(Struct, gc=False):
    """A called module."""

    name: Name  #: Qualified name; the root's is its type.
    type: Name  #: Class.
    leaf: bool  #: Whether it has no children.
    callers: list[CallerRecord]  #: Its calls.
    inputs: list[Whole]  #: Tensors of the first call.
    outputs: list[Whole]  #: Tensors of the first call.
    parameters: list[NamedTensorRecord]  #: The module's own.
    instructions: InstructionsRecord = field(default_factory=InstructionsRecord)  #: Python's.
    silent_nodes: Whole = 0  #: Autograd nodes in which no operator runs.


class ParameterRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A parameter of the model."""

    name: Name  #: Qualified name.
    layer: Text  #: Layer that owns it.
    tensor: Whole  #: Number of the tensor.
    trained: bool  #: Whether the step trains it.
    sparse: bool  #: Whether its gradient is sparse.


class ArrivalRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A gradient's accumulation: the parameter's number, and the number of operators before."""

    parameter: Whole  #: Number in `parameters`.
    n_ops: Whole  #: Operators before.


class StorageRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A piece of memory: size in bytes, lifetime in operator numbers, kind."""

    n_bytes: Whole  #: Size in bytes.
    born: IndexOrNone  #: Operator that makes it; -1: before the step.
    dies: Whole | None  #: Operator before which it is freed; null: never.
    kind: Text  #: `parameter`, `buffer`, `input`, `gradient`, `optimizer`, or empty.


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """Which optimizer stepped: its class (``updates by hand`` without one), how it loops
    (``for-loop``, ``foreach``, ``fused``), over how many parameters with a gradient, and whether
    zero_grad was called.
    """

    type: Name  #: Class.
    implementation: Name  #: `for-loop`, `foreach` or `fused`.
    n_tensors: Whole  #: Parameters with a gradient.
    zero_grad: bool = True  #: Whether zero_grad is called.


class TraceRecord(Struct, gc=False):
    """A recorded step."""

    target: Text  #: What the user named.
    batch_size: Positive  #: Samples of the step.
    inference: bool  #: One forward pass instead of a step.
    recorded_on: Text  #: `fake tensors` or `real tensors`.
    notes: tuple[Text, ...]  #: Remarks of the recording.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    optimizer: OptimizerInfo | None  #: The optimizer; null without one.
    layers: list[LayerRecord]  #: Called modules, in the order of execution.
    ops: list[OpRecord]  #: Operator calls, in order.
    storages: list[StorageRecord]  #: Memory.
    tensors: list[TensorRecord]  #: The tensors that calls refer to by number.
    parameters: list[ParameterRecord] = []  #: Parameters of the model.
    buffers: list[NamedTensorRecord] = []  #: Buffers of the model.
    arrivals: list[ArrivalRecord] = []  #: Order in which gradients are accumulated.

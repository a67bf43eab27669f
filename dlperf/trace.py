"""A recorded training step as data: the layers of a network, the operations they ran, the memory these held.

Nothing here imports torch. A trace is saved as JSON and is itself a target: a network can be predicted, and its
operations calibrated, where its code is not.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Union

from dlperf.display import Displayed
from dlperf.errors import DlperfError
from dlperf.files import read_json, write_json

SCHEMA, SCHEMA_VERSION = "dlperf.trace", 1
PHASES = ("zero_grad", "forward", "backward", "optimizer")
LOSS = "(loss)"
"""The row under which the work of the loss stands."""

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "complex64": 8, "complex128": 16, "complex32": 4, "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides (in elements), dtype and storage of a tensor.

    `storage` is the index of its memory in :attr:`Trace.storages`, -1 where no trace holds it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "float32"
    storage: int = -1

    @classmethod
    def contiguous(cls, *shape: int, dtype: str = "float32", storage: int = -1) -> TensorSpec:
        """A row-major tensor.

        >>> TensorSpec.contiguous(2, 3).strides
        (3, 1)
        """
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        return cls(tuple(shape), tuple(reversed(strides)), dtype, storage)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES.get(self.dtype, 4)

    @property
    def nbytes(self) -> int:
        """Bytes that reading every distinct element once moves; broadcast dimensions (stride 0) count once."""
        return math.prod(n for n, s in zip(self.shape, self.strides) if s != 0 or n == 0) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill their memory without gaps or overlap, in any order of dimensions."""
        step = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.strides) if n != 1):
            if stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument of an op that is a torch constant: kind ``dtype``, ``device``, ``layout`` or ``memory_format``, and its name."""

    kind: str
    name: str


Argument = Union[None, bool, int, float, str, TensorSpec, Symbol, "tuple[Argument, ...]"]


def tensors_in(argument: Any) -> Iterator[TensorSpec]:
    """The tensors in a nested argument, in order."""
    if isinstance(argument, TensorSpec):
        yield argument
    elif isinstance(argument, tuple):
        for item in argument:
            yield from tensors_in(item)


@dataclass(frozen=True)
class Op:
    """One call of an aten operator.

    `name` is the overload's full name (``aten.addmm.default``), `args` and `kwargs` are what it was called with,
    in the order of its schema. `layer` is the qualified name of the module that it belongs to; where it served
    several at once (a foreach or fused optimizer), `shares` gives each one's fraction. `node` numbers the autograd
    node that ran it in the backward (-1 elsewhere); `grad` says that autograd recorded it.
    """

    name: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    phase: str = "forward"
    layer: str = ""
    node: int = -1
    grad: bool = False
    shares: tuple[tuple[str, float], ...] = ()

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every tensor among the arguments, in order."""
        return tuple(tensors_in(self.args)) + tuple(tensors_in(tuple(value for _, value in self.kwargs)))

    @property
    def packet(self) -> str:
        """The operator without its overload.

        >>> Op("aten.add.Tensor").packet
        'aten.add'
        """
        return self.name.rsplit(".", 1)[0]

    @cached_property
    def signature(self) -> str:
        """What decides the op's time, as text: name and arguments without storages. Equal ops have equal signatures."""
        return f"{self.name}({_describe(self.args)}|{','.join(f'{k}={_describe(v)}' for k, v in self.kwargs)})"


def _describe(argument: Argument) -> str:
    if isinstance(argument, TensorSpec):
        strides = "" if argument.is_contiguous else ":" + "x".join(map(str, argument.strides))
        return f"{argument.dtype}[{'x'.join(map(str, argument.shape))}{strides}]"
    if isinstance(argument, tuple):
        return "(" + ",".join(map(_describe, argument)) + ")"
    if isinstance(argument, Symbol):
        return argument.name
    return repr(argument)


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that was called: where it stands, what it saw, what it owns.

    `name` is the qualified name (the root's is its type), `callers` counts its calls by the layer whose forward made
    them ("" for the step itself). `inputs` and `outputs` are those of the first call. `parameters` are the module's own.
    """

    name: str
    type: str
    is_leaf: bool
    callers: tuple[tuple[str, int], ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: tuple[tuple[str, TensorSpec], ...] = ()

    @property
    def n_calls(self) -> int:
        """How often the step called the module."""
        return sum(count for _, count in self.callers)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: its qualified name, the layer that owns it, whether the step trains it, and whether its gradient is sparse."""

    name: str
    layer: str
    spec: TensorSpec
    trained: bool = True
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory: its size and its life.

    `born` is the index of the op that made it, -1 if it was there before the step. `dies` is the index of the
    op before which it is freed (the number of ops if at the very end), None if it outlives the step.
    `kind`: ``parameter``, ``buffer``, ``input``, ``gradient``, ``optimizer`` or ``""`` (everything else).
    """

    nbytes: int
    born: int = -1
    dies: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class OptimizerInfo:
    """Which optimizer stepped: its class, how it loops (``for-loop``, ``foreach``, ``fused``), and over how many parameters with a gradient."""

    type: str
    implementation: str = "for-loop"
    n_tensors: int = 0


@dataclass(frozen=True, repr=False)
class Trace(Displayed, by="dlperf.report.summaries"):
    """One step (zero_grad, forward with loss, backward, optimizer) or, with `inference`, one forward pass.

    `layers` are in the order of first execution, `ops` in the order of execution. `parameters` and `buffers` (name, tensor) are the model's in the order
    of their definition, shared ones once; `arrivals` says in which order gradients were accumulated: (index in `parameters`, number of ops that had run).
    They are empty in files of older versions. `recorded_on` is ``fake tensors``
    or ``real tensors``; `notes` say what a user should know about the recording.
    """

    target: str
    batch_size: int
    layers: tuple[Layer, ...]
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...] = ()
    optimizer: OptimizerInfo | None = None
    inference: bool = False
    recorded_on: str = "fake tensors"
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[tuple[str, TensorSpec], ...] = ()
    arrivals: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise DlperfError(f"batch size is {self.batch_size}; it must be at least 1")
        for op in self.ops:
            if op.phase not in PHASES:
                raise DlperfError(f"trace: op {op.name} has phase {op.phase!r}; expected one of {', '.join(PHASES)}")

    @cached_property
    def n_parameters(self) -> int:
        """Number of trained and untrained parameters; shared ones once."""
        seen: dict[int, int] = {}
        loose = 0
        for layer in self.layers:
            for _, spec in layer.parameters:
                if spec.storage >= 0:
                    seen[spec.storage] = max(spec.numel, seen.get(spec.storage, 0))
                else:
                    loose += spec.numel
        return loose + sum(seen.values())

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, whole or not at all."""
        write_json(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace. Raises DlperfError naming the file where it is missing, truncated, newer or not a trace."""
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return cls.from_json(data)
        except DlperfError as error:
            raise DlperfError(f"{path}: {error}; record it again") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DlperfError(f"{path}: is damaged ({type(error).__name__}: {error}); record it again") from error

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON data; tensors stand once in a table and are referred to by number."""
        table = TensorTable()
        layers = [
            {
                "name": layer.name, "type": layer.type, "leaf": layer.is_leaf, "callers": [list(c) for c in layer.callers],
                "inputs": [table.add(t) for t in layer.inputs], "outputs": [table.add(t) for t in layer.outputs],
                "parameters": [[name, table.add(t)] for name, t in layer.parameters],
            }
            for layer in self.layers
        ]  # fmt: skip
        ops = [op_to_json(op, table) for op in self.ops]
        parameters = [[p.name, p.layer, table.add(p.spec), p.trained, p.sparse] for p in self.parameters]
        buffers = [[name, table.add(spec)] for name, spec in self.buffers]
        return {
            "schema": SCHEMA, "schema_version": SCHEMA_VERSION, "target": self.target, "batch_size": self.batch_size,
            "inference": self.inference, "recorded_on": self.recorded_on, "notes": list(self.notes), "versions": dict(self.versions),
            "optimizer": None if self.optimizer is None else
            {"type": self.optimizer.type, "implementation": self.optimizer.implementation, "n_tensors": self.optimizer.n_tensors},
            "parameters": parameters, "buffers": buffers, "arrivals": [list(arrival) for arrival in self.arrivals],
            "layers": layers, "ops": ops, "storages": [[s.nbytes, s.born, s.dies, s.kind] for s in self.storages], "tensors": table.to_json(),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """The trace that :meth:`to_json` wrote. Raises DlperfError naming the entry that no recording can have made."""
        tensors = TensorTable.from_json(data["tensors"])
        for number, spec in enumerate(tensors):
            if spec.storage >= len(data["storages"]):
                raise DlperfError(f"tensors[{number}] lies in storage {spec.storage}, of which there are {len(data['storages'])}")
        for number, (n_bytes, *_) in enumerate(data["storages"]):
            if isinstance(n_bytes, bool) or not isinstance(n_bytes, int) or n_bytes < 0:
                raise DlperfError(f"storages[{number}] has {n_bytes!r} bytes; sizes are whole and not negative")
        layers = tuple(
            Layer(
                row["name"], row["type"], row["leaf"], tuple((name, count) for name, count in row["callers"]),
                tuple(tensors[i] for i in row["inputs"]), tuple(tensors[i] for i in row["outputs"]),
                tuple((name, tensors[i]) for name, i in row["parameters"]),
            )
            for row in data["layers"]
        )  # fmt: skip
        optimizer = data["optimizer"]
        parameters = tuple(Parameter(name, layer, tensors[i], trained, sparse) for name, layer, i, trained, sparse in data.get("parameters", ()))
        for place, (index, n_ops) in enumerate(data.get("arrivals", ())):
            if not 0 <= index < len(parameters) or not 0 <= n_ops <= len(data["ops"]):
                raise DlperfError(f"arrivals[{place}] is of parameter {index} after {n_ops} ops; there are {len(parameters)} and {len(data['ops'])}")
        return cls(
            target=data["target"], batch_size=data["batch_size"], layers=layers, ops=tuple(op_from_json(row, tensors) for row in data["ops"]),
            storages=tuple(Storage(*row) for row in data["storages"]), optimizer=OptimizerInfo(**optimizer) if optimizer else None,
            inference=data["inference"], recorded_on=data["recorded_on"], notes=tuple(data["notes"]), versions=data["versions"],
            parameters=parameters, buffers=tuple((name, tensors[i]) for name, i in data.get("buffers", ())),
            arrivals=tuple((index, n_ops) for index, n_ops in data.get("arrivals", ())),
        )  # fmt: skip


class TensorTable:
    """Distinct tensors numbered in order of first use, so that JSON names each one once."""

    def __init__(self) -> None:
        self._index: dict[TensorSpec, int] = {}

    def add(self, spec: TensorSpec) -> int:
        """The number of `spec`, a new one at its first sight."""
        return self._index.setdefault(spec, len(self._index))

    def to_json(self) -> list[Any]:
        """``[shape, strides or null if they are those of a row-major tensor, dtype, storage]`` for each tensor."""
        return [
            [list(t.shape), None if t.strides == TensorSpec.contiguous(*t.shape).strides else list(t.strides), t.dtype, t.storage] for t in self._index
        ]

    @staticmethod
    def from_json(rows: list[Any]) -> list[TensorSpec]:
        """The tensors in order of their numbers. Raises DlperfError for sizes that no tensor has."""
        for number, (shape, strides, *_) in enumerate(rows):
            if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape):
                raise DlperfError(f"tensors[{number}] has shape {shape}; sizes are whole and not negative")
            if strides is not None and len(strides) != len(shape):
                raise DlperfError(f"tensors[{number}] has shape {shape} and strides {strides}; they must be of one length")
        return [
            TensorSpec.contiguous(*shape, dtype=dtype, storage=storage) if strides is None else TensorSpec(tuple(shape), tuple(strides), dtype, storage)
            for shape, strides, dtype, storage in rows
        ]


def op_to_json(op: Op, table: TensorTable) -> list[Any]:
    """An op as a JSON row; its tensors go to `table`."""
    return [
        op.name, [_argument_to_json(a, table) for a in op.args], {k: _argument_to_json(v, table) for k, v in op.kwargs},
        [table.add(t) for t in op.outputs], op.phase, op.layer, op.node, op.grad, [list(s) for s in op.shares],
    ]  # fmt: skip


def op_from_json(row: list[Any], tensors: list[TensorSpec]) -> Op:
    """The op that :func:`op_to_json` wrote."""
    name, args, kwargs, outputs, phase, layer, node, grad, shares = row
    return Op(
        name, tuple(_argument_from_json(a, tensors) for a in args), tuple((k, _argument_from_json(v, tensors)) for k, v in kwargs.items()),
        tuple(tensors[i] for i in outputs), phase, layer, node, grad, tuple((layer_name, share) for layer_name, share in shares),
    )  # fmt: skip


def _argument_to_json(argument: Argument, table: TensorTable) -> Any:
    if isinstance(argument, TensorSpec):
        return {"tensor": table.add(argument)}
    if isinstance(argument, Symbol):
        return {argument.kind: argument.name}
    if isinstance(argument, tuple):
        return [_argument_to_json(a, table) for a in argument]
    if isinstance(argument, float) and not math.isfinite(argument):
        return {"float": repr(argument)}
    return argument


def _argument_from_json(value: Any, tensors: list[TensorSpec]) -> Argument:
    if isinstance(value, list):
        return tuple(_argument_from_json(v, tensors) for v in value)
    if isinstance(value, dict):
        ((kind, name),) = value.items()
        if kind == "tensor":
            return tensors[name]
        return float(name) if kind == "float" else Symbol(kind, name)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an argument is {value!r}")


def own_operations(trace: Trace) -> str:
    """How the groups begin in which a target's own operations were measured.

    >>> own_operations(Trace("lenet", 64, (), (), inference=True))
    'for lenet@64 (forward pass,'
    """
    return f"for {trace.target}@{trace.batch_size} ({'forward pass' if trace.inference else 'step'},"

"""A recorded training step as data: the layers of a network, the operations they ran, the memory
these held.

Nothing here imports torch. A trace is saved as JSON and is itself a target: a network can be
predicted, and its operations calibrated, where its code is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from dlperf.core import files
from dlperf.core.conversion import check_unique, convert, refuse
from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.operators import (
    ITEM_BYTES,
    Argument,
    Op,
    Symbol,
    TensorSpec,
    TensorTable,
    op_from_record,
    op_to_json,
    tensor_numbered,
    tensors_from_records,
    tensors_in,
)
from dlperf.core.records.trace import OptimizerInfo, Phase, TraceRecord

__all__ = [
    "ITEM_BYTES",
    "LOSS",
    "PHASES",
    "SCHEMA",
    "SCHEMA_VERSION",
    "Argument",
    "Layer",
    "Op",
    "OptimizerInfo",
    "Parameter",
    "Storage",
    "Symbol",
    "TensorSpec",
    "TensorTable",
    "Trace",
    "op_to_json",
    "tensors_in",
    "trace_from_record",
]

SCHEMA, SCHEMA_VERSION = files.TRACE, 1
PHASES: tuple[str, ...] = get_args(Phase)
LOSS = "(loss)"
"""The row under which the work of the loss stands."""
BY_HAND = "updates by hand"
"""The optimizer's type where the program changes the parameters itself."""


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that was called: where it stands, what it saw, what it owns.

    `name` is the qualified name (the root's is its type), `callers` counts its calls by the layer
    whose forward made them ("" for the step itself). `inputs` and `outputs` are those of the first
    call. `parameters` are the module's own. `n_instructions` is the number of instructions that
    Python executed in its forward over all calls, `n_distinct` that of the places in the code where
    these stand; 0 where they were not counted. `n_silent_nodes` is the number of autograd nodes
    that its forward made and in which no op runs in the backward.
    """

    name: str
    type: str
    is_leaf: bool
    callers: tuple[tuple[str, int], ...] = ()
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    parameters: tuple[tuple[str, TensorSpec], ...] = ()
    n_instructions: int = 0
    n_distinct: int = 0
    n_silent_nodes: int = 0

    @property
    def n_calls(self) -> int:
        """How often the step called the module."""
        return sum(count for _, count in self.callers)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the model: its qualified name, the layer that owns it, whether the step trains
    it, and whether its gradient is sparse.
    """

    name: str
    layer: str
    spec: TensorSpec
    trained: bool = True
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory: its size and its life.

    `born` is the index of the op that made it, -1 if it was there before the step. `dies` is the
    index of the op before which it is freed (the number of ops if at the very end), None if it
    outlives the step. `kind`: ``parameter``, ``buffer``, ``input``, ``gradient``, ``optimizer`` or
    ``""`` (everything else).
    """

    nbytes: int
    born: int = -1
    dies: int | None = None
    kind: str = ""


@dataclass(frozen=True, repr=False)
class Trace(Displayed, by="dlperf.report.summaries"):
    """One step (zero_grad, forward with loss, backward, optimizer) or, with `inference`, one
    forward pass.

    `layers` are in the order of first execution, `ops` in the order of execution. `parameters` and
    `buffers` (name, tensor) are the model's in the order of their definition, shared ones once;
    `arrivals` says in which order gradients were accumulated: (index in `parameters`, number of ops
    that had run). They are empty in files of older versions. `recorded_on` is ``fake tensors`` or
    ``real tensors``; `notes` say what a user should know about the recording.
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
                raise DlperfError(
                    f"trace: op {op.name} has phase {op.phase!r}; expected one of"
                    f" {', '.join(PHASES)}"
                )

    @cached_property
    def n_parameters(self) -> int:
        """Number of trained and untrained parameters; shared ones once."""
        specs = [spec for layer in self.layers for _, spec in layer.parameters]
        largest: dict[int, int] = defaultdict(int)  # of each storage; unknown ones count apart
        for number, spec in enumerate(specs, 1):
            key = spec.storage if spec.storage >= 0 else -number
            largest[key] = max(spec.numel, largest[key])
        return sum(largest.values())

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, whole or not at all."""
        files.write_json(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace. Raises DlperfError naming the file, the entry and the way out."""
        return files.load(path, SCHEMA, SCHEMA_VERSION, cls.from_json, "Record it again.")

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON data; tensors stand once in a table and are referred to by number."""
        table = TensorTable()
        layers = [
            {
                "name": layer.name,
                "type": layer.type,
                "leaf": layer.is_leaf,
                "callers": [list(c) for c in layer.callers],
                "inputs": [table.add(t) for t in layer.inputs],
                "outputs": [table.add(t) for t in layer.outputs],
                "parameters": [[name, table.add(t)] for name, t in layer.parameters],
                "instructions": [layer.n_instructions, layer.n_distinct],
                "silent_nodes": layer.n_silent_nodes,
            }
            for layer in self.layers
        ]
        ops = [op_to_json(op, table) for op in self.ops]
        parameters = [
            [p.name, p.layer, table.add(p.spec), p.trained, p.sparse] for p in self.parameters
        ]
        buffers = [[name, table.add(spec)] for name, spec in self.buffers]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "batch_size": self.batch_size,
            "inference": self.inference,
            "recorded_on": self.recorded_on,
            "notes": list(self.notes),
            "versions": dict(self.versions),
            "optimizer": None if self.optimizer is None else asdict(self.optimizer),
            "parameters": parameters,
            "buffers": buffers,
            "arrivals": [list(arrival) for arrival in self.arrivals],
            "layers": layers,
            "ops": ops,
            "storages": [[s.nbytes, s.born, s.dies, s.kind] for s in self.storages],
            "tensors": table.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """The trace that :meth:`to_json` wrote. Raises DlperfError naming the entry that no
        recording can have made.
        """
        return trace_from_record(convert(data, TraceRecord))


def trace_from_record(record: TraceRecord, where: str = "") -> Trace:
    """The trace of a record; `where` precedes the entries in errors. Raises DlperfError for
    references and names that do not fit together.
    """
    tensors = tensors_from_records(record.tensors, where)
    for number, spec in enumerate(tensors):
        if spec.storage >= len(record.storages):
            refuse(
                f"{where}tensors[{number}].storage",
                spec.storage,
                f"one of the {len(record.storages)} storages",
            )
    n_ops = len(record.ops)
    for number, storage in enumerate(record.storages):
        for name, index, most in (("born", storage.born, n_ops - 1), ("dies", storage.dies, n_ops)):
            if index is not None and index > most:
                refuse(
                    f"{where}storages[{number}].{name}",
                    index,
                    f"an operator's number, of which there are {n_ops}",
                )

    def found(numbers: Sequence[int], entry: str) -> tuple[TensorSpec, ...]:
        return tuple(
            tensor_numbered(number, tensors, f"{where}{entry}[{index}]")
            for index, number in enumerate(numbers)
        )

    check_unique(f"{where}layers[{{}}].name", [layer.name for layer in record.layers])
    layers = tuple(
        Layer(
            row.name,
            row.type,
            row.leaf,
            tuple((caller.name, caller.count) for caller in row.callers),
            found(row.inputs, f"layers[{n}].inputs"),
            found(row.outputs, f"layers[{n}].outputs"),
            tuple(
                zip(
                    [p.name for p in row.parameters],
                    found([p.tensor for p in row.parameters], f"layers[{n}].parameters"),
                )
            ),
            row.instructions.executed,
            row.instructions.distinct,
            row.silent_nodes,
        )
        for n, row in enumerate(record.layers)
    )
    check_unique(f"{where}parameters[{{}}].name", [row.name for row in record.parameters])
    specs = found([row.tensor for row in record.parameters], "parameters")
    parameters = tuple(
        Parameter(row.name, row.layer, spec, row.trained, row.sparse)
        for row, spec in zip(record.parameters, specs)
    )
    for index, arrival in enumerate(record.arrivals):
        if arrival.parameter >= len(parameters):
            refuse(
                f"{where}arrivals[{index}].parameter",
                arrival.parameter,
                f"one of the {len(parameters)} parameters",
            )
        if arrival.n_ops > n_ops:
            refuse(
                f"{where}arrivals[{index}].n_ops",
                arrival.n_ops,
                f"at most the number of operators, {n_ops}",
            )
    _check_layers(record, where)
    return Trace(
        target=record.target,
        batch_size=record.batch_size,
        layers=layers,
        ops=tuple(
            op_from_record(row, tensors, f"{where}ops[{n}]") for n, row in enumerate(record.ops)
        ),
        storages=tuple(
            Storage(row.n_bytes, row.born, row.dies, row.kind) for row in record.storages
        ),
        optimizer=record.optimizer,
        inference=record.inference,
        recorded_on=record.recorded_on,
        notes=record.notes,
        versions=record.versions,
        parameters=parameters,
        buffers=tuple(
            zip(
                [row.name for row in record.buffers],
                found([row.tensor for row in record.buffers], "buffers"),
            )
        ),
        arrivals=tuple((arrival.parameter, arrival.n_ops) for arrival in record.arrivals),
    )


def _check_layers(record: TraceRecord, where: str) -> None:
    """Refuse the name of a layer that the trace does not contain.

    A parameter may belong to a module that is never called; traces of older versions do not name
    their parameters.
    """
    known = {"", LOSS, *(layer.name for layer in record.layers)}
    owners = known | {parameter.layer for parameter in record.parameters}
    expected = "a layer of the trace"
    for number, layer in enumerate(record.layers):
        for index, caller in enumerate(layer.callers):
            if caller.name not in known:
                refuse(f"{where}layers[{number}].callers[{index}].name", caller.name, expected)
    for number, op in enumerate(record.ops):
        if op.phase == "forward" or record.parameters:
            for index, share in enumerate(op.shares):
                if share.layer not in owners:
                    refuse(f"{where}ops[{number}].shares[{index}].layer", share.layer, expected)
            if op.layer not in owners:
                refuse(f"{where}ops[{number}].layer", op.layer, expected)

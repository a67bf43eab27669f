"""Operator calls as data: tensors without contents, arguments, and their form in trace files and
machine files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

from dlperf.core.conversion import MOST, refuse
from dlperf.core.records.trace import OpRecord, TensorRecord

_SYMBOLS = ("dtype", "device", "layout", "memory_format")
_DEEPEST = 10
_LARGEST = 2**64
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "complex64": 8,
    "complex128": 16,
    "complex32": 4,
    "bcomplex32": 4,
    "qint8": 1,
    "quint8": 1,
    "qint32": 4,
    "quint4x2": 1,
    "quint2x4": 1,
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
}
"""Bytes of an element by dtype, all of torch's; a test holds the table against torch."""


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
        """Bytes that reading every distinct element once moves; broadcast dimensions (stride 0)
        count once.
        """
        return (
            math.prod(n for n, s in zip(self.shape, self.strides) if s != 0 or n == 0)
            * self.item_bytes
        )

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
        """Whether the elements fill their memory without gaps or overlap, in any order of
        dimensions.
        """
        step = 1
        for stride, size in sorted((s, n) for n, s in zip(self.shape, self.strides) if n != 1):
            if stride != step:
                return False
            step *= size
        return True


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument of an op that is a torch constant: kind ``dtype``, ``device``, ``layout`` or
    ``memory_format``, and its name.
    """

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

    `name` is the overload's full name (``aten.addmm.default``), `args` and `kwargs` are what it was
    called with, in the order of its schema. `layer` is the qualified name of the module that it
    belongs to; where it served several at once (a foreach or fused optimizer), `shares` gives each
    one's fraction. `node` numbers the autograd node that ran it in the backward (-1 elsewhere);
    `grad` states that autograd recorded it, `from_cpp` that C++ code called it: the autograd
    engine, or an operator that Python called.
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
    from_cpp: bool = False

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Every tensor among the arguments, in order."""
        return tuple(tensors_in(self.args)) + tuple(
            tensors_in(tuple(value for _, value in self.kwargs))
        )

    @property
    def first_shape(self) -> tuple[int, ...]:
        """Shape of the first tensor among the positional arguments; () without one."""
        first = next(tensors_in(self.args), None)
        return () if first is None else first.shape

    @property
    def layer_shares(self) -> tuple[tuple[str, float], ...]:
        """Each layer that the call belongs to, with its fraction of it."""
        return self.shares or ((self.layer, 1.0),)

    @property
    def packet(self) -> str:
        """The operator without its overload.

        >>> Op("aten.add.Tensor").packet
        'aten.add'
        """
        return self.name.rsplit(".", 1)[0]

    @cached_property
    def signature(self) -> str:
        """What decides the op's time, as text: name and arguments without storages. Equal ops have
        equal signatures.
        """
        options = ",".join(f"{name}={_describe(value)}" for name, value in self.kwargs)
        return f"{self.name}({_describe(self.args)}|{options})"


def _describe(argument: Argument) -> str:
    if isinstance(argument, TensorSpec):
        strides = "" if argument.is_contiguous else ":" + "x".join(map(str, argument.strides))
        return f"{argument.dtype}[{'x'.join(map(str, argument.shape))}{strides}]"
    if isinstance(argument, tuple):
        return "(" + ",".join(map(_describe, argument)) + ")"
    if isinstance(argument, Symbol):
        return argument.name
    return repr(argument)


class TensorTable:
    """Distinct tensors numbered in order of first use, so that JSON names each one once."""

    def __init__(self) -> None:
        self._index: dict[TensorSpec, int] = {}

    def add(self, spec: TensorSpec) -> int:
        """The number of `spec`, a new one at its first sight."""
        return self._index.setdefault(spec, len(self._index))

    def to_json(self) -> list[Any]:
        """``[shape, strides or null if they are those of a row-major tensor, dtype, storage]`` for
        each tensor.
        """
        return [
            [
                list(t.shape),
                None if t.strides == TensorSpec.contiguous(*t.shape).strides else list(t.strides),
                t.dtype,
                t.storage,
            ]
            for t in self._index
        ]


def tensors_from_records(rows: Sequence[TensorRecord], where: str = "") -> list[TensorSpec]:
    """The tensors in the order of their numbers. Raises DlperfError for sizes and dtypes that no
    tensor has.
    """
    found = []
    for number, row in enumerate(rows):
        if row.dtype not in ITEM_BYTES:
            refuse(
                f"{where}tensors[{number}].dtype",
                row.dtype,
                "the name of a torch dtype such as float32",
            )
        if math.prod(row.shape) * ITEM_BYTES[row.dtype] >= MOST:
            refuse(f"{where}tensors[{number}].shape", row.shape, "a tensor of less than 2^53 bytes")
        if row.strides is None:
            found.append(TensorSpec.contiguous(*row.shape, dtype=row.dtype, storage=row.storage))
            continue
        if len(row.strides) != len(row.shape):
            refuse(
                f"{where}tensors[{number}].strides",
                row.strides,
                f"as many as the shape has sizes, {len(row.shape)}",
            )
        found.append(TensorSpec(tuple(row.shape), tuple(row.strides), row.dtype, row.storage))
    return found


def op_to_json(op: Op, table: TensorTable) -> list[Any]:
    """An op as a JSON row; its tensors go to `table`."""
    return [
        op.name,
        [_argument_to_json(a, table) for a in op.args],
        {k: _argument_to_json(v, table) for k, v in op.kwargs},
        [table.add(t) for t in op.outputs],
        op.phase,
        op.layer,
        op.node,
        op.grad,
        [list(s) for s in op.shares],
        op.from_cpp,
    ]


def op_from_record(row: OpRecord, tensors: Sequence[TensorSpec], entry: str) -> Op:
    """The operator call of a trace file's row, called `entry` in errors."""
    outputs = tuple(
        tensor_numbered(number, tensors, f"{entry}.outputs[{index}]")
        for index, number in enumerate(row.outputs)
    )
    args, kwargs = arguments_from_json(row.args, row.kwargs, tensors, entry)
    return Op(
        row.name,
        args,
        kwargs,
        outputs,
        row.phase,
        row.layer,
        row.node,
        row.grad,
        tuple((share.layer, share.share) for share in row.shares),
        row.from_cpp,
    )


def arguments_from_json(
    args: list[Any], kwargs: dict[str, Any], tensors: Sequence[TensorSpec], entry: str
) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
    """Positional and keyword arguments of an operator call. Raises DlperfError naming the part of
    `entry` that is none.
    """
    try:
        return (
            tuple([_argument_from_json(value, tensors) for value in args]),
            tuple([(name, _argument_from_json(value, tensors)) for name, value in kwargs.items()]),
        )
    except _Unfit as error:
        (unfit,) = error.args
    place = _place(args, unfit)
    entry += f".kwargs{_place(kwargs, unfit)}" if place is None else f".args{place}"
    if isinstance(unfit, dict) and list(unfit) == ["tensor"]:
        number = f"the number of a tensor, of which there are {len(tensors)}"
        refuse(f"{entry}['tensor']", unfit["tensor"], number)
    refuse(
        entry,
        unfit,
        "an operator's argument: null, true, false, a number, text, a list, or an object such as"
        " {'tensor': 0}",
    )


class _Unfit(Exception):
    """Holds the part of JSON data that is no operator's argument."""


def _place(values: Any, part: Any) -> str | None:
    """The keys and positions that lead to a `part` of lists and objects; None where it is none."""
    pairs = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in pairs:
        inner = "" if value is part else _place(value, part) if isinstance(value, list) else None
        if inner is not None:
            return f"[{key!a}]{inner}"
    return None


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


def _argument_from_json(
    value: Any, tensors: Sequence[TensorSpec], depth: int = _DEEPEST
) -> Argument:
    kind = type(value)
    if kind is int and -_LARGEST < value < _LARGEST:  # most of a file are these
        return value  # type: ignore[no-any-return]
    if kind is dict and len(value) == 1:
        ((name, content),) = value.items()
        if name == "tensor" and type(content) is int and 0 <= content < len(tensors):
            return tensors[content]
        if name == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if name in _SYMBOLS and type(content) is str:
            return Symbol(name, content)
    elif kind is list and depth:
        return tuple([_argument_from_json(one, tensors, depth - 1) for one in value])
    elif value is None or kind is bool or kind is str or (kind is float and math.isfinite(value)):
        return value  # type: ignore[no-any-return]
    raise _Unfit(value)


def tensor_numbered(number: int, tensors: Sequence[TensorSpec], entry: str) -> TensorSpec:
    """The tensor of a number. Raises DlperfError where there is none."""
    if number >= len(tensors):
        refuse(entry, number, f"the number of a tensor, of which there are {len(tensors)}")
    return tensors[number]

"""Registry of FLOP and byte formulas: one per operator, by packet name (``aten.addmm``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, TensorSpec, tensors_in

Formula = Callable[[Op], int]
Value = TypeVar("Value")

FLOPS: dict[str, Formula] = {}
"""FLOP formulas by operator without overload (``aten.addmm``)."""
BYTES: dict[str, Formula] = {}
"""Formulas for bytes moved, for the operators that the default rule would get wrong."""


def register(
    packets: Iterable[str], table: dict[str, Value], what: str
) -> Callable[[Value], Value]:
    """Decorator: `table` has the function for operators by packet name, ``aten.add`` also for the
    in-place ``aten.add_`` (:func:`find`).

    Raises DlperfError where an operator already has one.
    """

    def add(value: Value) -> Value:
        for packet in packets:
            if packet in table:
                names = " and ".join(getattr(one, "__name__", "") for one in (table[packet], value))
                raise DlperfError(f"{packet} has two {what}: {names}; keep one")
            table[packet] = value
        return value

    return add


def flop_formula(*packets: str) -> Callable[[Formula], Formula]:
    """Decorator: the function counts the FLOPs of these operators (:func:`register`)."""
    return register(packets, FLOPS, "FLOP formulas")


def byte_formula(*packets: str) -> Callable[[Formula], Formula]:
    """Decorator: the function counts the bytes that these operators move (:func:`register`)."""
    return register(packets, BYTES, "byte formulas")


def flops_per_element(flops: int, count: Callable[[Op], int], packets: Iterable[str]) -> None:
    """Register formulas: `flops` times the elements that `count` gives."""

    @flop_formula(*packets)
    def per_element(op: Op) -> int:
        return flops * count(op) if flops else 0


def aten(names: str, prefix: str = "") -> tuple[str, ...]:
    """Packets of a text of operators; those on lists of tensors have the prefix ``_foreach_``.

    >>> aten("mm bmm"), aten("add", "_foreach_")
    (('aten.mm', 'aten.bmm'), ('aten._foreach_add',))
    """
    return tuple(f"aten.{prefix}{name}" for name in names.split())


def names_of(packet: str) -> tuple[str, ...]:
    """The names to look an operator up by: its own, and the out-of-place one where it works in
    place.

    >>> names_of("aten.add_"), names_of("aten.mm")
    (('aten.add_', 'aten.add'), ('aten.mm',))
    """
    return (packet, packet[:-1]) if is_in_place(packet) else (packet,)


def is_in_place(packet: str) -> bool:
    """Whether the operator's name states that it overwrites its first argument."""
    return packet.endswith("_") and not packet.endswith("__")


def find(table: Mapping[str, Value], packet: str) -> Value | None:
    """The entry of an operator, or of its out-of-place form; None where there is none."""
    return next((table[name] for name in names_of(packet) if name in table), None)


def argument(op: Op, index: int, name: str, default: Any = None) -> Any:
    """Argument by its index in the schema, or by keyword; `default` where the call omits it."""
    return op.args[index] if index < len(op.args) else dict(op.kwargs).get(name, default)


def tensor(op: Op, index: int, name: str = "") -> TensorSpec:
    """A tensor argument. Raises DlperfError if the trace holds something else there."""
    value = argument(op, index, name)
    if not isinstance(value, TensorSpec):
        raise DlperfError(f"trace: argument {index} of {op.name} is {value!r}; expected a tensor")
    return value


def n_first_out(op: Op) -> int:
    """Elements of the first output; of the first input where an in-place op recorded no output."""
    return op.outputs[0].numel if op.outputs else n_first_in(op)


def n_first_in(op: Op) -> int:
    """Elements of the first input; 0 where there is none."""
    return op.inputs[0].numel if op.inputs else 0


def n_tensor(index: int) -> Callable[[Op], int]:
    """Function that gives the elements of the tensor argument at `index`."""
    return lambda op: tensor(op, index).numel


def n_larger(op: Op) -> int:
    """Elements of the larger one of the first input and the first output."""
    return max(n_first_in(op), n_first_out(op))


def n_first_list(op: Op) -> int:
    """Elements of all tensors of the first argument (a foreach or fused optimizer op)."""
    return sum(spec.numel for spec in tensors_in(op.args[0])) if op.args else 0

"""Where the formulas live: one per operator, registered by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, TensorSpec, tensors_in

Formula = Callable[[Op], int]

FLOPS: dict[str, Formula] = {}
"""FLOP formulas by operator without overload (``aten.addmm``)."""
BYTES: dict[str, Formula] = {}
"""Formulas for bytes moved, for the operators that the default rule would get wrong."""


def _register(
    table: dict[str, Formula], kind: str, packets: tuple[str, ...]
) -> Callable[[Formula], Formula]:
    def add(formula: Formula) -> Formula:
        for packet in packets:
            if packet in table:
                raise DlperfError(
                    f"{packet} has two {kind} formulas: {table[packet].__name__} and"
                    f" {formula.__name__}; keep one"
                )
            table[packet] = formula
        return formula

    return add


def flop_formula(*packets: str) -> Callable[[Formula], Formula]:
    """Decorator: the function counts the FLOPs of these operators (and of their in-place forms,
    ``aten.add_`` for ``aten.add``).

    Raises DlperfError where an operator already has a formula.
    """
    return _register(FLOPS, "FLOP", packets)


def byte_formula(*packets: str) -> Callable[[Formula], Formula]:
    """Decorator: the function counts the bytes that these operators move. Raises DlperfError where
    one already has a formula.
    """
    return _register(BYTES, "byte", packets)


def names_of(packet: str) -> tuple[str, ...]:
    """The names to look an operator up by: its own, and the out-of-place one where it works in
    place.

    >>> names_of("aten.add_"), names_of("aten.mm")
    (('aten.add_', 'aten.add'), ('aten.mm',))
    """
    return (packet, packet[:-1]) if is_in_place(packet) else (packet,)


def is_in_place(packet: str) -> bool:
    """Whether the operator's name says that it overwrites its first argument."""
    return packet.endswith("_") and not packet.endswith("__")


def find(table: dict[str, Formula], packet: str) -> Formula | None:
    """The formula of an operator, or of its out-of-place form; None where there is none."""
    formula = table.get(packet)
    if formula is None and is_in_place(packet):
        formula = table.get(packet[:-1])
    return formula


def argument(op: Op, place: int, name: str, default: Any = None) -> Any:
    """An argument by its place in the schema, or by keyword; `default` where the call left it out."""
    if place < len(op.args):
        return op.args[place]
    for key, value in op.kwargs:
        if key == name:
            return value
    return default


def tensor(op: Op, place: int, name: str = "") -> TensorSpec:
    """A tensor argument. Raises DlperfError if the trace holds something else there."""
    value = argument(op, place, name)
    if not isinstance(value, TensorSpec):
        raise DlperfError(f"trace: argument {place} of {op.name} is {value!r}; expected a tensor")
    return value


def n_first_out(op: Op) -> int:
    """Elements of the first output; of the first input where an in-place op recorded no output."""
    if op.outputs:
        return op.outputs[0].numel
    return op.inputs[0].numel if op.inputs else 0


def n_first_in(op: Op) -> int:
    """Elements of the first input; 0 where there is none."""
    return op.inputs[0].numel if op.inputs else 0


def n_first_list(op: Op) -> int:
    """Elements of all tensors of the first argument (a foreach or fused optimizer op)."""
    return sum(spec.numel for spec in tensors_in(op.args[0])) if op.args else 0

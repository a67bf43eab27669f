"""Values of expressions in a running frame, found without running code of the program.

Names, attributes, items of plain containers, arithmetic, and lengths of plain containers, tensors
and arrays are known; properties and a ``len`` of the program's own are not.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType, MemberDescriptorType
from typing import Any

import numpy as np
import torch

_CO_OPTIMIZED = 0x1
_SNAPSHOTS = sys.version_info < (3, 13)
MOST = 2**53
"""Larger numbers are unknown."""
_CONTAINERS = (list, tuple, dict, set, range, str)
_NUMBERS = (int, float)


class Names:
    """The values that a frame's names have; looked up, never evaluated."""

    def __init__(self, frame: FrameType, asks_for_locals: bool = False) -> None:
        self._globals: Mapping[str, Any] = frame.f_globals
        self._locals: Any = {}
        optimized = bool(frame.f_code.co_flags & _CO_OPTIMIZED)
        # Up to Python 3.12 this changes the dictionary that the function got from locals(): not
        # where the function calls it.
        if not (optimized and _SNAPSHOTS and asks_for_locals):
            self._locals = frame.f_locals
        self._snapshot = optimized and _SNAPSHOTS

    @classmethod
    def of(cls, local: Mapping[str, Any], outer: Mapping[str, Any]) -> Names:
        """The names of a function that is not running, with these arguments."""
        names = cls.__new__(cls)
        names._locals, names._globals, names._snapshot = local, outer, False
        return names

    def forget(self) -> None:
        """Drop the frame's objects.

        A snapshot lives as long as its frame, and would keep alive what the function deletes.
        """
        held, self._locals = self._locals, {}
        # three references, of the frame, this name and the call: nobody else uses it
        if self._snapshot and sys.getrefcount(held) == 3:
            held.clear()

    def get(self, name: str) -> Any:
        """The value of a name; None where there is none."""
        for names in (self._locals, self._globals, vars(builtins)):
            if name in names:
                return names[name]
        return None

    def number(self, node: ast.expr) -> int | None:
        """The whole number that an expression is; None where it is none."""
        value = self.value(node)
        if type(value) is float and value.is_integer():
            value = int(value)
        return value if type(value) is int and abs(value) < MOST else None

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; None where unknown."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.get(node.id)
        if isinstance(node, ast.Attribute):
            holder = self.value(node.value)
            sizes = _sizes(holder) if node.attr == "shape" else None
            return static_attribute(holder, node.attr) if sizes is None else sizes
        if isinstance(node, ast.Subscript):
            holder, key = self.value(node.value), self.value(node.slice)
            if type(holder) in (tuple, list):
                is_inside = type(key) is int and -len(holder) <= key < len(holder)
                return holder[key] if is_inside else None
            return holder.get(key) if type(holder) is dict and type(key) in (str, int) else None
        if isinstance(node, ast.Call) and not node.keywords:
            values = [self.value(one) for one in node.args]
            if isinstance(node.func, ast.Name):
                return self._called(self.get(node.func.id), values)
            if called_name(node) == "size" and len(values) == 1:
                sizes = _sizes(self.value(node.func.value))  # type: ignore[attr-defined]
                key = values[0]
                is_size = sizes and type(key) is int and abs(key) < len(sizes)
                return sizes[key] if sizes and is_size else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            value = self.value(node.operand)
            return -value if type(value) in _NUMBERS else None
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = self.value(node.left), self.value(node.right)
            if type(left) in _NUMBERS and type(right) in _NUMBERS:
                return _OPERATIONS[type(node.op)](left, right)
        return None

    @staticmethod
    def _called(function: Any, values: list[Any]) -> Any:
        if function is len and len(values) == 1:
            sizes = _sizes(values[0])
            if sizes is not None:
                return sizes[0] if sizes else None
            return len(values[0]) if type(values[0]) in _CONTAINERS else None
        is_number = function is int and len(values) == 1
        is_extremum = (function is min or function is max) and len(values) > 1
        is_known = all(type(value) in _NUMBERS and abs(value) < MOST for value in values)
        return function(*values) if is_known and (is_number or is_extremum) else None


def _sizes(value: Any) -> tuple[int, ...] | None:
    """The shape of a plain tensor or array; None for another value, also of a class of its own."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter, np.ndarray):
        return None
    with torch._C.DisableTorchFunction():  # modes of the program
        try:
            return tuple(value.shape)
        except RuntimeError:  # of a nested tensor
            return None


def static_attribute(holder: Any, name: str) -> Any:
    """An attribute of a plain object, also with ``__slots__``; None for what runs code."""
    found = inspect.getattr_static(holder, name, None)
    if isinstance(found, MemberDescriptorType):
        try:
            return found.__get__(holder)
        except (AttributeError, TypeError):  # not set yet; asked of the class
            return None
    return found


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b if b else None,
    ast.Div: lambda a, b: a / b if b else None,
    ast.Mod: lambda a, b: a % b if b else None,
    ast.Pow: lambda a, b: a**b if 0 <= b <= 19 and 0 <= a < MOST else None,  # no float overflows
}


def called_name(node: ast.Call) -> str:
    """The name of a called function, without its module."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return getattr(node.func, "id", "")

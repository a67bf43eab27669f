"""The running ``for ... in range(...)`` loops of a program: rounds done, and their number.

Python does not show the iterator of a running loop. So the source of the calling functions is
parsed, and the range's arguments are looked up: names, attributes, items of plain dictionaries and
whole-number arithmetic. No code of the program runs: a property or a ``len`` of its own makes a
loop unknown. So does a loop variable whose value is no member of the range.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

_OWN = str(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.join(path, "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
_LOOKS_AT_LOCALS = frozenset({"locals", "vars", "exec", "eval", "dir"})
_CO_OPTIMIZED = 0x1
_SNAPSHOTS = sys.version_info < (3, 13)
_MOST = 2**53


@dataclass(frozen=True)
class RunningLoop:
    """A running loop over a range: `index` of `length` rounds are done.

    `may_end_early`: its body may break or return.
    """

    index: int
    length: int
    may_end_early: bool = False


def enclosing_loops(frame: FrameType | None) -> tuple[RunningLoop, ...]:
    """The program's loops over known ranges around `frame`, innermost first.

    Those of libraries and of dlperf are left out.
    """
    found: list[RunningLoop] = []
    for nodes, names in _loops_around(frame):
        found += [loop for node in nodes if (loop := _loop(node, names)) is not None]
    return tuple(found)


def innermost_length(frame: FrameType | None) -> int | None:
    """Rounds of the innermost loop at `frame`, where it is over a plain list or tuple; else None.

    The list may be inside ``enumerate`` or ``tqdm``.
    """
    for nodes, names in _loops_around(frame):
        return None if any(_leaves(nodes[0].body)) else _sequence_length(nodes[0].iter, names)
    return None


def _loops_around(frame: FrameType | None) -> Iterator[tuple[list[ast.For], _Names]]:
    """The program's functions with loops around `frame`: their loops and names."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_OWN, *_LIBRARIES, "<")):
            function, nodes = _loops_at(code.co_filename, frame.f_lineno, code.co_name)
            if nodes:
                names = _Names(frame, asks_for_locals=_asks_for_locals(function))
                try:
                    yield nodes, names
                finally:
                    names.forget()
        frame = frame.f_back


def _called(node: ast.Call) -> str:
    """The name of a called function, without its module."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return getattr(node.func, "id", "")


def _sequence_length(node: ast.expr, names: _Names) -> int | None:
    if isinstance(node, ast.Call):
        is_name = isinstance(node.func, ast.Name)
        wraps = _called(node) == "tqdm" or (is_name and names.get(_called(node)) is enumerate)
        return _sequence_length(node.args[0], names) if wraps and node.args else None
    value = _value(node, names)
    return len(value) if type(value) in (list, tuple) else None  # a class of its own may run code


@functools.lru_cache(maxsize=16)
def _tree(path: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _asks_for_locals(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Name) and node.id in _LOOKS_AT_LOCALS for node in ast.walk(function)
    )


def _loops_at(path: str, line: int, function: str) -> tuple[ast.AST, list[ast.For]]:
    """The definition of `function`, and its ``for`` statements around a line, innermost first."""
    tree = _tree(path)
    if tree is None:
        return ast.Module([], []), []
    name, found = "<module>", list[ast.For]()
    definition: ast.AST = tree
    node: ast.AST | None = tree
    while node is not None:
        inside = None
        for child in ast.iter_child_nodes(node):
            begin, end = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
            if begin is None or end is None or not begin <= line <= end:
                continue
            inside = child
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                name, definition, found = child.name, child, []
            elif isinstance(child, ast.For) and child.body[0].lineno <= line <= (
                child.body[-1].end_lineno or 0
            ):
                found.insert(0, child)
            break
        node = inside
    return definition, found if name == function else []


class _Names:
    """The values that a frame's names have; looked up, never evaluated."""

    def __init__(self, frame: FrameType, asks_for_locals: bool) -> None:
        self._globals: Mapping[str, Any] = frame.f_globals
        self._locals: Any = {}
        optimized = bool(frame.f_code.co_flags & _CO_OPTIMIZED)
        # Up to Python 3.12 this changes the dictionary that the function got from locals(): not
        # where the function calls it.
        if not (optimized and _SNAPSHOTS and asks_for_locals):
            self._locals = frame.f_locals
        self._snapshot = optimized and _SNAPSHOTS

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


def _loop(node: ast.For, names: _Names) -> RunningLoop | None:
    if not isinstance(node.target, ast.Name):
        return None
    rounds = _range(node.iter, names)
    value = names.get(node.target.id)
    if rounds is None or type(value) is not int or value not in rounds:
        return None
    return RunningLoop(rounds.index(value), len(rounds), may_end_early=any(_leaves(node.body)))


def _range(node: ast.expr, names: _Names) -> range | None:
    """``range(...)``, also inside ``tqdm``, or ``trange(...)``."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = _called(node)
    if called == "tqdm":
        return _range(node.args[0], names)
    if called != "trange" and not (isinstance(node.func, ast.Name) and names.get(called) is range):
        return None
    values = [_value(argument, names) for argument in node.args]
    if (
        not 1 <= len(values) <= 3
        or not all(type(value) is int and abs(value) < _MOST for value in values)
        or values[2:] == [0]
    ):
        return None
    return range(*values)


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}


def _value(node: ast.expr, names: _Names) -> Any:
    """The value of an expression, without running code of the program; None where unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return inspect.getattr_static(_value(node.value, names), node.attr, None)
    if isinstance(node, ast.Subscript):
        holder, key = _value(node.value, names), _value(node.slice, names)
        return holder.get(key) if type(holder) is dict and type(key) in (str, int) else None
    if (
        isinstance(node, ast.Call)
        and len(node.args) == 1
        and isinstance(node.func, ast.Name)
        and names.get(node.func.id) is len
    ):
        held = _value(node.args[0], names)
        return len(held) if type(held) in (list, tuple, dict, range, str) else None
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _value(node.left, names), _value(node.right, names)
        if (
            type(left) is int
            and type(right) is int
            and not (isinstance(node.op, ast.FloorDiv) and right == 0)
        ):
            return _OPERATIONS[type(node.op)](left, right)
    return None


def _leaves(body: list[ast.stmt], in_loop: bool = True) -> Iterator[bool]:
    """True for each statement that may end the loop: a ``return``, or a ``break`` of its own."""
    for node in body:
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and in_loop):
            yield True
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        nested = isinstance(node, (ast.For, ast.AsyncFor, ast.While))
        for name in ("body", "orelse", "finalbody"):
            # a break in the else of an inner loop is the outer one's
            yield from _leaves(getattr(node, name, []), in_loop and not (nested and name == "body"))
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from _leaves(handler.body, in_loop)

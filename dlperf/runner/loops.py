"""The running loops of a program: rounds done, and their number.

Python does not show the iterator of a running loop. So the source of the calling functions is
parsed, and the numbers in it are looked up (:mod:`dlperf.runner.frame_names`): of
``for ... in range(...)``, and of loops that a counter ends (:mod:`dlperf.runner.counters`). No code
of the program runs. A loop variable whose value is no member of its range makes a loop unknown.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from types import FrameType, FunctionType

from dlperf.runner.counters import Counter, Surroundings, counters_of
from dlperf.runner.frame_names import Names, called_name

_OWN = str(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_LIBRARIES = tuple(
    {
        os.path.join(path, "")
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
        if (path := sysconfig.get_paths().get(name))
    }
)
_LOOKS_AT_LOCALS = frozenset({"locals", "vars", "exec", "eval", "dir"})


@dataclass(frozen=True)
class RunningLoop:
    """A running loop of a known length: `index` of `length` rounds are done.

    `may_end_early`: its body may break or return, for another reason than its length.
    """

    index: int
    length: int
    may_end_early: bool = False


def enclosing_loops(frame: FrameType | None) -> tuple[RunningLoop, ...]:
    """The program's loops of known lengths around `frame`, innermost first.

    Those of libraries and of dlperf are left out.
    """
    return tuple(
        loop
        for at in surroundings(frame)
        for depth in range(len(at.loops))
        if (loop := _loop(at, depth)) is not None
    )


def running_counters(frame: FrameType | None) -> tuple[Counter, ...]:
    """The counters that end the program's loops around `frame`, innermost first.

    Of several tests of one counter it is the innermost.
    """
    found: list[Counter] = []
    for at in surroundings(frame):
        # a function's own counter begins anew in each round of a loop that calls it
        found = [replace(one, restarts=one.restarts or one.is_local) for one in found]
        names = set()
        for depth in range(len(at.loops)):
            own = [counter for counter, _ in counters_of(at, depth) if counter.name not in names]
            found += own
            names |= {counter.name for counter in own}
    return tuple(found)


def innermost_length(frame: FrameType | None) -> int | None:
    """Rounds of the innermost loop at `frame`, where it is over a plain list or tuple; else None.

    The list may be inside ``enumerate`` or ``tqdm``.
    """
    for at in surroundings(frame):
        node = at.loops[0]
        if isinstance(node, ast.For) and not any(_leaves(node.body)):
            return _sequence_length(node.iter, at.names)
        return None
    return None


def running_lines(frame: FrameType | None) -> frozenset[tuple[str, int]]:
    """File and running line of each function of the stack."""
    found = set()
    while frame is not None:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return frozenset(found)


def iterates(frame: FrameType | None, lines: Set[tuple[str, int]]) -> bool:
    """Whether the program's ``for`` loops around `frame` include one whose head has such a line."""
    return any(
        (at.path, line) in lines
        for at in surroundings(frame)
        for node in at.loops
        if isinstance(node, ast.For)
        for line in range(node.lineno, (node.iter.end_lineno or node.lineno) + 1)
    )


def surroundings(frame: FrameType | None) -> Iterator[Surroundings]:
    """The program's functions with loops around `frame`."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith((_OWN, *_LIBRARIES, "<")):
            path, line = code.co_filename, frame.f_lineno
            function, loops = _loops_at(path, line, code.co_name)
            if loops:
                names = Names(frame, asks_for_locals=_asks_for_locals(function))
                try:
                    yield Surroundings(path, line, function, loops, names)
                finally:
                    names.forget()
        frame = frame.f_back


def _sequence_length(node: ast.expr, names: Names) -> int | None:
    if isinstance(node, ast.Call):
        is_name = isinstance(node.func, ast.Name)
        wraps = called_name(node) == "tqdm" or (
            is_name and names.get(called_name(node)) is enumerate
        )
        return _sequence_length(node.args[0], names) if wraps and node.args else None
    value = names.value(node)
    return len(value) if type(value) in (list, tuple) else None  # a class of its own may run code


def definition_of(function: FunctionType) -> ast.FunctionDef | None:
    """The source of a function of the program; None for one of a library."""
    code = function.__code__
    if code.co_filename.startswith((_OWN, *_LIBRARIES, "<")):
        return None
    tree = _tree(code.co_filename)
    found = [] if tree is None else [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    first = code.co_firstlineno  # of its decorators
    return next(
        (n for n in found if first in (n.lineno, *(d.lineno for d in n.decorator_list[:1]))), None
    )


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


def _loops_at(path: str, line: int, function: str) -> tuple[ast.AST, list[ast.For | ast.While]]:
    """The definition of `function`, and its loops around a line, innermost first."""
    tree = _tree(path)
    if tree is None:
        return ast.Module([], []), []
    name, found = "<module>", list[ast.For | ast.While]()
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
            elif isinstance(child, (ast.For, ast.While)) and child.body[0].lineno <= line <= (
                child.body[-1].end_lineno or 0
            ):
                found.insert(0, child)
            break
        node = inside
    return definition, found if name == function else []


def _loop(at: Surroundings, depth: int) -> RunningLoop | None:
    """The loop, where a range or a counter of its rounds tells its length."""
    node, found = at.loops[depth], list(counters_of(at, depth))
    known = [test for _, test in found if not _has_another_end(test)]
    may_end_early = any(_leaves([one for one in node.body if one not in known]))
    if isinstance(node, ast.While) and not isinstance(node.test, ast.Constant):
        may_end_early |= node not in known
    counters = [counter for counter, _ in found if counter.counts_rounds]
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
        rounds, value = _range(node.iter, at.names), at.names.get(node.target.id)
        if rounds is not None and type(value) is int and value in rounds:
            index = rounds.index(value)
            left = min([len(rounds) - index - 1, *(counter.left for counter in counters)])
            return RunningLoop(index, index + left + 1, may_end_early)
    if not isinstance(node, ast.While) or not counters:
        return None
    first = min(counters, key=lambda counter: counter.left)
    return RunningLoop(first.done, first.done + first.left + 1, may_end_early)


def _has_another_end(test: ast.If | ast.While) -> bool:
    """Whether a part of the test that is no counter's may end the loop, too."""
    is_and = isinstance(test.test, ast.BoolOp) and isinstance(test.test.op, ast.And)
    return isinstance(test.test, ast.BoolOp) and not (is_and and isinstance(test, ast.If))


def _range(node: ast.expr, names: Names) -> range | None:
    """``range(...)``, also inside ``tqdm``, or ``trange(...)``."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    called = called_name(node)
    if called == "tqdm":
        return _range(node.args[0], names)
    if called != "trange" and not (isinstance(node.func, ast.Name) and names.get(called) is range):
        return None
    values = [names.number(argument) for argument in node.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not 1 <= len(known) <= 3 or known[2:] == [0]:
        return None
    return range(*known)


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

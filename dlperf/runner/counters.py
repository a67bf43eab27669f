"""Counters that end loops: ``while step < n`` and ``if step >= n: break``, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from dlperf.runner.frame_names import Names, called_name

_GOES_ON = {ast.Lt: 0, ast.NotEq: 0, ast.LtE: 1}
"""Comparisons under which a loop goes on, and by how much its end lies above the bound."""
_ENDS = {ast.GtE: 0, ast.Eq: 0, ast.Gt: 1}
_FLIPPED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}


@dataclass(frozen=True)
class Surroundings:
    """The running `line` of a function: the `loops` around it, innermost first, and its names."""

    path: str
    line: int
    function: ast.AST
    loops: Sequence[ast.For | ast.While]
    names: Names


@dataclass(frozen=True)
class Counter:
    """A counter that ends a running loop after `left` further increments.

    `place`: file and line of its test. `done`: increments so far, counted from the number that the
    source assigns, or else from 0. `counts_rounds`: it counts the rounds of the loop that it ends,
    and not those of a loop inside. `restarts`: it begins anew in each round of a loop around this
    one. `is_local`: it begins anew with each call of its function. `name`: its text in the source.
    """

    place: tuple[str, int]
    name: str
    done: int
    left: int
    counts_rounds: bool
    restarts: bool
    is_local: bool


def counters_of(at: Surroundings, depth: int) -> Iterator[tuple[Counter, ast.If | ast.While]]:
    """The counters that end ``at.loops[depth]``, and the statement with the test of each.

    A test is the condition of a ``while``, or an ``if`` of the loop's body that breaks; each part
    of an ``and`` there, of an ``or`` here. An ``if n is not None and step >= n`` is one, too.
    """
    node, inside, around = at.loops[depth], at.loops[:depth], at.loops[depth + 1 :]
    for test, statement, shifts in _tests(node, at.names):
        for target, bound, shift in _sides(test, shifts):
            increments = list(_increments(node, inside, target, at.names))
            value, end = at.names.number(target), at.names.number(bound)
            is_counter = len(increments) == 1 and increments[0][1] > 0
            if not is_counter or value is None or end is None:
                continue
            (line, step, is_variable), tested = increments[0], statement.lineno
            # whether an increment lies between the running line and the next test
            is_pending = at.line <= line < tested
            if tested <= at.line:
                is_pending = line >= at.line or line < tested
            next_value = value + step * is_pending
            starts = [] if is_variable else _assignments(at.function, target, outside=node)
            first = starts[0].value if len(starts) == 1 else None
            begins = first.value if isinstance(first, ast.Constant) else 0
            begins = begins if type(begins) is int else 0
            counter = Counter(
                (at.path, tested),
                ast.unparse(target),
                max(0, (next_value - begins) // step - 1),
                max(0, -((next_value - end - shift) // step)),
                counts_rounds=not any(
                    one is not node
                    and isinstance(one, (ast.For, ast.While))
                    and _contains(one, line)
                    for one in ast.walk(node)
                ),
                restarts=any(
                    is_variable or any(_contains(one, start.lineno) for start in starts)
                    for one in around
                ),
                is_local=not isinstance(at.function, ast.Module) and (is_variable or bool(starts)),
            )
            yield counter, statement


def _tests(
    node: ast.For | ast.While, names: Names
) -> Iterator[tuple[ast.expr, ast.If | ast.While, dict[type[ast.cmpop], int]]]:
    if isinstance(node, ast.While):
        for part in _parts(node.test, ast.And):
            yield part, node, _GOES_ON  # type: ignore[misc]
    for statement in node.body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Break):
            for part in _parts(statement.test, ast.Or):
                yield _unguarded(part, names), statement, _ENDS  # type: ignore[misc]


def _parts(test: ast.expr, of: type[ast.boolop]) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, of) else [test]


def _unguarded(test: ast.expr, names: Names) -> ast.expr:
    """The comparison in an ``and`` whose other parts only say that its bound is given; else all."""
    parts = _parts(test, ast.And)
    for part in parts:
        if isinstance(part, ast.Compare):
            sides = {ast.unparse(part.left), ast.unparse(part.comparators[0])}
            if all(other is part or _is_given(other, sides, names) for other in parts):
                return part
    return test


def _is_given(guard: ast.expr, sides: Set[str], names: Names) -> bool:
    """Whether ``n``, ``n is not None``, ``n > 0`` or ``n != -1`` holds, for a number of `sides`."""
    if isinstance(guard, ast.Compare) and len(guard.ops) == 1:
        operand, operator, limit = guard.left, guard.ops[0], guard.comparators[0]
    else:
        operand, operator, limit = guard, ast.NotEq(), ast.Constant(0)
    value, least = names.number(operand), names.number(limit)
    if value is None or ast.unparse(operand) not in sides:
        return False
    if isinstance(operator, ast.IsNot):
        return isinstance(limit, ast.Constant) and limit.value is None
    is_above = isinstance(operator, ast.Gt) and least is not None and value > least
    return is_above or (isinstance(operator, ast.NotEq) and least is not None and value != least)


def _sides(
    test: ast.expr, shifts: dict[type[ast.cmpop], int]
) -> Iterator[tuple[ast.expr, ast.expr, int]]:
    """What may be the counter, its bound, and the shift of the end; both sides in turn."""
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return
    left, right, operator = test.left, test.comparators[0], type(test.ops[0])
    flipped = _FLIPPED.get(operator, operator)  # type: ignore[call-overload]
    for counter, bound, kind in ((left, right, operator), (right, left, flipped)):
        if isinstance(counter, (ast.Name, ast.Attribute)) and kind in shifts:
            yield counter, bound, shifts[kind]


def _increments(
    node: ast.For | ast.While,
    inside: Sequence[ast.For | ast.While],
    target: ast.expr,
    names: Names,
) -> Iterator[tuple[int, int, bool]]:
    """Line and size of each change of the counter in the loop; whether it is a loop's variable."""
    name = ast.unparse(target)
    for found in ast.walk(node):
        added: ast.expr | int | None = None
        if isinstance(found, ast.For):
            if name not in [ast.unparse(one) for one in _elements(found.target)]:
                continue
            is_counted = (found is node or found in inside) and _counts(found)
            added = 1 if is_counted else None
        elif isinstance(found, ast.AugAssign):
            if ast.unparse(found.target) != name:
                continue
            added = found.value if isinstance(found.op, ast.Add) else None
        elif isinstance(found, ast.Assign):
            if name not in [ast.unparse(one) for t in found.targets for one in _elements(t)]:
                continue
            value = found.value
            is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
            if is_sum and ast.unparse(value.left) == name:  # type: ignore[attr-defined]
                added = value.right  # type: ignore[attr-defined]
        else:
            continue
        step = names.number(added) if isinstance(added, ast.expr) else added
        yield found.lineno, step or 0, isinstance(found, ast.For)


def _elements(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def _counts(node: ast.For) -> bool:
    """Whether the loop's first variable counts in ones: of ``enumerate``, ``count``, ``range``."""
    iterated = node.iter
    while isinstance(iterated, ast.Call) and called_name(iterated) == "tqdm" and iterated.args:
        iterated = iterated.args[0]
    if not isinstance(iterated, ast.Call):
        return False
    n_most = {"enumerate": 2, "count": 1, "range": 2, "trange": 2}
    return len(iterated.args) <= n_most.get(called_name(iterated), -1)


def _assignments(where: ast.AST, target: ast.expr, outside: ast.stmt) -> list[ast.Assign]:
    name = ast.unparse(target)
    return [
        node
        for node in ast.walk(where)
        if isinstance(node, ast.Assign)
        and any(ast.unparse(one) == name for one in node.targets)
        and not _contains(outside, node.lineno)
    ]


def _contains(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)

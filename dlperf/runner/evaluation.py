"""Evaluation that a training will make: passes over a second loader, read from the source.

The loop around the training's pass is searched for ``for`` loops over a DataLoader, also in
the functions that it calls, where gradients are off or the model is in evaluation mode and no
``backward`` is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from torch.utils.data import DataLoader

from dlperf.runner.epoch_log import length_of
from dlperf.runner.frame_names import Names, static_attribute
from dlperf.runner.loops import definition_of, surroundings

UNKNOWN_EVALUATION = (
    "there is evaluation whose size or times the source does not tell; the forecast is without it"
    " until one was seen"
)
_QUIET = frozenset({"no_grad", "inference_mode", "eval", "set_grad_enabled"})
_DEEPEST = 3  # calls


@dataclass(frozen=True)
class Evaluation:
    """Passes without training, each of `batches` in batches of the training; None: unknown.

    One follows every `every_epochs` epochs, or every `every_steps` steps where this is set.
    """

    batches: float | None
    every_epochs: float = 1.0
    every_steps: float | None = None

    def expected(
        self, batch_s: float, n_steps: int, epoch_steps: float | None = None
    ) -> dict[str, float]:
        """The evaluation to come after `n_steps`, as fields of Progress, at `batch_s` a batch.

        `epoch_steps`: steps of an epoch, where the forecast is of steps. Empty where it is unknown,
        and where one was seen among the steps, whose rate contains it.
        """
        every = self.every_steps
        if every is None and epoch_steps is not None:
            every = self.every_epochs * epoch_steps
        if self.batches is None or (every is not None and n_steps >= every):
            return {}
        found = {"evaluation_s": self.batches * batch_s}
        if every is None:
            return found | {"evaluations_per_epoch": 1 / self.every_epochs}
        return found | {"evaluation_steps": every}


def evaluation_of(frame: FrameType | None, training: Any) -> Evaluation | None:
    """The evaluation in the loop around the pass of the loader `training` that begins in `frame`.

    None where the source shows none. An evaluation under ``if epoch % 5 == 0`` counts a fifth; its
    size is None under another condition, and for a loader without a length.
    """
    for at in surroundings(frame):
        others = list(_others(at.loops[0].body, at.line))
        found = list(_loaders(others, at.names, _is_quiet(others), training))
        sizes = [_worth(loader, training, period) for loader, period in found]
        known = [size for size in sizes if size is not None]
        return Evaluation(sum(known) if len(known) == len(sizes) else None) if found else None
    return None


def _others(body: list[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements of a loop's body beside the one with the training's pass."""
    for one in body:
        if not one.lineno <= line <= (one.end_lineno or 0):
            yield one
        elif not isinstance(one, (ast.For, ast.While)):
            for name in ("body", "orelse", "finalbody"):
                yield from _others(getattr(one, name, []), line)


def _loaders(
    body: list[ast.stmt],
    names: Names,
    is_quiet: bool,
    training: Any,
    depth: int = 0,
    period: int | None = 1,
) -> Iterator[tuple[Any, int | None]]:
    """The loaders that a body passes over without training.

    With each, the number of rounds in which it does so once; None: unknown.
    """
    for statement in body:
        every = period
        if isinstance(statement, ast.If):
            own = _period(statement.test, names)
            every = None if own is None or period is None else own * period
        for node in ast.walk(statement):
            if (
                isinstance(node, (ast.For, ast.comprehension))
                and is_quiet
                and not _calls_backward(node)
            ):
                for part in ast.walk(node.iter):
                    value = names.value(part) if isinstance(part, ast.expr) else None
                    if issubclass(type(value), DataLoader) and value is not training:
                        yield value, every
            elif isinstance(node, ast.Call) and depth < _DEEPEST:
                function, arguments = _function(node, names)
                where = None if function is None else definition_of(function)
                if function is not None and where is not None and not _calls_backward(where):
                    inner, quiet = Names.of(arguments, function.__globals__), _is_quiet([where])
                    is_inner_quiet = is_quiet or quiet
                    yield from _loaders(
                        where.body, inner, is_inner_quiet, training, depth + 1, every
                    )


def _period(test: ast.expr, names: Names) -> int | None:
    """Every how many rounds a condition on a remainder holds, as in ``epoch % 5 == 0``."""
    periods = [
        names.number(node.right)
        for node in ast.walk(test)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    ]
    is_one = len(periods) == 1 and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq)
    return periods[0] if is_one and (periods[0] or 0) > 0 else None


def _function(node: ast.Call, names: Names) -> tuple[FunctionType | None, Mapping[str, Any]]:
    """The program's function that a call names, and the values of its arguments."""
    owner: Any = None
    if isinstance(node.func, ast.Attribute):
        owner = names.value(node.func.value)
        function = static_attribute(type(owner), node.func.attr) if owner is not None else None
    else:
        function = names.value(node.func)
    while isinstance(function, FunctionType) and "__wrapped__" in function.__dict__:
        function = function.__dict__["__wrapped__"]  # @torch.no_grad()
    if not isinstance(function, FunctionType):
        return None, {}
    values = [names.value(one) for one in node.args]
    parameters = function.__code__.co_varnames[: function.__code__.co_argcount]
    own = dict(zip(parameters, values if owner is None else [owner, *values]))
    own |= {one.arg: names.value(one.value) for one in node.keywords if one.arg is not None}
    return function, own


def _worth(loader: Any, training: Any, period: int | None) -> float | None:
    """The pass in batches of the training, divided by its period."""
    n_batches, size = length_of(loader), getattr(loader, "batch_size", None)
    of_training = getattr(training, "batch_size", None)
    if n_batches is None or period is None:
        return None
    if isinstance(size, int) and isinstance(of_training, int):
        return n_batches * size / of_training / period
    return n_batches / period


def _is_quiet(body: list[Any]) -> bool:
    nodes = [node for one in body for node in ast.walk(one)]
    return any(getattr(node, "attr", getattr(node, "id", None)) in _QUIET for node in nodes)


def _calls_backward(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Attribute) and one.attr == "backward" for one in ast.walk(node))

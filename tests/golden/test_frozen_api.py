"""The public names of dlperf and their signatures."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from frozen_results import check_text

import dlperf


def signature(function: Any) -> str:
    """Names, kinds and defaults of the parameters; annotations name modules, which may move."""
    try:
        own = inspect.signature(function)
    except ValueError:
        return "(...)"
    bare = [one.replace(annotation=inspect.Parameter.empty) for one in own.parameters.values()]
    shown = [
        one.replace(default=Shown(one.default)) if one.default is not one.empty else one
        for one in bare
    ]
    return str(own.replace(parameters=shown, return_annotation=inspect.Signature.empty))


class Shown:
    """A default without addresses and modules."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        plain = isinstance(self.value, (int, float, str, tuple, frozenset, type(None)))
        return repr(self.value) if plain else type(self.value).__name__


def members(kind: type) -> Iterator[str]:
    """The public attributes and methods of a class, what it inherits from Python's own left out."""
    fields = (
        [one.name for one in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    )
    yield from (f"  {name}: field" for name in fields)
    own = {name for base in kind.__mro__ if base.__module__ != "builtins" for name in vars(base)}
    for name in sorted(own - set(fields)):
        if name.startswith("_") and name not in ("_repr_html_", "__enter__", "__exit__"):
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, (property, functools.cached_property)):
            yield f"  {name}: property"
        elif isinstance(value, (classmethod, staticmethod)):
            yield f"  {name}{signature(getattr(kind, name))}: {type(value).__name__}"
        elif callable(value):
            yield f"  {name}{signature(value)}"
        else:
            yield f"  {name}: {type(value).__name__}"


def described(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        is_error = issubclass(value, Exception)
        yield f"class {name}" + (": an exception" if is_error else signature(value))
        yield from members(value)
    elif callable(value):
        yield f"{name}{signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def test_public_names(frozen_files: Path, renew: bool) -> None:
    machine = dlperf.Machine.load(frozen_files / "machine.json")
    prediction = dlperf.predict(
        dlperf.Trace.load(frozen_files / "mlp-32.json"), machine, threads=1, predictor="roofline"
    )
    lines = []
    for name in sorted(dlperf.__all__):
        lines += [*described(name, getattr(dlperf, name)), ""]
    for name, value in (("step", prediction.step), ("epoch()", prediction.epoch(100))):
        lines += [f"Prediction.{name}", *members(type(value)), ""]
    for name in ("layers", "ops", "traffic"):
        lines += [
            f"Prediction.{name}: columns",
            *(f"  {own}" for own in getattr(prediction, name)),
            "",
        ]
    check_text("api", "\n".join(lines), renew)

"""What may stand behind the options of the command line: text -> values. Nothing heavy is imported
here.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import os
from pathlib import Path

from dlperf.core.units import UNSHAPED, format_rate, parse_bytes, parse_rate

FORMATS = ("text", "md", "html", "csv", "json")
_ABOVE_ZERO = math.ulp(0.0)
_WRITES_NAMES = {"globals", "vars", "exec", "setattr"}


def _number(
    text: str, kind: type[float], least: float, what: str, written: str | None = None
) -> float:
    """A finite number of at least `least`; `written` is what was typed, if not `text`."""
    with contextlib.suppress(ValueError):
        if least <= kind(text) < float("inf"):
            return kind(text)
    raise argparse.ArgumentTypeError(f"{written or text!r} is no {what}")


def count(text: str) -> int:
    """A whole number of at least 1."""
    return int(_number(text, int, 1, "whole number of at least 1"))


def count_or_none(text: str) -> int:
    """A whole number of at least 0."""
    return int(_number(text, int, 0, "whole number of at least 0"))


def counts(text: str) -> tuple[int, ...]:
    """``1,2,4``: whole numbers of at least 1, each once."""
    return tuple(dict.fromkeys(shape(text)))


def counts_or_none(text: str) -> tuple[int, ...]:
    """``0,1,2``: whole numbers of at least 0, each once."""
    return tuple(dict.fromkeys(count_or_none(part) for part in text.split(",")))


def size(text: str) -> int:
    """``2GiB``, ``500MB``: bytes, at least 1."""
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no memory to work in; write for example 512M or 4GiB"
        )
    return found


def amount(text: str) -> float:
    """``1935G``, ``40Mi``, ``1e9``: a positive amount of any unit."""
    with contextlib.suppress(ValueError):
        if (found := parse_bytes(text)) >= 1:
            return float(found)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no positive amount; write for example 19.5T, 40Mi or 1e9"
    )


def amounts(text: str) -> dict[str, float]:
    """``float32=19.5T,float16=312T``: amounts by name, each once."""
    found: dict[str, float] = {}
    for part in names(text):
        name, equals, value = part.partition("=")
        if not equals or not name or name in found:
            raise argparse.ArgumentTypeError(f"{part!r} is no NAME=AMOUNT that stands there once")
        found[name] = amount(value)
    return found


def shape(text: str) -> tuple[int, ...]:
    """``3,224,224``: sizes of at least 1."""
    return tuple(count(part) for part in text.split(","))


def seconds(text: str) -> float:
    """A positive, finite time."""
    return _number(text, float, _ABOVE_ZERO, "positive number of seconds")


def factor(text: str) -> tuple[str, float]:
    """``flops=2``: a name and a number."""
    name, equals, number = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and equals:
            return name.strip(), float(number)
    raise argparse.ArgumentTypeError(
        f"{text!r} is no NAME=FACTOR, such as flops=2; a target stands before them"
    )


def positive(text: str) -> float:
    """A positive, finite number."""
    return _number(text, float, _ABOVE_ZERO, "positive number")


def percent(text: str) -> float:
    """``5%`` or ``5``: a fraction in percent, at least 0."""
    number = text.rstrip("% ")
    return _number(number, float, 0, "percentage; write for example 5%", text) / 100


def names(text: str) -> tuple[str, ...]:
    """``a,b``: names, each once."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names separated by commas")
    return found


def formats(text: str) -> tuple[str, ...]:
    """``text,html``: formats of a report."""
    for name in names(text):
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; known are {', '.join(FORMATS)}")
    return names(text)


def loader(text: str) -> str:
    """``FILE.py:CALLABLE`` or ``PACKAGE.MODULE:CALLABLE``. Nothing is imported; of a file it is
    seen whether it is there, and defines the name.
    """
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise argparse.ArgumentTypeError(
            f"{text!r} names no function; give FILE.py:CALLABLE or PACKAGE.MODULE:CALLABLE"
        )
    if where.endswith(".py") or os.sep in where:
        if not os.path.isfile(where):
            raise argparse.ArgumentTypeError(f"{text}: there is no file {where}")
        defined = _defined_in(Path(where))
        if defined is not None and name.split(".")[0] not in defined:
            raise argparse.ArgumentTypeError(f"{text}: {where} defines no {name.split('.')[0]}")
    return text


def _defined_in(path: Path) -> set[str] | None:
    """The names that a source file binds anywhere; None where that cannot be read from it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return (
        None
        if found & {"*", "__getattr__"}
        or _WRITES_NAMES & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        else found
    )


def rates(text: str) -> tuple[str, ...]:
    """``1gbit,300mbit,none``: rates of links, each once; ``none`` is a link as it is."""
    try:
        return tuple(
            dict.fromkeys(
                UNSHAPED if name == UNSHAPED else format_rate(parse_rate(name))
                for name in names(text)
            )
        )
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, or {UNSHAPED}") from None

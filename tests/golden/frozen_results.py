"""Comparison of results with frozen ones: numbers to a relative 1e-9, all else exactly."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dlperf.core import host

FOLDER = Path(__file__).parent / "frozen"
EXACT = 1e-9
MOST_SHOWN = 12
HOW = "python -m pytest tests/golden --renew writes the new ones; the git diff shows each change"
HOST_FACTS = (
    "versions",
    "machine",
    "cluster",
    "path",
    "created",
    "provenance",
    "command",
    "warnings",
)
"""Keys of a command's answer that hold versions, paths and facts of the host."""
HOST_NOTES = ("this process may use", "was measured with torch")
"""In notes on the number of cores that this process has, and on its torch."""


def to_text(value: Any, indent: str = "") -> str:
    """JSON with one value a line; in a list, one line an entry that holds no further lists."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        rows = [f"{inner}{json.dumps(key)}: {to_text(own, inner)}" for key, own in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(entry, (dict, list)) for entry in value):
        rows = [f"{inner}{_row(entry, inner)}" for entry in value]
        return "[\n" + ",\n".join(rows) + f"\n{indent}]"
    return json.dumps(value)


def _row(entry: Any, indent: str) -> str:
    own = (
        list(entry.values())
        if isinstance(entry, dict)
        else entry
        if isinstance(entry, list)
        else []
    )
    nested = any(isinstance(value, (dict, list)) and value for value in own)
    return to_text(entry, indent) if nested else json.dumps(entry)


def differences(old: Any, new: Any, path: str = "", tolerance: float = EXACT) -> Iterator[str]:
    """The paths at which two JSON values differ, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            here = f"{path}.{key}".lstrip(".")
            if key not in new:
                yield f"{here}: gone"
            elif key not in old:
                yield f"{here}: new"
            else:
                yield from differences(old[key], new[key], here, tolerance)
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{path}: {len(old)} entries -> {len(new)}"
        for index, (one, other) in enumerate(zip(old, new)):
            yield from differences(one, other, f"{path}[{index}]", tolerance)
    elif not _equal(old, new, tolerance):
        yield f"{path}: {old!r} -> {new!r}"


def _equal(old: Any, new: Any, tolerance: float) -> bool:
    numbers = [
        isinstance(value, (int, float)) and not isinstance(value, bool) for value in (old, new)
    ]
    if not all(numbers):
        return type(old) is type(new) and old == new
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) and math.isnan(new)
    return math.isclose(old, new, rel_tol=tolerance, abs_tol=1e-18)


this_cpu = functools.cache(host.this_cpu)


def without_host_facts(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_host_facts(own) for k, own in value.items() if k not in HOST_FACTS}
    if isinstance(value, list):
        return [without_host_facts(own) for own in value if not _is_host_note(own)]
    if isinstance(value, str):
        return value.replace(f"this is {this_cpu().model}", "this is the host's processor")
    return value


def _is_host_note(value: Any) -> bool:
    return isinstance(value, str) and any(note in value for note in HOST_NOTES)


def check_data(name: str, data: Any, renew: bool, tolerance: float = EXACT) -> None:
    """Compare with ``frozen/NAME.json``; with `renew`, write it where it differs."""
    path = FOLDER / f"{name}.json"
    data = json.loads(json.dumps(data))
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    found = list(differences(old, data, "", tolerance))
    if not renew:
        _fail(path, found)
    elif found:
        _tell_numbers(path, data)
        _write(path, to_text(data) + "\n")


def check_text(name: str, text: str, renew: bool) -> None:
    """Compare with ``frozen/NAME.txt`` line by line, or write it."""
    path = FOLDER / f"{name}.txt"
    if renew:
        _write(path, text)
        return
    old, new = path.read_text(encoding="utf-8").splitlines(), text.splitlines()
    gone = [f"gone: {line.strip()}" for line in old if line not in set(new)]
    added = [f"new: {line.strip()}" for line in new if line not in set(old)]
    _fail(path, [*gone, *added] or (["lines in another order"] if old != new else []))


def _tell_numbers(path: Path, data: Any) -> None:
    """Say on stderr where numbers change: a diff of new words alone would hide one."""
    if not path.exists():
        return
    old, new = (
        sorted(_numbers(json.loads(path.read_text(encoding="utf-8")))),
        sorted(_numbers(data)),
    )
    n_changed = sum(not _equal(one, other, EXACT) for one, other in zip(old, new))
    if n_changed or len(old) != len(new):
        where, lengths = path.relative_to(FOLDER.parent), f"{len(old)} before, {len(new)} now"
        print(f"{where}: numbers change ({lengths})", file=sys.__stderr__)


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, (dict, list)):
        for own in value.values() if isinstance(value, dict) else value:
            yield from _numbers(own)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _fail(path: Path, found: list[str]) -> None:
    if found:
        more = f"\n  ... and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
        shown = "".join(f"\n  {line}" for line in found[:MOST_SHOWN])
        where = path.relative_to(FOLDER.parent)
        raise AssertionError(f"{where}: {len(found)} differences{shown}{more}\n{HOW}")

"""Checks of the entries of a JSON file; each names the entry, `where`, that is not what it must be."""

from __future__ import annotations

import sys
from typing import Any

from dlperf.errors import DlperfError


def check_number(where: str, value: Any, positive: bool = False) -> None:
    """Raises DlperfError for what is no finite number, negative, or, where it must be positive, 0; `where` names the entry."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max or (positive and value == 0):
        raise DlperfError(f"{where} is {value!r}; it must be a finite {'positive' if positive else 'non-negative'} number")


def check_list(where: str, value: Any, least: int = 0) -> list[Any]:
    """The list, of at least so many entries. Raises DlperfError naming where, as do those above and below."""
    if not isinstance(value, list) or len(value) < least:
        raise DlperfError(f"{where} is {value!r}; it must be a list" + (f" of at least {least}" if least else ""))
    return value


def check_text(where: str, value: Any) -> str:
    """The value. Raises DlperfError for what is no text; `where` names the entry."""
    if not isinstance(value, str):
        raise DlperfError(f"{where} is {value!r}; it must be text")
    return value


def check_name(where: str, value: Any, curves: tuple[str, ...]) -> str:
    """The name of a cost; one that begins as those of `curves` do is that of a point of a curve, ``kind/what/amount`` with a positive whole number."""
    name = check_text(where, value)
    if name.startswith(curves):
        _, *what, amount = name.split("/")
        if len(what) != 1 or not amount.isdecimal() or int(amount) == 0:
            raise DlperfError(f"{where} is {name!r}; it must end in what was measured and after how much of it, as in {curves[0]}next/1048576")
    return name

"""Text that is safe to show: control characters are visible, cells of CSV are no formulas."""

from __future__ import annotations

import csv
import io
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal obeys or cannot encode.

Control characters but line breaks and tabs, marks of writing direction, halves of surrogate pairs.
"""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def visible(text: str) -> str:
    """The text with control characters as escape sequences; line breaks and tabs stay.

    >>> print(visible("a\\x1b[31mb"))
    a\\x1b[31mb
    """
    return _CONTROLS.sub(_escaped, text)


def printable(name: str) -> str:
    """A name in one line, control characters, line breaks and tabs as escape sequences.

    >>> print(printable("a\\nb"))
    a\\nb
    """
    return re.sub("[\t\n]", _escaped, visible(name))


def _escaped(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()


def counted(n: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "thread"), counted(1200, "op")
    ('1 thread', '1,200 ops')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"


# -- width ----------------------------------------------------------------------------------------

WITHOUT_TERMINAL = 120
"""Columns of text that goes into a pipe or a file."""
_LEAST = 40


def text_width() -> int:
    """Columns of the terminal on stdout, 120 where there is none; ``COLUMNS`` comes before both."""
    return max(_LEAST, shutil.get_terminal_size((WITHOUT_TERMINAL, 24)).columns)


def fit(text: str, width: int | None = None) -> str:
    """The text with its wider lines wrapped to `width` columns (default: the terminal's).

    Later lines stand two columns further in than the first one.

    >>> print(fit("  note: busy while measuring", 16))
      note: busy
        while
        measuring
    """
    width = text_width() if width is None else width
    return "\n".join(_wrapped(line, width) for line in text.split("\n"))


def _wrapped(line: str, width: int) -> str:
    if len(line) <= width:
        return line
    indent = " " * min(len(line) - len(line.lstrip()) + 2, width // 2)
    return textwrap.fill(
        line, width, subsequent_indent=indent, replace_whitespace=False, break_on_hyphens=False
    )


# -- CSV ------------------------------------------------------------------------------------------


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """A CSV file of rows by column name; missing and unknown values are empty cells.

    >>> print(csv_text(["layer", "seconds"], [{"layer": "=1+1", "seconds": -0.5}]), end="")
    layer,seconds
    '=1+1,-0.5
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_safe_cell, columns))
    writer.writerows([_safe_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def csv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a CSV text, each with the number of its last line, from 1.

    Raises ValueError where quotation marks do not match: the text was cut or damaged there.

    >>> list(csv_rows('a,"b, c"\\nd,e\\n'))
    [(1, ['a', 'b, c']), (2, ['d', 'e'])]
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


def frame_to_csv(frame: pd.DataFrame, float_format: str | None = None) -> str:
    """A CSV file of a frame, without its index."""
    from pandas.api.types import is_numeric_dtype

    safe = frame.rename(columns=_safe_cell)
    for name in safe.columns:
        if not is_numeric_dtype(safe[name]):
            safe[name] = safe[name].map(_safe_cell, na_action="ignore")
    return str(safe.to_csv(index=False, lineterminator="\n", float_format=float_format))


def _safe_cell(value: Any) -> Any:
    """The value of a cell; an apostrophe precedes text that a spreadsheet takes for a formula."""
    if not isinstance(value, str):
        return value
    text = visible(value)
    return (
        f"'{text}" if text.startswith(_FORMULA) and not all(map(_is_number, text.split())) else text
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

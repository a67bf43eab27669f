"""Text no wider than the terminal that it is printed on."""

from __future__ import annotations

import shutil
import textwrap

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

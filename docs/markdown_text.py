"""Markdown of the generated pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a head that ends in ``:`` is of numbers."""
    lines = [heads, [("---:" if head.endswith(":") else "---") for head in heads], *rows]
    return "\n".join(
        f"| {' | '.join(cell.rstrip(':') if line is heads else cell for cell in line)} |"
        for line in lines
    )


def escaped(text: str) -> str:
    """Text with Markdown's characters escaped, code spans excepted."""
    return re.sub(r"(`[^`]*`)|([<>*_|])", lambda found: found[1] or f"\\{found[2]}", text)

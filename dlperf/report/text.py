"""Pages as plain text for a terminal or a text file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from dlperf.core.text import fit, printable, text_width
from dlperf.report.document import (
    Block,
    Bullets,
    Facts,
    Heading,
    Image,
    Paragraph,
    Preformatted,
    Table,
)
from dlperf.report.table import format_table

FILE_WIDTH = 160
"""Columns of prose in a text file; tables have all their columns."""
_PROSE_WIDTH = 120


def to_text(blocks: Iterable[Block], width: int | None = None, all_columns: bool = False) -> str:
    """The page, at most `width` columns wide (default: the terminal's, 120 where there is none).

    With `all_columns` tables are as wide as their cells. Plots are left out.
    """
    width = text_width() if width is None else width
    page = ""
    for block in blocks:
        if not isinstance(block, Image) and block != Paragraph(()):
            page += _block_text(block, width, all_columns)
            page += "\n" if isinstance(block, Heading) and block.level > 1 else "\n\n"
    page = page.rstrip("\n") + "\n"
    return page if all_columns else fit(page, width)


def _block_text(block: Block, width: int, all_columns: bool) -> str:
    if isinstance(block, Heading):
        return wrap(block.text, width)
    if isinstance(block, Table):
        return format_table(block.columns, None if all_columns else width)
    if isinstance(block, Preformatted):
        return block.text
    if isinstance(block, Paragraph):
        return "\n".join(wrap(line, min(width, _PROSE_WIDTH)) for line in block.lines)
    if isinstance(block, Facts):
        size = max(len(name) for name, _ in block.pairs)
        indent = " " * min(size + 2, width // 4)
        return "\n".join(
            wrap(f"{name:<{size}}  {text}", width, indent) for name, text in block.pairs
        )
    assert isinstance(block, Bullets)
    return "\n".join(wrap(f"- {item}", width, "  ") for item in block.items)


def wrap(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` characters; later lines are indented."""
    return textwrap.fill(printable(text), width, subsequent_indent=indent, break_on_hyphens=False)

"""Columns of text that fit a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from dlperf.core.units import format_seconds

_LEAST_TEXT = 8
"""Characters that a shortened cell keeps."""


@dataclass(frozen=True)
class Column:
    """One column: its title, the group title above it (``""`` for none), its cells.

    Columns of rank 0 are always shown, the others by rising rank while there is room.
    """

    title: str
    cells: tuple[str, ...]
    group: str = ""
    rank: int = 0
    align_left: bool = False

    @property
    def width(self) -> int:
        """Characters that the widest cell or the title takes."""
        return max((len(cell) for cell in (self.title, *self.cells)), default=0)


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the middle left out.

    >>> shorten("encoder.layers.11.linear1", 12)
    'encod..near1'
    """
    if len(text) <= width:
        return text
    tail = max(0, (width - 2) // 2)
    return text[: max(0, width - 2 - tail)] + ".." + (text[-tail:] if tail else "")


def format_table(columns: Sequence[Column], width: int | None, least_first: int = 20) -> str:
    """The columns side by side in at most `width` characters (None: as wide as they are).

    Columns of the same group and rank come and go together, those of high rank go first. Where
    those of rank 0 find no room either, text is shortened in the middle, the widest column first
    (the first column keeps `least_first` characters as long as it can); then the last ones go.
    What was left out is named below the table.
    """
    if width is None:
        width = sum(1 + column.width for column in columns)
    chosen = [column for column in columns if column.rank == 0]
    for rank in sorted({column.rank for column in columns if column.rank}):
        more = [column for column in columns if column in chosen or column.rank == rank]
        if _least(more, least_first) <= width:
            chosen = more
    while (widths := _widths(chosen, width, least_first)) is None:
        last = chosen[-1]
        chosen = [column for column in chosen[:-1] if not last.group or column.group != last.group]

    lines = []
    if any(column.group for column in chosen):
        lines.append(_group_line(chosen, widths))
    titles = [column.title for column in chosen]
    n_rows = len(columns[0].cells)
    rows = [titles, *([column.cells[i] for column in chosen] for i in range(n_rows))]
    for row in rows:
        cells = [shorten(cell, size) for cell, size in zip(row, widths)]
        text = " ".join(
            c.ljust(w) if column.align_left else c.rjust(w)
            for c, w, column in zip(cells, widths, chosen)
        )
        lines.append(text.rstrip())
    left_out = [column.group or column.title for column in columns if column not in chosen]
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        lines.append(textwrap.fill(f"(left out at {width} columns: {names})", width))
    return "\n".join(lines)


def _least(columns: Sequence[Column], least_first: int) -> int:
    first, *others = columns
    return min(first.width, least_first) + sum(1 + column.width for column in others)


def _widths(columns: Sequence[Column], width: int, least_first: int) -> list[int] | None:
    """The columns' widths, text shortened until they fit; None where they cannot."""
    widths = [column.width for column in columns]
    excess = sum(widths) + len(widths) - 1 - width
    cut = max(0, min(excess, widths[0] - least_first))
    widths[0], excess = widths[0] - cut, excess - cut
    text = [place for place, column in enumerate(columns) if place == 0 or column.align_left]
    for _ in range(excess):
        widest = max(text, key=lambda place: widths[place])
        if widths[widest] <= _LEAST_TEXT:
            return None
        widths[widest] -= 1
    return widths


def _group_line(columns: Sequence[Column], widths: Sequence[int]) -> str:
    line, start = "", 0
    place = 0
    while place < len(columns):
        end = place
        while (
            end + 1 < len(columns)
            and columns[end + 1].group == columns[place].group
            and columns[place].group
        ):
            end += 1
        size = sum(widths[place : end + 1]) + (end - place)
        title = columns[place].group
        line = line.ljust(start) + (
            (f" {title} ".center(size, "-") if size >= len(title) + 2 else title[:size])
            if title
            else ""
        )
        start += size + 1
        place = end + 1
    return line.rstrip()


def format_error(error_frac: float | None) -> str:
    """A signed error short enough for a column: percent, from tenfold on a factor.

    >>> format_error(0.123), format_error(-0.005), format_error(34.2), format_error(None)
    ('+12 %', '-0.5 %', '35x', '-')
    """
    if error_frac is None:
        return "-"
    if error_frac >= 9.995:
        return f"{error_frac + 1:.0f}x"
    return (
        f"{100 * error_frac:+.1f} %" if abs(error_frac) < 0.0995 else f"{100 * error_frac:+.0f} %"
    )


def format_time(seconds: float | None, is_part: bool = False) -> str:
    """Seconds in human units; a sum that lacks an unknown part is at least that.

    >>> format_time(0.00123), format_time(0.00123, is_part=True), format_time(None)
    ('1.23 ms', '>1.23 ms', '-')
    """
    if not is_part:
        return format_seconds(seconds)
    return f">{format_seconds(seconds)}" if seconds else "-"

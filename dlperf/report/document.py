"""A page as data: headings, paragraphs, lists, tables and plots; its text and its Markdown.

    page = [Heading("net, batch size 32", 1), Table(columns), Image("step", png, "The step.")]
    to_text(page), to_markdown("report", page), html.to_html("net", page)

A module that makes pages builds the blocks once and leaves the format to :func:`to_text`,
:func:`to_markdown` and :mod:`dlperf.report.html`. HTML is a jinja2 template, whose escaping is on
for every cell; text and Markdown are shorter in Python.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from dlperf.core.text import fit, printable, text_width
from dlperf.core.units import format_seconds

FILE_WIDTH = 160
"""Columns of prose in a text file; tables have all their columns."""
_PROSE_WIDTH = 120
_LEAST_TEXT, _LEAST_FIRST = 8, 20
"""Characters that a shortened cell keeps; one of the first column as long as it can."""


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


@dataclass(frozen=True)
class Heading:
    """A title: of the page (level 1), a case (2) or a part (3). Links lead to its `anchor`."""

    text: str
    level: int = 3
    anchor: str = ""


@dataclass(frozen=True)
class Paragraph:
    """Lines of prose; small print where `is_small`."""

    lines: tuple[str, ...]
    is_small: bool = False


@dataclass(frozen=True)
class Facts:
    """Pairs of a name and what is known of it."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Bullets:
    """A list. Items that begin with ``warning`` stand out."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Preformatted:
    """Text whose line breaks and columns stay as they are."""

    text: str


@dataclass(frozen=True)
class Table:
    """Columns of cells; leading blanks of the first column are indentation.

    `kinds` mark rows: ``group`` and ``own`` for a module and its own work, ``oneside`` for a layer
    of one side. `names` are the rows' full names, `shares` the fractions of bars beside the rows,
    `links` the anchors that the first cells lead to. Each has one entry per row or none.
    """

    columns: tuple[Column, ...]
    kinds: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Image:
    """A plot: its name, its PNG for HTML, its caption, and the file that Markdown links to."""

    name: str
    png: bytes = b""
    caption: str = ""
    link: str = ""


Block = Heading | Paragraph | Facts | Bullets | Preformatted | Table | Image


# -- text ------------------------------------------------------------------------------------------


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
    match block:
        case Heading(text):
            return wrap(text, width)
        case Table(columns):
            return format_table(columns, None if all_columns else width)
        case Paragraph(lines):
            return "\n".join(wrap(line, min(width, _PROSE_WIDTH)) for line in lines)
        case Bullets(items):
            return "\n".join(wrap(f"- {item}", width, "  ") for item in items)
        case Facts(pairs):
            size = max(len(name) for name, _ in pairs)
            indent = " " * min(size + 2, width // 4)
            return "\n".join(wrap(f"{name:<{size}}  {text}", width, indent) for name, text in pairs)
        case Preformatted(text):
            return text
    raise TypeError(f"{type(block).__name__} has no text")


def wrap(text: str, width: int, indent: str = "") -> str:
    """The text in lines of at most `width` characters; later lines are indented."""
    return textwrap.fill(printable(text), width, subsequent_indent=indent, break_on_hyphens=False)


def shorten(text: str, width: int) -> str:
    """At most `width` characters, the middle left out.

    >>> shorten("encoder.layers.11.linear1", 12)
    'encod..near1'
    """
    if len(text) <= width:
        return text
    tail = max(0, (width - 2) // 2)
    return text[: max(0, width - 2 - tail)] + ".." + (text[-tail:] if tail else "")


def format_table(columns: Sequence[Column], width: int | None) -> str:
    """The columns side by side in at most `width` characters (None: as wide as they are).

    Columns of the same group and rank come and go together, those of high rank go first. Where
    those of rank 0 find no room either, text is shortened in the middle, the widest column first;
    then the last ones go. What was left out is named below the table.
    """
    width = sum(1 + column.width for column in columns) if width is None else width
    chosen = [column for column in columns if column.rank == 0]
    for rank in sorted({column.rank for column in columns if column.rank}):
        more = [column for column in columns if column in chosen or column.rank == rank]
        if min(more[0].width, _LEAST_FIRST) + sum(1 + c.width for c in more[1:]) <= width:
            chosen = more
    while (widths := _widths(chosen, width)) is None:
        last = chosen[-1]
        chosen = [column for column in chosen[:-1] if not last.group or column.group != last.group]

    lines = [_group_line(chosen, widths)] if any(column.group for column in chosen) else []
    for row in zip(*((column.title, *column.cells) for column in chosen)):
        cells = (
            f"{shorten(cell, size):{'<' if column.align_left else '>'}{size}}"
            for cell, size, column in zip(row, widths, chosen)
        )
        lines.append(" ".join(cells).rstrip())
    left_out = [column.group or column.title for column in columns if column not in chosen]
    if left_out:
        names = ", ".join(dict.fromkeys(left_out))
        lines.append(textwrap.fill(f"(left out at {width} columns: {names})", width))
    return "\n".join(lines)


def _widths(columns: Sequence[Column], width: int) -> list[int] | None:
    """The columns' widths, text shortened until they fit; None where they cannot."""
    widths = [column.width for column in columns]
    excess = sum(widths) + len(widths) - 1 - width
    cut = max(0, min(excess, widths[0] - _LEAST_FIRST))
    widths[0], excess = widths[0] - cut, excess - cut
    text = [i for i, column in enumerate(columns) if i == 0 or column.align_left]
    for _ in range(excess):
        widest = max(text, key=lambda i: widths[i])
        if widths[widest] <= _LEAST_TEXT:
            return None
        widths[widest] -= 1
    return widths


def _group_line(columns: Sequence[Column], widths: Sequence[int]) -> str:
    """The title of each group in the middle of its columns' width."""
    parts = []
    for _, own in groupby(range(len(columns)), key=lambda i: columns[i].group or i):
        indices = list(own)
        title = columns[indices[0]].group
        size = sum(widths[index] for index in indices) + len(indices) - 1
        fits = title and size >= len(title) + 2
        parts.append(f" {title} ".center(size, "-") if fits else title[:size].ljust(size))
    return " ".join(parts).rstrip()


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


# -- Markdown --------------------------------------------------------------------------------------


def to_markdown(kind: str, blocks: Iterable[Block]) -> str:
    """The page. `kind` follows ``dlperf`` in the comment that marks the file as dlperf's."""
    comment = f"<!-- dlperf {kind.replace('--', '- -')} -->"
    return "\n\n".join([comment, *map(_block_markdown, blocks)]) + "\n"


def _block_markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * max(2, level)} {escape(text)}"
        case Table(columns, kinds):
            return table(columns, {i for i, kind in enumerate(kinds) if kind == "group"})
        case Paragraph(lines, is_small):
            text = "<br>".join(map(escape, lines))
            return f"<sub>{text}</sub>" if is_small else text
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Facts(pairs):
            return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in pairs)
        case Preformatted(text):
            return f"```text\n{text}\n```"
        case Image():
            name = block.caption or block.link.rsplit("/", 1)[-1].rsplit(".", 1)[0]
            return f"![{escape(name)}]({block.link})"


def table(columns: Sequence[Column], bold: set[int] | frozenset[int] = frozenset()) -> str:
    """All columns as a Markdown table. A group's title precedes the title of each of its columns;
    the first cells of the rows in `bold` are bold.
    """
    titles = [f"{column.group} {column.title}".strip() for column in columns]
    rules = [":---" if column.align_left else "---:" for column in columns]
    rows = [list(map(escape, titles)), rules]
    for i, name in enumerate(columns[0].cells):
        cell, indent = escape(name.lstrip(" ")), len(name) - len(name.lstrip(" "))
        first = "&nbsp;" * 2 * indent + (f"**{cell}**" if i in bold else cell)
        rows.append([first, *(escape(column.cells[i].lstrip(" ")) for column in columns[1:])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def escape(text: str) -> str:
    """Text without anything that Markdown or HTML would take as markup.

    >>> escape("a|<b>_x_")
    'a\\\\|&lt;b&gt;\\\\_x\\\\_'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", text).replace("\n", " ")

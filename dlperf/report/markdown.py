"""Pages as Markdown with GitHub's tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

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
from dlperf.report.table import Column


def to_markdown(kind: str, blocks: Iterable[Block]) -> str:
    """The page. `kind` follows ``dlperf`` in the comment that marks the file as dlperf's."""
    comment = f"<!-- dlperf {kind.replace('--', '- -')} -->"
    return "\n\n".join([comment, *map(_block_markdown, blocks)]) + "\n"


def _block_markdown(block: Block) -> str:
    if isinstance(block, Heading):
        return f"{'#' * max(2, block.level)} {escape(block.text)}"
    if isinstance(block, Table):
        return table(block.columns, {i for i, kind in enumerate(block.kinds) if kind == "group"})
    if isinstance(block, Image):
        name = block.caption or block.link.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        return f"![{escape(name)}]({block.link})"
    if isinstance(block, Preformatted):
        return f"```text\n{block.text}\n```"
    if isinstance(block, Paragraph):
        lines = "<br>".join(map(escape, block.lines))
        return f"<sub>{lines}</sub>" if block.is_small else lines
    if isinstance(block, Facts):
        return "\n".join(f"- **{escape(name)}**: {escape(text)}" for name, text in block.pairs)
    assert isinstance(block, Bullets)
    return "\n".join(f"- {escape(item)}" for item in block.items)


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

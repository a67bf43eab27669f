"""A page as data: headings, paragraphs, lists, tables and plots. Each format has one renderer.

    page = [Heading("net, batch size 32", 1), Table(columns), Image("step", png, "The step.")]
    text.to_text(page), markdown.to_markdown("report", page), html.to_html("net", page)

A module that makes pages builds the blocks once and leaves the format to :mod:`dlperf.report.text`,
:mod:`dlperf.report.markdown` and :mod:`dlperf.report.html`. HTML is a jinja2 template, whose
escaping is on for every cell; text and Markdown are shorter in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlperf.report.table import Column


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

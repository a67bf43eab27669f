"""Reports as Markdown (GitHub's tables)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dlperf.report.hierarchy import TRAFFIC_NOTE, traffic_columns
from dlperf.report.layer_comparison import phases_of
from dlperf.report.layers import layer_columns
from dlperf.report.outline import GROUP, SUM
from dlperf.report.table import Column
from dlperf.report.text import ACCURACY_NOTE, accuracy_columns, heading, step_sentence

if TYPE_CHECKING:
    from dlperf.report.comparison import Report


def report_to_markdown(report: Report, images: Sequence[str] = ()) -> str:
    """The report with every layer of every predictor; `images` are links to its plots."""
    blocks = [
        f"<!-- dlperf report, {_comment(report.created)} -->",
        f"## {escape(heading(report))}",
    ]
    summary = [
        f"- **{escape(label)}**:"
        f" {escape(step_sentence(p.step, report.measurement.step['total'].median, report.measurement.repeatability_frac))}"
        for p, label in zip(report.predictions, report.predictors)
    ]
    blocks += [
        "\n".join(summary),
        "### Accuracy",
        table(accuracy_columns(report.accuracy)),
        escape(ACCURACY_NOTE),
    ]
    for label in report.predictors:
        lines = report.outline(label)
        columns = layer_columns(lines, phases_of(report.inference), measured=True)
        bold = {i for i, line in enumerate(lines) if line.kind in (GROUP, SUM)}
        blocks += [f"### Layers, {escape(label)}", table(columns, bold)]
    blocks += [
        "### Bytes by level of the memory",
        table(traffic_columns(report)),
        escape(TRAFFIC_NOTE),
    ]
    if images:
        blocks += [
            "### Plots",
            "\n\n".join(f"![{escape(_caption(link))}]({link})" for link in images),
        ]
    if report.remarks:
        blocks += ["### Remarks", "\n".join(f"- {escape(remark)}" for remark in report.remarks)]
    blocks.append("<sub>" + "<br>".join(escape(line) for line in report.provenance) + "</sub>")
    return "\n\n".join(blocks) + "\n"


def table(columns: Sequence[Column], bold: set[int] | frozenset[int] = frozenset()) -> str:
    """All columns as a Markdown table, a group's title in front of each of its columns; the rows in
    `bold` stand out.
    """
    titles = [f"{column.group} {column.title}".strip() for column in columns]
    rules = [":---" if column.align_left else "---:" for column in columns]
    lines = ["| " + " | ".join(map(escape, titles)) + " |", "| " + " | ".join(rules) + " |"]
    for i in range(len(columns[0].cells)):
        cells = []
        for place, column in enumerate(columns):
            text = column.cells[i]
            stripped = text.lstrip(" ")
            cell = escape(stripped)
            if place == 0:
                cell = "&nbsp;" * 2 * (len(text) - len(stripped)) + (
                    f"**{cell}**" if i in bold else cell
                )
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def escape(text: str) -> str:
    """Text without anything that Markdown or HTML would take as markup.

    >>> escape("a|<b>_x_")
    'a\\\\|&lt;b&gt;\\\\_x\\\\_'
    """
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~$])", r"\\\1", text).replace("\n", " ")


def _comment(text: str) -> str:
    return text.replace("--", "- -")


def _caption(link: str) -> str:
    return link.rsplit("/", 1)[-1].rsplit(".", 1)[0]

"""What a run found as a file: Markdown or a page of HTML by its suffix, else text."""

from __future__ import annotations

from html import escape as escape_html
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlperf.runner.findings import Findings

_WIDTH = 160
"""Columns of text in a file."""


def to_document(findings: Findings, suffix: str) -> str:
    """The findings as the file's suffix (``.html``, ``.md``) asks; without a prediction the text
    stands in it as it is.
    """
    if suffix not in (".html", ".md"):
        return f"dlperf report\n\n{findings.to_text(_WIDTH)}\n"
    from dlperf.report.writing import render

    lines = [*findings.run_lines(), *(f"note: {note}" for note in findings.notes)]
    table = "\n".join(findings.rank_lines(_WIDTH)).strip("\n")
    if suffix == ".md":
        if findings.report is None:
            return f"<!-- dlperf report -->\n\n```text\n{findings.to_text(_WIDTH)}\n```\n"
        from dlperf.report.markdown import escape

        ranks = f"\n### Ranks\n\n```text\n{table}\n```\n" if table else ""
        return (
            render([findings.report], "md")
            + "\n### Run\n\n"
            + "\n".join(f"- {escape(line)}" for line in lines)
            + "\n"
            + ranks
        )
    from dlperf.report.html import GENERATOR

    if findings.report is None:
        head = (
            f'<meta charset="utf-8">\n<meta name="generator" content="{GENERATOR}">\n<title>dlperf:'
            f" {escape_html(findings.name)}</title>"
        )
        return (
            "<!DOCTYPE html>\n<html"
            f' lang="en">\n<head>\n{head}\n</head>\n<body>\n<pre>{escape_html(findings.to_text(_WIDTH))}</pre>\n</body>\n</html>\n'
        )
    ranks = f"<h2>Ranks</h2>\n<pre>{escape_html(table)}</pre>\n" if table else ""
    run = (
        "<h2>Run</h2>\n<ul>"
        + "".join(f"<li>{escape_html(line)}</li>" for line in lines)
        + "</ul>\n"
    )
    before, after = render([findings.report], "html").rsplit("</body>", 1)
    return f"{before}{run}{ranks}</body>{after}"

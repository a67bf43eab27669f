"""What a run found as a file: Markdown or a page of HTML by its suffix, else text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dlperf.report.document import Block
    from dlperf.runner.findings import Findings

_WIDTH = 160
"""Columns of text in a file."""


def to_document(findings: Findings, suffix: str) -> str:
    """The findings in the format of the file's suffix (``.html``, ``.md``, else text). Without a
    prediction the page contains the text.
    """
    from dlperf.report.comparison import plots_of
    from dlperf.report.document import Bullets, Heading, Image, Preformatted
    from dlperf.report.html import to_html
    from dlperf.report.markdown import to_markdown
    from dlperf.report.step_pages import report_page

    if suffix not in (".html", ".md"):
        return f"dlperf report\n\n{findings.to_text(_WIDTH)}\n"
    page: list[Block] = [Preformatted(findings.to_text(_WIDTH))]
    if findings.report is not None:
        images: list[Image] = plots_of(findings.report) if suffix == ".html" else []
        page = report_page(findings.report, images)
        lines = (*findings.run_lines(), *(f"note: {note}" for note in findings.notes))
        page += [Heading("Run"), Bullets(lines)]
        if table := "\n".join(findings.rank_lines(_WIDTH)).strip("\n"):
            page += [Heading("Ranks"), Preformatted(table)]
    if suffix == ".md":
        return to_markdown("report", page)
    return to_html(findings.name, page)

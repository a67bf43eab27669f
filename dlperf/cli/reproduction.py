"""``dlperf reproduce``: recomputes the papers' tables; with -o it draws their figures."""

from __future__ import annotations

from argparse import Namespace

from dlperf.cli.inputs import Answer
from dlperf.cli.options import (
    Command,
    common,
    option,
    output,
)


def reproduce(args: Namespace) -> Answer:
    """Recompute the papers' tables; with -o also draw their figures."""
    from dlperf.studies.papers import reproduction

    papers = [args.paper] if args.paper else reproduction.PAPERS
    by_paper = {paper: reproduction.reproduce(paper) for paper in papers}
    tables = [table for own in by_paper.values() for table in own]
    data = {
        "schema": "dlperf.reproduction",
        "schema_version": 1,
        "tables": [table.to_json() for table in tables],
    }
    text = "\n\n".join(table.to_text() for table in tables)
    if args.output is not None:
        from dlperf.studies.papers import figures

        written = figures.write(by_paper, args.output, args.force)
        text += "".join(f"\n{path}" for path in ["", *written])
    return Answer(text, data)


COMMAND = Command(
    "reproduce",
    "recompute the papers' tables and print them beside the printed values",
    options=(
        option("paper", metavar="PAPER", nargs="?", help="one paper (default: all)"),
        output("folder to write the tables and the figures that follow from them to", "DIR"),
        *common(threads=False, batch_size=False),
    ),
    work=reproduce,
    folder_answer="list of tables",
)

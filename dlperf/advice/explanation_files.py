"""An explanation into a folder: Markdown, JSON, CSV and plots."""

from __future__ import annotations

import json
from pathlib import Path

from dlperf.advice.explanation import Explanation
from dlperf.advice.explanation_export import explanation_to_json, parts_to_csv, suggestions_to_csv
from dlperf.advice.explanation_plots import pngs_of
from dlperf.advice.explanation_text import explanation_to_markdown
from dlperf.core.files import write_bytes, write_text
from dlperf.report.writing import check_folder, make_folder


def write(explanation: Explanation, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``explanation.md`` and ``.json``, ``parts.csv``, ``changes.csv`` and the plots; the
    files in that order.

    The folder is made if missing; files of an earlier explanation are replaced. Raises DlperfError
    for a folder that cannot be made or holds foreign files (unless `force`), WorkFailed if the disk
    refuses.
    """
    check_folder(folder, force)
    folder = make_folder(folder)
    pngs = pngs_of(explanation)
    texts = {
        "explanation.md": explanation_to_markdown(explanation, [f"{name}.png" for name in pngs]),
        "explanation.json": (
            json.dumps(explanation_to_json(explanation), indent=1, allow_nan=False) + "\n"
        ),
        "parts.csv": parts_to_csv(explanation),
        "changes.csv": suggestions_to_csv(explanation),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    for name, png in pngs.items():
        write_bytes(folder / f"{name}.png", png)
    return [folder / name for name in (*texts, *(f"{name}.png" for name in pngs))]

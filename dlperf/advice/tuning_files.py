"""A tuning into a folder: Markdown, JSON, CSV and the plot of the landscape."""

from __future__ import annotations

import json
from pathlib import Path

from dlperf.advice.tuning import Tuning
from dlperf.advice.tuning_export import tuning_to_csv, tuning_to_json
from dlperf.advice.tuning_plots import landscape_png
from dlperf.advice.tuning_text import tuning_to_markdown
from dlperf.core.files import write_bytes, write_text
from dlperf.report.writing import check_folder, make_folder


def write(tuning: Tuning, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``tuning.md``, ``.json``, ``.csv`` and ``landscape.png``; the files in that order.

    The folder is made if missing; files of an earlier tuning are replaced. Raises DlperfError for a
    folder that cannot be made or holds foreign files (unless `force`), WorkFailed if the disk
    refuses.
    """
    check_folder(folder, force)
    folder = make_folder(folder)
    picture = landscape_png(tuning)
    texts = {
        "tuning.md": tuning_to_markdown(tuning, ["landscape.png"]),
        "tuning.json": json.dumps(tuning_to_json(tuning), indent=1, allow_nan=False) + "\n",
        "tuning.csv": tuning_to_csv(tuning),
    }
    for name, text in texts.items():
        write_text(folder / name, text)
    write_bytes(folder / "landscape.png", picture)
    return [folder / name for name in (*texts, "landscape.png")]

"""Reports into a folder: one file per format for all of them, the plots beside."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlperf.core.errors import DlperfError
from dlperf.core.files import check_name, schema_of, try_folder, write_bytes, write_text

if TYPE_CHECKING:
    from dlperf.report.comparison import Report

FORMATS = ("text", "md", "html", "csv", "json")
_SUFFIXES = {"text": "txt", "md": "md", "html": "html", "csv": "csv", "json": "json"}
_FILE_WIDTH = 160
"""Characters of a line of prose in a text file; tables have all their columns."""


def render(reports: Sequence[Report], format: str, images: Sequence[Sequence[str]] = ()) -> str:
    """All reports as one document: ``text`` (as wide as the terminal), ``md``, ``html``, ``csv`` or
    ``json``.

    `images` are the links to each report's plots, for Markdown. Raises DlperfError for an unknown
    format or no report.
    """
    return _render(reports, format, images, None)


def _render(
    reports: Sequence[Report], format: str, images: Sequence[Sequence[str]], width: int | None
) -> str:
    if not reports:
        raise DlperfError("report: there is nothing to report; name a target or a measurement")
    if format == "text":
        return "\n\n".join(
            report.to_text() if width is None else report.to_text(width, None, all_columns=True)
            for report in reports
        )
    if format == "md":
        return "\n".join(
            report.to_markdown(images[i] if i < len(images) else ())
            for i, report in enumerate(reports)
        )
    if format == "html":
        from dlperf.report.html import reports_to_html

        return reports_to_html(reports)
    if format == "csv":
        from dlperf.report.export import reports_to_csv

        return reports_to_csv(reports)
    if format == "json":
        from dlperf.report.export import reports_to_json

        return json.dumps(reports_to_json(reports), indent=1, allow_nan=False) + "\n"
    raise DlperfError(f"report format {format!r} is unknown; known are {', '.join(FORMATS)}")


def check_folder(folder: str | Path, force: bool = False) -> None:
    """Refuse early a folder that cannot be written, or that holds files which dlperf did not write
    (these only with `force`).

    Raises DlperfError naming the folder, the first foreign file and the way out.
    """
    folder = Path(folder)
    check_name(folder)
    exists = folder.exists()
    if exists and not folder.is_dir():
        raise DlperfError(f"{folder}: is a file; name a folder for the report")
    if not exists:
        parent = next((p for p in folder.absolute().parents if p.exists()), None)
        if parent is None or not parent.is_dir() or not os.access(parent, os.W_OK):
            raise DlperfError(f"{folder}: cannot be made; choose another place")
    elif not os.access(folder, os.W_OK | os.X_OK):
        raise DlperfError(f"{folder}: cannot be written; choose another place")
    try:
        try_folder(folder)
    except OSError as error:
        raise DlperfError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another place"
        ) from error
    if not exists or force:
        return
    for path in sorted(folder.iterdir()):
        if not is_ours(path):
            raise DlperfError(
                f"{folder}: holds {path.name}, which dlperf did not write; choose another folder,"
                " or give --force"
            )


def write(
    reports: Sequence[Report],
    folder: str | Path,
    formats: Sequence[str] = FORMATS,
    force: bool = False,
) -> list[Path]:
    """Write ``report.txt``, ``.md``, ``.html``, ``.csv``, ``.json`` as asked, and every report's
    plots as PNG; the files in that order.

    The folder is made if missing. Files of an earlier report are replaced; nothing else is touched.

    Raises DlperfError for an unknown format, a folder that cannot be made or holds foreign files
    (unless `force`); WorkFailed if the disk refuses.
    """
    for format in formats:
        if format not in FORMATS:
            raise DlperfError(
                f"report format {format!r} is unknown; known are {', '.join(FORMATS)}"
            )
    check_folder(folder, force)
    folder = make_folder(folder)
    names = _names(reports)
    plots = [write_plots(report, folder, f"{name}-") for report, name in zip(reports, names)]
    images = [[path.name for path in paths] for paths in plots]
    written = []
    for format in dict.fromkeys(formats):
        path = folder / f"report.{_SUFFIXES[format]}"
        text = _render(reports, format, images, _FILE_WIDTH)
        write_text(path, f"dlperf report\n\n{text}" if format == "text" else text)
        written.append(path)
    return [*written, *(path for paths in plots for path in paths)]


def write_plots(report: Report, folder: str | Path, prefix: str = "") -> list[Path]:
    """Write a report's plots as ``PREFIXlayers.png`` and so on; the folder is made if missing.

    Raises DlperfError if it cannot be made, WorkFailed if the disk refuses.
    """
    folder = make_folder(folder)
    written = []
    for name, png in report.pngs.items():
        path = folder / f"{prefix}{name}.png"
        write_bytes(path, png)
        written.append(path)
    return written


def slug(name: str, most: int = 80) -> str:
    """A name that is safe as a file's: letters, digits, dot, dash and underscore.

    >>> slug("../nets/my net.py:lenet"), slug("..")
    ('nets-my-net.py-lenet', 'report')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-most:].strip("-.") or "report"


def _names(reports: Sequence[Report]) -> list[str]:
    names: list[str] = []
    for report in reports:
        name = (
            f"{slug(report.target.rsplit('/', 1)[-1])}-b{report.batch_size}-t{report.measurement.threads}"
            + ("-inference" if report.inference else "")
        )
        unique, number = name, 2
        while unique in names:
            unique, number = f"{name}-{number}", number + 1
        names.append(unique)
    return names


def make_folder(folder: str | Path) -> Path:
    """Make a folder and those above it. Raises DlperfError where that cannot be."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DlperfError(f"{folder}: {error.strerror or error}; choose another place") from error
    return folder


def is_ours(path: Path) -> bool:
    """Whether dlperf wrote the file, by the mark that each of its formats carries; of a folder, all
    that is in it, and there is something.
    """
    if path.is_dir() and not path.is_symlink():
        inside = list(path.iterdir())
        return bool(inside) and all(is_ours(one) for one in inside)
    if not path.is_file():
        return False
    if path.suffix == ".json":
        return schema_of(path) is not None
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:
        return False
    marks = {
        ".txt": lambda: head.startswith(b"dlperf "),
        ".md": lambda: head.startswith(b"<!-- dlperf "),
        ".html": lambda: b'<meta name="generator" content="dlperf' in head,
        ".csv": lambda: head.startswith(
            (
                b"target,batch_size,threads,",
                b"family,kind,op,threads,",
                b"threads,batch_size,loader_workers,",
                b"kind,case,run,unit,",
            )
        ),
        ".png": lambda: b"Software\x00dlperf" in head,
    }
    return path.suffix in marks and marks[path.suffix]()

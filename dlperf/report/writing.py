"""Folders of files that dlperf writes: checked, made, and recognised as its own."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dlperf.core.errors import DlperfError
from dlperf.core.files import check_name, schema_of, try_folder, write_bytes, write_text


def check_folder(folder: str | Path, force: bool = False) -> None:
    """Refuse early a folder that cannot be written, or contains files of others
    (these only with `force`).

    Raises DlperfError naming the folder, the first foreign file and the way out.
    """
    folder = Path(folder)
    check_name(folder)
    exists = folder.exists()
    if exists and not folder.is_dir():
        raise DlperfError(f"{folder}: is a file; name a folder for the report")
    try:
        try_folder(folder)
    except OSError as error:
        verb = "written" if os.path.lexists(folder) else "made"
        raise DlperfError(
            f"{folder}: cannot be {verb} ({error.strerror or error}); choose another place"
        ) from error
    if not exists or force:
        return
    for path in sorted(folder.iterdir()):
        if not is_ours(path):
            raise DlperfError(
                f"{folder}: contains {path.name}, which dlperf did not write; choose another"
                " folder, or give --force"
            )


def slug(name: str, most: int = 80) -> str:
    """A name that is safe as a file's: letters, digits, dot, dash and underscore.

    >>> slug("../nets/my net.py:lenet"), slug("..")
    ('nets-my-net.py-lenet', 'report')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[-most:].strip("-.") or "report"


def make_folder(folder: str | Path) -> Path:
    """Make a folder and those above it. Raises DlperfError where that cannot be."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DlperfError(
            f"{folder}: cannot be made ({error.strerror or error}); choose another place"
        ) from error
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
                b"kernel,name,launches,",
                b"operator,phase,bound,n_layers,",
            )
        ),
        ".png": lambda: b"Software\x00dlperf" in head,
    }
    return path.suffix in marks and marks[path.suffix]()


def write_files(
    folder: str | Path,
    files: Mapping[str, str | bytes],
    force: bool = False,
    earlier: Iterable[str] = (),
) -> list[Path]:
    """Write files by name into a folder, made if missing; the paths, in that order. Other files of
    dlperf whose names match patterns of `earlier` are removed: an earlier answer left them.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    check_folder(folder, force)
    folder = make_folder(folder)
    for name, content in files.items():
        if isinstance(content, str):
            write_text(folder / name, content)
        else:
            write_bytes(folder / name, content)
    for path in {path for pattern in earlier for path in folder.glob(pattern)}:
        if path.name not in files and path.is_file() and is_ours(path):
            path.unlink()
    return [folder / name for name in files]

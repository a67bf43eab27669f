"""Where this machine's file lies."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from dlperf.core.errors import DlperfError, check_type


def default_path() -> Path:
    """This machine's file in the user's data folder (``DLPERF_MACHINE`` names another)."""
    if named := os.environ.get("DLPERF_MACHINE"):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "dlperf" / "machine.json"


def find_path(path: str | Path | None = None) -> Path:
    """The machine file that was named, else this machine's.

    Raises DlperfError naming the command that makes it where there is none.
    """
    if path is not None:
        check_type("machine", "path", path, (str, Path), "the path of a machine file")
    place = default_path() if path is None else Path(path)
    if not os.path.exists(place):  # False for a name that no file can have
        where = "" if place == default_path() else f" -o {place}"
        raise DlperfError(
            f"{place}: there is no such machine file; dlperf calibrate{where} makes it "
            "(with --quick in less than a minute)"
        )
    return place

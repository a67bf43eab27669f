"""dlperf's own JSON files: read with kind errors, written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from dlperf.core.errors import DlperfError, WorkFailed, check_type, refuse
from dlperf.core.garbage import uncollected
from dlperf.core.streams import write_out
from dlperf.core.text import visible

try:
    import fcntl
except ImportError:  # Windows: two calibrations at once are not distinguished
    fcntl = None  # type: ignore[assignment]

T = TypeVar("T")
MACHINE, MEASUREMENT, TRACE = "dlperf.machine", "dlperf.measurement", "dlperf.trace"
"""Schemas of files that others read, and that take minutes to make or cannot be made again."""
_TEMPORARY = ".dlperf-"
"""Begins a temporary file's name: short, so that it fits wherever the final name does."""


def load(
    path: str | Path,
    schema: str,
    version: int,
    from_json: Callable[[dict[str, Any]], T],
    way_out: str,
) -> T:
    """What `from_json` makes of a file. Raises DlperfError in one line: the file, what is wrong
    with it, and the way out.
    """
    with uncollected():
        data = read_json(path, schema, version)
        try:
            return from_json(data)
        except DlperfError as error:
            raise DlperfError(f"{path}: {error}. {way_out}") from error


def read_json(path: str | Path, schema: str, version: int) -> dict[str, Any]:
    """The JSON object in `path`, which must carry `schema` and a `schema_version` up to `version`.

    Raises DlperfError naming the file and what is wrong: missing, truncated, another schema, a
    newer version.
    """
    try:
        data = _decode(path)
    except OSError as error:
        raise DlperfError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise DlperfError(f"{path}: is no {schema} file (not text)") from error
    except json.JSONDecodeError as error:
        raise DlperfError(
            f"{path}: is truncated or no JSON (line {error.lineno}: {error.msg}); make it again"
        ) from error
    except RecursionError as error:
        raise DlperfError(f"{path}: is no {schema} file (nested too deeply)") from error
    except ValueError as error:  # a number of thousands of digits
        raise DlperfError(
            f"{path}: is no {schema} file (a number is too long); make it again"
        ) from error
    if not isinstance(data, dict) or data.get("schema") != schema:
        found = data.get("schema") if isinstance(data, dict) else None
        what = f"its schema is {found!a:.60}" if found else "it names no schema"
        raise DlperfError(f"{path}: is no {schema} file ({what})")
    found = data.get("schema_version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise DlperfError(
            f"{path}: schema_version is {found!a:.60}; expected a whole number up to {version}"
        )
    if found > version:
        raise DlperfError(
            f"{path}: schema_version is {found!s:.60}, this dlperf reads up to {version}; update"
            " dlperf or make the file again"
        )
    if found < version:
        raise DlperfError(
            f"{path}: schema_version is {found}, this dlperf writes {version}; make the file again"
        )
    return data


def _decode(path: str | Path) -> Any:
    """The data of a JSON file, fast; what msgspec refuses (NaN, or no JSON at all) is left to the
    standard library, which tells where.

    The file is mapped: memory of its size that is freed would change what glibc's malloc does for
    a script that runs in this process.
    """
    import msgspec  # here: the command line's help needs no file

    try:
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            return msgspec.json.decode(text)
    except (OSError, ValueError, RecursionError, msgspec.DecodeError):
        return json.loads(Path(path).read_text(encoding="utf-8"))


def schema_of(path: str | Path) -> str | None:
    """The schema that a JSON file declares; None where it is not one of dlperf's files."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    schema = data.get("schema") if isinstance(data, dict) else None
    return schema if isinstance(schema, str) and schema.startswith("dlperf.") else None


KINDS = {
    MACHINE: "a machine file",
    TRACE: "a trace file",
    "dlperf.prediction": "a prediction",
    MEASUREMENT: "a measurement",
    "dlperf.comparison": "a comparison of steps",
    "dlperf.report": "a report",
    "dlperf.run": "a report on a run",
    "dlperf.explanation": "an explanation",
    "dlperf.machine-check": "the check of a machine file",
    "dlperf.reproduction": "a reproduction of tables",
    "dlperf.scaling": "a scaling forecast",
    "dlperf.tuning": "a tuning",
    "dlperf.cluster": "a cluster file",
    "dlperf.cluster-summary": "the summary of a cluster file",
    "dlperf.communication": "a trace of communication",
    "dlperf.timeline": "a timeline",
    "dlperf.state": "a state file",
    "dlperf.kernel-roofline": "a roofline of kernels",
}
"""What dlperf's files are, in words, by their schema."""


def kind_of(schema: str) -> str:
    """A schema in words.

    >>> kind_of("dlperf.machine"), kind_of("dlperf.new")
    ('a machine file', 'a dlperf.new file')
    """
    return KINDS.get(schema, f"a {schema} file")


def try_folder(folder: Path) -> None:
    """Make the folder and write into it, then take away again what that made: permissions do not
    tell of read-only disks, quotas, or a superuser's limits.

    Raises OSError where it cannot be.
    """
    made = []
    missing = folder
    while not missing.is_dir() and missing != missing.parent:
        made.append(missing)
        missing = missing.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(prefix=_TEMPORARY, dir=folder):
            pass
    finally:
        for path in made:
            with contextlib.suppress(OSError):
                path.rmdir()


def check_name(path: Path) -> None:
    """Raise DlperfError for a path that no file can have (too long), or that no line can show."""
    shown = f"{str(path)[:60]!r}{'...' * (len(str(path)) > 60)}"
    if any(ord(character) < 32 or ord(character) == 127 for character in str(path)):
        raise DlperfError(f"{shown}: holds a control character; choose another name")
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return  # its folder is looked at apart
    except OSError as error:
        why = error.strerror or error
        raise DlperfError(f"{shown}: cannot be made ({why}); choose another name") from error


def check_writable(path: str | Path, force: bool = False, schema: str = "") -> None:
    """Refuse early what could not be written at the end, or would destroy what dlperf did not
    write, or what lasts: a machine, a measurement or a trace, unless `schema`, which is to be
    written, is the same.

    Raises DlperfError if `path` is a folder, lies in none that can be written, or (without `force`)
    is such a file.
    """
    if str(path) == "-":
        return
    path = Path(path)
    check_name(path)
    refuse(
        (path.is_dir(), f"{path}: is a folder; name a file"),
        (not path.parent.exists(), f"{path}: its folder does not exist; make it first"),
        (not path.parent.is_dir(), f"{path}: {path.parent} is no folder"),
        (
            not os.access(path if path.exists() else path.parent, os.W_OK),
            f"{path}: cannot be written; choose another place",
        ),
    )
    if path.is_file() or not path.exists():  # a device is written as it is
        try:
            try_folder(path.parent)
        except OSError as error:
            raise DlperfError(
                f"{path}: cannot be written ({error.strerror or error}); choose another place"
            ) from error
    if force or not path.is_file() or not path.stat().st_size:
        return
    found = schema_of(path)
    refuse(
        (
            found is None,
            f"{path}: exists and is no whole file of dlperf; choose another name, or give --force",
        ),
        (
            found in (MACHINE, MEASUREMENT, TRACE) and found != schema,
            f"{path}: is {kind_of(found or '')}; choose another name, or give --force",
        ),
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file as a whole or not at all (temporary file, then rename); ``-`` is stdout.

    Control characters become escape sequences. Raises WorkFailed when the disk refuses; a file that
    stood there before is then unharmed.
    """
    text = visible(text)
    if str(path) == "-":
        write_out(text)
        return
    path = Path(path)
    if (
        path.exists() and not path.is_file()
    ):  # a device such as /dev/stdout or a pipe cannot be renamed over
        try:
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise WorkFailed(f"{path}: {error.strerror or error}; nothing was written") from error
        return
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all. Raises WorkFailed when the disk refuses."""
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        raise WorkFailed(f"{path}: {error.strerror or error}; nothing was written") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def write_json(path: str | Path, data: dict[str, Any], indent: int | None = 1) -> None:
    """`data` as JSON, as :func:`write_text` writes; NaN is refused."""
    write_text(path, json.dumps(data, indent=indent, allow_nan=False))


# -- this machine's file --------------------------------------------------------------------------


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


def device_path(device: str) -> Path:
    """The file of an accelerator of this machine, such as ``cuda``: next to the machine's own.

    >>> device_path("cuda:1").name
    'cuda-1.json'
    """
    name = "".join(sign if sign.isalnum() else "-" for sign in device.removesuffix(":0"))
    return default_path().with_name(f"{name}.json")


def find_path(path: str | Path | None = None) -> Path:
    """The machine file that was named, else this machine's.

    Raises DlperfError naming the command that makes it where there is none.
    """
    if path is not None:
        check_type("machine", "path", path, (str, Path), "the path of a machine file")
    index = default_path() if path is None else Path(path)
    if not os.path.exists(index):  # False for a name that no file can have
        where = "" if index == default_path() else f" -o {index}"
        raise DlperfError(
            f"{index}: there is no such machine file; dlperf calibrate{where} makes it "
            "(with --quick in about 40 s for each number of threads)"
        )
    return index


# -- one writer at a time -------------------------------------------------------------------------

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def one_writer(path: str | Path, work: str) -> Iterator[None]:
    """Hold the lock of `path` while its `work` (a calibration) lasts.

    The system releases the lock when the process ends, however it ends. The lock file lies next to
    `path`; one that a killed process left behind holds nothing up, and is removed by the next.
    Where the file system has no locks there is none.

    Raises DlperfError where another process holds it, or its folder cannot be written.
    """
    handle = None if fcntl is None else _acquire(Path(path), work)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                _lock_file(Path(path)).unlink()  # while it is held: nobody else's is removed
            os.close(handle)


def _lock_file(path: Path) -> Path:
    """Where the lock of `path` lies; links to one file have one lock."""
    real = Path(os.path.realpath(path))
    return real.parent / f".dlperf-{hashlib.sha256(os.fsencode(real.name)).hexdigest()[:12]}.lock"


def _acquire(path: Path, work: str) -> int:
    index = _lock_file(path)
    while True:
        try:
            handle = os.open(index, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            why = error.strerror or error
            raise DlperfError(f"{path}: cannot be written ({why}); choose another place") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(index, handle):  # its holder has removed it meanwhile
                os.close(handle)
                continue
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return handle
            holder = os.read(handle, 20).decode("ascii", "replace").strip()
            os.close(handle)
            if not isinstance(error, BlockingIOError):
                raise
            who = f"process {holder}" if holder else "another process"
            raise DlperfError(
                f"{path}: {who} is writing {work} to it; wait for its end, or name another file"
            ) from None
        return handle


def _is_at(place: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(place), os.fstat(handle))
    except FileNotFoundError:
        return False

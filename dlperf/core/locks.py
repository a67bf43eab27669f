"""Mutual exclusion of processes that write the same file."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from dlperf.core.errors import DlperfError

try:
    import fcntl
except ImportError:  # Windows: two calibrations at once are not told apart
    fcntl = None  # type: ignore[assignment]

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def one_writer(path: str | Path, work: str) -> Iterator[None]:
    """Hold the lock of `path` while its `work` (a calibration) lasts.

    The system releases the lock when the process ends, however it ends. The lock file lies beside
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
    place = _lock_file(path)
    while True:
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            why = error.strerror or error
            raise DlperfError(f"{path}: cannot be written ({why}); choose another place") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(place, handle):  # its holder has removed it meanwhile
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

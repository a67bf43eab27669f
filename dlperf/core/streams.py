"""The standard streams of a process: open, and able to show every character."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator

from dlperf.core.text import visible


def open_closed() -> None:
    """Open the null device in place of each standard stream that the shell closed (``>&-``).

    Otherwise the next file that is opened gets its descriptor, and messages would go into it.
    ``sys.stdout`` stays None, as Python leaves it: :func:`write_out` refuses to lose an answer.
    """
    for number in (0, 1, 2):  # in this order: a file gets the least free descriptor
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_WRONLY if number else os.O_RDONLY)
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    if sys.stderr is None:  # print(file=None) would write to stdout
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def write_out(text: str) -> None:
    """Write `text` and a line end to stdout. Raises OSError, naming stdout, where it is closed or
    refuses.
    """
    if _is_out_closed():
        raise OSError(errno.EBADF, "is closed; the answer cannot be written", "stdout")
    try:
        print(text.removesuffix("\n"))
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "stdout") from error


def write_err(line: str) -> None:
    """Write a line to stderr, control characters as escape sequences."""
    print(visible(line), file=sys.stderr, flush=True)


def log(line: str, program: str = "dlperf") -> None:
    """Write a line on the progress of the work to stderr."""
    write_err(f"{program}: {line}")


def warn(line: str) -> None:
    """Write a warning to stderr, as one line."""
    log("warning: " + " ".join(line.split()))


def flush_out() -> None:
    """Flush stdout, where there is one that is open."""
    if not _is_out_closed():
        sys.stdout.flush()


def _is_out_closed() -> bool:
    return sys.stdout is None or bool(getattr(sys.stdout, "closed", False))


@contextlib.contextmanager
def escaping() -> Iterator[None]:
    r"""Characters that stdout cannot encode are written as ``\xf1`` inside, not refused."""
    out = None if _is_out_closed() else sys.stdout
    if not isinstance(out, io.TextIOWrapper):
        yield
        return
    errors = out.errors
    out.reconfigure(errors="backslashreplace")
    try:
        yield
        out.flush()
    finally:
        with contextlib.suppress(OSError, ValueError):  # a stream that refuses has raised already
            out.reconfigure(errors=errors)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What is written to stdout inside goes to stderr: child processes and libraries too."""
    flush_out()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush_out()
        os.dup2(kept, 1)
        os.close(kept)

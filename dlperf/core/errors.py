"""The one exception that carries a line meant for the user."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sysconfig
from collections.abc import Callable, Iterator
from numbers import Integral


class DlperfError(Exception):
    """The input or the usage is unfit; the message names the thing, the value and the way out.

    The command line prints the message as one line and exits with status 2.
    """


class WorkFailed(DlperfError):
    """The input was fine but the work failed: a model that raised, a disk that filled. Exit status
    1.
    """


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM in the middle of long work; the message names what of it was kept, and is
    empty where nothing could be.
    """


@contextlib.contextmanager
def telling_what_is_kept(kept: Callable[[], str]) -> Iterator[None]:
    """Ctrl-C or SIGTERM inside raises Interrupted with what is `kept`, unless something inside says
    it. So it is, too, where another error came of it: by a compiled module that was interrupted
    while it was imported, or a child whose pipe broke while it was ended.
    """
    try:
        yield
    except BaseException as error:
        chain = [error]
        while (before := chain[-1].__cause__ or chain[-1].__context__) and before not in chain:
            chain.append(before)
        for one in chain:
            if isinstance(one, Interrupted):
                raise one from None
        if any(isinstance(one, KeyboardInterrupt) for one in chain):
            raise Interrupted(kept()) from None
        raise


def refuse(*problems: tuple[object, str]) -> None:
    """Raise DlperfError for the first problem whose condition holds."""
    for holds, problem in problems:
        if holds:
            raise DlperfError(problem)


def check_type(
    call: str, name: str, value: object, kind: type | tuple[type, ...], way_out: str
) -> None:
    """Refuse a value of another type in one line: what `call` got as `name`, and what to give
    instead.

    >>> check_type("compare", "measurement", 3, str, "dlperf.measure makes one")
    Traceback (most recent call last):
        ...
    dlperf.core.errors.DlperfError: compare: the measurement is 3 (of type int); expected a str:
    dlperf.measure makes one
    """
    if isinstance(value, kind):
        return
    kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
    raise DlperfError(
        f"{call}: the {name} is {' '.join(repr(value).split()):.60} (of type"
        f" {type(value).__name__}); expected a {kinds}: {way_out}"
    )


def check_count(name: str, value: object, least: int = 1) -> None:
    """Refuse what is no whole number of at least `least`, text and truth values included.

    >>> check_count("threads", "2")
    Traceback (most recent call last):
        ...
    dlperf.core.errors.DlperfError: threads is '2' (of type str); it must be a whole number of at
    least 1
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise DlperfError(
            f"{name} is {value!r:.60} (of type {type(value).__name__}); it must be a whole number"
            f" of at least {least}"
        )
    if value < least:
        raise DlperfError(f"{name} is {value}; it must be at least {least}")


_OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARIES = (_OWN_FOLDER, "<", *(_PATHS[name] for name in ("stdlib", "purelib", "platlib")))


def describe(error: BaseException) -> str:
    """What user code raised in one line: type, first line of the message, cause, file and line.

    >>> describe(ValueError("no such weather\\nat all"))
    'ValueError: no such weather'
    """
    text = one_line(error)
    cause = error.__cause__
    if cause is not None:
        text += f", caused by {one_line(cause)}"
    index = place_of(error) or (place_of(cause) if cause is not None else "")
    return f"{text} ({index})" if index else text


def place_of(error: BaseException) -> str:
    """``file.py:12``, the innermost line of user code that an exception passed; "" for none.

    Code of dlperf, of Python and of installed libraries is none of the user's.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_shown(error.filename)}:{error.lineno}"
    index, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(_LIBRARIES):
            index = f"{_shown(file)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return index


def _shown(file: str) -> str:
    """A file's path, relative where it lies below the working directory."""
    try:
        inside = os.path.relpath(file)
    except (OSError, ValueError):
        return file
    return file if inside.startswith(os.pardir) else inside


def one_line(error: BaseException) -> str:
    """An exception as ``Type: first line of its message``; a DlperfError as that line alone.

    >>> one_line(ValueError("no such weather\\nat all"))
    'ValueError: no such weather'
    >>> one_line(DlperfError("no such weather"))
    'no such weather'
    """
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > 240:
        text = text[:237] + "..."
    if text and isinstance(error, DlperfError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# -- too little memory ----------------------------------------------------------------------------

_NUMPY_BYTES, _TORCH_BYTES, _CORE_BYTES = 256 * 2**20, 2**30, 16 * 2**20
"""Address space that imports take (torch 2.13 with scipy: 0.98 GB), and each core's thread."""
_SPARE_BYTES = 64 * 2**20
_TEXTS = (
    "out of memory",
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "unable to allocate",
    "not enough memory",
    "bad_alloc",
    "can't start new thread",
    "memory allocation",
)
"""Messages of the loader, numpy, torch and threads, in lower case."""


def check_room(with_torch: bool) -> None:
    """Raise WorkFailed where the address space (``ulimit -v``) cannot hold numpy, or torch and
    scipy.

    Their libraries do not only raise then: some hang, abort, or end the process group.
    """
    needed = _TORCH_BYTES if with_torch else _NUMPY_BYTES
    if not _has_room(needed + _CORE_BYTES * (os.cpu_count() or 1)):
        what = "torch needs" if with_torch else "numpy needs"
        raise WorkFailed(f"out of memory: the address space (ulimit -v) is less than {what}")


def is_shortage(error: BaseException) -> bool:
    """Whether an exception, or what it was raised from, stands for too little memory.

    >>> is_shortage(ImportError("libtorch_cpu.so: failed to map segment from shared object"))
    True
    >>> is_shortage(ImportError("No module named 'foo'"))
    False
    """
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        if isinstance(following, MemoryError) or says_shortage(str(following)):
            return True
        if isinstance(following, OSError) and following.errno == errno.ENOMEM:
            return True
        if isinstance(following, (ImportError, SystemError)) and not _has_room(_SPARE_BYTES):
            return True  # a compiled module that cannot allocate reports anything
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def says_shortage(text: str) -> bool:
    """Whether a message is on too little memory."""
    lower = text.lower()
    return any(known in lower for known in _TEXTS)


def _has_room(n_bytes: int) -> bool:
    """Whether a number of bytes can be mapped; read-only pages, which no limit of memory counts."""
    try:
        with mmap.mmap(-1, n_bytes, access=mmap.ACCESS_READ):
            return True
    except (OSError, ValueError, OverflowError):
        return False

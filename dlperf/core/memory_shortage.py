"""Too little memory, told from other failures."""

from __future__ import annotations

import errno
import mmap
import os

from dlperf.core.errors import WorkFailed

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
"""What the loader, numpy, torch and threads say, in lower case."""


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
    """Whether a message speaks of too little memory."""
    lower = text.lower()
    return any(known in lower for known in _TEXTS)


def _has_room(n_bytes: int) -> bool:
    """Whether so many bytes can be mapped; read-only pages, which no limit of memory counts."""
    try:
        with mmap.mmap(-1, n_bytes, access=mmap.ACCESS_READ):
            return True
    except (OSError, ValueError, OverflowError):
        return False

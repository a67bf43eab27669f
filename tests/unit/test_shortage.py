"""Which failures stand for too little memory."""

from __future__ import annotations

import errno
import os

import pytest

from dlperf.core.child_process import failure
from dlperf.core.errors import WorkFailed, is_shortage


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
        ),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_shortages(error: Exception) -> None:
    assert is_shortage(error)
    wrapped = WorkFailed("target x: its builder raises")
    wrapped.__cause__ = error
    assert is_shortage(wrapped)


@pytest.mark.parametrize(
    "error",
    [ImportError("No module named 'foo'"), SystemError("bad call"), OSError(errno.ENOSPC, "full")],
    ids=str,
)
def test_other_failures(error: Exception) -> None:
    assert not is_shortage(error)
    error.__cause__ = error
    assert not is_shortage(error)


def test_a_child_without_memory() -> None:
    said = "Traceback ...\nImportError: libtorch.so: failed to map segment from shared object\n"
    assert str(failure(1, said)) == "the measuring process is out of memory"

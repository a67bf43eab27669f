"""A measuring process: reads its job from stdin, answers in JSON lines on stdout. The suite alone starts one."""
from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from dlperf.child_process import read_job

Say = Callable[[dict[str, Any]], None]
_PR_SET_PDEATHSIG = 1


def _end_with_parent() -> None:
    """Linux: SIGTERM for this process when its parent ends, however it ends: what it goes on to measure nobody would read."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def do_job(run: Callable[[dict[str, Any], Say], int | None]) -> int:
    """Do the job on stdin with `run`, which is given it and how to say something; the exit status (`run`'s own, 0 for None).

    Whatever a library prints goes to stderr, not between the lines. 130 on Ctrl-C; SIGTERM raises too, so that processes of the job's own end on the way out.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    _end_with_parent()
    job = read_job()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        return run(job, say) or 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1

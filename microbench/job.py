"""A measuring process: reads its job from stdin, answers in JSON lines on stdout."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from dlperf.core.child_process import FAILED, INTERRUPTED, end_with_parent, read_job
from dlperf.core.errors import WorkFailed, describe, is_shortage
from dlperf.core.streams import log

Say = Callable[[dict[str, Any]], None]


def do_job(run: Callable[[dict[str, Any], Say], None]) -> int:
    """Do the job on stdin with `run`, which is given it and how to write a message; the exit
    status.

    Whatever a library prints goes to stderr, not between the lines. 130 on Ctrl-C and SIGTERM,
    which raise KeyboardInterrupt, so that processes of the job's own end on the way out; later ones
    are ignored. Silent where it is interrupted or its parent has gone. WorkFailed is a message that
    it ``failed``, any other failure one line on stderr; and status 1.
    """
    stopped: list[int] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        if not stopped:
            stopped.append(number)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        status = _do(run)
        stopped.append(status)  # from here on signals are too late
        return status
    except BaseException as error:
        was_stopped = bool(stopped)
        stopped.append(FAILED)
        # what is interrupted while it is imported raises anything
        if was_stopped or isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(error, SystemExit):
            raise
        if not isinstance(error, BrokenPipeError):  # nobody reads
            reason = "out of memory" if is_shortage(error) else describe(error)
            log(f"error: the measuring process: {reason}")
        return FAILED


def _do(run: Callable[[dict[str, Any], Say], None]) -> int:
    end_with_parent()
    job = read_job()
    out = os.dup(1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        while line:
            line = line[os.write(out, line) :]  # unbuffered: nothing is left for the exit

    try:
        run(job, say)
    except WorkFailed as error:
        say({"failed": str(error)})
        return FAILED
    return 0

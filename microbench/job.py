"""A measuring process: reads its job from stdin, answers in JSON lines on stdout. The suite alone
starts one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from dlperf.core.child_process import FAILED, INTERRUPTED, end_with_parent, read_job
from dlperf.core.errors import describe, is_shortage
from dlperf.core.streams import log

Say = Callable[[dict[str, Any]], None]


class _Stop:
    """Raises KeyboardInterrupt at the first SIGINT or SIGTERM; later ones are ignored."""

    def __init__(self) -> None:
        self.seen = False
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self.seen:
            self.seen = True
            raise KeyboardInterrupt


def do_job(run: Callable[[dict[str, Any], Say], int | None]) -> int:
    """Do the job on stdin with `run`, which is given it and how to say something; the exit status
    (`run`'s own, 0 for None).

    Whatever a library prints goes to stderr, not between the lines. 130 on Ctrl-C and SIGTERM,
    which raise KeyboardInterrupt, so that processes of the job's own end on the way out. Silent
    where it is interrupted or its parent has gone; any other failure is one line on stderr, and
    status 1.
    """
    stop = _Stop()
    try:
        status = _do(run)
        stop.seen = True
        return status
    except BaseException as error:
        was_stopped, stop.seen = stop.seen, True
        # what is interrupted while it is imported raises anything
        if was_stopped or isinstance(error, KeyboardInterrupt):
            return INTERRUPTED
        if isinstance(error, SystemExit):
            raise
        if not isinstance(error, BrokenPipeError):  # nobody reads
            told = "out of memory" if is_shortage(error) else describe(error)
            log(f"error: the measuring process: {told}")
        return FAILED


def _do(run: Callable[[dict[str, Any], Say], int | None]) -> int:
    end_with_parent()
    job = read_job()
    out = os.dup(1)
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        line = (json.dumps(message) + "\n").encode()
        while line:
            line = line[os.write(out, line) :]  # unbuffered: nothing is left for the exit

    return run(job, say) or 0

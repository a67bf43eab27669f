"""Programs that a launcher starts once for each rank: their arguments, and what ends them (signals,
a step beyond its time, a launcher that is gone).
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from dlperf.core.child_process import FAILED, INTERRUPTED, UNUSABLE

GRACE_S = 5.0
_LOOK_S, _CLAIM_S = 0.25, 2.0


class Parser(argparse.ArgumentParser):
    """One line for a mistake, from rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        """End this process for a mistake in its arguments."""
        is_first = os.environ.get("RANK", "0") == "0"
        self.exit(UNUSABLE, f"{self.prog}: error: {message}; --help shows how\n" * is_first)


def limit(text: str) -> float:
    """A limit of time from the command line."""
    value = float(text)
    if not 1 <= value <= 3600:
        raise ValueError
    return value


limit.__name__ = "number of seconds from 1 to 3600"


def missing_variable() -> str:
    """The first of a launcher's environment variables that is not set, or nothing."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return next((name for name in needed if not os.environ.get(name)), "")


class Watch:
    """Ends this process of a `program`, and lets one rank alone report why and what was `kept`. A
    call that waits inside gloo runs no Python, so a thread looks after it.

    `step` is what is being done; every call of :meth:`begin` winds the time limit up. `claim`
    states whether this rank may speak (the first one that asks); it may block or raise where the
    others are gone, and then rank 0, or in its absence rank 1, speaks.
    """

    def __init__(
        self,
        program: str,
        rank: int,
        limit_s: float,
        kept: str,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.program, self.rank, self.limit_s, self.kept = program, rank, limit_s, kept
        self.claim: Callable[[], bool] = lambda: rank <= 1
        self._now, self._parent = now, os.getppid()
        self._ending = threading.Lock()
        self.begin("starting")

    def start(self) -> None:
        """Start the watching thread, and handle SIGINT and SIGTERM."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._look, args=(reader,), daemon=True).start()

    def begin(self, step: str) -> None:
        """A step begins, or goes on."""
        self.step, self._since = step, self._now()

    def trouble(self) -> str:
        """Why the process has to end; empty while all is well. gloo's own time-out comes first, by
        :data:`GRACE_S`.
        """
        if os.getppid() != self._parent:
            return "the launcher is gone"
        if self._now() - self._since > self.limit_s + GRACE_S:
            return f"no answer from another rank within {self.limit_s:g} s"
        return ""

    def fail(self, reason: str) -> NoReturn:
        """End with status 1 and, from one rank, one line."""
        if self.rank:
            time.sleep(0.5)  # rank 0 first: its line names the file
        self._end(FAILED, f"error: {self.step}: {' '.join(reason.split())[:300]}")

    def _look(self, reader: int) -> None:
        while not select.select([reader], [], [], _LOOK_S)[0]:
            if reason := self.trouble():
                self._end(FAILED, f"error: {self.step}: {reason}")
        if os.read(reader, 1)[0] == signal.SIGINT:
            self.claim = lambda: self.rank == 0
            self._end(INTERRUPTED, "interrupted")
        outside = "ended from outside, as launchers do when another rank has died"
        self._end(FAILED, f"error: {self.step}: {outside}")

    def _end(self, status: int, line: str) -> NoReturn:
        with self._ending:
            try:
                speaks = ThreadPoolExecutor(1).submit(self.claim).result(_CLAIM_S)
            except Exception:  # the store is gone with its host
                speaks = self.rank <= 1
            if speaks:
                os.write(sys.stderr.fileno(), f"{self.program}: {line}; {self.kept}\n".encode())
            os._exit(status)

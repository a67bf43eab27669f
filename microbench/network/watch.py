"""What ends a rank: signals, a step beyond its time, a launcher that is gone. A call that waits
inside gloo runs no Python, so a thread looks after it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

FAILED, INTERRUPTED = 1, 130
_GRACE_S = 5.0
_CLAIM_S = 2.0


class Watch:
    """Ends this process, and lets one rank alone say why.

    `step` says what is being done; every call of :meth:`begin` winds the time limit up. `claim`
    tells whether this rank may speak (the first one that asks); it may block or raise where the
    others are gone, and then rank 0, or in its absence rank 1, speaks.
    """

    def __init__(
        self, rank: int, limit_s: float, kept: str, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank, self.limit_s, self.kept = rank, limit_s, kept
        self.claim: Callable[[], bool] | None = None
        self.children: list[int] = []
        self.step = "starting"
        self._now, self._parent = now, os.getppid()
        self._since = now()
        self._ending = threading.Lock()

    def start(self) -> None:
        """Start the watching threads, and handle SIGINT and SIGTERM."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._wait_for_signal, args=(reader,), daemon=True).start()
        threading.Thread(target=self._poll, daemon=True).start()

    def begin(self, step: str) -> None:
        """A step begins, or goes on."""
        self.step, self._since = step, self._now()

    def overdue(self) -> bool:
        """Whether the step is past its limit, and past the grace in which gloo's own time-out
        speaks first.
        """
        return self._now() - self._since > self.limit_s + _GRACE_S

    def fail(self, reason: str) -> NoReturn:
        """End with status 1 and, from one rank, one line."""
        if self.rank:
            time.sleep(0.5)  # rank 0 first: its line names the file
        self._end(FAILED, f"error: {self.step}: {' '.join(reason.split())}; {self.kept}")

    def _wait_for_signal(self, reader: int) -> None:
        number = os.read(reader, 1)[0]
        if number == signal.SIGINT:
            self._end(INTERRUPTED, f"interrupted; {self.kept}", speaks=self.rank == 0)
        self._end(
            FAILED,
            f"error: {self.step}: ended from outside, as launchers do when another rank has died;"
            f" {self.kept}",
        )

    def _poll(self) -> None:
        while True:
            time.sleep(0.25)
            if os.getppid() != self._parent:
                self._end(FAILED, "error: the launcher is gone", speaks=self.rank == 0)
            if self.overdue():
                self._end(
                    FAILED,
                    f"error: {self.step}: no answer from another rank within {self.limit_s:g} s;"
                    f" {self.kept}",
                )

    def _end(self, status: int, line: str, speaks: bool | None = None) -> NoReturn:
        with self._ending:
            for child in self.children:
                try:
                    os.kill(child, signal.SIGKILL)
                except OSError:
                    continue
            if self._may_speak() if speaks is None else speaks:
                os.write(sys.stderr.fileno(), f"dlperf.microbench.network: {line}\n".encode())
            os._exit(status)

    def _may_speak(self) -> bool:
        answers: list[bool] = []

        def ask() -> None:
            try:
                if self.claim is not None:
                    answers.append(self.claim())
            except Exception:  # the store is gone with its host
                return

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(_CLAIM_S)
        return answers[0] if answers else self.rank <= 1

"""What ends a rank: an error, a step beyond its time, a launcher that is gone. Calls that wait
inside gloo run no Python, so a thread looks after them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

MARK = "cardwell_kernels"
GRACE_S = 3.0


class Watch:
    """Ends this process with status 1 where a step takes longer than `limit_s` or the launcher has
    gone; the first rank to ask says why, in one line.

    `claim` tells whether this rank is the first; where it cannot be asked, ranks 0 and 1 speak.
    `now` is the clock.
    """

    def __init__(
        self, rank: int, limit_s: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.rank, self.limit_s, self.step = rank, limit_s, "starting"
        self.claim: Callable[[], bool] | None = None
        self._now, self._parent, self._since = now, os.getppid(), now()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._look, daemon=True).start()

    def begin(self, step: str) -> None:
        """A step begins."""
        self.step, self._since = step, self._now()

    def trouble(self) -> str | None:
        """Why the process has to end; None while all is well. gloo's own time-out comes first, by
        :data:`GRACE_S`.
        """
        if os.getppid() != self._parent:
            return "the launcher is gone"
        if self._now() - self._since > self.limit_s + GRACE_S:
            return f"no answer from another rank within {self.limit_s:g} s"
        return None

    def fail(self, reason: str) -> NoReturn:
        """End now."""
        if self._may_speak():
            os.write(
                sys.stderr.fileno(),
                f"{MARK}: error: {self.step}: {' '.join(reason.split())[:300]}; nothing was"
                " written\n".encode(),
            )
        os._exit(1)

    def _look(self) -> None:
        while True:
            time.sleep(0.25)
            reason = self.trouble()
            if reason is not None:
                self.fail(reason)

    def _may_speak(self) -> bool:
        answers: list[bool] = []

        def ask() -> None:
            try:
                if self.claim is not None:
                    answers.append(self.claim())
            except Exception:  # the store went with its host
                return

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(2.0)
        return answers[0] if answers else self.rank <= 1

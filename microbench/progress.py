"""How far a long measurement is: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from tqdm import tqdm

from dlperf.core.streams import log

EVERY_S = 10.0
"""How far apart plain lines are at least."""


class Progress(Protocol):
    """What a measurement tells while it goes on."""

    def update(self, n: int) -> None:
        """`n` more are done."""

    def begin(self, what: str) -> None:
        """The next part begins."""


class Lines:
    """Progress without a terminal: what begins and how much is done, a line at most every EVERY_S
    seconds, the first at once.

    Between two parts that take long a line comes with the counting, so a log never stands still for
    much longer than that.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._unit, self._say, self._now = total, unit, say, now
        self._n_done, self._what = 0, ""
        self._begin_s = now()
        self._last_s = -float("inf")

    def update(self, n: int) -> None:
        """`n` more are done."""
        self._n_done += n
        self._tell()

    def begin(self, what: str) -> None:
        """The next part begins."""
        self._what = what
        self._tell()

    def _tell(self) -> None:
        now_s = self._now()
        if now_s - self._last_s >= EVERY_S:
            self._last_s = now_s
            done = f"{self._n_done} of {self._total} {self._unit}s, {now_s - self._begin_s:.0f} s"
            self._say(f"{done}; now {self._what}" if self._what else done)


class _Bar:
    """Progress as a bar."""

    def __init__(self, bar: tqdm[object]) -> None:
        self._bar = bar

    def update(self, n: int) -> None:
        self._bar.update(n)

    def begin(self, what: str) -> None:
        self._bar.set_postfix_str(what)


@contextlib.contextmanager
def progress_of(total: int, unit: str, title: str, bar: bool | None = None) -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal (or by `bar`), else plain lines."""
    if not (sys.stderr.isatty() if bar is None else bar):
        yield Lines(total, unit, lambda line: log(f"{title}: {line}"))
        return
    with tqdm(total=total, unit=unit, desc=title, file=sys.stderr, smoothing=0.1) as shown:
        yield _Bar(shown)

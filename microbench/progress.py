"""How far a long measurement is: a bar on a terminal or in a notebook, else plain lines."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from tqdm import TqdmWarning

from dlperf.core.streams import log

with warnings.catch_warnings():  # in a notebook without ipywidgets the bar is text
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

EVERY_S = 10.0
"""How far apart plain lines are at least."""


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
        self._begin_s, self._last_s = now(), -float("inf")

    def update(self, n: int) -> None:
        """`n` more are done."""
        self._n_done += n
        self._tell()

    def set_postfix_str(self, what: str) -> None:
        """The next part begins, as a bar shows it."""
        self._what = what
        self._tell()

    def _tell(self) -> None:
        now_s = self._now()
        if now_s - self._last_s >= EVERY_S:
            self._last_s = now_s
            done = f"{self._n_done} of {self._total} {self._unit}s, {now_s - self._begin_s:.0f} s"
            self._say(f"{done}; now {self._what}" if self._what else done)


Progress: TypeAlias = "tqdm[object] | Lines"


@contextmanager
def progress_of(total: int, unit: str, title: str, bar: bool | None = None) -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, in a notebook or by `bar`, else plain lines."""
    in_notebook = type(sys.stderr).__module__ == "ipykernel.iostream"
    if sys.stderr.isatty() or in_notebook if bar is None else bar:
        with tqdm(total=total, unit=unit, desc=title, file=sys.stderr, smoothing=0.1) as shown:
            yield shown
    else:
        yield Lines(total, unit, lambda line: log(f"{title}: {line}"))

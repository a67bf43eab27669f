"""The line on stderr that shows the live forecast."""

from __future__ import annotations

import os
import sys

from dlperf.core.streams import write_err
from dlperf.core.text import visible


class StderrLine:
    """A line that renews itself on a terminal; elsewhere a few plain ones.

    Its failures (a closed stream) are its caller's.
    """

    def __init__(self) -> None:
        self._open = False

    @property
    def is_terminal(self) -> bool:
        """Whether lines can be renewed."""
        is_dumb = os.environ.get("TERM", "dumb") == "dumb"
        return sys.stderr is not None and sys.stderr.isatty() and not is_dumb

    def show(self, text: str) -> None:
        """Show the present line."""
        if self.is_terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(f"\r\x1b[K{visible(text)[: max(1, width - 3)]}  ")
            sys.stderr.flush()
            self._open = True
        else:
            write_err(text)

    def close(self) -> None:
        """End the line."""
        if self._open:
            self._open = False
            sys.stderr.write("\n")
            sys.stderr.flush()

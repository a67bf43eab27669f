"""A budget of time that a group of measurements may spend, and parts of it."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """So many seconds from now on; what a part leaves unspent falls to those after it."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._end = now() + seconds

    def left_s(self) -> float:
        """Seconds left, not below 0."""
        return max(0.0, self._end - self._now())

    def part(self, fraction: float) -> Budget:
        """A share of what is left now."""
        return Budget(fraction * self.left_s(), self._now)

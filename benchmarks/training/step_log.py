"""Notes when a training script begins and how long its steps take; imports neither torch nor
dlperf.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time

N_FIRST = 100
"""Steps before those that count; dlperf watches fewer."""


class StepLog:
    """The script's first line makes one; ``sys.argv``: the number of steps, the file to write."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.n_steps = int(sys.argv[1])
        self._ends: list[float] = []

    def end_step(self) -> None:
        """A step has ended."""
        self._ends.append(time.perf_counter())

    def save(self) -> None:
        """Write the script's begin and the median interval between the ends of its later steps."""
        later = self._ends[N_FIRST:]
        step_s = statistics.median(after - before for before, after in itertools.pairwise(later))
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            json.dump({"began_s": self.began_s, "step_s": step_s}, file)

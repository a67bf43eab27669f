"""What tells how far a machine file can be relied on: the points of its plan that it holds, and how
it predicted steps that were timed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_LEAST_HALF_WIDTH = 1e-3


@dataclass(frozen=True)
class Coverage:
    """How many of a calibration's planned points of a group of kernels were measured with so many
    threads.
    """

    group: str
    threads: int
    n_measured: int
    n_planned: int


@dataclass(frozen=True)
class SelfTest:
    """A training step of a network drawn at random, predicted by the file and timed right after the
    calibration.

    `predicted_s`, with its 90 % interval `low_s`..`high_s`, rests on the machine file alone;
    `measured_s` is the median step.
    """

    name: str
    threads: int
    seed: int
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float

    @property
    def error_frac(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1.0

    @property
    def half_widths(self) -> float:
        """How many half widths of its interval the measured step lies from the predicted one, by
        logarithms.
        """
        end_s = self.high_s if self.measured_s > self.predicted_s else self.low_s
        half_width = max(_LEAST_HALF_WIDTH, abs(math.log(end_s / self.predicted_s)))
        return abs(math.log(self.measured_s / self.predicted_s)) / half_width

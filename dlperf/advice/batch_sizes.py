"""Predicted throughput over batch size, and its knee."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlperf.advice.breakdown import step_s_of
from dlperf.advice.variants import LEAST_GAIN_FRAC, malloc_of
from dlperf.core.units import format_percent
from dlperf.forecast.prediction import Prediction
from dlperf.predictors.page_faults import BOUND as PAGE_FAULTS

_FACTORS = (0.25, 0.5, 2.0, 4.0, 8.0, 16.0, 32.0)
KNEE_FRAC = 0.95
"""The knee is the least batch size with this share of the best throughput seen."""


@dataclass(frozen=True)
class BatchPoint:
    """Throughput at one batch size: predicted seconds a step, how many of them go into page faults,
    peak memory.
    """

    batch_size: int
    step_s: float
    peak_memory_bytes: int | None
    page_faults_s: float = 0.0

    @classmethod
    def of(cls, prediction: Prediction) -> BatchPoint:
        """The point of a predicted whole step."""
        items, memory_bytes = prediction.prices.items, prediction.step.peak_memory_bytes
        faults_s = math.fsum(item.seconds for item in items if item.bound == PAGE_FAULTS)
        return cls(prediction.trace.batch_size, step_s_of(prediction), memory_bytes, faults_s)

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.batch_size / self.step_s

    @property
    def faultless_samples_per_s(self) -> float:
        """Predicted throughput if malloc kept its memory, so that no page were new."""
        return self.batch_size / max(self.step_s - self.page_faults_s, 1e-12)


def batch_sizes(batch_size: int) -> list[int]:
    """The batch sizes of a sweep around `batch_size`, which is one of them.

    >>> batch_sizes(32), batch_sizes(1)
    ([8, 16, 32, 64, 128, 256, 512, 1024], [1, 2, 4, 8, 16, 32])
    """
    others = {int(factor * batch_size) for factor in _FACTORS if factor * batch_size >= 1}
    return sorted(others | {batch_size})


def knee_of(
    sweep: Sequence[BatchPoint],
    rate: Callable[[BatchPoint], float] = lambda point: point.samples_per_s,
) -> BatchPoint | None:
    """The least batch size that reaches :data:`KNEE_FRAC` of the best throughput seen; None
    without a sweep.
    """
    best = max(map(rate, sweep), default=0.0)
    return next((point for point in sweep if rate(point) >= KNEE_FRAC * best), None)


def knee_line(sweep: Sequence[BatchPoint]) -> str:
    """That page faults decide where the knee is, and what would end them; empty where they do
    not.
    """
    here, without = knee_of(sweep), knee_of(sweep, lambda point: point.faultless_samples_per_s)
    if here is None or without is None or here.batch_size == without.batch_size:
        return ""
    jump = max(sweep, key=lambda point: point.page_faults_s / point.step_s)
    return (
        "page faults decide where the knee is: malloc gets memory anew from the system in each"
        f" step ({format_percent(jump.page_faults_s / jump.step_s)} of the step at batch size"
        f" {jump.batch_size}); without them it would be at {without.batch_size}"
        f" ({malloc_of('tuned').settings} keeps the memory)"
    )


def grows_no_more(before: BatchPoint, after: BatchPoint) -> bool:
    """Whether throughput grows no more, page faults or not: those come and go with malloc's
    thresholds, and a jump of theirs is no knee.
    """
    least = 1.0 + LEAST_GAIN_FRAC
    return (
        after.samples_per_s < least * before.samples_per_s
        and after.faultless_samples_per_s < least * before.faultless_samples_per_s
    )

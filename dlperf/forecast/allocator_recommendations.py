"""Cost of page faults in a predicted step, and allocator settings that lower it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dlperf.core.prediction import PredictedStep
from dlperf.core.units import format_seconds
from dlperf.forecast.worker_processes import predict_co_run
from dlperf.predictors import registry
from dlperf.predictors.allocator.simulation import POLICIES
from dlperf.predictors.page_faults import BOUND

WORTH_FRAC = 0.05
"""Least share of page faults in the step for which recommendations are looked for."""


@dataclass(frozen=True)
class AllocatorRecommendation:
    """An allocator policy, the settings that start a process with it, and the seconds that it takes
    off the predicted step.
    """

    malloc: str
    settings: str
    saved_s: float


@dataclass(frozen=True)
class PageFaults:
    """Seconds of a predicted step (`step_s`) for touching fresh pages and giving them back; the
    recommendations by what they save, the best first.
    """

    seconds: float
    step_s: float
    recommendations: tuple[AllocatorRecommendation, ...]

    def sentence(self) -> str:
        """The cost, and the best recommendation that needs nothing installed.

        >>> best = AllocatorRecommendation("tuned", "MALLOC_MMAP_MAX_=0", 0.0101)
        >>> PageFaults(0.0123, 0.0807, (best,)).sentence()
        '12.3 ms of 80.7 ms; MALLOC_MMAP_MAX_=0 would save about 10.1 ms'
        """
        text = f"{format_seconds(self.seconds)} of {format_seconds(self.step_s)}"
        for one in self.recommendations:
            if "{" not in one.settings:
                return f"{text}; {one.settings} would save about {format_seconds(one.saved_s)}"
        return text

    def to_json(self) -> dict[str, Any]:
        """The cost and the recommendations as JSON data."""
        return {"seconds": self.seconds, "recommendations": [*map(asdict, self.recommendations)]}


def recommend_allocators(prediction: PredictedStep) -> PageFaults | None:
    """Cost of page faults where it is at least WORTH_FRAC of the step; else None.

    Each other policy's step is predicted anew, since memory that is kept is also colder than pages
    just zeroed. A policy that saves nothing is left out.
    """
    step_s = prediction.step.total_s
    seconds = math.fsum(item.seconds for item in prediction.prices.items if item.bound == BOUND)
    if not step_s or seconds < WORTH_FRAC * step_s:
        return None
    price = registry.get(prediction.predictor).price
    found = []
    for name, policy in POLICIES.items():
        if name not in ("default", prediction.malloc):
            prices = price(prediction.trace, prediction.machine, prediction.threads, name)
            alone = replace(prediction, prices=prices, workers=1)
            other = predict_co_run(alone, prediction.workers).step.total_s
            if other is not None and other < step_s:
                found.append(AllocatorRecommendation(name, policy.settings, step_s - other))
    return PageFaults(seconds, step_s, tuple(sorted(found, key=lambda one: -one.saved_s)))

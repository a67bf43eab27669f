"""What page faults cost in a predicted step, and what starting the process otherwise would save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlperf.core.units import format_seconds
from dlperf.forecast.prediction import Prediction, predict
from dlperf.forecast.worker_processes import predict_co_run
from dlperf.predictors.allocator.simulation import POLICIES
from dlperf.predictors.page_faults import BOUND

WORTH_FRAC = 0.05
"""Share of the step from which on page faults are worth a sentence and the search for a cure."""


@dataclass(frozen=True)
class AllocatorRecommendation:
    """A policy of malloc, how to start the process with it, and by how many seconds the predicted
    step is shorter under it.
    """

    malloc: str
    settings: str
    saved_s: float


@dataclass(frozen=True)
class PageFaults:
    """Seconds of a predicted step that go into touching fresh pages and giving them back, of
    `step_s`; `recommendations` by what they save, the best first.
    """

    seconds: float
    step_s: float
    recommendations: tuple[AllocatorRecommendation, ...]

    def sentence(self) -> str:
        """What they cost, and the best cure that needs nothing installed.

        >>> PageFaults(0.0123, 0.0807, (AllocatorRecommendation("tuned", "MALLOC_MMAP_MAX_=0", 0.0101),)).sentence()
        '12.3 ms of 80.7 ms; MALLOC_MMAP_MAX_=0 would save about 10.1 ms'
        """
        text = f"{format_seconds(self.seconds)} of {format_seconds(self.step_s)}"
        here = next((one for one in self.recommendations if "{" not in one.settings), None)
        return (
            text
            if here is None
            else f"{text}; {here.settings} would save about {format_seconds(here.saved_s)}"
        )


def recommend_allocators(prediction: Prediction) -> PageFaults | None:
    """What page faults cost, where that is at least WORTH_FRAC of the step; else None.

    Each other policy's step is predicted anew, as memory that is kept is also colder than pages
    just zeroed. A cure that saves nothing is left out.
    """
    step_s = prediction.step.total_s
    seconds = math.fsum(item.seconds for item in prediction.prices.items if item.bound == BOUND)
    if not step_s or seconds < WORTH_FRAC * step_s:
        return None
    recommendations = []
    for name, policy in POLICIES.items():
        if name in ("default", prediction.malloc):
            continue
        alone = predict(
            prediction.trace,
            prediction.machine,
            prediction.threads,
            prediction.predictor,
            malloc=name,
        )
        other = predict_co_run(alone, prediction.workers).step.total_s
        if other is not None and other < step_s:
            recommendations.append(AllocatorRecommendation(name, policy.settings, step_s - other))
    return PageFaults(seconds, step_s, tuple(sorted(recommendations, key=lambda one: -one.saved_s)))

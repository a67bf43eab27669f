"""What a step's time is made of, and which changes would pay.

:func:`explain` takes a prediction apart (:mod:`~dlperf.advice.breakdown`) and predicts changes of
its step (:mod:`~dlperf.advice.changes`); :mod:`~dlperf.advice.trials` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from dlperf.advice.breakdown import Breakdown, break_down
from dlperf.advice.variants import LEAST_GAIN_FRAC
from dlperf.core.display import Displayed

if TYPE_CHECKING:
    from dlperf.advice.changes import Advice
    from dlperf.advice.trials import ChangeTrials
    from dlperf.forecast.prediction import Prediction
    from dlperf.recorder.targets import Target


@dataclass(frozen=True, repr=False)
class Explanation(Displayed, by="dlperf.advice.explanation_page"):
    """A predicted step, its parts, what could be changed about it and, where they were tried, what
    the changes brought.
    """

    prediction: Prediction
    breakdown: Breakdown
    advice: Advice
    trials: ChangeTrials | None = None
    provenance: tuple[str, ...] = field(default=())


def explain(
    prediction: Prediction,
    target: Target | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Explanation:
    """Explain a predicted step.

    `target` is what its trace was recorded from (:func:`dlperf.recorder.targets.resolve`); without
    it nothing that needs code is considered. `log` is told what is being looked at. Raises
    DlperfError for a predictor that does not speak of the whole step.
    """
    from dlperf.advice.changes import advise

    return Explanation(prediction, break_down(prediction), advise(prediction, target, log))


@dataclass(frozen=True)
class Agreement:
    """Counts of changes that were tried, by whether they paid as predicted. `median_distance_frac`:
    |predicted - measured| gain, as a fraction.

    `n_close`: changes whose measured gain lies within the repeatability floor of the least gain
    that pays, so that the measurement cannot tell.
    """

    n_tried: int
    n_right: int
    n_wrong: int
    n_close: int
    median_distance_frac: float


def agreement_of(explanation: Explanation) -> Agreement | None:
    """The agreement over everything that was tried; None where nothing was."""
    trials = explanation.trials
    if trials is None:
        return None
    floor = trials.repeatability_frac or 0.0
    right = wrong = close = 0
    distances = []
    for suggestion in explanation.advice.suggestions:
        trial = trials.trial_of(suggestion.variant.name)
        if trial is None or trial.gain_frac is None or suggestion.gain_frac is None:
            continue
        distances.append(abs(suggestion.gain_frac - trial.gain_frac))
        if abs(trial.gain_frac - LEAST_GAIN_FRAC) <= floor:
            close += 1
        elif (suggestion.gain_frac >= LEAST_GAIN_FRAC) == (trial.gain_frac >= LEAST_GAIN_FRAC):
            right += 1
        else:
            wrong += 1
    return Agreement(len(distances), right, wrong, close, median(distances)) if distances else None

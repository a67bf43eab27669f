"""How well the predicted gains were borne out by the measured ones."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from dlperf.advice.explanation import Explanation
from dlperf.advice.variants import LEAST_GAIN_FRAC


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

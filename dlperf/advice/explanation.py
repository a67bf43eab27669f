"""What a step's time is made of, and which changes would pay.

:func:`explain` takes a prediction apart (:mod:`~dlperf.advice.breakdown`) and predicts changes of its step (:mod:`~dlperf.advice.changes`);
:mod:`~dlperf.advice.change_trials` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlperf.advice.breakdown import Breakdown, break_down
from dlperf.core.display import Displayed

if TYPE_CHECKING:
    from dlperf.advice.change_trials import Trials
    from dlperf.advice.changes import Advice
    from dlperf.forecast.prediction import Prediction
    from dlperf.recorder.targets import Target


@dataclass(frozen=True, repr=False)
class Explanation(Displayed, by="dlperf.advice.explanation_text"):
    """A predicted step, its parts, what could be changed about it and, where they were tried, what
    the changes brought.
    """

    prediction: Prediction
    breakdown: Breakdown
    advice: Advice
    trials: Trials | None = None
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

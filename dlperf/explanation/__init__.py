"""What a step's time is made of, and which changes would pay.

:func:`explain` takes a prediction apart (:mod:`~dlperf.explanation.breakdown`) and predicts changes of its step (:mod:`~dlperf.explanation.advice`);
:mod:`~dlperf.explanation.trials` measures them.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlperf.display import Displayed
from dlperf.explanation.breakdown import Breakdown, break_down

if TYPE_CHECKING:
    from dlperf.explanation.advice import Advice
    from dlperf.explanation.trials import Trials
    from dlperf.prediction import Prediction
    from dlperf.targets import Target


@dataclass(frozen=True, repr=False)
class Explanation(Displayed, by="dlperf.explanation.text"):
    """A predicted step, its parts, what could be changed about it and, where they were tried, what the changes brought."""

    prediction: Prediction
    breakdown: Breakdown
    advice: Advice
    trials: Trials | None = None
    provenance: tuple[str, ...] = field(default=())


def explain(prediction: Prediction, target: Target | None = None, narrate: Callable[[str], None] = lambda line: None) -> Explanation:
    """Explain a predicted step.

    `target` is what its trace was recorded from (:func:`dlperf.targets.resolve`); without it nothing that needs code is considered. `narrate` is told what
    is being looked at. Raises DlperfError for a predictor that does not speak of the whole step.
    """
    from dlperf.explanation.advice import advise

    return Explanation(prediction, break_down(prediction), advise(prediction, target, narrate))

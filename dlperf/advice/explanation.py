"""What a step's time is made of, and which changes would pay.

:func:`explain` takes a prediction apart (:mod:`~dlperf.advice.breakdown`) and predicts changes of
its step (:mod:`~dlperf.advice.changes`); :mod:`~dlperf.advice.trials` measures them. Exports are
JSON (schema ``dlperf.explanation``) and CSV: times in seconds, memory in bytes, gains as fractions
of samples per second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dlperf.advice.batch_sizes import knee_line, knee_of
from dlperf.advice.breakdown import PARTS, Breakdown, break_down
from dlperf.advice.changes import Advice, advise
from dlperf.advice.trials import ChangeTrial, ChangeTrials
from dlperf.advice.variants import LEAST_GAIN_FRAC, Suggestion
from dlperf.core import host
from dlperf.core.display import Displayed
from dlperf.core.text import csv_text
from dlperf.forecast.prediction import Prediction
from dlperf.recorder.targets import Target

SCHEMA, SCHEMA_VERSION = "dlperf.explanation", 2
MOST_EXPENSES = 20


@dataclass(frozen=True, repr=False)
class Explanation(Displayed, by="dlperf.advice.explanation_page"):
    """A predicted step, its parts, what could be changed about it and, where they were tried, what
    the changes brought.
    """

    prediction: Prediction
    breakdown: Breakdown
    advice: Advice
    trials: ChangeTrials | None = None
    provenance: tuple[str, ...] = ()

    def trial_of(self, suggestion: Suggestion) -> ChangeTrial | None:
        """The trial of a suggestion; None where it was not tried."""
        return None if self.trials is None else self.trials.trial_of(suggestion.variant.name)

    @property
    def tried(self) -> list[tuple[Suggestion, ChangeTrial]]:
        """The suggestions with a finished run, and their trials."""
        pairs = ((suggestion, self.trial_of(suggestion)) for suggestion in self.advice.suggestions)
        return [(suggestion, trial) for suggestion, trial in pairs if trial and trial.pairs]


def explain(
    prediction: Prediction,
    target: Target | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> Explanation:
    """Explain a predicted step.

    `target` is what its trace was recorded from (:func:`dlperf.recorder.targets.resolve`); without
    it nothing that needs code is considered. `log` reports what is considered. Raises DlperfError
    for a predictor that does not support the whole step.
    """
    return Explanation(prediction, break_down(prediction), advise(prediction, target, log))


@dataclass(frozen=True)
class Agreement:
    """Counts of changes that were tried, by whether they paid as predicted. `median_distance_frac`:
    |predicted - measured| gain, as a fraction.

    `n_close`: changes whose measured gain lies within the run-to-run variation of the least gain
    that pays, so that the measurement cannot tell.
    """

    n_tried: int
    n_right: int
    n_wrong: int
    n_close: int
    median_distance_frac: float


def agreement_of(explanation: Explanation) -> Agreement | None:
    """The agreement over everything that was tried; None where nothing was."""
    trials, tried = explanation.trials, explanation.tried
    if trials is None or not tried:
        return None
    gains = np.array([(suggestion.gain_frac, trial.gain_frac) for suggestion, trial in tried])
    paid_as_predicted = np.equal(*(gains >= LEAST_GAIN_FRAC).T)
    is_clear = abs(gains[:, 1] - LEAST_GAIN_FRAC) > (trials.repeatability_frac or 0.0)
    n_right = int((is_clear & paid_as_predicted).sum())
    n_close = len(tried) - int(is_clear.sum())
    distance_frac = float(np.median(abs(np.diff(gains))))
    return Agreement(len(tried), n_right, len(tried) - n_right - n_close, n_close, distance_frac)


# -- exports ---------------------------------------------------------------------------------------


def part_key(part: str) -> str:
    """A heading as the name of a quantity.

    >>> part_key("page-faults"), part_key("L2")
    ('page_faults_s', 'l2_s')
    """
    return part.lower().replace("-", "_") + "_s"


def explanation_to_json(explanation: Explanation) -> dict[str, Any]:
    """The whole explanation; values that were not predicted or not measured are null."""
    prediction, breakdown, advice, trials = (
        explanation.prediction,
        explanation.breakdown,
        explanation.advice,
        explanation.trials,
    )
    step, knee, agreement = prediction.step, knee_of(advice.sweep), agreement_of(explanation)
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "target": prediction.trace.target,
        "batch_size": prediction.trace.batch_size,
        "threads": prediction.threads,
        "inference": prediction.trace.inference,
        "machine": prediction.machine.path or prediction.machine.cpu.model,
        "predictor": prediction.predictor,
        "step": {
            "total_s": step.total_s,
            "low_s": step.low_s,
            "high_s": step.high_s,
            "peak_memory_bytes": step.peak_memory_bytes,
        },
        "parts": [
            {"part": part, "time_s": seconds, "share_frac": breakdown.share_frac(part)}
            for part, seconds in breakdown.parts_s
        ],
        "layers": [
            {
                "layer": row.layer,
                "type": row.type,
                "total_s": row.total_s,
                **{part_key(part): row.part_s(part) for part in PARTS},
            }
            for row in breakdown.layers
        ],
        "expenses": [
            {
                "layer": e.layer,
                "phase": e.phase,
                "what": e.what,
                "count": e.count,
                "time_s": e.seconds,
                "share_frac": e.seconds / breakdown.total_s if breakdown.total_s else 0.0,
                "bound": e.bound,
                "source": e.source,
            }
            for e in breakdown.expenses[:MOST_EXPENSES]
        ],
        "suggestions": [_suggestion(explanation, suggestion) for suggestion in advice.suggestions],
        "widths": [
            {
                "layer": w.layer,
                "width": w.width,
                "wider": w.wider,
                "predicted_cost_frac": w.cost_frac,
                "is_free": w.is_free,
                "reason": w.reason,
            }
            for w in advice.widths
        ],
        "batch_sizes": [
            {
                "batch_size": p.batch_size,
                "predicted_step_s": p.step_s,
                "page_faults_s": p.page_faults_s,
                "predicted_samples_per_s": p.samples_per_s,
                "peak_memory_bytes": p.peak_memory_bytes,
            }
            for p in advice.sweep
        ],
        "knee_batch_size": None if knee is None else knee.batch_size,
        "knee_note": knee_line(advice.sweep),
        "trials": (
            None
            if trials is None
            else {
                "baseline_step_s": trials.baseline_step_s,
                "baseline_samples_s": list(trials.baselines_s),
                "repeatability_frac": trials.repeatability_frac,
                "runs": trials.n_runs,
                "seconds": trials.seconds,
                "agreement": None if agreement is None else asdict(agreement),
                "is_interrupted": trials.is_interrupted,
                "notes": list(trials.notes),
            }
        ),
        "warnings": list(prediction.warnings),
        "notes": [*prediction.trace.notes, *prediction.prices.notes, *advice.notes],
        "provenance": list(explanation.provenance),
        "versions": {**host.versions(), "machine": prediction.machine.cpu.model},
    }


def _suggestion(explanation: Explanation, suggestion: Suggestion) -> dict[str, Any]:
    variant, trial = suggestion.variant, explanation.trial_of(suggestion)
    return {
        "change": variant.name,
        "verdict": suggestion.verdict,
        "how": variant.how,
        "reason": suggestion.reason,
        "caveat": variant.caveat,
        "needs_code": variant.needs_code,
        "edits": [asdict(edit) for edit in variant.edits],
        "batch_size": suggestion.batch_size,
        "threads": suggestion.threads,
        "malloc": variant.malloc,
        "predicted_step_s": suggestion.step_s,
        "predicted_sample_s": suggestion.sample_s,
        "predicted_gain_frac": suggestion.gain_frac,
        "unsure_frac": suggestion.unsure_frac,
        "peak_memory_bytes": suggestion.peak_memory_bytes,
        "measured_step_s": None if trial is None else trial.step_s,
        "measured_sample_s": None if trial is None else trial.sample_s,
        "measured_gain_frac": None if trial is None else trial.gain_frac,
        "measured_gains_frac": [] if trial is None else list(trial.gains_frac),
        "trial_error": "" if trial is None else trial.error,
    }


_OWN = ("target", "batch_size", "threads")


def _csv(data: dict[str, Any], rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    own = {name: data[name] for name in _OWN}
    return csv_text([*_OWN, *columns], ({**row, **own} for row in rows))


def parts_to_csv(explanation: Explanation) -> str:
    """One row a layer: its seconds by heading. They add up to the step."""
    data = explanation_to_json(explanation)
    return _csv(data, data["layers"], ["layer", "type", "total_s", *map(part_key, PARTS)])


def suggestions_to_csv(explanation: Explanation) -> str:
    """One row a change: predicted and measured gain, and what it takes. `batch_size` and `threads`
    are the baseline's, those of the change have columns of their own.
    """
    data, trials = explanation_to_json(explanation), explanation.trials
    variation = None if trials is None else trials.repeatability_frac
    rows = [
        {
            **row,
            "new_batch_size": row["batch_size"],
            "new_threads": row["threads"],
            "measured_gains_frac": " ".join(f"{gain:.4f}" for gain in row["measured_gains_frac"]),
            "repeatability_frac": variation if row["measured_gains_frac"] else None,
        }
        for row in data["suggestions"]
    ]
    columns = [
        "change",
        "verdict",
        "predicted_gain_frac",
        "measured_gain_frac",
        "repeatability_frac",
        "measured_gains_frac",
        "predicted_step_s",
        "measured_step_s",
        "predicted_sample_s",
        "measured_sample_s",
        "new_batch_size",
        "new_threads",
        "malloc",
        "peak_memory_bytes",
        "unsure_frac",
        "needs_code",
        "how",
        "caveat",
        "reason",
        "trial_error",
    ]
    return _csv(data, rows, columns)

"""Explanations as JSON (schema ``dlperf.explanation``) and CSV; times in seconds, memory in
bytes, gains as fractions of samples per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dlperf.advice.batch_sizes import knee_line, knee_of
from dlperf.advice.breakdown import PARTS
from dlperf.advice.explanation import Explanation, agreement_of
from dlperf.advice.variants import Suggestion
from dlperf.core import host
from dlperf.core.text import csv_text

SCHEMA, SCHEMA_VERSION = "dlperf.explanation", 2
MOST_EXPENSES = 20


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
    step, agreement = prediction.step, agreement_of(explanation)
    knee = knee_of(advice.sweep)
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
    variant = suggestion.variant
    trial = None if explanation.trials is None else explanation.trials.trial_of(variant.name)
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


def parts_to_csv(explanation: Explanation) -> str:
    """One row a layer: its seconds by heading. They add up to the step."""
    rows = explanation_to_json(explanation)["layers"]
    return _csv(
        explanation, rows, ["layer", "type", "total_s", *(part_key(part) for part in PARTS)]
    )


def suggestions_to_csv(explanation: Explanation) -> str:
    """One row a change: predicted and measured gain, and what it takes. `batch_size` and `threads`
    are the baseline's, those of the change stand beside it.
    """
    rows = []
    for row in explanation_to_json(explanation)["suggestions"]:
        row["new_batch_size"], row["new_threads"] = row.pop("batch_size"), row.pop("threads")
        row["measured_gains_frac"] = " ".join(f"{gain:.4f}" for gain in row["measured_gains_frac"])
        rows.append(row)
    floor = None if explanation.trials is None else explanation.trials.repeatability_frac
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
    return _csv(
        explanation,
        [
            {**row, "repeatability_frac": floor if row["measured_gains_frac"] else None}
            for row in rows
        ],
        columns,
    )


def _csv(explanation: Explanation, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    trace = explanation.prediction.trace
    own = {
        "target": trace.target,
        "batch_size": trace.batch_size,
        "threads": explanation.prediction.threads,
    }
    return csv_text([*_OWN, *columns], ({**row, **own} for row in rows))

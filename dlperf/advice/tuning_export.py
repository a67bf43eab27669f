"""Tunings as JSON (schema ``dlperf.tuning``) and CSV; times in seconds, memory in bytes."""

from __future__ import annotations

from typing import Any

from dlperf.advice.grid import Configuration, ConfigurationForecast
from dlperf.advice.tuning import Tuning
from dlperf.core import host
from dlperf.core.text import csv_text

SCHEMA, SCHEMA_VERSION = "dlperf.tuning", 1


def _configuration(one: Configuration) -> dict[str, int]:
    return {
        "threads": one.threads,
        "batch_size": one.batch_size,
        "loader_workers": one.loader_workers,
        "workers": one.workers,
    }


def row_to_json(row: ConfigurationForecast) -> dict[str, Any]:
    """A configuration's forecast as one flat object."""
    return {
        **_configuration(row.configuration),
        "samples_per_s": row.samples_per_s,
        "step_s": row.step_s,
        "epoch_s": row.epoch_s,
        "peak_memory_bytes": row.peak_memory_bytes,
        "bound": row.bound,
        "fits": row.fits,
        "source": row.source,
    }


def tuning_to_json(tuning: Tuning) -> dict[str, Any]:
    """The whole tuning; `rows` are in order of merit, those that do not fit last. What was not
    measured or not asked for is null.
    """
    objective, trials = tuning.objective, tuning.trials
    left = [row for row in tuning.rows if not row.fits]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "target": tuning.target,
        "machine": tuning.machine,
        "objective": objective.kind,
        "samples": objective.samples,
        "memory_limit_bytes": objective.memory_limit_bytes,
        "best": _configuration(tuning.best.configuration),
        "predicted_samples_per_s": tuning.best.samples_per_s,
        "predicted_epoch_s": tuning.best.epoch_s,
        "peak_memory_bytes": tuning.best.peak_memory_bytes,
        "rows": [row_to_json(row) for row in (*tuning.best_rows, *left)],
        "recorded_batch_sizes": list(tuning.recorded),
        "tried": (
            None
            if trials is None
            else [
                {
                    **_configuration(one.configuration),
                    "measured_samples_per_s": one.samples_per_s,
                    "runs_samples_per_s": list(one.runs_samples_per_s),
                    "error": one.error or None,
                }
                for one in trials.trials
            ]
        ),
        "loss_frac": None if trials is None else trials.loss_frac,
        "measured_best": (
            None
            if trials is None or trials.fastest is None
            else _configuration(trials.fastest.configuration)
        ),
        "notes": list(tuning.notes),
        "provenance": list(tuning.provenance),
        "versions": host.versions(),
    }


def tuning_to_csv(tuning: Tuning) -> str:
    """One line a configuration, in order of merit."""
    rows = tuning_to_json(tuning)["rows"]
    return csv_text(list(rows[0]), rows)

"""``dlperf tune``: which threads, batch size, loading workers and worker processes train fastest,
within a limit of memory.

It seeks speed and says nothing of convergence: a larger batch makes fewer updates of the weights in
an epoch. Exports are JSON (schema ``dlperf.tuning``) and CSV; times in seconds, memory in bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dlperf.advice.grid import (
    PREDICTED,
    Axes,
    Configuration,
    ConfigurationForecast,
    Objective,
    RateOf,
    ranked,
    spread_sizes,
    survey,
)
from dlperf.advice.trials import ConfigurationTrials
from dlperf.core import host
from dlperf.core.display import Displayed
from dlperf.core.text import csv_text

SCHEMA, SCHEMA_VERSION = "dlperf.tuning", 1

MOST_RECORDED = 8
"""Batch sizes that are recorded at first; between them configurations are interpolated."""
SPEED_NOTE = (
    "The fastest configuration, not the one that learns best: a larger batch, or more workers,"
    " update the weights less often in an epoch."
)
MEMORY_NOTE = (
    "Memory is what training adds to processes that have imported torch; that import takes some 200"
    " MiB each beside it."
)


@dataclass(frozen=True, repr=False)
class Tuning(Displayed, by="dlperf.advice.tuning_page"):
    """What was found for a target. `rows` are all configurations, `best_rows` those that fit, the
    best first; `trials` what was measured of the best few.
    """

    target: str
    machine: str
    axes: Axes
    objective: Objective
    rows: tuple[ConfigurationForecast, ...]
    best_rows: tuple[ConfigurationForecast, ...]
    recorded: tuple[int, ...]
    notes: tuple[str, ...] = ()
    trials: ConfigurationTrials | None = None
    provenance: tuple[str, ...] = ()

    @property
    def best(self) -> ConfigurationForecast:
        """The proposed configuration."""
        return self.best_rows[0]


def tune(
    target: str,
    machine: str,
    axes: Axes,
    objective: Objective,
    rate_of: RateOf,
    allowed: Callable[[Configuration], bool] = lambda _: True,
    n_exact: int = 1,
    notes: Callable[[], list[str]] = list,
) -> Tuning:
    """Compare every allowed configuration of the axes.

    Of many batch sizes MOST_RECORDED are asked of `rate_of`, the others interpolated; then the
    batch sizes of the best `n_exact` configurations are asked for as well, until these stand on
    predictions of their own, so that what is proposed is never interpolated. `notes` is called at
    the end.

    Raises DlperfError where nothing fits or nothing is left, and what `rate_of` raises.
    """
    recorded = set(spread_sizes(axes.batch_sizes, MOST_RECORDED))
    once = functools.cache(rate_of)
    while True:
        rows = survey(axes, once, sorted(recorded), objective, allowed)
        order = ranked(rows, objective)
        missing = {
            row.configuration.batch_size for row in order[:n_exact] if row.source != PREDICTED
        }
        if not missing:
            return Tuning(
                target,
                machine,
                axes,
                objective,
                tuple(rows),
                tuple(order),
                tuple(sorted(recorded)),
                tuple(notes()),
            )
        recorded |= missing


# -- exports ---------------------------------------------------------------------------------------


def _configuration(one: Configuration) -> dict[str, int]:
    return {
        "threads": one.threads,
        "batch_size": one.batch_size,
        "loader_workers": one.loader_workers,
        "workers": one.workers,
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
        "rows": [
            {
                **_configuration(row.configuration),
                "samples_per_s": row.samples_per_s,
                "step_s": row.step_s,
                "epoch_s": row.epoch_s,
                "peak_memory_bytes": row.peak_memory_bytes,
                "bound": row.bound,
                "fits": row.fits,
                "source": row.source,
            }
            for row in (*tuning.best_rows, *left)
        ],
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

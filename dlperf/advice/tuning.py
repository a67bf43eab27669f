"""``dlperf tune``: which threads, batch size, loading workers and worker processes train fastest,
within a limit of memory.

It seeks speed and says nothing of convergence: a larger batch makes fewer updates of the weights in
an epoch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

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
from dlperf.core.display import Displayed

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

    def row_of(self, configuration: Configuration) -> ConfigurationForecast:
        """The forecast of a configuration that is in the grid."""
        return next(row for row in self.rows if row.configuration == configuration)


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

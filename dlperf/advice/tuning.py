"""``dlperf tune``: which threads, batch size, loading workers and worker processes train fastest,
within a limit of memory.

It seeks speed and says nothing of convergence: a larger batch makes fewer updates of the weights in
an epoch. Exports are JSON (schema ``dlperf.tuning``) and CSV; times in seconds, memory in bytes.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlperf.advice.grid import (
    EPOCH,
    INTERPOLATED,
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
from dlperf.core.text import counted, csv_text, printable
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.report.document import (
    Block,
    Bullets,
    Column,
    Heading,
    Image,
    Paragraph,
    Table,
    to_markdown,
)
from dlperf.report.writing import write_files

SCHEMA, SCHEMA_VERSION = "dlperf.tuning", 1
MOST_SHOWN = 10

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
class Tuning(Displayed, by="dlperf.advice.tuning"):
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


# -- page ------------------------------------------------------------------------------------------


def rate_text(samples_per_s: float | None) -> str:
    """Samples per second, short enough for a column.

    >>> rate_text(12345.6), rate_text(3.14159), rate_text(None)
    ('12,346', '3.14', '-')
    """
    if samples_per_s is None:
        return "-"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 100 else f"{samples_per_s:.3g}"


def heading(tuning: Tuning) -> str:
    """What was compared, in one line."""
    objective = tuning.objective
    aim = (
        f"the shortest epoch of {objective.samples} samples"
        if objective.kind == EPOCH
        else "the most samples per second"
    )
    limit = (
        ""
        if objective.memory_limit_bytes is None
        else f" within {format_bytes(objective.memory_limit_bytes)}"
    )
    among = counted(len(tuning.rows), "configuration")
    return f"{printable(tuning.target)}: {aim}{limit}, among {among}, on {tuning.machine}"


def best_line(tuning: Tuning) -> str:
    """The proposal in one line."""
    best = tuning.best
    epoch = "" if best.epoch_s is None else f", {format_seconds(best.epoch_s)} an epoch"
    rate = f"{rate_text(best.samples_per_s)} samples/s predicted{epoch}"
    return (
        f"best: {best.configuration.label}: {rate}, {format_bytes(best.peak_memory_bytes)}; limited"
        f" by {best.bound}"
    )


def columns_of(tuning: Tuning, rows: Sequence[ConfigurationForecast]) -> list[Column]:
    """Configurations side by side."""
    found, trials = [row.configuration for row in rows], tuning.trials
    tried = [] if trials is None else [trials.trial_of(one) for one in found]
    measured = (rate_text(None if trial is None else trial.samples_per_s) for trial in tried)
    steps = (format_seconds(row.step_s) + "~" * (row.source == INTERPOLATED) for row in rows)
    columns = [
        Column("threads", tuple(str(one.threads) for one in found)),
        Column("batch size", tuple(str(one.batch_size) for one in found)),
        Column("loader", tuple(str(one.loader_workers) for one in found)),
        Column("workers", tuple(str(one.workers) for one in found)),
        Column("samples/s", tuple(rate_text(row.samples_per_s) for row in rows)),
        Column("measured", tuple(measured)),
        Column("step + loading", tuple(steps), rank=1),
        Column("epoch", tuple(format_seconds(row.epoch_s) for row in rows)),
        Column("memory", tuple(format_bytes(row.peak_memory_bytes) for row in rows)),
        Column("limited by", tuple(row.bound for row in rows), align_left=True),
    ]
    is_known = {"measured": trials is not None, "epoch": tuning.objective.samples is not None}
    return [column for column in columns if is_known.get(column.title, True)]


def remarks(tuning: Tuning) -> list[str]:
    """What a reader should know besides."""
    lines = []
    n_fit = len(tuning.best_rows)
    if n_fit > MOST_SHOWN:
        lines.append(
            f"The table has the best {MOST_SHOWN} of {n_fit} configurations; -o and --json have"
            " all."
        )
    n_left = len(tuning.rows) - n_fit
    if n_left:
        left = counted(n_left, "configuration")
        lines.append(f"Left out, with more memory than the limit: {left}.")
    if any(row.source == INTERPOLATED for row in tuning.rows):
        sizes = ", ".join(map(str, tuning.recorded))
        lines.append(
            f"Predicted at the batch sizes {sizes}; between them (~) step and memory are"
            " interpolated. What is proposed is never interpolated."
        )
    return [*lines, SPEED_NOTE, MEMORY_NOTE, *tuning.notes]


def trial_lines(tuning: Tuning) -> list[str]:
    """What measuring the best few said."""
    trials = tuning.trials
    if trials is None:
        return []
    lines = [
        f"{one.configuration.label}: could not be measured: {one.error}"
        for one in trials.trials
        if one.error
    ]
    fastest, loss_frac = trials.fastest, trials.loss_frac
    if fastest is not None and loss_frac is not None:
        if fastest is trials.trials[0]:
            lines.append(
                f"The proposed configuration was also the fastest of {len(trials.trials)} measured"
                " ones."
            )
        else:
            lines.append(
                f"The fastest of {len(trials.trials)} measured ones was"
                f" {fastest.configuration.label} ({rate_text(fastest.samples_per_s)} samples/s);"
                f" the proposed one was {format_percent(loss_frac)} slower."
            )
    if trials.is_interrupted:
        lines.append("The measuring was interrupted.")
    return lines


def one_line(tuning: Tuning) -> str:
    """The proposal for the target."""
    return f"<Tuning {printable(tuning.target)}: {best_line(tuning)}>"


def page(tuning: Tuning, images: Sequence[Image] = ()) -> list[Block]:
    """The page: the proposal, the best configurations, plots, trials and remarks."""
    return [
        Heading(heading(tuning), 2),
        Paragraph((best_line(tuning),)),
        Table(tuple(columns_of(tuning, tuning.best_rows[:MOST_SHOWN]))),
        *images,
        Bullets((*trial_lines(tuning), *remarks(tuning))),
    ]


def write(tuning: Tuning, folder: str | Path, force: bool = False) -> list[Path]:
    """Write ``tuning.md``, ``.json``, ``.csv`` and ``landscape.png``; the files in that order.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    from dlperf.advice.plots import landscape_png

    blocks = page(tuning, [Image("landscape.png", link="landscape.png")])
    if tuning.provenance:
        blocks.append(Paragraph(tuning.provenance, is_small=True))
    files: dict[str, str | bytes] = {
        "tuning.md": to_markdown("tuning", blocks),
        "tuning.json": json.dumps(tuning_to_json(tuning), indent=1, allow_nan=False) + "\n",
        "tuning.csv": tuning_to_csv(tuning),
        "landscape.png": landscape_png(tuning),
    }
    return write_files(folder, files, force)

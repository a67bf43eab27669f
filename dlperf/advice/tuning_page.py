"""A tuning as a page for a terminal, as Markdown, and as a folder of files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dlperf.advice.grid import EPOCH, INTERPOLATED, ConfigurationForecast
from dlperf.advice.tuning import MEMORY_NOTE, SPEED_NOTE, Tuning, tuning_to_csv, tuning_to_json
from dlperf.core.text import printable
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
    to_text,
)
from dlperf.report.writing import write_files

MOST_SHOWN = 10


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
    return (
        f"{printable(tuning.target)}: {aim}{limit}, among {len(tuning.rows)} configurations, on"
        f" {tuning.machine}"
    )


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
        Column("step", tuple(steps), rank=1),
        Column("epoch", tuple(format_seconds(row.epoch_s) for row in rows)),
        Column("memory", tuple(format_bytes(row.peak_memory_bytes) for row in rows)),
        Column("limited by", tuple(row.bound for row in rows), align_left=True),
    ]
    is_known = {"measured": trials is not None, "epoch": tuning.objective.samples is not None}
    return [column for column in columns if is_known.get(column.title, True)]


def remarks(tuning: Tuning) -> list[str]:
    """What a reader should know besides."""
    lines = []
    n_left = sum(not row.fits for row in tuning.rows)
    if n_left:
        lines.append(f"{n_left} configurations need more memory than the limit and were left out.")
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


def page(tuning: Tuning, width: int | None = None) -> str:
    """The page for a terminal, at most `width` columns wide (default: the terminal's)."""
    return to_text(tuning_page(tuning), width).rstrip("\n")


def tuning_page(tuning: Tuning, images: Sequence[Image] = ()) -> list[Block]:
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

    blocks = tuning_page(tuning, [Image("landscape.png", link="landscape.png")])
    if tuning.provenance:
        blocks.append(Paragraph(tuning.provenance, is_small=True))
    files: dict[str, str | bytes] = {
        "tuning.md": to_markdown("tuning", blocks),
        "tuning.json": json.dumps(tuning_to_json(tuning), indent=1, allow_nan=False) + "\n",
        "tuning.csv": tuning_to_csv(tuning),
        "landscape.png": landscape_png(tuning),
    }
    return write_files(folder, files, force)

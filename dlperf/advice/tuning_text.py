"""A tuning as text for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.advice.grid import EPOCH, INTERPOLATED, Row
from dlperf.advice.tuning import MEMORY_NOTE, SPEED_NOTE, Tuning
from dlperf.core.text import fit, printable, text_width
from dlperf.core.units import format_bytes, format_percent, format_seconds
from dlperf.core.version import VERSION
from dlperf.report.markdown import escape, table
from dlperf.report.table import Column, format_table
from dlperf.report.text import wrap

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
    wish = tuning.wish
    aim = (
        f"the shortest epoch of {wish.samples} samples"
        if wish.objective == EPOCH
        else "the most samples per second"
    )
    limit = (
        ""
        if wish.memory_limit_bytes is None
        else f" within {format_bytes(wish.memory_limit_bytes)}"
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


def columns_of(tuning: Tuning, rows: Sequence[Row]) -> list[Column]:
    """Configurations side by side."""
    found = [row.configuration for row in rows]
    columns = [
        Column("threads", tuple(str(one.threads) for one in found)),
        Column("batch size", tuple(str(one.batch_size) for one in found)),
        Column("loader", tuple(str(one.loader_workers) for one in found)),
        Column("workers", tuple(str(one.workers) for one in found)),
        Column("samples/s", tuple(rate_text(row.samples_per_s) for row in rows)),
    ]
    if tuning.contest is not None:
        tried = [tuning.contest.try_of(one) for one in found]
        columns.append(
            Column(
                "measured",
                tuple(rate_text(None if one is None else one.samples_per_s) for one in tried),
            )
        )
    columns += [
        Column(
            "step",
            tuple(
                format_seconds(row.step_s) + ("~" if row.source == INTERPOLATED else "")
                for row in rows
            ),
            rank=1,
        ),
        *(
            [Column("epoch", tuple(format_seconds(row.epoch_s) for row in rows))]
            if tuning.wish.samples is not None
            else []
        ),
        Column("memory", tuple(format_bytes(row.peak_memory_bytes) for row in rows)),
        Column("limited by", tuple(row.bound for row in rows), align_left=True),
    ]
    return columns


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


def contest_lines(tuning: Tuning) -> list[str]:
    """What measuring the best few said."""
    contest = tuning.contest
    if contest is None:
        return []
    lines = [
        f"{one.configuration.label}: could not be measured: {one.error}"
        for one in contest.tries
        if one.error
    ]
    winner, loss_frac = contest.winner, contest.loss_frac
    if winner is not None and loss_frac is not None:
        if winner is contest.tries[0]:
            lines.append(
                f"The proposed configuration was also the fastest of {len(contest.tries)} measured"
                " ones."
            )
        else:
            lines.append(
                f"The fastest of {len(contest.tries)} measured ones was"
                f" {winner.configuration.label} ({rate_text(winner.samples_per_s)} samples/s); the"
                f" proposed one was {format_percent(loss_frac)} slower."
            )
    if contest.is_interrupted:
        lines.append("The measuring was interrupted.")
    return [*lines, *contest.notes]


def one_line(tuning: Tuning) -> str:
    """The proposal for the target."""
    return f"<Tuning {printable(tuning.target)}: {best_line(tuning)}>"


def page(tuning: Tuning) -> str:
    """The best configurations."""
    return tuning_to_text(tuning)


def tuning_to_text(tuning: Tuning, width: int | None = None) -> str:
    """The best configurations as a table, and what is to be said of them."""
    width = text_width() if width is None else width
    blocks = [
        heading(tuning),
        best_line(tuning),
        "",
        format_table(columns_of(tuning, tuning.best_rows[:MOST_SHOWN]), width),
    ]
    for line in (*contest_lines(tuning), *remarks(tuning)):
        blocks += ["", wrap(line, width)] if line == SPEED_NOTE else [wrap(line, width)]
    return fit("\n".join(blocks), width)


def tuning_to_markdown(tuning: Tuning, images: Sequence[str] = ()) -> str:
    """The same as Markdown, with links to the plots."""
    lines = [
        f"<!-- dlperf {VERSION} -->",
        "",
        f"# {escape(heading(tuning))}",
        "",
        escape(best_line(tuning)),
        "",
    ]
    lines += [table(columns_of(tuning, tuning.best_rows[:MOST_SHOWN])), ""]
    lines += [f"![{name}]({name})" for name in images]
    lines += ["", *(f"- {escape(line)}" for line in (*contest_lines(tuning), *remarks(tuning))), ""]
    lines += [f"Made by {escape(line)}" for line in tuning.provenance]
    return "\n".join(lines) + "\n"

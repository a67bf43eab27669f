"""The landscape: throughput over batch size, a line for every number of threads, workers and
loading workers; below it the memory and its limit.
"""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, NullLocator

from dlperf.advice.grid import PREDICTED, ConfigurationForecast
from dlperf.advice.tuning import Tuning
from dlperf.core.units import MIB, format_bytes
from dlperf.report.drawing import CYCLE, DIM, GRID, INK, new_figure, own_style, plain, to_png

MOST_LINES = 12
_MARKS = "osD^vPX*<>ph"
_COLORS = (*CYCLE, INK)


def _line_of(row: ConfigurationForecast) -> tuple[int, int, int]:
    """What the points of a line have in common: workers, threads, loading workers."""
    one = row.configuration
    return one.workers, one.threads, one.loader_workers


def lines_of(tuning: Tuning) -> dict[str, list[ConfigurationForecast]]:
    """The rows by line, by rising batch size; of many lines those whose best configuration is best,
    so that they can be told apart.
    """
    found: dict[tuple[int, int, int], list[ConfigurationForecast]] = {}
    for row in tuning.rows:
        found.setdefault(_line_of(row), []).append(row)
    kept = sorted(found, key=lambda key: min(map(tuning.objective.cost, found[key])))[:MOST_LINES]
    lines = {}
    for workers, threads, loader in sorted(kept):
        count = f"{threads} thread{'s' * (threads != 1)}, {workers} worker{'s' * (workers != 1)}"
        lines[f"{count}, loader {loader}"] = sorted(
            found[workers, threads, loader], key=lambda row: row.configuration.batch_size
        )
    return lines


def landscape_png(tuning: Tuning, dpi: int = 130) -> bytes:
    """Samples per second and memory over batch size; the proposed configuration and the limit of
    memory are marked, what does not fit is hollow.
    """
    with own_style():
        figure = new_figure(7.8, 6.4)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1.0])
        for place, (label, rows) in enumerate(lines_of(tuning).items()):
            color, mark = _COLORS[place % len(_COLORS)], _MARKS[place % len(_MARKS)]
            _line(above, rows, [row.samples_per_s for row in rows], color, mark, label)
            _line(below, rows, [row.peak_memory_bytes / MIB for row in rows], color, mark, None)
        best = tuning.best
        above.plot(
            [best.configuration.batch_size],
            [best.samples_per_s],
            "o",
            markersize=15,
            markerfacecolor="none",
            markeredgecolor=INK,
            label="proposed",
        )
        if tuning.trials is not None:
            done = [
                (one.configuration.batch_size, one.samples_per_s)
                for one in tuning.trials.trials
                if one.samples_per_s is not None
            ]
            if done:
                above.plot(*zip(*done), "x", color=INK, markersize=7, label="measured")
        if tuning.objective.memory_limit_bytes is not None:
            limit = tuning.objective.memory_limit_bytes
            below.axhline(limit / MIB, color=INK, linestyle="--", linewidth=1.0)
            below.annotate(
                f"limit {format_bytes(limit)}",
                (0.01, limit / MIB),
                xycoords=("axes fraction", "data"),
                va="bottom",
                color=DIM,
                fontsize=8,
            )
        sizes = sorted({row.configuration.batch_size for row in tuning.rows})
        for ax, title in ((above, "samples per second"), (below, "memory, MiB")):
            ax.set_xscale("log", base=2)
            ax.set_ylabel(title)
            ax.grid(axis="y", color=GRID)
        above.margins(y=0.12)
        above.set_ylim(bottom=0)
        below.set_yscale("log")
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        below.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if len(sizes) <= 12:
            below.set_xticks(sizes, [str(size) for size in sizes])
            below.xaxis.set_minor_locator(NullLocator())
        below.set_xlabel("batch size")
        above.set_title(f"{plain(tuning.target)}: predicted on {plain(tuning.machine)}")
        n_lines = len(set(map(_line_of, tuning.rows)))
        if n_lines > MOST_LINES:
            above.annotate(
                f"the best {MOST_LINES} of {n_lines} lines",
                (0.01, 0.98),
                xycoords="axes fraction",
                va="top",
                color=DIM,
                fontsize=8,
            )
        figure.legend(loc="outside lower center", ncols=2)
        return to_png(figure, dpi, f"dlperf tune: {tuning.target}")


def _line(
    ax: Any,
    rows: list[ConfigurationForecast],
    values: list[float],
    color: str,
    mark: str,
    label: str | None,
) -> None:
    sizes = [row.configuration.batch_size for row in rows]
    ax.plot(sizes, values, color=color, linewidth=1.1)
    ax.plot([], [], color=color, linewidth=1.1, label=label, marker=mark, markersize=5)
    for fits in (True, False):
        chosen = [
            place for place, row in enumerate(rows) if row.fits is fits and row.source == PREDICTED
        ]
        ax.plot(
            [sizes[place] for place in chosen],
            [values[place] for place in chosen],
            mark,
            color=color,
            markersize=5,
            markerfacecolor=color if fits else "white",
        )

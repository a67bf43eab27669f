"""Plots of explanations and tunings.

An explanation: parts of step and layers, predicted against measured gains. A tuning: throughput and
memory over batch size, a line for every number of threads, workers and loading workers.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from dlperf.advice.breakdown import LayerParts
from dlperf.advice.explanation import Explanation
from dlperf.advice.grid import PREDICTED, ConfigurationForecast
from dlperf.core.text import counted
from dlperf.core.units import MIB, format_bytes
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
    CYCLE,
    DIM,
    GREEN,
    GRID,
    INK,
    ORANGE,
    PREDICTOR_COLORS,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    circumstances,
    layer_name,
    new_figure,
    own_style,
    plain,
    seconds_axis,
    seconds_text,
    to_png,
)

if TYPE_CHECKING:
    from dlperf.advice.tuning import Tuning

MOST_LAYERS = 24
_LOOK = {
    "compute": (BLUE, ""),
    "L1": (SKY, ""),
    "L2": (SKY, "...."),
    "L3": (GREEN, ""),
    "DRAM": (ORANGE, ""),
    "overhead": ("#999999", ""),
    "page-faults": (VERMILLION, "////"),
    "network": (PURPLE, ""),
    "unpriced": ("#ffffff", "xxxx"),
    "optimizer": (YELLOW, "\\\\\\\\"),
}
MOST_LINES = 12
_MARKS = "osD^vPX*<>ph"
_COLORS = (*CYCLE, INK)


def pngs_of(explanation: Explanation, dpi: int = 130) -> dict[str, bytes]:
    """The plots by name, drawn."""
    with own_style():
        figures = {"breakdown": breakdown_figure(explanation)}
        if explanation.tried:
            figures["gains"] = gains_figure(explanation)
    target = explanation.prediction.trace.target
    return {
        name: to_png(figure, dpi, f"dlperf {name}: {target}") for name, figure in figures.items()
    }


def breakdown_figure(explanation: Explanation) -> Figure:
    """Stacked bars: the step in shares on top, below it the longest layers in seconds."""
    breakdown = explanation.breakdown
    longest = sorted(breakdown.layers, key=lambda row: -row.total_s)[:MOST_LAYERS]
    rows = [row for row in breakdown.layers if row in longest]
    n_left = len(breakdown.layers) - len(rows)
    figure = new_figure(8.6, 2.3 + 0.27 * len(rows))
    top, below = figure.subplots(2, 1, height_ratios=[1.0, max(1.0, 0.55 * len(rows))])
    _stack(
        top,
        [LayerParts("step", "", breakdown.parts_s)],
        scale=100 / breakdown.total_s if breakdown.total_s else 0.0,
    )
    title = f"{_title(explanation)}: predicted {seconds_text(breakdown.total_s)} a step"
    top.set(xlim=(0, 100), xlabel="% of the step", yticks=[], title=title)
    looks = [(part, *_LOOK[part]) for part, _ in breakdown.parts_s]
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=INK, linewidth=0.4)
        for _, color, hatch in looks
    ]
    labels = [f"{part} {100 * breakdown.share_frac(part):.0f} %" for part, _, _ in looks]
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    _stack(below, rows)
    # of a bar too short to be seen the number is left
    ends = below.barh(range(len(rows)), [row.total_s for row in rows], alpha=0.0)
    texts = [seconds_text(row.total_s) for row in rows]
    below.bar_label(ends, texts, padding=4, fontsize=7.5)
    below.margins(x=0.12)
    left_out = ""
    if n_left:
        is_are = "is" if n_left == 1 else "are"
        left_out = f" ({counted(n_left, 'shorter layer')} {is_are} left out)"
    below.set(xlim=(0, None), xlabel=f"time per step{left_out}")
    seconds_axis(below.xaxis)
    _name_rows(below, [layer_name(row.layer, row.type, 40) for row in rows])
    return figure


def _name_rows(ax: Any, names: list[str]) -> None:
    """Horizontal bars from top to bottom, with a name each."""
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID)


def _stack(ax: Any, rows: list[LayerParts], scale: float = 1.0) -> None:
    lefts = np.zeros(len(rows))
    for part, (color, hatch) in _LOOK.items():
        widths = scale * np.array([row.part_s(part) for row in rows])
        if widths.any():
            ax.barh(
                range(len(rows)),
                widths,
                left=lefts,
                color=color,
                hatch=hatch,
                edgecolor=INK,
                linewidth=0.4,
                height=0.72,
            )
            lefts = lefts + widths


def gains_figure(explanation: Explanation) -> Figure:
    """Predicted and measured gain of everything that was tried, with the run-to-run variation as a
    band.
    """
    tried = sorted(explanation.tried, key=lambda pair: -(pair[0].gain_frac or 0.0))
    predicted = np.array([suggestion.gain_frac for suggestion, _ in tried], float)
    measured = np.array([trial.gain_frac for _, trial in tried], float)
    rows = np.arange(len(tried))
    figure = new_figure(7.6, 1.5 + 0.5 * len(tried))
    ax = figure.subplots()
    ax.barh(
        rows - 0.2,
        100 * predicted,
        0.36,
        color=PREDICTOR_COLORS[0],
        edgecolor=INK,
        linewidth=0.4,
        label="predicted",
    )
    ax.barh(rows + 0.2, 100 * measured, 0.36, color=ACTUAL_COLOR, label="measured")
    for row, (_, trial) in enumerate(tried):
        gains = 100 * np.array(trial.gains_frac)
        ax.plot(gains, np.full(len(gains), row + 0.2), "|", color=PREDICTOR_COLORS[1], markersize=9)
    trials = explanation.trials
    if trials is not None and trials.repeatability_frac is not None:
        ax.axvspan(
            -100 * trials.repeatability_frac,
            100 * trials.repeatability_frac,
            color=GRID,
            alpha=0.6,
            zorder=0,
            label="repeatability",
        )
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set(xlabel="gain in samples per second, %", title=_title(explanation))
    _name_rows(ax, [plain(suggestion.variant.name, 40) for suggestion, _ in tried])
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _title(explanation: Explanation) -> str:
    trace = explanation.prediction.trace
    return circumstances(
        trace.target,
        trace.batch_size,
        explanation.prediction.threads,
        explanation.prediction.machine.cpu.model,
    )


# -- tuning ----------------------------------------------------------------------------------------


def lines_of(tuning: Tuning) -> dict[str, list[ConfigurationForecast]]:
    """The rows by line, by rising batch size, the lines by workers, threads and loading workers."""
    found: dict[str, list[ConfigurationForecast]] = defaultdict(list)
    for row in sorted(tuning.rows, key=lambda row: row.configuration):
        one = row.configuration
        threads, workers = counted(one.threads, "thread"), counted(one.workers, "worker")
        found[f"{threads}, {workers}, loader {one.loader_workers}"].append(row)
    return found


def landscape_png(tuning: Tuning) -> bytes:
    """Samples per second and memory over batch size; the proposed configuration and the limit of
    memory are marked, what does not fit is hollow.
    """
    with own_style():
        figure = new_figure(7.8, 6.4)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1.6, 1.0])
        lines = lines_of(tuning)
        # of many lines those whose best configuration is best, so that they can be distinguished
        best_lines = sorted(lines, key=lambda name: min(map(tuning.objective.cost, lines[name])))
        shown = [name for name in lines if name in best_lines[:MOST_LINES]]
        for label, color, mark in zip(shown, cycle(_COLORS), cycle(_MARKS)):
            rows = lines[label]
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
        above.set_xscale("log", base=2)  # of both, which share it
        above.grid(axis="y", color=GRID)
        below.grid(axis="y", color=GRID)
        above.margins(y=0.12)
        title = f"{plain(tuning.target)}: predicted on {plain(tuning.machine)}"
        above.set(ylim=(0, None), ylabel="samples per second", title=title)
        below.set(yscale="log", ylabel="memory, MiB", xlabel="batch size")
        below.yaxis.set_major_formatter("{x:g}")
        below.yaxis.set_minor_formatter("{x:g}")
        if len(sizes) <= 12:
            below.set_xticks(sizes, [str(size) for size in sizes])
            below.xaxis.set_minor_locator(NullLocator())
        if len(lines) > MOST_LINES:
            above.annotate(
                f"the best {MOST_LINES} of {len(lines)} lines",
                (0.01, 0.98),
                xycoords="axes fraction",
                va="top",
                color=DIM,
                fontsize=8,
            )
        figure.legend(loc="outside lower center", ncols=2)
        return to_png(figure, 130, f"dlperf tune: {tuning.target}")


def _line(
    ax: Any,
    rows: list[ConfigurationForecast],
    values: list[float],
    color: str,
    mark: str,
    label: str | None,
) -> None:
    sizes = np.array([row.configuration.batch_size for row in rows])
    heights = np.array(values)
    ax.plot(sizes, heights, color=color, linewidth=1.1)
    ax.plot([], [], color=color, linewidth=1.1, label=label, marker=mark, markersize=5)
    for fits in (True, False):
        chosen = [row.fits is fits and row.source == PREDICTED for row in rows]
        fill = color if fits else "white"
        ax.plot(
            sizes[chosen], heights[chosen], mark, color=color, markersize=5, markerfacecolor=fill
        )

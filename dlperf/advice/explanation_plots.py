"""Plots of an explanation: parts of step and layers, predicted against measured gains."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlperf.advice.breakdown import LayerParts
from dlperf.advice.explanation import Explanation
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
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
    new_figure,
    own_style,
    plain,
    seconds_axis,
    seconds_text,
    to_png,
)

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
    dear = sorted(breakdown.layers, key=lambda row: -row.total_s)[:MOST_LAYERS]
    rows = [row for row in breakdown.layers if row in dear]
    n_left = len(breakdown.layers) - len(rows)
    figure = new_figure(8.6, 2.3 + 0.27 * len(rows))
    top, below = figure.subplots(2, 1, height_ratios=[1.0, max(1.0, 0.55 * len(rows))])
    _stack(
        top,
        [LayerParts("step", "", breakdown.parts_s)],
        scale=100 / breakdown.total_s if breakdown.total_s else 0.0,
    )
    top.set_xlim(0, 100)
    top.set_xlabel("% of the step")
    top.set_yticks([])
    top.set_title(f"{_title(explanation)}: predicted {seconds_text(breakdown.total_s)} a step")
    looks = [(part, *_LOOK[part]) for part, _ in breakdown.parts_s]
    handles = [
        Patch(facecolor=color, hatch=hatch, edgecolor=INK, linewidth=0.4)
        for _, color, hatch in looks
    ]
    labels = [f"{part} {100 * breakdown.share_frac(part):.0f} %" for part, _, _ in looks]
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    _stack(below, rows)
    below.set_yticks(range(len(rows)), [plain(row.layer, 32) for row in rows])
    # of a bar too short to be seen the number is left
    ends = below.barh(range(len(rows)), [row.total_s for row in rows], alpha=0.0)
    texts = [seconds_text(row.total_s) for row in rows]
    below.bar_label(ends, texts, padding=4, fontsize=7.5)
    below.margins(x=0.12)
    below.set_xlim(left=0)
    below.invert_yaxis()
    below.tick_params(axis="y", length=0)
    seconds_axis(below.xaxis)
    below.grid(axis="x", color=GRID)
    below.set_xlabel(
        "time per step" + (f" ({n_left} shorter layers are left out)" if n_left else "")
    )
    return figure


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
            label="repeatability floor",
        )
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_yticks(rows, [plain(s.variant.name, 40) for s, _ in tried])
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color=GRID)
    ax.set_xlabel("gain in samples per second, %")
    figure.legend(loc="outside lower center", ncols=3)
    ax.set_title(_title(explanation))
    return figure


def _title(explanation: Explanation) -> str:
    trace = explanation.prediction.trace
    return circumstances(
        trace.target,
        trace.batch_size,
        explanation.prediction.threads,
        explanation.prediction.machine.cpu.model,
    )

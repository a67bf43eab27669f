"""A scaling forecast's plots: the step and the efficiency over ranks, what of the sending shows,
and the Ridgeline plane.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dlperf.distributed.scaling import Scaling
from dlperf.models.ridgeline import Rates
from dlperf.report.drawing import (
    BLUE,
    DIM,
    GREEN,
    GRID,
    INK,
    ORANGE,
    YELLOW,
    new_figure,
    own_style,
    plain,
    seconds_axis,
    to_png,
)
from dlperf.report.ridgeline import PlanePoint, ridgeline_figure

COMPUTE, EXPOSED, HIDDEN, EFFICIENCY = BLUE, ORANGE, YELLOW, GREEN
_MOST_TICKS = 16


def pngs_of(found: Scaling, dpi: int = 130) -> dict[str, bytes]:
    """The plots by name, drawn."""
    with own_style():
        figures = {"step": step_figure(found), "communication": communication_figure(found)}
        if found.rates is not None:
            figures["ridgeline"] = plane_figure(found, found.rates)
    return {
        name: to_png(figure, dpi, f"dlperf scale {name}: {found.target}")
        for name, figure in figures.items()
    }


def step_figure(found: Scaling) -> Figure:
    """Above the step with its interval and the step without synchronisation, below efficiency, both
    over ranks.
    """
    rows = sorted(found.rows, key=lambda row: row.ranks)
    ranks = [row.ranks for row in rows]
    figure = new_figure(7.6, 5.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    low, high = [row.low_s for row in rows], [row.high_s for row in rows]
    top.fill_between(
        ranks, low, high, color=COMPUTE, alpha=0.15, linewidth=0, label="90 % interval of the step"
    )
    top.plot(ranks, [row.step_s for row in rows], color=COMPUTE, marker="o", label="step")
    top.plot(
        ranks,
        [row.compute_s for row in rows],
        color=EXPOSED,
        marker="s",
        linestyle="--",
        label="without synchronisation",
    )
    if found.scaling == "strong":
        top.set_yscale("log")
    else:
        top.set_ylim(bottom=0)
    seconds_axis(top.yaxis)
    top.set_ylabel("step")
    top.grid(axis="y", color=GRID)
    top.legend(loc="best")
    top.set_title(_title(found))
    below.plot(ranks, [row.efficiency for row in rows], color=EFFICIENCY, marker="o")
    below.axhline(1.0, color=DIM, linewidth=0.8, linestyle=":")
    below.set_ylim(0, max(1.05, 1.05 * max(row.efficiency for row in rows)))
    below.yaxis.set_major_formatter(PercentFormatter(1.0))
    below.set_ylabel("efficiency")
    below.grid(axis="y", color=GRID)
    _ranks_axis(below, ranks)
    return figure


def communication_figure(found: Scaling) -> Figure:
    """Stacked bars over ranks in shares of the step: computing with what is sent behind it, and the
    sending that shows.
    """
    rows = sorted(found.rows, key=lambda row: row.ranks)
    places = list(range(len(rows)))
    figure = new_figure(7.6, 3.6)
    ax = figure.subplots()
    hidden = [
        max(0.0, min(row.communication_s - row.exposed_communication_s, row.compute_s)) / row.step_s
        for row in rows
    ]
    shown = [row.exposed_communication_s / row.step_s for row in rows]
    quiet = [1 - a - b for a, b in zip(hidden, shown)]
    style: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.4}
    ax.bar(places, quiet, color=COMPUTE, label="computing, nothing sent", **style)
    ax.bar(
        places,
        hidden,
        bottom=quiet,
        color=HIDDEN,
        hatch="....",
        label="computing while sending",
        **style,
    )
    ax.bar(
        places,
        shown,
        bottom=[a + b for a, b in zip(quiet, hidden)],
        color=EXPOSED,
        hatch="////",
        label="exposed communication",
        **style,
    )
    ax.set_xticks(places, [str(row.ranks) for row in rows])
    ax.set_xlabel("ranks")
    ax.set_ylim(0, 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set_ylabel("share of the step")
    ax.set_title(_title(found))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def plane_figure(found: Scaling, rates: Rates) -> Figure:
    """The rows that send something on the Ridgeline plane, under the rates of the largest number of
    ranks, each labelled with its number.
    """
    rows = sorted(found.rows, key=lambda row: row.ranks)
    points = [
        PlanePoint(
            row.memory_intensity, row.arithmetic_intensity or 0.0, f"{row.ranks} ranks", "ranks"
        )
        for row in rows
        if row.memory_intensity
    ]
    return ridgeline_figure(points, rates, _title(found))


def _ranks_axis(ax: Any, ranks: list[int]) -> None:
    if len(ranks) > 1 and ranks[-1] / ranks[0] >= 4:
        ax.set_xscale("log", base=2)
    step = -(-len(ranks) // _MOST_TICKS)
    ax.set_xticks(ranks[::step], [str(n) for n in ranks[::step]])
    ax.minorticks_off()
    ax.set_xlabel("ranks")


def _title(found: Scaling) -> str:
    per = "per rank" if found.scaling == "weak" else "in all"
    changed = "".join(f", {name} x {factor:g}" for name, factor in found.what_if.items())
    return (
        f"{plain(found.target)}: {found.scaling} scaling, batch {found.batch_size} {per}{changed}"
    )

"""Plots of a scaling forecast (step and efficiency over ranks, exposed communication, the Ridgeline
plane) and of a communication replay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from dlperf.distributed.scaling import CommunicationReplay, Scaling
from dlperf.report.drawing import (
    BLUE,
    DIM,
    GREEN,
    GRID,
    INK,
    ORANGE,
    YELLOW,
    new_figure,
    plain,
    seconds_axis,
    to_pngs,
)
from dlperf.report.ridgeline import PlanePoint, ridgeline_figure

COMPUTE, EXPOSED, HIDDEN, EFFICIENCY = BLUE, ORANGE, YELLOW, GREEN
_MOST_TICKS = 16
_MOST_RANKS = 16
WAITING = "#8a8f98"


def pngs_of(found: Scaling | CommunicationReplay, dpi: int = 130) -> dict[str, bytes]:
    """The plots by file name, drawn."""
    draw: dict[str, Callable[[], Figure | None]]
    if isinstance(found, CommunicationReplay):
        draw = {"replay": partial(replay_figure, found)}
    else:
        draw = {
            "step": partial(step_figure, found),
            "communication": partial(communication_figure, found),
            "ridgeline": partial(plane_figure, found),
        }
    return to_pngs(draw, f"dlperf scale: {found.target}", dpi)


def step_figure(found: Scaling) -> Figure:
    """Above the step with its interval and the step without synchronisation, below efficiency, both
    over ranks.
    """
    frame = _frame(found)
    ranks = frame["ranks"]
    figure = new_figure(7.6, 5.4)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    interval = {"alpha": 0.15, "linewidth": 0, "label": "90 % interval of the step"}
    top.fill_between(ranks, frame["low_s"], frame["high_s"], color=COMPUTE, **interval)
    top.plot(ranks, frame["step_s"], color=COMPUTE, marker="o", label="step")
    alone = {"marker": "s", "linestyle": "--", "label": "without synchronisation"}
    top.plot(ranks, frame["compute_s"], color=EXPOSED, **alone)
    if found.scaling == "strong":
        top.set_yscale("log")
    else:
        top.set_ylim(bottom=0)
    seconds_axis(top.yaxis)
    top.set(ylabel="step", title=_title(found))
    top.legend(loc="best")
    below.plot(ranks, frame["efficiency"], color=EFFICIENCY, marker="o")
    below.axhline(1.0, color=DIM, linewidth=0.8, linestyle=":")
    below.set(ylim=(0, max(1.05, 1.05 * frame["efficiency"].max())), ylabel="efficiency")
    below.yaxis.set_major_formatter(PercentFormatter(1.0))
    for ax in (top, below):
        ax.grid(axis="y", color=GRID)
    if ranks.max() / ranks.min() >= 4:
        below.set_xscale("log", base=2)
    ticks = ranks[:: -(-len(ranks) // _MOST_TICKS)]
    below.set_xticks(ticks, ticks.astype(str))
    below.minorticks_off()
    below.set_xlabel("ranks")
    return figure


def communication_figure(found: Scaling) -> Figure:
    """Stacked bars over ranks in shares of the step: computing with what is sent behind it, and the
    sending that shows.
    """
    frame = _frame(found)
    figure = new_figure(7.6, 3.6)
    ax = figure.subplots()
    exposed_s = frame["exposed_communication_s"]
    behind_s = (frame["communication_s"] - exposed_s).clip(0, frame["compute_s"])
    hidden, shown = behind_s / frame["step_s"], exposed_s / frame["step_s"]
    bottom = 0.0 * shown
    for height, color, hatch, label in (
        (1 - hidden - shown, COMPUTE, "", "computing, nothing sent"),
        (hidden, HIDDEN, "....", "computing while sending"),
        (shown, EXPOSED, "////", "exposed communication"),
    ):
        ax.bar(
            frame.index,
            height,
            bottom=bottom,
            color=color,
            hatch=hatch,
            label=label,
            edgecolor=INK,
            linewidth=0.4,
        )
        bottom = bottom + height
    ax.set_xticks(frame.index, frame["ranks"].astype(str))
    ax.set(xlabel="ranks", ylim=(0, 1), ylabel="share of the step", title=_title(found))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _frame(found: Scaling) -> pd.DataFrame:
    """The rows by rising number of ranks."""
    frame = pd.DataFrame([asdict(row) for row in found.rows])
    return frame.sort_values("ranks", ignore_index=True)


def plane_figure(found: Scaling) -> Figure | None:
    """The rows that send something on the Ridgeline plane, under the rates of the largest number of
    ranks, each labelled with its number; None without rates.
    """
    if found.rates is None:
        return None
    points = [
        PlanePoint(
            row.memory_intensity, row.arithmetic_intensity or 0.0, f"{row.ranks} ranks", "ranks"
        )
        for row in sorted(found.rows, key=lambda row: row.ranks)
        if row.memory_intensity
    ]
    return ridgeline_figure(points, found.rates, _title(found))


def _title(found: Scaling) -> str:
    per = "per rank" if found.scaling == "weak" else "in all"
    changed = "".join(f", {name} x {factor:g}" for name, factor in found.what_if.items())
    return (
        f"{plain(found.target)}: {found.scaling} scaling, batch {found.batch_size} {per}{changed}"
    )


def replay_figure(found: CommunicationReplay) -> Figure:
    """Two bars per rank, recorded and replayed (overhead included): computing, waiting for slower
    ranks, exposed communication.
    """
    shown = found.ranks[:_MOST_RANKS]
    figure = new_figure(max(5.0, 2.2 + 1.3 * len(shown)), 4.4)
    ax = figure.subplots()
    style = {"edgecolor": INK, "linewidth": 0.4, "width": 0.36}
    kinds = (
        ("computing", "compute_s", COMPUTE, ""),
        ("waiting for slower ranks", "waiting_s", WAITING, "...."),
        ("exposed communication", "exposed_communication_s", EXPOSED, "////"),
    )
    for group, shift in (("recorded", -0.2), ("replayed", 0.2)):
        bottoms = [0.0] * len(shown)
        for title, name, color, hatch in kinds:
            heights = [max(0.0, getattr(getattr(one, group), name)) for one in shown]
            label = title if group == "recorded" else None
            ax.bar(
                [one.rank + shift for one in shown],
                heights,
                bottom=bottoms,
                color=color,
                hatch=hatch,
                label=label,
                **style,  # type: ignore[arg-type]
            )
            bottoms = [a + b for a, b in zip(bottoms, heights)]
        if group == "replayed" and found.overhead_s > 0:
            ax.bar(
                [one.rank + shift for one in shown],
                [found.overhead_s] * len(shown),
                bottom=bottoms,
                color="white",
                label="constant overhead",
                **style,  # type: ignore[arg-type]
            )
    ax.set_xticks(
        [one.rank + shift for one in shown for shift in (-0.2, 0.2)],
        ["recorded", "replayed"] * len(shown),
        fontsize=7.5,
        color=DIM,
    )
    for one in shown:
        ax.annotate(
            f"rank {one.rank}",
            (one.rank, 0),
            (0, -22),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha="center",
            va="top",
        )
    cluster = plain(Path(found.cluster).name or "another cluster", 40)
    seconds_axis(ax.yaxis)
    ax.set(
        ylabel="step",
        title=f"{plain(found.target, 60)} on {cluster}",
    )
    figure.legend(loc="outside lower center", ncols=2)
    return figure

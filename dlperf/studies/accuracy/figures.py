"""Plots of the study: predicted against measured steps, errors by case with their repeatability,
scatter of layers and single ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import matplotlib.ticker
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dlperf.core.text import counted
from dlperf.report.drawing import (
    DIM,
    INK,
    PHASE_COLORS,
    PREDICTOR_COLORS,
    label_points,
    new_figure,
    plain,
    seconds_axis,
    to_pngs,
)
from dlperf.report.drawing import PointLabel as Label
from dlperf.studies.accuracy.cases import CaseScore
from dlperf.studies.accuracy.scoring import large_leaves
from dlperf.studies.accuracy.study import MAIN, Study

CAPTIONS = {
    "steps": (
        "Predicted against measured step of every case, with the 90 % interval; the lines are 10"
        " and 20 % off."
    ),
    "cases": (
        "Error of every case with its 90 % interval; the grey bar is the repeatability,"
        " within which two measurements of the same step differ."
    ),
    "layers": (
        "Error of every layer of at least 1 % of its phase, by the source of its price and by its"
        " type: middle half, median, 5th to 95th percentile."
    ),
    "ops": (
        "Error of held-out single ops by kind: middle half, median, 5th to 95th percentile; each"
        " point is an op."
    ),
}
_MARKS = ("o", "s", "^", "D")
_LIMIT = 1.0
"""Errors beyond 100 % are drawn at the edge."""


def pngs_of(study: Study) -> dict[str, bytes]:
    """The plots as PNG by file name; one without anything to draw is left out."""
    makers = {
        "steps": steps_figure,
        "cases": cases_figure,
        "layers": layers_figure,
        "ops": ops_figure,
    }
    p = study.provenance
    draw = {name: partial(make, study) for name, make in makers.items()}
    return to_pngs(draw, f"dlperf validate; {p.machine}; {p.created}; {p.command}")


def _whole(study: Study, predictor: str = MAIN) -> list[CaseScore]:
    own = [
        score
        for score in study.own_scores
        if score.predicted_s is not None and score.step_error_frac is not None
    ]
    return [score for score in own if score.predictor == predictor] or own


def _where(study: Study, threads: Iterable[int]) -> str:
    """The circumstances that a plot's marks do not name."""
    counts = sorted(set(threads))
    return (
        f"{', '.join(map(str, counts))} thread{'s' * (counts != [1])}, on"
        f" {plain(study.provenance.machine, 70)}"
    )


def steps_figure(study: Study) -> Figure | None:
    """Predicted against measured step, log-log, one mark a case, threads by mark and colour."""
    scores = _whole(study)
    if not scores:
        return None
    figure = new_figure(7.4, 6.4)
    ax = figure.subplots()
    counts = sorted({score.case.threads for score in scores})
    for number, threads in enumerate(counts):
        own = [score for score in scores if score.case.threads == threads]
        x, y = [s.actual_s for s in own], [s.predicted_s or 0.0 for s in own]
        color, mark = list(PHASE_COLORS.values())[number % 3], _MARKS[number % len(_MARKS)]
        bars = [
            [max(0.0, p - (s.low_s if s.low_s is not None else p)) for s, p in zip(own, y)],
            [max(0.0, (s.high_s or p) - p) for s, p in zip(own, y)],
        ]
        label = f"{threads} thread{'s' if threads > 1 else ''}"
        ax.errorbar(
            x,
            y,
            yerr=bars,
            fmt=mark,
            color=color,
            ecolor=color,
            elinewidth=0.9,
            markeredgecolor=INK,
            markeredgewidth=0.6,
            markersize=6,
            label=label,
        )
    ends = [value for s in scores for value in (s.actual_s, s.predicted_s or 0.0) if value > 0]
    low, high = min(ends) / 1.8, max(ends) * 1.8
    for off, style in ((0.1, "--"), (0.2, ":")):
        for factor in (1 - off, 1 + off):
            ax.plot(
                [low, high],
                [factor * low, factor * high],
                color=DIM,
                linewidth=0.8,
                linestyle=style,
                label=f"{off:.0%} off" if factor > 1 else None,
            )
    ax.plot([low, high], [low, high], color=DIM, linewidth=1, label="predicted = measured")
    ax.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="measured step",
        ylabel="predicted step",
    )
    for axis in (ax.xaxis, ax.yaxis):
        seconds_axis(axis)
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        if high / low < 100:
            axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.grid(True)
    ax.set_title(
        f"{counted(len(scores), 'case')}, {plain(scores[0].predictor)}, on"
        f" {plain(study.provenance.machine)}"
    )
    figure.legend(loc="outside right upper")
    off_most = sorted(
        (s for s in scores if abs(s.step_error_frac or 0.0) > 0.1),
        key=lambda s: -abs(s.step_error_frac or 0.0),
    )[:8]
    labels = [
        Label(
            s.actual_s,
            s.predicted_s or 0.0,
            plain(s.case.label, 28),
            left_first=(s.step_error_frac or 0.0) > 0,
        )
        for s in off_most
    ]
    label_points(ax, labels, [(s.actual_s, s.predicted_s or 0.0) for s in scores], size=7.5)
    return figure


def cases_figure(study: Study) -> Figure | None:
    """One line a case: the repeatability as a grey bar around 0, each predictor's error as a mark,
    the main predictor's interval as a line.
    """
    spoken = [score for score in study.scores if score.step_error_frac is not None]
    if not spoken:
        return None
    labels = list(dict.fromkeys(score.case.label for score in spoken))
    names = list(dict.fromkeys(score.predictor for score in spoken))
    figure = new_figure(9.0, 1.6 + 0.24 * len(labels))
    ax = figure.subplots()
    index = {label: y for y, label in enumerate(labels)}
    for score in {score.case.label: score for score in spoken}.values():
        repeatability_frac = score.repeatability_frac or 0.0
        ax.barh(
            index[score.case.label],
            2 * repeatability_frac,
            0.8,
            left=-repeatability_frac,
            color="#cfd5db",
            linewidth=0,
            zorder=1,
        )
    for number, name in enumerate(names):
        own = [score for score in spoken if score.predictor == name]
        x = [max(-_LIMIT, min(_LIMIT, score.step_error_frac or 0.0)) for score in own]
        y = [index[score.case.label] for score in own]
        main = number == 0
        color = (
            PHASE_COLORS["forward"]
            if main
            else PREDICTOR_COLORS[(number - 1) % len(PREDICTOR_COLORS)]
        )
        ax.plot(
            x,
            y,
            linestyle="",
            marker=_MARKS[number % 4],
            color=color,
            markeredgecolor=INK,
            markeredgewidth=0.5,
            markersize=6 if main else 4.5,
            zorder=4 if main else 3,
            label=plain(name),
        )
        if main:
            for score in own:
                if score.low_s is not None and score.high_s is not None:
                    ends = [
                        max(-_LIMIT, min(_LIMIT, value / score.actual_s - 1))
                        for value in (score.low_s, score.high_s)
                    ]
                    ax.plot(
                        ends, [index[score.case.label]] * 2, color=color, linewidth=1.1, zorder=2
                    )
    _error_axes(ax, [plain(label, 42) for label in labels], "predicted / measured step - 1")
    steps = counted(len(labels), "step")
    ax.set_title(
        f"{steps} (network@batch size, t:"
        f" threads)\n{_where(study, [score.case.threads for score in spoken])}",
        fontsize=10,
    )
    handles, _ = ax.get_legend_handles_labels()
    figure.legend(
        handles=[*handles, Patch(facecolor="#cfd5db", label="repeatability")],
        loc="outside lower center",
        ncols=4,
    )
    return figure


def layers_figure(study: Study) -> Figure | None:
    """Boxes of the main predictor's layer errors by source and by type, forward and backward."""
    leaves = large_leaves(study.layers)
    main = leaves[leaves.predictor == MAIN]
    layers = main if len(main) else leaves
    if not len(layers):
        return None
    rows = [
        (f"{name}, {phase}", own.error_frac, PHASE_COLORS[phase])
        for kind, least in (("source", 1), ("family", 3))
        for (name, phase), own in sorted(
            layers.groupby([kind, "phase"]),
            key=lambda group: (group[0][0], group[0][1] != "forward"),
        )
        if len(own) >= least
    ]
    figure = new_figure(8.4, 1.6 + 0.26 * max(1, len(rows)))
    _boxes(figure.subplots(), rows, "predicted / measured time of a layer - 1")
    title = (
        f"{len(layers)} layers of at least 1 % of their phase; first by source, then by type (three"
        " or more)"
    )
    figure.suptitle(f"{title}\n{_where(study, layers.threads)}", fontsize=10)
    return figure


def ops_figure(study: Study) -> Figure | None:
    """Boxes of the single ops' errors by kind."""
    if not len(study.ops):
        return None
    colors = dict(zip(study.ops.family.unique(), itertools.cycle(PHASE_COLORS.values())))
    rows = [
        (f"{family}: {kind}", own.error_frac, colors[family])
        for (family, kind), own in sorted(
            study.ops.groupby(["family", "kind"], sort=False),
            key=lambda group: list(colors).index(group[0][0]),
        )
    ]
    figure = new_figure(8.4, 1.4 + 0.26 * len(rows))
    _boxes(figure.subplots(), rows, "predicted / measured time of an op - 1")
    title = f"{len(study.ops)} random ops that no calibration sampled"
    figure.suptitle(f"{title}\n{_where(study, study.ops.threads)}", fontsize=10)
    return figure


def _boxes(ax: Any, rows: Sequence[tuple[str, pd.Series[float], str]], label: str) -> None:
    for index, (_, errors, color) in enumerate(rows):
        _box(ax, errors.clip(-_LIMIT, _LIMIT), index, color)
    names = [f"{plain(name, 40)} ({len(errors)})" for name, errors, _ in rows]
    _error_axes(ax, names, label)


def _error_axes(ax: Any, names: Sequence[str], label: str) -> None:
    """Lines of named rows, the first at the top, over relative errors."""
    ax.axvline(0, color=DIM, linewidth=0.8)
    for off in (-0.2, -0.1, 0.1, 0.2):
        ax.axvline(off, color=DIM, linewidth=0.6, linestyle=":" if abs(off) > 0.15 else "--")
    ax.set_yticks(range(len(names)), names, fontsize=7.5)
    ax.set(ylim=(len(names) - 0.4, -0.6), xlim=(-1.05 * _LIMIT, 1.05 * _LIMIT), xlabel=label)
    ax.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    ax.tick_params(axis="y", length=0)


def _box(ax: Any, values: pd.Series[float], place: int, color: str) -> None:
    """Middle half, median and 5th to 95th percentile, with every point behind (matplotlib's own
    boxes are turned by an option that changed its name).
    """
    low, first, middle, third, high = np.quantile(values, (0.05, 0.25, 0.5, 0.75, 0.95))
    ax.plot(
        values,
        [place] * len(values),
        linestyle="",
        marker="|",
        color=color,
        alpha=0.35,
        markersize=9,
        zorder=1,
    )
    ax.plot([low, high], [place, place], color=color, linewidth=1.0, zorder=2)
    ax.barh(
        place,
        third - first,
        0.5,
        left=first,
        color=color,
        alpha=0.45,
        edgecolor=INK,
        linewidth=0.6,
        zorder=3,
    )
    ax.plot([middle, middle], [place - 0.25, place + 0.25], color=INK, linewidth=1.6, zorder=4)

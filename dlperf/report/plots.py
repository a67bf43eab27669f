"""The plots of a report: bars per layer, predicted against measured, where the step's time goes;
the rooflines are modules of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dlperf.core.text import counted
from dlperf.core.units import format_percent
from dlperf.forecast.prediction import Prediction
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    CYCLE,
    DIM,
    GRID,
    INK,
    PHASE_COLORS,
    PHASE_MARKS,
    PREDICTOR_COLORS,
    PREDICTOR_HATCHES,
    YELLOW,
    PointLabel,
    circumstances,
    empty,
    label_points,
    layer_name,
    log_seconds_axis,
    new_figure,
    own_style,
    plain,
    seconds_axis,
    seconds_text,
    spans_decades,
    to_png,
)
from dlperf.report.layer_comparison import PHASES, Times, phases_of
from dlperf.report.roofline import hierarchy_figure, roofline_figure
from dlperf.report.step_comparison import StepComparison

__all__ = ["CAPTIONS", "figures_of", "layers_figure", "pngs_of", "scatter_figure", "time_figure"]

MAX_LAYERS = 25
"""Layers that the bars show; of larger networks the ones that take longest."""

MAX_NAMES = 8
"""Marks of the scatter plot that are named: those that are most seconds off."""

_NOTHING = Times(0.0, has_work=False)
_BAND = "#e4e8ec"
_KIND_HATCHES = ("", "///", "", "...", "", "xxx", "", "\\\\\\")

CAPTIONS = {
    "layers": "Predicted and measured time of each layer, one panel per phase.",
    "scatter": (
        "Predicted against measured time, one mark per layer and phase; on the line they are equal,"
        " in the band within 20 %. The marks outside the band that are most seconds off have names."
    ),
    "roofline": (
        "Rate that each layer reached at its operational intensity (FLOP per byte of its operands),"
        " under the measured peak of matrix multiplication and the measured bandwidth of every"
        " level of the memory."
    ),
    "hierarchy": (
        "Hierarchical roofline (Yang, Kurth, Williams 2019): every layer at the rate it reached,"
        " once per level of the memory at its FLOP per byte moved there. Gaps between its dots are"
        " reuse in the caches; a level without a dot moves nothing. Roofs are measured, bytes"
        " modelled."
    ),
    "time": (
        "Where the time of the step goes: each phase by what it is spent on and what bounds it,"
        " beside the measured phase."
    ),
}


def figures_of(report: StepComparison) -> dict[str, Figure]:
    """The plots by name, in the order of reading. The rooflines are left out where the machine file
    contains no bandwidth or no matrix multiplication.
    """
    with own_style():
        figures = {
            "layers": layers_figure(report),
            "scatter": scatter_figure(report),
            "roofline": roofline_figure(report),
            "hierarchy": hierarchy_figure(report),
            "time": time_figure(report),
        }
    return {name: figure for name, figure in figures.items() if figure is not None}


def pngs_of(report: StepComparison, dpi: int = 130) -> dict[str, bytes]:
    """The plots by name, drawn; where they come from is written into each file."""
    what = (
        f"{report.target}, batch size {report.batch_size}, on {report.machine};"
        f" {'; '.join(report.provenance)}"
    )
    return {
        name: to_png(figure, dpi, f"dlperf {name}: {what}")
        for name, figure in figures_of(report).items()
    }


def layers_figure(report: StepComparison) -> Figure:
    """Bars per layer, predicted and measured, one panel per phase; an unknown time of a layer with
    work is remarked on, unless the predictor does not support the phase.
    """
    phases = phases_of(report.inference)
    names, left_out, left_frac = _largest_layers(report)
    by_predictor = [{row.layer: row for row in rows} for rows in report.rows]
    n_bars = 1 + len(by_predictor)
    height = 1.4 + max(0.8, len(names) * max(0.3, 0.12 * n_bars + 0.08))
    figure = new_figure(4.6 + 2.9 * len(phases), height, gap_frac=0.06)
    axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for ax, phase in zip(axes, phases):
        silent = [
            label
            for label, p in zip(report.predictors, report.predictions)
            if phase not in p.prices.phases
        ]
        who = f"\n(not predicted by {plain(', '.join(silent), 40)})" if silent else ""
        ax.set_title(phase + who)
        ax.tick_params(axis="y", length=0)
        values = []
        for index, name in enumerate(names):
            times = [
                rows[name].phase(phase) or _NOTHING if name in rows else _NOTHING
                for rows in by_predictor
            ]
            bars = [
                (t.predicted_s, t.has_work and label not in silent, _style(i), "not predicted")
                for i, (t, label) in enumerate(zip(times, report.predictors))
            ]
            actual_s = next((t.actual_s for t in times if t.actual_s is not None), None)
            has_work = any(t.has_work for t in times)
            bars.append((actual_s, has_work, {"color": ACTUAL_COLOR}, "not measured"))
            for i, (seconds, is_gap, style, remark) in enumerate(bars):
                y = index - 0.4 + 0.8 * (i + 0.5) / n_bars
                if seconds:
                    ax.barh(y, seconds, 0.8 / n_bars, **style)
                    values.append(seconds)
                elif seconds is None and is_gap:
                    _annotate(ax, 0, y, remark, DIM, 6, xycoords=ax.get_yaxis_transform())
        _layers_axis(ax, values)
    kinds = {row.layer: row.type for rows in by_predictor for row in rows.values()}
    axes[0].set_yticks(
        range(len(names)),
        [layer_name(name, kinds[name], 42) for name in names],
    )
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    handles = [
        Patch(label=f"predicted, {plain(label)}", **_style(i))
        for i, label in enumerate(report.predictors)
    ]
    handles.append(Patch(facecolor=ACTUAL_COLOR, label="measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    title = _circumstances(report)
    if left_out:
        title += (
            f"\nthe {len(names)} longest of {len(names) + left_out} layers ({left_out} left out,"
            f" with {format_percent(left_frac)} of the time)"
        )
    figure.suptitle(title, fontsize=10.5)
    return figure


def _layers_axis(ax: Any, values: Sequence[float]) -> None:
    """The axis of the layers' times, logarithmic where one would flatten the others."""
    if not values:
        empty(ax, "no time known")
        ax.set_xticks([])
        return
    if spans_decades(values):
        x_limits = max(min(values), 1e-4 * max(values)) / 2, 1.3 * max(values)
        ax.set(xlabel="time per step (logarithmic)", xscale="log", xlim=x_limits)
        log_seconds_axis(ax.xaxis)
    else:
        ax.set(xlabel="time per step", xlim=(0, 1.04 * max(ax.get_xlim()[1], 1e-9)))
        ax.xaxis.set_major_locator(MaxNLocator(4, min_n_ticks=2))
        seconds_axis(ax.xaxis)
    ax.grid(axis="x")


def _circumstances(report: StepComparison) -> str:
    threads = report.measurement.threads
    return circumstances(report.target, report.batch_size, threads, report.machine)


def _annotate(
    ax: Any, x: float, y: float, text: str, color: str = INK, size: float = 7.5, **where: Any
) -> None:
    """A text right of a bar's end."""
    style: dict[str, Any] = {
        "va": "center",
        "fontsize": size,
        "color": color,
        "textcoords": "offset points",
    }
    ax.annotate(text, (x, y), xytext=(3 if where else 4, 0), **style, **where)


def _largest_layers(report: StepComparison) -> tuple[list[str], int, float]:
    """(layers to show in the order of execution, how many are left out, their share of the time)"""
    seconds: dict[str, float] = {}
    for row in (row for rows in report.rows for row in rows):
        total = row.total
        own_s = total.predicted_s or 0.0 if total.actual_s is None else total.actual_s
        seconds[row.layer] = max(seconds.get(row.layer, 0.0), own_s)
    keep = set(sorted(seconds, key=lambda name: -seconds[name])[:MAX_LAYERS])
    left_s = sum(value for name, value in seconds.items() if name not in keep)
    names = [name for name in seconds if name in keep]
    return names, len(seconds) - len(keep), left_s / (sum(seconds.values()) or 1.0)


def scatter_figure(report: StepComparison) -> Figure:
    """Predicted against measured time of layers and phases, log-log, with y = x and the band of 20
    %.
    """
    figure = new_figure(7.2, 6.2)
    ax = figure.subplots()
    known = [
        (times, phase, number, layer_name(row.layer, row.type, 26))
        for number, rows in enumerate(report.rows)
        for row in rows
        for phase in phases_of(report.inference)
        if (times := row.phase(phase)) and None not in (times.actual_s, times.predicted_s)
    ]
    points = [
        (t.actual_s, t.predicted_s, phase, number, layer)
        for t, phase, number, layer in known
        if t.actual_s and t.predicted_s
    ]
    n_zero = sum(t.has_work and not (t.actual_s and t.predicted_s) for t, *_ in known)
    zeros = f"\n({counted(n_zero, 'layer')} at 0 s on one side cannot be drawn)" if n_zero else ""
    ax.set(
        xlabel="measured time per step",
        ylabel="predicted time per step",
        title=_circumstances(report) + zeros,
    )
    if not points:
        empty(ax, "no layer is known on both sides")
        ax.set(xticks=[], yticks=[])
        return figure
    several = len(report.predictors) > 1
    mark: dict[str, Any] = {"markeredgecolor": INK, "linestyle": ""}
    for x, y, phase, number, _ in points:
        ax.plot(
            x,
            y,
            marker=PHASE_MARKS[phase],
            color=_color(number) if several else PHASE_COLORS[phase],
            markeredgewidth=0.7,
            markersize=6.5,
            alpha=0.9,
            **mark,
        )
    measured, every = [x for x, *_ in points], [time for x, y, *_ in points for time in (x, y)]
    ends = np.array([min(measured) / 1.8, max(measured) * 1.8])
    ax.fill_between(ends, 0.8 * ends, 1.2 * ends, color=_BAND, linewidth=0, zorder=0)
    ax.plot(ends, ends, color=DIM, linewidth=1, zorder=1)
    # The line crosses the whole plot; predictions alone reach further than the measured times.
    y_limits = min(every) / 1.8, max(every) * 1.8
    ax.set(xscale="log", yscale="log", xlim=tuple(ends), ylim=y_limits)
    for axis in (ax.xaxis, ax.yaxis):
        log_seconds_axis(axis)
    ax.grid(True)
    handles: list[Any] = [
        Line2D(
            [],
            [],
            marker=PHASE_MARKS[phase],
            color="white" if several else PHASE_COLORS[phase],
            label=phase,
            **mark,
        )
        for phase in phases_of(report.inference)
        if any(point[2] == phase for point in points)
    ]
    if several:
        handles += [
            Patch(facecolor=_color(i), edgecolor=INK, linewidth=0.5, label=plain(label))
            for i, label in enumerate(report.predictors)
        ]
    handles += [
        Line2D([], [], color=DIM, label="predicted = measured"),
        Patch(facecolor=_BAND, label="within 20 %"),
    ]
    # The first predictor's worst layers by seconds off get a name.
    mine = [point for point in points if point[3] == 0 and not 0.8 <= point[1] / point[0] <= 1.2]
    mine.sort(key=lambda point: -abs(point[1] - point[0]))
    if mine:
        of_whom = f"\n({plain(report.predictors[0], 24)})" if several else ""
        text = f"named: {min(MAX_NAMES, len(mine))} most seconds off{of_whom}"
        handles.append(Line2D([], [], linestyle="", label=text))
    figure.legend(handles=handles, loc="outside right upper")
    label_points(
        ax,
        [
            PointLabel(x, y, f"{name}, {phase}", left_first=y > x)
            for x, y, phase, _, name in mine[:MAX_NAMES]
        ],
        [(x, y) for x, y, *_ in points],
        size=7.5,
    )
    return figure


def time_figure(report: StepComparison) -> Figure:
    """Horizontal stacked bars: each phase of each predictor by what the time is spent on, and the
    measured phase below.
    """
    phases = ("forward",) if report.inference else (*PHASES, "zero_grad")
    shares = [_by_kind(prediction) for prediction in report.predictions]
    kinds = sorted(
        dict.fromkeys(kind for by_phase in shares for own in by_phase.values() for kind in own),
        key=lambda kind: -sum(own.get(kind, 0.0) for own in shares[0].values()),
    )
    names = kinds if len(kinds) <= 8 else [*kinds[:7], "everything else"]
    looks: dict[str, dict[str, Any]] = {
        name: {"facecolor": color, "hatch": hatch, "edgecolor": _edge(color), "linewidth": 0.4}
        for name, color, hatch in zip(names, (*CYCLE, YELLOW, "#999999"), _KIND_HATCHES)
    }
    measured: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.2}
    medians = {name: s.median for name, s in report.measurement.step.items() if name != "total"}
    n_bars = len(phases) * (1 + len(shares))
    figure = new_figure(10.0, 1.7 + 0.3 * n_bars + 0.22 * len(phases))
    ax = figure.subplots()
    longest_s, y = max(medians.values(), default=0.0), 0.0
    bars = {}
    for phase in phases:
        for label, prediction, by_phase in zip(report.predictors, report.predictions, shares):
            bars[y] = f"{phase}, {plain(label, 24)}"
            own, left_s = by_phase.get(phase, {}), 0.0
            for name, look in looks.items():
                merged = [name] if name in kinds else kinds[7:]
                if seconds := sum(own.get(kind, 0.0) for kind in merged):
                    ax.barh(y, seconds, 0.8, left=left_s, **look)
                    left_s += seconds
            if phase in prediction.prices.phases and not prediction.prices.unsupported:
                _annotate(ax, left_s, y, seconds_text(left_s))
            else:
                part = f"{seconds_text(left_s)} for the layers it supports"
                _annotate(ax, left_s, y, part if left_s else "not predicted", DIM)
            longest_s = max(longest_s, left_s)
            y += 1.0
        bars[y] = f"{phase}, measured"
        if phase in medians:
            ax.barh(y, medians[phase], 0.55, **measured)
            _annotate(ax, medians[phase], y, seconds_text(medians[phase]))
        else:
            _annotate(ax, 0, y, "not measured", DIM)
        y += 1.6
    ax.set_yticks(list(bars), list(bars.values()))
    ax.set(ylim=(y - 1.0, -0.7), xlim=(0, 1.12 * longest_s or 1.0), xlabel="time per step")
    ax.tick_params(axis="y", length=0)
    seconds_axis(ax.xaxis)
    ax.grid(axis="x", color=GRID)
    handles = [Patch(label=plain(name), **look) for name, look in looks.items()]
    handles.append(Patch(label="measured", **measured))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.suptitle(f"Where the step's time goes: {_circumstances(report)}", fontsize=10.5)
    return figure


def _by_kind(prediction: Prediction) -> dict[str, dict[str, float]]:
    """Seconds by phase and by kind: a kernel by what bounds it, everything else by its name."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for item in prediction.prices.items:
        kind = f"kernels: {item.bound}" if item.what == "kernel" else item.what
        found[item.phase][kind] += item.seconds
    return found


def _edge(color: str) -> str:
    """The colour of edges and hatches that shows on `color`."""
    return "white" if np.dot((0.299, 0.587, 0.114), to_rgb(color)) < 0.5 else INK


def _color(number: int) -> str:
    return PREDICTOR_COLORS[number % len(PREDICTOR_COLORS)]


def _style(number: int) -> dict[str, Any]:
    """How the bars of a predictor look."""
    hatch = PREDICTOR_HATCHES[number % len(PREDICTOR_HATCHES)]
    return {"facecolor": _color(number), "hatch": hatch, "edgecolor": INK, "linewidth": 0.5}

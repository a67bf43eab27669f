"""The plots of a report: bars per layer, predicted against measured, where the step's time goes;
the rooflines are modules of their own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import matplotlib
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

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
    log_seconds_axis,
    new_figure,
    own_style,
    plain,
    seconds_axis,
    seconds_text,
    spans_decades,
    to_png,
)
from dlperf.report.layer_comparison import LayerComparison, phases_of
from dlperf.report.roofline import hierarchy_figure, roofline_figure
from dlperf.report.step_comparison import StepComparison

__all__ = ["CAPTIONS", "figures_of", "layers_figure", "pngs_of", "scatter_figure", "time_figure"]

MAX_LAYERS = 25
"""Layers that the bars show; of larger networks the ones that take longest."""

CAPTIONS = {
    "layers": "Predicted and measured time of each layer, one panel per phase.",
    "scatter": (
        "Predicted against measured time, one mark per layer and phase; on the line they are equal,"
        " in the band within 20 %."
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
    """Bars per layer, predicted and measured, one panel per phase."""
    phases = phases_of(report.inference)
    names, left_out, left_frac = _largest_layers(report)
    by_predictor = [{row.layer: row for row in rows} for rows in report.rows]
    n_bars = 1 + len(by_predictor)
    height = 1.4 + max(0.8, len(names) * max(0.3, 0.12 * n_bars + 0.08))
    figure = new_figure(4.6 + 2.9 * len(phases), height, gap_frac=0.06)
    axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for ax, phase in zip(axes, phases):
        spoken = [phase in p.prices.phases for p in report.predictions]
        times = [
            row.phase(phase) for rows in by_predictor for name in names if (row := rows.get(name))
        ]
        values = [v for t in times if t is not None for v in (t.predicted_s, t.actual_s) if v]
        if is_log := spans_decades(values):
            ax.set_xscale("log")
        n_drawn = sum(
            _bars(ax, place, [rows.get(name) for rows in by_predictor], phase, spoken)
            for place, name in enumerate(names)
        )
        silent = [
            label
            for label, p in zip(report.predictors, report.predictions)
            if phase not in p.prices.phases
        ]
        ax.set_title(
            phase + (f"\n(not predicted by {plain(', '.join(silent), 40)})" if silent else "")
        )
        ax.tick_params(axis="y", length=0)
        if not n_drawn:
            empty(ax, "no time known")
            ax.set_xticks([])
            continue
        if is_log:
            ax.set(
                xlabel="time per step (logarithmic)",
                xlim=(max(min(values), 1e-4 * max(values)) / 2, 1.3 * max(values)),
            )
            log_seconds_axis(ax.xaxis)
        else:
            ax.set(xlabel="time per step", xlim=(0, 1.04 * max(ax.get_xlim()[1], 1e-9)))
            ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, min_n_ticks=2))
            seconds_axis(ax.xaxis)
        ax.grid(axis="x")
    kinds = {row.layer: row.type for rows in by_predictor for row in rows.values()}
    axes[0].set_yticks(
        range(len(names)),
        [plain(name if name == kinds[name] else f"{name}  {kinds[name]}", 42) for name in names],
    )
    axes[0].set_ylim(len(names) - 0.4, -0.6)
    handles = [Patch(facecolor=ACTUAL_COLOR, label="measured")]
    for i, label in enumerate(report.predictors):
        handles.append(
            Patch(
                facecolor=_color(i),
                hatch=_hatch(i),
                edgecolor=INK,
                linewidth=0.5,
                label=f"predicted, {plain(label)}",
            )
        )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)))
    title = _circumstances(report)
    if left_out:
        title += (
            f"\nthe {len(names)} longest of {len(names) + left_out} layers (the other {left_out}"
            f" take {format_percent(left_frac)} of the time)"
        )
    figure.suptitle(title, fontsize=10.5)
    return figure


def _circumstances(report: StepComparison) -> str:
    return circumstances(
        report.target, report.batch_size, report.measurement.threads, report.machine
    )


def _bars(
    ax: Any, place: int, rows: list[LayerComparison | None], phase: str, spoken: list[bool]
) -> int:
    """One layer's bars: the predictors' and, last, the measured one; how many are not 0. A bar
    unknown though something runs says so.
    """
    size = 0.8 / (1 + len(rows))
    top = place - 0.4
    actual_s, has_work, n_drawn = None, False, 0
    for i, row in enumerate(rows):
        times = row.phase(phase) if row is not None else None
        if times is None:
            continue
        middle = top + (i + 0.5) * size
        actual_s, has_work = (
            times.actual_s if times.actual_s is not None else actual_s,
            has_work or times.has_work,
        )
        if times.predicted_s:
            ax.barh(
                middle,
                times.predicted_s,
                size,
                color=_color(i),
                hatch=_hatch(i),
                edgecolor=INK,
                linewidth=0.5,
            )
            n_drawn += 1
        elif times.predicted_s is None and times.has_work and spoken[i]:
            _remark(ax, middle, "not predicted")
    middle = top + (len(rows) + 0.5) * size
    if actual_s:
        ax.barh(middle, actual_s, size, color=ACTUAL_COLOR)
        n_drawn += 1
    elif actual_s is None and has_work:
        _remark(ax, middle, "not measured")
    return n_drawn


def _remark(ax: Any, height: float, text: str) -> None:
    """A text where a bar would begin, whatever the scale of the axis."""
    at = {"xycoords": ax.get_yaxis_transform(), "xytext": (3, 0), "textcoords": "offset points"}
    ax.annotate(text, (0, height), va="center", fontsize=6, color=DIM, **at)


def _largest_layers(report: StepComparison) -> tuple[list[str], int, float]:
    """(layers to show in the order of execution, how many are left out, their share of the time)"""
    seconds: dict[str, float] = {}
    for rows in report.rows:
        for row in rows:
            total = row.total
            seconds[row.layer] = max(
                seconds.get(row.layer, 0.0),
                total.actual_s if total.actual_s is not None else total.predicted_s or 0.0,
            )
    keep = set(sorted(seconds, key=lambda name: -seconds[name])[:MAX_LAYERS])
    left_s = sum(value for name, value in seconds.items() if name not in keep)
    whole_s = sum(seconds.values())
    return (
        [name for name in seconds if name in keep],
        len(seconds) - len(keep),
        left_s / whole_s if whole_s else 0.0,
    )


def scatter_figure(report: StepComparison) -> Figure:
    """Predicted against measured time of layers and phases, log-log, with y = x and the band of 20
    %.
    """
    figure = new_figure(7.2, 6.2)
    ax = figure.subplots()
    points = []
    n_zero = 0
    for number, rows in enumerate(report.rows):
        for row in rows:
            for phase in phases_of(report.inference):
                times = row.phase(phase)
                if times is None or times.actual_s is None or times.predicted_s is None:
                    continue
                if times.actual_s > 0 and times.predicted_s > 0:
                    points.append((times.actual_s, times.predicted_s, phase, number, row.layer))
                elif times.has_work:
                    n_zero += 1
    ax.set(
        xlabel="measured time per step",
        ylabel="predicted time per step",
        title=(
            _circumstances(report)
            + (f"\n({n_zero} layers at 0 s on one side cannot be drawn)" if n_zero else "")
        ),
    )
    if not points:
        empty(ax, "no layer is known on both sides")
        ax.set_xticks([])
        ax.set_yticks([])
        return figure
    several = len(report.predictors) > 1
    for x, y, phase, number, _ in points:
        face = _color(number) if several else PHASE_COLORS[phase]
        ax.plot(
            x,
            y,
            marker=PHASE_MARKS[phase],
            color=face,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            markersize=6.5,
            linestyle="",
            alpha=0.9,
        )
    low = min(min(x, y) for x, y, *_ in points) / 1.8
    high = max(max(x, y) for x, y, *_ in points) * 1.8
    ax.fill_between(
        [low, high],
        [0.8 * low, 0.8 * high],
        [1.2 * low, 1.2 * high],
        color="#e4e8ec",
        linewidth=0,
        zorder=0,
    )
    ax.plot([low, high], [low, high], color=DIM, linewidth=1, zorder=1)
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    for axis in (ax.xaxis, ax.yaxis):
        log_seconds_axis(axis)
    ax.grid(True)
    handles: list[Any] = [
        ax.plot(
            [],
            [],
            marker=PHASE_MARKS[phase],
            color="white" if several else PHASE_COLORS[phase],
            markeredgecolor=INK,
            linestyle="",
            label=phase,
        )[0]
        for phase in phases_of(report.inference)
        if any(point[2] == phase for point in points)
    ]
    if several:
        handles += [
            Patch(facecolor=_color(i), edgecolor=INK, linewidth=0.5, label=plain(label))
            for i, label in enumerate(report.predictors)
        ]
    handles.append(ax.plot([], [], color=DIM, label="predicted = measured")[0])
    handles.append(Patch(facecolor="#e4e8ec", label="within 20 %"))
    figure.legend(handles=handles, loc="outside right upper")
    # The first predictor's worst layers by seconds off get a name.
    mine = [point for point in points if point[3] == 0 and not 0.8 <= point[1] / point[0] <= 1.2]
    mine.sort(key=lambda point: -abs(point[1] - point[0]))
    label_points(
        ax,
        [PointLabel(x, y, plain(name, 26), left_first=y > x) for x, y, _, _, name in mine[:8]],
        [(x, y) for x, y, *_ in points],
        size=7.5,
    )
    return figure


def time_figure(report: StepComparison) -> Figure:
    """Horizontal stacked bars: each phase of each predictor by what the time is spent on, and the
    measured phase below.
    """
    phases = [
        phase
        for phase in ("forward", "backward", "optimizer", "zero_grad")
        if phase == "forward" or not report.inference
    ]
    shares = [_by_kind(prediction) for prediction in report.predictions]
    sums: dict[str, float] = defaultdict(float)
    for by_phase in shares[:1] or []:
        for kinds in by_phase.values():
            for kind, seconds in kinds.items():
                sums[kind] += seconds
    for by_phase in shares[1:]:
        for kinds in by_phase.values():
            for kind in kinds:
                sums.setdefault(kind, 0.0)
    order = sorted(sums, key=lambda kind: -sums[kind])
    shown = order if len(order) <= 8 else order[:7]
    names = [*shown, *(["everything else"] if len(order) > len(shown) else [])]
    colors = dict(zip(names, (*CYCLE, YELLOW, "#999999")))
    hatches = {
        kind: ("", "///", "", "...", "", "xxx", "", "\\\\\\")[i % 8] for i, kind in enumerate(names)
    }

    bars: list[tuple[str, float]] = []
    n_bars = len(phases) * (1 + len(shares))
    figure = new_figure(10.0, 1.7 + 0.3 * n_bars + 0.22 * len(phases))
    ax = figure.subplots()
    y = 0.0
    longest_s = max(
        (samples.median for name, samples in report.measurement.step.items() if name != "total"),
        default=0.0,
    )
    longest_s = max(
        [longest_s, *(sum(kinds.values()) for by_phase in shares for kinds in by_phase.values())]
    )
    for phase in phases:
        for label, prediction, by_phase in zip(report.predictors, report.predictions, shares):
            bars.append((f"{phase}, {plain(label, 24)}", y))
            if phase not in prediction.prices.phases or prediction.prices.unsupported:
                known_s = sum(by_phase.get(phase, {}).values())
                note = (
                    f"{seconds_text(known_s)} for the layers it supports"
                    if known_s
                    else "not predicted"
                )
                ax.annotate(
                    note,
                    (known_s, y),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                    color=DIM,
                )
            left = 0.0
            kinds = by_phase.get(phase, {})
            for name in names:
                seconds = (
                    sum(v for k, v in kinds.items() if k not in shown)
                    if name == "everything else"
                    else kinds.get(name, 0.0)
                )
                if seconds:
                    ax.barh(
                        y,
                        seconds,
                        0.8,
                        left=left,
                        color=colors[name],
                        hatch=hatches[name],
                        edgecolor=_edge(colors[name]),
                        linewidth=0.4,
                    )
                    left += seconds
            if phase in prediction.prices.phases and not prediction.prices.unsupported:
                ax.annotate(
                    seconds_text(left),
                    (left, y),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=7.5,
                )
            y += 1.0
        samples = report.measurement.step.get(phase)
        bars.append((f"{phase}, measured", y))
        if samples is not None:
            ax.barh(y, samples.median, 0.55, color="white", edgecolor=INK, linewidth=1.2)
            ax.annotate(
                seconds_text(samples.median),
                (samples.median, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
        else:
            ax.annotate(
                "not measured",
                (0, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
                color=DIM,
            )
        y += 1.6
    ax.set_yticks([place for _, place in bars], [name for name, _ in bars])
    ax.set(ylim=(y - 1.0, -0.7), xlim=(0, 1.12 * longest_s if longest_s else 1.0))
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("time per step")
    seconds_axis(ax.xaxis)
    ax.grid(axis="x", color=GRID)
    handles = [
        Patch(
            facecolor=colors[k],
            hatch=hatches[k],
            edgecolor=_edge(colors[k]),
            linewidth=0.4,
            label=plain(k),
        )
        for k in names
    ]
    handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=1.2, label="measured"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))
    figure.suptitle(f"Where the step's time goes: {_circumstances(report)}", fontsize=10.5)
    return figure


def _by_kind(prediction: Prediction) -> dict[str, dict[str, float]]:
    """Seconds by phase and by kind: a kernel by what bounds it, everything else by its name."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for item in prediction.prices.items:
        found[item.phase][f"kernels: {item.bound}" if item.what == "kernel" else item.what] += (
            item.seconds
        )
    return {phase: dict(kinds) for phase, kinds in found.items()}


def _edge(color: str) -> str:
    """The colour of edges and hatches that shows on `color`."""
    red, green, blue = to_rgb(color)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else INK


def _color(number: int) -> str:
    return PREDICTOR_COLORS[number % len(PREDICTOR_COLORS)]


def _hatch(number: int) -> str:
    return PREDICTOR_HATCHES[number % len(PREDICTOR_HATCHES)]

"""The rooflines of a report: its layers by the bytes of their operands, and the hierarchical
roofline with one dot per level of the memory at each layer's height.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from dlperf.core.text import counted
from dlperf.core.units import format_percent, format_si
from dlperf.models.memory_hierarchy import fma_fraction, mixed_flops_per_s
from dlperf.ops.roofs import Ceiling, Roofs
from dlperf.predictors.layer_traffic import LayerTraffic
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
    DIM,
    GREEN,
    INK,
    PHASE_COLORS,
    PHASE_MARKS,
    VERMILLION,
    PointLabel,
    circumstances,
    empty,
    group_points,
    label_lines,
    label_points,
    layer_name,
    letter,
    letter_list,
    new_figure,
    rate_axes,
)
from dlperf.report.layer_comparison import phases_of
from dlperf.report.step_comparison import StepComparison

MAX_LAYERS = 30
"""Layers that the roofline shows: those that take longest. Each has a letter and a line in the
legend.
"""
MAX_PANEL_LAYERS = 8
"""Layers that a panel of the hierarchical roofline shows."""
ALWAYS_DRAWN = ("float32", "bfloat16")
"""Precisions whose roof is drawn wherever it was measured; those that the step computes in are too.
"""
_LEGEND_ROWS, _PANEL_LEGEND_ROWS = 26, 4
LEVEL_STYLES = {
    "L1": (0, (1, 1.2)),
    "L2": (0, (4, 1.5, 1, 1.5)),
    "L3": (0, (6, 2)),
    "DRAM": "solid",
}
LEVEL_COLORS = {"L1": VERMILLION, "L2": BLUE, "L3": GREEN, "DRAM": ACTUAL_COLOR}
LEVEL_SIZES = {"L1": 11.0, "L2": 8.2, "L3": 5.6, "DRAM": 3.2}
"""Smaller outwards, so that levels that move the same bytes show as rings."""


@dataclass(frozen=True)
class Point:
    """A layer in one phase: the rate it reached, the seconds it took, and its intensities: FLOP per
    byte of its ``operands``, or per byte that each level of the memory moves.
    """

    layer: str
    phase: str
    flops_per_s: float
    seconds: float
    intensities: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal roof: its height, its text, how it is drawn."""

    flops_per_s: float
    text: str
    style: Any = "solid"
    width: float = 1.2


def points_of(report: StepComparison) -> tuple[list[Point], int]:
    """The layers' measured points by phase, the longest first, and how many have no FLOPs or no
    bytes to stand on.

    FLOPs and bytes are those of the first prediction's trace; bytes count each operand of each op
    once, wherever it lies.
    """
    points, n_without = [], 0
    for row in report.rows[0]:
        for phase in ("forward", "backward"):
            times = row.phase(phase)
            flops, n_bytes = map(round, row.work.get(phase, (0.0, 0.0)))
            if times is None or not times.actual_s:
                continue
            if flops and n_bytes:
                intensities = {"operands": flops / n_bytes}
                rate = flops / times.actual_s
                points.append(Point(row.layer, phase, rate, times.actual_s, intensities))
            else:
                n_without += 1
    return sorted(points, key=lambda point: -point.seconds), n_without


def level_points_of(report: StepComparison, phase: str) -> list[Point]:
    """The measured layers of a phase that have FLOPs, the longest first, with their intensity at
    each level that moves something. FLOPs and bytes are those of the first prediction's trace.
    """
    found = []
    rows = {row.layer: row for row in report.rows[0]}
    for traffic in report.predictions[0].layer_traffic:
        row = rows.get(traffic.layer)
        times = row.phase(phase) if row is not None and traffic.phase == phase else None
        intensities = {level: x for level in traffic.levels if (x := traffic.intensity(level))}
        if times is not None and times.actual_s and intensities:
            rate = traffic.flops / times.actual_s
            found.append(Point(traffic.layer, phase, rate, times.actual_s, intensities))
    return sorted(found, key=lambda point: -point.seconds)


def roofline_figure(report: StepComparison) -> Figure | None:
    """The layers by the bytes of their operands under the roofs of every level; None where the
    machine file contains no bandwidth and no peak.

    attainable = min(peak, bandwidth x intensity) (Williams et al. 2009), one roof per level and one
    ceiling per dtype, all measured.
    """
    roofs = report.predictions[0].roofs
    if not roofs.bandwidths or not roofs.ceilings:
        return None
    every_point, n_without = points_of(report)
    longest = list(dict.fromkeys(point.layer for point in every_point))
    shown = set(longest[:MAX_LAYERS])
    points = [point for point in every_point if point.layer in shown]
    numbers = {layer: n for layer, n in numbers_of(report).items() if layer in shown}
    lines = [
        Line(c.fma_flops_per_s, f"{c.dtype} {format_si(c.fma_flops_per_s, 'FLOP/s')}", width=width)
        for c, width in zip(roofs.ceilings, (1.8, *[1.0] * len(roofs.ceilings)))
    ]
    n_columns = -(-(len(numbers) + 6) // _LEGEND_ROWS)
    figure = new_figure(8.2 + 1.8 * n_columns, 6.0)
    ax = figure.subplots()
    handles = draw_roofs(ax, points, roofs, lines, (4, 6, 2, 2.5))
    indices = [(point.intensities["operands"], point.flops_per_s) for point in points]
    for phase in phases_of(report.inference):
        mine = [index for index, point in zip(indices, points) if point.phase == phase]
        if mine:
            handles += ax.plot(
                *zip(*mine),
                marker=PHASE_MARKS[phase],
                color=PHASE_COLORS[phase],
                markeredgecolor=INK,
                markeredgewidth=0.7,
                markersize=7,
                linestyle="",
                label=f"{phase} of a layer",
                zorder=4,
            )
    handles += text_handles(ax, _names(report, numbers))
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.4, ncols=n_columns)
    ax.set(xlabel="operational intensity (FLOP per byte of operands)", ylabel="rate (FLOP/s)")
    title = [_circumstances(report)]
    if len(longest) > len(numbers):
        title.append(f"the {len(numbers)} longest of {len(longest)} layers")
    if n_without:
        is_are = "is" if n_without == 1 else "are"
        title.append(f"{counted(n_without, 'point')} without FLOPs or bytes {is_are} not drawn")
    ax.set_title("\n".join(title))
    labels = [
        PointLabel(
            *indices[group[0]],
            textwrap.fill(letter_list(numbers[points[one].layer] for one in group), 16),
        )
        for group in group_points(ax, indices)
    ]
    label_lines(ax, [(line.flops_per_s, line.text) for line in lines])
    label_points(ax, labels, indices, size=7.5)
    if not points:
        empty(ax, "no measured layer has FLOPs and bytes to draw")
    return figure


def hierarchy_figure(report: StepComparison) -> Figure | None:
    """The hierarchical roofline (Yang, Kurth, Williams 2019); None where the machine file contains
    no bandwidth or no peak.

    A panel per phase; each layer is drawn at the rate it reached, once per level of the memory at
    its intensity there, so that the gaps between its dots are reuse in the caches. Roofs are
    measured; bytes are modelled. A level that moves nothing for a layer has no dot.
    """
    prediction = report.predictions[0]
    roofs = prediction.roofs
    if not roofs.bandwidths or not roofs.ceilings:
        return None
    phases = [phase for phase in phases_of(report.inference) if phase != "optimizer"]
    found = [level_points_of(report, phase) for phase in phases]
    panels = [points[:MAX_PANEL_LAYERS] for points in found]
    drawn = [point for panel in panels for point in panel]
    layers = {point.layer for point in drawn}
    numbers = {layer: n for layer, n in numbers_of(report).items() if layer in layers}
    dtypes = {*ALWAYS_DRAWN, *(t.dtype for t in prediction.layer_traffic)}
    lines = _lines(prediction.layer_traffic, [c for c in roofs.ceilings if c.dtype in dtypes])

    figure = new_figure(5.4 + 4.6 * len(phases), 6.6, gap_frac=0.03)
    axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    for ax, phase, panel, points in zip(axes, phases, panels, found):
        draw_roofs(ax, drawn, roofs, lines, (3, 3, 2.5, 1.7), LEVEL_COLORS)
        more = f": the {len(panel)} longest of {len(points)} layers"
        ax.set(
            title=phase + (more if len(points) > len(panel) else ""),
            xlabel="arithmetic intensity (FLOP per byte that the level moves)",
        )
        for point in panel:
            draw_levels(ax, point)
        if not panel:
            empty(ax, "no measured layer has FLOPs and bytes to draw")
    axes[0].set_ylabel("rate (FLOP/s)")
    handles = [
        axes[0].plot(
            [],
            [],
            color=LEVEL_COLORS[roof.level],
            linestyle=LEVEL_STYLES[roof.level],
            marker="o",
            markersize=LEVEL_SIZES[roof.level],
            label=f"{roof.level}  {format_si(roof.bytes_per_s, 'B/s')}",
        )[0]
        for roof in roofs.bandwidths
    ]
    # Whole columns: the levels in the first, the layers in the others.
    names, rows = _names(report, numbers), _PANEL_LEGEND_ROWS
    texts = [" "] * (rows - len(handles)) + names + [" "] * (-len(names) % rows)
    handles += text_handles(axes[0], texts)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) // rows,
        handlelength=2.6,
        columnspacing=1.0,
    )
    figure.suptitle(_circumstances(report), fontsize=10.5)
    label_lines(axes[-1], [(line.flops_per_s, line.text) for line in lines])
    for ax, panel in zip(axes, panels):
        labels = [
            PointLabel(min(p.intensities.values()), p.flops_per_s, letter(numbers[p.layer]), True)
            for p in panel
        ]
        dots = [(x, p.flops_per_s) for p in panel for x in p.intensities.values()]
        label_points(ax, labels, dots)
    return figure


def draw_roofs(
    ax: Any,
    points: Sequence[Point],
    roofs: Roofs,
    lines: Sequence[Line],
    room: tuple[float, float, float, float],
    colors: Mapping[str, str] | None = None,
) -> list[Any]:
    """Axes that hold `points` and all roofs, with a `room` of factors left, right, below and above;
    each level's roof up to the highest ceiling, the ceilings from the fastest level on. The levels'
    lines, for a legend.
    """
    top = max((line.flops_per_s for line in lines), default=roofs.ceilings[0].fma_flops_per_s)
    rates = [roof.bytes_per_s for roof in roofs.bandwidths]
    xs = [x for p in points for x in p.intensities.values()] + [top / rate for rate in rates]
    x_low, x_high = min(xs) / room[0], max(xs) * room[1]
    ys = [top, min(top, min(rates) * x_low), *(point.flops_per_s for point in points)]
    rate_axes(ax, (x_low, x_high), (min(ys) / room[2], max(ys) * room[3]))
    for line in lines:
        ax.plot(
            [line.flops_per_s / max(rates), x_high],
            [line.flops_per_s] * 2,
            color=INK,
            linestyle=line.style,
            linewidth=line.width,
            zorder=2,
        )
    return [
        ax.plot(
            [x_low, top / rate],
            [rate * x_low, top],
            color=colors[roof.level] if colors else INK,
            linestyle=LEVEL_STYLES[roof.level],
            linewidth=1.3,
            zorder=2,
            label=f"{roof.level}  {format_si(rate, 'B/s')}",
        )[0]
        for roof, rate in zip(roofs.bandwidths, rates)
    ]


def _lines(traffic: Sequence[LayerTraffic], ceilings: Sequence[Ceiling]) -> list[Line]:
    """Peak and "no FMA" of each dtype, and the ceiling of the step's own mix of instructions in the
    dtype of most of its FLOPs.
    """
    computed = dict.fromkeys((t.dtype for t in traffic), 0.0)
    for t in traffic:
        computed[t.dtype] += t.flops
    main = max(computed, key=lambda dtype: computed[dtype], default="")
    found = []
    for c in ceilings:
        peak, other = c.fma_flops_per_s, c.other_flops_per_s
        found.append(Line(peak, f"{c.dtype} FMA  {format_si(peak, 'FLOP/s')}", width=1.8))
        if c.dtype in computed:
            name = f"{c.dtype} no FMA  {format_si(other, 'FLOP/s')}"
            source = "" if c.is_measured else f"\n({c.other_source})"
            found.append(Line(other, name + source, (0, (5, 2))))
        if c.dtype == main and computed[main]:
            fma_flops = sum(t.fma_flops for t in traffic if t.dtype == main)
            alpha = float(fma_fraction(fma_flops / 2, computed[main] - fma_flops))
            mix = float(mixed_flops_per_s(alpha, peak, other))
            text = f"this step's mix: {format_percent(alpha)} FMA\n{format_si(mix, 'FLOP/s')}"
            found.append(Line(mix, text, (0, (1.5, 1.5))))
    return sorted(found, key=lambda line: -line.flops_per_s)


def draw_levels(ax: Any, point: Point) -> None:
    """A layer's dots and the line through them."""
    xs = point.intensities.values()
    heights = [point.flops_per_s] * 2
    ax.plot([min(xs), max(xs)], heights, color=DIM, linewidth=0.7, zorder=3)
    for level, x in point.intensities.items():
        ax.plot(
            x,
            point.flops_per_s,
            marker="o",
            zorder=4,
            color=LEVEL_COLORS[level],
            markeredgecolor="white",
            markeredgewidth=0.5,
            markersize=LEVEL_SIZES[level],
            linestyle="",
        )


def _circumstances(report: StepComparison) -> str:
    threads, cpu = report.measurement.threads, report.predictions[0].machine.cpu
    return circumstances(report.target, report.batch_size, threads, cpu.model)


def numbers_of(report: StepComparison) -> dict[str, int]:
    """The numbers, from 1, of the layers that the rooflines of a report draw, in the order of
    execution. The plots show them as letters: many layers are named by numbers.
    """
    longest = list(dict.fromkeys(point.layer for point in points_of(report)[0]))
    drawn = set(longest[:MAX_LAYERS])
    for phase in phases_of(report.inference):
        points = level_points_of(report, phase)[:MAX_PANEL_LAYERS]
        drawn.update(point.layer for point in points)
    layers = [row.layer for row in report.rows[0] if row.layer in drawn]
    return {layer: number for number, layer in enumerate(dict.fromkeys(layers), 1)}


def _names(report: StepComparison, numbers: Mapping[str, int]) -> list[str]:
    """Letters, names and types of layers for a legend."""
    kinds = {row.layer: row.type for row in report.rows[0]}
    return [
        f"{letter(number)}:  {layer_name(name, kinds[name], 30)}"
        for name, number in numbers.items()
    ]


def text_handles(ax: Any, texts: Iterable[str]) -> list[Any]:
    """Entries of a legend that are text alone."""
    return [ax.plot([], [], linestyle="", label=text)[0] for text in texts]

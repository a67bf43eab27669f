"""The roofline with every level of the memory hierarchy, and a report's layers under it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dlperf.core.machine import Machine
from dlperf.core.units import format_si
from dlperf.ops import roofs as measured_roofs
from dlperf.report.drawing import (
    INK,
    PHASE_COLORS,
    PHASE_MARKS,
    PointLabel,
    circumstances,
    empty,
    group_points,
    label_lines,
    label_points,
    new_figure,
    number_list,
    plain,
)
from dlperf.report.layer_comparison import phases_of
from dlperf.report.step_comparison import StepComparison

MAX_LAYERS = 30
"""Layers that are drawn: those that take longest. Each has a number and a line in the legend."""
_LEGEND_ROWS = 26

LEVEL_STYLES = {
    "L1": (0, (1, 1.2)),
    "L2": (0, (4, 1.5, 1, 1.5)),
    "L3": (0, (6, 2)),
    "DRAM": "solid",
}


@dataclass(frozen=True)
class Point:
    """A layer in one phase: FLOP per byte of its operands, the rate it reached, and the seconds it
    took.
    """

    layer: str
    phase: str
    intensity: float
    flops_per_s: float
    seconds: float


def peaks_of(machine: Machine, threads: int) -> dict[str, float]:
    """The best measured rate of matrix multiplication by dtype, in FLOP/s, the highest first; see
    :func:`dlperf.ops.roofs.roofs_of`.
    """
    return {
        ceiling.dtype: ceiling.fma_flops_per_s
        for ceiling in measured_roofs.roofs_of(machine, threads).ceilings
    }


def roofs_of(machine: Machine, threads: int) -> dict[str, float]:
    """Measured bandwidth of each memory level in bytes per second."""
    return {
        roof.level: roof.bytes_per_s
        for roof in measured_roofs.roofs_of(machine, threads).bandwidths
    }


def points_of(report: StepComparison) -> tuple[list[Point], int]:
    """The layers' measured points by phase, the longest first, and how many have no FLOPs or no
    bytes to stand on.

    FLOPs and bytes are those of the first prediction's trace; bytes count each operand of each op
    once, wherever it lies.
    """
    points, n_without = [], 0
    for row in report.rows[0]:
        for phase in phases_of(report.inference):
            if phase == "optimizer":
                continue
            times = row.phase(phase)
            flops, n_bytes = (
                (row.forward_flops, row.forward_bytes)
                if phase == "forward"
                else (row.backward_flops, row.backward_bytes)
            )
            if times is None or not times.actual_s:
                continue
            if not flops or not n_bytes:
                n_without += 1
                continue
            points.append(
                Point(row.layer, phase, flops / n_bytes, flops / times.actual_s, times.actual_s)
            )
    return sorted(points, key=lambda point: -point.seconds), n_without


def roofline_figure(report: StepComparison) -> Figure | None:
    """The layers by the bytes of their operands under the roofs of every level; None where the
    machine file contains no bandwidth and no peak.

    attainable = min(peak, bandwidth x intensity) (Williams et al. 2009), one roof per level and one
    ceiling per dtype, all measured.
    """
    prediction = report.predictions[0]
    machine, threads = prediction.machine, report.measurement.threads
    peaks, roofs = peaks_of(machine, threads), roofs_of(machine, threads)
    if not peaks or not roofs:
        return None
    points, n_without = points_of(report)
    points, numbers, n_layers = _longest(report, points)
    top = max(peaks.values())
    xs = [point.intensity for point in points] + [top / rate for rate in roofs.values()]
    x_low, x_high = min(xs) / 4, max(xs) * 6
    ys = [point.flops_per_s for point in points] + [min(top, min(roofs.values()) * x_low)]
    y_low, y_high = min(ys) / 2, max([top, *(point.flops_per_s for point in points)]) * 2.5

    n_columns = -(-(len(numbers) + 6) // _LEGEND_ROWS)
    figure = new_figure(8.2 + 1.8 * n_columns, 6.0)
    ax = figure.subplots()
    ax.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    handles: list[Any] = []
    for level, rate in roofs.items():
        x_ridge = top / rate
        (line,) = ax.plot(
            [x_low, x_ridge],
            [rate * x_low, top],
            color=INK,
            linestyle=LEVEL_STYLES[level],
            linewidth=1.3,
            zorder=2,
        )
        line.set_label(f"{level}  {format_si(rate, 'B/s')}")
        handles.append(line)
    for number, rate in enumerate(peaks.values()):
        start = rate / max(roofs.values())
        ax.plot(
            [start, x_high], [rate, rate], color=INK, linewidth=1.8 if not number else 1.0, zorder=2
        )
    for phase in phases_of(report.inference):
        mine = [point for point in points if point.phase == phase]
        if mine:
            marks = ax.plot(
                [p.intensity for p in mine],
                [p.flops_per_s for p in mine],
                marker=PHASE_MARKS[phase],
                color=PHASE_COLORS[phase],
                markeredgecolor=INK,
                markeredgewidth=0.7,
                markersize=7,
                linestyle="",
                label=f"{phase} of a layer",
                zorder=4,
            )
            handles.append(marks[0])
    kinds = {row.layer: row.type for row in report.rows[0]}
    names = [f"{number}:  {named(layer, kinds[layer], 30)}" for layer, number in numbers.items()]
    handles += [ax.plot([], [], linestyle="", label=name)[0] for name in names]
    figure.legend(handles=handles, loc="outside right upper", handlelength=2.4, ncols=n_columns)
    ax.set(xlabel="operational intensity (FLOP per byte of operands)", ylabel="rate (FLOP/s)")
    ax.yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
    ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    ax.grid(True)
    lines = [circumstances(report.target, report.batch_size, threads, machine.cpu.model)]
    if n_layers > len(numbers):
        lines.append(f"the {len(numbers)} longest of {n_layers} layers")
    if n_without:
        lines.append(f"{n_without} points without FLOPs or bytes are not drawn")
    ax.set_title("\n".join(lines))
    places = [(point.intensity, point.flops_per_s) for point in points]
    labels = [
        PointLabel(
            *places[group[0]],
            textwrap.fill(number_list(numbers[points[one].layer] for one in group), 16),
        )
        for group in group_points(ax, places)
    ]
    label_lines(
        ax, [(rate, f"{dtype} {format_si(rate, 'FLOP/s')}") for dtype, rate in peaks.items()]
    )
    label_points(ax, labels, places, size=7.5)
    if not points:
        empty(ax, "no measured layer has FLOPs and bytes to draw")
    return figure


def _longest(
    report: StepComparison, points: list[Point]
) -> tuple[list[Point], dict[str, int], int]:
    """The points of the layers that take longest, their numbers in the order of execution, and how
    many layers there are.
    """
    longest = list(dict.fromkeys(point.layer for point in points))
    shown = set(longest[:MAX_LAYERS])
    in_order = [row.layer for row in report.rows[0] if row.layer in shown]
    numbers = {layer: number for number, layer in enumerate(in_order, 1)}
    return [point for point in points if point.layer in shown], numbers, len(longest)


def named(layer: str, kind: str, width: int) -> str:
    """A layer's name and type for a legend."""
    return plain(layer if layer == kind else f"{layer}  {kind}", width)

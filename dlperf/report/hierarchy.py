"""The hierarchical roofline of a report: one dot per level at each layer's height, and the table of
the bytes behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from dlperf.core.units import format_percent, format_si
from dlperf.models.memory_hierarchy import fma_fraction, mixed_flops_per_s
from dlperf.ops.roofs import Ceiling
from dlperf.predictors.layer_traffic import LayerTraffic
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
    DIM,
    GREEN,
    INK,
    VERMILLION,
    PointLabel,
    circumstances,
    empty,
    label_lines,
    label_points,
    new_figure,
)
from dlperf.report.layer_comparison import phases_of
from dlperf.report.roofline import LEVEL_STYLES, named
from dlperf.report.step_comparison import StepComparison

MAX_LAYERS = 8
"""Layers that a panel shows: those that take longest."""
ALWAYS_DRAWN = ("float32", "bfloat16")
"""Precisions whose roof is drawn wherever it was measured; those that the step computes in are too.
"""
_COLORS = {"L1": VERMILLION, "L2": BLUE, "L3": GREEN, "DRAM": ACTUAL_COLOR}
_SIZES = {"L1": 11.0, "L2": 8.2, "L3": 5.6, "DRAM": 3.2}
"""Smaller outwards, so that levels that move the same bytes show as rings."""
_LEGEND_ROWS = 4


@dataclass(frozen=True, slots=True)
class Dots:
    """A layer in one phase: the rate it reached, the seconds it took, and its traffic."""

    traffic: LayerTraffic
    flops_per_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Line:
    """A horizontal roof: its height, its text, how it is drawn."""

    flops_per_s: float
    text: str
    style: Any
    width: float


def dots_of(report: StepComparison, phase: str) -> list[Dots]:
    """The measured layers of a phase that have FLOPs, the longest first. FLOPs and bytes are those
    of the first prediction's trace.
    """
    found = []
    rows = {row.layer: row for row in report.rows[0]}
    for traffic in report.predictions[0].layer_traffic:
        row = rows.get(traffic.layer)
        times = row.phase(phase) if row is not None and traffic.phase == phase else None
        if times is not None and times.actual_s and traffic.flops and any(traffic.level_bytes):
            found.append(Dots(traffic, traffic.flops / times.actual_s, times.actual_s))
    return sorted(found, key=lambda dots: -dots.seconds)


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
    found = [dots_of(report, phase) for phase in phases]
    panels = [dots[:MAX_LAYERS] for dots in found]
    lines = _lines(
        prediction.layer_traffic,
        [
            c
            for c in roofs.ceilings
            if c.dtype in (*ALWAYS_DRAWN, *(t.dtype for t in prediction.layer_traffic))
        ],
    )
    top = max(line.flops_per_s for line in lines) if lines else roofs.ceilings[0].fma_flops_per_s
    drawn = [dots for panel in panels for dots in panel]
    xs = [
        x
        for dots in drawn
        for roof in roofs.bandwidths
        if (x := dots.traffic.intensity(roof.level))
    ] + [top / r.bytes_per_s for r in roofs.bandwidths]
    x_low, x_high = min(xs) / 3, max(xs) * 3
    heights = [dots.flops_per_s for dots in drawn] + [
        min(top, roofs.bandwidths[-1].bytes_per_s * x_low)
    ]
    y_low, y_high = min(heights) / 2.5, max([top, *heights]) * 1.7

    figure = new_figure(5.4 + 4.6 * len(phases), 6.6, gap_frac=0.03)
    axes = figure.subplots(1, len(phases), sharey=True, squeeze=False)[0]
    numbers: dict[str, int] = {}
    for dots in drawn:
        numbers.setdefault(dots.traffic.layer, len(numbers) + 1)
    for ax, phase, panel, all_dots in zip(axes, phases, panels, found):
        ax.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
        ax.grid(True)
        n_left = len(all_dots) - len(panel)
        ax.set(
            title=f"{phase}: the {len(panel)} longest of {len(all_dots)} layers"
            if n_left
            else phase,
            xlabel="arithmetic intensity (FLOP per byte that the level moves)",
        )
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        for roof in roofs.bandwidths:
            ridge = top / roof.bytes_per_s
            ax.plot(
                [x_low, ridge],
                [roof.bytes_per_s * x_low, top],
                color=_COLORS[roof.level],
                linestyle=LEVEL_STYLES[roof.level],
                linewidth=1.3,
                zorder=2,
            )
        fastest = max(roof.bytes_per_s for roof in roofs.bandwidths)
        for line in lines:
            ax.plot(
                [line.flops_per_s / fastest, x_high],
                [line.flops_per_s] * 2,
                color=INK,
                linestyle=line.style,
                linewidth=line.width,
                zorder=2,
            )
        for dots in panel:
            _draw(ax, dots)
        if not panel:
            empty(ax, "no measured layer has FLOPs and bytes to draw")
    axes[0].set_ylabel("rate (FLOP/s)")
    axes[0].yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
    handles = [
        axes[0].plot(
            [],
            [],
            color=_COLORS[r.level],
            linestyle=LEVEL_STYLES[r.level],
            marker="o",
            markersize=_SIZES[r.level],
            label=f"{r.level}  {format_si(r.bytes_per_s, 'B/s')}",
        )[0]
        for r in roofs.bandwidths
    ]
    kinds = {row.layer: row.type for row in report.rows[0]}
    names = [f"{number}:  {named(layer, kinds[layer], 30)}" for layer, number in numbers.items()]
    # Whole columns: the levels in the first, the layers in the others.
    texts = [" "] * (_LEGEND_ROWS - len(handles)) + names + [" "] * (-len(names) % _LEGEND_ROWS)
    handles += [axes[0].plot([], [], linestyle="", label=text)[0] for text in texts]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) // _LEGEND_ROWS,
        handlelength=2.6,
        columnspacing=1.0,
    )
    figure.suptitle(
        circumstances(
            report.target,
            report.batch_size,
            report.measurement.threads,
            prediction.machine.cpu.model,
        ),
        fontsize=10.5,
    )
    label_lines(axes[-1], [(line.flops_per_s, line.text) for line in lines])
    for ax, panel in zip(axes, panels):
        _number(ax, panel, numbers)
    return figure


def _lines(traffic: Sequence[LayerTraffic], ceilings: Sequence[Ceiling]) -> list[_Line]:
    """Peak and "no FMA" of each dtype, and the ceiling of the step's own mix of instructions in the
    dtype of most of its FLOPs.
    """
    computed = {
        dtype: sum(t.flops for t in traffic if t.dtype == dtype)
        for dtype in dict.fromkeys(t.dtype for t in traffic)
    }
    main = max(computed, key=lambda dtype: computed[dtype]) if computed else ""
    found = []
    for c in ceilings:
        found.append(
            _Line(
                c.fma_flops_per_s,
                f"{c.dtype} FMA  {format_si(c.fma_flops_per_s, 'FLOP/s')}",
                "solid",
                1.8,
            )
        )
        if c.dtype in computed:
            name = f"{c.dtype} no FMA  {format_si(c.other_flops_per_s, 'FLOP/s')}"
            found.append(
                _Line(
                    c.other_flops_per_s,
                    name if c.is_measured else f"{name}\n({c.other_source})",
                    (0, (5, 2)),
                    1.2,
                )
            )
        if c.dtype == main and computed[main]:
            mine = [t for t in traffic if t.dtype == main]
            fma, other = (
                sum(t.fma_flops for t in mine) / 2,
                sum(t.flops - t.fma_flops for t in mine),
            )
            alpha = float(fma_fraction(fma, other))
            mix = float(mixed_flops_per_s(alpha, c.fma_flops_per_s, c.other_flops_per_s))
            found.append(
                _Line(
                    mix,
                    f"this step's mix: {format_percent(alpha)} FMA\n{format_si(mix, 'FLOP/s')}",
                    (0, (1.5, 1.5)),
                    1.2,
                )
            )
    return sorted(found, key=lambda line: -line.flops_per_s)


def _draw(ax: Any, dots: Dots) -> None:
    """A layer's dots and the line through them."""
    places = {level: x for level in dots.traffic.levels if (x := dots.traffic.intensity(level))}
    ax.plot(
        [min(places.values()), max(places.values())],
        [dots.flops_per_s] * 2,
        color=DIM,
        linewidth=0.7,
        zorder=3,
    )
    for level, x in places.items():
        style = {
            "color": _COLORS[level],
            "markeredgecolor": "white",
            "markeredgewidth": 0.5,
            "markersize": _SIZES[level],
            "linestyle": "",
        }
        ax.plot(x, dots.flops_per_s, marker="o", zorder=4, **style)


def _number(ax: Any, panel: Sequence[Dots], numbers: dict[str, int]) -> None:
    """Each layer's number left of its first dot, or where there is room along its line."""
    points = [
        (x, dots.flops_per_s)
        for dots in panel
        for level in dots.traffic.levels
        if (x := dots.traffic.intensity(level))
    ]
    labels = []
    for dots in panel:
        left = min(x for level in dots.traffic.levels if (x := dots.traffic.intensity(level)))
        labels.append(
            PointLabel(left, dots.flops_per_s, str(numbers[dots.traffic.layer]), left_first=True)
        )
    label_points(ax, labels, points)

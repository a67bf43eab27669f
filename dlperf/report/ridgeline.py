"""The Ridgeline plane (Checconi et al. 2022): which of arithmetic, memory and network bounds
kernels, layers or batch sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from dlperf.core.units import format_si
from dlperf.models import ridgeline
from dlperf.report.drawing import (
    ACTUAL_COLOR,
    BLUE,
    DIM,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    PointLabel,
    label_points,
    new_figure,
    plain,
)

AREA_COLORS = {
    ridgeline.COMPUTE: "#dcebd9",
    ridgeline.MEMORY: "#dbe7f3",
    ridgeline.NETWORK: "#f6e2d3",
}
LINE_COLORS = {ridgeline.COMPUTE: GREEN, ridgeline.MEMORY: BLUE, ridgeline.NETWORK: VERMILLION}
SERIES = (
    ("o", ACTUAL_COLOR),
    ("s", ORANGE),
    ("^", BLUE),
    ("D", PURPLE),
    ("v", GREEN),
    ("P", VERMILLION),
    ("X", SKY),
)
"""Marks and colours of series, in turn."""
_PREFIXES = {-1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P"}


@dataclass(frozen=True)
class PlanePoint:
    """A piece of work on the plane: bytes of memory per byte of network, FLOP per byte of memory.
    Points of one `series` are joined in their order.
    """

    memory_intensity: float
    arithmetic_intensity: float
    label: str = ""
    series: str = ""


def limits(
    points: Sequence[PlanePoint], rates: ridgeline.Rates
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Ranges of x and y that hold every drawable point and the centre, with room around. What sends
    nothing has no place (x is infinite).
    """
    centre = rates.centre
    xs = [centre[0], *(p.memory_intensity for p in _drawable(points))]
    ys = [centre[1], *(p.arithmetic_intensity for p in _drawable(points))]
    return (min(xs) / 8, max(xs) * 8), (min(ys) / 8, max(ys) * 8)


def draw_ridgeline(
    ax: Any, points: Sequence[PlanePoint], rates: ridgeline.Rates, names: bool = True
) -> set[str]:
    """The plane on `ax`: regions, the cross of the centre, the ridge, and the points; the labels
    that found a place. `names` writes each region's resource.

    Points that send nothing, or compute nothing, have no place on logarithmic axes and are left
    out; :func:`ridgeline_figure` counts them.
    """
    (x_low, x_high), (y_low, y_high) = limits(points, rates)
    centre_x, centre_y = rates.centre
    ax.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    left, right = np.geomspace(x_low, centre_x, 200), np.array([centre_x, x_high])
    edge = np.asarray(ridgeline.ridge(left, rates))
    ax.fill_between(left, y_low, edge, color=AREA_COLORS[ridgeline.NETWORK], linewidth=0, zorder=0)
    ax.fill_between(
        left,
        edge,
        max(y_high, edge.max()),
        color=AREA_COLORS[ridgeline.COMPUTE],
        linewidth=0,
        zorder=0,
    )
    ax.fill_between(
        right, y_low, centre_y, color=AREA_COLORS[ridgeline.MEMORY], linewidth=0, zorder=0
    )
    ax.fill_between(
        right, centre_y, y_high, color=AREA_COLORS[ridgeline.COMPUTE], linewidth=0, zorder=0
    )
    ax.axvline(
        centre_x,
        color=LINE_COLORS[ridgeline.NETWORK],
        linestyle=(0, (5, 3)),
        linewidth=1.1,
        zorder=1,
    )
    ax.axhline(
        centre_y,
        color=LINE_COLORS[ridgeline.MEMORY],
        linestyle=(0, (5, 3)),
        linewidth=1.1,
        zorder=1,
    )
    ax.plot(left, edge, color=INK, linewidth=2.2, zorder=2)
    ax.plot(right, [centre_y, centre_y], color=INK, linewidth=2.2, zorder=2)
    ax.plot([centre_x] * 2, [y_low, centre_y], color=INK, linewidth=2.2, zorder=2)
    covered = _draw_names(ax, rates) if names else []
    drawn = _drawable(points)
    for number, series in enumerate(dict.fromkeys(p.series for p in drawn)):
        mark, color = SERIES[number % len(SERIES)]
        mine = [p for p in drawn if p.series == series]
        ax.plot(
            [p.memory_intensity for p in mine],
            [p.arithmetic_intensity for p in mine],
            marker=mark,
            color=color,
            markeredgecolor="white",
            markeredgewidth=0.6,
            markersize=7,
            linewidth=0.8 if series else 0.0,
            alpha=0.95,
            zorder=4,
            label=plain(series),
        )
    plain_ticks(ax)
    ax.set(
        xlabel="memory intensity (byte of memory per byte of network)",
        ylabel="arithmetic intensity (FLOP per byte of memory)",
    )
    marks = [(p.memory_intensity, p.arithmetic_intensity) for p in drawn]
    before = set(ax.texts)
    placed = label_points(
        ax,
        [
            PointLabel(p.memory_intensity, p.arithmetic_intensity, plain(p.label, 24))
            for p in drawn
            if p.label
        ],
        marks + covered,
    )
    for text in set(ax.texts) - before:
        text.set_path_effects(
            [withStroke(linewidth=2.5, foreground="white", alpha=0.8)]
        )  # readable on the ridge too
    return placed


def ridgeline_figure(points: Sequence[PlanePoint], rates: ridgeline.Rates, title: str) -> Figure:
    """The plane as a figure of its own, with the rates and the centre below its title."""
    figure = new_figure(8.4, 6.4)
    ax = figure.subplots()
    n_left_out = len(points) - len(_drawable(points))
    x, y = rates.centre
    rates_text = (
        f"{_text_of(rates)}; centre ({x:.3g}, {y:.3g}), ridge at {rates.network_balance:.3g} FLOP"
        " per byte of network"
    )
    ax.set_title(
        f"{plain(title, 90)}\n{rates_text}"
        + (
            f"\n{n_left_out} points that send or compute nothing are not drawn"
            if n_left_out
            else ""
        ),
        fontsize=9.5,
    )
    draw_ridgeline(ax, points, rates)
    if len({p.series for p in points}) > 1:
        figure.legend(loc="outside lower center", ncols=min(7, len({p.series for p in points})))
    return figure


def principle_figure(rates: ridgeline.Rates) -> Figure:
    """How the plane is made (Checconi et al., Figure 2): the two rooflines' cuts, the quadrants
    they decide, lines of equal network intensity, the regions.
    """
    figure = new_figure(13.0, 7.6, gap_frac=0.03)
    axes = figure.subplots(2, 3).ravel()
    (x_low, x_high), (y_low, y_high) = limits((), rates)
    centre_x, centre_y = rates.centre
    for ax, text in zip(
        axes,
        (
            "a  compute or memory",
            "b  network or memory",
            "c  what both decide",
            "d  x y = k: equal network intensity",
            "e  the regions",
        ),
    ):
        ax.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
        ax.set_title(text, loc="left")
        ax.set(xlabel="memory intensity", ylabel="arithmetic intensity")
        plain_ticks(ax)
    above, below = (centre_y * y_high) ** 0.5, (centre_y * y_low) ** 0.5
    left, right = (centre_x * x_low) ** 0.5, (centre_x * x_high) ** 0.5

    def area(
        ax: Any, xs: tuple[float, float], ys: tuple[float, float], resource: int | None, text: str
    ) -> None:
        color = AREA_COLORS[resource] if resource is not None else "white"
        ax.fill_between(xs, ys[0], ys[1], color=color, linewidth=0, zorder=0)
        ax.text(
            (xs[0] * xs[1]) ** 0.5,
            (ys[0] * ys[1]) ** 0.5,
            text,
            ha="center",
            va="center",
            color=INK,
        )

    area(axes[0], (x_low, x_high), (centre_y, y_high), ridgeline.COMPUTE, "compute")
    area(axes[0], (x_low, x_high), (y_low, centre_y), ridgeline.MEMORY, "memory")
    area(axes[1], (x_low, centre_x), (y_low, y_high), ridgeline.NETWORK, "network")
    area(axes[1], (centre_x, x_high), (y_low, y_high), ridgeline.MEMORY, "memory")
    area(axes[2], (centre_x, x_high), (centre_y, y_high), ridgeline.COMPUTE, "compute")
    area(axes[2], (centre_x, x_high), (y_low, centre_y), ridgeline.MEMORY, "memory")
    area(axes[2], (x_low, centre_x), (y_low, centre_y), ridgeline.NETWORK, "network")
    area(axes[2], (x_low, centre_x), (centre_y, y_high), None, "network or compute")
    xs = np.geomspace(x_low, x_high, 50)
    for factor in (1 / 16, 1 / 4, 1.0, 4.0, 16.0):
        k = rates.network_balance * factor
        axes[3].plot(
            xs,
            k / xs,
            color=LINE_COLORS[ridgeline.COMPUTE if factor >= 1 else ridgeline.NETWORK],
            linewidth=2.0 if factor == 1 else 0.9,
        )
        middle = k**0.5 * (centre_x / centre_y) ** 0.5
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.2}
        axes[3].text(
            middle,
            k / middle,
            f"k = {k:,.3g}" if k < 1000 else f"k = {k:,.0f}",
            fontsize=8,
            ha="center",
            va="center",
            bbox=box,
        )
    for ax in axes[:4]:
        ax.axvline(
            centre_x,
            color=LINE_COLORS[ridgeline.NETWORK],
            linestyle=(0, (5, 3)),
            linewidth=1.1,
            visible=ax is not axes[0],
        )
        ax.axhline(
            centre_y,
            color=LINE_COLORS[ridgeline.MEMORY],
            linestyle=(0, (5, 3)),
            linewidth=1.1,
            visible=ax is not axes[1],
        )
    draw_ridgeline(axes[4], (), rates)
    axes[4].set(xlabel="memory intensity", ylabel="arithmetic intensity")
    axes[5].set_axis_off()
    legend = (
        f"above the blue line (peak / memory = {centre_y:.3g}) arithmetic is slower than memory;",
        (
            f"left of the red line (memory / network = {centre_x:.3g}) the network is slower than"
            " memory;"
        ),
        f"the green line of d (peak / network = {rates.network_balance:.3g}) parts the upper left.",
        _text_of(rates),
    )
    axes[5].text(
        0.0,
        0.95,
        "\n\n".join(legend),
        va="top",
        wrap=True,
        fontsize=9,
        color=DIM,
        transform=axes[5].transAxes,
    )
    for ax, (x, y) in ((axes[0], (left, above)), (axes[1], (right, below))):
        ax.plot([x], [y], alpha=0)  # keeps both halves in view
    return figure


def plane_surface_figure(
    points: Sequence[PlanePoint], rates: ridgeline.Rates, title: str
) -> Figure:
    """Attainable rate over the plane (Checconi et al., Figure 3), with one roofline at a fixed
    memory intensity and one at a fixed arithmetic intensity.
    """
    figure = new_figure(8.6, 7.0)
    ax = figure.add_subplot(projection="3d")
    (x_low, x_high), (y_low, y_high) = limits(points, rates)
    x, y = np.meshgrid(np.geomspace(x_low, x_high, 90), np.geomspace(y_low, y_high, 90))
    height = np.log10(np.asarray(ridgeline.attainable_flops_per_s(x, y, rates)))
    colors = np.array([to_rgba(AREA_COLORS[number]) for number in range(3)])[
        ridgeline.region(x, y, rates)
    ]
    ax.plot_surface(
        np.log10(x),
        np.log10(y),
        height,
        facecolors=colors,
        rstride=1,
        cstride=1,
        linewidth=0,
        antialiased=False,
        shade=True,
        alpha=0.9,
    )
    for number, (xs, ys, text) in enumerate(
        (
            (np.full(90, x_high), y[:, 0], "roofline of arithmetic and memory"),
            (
                x[0],
                np.full(90, rates.centre[1] * 4),
                (
                    f"roofline of arithmetic and network at {rates.centre[1] * 4:.3g} FLOP per byte"
                    " of memory"
                ),
            ),
        )
    ):
        z = np.log10(np.asarray(ridgeline.attainable_flops_per_s(xs, ys, rates)))
        color = LINE_COLORS[ridgeline.NETWORK if number == 0 else ridgeline.MEMORY]
        ax.plot(
            np.log10(xs), np.log10(ys), z + 0.02, color=color, linewidth=2, label=text, zorder=10
        )
        ax.plot(
            np.log10(xs),
            np.log10(ys),
            np.full(90, height.min()),
            color=color,
            linewidth=1,
            linestyle=(0, (4, 2)),
        )
    for p in _drawable(points):
        z = np.log10(
            float(
                ridgeline.attainable_flops_per_s(p.memory_intensity, p.arithmetic_intensity, rates)
            )
        )
        ax.plot(
            [np.log10(p.memory_intensity)],
            [np.log10(p.arithmetic_intensity)],
            [z + 0.03],
            marker="o",
            markersize=4,
            color=INK,
            zorder=11,
        )
    powers(ax.xaxis, x_low, x_high)
    powers(ax.yaxis, y_low, y_high)
    powers(ax.zaxis, 10 ** height.min(), 10 ** height.max(), "eng")
    ax.set(xlabel="memory intensity", ylabel="arithmetic intensity")
    ax.set_zlabel("attainable rate (FLOP/s)", labelpad=10)
    ax.view_init(elev=28, azim=-128)
    ax.set_box_aspect(None, zoom=0.95)
    ax.set_title(f"{plain(title, 80)}\n{_text_of(rates)}", fontsize=9.5)
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def plain_ticks(ax: Any) -> None:
    """Labels of a logarithmic plot as plain numbers, at whole powers only."""
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def powers(axis: Any, low: float, high: float, style: str = "plain") -> None:
    """Whole powers of ten as ticks of an axis of logarithms (3D axes have no logarithmic
    scale).
    """
    first, last = int(np.ceil(np.log10(low))), int(np.floor(np.log10(high)))
    step = max(1, (last - first + 5) // 6)
    places = list(range(first, last + 1, step)) or [round(np.log10(low * high) / 2)]
    labels = [
        (
            f"{10.0 ** (place % 3):g} {_PREFIXES.get(place // 3, '')}"
            if style == "eng"
            else f"{10.0**place:g}"
        )
        for place in places
    ]
    axis.set_ticks(places, labels)


def _drawable(points: Sequence[PlanePoint]) -> list[PlanePoint]:
    return [
        p for p in points if 0 < p.memory_intensity < np.inf and 0 < p.arithmetic_intensity < np.inf
    ]


def _draw_names(ax: Any, rates: ridgeline.Rates) -> list[tuple[float, float]]:
    """Each region's resource in its outer corner; the points that the words cover."""
    places = (
        (0.02, 0.02, "left", "bottom", ridgeline.NETWORK),
        (0.98, 0.02, "right", "bottom", ridgeline.MEMORY),
        (0.98, 0.98, "right", "top", ridgeline.COMPUTE),
    )
    texts = [
        ax.text(
            x,
            y,
            f"{ridgeline.RESOURCES[resource]} bound",
            ha=ha,
            va=va,
            transform=ax.transAxes,
            color=LINE_COLORS[resource],
            fontsize=10,
            fontweight="bold",
        )
        for x, y, ha, va, resource in places
    ]
    ax.figure.draw_without_rendering()
    edge = ax.transData.transform((rates.centre[0], 1.0))[0]
    if texts[0].get_window_extent().x1 > edge - 4:  # a narrow region
        texts[0].set_text(texts[0].get_text().replace(" ", "\n"))
    boxes = [text.get_window_extent() for text in texts]
    pixels = [
        (x, y)
        for box in boxes
        for x in np.arange(box.x0, box.x1 + 6, 6)
        for y in (box.y0, (box.y0 + box.y1) / 2, box.y1)
    ]
    return [tuple(ax.transData.inverted().transform(pixel)) for pixel in pixels]


def _text_of(rates: ridgeline.Rates) -> str:
    amounts = (
        format_si(rates.peak_flops_per_s, "FLOP/s"),
        format_si(rates.memory_bytes_per_s, "B/s"),
        format_si(rates.network_bytes_per_s, "B/s"),
    )
    return "{}, memory {}, network {}".format(*amounts)

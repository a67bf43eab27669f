"""The Ridgeline plane (Checconi et al. 2022): which of arithmetic, memory and network bounds
kernels, layers or batch sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, NullFormatter

from dlperf.core.units import format_si
from dlperf.models import ridgeline
from dlperf.models.ridgeline import COMPUTE, MEMORY, NETWORK
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
    plain_numbers,
)

AREA_COLORS = {COMPUTE: "#dcebd9", MEMORY: "#dbe7f3", NETWORK: "#f6e2d3"}
LINE_COLORS = {COMPUTE: GREEN, MEMORY: BLUE, NETWORK: VERMILLION}
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
    nothing has no position (x is infinite).
    """
    xs, ys = zip(rates.centre, *map(_position, _drawable(points)))
    return (min(xs) / 8, max(xs) * 8), (min(ys) / 8, max(ys) * 8)


def draw_ridgeline(
    ax: Any, points: Sequence[PlanePoint], rates: ridgeline.Rates, names: bool = True
) -> set[str]:
    """The plane on `ax`: regions, the cross of the centre, the ridge, and the points; the labels
    that were drawn. `names` writes each region's resource.

    Points that send nothing, or compute nothing, have no position on logarithmic axes and are left
    out; :func:`ridgeline_figure` counts them.
    """
    (x_low, x_high), (y_low, y_high) = limits(points, rates)
    centre_x, centre_y = rates.centre
    _plane_axes(ax, points, rates)
    left, right = np.geomspace(x_low, centre_x, 200), np.array([centre_x, x_high])
    edge = np.asarray(ridgeline.ridge(left, rates))
    for xs, bottom, top, resource in (
        (left, y_low, edge, NETWORK),
        (left, edge, max(y_high, edge.max()), COMPUTE),
        (right, y_low, centre_y, MEMORY),
        (right, centre_y, y_high, COMPUTE),
    ):
        ax.fill_between(xs, bottom, top, color=AREA_COLORS[resource], linewidth=0, zorder=0)
    _draw_cuts(ax, rates)
    for ridge in (
        (left, edge),
        (right, [centre_y] * 2),
        ([centre_x] * 2, [y_low, centre_y]),
    ):
        ax.plot(*ridge, color=INK, linewidth=2.2, zorder=2)
    covered = _draw_names(ax, rates) if names else []
    drawn = _drawable(points)
    draw_series(
        ax,
        drawn,
        ("memory_intensity", "arithmetic_intensity"),
        markeredgecolor="white",
        markeredgewidth=0.6,
        markersize=7,
        alpha=0.95,
        zorder=4,
    )
    ax.set(
        xlabel="memory intensity (byte of memory per byte of network)",
        ylabel="arithmetic intensity (FLOP per byte of memory)",
    )
    before = set(ax.texts)
    labels = [PointLabel(*_position(p), plain(p.label, 24)) for p in drawn if p.label]
    placed = label_points(ax, labels, [*map(_position, drawn), *covered])
    for text in set(ax.texts) - before:  # readable on the ridge too
        text.set_path_effects([withStroke(linewidth=2.5, foreground="white", alpha=0.8)])
    return placed


def draw_series(
    ax: Any,
    points: Sequence[Any],
    names: Sequence[str],
    scale: Callable[[Any], Any] = np.asarray,
    **style: Any,
) -> list[Any]:
    """The marks of each `series` of points, in their order and joined by a line where it has a
    name; the lines. Coordinates are the attributes `names`, as `scale` converts them; points
    without a finite one are left out.
    """
    lines = []
    for number, series in enumerate(dict.fromkeys(p.series for p in points)):
        mark, color = SERIES[number % len(SERIES)]
        places = [[getattr(p, name) for name in names] for p in points if p.series == series]
        finite = np.array([place for place in places if np.isfinite(place).all()])
        own: dict[str, Any] = {"marker": mark, "color": color, "label": plain(series)}
        own["linewidth"] = 0.8 if series else 0.0
        lines += ax.plot(*scale(finite.reshape(-1, len(names)).T), **{**own, **style})
    return lines


def ridgeline_figure(points: Sequence[PlanePoint], rates: ridgeline.Rates, title: str) -> Figure:
    """The plane as a figure of its own, with the rates and the centre below its title."""
    figure = new_figure(8.4, 6.4)
    ax = figure.subplots()
    n_left_out = len(points) - len(_drawable(points))
    x, y = rates.centre
    lines = [
        plain(title, 90),
        (
            f"{_text_of(rates)}; centre ({x:.3g}, {y:.3g}), ridge at"
            f" {rates.network_balance:.3g} FLOP per byte of network"
        ),
    ]
    if n_left_out:
        lines.append(f"{n_left_out} points that send or compute nothing are not drawn")
    ax.set_title("\n".join(lines), fontsize=9.5)
    draw_ridgeline(ax, points, rates)
    if (n_series := len({p.series for p in points})) > 1:
        figure.legend(loc="outside lower center", ncols=min(7, n_series))
    return figure


def principle_figure(rates: ridgeline.Rates) -> Figure:
    """How the plane is made (Checconi et al., Figure 2): the two rooflines' cuts, the quadrants
    they decide, lines of equal network intensity, the regions.
    """
    figure = new_figure(13.0, 7.6, gap_frac=0.03)
    *axes, last = figure.subplots(2, 3).ravel()
    (x_low, x_high), (y_low, y_high) = limits((), rates)
    centre_x, centre_y = rates.centre
    left, right, whole = (x_low, centre_x), (centre_x, x_high), (x_low, x_high)
    below, above = (y_low, centre_y), (centre_y, y_high)
    titles = (
        "a  compute or memory",
        "b  network or memory",
        "c  what both decide",
        "d  x y = k: equal network intensity",
        "e  the regions",
    )
    areas: tuple[tuple[tuple[Any, Any, int | None], ...], ...] = (
        ((whole, above, COMPUTE), (whole, below, MEMORY)),
        ((left, (y_low, y_high), NETWORK), (right, (y_low, y_high), MEMORY)),
        (
            (right, above, COMPUTE),
            (right, below, MEMORY),
            (left, below, NETWORK),
            (left, above, None),
        ),
    )
    cuts = ((MEMORY,), (NETWORK,), (NETWORK, MEMORY), (NETWORK, MEMORY))
    for ax, title in zip(axes, titles):
        _plane_axes(ax, (), rates)
        ax.set_title(title, loc="left")
    for ax, parts in zip(axes, areas):
        for xs, ys, resource in parts:
            color = "white" if resource is None else AREA_COLORS[resource]
            name = "network or compute" if resource is None else ridgeline.RESOURCES[resource]
            middle = (xs[0] * xs[1]) ** 0.5, (ys[0] * ys[1]) ** 0.5
            ax.fill_between(xs, *ys, color=color, linewidth=0, zorder=0)
            ax.text(*middle, name, ha="center", va="center", color=INK)
    grid = np.geomspace(x_low, x_high, 50)
    for factor in (1 / 16, 1 / 4, 1.0, 4.0, 16.0):
        k = rates.network_balance * factor
        x = (k * centre_x / centre_y) ** 0.5
        color = LINE_COLORS[COMPUTE if factor >= 1 else NETWORK]
        axes[3].plot(grid, k / grid, color=color, linewidth=2.0 if factor == 1 else 0.9)
        axes[3].text(
            x,
            k / x,
            f"k = {k:,.3g}" if k < 1000 else f"k = {k:,.0f}",
            fontsize=8,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
        )
    for ax, resources in zip(axes, cuts):
        _draw_cuts(ax, rates, resources)
    draw_ridgeline(axes[4], (), rates)
    axes[4].set(xlabel="memory intensity", ylabel="arithmetic intensity")
    legend = (
        f"above the blue line (peak / memory = {centre_y:.3g}) arithmetic is slower than memory;",
        (
            f"left of the red line (memory / network = {centre_x:.3g}) the network is slower than"
            " memory;"
        ),
        f"the green line of d (peak / network = {rates.network_balance:.3g}) parts the upper left.",
        _text_of(rates),
    )
    last.set_axis_off()
    last.text(
        0.0,
        0.95,
        "\n\n".join(legend),
        va="top",
        wrap=True,
        fontsize=9,
        color=DIM,
        transform=last.transAxes,
    )
    return figure


def plane_surface_figure(
    points: Sequence[PlanePoint], rates: ridgeline.Rates, title: str
) -> Figure:
    """Attainable rate over the plane (Checconi et al., Figure 3), with one roofline at a fixed
    memory intensity and one at a fixed arithmetic intensity.
    """

    def height_at(x: Any, y: Any) -> Any:
        return np.log10(np.asarray(ridgeline.attainable_flops_per_s(x, y, rates)))

    figure = new_figure(8.6, 7.0)
    ax = figure.add_subplot(projection="3d")
    grids = [np.geomspace(*ends, 90) for ends in limits(points, rates)]
    x, y = np.meshgrid(*grids)
    height = height_at(x, y)
    areas = np.array([to_rgba(AREA_COLORS[number]) for number in range(3)])
    draw_surface(ax, x, y, height, facecolors=areas[ridgeline.region(x, y, rates)], alpha=0.9)
    level = rates.centre[1] * 4
    name = f"roofline of arithmetic and network at {level:.3g} FLOP per byte of memory"
    for xs, ys, text, color in (
        (x[:, -1], y[:, 0], "roofline of arithmetic and memory", LINE_COLORS[NETWORK]),
        (x[0], np.full(90, level), name, LINE_COLORS[MEMORY]),
    ):
        on_floor = np.log10([xs, ys])
        z = height_at(xs, ys)
        ax.plot(*on_floor, z + 0.02, color=color, linewidth=2, label=text, zorder=10)
        ax.plot(*on_floor, height.min(), color=color, linewidth=1, linestyle=(0, (4, 2)))
    for p in _drawable(points):
        z = float(height_at(*_position(p))) + 0.03
        at = np.log10([[value] for value in _position(p)])
        ax.plot(*at, [z], marker="o", markersize=4, color=INK, zorder=11)
    ax.set(xlabel="memory intensity", ylabel="arithmetic intensity")
    ax.set_zlabel("attainable rate (FLOP/s)", labelpad=10)
    ax.view_init(elev=28, azim=-128)
    ax.set_title(f"{plain(title, 80)}\n{_text_of(rates)}", fontsize=9.5)
    figure.legend(loc="outside lower center", ncols=1)
    return figure


def draw_surface(
    ax: Any,
    x: Any,
    y: Any,
    height: Any,
    heights: tuple[float, float] | None = None,
    **style: Any,
) -> None:
    """The surface of a roofline over a grid of intensities; `height` is the logarithm of the rate,
    in FLOP/s, `heights` the range of its axis.
    """
    style = {"rstride": 1, "cstride": 1, "linewidth": 0, "antialiased": False, **style}
    ax.plot_surface(np.log10(x), np.log10(y), height, **style)
    _powers(ax.xaxis, np.log10(x[0]), "{:g}".format)
    _powers(ax.yaxis, np.log10(y[:, 0]), "{:g}".format)
    _powers(ax.zaxis, heights or height, EngFormatter(sep=" "))
    ax.set_box_aspect(None, zoom=0.95)


def _powers(axis: Any, exponents: Any, text: Callable[[float], str]) -> None:
    """Whole powers of ten as ticks of an axis of logarithms (3D axes have no logarithmic
    scale).
    """
    low, high = np.min(exponents), np.max(exponents)
    first, last = int(np.ceil(low)), int(np.floor(high))
    step = max(1, (last - first + 5) // 6)
    ticks = list(range(first, last + 1, step)) or [round((low + high) / 2)]
    axis.set_ticks(ticks, [text(10.0**tick) for tick in ticks])


def _plane_axes(ax: Any, points: Sequence[PlanePoint], rates: ridgeline.Rates) -> None:
    """Logarithmic axes of the plane, with plain numbers at whole powers only."""
    x_limits, y_limits = limits(points, rates)
    ax.set(xscale="log", yscale="log", xlim=x_limits, ylim=y_limits)
    ax.set(xlabel="memory intensity", ylabel="arithmetic intensity")
    for axis in (ax.xaxis, ax.yaxis):
        plain_numbers(axis)
        axis.set_minor_formatter(NullFormatter())


def _draw_cuts(
    ax: Any, rates: ridgeline.Rates, resources: Sequence[int] = (NETWORK, MEMORY)
) -> None:
    """The lines through the centre, beyond which the network and the memory are slower."""
    for resource in resources:
        line, at = (ax.axvline, 0) if resource == NETWORK else (ax.axhline, 1)
        style = {"color": LINE_COLORS[resource], "linestyle": (0, (5, 3))}
        line(rates.centre[at], linewidth=1.1, zorder=1, **style)


def _position(point: PlanePoint) -> tuple[float, float]:
    return point.memory_intensity, point.arithmetic_intensity


def _drawable(points: Sequence[PlanePoint]) -> list[PlanePoint]:
    return [p for p in points if all(0 < value < np.inf for value in _position(p))]


def _draw_names(ax: Any, rates: ridgeline.Rates) -> list[tuple[float, float]]:
    """Each region's resource in its outer corner; the points that the words cover."""
    texts = [
        ax.text(
            x,
            y,
            f"{ridgeline.RESOURCES[resource]} bound",
            ha="left" if x < 0.5 else "right",
            va="bottom" if y < 0.5 else "top",
            transform=ax.transAxes,
            color=LINE_COLORS[resource],
            fontsize=10,
            fontweight="bold",
        )
        for x, y, resource in ((0.02, 0.02, NETWORK), (0.98, 0.02, MEMORY), (0.98, 0.98, COMPUTE))
    ]
    ax.figure.draw_without_rendering()
    edge = ax.transData.transform((rates.centre[0], 1.0))[0]
    if texts[0].get_window_extent().x1 > edge - 4:  # a narrow region
        texts[0].set_text(texts[0].get_text().replace(" ", "\n"))
    pixels = [
        (x, y)
        for box in (text.get_window_extent() for text in texts)
        for x in np.arange(box.x0, box.x1 + 6, 6)
        for y in (box.y0, (box.y0 + box.y1) / 2, box.y1)
    ]
    return list(map(tuple, ax.transData.inverted().transform(pixels)))


def _text_of(rates: ridgeline.Rates) -> str:
    return (
        f"{format_si(rates.peak_flops_per_s, 'FLOP/s')},"
        f" memory {format_si(rates.memory_bytes_per_s, 'B/s')},"
        f" network {format_si(rates.network_bytes_per_s, 'B/s')}"
    )

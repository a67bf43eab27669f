"""Rooflines of three resources, arithmetic, memory and network: the Ridgeline plane (Checconi et
al. 2022), and the roofline with communication (Cardwell 2019, chapter 2) as a pair of 2D plots and
as a 3D surface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import NullFormatter

from dlperf.core.units import format_si
from dlperf.models import ridgeline
from dlperf.models.ridgeline import COMPUTE, MEMORY, NETWORK
from dlperf.models.roofline import attainable_flops_per_s, attainable_with_network_flops_per_s
from dlperf.report.drawing import (
    BLUE,
    DIM,
    GREEN,
    INK,
    VERMILLION,
    PointLabel,
    draw_series,
    draw_surface,
    label_points,
    new_figure,
    plain,
    plain_numbers,
    rate_axes,
)

AREA_COLORS = {COMPUTE: "#dcebd9", MEMORY: "#dbe7f3", NETWORK: "#f6e2d3"}
LINE_COLORS = {COMPUTE: GREEN, MEMORY: BLUE, NETWORK: VERMILLION}


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


def draw_ridgeline(ax: Any, points: Sequence[PlanePoint], rates: ridgeline.Rates) -> set[str]:
    """The plane on `ax`: regions with their resources, the cross of the centre, the ridge, and the
    points; the labels that were drawn.

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
    covered = _draw_names(ax, rates)
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


# -- the roofline with communication ---------------------------------------------------------------

SYSTEM_STYLES = (
    (VERMILLION, "solid"),
    (GREEN, (0, (6, 2))),
    (BLUE, (0, (4, 1.5, 1, 1.5))),
    (INK, (0, (1, 1.2))),
)
_AXES = (
    ("communication", "communication arithmetic intensity", "network"),
    ("operational", "operational intensity", "memory"),
)


@dataclass(frozen=True)
class MeasuredPoint:
    """A run: OI and CAI in FLOP per byte (CAI infinite where nothing is sent), and the rate that
    one process reached.
    """

    operational: float
    communication: float
    flops_per_s: float
    series: str = ""


@dataclass(frozen=True)
class System:
    """A machine under its name."""

    name: str
    rates: ridgeline.Rates


def pair_figure(
    systems: Sequence[System], points: Sequence[MeasuredPoint] = (), title: str = ""
) -> Figure:
    """The 2D pair (Figures 2.2 and 2.3): communication roofline left, original roofline right, the
    same points in both; ridge points are marked.

    A point that sends nothing is drawn on the right alone.
    """
    figure = new_figure(11.6, 5.4, gap_frac=0.04)
    axes = figure.subplots(1, 2, sharey=True)
    several = len(systems) > 1
    peaks = [system.rates.peak_flops_per_s for system in systems]
    heights = [*peaks, *(p.flops_per_s for p in points)]
    for ax, (intensity, name, resource) in zip(axes, _AXES):
        bandwidths = [getattr(s.rates, f"{resource}_bytes_per_s") for s in systems]
        ridges = [peak / bandwidth for peak, bandwidth in zip(peaks, bandwidths)]
        xs = [x for p in points if 0 < (x := getattr(p, intensity)) < np.inf]
        room = (3, 3) if xs else (100, 10)
        x_limits = min([*xs, *ridges]) / room[0], max([*xs, *ridges]) * room[1]
        grid = np.geomspace(*x_limits, 400)
        for number, (system, peak, bandwidth) in enumerate(zip(systems, peaks, bandwidths)):
            color, style = SYSTEM_STYLES[number % len(SYSTEM_STYLES)] if several else (INK, "solid")
            roof = np.asarray(attainable_flops_per_s(grid, peak, bandwidth))
            ridge = ridges[number]
            label = f"{format_si(bandwidth, 'B/s')}, ridge at {ridge:.3g}"
            label = plain(f"{system.name}: {label}" if several else label, 60)
            ax.plot(grid, roof, color=color, linestyle=style, linewidth=1.6, label=label, zorder=3)
            drop = [ridge, ridge], [peak / 1e9, peak]
            ax.plot(*drop, color=color, linestyle=":", linewidth=0.9, zorder=1)
            heights += [] if points else [float(roof.min())]
        rate_axes(ax, x_limits, (min(heights) / 3, max(peaks) * 3))
        ax.set_xlabel(f"{name} (FLOP per byte of {resource})")
        ax.legend(loc="lower right", framealpha=0.9, frameon=True, edgecolor="none")
        handles = draw_series(
            ax,
            points,
            (intensity, "flops_per_s"),
            markeredgecolor="white",
            markeredgewidth=0.6,
            markersize=6.5,
            linewidth=0.8,
            zorder=4,
        )
    axes[0].set_ylabel("rate of one process (FLOP/s)" if points else "attainable rate (FLOP/s)")
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=min(7, len(handles)))
    if title:
        figure.suptitle(plain(title, 110), fontsize=10.5)
    return figure


def surface_figure(
    systems: Sequence[System], points: Sequence[MeasuredPoint] = (), title: str = ""
) -> Figure:
    """The 3D surface of equation 2.5 for each system, all axes logarithmic (Figure 2.12), with
    points on it (Figure 2.13). What sends nothing is not drawn.
    """
    shown = [p for p in points if p.communication < np.inf]
    grids = []
    for intensity, _, resource in reversed(_AXES):
        xs = [
            s.rates.peak_flops_per_s / getattr(s.rates, f"{resource}_bytes_per_s") for s in systems
        ]
        xs += [getattr(p, intensity) for p in shown]
        n_cells = 64 if shown else 128
        grids.append(np.geomspace(min(xs) / (2.0 if shown else 20.0), max(xs) * 2, n_cells))
    oi, cai = np.meshgrid(*grids)
    surfaces = [
        np.log10(
            np.asarray(
                attainable_with_network_flops_per_s(
                    oi, cai, r.peak_flops_per_s, r.memory_bytes_per_s, r.network_bytes_per_s
                )
            )
        )
        for r in (system.rates for system in systems)
    ]
    low = min([surface.min() for surface in surfaces] + [np.log10(p.flops_per_s) for p in shown])
    high = max(surface.max() for surface in surfaces)
    figure = new_figure(1.6 + 5.2 * len(systems), 5.8 if len(systems) > 1 else 6.4)
    for number, (system, surface) in enumerate(zip(systems, surfaces)):
        ax: Any = figure.add_subplot(1, len(systems), number + 1, projection="3d")
        look = {"cmap": "viridis", "vmin": low, "vmax": high, "alpha": 0.75 if shown else 1.0}
        draw_surface(ax, oi, cai, surface, (low, high), **look)
        draw_series(
            ax,
            shown,
            ("operational", "communication", "flops_per_s"),
            np.log10,
            markersize=5,
            linewidth=0.8,
            zorder=10,
            **({"label": None} if number else {}),
        )
        ax.set(zlim=(low, high + 0.1), xlabel="OI (FLOP/byte)", ylabel="CAI (FLOP/byte)")
        ax.set_zlabel("attainable (FLOP/s)", labelpad=8)
        ax.view_init(elev=24, azim=-135)
        ax.set_title(plain(system.name), fontsize=10)
    if shown:
        figure.legend(loc="outside lower center", ncols=7)
    if title:
        figure.suptitle(plain(title, 110), fontsize=10.5)
    return figure

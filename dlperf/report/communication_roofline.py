"""The roofline with communication (Cardwell 2019, chapter 2): the pair of 2D plots, and the 3D
surface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from dlperf.core.units import format_si
from dlperf.models import ridgeline
from dlperf.models.roofline import attainable_flops_per_s, attainable_with_network_flops_per_s
from dlperf.report.drawing import BLUE, GREEN, INK, VERMILLION, new_figure, plain, rate_axes
from dlperf.report.ridgeline import draw_series, draw_surface

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

"""The roofline with communication (Cardwell 2019, chapter 2): the pair of 2D plots, and the 3D
surface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dlperf.core.units import format_si
from dlperf.models import ridgeline
from dlperf.models.roofline import attainable_flops_per_s, attainable_with_network_flops_per_s
from dlperf.report.drawing import BLUE, GREEN, INK, VERMILLION, new_figure, plain
from dlperf.report.ridgeline import SERIES, powers

SYSTEM_STYLES = (
    (VERMILLION, "solid"),
    (GREEN, (0, (6, 2))),
    (BLUE, (0, (4, 1.5, 1, 1.5))),
    (INK, (0, (1, 1.2))),
)
_AXES = (("communication arithmetic intensity", "network"), ("operational intensity", "memory"))


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
    top = max(system.rates.peak_flops_per_s for system in systems)
    heights: list[float] = [top]
    for side, (ax, (name, resource)) in enumerate(zip(axes, _AXES)):
        bandwidths = [
            s.rates.network_bytes_per_s if side == 0 else s.rates.memory_bytes_per_s
            for s in systems
        ]
        xs = [
            x for p in points if 0 < (x := p.communication if side == 0 else p.operational) < np.inf
        ]
        ridges = [s.rates.peak_flops_per_s / bandwidth for s, bandwidth in zip(systems, bandwidths)]
        x_low, x_high = (
            min([*xs, *ridges]) / (3 if xs else 100),
            max([*xs, *ridges]) * (3 if xs else 10),
        )
        grid = np.geomspace(x_low, x_high, 400)
        for number, (system, bandwidth, ridge) in enumerate(zip(systems, bandwidths, ridges)):
            color, style = (
                SYSTEM_STYLES[number % len(SYSTEM_STYLES)] if len(systems) > 1 else (INK, "solid")
            )
            roof = np.asarray(
                attainable_flops_per_s(grid, system.rates.peak_flops_per_s, bandwidth)
            )
            label = (
                f"{system.name}: " if len(systems) > 1 else ""
            ) + f"{format_si(bandwidth, 'B/s')}, ridge at {ridge:.3g}"
            ax.plot(
                grid,
                roof,
                color=color,
                linestyle=style,
                linewidth=1.6,
                label=plain(label, 60),
                zorder=3,
            )
            ax.plot(
                [ridge] * 2,
                [system.rates.peak_flops_per_s / 1e9, system.rates.peak_flops_per_s],
                color=color,
                linestyle=":",
                linewidth=0.9,
                zorder=1,
            )
            heights.append(float(roof.min()) if not points else system.rates.peak_flops_per_s)
        ax.set(
            xscale="log",
            yscale="log",
            xlim=(x_low, x_high),
            xlabel=f"{name} (FLOP per byte of {resource})",
        )
        ax.grid(True)
        ax.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        ax.legend(loc="lower right", framealpha=0.9, frameon=True, edgecolor="none")
    handles = []
    for number, series in enumerate(dict.fromkeys(p.series for p in points)):
        mark, color = SERIES[number % len(SERIES)]
        mine = [p for p in points if p.series == series]
        heights += [p.flops_per_s for p in mine]
        for side, ax in enumerate(axes):
            shown = [p for p in mine if side == 1 or p.communication < np.inf]
            xs = [p.communication if side == 0 else p.operational for p in shown]
            (line,) = ax.plot(
                xs,
                [p.flops_per_s for p in shown],
                marker=mark,
                color=color,
                markeredgecolor="white",
                markeredgewidth=0.6,
                markersize=6.5,
                linewidth=0.8,
                zorder=4,
            )
        line.set_label(plain(series))
        handles.append(line)
    axes[0].set(
        ylim=(min(heights) / 3, top * 3),
        ylabel="attainable rate (FLOP/s)" if not points else "rate of one process (FLOP/s)",
    )
    axes[0].yaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=" "))
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
    operational = [s.rates.peak_flops_per_s / s.rates.memory_bytes_per_s for s in systems] + [
        p.operational for p in shown
    ]
    communication = [s.rates.peak_flops_per_s / s.rates.network_bytes_per_s for s in systems] + [
        p.communication for p in shown
    ]
    room = 2.0 if shown else 20.0
    oi = np.geomspace(min(operational) / room, max(operational) * 2, 128 if not shown else 64)
    cai = np.geomspace(min(communication) / room, max(communication) * 2, len(oi))
    across, along = np.meshgrid(oi, cai)
    surfaces = [
        np.log10(
            np.asarray(
                attainable_with_network_flops_per_s(
                    across, along, r.peak_flops_per_s, r.memory_bytes_per_s, r.network_bytes_per_s
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
        ax.plot_surface(
            np.log10(across),
            np.log10(along),
            surface,
            cmap="viridis",
            vmin=low,
            vmax=high,
            rstride=1,
            cstride=1,
            linewidth=0,
            antialiased=False,
            alpha=0.75 if shown else 1.0,
        )
        for place, series in enumerate(dict.fromkeys(p.series for p in shown)):
            mark, color = SERIES[place % len(SERIES)]
            mine = [p for p in shown if p.series == series]
            coordinates = [
                [np.log10(getattr(p, name)) for p in mine]
                for name in ("operational", "communication", "flops_per_s")
            ]
            ax.plot(
                *coordinates,
                marker=mark,
                color=color,
                markersize=5,
                linewidth=0.8,
                zorder=10,
                label=plain(series) if number == 0 else None,
            )
        powers(ax.xaxis, oi[0], oi[-1])
        powers(ax.yaxis, cai[0], cai[-1])
        powers(ax.zaxis, 10**low, 10**high, "eng")
        ax.set(zlim=(low, high + 0.1), xlabel="OI (FLOP/byte)", ylabel="CAI (FLOP/byte)")
        ax.set_zlabel("attainable (FLOP/s)", labelpad=8)
        ax.view_init(elev=24, azim=-135)
        ax.set_box_aspect(None, zoom=0.95)
        ax.set_title(plain(system.name), fontsize=10)
    if shown:
        figure.legend(loc="outside lower center", ncols=7)
    if title:
        figure.suptitle(plain(title, 110), fontsize=10.5)
    return figure

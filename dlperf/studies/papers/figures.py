"""The papers' figures that follow from printed numbers, drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dlperf.core.files import write_bytes, write_text
from dlperf.models import ridgeline as model
from dlperf.report.communication_roofline import MeasuredPoint, System, pair_figure, surface_figure
from dlperf.report.drawing import DIM, INK, new_figure, own_style, seconds_axis, to_png
from dlperf.report.ridgeline import (
    PlanePoint,
    plane_surface_figure,
    principle_figure,
    ridgeline_figure,
)
from dlperf.report.writing import check_folder, make_folder
from dlperf.studies.papers import cardwell_parallel, ridgeline
from dlperf.studies.papers.tables import Table

_FILE_WIDTH = 1000
"""Columns of text in a file, which has room for all."""
_SIZES = tuple(242 * 4**power for power in range(5))
"""SUMMA's sizes between those of Table 2.5."""


def cardwell_figures() -> dict[str, Figure]:
    """Figures 2.2 and 2.12 (three systems), 2.3 and 2.13 (SUMMA); the measured points were not
    published, so those of the last two lie on their bound.
    """
    systems = [System(system.name, system.rates) for system in cardwell_parallel.TABLE_2_3]
    found = {
        "figure-2.2-rooflines": pair_figure(
            systems, title="Cardwell 2019, Figure 2.2: communication roofline and original roofline"
        ),
        "figure-2.12-surfaces": surface_figure(
            systems, title="Cardwell 2019, Figure 2.12: the roofline with communication"
        ),
    }
    summa = cardwell_parallel.ALGORITHMS[0]
    for system in systems:
        points = []
        for size in _SIZES:
            work = summa.work(size)
            seconds = model.projected_s(
                work.flops, work.memory_bytes, work.network_bytes, system.rates
            )
            points.append(
                MeasuredPoint(
                    float(work.operational_intensity),
                    float(work.communication_intensity),
                    float(work.flops / seconds),
                    "SUMMA, bound",
                )
            )
        name = system.name.lower().replace(" ", "-")
        sizes = f"N = {_SIZES[0]} to {_SIZES[-1]:,}"
        found[f"figure-2.3-{name}"] = pair_figure(
            [system],
            points,
            f"Cardwell 2019, Figure 2.3, {system.name}: SUMMA on 11 x 11 processes, {sizes}",
        )
        found[f"figure-2.13-{name}"] = surface_figure(
            [system], points, f"Cardwell 2019, Figure 2.13: SUMMA, {sizes}"
        )
    return found


def ridgeline_figures() -> dict[str, Figure]:
    """Figures 2, 3, 4 and 6 of the Ridgeline."""
    rates = ridgeline.CASCADE_LAKE
    on_plane = [
        PlanePoint(*ridgeline.place(b), str(b), "batch size")
        for b in ridgeline.BATCH_SIZES
        if b >= ridgeline.FIRST_ON_RIDGELINE
    ]
    title = "4096 x 4096 layer by batch size, Cascade Lake (Checconi et al. 2022, Figure 6a)"
    return {
        "figure-2-principle": principle_figure(rates),
        "figure-3-surface": plane_surface_figure(
            on_plane, rates, "Attainable rate over the plane (Checconi et al. 2022, Figure 3)"
        ),
        "figure-4-roofline": _case_study(),
        "figure-6-ridgeline": ridgeline_figure(on_plane, rates, title),
        "figure-6-all-batches": ridgeline_figure(
            [PlanePoint(*ridgeline.place(b), str(b), "batch size") for b in ridgeline.BATCH_SIZES],
            rates,
            "The same layer from batch 1 on",
        ),
    }


def _case_study() -> Figure:
    """Figure 4: arithmetic intensity, roofline, and the times of computing and all-reduce, by batch
    size; 6b: the projected time.
    """
    rates, batches = ridgeline.CASCADE_LAKE, np.array(ridgeline.BATCH_SIZES)
    terms = np.array([model.terms_s(*ridgeline.counts(b), rates) for b in ridgeline.BATCH_SIZES])
    intensity = np.array([ridgeline.place(b)[1] for b in ridgeline.BATCH_SIZES])
    figure = new_figure(13.6, 4.4, gap_frac=0.04)
    axes = figure.subplots(1, 3)
    axes[0].plot(batches, intensity, marker="o", markersize=4, color=INK)
    axes[0].axhline(rates.centre[1], color="#d9822b", linewidth=1.4)
    axes[0].annotate(
        f"balance {rates.centre[1]:g}",
        (batches[0], rates.centre[1]),
        xytext=(2, 4),
        textcoords="offset points",
        color="#a85f16",
    )
    axes[0].set_title("4a  arithmetic intensity", loc="left")
    axes[0].set_ylabel("FLOP per byte of memory")
    grid = np.geomspace(intensity[0] / 2, intensity[-1] * 2, 200)
    axes[1].plot(
        grid,
        np.minimum(rates.peak_flops_per_s, grid * rates.memory_bytes_per_s) / 1e12,
        color=DIM,
        linewidth=1.4,
    )
    axes[1].plot(
        intensity,
        np.minimum(rates.peak_flops_per_s, intensity * rates.memory_bytes_per_s) / 1e12,
        marker="o",
        markersize=4,
        color=INK,
        linewidth=0,
    )
    axes[1].set_title("4b  roofline", loc="left")
    axes[1].set_ylabel("attainable TFLOP/s")
    node = terms[:, : model.NETWORK].max(axis=1)
    axes[2].plot(batches, node, marker="o", markersize=4, color=INK, label="layer on the node")
    axes[2].plot(
        batches, terms[:, model.NETWORK], color="#c1440e", linewidth=1.6, label="all-reduce"
    )
    axes[2].plot(
        batches,
        terms.max(axis=1),
        color="#8fb8de",
        linewidth=5,
        alpha=0.7,
        zorder=0,
        label="projected (6b)",
    )
    axes[2].set_title("4c, 6b  times of a step", loc="left")
    axes[2].set_ylabel("time")
    axes[2].legend(loc="upper left")
    for ax, name in zip(axes, ("batch size", "FLOP per byte of memory", "batch size")):
        ax.set_xscale("log", base=2 if name == "batch size" else 10)
        ax.set_yscale("log")
        ax.set_xlabel(name)
        ax.grid(True)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    seconds_axis(axes[2].yaxis)
    figure.suptitle(
        "4096 x 4096 fully connected layer, fp32, one Cascade Lake socket (Checconi et al. 2022,"
        " Figures 4 and 6b)",
        fontsize=10.5,
    )
    return figure


FIGURES: Mapping[str, Callable[[], dict[str, Figure]]] = {
    "cardwell": cardwell_figures,
    "ridgeline": ridgeline_figures,
}
"""The papers with figures, by short name."""


def write(tables: Mapping[str, list[Table]], folder: str | Path, force: bool = False) -> list[Path]:
    """Write each paper's tables as ``PAPER.txt`` and its figures as ``PAPER-FIGURE.png``; the
    files.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    check_folder(folder, force)
    folder = make_folder(folder)
    written = []
    for paper, own in tables.items():
        path = folder / f"{paper}.txt"
        write_text(
            path, "dlperf reproduce\n\n" + "\n\n".join(table.to_text(_FILE_WIDTH) for table in own)
        )
        written.append(path)
        with own_style():
            figures = FIGURES[paper]() if paper in FIGURES else {}
        for name, figure in figures.items():
            path = folder / f"{paper}-{name}.png"
            write_bytes(path, to_png(figure, 130, f"dlperf reproduce {paper}: {name}"))
            written.append(path)
    return written

"""The papers' figures that follow from printed numbers, drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from dlperf.models import ridgeline as model
from dlperf.models.roofline import attainable_flops_per_s
from dlperf.report.drawing import DIM, INK, new_figure, seconds_axis, to_pngs
from dlperf.report.ridgeline import (
    MeasuredPoint,
    PlanePoint,
    System,
    pair_figure,
    plane_surface_figure,
    principle_figure,
    ridgeline_figure,
    surface_figure,
)
from dlperf.report.writing import write_files
from dlperf.studies.papers import cardwell, ridgeline
from dlperf.studies.papers.tables import Table

_FILE_WIDTH = 1000
"""Columns of text in a file, which has room for all."""
_SIZES = tuple(242 * 4**power for power in range(5))
"""SUMMA's sizes between those of Table 2.5."""


Draw = Callable[[], Figure]


def cardwell_figures() -> dict[str, Draw]:
    """Figures 2.2 and 2.12 (three systems), 2.3 and 2.13 (SUMMA); the measured points were not
    published, so those of the last two lie on their bound.
    """
    systems = [System(system.name, system.rates) for system in cardwell.TABLE_2_3]
    found: dict[str, Draw] = {
        "figure-2.2-rooflines": partial(
            pair_figure,
            systems,
            title="Cardwell 2019, Figure 2.2: communication roofline and original roofline",
        ),
        "figure-2.12-surfaces": partial(
            surface_figure,
            systems,
            title="Cardwell 2019, Figure 2.12: the roofline with communication",
        ),
    }
    for system in systems:
        points = [_summa_point(size, system.rates) for size in _SIZES]
        name = system.name.lower().replace(" ", "-")
        sizes = f"N = {_SIZES[0]} to {_SIZES[-1]:,}"
        found[f"figure-2.3-{name}"] = partial(
            pair_figure,
            [system],
            points,
            f"Cardwell 2019, Figure 2.3, {system.name}: SUMMA on 11 x 11 processes, {sizes}",
        )
        found[f"figure-2.13-{name}"] = partial(
            surface_figure, [system], points, f"Cardwell 2019, Figure 2.13: SUMMA, {sizes}"
        )
    return found


def _summa_point(size: int, rates: model.Rates) -> MeasuredPoint:
    """SUMMA on its bound."""
    work = cardwell.ALGORITHMS[0].work(size)
    seconds = model.projected_s(work.flops, work.memory_bytes, work.network_bytes, rates)
    return MeasuredPoint(
        float(work.operational_intensity),
        float(work.communication_intensity),
        float(work.flops / seconds),
        "SUMMA, bound",
    )


def ridgeline_figures() -> dict[str, Draw]:
    """Figures 2, 3, 4 and 6 of the Ridgeline."""
    rates = ridgeline.CASCADE_LAKE
    points = {
        b: PlanePoint(*ridgeline.place(b), str(b), "batch size") for b in ridgeline.BATCH_SIZES
    }
    on_plane = [point for b, point in points.items() if b >= ridgeline.FIRST_ON_RIDGELINE]
    title = "4096 x 4096 layer by batch size, Cascade Lake (Checconi et al. 2022, Figure 6a)"
    return {
        "figure-2-principle": partial(principle_figure, rates),
        "figure-3-surface": partial(
            plane_surface_figure,
            on_plane,
            rates,
            "Attainable rate over the plane (Checconi et al. 2022, Figure 3)",
        ),
        "figure-4-roofline": _case_study,
        "figure-6-ridgeline": partial(ridgeline_figure, on_plane, rates, title),
        "figure-6-all-batches": partial(
            ridgeline_figure, list(points.values()), rates, "The same layer from batch 1 on"
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
    left, middle, right = figure.subplots(1, 3)
    dots = {"marker": "o", "markersize": 4, "color": INK}
    left.plot(batches, intensity, **dots)
    left.axhline(rates.centre[1], color="#d9822b", linewidth=1.4)
    left.annotate(
        f"balance {rates.centre[1]:g}",
        (batches[0], rates.centre[1]),
        xytext=(2, 4),
        textcoords="offset points",
        color="#a85f16",
    )
    grid = np.geomspace(intensity[0] / 2, intensity[-1] * 2, 200)
    roof = partial(
        attainable_flops_per_s,
        peak_flops_per_s=rates.peak_flops_per_s / 1e12,
        bytes_per_s=rates.memory_bytes_per_s / 1e12,
    )
    middle.plot(grid, roof(grid), color=DIM, linewidth=1.4)
    middle.plot(intensity, roof(intensity), linewidth=0, **dots)
    right.plot(batches, terms[:, : model.NETWORK].max(axis=1), label="layer on the node", **dots)
    right.plot(batches, terms[:, model.NETWORK], color="#c1440e", linewidth=1.6, label="all-reduce")
    right.plot(
        batches,
        terms.max(axis=1),
        color="#8fb8de",
        linewidth=5,
        alpha=0.7,
        zorder=0,
        label="projected (6b)",
    )
    right.legend(loc="upper left")
    for ax, title, x, base, y in (
        (left, "4a  arithmetic intensity", "batch size", 2, "FLOP per byte of memory"),
        (middle, "4b  roofline", "FLOP per byte of memory", 10, "attainable TFLOP/s"),
        (right, "4c, 6b  times of a step", "batch size", 2, "time"),
    ):
        ax.set_title(title, loc="left")
        ax.set_xscale("log", base=base)
        ax.set(yscale="log", xlabel=x, ylabel=y)
        ax.grid(True)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    seconds_axis(right.yaxis)
    figure.suptitle(
        "4096 x 4096 fully connected layer, fp32, one Cascade Lake socket (Checconi et al. 2022,"
        " Figures 4 and 6b)",
        fontsize=10.5,
    )
    return figure


FIGURES = {"cardwell": cardwell_figures, "ridgeline": ridgeline_figures}
"""The papers with figures, by short name."""


def write(tables: Mapping[str, list[Table]], folder: str | Path, force: bool = False) -> list[Path]:
    """Write each paper's tables as ``PAPER.txt`` and its figures as ``PAPER-FIGURE.png``; the
    files.

    Raises DlperfError for a folder that cannot be made or holds foreign files (unless `force`),
    WorkFailed if the disk refuses.
    """
    files: dict[str, str | bytes] = {}
    for paper, own in tables.items():
        blocks = ["dlperf reproduce", *(table.to_text(_FILE_WIDTH) for table in own)]
        files[f"{paper}.txt"] = "\n\n".join(blocks)
        if paper in FIGURES:
            pngs = to_pngs(FIGURES[paper](), f"dlperf reproduce {paper}")
            files |= {f"{paper}-{name}": png for name, png in pngs.items()}
    return write_files(folder, files, force)

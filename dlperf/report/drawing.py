"""What the plots share: a style of their own that leaves the user's alone, colours that survive greyscale, labels that keep clear of each other."""
from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter

from dlperf.report.table import printable, shorten
from dlperf.units import format_seconds

INK, DIM, GRID = "#1c2024", "#5b6570", "#d8dde3"
PHASE_MARKS = {"forward": "o", "backward": "s", "optimizer": "^"}
PHASE_COLORS = {"forward": "#0b3c5d", "backward": "#d9822b", "optimizer": "#8fb8de"}
ACTUAL_COLOR = "#23272e"
PREDICTOR_COLORS = ("#e8a33d", "#7fa8d1", "#f1dfb5", "#b0b7bf", "#d9d9e8")
"""Falling contrast to the measured bars' dark; hatches tell them apart where colour does not."""
PREDICTOR_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")

_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 10, "axes.labelsize": 9,
    "axes.edgecolor": DIM, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": False, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8.5, "hatch.linewidth": 0.7, "figure.dpi": 100, "figure.facecolor": "white",
}  # fmt: skip


@contextmanager
def own_style() -> Iterator[None]:
    """matplotlib's defaults and ours while a plot is drawn; the user's settings stand again afterwards."""
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font.*")  # a name in a script that the font lacks is drawn as boxes
        warnings.filterwarnings("ignore", message=".*constrained_layout not applied.*")
        yield


def new_figure(width_in: float, height_in: float, gap_frac: float = 0.02) -> Figure:
    """A figure that no window and no global state knows of; `gap_frac` of its width lies between panels."""
    figure = Figure(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(wspace=gap_frac))
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure, dpi: int = 150, description: str = "") -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    description = description.encode(errors="backslashreplace").decode()
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with own_style():
            figure.savefig(buffer, format="png", dpi=dpi, facecolor="white", metadata={"Software": "dlperf", "Description": description})
    finally:
        logger.setLevel(level)
    return buffer.getvalue()


def plain(name: str, width: int = 48) -> str:
    """A name for a plot: short, and nothing in it taken for a formula."""
    return shorten(printable(name), width).replace("$", r"\$")


def circumstances(target: str, batch_size: int, threads: int, machine: str) -> str:
    """What a plot is of, for its title: the step in the first line, the machine in the second.

    >>> circumstances("nets.py:cnn", 32, 2, "Testor 9000")
    'nets.py:cnn, batch size 32, 2 threads\\non Testor 9000'
    """
    return f"{plain(target, 60)}, batch size {batch_size}, {threads} thread{'s' * (threads != 1)}\non {plain(machine, 70)}"


def seconds_axis(axis: Any) -> None:
    """Tick labels in s, ms or µs."""
    axis.set_major_formatter(EngFormatter(unit="s", sep=" "))


def seconds_text(seconds: float) -> str:
    """Seconds in the units of the axes."""
    return format_seconds(seconds).replace(" us", " µs")


@dataclass(frozen=True)
class PointLabel:
    """A text to write beside a point; `left_first` tries the upper left before the right."""

    x: float
    y: float
    text: str
    left_first: bool = False


def label_points(ax: Any, labels: Sequence[PointLabel], points: Sequence[tuple[float, float]], size: float = 8.0) -> set[str]:
    """Write each label beside its point wherever it covers none of `points` and no earlier label and stays inside the axes; the texts that found a place.

    Call it when the limits of the axes stand. Earlier labels choose first.
    """
    figure = ax.figure
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    frame = ax.get_window_extent(renderer)
    marks = [tuple(ax.transData.transform(point)) for point in points]
    taken: list[Any] = []
    placed = set()
    for label in labels:
        own = tuple(ax.transData.transform((label.x, label.y)))
        for dx, dy, horizontal, vertical in _PLACES[label.left_first]:
            text = ax.annotate(label.text, (label.x, label.y), xytext=(dx, dy), textcoords="offset points", ha=horizontal, va=vertical, fontsize=size, zorder=5)
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            inside = box.x0 >= frame.x0 and box.x1 <= frame.x1 and box.y0 >= frame.y0 and box.y1 <= frame.y1
            on_marks = any(box.x0 - 4 <= mx <= box.x1 + 4 and box.y0 - 4 <= my <= box.y1 + 4 for mx, my in marks if (mx, my) != own)
            if inside and not on_marks and not any(box.overlaps(other) for other in taken):
                taken.append(box.expanded(1.05, 1.1))
                placed.add(label.text)
                break
            text.remove()
    return placed


def _places(flip: int) -> tuple[tuple[float, float, str, str], ...]:
    ways = ((7, 4), (7, -4), (-7, 4), (-7, -4), (0, 8), (0, -8))
    return tuple(
        (flip * dx * far, dy * far, "center" if not dx else "left" if flip * dx > 0 else "right", "bottom" if dy > 0 else "top")
        for far in (1.0, 1.7)
        for dx, dy in ways
    )


_PLACES = {False: _places(1), True: _places(-1)}

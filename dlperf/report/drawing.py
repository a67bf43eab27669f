"""What the plots share: a style of their own that leaves the user's alone, colours that can be told
apart, labels that keep clear of each other.
"""

from __future__ import annotations

import io
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from string import ascii_lowercase
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from dlperf.core.text import counted, printable, visible
from dlperf.core.units import format_seconds
from dlperf.report.document import shorten

INK, DIM, GRID = "#1c2024", "#5b6570", "#d8dde3"
PHASE_MARKS = {"forward": "o", "backward": "s", "optimizer": "^"}
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, YELLOW = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#56b4e9",
    "#f0e442",
)
"""Colours that colour-blind readers can tell apart (Okabe and Ito 2008); with ``ACTUAL_COLOR``, the
black.
"""
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY)
"""Those that show as a line on white."""
PHASE_COLORS = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN}
ACTUAL_COLOR = "#23272e"
PREDICTOR_COLORS = (ORANGE, SKY, GREEN, PURPLE, YELLOW)
"""Lighter than the measured bars' dark; hatches tell them apart where colour does not."""
PREDICTOR_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\")

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

_SETTINGS: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.edgecolor": DIM,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.7,
    "figure.dpi": 100,
    "figure.facecolor": "white",
}


@contextmanager
def own_style() -> Iterator[None]:
    """matplotlib's defaults and ours while a plot is drawn; the user's settings stand again
    afterwards.
    """
    with matplotlib.style.context(["default", _SETTINGS]), warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes.
        warnings.filterwarnings(
            "ignore", message=".*(missing from font|constrained_layout not applied).*"
        )
        yield


def new_figure(width_in: float, height_in: float, gap_frac: float = 0.02) -> Figure:
    """A figure that no window and no global state knows of; `gap_frac` of its width lies between
    panels.
    """
    figure = Figure(figsize=(width_in, height_in), layout=ConstrainedLayoutEngine(wspace=gap_frac))
    FigureCanvasAgg(figure)
    return figure


def to_png(figure: Figure, dpi: int = 150, description: str = "") -> bytes:
    """The figure as PNG."""
    buffer, escaped = io.BytesIO(), description.encode(errors="backslashreplace")
    logger = logging.getLogger("matplotlib.font_manager")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with own_style():
            figure.savefig(
                buffer,
                format="png",
                dpi=dpi,
                facecolor="white",
                metadata={"Software": "dlperf", "Description": visible(escaped.decode())},
            )
    finally:
        logger.setLevel(level)
    return buffer.getvalue()


def to_pngs(
    figures: Mapping[str, Callable[[], Figure | None]], description: str, dpi: int = 130
) -> dict[str, bytes]:
    """The plots as PNG by file name; one without anything to draw is left out. Their descriptions
    end with their names.
    """
    pngs = {}
    for name, draw in figures.items():
        with own_style():
            figure = draw()
        if figure is not None:
            pngs[f"{name}.png"] = to_png(figure, dpi, f"{description}: {name}")
    return pngs


def plain(name: str, width: int = 48) -> str:
    """A name for a plot: short, and nothing in it taken for a formula."""
    return shorten(printable(name), width).replace("$", r"\$")


def layer_name(name: str, kind: str, width: int) -> str:
    """A layer's name and type for a plot.

    >>> layer_name("features.0", "Conv2d", 40), layer_name("LeNet5", "LeNet5", 40)
    ('features.0  Conv2d', 'LeNet5')
    """
    return plain(name if name == kind else f"{name}  {kind}", width)


def circumstances(target: str, batch_size: int, threads: int, machine: str) -> str:
    """What a plot is of, for its title: the step in the first line, the machine in the second.

    >>> circumstances("nets.py:cnn", 32, 2, "Testor 9000")
    'nets.py:cnn, batch size 32, 2 threads\\non Testor 9000'
    """
    return (
        f"{plain(target, 60)}, batch size {batch_size}, {counted(threads, 'thread')}\non"
        f" {plain(machine, 70)}"
    )


def empty(ax: Any, text: str) -> None:
    """Write in the middle of the axes why nothing is drawn."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color=DIM)


def plain_numbers(axis: Any) -> None:
    """Tick labels without powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def rate_axes(ax: Any, x_limits: tuple[float, float], y_limits: tuple[float, float]) -> None:
    """Logarithmic axes of a roofline: intensity in plain numbers, rates with a prefix."""
    ax.set(xscale="log", yscale="log", xlim=x_limits, ylim=y_limits)
    plain_numbers(ax.xaxis)
    ax.yaxis.set_major_formatter(EngFormatter(sep=" "))
    ax.grid(True)


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


def label_points(
    ax: Any, labels: Sequence[PointLabel], points: Sequence[tuple[float, float]], size: float = 8.0
) -> set[str]:
    """Write each label where it covers none of `points` and no earlier label; the labels written.

    The nearest free place counts. From a place further away a line leads to the point. A label
    that finds no place inside the axes is left out. Call it when the limits of the axes stand.
    """
    figure = ax.figure
    renderer = figure.canvas.get_renderer()
    figure.draw_without_rendering()
    frame = ax.get_window_extent(renderer)
    pixels = figure.dpi / 72
    marks = np.array([ax.transData.transform(point) for point in points]).reshape(-1, 2)
    taken: list[Bbox] = []
    placed = set()
    for label in labels:
        own = ax.transData.transform((label.x, label.y))
        others = marks[(marks != own).any(axis=1)]
        sample = ax.text(label.x, label.y, label.text, fontsize=size)
        extent = sample.get_window_extent(renderer)
        sample.remove()
        for index in (*_PLACES[label.left_first], *_FAR_PLACES):
            aligned = extent.size * [_ALIGNED[name] for name in index[2:]]
            box = Bbox.from_bounds(*own + pixels * np.array(index[:2]) - aligned, *extent.size)
            leaves = (box.min < frame.min).any() or (box.max > frame.max).any()
            if leaves or box.padded(4).count_contains(others) or any(map(box.overlaps, taken)):
                continue
            text = ax.annotate(
                label.text,
                (label.x, label.y),
                xytext=index[:2],
                textcoords="offset points",
                ha=index[2],
                va=index[3],
                fontsize=size,
                zorder=5,
                arrowprops=_LEADER if index in _FAR_PLACES else None,
            )
            text.set_in_layout(False)
            text.set_path_effects([withStroke(linewidth=2.0, foreground="white")])
            taken.append(box.padded(1.5 * pixels))
            placed.add(label.text)
            break
    return placed


def label_lines(ax: Any, lines: Sequence[tuple[float, str]]) -> None:
    """Each horizontal line's text in the right margin, moved as far as it takes not to cover
    another.

    `lines` are heights and texts, the highest first. Call it when the limits of the axes stand.
    """
    ax.figure.draw_without_rendering()
    points_per_pixel = 72 / ax.figure.dpi
    frame = ax.get_window_extent()
    free = frame.height * points_per_pixel + 8.0
    for height, text in lines:
        size = 10.5 * (1 + text.count("\n"))
        own = (ax.transData.transform((1.0, height))[1] - frame.y0) * points_per_pixel
        middle = min(own, free - size / 2)
        free = middle - size / 2 - 1.0
        ax.annotate(
            text,
            (1.0, own / (frame.height * points_per_pixel)),
            xycoords="axes fraction",
            xytext=(16, middle - own),
            textcoords="offset points",
            ha="left",
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={**_LEADER, "shrinkB": 0},
        )


_Place = tuple[float, float, str, str]
"""Offset in points, and the horizontal and vertical alignment there."""
_ALIGNED = {"left": 0.0, "bottom": 0.0, "center": 0.5, "right": 1.0, "top": 1.0}
"""Share of a text's size that lies left of its position, or below it."""
_LEADER = {"arrowstyle": "-", "color": DIM, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3}


def _near_places(flip: int) -> tuple[_Place, ...]:
    ways = ((7, 4), (7, -4), (-7, 4), (-7, -4), (0, 8), (0, -8))
    return tuple(
        (
            flip * dx * far,
            dy * far,
            "center" if not dx else "left" if flip * dx > 0 else "right",
            "bottom" if dy > 0 else "top",
        )
        for far in (1.0, 1.7)
        for dx, dy in ways
    )


def _far_places() -> tuple[_Place, ...]:
    angles = [math.radians(15 * step) for step in range(24)]
    return tuple(
        (
            radius * math.cos(angle),
            radius * math.sin(angle),
            "left" if math.cos(angle) > 0 else "right",
            "center",
        )
        for radius in (24, 36, 50, 66, 84, 104, 126, 150, 176, 204, 234, 266)
        for angle in angles
    )


_PLACES = {False: _near_places(1), True: _near_places(-1)}
_FAR_PLACES = _far_places()


def group_points(ax: Any, points: Sequence[tuple[float, float]]) -> list[list[int]]:
    """Indices of the points that cannot be distinguished: within 7/72 inch of a group's first."""
    groups: list[list[int]] = []
    limit = 7 * ax.figure.dpi / 72
    pixels = [ax.transData.transform(point) for point in points]
    for index, at in enumerate(pixels):
        own = next((group for group in groups if math.dist(pixels[group[0]], at) <= limit), [])
        if not own:
            groups.append(own)
        own.append(index)
    return groups


def letter(number: int) -> str:
    """A number from 1 as a letter, beyond 26 as several.

    >>> letter(1), letter(26), letter(27), letter(53)
    ('a', 'z', 'aa', 'ba')
    """
    before, index = divmod(number - 1, 26)
    return (letter(before) if before else "") + ascii_lowercase[index]


def letter_list(numbers: Iterable[int]) -> str:
    """Numbers as letters, with their runs as ranges.

    >>> letter_list([7, 1, 2, 3, 9, 10])
    'a-c, g, i, j'
    """
    ordered = enumerate(sorted(set(numbers)))
    runs = [[n for _, n in run] for _, run in groupby(ordered, lambda pair: pair[1] - pair[0])]
    return ", ".join(
        f"{letter(run[0])}-{letter(run[-1])}" if len(run) > 2 else ", ".join(map(letter, run))
        for run in runs
    )


def spans_decades(values: Iterable[float]) -> bool:
    """Whether the largest value leaves the others too small to be seen on a linear axis.

    >>> spans_decades([1, 2, 3, 20]), spans_decades([1, 2, 3, 50])
    (False, True)
    """
    positive = sorted(value for value in values if value > 0)
    return bool(positive) and positive[-1] > 10 * positive[(len(positive) - 1) // 2]


def log_seconds_axis(axis: Any) -> None:
    """A logarithmic axis of seconds; call it when the limits stand."""
    seconds_axis(axis)
    axis.set_minor_formatter(NullFormatter())
    low, high = axis.get_view_interval()
    if high / low < 30:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))


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
        indices = [[getattr(p, name) for name in names] for p in points if p.series == series]
        finite = np.array([index for index in indices if np.isfinite(index).all()])
        own: dict[str, Any] = {"marker": mark, "color": color, "label": plain(series)}
        own["linewidth"] = 0.8 if series else 0.0
        lines += ax.plot(*scale(finite.reshape(-1, len(names)).T), **{**own, **style})
    return lines


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

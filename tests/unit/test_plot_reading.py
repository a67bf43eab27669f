"""Plots that can be read: every point named, no label on another, decades on a logarithmic axis,
colours that differ.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import report_cases as cases
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.prediction import Item
from dlperf.core.trace import Layer, Trace
from dlperf.forecast.prediction import Prediction
from dlperf.report import drawing
from dlperf.report.comparison import compare
from dlperf.report.drawing import own_style
from dlperf.report.plots import figures_of, layers_figure, time_figure
from dlperf.report.roofline import MAX_LAYERS, hierarchy_figure, roofline_figure


def numbers_in(texts: list[str]) -> set[int]:
    """The numbers of ``1-3, 7``."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", " ".join(texts)):
        found.update(range(int(first), int(last or first) + 1))
    return found


def number_texts(ax: Any) -> list[Any]:
    return [text for text in ax.texts if re.fullmatch(r"[\d,\s-]+", text.get_text())]


def legend_numbers(figure: Figure) -> set[int]:
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return {int(match.group(1)) for text in texts if (match := re.match(r"(\d+):  ", text))}


@pytest.mark.parametrize(
    "make", [cases.cnn, lambda: cases.wide(20), lambda: cases.wide(60), lambda: cases.wide(200)]
)
def test_every_point_of_a_roofline_is_named_in_the_plot_and_in_the_legend(make: Any) -> None:
    report = compare(*make())
    with own_style():
        figure = roofline_figure(report)
    assert figure is not None
    (ax,) = figure.axes
    texts = number_texts(ax)
    n_layers = (
        len({row.layer for row in report.rows[0]} - {"(loss)"}) if len(report.rows[0]) > 10 else 4
    )
    n_drawn = min(n_layers, MAX_LAYERS)
    assert (
        numbers_in([text.get_text() for text in texts])
        == legend_numbers(figure)
        == set(range(1, n_drawn + 1))
    )
    assert (f"the {MAX_LAYERS} longest of {n_layers} layers" in ax.get_title()) == (
        n_layers > MAX_LAYERS
    )
    # no label lies on another, and the legend is all there
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert legend.x0 >= ax.get_window_extent().x1
    assert legend.y0 >= 0
    boxes = [
        Text.get_window_extent(text) for text in texts
    ]  # without the lines that lead to points
    assert not [1 for i, box in enumerate(boxes) for other in boxes[:i] if box.overlaps(other)]


def test_every_layer_of_a_hierarchical_roofline_is_numbered_and_the_rest_counted() -> None:
    with own_style():
        figure = hierarchy_figure(compare(*cases.wide(60)))
    assert figure is not None
    seen = [numbers_in([text.get_text() for text in number_texts(ax)]) for ax in figure.axes]
    assert [len(numbers) for numbers in seen] == [8, 8]
    assert seen[0] | seen[1] == legend_numbers(figure)
    assert all("the 8 longest of 60 layers" in ax.get_title() for ax in figure.axes)


def lopsided(longest_us: float) -> tuple[Prediction, Measurement]:
    """Four layers of 10 us and one of `longest_us`."""
    seconds = {f"small{i}": 10.0 for i in range(4)} | {"large": longest_us}
    layers = tuple(Layer(name, "Linear", True, (("Net", 1),)) for name in seconds)
    ops = tuple(cases.mm(4, 4, 4, name) for name in seconds)
    trace = Trace("net", 4, (Layer("Net", "Net", False, (("", 1),)), *layers), ops, inference=True)
    items = [
        Item(name, "forward", us * cases.US, "compute", "measured") for name, us in seconds.items()
    ]
    total = cases.around(sum(seconds.values()) * cases.US)
    times = tuple(
        LayerTimes(name, "Linear", cases.around(us * cases.US)) for name, us in seconds.items()
    )
    return cases.prediction(trace, items), Measurement(
        "net", 4, 1, {"forward": total, "total": total}, times, inference=True
    )


@pytest.mark.parametrize(("longest_us", "scale"), [(50, "linear"), (5_000, "log")])
def test_one_long_layer_does_not_flatten_the_others(longest_us: float, scale: str) -> None:
    with own_style():
        figure = layers_figure(compare(*lopsided(longest_us)))
    (ax,) = figure.axes
    assert ax.get_xscale() == scale
    assert ("logarithmic" in ax.get_xlabel()) == (scale == "log")
    figure.draw_without_rendering()
    shortest = min(bar.get_window_extent().width for bar in ax.patches)
    assert shortest > 0.02 * ax.get_window_extent().width


def test_colours_are_those_that_everybody_can_tell_apart() -> None:
    known = {*drawing.CYCLE, drawing.YELLOW, drawing.ACTUAL_COLOR, "#999999", "#ffffff"}
    assert set(drawing.PHASE_COLORS.values()) | set(drawing.PREDICTOR_COLORS) <= known
    items = [
        Item("conv", "forward", 1e-5, bound, "measured", what)
        for bound, what in (("compute", "kernel"), ("L1", "kernel"), ("DRAM", "kernel"))
    ]
    items += [Item("conv", "backward", 1e-5, "overhead", "measured", f"what {i}") for i in range(9)]
    with own_style():
        figure = time_figure(
            compare(cases.prediction(cases.cnn_trace(), items), cases.cnn_measurement())
        )
    looks = [
        (to_hex(patch.get_facecolor()), patch.get_hatch())
        for patch in figure.legends[0].get_patches()
    ]
    assert (
        len(set(looks)) == len(looks) == 9
    )  # eight kinds, the last of them for everything else, and the measured phase
    assert {color for color, _ in looks} <= known


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers", "scatter", "roofline", "hierarchy", "time"])
def test_axes_say_what_they_show(name: str) -> None:
    figure = figures_of(compare(*cases.cnn()))[name]
    assert all(ax.get_xlabel() for ax in figure.axes)
    suptitle = figure.get_suptitle() or "".join(ax.get_title() for ax in figure.axes)
    assert "nets.py:cnn, batch size 32, 1 thread" in suptitle

"""Plots that can be read: every point named, no label on another, decades on a logarithmic axis,
colours that differ.
"""

from __future__ import annotations

import re
from dataclasses import replace
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
from dlperf.report.drawing import letter, own_style
from dlperf.report.plots import figures_of, layers_figure, scatter_figure, time_figure
from dlperf.report.roofline import MAX_LAYERS, hierarchy_figure, roofline_figure

NUMBERS = {letter(number): number for number in range(1, 300)}


def numbers_in(texts: list[str]) -> set[int]:
    """The numbers of the letters ``a-c, g``."""
    found: set[int] = set()
    for first, last in re.findall(r"([a-z]+)(?:-([a-z]+))?", " ".join(texts)):
        found.update(range(NUMBERS[first], NUMBERS[last or first] + 1))
    return found


def number_texts(ax: Any) -> list[Any]:
    return [
        text
        for text in ax.texts
        if re.fullmatch(r"[a-z]{1,2}([,\s-]+[a-z]{1,2})*", text.get_text())
    ]


def legend_names(figure: Figure) -> dict[int, str]:
    texts = [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    found = [match for text in texts if (match := re.match(r"([a-z]+):  (.*)", text))]
    return {NUMBERS[match.group(1)]: match.group(2) for match in found}


def legend_numbers(figure: Figure) -> set[int]:
    return set(legend_names(figure))


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


def test_a_layer_has_the_same_letter_in_both_rooflines() -> None:
    """In the order of execution, not of time."""
    with own_style():
        report = compare(*cases.cnn())
        flat, hierarchical = roofline_figure(report), hierarchy_figure(report)
    assert flat is not None
    assert hierarchical is not None
    assert legend_names(flat) == legend_names(hierarchical)
    layers = [name.split("  ")[0] for _, name in sorted(legend_names(flat).items())]
    assert layers == [row.layer for row in report.rows[0] if row.layer in layers]


def test_the_scatter_plot_has_the_range_of_the_measured_times_and_names_mark_by_mark() -> None:
    """Layers of 10 to 50 us, of which the first predictor expects a tenth, the second a hundredth."""
    prediction, measurement = lopsided(50)
    items = prediction.prices.items
    both = [
        cases.prediction(
            prediction.trace, [replace(item, seconds=factor * item.seconds) for item in items]
        )
        for factor in (0.1, 0.01)
    ]
    with own_style():
        figure = scatter_figure(compare(both, measurement))
    (ax,) = figure.axes
    assert ax.get_xlim() == pytest.approx((10e-6 / 1.8, 50e-6 * 1.8))
    assert ax.get_ylim() == pytest.approx((0.1e-6 / 1.8, 50e-6 * 1.8))
    texts = [text.get_text() for text in ax.texts]
    assert "large  Linear, forward" in texts
    assert len(set(texts)) == len(texts)
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any(text.startswith("named: 5 most seconds off") for text in legend)


def test_the_legend_of_the_layers_has_the_order_of_the_bars() -> None:
    with own_style():
        figure = layers_figure(compare(*cases.cnn()))
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["predicted, calibrated", "measured"]


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

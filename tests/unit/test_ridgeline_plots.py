"""The Ridgeline plane and the rooflines with communication, drawn: what is on them, read back from
the axes.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from dlperf.cli.main import main
from dlperf.models import ridgeline as model
from dlperf.report import ridgeline as plane
from dlperf.report.drawing import new_figure, own_style, to_pngs
from dlperf.report.ridgeline import MeasuredPoint, System, pair_figure, surface_figure
from dlperf.studies.papers import figures

RATES = model.Rates(4.2e12, 105e9, 12e9)


def test_points_regions_and_ridge_are_where_the_law_says() -> None:
    points = [
        plane.PlanePoint(0.625, 614.4, "512", "batch"),
        plane.PlanePoint(50.0, 5.0, "copy", "kernel"),
        plane.PlanePoint(np.inf, 1.0, "alone", "kernel"),
    ]
    with own_style():
        figure = new_figure(6, 5)
        ax = figure.subplots()
        placed = plane.draw_ridgeline(ax, points, RATES)
    assert placed == {"512", "copy"}  # what sends nothing has no place
    drawn = {line.get_label(): list(zip(*line.get_data())) for line in ax.lines}
    assert drawn["batch"] == [(0.625, 614.4)]
    assert drawn["kernel"] == [(50.0, 5.0)]
    ridge = max(ax.lines, key=lambda line: len(line.get_xdata()))
    assert np.allclose(ridge.get_xdata() * ridge.get_ydata(), 350.0)
    for area, x, y, resource in zip(
        ax.collections,
        (1, 1, 50, 50),
        (10, 1000, 10, 100),
        (model.NETWORK, model.COMPUTE, model.MEMORY, model.COMPUTE),
    ):
        assert model.region(x, y, RATES) == resource
        assert any(path.contains_point((x, y)) for path in area.get_paths())
        assert to_hex(area.get_facecolor()[0]) == plane.AREA_COLORS[resource]


@pytest.mark.slow
def test_any_number_of_points_can_be_drawn() -> None:
    for points in (
        [],
        [plane.PlanePoint(10.0**-k, 10.0**k, str(k), f"series {k % 9}") for k in range(40)],
    ):
        with own_style():
            assert plane.ridgeline_figure(points, RATES, "many").axes
            assert plane.plane_surface_figure(points, RATES, "many").axes


def test_the_pair_shows_the_same_rates_on_both_sides() -> None:
    points = [MeasuredPoint(1.0, 10.0, 1e11, "a"), MeasuredPoint(2.0, np.inf, 2e11, "a")]
    with own_style():
        left, right = pair_figure([System("one", RATES)], points).axes
        assert surface_figure([System("one", RATES)], points).axes
    assert list(zip(*left.lines[-1].get_data())) == [
        (10.0, 1e11)
    ]  # what sends nothing stands on the right alone
    assert list(zip(*right.lines[-1].get_data())) == [(1.0, 1e11), (2.0, 2e11)]
    ridges = [ax.lines[1].get_xdata()[0] for ax in (left, right)]
    assert ridges == pytest.approx([350.0, 40.0])


@pytest.mark.slow
def test_reproduce_writes_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = functools.cache(lambda description: to_pngs(figures.ridgeline_figures(), description))
    monkeypatch.setattr(figures, "to_pngs", lambda _, description: drawn(description))
    folder = tmp_path / "new"
    assert main(["reproduce", "ridgeline", "-o", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "ridgeline.txt",
        "ridgeline-figure-2-principle.png",
        "ridgeline-figure-3-surface.png",
        "ridgeline-figure-4-roofline.png",
        "ridgeline-figure-6-ridgeline.png",
        "ridgeline-figure-6-all-batches.png",
    }
    assert str(folder / "ridgeline.txt") in capsys.readouterr().out
    assert main(["reproduce", "ridgeline", "-o", str(folder)]) == 0  # our own files are replaced
    (folder / "mine.png").write_bytes(b"")
    assert main(["reproduce", "ridgeline", "-o", str(folder)]) == 2
    assert "mine.png, which dlperf did not write" in capsys.readouterr().err

"""Checconi et al. 2022, the case study: the printed rates, the batch sizes that the text names, and
the values worked out by hand.
"""

from __future__ import annotations

import json

import pytest

from dlperf.models import ridgeline as model
from dlperf.studies.papers import ridgeline
from dlperf.studies.papers.reproduction import PAPERS, reproduce


def test_the_centre() -> None:
    assert [entry.text for row in ridgeline.centre().rows for entry in row.entries] == [
        "8.750",
        "40.000",
        "350.000",
    ]


def test_32_clears_the_line_and_16_does_not() -> None:
    # 6 B W^2 / (4 (2 B W + W^2)) = 6 B W / (4 (2 B + W)): 786,432 / 16,640 = 47.26; 393,216 /
    # 16,512 = 23.81
    rows = {row.keys[0]: row for row in ridgeline.roofline().rows}
    assert (
        f"{rows['32'].entries[0].recomputed:.1f}",
        f"{rows['16'].entries[0].recomputed:.1f}",
    ) == ("47.3", "23.8")
    assert (rows["32"].keys[1], rows["16"].keys[1]) == ("compute", "memory")
    assert rows["32"].entries[1].text == "4.200"
    assert rows["16"].entries[1].text == "2.500"  # 23.81 x 105 GB/s


@pytest.mark.parametrize(
    ("batch", "intensity", "region"),
    [(256, 192, "network"), (512, 384, "compute"), (1024, 768, "compute"), (32, 24, "network")],
)
def test_places_on_the_plane(batch: int, intensity: float, region: str) -> None:
    row = {row.keys[0]: row for row in ridgeline.ridgeline().rows}[str(batch)]
    assert row.entries[2].recomputed == pytest.approx(intensity)  # 6 B / 8
    assert row.keys[1] == region


def test_times_of_batch_512() -> None:
    # 6 x 512 x 4096^2 / 4.2e12 = 12.271 ms; 83,886,080 / 105e9 = 0.799 ms; 134,217,728 / 12e9 =
    # 11.185 ms
    row = {row.keys[0]: row for row in ridgeline.ridgeline().rows}["512"]
    assert [entry.text for entry in row.entries[3:]] == ["12.271", "0.799", "11.185", "12.271"]
    assert ridgeline.ridge_batch() == pytest.approx(350 * 8 / 6)


def test_the_region_is_confirmed_by_the_times() -> (
    None
):  # "The bottleneck assessment from the ridgeline plot is confirmed by the timing projections"
    for batch in ridgeline.BATCH_SIZES:
        assert model.region(
            *ridgeline.place(batch), ridgeline.CASCADE_LAKE
        ) == model.bounding_resource(*ridgeline.counts(batch), ridgeline.CASCADE_LAKE)


def test_tables_say_what_matches() -> None:
    tables = reproduce("ridgeline")
    assert [(table.n_matches, table.n_printed) for table in tables] == [
        (0, 0),
        (0, 0),
        (0, 0),
        (4, 4),
    ]
    assert "*" not in "\n".join(table.to_text() for table in tables)
    json.dumps([table.to_json() for table in tables], allow_nan=False)
    assert "ridgeline" in PAPERS

"""Yang, Kurth, Williams 2019: printed numbers and the roofs of the authors' example.

The expected values are typed or worked out here, not taken from the library.
"""

from __future__ import annotations

import json

import pytest

from dlperf.models import memory_hierarchy
from dlperf.studies.papers import yang
from dlperf.studies.papers.reproduction import PAPERS, reproduce
from dlperf.studies.papers.tables import Table

ROOFS = {"L1": 14336.0, "L2": 2996.77, "HBM": 828.758}
FMA, NO_FMA = 7068.86, 3535.79


def values(table: Table) -> dict[str, list[float]]:
    return {row.keys[0]: [entry.recomputed for entry in row.entries] for row in table.rows}


def test_roofs_are_the_printed_ones() -> None:
    assert {level: float(rate) for level, rate in zip(yang.LEVELS, yang.LEVEL_GB_PER_S)} == ROOFS
    assert (float(yang.FMA_GFLOPS_PER_S), float(yang.NO_FMA_GFLOPS_PER_S)) == (FMA, NO_FMA)


def test_ridge_points() -> None:
    found = values(yang.roofs())
    for level, rate in ROOFS.items():
        assert found[level] == pytest.approx([FMA / rate, NO_FMA / rate])
    assert f"{found['HBM'][0]:.2f}" == "8.53"  # 7068.86 / 828.758


def test_sixty_percent_of_fma_make_eighty_percent_of_the_peak() -> None:
    # equation 7: (0.6 x 2 + 0.4) / 2
    assert (
        memory_hierarchy.fma_mix_fraction(0.6)
        == pytest.approx((0.6 * 2 + 0.4) / 2)
        == pytest.approx(0.80)
    )
    printed = {
        row.keys[0]: (row.entries[0].printed, row.entries[0].text)
        for row in yang.fma_mix().rows
        if row.entries[0].printed
    }
    assert printed == {
        "alpha, %": ("60", "60"),
        "beta, %": ("80", "80"),
        "GPP at nw = 6 of the FMA peak, %": ("66", "66"),
    }
    assert values(yang.fma_mix())["ceiling beta x FMA, GFLOP/s"] == pytest.approx([0.8 * FMA])
    assert values(yang.fma_mix())["GPP at nw = 6 of its ceiling, %"] == pytest.approx(
        [100 * 4692.209405 / (0.8 * FMA)]
    )


def test_the_data_sheet_exceeds_the_measured_roofs_by_about_ten_percent() -> None:
    found = values(yang.data_sheet())
    assert (
        pytest.approx(7.8336e12) == yang.V100_FP64_FLOPS_PER_S
    )  # 80 x 32 x 2 x 1.53e9; the data sheet says 7.8 TFLOP/s
    for name in ("FP64 peak over measured, %", "HBM peak over measured, %"):
        assert 8 < found[name][0] < 12
    assert (
        pytest.approx(125.3e12, rel=1e-3) == yang.V100_TENSOR_FLOPS_PER_S
    )  # 80 x 8 cores x 64 multiply-adds x 2 x 1.53e9


def test_gpp_is_bound_by_hbm_at_first_and_by_its_mix_in_the_end() -> None:
    rows = {row.keys[0]: row for row in yang.gpp().rows}
    assert [rows[str(nw)].keys[1] for nw in range(1, 7)] == [
        "HBM",
        "HBM",
        "FMA mix",
        "FMA mix",
        "FMA mix",
        "FMA mix",
    ]
    assert rows["1"].entries[0].recomputed == pytest.approx(2.584785579 * 828.758)
    assert rows["6"].entries[0].recomputed == pytest.approx(0.8 * FMA)
    for row in rows.values():
        assert row.entries[1].recomputed < 100  # no measured point lies above its roof
    # "performance is clearly bound by HBM": nw = 1 reaches 2085.756683 of 2142.16
    assert rows["1"].entries[1].text == "97.367"
    # "roughly constant" L1 and HBM bytes, "substantial increases" of L2's
    l1, l2, hbm = (entry.recomputed for entry in rows["6"].entries[2:])
    assert max(l1, hbm) < 1.3 < 2 < l2


def test_tables_say_what_matches() -> None:
    tables = reproduce("yang")
    assert [(table.n_matches, table.n_printed) for table in tables] == [
        (0, 0),
        (2, 2),
        (3, 3),
        (0, 0),
        (4, 4),
    ]
    assert "*" not in "\n".join(table.to_text() for table in tables)
    json.dumps([table.to_json() for table in tables], allow_nan=False)
    assert "yang" in PAPERS

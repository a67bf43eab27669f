"""Choi et al. 2020: printed numbers, typed or worked out here, not taken from the library."""

from __future__ import annotations

import json

import pytest

from dlperf.studies.papers import choi
from dlperf.studies.papers.reproduction import PAPERS, reproduce
from dlperf.studies.papers.tables import Table


def values(table: Table) -> dict[tuple[str, ...], list[float]]:
    return {row.keys: [entry.recomputed for entry in row.entries] for row in table.rows}


def test_table_5() -> None:
    table = choi.k_values()
    assert (table.n_matches, table.n_printed) == (9, 9)
    assert [row.entries[0].text for row in table.rows] == [
        "3.50",
        "2.50",
        "1.00",
        "5.19",
        "3.54",
        "1.92",
        "4.67",
        "3.00",
        "1.67",
    ]
    assert choi.senders("MiniFE", choi.SUMMIT) == pytest.approx(135 / 156 * 6)


def test_message_counts_follow_from_placement() -> None:
    table = choi.counted()
    assert (table.n_matches, table.n_printed) == (21, 21)
    # six of a row: each sends 2 up and down, and the two at the ends one along the row
    assert choi.placed("Jacobi2D", choi.SUMMIT).n_inter == 6 * 2 + 2
    # six of rows of eight: 2 + 4 over a row's end, so 4 pairs stay inside: 36 - 8
    assert choi.placed("MiniMD", choi.SUMMIT).n_inter == 36 - 2 * 4


def test_parameters_are_the_printed_ones() -> None:
    assert [len(system.postal) for system in choi.SYSTEMS] == [9, 9, 6]  # Table 2
    assert [len(system.short) for system in choi.SYSTEMS] == [3, 2, 1]  # Table 3
    assert [len(system.max_rate) for system in choi.SYSTEMS] == [6, 4, 2]  # Table 4
    assert choi.SUMMIT.max_rate["inter-node", "rendezvous"] == ("9.33E-6", "1.23E10", "2.58E7")
    assert choi.LASSEN.postal["inter-node", "eager"] == ("2.86E-6", "1.52E-10")
    assert choi.BRIDGES.short["inter-node"] == ("1.39E-6", "5.51E-9")


def test_parameters_agree_with_each_other() -> None:
    """Fitted to different runs of the same links: one sender's 1 / R_Cb is about the postal beta,
    and a further sender adds less than the first.
    """
    for system in choi.SYSTEMS:
        for index, (_, base, added) in system.max_rate.items():
            assert 0.7 < float(base) * float(system.postal[index][1]) < 1.4, (system.name, index)
            assert float(added) < float(base)


def test_the_models() -> None:
    found = values(choi.models())
    # Summit: 7.59 us + 131072 x 8.70e-11; k = 3.5: 9.33 us + 3.5 n / (1.23e10 + 2.5 x 2.58e7); k =
    # 6
    n = 131072
    postal, k_model, max_rate = (
        7.59e-6 + n * 8.70e-11,
        9.33e-6 + 3.5 * n / (1.23e10 + 2.5 * 2.58e7),
        9.33e-6 + 6 * n / (1.23e10 + 5 * 2.58e7),
    )
    assert found["Summit", "3.50"] == pytest.approx([postal * 1e6, k_model * 1e6, max_rate * 1e6])
    for postal_us, k_us, max_rate_us in found.values():
        assert postal_us < k_us < max_rate_us
    assert choi.message_s(choi.SUMMIT, 100, "K", 3.5, protocol="short") == pytest.approx(
        1.51e-6 + 3.5 * 100 * 6.32e-10
    )
    assert choi.message_s(
        choi.LASSEN, 100, "max-rate", 4, "intra-socket", "short"
    ) == pytest.approx(3.61e-7 + 100 * 1.16e-10)  # "Apply postal model"


def test_fatter_nodes_are_faster_by_the_postal_model_and_slower_by_max_rate() -> None:
    rows = list(values(choi.fatter_nodes()).values())
    postal, max_rate = [row[3] for row in rows], [row[4] for row in rows]
    assert postal[1:] == sorted(postal[1:], reverse=True)
    assert postal[-1] < postal[0]
    assert max_rate[:4] == sorted(max_rate[:4])
    assert max_rate[-1] > 1.8 * max_rate[0]
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    # 16 x 4 x 4: 15 x 16 + 2 x 16 x 12 = 624 pairs; a node of 16 is a plane of 24 pairs, so 16 x 24
    # stay inside
    assert rows[-1][0] == pytest.approx(100 * (624 - 16 * 24) / 624)


def test_tables_say_what_matches() -> None:
    tables = reproduce("choi")
    assert [(table.n_matches, table.n_printed) for table in tables] == [
        (9, 9),
        (21, 21),
        (0, 0),
        (0, 0),
    ]
    json.dumps([table.to_json() for table in tables], allow_nan=False)
    assert "choi" in PAPERS

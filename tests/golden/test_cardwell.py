"""Cardwell 2019: every row of Tables 3.6, 3.7, 3.8 and the ridge points of Table 2.3, at printed
precision.

The text blocks are the paper's tables as printed, typed here independently of the library's own
data.
"""

from __future__ import annotations

import json

import pytest

from dlperf import predict
from dlperf.studies.papers import cardwell
from dlperf.studies.papers.reproduction import PAPERS, reproduce

TABLE_3_6 = """
fc1	32	0.000103	0.000143	38.83
relu	32	0.000033	0.000000	98.50
fc2	32	0.000008	0.000005	37.50
sigmoid	32	0.000011	0.000003	73.02
fc1	64	0.000249	0.000157	36.95
relu	64	0.000066	0.000001	98.50
fc2	64	0.000013	0.000010	23.08
sigmoid	64	0.000022	0.000006	73.02
fc1	128	0.000206	0.000207	0.49
relu	128	0.000144	0.000002	98.63
fc2	128	0.000028	0.000027	3.57
sigmoid	128	0.000047	0.000012	74.74
"""
TABLE_3_7 = """
fc1	32	0.000093	0.000102	9.68
relu	32	0.000034	0.000001	98.35
fc2	32	0.000005	0.000003	40.00
sigmoid	32	0.000011	0.000003	69.49
fc1	64	0.000183	0.000169	7.65
relu	64	0.000067	0.000001	98.33
fc2	64	0.000008	0.000005	37.50
sigmoid	64	0.000021	0.000007	68.04
fc1	128	0.000349	0.000326	6.59
relu	128	0.000130	0.000002	98.28
fc2	128	0.000018	0.000010	44.44
sigmoid	128	0.000040	0.000013	66.44
"""
TABLE_3_8 = """
Carbonate	32	61.96
Carbonate	64	57.89
Carbonate	128	44.36
Bridges	32	54.38
Bridges	64	52.88
Bridges	128	53.94
"""


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.strip().splitlines()]


CASES = [
    (system, *row)
    for system, text in ((cardwell.CARBONATE, TABLE_3_6), (cardwell.BRIDGES, TABLE_3_7))
    for row in rows(text)
]


@pytest.mark.parametrize(
    ("system", "layer", "batch", "actual", "predicted", "error"),
    CASES,
    ids=[f"{c[0].name}-{c[1]}-{c[2]}" for c in CASES],
)
def test_predicted_time_and_error(
    system: cardwell.System, layer: str, batch: str, actual: str, predicted: str, error: str
) -> None:
    frame = predict(
        cardwell.network(int(batch)), cardwell.machine(system), threads=1, predictor="gemm-table"
    ).layers
    seconds = float(frame.set_index("layer").loc[layer, "forward_s"])
    assert f"{seconds:.6f}" == predicted
    assert f"{100 * abs(float(actual) - seconds) / float(actual):.2f}" == error


def test_errors_come_from_predictions_before_rounding() -> None:
    # Table 3.6, relu, batch 32: 4 x 32 x 50 / 12,937.6e6 = 0.4947e-6 s, printed 0.000000, which
    # would be an error of 100 %
    seconds = cardwell.predicted_s(cardwell.CARBONATE)["relu", 32]
    assert seconds == pytest.approx(4 * 32 * 50 / 12_937.6e6)
    assert f"{cardwell.error_percent(0.000033, seconds):.2f}" == "98.50"
    assert cardwell.error_percent(0.000033, float(f"{seconds:.6f}")) == 100.0
    # sigmoid: 30 x 4 x 32 x 10 / 12,937.6e6 = 2.968e-6 s, printed 0.000003, which would be 72.73 %
    seconds = cardwell.predicted_s(cardwell.CARBONATE)["sigmoid", 32]
    assert f"{cardwell.error_percent(0.000011, seconds):.2f}" == "73.02"
    assert f"{cardwell.error_percent(0.000011, float(f'{seconds:.6f}')):.2f}" == "72.73"


@pytest.mark.parametrize(("system", "batch", "mape"), rows(TABLE_3_8))
def test_mean_errors(system: str, batch: str, mape: str) -> None:
    found = {row.keys: row.entries[0].text for row in cardwell.summary().rows}
    assert found[system, batch] == mape


def test_ridge_points() -> None:
    # 14.7/13.4, 22/13.9, 43.4/13.1 FLOP per byte of memory; 14.7/5.7, 22/1.2, 43.4/0.34 per byte of
    # network traffic
    found = {
        row.keys[0]: [entry.recomputed for entry in row.entries]
        for row in cardwell.ridge_points().rows
    }
    assert [f"{found[name][0]:.3f}" for name in ("Big Red II", "Karst", "Jetstream")] == [
        "1.097",
        "1.583",
        "3.313",
    ]
    assert [f"{found[name][1]:.4g}" for name in ("Big Red II", "Karst", "Jetstream")] == [
        "2.579",
        "18.33",
        "127.6",
    ]


def test_table_2_4_at_the_sizes_of_table_2_5() -> None:
    found = {row.keys[:2]: row for row in cardwell.intensities().rows}
    ddot = found[
        "DDOT", "1,073,741,824"
    ]  # 2^23 elements each: (2^24 - 1) / (2^27 + 8) and (2^24 - 1) / (8 x 7)
    assert [f"{entry.recomputed:.3f}" for entry in ddot.entries[:2]] == ["0.125", "299593.125"]
    assert ddot.keys[2] == "memory/memory/memory"
    assert f"{ddot.entries[2].recomputed:.3f}" == "1.675"  # 13.4 / 8 GFLOP/s
    # MST: 16 V log V / 128 FLOP and 12 V log V (7/2 + 1) bytes, 16 / 128 / 54 = 0.002315; 0.34 GB/s
    # x that is 0.0008 GFLOP/s on Jetstream
    mst = found["MST", "65,536"]
    assert f"{mst.entries[1].recomputed:.6f}" == "0.002315"
    assert mst.keys[2] == "network/network/network"
    assert [entry.text for entry in mst.entries[2:]] == ["0.013", "0.003", "0.001"]


def test_the_method_of_table_2_6() -> None:
    # errors 100 % and 300 % against 0 % and 100 %: MAPE 200 and 50, improved by 75 %
    original, new = (
        cardwell.mape_percent([1.0, 1.0], [2.0, 4.0]),
        cardwell.mape_percent([1.0, 1.0], [1.0, 2.0]),
    )
    assert (original, new, cardwell.percentage_change(original, new)) == (
        200.0,
        50.0,
        75.0,
    )
    ratios = {
        row.keys[0]: [entry.recomputed for entry in row.entries]
        for row in cardwell.improvements().rows
    }
    assert f"{ratios['SUMMA'][0]:.2f}" == "2.42"  # 100 / (100 - 58.6)
    assert f"{ratios['DGEMV'][0]:.2f}" == "0.89"  # 100 / 112.9: worse
    assert [round(ratio) for ratio in ratios["MST"]] == [200, 200, 200]


def test_the_memory_term_never_wins() -> None:
    for system in cardwell.SYSTEMS:
        for batch in cardwell.BATCH_SIZES:
            frame = predict(
                cardwell.network(batch), cardwell.machine(system), threads=1, predictor="gemm-table"
            ).layers
            assert list(frame["bound"]) == ["compute", "DRAM", "compute", "DRAM"]
            assert list(frame["source"]) == ["measured", "interpolated", "measured", "interpolated"]


def test_the_step_is_the_forward_pass() -> None:
    step = predict(
        cardwell.network(32),
        cardwell.machine(cardwell.CARBONATE),
        threads=1,
        predictor="gemm-table",
    ).step
    # 143 us + 4 x 1,600 / M + 5 us + 30 x 4 x 320 / M with M = 12,937.6e6 bytes/s
    assert step.forward_s == pytest.approx(143e-6 + 5e-6 + (4 * 1600 + 120 * 320) / 12_937.6e6)
    assert step.total_s == step.forward_s
    assert step.backward_s is None


def test_tables_say_what_matches() -> None:
    tables = reproduce("cardwell")
    assert [(table.n_matches, table.n_printed) for table in tables] == [
        (0, 0),
        (0, 0),
        (0, 0),
        (24, 24),
        (24, 24),
        (6, 6),
    ]
    text = "\n".join(table.to_text() for table in tables)
    assert "*" not in text
    assert "24 of 24 printed values match" in text
    json.dumps([table.to_json() for table in tables], allow_nan=False)
    assert set(PAPERS) >= {"cardwell"}


def test_measured_times_enter_no_prediction() -> None:
    from dataclasses import replace

    doubled = replace(
        cardwell.CARBONATE,
        results=tuple(
            (layer, batch, "1.0", p, e) for layer, batch, _, p, e in cardwell.CARBONATE.results
        ),
    )
    assert cardwell.predicted_s(doubled) == cardwell.predicted_s(cardwell.CARBONATE)

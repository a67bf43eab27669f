"""Viebke et al. 2019: the starred rows of Table IV, Tables VII to XI, and what the text says of
them.

The text blocks are the paper's tables as printed, typed here independently of the library's own
data.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dlperf.models import threads as model
from dlperf.studies.papers import viebke
from dlperf.studies.papers.reproduction import reproduce

TABLE_4 = """
1	7.10e-6	1.56e-4	8.83e-4
15	6.40e-4	2.00e-3	8.75e-3
30	1.36e-3	3.97e-3	1.67e-2
60	3.07e-3	8.03e-3	3.22e-2
120	6.76e-3	1.65e-2	6.74e-2
180	9.95e-3	2.50e-2	1.00e-1
240	1.40e-2	3.83e-2	1.38e-1
"""
TABLE_4_STARRED = """
480	2.78e-2	7.31e-2	2.73e-1
960	5.60e-2	1.47e-1	5.46e-1
1920	1.12e-1	2.95e-1	1.09e0
3840	2.25e-1	5.91e-1	2.19e0
"""
TABLE_10 = """
480	6.6	6.7	36.8	39.1	92.9	82.6
960	5.4	5.5	23.9	25.1	60.8	45.7
1920	4.9	4.9	17.4	18.0	44.8	27.2
3840	4.6	4.6	14.2	14.5	36.8	18.0
"""
TABLE_11 = """
60000	10000	8.9	17.6	35.0	6.6	12.9	25.6
120000	20000	17.6	35.0	69.7	12.9	25.6	51.1
240000	40000	35.0	69.7	139.3	25.6	51.1	101.9
"""
NETWORKS = viebke.NETWORKS


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.strip().splitlines()]


def half_a_digit(printed: str) -> float:
    """How far a printed number can be from what was rounded to it."""
    digits, _, exponent = printed.partition("e")
    return 0.5 * 10 ** (int(exponent or 0) - len(digits.partition(".")[2]))


def column(network: model.HardwareThreads | viebke.Network, text: str) -> list[str]:
    return [row[1 + NETWORKS.index(network)] for row in rows(text)]  # type: ignore[arg-type]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda n: n.name)
def test_starred_contention_is_the_line_through_the_measured_rows(network: viebke.Network) -> None:
    threads = [int(row[0]) for row in rows(TABLE_4)]
    measured = column(network, TABLE_4)
    contention = model.MemoryContention(tuple(zip(threads, map(float, measured))))
    mean = sum(threads) / 7
    spread = sum((x - mean) ** 2 for x in threads)
    for (at, *_), printed in zip(rows(TABLE_4_STARRED), column(network, TABLE_4_STARRED)):
        # the line at x is the sum of y_k (1/7 + (x - mean)(x_k - mean) / spread): so much can the
        # rounding of the measured rows move it
        weights = [1 / 7 + (int(at) - mean) * (x - mean) / spread for x in threads]
        open_s = sum(abs(weight) * half_a_digit(value) for weight, value in zip(weights, measured))
        assert abs(contention.at(int(at)) - float(printed)) <= open_s + half_a_digit(printed)
        assert open_s < 0.004 * float(printed) + half_a_digit(
            printed
        )  # and that is not much: the check can fail
    assert contention.at(240) == float(measured[-1])


def test_the_lines() -> None:
    # fitted by numpy.polyfit to the seven rows
    lines = [network.measured_contention.line for network in NETWORKS]
    assert [f"{slope:.4e} {intercept:.2e}" for slope, intercept in lines] == [
        "5.8457e-05 -2.82e-04",
        "1.5416e-04 -8.04e-04",
        "5.6933e-04 -5.51e-04",
    ]


@pytest.mark.parametrize("row", rows(TABLE_10), ids=lambda row: row[0])
def test_minutes_beyond_the_hardware_threads(row: list[str]) -> None:
    found = [
        viebke.minutes(network, strategy, int(row[0])) for network in NETWORKS for strategy in "ab"
    ]
    assert [f"{value:.1f}" for value in found] == row[1:]
    with_line = [
        viebke.minutes(n, s, int(row[0]), n.measured_contention.at(int(row[0])))
        for n in NETWORKS
        for s in "ab"
    ]
    assert with_line == pytest.approx(
        [float(value) for value in row[1:]], abs=0.06
    )  # 0.05 is rounding


def test_one_value_by_hand() -> None:
    # small, 480 threads, strategy (b): 12.56 + 2 [(6.75 + 1.45) ms 60,000 + 1.45 ms 10,000] 70 /
    # 480 + 0.0278 x 60,000 x 70 / 480 seconds
    seconds = (
        12.56 + 2 * (8.2e-3 * 60_000 + 1.45e-3 * 10_000) * 70 / 480 + 2.78e-2 * 60_000 * 70 / 480
    )
    assert viebke.minutes(viebke.SMALL, "b", 480) == pytest.approx(seconds / 60)
    # strategy (a), one thread: 15 (10^9 + 240,000 + 20,000 + 700) / s + 15 [(58k + 524k + 58k)
    # 60,000 + 58k 10,000] 70 / s + 7.1e-6 x 60,000 x 70
    seconds = (
        15 * (1e9 + 260_700) / 1.238e9
        + 15 * (640e3 * 60_000 + 58e3 * 10_000) * 70 / 1.238e9
        + 7.1e-6 * 4.2e6
    )
    assert viebke.minutes(viebke.SMALL, "a", 1) == pytest.approx(seconds / 60)


def test_the_preparation_of_the_medium_network() -> None:
    # 15 x 9 x 10^9 / 1.238e9 s = 109.05 s = 1.82 minutes more with Table II's 10^10, which would
    # print 38.6 where the paper has 36.8
    other = replace(viebke.MEDIUM, preparation_operations=1e10)
    assert viebke.minutes(other, "a", 480) - viebke.minutes(
        viebke.MEDIUM, "a", 480
    ) == pytest.approx(15 * 9e9 / 1.238e9 / 60)
    assert f"{viebke.minutes(other, 'a', 480):.1f}" == "38.6"


@pytest.mark.parametrize("row", rows(TABLE_11), ids=lambda row: row[0])
def test_minutes_of_more_images_and_epochs(row: list[str]) -> None:
    n_images, n_test = int(row[0]), int(row[1])
    cases = [(n_threads, n_epochs) for n_threads in (240, 480) for n_epochs in (70, 140, 280)]
    for (n_threads, n_epochs), printed in zip(cases, row[2:]):
        workload = model.Workload(n_epochs, n_images, n_images, n_test)
        found = viebke.minutes(viebke.SMALL, "a", n_threads, workload=workload)
        assert abs(found - float(printed)) <= 0.003 * float(printed) + 0.05


def test_totals_and_ratios_of_operations() -> None:
    table = viebke.operations()
    assert (table.n_matches, table.n_printed) == (10, 10)
    assert [row.entries[0].text for row in table.rows] == [
        "58",
        "559",
        "5349",
        "524",
        "6119",
        "73178",
    ]
    assert [row.entries[1].text for row in table.rows] == [
        "1.000",
        "9.64",
        "9.57",
        "1.000",
        "11.68",
        "11.96",
    ]


def test_what_the_text_says() -> None:
    # section V: "the predicted execution time increases between 120 and 240 threads"
    assert viebke.minutes(viebke.SMALL, "a", 240) > viebke.minutes(viebke.SMALL, "a", 120)
    # abstract: "about 15% for the first model and 11% for second model": (14.57 + 14.76 + 15.36) /
    # 3, (16.35 + 7.48 + 10.22) / 3
    assert [row.entries[0].recomputed for row in viebke.accuracy().rows] == pytest.approx(
        [14.8967, 11.35], abs=1e-4
    )
    # Table III: "1-2 threads: 1; 3 threads: 1.5; 4 threads: 2" of 61 cores
    assert [viebke.PHI.cpi(p) for p in (1, 61, 62, 122, 123, 183, 184, 240, 3840)] == [
        1,
        1,
        1,
        1,
        1.5,
        1.5,
        2,
        2,
        2,
    ]


def test_tables_say_what_matches() -> None:
    tables = reproduce("viebke")
    assert [(table.n_matches, table.n_printed) for table in tables] == [
        (9, 12),
        (10, 10),
        (0, 0),
        (2, 2),
        (24, 24),
        (9, 18),
    ]
    text = "\n".join(table.to_text() for table in tables)
    assert "2.25e-1         2.24e-1*" in text
    assert "cannot be recomputed" in text
    json.dumps([table.to_json() for table in tables], allow_nan=False)

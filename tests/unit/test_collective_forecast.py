"""Collectives over a cluster: the law with this cluster's parameters, what was measured, and what-if factors, each with its sum in sight."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlperf.clock import Samples
from dlperf.cluster import Cluster, Collective, Link
from dlperf.errors import DlperfError
from dlperf.laws import gloo
from dlperf.network import LinkFactors, collective_s

MIB = 2**20
NETWORK = Link("network", (), 3e-4, 1e8)
SOCKET = Link("socket", (), 1e-4, 1e9)
SHEET = Cluster(links=(NETWORK,))
BOTH = Cluster(links=(NETWORK, SOCKET))


def measured(seconds: float, n_bytes: int = 4 * MIB, n_ranks: int = 2, per_node: int = 1, kind: str = "all_reduce") -> Collective:
    return Collective(kind, n_bytes, n_ranks, per_node, Samples((seconds,)))


def test_a_data_sheet_gives_the_law() -> None:
    """2 ranks, 4 MiB: four segments of 1 MiB, two each way; with nothing to add, the port is busy for 4 x 10.49 ms, and two latencies pass."""
    expected = 4 * MIB / 1e8 + 2 * 3e-4
    assert collective_s(SHEET, "all_reduce", 4 * MIB, 2) == pytest.approx(expected)
    assert collective_s(SHEET, "all_reduce", 4 * MIB, 2) == pytest.approx(gloo.all_reduce_s(4 * MIB, 2, 3e-4, 1e-8))


def test_factors_change_the_wire_alone() -> None:
    """Wire: 200 us of the latency and 10 ns a byte; processor: 100 us and 1 ns a byte, which shows where the wire is 20 times as fast."""
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)) == pytest.approx(4 * MIB * 1e-8 / 0.3 + 2 * 3e-4)
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(20.0)) == pytest.approx(4 * MIB * 1e-9 + 2 * 3e-4)
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(1.0, 10.0)) == pytest.approx(4 * MIB * 1e-8 + 2 * (1e-4 + 2e-3))
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, 2, LinkFactors(0.3, 10.0)) == collective_s(BOTH, "all_reduce", 4 * MIB, 2, 2)


def test_the_measured_stands_where_it_was_measured() -> None:
    cluster = replace(SHEET, collectives=(measured(0.06), measured(0.7, 64 * MIB)))
    assert collective_s(cluster, "all_reduce", [4 * MIB, 64 * MIB], 2) == pytest.approx([0.06, 0.7])


def test_between_measured_sizes_the_ratio_to_the_law() -> None:
    law = {n: float(collective_s(SHEET, "all_reduce", n * MIB, 2)) for n in (1, 4, 16, 64)}
    cluster = replace(SHEET, collectives=(measured(2 * law[4]), measured(1 * law[64], 64 * MIB)))
    assert collective_s(cluster, "all_reduce", 16 * MIB, 2) == pytest.approx(1.5 * law[16])  # half way in the logarithm
    assert collective_s(cluster, "all_reduce", MIB, 2) == pytest.approx(2 * law[1])


def test_beyond_measured_ranks_the_law_with_the_ratio_at_the_largest() -> None:
    law = {p: float(collective_s(SHEET, "all_reduce", 4 * MIB, p)) for p in (2, 4, 1024)}
    cluster = replace(SHEET, collectives=(measured(law[2]), measured(1.2 * law[4], n_ranks=4)))
    assert collective_s(cluster, "all_reduce", 4 * MIB, 1024) == pytest.approx(1.2 * law[1024])


def test_what_a_host_does_itself_stays_when_the_link_changes() -> None:
    """Measured 42.5 ms beyond the law, 5 ms of them beyond it inside a host too: the rest is the link's and grows with it."""
    law, local = float(collective_s(BOTH, "all_reduce", 4 * MIB, 2)), float(collective_s(BOTH, "all_reduce", 4 * MIB, 2, 2))
    cluster = replace(BOTH, collectives=(measured(1.5 * law + 5e-3), measured(local + 5e-3, per_node=2)))
    slower = float(collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)))
    assert collective_s(cluster, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)) == pytest.approx(1.5 * slower + 5e-3)
    assert collective_s(cluster, "all_reduce", 4 * MIB, 2) == pytest.approx(1.5 * law + 5e-3)


def test_one_rank_costs_nothing_and_arrays_broadcast() -> None:
    found = collective_s(SHEET, "all_gather", np.array([[4], [MIB]]), np.array([1, 2, 16384]))
    assert found.shape == (2, 3)
    assert list(found[:, 0]) == [0, 0]
    assert np.all(np.diff(found, axis=1) > 0)
    assert np.all(np.diff(found[:, 1:], axis=0) > 0)


def test_an_empty_message_costs_as_much_as_a_short_one() -> None:
    assert collective_s(SHEET, "broadcast", 0, 2) == collective_s(SHEET, "broadcast", 4, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("scan", 4, 2), "collective 'scan' is unknown"),
        (("all_reduce", -1, 2), "n_bytes is -1"),
        (("all_reduce", 4, 0), "n_ranks is 0"),
        (("all_reduce", 4, 2, 0), "ranks_per_node is 0"),
        (("all_reduce", 4, 6, 4), "6 ranks do not fill nodes of 4"),
        (("all_reduce", 4, 2, 2), "holds no link inside a node (it has network)"),
    ],
)  # fmt: skip
def test_mistakes_are_named(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(DlperfError) as caught:
        collective_s(SHEET, *arguments)
    assert words in str(caught.value)


def test_a_missing_network_is_named() -> None:
    with pytest.raises(DlperfError, match="holds no link between nodes"):
        collective_s(Cluster(links=(SOCKET,)), "all_reduce", 4, 2)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_are_positive(factor: float) -> None:
    with pytest.raises(DlperfError, match="link_bandwidth is"):
        LinkFactors(link_bandwidth=factor)

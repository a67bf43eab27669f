"""Collectives over a cluster: the model with this cluster's parameters, what was measured, and
what-if factors, each with its sum in sight.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from dlperf.core.cluster import Cluster, Collective, Link, Message
from dlperf.core.errors import DlperfError
from dlperf.distributed.collective_times import (
    LinkFactors,
    Path,
    collective_s,
    find_path,
    message_s,
)
from dlperf.models import gloo

MIB = 2**20
NETWORK = Link("network", (), 3e-4, 1e8)
SOCKET = Link("socket", (), 1e-4, 1e9)
SHEET = Cluster(links=(NETWORK,))
BOTH = Cluster(links=(NETWORK, SOCKET))


def measured(
    seconds: float,
    n_bytes: int = 4 * MIB,
    n_ranks: int = 2,
    per_node: int = 1,
    kind: str = "all_reduce",
) -> Collective:
    return Collective(kind, n_bytes, n_ranks, per_node, samples_s=[seconds])


def test_a_data_sheet_gives_the_law() -> None:
    """2 ranks, 4 MiB: four segments of 1 MiB, two each way; with nothing to add, the port is busy
    for 4 x 10.49 ms, and two latencies pass.
    """
    expected = 4 * MIB / 1e8 + 2 * 3e-4
    assert collective_s(SHEET, "all_reduce", 4 * MIB, 2) == pytest.approx(expected)
    assert collective_s(SHEET, "all_reduce", 4 * MIB, 2) == pytest.approx(
        gloo.all_reduce_s(4 * MIB, 2, 3e-4, 1e-8)
    )


def test_factors_change_the_wire_alone() -> None:
    """Wire: 200 us of the latency and 10 ns a byte; processor: 100 us and 1 ns a byte, which shows
    where the wire is 20 times as fast.
    """
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)) == pytest.approx(
        4 * MIB * 1e-8 / 0.3 + 2 * 3e-4
    )
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(20.0)) == pytest.approx(
        4 * MIB * 1e-9 + 2 * 3e-4
    )
    assert collective_s(
        BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(1.0, 10.0)
    ) == pytest.approx(4 * MIB * 1e-8 + 2 * (1e-4 + 2e-3))
    assert collective_s(BOTH, "all_reduce", 4 * MIB, 2, 2, LinkFactors(0.3, 10.0)) == collective_s(
        BOTH, "all_reduce", 4 * MIB, 2, 2
    )


def test_the_measured_stands_where_it_was_measured() -> None:
    cluster = replace(SHEET, collectives=(measured(0.06), measured(0.7, 64 * MIB)))
    assert collective_s(cluster, "all_reduce", [4 * MIB, 64 * MIB], 2) == pytest.approx([0.06, 0.7])


def test_between_measured_sizes_the_ratio_to_the_law() -> None:
    model = {n: float(collective_s(SHEET, "all_reduce", n * MIB, 2)) for n in (1, 4, 16, 64)}
    cluster = replace(
        SHEET, collectives=(measured(2 * model[4]), measured(1 * model[64], 64 * MIB))
    )
    assert collective_s(cluster, "all_reduce", 16 * MIB, 2) == pytest.approx(
        1.5 * model[16]
    )  # half way in the logarithm
    assert collective_s(cluster, "all_reduce", MIB, 2) == pytest.approx(2 * model[1])


def test_beyond_measured_ranks_the_law_with_the_ratio_at_the_largest() -> None:
    model = {p: float(collective_s(SHEET, "all_reduce", 4 * MIB, p)) for p in (2, 4, 1024)}
    cluster = replace(SHEET, collectives=(measured(model[2]), measured(1.2 * model[4], n_ranks=4)))
    assert collective_s(cluster, "all_reduce", 4 * MIB, 1024) == pytest.approx(1.2 * model[1024])


def test_what_a_host_does_itself_stays_when_the_link_changes() -> None:
    """Measured 42.5 ms beyond the model, 5 ms of them beyond it inside a host too: the rest is the
    link's and grows with it.
    """
    model, local = (
        float(collective_s(BOTH, "all_reduce", 4 * MIB, 2)),
        float(collective_s(BOTH, "all_reduce", 4 * MIB, 2, 2)),
    )
    cluster = replace(
        BOTH, collectives=(measured(1.5 * model + 5e-3), measured(local + 5e-3, per_node=2))
    )
    slower = float(collective_s(BOTH, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)))
    assert collective_s(
        cluster, "all_reduce", 4 * MIB, 2, what_if=LinkFactors(0.3)
    ) == pytest.approx(1.5 * slower + 5e-3)
    assert collective_s(cluster, "all_reduce", 4 * MIB, 2) == pytest.approx(1.5 * model + 5e-3)


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
        (("all_reduce", 4, 2, 2), "contains no link inside a node (it has network)"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(DlperfError) as caught:
        collective_s(SHEET, *arguments)
    assert words in str(caught.value)


def test_a_missing_network_is_named() -> None:
    with pytest.raises(DlperfError, match="contains no link between nodes"):
        collective_s(Cluster(links=(SOCKET,)), "all_reduce", 4, 2)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_factors_are_positive(factor: float) -> None:
    with pytest.raises(DlperfError, match="link_bandwidth is"):
        LinkFactors(link_bandwidth=factor)


def test_nccl_takes_rings() -> None:
    """Four ranks, 4 kB at 1e8 bytes/s: 2 x 3 steps of 1 kB (10 us) and 300 us; a broadcast passes
    three links, and the vector each of them once.
    """
    sheet = replace(SHEET, backend="nccl")
    assert collective_s(sheet, "all_reduce", 4000, 4) == pytest.approx(6 * (3e-4 + 1e-5))
    assert collective_s(sheet, "broadcast", 4000, 4) == pytest.approx(3 * 3e-4 + 4e-5)


def test_calls_that_no_file_measures_follow_gloo() -> None:
    assert collective_s(SHEET, "gather", 4 * MIB, 4) == pytest.approx(3e-4 + 3 * MIB * 1e-8)
    assert (
        collective_s(SHEET, "scatter", 4 * MIB, 4)
        == collective_s(SHEET, "all_to_all", 4 * MIB, 4)
        == collective_s(SHEET, "gather", 4 * MIB, 4)
    )
    assert collective_s(
        SHEET, "reduce", 4 * MIB, [1, 2], what_if=LinkFactors(2.0)
    ) == pytest.approx([0.0, gloo.reduce_s(4 * MIB, 2, 3e-4, 5e-9)])
    assert collective_s(SHEET, "barrier", 0, [1, 2, 5]) == pytest.approx([0.0, 3e-4, 9e-4])
    assert collective_s(BOTH, "barrier", 0, 2, ranks_per_node=2) == pytest.approx(1e-4)
    assert collective_s(replace(SHEET, backend="nccl"), "barrier", 0, 2) == collective_s(
        replace(SHEET, backend="nccl"), "all_reduce", 4, 2
    )
    with pytest.raises(DlperfError, match=r"'gossip' is unknown; known are all_reduce, .*barrier"):
        collective_s(SHEET, "gossip", 0, 2)
    with pytest.raises(DlperfError, match="no link inside a node"):
        collective_s(SHEET, "gather", 0, 2, ranks_per_node=2)


def test_messages_take_the_postal_law_as_measured() -> None:
    assert message_s(SHEET, [0, 1e6], True) == pytest.approx([3e-4, 3e-4 + 1e-2])
    assert message_s(BOTH, 1e6, False) == pytest.approx(1e-4 + 1e-3)
    assert message_s(BOTH, 1e6, True, LinkFactors(2.0, 3.0)) == pytest.approx(1e-4 + 6e-4 + 5e-3)
    slow = structs.replace(
        NETWORK,
        messages=tuple(
            Message("ping_pong", n, 1, 1, samples_s=[seconds])
            for n, seconds in ((0, 6e-4), (10**6, 1.03e-2))
        ),
    )
    assert message_s(Cluster(links=(slow,)), [0, 1e6, 1e7], True) == pytest.approx(
        [6e-4, 1.03e-2, 3e-4 + 1e-1]
    )
    assert message_s(Cluster(links=(slow,)), 0, True, LinkFactors(1.0, 2.0)) == pytest.approx(
        1.2e-3
    )
    with pytest.raises(DlperfError, match="no link inside a node"):
        message_s(SHEET, 1, False)
    with pytest.raises(DlperfError, match="n_bytes"):
        message_s(SHEET, -1, True)


def test_the_bandwidth_of_a_link() -> None:
    assert find_path(BOTH, True).changed(LinkFactors(3.0)).bytes_per_s == pytest.approx(3e8)
    assert find_path(BOTH, False).changed(LinkFactors(3.0)).bytes_per_s == pytest.approx(
        1e9
    )  # no wire
    assert find_path(BOTH, True).changed(LinkFactors(30.0)).bytes_per_s == pytest.approx(
        1e9
    )  # the processor is slower then


def test_a_token_bucket_spares_the_wires_time_alone() -> None:
    """128 KiB of 10 ns a byte on the wire, of which the processor takes 1 ns: 9 ns a byte are
    spared, more on a slower wire.
    """
    messages = tuple(
        Message("ping_pong", size, 1, 1, samples_s=[1e-8 * (size - 2**17)])
        for size in (2**18, 2**20, 2**22)
    )
    shaped = Cluster(links=(Link("network", messages, latency_s=0.0), SOCKET))
    burst = find_path(shaped, True)
    assert (burst.stored_s, burst.spared_s_per_byte) == pytest.approx(
        (2**17 * 9e-9, 9e-9), rel=1e-3
    )
    assert find_path(shaped, True).changed(LinkFactors(0.5)).stored_s == pytest.approx(
        2**17 * 19e-9, rel=1e-3
    )
    assert find_path(shaped, False).stored_s == find_path(SHEET, True).stored_s == 0
    assert [
        Path(0.0, 0.0, 0.0, 0.5, burst_bytes=6.0).spared_s(n_bytes, 1.0) for n_bytes in (1, 4, 100)
    ] == [
        0.0,
        1.0,
        2.0,
    ]  # measured after a rest of 1 s


def test_messages_of_one_size_tell_no_link() -> None:
    link = Link("network", (Message("ping_pong", 1024, 1, 1, samples_s=[1e-4]),))
    with pytest.raises(
        DlperfError, match="the messages of its links tell neither latency nor bandwidth"
    ):
        collective_s(Cluster((link,), path="c.json"), "all_reduce", 1024, 2)

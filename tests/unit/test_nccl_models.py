"""NCCL's tuner: numbers worked out by hand from its rules, and its choices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlperf.core.errors import DlperfError
from dlperf.models import nccl

DGX = nccl.NcclSystem(
    n_ranks=8, n_nodes=1, n_channels=12, intra_bytes_per_s=20e9, inter_bytes_per_s=20e9
)
FOUR = nccl.NcclSystem(
    n_ranks=32,
    n_nodes=4,
    n_channels=4,
    intra_bytes_per_s=24e9,
    inter_bytes_per_s=12e9,
    network_latency_s=2e-6,
)


def test_one_node() -> None:
    # bus 240 GB/s; ring x 8/14; LL min(87.7, 240/4) x 8/14; LL128 min(240 x 0.92, 12 x 20) x 8/14;
    # tree min(220.8, 12 x 24) / 2
    found = [
        nccl.bandwidth_bytes_per_s("all_reduce", "ring", protocol, DGX) / 1e9
        for protocol in nccl.PROTOCOLS
    ]
    assert found == pytest.approx([60 * 8 / 14, 220.8 * 8 / 14, 240 * 8 / 14])
    found = [
        nccl.bandwidth_bytes_per_s("all_reduce", "tree", protocol, DGX) / 1e9
        for protocol in nccl.PROTOCOLS
    ]
    assert found == pytest.approx([220.8 / 3.8 / 2, 220.8 * 7 / 9 / 2, 220.8 / 2])
    # all-gather: LL a third, x 8/7; 7 steps of 0.6 us
    assert nccl.bandwidth_bytes_per_s("all_gather", "ring", "LL", DGX) / 1e9 == pytest.approx(
        80 * 8 / 7
    )
    assert nccl.latency_s("all_gather", "ring", "LL", DGX) == pytest.approx((6.6 + 7 * 0.6) * 1e-6)
    assert nccl.latency_s("broadcast", "ring", "Simple", DGX) == pytest.approx((8.4 + 3.4) * 1e-6)


def test_four_nodes() -> None:
    # ring: 62 steps, 8 of them between nodes at 2.7 + 2 us, the others at max(0.6, 1) us
    assert nccl.latency_s("all_reduce", "ring", "LL", FOUR) == pytest.approx(
        (6.6 + 54 * 1.0 + 8 * 4.7) * 1e-6
    )
    # Simple: 14 + 2 x 2 us between nodes, max(3.4, 3 x 1) us inside; x 1.4 from 64 x 4 x 32 = 8 KiB
    # on; 48 GB/s x 32/62
    plateau = 1.4 * (8.4 + 54 * 3.4 + 8 * 18.0) * 1e-6
    assert nccl.algorithm_s("all_reduce", [8191, 8192], "ring", "Simple", FOUR) == pytest.approx(
        [plateau / 1.4 + 8191 / (48e9 * 32 / 62), plateau + 8192 / (48e9 * 32 / 62)]
    )
    # tree: 7 hops in the node, log2 4 between nodes, twice; min(48 x 0.92, 4 x 17.8) / 2, of which
    # 8 MiB (2^17 x 64) reach 0.8
    tree = 2 * (7 * 28 + 2 * (28 + 4)) * 1e-6
    assert nccl.algorithm_s("all_reduce", 2**23, "tree", "Simple", FOUR) == pytest.approx(
        tree + 2**23 / (44.16e9 / 2 * 0.8)
    )
    assert nccl.bandwidth_bytes_per_s(
        "all_reduce", "ring", "LL128", replace(FOUR, n_ranks=4)
    ) == pytest.approx(48e9 * 0.7 * 4 / 6)


def test_small_vectors_take_trees_and_LL_over_many_nodes_long_ones_rings() -> None:
    assert nccl.choose("all_reduce", 1024, FOUR) == ("tree", "LL")
    assert nccl.choose("all_reduce", 2**30, FOUR)[0] == "ring"
    assert nccl.choose("broadcast", 1024, FOUR)[0] == "ring"  # trees reduce only


def test_the_choice_is_the_least() -> None:
    sizes = 2.0 ** np.arange(0, 31)
    for kind in nccl.KINDS:
        times = nccl.collective_s(kind, sizes, FOUR)
        for size, time_s in zip(sizes, times):
            assert time_s == nccl.algorithm_s(kind, size, *nccl.choose(kind, size, FOUR), FOUR)
        assert times[0] < times[-1]
        assert (
            nccl.collective_s(kind, sizes, replace(FOUR, n_ranks=1, n_nodes=1)).tolist()
            == [0.0] * 31
        )
    assert (
        nccl.algorithm_s("all_reduce", 100, "ring", "LL128", replace(FOUR, nvlink=False)) == np.inf
    )
    # zero bytes cost latency only
    assert nccl.collective_s("all_gather", 0, DGX) == pytest.approx((6.6 + 7 * 0.6) * 1e-6)


def test_bad_input() -> None:
    for call, message in (
        (lambda: nccl.algorithm_s("scan", 1, "ring", "LL", DGX), "collective 'scan' is unknown"),
        (
            lambda: nccl.algorithm_s("all_reduce", 1, "star", "LL", DGX),
            "algorithm 'star' is unknown; known are tree, ring",
        ),
        (lambda: nccl.algorithm_s("all_reduce", 1, "ring", "L", DGX), "protocol 'L' is unknown"),
        (lambda: nccl.collective_s("all_reduce", -1, DGX), "n_bytes is -1"),
        (lambda: replace(DGX, n_nodes=3), "8 ranks cannot be divided among 3 nodes"),
        (
            lambda: replace(DGX, intra_bytes_per_s=0.0),
            "intra_bytes_per_s is 0.0; it must be positive",
        ),
    ):
        with pytest.raises(DlperfError, match=message):
            call()

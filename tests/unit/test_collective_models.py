"""The textbook's collectives against their algorithms sent message by message, and what holds for
all of them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import textbook_programs as programs
from hypothesis import given, settings
from hypothesis import strategies as st
from message_simulation import Link, Network, simulate

from dlperf.core.errors import DlperfError
from dlperf.models import collectives as model

ADD = 0.003
LINK = Link(latency_s=2.0, s_per_byte=0.01)
N_ITEMS = 840 * 16  # divisible by 1 to 8, and by 16
ALL_REDUCES = {
    "ring": (model.ring_all_reduce_s, programs.ring_all_reduce(ADD)),
    "recursive doubling": (
        model.recursive_doubling_all_reduce_s,
        programs.folded(ADD, halving=False),
    ),
    "Rabenseifner": (model.rabenseifner_all_reduce_s, programs.folded(ADD, halving=True)),
    "binomial": (model.binomial_all_reduce_s, programs.binomial_all_reduce(ADD)),
}
REDUCING = [case[0] for case in ALL_REDUCES.values()] + [
    model.ring_reduce_scatter_s,
    model.binomial_reduce_s,
    model.double_binary_tree_all_reduce_s,
]
MOVING = [
    model.ring_all_gather_s,
    model.bruck_all_gather_s,
    model.binomial_broadcast_s,
    model.scatter_all_gather_broadcast_s,
    model.double_binary_tree_broadcast_s,
]
Law = Callable[..., float]


def vectors(n_ranks: int, n_items: int = N_ITEMS) -> list[np.ndarray]:
    return [np.arange(n_items, dtype=np.float64) + 100 * rank for rank in range(n_ranks)]


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5, 6, 7, 8, 14, 16])
@pytest.mark.parametrize("case", ALL_REDUCES.values(), ids=ALL_REDUCES)
def test_all_reduce(case: tuple[Law, Callable[..., programs.Program]], n_ranks: int) -> None:
    inputs = vectors(n_ranks)
    time_s, results = simulate(case[1], inputs, LINK)
    assert all(np.array_equal(result, sum(inputs)) for result in results)
    assert case[0](N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte, ADD) == pytest.approx(
        time_s
    )


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 7, 8, 16])
def test_reduce_scatter(n_ranks: int) -> None:
    inputs = vectors(n_ranks)
    time_s, results = simulate(programs.ring_reduce_scatter(ADD), inputs, LINK)
    assert np.array_equal(np.concatenate(results), sum(inputs))
    assert model.ring_reduce_scatter_s(
        N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte, ADD
    ) == pytest.approx(time_s)
    if n_ranks & n_ranks - 1 == 0:
        time_s, results = simulate(programs.recursive_halving_reduce_scatter(ADD), inputs, LINK)
        assert np.array_equal(np.concatenate(results), sum(inputs))
        assert model.recursive_halving_reduce_scatter_s(
            N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte, ADD
        ) == pytest.approx(time_s)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize(
    ("of", "program"),
    [
        (model.ring_all_gather_s, programs.ring_all_gather),
        (model.bruck_all_gather_s, programs.bruck_all_gather),
    ],
)
def test_all_gather(of: Law, program: Callable[..., programs.Program], n_ranks: int) -> None:
    whole = np.arange(N_ITEMS, dtype=np.float64)
    inputs = []
    for rank in range(n_ranks):
        own = np.full(N_ITEMS, -1.0)
        share = slice(rank * N_ITEMS // n_ranks, (rank + 1) * N_ITEMS // n_ranks)
        own[share] = whole[share]
        inputs.append(own)
    time_s, results = simulate(program, inputs, LINK)
    assert all(np.array_equal(result, whole) for result in results)
    assert of(N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte) == pytest.approx(time_s)
    if n_ranks & n_ranks - 1 == 0 and of is model.bruck_all_gather_s:
        assert model.recursive_doubling_all_gather_s(
            N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte
        ) == pytest.approx(time_s)


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 6, 7, 8, 14, 16])
@pytest.mark.parametrize(
    ("of", "program"),
    [
        (model.binomial_broadcast_s, programs.binomial_broadcast),
        (model.scatter_all_gather_broadcast_s, programs.scatter_all_gather_broadcast),
    ],
)
def test_broadcast(of: Law, program: Callable[..., programs.Program], n_ranks: int) -> None:
    inputs = vectors(n_ranks)
    time_s, results = simulate(program, inputs, LINK)
    assert all(np.array_equal(result, inputs[0]) for result in results)
    assert of(N_ITEMS * 8, n_ranks, LINK.latency_s, LINK.s_per_byte) == pytest.approx(time_s)


@pytest.mark.parametrize(
    ("n_nodes", "ranks_per_node"), [(1, 4), (4, 1), (2, 2), (2, 4), (4, 2), (3, 5)]
)
def test_two_levels(n_nodes: int, ranks_per_node: int) -> None:
    """A node's link is shared by making each of its ranks' messages that much slower, and once by
    one port for all of them.
    """
    levels = model.TwoLevels(0.5, 0.001, 2.0, 0.01)
    inner, outer = Link(0.5, 0.001), Link(2.0, 0.01 * ranks_per_node)
    inputs = vectors(n_nodes * ranks_per_node)
    network = Network(lambda a, b: inner if a // ranks_per_node == b // ranks_per_node else outer)
    time_s, results = simulate(
        programs.hierarchical_all_reduce(ranks_per_node, ADD), inputs, network
    )
    assert all(np.array_equal(result, sum(inputs)) for result in results)
    assert model.two_level_all_reduce_s(
        N_ITEMS * 8, n_nodes, ranks_per_node, levels, ADD
    ) == pytest.approx(time_s)

    def port(rank: int, peer: int) -> object:
        mates = rank // ranks_per_node == peer // ranks_per_node
        return rank if mates else ("adapter", rank // ranks_per_node)

    fast = Link(0.0, 0.01)
    adapters = Network(
        lambda a, b: inner if a // ranks_per_node == b // ranks_per_node else fast, port
    )
    time_s, _ = simulate(programs.hierarchical_all_reduce(ranks_per_node, 0.0), inputs, adapters)
    free = model.TwoLevels(0.5, 0.001, 0.0, 0.01)
    assert model.two_level_all_reduce_s(
        N_ITEMS * 8, n_nodes, ranks_per_node, free
    ) == pytest.approx(time_s, rel=0.05)


def test_two_levels_of_one_are_the_flat_rings() -> None:
    levels = model.TwoLevels(0.5, 0.001, 2.0, 0.01)
    assert model.two_level_all_reduce_s(1000, 1, 5, levels, ADD) == pytest.approx(
        model.ring_all_reduce_s(1000, 5, 0.5, 0.001, ADD)
    )
    assert model.two_level_all_reduce_s(1000, 5, 1, levels, ADD) == pytest.approx(
        model.ring_all_reduce_s(1000, 5, 2.0, 0.01, ADD)
    )
    assert model.two_level_reduce_scatter_s(1000, 5, 1, levels, ADD) == pytest.approx(
        model.ring_reduce_scatter_s(1000, 5, 2.0, 0.01, ADD)
    )
    assert model.two_level_all_gather_s(1000, 1, 5, levels) == pytest.approx(
        model.ring_all_gather_s(1000, 5, 0.5, 0.001)
    )
    assert model.two_level_broadcast_s(1000, 8, 1, levels) == pytest.approx(
        model.binomial_broadcast_s(1000, 8, 2.0, 0.01)
    )
    assert model.split([4, 8], 4).tolist() == [1, 2]


@pytest.mark.parametrize("n_ranks", range(2, 34))
def test_two_trees_take_at_most_the_law_s_steps(n_ranks: int) -> None:
    for n_blocks in (1, 2, 8, 32):
        steps = programs.coloured_steps(n_ranks, n_blocks)
        bound = model.double_binary_tree_broadcast_s(
            800, n_ranks, 1.0, 0.0, n_blocks
        )  # a second a step
        assert (0.75 if n_ranks > 2 else 0.5) * bound <= steps <= bound
    assert steps >= 0.97 * bound


@pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 7, 8, 12, 16])
def test_two_trees_sum(n_ranks: int) -> None:
    inputs = vectors(n_ranks, 384)
    for n_blocks in (1, 4, 24):
        time_s, results = simulate(programs.double_tree_all_reduce(n_blocks, ADD), inputs, LINK)
        assert all(np.array_equal(result, sum(inputs)) for result in results)
        bound = model.double_binary_tree_all_reduce_s(
            384 * 8, n_ranks, LINK.latency_s, LINK.s_per_byte, ADD, n_blocks
        )
        assert 0.45 * bound < time_s < 1.6 * bound


def test_the_best_number_of_blocks_is_the_best() -> None:
    best = model.double_binary_tree_all_reduce_s(1e6, 16, 1e-3, 1e-7, n_blocks=None)
    assert best <= min(
        model.double_binary_tree_all_reduce_s(1e6, 16, 1e-3, 1e-7, n_blocks=np.arange(1, 1000))
    )


SIZE, RANKS, SECONDS = st.integers(0, 10**9), st.integers(1, 5000), st.floats(0, 1)


@settings(deadline=None, max_examples=80)
@given(SIZE, SIZE, RANKS, SECONDS, SECONDS, SECONDS)
def test_properties(
    size: int, more: int, n_ranks: int, latency_s: float, s_per_byte: float, add: float
) -> None:
    cases = [(of, (latency_s, s_per_byte, add)) for of in REDUCING] + [
        (of, (latency_s, s_per_byte)) for of in MOVING
    ]
    for of, parameters in cases:
        assert of(size, 1, *parameters) == 0
        few, many = of(np.array([size, size + more]), n_ranks, *parameters)
        assert few <= many * (1 + 1e-9)
        assert many == pytest.approx(
            of(size + more, n_ranks, *parameters)
        )  # arrays and numbers alike
        assert of(0, n_ranks, latency_s, s_per_byte) == of(
            0, n_ranks, latency_s, 0.0
        )  # zero bytes cost latency only
        doubled = of(size, n_ranks, *(2 * parameter for parameter in parameters))
        assert doubled == pytest.approx(2 * of(size, n_ranks, *parameters))
        assert many >= (n_ranks > 1) * latency_s


def test_bytes_alone() -> None:
    """Without latency: ring and Rabenseifner 2 (n-1)/n of the vector, two trees twice, recursive
    doubling log2 times.
    """
    n_ranks = np.array([2, 4, 64])
    expected = 2 * (n_ranks - 1) / n_ranks * 1e6
    assert model.ring_all_reduce_s(1e6, n_ranks, 0.0, 1.0) == pytest.approx(expected)
    assert model.rabenseifner_all_reduce_s(1e6, n_ranks, 0.0, 1.0) == pytest.approx(expected)
    assert model.recursive_doubling_all_reduce_s(1e6, n_ranks, 0.0, 1.0) == pytest.approx(
        np.array([1, 2, 6]) * 1e6
    )
    assert model.double_binary_tree_all_reduce_s(1e6, n_ranks, 0.0, 1.0) == pytest.approx(
        2e6, rel=1e-4
    )


def test_bad_input() -> None:
    for of in REDUCING + MOVING:
        for arguments, message in (
            ((-1, 2, 1, 1), "n_bytes"),
            ((1, 0, 1, 1), "n_ranks"),
            ((1, 1.5, 1, 1), "whole"),
            ((1, 2, -1, 1), "latency_s"),
        ):
            with pytest.raises(DlperfError, match=message):
                of(*arguments)
    for of in (model.recursive_halving_reduce_scatter_s, model.recursive_doubling_all_gather_s):
        with pytest.raises(
            DlperfError, match="n_ranks is 6; recursive halving and doubling need a power of two"
        ):
            of(100, 6, 1.0, 1.0)
    with pytest.raises(DlperfError, match="6 ranks cannot be divided among nodes of 4"):
        model.split(6, 4)
    with pytest.raises(DlperfError, match="inter_latency_s is -1"):
        model.TwoLevels(0.0, 0.0, -1.0, 0.0)

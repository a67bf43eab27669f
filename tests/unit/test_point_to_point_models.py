"""Messages between two processes, message counts from placements, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_simulation import Link, Program, Rank, Vector, simulate

from dlperf.core.errors import DlperfError
from dlperf.models import backends, gloo, point_to_point
from dlperf.models.collectives import recursive_doubling_all_reduce_s


def train(n_messages: int) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        handles = [me.send(1, vector) if me.number == 0 else me.recv(0) for _ in range(n_messages)]
        yield from handles
        return vector

    return program


def test_messages_as_sent() -> None:
    vector = np.zeros(12)  # 96 bytes
    alone, _ = simulate(train(1), [vector, vector], Link(2.0, 0.01))
    assert point_to_point.postal_s(96, 2.0, 0.01) == pytest.approx(alone) == pytest.approx(2.96)
    three, _ = simulate(train(3), [vector, vector], Link(2.0, 0.01, latency_on_port=False))
    # LogGP with no overhead, a gap of one byte's time between messages: 95 + 96 + 96 byte times and
    # the latency
    assert point_to_point.loggp_s(
        96, 2.0, 0.0, 0.01, gap_s=0.01, n_messages=3
    ) + 0.01 == pytest.approx(three)


def test_max_rate_contains_the_others() -> None:
    n_bytes = np.array([0.0, 1e3, 1e6])
    assert point_to_point.max_rate_s(n_bytes, 1e-6, 1e9, 5e8) == pytest.approx(
        point_to_point.postal_s(n_bytes, 1e-6, 1e-9)
    )
    assert point_to_point.max_rate_s(n_bytes, 1e-6, 1e9, 0.0, 4) == pytest.approx(
        point_to_point.max_rate_short_s(n_bytes, 1e-6, 1e-9, 4)
    )
    assert point_to_point.max_rate_s(n_bytes, 1e-6, 1e9, 1e9, 4) == pytest.approx(
        point_to_point.postal_s(n_bytes, 1e-6, 1e-9)
    )  # no sharing at all
    assert point_to_point.max_rate_s(
        1e6, 0.0, 1e9, 1e9, 4, injection_bytes_per_s=2e9
    ) == pytest.approx(4e6 / 2e9)


@given(
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.floats(0, 1),
    st.floats(0, 1e-3),
    st.floats(1, 64),
)
def test_properties(size: int, more: int, latency_s: float, s_per_byte: float, k: float) -> None:
    rate = 1 / max(s_per_byte, 1e-12)
    for of in (
        lambda n: point_to_point.postal_s(n, latency_s, s_per_byte),
        lambda n: point_to_point.loggp_s(n, latency_s, 0.0, s_per_byte),
        lambda n: point_to_point.max_rate_s(n, latency_s, rate, rate / 2, k),
        lambda n: point_to_point.max_rate_short_s(n, latency_s, s_per_byte, k),
    ):
        assert of(0) == latency_s
        assert of(size) <= of(size + more)
    assert point_to_point.max_rate_s(
        size, latency_s, rate, rate / 2, k
    ) <= point_to_point.max_rate_s(size, latency_s, rate, rate / 2, k + 1) * (1 + 1e-12)


def test_counts_by_hand() -> None:
    messages = [
        (sender, receiver) for sender in range(4) for receiver in range(4) if sender != receiver
    ]
    assert point_to_point.count_messages(messages, [0, 0, 1, 1]) == point_to_point.MessageCounts(
        4, 6, 2
    )  # 2 ranks x 2 of 3 leave
    assert point_to_point.count_messages(messages, ["a", "b", "a", "b"]).k == pytest.approx(
        4 / 6 * 2
    )  # names for nodes
    assert point_to_point.count_messages(messages, [0] * 4).k == 0
    assert point_to_point.count_messages([], [0, 1]) == point_to_point.MessageCounts(0, 0, 0)
    assert point_to_point.count_messages([], [0, 1]).k == 0
    assert point_to_point.count_messages(
        point_to_point.ring(8), point_to_point.blocks(8, 4)
    ) == point_to_point.MessageCounts(1, 4, 4)
    assert len(point_to_point.ring(1)) == 0


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
)
def test_counts_against_counting(
    shape: list[int], periodic: bool, corners: bool, per_node: int
) -> None:
    found = point_to_point.halo(shape, periodic, corners).tolist()
    assert sorted(found) == sorted([b, a] for a, b in found)  # neighbours send to each other
    nodes = point_to_point.blocks(int(np.prod(shape)), per_node)
    counts = point_to_point.count_messages(found, nodes)
    inter = [sum(nodes[a] == node != nodes[b] for a, b in found) for node in set(nodes)]
    total = [sum(nodes[a] == node for a, _ in found) for node in set(nodes)]
    assert (counts.n_inter, counts.n_total) == (max(inter), max(total))


def test_backends() -> None:
    link = backends.LinkParameters(1e-4, 8e-9, 1e-10, 5e-5)
    assert backends.collective_s("all_reduce", 2**22, 4, link) == gloo.all_reduce_s(
        2**22, 4, 1e-4, 8e-9, 1e-10, 5e-5
    )
    expected = recursive_doubling_all_reduce_s(2**22, 4, 1e-4, 8e-9, 1e-10)
    assert (
        backends.collective_s("all_reduce", 2**22, 4, link, "textbook", "recursive_doubling")
        == expected
    )
    for backend in ("gloo", "textbook"):
        for kind in backends.KINDS:
            for algorithm in backends.algorithms(kind, backend):
                assert backends.collective_s(kind, 1000, 1, link, backend, algorithm) == 0
                assert np.all(
                    np.diff(
                        backends.collective_s(
                            kind, np.array([1e3, 1e6]), 4, link, backend, algorithm
                        )
                    )
                    > 0
                )
    assert backends.algorithms("all_reduce", "nccl") == ("ring", "tree")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: point_to_point.postal_s(-1, 0.0, 0.0), "n_bytes is -1"),
        (lambda: point_to_point.postal_s(float("inf"), 0.0, 0.0), "n_bytes is inf"),
        (lambda: point_to_point.loggp_s(1, 0.0, 0.0, 0.0, n_messages=0), "n_messages is 0"),
        (
            lambda: point_to_point.max_rate_s(1, 0.0, 0.0, 0.0),
            "base_bytes_per_s is 0.0; it must be positive",
        ),
        (
            lambda: point_to_point.max_rate_s(1, 0.0, 1.0, 4.0, 0.5),
            "the rate of 0.5 senders is -1.0",
        ),
        (lambda: point_to_point.k_model_senders(2, 1, 1), "n_inter is 2, n_total 1"),
        (lambda: point_to_point.k_model_senders(0, 0, 1), "n_total is 0"),
        (lambda: point_to_point.blocks(0, 1), "n_ranks is 0"),
        (lambda: point_to_point.halo((2, 0)), r"shape is \(2, 0\)"),
        (lambda: point_to_point.count_messages([(0, 2)], [0, 1]), "rank 2 sends or receives"),
        (
            lambda: backends.collective_s("scan", 1, 1, backends.LinkParameters(0, 0)),
            "collective 'scan' is unknown",
        ),
        (
            lambda: backends.collective_s("broadcast", 1, 1, backends.LinkParameters(0, 0), "mpi"),
            "backend 'mpi' is unknown",
        ),
        (
            lambda: backends.collective_s(
                "broadcast", 1, 1, backends.LinkParameters(0, 0), "gloo", "ring"
            ),
            "gloo has no broadcast by 'ring'",
        ),
        (
            lambda: backends.collective_s("broadcast", 1, 1, backends.LinkParameters(0, 0), "nccl"),
            "use dlperf.models.nccl.collective_s",
        ),
        (lambda: backends.LinkParameters(-1, 0), "latency_s is -1"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        call()

"""What must hold of any data-parallel step, whatever its sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlperf.models.buckets import Gradient, assign, rebuilt_buckets, sizes_bytes
from dlperf.models.communication_replay import Collective
from dlperf.models.overlap import Computation, Synchronisation, ddp_program, simulate

seconds = st.floats(0.0, 2.0, allow_nan=False).map(lambda x: round(x, 6))
shares = st.floats(0.0, 1.0, allow_nan=False)


@st.composite
def steps(draw: st.DrawFn) -> tuple[Computation, Synchronisation]:
    n = draw(st.integers(1, 8))
    times = sorted(draw(st.lists(seconds, min_size=n, max_size=n)))
    backward = times[-1] + draw(seconds)
    order = draw(st.permutations(range(n)))
    computation = Computation(draw(seconds), tuple(zip(times, order)), backward, draw(seconds))
    limit = draw(st.integers(1, 4))
    buckets = assign([Gradient(1)] * n, order, (limit,))
    reductions = tuple(Collective(draw(seconds), draw(shares)) for _ in buckets)
    return computation, Synchronisation(buckets, reductions)


@given(steps(), st.integers(1, 2))
def test_exposed_communication_lies_between_nothing_and_all_of_it(
    step: tuple[Computation, Synchronisation], lanes: int
) -> None:
    computation, sync = step
    line = simulate(ddp_program(computation, sync), lanes)
    exposed = line.total_s - computation.alone_s
    assert exposed >= -1e-9
    assert exposed <= line.communication_s + 1e-9
    assert exposed == pytest.approx(line.waited_s, abs=1e-9)


@given(steps(), st.integers(1, 2))
def test_nothing_to_send_costs_nothing(
    step: tuple[Computation, Synchronisation], lanes: int
) -> None:
    computation, sync = step
    silent = replace(sync, reductions=tuple(Collective(0.0) for _ in sync.buckets))
    assert simulate(ddp_program(computation, silent), lanes).total_s == pytest.approx(
        computation.alone_s
    )


@given(steps(), st.floats(1.0, 10.0))
def test_a_faster_link_is_never_slower(
    step: tuple[Computation, Synchronisation], factor: float
) -> None:
    computation, sync = step
    faster = replace(
        sync,
        reductions=tuple(
            replace(one, duration_s=one.duration_s / factor) for one in sync.reductions
        ),
    )
    assert (
        simulate(ddp_program(computation, faster), 1).total_s
        <= simulate(ddp_program(computation, sync), 1).total_s + 1e-9
    )


@given(steps(), st.floats(0.1, 10.0))
def test_everything_as_slow_takes_as_long(
    step: tuple[Computation, Synchronisation], factor: float
) -> None:
    computation, sync = step
    slower = replace(
        sync,
        reductions=tuple(
            replace(one, duration_s=one.duration_s * factor) for one in sync.reductions
        ),
    )
    expected = factor * simulate(ddp_program(computation, sync)).total_s
    assert simulate(ddp_program(computation.scaled(factor), slower)).total_s == pytest.approx(
        expected, abs=1e-9
    )


@given(steps())
def test_one_lane_is_the_recursion_of_the_reducer(
    step: tuple[Computation, Synchronisation],
) -> None:
    """start = max(all its gradients are there, the one before has been launched, and has ended),
    without any simulation.
    """
    computation, sync = step
    arrived = {index: at for at, index in computation.arrivals}
    ready = end = 0.0
    for bucket, one in zip(sync.buckets, sync.reductions):
        ready = max([ready, *(arrived[index] for index in bucket)])
        end = max(ready, end) + one.duration_s
    expected = computation.before_s + max(computation.backward_s, end) + computation.after_s
    assert simulate(ddp_program(computation, sync), 1).total_s == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.randoms())
def test_every_gradient_is_in_one_bucket_and_only_the_last_is_not_full(
    sizes: list[int], random: object
) -> None:
    gradients = [Gradient(size * 2**20) for size in sizes]
    order = list(range(len(sizes)))
    random.shuffle(order)  # type: ignore[attr-defined]
    buckets = rebuilt_buckets(gradients, order)
    assert [index for bucket in buckets for index in bucket] == order
    totals = sizes_bytes(gradients, buckets)
    assert totals[0] >= 2**20 or len(totals) == 1
    assert all(total >= 25 * 2**20 for total in totals[1:-1])

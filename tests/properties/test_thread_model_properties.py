"""Properties of the training time on p workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dlperf.models.threads import (
    HardwareThreads,
    ImageTimes,
    MemoryContention,
    Operations,
    Workload,
    operation_times,
    seconds_per_operation,
    training_time,
)

SECONDS = st.floats(0, 1e3)
TIMES = st.builds(ImageTimes, SECONDS, SECONDS, SECONDS)
WORKLOADS = st.builds(
    Workload,
    st.integers(1, 300),
    st.integers(64, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.none() | st.integers(0, 5),
)
WORKERS = st.integers(1, 64)
CPI = st.floats(1, 8)
CPIS = st.lists(CPI, min_size=1, max_size=8).map(lambda values: tuple(sorted(values)))
POINTS = st.dictionaries(st.integers(1, 512), st.floats(0, 10), min_size=2, max_size=8).map(
    lambda found: tuple(sorted(found.items()))
)


@given(WORKLOADS, TIMES)
def test_one_worker_without_contention_does_the_sum_of_the_work(
    run: Workload, times: ImageTimes
) -> None:
    forwards = run.n_epochs * (run.n_training + run.n_validation) + run.n_tested
    work_s = (
        times.preparation_s
        + times.forward_s * forwards
        + times.backward_s * run.n_epochs * run.n_training
    )
    assert training_time(run, times, 1).total_s == pytest.approx(work_s)


@given(WORKLOADS, TIMES, WORKERS, CPI, SECONDS)
def test_twice_the_images_take_twice_the_time_but_for_the_preparation(
    run: Workload, times: ImageTimes, p: int, cpi: float, contention_s: float
) -> None:
    double = replace(
        run, n_training=2 * run.n_training, n_validation=2 * run.n_validation, n_test=2 * run.n_test
    )
    one, two = (training_time(which, times, p, cpi, contention_s) for which in (run, double))
    assert two.preparation_s == one.preparation_s
    for term in ("training_s", "validation_s", "testing_s", "contention_s"):
        assert getattr(two, term) == pytest.approx(2 * getattr(one, term))


@given(WORKLOADS, TIMES, WORKERS)
def test_without_contention_p_workers_take_a_pth(run: Workload, times: ImageTimes, p: int) -> None:
    assert training_time(run, times, p).training_s * p == pytest.approx(
        training_time(run, times, 1).training_s
    )


@given(WORKLOADS, TIMES, WORKERS, CPI, CPI)
def test_a_higher_cpi_never_takes_less(
    run: Workload, times: ImageTimes, p: int, cpi: float, other: float
) -> None:
    low, high = (training_time(run, times, p, value).total_s for value in sorted((cpi, other)))
    assert low <= high


@given(st.integers(1, 100), CPIS, st.integers(1, 5000), st.integers(0, 5000))
def test_cpi_never_falls_with_more_workers(
    n_cores: int, cpis: tuple[float, ...], p: int, more: int
) -> None:
    on = HardwareThreads(n_cores, cpis)
    assert cpis[0] <= on.cpi(p) <= on.cpi(p + more) <= cpis[-1]
    assert on.cpi(p) <= on.shared_cpi(p) <= on.shared_cpi(p + more)


@given(POINTS, st.integers(1, 4096))
def test_contention_is_the_table_where_there_is_one(
    points: tuple[tuple[int, float], ...], p: int
) -> None:
    contention = MemoryContention(points)
    assert [contention.at(n) for n, _ in points] == [seconds for _, seconds in points]
    assert contention.at(p) >= 0
    if points[0][0] <= p <= points[-1][0]:
        below, above = (
            max((n, s) for n, s in points if n <= p),
            min((n, s) for n, s in points if n >= p),
        )
        assert min(below[1], above[1]) - 1e-9 <= contention.at(p) <= max(below[1], above[1]) + 1e-9


@given(
    WORKLOADS,
    st.floats(1, 1e9),
    st.floats(1, 1e9),
    st.floats(0, 1e12),
    st.floats(1e-12, 1e-3),
    WORKERS,
    CPI,
)
def test_the_factor_is_found_again(
    run: Workload,
    forward: float,
    backward: float,
    preparation: float,
    each_s: float,
    p: int,
    cpi: float,
) -> None:
    operations = Operations(forward, backward, preparation)
    point, unit = (
        training_time(run, operation_times(run, operations, value), p, cpi)
        for value in (each_s, 1.0)
    )
    assume(point.total_s > 0)
    assert seconds_per_operation(point.total_s, unit.total_s) == pytest.approx(each_s)

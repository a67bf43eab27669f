"""Training time on p workers, by hand."""

from __future__ import annotations

import math

import pytest

from dlperf.core.errors import DlperfError
from dlperf.models.threads import (
    HardwareThreads,
    ImageTimes,
    MemoryContention,
    Operations,
    TrainingTime,
    Workload,
    delta_frac,
    operation_times,
    seconds_per_operation,
    training_time,
)

RUN = Workload(n_epochs=3, n_training=100, n_validation=40, n_test=20)
TIMES = ImageTimes(forward_s=0.1, backward_s=0.3, preparation_s=7.0)


def test_every_term() -> None:
    found = training_time(RUN, TIMES, n_workers=4, cpi=2.0, contention_s=0.05)
    # 2 x 0.4 x 100/4 x 3, 2 x 0.1 x 40/4 x 3, 2 x 0.1 x 20/4 x 3, 0.05 x 100/4 x 3: CPI multiplies
    # neither preparation nor contention
    assert found == TrainingTime(
        7.0, pytest.approx(60.0), pytest.approx(6.0), pytest.approx(3.0), pytest.approx(3.75)
    )  # type: ignore[arg-type]
    assert found.total_s == pytest.approx(79.75)


def test_a_test_at_the_end_alone() -> None:
    once = Workload(3, 100, 40, 20, n_test_passes=1)
    assert training_time(once, TIMES, 1).testing_s == pytest.approx(20 * 0.1)
    assert training_time(RUN, TIMES, 1).testing_s == pytest.approx(3 * 20 * 0.1)


def test_strategy_a_is_strategy_b_with_counted_times() -> None:
    operations, each_s = Operations(forward=10, backward=30, preparation=500), 0.01
    times = operation_times(RUN, operations, each_s)
    # 500 + 4 x 100 + 2 x 20 + 10 x 3 = 970 operations to prepare
    assert (times.forward_s, times.backward_s, times.preparation_s) == pytest.approx(
        (0.1, 0.3, 9.7)
    )


def test_the_factor_comes_back_from_a_point_of_its_own() -> None:
    operations = Operations(forward=10, backward=30, preparation=500)
    point = training_time(RUN, operation_times(RUN, operations, 0.02), 5, 1.5, 0.3)
    unit = training_time(RUN, operation_times(RUN, operations, 1.0), 5, 1.5)
    assert seconds_per_operation(point.total_s, unit.total_s, point.contention_s) == pytest.approx(
        0.02
    )


def test_times_of_a_step() -> None:
    times = ImageTimes.of_step(0.2, 0.8, batch_size=2, preparation_s=3)
    assert (times.forward_s, times.backward_s, times.preparation_s) == pytest.approx((0.1, 0.3, 3))


def test_delta_divides_by_the_prediction() -> None:
    assert delta_frac(measured_s=8.0, predicted_s=10.0) == pytest.approx(
        0.2
    )  # |8 - 10| / 8 would be 0.25


def test_cpi_of_the_fullest_core() -> None:
    phi = HardwareThreads(2, (1.0, 1.0, 1.5, 2.0))
    assert [phi.cpi(p) for p in range(1, 10)] == [1, 1, 1, 1, 1.5, 1.5, 2, 2, 2]
    assert phi.n_threads == 8
    assert (
        phi.shared_cpi(16) == 4.0
    )  # 2 for four threads a core, and two workers take turns on each
    siblings = HardwareThreads(1, (1.0, 1.6))
    assert [siblings.cpi(p) for p in (1, 2, 3)] == [1.0, 1.6, 1.6]
    assert siblings.shared_cpi(4) == pytest.approx(3.2)


def test_contention_is_table_then_neighbours_then_line() -> None:
    found = MemoryContention(((1, 0.0), (2, 1.0), (4, 2.0)))
    assert [found.at(p) for p in (1, 2, 3, 4)] == [0.0, 1.0, 1.5, 2.0]
    # means 7/3 and 1; slope (4/3 + 0 + 5/3) / (16 + 1 + 25) x 9 = 27/42
    assert found.line[0] == pytest.approx(27 / 42)
    assert found.at(8) == pytest.approx(1 + 27 / 42 * (8 - 7 / 3))
    assert (
        MemoryContention(((4, 1.0), (8, 9.0))).at(1) == 0.0
    )  # the line says -5: nobody gains by contention


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: training_time(RUN, TIMES, 0), "number of workers is 0"),
        (lambda: training_time(RUN, TIMES, -3), "number of workers is -3"),
        (lambda: training_time(RUN, TIMES, 1.5), "number of workers is 1.5"),  # type: ignore[arg-type]
        (
            lambda: training_time(RUN, TIMES, 101),
            "101 workers are more than the 100 training images",
        ),
        (lambda: training_time(RUN, TIMES, 1, cpi=0.0), "CPI is 0.0"),
        (lambda: training_time(RUN, TIMES, 1, contention_s=-1.0), "contention_s is -1.0"),
        (lambda: Workload(0, 10), "n_epochs is 0"),
        (lambda: Workload(1, 0), "n_training is 0"),
        (lambda: Workload(1, 10, n_test=-1), "n_test is -1"),
        (lambda: Workload(1, 10, n_test_passes=-1), "n_test_passes is -1"),
        (lambda: Operations(-1, 1), "forward is -1"),
        (lambda: ImageTimes(1.0, math.nan), "backward_s is nan"),
        (lambda: ImageTimes.of_step(2.0, 1.0, 1), "less than forward_s"),
        (lambda: ImageTimes.of_step(1.0, 2.0, 0), "batch_size is 0"),
        (lambda: operation_times(RUN, Operations(1, 1), 0.0), "seconds_per_operation is 0.0"),
        (lambda: seconds_per_operation(1.0, 0), "0 operations"),
        (lambda: seconds_per_operation(1.0, 5, other_s=1.0), "nothing is left to fit"),
        (lambda: delta_frac(1.0, 0.0), "predicted_s is 0.0"),
        (lambda: HardwareThreads(0), "n_cores is 0"),
        (lambda: HardwareThreads(2, ()), "CPIs are ()"),
        (lambda: HardwareThreads(2, (2.0, 1.0)), "CPIs are (2.0, 1.0)"),
        (lambda: HardwareThreads(2).cpi(0), "number of workers is 0"),
        (lambda: MemoryContention(()), "has 0 points"),
        (lambda: MemoryContention(((1, 0.1),)), "has 1 point"),
        (lambda: MemoryContention(((2, 0.1), (1, 0.2))), "at [2, 1] workers"),
        (lambda: MemoryContention(((1, 0.1), (1, 0.2))), "at [1, 1] workers"),
        (lambda: MemoryContention(((0, 0.1), (1, 0.2))), "number of workers is 0"),
        (
            lambda: MemoryContention(((1, 0.1), (2, -0.2))),
            "memory contention of 2 workers is -0.2",
        ),
        (lambda: MemoryContention(((1, 0.1), (2, 0.2))).at(0), "number of workers is 0"),
    ],
)
def test_bad_input_is_one_line(make, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DlperfError) as caught:
        make()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)

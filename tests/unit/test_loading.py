"""Loading by hand and against an event simulation; the costs of a made-up machine."""

from __future__ import annotations

import random

import pytest
from calibrated_cases import T, machine
from loader_simulation import simulate

from dlperf.core.costs import CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.state import State
from dlperf.core.trace import Op, Storage, TensorSpec, Trace
from dlperf.forecast.loading import (
    Batches,
    LoaderCosts,
    Starts,
    has_costs,
    period,
    pipeline_s,
    rates,
    sample_bytes,
)

US = 1e-6
IN_PROCESS = {
    "loader_batch": 30 * US,
    "loader_batch_tensor": 6 * US,
    "loader_sample": 1 * US,
    "loader_tensor": 2 * US,
    "loader_shuffle": 0.1 * US,
    CostKey("loader_byte", at=1024): 2e-10,
    CostKey("loader_byte", at=4096): 4e-10,
}
WORKERS = {
    "loader_receive_batch": 500 * US,
    "loader_receive_tensor": 300 * US,
    "loader_receive_byte": 4e-10,
    "loader_send_batch": 700 * US,
    "loader_send_tensor": 200 * US,
    "loader_send_byte": 1e-9,
    "loader_start_call": 0.02,
    "loader_start_worker": 0.015,
    "loader_stop_call": 0.007,
    "loader_stop_worker": 0.001,
    "loader_resume": 0.002,
    "loader_fork_byte": 1e-9,
}


def loading_machine(workers: bool = True, **rest: float) -> Machine:
    costs = IN_PROCESS | (WORKERS if workers else {})
    return machine({**costs, **rest})


# -- the pipeline ----------------------------------------------------------------------------------


def test_without_workers_batches_are_fetched_in_between() -> None:
    assert pipeline_s(10, 3.0, 2.0, 0) == 10 * (3.0 + 2.0)
    assert pipeline_s(0, 3.0, 2.0, 0) == pipeline_s(0, 3.0, 2.0, 4) == 0.0


def test_a_fast_worker_costs_its_first_batch() -> None:
    assert pipeline_s(10, 3.0, 2.0, 1) == 2.0 + 10 * 3.0


def test_a_slow_worker_costs_what_it_takes() -> None:
    # one worker: the last batch is ready at 10 x 5 and is used until 50 + 3; two: 5 rounds of 5,
    # then the two batches of the last one
    assert pipeline_s(10, 3.0, 5.0, 1) == 53.0
    assert pipeline_s(10, 1.0, 5.0, 2) == 5 * 5.0 + 2 * 1.0
    # three batches in two rounds: the last round has one batch
    assert pipeline_s(3, 1.0, 5.0, 2) == 2 * 5.0 + 1.0


def test_a_loader_that_takes_no_time_leaves_the_steps() -> None:
    for n_workers in range(5):
        assert pipeline_s(7, 3.0, 0.0, n_workers, threads=2, n_cores=2) == 7 * 3.0


def test_one_core_for_all_does_all_the_work() -> None:
    # consumer 3 and producer 2 take turns on the core: 5 a batch whatever the number of workers
    for n_workers in (1, 2, 4):
        assert period(3.0, 2.0, n_workers, 1, 1).seconds == pytest.approx(5.0)


def test_threads_wait_for_the_one_that_shares_its_core() -> None:
    # two threads and a worker on two cores: while it is active the training goes at 1/2, the worker
    # at 2/3. To make a batch (2) takes 3, in which 1.5 of 6 are done, and the other 4.5 take as
    # long: 7.5
    found = period(6.0, 2.0, 1, 2, 2)
    assert found.seconds == pytest.approx(7.5)
    assert not found.waits


def test_workers_that_wait_need_no_core() -> None:
    # four workers that sleep 10 s for a batch make one every 2.5 s, however few the cores
    assert period(1.0, 10.0, 4, 1, 2, busy_frac=0.0).seconds == pytest.approx(2.5)
    # half of their time on a core: 1 + 4 / 2 busy on 2 cores, so 2/3 of a core each and 10 (1/2 +
    # 3/4) = 12.5 s beside the training, 10 s where it waits
    found = period(1.0, 10.0, 4, 1, 2, busy_frac=0.5)
    assert found.waits
    assert found.seconds == pytest.approx(1.5 + (1 - 1.5 * 4 / 12.5) / (4 / 10.0))


def test_a_training_that_waits_leaves_its_core_to_the_workers() -> None:
    # one thread and two workers on two cores, 1 to use and 10 to make: 1.5 s together at 2/3 each,
    # which make 2 x 1.5 x 2/3 = 2 of the 10, the other 8 take 8/2
    found = period(1.0, 10.0, 2, 1, 2)
    assert found.seconds == pytest.approx(1.5 + 4.0)
    assert found.waits


@pytest.mark.parametrize("seed", range(300))
def test_the_closed_form_is_the_simulation_where_cores_suffice(seed: int) -> None:
    draw = random.Random(seed)
    n, n_workers = draw.randint(1, 60), draw.randint(1, 9)
    consumer_s, producer_s = draw.uniform(0.1, 3.0), draw.uniform(0.1, 9.0)
    assert pipeline_s(n, consumer_s, producer_s, n_workers) == pytest.approx(
        simulate(n, consumer_s, producer_s, n_workers), rel=1e-9
    )


@pytest.mark.parametrize("seed", range(300))
def test_it_is_near_the_simulation_where_they_share_cores(seed: int) -> None:
    draw = random.Random(1000 + seed)
    n, n_workers, threads, n_cores = (
        draw.randint(150, 300),
        draw.randint(1, 6),
        draw.randint(1, 3),
        draw.randint(1, 4),
    )
    consumer_s, producer_s = draw.uniform(0.1, 3.0), draw.uniform(0.1, 9.0)
    exact = simulate(n, consumer_s, producer_s, n_workers, threads, n_cores)
    assert pipeline_s(n, consumer_s, producer_s, n_workers, threads, n_cores) == pytest.approx(
        exact, rel=0.05
    )


@pytest.mark.parametrize("n_workers", [1, 2, 3, 5])
def test_more_cores_never_cost(n_workers: int) -> None:
    taken = [pipeline_s(50, 1.0, 2.5, n_workers, 2, n_cores) for n_cores in (1, 2, 3, 4, 8, 16)]
    assert taken == sorted(taken, reverse=True)


def test_more_workers_never_cost_where_there_are_cores() -> None:
    taken = [pipeline_s(64, 1.0, 6.0, n_workers) for n_workers in range(12)]
    assert taken == sorted(taken, reverse=True)


def test_shares_add_up_to_the_cores() -> None:
    for n_active in range(1, 6):
        main, worker = rates(n_active, 1, 2)
        assert main + n_active * worker == pytest.approx(min(2, 1 + n_active))


# -- what batches cost -----------------------------------------------------------------------------


def test_a_batch_in_memory() -> None:
    costs = LoaderCosts(loading_machine(), 1)
    # 32 samples of 1024 and 2048 bytes: 30 + 2 x 6 + 32 (1 + 2 x 2 + 0.1) us, and the bytes at
    # 2e-10 and, half-way in the logarithm, 3e-10 each
    copied_s = 32 * (1024 * 2e-10 + 2048 * 3e-10)
    assert costs.fetch_s(32, (1024, 2048), shuffled=True) == pytest.approx(
        (30 + 12 + 32 * 5.1) * US + copied_s
    )
    assert costs.fetch_s(32, (1024, 2048), shuffled=False) == pytest.approx(
        (30 + 12 + 32 * 5.0) * US + copied_s
    )


def test_a_batch_that_malloc_takes_anew_is_faulted() -> None:
    costs = LoaderCosts(loading_machine(page_fault=0.5 * US, page_release=0.1 * US), 1)
    small, large = (costs.fetch_s(n, (2**20,), shuffled=False) for n in (31, 32))
    # 32 MiB are 8192 pages of 4 KiB
    assert large - small == pytest.approx(3 * US + 2**20 * 4e-10 + 8192 * 0.6 * US)


def test_handing_over() -> None:
    costs = LoaderCosts(loading_machine(), 1, State(interpreter=1.5, dram=3.0), mean=2.0)
    assert costs.batches(0.001, (1000, 24), 0) == Batches(0.001)
    found = costs.batches(0.001, (1000, 24), 3)
    assert found.hand_over_s == pytest.approx(2 * (1.5 * (700 + 2 * 200) * US + 3 * 1024 * 1e-9))
    assert found.take_over_s == pytest.approx(2 * (1.5 * (500 + 2 * 300) * US + 3 * 1024 * 4e-10))


def test_starting_and_ending() -> None:
    costs = LoaderCosts(loading_machine(), 1)
    assert costs.starts(0, 1e9) == Starts()
    found = costs.starts(3, 1e6)
    assert (found.start_s, found.stop_s, found.resume_s) == (
        pytest.approx(0.02 + 3 * 0.015 + 0.001),
        pytest.approx(0.007 + 3 * 0.001),
        0.002,
    )


def test_a_machine_without_the_costs_names_the_command() -> None:
    assert not has_costs(machine())
    with pytest.raises(
        DlperfError, match="machine: holds no costs of loading data; dlperf calibrate adds them"
    ):
        LoaderCosts(machine(), 1)
    alone = LoaderCosts(loading_machine(workers=False), 1)
    for ask in (lambda: alone.batches(0.0, (4,), 1), lambda: alone.starts(1, 0)):
        with pytest.raises(
            DlperfError, match="holds no costs of loading workers, which this system refused"
        ):
            ask()


def test_what_a_step_reads_from_outside() -> None:
    def spec(storage: int, *shape: int, dtype: str = "float32") -> TensorSpec:
        return TensorSpec.contiguous(*shape, dtype=dtype, storage=storage)

    x, weight, labels, hidden = (
        spec(0, 8, 10),
        spec(1, 8, 10),
        spec(2, 8, dtype="int64"),
        spec(3, 8, 8),
    )
    ops = (
        Op("aten.mm.default", (x, weight), outputs=(hidden,)),
        Op("aten.nll_loss_forward.default", (hidden, labels)),
        Op("aten.relu.default", (T(8),)),
    )
    storages = (
        Storage(320, kind="input"),
        Storage(320, kind="parameter"),
        Storage(64),
        Storage(256, born=0, dies=2),
    )
    assert sample_bytes(Trace("t", 8, (), ops, storages)) == (40, 8)

"""Workers beside one another on made-up machines, by hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from calibrated_cases import cost, relu
from calibrated_cases import machine as made_up
from calibrated_cases import trace as trace_of

from dlperf.core.clock import Samples
from dlperf.core.co_run import PREPARATION, CoRun, operations_of
from dlperf.core.costs import Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Cpu, Machine
from dlperf.core.prediction import BOUNDS, Item, Prices
from dlperf.core.state import Reading
from dlperf.core.variation import sigma_over
from dlperf.forecast.loading import _NEEDED, _NEEDED_BY_WORKERS
from dlperf.forecast.prediction import Prediction
from dlperf.forecast.worker_processes import (
    averaging_s,
    hardware_threads,
    memory_contention_s,
    own_slowdown,
    predict_co_run,
    preparation_s,
    slowdown,
)
from dlperf.report.machine_summary import summarize

TWO_CORES = Cpu("Made-up CPU", 2, (2**15, 2**20, 2**25), n_physical_cores=2)
EIGHT_CORES = replace(TWO_CORES, n_cores=8, n_physical_cores=8)
SIBLINGS = Cpu("Made-up CPU", 4, (2**15, 2**20, 2**25), n_physical_cores=2)
"""Two cores of two hardware threads each."""


def co_run(work: str, workers: int, together_s: float, alone_s: float = 1.0) -> CoRun:
    """Pairs of ratio t / a, t / a (both slowed down by a neighbour) and 3 t / a (which the median
    leaves out).
    """
    return CoRun(
        work,
        workers,
        Samples((together_s, 2 * together_s, 3 * together_s)),
        Samples((alone_s, 2 * alone_s, alone_s)),
    )


def machine(cpu: Cpu = TWO_CORES, **work: Mapping[int, float]) -> Machine:
    """A machine whose slowdowns are those given by kind of work (``page_faults`` for
    ``page-faults``) and number of workers.
    """
    rows = [
        co_run(name.replace("_", "-"), p, value)
        for name, values in work.items()
        for p, value in values.items()
    ]
    return replace(made_up(), cpu=cpu, co_runs=tuple(rows))


def prediction(file: Machine, *items: Item, threads: int = 1) -> Prediction:
    found = items or (
        Item("fc", "forward", 3e-3, "compute", "measured"),
        Item("fc", "forward", 1e-3, "DRAM", "measured"),
    )
    return Prediction(
        replace(trace_of(relu(64)), batch_size=10),
        file,
        threads,
        "made-up",
        Prices(found, phases=("forward",), low_factor=0.9, high_factor=1.1),
    )


# -- slowdowns -------------------------------------------------------------------------------------


def test_what_was_measured_is_the_usual_ratio_of_a_pair() -> None:
    # of 2.5 / 1, 5 / 2 and 7.5 / 1
    assert slowdown(machine(compute={4: 2.5}), "compute", 4) == 2.5
    assert slowdown(machine(compute={4: 2.5}), "compute", 1) == 1.0


def test_between_measured_numbers_the_excess_over_the_processors_sharing_is_interpolated() -> None:
    # 2 cores: co_run 1 at 2 workers, 2 at 4, 1.5 at 3; excess 1.2 and 2.8 / 2 = 1.4, halfway 1.3
    assert slowdown(machine(compute={2: 1.2, 4: 2.8}), "compute", 3) == pytest.approx(1.5 * 1.3)
    # only 4 was measured: excess 1 at one worker and 1.5 at four, a third of the way 1.1667; two
    # workers have two cores
    assert slowdown(machine(compute={4: 3.0}), "compute", 2) == pytest.approx(1.0 + 0.5 / 3)


def test_beyond_them_the_excess_follows_its_line_until_all_cores_are_busy() -> None:
    # excess 1, 1.1, 1.3 at 1, 2, 4: the line 0.9 + 0.1 p; at 8 it is 1.7, and 16 workers have half
    # a core each
    file = machine(EIGHT_CORES, compute={2: 1.1, 4: 1.3})
    assert [slowdown(file, "compute", p) for p in (6, 8, 16)] == pytest.approx([1.5, 1.7, 2 * 1.7])
    # two cores were busy with 2 and with 4, excess 1.1 and 1.3; more have their mean
    assert slowdown(machine(compute={2: 1.1, 4: 2.6}), "compute", 8) == pytest.approx(4 * 1.2)
    # one core is busy with one already, but what one does not have is switching
    assert slowdown(
        machine(replace(TWO_CORES, n_cores=1, n_physical_cores=1), compute={2: 2.2}), "compute", 4
    ) == pytest.approx(4 * 1.1)


def test_an_excess_that_falls_does_not_fall_for_ever() -> None:
    # excess 1, 1.4 and 1 at 1, 2, 4: at 8 the line would be at 0.97; the least measured counts
    assert slowdown(machine(EIGHT_CORES, compute={2: 1.4, 4: 1.0}), "compute", 8) == pytest.approx(
        1.0
    )


def test_company_makes_nobody_faster() -> None:
    file = machine(EIGHT_CORES, compute={2: 0.9, 4: 1.2})
    assert [slowdown(file, "compute", p) for p in (2, 4)] == pytest.approx([1.0, 1.2])


def test_siblings_share_a_core() -> None:
    assert [hardware_threads(SIBLINGS).shared_cpi(p) for p in (1, 2, 3, 4, 8)] == [1, 1, 2, 2, 4]
    assert [hardware_threads(TWO_CORES).shared_cpi(p) for p in (1, 2, 4)] == [1, 1, 2]
    file = machine(SIBLINGS, compute={4: 1.4})
    # excess 1 at one worker, 1.4 / 2 = 0.7 at four: the line stays there beyond, and 8 workers take
    # turns on 4 threads
    assert slowdown(file, "compute", 8) == pytest.approx(4 * 0.7)


def test_a_file_without_the_terms_says_which_command_adds_them() -> None:
    for ask in (
        lambda m: slowdown(m, "L2", 2),
        lambda m: preparation_s(m, 2),
        lambda m: predict_co_run(prediction(m), 2),
        lambda m: averaging_s(m, 4, 2),
    ):
        with pytest.raises(DlperfError, match=r"dlperf calibrate --workers 1,2,4 -o m\.json adds"):
            ask(replace(machine(), path="m.json"))
    with pytest.raises(DlperfError, match="at least 1"):
        slowdown(machine(), "compute", 0)


# -- predictions -----------------------------------------------------------------------------------


def test_each_item_takes_the_slowdown_of_what_bounds_it() -> None:
    file = machine(compute={2: 1.1}, DRAM={2: 1.8}, overhead={2: 1.05})
    alone = prediction(file)
    found = predict_co_run(alone, 2)
    assert found.workers == 2
    assert found.step.total_s == pytest.approx(3e-3 * 1.1 + 1e-3 * 1.8)
    assert (found.step.low_s, found.step.high_s) == (
        pytest.approx(0.9 * 5.1e-3),
        pytest.approx(1.1 * 5.1e-3),
    )
    assert predict_co_run(alone, 1) is alone
    assert "one of 2 workers" in found.prices.notes[-1]
    assert "beyond" not in found.prices.notes[-1]
    assert "beyond 2 workers" in predict_co_run(alone, 3840).prices.notes[-1]
    with pytest.raises(DlperfError, match="for 2 workers already"):
        predict_co_run(found, 4)


def test_every_bound_has_a_slowdown_but_the_networks() -> None:
    file = machine(**{name.replace("-", "_"): {2: 2.0} for name in BOUNDS if name != "network"})
    found = predict_co_run(
        prediction(file, *(Item("fc", "forward", 1.0, bound, "measured") for bound in BOUNDS)), 2
    )
    assert {item.bound: item.seconds for item in found.prices.items} == {
        bound: 1.0 if bound == "network" else 2.0 for bound in BOUNDS
    }


def test_a_targets_own_operations_come_before_kinds_of_work() -> None:
    file = machine(compute={2: 1.1}, overhead={2: 1.3}, page_faults={2: 1.6})
    own = operations_of("made-up", 10, inference=False)
    file = replace(file, co_runs=(*file.co_runs, co_run(own, 2, 1.5)))
    items = (
        Item("fc", "forward", 1.0, "compute", "measured"),
        Item("fc", "forward", 1.0, "overhead", "measured", "module call"),
        Item("fc", "forward", 1.0, "page-faults", "measured", "page faults"),
    )
    found = predict_co_run(prediction(file, *items), 2)
    assert [item.seconds for item in found.prices.items] == pytest.approx([1.5, 1.3, 1.6])
    assert own_slowdown(file, replace(found.trace, batch_size=11), 2) is None
    assert own_slowdown(file, found.trace, 2) == 1.5  # a forward pass takes that of its step


def test_the_costs_around_a_step_are_slowed_down_as_python_is() -> None:
    file = machine(compute={2: 1.0}, DRAM={2: 1.0}, overhead={2: 1.25})
    file = replace(
        file,
        costs=(
            Cost(CostKey("loader_batch"), 1, Samples((4e-6,))),
            Cost(CostKey("page_fault"), 1, Samples((4e-6,))),
        ),
    )
    found = {cost.key: cost.value for cost in predict_co_run(prediction(file), 2).machine.costs}
    assert found == {CostKey("loader_batch"): pytest.approx(5e-6), CostKey("page_fault"): 4e-6}


def test_workers_have_one_thread() -> None:
    with pytest.raises(DlperfError, match="predict with threads=1"):
        predict_co_run(prediction(machine(compute={2: 1.0}), threads=2), 2)


def test_memory_contention_is_what_an_image_takes_beyond_the_processors_sharing() -> None:
    file = machine(compute={4: 2.2}, DRAM={4: 3.0}, overhead={4: 2.0})
    # alone 4 ms for 10 images; beside three others 3 x 2.2 + 1 x 3 = 9.6 ms, of which half a core
    # each explains 8
    assert memory_contention_s(prediction(file), 4) == pytest.approx((9.6e-3 - 8e-3) / 10)
    assert memory_contention_s(prediction(file), 1) == 0.0


def test_preparation() -> None:
    # alone 1, 2, 1 and 2, 4, 2 s: the median is 2; of 4 workers 2.5 / 2 times as long as alone,
    # excess 1.25 / 2 = 0.625 on 2 cores
    file = replace(
        machine(), co_runs=(co_run(PREPARATION, 1, 1.0, 1.0), co_run(PREPARATION, 4, 2.5, 2.0))
    )
    assert [preparation_s(file, p) for p in (1, 4)] == [2.0, 2.5]
    # a third of the way from excess 1 at one worker to 0.625 at four: 0.875
    assert preparation_s(file, 2) == pytest.approx(2 * 0.875)
    # the line falls below what was measured; 8 workers, four of them a core
    assert preparation_s(file, 8) == pytest.approx(2 * 4 * 0.625)
    assert preparation_s(replace(file, co_runs=file.co_runs[:1]), 1) == 1.0
    with pytest.raises(DlperfError, match="preparation"):
        preparation_s(replace(file, co_runs=file.co_runs[:1]), 2)


def test_averaging_moves_all_rows() -> None:
    # 4 workers: 4 + 4 times 10^6 bytes at 10 GB/s, beside three others three times as long
    assert averaging_s(machine(DRAM={4: 3.0}), 10**6, 4) == pytest.approx(3 * 8e6 / 1e10)


# -- runs ------------------------------------------------------------------------------------------


def workers_file() -> Machine:
    file = machine(compute={2: 1.5}, DRAM={2: 2.0}, overhead={2: 1.2})
    return replace(file, co_runs=(*file.co_runs, co_run(PREPARATION, 2, 4.0, 3.0)))


def test_a_run_is_that_of_the_largest_share_beside_the_others_and_what_surrounds_it() -> None:
    # 101 samples on 2 workers: 51 of one, in batches of 10 6 steps; a pass over 21 validation
    # samples has 11, 2 batches, over 9 test samples 1
    alone = prediction(
        workers_file()
    )  # its step is a forward pass of 3 ms computing and 1 ms of memory
    step_s = 3e-3 * 1.5 + 1e-3 * 2.0
    found = alone.epoch(101, 3, 21, 9, workers=2)
    assert (found.samples, found.workers, found.steps_per_epoch) == (101, 2, 6)
    assert found.preparation_s == pytest.approx(4.0)  # 3 s, the median of 3, 6 and 3, times 4 / 3
    assert found.averaging_s == 0.0  # a network without parameters
    assert found.epoch_s == pytest.approx((6 + 2) * step_s)
    assert found.total_s == pytest.approx(4.0 + 3 * 8 * step_s + step_s)
    assert found.to_json()["preparation_s"] == found.preparation_s


def test_one_worker_is_started_too() -> None:
    alone = prediction(workers_file())
    assert alone.epoch(100, workers=1).total_s == pytest.approx(
        alone.epoch(100).total_s + 3.0
    )  # the median of 3, 6 and 3
    assert alone.epoch(100).preparation_s == 0.0


def test_runs_that_cannot_be() -> None:
    alone = prediction(workers_file())
    for workers, complaint in ((0, "at least 1"), (11, "11 workers are more than the 10 samples")):
        with pytest.raises(DlperfError, match=complaint):
            alone.epoch(10, workers=workers)


def test_workers_wait_for_the_slowest_of_them() -> None:
    """Paces that vary by 10 % over 5 s: of two epochs of 5 s each the slower takes 0.564 standard
    deviations more than the mean.
    """
    steady = workers_file()
    reference = Reading(*(1.0,) * 6)
    readings = tuple(
        replace(reference, core_s=1 + 0.1 * statistics.NormalDist().inv_cdf((index + 0.5) / 101))
        for index in range(101)
    )
    contended = replace(steady, reference=reference, readings=readings)
    n = 12_500  # epochs of 6,250 steps of 6.5 ms
    one, other = (prediction(file).epoch(n, 2, workers=2) for file in (steady, contended))
    assert one.waiting_s == 0.0
    assert one.epoch_s == pytest.approx(other.epoch_s - other.waiting_s)
    sigma = sigma_over(0.1, one.epoch_s)
    assert other.waiting_s == pytest.approx(0.564 * sigma * one.epoch_s, rel=0.05)
    assert other.total_s - one.total_s == pytest.approx(2 * other.waiting_s)
    assert prediction(contended).epoch(n, workers=1).waiting_s == 0.0
    four = prediction(contended).epoch(n, workers=4)  # two at a time, on two cores
    assert four.waiting_s / four.epoch_s < 1.5 * other.waiting_s / other.epoch_s


def test_loading_workers_share_their_training_workers_part_of_the_cores() -> None:
    names = [
        *(f"loader_{name}" for name in (*_NEEDED, *_NEEDED_BY_WORKERS)),
        CostKey("loader_byte", at=4096),
    ]
    file = replace(
        workers_file(),
        costs=(*workers_file().costs, *(cost(key, 1e-9) for key in names)),
    )
    loader = SampledLoader("l", 10, 4e-3, (1,), 40)
    step_s = 3e-3 * 1.5 + 1e-3 * 2.0
    made_s = 1.2 * 4e-3
    # two training workers on two cores: each has one, and what loads for it takes its time there
    found = prediction(file).epoch(20_000, workers=2, loader_workers=1, loader=loader)
    assert found.steps_per_epoch == 1000
    assert found.epoch_s == pytest.approx(1000 * (step_s + made_s), rel=0.01)
    assert any("no measured run" in note for note in found.notes)
    # on eight cores each has four, and steps and batches are made side by side
    apart = prediction(replace(file, cpu=EIGHT_CORES)).epoch(
        20_000, workers=2, loader_workers=1, loader=loader
    )
    assert apart.epoch_s == pytest.approx(1000 * step_s, rel=0.01)


# -- files -----------------------------------------------------------------------------------------


def test_files_keep_what_was_measured(tmp_path: Path) -> None:
    file = machine(SIBLINGS, compute={2: 1.25, 4: 2.5})
    file.save(tmp_path / "m.json")
    loaded = Machine.load(tmp_path / "m.json")
    assert (loaded.co_runs, loaded.cpu) == (file.co_runs, file.cpu)
    data = json.loads((tmp_path / "m.json").read_text())
    del data["co_runs"], data["cpu"]["n_physical_cores"]  # a file of before
    old = Machine.from_json(data)
    assert (old.co_runs, old.cpu.threads_per_core) == ((), 1)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda row: row.update(workers=0),
            r"co_runs\[0\].workers is 0; expected a whole number of at least 1",
        ),
        (lambda row: row.update(samples_s=[-1.0]), r"co_runs\[0\].samples_s\[0\] is -1.0"),
        (
            lambda row: row["alone"].update(samples_s=[1.0]),
            r"expected as many samples as alone, 1: they are taken in pairs",
        ),
        (lambda row: row["alone"].update(samples_s=[]), r"co_runs\[0\].alone.samples_s is \[\]"),
    ],
)
def test_what_no_measurement_can_have_made_is_refused(change, complaint) -> None:  # type: ignore[no-untyped-def]
    data = machine(compute={2: 1.25}).to_json()
    change(data["co_runs"][0])
    with pytest.raises(DlperfError, match=complaint):
        Machine.from_json(data)


def test_show_prints_them() -> None:
    file = machine(SIBLINGS, compute={2: 1.25, 4: 2.5})
    file = replace(
        file,
        co_runs=(
            *file.co_runs,
            co_run(PREPARATION, 1, 1.0, 1.0),
            co_run(PREPARATION, 4, 2.5, 2.0),
        ),
    )
    text = summarize(file).to_text()
    rows = {tuple(line.split()) for line in text.splitlines()}
    assert ("compute", "1.00", "1.25", "2.50") in rows
    assert ("by", "the", "topology", "alone", "1.00", "1.00", "2.00") in rows
    assert ("preparation", "2.00", "s", "-", "5.00", "s") in rows
    assert "2 hardware threads each of 2" in text
    assert summarize(file).to_json()["co_runs"][1] == {
        "work": "compute",
        "workers": 4,
        "slowdown": 2.5,
        "time_s": 5.0,
        "alone_s": 1.0,
    }

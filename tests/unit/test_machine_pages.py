from __future__ import annotations

from dataclasses import replace

import pytest
from calibrated_cases import cost, step_keys

from dlperf.core.clock import Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Bandwidth, Cpu, Kernel, KernelModelFit, Machine
from dlperf.core.machine_doubts import (
    doubts_of,
    find_mismatches,
    find_missing_dtypes,
    find_state_problem,
)
from dlperf.core.state import Reading
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.core.verification import Coverage, Disturbance, SelfTest
from dlperf.report.machine_check import (
    compare_machines,
    find_problems,
    find_remarks,
)
from dlperf.report.machine_summary import summarize

CPU = Cpu("Testor 9000", 2, (32 * 2**10, 2**20, 32 * 2**20), 8 * 2**30, ("avx2", "fma"), "test/1")
VERSIONS = {"dlperf": "0.1.0", "torch": "2.13.0+cpu"}


def product(n: int, dtype: str = "float32") -> Op:
    square = TensorSpec.contiguous(n, n, dtype=dtype)
    return Op("aten.mm.default", (square, square), outputs=(square,))


def machine_of(scale: float = 1.0, **changes: object) -> Machine:
    """Times are `scale` times those of a machine with 100 GFLOP/s, 10 GB/s and 1 us of dispatch."""
    kernels = tuple(
        Kernel(product(n), "gemm", 1, Samples((scale * 2 * n**3 / 100e9,) * 3))
        for n in (64, 128, 256)
    )
    sweep = tuple(
        Bandwidth("triad", 1, size, size, Samples((scale * size / 10e9,) * 3))
        for size in (16 * 2**10, 2**19, 2**23, 2**28)
    )
    costs = (
        Cost(CostKey("fork_join"), 1, Samples((scale * 1e-6,))),
        *(cost(key, 0.0) for key in step_keys()),
    )
    tests = (SelfTest("MLP", 1, 7, 1.1e-3, 0.9e-3, 1.3e-3, 1e-3),)
    machine = Machine(
        CPU,
        kernels,
        sweep,
        costs,
        complete=True,
        versions=VERSIONS,
        created="2026-01-01",
        path="one.json",
        self_tests=tests,
    )
    return replace(machine, **changes)  # type: ignore[arg-type]


CURVES = (
    KernelModelFit(("gemm", "float32", "matrix"), "gemm", 1, (3.0,), 0.1, 0.05, (0.02, 0.08) * 10),
    KernelModelFit(("gemm",), "gemm", 2, (3.0,), 0.1, 0.05, (0.5,)),
)


def test_summary_holds_the_rates_of_the_samples() -> None:
    summary = summarize(machine_of(kernel_models=CURVES))
    assert summary.peaks == (("float32", 1, pytest.approx(100e9)),)
    assert [(level, rate) for level, _, rate in summary.bandwidths] == [
        (level, pytest.approx(10e9)) for level in ("L1", "L2", "L3", "DRAM")
    ]
    assert (CostKey("fork_join"), 1, 1e-6) in summary.costs
    (family,) = summary.families
    assert (
        family.name,
        family.threads,
        family.n_points,
        family.spread_frac,
        family.leave_one_out_frac,
    ) == ("gemm", 1, 3, 0.0, 0.05)


def test_summary_text_names_what_it_holds() -> None:
    text = summarize(machine_of(notes=("the machine was busy",), kernel_models=CURVES)).to_text()
    for part in (
        "one.json",
        "Testor 9000, 2 cores",
        "L3 32.0 MiB",
        "torch 2.13.0+cpu",
        "100 GFLOP/s",
        "10.0 GB/s",
        "1.00 us",
        "5.0 %",
    ):
        assert part in text
    assert "note: the machine was busy" in text


def test_summary_tells_of_readings() -> None:
    times = ("2026-01-02T03:04:05+00:00", "2026-01-02T03:04:06+00:00", "2026-01-02T03:09:59+00:00")
    machine = with_readings(1.0, 1.1, 1.3)
    readings = tuple(replace(one, created=time) for one, time in zip(machine.readings, times))
    summary = summarize(replace(machine, readings=readings))
    line = (
        "3 readings from 2026-01-02 03:04 to 2026-01-02 03:09; median state: core 1.10, interpreter"
    )
    assert line in summary.to_text()
    data = summary.to_json()
    assert (data["n_readings"], data["reference"]["dram_s"]) == (3, 1.0)
    assert data["usual_state"]["core"] == pytest.approx(1.1)
    bare = summarize(machine_of())
    assert "it contains no reference state, so states have no effect" in bare.to_text()
    data = bare.to_json()
    assert (data["n_readings"], data["reference"], data["usual_state"]) == (0, None, None)


def test_differing_references_stand_side_by_side() -> None:
    first, second = with_readings(1.0), with_readings(1.2)
    assert compare_machines(first, second).notes == ()
    second = replace(second, reference=Reading(2.0, *(1.0,) * 5))
    (note,) = compare_machines(first, second).notes
    rest = "interpreter 1.00 s, own caches 1.00 s, shared cache 1.00 s, DRAM 1.00 s, page faults 1.00 s"
    assert note == f"reference states: core 1.00 s, {rest}; core 2.00 s, {rest}"
    (note,) = compare_machines(first, machine_of()).notes
    assert note.endswith("; none")


def test_summary_of_an_empty_file() -> None:
    assert "incomplete" in summarize(Machine(CPU)).to_text()


def test_this_machine_matches() -> None:
    assert find_mismatches(machine_of(), CPU, VERSIONS) == []
    assert find_problems(machine_of(), CPU, VERSIONS) == []
    assert (
        find_mismatches(machine_of(), CPU, {"torch": "2.13.0"}) == []
    )  # the build's suffix is no other version


@pytest.mark.parametrize(
    ("cpu", "versions", "says"),
    [
        (replace(CPU, model="Other 1"), VERSIONS, "another CPU"),
        (replace(CPU, n_cores=1), VERSIONS, "with 2 cores, this process may use 1"),
        (CPU, {"torch": "2.11.0"}, "torch 2.13.0+cpu, this is torch 2.11.0"),
    ],
)
def test_another_machine_is_named(cpu: Cpu, versions: dict[str, str], says: str) -> None:
    (line,) = find_mismatches(machine_of(), cpu, versions)
    assert says in line
    assert "extrapolated" in line
    assert line in find_problems(machine_of(), cpu, versions)


def test_problems_of_the_measuring() -> None:
    assert "did not finish" in find_problems(machine_of(complete=False), CPU, VERSIONS)[0]
    assert "no measurements" in find_problems(Machine(CPU, complete=True), CPU, VERSIONS)[0]
    assert find_problems(machine_of(bandwidths=()), CPU, VERSIONS) == [
        "it contains no memory bandwidth; dlperf calibrate -o one.json adds it"
    ]
    (line,) = find_problems(
        machine_of(
            costs=tuple(
                cost
                for cost in machine_of().costs
                if cost.key.kind not in ("page_fault", "page_release")
            )
        ),
        CPU,
        VERSIONS,
    )
    what = "it contains no costs page_fault, page_release"
    assert line == f"{what}; dlperf calibrate -o one.json adds them"


def test_spread_alone_is_no_problem() -> None:
    """On a virtual machine the samples above the least tell of neighbours; curves go by the least."""
    unsteady = tuple(
        replace(kernel, samples=Samples((1e-3, 2e-3, 2e-3))) for kernel in machine_of().kernels
    )
    assert find_problems(machine_of(kernels=unsteady), CPU, VERSIONS) == []


def test_kernels_that_do_not_predict_one_another_are_a_remark() -> None:
    def held_out(error: float) -> list[str]:
        found = machine_of(
            kernel_models=(KernelModelFit(("gemm",), "gemm", 1, (3.0,), 0.1, 0.05, (error,) * 20),)
        )
        assert find_problems(found, CPU, VERSIONS) == []  # the self-test tells what comes of it
        return find_remarks(found)

    assert held_out(0.29) == []
    (line,) = held_out(0.31)
    assert line == "gemm with 1 thread: the leave-one-out error of its kernels is 31.0 %"


def test_the_self_test_decides() -> None:
    off = SelfTest("MLP", 1, 7, 9e-3, 8e-3, 1e-2, 1e-3)
    (line,) = find_problems(machine_of(self_tests=(off,)), CPU, VERSIONS)
    assert line.startswith(
        "one.json failed its self-test (MLP, 1 thread: predicted 9.00 ms, measured 1.00 ms:"
        " +800.0 %, a factor of 9.00, is above 1.5; 1 step with 1 thread: the median error of 800.0"
        " % is above 30 %); predictions may be as far off. dlperf calibrate --threads 1 -o one.json"
    )
    (line,) = find_problems(machine_of(self_tests=()), CPU, VERSIONS)
    assert line == "one.json contains no self-test; dlperf machine check runs it"


def test_points_that_there_was_no_time_for_are_counted() -> None:
    some = machine_of(
        complete=False, coverage=(Coverage("gemm", 1, 3, 5), Coverage("rows", 1, 7, 7))
    )
    line = "10 of 12 planned points with 1 thread; there was no time for 2 of gemm"
    assert find_problems(some, CPU, VERSIONS) == []
    most = machine_of(complete=False, coverage=(Coverage("gemm", 1, 3, 7),))
    most = replace(most, reference=Reading(*(1.0,) * 6))
    (problem,) = find_problems(most, CPU, VERSIONS)
    assert problem == (
        "the calibration did not finish; dlperf calibrate --threads 1 -o one.json measures what is"
        " missing or was disturbed"
    )
    assert find_remarks(some) == [line]
    assert line in summarize(some).to_text()
    assert "incomplete" in summarize(some).to_text()


def test_busy_groups_are_a_remark() -> None:
    def with_busy(n_busy: int) -> Machine:
        groups = tuple(
            f"full/{threads}/group {number}" for threads in (1, 2) for number in range(4)
        )
        return machine_of(
            groups=groups,
            disturbances=tuple(
                Disturbance(f"group {number}", 1, 50.0, 0, 9) for number in range(n_busy)
            ),
            notes=("1 other process was running when the measuring began; times may be too long",),
            reference=Reading(*(1.0,) * 6),
        )

    said = (
        "the machine was busy while {} of 4 groups were measured with 1 thread; when it is quiet,"
        " dlperf calibrate --threads 1 -o one.json measures what is missing or was disturbed"
    )
    assert find_problems(with_busy(2), CPU, VERSIONS) == []
    assert find_remarks(with_busy(2))[0] == said.format(2)
    assert "its own note: 1 other process was running" in find_remarks(with_busy(2))[1]
    assert find_problems(with_busy(3), CPU, VERSIONS) == []
    assert find_remarks(with_busy(3))[0] == said.format(3)
    assert (
        "note: the machine was busy while 3 groups were measured with 1 thread: group 0, group"
        " 1, group 2" in summarize(with_busy(3)).to_text()
    )


def with_readings(*factors: float) -> Machine:
    """A file with a reference of 1 s in each probe, and readings of so many seconds."""
    readings = tuple(Reading(*(factor,) * 6) for factor in factors)
    return machine_of(reference=Reading(*(1.0,) * 6), readings=readings)


@pytest.mark.parametrize(
    ("factors", "fits"),
    [
        ((0.72,), True),  # the clock is higher than in the calibration
        ((0.68,), False),
        ((1.0, 0.1, 1.0), True),  # the median counts
        ((4.9,), True),
        ((5.1,), False),
        ((10.0, 10.0, 1.0), False),
    ],
)
def test_readings_that_no_machine_of_this_reference_has(
    factors: tuple[float, ...], fits: bool
) -> None:
    machine = with_readings(*factors)
    problem = find_state_problem(machine)
    assert ("contradict its reference state" not in problem) is fits
    assert bool(problem) is not fits
    trace = Trace("t", 1, (), (product(4),))
    assert (f"one.json: {problem}" in doubts_of(machine, trace, 1)) is not fits


def test_states_need_a_reference_and_readings() -> None:
    assert "no reference state" in find_state_problem(machine_of())
    assert "no readings of its state" in find_state_problem(with_readings())
    assert find_state_problem(machine_of(kernels=())) == ""


def test_missing_dtypes_are_named_once() -> None:
    trace = Trace(
        "t",
        1,
        (),
        (product(4, "bfloat16"), product(8, "bfloat16"), product(4), product(4, "int64")),
    )
    (line,) = find_missing_dtypes(machine_of(), trace)
    assert "bfloat16" in line


def test_difference_is_a_ratio_of_times() -> None:
    difference = compare_machines(machine_of(), machine_of(2.0, path="two.json"))
    assert {ratio.what: ratio.ratio for ratio in difference.ratios} == {
        what: pytest.approx(2.0)
        for what in ("gemm", "memory L1", "memory L2", "memory L3", "memory DRAM", "cost fork_join")
    }
    assert difference.ratios[0].n_shared == 3
    assert difference.notes == ()
    assert "two.json / time in one.json" in difference.to_text()
    assert "cost fork_join" in difference.to_text()
    alike = compare_machines(machine_of(), machine_of()).to_text()
    assert "1 other cost within 5.0 %" in alike
    assert "fork_join" not in alike


def test_difference_names_what_is_not_shared() -> None:
    first = machine_of()
    second = machine_of(
        cpu=replace(CPU, model="Other 1"),
        versions={**VERSIONS, "torch": "2.11.0"},
        kernels=first.kernels[1:],
        mode="quick",
    )
    notes = " | ".join(compare_machines(first, second).notes)
    for part in (
        "other machines: Testor 9000 (2 cores), Other 1 (2 cores)",
        "torch 2.13.0+cpu, 2.11.0",
        "full, quick",
    ):
        assert part in notes
    assert "points in one file alone: 1 in the first, 0 in the second" in notes

"""Times of a calibration in changing states of a machine, normalised to its reference state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from calibrated_cases import T, relu
from test_simulated_machines import Simulation, calibrate

from dlperf.core.clock import Samples, quantile
from dlperf.core.costs import Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.machine import EXACT, Bandwidth, Cpu, Kernel, Machine
from dlperf.core.readings import MOST_READINGS, first_referred, with_readings
from dlperf.core.state import Reading, State
from dlperf.core.trace import Op
from dlperf.microbench.worker import States
from dlperf.ops.reference_state import at_reference, together

KIB, MIB = 2**10, 2**20
CPU = Cpu("Made-up CPU", 2, (32 * KIB, MIB, 32 * MIB))
REFERENCE = Reading(2e-3, 1e-3, 3e-3, 4e-3, 5e-3, 6e-3)
DRAM_RELU = relu(16 * MIB)
"""An operand of 64 MiB: beyond the shared cache."""
L3_RELU = relu(2 * MIB)
PRODUCT = Op("aten.mm.default", (T(64, 64), T(64, 64)))
TINY = relu(64)
KERNELS = {PRODUCT: (1e-4, "compute"), DRAM_RELU: (5e-2, "DRAM"), L3_RELU: (1e-3, "L3")}
KERNELS |= {TINY: (2e-6, "overhead")}


def reading_at(state: State) -> Reading:
    return Reading(*(s * factor for s, factor in zip(REFERENCE.seconds, astuple(state))))


class Course:
    """A calibration of 600 s in a machine whose state is a function of time: passes over kernels,
    a sample each 0.5 s, between which groups of sweeps and costs are measured.
    """

    def __init__(self, state: Callable[[float], State], every_s: float = 1.5) -> None:
        self.time_s, self.state = 0.0, state
        self.states = States(self, lambda: self.time_s, 0, every_s)  # type: ignore[arg-type]
        taken: dict[Op, list[tuple[float, int]]] = {op: [] for op in KERNELS}
        bandwidths, costs = [], []
        while self.time_s < 600.0:
            for op, (seconds, bound) in KERNELS.items():
                index = self.states.current()
                taken[op].append((seconds * state(self.time_s).factor(bound), index))
                self.time_s += 0.5
        for number, size in enumerate((512 * KIB, 8 * MIB, 256 * MIB)):
            level = CPU_LEVELS[number]
            before = self.states.current()
            seconds = 1e-3 * state(self.time_s).factor(level)
            self.time_s += 0.5
            at = (before, self.states.current())
            bandwidths.append(Bandwidth("triad", 1, size, 3 * size, Samples((seconds,)), at))
        for kind, bound in COSTS.items():
            before = self.states.current()
            seconds = 1e-6 * state(self.time_s).factor(bound)
            self.time_s += 0.5
            at = (before, self.states.current())
            costs.append(Cost(CostKey(kind), 1, Samples((seconds,)), at))
        self.machine = Machine(
            CPU,
            tuple(
                Kernel(op, "x", 1, Samples(tuple(s for s, _ in row)), tuple(i for _, i in row))
                for op, row in taken.items()
            ),
            tuple(bandwidths),
            tuple(costs),
            readings=self.states.unsent(),
        )

    def rounds(self, count: int) -> list[Reading]:
        return [reading_at(self.state(self.time_s))] * count


CPU_LEVELS = ("L2", "L3", "DRAM")
COSTS = {"native_call": "overhead", "page_fault": "page-faults", "arithmetic": "compute"}


def values(machine: Machine) -> list[float]:
    """What a prediction uses of every entry."""
    return [
        *(kernel.seconds for kernel in machine.kernels),
        *(bandwidth.best_bytes_per_s for bandwidth in machine.bandwidths),
        *(bandwidth.median_bytes_per_s for bandwidth in machine.bandwidths),
        *(cost.value for cost in machine.costs),
    ]


def a_clock_that_steps(time_s: float) -> State:
    """13 % slower from the middle to the end: the core, its interpreter, its own caches."""
    return State(1.13, 1.13, 1.13) if time_s > 305 else State()


def a_clock_that_steps_up(time_s: float) -> State:
    return State() if time_s > 300 else State(1.13, 1.13, 1.13)


def busy_memory(time_s: float) -> State:
    """A co-tenant slows DRAM by 75 % and page faults by 30 % for a minute, and then again for the
    last one, with all sweeps and costs.
    """
    is_busy = 200 < time_s < 260 or time_s > 540
    return State(dram=1.75, page_fault=1.3) if is_busy else State()


@pytest.mark.parametrize("state", [a_clock_that_steps, a_clock_that_steps_up, busy_memory])
def test_values_are_those_of_the_reference_state(state: Callable[[float], State]) -> None:
    """The least of the readings is that of the machine as it was for half of the time."""
    quiet = at_reference(Course(lambda _: State()).machine)
    found = at_reference(Course(state).machine)
    assert found.reference is not None
    assert found.reference.seconds == pytest.approx(REFERENCE.seconds)
    assert values(found) == pytest.approx(values(quiet), rel=0.02)
    assert values(quiet) == pytest.approx(
        [
            *(seconds for seconds, _ in KERNELS.values()),
            *(3 * size / 1e-3 for size in (512 * KIB, 8 * MIB, 256 * MIB)),
            *(3 * size / 1e-3 for size in (512 * KIB, 8 * MIB, 256 * MIB)),
            *(1e-6 for _ in COSTS),
        ],
        rel=1e-3,
    )


def test_a_machine_that_was_fast_for_a_moment_has_a_slower_reference() -> None:
    """Samples of the first 15 s of 600 were faster: the file holds what it would, had the machine
    been slow throughout. From there a state leads back.
    """

    def slow(time_s: float) -> State:
        return State(1.13, 1.13, 1.13) if time_s > 15.0 else State()

    found = at_reference(Course(slow).machine)
    throughout = at_reference(Course(lambda _: State(1.13, 1.13, 1.13)).machine)
    assert found.reference is not None
    assert found.reference.core_s == pytest.approx(1.13 * REFERENCE.core_s, rel=1e-3)
    assert values(found) == pytest.approx(values(throughout), rel=0.02)
    product, quiet_s = found.kernels[0], KERNELS[PRODUCT][0]
    assert product.samples.minimum == pytest.approx(quiet_s)  # raw
    assert product.slowdown == pytest.approx(1 / 1.13, rel=1e-3)
    assert REFERENCE.over(found.reference).core * product.seconds == pytest.approx(
        quiet_s, rel=0.02
    )


@pytest.mark.parametrize("fast_s", [90.0, 240.0, 540.0])
def test_a_machine_that_was_fast_for_a_while_has_the_fast_state_as_its_reference(
    fast_s: float,
) -> None:
    def slow(time_s: float) -> State:
        return State(1.13, 1.13, 1.13) if time_s > fast_s else State()

    found = at_reference(Course(slow).machine)
    quiet = at_reference(Course(lambda _: State()).machine)
    assert found.reference == quiet.reference
    assert values(found) == pytest.approx(values(quiet), rel=0.02)


def test_values_of_a_machine_that_was_slow_throughout_differ_without_a_reference() -> None:
    """A file's reference is that of its first calibration: one that is extended in another state
    has the same values.
    """
    slow = Course(lambda _: State(core=1.5, dram=1.5)).machine
    assert at_reference(slow).kernels[0].seconds == pytest.approx(1.5e-4)
    known = at_reference(Machine(**{**vars(slow), "reference": REFERENCE}))
    assert known.kernels[0].seconds == pytest.approx(1e-4)
    assert known.kernels[1].seconds == pytest.approx(5e-2)
    assert known.reference == REFERENCE


def test_a_slowdown_that_ended_shortens_no_later_sample() -> None:
    """All samples of a kernel within 3 s after a reading at 1.5 were taken at full speed."""
    readings = (reading_at(State(core=1.5)),) * 10 + (reading_at(State()),) * 10
    kernel = Kernel(PRODUCT, "x", 1, Samples((1e-4, 1.5e-4)), (9, 3))
    machine = at_reference(Machine(CPU, (kernel,), readings=readings, reference=REFERENCE))
    assert machine.kernels[0].seconds == pytest.approx(1e-4)


def test_readings_that_scatter_say_nothing() -> None:
    """A co-tenant at the beginning: the clock has no such states."""
    factors = (1.68, 1.37, 1.49, 1.27, 1.65, 1.12, 1.13, 1.46) * 3 + (1.0,) * 60
    readings = tuple(reading_at(State(core=factor)) for factor in factors)
    kernel = Kernel(PRODUCT, "x", 1, Samples((1e-4, 1.1e-4)), (3, 10))
    machine = at_reference(Machine(CPU, (kernel,), readings=readings, reference=REFERENCE))
    assert machine.kernels[0].slowdown == 1.0


def test_one_reading_apart_says_nothing() -> None:
    """A single reading at 3 among others at 1 is an error of the probe, not a state."""
    readings = [reading_at(State())] * 20
    readings[10] = reading_at(State(core=3.0))
    kernel = Kernel(PRODUCT, "x", 1, Samples((1e-4, 1e-4)), (10, 10))
    machine = at_reference(Machine(CPU, (kernel,), readings=tuple(readings)))
    assert (machine.kernels[0].slowdown, machine.kernels[0].seconds) == (1.0, 1e-4)


def test_a_sample_among_slow_and_fast_ones_counts_normalised() -> None:
    """1.3e-4 s at 1.5 would be 8.7e-5 s at the reference, less than the 1e-4 s that were measured
    there. The slowdown is that of the least raw sample.
    """
    readings = (reading_at(State(core=1.5)),) * 30 + (reading_at(State()),) * 90
    kernel = Kernel(PRODUCT, "x", 1, Samples((1e-4, 1.3e-4)), (60, 9))
    machine = at_reference(Machine(CPU, (kernel,), readings=readings))
    assert machine.kernels[0].seconds == pytest.approx(1.3e-4 / 1.5, rel=1e-3)
    assert machine.kernels[0].slowdown == pytest.approx(1.5 / 1.3, rel=1e-3)


def test_noise_of_single_readings_changes_little() -> None:
    """Readings off by 3 % at random, one by one: values move by less than 3 % in nine cases of
    ten, and by 2 % on average.
    """
    draw = random.Random(1)
    readings = tuple(reading_at(State(core=draw.gauss(1.0, 0.03))) for _ in range(200))
    kernels = tuple(
        Kernel(
            Op("aten.mm.default", (T(8, size), T(size, 8))),
            "x",
            1,
            Samples((1e-4,)),
            (draw.randrange(200),),
        )
        for size in range(1, 200)
    )
    found = at_reference(Machine(CPU, kernels, readings=readings)).kernels
    errors = [abs(one.seconds / 1e-4 - 1) for one in found]
    assert quantile(errors, 0.9) < 0.03
    assert sum(errors) / len(errors) < 0.02


@pytest.mark.parametrize("busy_frac", [0.3, 0.5, 0.6])
def test_disturbances_of_milliseconds_slow_no_kernel_but_the_usual_state(busy_frac: float) -> None:
    """Readings of the core are at 1.0 or, at random, at 1.4, with an error of 1 %. The least
    of four samples of each kernel is at 1.0.
    """
    draw = random.Random(3)

    def busy() -> float:
        return draw.gauss(1.4 if draw.random() < busy_frac else 1.0, 0.01)

    readings = tuple(reading_at(State(core=busy())) for _ in range(200))
    kernels = []
    for size in range(1, 300):
        numbers = tuple(sorted(draw.sample(range(200), 4)))
        samples = Samples((1.4e-4, 1e-4, 1e-4, 1.4e-4))
        op = Op("aten.mm.default", (T(8, size), T(size, 8)))
        kernels.append(Kernel(op, "x", 1, samples, numbers))
    found = at_reference(Machine(CPU, tuple(kernels), readings=readings))
    assert [one.seconds for one in found.kernels] == pytest.approx([1e-4] * 299, rel=0.025)
    assert found.usual_state.core > (1.3 if busy_frac > 0.5 else 1.0)


# -- files -----------------------------------------------------------------------------------------


def test_raw_samples_and_their_slowdown_stay_in_the_file(tmp_path: Path) -> None:
    course = Course(busy_memory).machine
    found = at_reference(course)
    found.save(tmp_path / "m.json")
    again = Machine.load(tmp_path / "m.json")
    assert values(again) == pytest.approx(values(found), rel=1e-5)
    for one, raw in zip(again.kernels, course.kernels):
        assert one.samples.values == pytest.approx(raw.samples.values, rel=1e-5)
    assert first_referred(again) is None
    first = first_referred(course) or 0
    assert again.readings == (*course.readings[:first], *together(course.readings[first:]))
    data = json.loads((tmp_path / "m.json").read_text())
    assert {"readings", "slowdown"}.isdisjoint(
        data["kernels"][0]
    )  # a product, which was not slowed
    assert data["costs"][1]["slowdown"] == 1.3


def test_an_interrupted_calibration_goes_on_with_its_readings(tmp_path: Path) -> None:
    course = Course(a_clock_that_steps).machine
    course.save(tmp_path / "m.json")
    again = Machine.load(tmp_path / "m.json")
    assert values(at_reference(again)) == pytest.approx(values(at_reference(course)), rel=1e-5)
    more = with_readings(again, [REFERENCE] * MOST_READINGS)
    assert len(more.readings) == len(course.readings) + MOST_READINGS
    assert len(with_readings(at_reference(more), ()).readings) == MOST_READINGS


def test_a_file_that_is_extended_in_another_state_keeps_its_values() -> None:
    """A product is measured again, an operation is new. The later samples count with theirs."""
    first = at_reference(Course(lambda _: State()).machine)
    n = len(first.readings)
    slow = (reading_at(State(1.5, 1.5, dram=1.5)),) * 12
    old = first.kernels[0]
    joined = replace(old, samples=old.samples.joined(Samples((1.5e-4,))), readings=(n + 5,))
    new = Kernel(Op("aten.mm.default", (T(8, 8), T(8, 8))), EXACT, 1, Samples((3e-6,)), (n + 6,))
    extended = replace(
        first, kernels=(joined, *first.kernels[1:], new), readings=first.readings + slow
    )
    found = at_reference(extended)
    assert found.reference == first.reference
    assert values(found)[: len(KERNELS)] == pytest.approx(values(first)[: len(KERNELS)], rel=1e-3)
    assert found.kernels[-1].seconds == pytest.approx(2e-6, rel=1e-3)
    assert found.kernels[1:-1] == first.kernels[1:]
    assert at_reference(found) == found


def test_readings_that_are_not_there_count_as_the_reference() -> None:
    """Of a file from which somebody cut readings."""
    kernel = Kernel(PRODUCT, "x", 1, Samples((1e-4,)), (99,))
    cost = Cost(CostKey("native_call"), 1, Samples((1e-6,)), (99, 100))
    sweep = Bandwidth("triad", 1, MIB, MIB, Samples((1e-3,)), (99,))
    for readings in ((), (REFERENCE,), (REFERENCE,) * 99 + (reading_at(State(core=1.5)),)):
        machine = Machine(CPU, (kernel,), (sweep,), (cost,), readings=readings, reference=REFERENCE)
        assert at_reference(machine).kernels[0].seconds <= 1e-4
        assert at_reference(machine).costs[0].value == 1e-6


def test_a_prediction_from_a_file_without_states_is_what_it_was() -> None:
    """Files of older versions have neither a reference nor readings nor slowdowns."""
    machine = Course(lambda _: State()).machine
    data = at_reference(machine).to_json()
    assert not any("slowdown" in row for row in data["kernels"] + data["costs"])
    data |= {"reference": None, "readings": []}
    old = Machine.from_json(data)
    assert at_reference(old) is old
    assert values(old) == values(at_reference(machine))


@pytest.mark.parametrize("value", [0, -1.0, "fast", None])
def test_a_slowdown_that_no_machine_has_is_refused(value: object) -> None:
    data = at_reference(Course(busy_memory).machine).to_json()
    data["kernels"][1]["slowdown"] = value
    with pytest.raises(DlperfError, match=r"kernels\[1\].slowdown"):
        Machine.from_json(data)


def test_a_file_without_readings_stays_as_it_is() -> None:
    machine = Machine(CPU, (Kernel(PRODUCT, "x", 1, Samples((1e-4,))),))
    assert at_reference(machine) is machine
    old = Kernel(PRODUCT, "x", 1, Samples((1e-4,)))  # measured before there were readings
    found = at_reference(Machine(CPU, (old,), readings=(reading_at(State(core=1.3)),)))
    assert found.kernels == (old,)


def test_a_cost_is_slowed_down_by_its_statistic_of_the_readings() -> None:
    """Of five readings at 1.0 to 1.4: the least, the median, the lower quartile. A factor is
    relative already. Cold starts of all kinds are medians.
    """
    states = [State(interpreter=factor) for factor in (1.0, 1.1, 1.2, 1.3, 1.4)]
    readings = tuple(reading_at(state) for state in states for _ in range(9))
    at = tuple(range(4, 45, 9))  # in the middle of each
    keys = {
        CostKey("native_call"): 1.0,
        CostKey("ddp_call"): 1.2,
        CostKey("cold_start", "next", 2**20): 1.2,
        CostKey("page_allocation_eviction", "next", 2**20): 1.2,
        CostKey("instruction_cache_pressure", "next", 8): 1.2,
        CostKey("loader_resume"): 1.1,
        CostKey("cache_residency", at=100): 1.0,
    }
    costs = tuple(Cost(key, 1, Samples((1.0,)), at) for key in keys)
    found = at_reference(Machine(CPU, costs=costs, readings=readings, reference=REFERENCE))
    assert [cost.slowdown for cost in found.costs] == pytest.approx([*keys.values()])


# -- simulated calibrations ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet() -> Machine:
    """A simulated calibration at one state."""
    with pytest.MonkeyPatch.context() as patch:
        return at_reference(calibrate(Simulation(), patch).machine)


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.13), (1.13, 1.0)])
@pytest.mark.parametrize("when_s", [3.0, 5.0, 6.0, 8.0])
def test_a_simulated_calibration_does_not_depend_on_the_clock(
    monkeypatch: pytest.MonkeyPatch, quiet: Machine, when_s: float, before: float, after: float
) -> None:
    """At the same state all times are the same. (Not of a group all of whose samples come after
    the step and before the next reading, as one does from 8.6 to 9.1 s.)
    """
    simulation = Simulation(speed=lambda time_s: after if time_s > when_s else before)
    found = at_reference(calibrate(simulation, monkeypatch).machine)
    assert quiet.reference is not None
    assert found.reference is not None
    moved = found.reference.over(quiet.reference).core
    assert 1.0 <= moved <= 1.13
    known = {kernel.op.signature: kernel.seconds for kernel in quiet.kernels}
    shared = [kernel for kernel in found.kernels if kernel.op.signature in known]
    assert len(shared) > 100
    for kernel in shared:
        expected_s = moved * known[kernel.op.signature]
        assert kernel.seconds == pytest.approx(expected_s, rel=0.02), kernel.op


@pytest.mark.parametrize(
    ("factors", "slowdowns"),
    [
        # A sample after the last slow reading may have been taken at full speed.
        ([1.13] * 27 + [1.0] * 6, [1.13, 1.0, 1.0, 1.0]),
        ([1.0] * 6 + [1.13] * 27, [1.13] * 4),
        ([1.0] * 30 + [3.0] * 3, [1.0] * 4),
    ],
)
def test_an_edge_near_the_end_of_the_readings_stays_where_it_is(
    factors: list[float], slowdowns: list[float]
) -> None:
    """Six fast readings after many slow ones; some at the end that are off by themselves."""
    readings = tuple(reading_at(State(core=factor)) for factor in factors)
    kernels = tuple(
        Kernel(Op("aten.mm.default", (T(8, at), T(at, 8))), "x", 1, Samples((1e-3,)), (at,))
        for at in range(33)
    )
    found = at_reference(Machine(CPU, kernels, readings=readings, reference=REFERENCE))
    assert [one.slowdown for one in found.kernels[23::3]] == pytest.approx(slowdowns)

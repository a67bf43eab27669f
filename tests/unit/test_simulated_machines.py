"""A quick calibration of machines that exist only as a clock: what kernels, costs and operators
take is made up.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from dlperf.core import clock, host
from dlperf.core.clock import Clock, CoreSpeed, Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Bandwidth, Cpu, Machine
from dlperf.core.state import Reading
from dlperf.core.trace import Op
from dlperf.microbench import (
    ceilings,
    cold_start,
    ddp,
    framework,
    loader,
    loop,
    memory,
    operator_benchmark,
    stream,
    threads,
    worker,
)
from dlperf.microbench.results import merged
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.predictors.kernel_fits import fit_kernel_models

CPU = Cpu("Made-up CPU", 2, (2**15, 2**20, 2**25), 2**34)
LARGE = Cpu("Made-up CPU", 2, (2**15, 2**21, 480 * 2**20), 2**34)
BUDGET_S = worker.BUDGET_S["quick"]


@dataclass
class Simulation:
    """Time passes in kernels: `call_s` each and `byte_s` for each byte of their operands; `speed`
    says how many times as long at a moment.
    """

    call_s: float = 2e-6
    byte_s: float = 1e-10
    speed: Callable[[float], float] = lambda _: 1.0
    time_s: float = 0.0
    slept_s: float = 0.0

    def now(self) -> float:
        self.time_s += 1e-7  # a look at the clock
        return self.time_s + self.slept_s

    def spend(self, seconds: float) -> None:
        self.time_s += seconds * self.speed(self.time_s)

    def rounds(self, count: int) -> list[Reading]:
        """A probe of its state: everything is as slow as the core."""
        return [Reading(*(1e-3 * self.speed(self.time_s),) * 6)] * count

    def shared_core(self) -> dict[str, float]:
        """Nothing of its probes."""
        return {}

    def build(self, op: Op, grad: bool = False) -> Callable[[], object]:
        n_bytes = sum(spec.numel * spec.item_bytes for spec in op.inputs)
        return lambda: self.spend(self.call_s + n_bytes * self.byte_s)


@dataclass
class Told:
    """What the measuring process told: the machine that its groups make, the points that each left
    out, and the groups of costs.
    """

    machine: Machine = field(default_factory=lambda: Machine(CPU))
    left_out: dict[str, int] = field(default_factory=dict)
    costs: list[str] = field(default_factory=list)

    def say(self, message: dict[str, Any]) -> None:
        if "group" in message:
            self.machine = merged(self.machine, message, 1)
            if message["part"]["kernels"]:
                self.left_out[message["group"]] = message["left_out"]
            else:
                self.costs.append(message["group"])


def calibrate(
    simulation: Simulation,
    monkeypatch: pytest.MonkeyPatch,
    best_s: float = 1e-6,
    spin_s: float = 0.0,
) -> Told:
    """The plan on simulated kernels, on a core that is known to do its work in `best_s`, and does
    it in `spin_s`. Every group of costs takes as long as it may, and a hundred calls of the
    framework first.
    """

    def greedy(own: Clock) -> list[Cost]:
        for _ in range(100):
            simulation.spend(simulation.call_s)
        while not own.is_late:
            simulation.spend(1e-3)
        return [Cost(CostKey("fork_join"), 1, Samples((1.0,)))]

    def sweeps(*arguments: Any) -> list[Bandwidth]:
        greedy(arguments[-1])
        return []

    monkeypatch.setattr(clock, "_spin", lambda: simulation.spend(spin_s))
    monkeypatch.setattr(host, "this_cpu", lambda: CPU)
    monkeypatch.setattr(worker, "StateProbe", lambda cpu, is_slow: simulation)
    for module in (framework, memory, threads, loop, ddp):
        monkeypatch.setattr(module, "measure", lambda *arguments: greedy(arguments[-1]))
    monkeypatch.setattr(stream, "measure_residency", lambda *arguments: [])
    monkeypatch.setattr(stream, "measure", sweeps)
    monkeypatch.setattr(ceilings, "measure", lambda *arguments: ([], greedy(arguments[-1])))
    monkeypatch.setattr(loader, "measure", lambda *arguments: (greedy(arguments[-1]), []))
    monkeypatch.setattr(cold_start, "measure", lambda *arguments: {})
    monkeypatch.setattr(operator_benchmark, "build", simulation.build)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    groups = [group.name for group in worker.planned_groups("quick", CPU.flags)]
    job = {
        "threads": 1,
        "mode": "quick",
        "groups": [*worker.SYSTEM_GROUPS, *groups],
        "traces": [],
        "core_speed_s": math.inf,
        "asks": False,
        "measured": {},
        "n_readings": 0,
    }
    told = Told()
    worker.run(
        job, told.say, CoreSpeed(simulation.now, lambda: 0, lambda seconds: None, best_s=best_s)
    )
    return told


def assert_balanced(told: Told, simulation: Simulation) -> None:
    """Every group of costs is there, and every family has a curve over its whole range."""
    assert set(worker.SYSTEM_GROUPS) <= set(told.costs)
    planned = {group.name: group for group in worker.planned_groups("quick", CPU.flags)}
    assert set(told.left_out) == set(planned)
    for name, group in planned.items():
        least = [point for point in group.points if point.rank == 0]
        measured = [point for point in least if told.machine.exact(point.op, 1)]
        assert len(measured) >= min(len(least), max(12, 0.9 * len(least))), name
    names = ("aten.relu.default", "aten.threshold_backward.default")
    kernels = tuple(kernel for kernel in told.machine.kernels if kernel.op.name in names)
    cost_model = KernelCostModel(fit_kernel_models(replace(told.machine, kernels=kernels)), 1)
    for key in (("relu", "1", "float32", "flat"), ("threshold_backward", "2", "float32", "flat")):
        assert {64, 2**20} <= {kernel.op.inputs[0].numel for _, kernel in cost_model.kernels[key]}
    small = Op(
        "aten.threshold_backward.default",
        (
            relu := cost_model.kernels["threshold_backward", "2", "float32", "flat"][0][
                1
            ].op.inputs[0],
        )
        * 2
        + (0,),
    )
    assert relu.numel <= 2**20
    seconds, _ = cost_model.kernel_s(small) or (math.inf, "")
    assert seconds < 2 * (simulation.call_s + 2 * small.inputs[0].nbytes * simulation.byte_s) * 1.3


def test_a_usual_machine_has_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation()
    told = calibrate(simulation, monkeypatch)
    assert_balanced(told, simulation)
    assert not any(told.left_out.values())
    assert fit_kernel_models(told.machine).kernel_models  # of every family
    assert simulation.now() < 1.2 * BUDGET_S


def test_calls_that_take_ten_times_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(call_s=2e-5)
    told = calibrate(simulation, monkeypatch)
    assert_balanced(told, simulation)
    assert simulation.now() < 1.2 * BUDGET_S


def test_a_machine_that_takes_ten_times_as_long_for_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(call_s=2e-5, byte_s=1e-9)
    told = calibrate(simulation, monkeypatch)
    assert set(worker.SYSTEM_GROUPS) <= set(told.costs)
    for group in worker.planned_groups(
        "quick", CPU.flags
    ):  # some points are left out, of no family all but a few
        assert len(group.points) - told.left_out[group.name] >= min(12, len(group.points)), (
            group.name
        )
    assert simulation.now() < 2 * BUDGET_S


@pytest.mark.parametrize("when_s", [1.0, 3.0, 5.0])
def test_a_core_that_slows_down(monkeypatch: pytest.MonkeyPatch, when_s: float) -> None:
    simulation = Simulation(speed=lambda time_s: 1.13 if time_s > when_s else 1.0)
    told = calibrate(simulation, monkeypatch)
    assert_balanced(told, simulation)
    assert simulation.now() < 1.2 * BUDGET_S


@pytest.mark.parametrize("when_s", [1.0, 3.0, 5.0])
def test_a_clock_that_jumps(monkeypatch: pytest.MonkeyPatch, when_s: float) -> None:
    simulation = Simulation()

    def speed(time_s: float) -> float:
        if time_s > when_s:
            simulation.slept_s = 2.0  # the machine stood still
        return 1.0

    simulation.speed = speed
    told = calibrate(simulation, monkeypatch)
    assert simulation.slept_s
    assert_balanced(told, simulation)
    assert simulation.now() < 1.2 * BUDGET_S + 2.0


@pytest.mark.parametrize("busy_frac", [0.0, 0.5, 0.8, 0.95])
def test_a_co_tenant_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch, busy_frac: float) -> None:
    """It slows everything by a half, for 10 ms at a time, and all the time at first."""
    dice = random.Random(3)
    busy = [dice.random() < busy_frac for _ in range(3000)]

    def speed(time_s: float) -> float:
        return 1.5 if (time_s < busy_frac or busy[int(100 * time_s) % len(busy)]) else 1.0

    simulation = Simulation(speed=speed)
    told = calibrate(simulation, monkeypatch, math.inf, spin_s=8e-6)
    ratios = [
        kernel.seconds / (simulation.call_s + kernel.op.inputs[0].nbytes * simulation.byte_s)
        for kernel in told.machine.kernels
        if len(kernel.op.inputs) == 1
    ]
    median, high = (clock.quantile(ratios, part) for part in (0.5, 0.9))
    assert len(ratios) > 100
    assert median == pytest.approx(1.0, abs=0.05)
    assert high < 1.15


def test_a_last_cache_of_480_mib_asks_for_no_larger_sets() -> None:
    for module in (stream, ceilings):
        sets = module.working_sets(
            "quick", LARGE.caches_bytes[2] if module is stream else LARGE.caches_bytes
        )
        assert max(sets) == 2**27
        assert len(sets) <= 16
    assert max(stream.working_sets("full", LARGE.caches_bytes[2])) == 4 * LARGE.caches_bytes[2]


def test_the_kernels_keep_a_part_of_the_time_that_nothing_else_can_take() -> None:
    assert sum(worker.SHARES.values()) + max(worker.LEAST_FRAC.values()) <= 0.8

"""What a measuring process found in one group, and the machine that it is merged into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from dlperf.core.costs import Cost
from dlperf.core.machine import EXACT, Bandwidth, Kernel, KernelModelFit, Machine, PageTest
from dlperf.core.text import counted
from dlperf.core.verification import Coverage, Disturbance, SelfTest

BUSY_SWITCHES_PER_S = 40.0
"""Involuntary context switches per second above which a group counts as disturbed: a co-tenant
takes the core every scheduler quantum (some 4 ms), an idle system a few times a second.
"""
BUSY_SWITCHES = 25
"""Fewer in a group are no evidence: a group may last a few milliseconds."""
_UNSTEADY_FRAC = 0.2
"""Share of a group's kernels that may be measured on a slow core alone; above it the group is
reported as disturbed.
"""
_OF_PROCESSES = ("ddp", "loader")
"""Groups that time processes of their own, which take cores from each other by nature."""
Entry = TypeVar("Entry")
Measured = TypeVar(
    "Measured", Kernel, Bandwidth, Cost, KernelModelFit, Coverage, Disturbance, SelfTest, PageTest
)


def merged(
    machine: Machine,
    message: dict[str, Any],
    threads: int,
    before: Machine | None = None,
    n_before: int = 0,
) -> Machine:
    """The machine with the result of a group in a measuring process's `message`; `n_before` of its
    points were measured earlier. Kernels keep the samples that they have in `before`, too.

    The message holds the group's name, the ``part`` of a machine that was measured, involuntary
    switches and seconds meanwhile; for kernels also what could not be called, the numbers of those
    without an undisturbed sample and of points left out, and whether further samples follow.
    """
    group, part = message["group"], Machine.from_json(message["part"])
    kernels = part.kernels
    if before is not None:
        kernels = tuple(
            _with_earlier(kernel, before.exact(kernel.op, threads)) for kernel in kernels
        )
    notes, coverage = list(machine.notes), list(machine.coverage)
    if message["refused"]:
        notes.append(f"{group}: not measured: {'; '.join(sorted(set(message['refused'])))}")
    if n_measured := len(kernels) + n_before:
        n_planned = n_measured + message["left_out"]
        coverage.append(Coverage(group, threads, n_measured, n_planned, message["sampled_once"]))
    # A group whose last points others had took no time.
    switches_per_s = message["switches"] / message["seconds"] if message["seconds"] else 0.0
    # A team's threads take cores from each other: 55 to 250 times a second (AMD EPYC, Zen 5, two on
    # two quiet cores), as often as another program would.
    was_taken = (
        threads == 1
        and group not in _OF_PROCESSES
        and message["switches"] >= BUSY_SWITCHES
        and switches_per_s > BUSY_SWITCHES_PER_S
    )
    is_unsteady = message["unsteady"] > _UNSTEADY_FRAC * len(kernels)
    disturbances = [
        one for one in machine.disturbances if (one.group, one.threads) != (group, threads)
    ]
    if was_taken or is_unsteady:
        disturbances.append(
            Disturbance(
                group,
                threads,
                switches_per_s if was_taken else 0.0,
                message["unsteady"] if is_unsteady else 0,
                len(kernels),
            )
        )
    readings = (*machine.readings, *part.readings)
    is_of_a_target = bool(kernels) and all(kernel.family == EXACT for kernel in kernels)
    return replace(
        machine.with_kernels(kernels),
        readings=readings,
        bandwidths=_latest(
            (*machine.bandwidths, *part.bandwidths),
            lambda one: (one.kernel, one.threads, one.working_set_bytes),
        ),
        costs=_latest((*machine.costs, *part.costs), lambda one: (one.key, one.threads)),
        footprints=_latest((*machine.footprints, *part.footprints), lambda one: one.name),
        co_runs=_latest((*machine.co_runs, *part.co_runs), lambda one: (one.work, one.workers)),
        coverage=_latest(coverage, lambda one: (one.group, one.threads)),
        notes=tuple(dict.fromkeys(notes)),
        disturbances=tuple(disturbances),
        self_tests=tuple(  # of another file than this one
            test for test in machine.self_tests if test.threads != threads or is_of_a_target
        ),
    )


def without(machine: Machine, threads: Collection[int]) -> Machine:
    """The machine without what was measured with these thread counts. Co-runs stay: they are ratios
    of times that were measured in turns.
    """
    co_runs = {co_run_group(one.work, one.workers) for one in machine.co_runs}
    counts = {str(count) for count in threads}

    def is_kept(name: str) -> bool:
        count, _, group = name.partition("/")[2].partition("/")
        return count not in counts or group in co_runs

    return replace(
        machine,
        kernels=_of_others(machine.kernels, threads),
        bandwidths=_of_others(machine.bandwidths, threads),
        costs=_of_others(machine.costs, threads),
        kernel_models=_of_others(machine.kernel_models, threads),
        coverage=_of_others(machine.coverage, threads),
        disturbances=_of_others(machine.disturbances, threads),
        self_tests=_of_others(machine.self_tests, threads),
        page_tests=_of_others(machine.page_tests, threads),
        groups=tuple(filter(is_kept, machine.groups)),
    )


def co_run_group(work: str, n_workers: int) -> str:
    """The name of a group of co-runs."""
    return f"{work} of {counted(n_workers, 'worker')}"


def _of_others(entries: Iterable[Measured], threads: Collection[int]) -> tuple[Measured, ...]:
    return tuple(one for one in entries if one.threads not in threads)


def _latest(entries: Iterable[Entry], key: Callable[[Entry], Hashable]) -> tuple[Entry, ...]:
    """The last entry of each key, in the order of the first ones."""
    return tuple({key(entry): entry for entry in entries}.values())


def _with_earlier(kernel: Kernel, earlier: Kernel | None) -> Kernel:
    if earlier is None:
        return kernel
    samples, readings = earlier.samples.joined(kernel.samples), earlier.readings + kernel.readings
    return replace(
        kernel,
        samples=samples,
        readings=readings,
        slowdown=earlier.slowdown,
        shared_core=kernel.shared_core or earlier.shared_core,
        core_to_core=earlier.core_to_core if kernel.core_to_core is None else kernel.core_to_core,
    )

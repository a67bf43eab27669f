"""What a measuring process found in one group, and the machine that it is merged into."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dlperf.core.clock import Samples, usual_factor
from dlperf.core.costs import CONTENTION, CONTENTION_LONG, CONTENTION_MEAN, Cost, CostKey
from dlperf.core.machine import Kernel, Machine
from dlperf.core.verification import Coverage, Disturbance
from dlperf.ops.reference_state import StateCourse, bound_of, normalised

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
Entry = TypeVar("Entry")


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
    without an undisturbed sample and of points left out, all raw samples of each in seconds, and
    the numbers of the readings before them.
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
    if n_measured := len(kernels):
        n_measured += n_before
        coverage.append(Coverage(group, threads, n_measured, n_measured + message["left_out"]))
    switches_per_s = message["switches"] / message["seconds"]
    was_taken = message["switches"] >= BUSY_SWITCHES and switches_per_s > BUSY_SWITCHES_PER_S
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
    machine = replace(machine.with_kernels(kernels), readings=readings)
    raw = list(zip(message["wholes_s"], message["readings"]))
    factors = _factors(group, kernels, raw, machine, threads)
    return replace(
        machine,
        bandwidths=_latest(
            (*machine.bandwidths, *part.bandwidths),
            lambda one: (one.kernel, one.threads, one.working_set_bytes),
        ),
        costs=_latest((*machine.costs, *part.costs, *factors), lambda one: (one.key, one.threads)),
        footprints=_latest((*machine.footprints, *part.footprints), lambda one: one.name),
        co_runs=_latest((*machine.co_runs, *part.co_runs), lambda one: (one.work, one.workers)),
        coverage=_latest(coverage, lambda one: (one.group, one.threads)),
        notes=tuple(dict.fromkeys(notes)),
        disturbances=tuple(disturbances),
        self_tests=tuple(  # of another file than this one
            test for test in machine.self_tests if test.threads != threads
        ),
    )


def _factors(
    group: str,
    kernels: Sequence[Kernel],
    raw: Sequence[tuple[Sequence[float], Sequence[int]]],
    machine: Machine,
    threads: int,
) -> list[Cost]:
    """The usual slowdown of this group's kernels over their best, and the mean over the usual, in
    one state of the machine: from all raw samples of each in seconds and the readings before them.

    A step outlasts interference, so it takes what its kernels take on average; what its median
    does not see are the moments in which the core was taken away. All samples count alike: those of
    a kernel that was sampled until it was undisturbed are no average by themselves. Every group
    keeps its own: one that is measured later, at another moment, is no evidence for the others.
    """
    above: dict[str, list[float]] = {"all": [], CONTENTION: [], CONTENTION_LONG: []}
    course = StateCourse.of(machine)
    for (wholes_s, numbers), kernel in zip(raw, kernels):
        if len(wholes_s) == len(kernel.samples.values) == 1:
            continue  # its ratio to itself is no slowdown
        if least_s := normalised(kernel, course, machine).seconds:
            factors = [whole_s / least_s for whole_s in wholes_s]
            if course is not None and len(numbers) == len(factors):
                bound = bound_of(kernel, machine)
                slowdowns = (course.after(number, bound) for number in numbers)
                factors = [factor / slowdown for factor, slowdown in zip(factors, slowdowns)]
            above["all"] += factors
    if not above["all"]:
        return []
    usual = {name: usual_factor(factors) for name, factors in above.items() if factors}
    usual[CONTENTION_MEAN] = statistics.fmean(above["all"]) / usual.pop("all")
    return [Cost(CostKey(name, group), threads, Samples((value,))) for name, value in usual.items()]


def _latest(entries: Iterable[Entry], key: Callable[[Entry], Hashable]) -> tuple[Entry, ...]:
    """The last entry of each key, in the order of the first ones."""
    return tuple({key(entry): entry for entry in entries}.values())


def _with_earlier(kernel: Kernel, earlier: Kernel | None) -> Kernel:
    if earlier is None:
        return kernel
    samples, readings = earlier.samples.joined(kernel.samples), earlier.readings + kernel.readings
    return replace(kernel, samples=samples, readings=readings, slowdown=earlier.slowdown)

"""What a calibration has still to measure, given what its file holds."""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.core.co_run import PREPARATION, operations_of
from dlperf.core.machine import Machine
from dlperf.core.trace import Trace
from dlperf.microbench.co_run import resources
from dlperf.microbench.plan import MODES
from dlperf.microbench.results import co_run_group
from dlperf.microbench.worker import SYSTEM_GROUPS, planned_groups, trace_group


def done_name(mode: str, threads: int, group: str) -> str:
    """What a machine file calls a group that was measured."""
    return f"{mode}/{threads}/{group}"


def _is_done(machine: Machine, mode: str, threads: int, group: str) -> bool:
    """Whether a group was measured at this depth or deeper."""
    deep_enough = MODES[MODES.index(mode) :]
    return any(done_name(deep, threads, group) in machine.groups for deep in deep_enough)


def _cut_short(machine: Machine, threads: int) -> set[str]:
    """The groups with points that there was no time for."""
    return {
        one.group
        for one in machine.coverage
        if one.threads == threads and one.n_measured < one.n_planned
    }


def _sampled_once(machine: Machine, threads: int) -> set[str]:
    """The groups whose measurement ended after its first samples."""
    return {one.group for one in machine.coverage if one.threads == threads and one.sampled_once}


def to_join(machine: Machine, threads: int) -> set[str]:
    """The groups whose kernels keep their samples beside those of another measurement: disturbed
    ones, since the least of both is nearer to an undisturbed machine than either, and those that
    were sampled once.
    """
    return _sampled_once(machine, threads) | set(machine.busy_groups(threads))


def missing_groups(
    machine: Machine, threads: int, mode: str, traces: Sequence[Trace], goes_on: bool, mends: bool
) -> list[tuple[str, int]]:
    """The groups still to measure, each with its weight in the progress bar; where it `goes_on`,
    also those that were cut short or sampled once, where it `mends`, those that were measured on a
    busy machine.
    """
    kernels = [*planned_groups(mode, machine.cpu.flags)]
    kernels += [trace_group(trace, mode) for trace in traces]
    weights = dict.fromkeys(SYSTEM_GROUPS, 0) | {one.name: len(one.points) for one in kernels}
    # A file whose costs were cut out, or that an older version made, lacks what its groups should
    # have left.
    again = {group.split()[0] for group in machine.missing_costs(threads=threads)}
    again &= set(SYSTEM_GROUPS)
    if goes_on:
        again |= _cut_short(machine, threads) | _sampled_once(machine, threads)
    if mends:
        again |= set(machine.busy_groups(threads))
    measured = measured_points(machine, threads, mode, set(weights))
    rest = [
        (name, weight - len(measured.get(name, ())))
        for name, weight in weights.items()
        if name in again or not _is_done(machine, mode, threads, name)
    ]
    # What was never measured comes first, what is to be mended after it.
    return sorted(rest, key=lambda row: _is_done(machine, mode, threads, row[0]))


def measured_points(
    machine: Machine, threads: int, mode: str, names: set[str]
) -> dict[str, list[int]]:
    """The indices, by group, of the points that a group of these names has already, where it was
    cut short for want of time; others are measured anew.
    """
    kept = names & _cut_short(machine, threads) - to_join(machine, threads)
    return {
        group.name: [
            index for index, point in enumerate(group.points) if machine.exact(point.op, threads)
        ]
        for group in planned_groups(mode, machine.cpu.flags)
        if group.name in kept and done_name(mode, threads, group.name) in machine.groups
    }


def recorded_operations(trace: Trace) -> str:
    """The kind of work of a trace's operations."""
    return operations_of(trace.target, trace.batch_size, trace.inference)


def missing_co_runs(
    machine: Machine, mode: str, traces: Sequence[Trace], workers: Sequence[int]
) -> list[tuple[str, str, int]]:
    """What is still to measure of several workers at once: (group, kind of work, number of workers)
    each.
    """
    numbers = sorted(set(workers))
    kinds = (*resources(machine.cpu), *map(recorded_operations, traces))
    planned = [(PREPARATION, n) for n in numbers]
    planned += [(kind, n) for kind in kinds for n in numbers if n > 1]
    named = [(co_run_group(kind, n), kind, n) for kind, n in planned]
    busy = () if traces else machine.busy_groups(1)
    return [row for row in named if row[0] in busy or not _is_done(machine, mode, 1, row[0])]

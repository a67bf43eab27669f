"""Doubts about a machine file, one line each: of another machine or torch than this, unfinished,
measured on a busy machine, with a self-test that failed, or without states that can be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dlperf.core import host
from dlperf.core.machine import Cpu, Machine
from dlperf.core.readings import first_referred
from dlperf.core.state import Reading
from dlperf.core.text import counted
from dlperf.core.trace import Trace
from dlperf.core.units import format_percent, format_seconds
from dlperf.core.variation import HOUR_SPREAD
from dlperf.core.verification import has_failed, why_failed

BUSY_SHARE = 0.5
"""Share of the groups of a thread count that were measured on a busy machine, above which all its
times are too long. Leave-one-out errors do not show it.
"""
LEAST_USUAL, MOST_USUAL = 0.7, 5.0
"""Factors of a usual state (:attr:`dlperf.core.machine.Machine.usual_state`) that a machine can
have. The reference is the least of a calibration's readings. Medians of a calibration on a shared
Intel Xeon were up to 1.15; between two of its hours the core's clock stepped to 0.83.
"""

LEAST_FACTOR, MOST_FACTOR = 0.3, 50.0
"""Factors of a single reading that a machine can have."""


def has_fitting_reference(machine: Machine) -> bool:
    """Whether there is a reference state, and the median of the readings is one that a machine with
    this reference can have.
    """
    usual = vars(replace(machine.usual_state, core_to_core=1.0)).values()
    return machine.reference is not None and all(
        LEAST_USUAL <= factor <= MOST_USUAL for factor in usual
    )


def has_unfit_reference(machine: Machine) -> bool:
    """Whether a finished calibration has no reference state that fits its readings: none of its
    times can be kept. A calibration that goes on has its reference at the end.
    """
    is_finished = bool(machine.kernels) and first_referred(machine) is None
    return is_finished and not has_fitting_reference(machine)


def has_failed_with(machine: Machine, threads: int) -> bool:
    """Whether the file failed its self-test with exactly `threads` threads."""
    return has_failed([test for test in machine.self_tests if test.threads == threads])


def remedy(machine: Machine, *threads: int) -> str:
    """The calibration that mends a file for these thread counts, and what it does.

    >>> remedy(Machine(Cpu("", 1), mode="quick"), 1)
    'dlperf calibrate --quick --threads 1 measures what is missing or was disturbed'
    """
    is_unfit = has_unfit_reference(machine)
    counts = machine.threads if is_unfit else threads
    failed = [count for count in counts if has_failed_with(machine, count)]
    options = [] if machine.mode == "full" else [f"--{machine.mode}"]
    if counts:
        options.append(f"--threads {','.join(map(str, counts))}")
    command = machine.calibration(*options)
    if is_unfit:
        return f"{command} measures the whole file anew"
    if failed:
        return f"{command} measures everything with {join_threads(failed)} anew"
    return f"{command} measures what is missing or was disturbed"


def join_threads(threads: Sequence[int]) -> str:
    """Thread counts in words.

    >>> join_threads([1]), join_threads([1, 2])
    ('1 thread', '1 and 2 threads')
    """
    return f"{' and '.join(map(str, threads))} thread{'s' * (tuple(threads) != (1,))}"


def find_impossible_factor(reading: Reading, reference: Reading) -> str:
    """The first probe whose factor over the reference no machine can have, in words; else empty.

    >>> usual = Reading(2e-3, 1e-4, 1e-4, 1e-4, 1e-2, 1e-4)
    >>> find_impossible_factor(Reading(1e-9, *usual.seconds[1:]), usual)
    'core_s of 1.00 ns is 5e-07 of the reference, which no machine can have (0.3 to 50)'
    >>> find_impossible_factor(usual, usual)
    ''
    """
    for name, factor in vars(reading.over(reference)).items():
        if not LEAST_FACTOR <= factor <= MOST_FACTOR:
            probes = {**vars(reading), "core_to_core_s": sum(reading.parallel_region_s.values())}
            seconds = format_seconds(probes[f"{name}_s"])
            return (
                f"{name}_s of {seconds} is {factor:.2g} of the reference, which no machine can have"
                f" ({LEAST_FACTOR:g} to {MOST_FACTOR:g})"
            )
    return ""


def find_unmeasured_threads(machine: Machine, threads: int) -> str:
    """That a measured file has no times of a number of threads, with the remedy; else empty."""
    if not machine.threads or threads in machine.threads or machine.data_sheet is not None:
        return ""
    return (
        f"the machine file was measured with {join_threads(machine.threads)}, not with {threads}:"
        f" extrapolated; {machine.calibration(f'--threads {threads}')} measures it"
    )


def find_state_problem(machine: Machine) -> str:
    """What a machine file lacks for states of the machine, with the remedy, as words after its
    name; empty for a device of a data sheet, which has no states.
    """
    if machine.data_sheet is not None or not machine.kernels:
        return ""
    if machine.reference is None:
        goes_on = first_referred(machine) is not None
        way_out = "makes it at its end" if goes_on else "measures anew"
        return (
            "contains no reference state, so states have no effect, and hours differ from a"
            f" prediction by {format_percent(HOUR_SPREAD)} more (standard deviation);"
            f" {machine.calibration()} {way_out}"
        )
    if not machine.readings:
        return (
            "contains no readings of its state, so the reference counts as its usual one, and"
            " predictions are too short by what the machine is slower than at its best;"
            f" {machine.calibration('--refresh')} adds some"
        )
    if has_fitting_reference(machine):
        return ""
    return (
        "contains readings that contradict its reference state (median:"
        f" {machine.usual_state.describe()}); {machine.calibration()} measures anew"
    )


def find_self_test_problem(machine: Machine, threads: int) -> str:
    """Why the file's self-test advises against it with a number of threads, with the remedy; empty
    where it passed.
    """
    tests = machine.self_tests_of(threads)
    name = machine.path or "the machine file"
    if not tests:
        return f"{name} contains no self-test; dlperf machine check runs it"
    why, tested = why_failed(tests), tests[0].threads
    return (
        f"{name} failed its self-test ({why}); predictions may be as far off."
        f" {remedy(machine, tested)}"
        if why
        else ""
    )


def find_mismatches(machine: Machine, cpu: Cpu, versions: dict[str, str]) -> list[str]:
    """Differences of the measured machine from this one: processor, cores, torch. One line each."""
    found = []
    name = machine.path or "machine file"
    if (machine.cpu.model, machine.cpu.family) != (cpu.model, cpu.family):
        known, this = (
            f"{one.model}, family {one.family}" if machine.cpu.model == cpu.model else one.model
            for one in (machine.cpu, cpu)
        )
        found.append(f"{name} was measured on another CPU ({known}; this is {this}): extrapolated")
    elif machine.cpu.n_cores != cpu.n_cores:
        found.append(
            f"{name} was measured with {machine.cpu.n_cores} cores, this process may use"
            f" {cpu.n_cores}: extrapolated"
        )
    theirs, ours = machine.versions.get("torch"), versions.get("torch")
    if theirs and ours and theirs.partition("+")[0] != ours.partition("+")[0]:
        found.append(
            f"{name} was measured with torch {theirs}, this is torch {ours}: extrapolated;"
            f" {machine.calibration('--force')} measures anew"
        )
    return found


def find_missing_dtypes(machine: Machine, trace: Trace) -> list[str]:
    """Floating-point types of the trace without a kernel in the machine file, one line each."""
    asked = dict.fromkeys(
        spec.dtype
        for op in trace.ops
        for spec in op.inputs
        if spec.dtype.startswith(("float", "bfloat", "complex"))
    )
    return [
        f"{machine.path or 'machine file'} contains no kernels in {dtype}: extrapolated"
        for dtype in asked
        if not any(spec.dtype == dtype for kernel in machine.kernels for spec in kernel.op.inputs)
    ]


def _n_busy_and_all(machine: Machine, threads: int) -> tuple[int, int]:
    """How many groups of kernels were measured on a busy machine, and how many in all."""
    n_busy = len(machine.busy_groups(threads))
    parts = [name.split("/", 2) for name in machine.groups]
    return n_busy, max(n_busy, len({p[2] for p in parts if p[1:2] == [str(threads)]}))


def busy_line(machine: Machine, threads: int) -> str:
    """How many groups were measured on a busy machine, and the remedy; empty where none was."""
    n_busy, n_groups = _n_busy_and_all(machine, threads)
    return (
        f"the machine was busy while {n_busy} of {counted(n_groups, 'group')}"
        f" {'was' if n_groups == 1 else 'were'} measured with {counted(threads, 'thread')}; when it"
        f" is quiet, {remedy(machine, threads)}"
        if n_busy
        else ""
    )


def was_busy(machine: Machine, threads: int) -> bool:
    """Whether more than BUSY_SHARE of the groups were measured on a busy machine, so that all times
    with `threads` are too long.
    """
    n_busy, n_groups = _n_busy_and_all(machine, threads)
    return n_busy > BUSY_SHARE * n_groups


def is_unfinished(machine: Machine) -> bool:
    """Whether a calibration was interrupted, or lacks more than half of its points. A few missing
    points cost little exactness.
    """
    n_planned = sum(one.n_planned for one in machine.coverage)
    n_left_out = n_planned - sum(one.n_measured for one in machine.coverage)
    return not machine.complete and not 0 < n_left_out <= 0.5 * n_planned


def is_cross_machine(machine: Machine) -> bool:
    """Whether the machine file describes another machine or torch than this. A machine without a
    file is one that somebody made up, and is taken as it is.
    """
    if machine.data_sheet is not None:
        return False
    return bool(machine.path and find_mismatches(machine, host.this_cpu(), host.versions()))


def doubts_of(machine: Machine, trace: Trace, threads: int) -> list[str]:
    """Doubts about a prediction by a machine file: mismatches with this machine or this trace, an
    unfinished or a busy calibration, a failed self-test, what it lacks for states. None about a
    machine without a file.
    """
    if not machine.path or machine.data_sheet is not None:
        return []
    nearest = machine.nearest_threads(threads)
    doubts = [
        *find_mismatches(machine, host.this_cpu(), host.versions()),
        *find_missing_dtypes(machine, trace),
        f"{machine.path}: the calibration did not finish; {remedy(machine, nearest)}"
        if is_unfinished(machine)
        else "",
        find_self_test_problem(machine, threads),
        f"{machine.path}: {busy_line(machine, nearest)}" if was_busy(machine, nearest) else "",
        f"{machine.path}: {problem}" if (problem := find_state_problem(machine)) else "",
    ]
    return [doubt for doubt in doubts if doubt]

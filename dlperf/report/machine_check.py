"""Machine files judged: whether one can be trusted on this machine, for a trace, with a number of
threads; and the ratios of the times that two of them contain.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from dlperf.core.machine import STREAM_BYTES_PER_ELEMENT, Cpu, Machine
from dlperf.core.machine_doubts import (
    busy_line,
    find_mismatches,
    find_self_test_problem,
    is_unfinished,
    remedy,
)
from dlperf.core.text import counted
from dlperf.core.units import format_percent
from dlperf.core.verification import SelfTest
from dlperf.ops.roofs import LEVELS, roofs_of
from dlperf.report.document import Column, format_table

WORST_LEAVE_ONE_OUT_FRAC = 0.3
"""Mean leave-one-out error of a family's kernels above which its models are remarked on: other ops
are as far off.
"""
_MOST_LINES = 3
"""Steps of a self-test that have a line each."""
_COST, _ALIKE_FRAC = "cost ", 0.05
"""What costs of two machine files begin with, and how far those that are alike differ."""
_LEAST_CHANGE_FRAC = 1e-3
"""Change of predicted steps that is told."""


def coverage_line(machine: Machine, threads: int) -> str:
    """The number of planned points that were measured, and the groups that lack some.

    >>> from dlperf.core.verification import Coverage
    >>> rows = Coverage("gemm", 1, 4, 6), Coverage("rows", 1, 9, 9)
    >>> coverage_line(Machine(Cpu("", 1), coverage=rows), 1)
    '13 of 15 planned points with 1 thread; there was no time for 2 of gemm'
    """
    rows = [one for one in machine.coverage if one.threads == threads]
    n_measured, n_planned = sum(one.n_measured for one in rows), sum(one.n_planned for one in rows)
    line = (
        f"{n_measured:,} of {counted(n_planned, 'planned point')} with {counted(threads, 'thread')}"
    )
    missing = [
        f"{one.n_planned - one.n_measured} of {one.group}"
        for one in rows
        if one.n_measured < one.n_planned
    ]
    return line + (f"; there was no time for {', '.join(missing)}" if missing else "")


def self_test_lines(machine: Machine) -> list[str]:
    """The self-test of each thread count in lines: each of few steps, or a summary of
    many; its result last.
    """
    found = []
    for threads in machine.threads:
        tests = [test for test in machine.self_tests if test.threads == threads]
        steps = [test.describe() for test in tests]
        if len(steps) > _MOST_LINES:
            steps = [_summary_of(tests)]
        found += [f"self-test: {line}" for line in steps]
        change = f"{machine.interval_factor(threads):.1f}" if tests else "1.0"
        which = "wider" if float(change) > 1.0 else "narrower"
        changed = f"; intervals are {which} by a factor of {change}" if change != "1.0" else ""
        more_frac = machine.kernel_factor(threads) - 1.0 if tests else 0.0
        if abs(more_frac) >= _LEAST_CHANGE_FRAC:
            which = "longer" if more_frac > 0 else "shorter"
            more = format_percent(abs(more_frac))
            changed = f"; kernels in steps are predicted {more} {which}{changed}"
        if any(test.threads == threads for test in machine.page_tests):
            times = machine.page_factor(threads)
            changed += f"; pages of the heap take {times:.2f} times as long as alone"
        problem = find_self_test_problem(machine, threads)
        passed = f"self-test with {counted(threads, 'thread')}: passed{changed}"
        found.append(f"self-test: {problem}" if problem else passed)
    return found


def _summary_of(tests: Sequence[SelfTest]) -> str:
    """The steps of one thread count in a line: median and worst error, and the median signed error
    (bias).

    >>> steps = [SelfTest("MLP", 2, 7, 1.1 + 0.1 * n, 0.9, 1.2, 1.0) for n in range(5)]
    >>> _summary_of(steps)
    '5 steps with 2 threads: median error 30.0 %, worst +50.0 % (MLP), bias +30.0 %'
    """
    worst, threads = max(tests, key=lambda test: test.factor), tests[0].threads
    errors = [test.error_frac for test in tests]
    return (
        f"{len(tests)} steps with {counted(threads, 'thread')}: median error"
        f" {format_percent(median(map(abs, errors)))}, worst"
        f" {format_percent(worst.error_frac, signed=True)} ({worst.name}), bias"
        f" {format_percent(median(errors), signed=True)}"
    )


def find_problems(machine: Machine, cpu: Cpu, versions: dict[str, str]) -> list[str]:
    """Why a machine file should not be trusted here, one line each; empty if it can be.

    It must be of this machine, be complete and have passed its self-test. The spread of samples, a
    busy machine and leave-one-out errors are remarks only (:func:`find_remarks`): the self-test
    shows their effect.
    """
    found = find_mismatches(machine, cpu, versions)
    if is_unfinished(machine):
        found.append(f"the calibration did not finish; {remedy(machine, *machine.threads)}")
    held = {"kernels": machine.kernels, "memory bandwidth": machine.bandwidths}
    if not any(held.values()):
        return [*found, f"it contains no measurements; run {machine.calibration()}"]
    found += [
        f"it contains no {name}; {machine.calibration()} adds it"
        for name, part in held.items()
        if not part
    ]
    found += [
        f"it contains no costs {', '.join(names)}; {machine.calibration()} adds them"
        for names in machine.missing_costs().values()
    ]
    return found + [
        problem
        for threads in machine.threads
        if (problem := find_self_test_problem(machine, threads))
    ]


def find_remarks(machine: Machine) -> list[str]:
    """Remarks that do not decide whether a machine file can be trusted, one line each."""
    found = [
        busy_line(machine, threads) for threads in machine.threads if machine.busy_groups(threads)
    ]
    found += [
        coverage_line(machine, threads)
        for threads in machine.threads
        if machine.n_left_out(threads)
    ]
    found += [
        f"{family} with {counted(threads, 'thread')}: the leave-one-out error of its kernels is"
        f" {format_percent(error)}"
        for threads in machine.threads
        for family, error in machine.leave_one_out_errors(threads).items()
        if error > WORST_LEAVE_ONE_OUT_FRAC
    ]
    return [
        *found,
        *(
            f"its own note: {note}"
            for note in machine.notes
            if "running when the measuring began" in note
        ),
    ]


# -- two machine files -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """Time in the second machine file / time in the first: the geometric mean over the `n_shared`
    points of both, and its extremes.
    """

    what: str
    threads: int
    ratio: float
    low: float
    high: float
    n_shared: int

    @property
    def is_cost_alike(self) -> bool:
        """Whether it is of a cost, which takes about as long in both."""
        return self.what.startswith(_COST) and abs(self.ratio - 1.0) <= _ALIKE_FRAC


@dataclass(frozen=True)
class Difference:
    """Two machine files: `ratios` of what both contain, `notes` on what only one contains."""

    first: Machine
    second: Machine
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """A table; below 1 the second machine is faster. Costs that are alike share a line."""
        found = [r for r in self.ratios if not r.is_cost_alike]
        n_alike = len(self.ratios) - len(found)
        columns = [
            Column("what", tuple(r.what for r in found), align_left=True),
            Column("threads", tuple(str(r.threads) for r in found)),
            Column("ratio", tuple(f"{r.ratio:.3f}" for r in found)),
            Column("least", tuple(f"{r.low:.3f}" for r in found)),
            Column("most", tuple(f"{r.high:.3f}" for r in found)),
            Column("points", tuple(str(r.n_shared) for r in found)),
        ]
        table = format_table(columns, None) if found else "nothing is in both"
        head = (
            f"time in {self.second.path or 'the second'} / time in"
            f" {self.first.path or 'the first'}; below 1 the second is faster"
        )
        alike = [f"{counted(n_alike, 'other cost')} within {format_percent(_ALIKE_FRAC)}"]
        rest = alike if n_alike else []
        return "\n".join([head, "", table, *rest, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON data."""
        return {
            "schema": "dlperf.machine-diff",
            "schema_version": 1,
            "first": self.first.path,
            "second": self.second.path,
            "notes": list(self.notes),
            "ratios": [
                {
                    "what": r.what,
                    "threads": r.threads,
                    "ratio": r.ratio,
                    "low": r.low,
                    "high": r.high,
                    "points": r.n_shared,
                }
                for r in self.ratios
            ],
        }


def compare_machines(first: Machine, second: Machine) -> Difference:
    """Ratios of times by family, bandwidth level and cost, over what both files contain."""
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    theirs = {(k.op.signature, k.threads): k.seconds for k in second.kernels}
    for kernel in sorted(first.kernels, key=lambda k: (k.family, k.threads)):
        if other_s := theirs.get((kernel.op.signature, kernel.threads)):
            ratios[kernel.family, kernel.threads].append(other_s / kernel.seconds)
    for threads in sorted(set(first.threads) & set(second.threads)):
        ours, others = (
            {roof.level: roof for roof in roofs_of(machine, threads).bandwidths}
            for machine in (first, second)
        )
        for level in (level for level in LEVELS if level in ours and level in others):
            a, b = ours[level], others[level]
            if (a.kernel in STREAM_BYTES_PER_ELEMENT) == (b.kernel in STREAM_BYTES_PER_ELEMENT):
                ratios[f"memory {level}", threads].append(a.bytes_per_s / b.bytes_per_s)
    costs = {(c.key, c.threads): c.value for c in second.costs}
    for cost in sorted(first.costs, key=lambda c: (c.key, c.threads)):
        other_s = costs.get((cost.key, cost.threads))
        if other_s and cost.value:
            ratios[f"{_COST}{cost.key}", cost.threads].append(other_s / cost.value)
    found = [
        Ratio(*key, math.exp(fmean(map(math.log, values))), min(values), max(values), len(values))
        for key, values in ratios.items()
    ]
    return Difference(first, second, tuple(found), tuple(_only_in_one(first, second)))


def _only_in_one(first: Machine, second: Machine) -> Iterable[str]:
    if first.cpu.identity != second.cpu.identity:
        yield (
            f"other machines: {first.cpu.model} ({first.cpu.n_cores} cores), {second.cpu.model}"
            f" ({second.cpu.n_cores} cores)"
        )
    for name in sorted(set(first.versions) | set(second.versions)):
        a, b = first.versions.get(name, "none"), second.versions.get(name, "none")
        if a != b:
            yield f"{name} {a}, {b}"
    if first.mode != second.mode:
        yield f"calibrations of other depth: {first.mode}, {second.mode}"
    references = [
        "none" if one.reference is None else one.reference.describe() for one in (first, second)
    ]
    if references[0] != references[1]:
        yield f"reference states: {'; '.join(references)}"
    if first.threads != second.threads:
        yield (
            f"thread counts {', '.join(map(str, first.threads)) or 'none'};"
            f" {', '.join(map(str, second.threads)) or 'none'}"
        )
    a_keys, b_keys = (
        {(k.op.signature, k.threads) for k in machine.kernels} for machine in (first, second)
    )
    if a_keys ^ b_keys:
        yield (
            f"points in one file alone: {len(a_keys - b_keys)} in the first,"
            f" {len(b_keys - a_keys)} in the second"
        )

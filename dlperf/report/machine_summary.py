"""A machine file as a page: rates, costs, kernels, co-run slowdowns, self-tests."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from dlperf.core.co_run import PREPARATION
from dlperf.core.costs import (
    ARITHMETIC,
    CACHE_MISS,
    CACHE_RESIDENCY,
    CORE_SPEED,
    KINDS,
    CostKey,
)
from dlperf.core.machine import Machine
from dlperf.core.machine_doubts import (
    busy_line,
    find_self_test_problem,
    find_state_problem,
    remedy,
)
from dlperf.core.text import counted
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.forecast.worker_processes import hardware_threads
from dlperf.ops import counts
from dlperf.ops.roofs import LEVELS, roofs_of
from dlperf.report.document import Column, format_table
from dlperf.report.machine_check import coverage_line, self_test_lines

_GEMMS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear", "aten.baddbmm")
Rates = tuple[tuple[str | CostKey, int, float], ...]
"""Values by name or cost and number of threads."""


_flops = partial(format_si, unit="FLOP/s")
_rate = partial(format_si, unit="B/s")
_TABLES: dict[str, tuple[str, str, str, Callable[[float], str]]] = {
    "peaks": ("matrix product, best", "dtype", "flops_per_s", _flops),
    "no_fma": ("sums or products alone, best", "dtype", "flops_per_s", _flops),
    "roofs": ("memory, best kernel", "level", "bytes_per_s", _rate),
    "bandwidths": ("memory, STREAM triad", "level", "bytes_per_s", _rate),
    "cache_residency": ("slowdown after a pause", "", "value", "{:.2f}".format),
    "cache_miss_penalty": (
        "cache-miss penalty of operands",
        "",
        "value",
        lambda value: f"{1e12 * value:.0f} ps/B",
    ),
    "costs": ("costs", "", "value", format_seconds),
}
"""The tables by the summary's attribute: title, JSON keys of the name (of
costs the fields of their key instead) and of the value, format."""


@dataclass(frozen=True)
class Family:
    """The kernels of one family at one thread count: their number, their median spread (None where
    each has a single sample), and their leave-one-out error.
    """

    name: str
    threads: int
    n_points: int
    spread_frac: float | None
    leave_one_out_frac: float | None


@dataclass(frozen=True)
class Summary:
    """A machine file in the numbers that people ask for, each from the file's own samples.

    `peaks` are FLOP/s of the fastest matrix product by dtype, `bandwidths` bytes/s of the STREAM
    triad by level, `costs` in the unit of their kinds. `no_fma` are FLOP/s of additions or products
    alone, `roofs` bytes/s of the fastest memory kernel (:func:`dlperf.ops.roofs.roofs_of`).
    `cache_residency` is the slowdown of operands in the shared cache after a pause without a touch,
    by the pause. `cache_miss_penalty` is in seconds per byte, by operator and reuse distance in
    bytes.
    """

    machine: Machine
    peaks: Rates
    bandwidths: Rates
    costs: Rates
    families: tuple[Family, ...]
    no_fma: Rates = ()
    roofs: Rates = ()
    cache_residency: Rates = ()
    cache_miss_penalty: Rates = ()

    def _co_run_table(self) -> list[str]:
        """Co-run slowdown of each kind of work over the number of workers."""
        machine = self.machine
        workers = sorted({run.workers for run in machine.co_runs})
        found = {run.work: machine.co_runs_of(run.work) for run in machine.co_runs}
        rows: list[list[str]] = []
        if times := found.pop(PREPARATION, None):
            cells = (
                format_seconds(times[n].samples.median) if n in times else "-" for n in workers
            )
            rows.append([PREPARATION, *cells])
        if workers:
            cpi = (f"{hardware_threads(machine.cpu).shared_cpi(n):.2f}" for n in workers)
            rows.append(["by the topology alone", *cpi])
        rows += [
            [
                name,
                *(
                    f"{runs[n].slowdown:.2f}" if n in runs else "1.00" if n == 1 else "-"
                    for n in workers
                ),
            ]
            for name, runs in found.items()
        ]
        titles = [counted(n, "worker") for n in workers]
        return _table(["co-run slowdown of workers at once", *titles], rows)

    def to_text(self) -> str:
        """A page to read."""
        machine, cpu, threads = self.machine, self.machine.cpu, self.machine.threads
        sizes = [
            f"{name} {format_bytes(size)}" for name, size in zip(LEVELS, cpu.caches_bytes) if size
        ]
        sizes += [f"memory {format_bytes(cpu.memory_bytes)}"] if cpu.memory_bytes else []
        siblings = (
            f" ({cpu.threads_per_core} hardware threads each of {cpu.n_physical_cores})"
            if cpu.threads_per_core > 1
            else ""
        )
        covered = {one.threads for one in machine.coverage}
        lines = [
            (
                f"{machine.path or 'machine'}: {machine.mode} calibration,"
                f" {'complete' if machine.complete else 'incomplete'}, made"
                f" {machine.created or 'at an unknown time'}"
            ),
            (
                f"  {cpu.model}, {counted(cpu.n_cores, 'core')}{siblings};"
                f" {', '.join(sizes) or 'sizes of caches and memory unknown'}"
            ),
            f"  {' '.join(cpu.flags) or 'no known vector extensions'}",
            "  " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
            *(f"  {coverage_line(machine, count)}" for count in threads if count in covered),
            *(f"  {line}" for line in self_test_lines(machine)),
            *(f"  {line}" for line in _state_lines(machine)),
        ]
        titles = [counted(t, "thread") for t in threads]
        for attribute, (title, _, _, form) in _TABLES.items():
            found = {(name, t): form(value) for name, t, value in getattr(self, attribute)}
            rows = [
                [_readable(name), *(found.get((name, t), "-") for t in threads)]
                for name in dict.fromkeys(name for name, _ in found)
            ]
            lines += _table([title, *titles], rows)
        kernels = [
            [
                f.name,
                str(f.threads),
                str(f.n_points),
                format_percent(f.spread_frac),
                format_percent(f.leave_one_out_frac),
            ]
            for f in self.families
        ]
        lines += _table(["kernels", "threads", "points", "spread", "leave-one-out error"], kernels)
        lines += self._co_run_table()
        return "\n".join([*lines, *(f"note: {note}" for note in _notes(machine))])

    def to_json(self) -> dict[str, Any]:
        """The page as JSON data."""
        machine, cpu = self.machine, self.machine.cpu
        tables = {
            attribute: [
                {**_name_fields(key, name), "threads": t, unit: value}
                for name, t, value in getattr(self, attribute)
            ]
            for attribute, (_, key, unit, _) in _TABLES.items()
        }
        return {
            "schema": "dlperf.machine-summary",
            "schema_version": 2,
            "machine": machine.path,
            "created": machine.created,
            "mode": machine.mode,
            "complete": machine.complete,
            "versions": dict(machine.versions),
            "threads": list(machine.threads),
            "notes": list(machine.notes),
            "disturbances": [vars(one) for one in machine.disturbances],
            "reference": None if machine.reference is None else vars(machine.reference),
            "n_readings": len(machine.readings),
            "usual_state": vars(machine.usual_state) if machine.states else None,
            "coverage": [vars(one) for one in machine.coverage],
            "self_tests": [
                {**vars(test), "error_frac": test.error_frac} for test in machine.self_tests
            ],
            "cpu": {
                "model": cpu.model,
                "n_cores": cpu.n_cores,
                "caches_bytes": list(cpu.caches_bytes),
                "memory_bytes": cpu.memory_bytes,
                "flags": list(cpu.flags),
                "threads_per_core": cpu.threads_per_core,
            },
            "co_runs": [
                {
                    "work": run.work,
                    "workers": run.workers,
                    "slowdown": run.slowdown,
                    "time_s": run.samples.median,
                    "alone_s": run.alone.median,
                }
                for run in machine.co_runs
            ],
            **tables,
            "families": [
                {
                    "family": f.name,
                    "threads": f.threads,
                    "points": f.n_points,
                    "spread_frac": f.spread_frac,
                    "leave_one_out_frac": f.leave_one_out_frac,
                }
                for f in self.families
            ],
        }


def _state_lines(machine: Machine) -> list[str]:
    """The file's readings and their median state, and what it lacks for states.

    >>> from dlperf.core.machine import Cpu
    >>> from dlperf.core.state import Reading
    >>> one, two = (Reading(*(n,) * 6, f"2026-01-01T00:0{n}:00+00:00") for n in (1, 2))
    >>> _state_lines(Machine(Cpu("", 1), reference=one, readings=(one, one, two)))
    ['3 readings from 2026-01-01 00:01 to 2026-01-01 00:02; median state: as the reference']
    """
    found, readings = [], machine.readings
    if machine.states:
        times = [
            one.created[:16].replace("T", " ") or "an unknown time"
            for one in (readings[0], readings[-1])
        ]
        found.append(
            f"{counted(len(readings), 'reading')} from {times[0]} to {times[1]};"
            f" median state: {machine.usual_state.describe()}"
        )
    if problem := find_state_problem(machine):
        found.append(f"it {problem}")
    return found


def _notes(machine: Machine) -> list[str]:
    """The file's notes, and its disturbed groups in one line per thread count."""
    busy = [
        f"the machine was busy while {counted(len(names), 'group')}"
        f" {'was' if len(names) == 1 else 'were'} measured with"
        f" {counted(threads, 'thread')}: {', '.join(names)}"
        for threads in dict.fromkeys(one.threads for one in machine.disturbances)
        if (names := machine.busy_groups(threads))
    ]
    return [*machine.notes, *busy]


def _name_fields(title: str, name: str | CostKey) -> dict[str, Any]:
    if isinstance(name, CostKey):
        return {**name._asdict(), "unit": KINDS[name.kind].unit}
    return {title: name}


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """An indented table below a blank line; nothing without rows."""
    columns = [
        Column(title, cells, align_left=i == 0)
        for i, (title, cells) in enumerate(zip(titles, zip(*rows)))
    ]
    return ["", *textwrap.indent(format_table(columns, None), "  ").split("\n")] if rows else []


def conclude(summary: Summary, seconds: float) -> str:
    """A calibration of so many seconds on one screen: points, main rates, self-test, what to type
    next.
    """
    machine = summary.machine
    cpu, name = machine.cpu, machine.path or "machine file"
    costs = {"boxed_call": "call of an operator", "page_fault": "page fault"}
    lines = [
        (
            f"{name}: {machine.mode} calibration of {cpu.model}, {cpu.n_cores}"
            f" core{'s' * (cpu.n_cores != 1)}, {seconds:.0f} s"
        )
    ]
    for threads in machine.threads:
        lines.append(f"  {coverage_line(machine, threads)}")
        points = ", ".join(
            f"{family.name} {family.n_points}"
            for family in summary.families
            if family.threads == threads
        )
        named = [
            *((t, f"{dtype} product {_flops(rate)}") for dtype, t, rate in summary.peaks),
            *((t, f"{of} {_rate(rate)}") for of, t, rate in summary.roofs or summary.bandwidths),
            *(
                (t, f"{costs[cost.kind]} {format_seconds(value)}")
                for cost, t, value in summary.costs
                if isinstance(cost, CostKey) and cost.kind in costs
            ),
        ]
        for text in (points, ", ".join(rate for t, rate in named if t == threads)):
            lines += textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
        if busy := busy_line(machine, threads):
            lines.append(f"  note: {busy}")
    lines += self_test_lines(machine)
    problems = [find_self_test_problem(machine, threads) for threads in machine.threads]
    if any(problems):
        return "\n".join([*lines, *(f"warning: {problem}" for problem in problems if problem)])
    if not machine.complete:
        lines.append(f"next: {remedy(machine, *machine.threads)}")
    lines.append(
        "next: dlperf predict FILE.py:CALLABLE, dlperf report FILE.py:CALLABLE -o DIR, dlperf"
        " run script.py; dlperf machine show has the details"
    )
    return "\n".join(lines)


def summarize(machine: Machine) -> Summary:
    """A machine file's summary."""
    peaks: dict[tuple[str, int], float] = {}
    for kernel in machine.kernels:
        if (
            kernel.op.packet in _GEMMS
            and kernel.op.inputs
            and (flops := counts.op_flops(kernel.op))
            and kernel.seconds
        ):
            key = kernel.op.inputs[0].dtype, kernel.threads
            peaks[key] = max(peaks.get(key, 0.0), flops / kernel.seconds)
    measured = {b.threads for b in machine.bandwidths}
    ordered = sorted(machine.costs, key=lambda c: (c.key, c.threads))
    costs = [
        c
        for c in ordered
        if KINDS[c.key.kind].unit != "factor"
        and c.key.kind not in (ARITHMETIC, CACHE_MISS, CORE_SPEED)
    ]
    with_ceilings = {c.threads for c in machine.costs_of(ARITHMETIC)}
    roofs = {t: roofs_of(machine, t) for t in machine.threads if t in with_ceilings}
    # STREAM's sweeps of sets that fit a cache are shorter than their calls: where better kernels
    # measured the caches, STREAM counts for memory alone.
    levels = {t: LEVELS if t not in roofs else ("DRAM",) for t in machine.threads if t in measured}
    bandwidths = [
        (level, t, rate)
        for level in LEVELS
        for t in levels
        if level in levels[t] and (rate := machine.level_bytes_per_s(level, t)) is not None
    ]
    families = []
    for threads in machine.threads:
        errors = machine.leave_one_out_errors(threads)
        for name in machine.families(threads):
            kernels = machine.family(name, threads)
            repeated = (kernel.samples for kernel in kernels if len(kernel.samples.values) > 1)
            spreads = [samples.spread_frac for samples in repeated]
            spread_frac = median(spreads) if spreads else None
            families.append(Family(name, threads, len(kernels), spread_frac, errors.get(name)))

    def costs_of(*kinds: str) -> Rates:
        return tuple((c.key, c.threads, c.value) for c in ordered if c.key.kind in kinds)

    return Summary(
        machine,
        tuple(
            (dtype, t, rate)
            for (dtype, t), rate in sorted(peaks.items(), key=lambda item: (-item[1], item[0]))
        ),
        tuple(bandwidths),
        tuple((c.key, c.threads, c.value) for c in costs),
        tuple(sorted(families, key=lambda f: (f.name, f.threads))),
        tuple(
            (c.dtype, t, c.other_flops_per_s)
            for t, found in roofs.items()
            for c in found.ceilings
            if c.is_measured
        ),
        tuple(
            (roof.level, t, roof.bytes_per_s)
            for t, found in roofs.items()
            for roof in found.bandwidths
        ),
        costs_of(CACHE_RESIDENCY),
        costs_of(CACHE_MISS),
    )


def _readable(name: str | CostKey) -> str:
    """A row's name, amounts of bytes in human units.

    >>> keys = CostKey("cold_start", "next", 1048576), CostKey("cache_residency", at=4)
    >>> tuple(map(_readable, keys))
    ('cold_start next at 1.00 MiB', 'cache_residency at 4 ms')
    """
    if isinstance(name, CostKey) and name.at and KINDS[name.kind].at == "bytes":
        return f"{name._replace(at=0)} at {format_bytes(name.at)}"
    return str(name)

"""What a machine file says, whether it can be trusted, and how two of them differ."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from dlperf.core.co_run import PREPARATION
from dlperf.core.machine import (
    CACHE_MISS_COSTS,
    CACHE_RESIDENCY,
    CONTENTION,
    CORE_SPEED,
    PAGE_RESIDENCY,
    STREAM_BYTES_PER_ELEMENT,
    Cpu,
    Machine,
)
from dlperf.core.trace import Trace
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.forecast.worker_processes import hardware_threads
from dlperf.ops import counts
from dlperf.ops.roofs import CEILING, LEVELS, roofs_of
from dlperf.studies import self_test

_GEMMS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.matmul", "aten.linear", "aten.baddbmm")
WORST_HELD_OUT_FRAC = 0.3
"""Mean error of a family's kernels, each predicted from the others, from which on its curves are
worth little: other ops are as far off.
"""
BUSY_SHARE = 0.5
"""Where more of the groups of a thread count than this were measured on a busy machine, its times
are too long throughout; leave-one-out errors do not show it.
"""


# -- show ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """The kernels of one family at one thread count: how many, their median spread (None where each
    has a single sample), and the error of predicting each from the others.
    """

    name: str
    threads: int
    n_points: int
    spread_frac: float | None
    leave_one_out_frac: float | None


@dataclass(frozen=True)
class Summary:
    """A machine file in numbers people ask for.

    `peaks` hold (dtype, threads, FLOP/s) of the fastest matrix product, `bandwidths` (level,
    threads, bytes/s) of the STREAM triad, `costs` (name, threads, seconds each), all from the
    file's own samples. `no_fma` are the rates of additions or products alone, `roofs` the
    bandwidths of the fastest memory kernel (:func:`dlperf.ops.roofs.roofs_of`). `retention` says
    after how many milliseconds without a touch what lay in the shared cache takes how many times as
    long, `far` how many seconds a byte an operator takes more after so many bytes of other data.
    """

    machine: Machine
    peaks: tuple[tuple[str, int, float], ...]
    bandwidths: tuple[tuple[str, int, float], ...]
    costs: tuple[tuple[str, int, float], ...]
    families: tuple[Family, ...]
    no_fma: tuple[tuple[str, int, float], ...] = ()
    roofs: tuple[tuple[str, int, float], ...] = ()
    retention: tuple[tuple[str, int, float], ...] = ()
    far: tuple[tuple[str, int, float], ...] = ()

    @property
    def _sharing_lines(self) -> list[str]:
        """What workers cost one another: for each kind of work how many times as long it takes
        beside the others.
        """
        co_runs = self.machine.co_runs
        if not co_runs:
            return []
        numbers = sorted({s.workers for s in co_runs})
        titles = [f"{n} worker{'s' * (n != 1)}" for n in numbers]
        rows = [
            [
                "by the topology alone",
                *(f"{hardware_threads(self.machine.cpu).shared_cpi(n):.2f}" for n in numbers),
            ]
        ]
        for name in dict.fromkeys(s.work for s in co_runs):
            found = self.machine.co_runs_of(name)
            if name == PREPARATION:
                rows.insert(
                    0,
                    [
                        name,
                        *(
                            format_seconds(found[n].samples.median) if n in found else "-"
                            for n in numbers
                        ),
                    ],
                )
            else:
                rows.append(
                    [
                        name,
                        *(
                            f"{found[n].slowdown:.2f}" if n in found else "1.00" if n == 1 else "-"
                            for n in numbers
                        ),
                    ]
                )
        return ["", *_table(["workers at once, times as long as alone", *titles], rows)]

    def to_text(self) -> str:
        """A page to read."""
        machine, cpu, threads = self.machine, self.machine.cpu, self.machine.threads
        sizes = [
            f"{name} {format_bytes(size)}" for name, size in zip(LEVELS, cpu.caches_bytes) if size
        ]
        sizes += [f"memory {format_bytes(cpu.memory_bytes)}"] if cpu.memory_bytes else []
        made = (
            f"{machine.mode} calibration, {'complete' if machine.complete else 'incomplete'}, made"
            f" {machine.created or 'at an unknown time'}"
        )
        covered = [
            f"  {coverage_line(machine, count)}"
            for count in threads
            if any(one.threads == count for one in machine.coverage)
        ]
        lines = [
            f"{machine.path or 'machine'}: {made}",
            (
                f"  {cpu.model}, {cpu.n_cores} core{'s' * (cpu.n_cores != 1)}{_siblings(cpu)};"
                f" {', '.join(sizes) or 'sizes of caches and memory unknown'}"
            ),
            f"  {' '.join(cpu.flags) or 'no known vector extensions'}",
            "  " + ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
            *covered,
            *(f"  {line}" for line in self_test_lines(machine)),
        ]
        for title, rows, form in (
            ("matrix product, best", self.peaks, lambda value: format_si(value, "FLOP/s")),
            ("sums or products alone, best", self.no_fma, lambda value: format_si(value, "FLOP/s")),
            ("memory, best kernel", self.roofs, lambda value: format_si(value, "B/s")),
            ("memory, STREAM triad", self.bandwidths, lambda value: format_si(value, "B/s")),
            (
                "shared cache after a pause, times as long",
                self.retention,
                lambda value: f"{value:.2f}",
            ),
            (
                "operators on far operands, longer by",
                self.far,
                lambda value: f"{1e12 * value:.0f} ps/B",
            ),
            ("costs, median each", self.costs, format_seconds),
        ):
            if rows:
                values = {(name, t): form(value) for name, t, value in rows}
                names = dict.fromkeys(name for name, _, _ in rows)
                rows_of_title = [
                    [_readable(name), *(values.get((name, t), "-") for t in threads)]
                    for name in names
                ]
                lines += ["", *_table([title, *_thread_titles(threads)], rows_of_title)]
        if self.families:
            found = [
                [
                    f.name,
                    str(f.threads),
                    str(f.n_points),
                    format_percent(f.spread_frac),
                    format_percent(f.leave_one_out_frac),
                ]
                for f in self.families
            ]
            lines += [
                "",
                *_table(["kernels", "threads", "points", "spread", "leave-one-out error"], found),
            ]
        lines += self._sharing_lines
        lines += [f"note: {note}" for note in condense(machine.notes)]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The page as JSON data."""
        machine, cpu = self.machine, self.machine.cpu
        return {
            "schema": "dlperf.machine-summary",
            "schema_version": 1,
            "machine": machine.path,
            "created": machine.created,
            "mode": machine.mode,
            "complete": machine.complete,
            "versions": dict(machine.versions),
            "threads": list(machine.threads),
            "notes": list(machine.notes),
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
                    "work": s.work,
                    "workers": s.workers,
                    "slowdown": s.slowdown,
                    "time_s": s.samples.median,
                    "alone_s": s.alone.median,
                }
                for s in machine.co_runs
            ],
            "peaks": [
                {"dtype": name, "threads": t, "flops_per_s": value} for name, t, value in self.peaks
            ],
            "no_fma": [
                {"dtype": name, "threads": t, "flops_per_s": value}
                for name, t, value in self.no_fma
            ],
            "roofs": [
                {"level": name, "threads": t, "bytes_per_s": value} for name, t, value in self.roofs
            ],
            "bandwidths": [
                {"level": name, "threads": t, "bytes_per_s": value}
                for name, t, value in self.bandwidths
            ],
            "retention": [
                {"pause": name, "threads": t, "factor": value} for name, t, value in self.retention
            ],
            "far": [
                {"name": name, "threads": t, "s_per_byte": value} for name, t, value in self.far
            ],
            "costs": [
                {"name": name, "threads": t, "time_s": value} for name, t, value in self.costs
            ],
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


_BUSY_NOTE = re.compile(r"busy while measuring (.+) with (\d+) thread\(s\): .*")


def condense(notes: Sequence[str]) -> list[str]:
    """A calibration's notes, those that it makes of every group in one line a thread count; the
    file and JSON have each of them.

    >>> condense(["busy while measuring conv with 1 thread(s): why", "x", "busy while measuring gemm with 1 thread(s): why"])
    ['x', 'the machine was busy while 2 groups were measured with 1 thread(s): conv, gemm']
    """
    busy: dict[str, list[str]] = {}
    others = []
    for note in notes:
        if match := _BUSY_NOTE.fullmatch(note):
            busy.setdefault(match[2], []).append(match[1])
        else:
            others.append(note)
    for threads, names in busy.items():
        names = list(dict.fromkeys(names))
        others.append(
            f"the machine was busy while {len(names)} groups were measured with {threads}"
            f" thread(s): {', '.join(names)}"
        )
    return others


def coverage_line(machine: Machine, threads: int) -> str:
    """How many of the planned points were measured, and which groups lack some.

    >>> from dlperf.core.verification import Coverage
    >>> coverage_line(Machine(Cpu("", 1), coverage=(Coverage("gemm", 1, 4, 6), Coverage("rows", 1, 9, 9))), 1)
    '13 of 15 planned points with 1 thread; there was no time for 2 of gemm'
    """
    rows = [one for one in machine.coverage if one.threads == threads]
    n_measured, n_planned = sum(one.n_measured for one in rows), sum(one.n_planned for one in rows)
    line = (
        f"{n_measured:,} of {n_planned:,} planned points with {threads}"
        f" thread{'s' * (threads != 1)}"
    )
    missing = [
        f"{one.n_planned - one.n_measured} of {one.group}"
        for one in rows
        if one.n_measured < one.n_planned
    ]
    return line + (f"; there was no time for {', '.join(missing)}" if missing else "")


def conclude(summary: Summary, seconds: float) -> str:
    """What a calibration found, on one screen: how much it measured in how many seconds, the main
    rates, its self-test, what to type next.
    """
    machine = summary.machine
    cpu, name = machine.cpu, machine.path or "machine file"
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
        lines += textwrap.wrap(points, 100, initial_indent="    ", subsequent_indent="    ")
        rates = [
            f"{dtype} product {format_si(rate, 'FLOP/s')}"
            for dtype, t, rate in summary.peaks
            if t == threads
        ]
        rates += [
            f"{level} {format_si(rate, 'B/s')}"
            for level, t, rate in summary.roofs or summary.bandwidths
            if t == threads
        ]
        costs = {"boxed_call": "call of an operator", "page_fault": "page fault"}
        rates += [
            f"{costs[cost]} {format_seconds(value)}"
            for cost, t, value in summary.costs
            if t == threads and cost in costs
        ]
        lines += textwrap.wrap(
            ", ".join(rates), 100, initial_indent="    ", subsequent_indent="    "
        )
        if busy := busy_line(machine, threads):
            lines.append(f"  note: {busy}")
    lines += self_test_lines(machine)
    if not machine.complete:
        lines.append("next: the same command again measures what there was no time for")
    if not any(self_test.find_problem(machine, threads) for threads in machine.threads):
        lines.append(
            "next: dlperf predict FILE.py:CALLABLE, dlperf report FILE.py:CALLABLE -o DIR, dlperf"
            " run script.py; dlperf machine show has the details"
        )
    return "\n".join(lines)


def self_test_lines(machine: Machine) -> list[str]:
    """The self-test in lines, the verdict last."""
    found = []
    for threads in machine.threads:
        tests = (
            machine.self_tests_of(threads)
            if any(test.threads == threads for test in machine.self_tests)
            else ()
        )
        found += [f"self-test: {line}" for line in self_test.describe(tests)]
        problem = self_test.find_problem(machine, threads)
        factor = machine.interval_factor(threads)
        wider = (
            f"; intervals are {factor:.1f} times as wide for it" if tests and factor >= 1.05 else ""
        )
        found.append(
            f"self-test: {problem}"
            if problem
            else f"self-test with {threads} thread{'s' * (threads != 1)}: passed{wider}"
        )
    return found


def summarize(machine: Machine) -> Summary:
    """A machine file's summary."""
    peaks: dict[tuple[str, int], float] = {}
    for kernel in machine.kernels:
        if (
            kernel.op.packet in _GEMMS
            and kernel.op.inputs
            and (flops := counts.op_flops(kernel.op))
            and kernel.samples.minimum
        ):
            key = kernel.op.inputs[0].dtype, kernel.threads
            peaks[key] = max(peaks.get(key, 0.0), flops / kernel.samples.minimum)
    measured = {b.threads for b in machine.bandwidths}
    ordered = sorted(machine.costs, key=lambda c: (_numbers_apart(c.name), c.threads))
    costs = [
        c
        for c in ordered
        if not c.name.startswith((CEILING, CONTENTION, CACHE_RESIDENCY, CACHE_MISS_COSTS))
        and c.name != CORE_SPEED
    ]
    with_ceilings = {c.threads for c in machine.costs if c.name.startswith(CEILING)}
    roofs = {t: roofs_of(machine, t) for t in machine.threads if t in with_ceilings}
    # STREAM's sweeps of sets that fit a cache are shorter than their calls: where better kernels
    # speak of the caches, it speaks of memory alone.
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
            spreads = [
                kernel.samples.spread_frac for kernel in kernels if len(kernel.samples.values) > 1
            ]
            families.append(
                Family(
                    name,
                    threads,
                    len(kernels),
                    median(spreads) if spreads else None,
                    errors.get(name),
                )
            )
    return Summary(
        machine,
        tuple(
            (dtype, t, rate)
            for (dtype, t), rate in sorted(peaks.items(), key=lambda item: (-item[1], item[0]))
        ),
        tuple(bandwidths),
        tuple((c.name, c.threads, c.seconds) for c in costs),
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
        tuple(
            (_pause(c.name), c.threads, c.seconds)
            for c in ordered
            if c.name.startswith(CACHE_RESIDENCY)
        ),
        tuple(
            (c.name, c.threads, c.seconds) for c in ordered if c.name.startswith(CACHE_MISS_COSTS)
        ),
    )


def _pause(name: str) -> str:
    """The pause of a factor for people, and of what it is."""
    what, _, ms = name.partition("/")
    return f"{ms} ms, pages" if what == PAGE_RESIDENCY else f"{ms} ms"


# -- check -----------------------------------------------------------------------------------------


def find_mismatches(machine: Machine, cpu: Cpu, versions: dict[str, str]) -> list[str]:
    """In what the machine that was measured is not this one: processor, cores, torch. One line
    each.
    """
    found = []
    name = machine.path or "machine file"
    if (machine.cpu.model, machine.cpu.family) != (cpu.model, cpu.family):
        found.append(
            f"{name} was measured on another CPU ({machine.cpu.model}; this is {cpu.model}):"
            " extrapolated"
        )
    elif machine.cpu.n_cores != cpu.n_cores:
        found.append(
            f"{name} was measured with {machine.cpu.n_cores} cores, this process may use"
            f" {cpu.n_cores}: extrapolated"
        )
    theirs, ours = machine.versions.get("torch"), versions.get("torch")
    if theirs and ours and theirs.partition("+")[0] != ours.partition("+")[0]:
        found.append(
            f"{name} was measured with torch {theirs}, this is torch {ours}: extrapolated; dlperf"
            " calibrate measures anew"
        )
    return found


def find_missing_dtypes(machine: Machine, trace: Trace) -> list[str]:
    """Which floating-point types the trace computes with and the machine file has no kernel for.
    One line each.
    """
    held = {spec.dtype for kernel in machine.kernels for spec in kernel.op.inputs}
    asked = dict.fromkeys(
        spec.dtype
        for op in trace.ops
        for spec in op.inputs
        if spec.dtype.startswith(("float", "bfloat", "complex"))
    )
    return [
        f"{machine.path or 'machine file'} holds no kernels in {dtype}: extrapolated"
        for dtype in asked
        if dtype not in held
    ]


def busy_line(machine: Machine, threads: int) -> str:
    """The groups that were measured beside others, in one line; empty where none was."""
    n_busy = len(machine.busy_groups(threads))
    n_groups = len(
        {
            name.split("/", 2)[2]
            for name in machine.groups
            if name.split("/", 2)[1:2] == [str(threads)]
        }
    )
    mends = "calibrating again when it is quiet mends them"
    return (
        f"the machine was busy while {n_busy} of {max(n_busy, n_groups)} groups were measured with"
        f" {threads} thread(s); {mends}"
        if n_busy
        else ""
    )


def was_busy(machine: Machine, threads: int) -> bool:
    """Whether so many groups were measured beside others (BUSY_SHARE) that the times with `threads`
    are too long throughout.
    """
    n_groups = len(
        {
            name.split("/", 2)[2]
            for name in machine.groups
            if name.split("/", 2)[1:2] == [str(threads)]
        }
    )
    n_busy = len(machine.busy_groups(threads))
    return n_busy > BUSY_SHARE * max(n_busy, n_groups)


def is_unfinished(machine: Machine) -> bool:
    """Whether a calibration was interrupted, or had no time for more than half of its points; a few
    less than planned cost little exactness.
    """
    n_planned = sum(one.n_planned for one in machine.coverage)
    n_left_out = n_planned - sum(one.n_measured for one in machine.coverage)
    return not machine.complete and not 0 < n_left_out <= 0.5 * n_planned


def find_problems(machine: Machine, cpu: Cpu, versions: dict[str, str]) -> list[str]:
    """Why a machine file should not be trusted here, one line each; empty if it can be.

    What decides is whether it is of this machine, complete, and passed its self-test. How far
    samples spread, how busy the machine was, and how well kernels are predicted from one another
    does not (:func:`find_remarks`): the self-test shows what comes of it.
    """
    found = find_mismatches(machine, cpu, versions)
    if is_unfinished(machine):
        found.append("the calibration did not finish; the same dlperf calibrate goes on with it")
    held = {"kernels": machine.kernels, "memory bandwidth": machine.bandwidths}
    if not any(held.values()):
        return [*found, "it holds no measurements; run dlperf calibrate"]
    found += [
        f"it holds no {name}; dlperf calibrate adds it" for name, part in held.items() if not part
    ]
    found += [
        f"it holds no costs {', '.join(names)}; dlperf calibrate adds them"
        for names in machine.missing_costs().values()
    ]
    return found + [
        problem
        for threads in machine.threads
        if (problem := self_test.find_problem(machine, threads))
    ]


def find_remarks(machine: Machine) -> list[str]:
    """What a reader of a machine file may want to know though it does not speak against it, one
    line each.
    """
    found = [
        busy_line(machine, threads) for threads in machine.threads if machine.busy_groups(threads)
    ]
    found += [
        coverage_line(machine, threads)
        for threads in machine.threads
        if machine.n_left_out(threads)
    ]
    found += [
        f"{family} with {threads} thread(s): predicting each kernel from the others is off by"
        f" {format_percent(error)}"
        for threads in machine.threads
        for family, error in machine.leave_one_out_errors(threads).items()
        if error > WORST_HELD_OUT_FRAC
    ]
    return [
        *found,
        *(f"it says itself: {note}" for note in machine.notes if "were running" in note),
    ]


# -- diff ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """Time in the second machine file / time in the first, of what both hold: the geometric mean
    over `n_shared` points, and its extremes.
    """

    what: str
    threads: int
    ratio: float
    low: float
    high: float
    n_shared: int


@dataclass(frozen=True)
class Difference:
    """How two machine files differ: `ratios` of what both hold, `notes` on what only one holds."""

    first: Machine
    second: Machine
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """A table; below 1 the second machine is faster."""
        rows = [
            [
                r.what,
                str(r.threads),
                f"{r.ratio:.3f}",
                f"{r.low:.3f}",
                f"{r.high:.3f}",
                str(r.n_shared),
            ]
            for r in self.ratios
        ]
        head = [
            (
                f"time in {self.second.path or 'the second'} / time in"
                f" {self.first.path or 'the first'}; below 1 the second is faster"
            )
        ]
        table = (
            _table(["what", "threads", "ratio", "least", "most", "points"], rows)
            if rows
            else ["nothing is in both"]
        )
        return "\n".join([*head, "", *table, *(f"note: {note}" for note in self.notes)])

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
    """Ratios of times by family, bandwidth level and cost, over what both files hold."""
    ratios = []
    theirs = {(k.op.signature, k.threads): k for k in second.kernels}
    shared: dict[tuple[str, int], list[float]] = {}
    for kernel in first.kernels:
        if other := theirs.get((kernel.op.signature, kernel.threads)):
            shared.setdefault((kernel.family, kernel.threads), []).append(
                other.samples.median / kernel.samples.median
            )
    ratios += [_ratio(name, threads, values) for (name, threads), values in sorted(shared.items())]
    for threads in sorted(set(first.threads) & set(second.threads)):
        ours, others = (
            {roof.level: roof for roof in roofs_of(machine, threads).bandwidths}
            for machine in (first, second)
        )
        for level in LEVELS:
            a, b = ours.get(level), others.get(level)
            if (
                a
                and b
                and (a.kernel in STREAM_BYTES_PER_ELEMENT) == (b.kernel in STREAM_BYTES_PER_ELEMENT)
            ):
                ratios.append(_ratio(f"memory {level}", threads, [a.bytes_per_s / b.bytes_per_s]))
    costs = {(c.name, c.threads): c.samples.minimum for c in second.costs}
    for cost in sorted(first.costs, key=lambda c: (c.name, c.threads)):
        other_s = costs.get((cost.name, cost.threads))
        if other_s and cost.samples.median:
            ratios.append(
                _ratio(f"cost {cost.name}", cost.threads, [other_s / cost.samples.median])
            )
    return Difference(first, second, tuple(ratios), tuple(_only_in_one(first, second)))


def _ratio(what: str, threads: int, values: Sequence[float]) -> Ratio:
    return Ratio(
        what, threads, math.exp(fmean(map(math.log, values))), min(values), max(values), len(values)
    )


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
            f"{len(a_keys - b_keys)} points are only in the first, {len(b_keys - a_keys)} only in"
            " the second"
        )


# -- text ------------------------------------------------------------------------------------------


def _siblings(cpu: Cpu) -> str:
    return (
        f" ({cpu.threads_per_core} hardware threads each of {cpu.n_physical_cores})"
        if cpu.threads_per_core > 1
        else ""
    )


def _thread_titles(threads: Iterable[int]) -> list[str]:
    return [f"{t} thread{'s' * (t != 1)}" for t in threads]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """Columns as wide as they need, the first to the left, the others to the right."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    aligned = [
        [
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths))
        ]
        for row in [head, *rows]
    ]
    return [("  " + "  ".join(row)).rstrip() for row in aligned]


def _numbers_apart(name: str) -> tuple[tuple[bool, int, str], ...]:
    """A key that sorts the numbers in a cost's name by size."""
    return tuple(
        (part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split("/")
    )


def _readable(name: str) -> str:
    """A cost's name with amounts of bytes as people write them.

    >>> _readable("cold/call/1048576"), _readable("optimizer_tensor/SGD/for-loop/3")
    ('cold/call after 1.00 MiB', 'optimizer_tensor/SGD/for-loop/3')
    """
    start, _, last = name.rpartition("/")
    return (
        f"{start} after {format_bytes(int(last))}"
        if name.startswith(("cold/", "churn/", CACHE_MISS_COSTS)) and last.isdigit()
        else name
    )

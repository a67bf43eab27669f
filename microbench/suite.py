"""The plan and its execution: fresh process per thread count, a file written after every group,
resume where it stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlperf.core import host
from dlperf.core.clock import LONG_CALL_S, SHORT_CALL_S, Samples, usual_factor
from dlperf.core.co_run import PREPARATION, operations_of
from dlperf.core.costs import (
    CONTENTION,
    CONTENTION_LONG,
    CONTENTION_MEAN,
    CORE_SPEED,
    Cost,
    CostKey,
)
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed
from dlperf.core.files import check_writable, schema_of
from dlperf.core.machine import SCHEMA, Bandwidth, Kernel, Machine
from dlperf.core.trace import Op, Trace
from dlperf.core.verification import Coverage, Disturbance
from dlperf.microbench.co_run import resources
from dlperf.microbench.plan import MODES
from dlperf.microbench.progress import Progress, progress_of
from dlperf.microbench.worker import (
    SYSTEM_GROUPS,
    environment,
    further_points,
    planned_groups,
    trace_group,
)

BUSY_SWITCHES_PER_S = 40.0
"""Involuntary context switches per second above which a group counts as disturbed: a co-tenant
takes the core every scheduler quantum (some 4 ms), an idle system a few times a second.
"""
BUSY_SWITCHES = 25
"""Fewer than so many in a group say nothing: a group may last a few milliseconds."""
_UNSTEADY_FRAC = 0.2
"""Share of a group's kernels that may be measured on a slow core alone before the group is said not
to be trusted.
"""
SAVE_EVERY_S = 0.5
"""How often the file is written while groups of kernels follow each other quickly; what is told by
then is written in the end, however that comes.
"""
_SHARING_WEIGHT = 50
_THREADS_A_CORE = 4
"""More threads than so many a core wait for each other for minutes, and tell nothing."""
_DEGREE = {"quick": 0, "full": 1, "thorough": 2}
_CRASHES = {
    int(number)
    for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
}
Choose = Callable[[Machine, int, Mapping[str, Sequence[Op]], int], Mapping[str, Sequence[int]]]
"""Given what was measured so far with a number of threads, operations by group and a number of
them: the places of those to measure as well, by group.
"""


def calibrate(
    path: str | Path,
    *,
    mode: str = "full",
    threads: Sequence[int] = (1,),
    traces: Sequence[Trace] = (),
    workers: Sequence[int] = (),
    force: bool = False,
    progress: bool | None = None,
    choose: Choose | None = None,
    refused: Callable[[Machine], bool] = lambda _: False,
) -> Machine:
    """Measure this machine into `path`: create the file, resume an interrupted one, or extend a
    finished one.

    `threads` are the thread counts, each in a process of its own; `traces` add their steps' exact
    operations. `workers` are numbers of processes with one thread each: what they cost one another
    when all of them work at once, the operations of `traces` included. What is finished stays in
    the file whatever happens. `progress` shows a bar on stderr (default: if that is a terminal,
    plain lines elsewhere). `choose` says which further points to take, beyond those of the plan. A
    file of this machine that is `refused` is measured anew.

    Raises DlperfError for an unknown mode, threads below 1 or above four a core, a file of another
    machine or torch, or not of dlperf (without `force`); WorkFailed when a worker dies or the disk
    refuses; Interrupted, which says what was kept, on Ctrl-C.
    """
    path = Path(path)
    if mode not in MODES:
        raise DlperfError(f"mode {mode!r} is unknown; known are {', '.join(MODES)}")
    for name, counts in (("threads", threads), ("workers", workers)):
        for count in counts:
            if count < 1:
                raise DlperfError(f"{name} is {count}; it must be at least 1")
    most = _THREADS_A_CORE * host.available_cores()
    if max(threads) > most and not force:
        raise DlperfError(
            f"threads is {max(threads)}, of {host.available_cores()} cores; give at most {most}, or"
            " --force"
        )
    machine = _start(path, mode, force)
    if refused(machine):
        log(f"{path} failed its self-test; measuring anew")
        machine = _fresh(mode)
    n_before = _n_busy(machine)
    if max(threads) > machine.cpu.n_cores:
        log(
            f"warning: {max(threads)} threads on {machine.cpu.n_cores} cores: they will wait for"
            " each other"
        )
    mends = (
        not traces and not workers
    )  # a calibration that is run again does; one that adds something does not
    work = [
        (count, _missing(machine, count, mode, traces, mends)) for count in dict.fromkeys(threads)
    ]
    shared = _missing_co_runs(machine, mode, traces, workers)
    if not any(groups for _, groups in work) and not shared:
        log(f"{path} holds all of this already; nothing to measure")
    elif machine.groups:
        n_left = sum(len(groups) for _, groups in work) + len(shared)
        log(f"{path} keeps {len(machine.groups)} measured groups; going on with {n_left} more")
    machine = _note_other_processes(machine)
    total = sum(weight for _, groups in work for _, weight in groups) + _SHARING_WEIGHT * len(
        shared
    )
    recorded = [trace.to_json() for trace in traces]
    finished: set[str] = set()
    try:
        with progress_of(total, "kernel", f"calibrating ({mode})", progress) as bar:
            for count, groups in work:
                if groups:
                    job = {
                        "threads": count,
                        "mode": mode,
                        "groups": [name for name, _ in groups],
                        "traces": recorded,
                        "core_speed_s": _best_core_speed_s(machine),
                        "asks": choose is not None,
                        "measured": _measured_places(
                            machine, count, mode, {name for name, _ in groups}
                        ),
                    }
                    machine = _run_workers(
                        machine,
                        path,
                        "dlperf.microbench.worker",
                        job,
                        dict(groups),
                        bar,
                        finished,
                        choose,
                    )
            if shared:
                own = dict(zip(map(_operations_of, traces), recorded))
                job = {
                    "threads": 1,
                    "mode": mode,
                    "groups": [[name, kind, own.get(kind), n] for name, kind, n in shared],
                }
                machine = _run_workers(
                    machine,
                    path,
                    "dlperf.microbench.co_run",
                    job,
                    {name: _SHARING_WEIGHT for name, _, _ in shared},
                    bar,
                    finished,
                )
    except KeyboardInterrupt:
        raise Interrupted(what_is_kept(path, len(finished))) from None
    machine = replace(
        machine,
        complete=not any(
            machine.n_left_out(count) for count in {one.threads for one in machine.coverage}
        ),
    )
    machine.save(path)
    n_busy = _n_busy(machine) - n_before
    if n_busy > 0:
        n_groups = sum(len(groups) for _, groups in work) + len(shared)
        log(
            f"warning: the machine was busy while {n_busy} of {n_groups} groups were measured;"
            " dlperf machine show names them, and calibrating anew when it is quiet mends them"
        )
    return machine


def what_is_kept(path: Path, n_groups: int) -> str:
    """What an interrupted or failed calibration leaves, for its one line."""
    if n_groups:
        return (
            f"{path} keeps {n_groups} finished group{'s' * (n_groups != 1)}, and the same command"
            " goes on from there"
        )
    return (
        "no group was finished, so"
        f" {f'{path} is as it was' if path.exists() else 'nothing was kept'}"
    )


def _n_busy(machine: Machine) -> int:
    return sum(
        len(machine.busy_groups(threads))
        for threads in {cost.threads for cost in machine.costs} | set(machine.threads)
    )


def log(text: str) -> None:
    """One line on stderr, above a progress bar if there is one."""
    tqdm.write(f"dlperf: {text}", file=sys.stderr)


def _fresh(mode: str) -> Machine:
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Machine(host.this_cpu(), mode=mode, versions=host.versions(), created=created)


def _start(path: Path, mode: str, force: bool) -> Machine:
    check_writable(path, force)
    fresh = _fresh(mode)
    if not path.exists() or path.stat().st_size == 0:
        return fresh
    found = schema_of(path)
    if found != SCHEMA:
        if force or found is not None:
            return fresh
        raise DlperfError(f"{path}: is no machine file; choose another name, or give --force")
    try:
        old = Machine.load(path)
    except DlperfError as error:
        if force:
            return fresh
        raise DlperfError(f"{error} Or give --force to measure anew.") from error
    if old.cpu.identity != fresh.cpu.identity:
        if force:
            return fresh
        raise DlperfError(
            f"{path}: is of another machine ({old.cpu.model}, {old.cpu.n_cores} cores); choose"
            " another name, or give --force to replace it"
        )
    if (
        old.versions.get("torch", "").partition("+")[0]
        != fresh.versions.get("torch", "").partition("+")[0]
    ):
        if force:
            log(
                f"{path} was made with torch {old.versions.get('torch')}; measuring anew with"
                f" {fresh.versions.get('torch')}"
            )
            return fresh
        raise DlperfError(
            f"{path}: was made with torch {old.versions.get('torch')}, this is torch"
            f" {fresh.versions.get('torch')}; choose another name (-o) to keep it, or give --force"
            " to replace it"
        )
    deeper = max(old.mode, mode, key=lambda name: _DEGREE.get(name, 0))
    return replace(old, mode=deeper, complete=False)


def _done_name(mode: str, threads: int, group: str) -> str:
    return f"{mode}/{threads}/{group}"


def _missing(
    machine: Machine, threads: int, mode: str, traces: Sequence[Trace], mends: bool
) -> list[tuple[str, int]]:
    """The groups still to measure, each with its weight in the progress bar; where it `mends`, what
    was measured on a busy machine, too.
    """
    planned: list[tuple[str, int]] = [(name, 0) for name in SYSTEM_GROUPS]
    kernels = planned_groups(mode, machine.cpu.flags)
    planned += [(group.name, len(group.points)) for group in kernels]
    exact = [trace_group(trace, mode) for trace in traces]
    planned += [(group.name, len(group.points)) for group in exact]
    # What was measured at this depth or deeper is not measured again.
    deep_enough = [m for m in MODES if _DEGREE[m] >= _DEGREE[mode]]
    done = set(machine.groups)
    if mends:
        done -= {
            _done_name(m, threads, name)
            for m in MODES
            for name, _ in planned
            if name in machine.busy_groups(threads)
        }
    # What there was no time for comes now.
    cut_short = {
        one.group
        for one in machine.coverage
        if one.threads == threads and one.n_measured < one.n_planned
    }
    done -= {_done_name(m, threads, name) for m in MODES for name in cut_short} if mends else set()
    # A file whose costs were cut out, or that an older version made, lacks what its groups should
    # have left.
    cut = {group.split()[0] for group in machine.missing_costs(threads=threads)} & set(
        SYSTEM_GROUPS
    )
    done -= {_done_name(m, threads, name) for m in MODES for name in cut}
    measured = _measured_places(machine, threads, mode, cut_short)
    missing = [
        (name, weight - len(measured.get(name, ())))
        for name, weight in planned
        if not any(_done_name(m, threads, name) in done for m in deep_enough)
    ]
    # What was never measured comes first, what is to be mended after it.
    return sorted(
        missing,
        key=lambda row: any(_done_name(m, threads, row[0]) in machine.groups for m in deep_enough),
    )


def _measured_places(
    machine: Machine, threads: int, mode: str, names: set[str]
) -> dict[str, list[int]]:
    """The places, by group, of the points that a group of these names has already, where it was cut
    short for want of time; others are measured anew.
    """
    cut_short = {
        one.group
        for one in machine.coverage
        if one.threads == threads and one.n_measured < one.n_planned
    } & names
    cut_short = {name for name in cut_short if _done_name(mode, threads, name) in machine.groups}
    cut_short -= {name for name in cut_short if name in machine.busy_groups(threads)}
    groups = [group for group in planned_groups(mode, machine.cpu.flags) if group.name in cut_short]
    return {
        group.name: [
            place
            for place, point in enumerate(group.points)
            if machine.exact(point.op.signature, threads)
        ]
        for group in groups
    }


def _note_other_processes(machine: Machine) -> Machine:
    running = _running_processes()
    if running <= 1:
        return machine
    note = (
        f"{running - 1} other process(es) were running when the measuring began; times may be too"
        " long"
    )
    log(f"warning: the machine is busy: {note}")
    return replace(machine, notes=(*machine.notes, note))


def _running_processes() -> int:
    """Runnable processes now, this one included; 1 where the system does not tell. The least of a
    few readings counts.
    """
    counts = []
    for _ in range(3):
        try:
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
        except (OSError, ValueError, IndexError):
            return 1
        time.sleep(0.05)
    return max(1, min(counts))


def _operations_of(trace: Trace) -> str:
    return operations_of(trace.target, trace.batch_size, trace.inference)


def _missing_co_runs(
    machine: Machine, mode: str, traces: Sequence[Trace], workers: Sequence[int]
) -> list[tuple[str, str, int]]:
    """What is still to measure of several workers at once: (group, kind of work, number of workers)
    each.
    """
    if not workers:
        return []
    numbers = sorted(set(workers))
    planned = [(PREPARATION, n) for n in numbers]
    planned += [
        (kind, n)
        for kind in (*resources(machine.cpu), *map(_operations_of, traces))
        for n in numbers
        if n > 1
    ]
    named = [(f"{kind} of {n} worker{'s' * (n > 1)}", kind, n) for kind, n in planned]
    deep_enough = [m for m in MODES if _DEGREE[m] >= _DEGREE[mode]]
    busy = set() if traces else {name for name, _, _ in named if name in machine.busy_groups(1)}
    return [
        row
        for row in named
        if row[0] in busy
        or not any(_done_name(m, 1, row[0]) in machine.groups for m in deep_enough)
    ]


def _best_core_speed_s(machine: Machine) -> float:
    return min((cost.value for cost in machine.costs_of(CORE_SPEED)), default=float("inf"))


@dataclass(eq=False)
class _Crashed(Exception):
    """A measuring process died of a signal that comes from within, while it measured `group`;
    `machine` holds what it had told, `ahead` what it had not.
    """

    name: str
    group: str
    machine: Machine
    ahead: tuple[str, ...]


def _run_workers(
    machine: Machine,
    path: Path,
    module: str,
    job: dict[str, Any],
    weights: dict[str, int],
    bar: Progress,
    finished: set[str],
    choose: Choose | None = None,
) -> Machine:
    """:func:`_run_worker`, in another process once more where one crashes: of thousands of kernels
    of torch and its libraries, called with odd shapes, one may write where it should not. Raises
    WorkFailed where the second crashes, too, before it has measured every group once.
    """
    for is_last in (False, True):
        try:
            return _run_worker(machine, path, module, job, weights, bar, finished, choose)
        except _Crashed as crash:
            died = f"the measuring process died of {crash.name} while it measured {crash.group}"
            if is_last and crash.ahead:
                raise WorkFailed(f"{died}; {what_is_kept(path, len(finished))}") from None
            note = f"{died} with {job['threads']} thread(s)"
            log(
                f"warning: {note};"
                f" {'another goes on' if crash.ahead else 'its groups have fewer samples'}"
            )
            machine = replace(crash.machine, notes=(*crash.machine.notes, note))
            weights = {name: weights[name] for name in crash.ahead}
            job = {
                **job,
                "groups": [
                    group
                    for group in job["groups"]
                    if (group if isinstance(group, str) else group[0]) in weights
                ],
            }
        if not weights:
            break
    return machine


def _run_worker(
    machine: Machine,
    path: Path,
    module: str,
    job: dict[str, Any],
    weights: dict[str, int],
    bar: Progress,
    finished: set[str],
    choose: Choose | None = None,
) -> Machine:
    """Run a measuring process for the groups of a job, write the file after each pass over one of
    them and add its name to `finished`. What further points the process asks for, `choose` says.
    """
    threads, names = job["threads"], list(weights)
    # A second measurement of disturbed groups: the least of both is nearer to an undisturbed
    # machine than either.
    spoilt = set(names) & set(machine.busy_groups(threads))
    before = machine
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **environment(threads)},
        text=True,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already: its status tells
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        what = f"{threads} thread{'s' if threads > 1 else ''}: "
        bar.begin(what + names[0])
        ahead, group, now_s = dict(weights), names[0], time.monotonic
        saved_s = now_s()
        for line in process.stdout:
            if not line.endswith("\n"):
                break  # the worker died while it wrote
            message = json.loads(line)
            if "progress" in message:
                bar.update(message["progress"])
                continue
            if "now" in message:
                group = message["now"]
                bar.begin(f"{what}{group}")
                continue
            if "wants" in message and choose is not None:
                pool = {
                    name: points
                    for name, points in further_points(job["mode"], machine.cpu.flags).items()
                    if name in weights
                }
                ops = {name: [point.op for point in points] for name, points in pool.items()}
                process.stdin.write(
                    json.dumps(
                        {
                            name: list(places)
                            for name, places in choose(
                                machine, threads, ops, message["wants"]
                            ).items()
                        }
                    )
                    + "\n"
                )
                process.stdin.flush()
                continue
            if "failed" in message:
                raise WorkFailed(f"{message['failed']}; {what_is_kept(path, len(finished))}")
            weight = ahead.pop(message["group"], 0)
            bar.update(
                weight if module == "dlperf.microbench.co_run" else 0
            )  # the others have told each of their points
            part = Machine.from_json(message["part"])
            if message["group"] in spoilt:
                part = replace(
                    part,
                    kernels=tuple(
                        _with_earlier(kernel, before.exact(kernel.op.signature, threads))
                        for kernel in part.kernels
                    ),
                )
            machine = _merge(
                machine,
                part,
                message,
                job["mode"],
                threads,
                len(job.get("measured", {}).get(message["group"], ())),
            )
            finished.add(_done_name(job["mode"], threads, message["group"]))
            if (
                now_s() - saved_s >= SAVE_EVERY_S
            ):  # writing a file of some MB beside the measuring process disturbs it
                machine.save(path)
                saved_s = now_s()
        if process.wait() == 130:
            raise KeyboardInterrupt
        if -process.returncode in _CRASHES:
            raise _Crashed(signal.Signals(-process.returncode).name, group, machine, tuple(ahead))
        if process.returncode != 0:
            raise WorkFailed(
                f"the measuring process ended with status {process.returncode};"
                f" {what_is_kept(path, len(finished))}"
            )
    finally:
        if finished:
            machine.save(path)
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if process.poll() is None:
            process.terminate()
            process.wait()
    return machine


def _with_earlier(kernel: Kernel, earlier: Kernel | None) -> Kernel:
    if earlier is None:
        return kernel
    return replace(kernel, samples=earlier.samples.joined(kernel.samples))


def _factors(kernels: Sequence[Kernel], message: dict[str, Any], threads: int) -> list[Cost]:
    """How much longer than at best this group's kernels usually took, and how much longer on
    average than usually.

    A step outlasts interference, so it takes what its kernels take on
    average; what its median does not see are the moments in which the core was taken away. All
    samples count alike: those of a kernel that was sampled until it was undisturbed are no average
    by themselves. Every group keeps its own: one that is measured later, at another moment, says
    nothing of the others.
    """
    above: dict[str, list[float]] = {"all": [], CONTENTION: [], CONTENTION_LONG: []}
    for wholes_s, kernel in zip(message["wholes_s"], kernels):
        if len(wholes_s) == len(kernel.samples.values) == 1:
            continue  # held against itself it says nothing
        if least_s := kernel.samples.minimum:
            factors = [whole_s / least_s for whole_s in wholes_s]
            above["all"] += factors
            if least_s < SHORT_CALL_S or least_s >= LONG_CALL_S:
                above[CONTENTION if least_s < SHORT_CALL_S else CONTENTION_LONG] += factors
    if not above["all"]:
        return []
    usual = {name: usual_factor(factors) for name, factors in above.items() if factors}
    mean = statistics.fmean(above["all"]) / usual.pop("all")
    return [
        Cost(CostKey(name, message["group"]), threads, Samples((value,)))
        for name, value in (usual | {CONTENTION_MEAN: mean}).items()
    ]


def _merge(
    machine: Machine,
    part: Machine,
    message: dict[str, Any],
    mode: str,
    threads: int,
    n_before: int = 0,
) -> Machine:
    """The machine with what a message tells of a group of which `n_before` points were measured
    before.
    """
    group = message["group"]
    notes = list(machine.notes)
    switches_per_s = message["switches"] / message["seconds"]
    n_kernels = len(part.kernels)
    was_taken = message["switches"] >= BUSY_SWITCHES and switches_per_s > BUSY_SWITCHES_PER_S
    is_unsteady = message["unsteady"] > _UNSTEADY_FRAC * n_kernels
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
                n_kernels,
            )
        )
    coverage = {(one.group, one.threads): one for one in machine.coverage}
    if n_kernels:
        coverage[group, threads] = Coverage(
            group, threads, n_before + n_kernels, n_before + n_kernels + message["left_out"]
        )
    if message["refused"]:
        notes.append(
            f"{message['group']}: not measured: {'; '.join(sorted(set(message['refused'])))}"
        )
    bandwidths: dict[tuple[str, int, int], Bandwidth] = {
        (b.kernel, b.threads, b.working_set_bytes): b
        for b in (*machine.bandwidths, *part.bandwidths)
    }
    footprints = {
        footprint.name: footprint for footprint in (*machine.footprints, *part.footprints)
    }
    co_runs = {
        (co_run.work, co_run.workers): co_run for co_run in (*machine.co_runs, *part.co_runs)
    }
    costs = {
        (c.key, c.threads): c
        for c in (*machine.costs, *part.costs, *_factors(part.kernels, message, threads))
    }
    return replace(
        machine.with_kernels(part.kernels),
        bandwidths=tuple(bandwidths.values()),
        costs=tuple(costs.values()),
        footprints=tuple(footprints.values()),
        co_runs=tuple(co_runs.values()),
        coverage=tuple(coverage.values()),
        groups=tuple(dict.fromkeys((*machine.groups, _done_name(mode, threads, group)))),
        notes=tuple(dict.fromkeys(notes)),
        disturbances=tuple(disturbances),
        self_tests=tuple(
            test for test in machine.self_tests if test.threads != threads
        ),  # the file is another now
    )

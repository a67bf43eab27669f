"""The execution of a calibration's plan: fresh process per thread count, a file written after every
group, resume where it stopped.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dlperf.core import host
from dlperf.core.child_process import INTERRUPTED, Child
from dlperf.core.costs import CORE_SPEED
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed
from dlperf.core.files import check_writable, schema_of
from dlperf.core.machine import SCHEMA, Machine
from dlperf.core.machine_doubts import busy_line, has_failed_with, join_threads
from dlperf.core.readings import with_readings
from dlperf.core.text import counted
from dlperf.core.trace import Op, Trace
from dlperf.microbench.co_run import WEIGHT
from dlperf.microbench.plan import MODES
from dlperf.microbench.progress import Progress, progress_of
from dlperf.microbench.remaining import (
    done_name,
    measured_points,
    missing_co_runs,
    missing_groups,
    recorded_operations,
    to_join,
)
from dlperf.microbench.results import merged, without
from dlperf.microbench.worker import environment, further_points
from dlperf.ops.reference_state import at_reference

SAVE_EVERY_S = 0.5
"""How often the file is written while groups of kernels follow each other quickly; results that
have arrived by then are written in the end, however that comes.
"""
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
Choose = Callable[[Machine, int, Mapping[str, Sequence[Op]], int], Mapping[str, Sequence[int]]]
"""Given what was measured so far with a number of threads, operations by group and a number of
them: the indices of those to measure as well, by group.
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
    refused: Callable[[Machine], str] = lambda _: "",
    running: int | None = None,
) -> Machine:
    """Measure this machine into `path`: create the file, resume an interrupted one, extend a
    finished one, or measure anew those of the thread counts that failed their self-test.

    `threads` are the thread counts, each in a process of its own; `traces` add their steps' exact
    operations. `workers` are numbers of processes with one thread each: what they cost one another
    when all of them work at once, the operations of `traces` included. What is finished stays in
    the file whatever happens; what is measured anew replaces the former measurement once it is
    whole. `progress` shows a bar on stderr (default: if that is a terminal, plain lines elsewhere).
    `choose` returns further points to take, beyond those of the plan. A file of this machine is
    measured anew as a whole where `refused` returns a reason. `running` is what
    :func:`dlperf.core.host.running_processes` said before the caller started others of its own.

    Raises DlperfError for an unknown mode, threads below 1 or above four a core, a file of another
    machine or torch, or not of dlperf (without `force`); WorkFailed when a worker dies or the disk
    refuses; Interrupted, which names what was kept, on Ctrl-C.
    """
    path = Path(path)
    _check(mode, threads, workers, force)
    former = _start(path, mode, force)
    reason = refused(former)
    anew = [one for one in dict.fromkeys(threads) if reason or has_failed_with(former, one)]
    machine = _fresh(mode) if reason else _without(former, anew, mode)
    if max(threads) > machine.cpu.n_cores:
        log(
            f"warning: {max(threads)} threads on {machine.cpu.n_cores} cores: they will wait for"
            " each other"
        )
    # A calibration that is run again goes on where one was cut short, and mends disturbed groups;
    # one that adds something does neither, and one that was interrupted has none to mend.
    goes_on = not traces and not workers
    tested = {test.threads for test in machine.self_tests}
    mends = goes_on and tested.issuperset(threads)
    # What is measured anew comes first: the file is not written before it is whole.
    in_order = sorted(threads, key=lambda count: count not in anew)
    work = {
        count: missing_groups(machine, count, mode, traces, goes_on, mends) for count in in_order
    }
    shared = missing_co_runs(machine, mode, traces, workers)
    n_groups = sum(map(len, work.values())) + len(shared)
    planned = {done_name(mode, count, name) for count in work for name, _ in work[count]}
    if reason or anew:
        why = reason or f"failed its self-test with {join_threads(anew)}"
        log(f"{path} {why}; measuring {'all' if reason else 'that'} anew")
        if lost := _left_out(former, machine, planned):
            log(f"warning: the file will no longer hold {lost}")
    if not n_groups:
        log(f"{path} holds all of this already; nothing to measure")
    elif machine.groups:
        n_kept, n_again = len(machine.groups), len(planned.intersection(machine.groups))
        again = f", and with {n_again} of these, which want more samples" if n_again else ""
        log(
            f"{path} keeps {counted(n_kept, 'measured group')}; going on with"
            f" {n_groups - n_again} more{again}"
        )
    running = host.running_processes() if running is None else running
    machine = _note_other_processes(machine, running)
    total = sum(weight for groups in work.values() for _, weight in groups)
    recorded = [trace.to_json() for trace in traces]
    with progress_of(
        total + WEIGHT * len(shared), "kernel", f"calibrating ({mode})", progress
    ) as bar:
        held = {name for name in planned if int(name.split("/", 2)[1]) in anew}
        measuring = _Measuring(path, mode, bar, machine, held)
        try:
            for count, groups in work.items():
                names = {name: name for name, _ in groups}
                speeds = [cost.value for cost in measuring.machine.costs_of(CORE_SPEED)]
                job = {
                    "traces": recorded,
                    "core_speed_s": min(speeds, default=float("inf")),
                    "asks": choose is not None,
                    "measured": measured_points(machine, count, mode, set(names)),
                }
                measuring.run("dlperf.microbench.worker", count, job, names, choose)
            own = dict(zip(map(recorded_operations, traces), recorded))
            co_runs = {name: [name, kind, own.get(kind), n] for name, kind, n in shared}
            measuring.run("dlperf.microbench.co_run", 1, {}, co_runs)
        except KeyboardInterrupt:
            raise Interrupted(measuring.what_is_kept) from None
    machine = measuring.machine
    counts = {one.threads for one in machine.coverage}
    machine = replace(machine, complete=not any(map(machine.n_left_out, counts)))
    machine = with_readings(at_reference(machine), ())
    machine.save(path)
    for count in work:
        if told := busy_line(machine, count):
            log(f"warning: {told}")
    return machine


def _check(mode: str, threads: Sequence[int], workers: Sequence[int], force: bool) -> None:
    if mode not in MODES:
        raise DlperfError(f"mode {mode!r} is unknown; known are {', '.join(MODES)}")
    for name, counts in (("threads", threads), ("workers", workers)):
        least = min(counts, default=1)
        if least < 1:
            raise DlperfError(f"{name} is {least}; it must be at least 1")
    if not force:
        host.check_threads(max(threads), ", or --force")


def what_is_kept(path: Path, n_groups: int) -> str:
    """What an interrupted or failed calibration leaves, for its one line."""
    if n_groups:
        return (
            f"{path} keeps {counted(n_groups, 'finished group')}, and the same command"
            " goes on from there"
        )
    return (
        "no group was finished, so"
        f" {f'{path} is as it was' if path.exists() else 'nothing was kept'}"
    )


def log(text: str) -> None:
    """One line on stderr, above a progress bar if there is one."""
    tqdm.write(f"dlperf: {text}", file=sys.stderr)


# -- the file so far -------------------------------------------------------------------------------


def _fresh(mode: str) -> Machine:
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Machine(host.this_cpu(), mode=mode, versions=host.versions(), created=created)


def _start(path: Path, mode: str, force: bool) -> Machine:
    check_writable(path, force, SCHEMA)
    fresh = _fresh(mode)
    if not path.exists() or path.stat().st_size == 0:
        return fresh
    if schema_of(path) not in (None, SCHEMA):
        return fresh
    try:
        old = _load(path, fresh, force)
    except DlperfError:
        if force:
            return fresh
        raise
    deeper = max(old.mode, mode, key=lambda name: MODES.index(name) if name in MODES else 0)
    return replace(old, mode=deeper, complete=False)


def _load(path: Path, fresh: Machine, force: bool) -> Machine:
    """The file's machine. Raises DlperfError where it is not this one with this torch."""
    if schema_of(path) is None:
        raise DlperfError(f"{path}: is no machine file; choose another name, or give --force")
    try:
        old = Machine.load(path)
    except DlperfError as error:
        problem = str(error).removesuffix(".")
        raise DlperfError(f"{problem}. Or give --force to measure anew.") from error
    if old.cpu.identity != fresh.cpu.identity:
        raise DlperfError(
            f"{path}: is of another machine ({old.cpu.model}, {old.cpu.n_cores} cores); choose"
            " another name, or give --force to replace it"
        )
    theirs, ours = (machine.versions.get("torch", "") for machine in (old, fresh))
    if theirs.partition("+")[0] != ours.partition("+")[0]:
        if force:
            log(f"{path} was made with torch {theirs}; measuring anew with {ours}")
        raise DlperfError(
            f"{path}: was made with torch {theirs}, this is torch {ours}; choose another name (-o)"
            " to keep it, or give --force to replace it"
        )
    return old


def _without(machine: Machine, threads: Sequence[int], mode: str) -> Machine:
    """The machine without what was measured with these thread counts. Where no kernel is left, the
    next calibration defines the reference.
    """
    rest = without(machine, threads) if threads else machine
    if rest.kernels or not machine.kernels:
        return rest
    return replace(_fresh(mode), co_runs=rest.co_runs, groups=rest.groups)


def _left_out(former: Machine, machine: Machine, planned: set[str]) -> str:
    """What a file loses by a measurement anew: thread counts, and groups of other plans."""
    threads = {name.split("/", 2)[1] for name in {*planned, *machine.groups}}
    lost = [count for count in former.threads if str(count) not in threads]
    again = {name.split("/", 2)[2] for name in {*planned, *machine.groups}}
    groups = dict.fromkeys(name.split("/", 2)[2] for name in former.groups)
    found = [f"what was measured with {join_threads(lost)}"] if lost else []
    return ", ".join([*found, *(name for name in groups if name not in again)])


def _note_other_processes(machine: Machine, running: int) -> Machine:
    if running <= 1:
        return machine
    others = "1 other process was" if running == 2 else f"{running - 1} other processes were"
    note = f"{others} running when the measuring began; times may be too long"
    log(f"warning: the machine is busy: {note}")
    return replace(machine, notes=(*machine.notes, note))


# -- the measuring processes -----------------------------------------------------------------------


@dataclass
class _Measuring:
    """What was measured so far, the names of the groups `finished` now, and of those that are
    measured anew and have no result yet: the file is written without any `held`.
    """

    path: Path
    mode: str
    bar: Progress
    machine: Machine
    held: set[str]
    finished: set[str] = field(default_factory=set)

    def run(
        self,
        module: str,
        threads: int,
        job: dict[str, Any],
        groups: dict[str, Any],
        choose: Choose | None = None,
    ) -> None:
        """Measure groups, given by name as the job's `module` reads them, in a process of its own;
        in another once more where that crashes: of thousands of kernels of torch and its libraries,
        called with odd shapes, one may write where it should not.

        Raises WorkFailed where the second crashes, too, before it has measured every group once.
        """
        is_last = False
        while groups:
            message = {**job, "threads": threads, "mode": self.mode, "groups": [*groups.values()]}
            message["n_readings"] = len(self.machine.readings)
            ahead = list(groups)
            died = self._run_process(module, message, ahead, choose)
            if not died:
                return
            if is_last and ahead:
                raise WorkFailed(f"{died}; {self.what_is_kept}")
            note = f"{died} with {counted(threads, 'thread')}"
            log(
                f"warning: {note};"
                f" {'another goes on' if ahead else 'its groups have fewer samples'}"
            )
            self.machine = replace(self.machine, notes=(*self.machine.notes, note))
            groups = {name: groups[name] for name in ahead}
            is_last = True

    @property
    def what_is_kept(self) -> str:
        """What the file keeps now, for the one line of an interrupted or failed calibration."""
        if self.held:
            return f"{self.path} is as it was, and the same command measures it anew"
        return what_is_kept(self.path, len(self.finished))

    def _run_process(
        self, module: str, job: dict[str, Any], ahead: list[str], choose: Choose | None
    ) -> str:
        """Run a measuring process for a job, write the file after each pass over a group, and
        remove from `ahead` the groups that have a result. How it died, if a signal from within
        ended it.
        """
        threads, group, before = job["threads"], ahead[0], self.machine
        what = f"{counted(threads, 'thread')}: "
        self.bar.set_postfix_str(what + group)
        saved_s = time.monotonic()
        variables = {**os.environ, **environment(threads)}
        with Child(module, environment=variables, stderr=None) as process:
            try:
                process.write(json.dumps(job))
                for line in process.stdout or ():
                    if not line.endswith("\n"):
                        break  # the process died while it wrote
                    message = json.loads(line)
                    if "progress" in message:
                        self.bar.update(message["progress"])
                    elif "now" in message:
                        group = message["now"]
                        self.bar.set_postfix_str(what + group)
                    elif "wants" in message and choose is not None:
                        chosen = self._chosen(choose, job, message["wants"])
                        process.write(json.dumps(chosen))
                    elif "failed" in message:
                        raise WorkFailed(f"{message['failed']}; {self.what_is_kept}")
                    else:
                        self._merge(message, job, before)
                        if message["group"] in ahead:
                            ahead.remove(message["group"])
                        # Writing a file of some MB disturbs the measuring process.
                        if not self.held and time.monotonic() - saved_s >= SAVE_EVERY_S:
                            self.machine.save(self.path)
                            saved_s = time.monotonic()
                status = process.wait()
            finally:
                if self.finished and not self.held:
                    self.machine.save(self.path)
                process.stop()
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if -status in _CRASHES:
            name = signal.Signals(-status).name
            return f"the measuring process died of {name} while it measured {group}"
        if status:
            raise WorkFailed(
                f"the measuring process ended with status {status}; {self.what_is_kept}"
            )
        return ""

    def _chosen(self, choose: Choose, job: dict[str, Any], n_ops: int) -> dict[str, list[int]]:
        """The indices of further points, by group of the job."""
        ops = {
            name: [point.op for point in points]
            for name, points in further_points(self.mode, self.machine.cpu.flags).items()
            if name in job["groups"]
        }
        chosen = choose(self.machine, job["threads"], ops, n_ops)
        return {name: list(indices) for name, indices in chosen.items()}

    def _merge(self, message: dict[str, Any], job: dict[str, Any], before: Machine) -> None:
        threads, group = job["threads"], message["group"]
        earlier = before if group in to_join(before, threads) else None
        n_before = len(job.get("measured", {}).get(group, ()))
        machine = merged(self.machine, message, threads, earlier, n_before)
        name = done_name(self.mode, threads, group)
        self.machine = replace(machine, groups=tuple(dict.fromkeys((*machine.groups, name))))
        self.finished.add(name)
        self.held.discard(name)

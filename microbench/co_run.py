"""What workers that run at once cost one another: p processes of one thread each against one alone,
for every kind of work.

``python -m dlperf.microbench.co_run`` reads a job from stdin and writes JSON lines, as
:mod:`dlperf.microbench.worker` does; the suite alone starts it. It starts as many processes as
workers were asked for, and lets them work in turns: one alone, then p at once, which a barrier
starts together. A window is long against the scheduler's quanta, and only what lies well inside it
counts, where all p are busy. More workers than cores take turns, which is in what they measure:
their share of the processors, what switching costs, and caches that others emptied.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from threading import BrokenBarrierError
from typing import Any

from dlperf.core import host
from dlperf.core.clock import Clock, Samples, involuntary_switches, timed
from dlperf.core.co_run import PREPARATION, CoRun
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Cpu, Machine
from dlperf.microbench.job import Say, do_job

WEIGHT = 50
"""Of a group, in kernels of a calibration's progress."""
ROUNDS = {"quick": 3, "full": 7, "thorough": 15}
"""How often one alone and all together are measured in turns."""
WINDOW_S = {"quick": 0.1, "full": 0.2, "thorough": 0.5}
_MARGIN_FRAC = 0.1
"""The first and the last tenth of a window do not count: a process may be a few quanta late."""
_BATCH_S = 1e-3
"""Length of a batch of calls between two readings of the clock."""
_CALLS_A_WINDOW = 6
LIMIT_S = 120.0
"""Longer than any answer of a worker should take beyond its window; then the run is given up."""
_LOOK_S = 0.005
_STARTS = {"quick": 1, "full": 2, "thorough": 5}
"""How often processes are started to see what their preparation takes."""


class WorkerDied(WorkFailed):
    """A worker ended or did not answer; the message is one line."""


def resources(cpu: Cpu) -> list[str]:
    """What is measured on a processor: the bounds of items, without the caches that it is not known
    to have.
    """
    caches = [level for level, size in zip(("L1", "L2", "L3"), cpu.caches_bytes) if size]
    return ["compute", *caches, "DRAM", "overhead", "page-faults"]


# -- in a worker -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Whole batches of calls that lay well inside a window: how many calls, and their seconds."""

    n_calls: int
    seconds: float
    switches: int = 0


def time_window(
    call: Callable[[], object], batch: int, window_s: float, clock: Clock = Clock()
) -> Window:
    """Call until the window is over and one batch at least lay inside it, whatever happens to be
    counted.
    """
    begin = clock.now()
    opens, closes, end = (
        begin + _MARGIN_FRAC * window_s,
        begin + (1 - _MARGIN_FRAC) * window_s,
        begin + window_s,
    )
    switches = clock.switches()
    first = last = begin
    n_calls = n_before = 0
    while True:
        for _ in range(batch):
            call()
        now = clock.now()
        if now < opens:
            first, n_before = now, n_before + batch
        elif now <= closes or not n_calls:
            last, n_calls = now, n_calls + batch
        if now >= end and n_calls:
            return Window(n_calls, last - first, clock.switches() - switches)


def serve(place: int, connection: Connection, barriers: dict[int, Any], cpu: Cpu) -> None:
    """A worker: does what it is told until it hears nothing more."""
    import torch

    from dlperf.microbench import kinds

    torch.set_num_threads(1)
    torch.manual_seed(place)
    call: Callable[[], object] = lambda: None  # noqa: E731
    try:
        while True:
            what, *details = connection.recv()
            if what == "make":
                work, recorded = details
                del call
                call = (
                    kinds.make(work, cpu, max(barriers))
                    if recorded is None
                    else kinds.make_operations(recorded)
                )
                connection.send(warm_s(call))
            else:
                workers, batch, window_s = details
                barriers[workers].wait(LIMIT_S)
                connection.send(time_window(call, batch, window_s))
    except (EOFError, KeyboardInterrupt, BrokenBarrierError, OSError):
        return  # whoever listened is gone, and has said why
    except Exception as error:  # what cannot be made or called; the leader says it in a line
        connection.send(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        )


def warm_s(call: Callable[[], object], now: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of a call that is no first one."""
    clock = Clock(now, lambda: 0)
    return min([timed(call, clock)[0] for _ in range(4)][1:])


def batch_of(call_s: float) -> int:
    """Calls in a batch of about a millisecond, at least one."""
    return max(1, round(_BATCH_S / call_s)) if call_s > 0 else 1


def window_s_of(call_s: float, least_s: float, n: int, n_cores: int) -> float:
    """The window in seconds, `least_s` or longer, that holds several calls of each of `n`
    processes, which take turns where there are fewer cores.
    """
    return max(least_s, _CALLS_A_WINDOW * call_s * max(1.0, n / n_cores))


def _be_ready(barrier: Any) -> None:
    """What a worker of a training does before its first step, as far as it is the same for all
    trainings: then it meets the others.
    """
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    torch.optim.SGD(
        model.parameters(), lr=0.1
    )  # the first optimizer of a process imports what it may compile with
    DataLoader([0])  # type: ignore[arg-type]
    barrier.wait(LIMIT_S)


# -- in the process that leads ---------------------------------------------------------------------


class Pool:
    """Started workers, and how they are told what to do."""

    def __init__(self, numbers: tuple[int, ...], cpu: Cpu) -> None:
        spawning, n = multiprocessing.get_context("spawn"), max(numbers)
        self.barriers = {
            p: spawning.Barrier(p) for p in {1, *numbers}
        }  # kept: a worker that still starts finds them by name
        self.cpu, self.work, self.workers = cpu, "", n
        self.processes, self.connections = [], []
        for index in range(n):
            here, there = spawning.Pipe()
            process = spawning.Process(
                target=serve, args=(index, there, self.barriers, cpu), daemon=True
            )
            process.start()
            there.close()  # so that the pipe ends with the worker
            self.processes.append(process)
            self.connections.append(here)

    def _ask(self, places: list[int], message: tuple[Any, ...], limit_s: float) -> list[Any]:
        """The answers of some workers. Raises WorkerDied where one ends or none comes in time."""
        found: dict[int, Any] = {}
        try:
            for index in places:
                self.connections[index].send(message)
            end = time.monotonic() + limit_s
            while waiting := [index for index in places if index not in found]:
                ready = wait(
                    [self.connections[index] for index in waiting], max(0.0, end - time.monotonic())
                )
                if not ready:
                    raise WorkerDied(
                        f"{len(waiting)} of {self.workers} workers did not answer within"
                        f" {limit_s:.0f} s, busy with {self.work}"
                    )
                for index in waiting:
                    if self.connections[index] in ready:
                        found[index] = self.connections[index].recv()
                        if isinstance(found[index], str):
                            raise WorkerDied(
                                f"worker {index} of {self.workers} failed, busy with {self.work}:"
                                f" {found[index]}"
                            )
        except (EOFError, OSError) as error:
            index = next(
                (index for index in places if index not in found and self._has_ended(index)),
                places[0],
            )
            process = self.processes[index]
            raise WorkerDied(
                f"worker {index} of {self.workers} (process {process.pid}) ended with status"
                f" {process.exitcode}, busy with {self.work}"
            ) from error
        return [found[index] for index in places]

    def _has_ended(self, place: int) -> bool:
        self.processes[place].join(1)  # its pipe may end a moment before it does
        return not self.processes[place].is_alive()

    def make(self, work: str, recorded: dict[str, Any] | None, workers: int) -> float:
        """Have `workers` of them get ready for a kind of work, or for a trace's operations; seconds
        of a call where no others run.
        """
        self.work, self.workers = work, workers
        self._ask(list(range(1, workers)), ("make", work, recorded), LIMIT_S)
        (call_s,) = self._ask([0], ("make", work, recorded), LIMIT_S)
        return float(call_s)

    def run(self, places: list[int], batch: int, window_s: float) -> tuple[float, int]:
        """Seconds a call, the mean over the workers at these places, which do it at once; and how
        often they lost a core.
        """
        windows: list[Window] = self._ask(
            places, ("run", len(places), batch, window_s), LIMIT_S + 10 * window_s
        )
        return sum(w.seconds for w in windows) / sum(w.n_calls for w in windows), sum(
            w.switches for w in windows
        )

    def close(self) -> None:
        """End all workers."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def measure(
    team: Any, work: str, recorded: dict[str, Any] | None, workers: int, mode: str
) -> tuple[CoRun, int, float]:
    """One kind of work by `workers` at once against one alone; how often the one lost its core, and
    in how many seconds.
    """
    call_s = team.make(work, recorded, workers)
    batch = batch_of(call_s)
    window_s, together_s = (
        window_s_of(call_s, WINDOW_S[mode], n, team.cpu.n_cores) for n in (1, workers)
    )
    together, alone, switches = [], [], 0
    for number in range(ROUNDS[mode]):
        seconds, lost = team.run([number % workers], batch, window_s)
        alone.append(seconds)
        switches += lost
        together.append(team.run(list(range(workers)), batch, together_s)[0])
    return (
        CoRun(work, workers, Samples(tuple(together)), Samples(tuple(alone))),
        switches,
        ROUNDS[mode] * window_s,
    )


def measure_preparation(workers: int, mode: str, start: Callable[[int], float]) -> CoRun:
    """What starting `workers` processes takes, and what starting one does."""
    pairs = [(start(1), start(workers) if workers > 1 else 0.0) for _ in range(_STARTS[mode])]
    alone = Samples(tuple(one for one, _ in pairs))
    return CoRun(
        PREPARATION,
        workers,
        Samples(tuple(all_of for _, all_of in pairs)) if workers > 1 else alone,
        alone,
    )


def start_s(workers: int, target: Callable[[Any], None] = _be_ready) -> float:
    """Seconds from the start of spawned processes until all of them are ready to train. Raises
    WorkerDied where one is not.
    """
    spawning = multiprocessing.get_context("spawn")
    barrier = spawning.Barrier(workers + 1)
    begin = time.perf_counter()
    processes = [
        spawning.Process(target=target, args=(barrier,), daemon=True) for _ in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        while barrier.n_waiting < workers:
            if (
                wait([process.sentinel for process in processes], _LOOK_S)
                or time.perf_counter() - begin > LIMIT_S
            ):
                raise WorkerDied(
                    f"one of {workers} workers ended while they were started, or they took longer"
                    f" than {LIMIT_S:.0f} s"
                )
        seconds = time.perf_counter() - begin
        barrier.wait(LIMIT_S)
        for process in processes:
            process.join(LIMIT_S)
        return seconds
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run(job: dict[str, Any], say: Say) -> None:
    """Measure the groups of a job: [name, work, a trace or null, workers] each."""
    cpu, mode = host.this_cpu(), job["mode"]
    at_once = [workers for _, work, _, workers in job["groups"] if work != PREPARATION]

    def tell(name: str, co_run: CoRun, switches: int, seconds: float) -> None:
        part = Machine(cpu, co_runs=(co_run,)).to_json()
        say({"progress": WEIGHT})
        of_kernels = {"refused": [], "unsteady": 0, "left_out": 0, "sampled_once": False}
        measured = {"switches": switches, "seconds": seconds}
        say({"group": name, "part": part, **measured, **of_kernels})

    for name, work, _, workers in job["groups"]:
        if work == PREPARATION:
            switches, begin = involuntary_switches(), time.perf_counter()
            co_run = measure_preparation(workers, mode, start_s)
            tell(name, co_run, involuntary_switches() - switches, time.perf_counter() - begin)
    if at_once:
        with closing(Pool(tuple(at_once), cpu)) as team:
            for name, work, recorded, workers in job["groups"]:
                if work != PREPARATION:
                    tell(name, *measure(team, work, recorded, workers, mode))


if __name__ == "__main__":
    sys.exit(do_job(run))

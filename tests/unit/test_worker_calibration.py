"""What workers cost one another, measured with made-up clocks and teams; and once with real
processes, one of which dies.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrated_cases import mm, relu, trace

from dlperf.core import host
from dlperf.core.clock import Clock, Samples
from dlperf.core.co_run import PREPARATION, CoRun
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Cpu, Machine
from dlperf.core.trace import Trace
from dlperf.microbench import co_run, remaining, suite
from dlperf.microbench.co_run import (
    Pool,
    Window,
    WorkerDied,
    measure,
    measure_preparation,
    resources,
    run,
    time_window,
)
from dlperf.microbench.plan import Group

CPU = Cpu("Made-up CPU", 2, (2**15, 2**20, 2**25), n_physical_cores=2)


class Ticking:
    """A clock whose time passes in calls alone, `seconds` each."""

    def __init__(self, seconds: float) -> None:
        self.time, self.seconds, self.n_calls = 0.0, seconds, 0

    def call(self) -> None:
        self.time += self.seconds
        self.n_calls += 1

    def clock(self) -> Clock:
        return Clock(lambda: self.time, lambda: self.n_calls // 10)


def test_only_what_lies_well_inside_a_window_counts() -> None:
    ticking = Ticking(0.5)
    # batches of two calls end at 1, 2, ..., 30; what ended before 3 and after 27 does not count: 25
    # batches from 2 to 27
    assert time_window(ticking.call, 2, 30.0, ticking.clock()) == Window(50, 25.0, 6)


def test_a_batch_longer_than_the_window_counts() -> None:
    ticking = Ticking(40.0)
    assert time_window(ticking.call, 1, 30.0, ticking.clock()) == Window(1, 40.0, 0)


class Team:
    """Stands for a pool: alone a call takes 2 ms, with others 1 ms more for each of them; a
    neighbour makes every other pair take twice as long.
    """

    def __init__(self, call_s: float = 2e-3) -> None:
        self.cpu, self.call_s, self.runs = CPU, call_s, []  # type: ignore[var-annotated]

    def make(self, work: str, recorded: dict[str, Any] | None, n: int) -> float:
        return self.call_s

    def run(self, places: list[int], batch: int, window_s: float) -> tuple[float, int]:
        self.runs.append((tuple(places), batch, window_s))
        disturbed = 1 + ((len(self.runs) - 1) // 2) % 2
        return disturbed * (2e-3 + 1e-3 * (len(places) - 1)), 3


def test_one_alone_and_all_at_once_take_turns() -> None:
    team = Team()
    found, switches, seconds = measure(team, "compute", None, 3, "quick")
    assert found.slowdown == pytest.approx(4e-3 / 2e-3)
    assert len(found.samples.values) == len(found.alone.values) == co_run.ROUNDS["quick"]
    assert [indices for indices, *_ in team.runs] == [
        (0,),
        (0, 1, 2),
        (1,),
        (0, 1, 2),
        (2,),
        (0, 1, 2),
    ]  # each alone in its turn
    assert (switches, seconds) == (
        9,
        pytest.approx(3 * co_run.WINDOW_S["quick"]),
    )  # those of the one alone: that others take turns is no disturbance


def test_windows_hold_several_calls_and_batches_a_millisecond() -> None:
    long, short = Team(call_s=2.0), Team(call_s=1e-5)
    measure(long, "operations of big@1 (step)", None, 4, "quick")
    assert {(len(indices), batch, window_s) for indices, batch, window_s in long.runs} == {
        (1, 1, 12.0),
        (4, 1, 24.0),
    }  # 2 cores: 4 take turns
    measure(short, "overhead", None, 2, "quick")
    assert {batch for _, batch, _ in short.runs} == {100}


def test_preparation_is_measured_beside_one_alone() -> None:
    found = measure_preparation(4, "full", lambda n: 2.0 + n)
    assert (found.samples.values, found.alone.values) == ((6.0, 6.0), (3.0, 3.0))
    assert measure_preparation(1, "quick", lambda n: 2.0 + n) == CoRun(
        PREPARATION, 1, Samples((3.0,)), Samples((3.0,))
    )


def test_only_the_caches_that_are_there() -> None:
    assert resources(CPU) == ["compute", "L1", "L2", "L3", "DRAM", "overhead", "page-faults"]
    assert resources(replace(CPU, caches_bytes=(2**15, 2**20, 0))) == [
        "compute",
        "L1",
        "L2",
        "DRAM",
        "overhead",
        "page-faults",
    ]


# -- the suite -------------------------------------------------------------------------------------


ANSWER = {
    "switches": 0,
    "seconds": 1.0,
    "refused": [],
    "unsteady": 0,
    "left_out": 0,
    "sampled_once": False,
}


class Leader:
    """Stands for the measuring process: answers every group, or fails at the one called `failing`."""

    jobs: list[dict[str, Any]]
    failing = ""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.lines: list[dict[str, Any]] = []

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, line: str) -> None:
        job = json.loads(line)
        type(self).jobs.append(job)
        for row in job["groups"]:
            if isinstance(row, str):  # of one process
                self.lines.append(
                    {**ANSWER, "group": row, "part": Machine(host.this_cpu()).to_json()}
                )
                continue
            name, work, _, n = row
            if name == self.failing:
                self.lines.append(
                    {
                        "failed": (
                            f"worker 1 of {n} (process 7) ended with status -9, busy with {work}"
                        )
                    }
                )
                return
            part = Machine(
                host.this_cpu(), co_runs=(CoRun(work, n, Samples((float(n),)), Samples((1.0,))),)
            )
            self.lines.append({**ANSWER, "group": name, "part": part.to_json()})

    @property
    def stdout(self) -> Any:
        return (json.dumps(line) + "\n" for line in self.lines)

    def wait(self) -> int:
        return 0

    def stop(self) -> None: ...


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> type[Leader]:
    class Fresh(Leader):
        jobs: list[dict[str, Any]] = []  # noqa: RUF012

    monkeypatch.setattr(suite, "Child", Fresh)
    monkeypatch.setattr(remaining, "planned_groups", lambda mode, flags: [])
    monkeypatch.setattr(
        remaining, "trace_group", lambda found, mode: Group("exact", (), suite_repeats(mode))
    )
    monkeypatch.setattr(remaining, "SYSTEM_GROUPS", ())
    monkeypatch.setattr(host, "running_processes", lambda: 1)
    return Fresh


def suite_repeats(mode: str) -> Any:
    from dlperf.microbench.plan import repeats

    return repeats(mode)


def asked(leader: type[Leader]) -> list[list[tuple[str, int]]]:
    return [
        [(work, n) for _, work, _, n in job["groups"]]
        for job in leader.jobs
        if job["groups"] and isinstance(job["groups"][0], list)
    ]


def test_workers_are_measured_once_and_more_of_them_added(
    tmp_path: Path, leader: type[Leader]
) -> None:
    path = tmp_path / "m.json"
    assert suite.calibrate(path, mode="quick").co_runs == ()  # nothing without the option
    machine = suite.calibrate(path, mode="quick", workers=(2, 1))
    kinds = resources(machine.cpu)
    assert asked(leader) == [[(PREPARATION, 1), (PREPARATION, 2), *((kind, 2) for kind in kinds)]]
    assert machine.co_runs_of("DRAM")[2].slowdown == 2.0
    suite.calibrate(path, mode="quick", workers=(1, 2))
    assert len(asked(leader)) == 1
    machine = suite.calibrate(path, mode="quick", workers=(1, 2, 4))
    assert asked(leader)[1] == [(PREPARATION, 4), *((kind, 4) for kind in kinds)]
    assert set(machine.co_runs_of("compute")) == {2, 4}
    assert Machine.load(path).co_runs == machine.co_runs


def test_a_targets_operations_are_measured_by_target_and_batch_size(
    tmp_path: Path, leader: type[Leader]
) -> None:
    step = replace(trace(mm(8, 8, 8), inference=False), target="mine", batch_size=16)
    machine = suite.calibrate(tmp_path / "m.json", mode="quick", workers=(2,), traces=[step])
    assert machine.co_runs_of("operations of mine@16 (step)")[2].slowdown == 2.0
    (found,) = (
        found
        for name, _, found, _ in leader.jobs[-1]["groups"]
        if name.startswith("operations of mine@16")
    )
    assert found == step.to_json()


def test_a_worker_that_dies_leaves_one_line_and_what_is_finished(
    tmp_path: Path, leader: type[Leader]
) -> None:
    leader.failing = "L2 of 2 workers"
    with pytest.raises(
        WorkFailed,
        match=(
            r"^worker 1 of 2 \(process 7\) ended with status -9, busy with L2; .*m.json keeps 3"
            r" finished groups, and the same"
        ),
    ):
        suite.calibrate(tmp_path / "m.json", mode="quick", workers=(2,))
    assert {found.work for found in Machine.load(tmp_path / "m.json").co_runs} == {
        PREPARATION,
        "compute",
        "L1",
    }


# -- real processes --------------------------------------------------------------------------------


@pytest.mark.process
def test_two_real_workers_and_the_death_of_one() -> None:
    with closing(Pool((2,), CPU)) as team:
        assert team.make("overhead", None, 2) > 0
        seconds, _ = team.run([0, 1], 5, 0.02)
        assert seconds > 0
        os.kill(team.processes[1].pid, signal.SIGKILL)
        with pytest.raises(
            WorkerDied,
            match=(
                rf"worker 1 of 2 \(process {team.processes[1].pid}\) ended with status -9, busy"
                r" with overhead"
            ),
        ):
            team.run([0, 1], 5, 0.02)
    assert not any(process.is_alive() for process in team.processes)


@pytest.mark.process
def test_a_worker_that_fails_says_why() -> None:
    with (
        closing(Pool((2,), CPU)) as team,
        pytest.raises(
            WorkerDied, match=r"worker 1 of 2 failed, busy with own: Unplayable: mine: none of its"
        ),
    ):
        team.make("own", Trace("mine", 1, (), ()).to_json(), 2)
    assert not any(process.is_alive() for process in team.processes)


def _dies(barrier: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _meets(barrier: Any) -> None:
    barrier.wait(60)


@pytest.mark.process
def test_starting_processes() -> None:
    assert co_run.start_s(2, _meets) > 0
    with pytest.raises(WorkerDied, match="one of 2 workers ended while they were started"):
        co_run.start_s(2, _dies)


@pytest.mark.process
def test_a_job_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(co_run.ROUNDS, "quick", 1)
    monkeypatch.setitem(co_run.WINDOW_S, "quick", 0.01)
    monkeypatch.setattr(co_run, "start_s", lambda n: float(n))
    recorded = trace(relu(64), mm(8, 8, 8)).to_json()
    groups = [
        ["p", PREPARATION, None, 2],
        *([work, work, None, 2] for work in resources(CPU)),
        ["own", "own", recorded, 2],
    ]
    told: list[dict[str, Any]] = []
    run({"mode": "quick", "groups": groups}, told.append)
    told = [message for message in told if "group" in message]
    assert [message["group"] for message in told] == [name for name, *_ in groups]
    (found,) = Machine.from_json(told[-1]["part"]).co_runs
    assert (found.work, found.workers) == ("own", 2)
    assert found.slowdown > 0


@pytest.mark.process
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent has ended"
)
def test_a_measuring_process_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    child = (
        "import os, time; from dlperf.microbench.job import do_job; do_job(lambda job, say:"
        " say({'pid': os.getpid()}) or time.sleep(600))"
    )
    parent = (
        "import subprocess, sys; process = subprocess.Popen([sys.executable, '-c', sys.argv[1]],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True); process.stdin.write('{}' +"
        " chr(10)); process.stdin.flush(); print(process.stdout.readline(), flush=True);"
        " process.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        pid = json.loads(started.stdout.readline())["pid"]
        started.kill()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(
            f"/proc/{pid}/status"
        ).read_text(encoding="utf-8"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} outlived its parent")

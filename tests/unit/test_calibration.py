"""The suite: a file after every group, resuming, deepening, refusing; with made-up workers, and
once with a real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from calibrated_cases import T, cost, mm, relu, step_keys, trace
from calibrated_cases import machine as made_up

from dlperf import predict
from dlperf.cli import calibration
from dlperf.cli.main import main
from dlperf.core import host
from dlperf.core.clock import Samples
from dlperf.core.co_run import CoRun
from dlperf.core.errors import DlperfError, Interrupted, WorkFailed
from dlperf.core.machine import Kernel, Machine
from dlperf.core.state import Reading
from dlperf.core.trace import Op
from dlperf.core.verification import Coverage, SelfTest
from dlperf.microbench import remaining, results, suite
from dlperf.microbench.plan import Group, Point, repeats
from dlperf.microbench.worker import SYSTEM_GROUPS, planned_groups

GROUPS = ("one", "two", "three")


class Worker:
    """Stands for the measuring process: answers a job group by group; `fate` is called before each
    group and may raise or write half a line.
    """

    jobs: list[dict[str, Any]]
    fate: Callable[[str], str | None]
    status = 0
    switches_per_s = 0.0
    seconds = 1e-6
    left_out = 0
    sampled_once = False
    unsteady = 0
    passes = 1
    wants = 0
    state: Callable[[str], float] | None = None
    chosen: list[dict[str, list[int]]]

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.stdout: Iterator[str] = iter(())

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left of it."""

    def write(self, line: str) -> None:
        said = json.loads(line)
        if "groups" not in said:
            type(self).chosen.append(said)
            return
        type(self).jobs.append(said)
        self.stdout = self._answer(said)

    def _answer(self, job: dict[str, Any]) -> Iterator[str]:
        for index, name in enumerate(job["groups"] * self.passes):
            yield json.dumps({"now": name}) + "\n"
            broken = type(self).fate(name)
            if broken is not None:
                yield broken
                return
            yield json.dumps({"progress": 1}) + "\n"
            state = type(self).state
            factor = 1.0 if state is None else state(name)
            n_readings = 0 if state is None else 18
            first = job["n_readings"] + index * n_readings
            samples = Samples(
                (self.seconds * factor,) * (1 + index // len(job["groups"]))
            )  # a later pass tells the earlier one's, too
            kernel = Kernel(
                Op("aten.relu.default", (T(64 + GROUPS.index(name) if name in GROUPS else index),)),
                name,
                job["threads"],
                samples,
                (first + 8,) * len(samples.values) if n_readings else (),
            )
            reading = Reading(*(1e-3 * factor,) * 6)
            part = Machine(host.this_cpu(), (kernel,), readings=(reading,) * n_readings)
            switches = 100 * self.switches_per_s
            told = {
                "group": name,
                "part": part.to_json(),
                "switches": switches,
                "seconds": 100.0,
                "refused": [],
                "unsteady": self.unsteady,
                "left_out": self.left_out,
                "sampled_once": self.sampled_once,
            }
            yield json.dumps(told) + "\n"
        if self.wants:
            yield json.dumps({"wants": self.wants}) + "\n"

    def wait(self) -> int:
        return type(self).status

    def stop(self) -> None:
        """It has ended."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Worker]:
    class Fresh(Worker):
        jobs: list[dict[str, Any]] = []  # noqa: RUF012
        chosen: list[dict[str, list[int]]] = []  # noqa: RUF012
        fate = staticmethod(lambda name: None)

    groups = [
        Group(name, (Point(name, relu(64)), Point(name, relu(65))), repeats("quick"))
        for name in GROUPS
    ]
    monkeypatch.setattr(suite, "Child", Fresh)
    monkeypatch.setattr(remaining, "planned_groups", lambda mode, flags: groups)
    monkeypatch.setattr(remaining, "SYSTEM_GROUPS", ())
    monkeypatch.setattr(suite, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(host, "running_processes", lambda: 1)
    return Fresh


def end_with_a_self_test(path: Path) -> None:
    """What ends a calibration on the command line."""
    machine = Machine.load(path)
    test = SelfTest("MLP", 1, 7, 1e-3, 1e-3, 1e-3, 1e-3)
    replace(machine, self_tests=(test,)).save(path)


def test_a_second_pass_replaces_what_the_first_told(tmp_path: Path, worker: type[Worker]) -> None:
    path = tmp_path / "m.json"
    worker.passes, worker.unsteady, worker.seconds = 2, 1, 2e-3
    machine = suite.calibrate(path, mode="quick")
    assert machine.groups == ("quick/1/one", "quick/1/two", "quick/1/three")
    assert {kernel.samples.values for kernel in machine.kernels} == {(2e-3, 2e-3)}
    # calibrated again where it was busy: both calibrations count, each once
    end_with_a_self_test(path)
    worker.seconds, worker.unsteady = 1e-3, 0
    assert {kernel.samples.values for kernel in suite.calibrate(path, mode="quick").kernels} == {
        (2e-3, 2e-3, 1e-3, 1e-3)
    }


def measured(worker: type[Worker]) -> list[tuple[int, list[str]]]:
    return [(job["threads"], job["groups"]) for job in worker.jobs]


def test_the_caller_chooses_further_points_by_what_was_measured(
    tmp_path: Path, worker: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def choose(
        machine: Machine, threads: int, pool: Mapping[str, Sequence[Op]], n_ops: int
    ) -> dict[str, list[int]]:
        asked.append(
            (len(machine.kernels), threads, {name: len(ops) for name, ops in pool.items()}, n_ops)
        )
        return {"two": [1]}

    monkeypatch.setattr(
        suite,
        "further_points",
        lambda mode, flags: {
            name: (Point(name, relu(99)),) * 2 for name in ("two", "another job's")
        },
    )
    worker.wants = 5
    suite.calibrate(tmp_path / "m.json", mode="full", choose=choose)
    assert worker.jobs[0]["asks"] is True
    assert asked == [(3, 1, {"two": 2}, 5)]
    assert worker.chosen == [{"two": [1]}]


def test_a_file_is_made_and_a_second_run_has_nothing_to_do(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    machine = suite.calibrate(path, mode="quick")
    assert machine.complete
    assert len(machine.kernels) == 3
    assert machine.groups == ("quick/1/one", "quick/1/two", "quick/1/three")
    assert Machine.load(path) == replace(machine, path=str(path))
    assert machine.versions["torch"]
    suite.calibrate(path, mode="quick")
    assert measured(worker) == [(1, list(GROUPS))]
    captured = capsys.readouterr()
    assert "holds all of this already; nothing to measure" in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("again", [False, True])
def test_where_a_kernel_crashes_the_process_another_goes_on(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    path = tmp_path / "m.json"

    def fate(name: str) -> str | None:
        worker.status = -11 if name == "three" and (again or len(worker.jobs) == 1) else 0
        return "" if worker.status else None

    worker.fate = staticmethod(fate)  # type: ignore[assignment]
    if again:
        with pytest.raises(
            WorkFailed,
            match=(
                r"died of SIGSEGV while it measured three; .*m.json keeps 2 finished groups, and"
                r" the same command goes on"
            ),
        ):
            suite.calibrate(path, mode="quick")
        return
    machine = suite.calibrate(path, mode="quick")
    assert machine.complete
    assert machine.groups == tuple(f"quick/1/{name}" for name in GROUPS)
    assert measured(worker) == [(1, list(GROUPS)), (1, ["three"])]
    assert (
        "died of SIGSEGV while it measured three with 1 thread; another goes on"
        in capsys.readouterr().err
    )
    assert any("SIGSEGV" in note for note in machine.notes)


def end_at_three(worker: type[Worker], how: str) -> None:
    """Let the measuring process end before it has the result of the third group."""

    def fate(name: str) -> str | None:
        if name != "three":
            return None
        if how == "interrupt":
            raise KeyboardInterrupt
        worker.status = -9
        return "" if how == "killed" else '{"group": "three", "part": {"cpu"'

    worker.fate = staticmethod(fate)  # type: ignore[assignment]


@pytest.mark.parametrize("how", ["interrupt", "killed", "half a line"])
def test_what_is_finished_stays_and_is_not_measured_again(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str], how: str
) -> None:
    path = tmp_path / "m.json"
    end_at_three(worker, how)
    if how == "interrupt":
        with pytest.raises(
            Interrupted,
            match=r"m.json keeps 2 finished groups, and the same command goes on from there",
        ):
            suite.calibrate(path, mode="quick")
    else:
        with pytest.raises(
            WorkFailed,
            match=(
                r"ended with status -9; .*m.json keeps 2 finished groups, and the same command goes"
                r" on from there"
            ),
        ):
            suite.calibrate(path, mode="quick")
    kept = Machine.load(path)
    assert kept.groups == ("quick/1/one", "quick/1/two")
    assert not kept.complete
    worker.fate, worker.status = staticmethod(lambda name: None), 0  # type: ignore[assignment]
    assert "going on" not in capsys.readouterr().err
    assert suite.calibrate(path, mode="quick").complete
    assert "m.json keeps 2 measured groups; going on with 1 more" in capsys.readouterr().err
    assert measured(worker)[1:] == [(1, ["three"])]
    assert len(Machine.load(path).kernels) == 3


def test_times_are_normalised_once_all_readings_are_there(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock slows down by 13 % before the last group; the calibration is interrupted there, and
    goes on later. A target's operations are measured on a day that is slower still.
    """
    path = tmp_path / "m.json"

    def fate(name: str) -> str | None:
        if name == "three":
            raise KeyboardInterrupt
        return None

    worker.state = staticmethod(lambda name: 1.13 if name == "three" else 1.0)  # type: ignore[assignment]
    worker.fate = staticmethod(fate)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        suite.calibrate(path, mode="quick")
    kept = Machine.load(path)
    assert [one.readings for one in kept.kernels] == [(8,), (26,)]
    assert kept.reference is None
    worker.fate = staticmethod(lambda name: None)  # type: ignore[assignment]
    machine = suite.calibrate(path, mode="quick")
    assert [job["n_readings"] for job in worker.jobs] == [0, 36]
    assert machine.reference == Reading(*(1e-3,) * 6)
    assert [one.slowdown for one in machine.kernels] == [1.0, 1.0, 1.13]
    worker.state = staticmethod(lambda name: 1.5)  # type: ignore[assignment]
    suite.calibrate(path, mode="quick", traces=[trace(mm(8, 8, 8))])
    found = Machine.load(path)
    assert found.reference == machine.reference
    assert len(found.readings) == 36  # medians of three but for the first of each calibration
    assert [one.slowdown for one in found.kernels] == [1.0, 1.0, 1.13, 1.5]
    assert [one.seconds for one in found.kernels] == pytest.approx([worker.seconds] * 4)
    assert [one.samples.minimum for one in found.kernels[2:]] == pytest.approx(
        [1.13 * worker.seconds, 1.5 * worker.seconds]
    )
    assert not any(one.readings for one in found.kernels)


def test_the_same_command_goes_on_with_what_there_was_no_time_for(
    tmp_path: Path,
    worker: type[Worker],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "m.json"
    groups = [
        Group(
            name,
            tuple(Point(name, relu(64 + number + extra)) for extra in (0, 100)),
            repeats("quick"),
        )
        for number, name in enumerate(GROUPS)
    ]
    monkeypatch.setattr(remaining, "planned_groups", lambda mode, flags: groups)
    worker.left_out = 1
    machine = suite.calibrate(path, mode="quick")
    assert not machine.complete  # points count, not groups
    assert [(one.group, one.n_measured, one.n_planned) for one in machine.coverage] == [
        (name, 1, 2) for name in GROUPS
    ]
    worker.left_out = 0
    end_with_a_self_test(path)
    machine = suite.calibrate(path, mode="quick")
    assert machine.complete
    assert worker.jobs[0]["measured"] == {}
    assert worker.jobs[1]["measured"] == {
        name: [0] for name in GROUPS
    }  # what it has is not measured again
    assert [(one.n_measured, one.n_planned) for one in machine.coverage] == [(2, 2)] * 3
    assert suite.calibrate(path, mode="quick").complete
    assert "nothing to measure" in capsys.readouterr().err
    assert len(worker.jobs) == 2


def test_a_deeper_calibration_measures_what_a_quick_one_had_time_for_anew(
    tmp_path: Path, worker: type[Worker]
) -> None:
    worker.left_out = 1
    suite.calibrate(tmp_path / "m.json", mode="quick")
    suite.calibrate(tmp_path / "m.json", mode="full")
    assert worker.jobs[1]["measured"] == {}


def test_far_more_threads_than_cores_are_refused(
    tmp_path: Path, worker: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "available_cores", lambda: 2)
    with pytest.raises(DlperfError, match=r"threads is 9, of 2 cores; give at most 8, or --force"):
        suite.calibrate(tmp_path / "m.json", mode="quick", threads=(1, 9))
    assert not worker.jobs
    assert not list(tmp_path.iterdir())
    suite.calibrate(tmp_path / "m.json", mode="quick", threads=(8,))
    suite.calibrate(tmp_path / "forced.json", mode="quick", threads=(9,), force=True)
    assert [job["threads"] for job in worker.jobs] == [8, 9]


def test_a_file_that_is_refused_is_measured_anew(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    suite.calibrate(path, mode="quick", threads=(1, 2))
    worker.seconds = 5e-6
    machine = suite.calibrate(
        path, mode="quick", refused=lambda file: "is old" if file.kernels else ""
    )
    assert {kernel.samples.values for kernel in machine.kernels} == {(5e-6,)}
    told = capsys.readouterr().err
    assert f"{path} is old; measuring all anew" in told
    assert "warning: the file will no longer hold what was measured with 2 threads" in told


def failed_with_one_thread(path: Path, threads: tuple[int, ...] = (1, 2)) -> Machine:
    """A file that failed its self-test with one thread and passed it with the others."""
    machine = suite.calibrate(path, mode="quick", threads=threads)
    tests = tuple(
        SelfTest("MLP", count, 7, 1e-3, 1e-3, 1e-3, 5e-3 if count == 1 else 1e-3)
        for count in threads
    )
    machine = replace(machine, self_tests=tests)
    machine.save(path)
    return machine


@pytest.mark.parametrize("threads", [(1,), (1, 2), (2, 1)])
def test_what_failed_is_measured_anew_and_the_other_thread_counts_stay(
    tmp_path: Path,
    worker: type[Worker],
    capsys: pytest.CaptureFixture[str],
    threads: tuple[int, ...],
) -> None:
    path = tmp_path / "m.json"
    former = failed_with_one_thread(path)
    worker.seconds = 5e-6
    suite.calibrate(path, mode="quick", threads=threads)
    machine = Machine.load(path)
    assert measured(worker)[2:] == [(1, list(GROUPS))]
    assert {(kernel.threads, kernel.seconds) for kernel in machine.kernels} == {
        (1, 5e-6),
        (2, 1e-6),
    }
    assert len(machine.kernels) == 6
    assert set(machine.groups) == set(former.groups)
    assert machine.self_tests == former.self_tests[1:]
    assert machine.complete
    told = capsys.readouterr().err
    assert f"{path} failed its self-test with 1 thread; measuring that anew" in told
    assert f"{path} keeps 3 measured groups; going on with 3 more" in told
    assert "no longer" not in told


def test_what_failed_stays_where_another_thread_count_is_asked_for(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    former = failed_with_one_thread(path)
    machine = suite.calibrate(path, mode="quick", threads=(2, 4))
    assert measured(worker)[2:] == [(4, list(GROUPS))]
    assert machine.self_tests == former.self_tests
    assert machine.threads == (1, 2, 4)


def test_a_file_that_failed_as_a_whole_gets_another_reference(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    worker.state = staticmethod(lambda name: 2.0)  # type: ignore[assignment]
    failed_with_one_thread(path, threads=(1,))
    worker.state = staticmethod(lambda name: 1.0)  # type: ignore[assignment]
    machine = suite.calibrate(path, mode="quick")
    assert machine.reference == Reading(*(1e-3,) * 6)
    assert [one.slowdown for one in machine.kernels] == [1.0] * 3


@pytest.mark.parametrize("how", ["interrupt", "killed"])
def test_a_measurement_anew_that_does_not_end_leaves_the_file_as_it_was(
    tmp_path: Path, worker: type[Worker], how: str
) -> None:
    path = tmp_path / "m.json"
    failed_with_one_thread(path)
    before = path.read_bytes()

    end_at_three(worker, how)
    why = r"m.json is as it was, and the same command measures it anew$"
    with pytest.raises(Interrupted if how == "interrupt" else WorkFailed, match=why):
        suite.calibrate(path, mode="quick", threads=(4, 1))
    assert path.read_bytes() == before
    worker.fate, worker.status = staticmethod(lambda name: None), 0  # type: ignore[assignment]
    assert suite.calibrate(path, mode="quick", threads=(4, 1)).threads == (1, 2, 4)


def test_operations_of_targets_that_a_measurement_anew_drops_are_named(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    step = [trace(mm(8, 8, 8))]
    suite.calibrate(path, mode="quick", traces=step)
    failed_with_one_thread(path, threads=(1,))
    suite.calibrate(path, mode="quick", traces=step)
    assert "no longer" not in capsys.readouterr().err
    failed_with_one_thread(path, threads=(1,))
    suite.calibrate(path, mode="quick")
    assert "warning: the file will no longer hold for made-up@1 (" in capsys.readouterr().err


def test_co_runs_stay_where_one_thread_is_measured_anew() -> None:
    samples = Samples((1e-3,))
    co_runs = (CoRun("compute", 2, samples, samples),)
    groups = ("quick/1/one", "quick/1/compute of 2 workers", "quick/2/one", "made otherwise")
    machine = replace(made_up(), co_runs=co_runs, groups=groups)
    rest = results.without(machine, [1])
    assert rest.groups == groups[1:]
    assert rest.co_runs == co_runs
    assert rest.threads == ()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"reference": None}, "contains no reference state that fits its readings"),
        ({"readings": (Reading(*(10.0,) * 6),)}, "contains no reference state that fits"),
    ],
)
def test_a_file_that_cannot_be_mended_is_refused(changes: dict[str, Any], reason: str) -> None:
    one = Reading(*(1.0,) * 6)
    machine = replace(made_up(), reference=one, readings=(one,), self_tests=())
    assert calibration._why_refused(replace(machine, **changes)).startswith(reason)
    assert bool(calibration._why_refused(replace(machine, **changes))) is bool(reason)
    first, *others = machine.kernels
    going_on = replace(machine, reference=None, kernels=(replace(first, readings=(0,)), *others))
    assert calibration._why_refused(going_on) == ""  # its reference comes at the end


def test_what_is_measured_voids_the_self_test_of_its_thread_count(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    first = suite.calibrate(path, mode="quick", threads=(1, 2))
    replace(
        first,
        self_tests=tuple(SelfTest("MLP", count, 7, 1e-3, 1e-3, 1e-3, 1e-3) for count in (1, 2)),
    ).save(path)
    assert len(suite.calibrate(path, mode="quick", threads=(1, 2)).self_tests) == 2
    added = suite.calibrate(path, mode="quick", threads=(2,), traces=[trace(mm(8, 8, 8))])
    assert [test.threads for test in added.self_tests] == [1]


def test_the_file_is_written_after_every_group(tmp_path: Path, worker: type[Worker]) -> None:
    path, seen = tmp_path / "m.json", []

    def fate(name: str) -> None:
        seen.append(Machine.load(path).groups if path.exists() else ())

    worker.fate = staticmethod(fate)  # type: ignore[assignment]
    suite.calibrate(path, mode="quick")
    assert [len(groups) for groups in seen] == [0, 1, 2]


def test_a_full_disk_keeps_the_last_state(
    tmp_path: Path, worker: type[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.json"
    real, calls = Machine.save, []

    def save(machine: Machine, where: Path) -> None:
        calls.append(1)
        if len(calls) >= 3:
            raise WorkFailed(f"{where}: No space left on device; nothing was written")
        real(machine, where)

    monkeypatch.setattr(Machine, "save", save)
    with pytest.raises(WorkFailed, match="No space left"):
        suite.calibrate(path, mode="quick")
    assert Machine.load(path).groups == ("quick/1/one", "quick/1/two")


def test_threads_have_a_process_each(tmp_path: Path, worker: type[Worker]) -> None:
    machine = suite.calibrate(tmp_path / "m.json", mode="quick", threads=(1, 2, 1))
    assert measured(worker) == [(1, list(GROUPS)), (2, list(GROUPS))]
    assert machine.threads == (1, 2)
    suite.calibrate(tmp_path / "m.json", mode="quick", threads=(2, 4))
    assert measured(worker)[2:] == [(4, list(GROUPS))]


def test_a_deeper_mode_measures_anew_and_a_shallower_one_does_not(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    suite.calibrate(path, mode="quick")
    worker.seconds = 5e-6
    deeper = suite.calibrate(path, mode="thorough")
    assert deeper.mode == "thorough"
    assert {kernel.samples.median for kernel in deeper.kernels} == {5e-6}
    assert len(deeper.kernels) == 3
    assert suite.calibrate(path, mode="full").mode == "thorough"
    assert len(worker.jobs) == 2


def test_a_neighbour_is_noted(
    tmp_path: Path,
    worker: type[Worker],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(host, "running_processes", lambda: 3)
    worker.switches_per_s = 2 * results.BUSY_SWITCHES_PER_S
    machine = suite.calibrate(tmp_path / "m.json", mode="quick")
    assert machine.notes[0].startswith("2 other processes were running")
    assert [one.switches_per_s > 0 for one in machine.disturbances] == [True] * 3
    told = capsys.readouterr().err
    assert "warning: the machine is busy" in told
    assert told.count("was busy while 3 of 3 groups were measured") == 1


def test_what_was_measured_on_a_busy_machine_is_mended_by_calibrating_again(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    worker.unsteady = 1
    busy = suite.calibrate(path, mode="quick")
    assert sum("never had the core's full speed" in one.note for one in busy.disturbances) == 3
    worker.unsteady = 0
    suite.calibrate(path, mode="quick", traces=[trace(mm(8, 8, 8))])
    assert measured(worker)[1][1] != list(GROUPS)  # adding a target measures that alone
    worker.seconds = 5e-6
    suite.calibrate(path, mode="quick")  # one that was interrupted before its self-test
    assert len(worker.jobs) == 2
    end_with_a_self_test(path)
    mended = suite.calibrate(path, mode="quick")
    assert set(measured(worker)[2][1]) >= set(GROUPS)
    assert mended.disturbances == ()
    # both looks are kept, and the least of them counts
    assert {kernel.samples.values for kernel in mended.kernels if kernel.family in GROUPS} == {
        (1e-6, 5e-6)
    }


def test_one_that_was_interrupted_goes_on_with_what_is_missing_alone(
    tmp_path: Path, worker: type[Worker]
) -> None:
    path = tmp_path / "m.json"
    worker.unsteady = 1

    def fate(name: str) -> str | None:
        if name == "three":
            raise KeyboardInterrupt
        return None

    worker.fate = staticmethod(fate)  # type: ignore[assignment]
    with pytest.raises(Interrupted):
        suite.calibrate(path, mode="quick")
    worker.fate = staticmethod(lambda name: None)  # type: ignore[assignment]
    suite.calibrate(path, mode="quick")
    assert measured(worker)[1][1] == ["three"]


def other(path: Path) -> None:
    cpu = replace(host.this_cpu(), model="Another CPU")
    Machine(
        cpu, (Kernel(relu(7), "pointwise", 1, Samples((1.0,))),), versions=host.versions()
    ).save(path)


def damaged(path: Path) -> None:
    data = Machine(host.this_cpu(), (Kernel(relu(7), "pointwise", 1, Samples((1.0,))),)).to_json()
    data["kernels"][0]["threads"] = -1
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other, "is of another machine .Another CPU, .* choose another name, or give --force"),
        (damaged, r"kernels\[0\]\.threads is -1.* Or give --force to measure anew"),
        (
            lambda path: path.write_text("my notes"),
            "is no whole file of dlperf; choose another name, or give --force",
        ),
    ],
)
def test_what_is_not_this_machines_is_refused_without_force(
    tmp_path: Path, worker: type[Worker], make: Callable[[Path], Any], message: str
) -> None:
    path = tmp_path / "m.json"
    make(path)
    before = path.read_text()
    with pytest.raises(DlperfError, match=message):
        suite.calibrate(path, mode="quick")
    assert path.read_text() == before
    assert worker.jobs == []
    assert len(suite.calibrate(path, mode="quick", force=True).kernels) == 3


def test_another_torch_does_not_replace_what_took_hours(
    tmp_path: Path, worker: type[Worker], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.json"
    replace(suite.calibrate(path, mode="quick"), versions={"torch": "1.0"}).save(path)
    held = path.read_bytes()
    with pytest.raises(
        DlperfError,
        match=(
            r"was made with torch 1\.0, this is torch .*; choose another name \(-o\) to keep it, or"
            r" give --force to replace it"
        ),
    ):
        suite.calibrate(path, mode="quick")
    assert path.read_bytes() == held
    suite.calibrate(path, mode="quick", force=True)
    assert len(worker.jobs) == 2
    assert "was made with torch 1.0; measuring anew" in capsys.readouterr().err
    ours = host.versions()["torch"].partition("+")[0]
    replace(Machine.load(path), versions={"torch": f"{ours}+other"}).save(
        path
    )  # another build of the same version goes on
    suite.calibrate(path, mode="quick")
    assert len(worker.jobs) == 2


def test_a_group_that_was_sampled_once_is_sampled_again_beside_what_it_has(
    tmp_path: Path, worker: type[Worker]
) -> None:
    """A calibration that was interrupted after first samples ends with as many as any."""
    path = tmp_path / "m.json"

    def interrupt(name: str) -> str | None:
        if name == "three":
            raise KeyboardInterrupt
        return None

    worker.fate = staticmethod(interrupt)  # type: ignore[assignment]
    worker.sampled_once, worker.seconds = True, 2e-3
    with pytest.raises(Interrupted, match="keeps 2 finished groups"):
        suite.calibrate(path, mode="quick")
    kept = Machine.load(path)
    assert [(one.group, one.sampled_once) for one in kept.coverage] == [
        ("one", True),
        ("two", True),
    ]
    worker.fate = staticmethod(lambda name: None)  # type: ignore[assignment]
    worker.sampled_once, worker.seconds = False, 1e-3
    machine = suite.calibrate(path, mode="quick")
    assert worker.jobs[-1]["groups"] == ["three", "one", "two"]
    taken = {kernel.family: kernel.samples.values for kernel in machine.kernels}
    assert taken == {"one": (2e-3, 1e-3), "two": (2e-3, 1e-3), "three": (1e-3,)}
    assert not any(one.sampled_once for one in machine.coverage)
    suite.calibrate(path, mode="quick")
    assert len(worker.jobs) == 2  # nothing is left to measure


def test_only_a_calibration_that_adds_nothing_goes_on_with_groups_that_were_cut_short() -> None:
    """Interrupted ones, too, which have no self-test and mend nothing."""
    planned = planned_groups("quick", host.this_cpu().flags)
    names = [*SYSTEM_GROUPS, *(group.name for group in planned)]
    short = planned[0]
    cut = Machine(
        host.this_cpu(),
        costs=tuple(cost(key, 1e-6) for key in step_keys()),
        groups=tuple(f"quick/1/{name}" for name in names),
        coverage=(Coverage(short.name, 1, 0, len(short.points)),),
    )
    for goes_on, expected in ((True, [(short.name, len(short.points))]), (False, [])):
        assert (
            remaining.missing_groups(cut, 1, "quick", (), goes_on=goes_on, mends=False) == expected
        )


def test_costs_that_were_cut_out_are_measured_again() -> None:
    groups = tuple(
        f"quick/1/{name}"
        for name in (
            *SYSTEM_GROUPS,
            *(group.name for group in planned_groups("quick", host.this_cpu().flags)),
        )
    )
    whole = Machine(
        host.this_cpu(),
        costs=tuple(cost(key, 1e-6) for key in step_keys()),
        groups=groups,
    )
    assert remaining.missing_groups(whole, 1, "quick", (), goes_on=False, mends=False) == []
    cut = replace(
        whole,
        costs=tuple(
            cost
            for cost in whole.costs
            if cost.key[:2] not in (("autograd_node", ""), ("cold_start", "first"))
        ),
    )
    assert [
        name
        for name, _ in remaining.missing_groups(cut, 1, "quick", (), goes_on=False, mends=False)
    ] == ["framework"]
    assert [
        name
        for name, _ in remaining.missing_groups(
            replace(whole, costs=()), 1, "quick", (), goes_on=False, mends=False
        )
    ] == ["framework", "memory"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "hasty"}, "mode 'hasty' is unknown; known are quick"),
        ({"threads": (1, 0)}, "threads is 0"),
    ],
)
def test_wrong_usage(
    tmp_path: Path, worker: type[Worker], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DlperfError, match=message):
        suite.calibrate(tmp_path / "m.json", **arguments)
    assert not list(tmp_path.iterdir())


# -- the command -----------------------------------------------------------------------------------


def test_an_interruption_in_the_first_group_promises_nothing(
    tmp_path: Path, worker: type[Worker]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    worker.fate, before = staticmethod(interrupt), worker.fate  # type: ignore[assignment]
    path = tmp_path / "m.json"
    with pytest.raises(Interrupted, match=r"^no group was finished, so nothing was kept$"):
        suite.calibrate(path, mode="quick")
    assert not path.exists()
    worker.fate = staticmethod(before)  # type: ignore[assignment]
    suite.calibrate(path, mode="quick")
    held = path.read_bytes()
    worker.fate = staticmethod(interrupt)  # type: ignore[assignment]
    with pytest.raises(Interrupted, match=r"^no group was finished, so .*m.json is as it was$"):
        suite.calibrate(path, mode="thorough")
    assert path.read_bytes() == held


@pytest.mark.process
@pytest.mark.parametrize(
    ("fate", "status"), [(KeyboardInterrupt, 130), (WorkFailed, 1), (DlperfError, 2)]
)
def test_exit_statuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fate: type[BaseException],
    status: int,
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise fate("why")

    monkeypatch.setattr("dlperf.microbench.suite.calibrate", fail)
    assert main(["calibrate", "--quick", "-o", str(tmp_path / "m.json")]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(("dlperf calibrate: ", "dlperf: "))
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--threads", "two"],
        ["--threads", "1,"],
        ["--threads", ""],
        ["--quick", "--thorough"],
        ["--fast"],
    ],
)
def test_wrong_options_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_bad_values_exit_with_2_before_anything_is_written(tmp_path: Path) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "m.json"), "--threads", "0"]) == 2
    assert main(["calibrate", "-o", str(tmp_path)]) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.process
# -- a real worker ---------------------------------------------------------------------------------


@pytest.mark.process
def test_a_traces_ops_are_measured_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remaining, "planned_groups", lambda mode, flags: [])
    monkeypatch.setattr(remaining, "SYSTEM_GROUPS", ("threads", "memory"))
    monkeypatch.setattr(host, "running_processes", lambda: 1)
    step = trace(mm(33, 17, 9), relu(77), Op("mine.odd.default", (T(4),), layer="fc"))
    machine = suite.calibrate(tmp_path / "m.json", mode="quick", traces=[step])
    assert machine.groups[1:] == ("quick/1/threads", "quick/1/memory")  # kernels come first
    assert machine.groups[0].startswith("quick/1/for made-up@1 (forward pass, ops ")
    assert {kernel.family for kernel in machine.kernels} == {"exact"}
    assert [machine.exact(op, 1) is not None for op in step.ops] == [True, True, False]
    assert any(
        "mine.odd.default: this torch has no such operator" in note for note in machine.notes
    )
    assert machine.cost_value("fork_join", 1) == 0.0
    assert capfd.readouterr().out == ""
    found = predict(step, replace(machine, bandwidths=made_up().bandwidths), threads=1)
    assert list(found.ops[found.ops["what"] == "kernel"]["source"]) == [
        "measured",
        "measured",
        "unpriced",
    ]


def test_a_kernel_that_meets_no_co_tenant_again_keeps_what_it_took_beside_one() -> None:
    seen = Kernel(mm(8, 8, 8), "gemm", 1, Samples((1e-5,)), shared_core=1.4)
    before = made_up(extra=(seen,))

    def again(shared_core: float) -> float:
        kernel = replace(seen, samples=Samples((1.1e-5,)), shared_core=shared_core)
        part = Machine(before.cpu, kernels=(kernel,)).to_json()
        message = {"group": "gemm", "part": part, "switches": 0, "seconds": 1.0}
        message |= {"refused": (), "unsteady": 0, "left_out": 0, "sampled_once": False}
        found = results.merged(before, message, 1, before).exact(seen.op, 1)
        return found.shared_core if found is not None else 0.0

    assert (again(0.0), again(1.6)) == (1.4, 1.6)


def test_a_group_whose_last_points_others_had_is_whole() -> None:
    part = Machine(made_up().cpu).to_json()
    message = {"group": "gemm", "part": part, "switches": 0, "seconds": 0.0}
    message |= {"refused": (), "unsteady": 0, "left_out": 0, "sampled_once": False}
    (coverage,) = results.merged(made_up(), message, 1, n_before=39).coverage
    assert (coverage.group, coverage.n_measured, coverage.n_planned) == ("gemm", 39, 39)


def test_groups_that_time_processes_of_their_own_are_not_busy_for_that() -> None:
    part = Machine(made_up().cpu).to_json()
    message = {"part": part, "switches": 300, "seconds": 1.0}
    message |= {"refused": (), "unsteady": 0, "left_out": 0, "sampled_once": False}
    busy = {
        group: bool(results.merged(made_up(), {"group": group, **message}, 1).disturbances)
        for group in ("loader", "ddp", "gemm")
    }
    assert busy == {"loader": False, "ddp": False, "gemm": True}

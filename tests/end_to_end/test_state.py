"""States of the machine on the command line: ``machine state``, ``predict --state``, reports at the
state of the measurement. The probe is a fake.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.core import state_probe
from dlperf.core.machine import Machine
from dlperf.core.state import Reading
from dlperf.core.state_file import ProbedState
from dlperf.microbench import refresh

ONE = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)
NO_REFERENCE = (
    "warning: {0}: contains no reference state, so states have no effect, and hours differ from a"
    " prediction by 6.4 % more (standard deviation); dlperf calibrate -o {0} measures anew"
)
SLOW = replace(ONE, core_s=1.25e-4, dram_s=1.5e-2)  # core 1.25, DRAM 1.5


@pytest.fixture(autouse=True)
def slow_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_probe, "take_reading", lambda: SLOW)


def test_the_state_is_shown_and_saved(dlperf: Callable, referenced: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    done = dlperf("machine", "state", "--machine", referenced, "-o", file, "--threads", "2")
    assert done.status == 0
    assert done.out.splitlines() == [
        "core 1.25, DRAM 1.50 of the reference",
        "median of 3 readings: core 1.10 of the reference",
    ]
    found = ProbedState.load(file)
    assert found.reading == SLOW
    assert found.identity == Machine.load(referenced).cpu.identity
    data = json.loads(file.read_text())
    assert data["schema"] == "dlperf.state"
    assert data["versions"]["dlperf"]
    assert "state" not in data  # the machine file that it is used with may be a newer one
    answer = json.loads(dlperf("machine", "state", "--machine", referenced, "--json", "-").out)
    assert answer["state"]["dram"] == pytest.approx(1.5)
    assert {**answer, "state": 0} == {**data, "state": 0}


def test_a_reading_that_no_machine_has_is_refused(
    dlperf: Callable, referenced: Path, tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    dlperf("machine", "state", referenced, "-o", file)
    data = json.loads(file.read_text())
    data["reading"]["core_s"] = 1e-9
    file.write_text(json.dumps(data))
    done = dlperf("predict", "mlp", "--machine", referenced, "--state", file)
    assert done.status == 2
    assert f"{file}: reading.core_s of 1.00 ns is 1e-05 of the reference" in done.line


@pytest.mark.parametrize(
    "order", [("machine", "state", "-o"), ("predict", "mlp", "--batch-size", "4", "--json")]
)
def test_an_answer_replaces_no_machine_file(
    dlperf: Callable, referenced: Path, tmp_path: Path, order: tuple[str, ...]
) -> None:
    copy = tmp_path / "copy.json"
    copy.write_bytes(referenced.read_bytes())
    done = dlperf(*order, copy, "--machine", referenced)
    assert done.status == 2
    assert f"{copy}: is a machine file; choose another name, or give --force" in done.err
    assert copy.read_bytes() == referenced.read_bytes()


def test_without_a_reference_there_are_seconds(
    dlperf: Callable, machine_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "state.json"
    done = dlperf("machine", "state", "--machine", machine_file, "-o", file)
    assert done.status == 0
    assert "core 125 us" in done.out
    assert NO_REFERENCE.format(machine_file) in done.err
    assert ProbedState.load(file).reading == SLOW
    answer = json.loads(dlperf("machine", "state", "--machine", machine_file, "--json", "-").out)
    assert answer["state"] is None


def test_the_file_of_another_machine_is_refused(
    dlperf: Callable, referenced: Path, tmp_path: Path
) -> None:
    machine = Machine.load(referenced)
    replace(machine, cpu=replace(machine.cpu, model="Other")).save(tmp_path / "other.json")
    done = dlperf("machine", "state", "--machine", tmp_path / "other.json")
    assert done.status == 2
    assert "is of another machine (Other" in done.line


def _predicted(done: object) -> dict:
    assert done.status == 0, done.err  # type: ignore[attr-defined]
    return dict(json.loads(done.out))  # type: ignore[attr-defined]


def test_cores_far_apart_are_a_state_of_several_threads(
    dlperf: Callable, referenced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine.load(referenced)
    kernels = tuple(replace(kernel, core_to_core=0.5) for kernel in machine.kernels)
    with_team = replace(ONE, parallel_region_s={1: 2e-6, 2: 2e-6})
    replace(machine, kernels=kernels, reference=with_team).save(referenced)
    far, alone = (tmp_path / f"{name}.json" for name in ("far", "alone"))
    dlperf("machine", "state", "--machine", referenced, "--threads", "1", "-o", alone)
    reading = replace(SLOW, parallel_region_s={2: 3e-6})
    monkeypatch.setattr(state_probe, "take_reading", lambda: reading)
    done = dlperf("machine", "state", "--machine", referenced, "--threads", "2", "-o", far)
    assert done.out.splitlines()[0].endswith("DRAM 1.50, core to core 1.50 of the reference")

    def predict(state: Path) -> dict:
        on = ("--machine", referenced, "--threads", "2", "--json", "-", "--state", state)
        return _predicted(dlperf("predict", "lenet", *on))

    found, other = predict(far), predict(alone)
    assert (found["state"]["core_to_core"], other["state"]["core_to_core"]) == (1.5, 1.0)
    assert found["step"]["total_s"] > 1.1 * other["step"]["total_s"]


def test_one_thread_has_no_cores_that_are_apart(
    dlperf: Callable, referenced: Path, tmp_path: Path
) -> None:
    """Although the file's usual state has them apart, which tells of its other readings."""
    with_team = replace(ONE, parallel_region_s={2: 2e-6})
    apart = tuple(replace(ONE, parallel_region_s={2: 3e-6}) for _ in range(9))
    replace(Machine.load(referenced), reference=with_team, readings=apart).save(referenced)
    file = tmp_path / "alone.json"
    dlperf("machine", "state", "--machine", referenced, "--threads", "1", "-o", file)
    on = ("--machine", referenced, "--json", "-", "--state", file, "--threads")
    one, two = (_predicted(dlperf("predict", "lenet", *on, count)) for count in "12")
    assert one["state"]["core_to_core"] == 1.0
    assert two["state"]["core_to_core"] == 1.5


def test_predictions_at_states(dlperf: Callable, referenced: Path, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    dlperf("machine", "state", "--machine", referenced, "-o", file)

    def predict(*states: object) -> dict:
        options = [word for state in states for word in ("--state", state)]
        on = ("--machine", referenced, "--threads", "1", "--json", "-")
        return _predicted(dlperf("predict", "lenet", *on, *options))

    usual, reference, now, mean = predict(), predict("reference"), predict("now"), predict(file)
    assert usual["state"]["core"] == pytest.approx(1.1)
    assert set(reference["state"].values()) == {1.0}
    assert now["state"] == mean["state"]
    assert now["state"]["dram"] == pytest.approx(1.5)
    both = predict(file, "reference")
    assert both["state"]["core"] == pytest.approx(1.125)  # (1.25 + 1) / 2
    assert reference["step"]["total_s"] < both["step"]["total_s"] < now["step"]["total_s"]


def test_the_text_names_the_state(dlperf: Callable, referenced: Path) -> None:
    on = ("predict", "lenet", "--machine", referenced, "--threads", "1")
    usual = "state: median of 3 readings: core 1.10 of the reference"
    assert usual in dlperf(*on).out.splitlines()
    given = "state: core 1.25, DRAM 1.50 of the reference"
    assert given in dlperf(*on, "--state", "now").out.splitlines()
    assert "state:" not in dlperf(*on, "--state", "reference").out


def test_without_a_reference_states_are_warned_of(dlperf: Callable, machine_file: Path) -> None:
    on = ("predict", "lenet", "--machine", machine_file, "--threads", "1", "--json", "-")
    done = dlperf(*on, "--state", "now")
    assert done.err.count(NO_REFERENCE.format(machine_file)) == 1
    assert set(_predicted(done)["state"].values()) == {1.0}
    for words in ((), ("--state", "reference")):
        assert dlperf(*on, *words).err.count(NO_REFERENCE.format(machine_file)) == 1


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("reading", "dram_s"), float("nan"), "reading.dram_s is nan"),
        (("reading", "core_s"), -1, "reading.core_s is -1"),
        (("machine", "model"), "Other", "is of another machine (Other"),
        (("schema",), "dlperf.trace", "is no dlperf.state file"),
        (("schema_version",), 9, "schema_version is 9"),
        (("schema_version",), 1, "schema_version is 1, this dlperf writes 4; make the file again"),
    ],
)
def test_unfit_state_files_are_refused(
    dlperf: Callable, referenced: Path, tmp_path: Path, path: tuple, value: object, said: str
) -> None:
    file = tmp_path / "state.json"
    dlperf("machine", "state", "--machine", referenced, "-o", file)
    data = json.loads(file.read_text())
    *outer, last = path
    (data[outer[0]] if outer else data)[last] = value
    file.write_text(json.dumps(data))
    done = dlperf("predict", "lenet", "--machine", referenced, "--state", file)
    assert done.status == 2
    assert str(file) in done.line
    assert said in done.line
    assert "dlperf machine state -o FILE" in done.line


def test_a_damaged_or_missing_state_file(
    dlperf: Callable, referenced: Path, tmp_path: Path
) -> None:
    (tmp_path / "cut.json").write_text('{"schema": "dlperf.st')
    for name in ("cut.json", "none.json"):
        done = dlperf("predict", "lenet", "--machine", referenced, "--state", tmp_path / name)
        assert done.status == 2
        assert name in done.line
        assert "dlperf machine state -o FILE" in done.line


@pytest.mark.parametrize("word", ["noe", "Now", "refernce"])
def test_an_unknown_state_names_the_known_words(
    dlperf: Callable, referenced: Path, word: str
) -> None:
    done = dlperf("predict", "lenet", "--machine", referenced, "--state", word)
    assert done.status == 2
    assert f"--state {word}: is neither now nor reference, and there is no such file" in done.line


def test_now_is_of_this_machine_only(dlperf: Callable, referenced: Path, tmp_path: Path) -> None:
    machine = Machine.load(referenced)
    other = tmp_path / "other.json"
    replace(machine, cpu=replace(machine.cpu, model="Other")).save(other)
    done = dlperf("predict", "lenet", "--machine", other, "--state", "now")
    assert done.status == 2
    assert "give the FILE of dlperf machine state" in done.line


def test_a_report_is_at_the_state_of_its_measurement(
    dlperf: Callable, referenced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = iter([SLOW, ONE])  # before and after: core 1.125 on average
    monkeypatch.setattr(state_probe.StateProbe, "__init__", lambda probe, cpu: None)
    monkeypatch.setattr(state_probe.StateProbe, "read", lambda probe, rounds: next(readings))
    file = tmp_path / "measured.json"
    assert dlperf("measure", "lenet", "--threads", "1", "--seconds", "0.2", "-o", file).status == 0
    on = ("--machine", referenced, "--predictor", "roofline", "--threads", "1")
    done = dlperf("report", file, *on)
    assert (
        "state during the measurement: core 1.12, DRAM 1.25 of the reference"
        in done.out.splitlines()
    )
    assert "; blind: " in " ".join(done.out.split())
    data = json.loads(dlperf("report", file, *on, "--json", "-").out)
    assert data["state"]["dram"] == pytest.approx(1.25)
    assert [one["core_s"] for one in data["measured"]["states"]] == [1.25e-4, 1e-4]
    (row,) = data["predicted"]
    assert row["state"] == data["state"]
    blind, actual_s = row["blind"], data["measured"]["step"]["total_s"]
    assert blind["step"]["total_s"] < row["step"]["total_s"]
    assert blind["error_frac"] == pytest.approx(blind["step"]["total_s"] / actual_s - 1)
    # the machine file stays as it is
    assert len(Machine.load(referenced).readings) == 3


def test_a_report_without_a_reference_is_blind_alone(
    dlperf: Callable, machine_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "measured.json"
    dlperf("measure", "lenet", "--threads", "1", "--seconds", "0.2", "-o", file)
    on = ("--machine", machine_file, "--predictor", "roofline")
    done = dlperf("report", file, file, *on)
    assert done.err.count(NO_REFERENCE.format(machine_file)) == 1
    assert "state during" not in done.out
    assert "blind" not in done.out


@pytest.fixture
def retimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(machine: Machine, threads: int, budget_s: float) -> tuple:
        kernels = refresh.anchors(machine, threads)
        timed = (refresh.Retimed(one, 1.5 * one.seconds, (ONE, ONE)) for one in kernels)
        return tuple(timed), (ONE, SLOW, ONE)

    monkeypatch.setattr(refresh, "measure", measure)


def test_refresh_adds_readings_and_nothing_else(
    dlperf: Callable, referenced: Path, retimed: None
) -> None:
    before = json.loads(referenced.read_text())
    done = dlperf("calibrate", "--refresh", "--machine", referenced)
    assert done.status == 0
    assert "gemm with 1 thread: +50 % beyond what the state explains" in done.err
    assert "reference state" not in done.err
    assert "moved" in done.out
    after = json.loads(referenced.read_text())
    assert len(after.pop("readings")) == len(before.pop("readings")) + 3
    assert after == before


def test_refresh_without_a_reference_says_so(
    dlperf: Callable, machine_file: Path, retimed: None
) -> None:
    done = dlperf("calibrate", "--refresh", "--machine", machine_file)
    assert done.status == 0
    assert done.err.count(NO_REFERENCE.format(machine_file)) == 1


def test_a_usual_state_without_readings_is_warned_of(dlperf: Callable, referenced: Path) -> None:
    replace(Machine.load(referenced), readings=()).save(referenced)
    line = f"{referenced}: contains no readings of its state, so the reference counts as its usual"
    on = ("--machine", referenced)
    for words in (("machine", "state"), ("predict", "lenet", "--threads", "1", "--state", "now")):
        done = dlperf(*words, *on)
        assert done.status == 0
        assert done.err.count(line) == 1


def test_readings_that_contradict_the_reference_are_doubted(
    dlperf: Callable, referenced: Path
) -> None:
    """The reference is a tenth of what it was: every state is 10 or more."""
    tenth = Reading(*(0.1 * seconds for seconds in ONE.seconds))
    replace(Machine.load(referenced), reference=tenth).save(referenced)
    line = (
        f"{referenced}: contains readings that contradict its reference state (median: core 11.00"
    )
    on = ("--machine", referenced)
    lenet = ("predict", "lenet", "--threads", "1")
    for words in (lenet, (*lenet, "--state", "now"), ("machine", "state")):
        done = dlperf(*words, *on)
        assert done.status == 0
        assert done.err.count(line) == 1
        assert f"; dlperf calibrate -o {referenced} measures anew" in done.err


@pytest.mark.parametrize(
    "others", [("--quick",), ("--thorough",), ("--for", "lenet@8"), ("--workers", "1,2")]
)
def test_refresh_is_an_order_of_its_own(
    dlperf: Callable, referenced: Path, others: tuple[str, ...]
) -> None:
    done = dlperf("calibrate", "--refresh", *others, "--machine", referenced)
    assert done.status == 2
    assert "--refresh" in done.line


def test_refresh_needs_this_machines_file(
    dlperf: Callable, referenced: Path, tmp_path: Path, retimed: None
) -> None:
    done = dlperf("calibrate", "--refresh", "--machine", tmp_path / "none.json")
    assert done.status == 2
    assert "there is no such machine file" in done.line
    machine = Machine.load(referenced)
    other = tmp_path / "other.json"
    replace(machine, cpu=replace(machine.cpu, model="Other")).save(other)
    assert dlperf("calibrate", "--refresh", "--machine", other).status == 2
    assert dlperf("calibrate", "--refresh", "--machine", referenced, "--threads", "7").status == 2

"""The machine's state after the watched steps of a loop: the reading, and what a report makes of
them. The probe is a fake, but where a test says otherwise.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from report_cases import machine
from test_watcher import Net, hooks, train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlperf.core import host, state_probe
from dlperf.core.clock import Clock
from dlperf.core.machine import Machine
from dlperf.core.state import Reading
from dlperf.runner import state_readings
from dlperf.runner.core_speed import is_traced
from dlperf.runner.findings import Findings
from dlperf.runner.run_report import to_document, to_json, to_text
from dlperf.runner.state_readings import N_ROUNDS, StateReadings
from dlperf.runner.watcher import DONE, Watcher
from dlperf.runner.wrapping import profile

ONE = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)
SLOW = replace(ONE, core_s=1.25e-4, dram_s=1.5e-2)  # core 1.25, DRAM 1.5
LINE = "state during the measurement: core 1.25, DRAM 1.50 of the reference"


def here(reference: Reading | None = ONE) -> Machine:
    """A file of this processor, whose usual state is that of its reference."""
    made_up = machine()
    cpu = replace(made_up.cpu, model=host.this_cpu().model)
    readings = () if reference is None else (reference,)
    return replace(made_up, cpu=cpu, reference=reference, readings=readings)


@pytest.fixture(autouse=True)
def _no_hook_stays() -> Iterator[None]:
    before = hooks()
    yield
    assert hooks() == before


@pytest.fixture(autouse=True)
def _not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer that measures coverage of these tests is not there."""
    monkeypatch.setattr(state_readings, "is_traced", lambda: False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rounds of each reading that was taken; the first one is slow."""
    seen: list[int] = []

    def take(rounds: int) -> Reading:
        seen.append(rounds)
        return SLOW if len(seen) == 1 else ONE

    monkeypatch.setattr(state_probe, "take_reading", take)
    return seen


def watched(
    machine: Machine | None, loop: Callable[[], object], clock: Clock = Clock()
) -> tuple[Watcher, Findings]:
    watcher = Watcher(clock=clock, state_readings=StateReadings(machine))
    watcher.install()
    try:
        loop()
    finally:
        watcher.remove()
    assert watcher.error is None
    return watcher, Findings(watcher, machine, "train.py")


def trained(n: int = 40) -> object:
    torch.manual_seed(0)
    return train(Net(), n, nn.CrossEntropyLoss())


def test_the_report_is_at_the_state_and_has_the_blind_error_beside(taken: list[int]) -> None:
    _, findings = watched(here(), trained)
    assert taken == [N_ROUNDS]
    assert findings.measurement.states == (SLOW,)
    prediction, blind, report = findings.prediction, findings.blind_prediction, findings.report
    assert prediction is not None
    assert blind is not None
    assert report is not None
    vars(report)["pngs"] = {}  # its text is looked at
    assert prediction.state == report.state == findings.state
    assert prediction.state.core == pytest.approx(1.25)
    assert blind.state.core == 1.0
    actual_s, at_state_s, blind_s = (
        findings.measurement.step["total"].median,
        prediction.step.total_s,
        blind.step.total_s,
    )
    assert at_state_s is not None
    assert blind_s is not None
    assert at_state_s > blind_s
    text = to_text(findings, 400)
    assert LINE in text.splitlines()
    assert "; blind: " in text
    for suffix in (".md", ".html", ".txt"):
        assert LINE in to_document(findings, suffix)
        assert "blind: " in to_document(findings, suffix)
    data = to_json(findings)
    assert data["measurement"]["states"] == [vars(SLOW)]
    assert data["report"]["state"]["dram"] == pytest.approx(1.5)
    (row,) = data["report"]["predicted"]
    assert row["step"]["total_s"] == at_state_s
    assert row["blind"]["step"]["total_s"] == blind_s
    assert row["blind"]["error_frac"] == pytest.approx(blind_s / actual_s - 1)


def test_the_reading_comes_right_after_the_watched_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[tuple[int, int]] = []
    watcher = Watcher(state_readings=StateReadings(here()))

    def take(rounds: int) -> Reading:
        timed = 0 if watcher.watched is None else len(watcher.watched.layered)
        at.append((watcher.stage, timed))
        return ONE

    monkeypatch.setattr(state_probe, "take_reading", take)
    watcher.install()
    trained()
    watcher.remove()
    assert at == [(DONE, watcher.plan.layered)]


@pytest.mark.parametrize(
    "file",
    [None, here(None), replace(here(), cpu=machine().cpu)],
    ids=["no file", "no reference", "another processor"],
)
def test_without_a_reference_of_this_processor_nothing_is_read(
    taken: list[int], file: Machine | None
) -> None:
    _, findings = watched(file, trained)
    assert taken == []
    assert findings.state is None
    assert findings.prediction is findings.blind_prediction
    text = to_text(findings, 400)
    assert "state during" not in text
    assert "blind" not in text


def test_under_a_tracer_nothing_is_read(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer slows the probe's own work."""
    monkeypatch.setattr(state_readings, "is_traced", is_traced)
    before = sys.gettrace()

    def traced() -> None:
        sys.settrace(lambda *_: None)
        try:
            trained()
        finally:
            sys.settrace(before)

    watched(here(), traced)
    assert taken == []


def test_a_probe_that_fails_leaves_a_note_and_the_blind_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def fail(rounds: int) -> Reading:
        tries.append(rounds)
        raise MemoryError("no memory\nfor a mapping")

    monkeypatch.setattr(state_probe, "take_reading", fail)
    losses: list[object] = []
    _, findings = watched(here(), lambda: losses.append(trained()))
    assert losses == [trained()]
    assert len(tries) == 1
    (note,) = [note for note in findings.notes if "reading of the machine's state" in note]
    assert note.startswith("a reading of the machine's state failed (")
    assert "\n" not in note
    assert note in to_text(findings, 400)
    assert findings.prediction is findings.blind_prediction is not None


def test_a_loop_that_ends_early_has_no_reading(taken: list[int]) -> None:
    _, findings = watched(here(), lambda: trained(10))
    assert taken == []
    assert findings.state is None
    assert findings.prediction is findings.blind_prediction is not None


def test_a_new_search_has_the_reading_after_its_own_steps(taken: list[int]) -> None:
    """The second optimizer begins to step in turn with the first after some steps."""
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]

    def loop() -> None:
        for step in range(60):
            for model, optimizer in list(zip(models, optimizers))[: 1 + (step >= 4)]:
                optimizer.zero_grad()
                model(torch.rand(2, 4)).sum().backward()
                optimizer.step()

    watcher, findings = watched(here(), loop)
    assert len(findings.watched.optimizers) == 2
    assert watcher.stage == DONE
    assert len(findings.measurement.states) == 1


class Hand:
    """A clock of which every reading is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize("is_by_hand", [False, True])
def test_the_time_of_readings_is_in_no_step_and_no_epoch(
    monkeypatch: pytest.MonkeyPatch, is_by_hand: bool
) -> None:
    hand = Hand()

    def take(rounds: int) -> Reading:
        hand.now_s += 1e6
        return ONE

    def loop() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(60, 6), torch.randint(0, 3, (60,)))
        for _ in range(2):
            for x, y in DataLoader(data, batch_size=2):
                model.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                if is_by_hand:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.sub_(parameter.grad, alpha=0.1)
                else:
                    optimizer.step()

    monkeypatch.setattr(state_probe, "take_reading", take)
    seen = []
    for file in (here(), None):
        hand.now_s = 0.0
        watcher, findings = watched(file, loop, Clock(now=hand.now, switches=lambda: 0))
        epochs = [epoch.seconds for epoch in watcher.epochs.epochs]
        seen.append((findings.intervals_s, epochs, watcher.epochs.whole.seconds))
    (intervals, epochs, whole_s), (without, epochs_without, whole_without_s) = seen
    assert hand.now_s < 1e6  # the second loop took no reading
    assert intervals == without
    # a reading takes the clock's reading before it, which is outside
    assert epochs == pytest.approx(epochs_without, abs=2)
    assert whole_s == pytest.approx(whole_without_s, abs=2)


def test_the_real_probe_changes_no_bit_of_a_training() -> None:
    ends = []
    for file in (None, here()):
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002  the state that a program may use
        torch.manual_seed(0)
        model = nn.Sequential(Net(), nn.Dropout(0.3))
        if file is None:
            losses = train(model, 40, nn.CrossEntropyLoss())
        else:
            with profile(model, file) as watching:
                losses = train(model, 40, nn.CrossEntropyLoss())
            assert len(watching.measurement.states) == 1
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        drawn = (random.random(), float(np.random.rand()), float(torch.rand(1)))  # noqa: NPY002
        ends.append((losses, weights, drawn, torch.get_num_threads(), np.geterr()))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(one, other) for one, other in zip(ends[0][1], ends[1][1]))
    assert ends[0][2:] == ends[1][2:]

"""What is left of dlperf in a training loop after the watched steps, and what its report imports."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from report_cases import machine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dlperf
from dlperf.recorder.op_recorder import OpRecorder
from dlperf.runner.findings import Findings
from dlperf.runner.live_eta import LiveEta
from dlperf.runner.run_report import to_text
from dlperf.runner.watcher import DONE, Watcher

OWN = str(Path(dlperf.__file__).parent)


def calls_of_dlperf(loop: Callable[[], None]) -> Counter[str]:
    """The calls of dlperf's Python functions in a loop, by name."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OWN):
            found[
                frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name
            ] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        loop()
    finally:
        sys.setprofile(before)
    return found


def one_optimizer() -> Callable[[int], None]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def train(n_steps: int) -> None:
        loader = DataLoader(TensorDataset(torch.rand(2 * n_steps, 4)), batch_size=2)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    return train


def two_optimizers() -> Callable[[int], None]:
    models = [nn.Linear(4, 1), nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def train(n_steps: int) -> None:
        for _ in range(n_steps):
            for model, optimizer in zip(models, optimizers):
                optimizer.zero_grad()
                model(torch.rand(2, 4)).sum().backward()
                optimizer.step()

    return train


def by_hand() -> Callable[[int], None]:
    model = nn.Linear(4, 1)

    def train(n_steps: int) -> None:
        for _ in range(n_steps):
            model.zero_grad()
            model(torch.rand(2, 4)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.1 * parameter.grad)

    return train


@pytest.mark.parametrize(("make", "most"), [(one_optimizer, 2), (two_optimizers, 3), (by_hand, 3)])
def test_a_step_after_the_watched_ones_costs_a_count(
    make: Callable[[], Callable[[int], None]], most: int
) -> None:
    """The hook of each optimizer, or the wrapper of backward, and the count of a step."""
    train = make()
    watcher = Watcher()
    live = LiveEta(watcher.epochs, watcher.clock)
    watcher.install()
    try:
        train(40)
        assert watcher.stage == DONE
        n_more = 100
        found = calls_of_dlperf(lambda: train(n_more))
    finally:
        live.finish()
        watcher.remove()
    per_step = sum(found.values()) / n_more  # what a pass of the loader calls once is little
    assert most <= per_step < most + 1, found


def test_recording_a_step_imports_no_compiler() -> None:
    # torch imports its compiler at the first call of what it wraps
    assert not hasattr(OpRecorder.__torch_dispatch__, "__wrapped__")


def test_the_report_on_a_run_waits_for_no_library_of_tables_or_plots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watcher = Watcher()
    watcher.install()
    try:
        one_optimizer()(40)
    finally:
        watcher.remove()
    for name in ("pandas", "matplotlib", "jinja2"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises ImportError
    findings = Findings(watcher, machine())
    assert "Layers, calibrated" in to_text(findings)
    assert findings.prediction is not None
    assert findings.prediction.to_json()["layers"][0]["layer"] == "Sequential"

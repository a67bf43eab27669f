"""Evaluation in the forecast before one was seen, with a clock held in the hand."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_run_length import LIGHTNING, Trained, ran, trainer_of
from torch.utils.data import DataLoader, IterableDataset

from dlperf.runner.evaluation import UNKNOWN_EVALUATION, Evaluation

SEEN_S = 0.5  # a batch of the training's size, without training


class Evaluated(Trained):
    """A training whose evaluation takes half a second for each batch of 4."""

    def __init__(self) -> None:
        super().__init__()
        begin = self.live.begin
        self.live.begin = functools.partial(begin, seen_s=SEEN_S)  # type: ignore[method-assign]

    def look(self, samples: Any) -> None:
        self.now += SEEN_S * len(samples) / 4


HEAD = """
import torch
from torch import no_grad

class Model:
    training = True
    def eval(self): self.training = False
model = Model()

def passes(loader):
    with no_grad():
        for x in loader:
            look(x)

@torch.no_grad()
def decorated(loader, n=1):
    for i, x in enumerate(loader):
        look(x)

class Slots:
    __slots__ = ("n",)

class Trainer:
    def __init__(self): self.loader = val
    def check(self): self.passes(data=self.loader)
    def passes(self, data):
        model.eval()
        for x in data: look(x)
trainer = Trainer()

for epoch in range(4):
    decorated([], Slots.n)
    for x in batches(40):
        train()
"""
# 10 batches of 8 samples are worth 20 of the training's; of 0.5 s each
CASES = {
    "with no_grad():\n    for x in val: look(x)": 10.0,
    "model.eval()\nfor i, x in enumerate(val):\n    look(x)": 10.0,
    "with no_grad(): [look(x) for x in val]": 10.0,
    "passes(val)": 10.0,
    "decorated(loader=val)": 10.0,
    "trainer.check()": 10.0,
    "passes(val)\ndecorated(val)": 20.0,
    "if epoch % 2 == 0:\n    passes(val)": 5.0,
    "if epoch > 1: passes(val)": None,
    "passes(stream)": None,
    "for x in val: look(x)  # no sign of evaluation": 0.0,
    "pass": 0.0,
}


@pytest.mark.parametrize("source", CASES)
def test_evaluation_from_the_source(tmp_path: Path, source: str) -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(torch.ones(80))

    run = Evaluated()
    indented = "".join(f"    {line}\n" for line in source.splitlines())
    names = {"val": DataLoader(torch.ones(80), batch_size=8), "stream": DataLoader(Stream())}
    live = ran(tmp_path, HEAD + indented, run, look=run.look, **names).live
    first, each_s = live.first, CASES[source]
    assert first is not None
    assert first.run_s == 4 * 40 + 4 * (each_s or 0.0)
    assert first.evaluation_s == 4 * (each_s or 0.0)
    assert first.left_s == first.run_s - 19
    assert (UNKNOWN_EVALUATION in live.notes) == (each_s is None)
    shown = next(line for line in run.line.shown if "step 19 of 40" in line)
    assert ("predicted for evaluation" in shown) == bool(each_s)
    if each_s:
        assert first.run_s == run.now - 100.0  # what it took
    assert live.training.error_frac == 0.0
    if live.with_pause is not None:
        assert live.with_pause.evaluation_s == 0.0  # the measured pause takes its place


def test_evaluation_among_the_steps() -> None:
    every = Evaluation(20.0, every_steps=30.0)
    assert every.expected(0.5, 19) == {"evaluation_s": 10.0, "evaluation_steps": 30.0}
    assert every.expected(0.5, 30) == {}  # seen: among the steps
    epochs = Evaluation(20.0, every_epochs=2.0)
    assert epochs.expected(0.5, 19) == {"evaluation_s": 10.0, "evaluations_per_epoch": 0.5}
    assert epochs.expected(0.5, 19, 25.0) == {"evaluation_s": 10.0, "evaluation_steps": 50.0}
    assert Evaluation(None).expected(0.5, 19) == {}


ARGS = {"max_steps": 100, "num_train_epochs": 3.0, "train_batch_size": 4}
LOADERS = {
    "enable_validation": True,
    "num_val_batches": [10, 2],
    "val_dataloaders": [SimpleNamespace(batch_size=8)],
    "train_dataloader": SimpleNamespace(batch_size=4),
    "val_check_batch": 40,
    "check_val_every_n_epoch": 1,
    "max_steps": 100,
}
TRAINERS = [
    ("transformers", {"eval_strategy": "steps"}, {"eval_dataset": range(80)}, 100 + 3 * 10),
    ("transformers", {"eval_strategy": "no"}, {"eval_dataset": range(80)}, 100),
    ("transformers", {"evaluation_strategy": "steps"}, {"eval_dataset": {"a": range(8)}}, 103),
    ("transformers", {"eval_strategy": "steps"}, {"eval_dataset": iter(())}, 100),
    ("lightning.pytorch.trainer", {}, {"val_check_batch": 30}, 100 + 3 * 12),
    ("lightning.pytorch.trainer", {}, {"enable_validation": False}, 100),
    ("lightning.pytorch.trainer", {}, {"num_val_batches": [float("inf")]}, 100),
]


@pytest.mark.parametrize(("package", "args", "numbers", "expected_s"), TRAINERS)
def test_evaluation_of_a_trainer(
    package: str, args: dict[str, Any], numbers: dict[str, Any], expected_s: float
) -> None:
    run = Evaluated()
    known = {**LIGHTNING, **LOADERS, "eval_steps": 30, "args": SimpleNamespace(**ARGS, **args)}
    trainer = trainer_of(f"{package}.trainer", run, **{**known, **numbers})
    trainer.fit(19)
    assert run.live.error is None
    assert run.live.first is not None
    assert run.live.first.epoch_s == expected_s

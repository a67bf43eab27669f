"""The length of a run, read from the loops of its source, with a clock held in the hand."""

from __future__ import annotations

import ast
import itertools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from test_live_eta import Line, Loader, Pass, Run

from dlperf.runner.evaluation import UNKNOWN_EVALUATION
from dlperf.runner.frame_names import Names
from dlperf.runner.step_rate import ObservedStep


class Trained(Run):
    """A run of steps of one second; the ETA is made with step `eta_at`."""

    def __init__(self, eta_at: int = 19, passes: int = 1, **numbers: Any) -> None:
        super().__init__(line=Line(), **numbers)
        self.eta_at, self.passes, self.n_passes = eta_at, passes, 0

    def train(self) -> None:
        """One pass; of every `passes`, the last one ends a step."""
        self.n_passes += 1
        if self.n_passes % self.passes:
            return
        if not self.log.n_steps:
            self.log.began = self.now
            self.log.follow([self], 1)  # as soon as a training is found
        if self.log.n_steps == self.eta_at - 1:
            self.live.begin([ObservedStep(1.0)] * 8, self.passes)
        self.now += 1.0
        self.iterator._num_yielded += 1
        self.log.count(self.now)

    def batches(self, n: int) -> Iterator[int]:
        """A loader's pass."""
        self.iterator = Pass()
        loader = Loader(n)
        epoch = self.log.begin(loader, self.iterator, self.now)
        if self.log.on_pass is not None:
            self.log.on_pass(epoch, loader, sys._getframe(1))
        return iter(range(n))


RunKind = TypeVar("RunKind", bound=Run)


def ran(path: Path, source: str, run: RunKind, **names: Any) -> RunKind:
    """The run of a script, whose functions ``train`` and ``batches`` are those of `run`."""
    path = path / "script.py"
    path.write_text(textwrap.dedent(source), encoding="utf-8")
    found = dict(names)
    if isinstance(run, Trained):
        found |= {"train": run.train, "batches": run.batches}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), found)
    assert run.live.error is None
    run.live.finish()
    return run


STEPS = {
    "a while with a counter": """
        step = 0
        while step < args.steps:
            train()
            step += 1
    """,
    "a while that counts before it trains": """
        step = 0
        while args.steps > step:
            step = step + 1
            train()
    """,
    "a while up to a bound": """
        step = 1
        while step <= args.steps:
            train()
            step += 1
    """,
    "a break at the end, as in nanoGPT": """
        iter_num = 0
        while True:
            for micro in range(2):
                pass
            train()
            iter_num += 1
            if iter_num > args.steps - 1:
                break
    """,
    "a break where a limit is given, as in minGPT": """
        step = 0
        while True:
            train()
            step += 1
            if args.steps is not None and step >= args.steps: break
    """,
    "a break where the limit is a number above": """
        step = 0
        while True:
            train()
            step += 1
            if args.steps > 0 and args.steps != -1 and args.steps and step >= args.steps: break
    """,
    "a break at the start": """
        step = 0
        while True:
            if step == args.steps: break
            train()
            step += 1
    """,
    "an attribute counts": """
        class Trainer:
            __slots__ = ("step", "steps")
            def fit(self):
                self.step, self.steps = 0, args.steps
                while self.step < self.steps:
                    self.one()
                    self.step += 1
            def one(self):
                train()
        Trainer().fit()
    """,
    "two steps counted at a time": """
        seen = 0
        while seen < 8 * args.steps:
            train()
            seen += 8
    """,
    "rounds before the first step, as while a replay buffer fills": """
        for step in range(args.steps + 64):
            if step < 64: continue
            train()
    """,
    "a run that goes on": """
        step = args.resumed
        while step < args.steps + args.resumed:
            train()
            step += 1
    """,
    "count": """
        import itertools
        for step in itertools.count():
            if step >= args.steps:
                break
            train()
    """,
    "arithmetic": """
        for step in range(int(args.steps / 2 * 1e0) * 2 + 3 % 3):
            train()
    """,
    "nested ranges": """
        for epoch in range(5):
            for i in range(args.steps // 5):
                train()
    """,
    "nested ranges, short": """
        for epoch in range(args.steps // 4):
            for i in range(4):
                train()
    """,
    "a while in a range": """
        for epoch in range(5):
            step = 0
            while step < args.steps // 5:
                train()
                step += 1
    """,
    "an epoch's own function": """
        def one_epoch():
            step = 0
            while step < args.steps // 5:
                train()
                step += 1
        epoch = 0
        while epoch < 5:
            one_epoch()
            epoch += 1
    """,
    "a limit inside of nested ranges": """
        total = 0
        for epoch in range(args.steps):
            for i in range(40):
                train()
                total += 1
                if total >= args.steps:
                    break
            if total >= args.steps:
                break
    """,
    "a limit over loaders": """
        step = 0
        while step < args.steps:
            for batch in batches(30):
                train()
                step += 1
                if step >= args.steps: break
    """,
    "an endless iterator": """
        it = batches(10)
        for i in range(args.steps):
            if next(it, None) is None:
                it = batches(10)
                next(it)
            train()
    """,
    "an endless iterator, its first pass watched": """
        it = batches(400)
        for i in range(args.steps):
            next(it)
            train()
    """,
    "an endless iterator, in nested ranges": """
        for epoch in range(2):
            it = batches(7)
            for i in range(args.steps // 2):
                for micro in range(3):
                    try: next(it)
                    except StopIteration:
                        it = batches(7)
                        next(it)
                train()
    """,
    "an endless generator": """
        def endless():
            while True:
                for batch in batches(10):
                    yield batch
        it = endless()
        for i in range(args.steps):
            next(it)
            train()
    """,
    "lengths of tensors": """
        for epoch in range(5):
            for start in range(0, len(X), X.shape[1]):
                for i in range(weight.size(0)):
                    train()
    """,
    "a limit before the last epoch": """
        step = 0
        for epoch in range(50):
            for batch in batches(30):
                if step >= args.steps: break
                train()
                step += 1
            if step >= args.steps: break
    """,
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_from_the_source(tmp_path: Path, name: str) -> None:
    args = SimpleNamespace(steps=100, resumed=5000)
    tensors = {"X": torch.zeros(40, 4), "weight": torch.nn.Parameter(torch.zeros(2))}
    live = ran(tmp_path, STEPS[name], Trained(), args=args, **tensors).live
    assert live.first is not None
    assert (live.first.steps, live.is_epoch) == (100, False)
    assert live.epoch.error_frac == 0.0
    assert live.epoch.measured_s == 100.0
    assert not live.notes


@pytest.mark.parametrize("passes", [1, 4])
def test_a_counter_of_passes(tmp_path: Path, passes: int) -> None:
    source = "n = 0\nwhile n < 400:\n    train()\n    n += 1\n"
    first = ran(tmp_path, source, Trained(passes=passes)).live.first
    assert first is not None
    assert first.steps == 400 / passes


def test_a_counter_of_updates_by_hand(tmp_path: Path) -> None:
    """The next forward ends an update while it is watched, and the backward after that."""
    run = Run(line=Line())
    rounds = iter(range(1, 1000))

    def train() -> None:
        n = next(rounds)
        if 9 < n <= 20:
            run.step(1.0)
        if n == 9:
            run.log.follow([], n)
        if n == 20:
            run.log.count_backwards()
            run.live.begin([ObservedStep(1.0)] * 8, 1)
        if n >= 20:
            run.step(1.0)

    source = """
        for step in itertools.count(1):
            train()
            if step >= 300: break
    """
    try:
        live = ran(tmp_path, source, run, train=train, itertools=itertools).live
    finally:
        run.log.remove()
    assert live.first is not None
    assert live.first.steps == 300


EPOCHS = {
    "while": """
        epoch = 0
        while epoch < 3:
            for batch in batches(40):
                train()
            epoch += 1
    """,
    "the pass goes on to its end": """
        step = 0
        while step < 90:
            for batch in batches(40):
                train()
                step += 1
    """,
    "a limit that nothing reaches": """
        step = 0
        for epoch in range(3):
            for batch in batches(40):
                train()
                step += 1
                if step >= 120: break
    """,
    "a limit of each epoch": """
        for epoch in range(3):
            for i, batch in enumerate(batches(100)):
                if i >= 40: break
                train()
    """,
    "a loader by hand, in each epoch": """
        for epoch in range(3):
            it = batches(40)
            batch = next(it)
            while batch is not None:
                train()
                batch = next(it, None)
    """,
    "a loader by hand, with a limit": """
        for epoch in range(3):
            it = batches(40)
            for i in range(500):
                if next(it, None) is None: break
                train()
    """,
    "a loader of a generator": """
        def scaled(loader):
            for batch in loader:
                yield batch / 2
        for epoch in range(3):
            for batch in scaled(batches(40)):
                train()
    """,
    "a limit of each call": """
        def one_epoch(n):
            for i, batch in enumerate(batches(100), 0):
                train()
                if i + 0 == n or i == n - 1:
                    break
        for epoch in range(3):
            one_epoch(40)
    """,
}


@pytest.mark.parametrize("name", EPOCHS)
def test_epochs_from_the_source(tmp_path: Path, name: str) -> None:
    live = ran(tmp_path, EPOCHS[name], Trained()).live
    assert live.first is not None
    assert (live.first.steps, live.first.n_epochs, live.is_epoch) == (40, 3, True)
    assert live.training.error_frac == 0.0
    assert live.training.measured_s == 120.0


def test_epochs_of_one_batch_stay_epochs(tmp_path: Path) -> None:
    source = "for epoch in range(60):\n    for batch in batches(1):\n        train()\n"
    live = ran(tmp_path, source, Trained()).live
    assert live.first is not None
    assert (live.first.steps, live.first.n_epochs, live.is_epoch) == (1, 60, True)


def test_evaluation_between_steps_is_unknown(tmp_path: Path) -> None:
    source = """
        def evaluate():
            with torch.no_grad():
                for batch in loader: pass
        it = batches(400)
        for i in range(100):
            next(it)
            train()
            if i % 50 == 49: evaluate()
    """
    loader = torch.utils.data.DataLoader(torch.zeros(8))
    live = ran(tmp_path, source, Trained(), torch=torch, loader=loader).live
    assert live.notes == [UNKNOWN_EVALUATION]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sizes_run_no_code_of_the_program() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *_: Any) -> Any:
            raise AssertionError

    nested = torch.nested.nested_tensor([torch.zeros(2)])
    local = {"x": torch.zeros(3, 2), "a": np.zeros((4, 5)), "scalar": torch.tensor(0), "n": nested}
    names = Names.of(local, {})
    texts = ["len(x)", "len(a)", "a.shape[-1]", "x.size(1)", "x.size(2)", "len(scalar)", "len(n)"]
    with Mode():
        found = [names.value(ast.parse(text, mode="eval").body) for text in texts]
    assert found == [3, 4, 5, 2, None, None, None]


UNKNOWN = {
    "another condition": "while not stopped(train()): pass",
    "a counter that is set back": """
        step = 0
        while step < 100:
            train()
            step += 1
            if step == 50 and train: step = 50
    """,
    "a bound of its own": """
        class Bound:
            def __gt__(self, other): return other < 100
        step, bound = 0, Bound()
        while step < bound:
            train()
            step += 1
    """,
    "a length of a class of its own": """
        class Rows(torch.Tensor): pass
        X = torch.zeros(100).as_subclass(Rows)
        for i in range(len(X)): train()
    """,
    "a counter by a float": """
        step = 0.0
        while step < 0.995:
            train()
            step += 0.01
    """,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_stays_unknown(tmp_path: Path, name: str) -> None:
    calls: list[None] = []

    def stopped(call: None) -> bool:
        calls.append(call)
        return len(calls) == 100

    first = ran(tmp_path, UNKNOWN[name], Trained(), stopped=stopped, torch=torch).live.first
    assert first is not None
    assert first.steps is None


@pytest.mark.parametrize(
    "source",
    [
        "for i in range(100):\n    train()\n    if i == 60 and train: break\n",
        "for e in range(5):\n    for i in range(20):\n        train()\n    if e == 2 and i: break\n",
        "i = 0\nwhile i < 100 and train:\n    train()\n    i += 1\n",
    ],
)
def test_a_loop_that_may_end_early_is_noted(tmp_path: Path, source: str) -> None:
    live = ran(tmp_path, source, Trained()).live
    assert live.first is not None
    assert live.first.steps == 100
    (note,) = live.notes
    assert "rounds may end early" in note


@pytest.mark.parametrize(
    ("told", "note"),
    [
        ({"n_steps": 90}, "--steps 90 was given, and the script's loops have 120 steps"),
        ({"n_epochs": 4}, "--epochs 4 was given, and the script's loop has 3 epochs"),
        ({"n_epochs": 3}, None),
        ({"n_steps": 120}, None),
    ],
)
def test_what_the_user_says_is_compared_with_the_source(
    tmp_path: Path, told: dict[str, int], note: str | None
) -> None:
    run = Trained(**told)
    ran(tmp_path, EPOCHS["while"], run)
    assert [said for said in run.live.notes if said.startswith(note or "")] == run.live.notes
    assert len(run.live.notes) == (note is not None)
    assert run.live.first is not None
    shown = "step 19 of 90" if "n_steps" in told else f"of {told['n_epochs']}: step 19 of 40"
    if note is not None:
        assert note in run.line.shown[0]
        assert shown in run.line.shown[1] or "n_steps" in told


TRAINER = """
class Loop:
    def run(self, trainer, n):
        for _ in range(n):
            trainer.count()

class Trainer:
    def __init__(self, train, **numbers):
        self.train, self.n_done = train, numbers.pop("n_done", 0)
        vars(self).update(numbers)

    @property
    def global_step(self):  # of the running step, all but the last optimizer's are counted
        return self.n_done * self.updates + self.updates - 1
    state = property(lambda self: self)

    def count(self):
        self.train()
        self.n_done += 1

    def fit(self, n): Loop().run(self, n)
"""


def trainer_of(module: str, run: Trained, **numbers: Any) -> Any:
    """A Trainer as its library defines one, as far as dlperf looks at it."""
    names: dict[str, Any] = {"__name__": module}
    exec(compile(TRAINER, f"<{module}>", "exec"), names)
    return names["Trainer"](run.train, **{"updates": 1, **numbers})


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"args": SimpleNamespace(max_steps=-1, num_train_epochs=3.0)}, (3, None)),
        ({"args": SimpleNamespace(max_steps=90, num_train_epochs=3.0), "max_steps": 90}, 90),
        ({"args": SimpleNamespace(max_steps=-1, num_train_epochs=2.5), "max_steps": 100}, 100),
        (
            {
                "args": SimpleNamespace(max_steps=-1, num_train_epochs=3.0),
                "n_done": 30,
                "max_steps": 120,
            },
            90,
        ),
    ],
)
def test_the_numbers_of_a_transformers_trainer(numbers: dict[str, Any], expected: Any) -> None:
    assert told_by("transformers.trainer", numbers) == expected


LIGHTNING: dict[str, Any] = {
    "max_epochs": 3,
    "max_steps": -1,
    "num_training_batches": 40,
    "limit_train_batches": 1.0,
    "current_epoch": 0,
    "accumulate_grad_batches": 1,
    "lightning_module": SimpleNamespace(automatic_optimization=True),
    "fit_loop": SimpleNamespace(total_batch_idx=18),
}
BY_HAND = {"lightning_module": SimpleNamespace(automatic_optimization=False)}


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({}, (3, None)),
        ({"max_steps": 90}, 90),
        ({"max_epochs": -1, "max_steps": 90}, 90),
        ({"limit_train_batches": 0.5, "num_training_batches": 20}, 60),
        ({"max_epochs": -1}, None),
        ({"num_training_batches": float("inf"), "max_steps": 70}, 70),
        ({"max_steps": 90, "updates": 2, **BY_HAND}, 45),
        ({"max_steps": 91, "updates": 2, **BY_HAND}, 46),
        ({"limit_train_batches": 40, "updates": 2, **BY_HAND}, 120),
        ({"current_epoch": "unreadable", "updates": 1}, None),
    ],
)
def test_the_numbers_of_a_lightning_trainer(
    package: str, numbers: dict[str, Any], expected: Any
) -> None:
    assert told_by(f"{package}.trainer.trainer", {**LIGHTNING, **numbers}) == expected


def told_by(module: str, numbers: dict[str, Any]) -> Any:
    """The run's epochs (and steps, which are None) or its steps, as the ETA has them."""
    run = Trained()
    trainer = trainer_of(module, run, **numbers)
    has_loader = numbers.get("max_steps", -1) == -1
    if has_loader:
        run.loader(Loader(40))
    for _ in range(1):
        trainer.fit(1)
        run.log.updates_per_step = numbers.get("updates", 1)
        trainer.fit(30)
    live = run.live
    assert live.error is None
    assert live.first is not None
    if live.is_epoch:
        return (live.first.n_epochs, None) if live.first.n_epochs else None
    return live.first.steps

"""dlperf inside the Trainers of Lightning and transformers, in real trainings; where these are
installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dlperf.core.errors import DlperfError
from dlperf.runner.rendezvous import Rendezvous, World
from dlperf.runner.session import Session
from dlperf.runner.watcher import Watcher

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from report_cases import machine
from test_watcher import hooks

pytestmark = pytest.mark.network  # the libraries ask for their host once

Fit = Callable[..., tuple[list[str], list[torch.Tensor], torch.Tensor]]
"""A training with or without dlperf: its losses, its weights, and the next random number."""


@pytest.fixture(autouse=True)
def _no_hook_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    before = hooks()
    yield
    assert hooks() == before


def fail(*_: Any) -> None:
    raise RuntimeError("own failure")


def assert_same(one: Any, other: Any) -> None:
    assert one[0]
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))
    assert torch.equal(one[2], other[2])


@contextlib.contextmanager
def plainly_watched(**length: int) -> Iterator[Any]:
    """As `dlperf run` watches a script: the live ETA."""
    told = (length.get("n_epochs"), length.get("n_steps"))
    session = Session(None, None, told, Rendezvous(World(0, 1)), shows_eta=False)
    session.watch_after_torch()
    live = session.live
    assert live is not None
    live.log = session.watcher.epochs  # type: ignore[attr-defined, union-attr]
    try:
        yield live
    finally:
        session.end()
    assert session.failure is None
    assert live.error is None


# -- Lightning -------------------------------------------------------------------------------------


def fit_lightning(
    profiler: Any = None, n_epochs: int = 2, raises: Any = None, **options: Any
) -> Any:
    lightning = pytest.importorskip("lightning.pytorch")
    torch.manual_seed(0)
    losses: list[str] = []

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x).relu())

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if raises is not None and index == 5:
                raise raises
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            losses.append(loss.item().hex())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    dataset = TensorDataset(torch.randn(100, 6), torch.randint(3, (100,)))
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=n_epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler=profiler,
        **options,
    )
    trainer.fit(model, DataLoader(dataset, 4, shuffle=True), DataLoader(dataset, 50))
    return losses, list(model.parameters()), torch.rand(1), trainer


def profiler_of(*args: Any) -> Any:
    pytest.importorskip("lightning.pytorch")
    from dlperf.integrations.lightning import DlperfProfiler

    return DlperfProfiler(*args)


@pytest.mark.slow
def test_lightning_has_layers_and_the_same_training() -> None:
    profiler = profiler_of(machine())
    watched = fit_lightning(profiler)
    assert_same(watched, fit_lightning())
    text = profiler.summary()
    assert {"Classifier", "first", "last"} <= set(profiler.report().frame["layer"])
    assert "watched Classifier with AdamW: 8 steps" in text
    assert "epoch of 25 steps" in text
    assert "all 2 epochs" in text
    assert "live forecast after 19 steps: epoch" in text
    trainer, loader = watched[-1], DataLoader(TensorDataset(torch.randn(4, 6)), 2)
    trainer.validate(trainer.lightning_module, loader, verbose=False)
    assert profiler.summary() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"n_epochs": -1, "max_steps": 40},
        {"limit_train_batches": 20},
        {"limit_train_batches": 0.8, "max_steps": 40},
    ],
)
def test_lightning_knows_a_limited_number_of_steps(options: dict[str, Any]) -> None:
    profiler = profiler_of(machine())
    fit_lightning(profiler, **options)
    live = profiler._session.live
    assert (live.first.steps, live.is_epoch) == (40.0, False)


@pytest.mark.slow
def test_lightning_after_a_failed_fit() -> None:
    profiler = profiler_of(machine())
    before = hooks()
    with pytest.raises(ValueError, match="mine"):
        fit_lightning(profiler, raises=ValueError("mine"))
    assert hooks() == before
    assert "5 optimizer steps were seen, at least 7 are needed" in profiler.summary()
    fit_lightning(profiler)
    assert "watched Classifier" in profiler.summary()


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["install", "_begin", "_begin_layers"])
def test_lightning_goes_on_where_dlperf_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = fit_lightning()
    monkeypatch.setattr(Watcher, failing, fail)
    profiler = profiler_of(machine())
    assert_same(fit_lightning(profiler), plain)
    reason = "watching failed and was given up: RuntimeError: own failure"
    assert profiler.summary() == f"DlperfProfiler: {reason}"
    with pytest.raises(DlperfError, match=reason):
        profiler.report()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 25, 25)),
        ({"n_epochs": 5, "max_steps": 40}, (None, 40, 40)),
        ({"n_epochs": -1, "max_steps": 40, "accumulate_grad_batches": 2}, (None, 40, 40)),
        ({"n_epochs": 4, "accumulate_grad_batches": 2}, (4, 12.5, 13)),
        ({"n_epochs": 3, "limit_train_batches": 20}, (None, 60, 60)),
    ],
)
def test_lightning_in_a_script_that_knows_nothing_of_dlperf(
    options: dict[str, Any], expected: tuple[Any, float, int]
) -> None:
    with plainly_watched() as live:
        for _fold in range(1):  # a loop of the script around the Trainer
            fit_lightning(**options)
    assert (live.first.n_epochs, live.first.steps) == expected[:2]
    assert live._evaluation.batches == 25  # 2 of 50 samples; those of the training have 4
    assert live.first.evaluation_s > 0 or options  # with others, one was seen before
    assert live.log.epochs[0].n_steps == expected[2] or not live.is_epoch
    assert live.log.n_steps == expected[2] * (expected[0] or 1)


@pytest.mark.slow
@pytest.mark.parametrize(("max_steps", "n_periods"), [(80, 40), (81, 41), (-1, 50)])
def test_lightning_counts_each_optimizers_step(max_steps: int, n_periods: int) -> None:
    """Two optimizers, stepped by hand, for each batch: a step of dlperf are two of Lightning."""
    lightning = pytest.importorskip("lightning.pytorch")

    class Two(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.last(self.first(batch[0]).relu()).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(part.parameters(), 1e-3) for part in (self.first, self.last)]

    trainer = lightning.Trainer(
        max_epochs=2,
        max_steps=max_steps,
        limit_train_batches=25,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with plainly_watched() as live:
        trainer.fit(Two(), DataLoader(TensorDataset(torch.randn(100, 6)), 4))
    assert live.log.n_steps == n_periods
    assert live.first.steps == n_periods


# -- transformers ----------------------------------------------------------------------------------


def train_transformers(
    callback: Any = None, raises: Any = None, resume: bool = False, **options: Any
) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    losses: list[str] = []

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            if raises is not None and len(losses) == 5:
                raise raises
            logits = self.last(self.first(x).relu())
            loss = nn.functional.cross_entropy(logits, labels)
            losses.append(loss.item().hex())
            return {"loss": loss, "logits": logits}

    torch.manual_seed(0)
    model = Classifier()
    dataset = [{"x": torch.randn(6), "labels": n % 3} for n in range(100)]
    chosen = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 10,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments("out", **chosen)
    callbacks = [] if callback is None else [callback]
    trainer = transformers.Trainer(
        model, arguments, train_dataset=dataset, eval_dataset=dataset, callbacks=callbacks
    )
    try:
        trainer.train(resume_from_checkpoint=resume or None)
    finally:
        assert not {"_run_epoch", "training_step"} & vars(trainer).keys()
    return losses, list(model.parameters()), torch.rand(1), trainer.state.log_history


def callback_of(*args: Any) -> Any:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from dlperf.integrations.transformers import DlperfCallback

    return DlperfCallback(*args)


def forecasts(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [entry for entry in log_history if "dlperf_step_s" in entry]


@pytest.mark.slow
def test_transformers_has_layers_a_forecast_and_the_same_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    callback = callback_of(machine())
    watched = train_transformers(callback)
    printed = capsys.readouterr().out
    plain = train_transformers()
    assert_same(watched, plain)
    assert {"Classifier", "first", "last"} <= set(callback.report().frame["layer"])
    assert "watched Classifier with AdamW: 8 steps" in printed
    assert "epoch of 25 steps" in printed
    (forecast,) = forecasts(watched[-1])
    assert forecast["step"] == 19
    assert 0 < forecast["dlperf_step_s"] < forecast["dlperf_epoch_s"] < forecast["dlperf_run_s"]
    assert forecast["dlperf_predicted_step_s"] > 0
    losses = [
        [entry["loss"] for entry in log_history if "loss" in entry]
        for log_history in (watched[-1], plain[-1])
    ]
    assert len(losses[0]) == 5
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", [19, 45])
def test_transformers_knows_a_limited_number_of_steps(n_steps: int) -> None:
    callback = callback_of(machine())
    (forecast,) = forecasts(train_transformers(callback, max_steps=n_steps)[-1])
    assert forecast["step"] == 19
    assert forecast["dlperf_run_s"] > 0
    assert "dlperf_epoch_s" not in forecast
    assert callback._session.live.first.steps == n_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (2, 25, 50)),
        ({"max_steps": 40}, (None, 40, 40)),
        ({"num_train_epochs": 1.6}, (None, 40, 40)),
        ({"gradient_accumulation_steps": 2, "num_train_epochs": 3}, (3, 12.5, 39)),
    ],
)
def test_transformers_in_a_script_that_knows_nothing_of_dlperf(
    options: dict[str, Any], expected: tuple[Any, float, int]
) -> None:
    with plainly_watched() as live:
        train_transformers(**options)
    assert (live.first.n_epochs, live.first.steps, live.log.n_steps) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "every_steps"),
    [({"eval_strategy": "epoch"}, None), ({"eval_strategy": "steps", "eval_steps": 30}, 30)],
)
def test_transformers_tells_its_evaluation(options: dict[str, Any], every_steps: Any) -> None:
    with plainly_watched() as live:
        train_transformers(**options)
    evaluation = live._evaluation
    assert (evaluation.batches, evaluation.every_steps) == (25, every_steps)
    assert live.first.evaluation_s > 0


@pytest.mark.slow
def test_transformers_that_goes_on_with_a_checkpoint() -> None:
    options = {"save_strategy": "steps", "save_steps": 25}
    train_transformers(**options, num_train_epochs=1)
    with plainly_watched(n_epochs=3) as live:
        train_transformers(resume=True, num_train_epochs=2)
    assert live.notes == []
    with plainly_watched() as live:
        train_transformers(resume=True, num_train_epochs=2)
    assert (live.first.steps, live.log.n_steps) == (25, 25)


@pytest.mark.slow
def test_transformers_after_a_failed_training() -> None:
    callback = callback_of(machine())
    before = hooks()
    with pytest.raises(ValueError, match="mine"):
        train_transformers(callback, raises=ValueError("mine"))
    assert hooks() == before
    assert "5 optimizer steps were seen, at least 7 are needed" in callback.summary()
    train_transformers(callback, gradient_accumulation_steps=2, num_train_epochs=4)
    assert "a step has 2 forward and backward passes over 2 batches" in callback.summary()


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["install", "_begin", "_begin_layers"])
def test_transformers_goes_on_where_dlperf_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = train_transformers()
    monkeypatch.setattr(Watcher, failing, fail)
    capsys.readouterr()
    callback = callback_of(machine())
    watched = train_transformers(callback)
    assert_same(watched, plain)
    assert not forecasts(watched[-1])
    reason = "DlperfCallback: watching failed and was given up: RuntimeError: own failure"
    assert reason in capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_transformers_where_the_trainer_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = callback_of(machine())
    module = sys.modules["dlperf.integrations.transformers"]
    monkeypatch.setattr(module, "_calling_trainer", fail)
    train_transformers(callback)
    reason = "watching failed and was given up: RuntimeError: own failure"
    assert callback.summary() == f"DlperfCallback: {reason}"


def test_a_machine_file_that_is_not_there_is_noticed_before_the_training(tmp_path: Path) -> None:
    for make in (profiler_of, callback_of):
        with pytest.raises(DlperfError, match="there is no such machine file"):
            make(tmp_path / "none.json")

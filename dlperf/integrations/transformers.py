"""dlperf as a callback of a Hugging Face Trainer."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Any

from transformers import Trainer, TrainerCallback

from dlperf.core.patching import wrap_attribute
from dlperf.integrations.trainer_watch import TrainerWatch
from dlperf.runner.findings import Findings


class DlperfCallback(TrainerWatch, TrainerCallback):  # type: ignore[misc]
    """Watches a training: predicted beside actual times of the layers, the step and the run::

        trainer = transformers.Trainer(callbacks=[DlperfCallback("machine.json")], ...)

    After the watched steps it logs the forecast through the Trainer, in seconds:
    ``dlperf_step_s`` (measured), ``dlperf_predicted_step_s``, ``dlperf_epoch_s``, ``dlperf_run_s``.
    At the end it prints the summary. `machine` is a Machine or a machine file, by default this
    machine's file. Rank 0 is watched. If dlperf fails, the training goes on, and the summary is one
    line.

    Raises DlperfError for a machine file that is missing or cannot be used.
    """

    _trainer: Any = None
    _watched: Findings | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch."""
        self._watched = None
        if not state.is_world_process_zero:
            return
        with self._guarded():
            self._begin(self._predict)
            self._trainer = _calling_trainer()
            # no event follows an exception; older releases have one method for all epochs
            name = "_run_epoch" if hasattr(self._trainer, "_run_epoch") else "training_step"
            self._undo.callback(wrap_attribute(self._trainer, name, self._call))

    def _call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._until_failure():
            return original(*args, **kwargs)

    def _predict(self) -> None:
        """Predict the step now: the ETA that follows contains the second that this takes."""
        with self._guarded():
            self._watched = self._found()
            _ = self._watched.prediction

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the forecast once it is there."""
        watched = self._watched
        if watched is None or watched.live is None or watched.live.first is None:
            return
        with self._guarded():
            eta, prediction = watched.live.first, watched.prediction
            is_epoch = watched.live.is_epoch  # else the ETA is one of all steps
            seconds = {
                "step": watched.step_s,
                "predicted_step": None if prediction is None else prediction.step.total_s,
                "epoch": eta.epoch_s if is_epoch else None,
                "run": eta.run_s if is_epoch else eta.epoch_s,
            }
            known = {f"dlperf_{name}_s": s for name, s in seconds.items() if s is not None}
            # not a subclass's log, which may flush means that it collects
            Trainer.log(self._trainer, known)
        self._watched = None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove every hook, and print the summary."""
        self.on_step_begin(args, state, control)
        if state.is_world_process_zero:
            print(self.summary(), flush=True)
        self._trainer = None


def _calling_trainer() -> Any:
    """The Trainer that calls a callback: events do not name it, and it alone can log."""
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe()))
    return next(caller for caller in callers if isinstance(caller, Trainer))

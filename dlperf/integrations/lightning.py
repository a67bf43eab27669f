"""dlperf as the profiler of a Lightning Trainer."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from dlperf.integrations.trainer_watch import TrainerWatch

try:
    from lightning.pytorch.profilers import Profiler
except ModuleNotFoundError:
    from pytorch_lightning.profilers import Profiler


class DlperfProfiler(TrainerWatch, Profiler):  # type: ignore[misc]
    """Watches a fit: predicted beside actual times of the layers, the step and the run::

        trainer = lightning.Trainer(profiler=DlperfProfiler("machine.json"), ...)

    The Trainer logs the summary after a fit. `machine` is a Machine or a machine file, by default
    this machine's file. The first rank of each node is watched. If dlperf fails, the fit goes on,
    and the summary is one line.

    Raises DlperfError for a machine file that is missing or cannot be used.
    """

    _has_length = False

    def start(self, action_name: str) -> None:
        """Take the run's length from the Trainer before the first epoch: loaders are set up."""
        if action_name == "run_training_epoch" and not self._has_length:
            self._has_length = True
            with self._guarded():
                self._set_length(*self._length())

    def stop(self, action_name: str) -> None:
        """Begin to watch after the last hook before the loaders; a tuner's steps are over then."""
        is_last = action_name.startswith("[LightningModule]") and ".on_fit_start" in action_name
        if is_last and not self.local_rank:
            self._has_length = False
            with self._guarded():
                self._begin()

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """One action of the Trainer. An exception ends the fit."""
        with self._until_failure(), super().profile(action_name):
            yield action_name

    def _length(self) -> tuple[int | None, int | None]:
        """The epochs of the fit, or its steps where these are limited."""
        trainer = self._lightning_module.trainer
        has_limit = trainer.max_steps != -1 or trainer.limit_train_batches != 1.0
        if trainer.max_epochs > 0 and not has_limit:
            return trainer.max_epochs - trainer.current_epoch, None
        steps = trainer.estimated_stepping_batches - trainer.global_step
        return None, int(steps) if math.isfinite(steps) else None

    def describe(self) -> None:
        """Log the summary after a fit, but not again after a validation, test or prediction."""
        if self._stage in (None, "fit"):
            super().describe()

"""dlperf as the profiler of a Lightning Trainer."""

from __future__ import annotations

import contextlib
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

    def start(self, action_name: str) -> None:
        """Nothing begins with an action."""

    def stop(self, action_name: str) -> None:
        """Begin to watch after the last hook before the loaders; a tuner's steps are over then."""
        is_last = action_name.startswith("[LightningModule]") and ".on_fit_start" in action_name
        if is_last and not self.local_rank:
            with self._guarded():
                self._begin()

    @contextlib.contextmanager
    def profile(self, action_name: str) -> Iterator[str]:
        """One action of the Trainer. An exception ends the fit."""
        with self._until_failure(), super().profile(action_name):
            yield action_name

    def describe(self) -> None:
        """Log the summary after a fit, but not again after a validation, test or prediction."""
        if self._stage in (None, "fit"):
            super().describe()

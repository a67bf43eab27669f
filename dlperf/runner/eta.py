"""ETA of an epoch and of a run, from the progress so far and the rate of steps.

An epoch sums the means of its parts: the time that has passed (warm-up and watching included), and
for each step to come the mean interval between the ends of steps, with loading and whatever else
the loop does. Numbers only: no clock, no torch.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from dlperf.core.units import format_seconds
from dlperf.runner.step_rate import Rate

_Interval = tuple[float | None, float | None, float | None]
"""A time with its 90 % interval."""
_UNKNOWN: _Interval = (None, None, None)


@dataclass(frozen=True)
class Progress:
    """The progress of a run. Times in seconds since the start of the first epoch.

    Steps are those of the watched optimizer. `epochs_s`: finished epochs, each to its last step.
    `pauses_s`: from an epoch's last step to the next one's start (validation, checkpoints).
    `starts_s`: from an epoch's start to the end of its first step, without warm-up. `running_s`:
    since the running epoch's start. `steps`: an epoch's length, None if unknown; `n_epochs`: the
    run's. `epochs_before`: those of an earlier run that this one resumes. `evaluation_s`: a pass of
    evaluation, predicted, with `evaluations_per_epoch` after an epoch, or one every
    `evaluation_steps` steps; 0 where there is none, and once it was seen.
    """

    now_s: float
    after_steps: int
    running_s: float
    n_running: int
    steps: float | None
    n_epochs: int | None = None
    epochs_s: tuple[float, ...] = ()
    pauses_s: tuple[float, ...] = ()
    starts_s: tuple[float, ...] = ()
    epochs_before: int = 0
    evaluation_s: float = 0.0
    evaluations_per_epoch: float = 0.0
    evaluation_steps: float = math.inf

    def evaluations_s(self, n_steps: float) -> float:
        """Predicted evaluation between the next `n_steps`."""
        return self.evaluation_s * ((self.after_steps + n_steps) // self.evaluation_steps)

    @property
    def number(self) -> int:
        """The running epoch's number, from 1."""
        return self.epochs_before + len(self.epochs_s) + 1

    @property
    def n_further(self) -> int:
        """Epochs after the running one; 0 where their number is unknown."""
        return 0 if self.n_epochs is None else max(0, self.n_epochs - self.number)

    @property
    def steps_left(self) -> float | None:
        """Steps to the end of the run, or else of the epoch."""
        if self.steps is None:
            return None
        return max(0.0, self.steps - self.n_running) + self.n_further * self.steps


@dataclass(frozen=True)
class Eta:
    """The forecast, in seconds, of the running epoch to its last step and of the run with pauses.

    Each has a 90 % interval, and is None where the length of an epoch, or their number, is unknown.
    `number`: the running epoch's. `n_running`: its steps so far. `pause_s`: the mean pause after an
    epoch (None: none was seen, and none is in the forecast). `left_s`: to the end of the run, or
    else of the epoch. `by_loader`: the loader's workers limit the rate. `pauses_s`: all pauses that
    the run's forecast contains; `evaluation_s`: the evaluation in it that was predicted.
    """

    after_steps: int
    number: int
    n_epochs: int | None
    n_running: int
    steps: float | None
    step_s: float
    epoch_s: float | None
    low_s: float | None
    high_s: float | None
    run_s: float | None
    run_low_s: float | None
    run_high_s: float | None
    left_s: float | None
    pause_s: float | None
    by_loader: bool = False
    pauses_s: float = 0.0
    evaluation_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        names = (
            "after_steps number n_epochs step_s epoch_s low_s high_s run_s run_low_s run_high_s"
            " left_s pause_s evaluation_s"
        )
        return {name: getattr(self, name) for name in names.split()}


def estimate_eta(progress: Progress, rate: Rate) -> Eta:
    """The ETA at `rate` for each step to come.

    epoch = passed + (steps - done) step; run = passed + rest of the epoch + pause, and for each
    further epoch start + (steps - 1) step + pause.
    """
    step_s, steps = rate.step_s, progress.steps
    epoch = run = _UNKNOWN
    left_s: float | None = None
    pause_s = statistics.fmean(progress.pauses_s) if progress.pauses_s else None
    pauses_s = evaluation_s = 0.0
    if steps is not None:
        n_left = max(0.0, steps - progress.n_running)
        left_s, evaluation_s = n_left * step_s, progress.evaluations_s(n_left)
        epoch = _around(progress.running_s + evaluation_s, left_s, rate)
        if progress.n_epochs is not None:
            start_s = statistics.fmean(progress.starts_s) if progress.starts_s else step_s
            each_s = progress.evaluations_per_epoch * progress.evaluation_s
            pauses_s = (progress.n_further + 1) * (each_s if pause_s is None else pause_s)
            steps_s = left_s + progress.n_further * (start_s + max(0.0, steps - 1) * step_s)
            within_s = progress.evaluations_s(progress.steps_left or 0.0)
            evaluation_s = within_s + (pauses_s if pause_s is None else 0.0)
            left_s = steps_s + pauses_s + within_s
            run = _around(progress.now_s + pauses_s + within_s, steps_s, rate)
        else:
            left_s += evaluation_s
    return Eta(
        progress.after_steps,
        progress.number,
        progress.n_epochs,
        progress.n_running,
        steps,
        step_s,
        *epoch,
        *run,
        left_s,
        pause_s,
        rate.waits,
        pauses_s,
        evaluation_s,
    )


def _around(certain_s: float, steps_s: float, rate: Rate) -> _Interval:
    """What is certain and what steps take, with the rate's 90 % interval."""
    low, high = (rate.low_s / rate.step_s, rate.high_s / rate.step_s) if rate.step_s else (1.0, 1.0)
    return certain_s + steps_s, certain_s + low * steps_s, certain_s + high * steps_s


def describe(eta: Eta, is_epoch: bool = True) -> str:
    """The ETA in one line. `is_epoch`: a loader tells the length of an epoch."""
    rate = f"{1 / eta.step_s:.3g} steps/s" if eta.step_s else "no time per step"
    if eta.epoch_s is None or eta.steps is None:
        why = (
            "the loader has no length"
            if is_epoch
            else "no loader or loop tells how many the run has (dlperf run --steps N)"
        )
        return f"{eta.after_steps} steps, {rate}, {format_seconds(eta.step_s)} each; {why}"
    step = f"step {eta.n_running} of {math.ceil(eta.steps)}, {rate}"
    epoch = format_interval(eta.epoch_s, eta.low_s, eta.high_s)
    left = f"{format_seconds(eta.left_s)} left"
    if not is_epoch:
        parts = [step, f"run {epoch}", left]
    else:
        of_all = "" if eta.n_epochs is None else f" of {eta.n_epochs}"
        parts = [f"epoch {eta.number}{of_all}: {step}", f"epoch {epoch}"]
        if eta.run_s is None:
            parts.append(f"{left} of this epoch (dlperf run --epochs E forecasts the run)")
        else:
            run = format_interval(eta.run_s, eta.run_low_s, eta.run_high_s)
            parts += [f"run {run}", left]
    if eta.by_loader:
        parts.append("waiting for the loader")
    if eta.evaluation_s:
        parts.append(f"{format_seconds(eta.evaluation_s)} of it predicted for evaluation")
    elif is_epoch and eta.run_s is not None and eta.pause_s is None:
        parts.append("without validation and other pauses, which show after the first epoch")
    return ", ".join(parts)


def format_interval(value: float | None, low: float | None, high: float | None) -> str:
    """Seconds with their 90 % interval."""
    return f"{format_seconds(value)} ({format_seconds(low)} .. {format_seconds(high)})"


@dataclass(frozen=True)
class EtaResult:
    """A forecast in seconds and its measured value; None where it was not seen."""

    predicted_s: float | None
    measured_s: float | None

    @property
    def error_frac(self) -> float | None:
        """predicted / measured - 1."""
        if self.predicted_s is None or not self.measured_s:
            return None
        return self.predicted_s / self.measured_s - 1

    def to_json(self) -> dict[str, float | None]:
        """The comparison as JSON data."""
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error_frac": self.error_frac,
        }

    def __str__(self) -> str:
        if self.error_frac is None:
            return "it was not finished"
        measured = format_seconds(self.measured_s)
        return f"it took {measured} (forecast {100 * self.error_frac:+.1f} %)"

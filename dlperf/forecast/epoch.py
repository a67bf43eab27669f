"""Forecast of a training run: an epoch is its steps, its loading, its evaluation and its pauses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_count
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.prediction import PredictedStep
from dlperf.forecast.loading import (
    Batches,
    LoaderCosts,
    has_costs,
    period,
    pipeline_s,
    sample_bytes,
)
from dlperf.forecast.loop import Loop, accumulation_s, first_step_s, pause_s, update_s, visit_s


@dataclass(frozen=True, repr=False)
class Epoch(Displayed, by="dlperf.report.summaries"):
    """Forecast in seconds; `epoch_s` is one epoch, `total_s` the whole run:

        epoch_s = steps_s + loop_s + loading_s + evaluation_s + pauses_s + averaging_s + waiting_s
        total_s = preparation_s + first_step_s + start_s + epochs epoch_s + test_s

    Of an epoch: `steps_s` are its training steps, `loop_s` the script's own work in each of them
    (clipping, a scheduler, reading the loss), `loading_s` the overhead of loading, `evaluation_s`
    the validation pass with its loading, `pauses_s` checkpoints. Of the run: `first_step_s` is the
    overhead of its first step, `start_s` the start of loader workers that stay from epoch to epoch,
    `test_s` the pass at the end. None is a part that the machine file lacks; sums leave it out, and
    `notes` name it. `bound` is ``step`` or ``loader``, whichever the other waits for.

    With several `workers` (:func:`dlperf.forecast.worker_processes.forecast_workers`), the parts of
    an epoch are those of the worker with the largest share. `waiting_s` is the wait for the slowest
    after each epoch, `averaging_s` the averaging of weights, `preparation_s` the time until all are
    ready.
    """

    samples: int
    epochs: int
    epoch_s: float
    total_s: float
    steps_per_epoch: int
    steps_s: float = 0.0
    loop_s: float = 0.0
    loading_s: float | None = None
    evaluation_s: float = 0.0
    pauses_s: float = 0.0
    first_step_s: float | None = None
    start_s: float = 0.0
    test_s: float = 0.0
    bound: str = "step"
    notes: tuple[str, ...] = ()
    workers: int = 1
    averaging_s: float = 0.0
    waiting_s: float = 0.0
    preparation_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        return {**asdict(self), "notes": list(self.notes)}


def forecast(
    training: PredictedStep,
    samples: int,
    epochs: int = 1,
    val_samples: int = 0,
    test_samples: int = 0,
    evaluation: PredictedStep | None = None,
    last: PredictedStep | None = None,
    loop: Loop = Loop(),
    loader: SampledLoader | None = None,
) -> Epoch:
    """Time of an epoch and of the whole run, by its parts (:class:`Epoch`).

    An epoch has ceil(samples / batch) steps, floor with ``loop.drop_last``. `last` predicts its
    last, smaller batch; without it that counts as a whole step, which errs high by less than a
    step. `evaluation` predicts the inference pass; without it a pass takes the training step's
    forward, which errs high by the cost of recording for the backward. The last, smaller batch of a
    pass counts as a whole one. Steps are medians, an epoch sums means: the machine's ratio of the
    two is a factor of everything.

    Batches come from `loader`, or without one from tensors in memory of the sizes that the trace
    reads.

    Raises DlperfError for counts below 0 (1 for samples and epochs), a predictor without a step, an
    epoch without a whole batch under ``drop_last``, and a machine file without what the loop needs.
    """
    check_counts(samples, epochs, val_samples, test_samples)
    run = _Forecast(training, samples, evaluation, last, loop, loader)
    return run.epoch(epochs, val_samples, test_samples)


def check_counts(samples: int, epochs: int, val_samples: int, test_samples: int) -> None:
    """Raise DlperfError for counts below 0, or 1 for samples and epochs."""
    check_count("samples", samples)
    check_count("epochs", epochs)
    check_count("val_samples", val_samples, 0)
    check_count("test_samples", test_samples, 0)


def last_batch_size(samples: int, batch_size: int, drop_last: bool = False) -> int | None:
    """Samples of an epoch's last batch; None if it is a whole one.

    >>> last_batch_size(100, 32), last_batch_size(96, 32), last_batch_size(100, 32, drop_last=True)
    (4, None, None)
    """
    return None if drop_last else samples % batch_size or None


class _Forecast:
    def __init__(
        self,
        training: PredictedStep,
        samples: int,
        evaluation: PredictedStep | None,
        last: PredictedStep | None,
        loop: Loop,
        loader: SampledLoader | None,
    ) -> None:
        self.training, self.samples, self.last = training, samples, last
        self.loop, self.loader = loop, loader
        self.notes: list[str] = list(loader.notes) if loader is not None else []
        self.batch = training.trace.batch_size
        self.mean = training.machine.mean_slowdown(training.threads)
        step_s = training.step.total_s
        evaluation_s = (
            evaluation.step.total_s if evaluation is not None else training.step.forward_s
        )
        if step_s is None or evaluation_s is None:
            raise DlperfError(
                f"predictor {training.predictor!r} predicts no whole step, so no epoch; use"
                " calibrated or roofline"
            )
        self.step_s, self.evaluation_s = step_s, self.mean * evaluation_s
        partial = last_batch_size(samples, self.batch, loop.drop_last)
        if last is not None and last.trace.batch_size != partial:
            raise DlperfError(
                f"last: is predicted at batch size {last.trace.batch_size}; the last batch of"
                f" {samples} samples has {partial or self.batch}"
            )
        self.n_steps = samples // self.batch if loop.drop_last else math.ceil(samples / self.batch)
        if self.n_steps == 0:
            raise DlperfError(
                f"samples is {samples}, fewer than a batch of {self.batch}, and drop_last leaves no"
                " step; use a smaller batch size"
            )
        self.n_whole = self.n_steps - (last is not None)
        self.n_updates = math.ceil(self.n_steps / loop.accumulate)
        self.costs = self._loader_costs()
        self.n_workers = loop.loader_workers or 0
        # with more training workers than cores, the prediction is that of one shared core
        self.n_cores = max(1.0, training.machine.cpu.n_cores / training.workers)

    def _loader_costs(self) -> LoaderCosts | None:
        machine, threads = self.training.machine, self.training.threads
        if self.loop.loader_workers is None and self.loader is None and not has_costs(machine):
            self.notes.append(
                f"{machine.path or 'machine'}: holds no costs of loading data, which is not part"
                " of the forecast; dlperf calibrate adds them"
            )
            return None
        return LoaderCosts(machine, threads, machine.contention_slowdown(threads) * self.mean)

    def steps_s(self) -> float:
        """An epoch's steps: forward and backward of each batch, the optimizer of each update."""
        whole = self.training.step
        last = self.last.step if self.last is not None else None
        if self.loop.accumulate == 1:
            return self.mean * (self.n_whole * self.step_s + ((last and last.total_s) or 0.0))
        parts = whole.forward_s, whole.backward_s, whole.optimizer_s, whole.zero_grad_s
        if any(part is None for part in parts):
            raise DlperfError(
                f"accumulate is {self.loop.accumulate}; a forward pass has no updates (predictor"
                f" {self.training.predictor!r})"
            )
        forward_s, backward_s, optimizer_s, zero_s = (part or 0.0 for part in parts)
        last_s = (last.forward_s or 0.0) + (last.backward_s or 0.0) if last else 0.0
        return self.mean * (
            self.n_whole * (forward_s + backward_s)
            + last_s
            + self.n_updates * (optimizer_s + zero_s)
        )

    def loop_s(self) -> float:
        """The script's own work in an epoch, without its loading."""
        quiet_s = self.n_steps * visit_s(self.training, self.loop)
        quiet_s += self.n_updates * update_s(self.training, self.loop)
        added_s = accumulation_s(self.training) if self.loop.accumulate > 1 else 0.0
        return self.mean * (quiet_s + (self.n_steps - self.n_updates) * added_s)

    def _batches(self, costs: LoaderCosts, shuffled: bool) -> Batches:
        """What a batch costs, by the costs of loading and the sampled loader."""
        if self.loader is not None:
            # The sample is a mean of usual batches: the usual contention is in it.
            return costs.batches(
                self.mean * self.loader.batch_s,
                self.loader.tensor_bytes,
                self.n_workers,
                self.loader.waiting_frac,
            )
        sizes = sample_bytes(self.training.trace) or (1,)
        maker = LoaderCosts(costs.machine, 1, costs.factor) if self.n_workers else costs
        fetch_s = maker.fetch_s(self.batch, sizes, shuffled)
        return costs.batches(fetch_s, tuple(self.batch * size for size in sizes), self.n_workers)

    def loading_s(self, n_batches: int, consumer_s: float, shuffled: bool) -> float:
        """Seconds of `n_batches` batches, their loading included."""
        if self.costs is None:
            return n_batches * consumer_s
        one = self._batches(self.costs, shuffled)
        return pipeline_s(n_batches, *self._pipeline(one, consumer_s))

    def _pipeline(
        self, one: Batches, consumer_s: float
    ) -> tuple[float, float, int, int, float, float]:
        return (
            consumer_s + one.take_over_s,
            one.made_s,
            self.n_workers,
            self.training.threads,
            self.n_cores,
            one.busy_frac,
        )

    def waits(self, consumer_s: float) -> bool:
        """Whether the training waits for its loader workers."""
        if self.costs is None or not self.n_workers:
            return False
        return period(*self._pipeline(self._batches(self.costs, True), consumer_s)).waits

    def epoch(self, epochs: int, val_samples: int, test_samples: int) -> Epoch:
        """The forecast from its parts."""
        n_val, n_test = (math.ceil(n / self.batch) for n in (val_samples, test_samples))
        steps_s, loop_s = self.steps_s(), self.loop_s()
        each_s = (steps_s + loop_s) / self.n_steps
        loading_s = self.loading_s(self.n_steps, each_s, self.loop.shuffle) - self.n_steps * each_s
        seen_s = self.evaluation_s + self.mean * visit_s(self.training, self.loop)
        validation_s, test_s = (self.loading_s(n, seen_s, False) for n in (n_val, n_test))
        start_s = 0.0
        if self.costs is not None and self.n_workers:
            starts = self.costs.starts(self.n_workers, self.training.step.peak_memory_bytes or 0)
            once_s, n_passes = starts.start_s + starts.stop_s, 1 + (n_val > 0)
            again_s = once_s
            if self.loop.persistent_workers:
                start_s = n_passes * once_s
                again_s = starts.resume_s * (epochs - 1) / epochs
            loading_s += again_s
            validation_s += again_s if n_val else 0.0
            test_s += once_s if n_test else 0.0
        pauses_s = self.mean * pause_s(self.training, self.loop)
        epoch_s = math.fsum((steps_s, loop_s, loading_s, validation_s, pauses_s))
        first_s = first_step_s(self.training)
        if first_s is None:
            self.notes.append(
                "the overhead of a first step is not part of the forecast; dlperf calibrate"
                " (without --quick) adds it"
            )
        is_bound_by_loader = self.waits(each_s) or (
            not self.n_workers and loading_s > steps_s + loop_s
        )
        return Epoch(
            self.samples,
            epochs,
            epoch_s,
            total_s=math.fsum((first_s or 0.0, start_s, epochs * epoch_s, test_s)),
            steps_per_epoch=self.n_steps,
            steps_s=steps_s,
            loop_s=loop_s,
            loading_s=None if self.costs is None else loading_s,
            evaluation_s=validation_s,
            pauses_s=pauses_s,
            first_step_s=first_s,
            start_s=start_s,
            test_s=test_s,
            bound="loader" if is_bound_by_loader else "step",
            notes=tuple(self.notes),
        )

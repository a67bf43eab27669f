"""Forecast of a training run: an epoch is its steps, its loading, its evaluation and its pauses."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_count
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.prediction import PredictedStep
from dlperf.forecast.loading import (
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
    machine, batch = training.machine, training.trace.batch_size
    mean = machine.mean_slowdown
    seen_s = training.step.forward_s if evaluation is None else evaluation.step.total_s
    if training.step.total_s is None or seen_s is None:
        raise DlperfError(
            f"predictor {training.predictor!r} predicts no whole step, so no epoch; use"
            " calibrated or roofline"
        )
    n_steps = _n_steps(samples, batch, loop.drop_last, last)
    n_updates = math.ceil(n_steps / loop.accumulate)
    n_val, n_test = (math.ceil(n / batch) for n in (val_samples, test_samples))
    loading = _Loading(training, loop, loader, mean)
    steps_s = mean * _steps_s(training, last, loop, n_steps, n_updates)
    around_s = n_steps * visit_s(training, loop) + n_updates * update_s(training, loop)
    if loop.accumulate > 1:
        around_s += (n_steps - n_updates) * accumulation_s(training)
    loop_s = mean * around_s
    each_s = (steps_s + loop_s) / n_steps
    loading_s = loading.pass_s(n_steps, each_s, loop.shuffle) - n_steps * each_s
    seen_s = mean * (seen_s + visit_s(training, loop))
    validation_s, test_s = (loading.pass_s(n, seen_s, False) for n in (n_val, n_test))
    is_bound_by_loader = loading.waits(each_s)
    start_s = 0.0
    if loading.costs is not None and loading.n_workers:
        memory_bytes = training.step.peak_memory_bytes or 0
        starts = loading.costs.starts(loading.n_workers, memory_bytes)
        once_s = again_s = starts.start_s + starts.stop_s
        if loop.persistent_workers:
            start_s = (1 + (n_val > 0)) * once_s
            again_s = starts.resume_s * (epochs - 1) / epochs
        loading_s += again_s
        validation_s += again_s if n_val else 0.0
        test_s += once_s if n_test else 0.0
    else:
        is_bound_by_loader = loading_s > steps_s + loop_s
    pauses_s = mean * pause_s(training, loop)
    epoch_s = math.fsum((steps_s, loop_s, loading_s, validation_s, pauses_s))
    first_s = first_step_s(training)
    notes = list(loader.notes) if loader is not None else []
    if machine.data_sheet is not None:
        notes.append(
            "a data sheet tells neither the time of loading data nor of a first step, which are not"
            " part of the forecast"
        )
    elif loading.costs is None:
        notes.append(
            f"{machine.path or 'machine'}: holds no costs of loading data, which is not part"
            f" of the forecast; {machine.calibration()} adds them"
        )
    if first_s is None and machine.data_sheet is None:
        notes.append(
            "the overhead of a first step is not part of the forecast;"
            f" {machine.calibration()} (without --quick) adds it"
        )
    return Epoch(
        samples,
        epochs,
        epoch_s,
        total_s=math.fsum((first_s or 0.0, start_s, epochs * epoch_s, test_s)),
        steps_per_epoch=n_steps,
        steps_s=steps_s,
        loop_s=loop_s,
        loading_s=None if loading.costs is None else loading_s,
        evaluation_s=validation_s,
        pauses_s=pauses_s,
        first_step_s=first_s,
        start_s=start_s,
        test_s=test_s,
        bound="loader" if is_bound_by_loader else "step",
        notes=tuple(notes),
    )


def check_counts(samples: int, epochs: int, val_samples: int, test_samples: int) -> None:
    """Raise DlperfError for counts below 0, or 1 for samples and epochs."""
    check_count("samples", samples)
    check_count("epochs", epochs)
    for name, value in (("val_samples", val_samples), ("test_samples", test_samples)):
        check_count(name, value, 0)


def last_batch_size(samples: int, batch_size: int, drop_last: bool = False) -> int | None:
    """Samples of an epoch's last batch; None if it is a whole one.

    >>> last_batch_size(100, 32), last_batch_size(96, 32), last_batch_size(100, 32, drop_last=True)
    (4, None, None)
    """
    return None if drop_last else samples % batch_size or None


def _n_steps(samples: int, batch: int, drop_last: bool, last: PredictedStep | None) -> int:
    """Steps of an epoch."""
    partial = last_batch_size(samples, batch, drop_last)
    if last is not None and last.trace.batch_size != partial:
        raise DlperfError(
            f"last: is predicted at batch size {last.trace.batch_size}; the last batch of"
            f" {samples} samples has {partial or batch}"
        )
    n_steps = samples // batch if drop_last else math.ceil(samples / batch)
    if n_steps == 0:
        raise DlperfError(
            f"samples is {samples}, fewer than a batch of {batch}, and drop_last leaves no"
            " step; use a smaller batch size"
        )
    return n_steps


def _steps_s(
    training: PredictedStep, last: PredictedStep | None, loop: Loop, n_steps: int, n_updates: int
) -> float:
    """An epoch's steps: forward and backward of each batch, the optimizer of each update."""
    whole, partial = training.step, last.step if last is not None else None
    n_whole = n_steps - (last is not None)
    if loop.accumulate == 1:
        last_s = (partial.total_s or 0.0) if partial else 0.0
        return n_whole * (whole.total_s or 0.0) + last_s
    parts = whole.forward_s, whole.backward_s, whole.optimizer_s, whole.zero_grad_s
    if any(part is None for part in parts):
        raise DlperfError(
            f"accumulate is {loop.accumulate}; a forward pass has no updates (predictor"
            f" {training.predictor!r})"
        )
    forward_s, backward_s, optimizer_s, zero_s = (part or 0.0 for part in parts)
    last_s = (partial.forward_s or 0.0) + (partial.backward_s or 0.0) if partial else 0.0
    return n_whole * (forward_s + backward_s) + last_s + n_updates * (optimizer_s + zero_s)


class _Loading:
    """Loading of a training's batches; `costs` is None where the machine file holds none."""

    def __init__(
        self, training: PredictedStep, loop: Loop, loader: SampledLoader | None, mean: float
    ) -> None:
        self.training, self.loader, self.mean = training, loader, mean
        self.n_workers = loop.loader_workers or 0
        machine, threads = training.machine, training.threads
        self.costs: LoaderCosts | None = None
        if loop.loader_workers is not None or loader is not None or has_costs(machine):
            self.costs = LoaderCosts(machine, threads, training.state, mean)

    def _stages(
        self, costs: LoaderCosts, consumer_s: float, shuffled: bool
    ) -> tuple[float, float, int, int, float, float]:
        """Arguments of :func:`dlperf.forecast.loading.period` from the costs and the sampled
        loader.
        """
        training, loader, n_workers = self.training, self.loader, self.n_workers
        if loader is not None:
            # The sample is a mean of batches in the usual state.
            batch_s, tensor_bytes = self.mean * loader.batch_s, loader.tensor_bytes
        else:
            batch, sizes = training.trace.batch_size, sample_bytes(training.trace) or (1,)
            maker = replace(costs, threads=1) if n_workers else costs
            batch_s = maker.fetch_s(batch, sizes, shuffled)
            tensor_bytes = tuple(batch * size for size in sizes)
        waiting_frac = 0.0 if loader is None else loader.waiting_frac
        one = costs.batches(batch_s, tensor_bytes, n_workers, waiting_frac)
        # With more training workers than cores, the prediction is that of one shared core.
        n_cores = max(1.0, training.machine.cpu.n_cores / training.workers)
        ready_s = consumer_s + one.take_over_s
        return ready_s, one.made_s, n_workers, training.threads, n_cores, one.busy_frac

    def pass_s(self, n_batches: int, consumer_s: float, shuffled: bool) -> float:
        """Seconds of a pass over `n_batches` batches, their loading included."""
        if self.costs is None:
            return n_batches * consumer_s
        return pipeline_s(n_batches, *self._stages(self.costs, consumer_s, shuffled))

    def waits(self, consumer_s: float) -> bool:
        """Whether the training waits for its loader workers."""
        if self.costs is None or not self.n_workers:
            return False
        return period(*self._stages(self.costs, consumer_s, True)).waits

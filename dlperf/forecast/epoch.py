"""Prediction -> training run: an epoch is its steps, its loading, its evaluation passes and its
pauses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_count
from dlperf.core.loader_sample import SampledLoader
from dlperf.forecast.loading import (
    LoaderCosts,
    has_costs,
    period,
    pipeline_s,
    sample_bytes,
)
from dlperf.forecast.loop import Loop, accumulation_s, first_step_s, pause_s, update_s, visit_s

if TYPE_CHECKING:
    from dlperf.forecast.prediction import Prediction


@dataclass(frozen=True, repr=False)
class Epoch(Displayed, by="dlperf.report.summaries"):
    """A forecast, in seconds. `epoch_s` is one epoch (training and validation), `total_s` all of
    them with everything around:

        epoch_s = steps_s + loop_s + loading_s + evaluation_s + pauses_s + averaging_s + waiting_s
        total_s = preparation_s + first_step_s + start_s + epochs epoch_s + test_s

    `steps_s` are an epoch's training steps, `loop_s` what the script does in each of them besides
    (clipping, a scheduler, looking at the loss), `loading_s` how much longer loading makes it,
    `evaluation_s` the validation pass with its own loading, `pauses_s` checkpoints. Of the run,
    `first_step_s` is what its first step takes more, `start_s` the start of loading workers that
    stay from epoch to epoch, `test_s` the pass at the end. None is what the machine file does not
    hold; sums go without it, and `notes` say so. `bound` is ``step`` or ``loader``, whichever the
    other waits for.

    Where `workers` train on a share of the samples each
    (:func:`dlperf.forecast.worker_processes.forecast_workers`), the parts of an epoch, its steps
    among them, are those of the worker with the largest share; `waiting_s` they wait for the
    slowest of them after each epoch, `averaging_s` puts their weights together, `preparation_s` is
    until all of them are ready.
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
    training: Prediction,
    samples: int,
    epochs: int = 1,
    val_samples: int = 0,
    test_samples: int = 0,
    evaluation: Prediction | None = None,
    last: Prediction | None = None,
    loop: Loop = Loop(),
    loader: SampledLoader | None = None,
) -> Epoch:
    """Time of an epoch and of the whole run; what it consists of is said by :class:`Epoch`.

    An epoch has ceil(samples / batch) steps, floor with ``loop.drop_last``. Its last, smaller batch
    takes what `last` predicts, a prediction of the same network at that batch size; without one it
    counts as a whole step, which errs high by less than a step. `evaluation` is the prediction of
    the inference pass; without it a pass takes the training step's forward, which errs high by the
    cost of recording for the backward; the last, smaller batch of a pass counts as a whole one.
    Steps are medians, an epoch sums means: the machine's ratio of the two is a factor of
    everything.

    Batches come from tensors in memory of the sizes that the trace reads, or as `loader` was
    sampled.

    Raises DlperfError for counts below 0 (1 for samples and epochs), a predictor that gives no
    step, an epoch without a whole batch under ``drop_last``, and where the machine file lacks what
    the loop asks for.
    """
    check_counts(samples, epochs, val_samples, test_samples)
    return _Forecast(training, samples, evaluation, last, loop, loader).epoch(
        epochs, val_samples, test_samples
    )


def check_counts(samples: int, epochs: int, val_samples: int, test_samples: int) -> None:
    """Raises DlperfError for counts below 0, or 1 for samples and epochs."""
    for name, value, least in (
        ("samples", samples, 1),
        ("epochs", epochs, 1),
        ("val_samples", val_samples, 0),
        ("test_samples", test_samples, 0),
    ):
        check_count(name, value, least)


def last_batch_size(samples: int, batch_size: int, drop_last: bool = False) -> int | None:
    """Samples of an epoch's last batch if it is a smaller one.

    >>> last_batch_size(100, 32), last_batch_size(96, 32), last_batch_size(100, 32, drop_last=True)
    (4, None, None)
    """
    return None if drop_last else samples % batch_size or None


class _Forecast:
    def __init__(
        self,
        training: Prediction,
        samples: int,
        evaluation: Prediction | None,
        last: Prediction | None,
        loop: Loop,
        loader: SampledLoader | None,
    ) -> None:
        self.training, self.samples, self.loop, self.loader = training, samples, loop, loader
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
        self.evaluation_s = self.mean * evaluation_s
        self.last = last
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
        self.costs = self._loader_costs()
        self.n_workers = loop.loader_workers or 0
        # each training worker has its part of the cores; where they are more than cores, the
        # prediction beside the others is that of one core shared
        self.n_cores = max(1.0, training.machine.cpu.n_cores / training.workers)

    def _loader_costs(self) -> LoaderCosts | None:
        machine, threads = self.training.machine, self.training.threads
        if self.loop.loader_workers is None and self.loader is None and not has_costs(machine):
            self.notes.append(
                f"{machine.path or 'machine'}: holds no costs of loading data, which is not part of"
                " the forecast; dlperf calibrate adds them"
            )
            return None
        return LoaderCosts(machine, threads, machine.contention_slowdown(threads) * self.mean)

    def steps_s(self) -> float:
        """An epoch's steps: forward and backward of every batch, the optimizer every `accumulate`."""
        n_updates = math.ceil(self.n_steps / self.loop.accumulate)
        whole = self.training.step
        if self.loop.accumulate == 1:
            last_s = self.last.step.total_s if self.last is not None else 0.0
            assert whole.total_s is not None
            return self.mean * (self.n_whole * whole.total_s + (last_s or 0.0))
        parts = whole.forward_s, whole.backward_s, whole.optimizer_s, whole.zero_grad_s
        if any(part is None for part in parts):
            raise DlperfError(
                f"accumulate is {self.loop.accumulate}; a forward pass has no updates (predictor"
                f" {self.training.predictor!r})"
            )
        forward_s, backward_s, optimizer_s, zero_s = (part or 0.0 for part in parts)
        last_s = (
            (self.last.step.forward_s or 0.0) + (self.last.step.backward_s or 0.0)
            if self.last is not None
            else 0.0
        )
        return self.mean * (
            self.n_whole * (forward_s + backward_s) + last_s + n_updates * (optimizer_s + zero_s)
        )

    def loop_s(self) -> float:
        """What the script does in an epoch besides, without its loading."""
        n_updates = math.ceil(self.n_steps / self.loop.accumulate)
        quiet_s = self.n_steps * visit_s(self.training, self.loop) + n_updates * update_s(
            self.training, self.loop
        )
        added_s = accumulation_s(self.training) if self.loop.accumulate > 1 else 0.0
        return self.mean * (quiet_s + (self.n_steps - n_updates) * added_s)

    def loading_s(self, n_batches: int, consumer_s: float, shuffled: bool) -> float:
        """Seconds of `n_batches` batches, their loading included."""
        if self.costs is None:
            return n_batches * consumer_s
        fetch_s, tensor_bytes = self._fetch(shuffled)
        one = self.costs.batches(
            fetch_s,
            tensor_bytes,
            self.n_workers,
            self.loader.waiting_frac if self.loader is not None else 0.0,
        )
        return pipeline_s(
            n_batches,
            consumer_s + one.take_over_s,
            one.made_s,
            self.n_workers,
            self.training.threads,
            self.n_cores,
            one.busy_frac,
        )

    def _fetch(self, shuffled: bool) -> tuple[float, tuple[int, ...]]:
        assert self.costs is not None
        if self.loader is not None:
            # A mean of usual batches, not the least that the micro-benchmarks keep: the machine's
            # usual unrest is in it.
            return self.mean * self.loader.batch_s, self.loader.tensor_bytes
        sizes = sample_bytes(self.training.trace) or (1,)
        costs = (
            self.costs
            if not self.n_workers
            else LoaderCosts(self.costs.machine, 1, self.costs.factor)
        )  # a worker has one thread
        return costs.fetch_s(self.batch, sizes, shuffled), tuple(
            self.batch * size for size in sizes
        )

    def waits(self, consumer_s: float) -> bool:
        """Whether the training waits for its workers."""
        if self.costs is None or not self.n_workers:
            return False
        fetch_s, tensor_bytes = self._fetch(True)
        one = self.costs.batches(
            fetch_s,
            tensor_bytes,
            self.n_workers,
            self.loader.waiting_frac if self.loader is not None else 0.0,
        )
        return period(
            consumer_s + one.take_over_s,
            one.made_s,
            self.n_workers,
            self.training.threads,
            self.n_cores,
            one.busy_frac,
        ).waits

    def epoch(self, epochs: int, val_samples: int, test_samples: int) -> Epoch:
        """The whole of it."""
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
            if self.loop.persistent_workers:
                start_s = n_passes * once_s
                again_s = starts.resume_s * (epochs - 1) / epochs
            else:
                again_s = once_s
            loading_s += again_s
            validation_s += again_s if n_val else 0.0
            test_s += once_s if n_test else 0.0
        pauses_s = self.mean * pause_s(self.training, self.loop)
        epoch_s = math.fsum((steps_s, loop_s, loading_s, validation_s, pauses_s))
        first_s = first_step_s(self.training)
        if first_s is None:
            self.notes.append(
                "what a first step takes more is not part of the forecast; dlperf calibrate"
                " (without --quick) adds it"
            )
        total_s = math.fsum((first_s or 0.0, start_s, epochs * epoch_s, test_s))
        bound = (
            "loader"
            if self.waits(each_s) or (not self.n_workers and loading_s > steps_s + loop_s)
            else "step"
        )
        return Epoch(
            self.samples,
            epochs,
            epoch_s,
            total_s,
            self.n_steps,
            steps_s,
            loop_s,
            None if self.costs is None else loading_s,
            validation_s,
            pauses_s,
            first_s,
            start_s,
            test_s,
            bound,
            tuple(self.notes),
        )

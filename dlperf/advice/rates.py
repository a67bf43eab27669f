"""Predictions -> what a configuration takes: the step with so many threads, beside other workers,
fed by loading workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from dlperf.advice.grid import Configuration, Rate
from dlperf.core.errors import DlperfError
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Machine
from dlperf.core.trace import Trace
from dlperf.core.variation import machine_log_sigma
from dlperf.forecast.loading import LoaderCosts, has_costs, period, sample_bytes
from dlperf.forecast.loop import Loop, visit_s
from dlperf.forecast.prediction import Prediction, predict
from dlperf.forecast.worker_processes import averaging_s, predict_co_run

PREFETCHED = 2
"""Batches that a loading worker holds ready (torch's ``prefetch_factor``)."""


@dataclass
class Forecaster:
    """Answers what a configuration takes at batch sizes that `record` can record; every trace and
    prediction is made once.

    `sample` samples the user's own loader at a batch size; without it batches come from tensors in
    memory. `is_cross_machine` says that the machine file speaks of another machine. `notes` gathers
    what a user should know of the answers.
    """

    machine: Machine
    record: Callable[[int], Trace]
    is_cross_machine: bool = False
    sample: Callable[[int], SampledLoader] | None = None
    notes: list[str] = field(default_factory=list)
    _traces: dict[int, Trace] = field(default_factory=dict)
    _predictions: dict[tuple[int, int, int], Prediction] = field(default_factory=dict)
    _bases: dict[tuple[int, int, int], _Base] = field(default_factory=dict)
    _sampled: dict[int, SampledLoader] = field(default_factory=dict)

    @cached_property
    def knows_loading(self) -> bool:
        """Whether the machine file holds loader costs; without them no forecast has loading."""
        return has_costs(self.machine)

    @cached_property
    def knows_loading_workers(self) -> bool:
        """Whether it says what loading workers cost."""
        if not self.knows_loading:
            return False
        try:
            LoaderCosts(self.machine, 1).starts(1, 0.0)
        except DlperfError:
            return False
        return True

    def knows(self, configuration: Configuration) -> bool:
        """Whether the machine file speaks of such a configuration; where it does not, a note says
        what is missing, once.
        """
        where = f"{self.machine.path or 'machine'}: holds no"
        if configuration.loader_workers and not self.knows_loading_workers:
            if self.knows_loading:
                self._note(
                    f"{where} costs of loading workers, which this system refused while it was"
                    " calibrated: only 0 loading workers are considered"
                )
            else:
                self._note(
                    f"{where} costs of loading data: loading is no part of the comparison; dlperf"
                    " calibrate adds them"
                )
            return False
        if configuration.workers > 1:
            if not self.machine.co_runs:
                self._note(
                    f"{where} costs of worker processes beside each other: only 1 worker is"
                    " considered; dlperf calibrate --workers 1,2,4 adds them"
                )
                return False
            if configuration.threads > 1:
                self._note(
                    "several workers are considered with one thread each, as they are measured"
                )
                return False
        return True

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def trace_of(self, batch_size: int) -> Trace:
        """The recorded step at a batch size."""
        if batch_size not in self._traces:
            self._traces[batch_size] = self.record(batch_size)
        return self._traces[batch_size]

    def prediction_of(self, threads: int, batch_size: int, workers: int = 1) -> Prediction:
        """The predicted step of one worker of so many."""
        key = threads, batch_size, workers
        if key not in self._predictions:
            if workers == 1:
                made = predict(self.trace_of(batch_size), self.machine, threads)
                made = made.cross_machine() if self.is_cross_machine else made
            else:
                made = predict_co_run(self.prediction_of(threads, batch_size), workers)
            self._predictions[key] = made
        return self._predictions[key]

    def rate_of(self, configuration: Configuration) -> Rate:
        """What one worker of a configuration takes, its loading included where the machine file
        speaks of it, and how far workers vary apart.

        The loss is looked at in each step. Several workers share the cores for their loading. Once
        an epoch come the start and end of loading workers and, with several workers, the averaging
        of their weights. Memory is the step's and the batches that loading workers hold ready.

        Raises DlperfError where the predictor gives no step or no memory.
        """
        n_apart = min(configuration.workers, self.machine.cpu.n_cores)
        return replace(
            self._rate_of(configuration),
            sigma=machine_log_sigma(self.machine, configuration.threads),
            n_apart=n_apart,
        )

    def _rate_of(self, configuration: Configuration) -> Rate:
        threads, batch_size, workers = (
            configuration.threads,
            configuration.batch_size,
            configuration.workers,
        )
        found = self._base_of(threads, batch_size, workers)
        once_s = averaging_s(self.machine, found.parameter_bytes, workers) if workers > 1 else 0.0
        if not self.knows_loading:
            return Rate(found.step_s, once_s, found.peak_memory_bytes, found.bound)
        n_loading = configuration.loader_workers
        factor = self.machine.contention_slowdown(threads) * self.machine.mean_slowdown(threads)
        costs = LoaderCosts(self.machine, threads, factor)
        own = self._own_loader(batch_size)
        if own is not None:
            fetch_s, tensor_bytes = (
                self.machine.mean_slowdown(threads) * own.batch_s,
                own.tensor_bytes,
            )
        else:
            fetching = (
                costs if not n_loading else LoaderCosts(self.machine, 1, factor)
            )  # a loading worker has one thread
            fetch_s, tensor_bytes = (
                fetching.fetch_s(batch_size, found.sample_bytes, True),
                tuple(batch_size * size for size in found.sample_bytes),
            )
        batch = costs.batches(
            fetch_s, tensor_bytes, n_loading, own.waiting_frac if own is not None else 0.0
        )
        if not n_loading:
            return Rate(
                found.step_s + batch.fetch_s,
                once_s,
                found.peak_memory_bytes,
                "loader" if batch.fetch_s > found.step_s else found.bound,
            )
        cores = max(1.0, self.machine.cpu.n_cores / workers)
        steady = period(
            found.step_s + batch.take_over_s,
            batch.made_s,
            n_loading,
            threads,
            cores,
            batch.busy_frac,
        )
        starts = costs.starts(n_loading, found.peak_memory_bytes)
        memory_bytes = found.peak_memory_bytes + PREFETCHED * n_loading * sum(tensor_bytes)
        return Rate(
            steady.seconds,
            once_s + starts.start_s + starts.stop_s,
            memory_bytes,
            "loader" if steady.waits else found.bound,
        )

    def _own_loader(self, batch_size: int) -> SampledLoader | None:
        if self.sample is None:
            return None
        if batch_size not in self._sampled:
            self._sampled[batch_size] = self.sample(batch_size)
            for note in self._sampled[batch_size].notes:
                self._note(note)
        return self._sampled[batch_size]

    def _base_of(self, threads: int, batch_size: int, workers: int) -> _Base:
        key = threads, batch_size, workers
        if key not in self._bases:
            prediction = self.prediction_of(threads, batch_size, workers)
            step, trace = prediction.step, prediction.trace
            if step.total_s is None or step.peak_memory_bytes is None:
                raise DlperfError(
                    f"predictor {prediction.predictor!r} predicts no whole step, so no"
                    " configuration can be chosen"
                )
            step_s = self.machine.mean_slowdown(threads) * (
                step.total_s + visit_s(prediction, Loop())
            )
            sizes = sample_bytes(trace) or (1,)
            self._bases[key] = _Base(
                step_s,
                step.peak_memory_bytes,
                main_bound(prediction),
                sizes,
                _parameter_bytes(trace),
            )
        return self._bases[key]


@dataclass(frozen=True)
class _Base:
    """A step without its loading, and what the loading depends on: bytes of a sample by tensor,
    bytes of all parameters.
    """

    step_s: float
    peak_memory_bytes: int
    bound: str
    sample_bytes: tuple[int, ...]
    parameter_bytes: int


def _parameter_bytes(trace: Trace) -> int:
    return sum(storage.nbytes for storage in trace.storages if storage.kind == "parameter")


def main_bound(prediction: Prediction) -> str:
    """What binds the largest share of a step's time."""
    sums: dict[str, float] = {}
    for item in prediction.prices.items:
        sums[item.bound] = sums.get(item.bound, 0.0) + item.seconds
    return max(sums, key=lambda bound: sums[bound], default="overhead")

"""Predictions -> what a configuration takes: the step with so many threads, beside other workers,
fed by loading workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from dlperf.advice.breakdown import sums_by_name
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


class Forecaster:
    """Rates of configurations at batch sizes that `record` can record; every trace and prediction
    is made once.

    `sample` samples the user's own loader at a batch size; without it batches come from tensors in
    memory. `notes` gathers what a user should know of the answers.
    """

    def __init__(
        self,
        machine: Machine,
        record: Callable[[int], Trace],
        sample: Callable[[int], SampledLoader] | None = None,
    ) -> None:
        self.machine = machine
        self.notes: list[str] = []
        self._trace_of = functools.cache(record)
        self._sample = None if sample is None else functools.cache(sample)
        self._prediction_of = functools.cache(self._predict)
        self._without_loader = functools.cache(self._rate_without_loader)

    @cached_property
    def knows_loading(self) -> bool:
        """Whether the machine file holds loader costs; without them no forecast has loading."""
        return has_costs(self.machine)

    @cached_property
    def _knows_loading_workers(self) -> bool:
        """Whether it holds the costs of loading workers."""
        if not self.knows_loading:
            return False
        try:
            LoaderCosts(self.machine, 1).starts(1, 0.0)
        except DlperfError:
            return False
        return True

    def knows(self, configuration: Configuration) -> bool:
        """Whether the machine file supports such a configuration; where it does not, a note says
        what is missing, once.
        """
        missing = self._missing(configuration)
        if missing:
            self._note(missing)
        return not missing

    def _missing(self, configuration: Configuration) -> str:
        where = f"{self.machine.path or 'machine'}: holds no"
        if configuration.loader_workers and not self.knows_loading:
            return (
                f"{where} costs of loading data: loading is no part of the comparison;"
                f" {self.machine.calibration()} adds them"
            )
        if configuration.loader_workers and not self._knows_loading_workers:
            return (
                f"{where} costs of loading workers, which this system refused while it was"
                " calibrated: only 0 loading workers are considered"
            )
        if configuration.workers > 1 and not self.machine.co_runs:
            return (
                f"{where} costs of worker processes beside each other: only 1 worker is"
                f" considered; {self.machine.calibration('--workers 1,2,4')} adds them"
            )
        if configuration.workers > 1 and configuration.threads > 1:
            return "several workers are considered with one thread each, as they are measured"
        return ""

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def _predict(self, threads: int, batch_size: int, workers: int) -> Prediction:
        """The predicted step of one of `workers` processes."""
        if workers > 1:
            return predict_co_run(self._prediction_of(threads, batch_size, 1), workers)
        return predict(self._trace_of(batch_size), self.machine, threads)

    def rate_of(self, configuration: Configuration) -> Rate:
        """What one worker of a configuration takes, its loading included where the machine file
        supports it, and how far workers vary apart.

        The loss is read in each step. Several workers share the cores for their loading. Once
        an epoch come the start and end of loading workers and, with several workers, the averaging
        of their weights. Memory is the step's and the batches that loading workers hold ready.

        Raises DlperfError where the predictor gives no step or no memory.
        """
        machine, threads, batch_size, n_loading = (
            self.machine,
            configuration.threads,
            configuration.batch_size,
            configuration.loader_workers,
        )
        rate, sizes = self._without_loader(threads, batch_size, configuration.workers)
        if not self.knows_loading:
            return rate
        slowdown = machine.mean_slowdown
        costs = LoaderCosts(machine, threads, machine.usual_state, slowdown)
        if self._sample is not None:
            own = self._sample(batch_size)
            for note in own.notes:
                self._note(note)
            fetch_s, tensor_bytes, waiting_frac = (
                slowdown * own.batch_s,
                own.tensor_bytes,
                own.waiting_frac,
            )
        else:
            # a loading worker has one thread
            fetching = replace(costs, threads=1) if n_loading else costs
            fetch_s, waiting_frac = fetching.fetch_s(batch_size, sizes, True), 0.0
            tensor_bytes = tuple(batch_size * size for size in sizes)
        batch = costs.batches(fetch_s, tensor_bytes, n_loading, waiting_frac)
        if not n_loading:
            bound = "loader" if batch.fetch_s > rate.step_s else rate.bound
            return replace(rate, step_s=rate.step_s + batch.fetch_s, bound=bound)
        cores = max(1.0, machine.cpu.n_cores / configuration.workers)
        steady = period(
            rate.step_s + batch.take_over_s,
            batch.made_s,
            n_loading,
            threads,
            cores,
            batch.busy_frac,
        )
        starts = costs.starts(n_loading, rate.peak_memory_bytes)
        return replace(
            rate,
            step_s=steady.seconds,
            once_s=rate.once_s + starts.start_s + starts.stop_s,
            peak_memory_bytes=rate.peak_memory_bytes + PREFETCHED * n_loading * sum(tensor_bytes),
            bound="loader" if steady.waits else rate.bound,
        )

    def _rate_without_loader(
        self, threads: int, batch_size: int, workers: int
    ) -> tuple[Rate, tuple[int, ...]]:
        """A worker's rate without its loading, and the bytes of a sample by tensor."""
        machine = self.machine
        prediction = self._prediction_of(threads, batch_size, workers)
        step, trace = prediction.step, prediction.trace
        if step.total_s is None or step.peak_memory_bytes is None:
            raise DlperfError(
                f"predictor {prediction.predictor!r} predicts no whole step, so no"
                " configuration can be chosen"
            )
        bounds = sums_by_name((item.bound, item.seconds) for item in prediction.prices.items)
        n_bytes = sum(storage.nbytes for storage in trace.storages if storage.kind == "parameter")
        rate = Rate(
            machine.mean_slowdown * (step.total_s + visit_s(prediction, Loop())),
            prediction.state.dram * averaging_s(machine, n_bytes, workers) if workers > 1 else 0.0,
            step.peak_memory_bytes,
            max(bounds, key=lambda bound: bounds[bound], default="overhead"),
            machine_log_sigma(machine),
            min(workers, machine.cpu.n_cores),
        )
        return rate, sample_bytes(trace) or (1,)

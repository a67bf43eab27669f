"""Predictions -> what a configuration takes: the step with so many threads, beside other workers, fed by loading workers."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

from dlperf.contention import averaging_s, beside
from dlperf.errors import DlperfError
from dlperf.loading import LoaderCosts, has_costs, sample_bytes
from dlperf.machine import Machine
from dlperf.prediction import Prediction, predict
from dlperf.trace import Trace
from dlperf.tuning.grid import Configuration, Pace

PREFETCHED = 2
"""Batches that a loading worker holds ready (torch's ``prefetch_factor``)."""
_STEADY_STEPS = 1000
"""Steps over which the start of an epoch is spread to tell its steady pace."""


@dataclass
class Forecaster:
    """Answers what a configuration takes at batch sizes that `record` can record; every trace and prediction is made once.

    `elsewhere` says that the machine file speaks of another machine. `notes` gathers what a user should know of the answers.
    """

    machine: Machine
    record: Callable[[int], Trace]
    elsewhere: bool = False
    notes: list[str] = field(default_factory=list)
    _traces: dict[int, Trace] = field(default_factory=dict)
    _predictions: dict[tuple[int, int, int], Prediction] = field(default_factory=dict)
    _machines: dict[int, Machine] = field(default_factory=dict)

    @cached_property
    def knows_loading(self) -> bool:
        """Whether the machine file says what loading costs. If not, it is no part of any pace."""
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
        """Whether the machine file speaks of such a configuration; where it does not, a note says what is missing, once."""
        where = f"{self.machine.path or 'machine'}: holds no"
        if configuration.loader_workers and not self.knows_loading_workers:
            if self.knows_loading:
                self._note(f"{where} costs of loading workers, which this system refused while it was calibrated: only 0 loading workers are considered")
            else:
                self._note(f"{where} costs of loading data: loading is no part of the comparison; dlperf calibrate adds them")
            return False
        if configuration.workers > 1:
            if not self.machine.sharings:
                self._note(f"{where} costs of worker processes beside each other: only 1 worker is considered; dlperf calibrate --workers 1,2,4 adds them")
                return False
            if configuration.threads > 1:
                self._note("several workers are considered with one thread each, as they are measured")
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
                made = made.elsewhere() if self.elsewhere else made
            else:
                made = replace(beside(self.prediction_of(threads, batch_size), workers), machine=self._share_of_machine(workers))
            self._predictions[key] = made
        return self._predictions[key]

    def _share_of_machine(self, workers: int) -> Machine:
        """The machine as one of several workers finds it for what loads beside it: with its share of the cores, at least one."""
        if workers not in self._machines:
            cpu = self.machine.cpu
            self._machines[workers] = replace(self.machine, cpu=replace(cpu, n_cores=max(1, cpu.n_cores // workers)))
        return self._machines[workers]

    def pace_of(self, configuration: Configuration) -> Pace:
        """What one worker of a configuration takes, its loading included where the machine file speaks of it.

        Once an epoch come the start and end of loading workers and, with several workers, the averaging of their weights. Memory is the step's and the
        batches that loading workers hold ready. Raises DlperfError where the predictor gives no step or no memory.
        """
        prediction = self.prediction_of(configuration.threads, configuration.batch_size, configuration.workers)
        step, trace = prediction.step, prediction.trace
        if step.total_s is None or step.peak_memory_bytes is None:
            raise DlperfError(f"predictor {prediction.predictor!r} predicts no whole step, so no configuration can be chosen")
        loader_workers = configuration.loader_workers if self.knows_loading else None
        samples = _STEADY_STEPS * configuration.batch_size
        epoch = prediction.epoch(samples, loader_workers=loader_workers, persistent_workers=True)
        step_s = (epoch.steps_s + epoch.loop_s + (epoch.loading_s or 0.0)) / _STEADY_STEPS
        once_s = 0.0
        if loader_workers:
            anew = prediction.epoch(samples, loader_workers=loader_workers)
            once_s += (anew.loading_s or 0.0) - (epoch.loading_s or 0.0)
        if configuration.workers > 1:
            once_s += averaging_s(self.machine, _parameter_bytes(trace), configuration.workers)
        held_bytes = PREFETCHED * (loader_workers or 0) * configuration.batch_size * sum(sample_bytes(trace))
        bound = "loader" if epoch.bound == "loader" else main_bound(prediction)
        return Pace(step_s, once_s, step.peak_memory_bytes + held_bytes, bound)


def _parameter_bytes(trace: Trace) -> int:
    return sum(storage.nbytes for storage in trace.storages if storage.kind == "parameter")


def main_bound(prediction: Prediction) -> str:
    """What binds the largest share of a step's time."""
    sums: dict[str, float] = {}
    for item in prediction.prices.items:
        sums[item.bound] = sums.get(item.bound, 0.0) + item.seconds
    return max(sums, key=lambda bound: sums[bound], default="overhead")

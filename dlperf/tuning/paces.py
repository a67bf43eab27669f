"""Predictions -> what a configuration takes: the step with so many threads, beside other workers, fed by loading workers."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dlperf.errors import DlperfError
from dlperf.machine import Machine
from dlperf.prediction import Prediction, predict
from dlperf.trace import Trace
from dlperf.tuning.grid import Configuration, Pace

PREFETCHED = 2
"""Batches that a loading worker holds ready (torch's ``prefetch_factor``)."""


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
    _predictions: dict[tuple[int, int], Prediction] = field(default_factory=dict)

    def trace_of(self, batch_size: int) -> Trace:
        """The recorded step at a batch size."""
        if batch_size not in self._traces:
            self._traces[batch_size] = self.record(batch_size)
        return self._traces[batch_size]

    def prediction_of(self, threads: int, batch_size: int) -> Prediction:
        """The predicted step of one worker alone."""
        key = threads, batch_size
        if key not in self._predictions:
            prediction = predict(self.trace_of(batch_size), self.machine, threads)
            self._predictions[key] = prediction.elsewhere() if self.elsewhere else prediction
        return self._predictions[key]

    def pace_of(self, configuration: Configuration) -> Pace:
        """What one worker of a configuration takes. Raises DlperfError where the predictor gives no step or no memory."""
        prediction = self.prediction_of(configuration.threads, configuration.batch_size)
        step = prediction.step
        if step.total_s is None or step.peak_memory_bytes is None:
            raise DlperfError(f"predictor {prediction.predictor!r} predicts no whole step, so no configuration can be chosen")
        return Pace(step.total_s, 0.0, step.peak_memory_bytes, main_bound(prediction))


def main_bound(prediction: Prediction) -> str:
    """What binds the largest share of a step's time."""
    sums: dict[str, float] = {}
    for item in prediction.prices.items:
        sums[item.bound] = sums.get(item.bound, 0.0) + item.seconds
    return max(sums, key=lambda bound: sums[bound], default="overhead")

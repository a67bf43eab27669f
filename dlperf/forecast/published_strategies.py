"""Training time on p workers by Viebke's two strategies (``viebke-a``, ``viebke-b``)."""

from __future__ import annotations

import math

from dlperf.core.errors import DlperfError
from dlperf.core.prediction import PredictedStep
from dlperf.forecast.epoch import Epoch, check_counts
from dlperf.forecast.worker_processes import hardware_threads, memory_contention_s, preparation_s
from dlperf.models.threads import ImageTimes, Workload, training_time


def forecast_published(
    training: PredictedStep,
    workers: int | None,
    samples: int,
    epochs: int = 1,
    val_samples: int = 0,
    test_samples: int = 0,
) -> Epoch:
    """T = T_prep + CPI [(T_FProp + T_BProp) i/p + T_FProp v/p + T_FProp it/p] ep + MemoryContention
    i ep / p; Viebke et al. 2019, Tables V and VI.

    T_FProp and T_BProp are the predicted step's, by image. CPI(p) is the topology's, T_prep and
    MemoryContention(p) are those of the machine file; without `workers` both are 0. Tests come
    once, at the end, as in all of dlperf's forecasts (the paper tests after every epoch). The
    equation has no term for loading, the loop around the steps, or a smaller last batch. A negative
    MemoryContention counts as 0.

    Raises DlperfError for counts below 0, p above the samples, a predictor without a step, and a
    machine file without the terms.
    """
    check_counts(samples, epochs, val_samples, test_samples)
    step, p = training.step, 1 if workers is None else workers
    if step.forward_s is None or step.total_s is None:
        raise DlperfError(f"predictor {training.predictor!r} predicts no whole step, so no epoch")
    machine, batch = training.machine, training.trace.batch_size
    times = ImageTimes.of_step(
        step.forward_s, step.total_s, batch, 0.0 if workers is None else preparation_s(machine, p)
    )
    contention_s = max(0.0, memory_contention_s(training, p)) if p > 1 else 0.0
    workload = Workload(epochs, samples, val_samples, test_samples, n_test_passes=1)
    terms = training_time(
        workload, times, p, hardware_threads(machine.cpu).shared_cpi(p), contention_s
    )
    steps_s = (terms.training_s + terms.contention_s) / epochs
    evaluation_s = terms.validation_s / epochs
    return Epoch(
        samples,
        epochs,
        steps_s + evaluation_s,
        terms.total_s,
        math.ceil(samples / p / batch),
        steps_s,
        evaluation_s=evaluation_s,
        test_s=terms.testing_s,
        workers=p,
        preparation_s=terms.preparation_s,
        notes=(f"{training.predictor}: the equation has no term for loading or the training loop",),
    )

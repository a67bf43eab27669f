"""Co-run slowdown of p worker processes with one thread each, and their training runs, also by
Viebke's two strategies (``viebke-a``, ``viebke-b``).

The slowdown of each kind of work is measured (``dlperf calibrate --workers 1,2,4``); that of a
target's own operations (``--for TARGET@BATCH``) comes before that of kinds. For other numbers of
workers:

    slowdown(p) = CPI(p) x excess(p)

CPI(p) is the processor sharing of the topology
(:meth:`dlperf.models.threads.HardwareThreads.shared_cpi`). The excess is what memory, caches and
switching add. It is interpolated between measured numbers. Beyond them it follows its line of least
squares, as the memory contention of Viebke et al. 2019 does, up to the number of hardware threads:
more workers than these never run at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace

from dlperf.core.co_run import PREPARATION, CoRun, operations_of
from dlperf.core.costs import Cost
from dlperf.core.errors import DlperfError
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Cpu, Machine
from dlperf.core.prediction import Item, Predicted, PredictedStep
from dlperf.core.trace import Trace
from dlperf.core.variation import machine_log_sigma, waiting_s
from dlperf.core.what_if import LOOP_COSTS, scaled
from dlperf.forecast.epoch import Epoch, check_counts, forecast
from dlperf.forecast.loop import Loop, parameters_of
from dlperf.models.threads import (
    HardwareThreads,
    ImageTimes,
    Workload,
    check_workers,
    training_time,
)

KERNEL = "kernel"
_NETWORK = "network"
_UNTRIED = (
    "loader workers and several training workers share the cores by equal parts; no measured run"
    " confirms that"
)


def hardware_threads(cpu: Cpu) -> HardwareThreads:
    """Cores of a processor, with the slowdown of its hardware threads by the topology alone: k
    threads of one core take k times as long.

    That errs high where one thread leaves units of the core idle.
    """
    return HardwareThreads(
        cpu.n_physical_cores or cpu.n_cores,
        tuple(float(k) for k in range(1, cpu.threads_per_core + 1)),
    )


def slowdown(machine: Machine, work: str, workers: int) -> float:
    """Slowdown of one call of a kind of work (:class:`dlperf.core.co_run.CoRun`) while p workers do
    it.

    Raises DlperfError for p below 1, and for work that the machine file does not contain.
    """
    check_workers(workers)
    if workers == 1:
        return 1.0
    points = {1: 1.0, **{p: co_run.slowdown for p, co_run in machine.co_runs_of(work).items()}}
    if workers in points:
        return points[workers]
    if len(points) < 2:
        raise _lacking(machine, f"no contention of workers ({work})")
    processor = hardware_threads(machine.cpu)
    excess = {p: value / processor.shared_cpi(p) for p, value in points.items()}
    return processor.shared_cpi(workers) * _excess(excess, workers, processor.n_threads)


def with_co_runs(machine: Machine, co_runs: Iterable[CoRun]) -> Machine:
    """The machine with co-run measurements of ranks that share it, in place of its own of the same
    work and number of workers.
    """
    merged = {(co_run.work, co_run.workers): co_run for co_run in (*machine.co_runs, *co_runs)}
    return replace(machine, co_runs=tuple(merged.values()))


def unmeasured(prediction: PredictedStep) -> tuple[str, ...]:
    """Kinds of work of a step without a slowdown in its machine file; :func:`predict_co_run` raises
    for them.
    """
    bounds = dict.fromkeys(("overhead", *(item.bound for item in prediction.prices.items)))
    return tuple(
        bound for bound in bounds if bound != _NETWORK and not prediction.machine.co_runs_of(bound)
    )


def _excess(points: dict[int, float], p: int, n_threads: int) -> float:
    """The excess at p: linear between the points around it; beyond the last one on the line of
    least squares, not below the least point.

    From p = `n_threads` on, all hardware threads are busy, and the mean of such points counts.
    """
    largest = max(points)
    if p < largest:
        below, above = max(q for q in points if q < p), min(q for q in points if q > p)
        return points[below] + (points[above] - points[below]) * (p - below) / (above - below)
    if largest >= n_threads:
        return statistics.fmean(value for q, value in points.items() if q >= max(2, n_threads))
    slope, intercept = statistics.linear_regression(*zip(*sorted(points.items())))
    return max(min(points.values()), slope * min(p, n_threads) + intercept)


def _lacking(machine: Machine, what: str) -> DlperfError:
    remedy = machine.calibration("--workers 1,2,4")
    return DlperfError(f"{machine.path or 'machine'}: holds {what}; {remedy} adds it")


def preparation_s(machine: Machine, workers: int) -> float:
    """Seconds from the start of p worker processes until all of them have imported torch and made a
    model and an optimizer.

    It is the median of one alone times the slowdown of p (:func:`slowdown`), without the loading of
    data. Raises DlperfError for p below 1, and for a machine file without such times.
    """
    check_workers(workers)
    co_runs = machine.co_runs_of(PREPARATION).values()
    alone = [value for co_run in co_runs for value in co_run.alone.values]
    if not alone:
        raise _lacking(machine, "no preparation of workers")
    return statistics.median(alone) * slowdown(machine, PREPARATION, workers)


def predict_co_run(prediction: Predicted, workers: int) -> Predicted:
    """The prediction of one worker's step while p workers, itself included, do the same.

    Items take their slowdown at p: kernels that of the target's own operations where these were
    measured, all others that of their bound. Items bound by a network and the interval's relative
    width stay. The machine's costs of a training loop are slowed down, too. Raises DlperfError for
    p below 1, for workers of several threads, and for a machine file without the slowdowns (the
    message names the command that adds them).
    """
    check_workers(workers)
    if workers == 1:
        return prediction
    if prediction.workers != 1:
        raise DlperfError(
            f"the prediction is for {prediction.workers} workers already; give that of one alone"
        )
    if prediction.threads != 1:
        raise DlperfError(
            f"the prediction is for {prediction.threads} threads; workers have one thread each:"
            " predict with threads=1"
        )
    machine, bounds = prediction.machine, {item.bound for item in prediction.prices.items}
    own = own_slowdown(machine, prediction.trace, workers)
    python = slowdown(machine, "overhead", workers)
    general = {
        bound: 1.0 if bound == _NETWORK else slowdown(machine, bound, workers) for bound in bounds
    }

    def slowed(item: Item) -> Item:
        factor = own if own is not None and item.what == KERNEL else general[item.bound]
        return replace(item, seconds=item.seconds * factor)

    def slowed_cost(cost: Cost) -> Cost:
        return scaled(cost, python) if cost.key.kind.startswith(LOOP_COSTS) else cost

    source = "its own operations" if own is not None else "its kinds of work"
    note = f"one of {workers} workers that run at once, with the measured slowdown of {source}"
    most = max((p for bound in bounds for p in machine.co_runs_of(bound)), default=workers)
    if workers > most:
        remedy = machine.calibration(f"--workers {workers}")
        note += f", extrapolated beyond {most} workers ({remedy} measures more)"
    prices = prediction.prices.map_items(slowed)
    return replace(
        prediction,
        prices=replace(prices, notes=(*prices.notes, note)),
        machine=replace(machine, costs=tuple(map(slowed_cost, machine.costs))),
        workers=workers,
    )


def own_slowdown(machine: Machine, trace: Trace, workers: int) -> float | None:
    """Slowdown of a target's own operations at p; None where they were not measured.

    A forward pass takes that of the step that contains it.
    """
    for inference in dict.fromkeys((trace.inference, False)):
        work = operations_of(trace.target, trace.batch_size, inference)
        if machine.co_runs_of(work):
            return slowdown(machine, work, workers)
    return None


def memory_contention_s(prediction: PredictedStep, workers: int) -> float:
    """MemoryContention(p), seconds per image: (T(p) - CPI(p) T(1)) / batch size.

    Viebke et al. 2019, Table IV. `prediction` is of one worker alone. Negative where the workers'
    slowdown is below the topology's. Raises DlperfError as :func:`predict_co_run` does, and for a
    predictor without a step.
    """
    alone, together = prediction.step.total_s, predict_co_run(prediction, workers).step.total_s
    if alone is None or together is None:
        raise DlperfError(
            f"predictor {prediction.predictor!r} predicts no whole step, so no contention; use"
            " calibrated or roofline"
        )
    return (
        together - hardware_threads(prediction.machine.cpu).shared_cpi(workers) * alone
    ) / prediction.trace.batch_size


def averaging_s(machine: Machine, parameter_bytes: int, workers: int) -> float:
    """Seconds to average the weights of p workers through shared memory, without waiting for the
    slowest: bytes / DRAM bandwidth x DRAM slowdown.

    Each worker writes its own weights, reads those of all, and writes the mean back. Raises
    DlperfError for a machine file without the bandwidth or the slowdown.
    """
    n_bytes = (workers + 4) * parameter_bytes  # gathered and written: 2 and 2, all rows read
    return n_bytes / machine.dram_bytes_per_s(1) * slowdown(machine, "DRAM", workers)


def forecast_workers(
    training: PredictedStep,
    workers: int,
    samples: int,
    epochs: int = 1,
    val_samples: int = 0,
    test_samples: int = 0,
    evaluation: PredictedStep | None = None,
    last: PredictedStep | None = None,
    loop: Loop = Loop(),
    loader: SampledLoader | None = None,
) -> Epoch:
    """Forecast of a run in which p worker processes train an instance each on their share of the
    samples and average the weights after every epoch: strategy (b) of Viebke et al. 2019.

        T = T_prep + the epochs and the test pass of the largest share, ceil(samples / p), at the
            speed of p workers (:func:`predict_co_run`) + epochs (averaging + waiting)

    `training`, `evaluation` and `last` are predictions of one worker alone, `last` of the last
    batch of its share; the other arguments are those of :func:`dlperf.forecast.epoch.forecast`. All
    wait for the slowest at the end of an epoch (:func:`dlperf.core.variation.waiting_s`): as many
    as there are cores are independent of one another, and each varies as the machine's kernels do.
    A worker's loader workers share its part of the cores. Raises DlperfError for p below 1 or above
    the samples, and as :func:`predict_co_run` and ``forecast`` do.
    """
    check_workers(workers)
    if workers > samples:
        raise DlperfError(
            f"{workers} workers are more than the {samples} samples; give each at least one"
        )
    machine = training.machine
    python = slowdown(machine, "overhead", workers)
    one = forecast(
        predict_co_run(training, workers),
        math.ceil(samples / workers),
        epochs,
        math.ceil(val_samples / workers),
        math.ceil(test_samples / workers),
        evaluation and predict_co_run(evaluation, workers),
        last and predict_co_run(last, workers),
        loop,
        loader and replace(loader, batch_s=python * loader.batch_s),
    )
    averaged_s = waited_s = 0.0
    if workers > 1:
        parameter_bytes = sum(spec.nbytes for spec in parameters_of(training))
        slowdown_dram = training.state.dram * training.what_if.state.dram
        averaged_s = slowdown_dram * averaging_s(machine, parameter_bytes, workers)
        waited_s = waiting_s(
            min(workers, machine.cpu.n_cores), machine_log_sigma(machine), one.epoch_s
        )
    prepared_s = training.what_if.overhead * preparation_s(machine, workers)
    again_s = averaged_s + waited_s
    notes = (*one.notes, _UNTRIED) if workers > 1 and loop.loader_workers else one.notes
    return replace(
        one,
        samples=samples,
        workers=workers,
        averaging_s=averaged_s,
        waiting_s=waited_s,
        preparation_s=prepared_s,
        epoch_s=one.epoch_s + again_s,
        total_s=one.total_s + epochs * again_s + prepared_s,
        notes=notes,
    )


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

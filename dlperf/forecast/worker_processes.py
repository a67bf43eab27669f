"""Prediction of one worker's step while p workers run: processes of one thread each that share a
machine's cores, caches and memory.

Every item of a step takes as many times as long as work of its kind was measured to take when p do
it at once (``dlperf calibrate --workers 1,2,4``). A target's own operations, measured so (``--for
TARGET@BATCH``), come before that. Measured numbers of workers count as they are. Elsewhere a
slowdown is the processors' sharing, which follows from the topology
(:meth:`dlperf.models.threads.HardwareThreads.shared_cpi`), times an excess that memory, caches and
switching add: between measured numbers it is interpolated, beyond them it follows its line of least
squares, as the memory contention of Viebke et al. 2019 does, up to as many workers as the processor
has hardware threads. More than these never run at once, so that the excess grows no more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from dlperf.core.clock import Samples
from dlperf.core.co_run import PREPARATION, CoRun, operations_of
from dlperf.core.errors import DlperfError
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Cost, Cpu, Machine
from dlperf.core.trace import Trace
from dlperf.core.variation import machine_log_sigma, waiting_s
from dlperf.forecast.epoch import Epoch, forecast
from dlperf.forecast.loop import Loop, parameters_of
from dlperf.models.threads import HardwareThreads, check_workers, least_squares_line

if TYPE_CHECKING:
    from dlperf.forecast.prediction import Prediction

KERNEL = "kernel"
_NETWORK = "network"
_UNTRIED = (
    "loading workers beside several training workers share the cores by equal parts; no measured"
    " run stands behind that"
)
_AROUND = ("loader", "loop")
"""How the names of costs begin that an epoch has beside its steps."""


def hardware_threads(cpu: Cpu) -> HardwareThreads:
    """A processor's cores, and what its hardware threads cost one another by the topology alone: k
    of one core share its units and take k times as long.

    That errs high where one thread leaves units idle; the measured slowdowns say what is true of a
    machine.
    """
    return HardwareThreads(
        cpu.n_physical_cores or cpu.n_cores,
        tuple(float(k) for k in range(1, cpu.threads_per_core + 1)),
    )


def cpi(machine: Machine, workers: int) -> tuple[float, float | None]:
    """CPI(p) by the topology, and as measured (the slowdown of what computes in a core's own
    caches); None where it was not measured at p.

    Raises DlperfError for p below 1.
    """
    measured = 1.0 if workers == 1 else None
    if workers in (found := machine.co_runs_of("compute")):
        measured = found[workers].slowdown
    return hardware_threads(machine.cpu).shared_cpi(workers), measured


def slowdown(machine: Machine, work: str, workers: int) -> float:
    """How many times as long one call of a kind of work (:class:`dlperf.core.co_run.CoRun`) takes
    while p workers do it.

    Raises DlperfError for p below 1, and where the machine file holds nothing on this work.
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
    law = processor.shared_cpi
    return law(workers) * _excess(
        {p: value / law(p) for p, value in points.items()}, workers, processor.n_threads
    )


def with_co_runs(machine: Machine, co_runs: Iterable[CoRun]) -> Machine:
    """The machine with slowdowns that were measured elsewhere, on ranks that share it: they replace
    its own of the same work and number of workers.
    """
    merged = {(co_run.work, co_run.workers): co_run for co_run in (*machine.co_runs, *co_runs)}
    return replace(machine, co_runs=tuple(merged.values()))


def unmeasured(prediction: Prediction) -> tuple[str, ...]:
    """The kinds of work of a step that its machine file holds no slowdown of, so that
    :func:`predict_co_run` would raise.
    """
    bounds = dict.fromkeys(("overhead", *(item.bound for item in prediction.prices.items)))
    return tuple(
        bound for bound in bounds if bound != _NETWORK and not prediction.machine.co_runs_of(bound)
    )


def _excess(points: dict[int, float], p: int, n_threads: int) -> float:
    """A value at p: linear between the points around it; beyond the last one on the line of least
    squares, not below the least that was measured.

    From p = `n_threads` on, all hardware threads are busy: where so many were measured, their mean
    is what more of them have.
    """
    largest = max(points)
    if p < largest:
        below, above = max(q for q in points if q < p), min(q for q in points if q > p)
        return points[below] + (points[above] - points[below]) * (p - below) / (above - below)
    if largest >= n_threads:
        return statistics.fmean(value for q, value in points.items() if q >= max(2, n_threads))
    return max(
        min(points.values()), least_squares_line(sorted(points.items())).at(min(p, n_threads))
    )


def _lacking(machine: Machine, what: str) -> DlperfError:
    return DlperfError(
        f"{machine.path or 'machine'}: holds {what}; dlperf calibrate --workers 1,2,4 adds it"
    )


def preparation_s(machine: Machine, workers: int) -> float:
    """Seconds from the start of p worker processes until all of them are ready to train: each has
    imported torch and made a model and an optimizer.

    What one alone usually takes (the median of all that were started so), times the slowdown of p
    (:func:`slowdown`), as starting mostly computes. Loading the data is not in it. Raises
    DlperfError for p below 1, and where the file holds no such times.
    """
    check_workers(workers)
    alone = [
        value
        for co_run in machine.co_runs_of(PREPARATION).values()
        for value in co_run.alone.values
    ]
    if not alone:
        raise _lacking(machine, "no preparation of workers")
    return statistics.median(alone) * slowdown(machine, PREPARATION, workers)


def predict_co_run(prediction: Prediction, workers: int) -> Prediction:
    """The prediction of one worker's step while p workers, itself included, do the same.

    Items take their slowdown at p: those of kernels that of the target's own operations where these
    were measured, all others that of what bounds them. What a network bounds stays as it is, and so
    does the interval's width. The prediction's machine is slowed down, too, in what a training loop
    costs around its steps. Raises DlperfError for p below 1, for workers of several threads, and
    where the machine file lacks the terms (the message says which command adds them).
    """
    check_workers(workers)
    if workers == 1:
        return prediction
    if prediction.workers != 1:
        raise DlperfError(
            f"the prediction is beside {prediction.workers} workers already; give that of one alone"
        )
    if prediction.threads != 1:
        raise DlperfError(
            f"the prediction is for {prediction.threads} threads; workers have one thread each:"
            " predict with threads=1"
        )
    machine, bounds = prediction.machine, {item.bound for item in prediction.prices.items}
    own = own_slowdown(machine, prediction.trace, workers)
    general = {
        bound: 1.0 if bound == _NETWORK else slowdown(machine, bound, workers) for bound in bounds
    }
    items = tuple(
        replace(
            item,
            seconds=item.seconds
            * (own if own is not None and item.what == KERNEL else general[item.bound]),
        )
        for item in prediction.prices.items
    )
    source = (
        "as its own operations were measured to"
        if own is not None
        else "as work of its kinds was measured to"
    )
    note = f"one of {workers} workers that run at once: slowed down {source}"
    most = max((p for bound in bounds for p in machine.co_runs_of(bound)), default=workers)
    if workers > most:
        note += f", extrapolated beyond {most} workers (dlperf calibrate --workers measures more)"
    prices = replace(prediction.prices, items=items, notes=(*prediction.prices.notes, note))
    return replace(
        prediction,
        prices=prices,
        machine=_around(machine, slowdown(machine, "overhead", workers)),
        workers=workers,
    )


def _around(machine: Machine, factor: float) -> Machine:
    """The machine with the costs of loading and of the training's loop, mostly Python's, `factor`
    times as high.
    """

    def slowed(cost: Cost) -> Cost:
        samples = Samples(
            tuple(factor * value for value in cost.samples.values), cost.samples.n_disturbed
        )
        return replace(cost, samples=samples) if cost.name.startswith(_AROUND) else cost

    return replace(machine, costs=tuple(map(slowed, machine.costs)))


def own_slowdown(machine: Machine, trace: Trace, workers: int) -> float | None:
    """The slowdown of a target's own operations at p; None where they were not measured. A forward
    pass takes that of the step that holds it.
    """
    for inference in dict.fromkeys((trace.inference, False)):
        work = operations_of(trace.target, trace.batch_size, inference)
        if machine.co_runs_of(work):
            return slowdown(machine, work, workers)
    return None


def memory_contention_s(prediction: Prediction, workers: int) -> float:
    """MemoryContention(p): seconds that each image of a worker's step takes longer because p
    workers run, beyond the processors' sharing.

    Viebke et al. 2019, Table IV; `prediction` is of one worker alone. 0 at one worker. Negative
    where workers disturb one another less than the topology allows. Raises DlperfError as
    :func:`predict_co_run` does, and where the predictor gives no step.
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
    """Seconds to average the weights of p workers through shared memory: each writes its own once,
    reads those of all, and writes the mean back.

    Bytes over STREAM's rate, slowed down as what memory bounds is; waiting for the slowest worker
    is no part of it. Raises DlperfError where the machine file has no such rate or slowdown.
    """
    n_bytes = (workers + 4) * parameter_bytes  # gathered and written: 2 and 2, all rows read
    return n_bytes / machine.dram_bytes_per_s(1) * slowdown(machine, "DRAM", workers)


def forecast_workers(
    training: Prediction,
    workers: int,
    samples: int,
    epochs: int = 1,
    val_samples: int = 0,
    test_samples: int = 0,
    evaluation: Prediction | None = None,
    last: Prediction | None = None,
    loop: Loop = Loop(),
    loader: SampledLoader | None = None,
) -> Epoch:
    """The forecast of a run in which p worker processes train an instance each on their share of
    the samples and average the weights after every epoch.

    T = T_prep + the epochs and the test pass of the worker with the largest share, ceil(samples /
    p), while all p run (:func:`predict_co_run`), and the averaging: strategy (b) of Viebke et al. 2019 with
    the contention in the step. `training`, `evaluation` and `last` are predictions of one worker
    alone, `last` of the last batch of its share; the rest is
    :func:`dlperf.forecast.epoch.forecast`'s. At the end of an epoch all wait for the slowest: as
    many are independent of one another as there are cores for, and each varies as the machine's
    kernels do, in spells (:func:`dlperf.core.variation.waiting_s`). Loading workers that each of
    them has share its part of the cores with it. Raises DlperfError for p below 1 or above the
    samples, and as :func:`predict_co_run` and ``forecast`` do.
    """
    check_workers(workers)
    if workers > samples:
        raise DlperfError(
            f"{workers} workers are more than the {samples} samples; give each at least one"
        )
    python = slowdown(training.machine, "overhead", workers)
    one = forecast(
        predict_co_run(training, workers),
        math.ceil(samples / workers),
        epochs,
        math.ceil(val_samples / workers),
        math.ceil(test_samples / workers),
        None if evaluation is None else predict_co_run(evaluation, workers),
        None if last is None else predict_co_run(last, workers),
        loop,
        None if loader is None else replace(loader, batch_s=python * loader.batch_s),
    )
    averaged_s = (
        averaging_s(training.machine, sum(spec.nbytes for spec in parameters_of(training)), workers)
        if workers > 1
        else 0.0
    )
    prepared_s = preparation_s(training.machine, workers)
    waited_s = waiting_s(
        min(workers, training.machine.cpu.n_cores),
        machine_log_sigma(training.machine, 1),
        one.epoch_s,
    )
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

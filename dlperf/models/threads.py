"""Training time on p workers that each hold an instance of the network and own a share of the
images.

Viebke, Pllana, Memeti, Kolodziej, "Performance modelling of deep learning on Intel many integrated
core architectures", HPCS 2019: strategies (a) and (b), Tables I to VI. In the paper a worker is a
hardware thread; the model is the same for processes with a core each. SI base units; p is a whole
number of at least 1, images and epochs are counts.

    T = T_prep + CPI [(T_FProp + T_BProp) i/p + T_FProp i/p + T_FProp it/p] ep + MemoryContention i
    ep / p

Strategy (b) takes T_prep, T_FProp and T_BProp as measured; strategy (a) makes them of operation
counts, a clock rate and one fitted OperationFactor. Either takes CPI (:class:`HardwareThreads`) and
the contention (:class:`MemoryContention`) as measured on the machine: they are parameters of the
model by definition.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.text import counted
from dlperf.models.arguments import AMOUNT, FROM_ONE, POSITIVE, POSITIVE_FINITE, Checked, count

# -- what is trained, and what it takes ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Workload(Checked):
    """A training run: `n_epochs` (ep), images of an epoch for training (i), validation (i in the
    paper, which validates on what it trains on) and testing (it).

    `n_test_passes` is how often the test images are gone through; None is after every epoch, as in
    the paper. Raises DlperfError for counts below 0, or no epoch or training image at all.
    """

    n_epochs: int
    n_training: int
    n_validation: int = 0
    n_test: int = 0
    n_test_passes: int | None = None

    @property
    def n_tested(self) -> int:
        """Images tested in the whole run: it x ep in the paper."""
        return self.n_test * (self.n_epochs if self.n_test_passes is None else self.n_test_passes)


@dataclass(frozen=True, slots=True)
class ImageTimes(Checked):
    """What one worker alone takes, in seconds: T_FProp and T_BProp for one image (the update of the
    weights belongs to T_BProp), T_prep for the whole run.

    Raises DlperfError for times that are negative or not finite.
    """

    forward_s: float
    backward_s: float
    preparation_s: float = 0.0

    @classmethod
    def of_step(
        cls, forward_s: float, total_s: float, batch_size: int, preparation_s: float = 0.0
    ) -> ImageTimes:
        """The times of an image from those of a step over a batch: T_FProp = forward / batch,
        T_BProp = (total - forward) / batch.

        Raises DlperfError for a batch below 1, or a forward that is longer than the whole step.

        >>> ImageTimes.of_step(forward_s=2.0, total_s=8.0, batch_size=4)
        ImageTimes(forward_s=0.5, backward_s=1.5, preparation_s=0.0)
        """
        FROM_ONE.check("batch_size", batch_size)
        if total_s < forward_s:
            raise DlperfError(
                f"total_s is {total_s}, less than forward_s, {forward_s}; a step holds its forward"
                " pass"
            )
        return cls(forward_s / batch_size, (total_s - forward_s) / batch_size, preparation_s)


@dataclass(frozen=True, slots=True)
class Operations(Checked):
    """Strategy (a)'s counts: FProp and BProp for one image (Tables VII and VIII), Prep for the
    creation of instances and weights (Table II).

    The paper's counts are its own (less than the multiply-adds of the layers), and OperationFactor
    makes up for it: never mix them with FLOP counts under one factor. Raises DlperfError for
    negative counts.
    """

    forward: float
    backward: float
    preparation: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """The terms of a run in seconds, CPI included: the rows of Tables V and VI."""

    preparation_s: float
    training_s: float
    validation_s: float
    testing_s: float
    contention_s: float

    @property
    def total_s(self) -> float:
        """The whole run."""
        return math.fsum(
            (
                self.preparation_s,
                self.training_s,
                self.validation_s,
                self.testing_s,
                self.contention_s,
            )
        )


# -- the two strategies ----------------------------------------------------------------------------


def training_time(
    workload: Workload,
    times: ImageTimes,
    n_workers: int,
    cpi: float = 1.0,
    contention_s: float = 0.0,
) -> TrainingTime:
    """Strategy (b): the time of a run on p = `n_workers`, term by term.

    Viebke et al. 2019, Table VI, where CPI multiplies training, validation and testing, not the
    preparation, and the memory overhead is T_mem = MemoryContention i ep / p. `cpi` is CPI(p), 1
    where nobody shares a core; `contention_s` is MemoryContention(p), seconds that each training
    image takes longer because p workers train at once.

    i / p is not rounded: errs low by less than an image a worker and epoch. Waiting for the slowest
    worker and combining the instances are in no term but the measured contention. Raises
    DlperfError for p below 1 or above the training images, a CPI that is not positive, a negative
    contention.

    >>> times = ImageTimes(1.0, 2.0, preparation_s=5.0)
    >>> training_time(Workload(n_epochs=3, n_training=10), times, n_workers=2, contention_s=0.5)
    TrainingTime(preparation_s=5.0, training_s=45.0, validation_s=0.0, testing_s=0.0,
    contention_s=7.5)
    """
    check_workers(n_workers)
    if n_workers > workload.n_training:
        raise DlperfError(
            f"{n_workers} workers are more than the {workload.n_training} training images; give"
            " each at least one image"
        )
    POSITIVE_FINITE.check("CPI", cpi)
    AMOUNT.check("contention_s", contention_s)
    trained = workload.n_training * workload.n_epochs / n_workers
    validated = workload.n_validation * workload.n_epochs / n_workers
    return TrainingTime(
        times.preparation_s,
        cpi * (times.forward_s + times.backward_s) * trained,
        cpi * times.forward_s * validated,
        cpi * times.forward_s * workload.n_tested / n_workers,
        contention_s * trained,
    )


def operation_times(
    workload: Workload, operations: Operations, seconds_per_operation: float
) -> ImageTimes:
    """Strategy (a)'s times: operations times OperationFactor / s, with (Prep + 4 i + 2 it + 10 ep)
    operations to prepare.

    Viebke et al. 2019, Table V. `seconds_per_operation` is OperationFactor / s, the paper's 15 /
    1.238 GHz, or fitted (:func:`seconds_per_operation`). The paper's table omits the factor; its
    Table X needs it, in the preparation too. Raises DlperfError where it is not positive.

    >>> operations = Operations(3, 6, preparation=40)
    >>> operation_times(Workload(n_epochs=1, n_training=10, n_test=5), operations, 0.5)
    ImageTimes(forward_s=1.5, backward_s=3.0, preparation_s=50.0)
    """
    POSITIVE_FINITE.check("seconds_per_operation", seconds_per_operation)
    preparation = (
        operations.preparation
        + 4 * workload.n_training
        + 2 * workload.n_test
        + 10 * workload.n_epochs
    )
    return ImageTimes(
        operations.forward * seconds_per_operation,
        operations.backward * seconds_per_operation,
        preparation * seconds_per_operation,
    )


def seconds_per_operation(measured_s: float, n_operations: float, other_s: float = 0.0) -> float:
    """OperationFactor / s fitted to one measured point: (T - other) / operations, in seconds.

    Viebke et al. 2019, section IV: the factor is "adjusted to closely match the measured value for
    15 threads". Time is linear in it, so one point fixes it. `n_operations` are those of the
    measured work on its critical path (for a run (preparation + CPI ... i ep / p), for a step its
    FLOPs), `other_s` what does not depend on them (the contention). Holds for what computes as the
    measured work did. Raises DlperfError where nothing is left to fit.

    >>> seconds_per_operation(10.0, 4, other_s=2.0)
    2.0
    """
    AMOUNT.check("other_s", other_s)
    if not n_operations > 0:
        raise DlperfError(
            f"the measured point has {n_operations} operations; OperationFactor needs at least one"
        )
    if not (measured_s > other_s and math.isfinite(measured_s)):
        raise DlperfError(
            f"the measured point took {measured_s:.6g} s, of which {other_s:.6g} s are no"
            " operations; nothing is left to fit OperationFactor to"
        )
    return (measured_s - other_s) / n_operations


def delta_frac(measured_s: float, predicted_s: float) -> float:
    """The paper's accuracy Delta = |measured - predicted| / predicted, as a fraction (section V: it
    divides by the prediction).

    Raises DlperfError where the prediction is not positive.

    >>> delta_frac(measured_s=9.0, predicted_s=10.0)
    0.1
    """
    POSITIVE.check("predicted_s", predicted_s)
    return abs(measured_s - predicted_s) / predicted_s


# -- what the machine adds -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HardwareThreads:
    """Cores that run several hardware threads: `cpis` holds the CPI of each thread where 1, 2, ...
    of them share a core.

    Viebke et al. 2019, Table III: 1, 1, 1.5, 2 on the Xeon Phi. Without threads that share a core:
    ``(1.0,)``. Raises DlperfError for no core, CPIs that are not positive, or a thread that runs
    faster beside more others.
    """

    n_cores: int
    cpis: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        FROM_ONE.check("n_cores", self.n_cores)
        if (
            not self.cpis
            or not all(cpi > 0 and math.isfinite(cpi) for cpi in self.cpis)
            or list(self.cpis) != sorted(self.cpis)
        ):
            raise DlperfError(
                f"CPIs are {self.cpis}; they must be positive, one for each number of threads on a"
                " core, and none less than the one before"
            )

    @property
    def n_threads(self) -> int:
        """Hardware threads of all cores."""
        return self.n_cores * len(self.cpis)

    def cpi(self, n_workers: int) -> float:
        """CPI(p), each worker on a hardware thread of its own: that of the fullest core, whose
        workers come last.

        Beyond all hardware threads the last value stands, as in the paper, which so asks for a
        larger processor of the same kind; for more workers than this very processor has threads,
        :meth:`shared_cpi`. Raises DlperfError for p below 1.

        >>> [HardwareThreads(61, (1, 1, 1.5, 2)).cpi(p) for p in (1, 120, 180, 240, 3840)]
        [1, 1, 1.5, 2, 2]
        """
        check_workers(n_workers)
        return self.cpis[min(-(-n_workers // self.n_cores), len(self.cpis)) - 1]

    def shared_cpi(self, n_workers: int) -> float:
        """CPI(p) on this very processor: beyond its hardware threads, workers take turns, each p /
        threads times as long.

        Not in the paper. A fair scheduler, the cost of switching left out: errs low. Raises
        DlperfError for p below 1.

        >>> [HardwareThreads(2).shared_cpi(p) for p in (1, 2, 4, 8)]
        [1.0, 1.0, 2.0, 4.0]
        """
        return self.cpi(n_workers) * max(1.0, n_workers / self.n_threads)


@dataclass(frozen=True, slots=True)
class MemoryContention:
    """MemoryContention(p) of one network on one machine: measured (workers, seconds an image), and
    what follows from them elsewhere.

    Viebke et al. 2019, Table IV: up to the measured number of threads the table, beyond it the line
    of least squares through all of its rows. Raises DlperfError for fewer than two points, two of
    the same p, p below 1, or times that are negative or not finite.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if len(self.points) < 2:
            raise DlperfError(
                f"memory contention has {counted(len(self.points), 'point')}; its line needs two at"
                " least: measure it at another number of workers"
            )
        workers = [n for n, _ in self.points]
        if sorted(set(workers)) != workers:
            raise DlperfError(
                f"memory contention is given at {workers} workers; give each number once, in rising"
                " order"
            )
        for n_workers, seconds in self.points:
            check_workers(n_workers)
            AMOUNT.check(f"memory contention of {counted(n_workers, 'worker')}", seconds)

    @property
    def line(self) -> tuple[float, float]:
        """Slope and intercept of the line of least squares through all points."""
        slope, intercept = statistics.linear_regression(*zip(*self.points))
        return slope, intercept

    def at(self, n_workers: int) -> float:
        """MemoryContention(p) in seconds an image: measured where it was, on the line beyond the
        most workers measured.

        Between two measured numbers, and below the least, of which the paper says nothing, it lies
        on the straight line between the neighbours (below: the line), never below 0. Raises
        DlperfError for p below 1.

        >>> contention = MemoryContention(((1, 0.0), (2, 1.0), (4, 3.5)))
        >>> contention.at(2), contention.at(3)
        (1.0, 2.25)
        """
        check_workers(n_workers)
        workers, seconds = zip(*self.points)
        if workers[0] <= n_workers <= workers[-1]:
            return float(np.interp(n_workers, workers, seconds))
        slope, intercept = self.line
        return max(0.0, slope * n_workers + intercept)


def check_workers(n_workers: int) -> None:
    """Raises DlperfError for a number of workers that is not whole or below 1."""
    count().check("the number of workers", n_workers)

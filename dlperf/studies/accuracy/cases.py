"""What is studied and what was found: cases, what was measured of them, and how far each predictor
was off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import pandas as pd

from dlperf.core.errors import DlperfError
from dlperf.core.measurement import Measurement
from dlperf.core.state import State

PHASES = ("forward", "backward", "optimizer")
LAYER_PHASES = ("forward", "backward")
"""The phases whose layers are scored: the optimizer's division over layers is dlperf's own."""
OWN_OPS = "(own ops)"
"""The family of what a module with children does outside of them."""


@dataclass(frozen=True)
class Case:
    """One step: a target at a batch size, with a given number of threads."""

    target: str
    batch_size: int
    threads: int
    inference: bool = False

    @property
    def network(self) -> str:
        """The target without folders and without the module that holds the checkout's networks.

        >>> Case("networks.further:gpt", 16, 1).network, Case("../nets/my.py:net", 16, 1).network
        ('gpt', 'my.py:net')
        """
        name = self.target.replace("\\", "/").rsplit("/", 1)[-1]
        return name.partition(":")[2] if name.startswith("networks.") else name

    @property
    def label(self) -> str:
        """How tables name it.

        >>> Case("lenet", 32, 2).label
        'lenet@32 t2'
        """
        return f"{self.network}@{self.batch_size} t{self.threads}" + (
            " inference" if self.inference else ""
        )


@dataclass(frozen=True)
class Reference:
    """What several fresh processes measured of one case: medians over the runs, in seconds.

    `repeatability_frac` is (slowest - fastest run) / median of the whole step: no prediction can be
    more exact than that. `run_totals_s` are the runs' own medians; `fault_counts` their page faults
    a step.
    """

    total_s: float
    forward_s: float
    backward_s: float | None
    optimizer_s: float | None
    repeatability_frac: float | None
    layers: pd.DataFrame = field(compare=False, repr=False)
    run_totals_s: tuple[float, ...]
    fault_counts: tuple[float, ...] = ()
    zero_grad_s: float | None = None


def spread_frac(values: Sequence[float]) -> float:
    """(largest - smallest) / median; 0 where the median is.

    >>> spread_frac([2.0, 3.0, 2.5])
    0.4
    """
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def median_or_none(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None where there is none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def join(runs: Sequence[Measurement]) -> Reference:
    """The reference of a case from the measurements of fresh processes.

    Raises DlperfError where there is no run, or the runs are of different cases.
    """
    if not runs:
        raise DlperfError("validate: a case was never measured")
    if len({(run.target, run.batch_size, run.threads, run.inference) for run in runs}) > 1:
        raise DlperfError("validate: measurements of different cases cannot be joined")

    def phase(name: str) -> float | None:
        return median_or_none(run.step[name].median for run in runs if name in run.step)

    totals = tuple(run.step["total"].median for run in runs)
    forward_s = phase("forward")
    assert forward_s is not None  # every Measurement holds it
    return Reference(
        total_s=median(totals),
        forward_s=forward_s,
        backward_s=phase("backward"),
        optimizer_s=phase("optimizer"),
        repeatability_frac=spread_frac(totals) if len(totals) > 1 else None,
        layers=_join_layers(runs),
        run_totals_s=totals,
        fault_counts=tuple(
            run.noise["page_faults_per_step"] for run in runs if "page_faults_per_step" in run.noise
        ),
        zero_grad_s=phase("zero_grad"),
    )


def _join_layers(runs: Sequence[Measurement]) -> pd.DataFrame:
    """The frame of :class:`Reference`, one phase after the other."""
    taken = [
        (row.layer, row.type, phase, samples.median)
        for phase in LAYER_PHASES
        for run in runs
        for row in run.layers
        if (samples := row.phase(phase)) is not None
    ]
    groups = pd.DataFrame(taken, columns=["layer", "type", "phase", "actual_s"]).groupby(
        ["layer", "phase"], sort=False
    )
    times = groups.actual_s
    spread = ((times.max() - times.min()) / times.median()).fillna(0.0)
    return pd.DataFrame(
        {
            "type": groups.type.first(),
            "actual_s": times.median(),
            "repeatability_frac": spread.where((times.size() == len(runs)) & (len(runs) > 1)),
        }
    ).reset_index()


@dataclass(frozen=True)
class SourceShares:
    """Which share of the predicted time is the time of ops measured at their very shape,
    interpolated, extrapolated, unpriced, or no op's at all.

    What is no op's is the framework: module calls, the optimizer's loop, page faults. The shares
    add up to 1.
    """

    measured: float = 0.0
    interpolated: float = 0.0
    extrapolated: float = 0.0
    unpriced: float = 0.0
    framework: float = 0.0

    @property
    def all_measured(self) -> bool:
        """Whether the op times of the case are exact in the machine file: at least 99 % of the ops'
        time is.
        """
        ops = self.measured + self.interpolated + self.extrapolated + self.unpriced
        return ops > 0 and self.measured >= 0.99 * ops


@dataclass(frozen=True)
class CaseScore:
    """One predictor on one case, as the yardstick counts; fractions, None where the predictor does
    not speak.

    `step_error_frac` is predicted / actual - 1. `forward_mape_frac` and `backward_mape_frac` are
    means of abs(predicted / actual - 1) over the leaf modules of at least 1 % of their measured
    phase, the repeatabilities beside them means over the same layers; `seen_frac` is the share of
    the backward that the measurement attributes to layers. `weighted_frac` is the sum of
    abs(predicted
    - actual) over the sum of actual in the forward. `unpriced_frac` is the share of the measured
    forward in layers that the prediction calls unpriced. `width_frac` is half the 90 % interval
    over the prediction, `inside` whether the actual step lies in it.

    All of this is of the blind prediction, for the median of the states that the machine file
    contains. `at_state` is the score of the prediction for `state`, the machine's during the
    measurements; both are None where there is none.
    """

    case: Case
    predictor: str
    actual_s: float
    repeatability_frac: float | None
    predicted_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    step_error_frac: float | None = None
    forward_error_frac: float | None = None
    backward_error_frac: float | None = None
    optimizer_error_frac: float | None = None
    forward_mape_frac: float | None = None
    forward_repeatability_frac: float | None = None
    backward_mape_frac: float | None = None
    backward_repeatability_frac: float | None = None
    seen_frac: float | None = None
    weighted_frac: float | None = None
    unpriced_frac: float | None = None
    sources: SourceShares | None = None
    state: State | None = None
    at_state: CaseScore | None = None

    @property
    def width_frac(self) -> float | None:
        """Half the width of the interval over the prediction."""
        if self.low_s is None or self.high_s is None or not self.predicted_s:
            return None
        return (self.high_s - self.low_s) / 2 / self.predicted_s

    @property
    def inside(self) -> bool | None:
        """Whether the actual step lies in the interval."""
        return (
            None
            if self.low_s is None or self.high_s is None
            else self.low_s <= self.actual_s <= self.high_s
        )

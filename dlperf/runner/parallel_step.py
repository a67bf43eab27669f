"""The step of a data-parallel training: measured, and predicted as `dlperf scale` does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlperf.core import units
from dlperf.core.errors import DlperfError
from dlperf.core.text import text_width
from dlperf.models.buckets import ReducerOptions
from dlperf.report.document import Column, format_error, format_table
from dlperf.runner.ranks import MergedRanks

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.forecast.prediction import Prediction

PARTS = ("step_s", "compute_s", "exposed_communication_s")


@dataclass(frozen=True)
class ParallelStep:
    """Seconds of :data:`PARTS` on the slowest rank, without what the loop does around the step.

    The step is zero_grad, forward, backward and optimizer. Its time beyond the slowest rank's
    computation is exposed communication, as in a scaling forecast. `predicted` is None without a
    cluster file or a prediction; `notes` contain the reason.
    """

    actual: tuple[float, ...]
    predicted: tuple[float, ...] | None = None
    notes: tuple[str, ...] = ()

    def lines(self, width: int | None = None) -> list[str]:
        """The table, `width` columns wide (default: the terminal's)."""
        columns = [
            Column(
                "distributed step", ("whole", "compute", "exposed communication"), align_left=True
            )
        ]
        if self.predicted is not None:
            columns.append(Column("predicted", tuple(map(units.format_seconds, self.predicted))))
        columns.append(Column("actual", tuple(map(units.format_seconds, self.actual))))
        if self.predicted is not None:
            errors = (
                predicted / actual - 1 if actual else None
                for predicted, actual in zip(self.predicted, self.actual)
            )
            columns.append(Column("error", tuple(map(format_error, errors))))
        return [format_table(columns, text_width() if width is None else width)]

    def to_json(self) -> dict[str, Any]:
        """The step as JSON data."""
        return {
            "actual": dict(zip(PARTS, self.actual)),
            "predicted": None if self.predicted is None else dict(zip(PARTS, self.predicted)),
        }


def compare_step(
    ranks: MergedRanks,
    prediction: Prediction | None,
    options: ReducerOptions | None,
    batch_size: int,
    cluster: Cluster | None,
) -> ParallelStep | None:
    """The ranks' step and its forecast; None where the ranks' own steps were not seen.

    `prediction`: of one rank's step alone, all its passes included. All but the last are taken to
    run under ``no_sync``.
    """
    times = ranks.step_times
    if not times:
        return None
    step_s, compute_s = max(one.step_s for one in times), max(one.compute_s for one in times)
    actual = (step_s, compute_s, max(0.0, step_s - compute_s))

    def unpredicted(*reasons: str) -> ParallelStep:
        notes = tuple(f"no prediction of the distributed step: {reason}" for reason in reasons)
        return ParallelStep(actual, notes=notes)

    if cluster is None:
        return unpredicted()
    if options is None:
        return unpredicted("the model is not wrapped in DistributedDataParallel")
    if prediction is None or ranks.trace is None:
        return unpredicted("there is none of a single rank's")
    from dlperf.distributed.forecast import forecast
    from dlperf.distributed.scenario import ScalingScenario, hosts_per_system_of

    hosts = ranks.trace.hosts
    try:
        question = ScalingScenario(
            (ranks.n_ranks,),
            batch_size,
            ranks_per_node=max(hosts.count(name) for name in hosts),
            hosts_per_system=hosts_per_system_of(cluster),
            options=options,
        )
        found = forecast(lambda _: prediction, cluster, question)
    except DlperfError as error:
        return unpredicted(str(error))
    (row,) = found.rows
    return ParallelStep(
        actual, (row.step_s, row.compute_s, row.exposed_communication_s), found.notes
    )

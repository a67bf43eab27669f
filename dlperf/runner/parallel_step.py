"""The step of data-parallel training on the ranks at hand: what was measured beside what `dlperf
scale` would have said.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlperf.core import units
from dlperf.core.errors import DlperfError
from dlperf.core.text import text_width
from dlperf.models.buckets import ReducerOptions
from dlperf.report.table import Column, format_error, format_table
from dlperf.runner.ranks import MergedRanks

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.forecast.prediction import Prediction

PARTS = ("step_s", "compute_s", "exposed_communication_s")


@dataclass(frozen=True)
class ParallelStep:
    """Seconds of :data:`PARTS`: zero_grad, forward, backward and optimizer on the slowest rank,
    without what the loop does around them.

    The slowest rank's computing counts, and what its step takes beyond that is exposed
    communication, as in a scaling forecast. `predicted` is None without a cluster file, or where
    nothing can be predicted; `notes` say why.
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
    team: MergedRanks,
    prediction: Prediction | None,
    options: ReducerOptions | None,
    batch_size: int,
    n_passes: int,
    cluster: Cluster | None,
) -> ParallelStep | None:
    """The team's step beside its forecast; None where the ranks' own steps were not seen.
    `prediction` is of one rank's step alone.
    """
    times = team.step_times
    if not times:
        return None
    step_s, compute_s = (
        max(getattr(one, name) for one in times) for name in ("step_s", "compute_s")
    )
    actual = (step_s, compute_s, max(0.0, step_s - compute_s))
    if cluster is None:
        return ParallelStep(actual)
    if options is None:
        return ParallelStep(
            actual,
            notes=(
                (
                    "no prediction of the distributed step: the model is not wrapped in"
                    " DistributedDataParallel"
                ),
            ),
        )
    if prediction is None or team.trace is None:
        return ParallelStep(
            actual,
            notes=("no prediction of the distributed step: there is none of a single rank's",),
        )
    from dlperf.distributed.forecast import forecast
    from dlperf.distributed.scenario import ScalingScenario, hosts_per_system_of

    hosts = team.trace.hosts
    notes = []
    if n_passes > 1:
        notes.append(
            f"{n_passes} passes make a step: the distributed step is predicted as if all but the"
            " last ran under no_sync"
        )
    try:
        question = ScalingScenario(
            (team.n_ranks,),
            batch_size,
            ranks_per_node=max(hosts.count(name) for name in hosts),
            hosts_per_system=hosts_per_system_of(cluster),
            options=ReducerOptions(
                options.bucket_bytes,
                options.gradient_as_bucket_view,
                options.static_graph,
                options.find_unused_parameters,
                options.broadcast_buffers,
                n_passes,
            ),
        )
        found = forecast(lambda _: prediction, cluster, question)
    except DlperfError as error:
        return ParallelStep(actual, notes=(f"no prediction of the distributed step: {error}",))
    (row,) = found.rows
    return ParallelStep(
        actual, (row.step_s, row.compute_s, row.exposed_communication_s), (*notes, *found.notes)
    )

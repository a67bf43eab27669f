"""Co-run slowdown of worker processes, measured on a machine or on the ranks of a cluster."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from dlperf.core.clock import Samples, samples_from_record, samples_to_json
from dlperf.core.conversion import CoRunRecord, refuse
from dlperf.core.errors import DlperfError

PREPARATION = "preparation"
"""Kind of work: from the start of the worker processes until all of them have imported torch and
made an optimizer.
"""


@dataclass(frozen=True)
class CoRun:
    """Seconds per call of one kind of work, by `workers` processes of one thread each at once, and
    by one of them alone.

    `work` is a bound of a prediction's items (``compute``, ``L2``, ``page-faults``, ...),
    :data:`PREPARATION`, or :func:`operations_of` a step. A sample is the mean over the processes
    while all of them are busy. Samples alone and together are taken in turns, so that the i-th of
    both are neighbours in time. Raises DlperfError for numbers of samples that differ.
    """

    work: str
    workers: int
    samples: Samples
    alone: Samples

    def __post_init__(self) -> None:
        together, alone = len(self.samples.values), len(self.alone.values)
        if together != alone:
            raise DlperfError(
                f"co-run of {self.work} by {self.workers} workers has {together} samples together"
                f" and {alone} alone; they are taken in pairs"
            )

    @property
    def slowdown(self) -> float:
        """Slowdown of a call: the median over the pairs of samples, and not below 1.

        It is not the ratio of the least samples: a co-tenant of the machine may slow any core for
        seconds, and all cores may never be quiet at once. Two samples in a row mostly meet the same
        state.
        """
        return max(
            1.0,
            statistics.median(
                together / alone for together, alone in zip(self.samples.values, self.alone.values)
            ),
        )


def co_run_to_json(co_run: CoRun) -> dict[str, Any]:
    """The entry of a machine file or a cluster file."""
    return {
        "work": co_run.work,
        "workers": co_run.workers,
        **samples_to_json(co_run.samples),
        "alone": samples_to_json(co_run.alone),
    }


def co_run_from_record(record: CoRunRecord, entry: str) -> CoRun:
    """The co-run of a file's `entry`. Raises DlperfError for samples that are no pairs."""
    together, alone = samples_from_record(record), samples_from_record(record.alone)
    if len(together.values) != len(alone.values):
        refuse(
            f"{entry}.samples_s",
            record.samples_s,
            f"as many samples as alone, {len(alone.values)}: they are taken in pairs",
        )
    return CoRun(record.work, record.workers, together, alone)


def operations_of(target: str, batch_size: int, inference: bool) -> str:
    """Kind of work: a target's own operations, repeated one by one in their order.

    >>> operations_of("lenet", 32, inference=False)
    'operations of lenet@32 (step)'
    """
    return f"operations of {target}@{batch_size} ({'forward pass' if inference else 'step'})"

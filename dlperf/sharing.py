"""What workers that run at once cost one another, as data: measured on one machine, kept in its file."""
from __future__ import annotations

from dataclasses import dataclass

from dlperf.clock import Samples

PREPARATION = "preparation"
"""Not a resource: from the start of the workers' processes until all of them have imported torch and made an optimizer."""


@dataclass(frozen=True)
class Sharing:
    """One kind of work done by `workers` processes of one thread each at once, and by one of them alone: seconds a call, sampled in turns.

    `work` is what bounds the items of a prediction (``compute``, ``L2``, ``page-faults``, ...), :data:`PREPARATION`, or
    :func:`operations_of` a step. A sample is the mean over the processes, taken while all of them were busy.
    """

    work: str
    workers: int
    samples: Samples
    alone: Samples

    @property
    def slowdown(self) -> float:
        """How many times as long a call takes beside the others as alone, of either the least sample, since disturbances only add."""
        return self.samples.minimum / self.alone.minimum


def operations_of(target: str, batch_size: int, inference: bool) -> str:
    """The name under which a file keeps the contention of a target's own operations, repeated one by one in their order.

    >>> operations_of("lenet", 32, inference=False)
    'operations of lenet@32 (step)'
    """
    return f"operations of {target}@{batch_size} ({'forward pass' if inference else 'step'})"

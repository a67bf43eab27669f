"""How far a machine's speed has moved since its file was made: kernels timed again, over the file's
times and what the machine's state explains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dlperf.core.clock import quantile
from dlperf.core.machine import Kernel, Machine
from dlperf.core.state import Reading, State, reading_of
from dlperf.core.text import counted
from dlperf.core.units import format_percent
from dlperf.ops.reference_state import bound_of
from dlperf.report.document import Column, format_error, format_table

MOVED_FRAC = 0.08
"""Median change of a family beyond which it has moved: times of the same kernels in calibrations of
one day differ by some 5 %.
"""


@dataclass(frozen=True)
class Movement:
    """A family's median time over the file's and the state's (1: none), half the distance of the
    10th and the 90th percentile, and the number of its kernels.
    """

    family: str
    threads: int
    n_kernels: int
    ratio: float
    spread: float

    @property
    def threshold_frac(self) -> float:
        """The change beyond which it has moved: MOVED_FRAC, or its spread where that is more."""
        return max(MOVED_FRAC, self.spread)

    @property
    def has_moved(self) -> bool:
        """Whether it changed by more than its threshold."""
        return abs(self.ratio - 1) > self.threshold_frac

    def sentence(self) -> str:
        """The change in words.

        >>> Movement("gemm", 1, 6, 1.25, 0.04).sentence()
        'gemm with 1 thread: +25 % beyond what the state explains (6 kernels, threshold 8.0 %);
        dlperf calibrate -o NEW.json measures anew'
        """
        return (
            f"{self.family} with {counted(self.threads, 'thread')}:"
            f" {format_error(self.ratio - 1)} beyond what the state explains"
            f" ({self.n_kernels} kernels, threshold {format_percent(self.threshold_frac)}); dlperf"
            " calibrate -o NEW.json measures anew"
        )


@dataclass(frozen=True)
class Refresh:
    """The movements of a machine file's families, and the median state meanwhile; None without a
    reference.
    """

    machine: Machine
    movements: tuple[Movement, ...]
    state: State | None

    @property
    def moved(self) -> tuple[Movement, ...]:
        """The families that have moved."""
        return tuple(one for one in self.movements if one.has_moved)

    def to_text(self) -> str:
        """The state, and a table of the families."""
        found = self.movements
        columns = [
            Column("family", tuple(one.family for one in found), align_left=True),
            Column("threads", tuple(str(one.threads) for one in found)),
            Column("kernels", tuple(str(one.n_kernels) for one in found)),
            Column("change", tuple(format_error(one.ratio - 1) for one in found)),
            Column("spread", tuple(format_percent(one.spread) for one in found)),
            Column("threshold", tuple(format_percent(one.threshold_frac) for one in found)),
            Column("", tuple("moved" if one.has_moved else "" for one in found), align_left=True),
        ]
        head = [] if self.state is None else [f"state now: {self.state.describe()}", ""]
        verdict = (
            f"{len(self.moved)} of {len(found)} families moved by more than the state explains"
            if self.moved
            else "no family moved by more than the state explains"
        )
        return "\n".join([*head, format_table(columns, None), "", verdict])

    def to_json(self) -> dict[str, Any]:
        """The movements as JSON data."""
        return {
            "schema": "dlperf.machine-refresh",
            "schema_version": 1,
            "machine": self.machine.path,
            "versions": dict(self.machine.versions),
            "state": None if self.state is None else asdict(self.state),
            "families": [
                {**asdict(one), "threshold_frac": one.threshold_frac, "has_moved": one.has_moved}
                for one in self.movements
            ],
        }


def _slowdown(kernel: Kernel, state: State, bound: str) -> float:
    """How many times longer a kernel takes in a state."""
    return state.factor(bound) + (kernel.core_to_core or 0.0) * (state.core_to_core - 1.0)


def compare(
    machine: Machine,
    timed: Sequence[tuple[Kernel, float, Sequence[Reading]]],
    readings: Sequence[Reading],
) -> Refresh:
    """Kernels of a machine file that were `timed` again: each with its least sample in seconds and
    the least readings around it, of which the lesser slowdown counts, as for the file's samples.
    `readings` are all that were taken.
    """
    reference = machine.reference
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    for kernel, seconds, around in timed:
        bound = bound_of(kernel, machine)
        states = [] if reference is None else [reading.over(reference) for reading in around]
        slowdown = min((_slowdown(kernel, state, bound) for state in states), default=1.0)
        ratios[kernel.family, kernel.threads].append(seconds / (kernel.seconds * slowdown))
    movements = tuple(
        Movement(*key, len(own), median(own), 0.5 * (quantile(own, 0.9) - quantile(own, 0.1)))
        for key, own in sorted(ratios.items())
    )
    now = None if reference is None else reading_of(readings).over(reference)
    return Refresh(machine, movements, now)

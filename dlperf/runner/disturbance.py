"""Disturbance of a watched run by other programs, and the step without it."""

from __future__ import annotations

import os
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from dlperf.core.units import format_percent, format_seconds
from dlperf.runner.watched_training import WatchedStep

_LEAST_CORE_FRAC = 0.9
_MOST_SLOWDOWN = 1.15
_MOST_DISTURBED_FRAC = 0.5


@dataclass(frozen=True)
class Disturbance:
    """What other programs took from the watched steps.

    `core_frac`: processor time over elapsed time of the steps, without loading; None for several
    threads, which also wait for each other. `slowdown`: of the core, from its speed samples.
    `disturbed_frac`: share of the steps that lost their core. `load`: the system's load average
    over a minute, None where the system has none. `step_s`: the step on a core of its own.
    """

    core_frac: float | None
    slowdown: float
    disturbed_frac: float
    load: float | None
    step_s: float

    @property
    def is_notable(self) -> bool:
        """Whether it is more than the usual noise.

        Several threads, or a loader's workers, take cores from each other: steps that lose one
        count where the system has more to run than CPUs.
        """
        is_full = self.load is not None and self.load > (os.cpu_count() or 1) + 0.5
        return (
            (self.core_frac is not None and self.core_frac < _LEAST_CORE_FRAC)
            or self.slowdown > _MOST_SLOWDOWN
            or (is_full and self.core_frac is None and self.disturbed_frac > _MOST_DISTURBED_FRAC)
        )

    def to_text(self) -> str:
        """The disturbance in one line."""
        parts = []
        if self.core_frac is not None:
            parts.append(f"the steps had {format_percent(self.core_frac)} of a core")
        parts.append(f"the core's slowdown was {self.slowdown:.2f}")
        parts.append(f"{format_percent(self.disturbed_frac)} of the steps lost their core")
        if self.load is not None:
            parts.append(f"the system's load was {self.load:.1f}")
        text = f"other programs disturbed the run: {', '.join(parts)}."
        if self.core_frac is None:
            return text
        return (
            f"{text} On a core of its own the step would take about {format_seconds(self.step_s)}."
        )

    def to_json(self) -> dict[str, Any]:
        """The disturbance as JSON data."""
        return asdict(self) | {"is_notable": self.is_notable}


def system_load() -> float | None:
    """Load average of the system over a minute; None where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def disturbance_of(
    steps: list[WatchedStep], threads: int, slowdown: float, load: float | None
) -> Disturbance:
    """The disturbance of watched steps, at least one; `slowdown` is of the core meanwhile."""
    timed = [step for step in steps if step.interval_s]
    elapsed_s = sum((step.interval_s or 0.0) - step.loading_s for step in timed)
    core_frac = None
    if threads == 1 and elapsed_s > 0:
        core_frac = min(1.0, sum(step.processor_s for step in timed) / elapsed_s)
    own_s = statistics.median(step.own_s for step in steps)
    return Disturbance(
        core_frac,
        slowdown,
        statistics.fmean(step.disturbed for step in steps),
        load,
        own_s * (1.0 if core_frac is None else core_frac) / slowdown,
    )

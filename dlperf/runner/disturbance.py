"""Disturbance of a watched run by other programs, and the step without it."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlperf.core.clock import Clock, undisturbed
from dlperf.core.units import format_percent, format_seconds
from dlperf.runner.watched_training import WatchedStep

_LEAST_CORE_FRAC = 0.9
_MOST_SLOWDOWN = 1.15
_MOST_DISTURBED_FRAC = 0.5


@dataclass(frozen=True)
class Disturbance:
    """What other programs took from the watched steps.

    `core_frac`: processor time of the steps over itself plus the time in which they were ready to
    run without a core; None for several threads, which also wait for each other, and where the
    system does not tell. `slowdown`: of the core, from its speed samples. `disturbed_frac`: share
    of the steps that lost their core. `load`: the system's load average over a minute, None where
    the system has none. `step_s`: the step on a core of its own; None where `core_frac` is, and
    where it would not be below the measured step.
    """

    core_frac: float | None
    slowdown: float
    disturbed_frac: float
    load: float | None
    step_s: float | None

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
        if self.step_s is None:
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


def core_times_s() -> tuple[float, float | None]:
    """Processor time of this process, and time that this thread was ready to run without a core.

    Waiting for others (children, devices, sleep) is in neither. The second one is None where the
    system does not tell: Linux alone does.
    """
    used_s = time.process_time()
    try:
        _, waited_ns, n_slices = Path("/proc/thread-self/schedstat").read_text().split()
    except (OSError, ValueError):
        return used_s, None
    return used_s, int(waited_ns) * 1e-9 if int(n_slices) else None


class SystemReadings:
    """What the system tells of a step: a lost core, its processor time and its wait for a core."""

    def __init__(self) -> None:
        self._switches = 0
        self._core_times_s: tuple[float, float | None] = (0.0, None)

    def begin(self, clock: Clock) -> None:
        """A step begins."""
        self._switches, self._core_times_s = clock.switches(), core_times_s()

    def end(self, step: WatchedStep, clock: Clock) -> None:
        """The step ends: note what was read."""
        step.disturbed = clock.switches() != self._switches
        (used_s, waited_s), (used_before_s, before_s) = core_times_s(), self._core_times_s
        step.processor_s = used_s - used_before_s
        if waited_s is not None and before_s is not None:
            step.queue_wait_s = waited_s - before_s


def disturbance_of(
    steps: list[WatchedStep], threads: int, slowdown: float, load: float | None
) -> Disturbance:
    """The disturbance of watched steps, at least one; `slowdown` is of the core meanwhile.

    The step on a core of its own is the measured one, whose disturbed steps are dropped, without
    what the remaining ones waited for a core, over `slowdown`. Its lower bound is the least
    processor time of a step.
    """
    timed = [(step, step.queue_wait_s) for step in steps if step.queue_wait_s is not None]
    used_s = sum(step.processor_s for step, _ in timed)
    core_frac = step_s = None
    if threads == 1 and used_s > 0:
        core_frac = used_s / (used_s + sum(waited_s for _, waited_s in timed))
        alone = [(_without_wait_s(step, waited_s), step.disturbed) for step, waited_s in timed]
        least_s = min(min(step.own_s, step.processor_s) for step, _ in timed)
        step_s = max(undisturbed(alone).median / slowdown, least_s)
        if step_s >= undisturbed([(step.own_s, step.disturbed) for step in steps]).median:
            step_s = None
    disturbed_frac = statistics.fmean(step.disturbed for step in steps)
    return Disturbance(core_frac, slowdown, disturbed_frac, load, step_s)


def _without_wait_s(step: WatchedStep, waited_s: float) -> float:
    """The step without its share of the wait for a core in its interval."""
    interval_s = step.interval_s or step.own_s
    return step.own_s * max(0.0, 1.0 - waited_s / interval_s) if interval_s else 0.0

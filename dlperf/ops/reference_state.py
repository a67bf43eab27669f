"""Normalises the times of a machine file to its reference state.

A sample that was taken in another state of the machine is divided by the slowdown, then, of what
bounds it. Raw samples stay in the file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dlperf.core.clock import quantile
from dlperf.core.costs import KINDS, LOWER_QUARTILE, MEDIAN, Cost
from dlperf.core.machine import Bandwidth, Kernel, Machine
from dlperf.core.readings import first_referred, with_reference
from dlperf.core.state import LEAST, Reading, State, reading_of
from dlperf.ops.blocking import is_contraction

_BESIDE = 12
"""Readings before and after one of which a quantile is taken."""
_LASTING, _LASTING_AT_END = 45, 15
"""Readings in a row in which a slowdown counts for least samples: disturbances of milliseconds show
in many readings, but not in all of so many. Fewer do at the first and the last one, where nine are
taken at a time: with nine, kernels at the end of a calibration beside a busy co-tenant were divided
by up to 1.4, while their times and those of other hours agreed.
"""
_STEADY = 1.1
"""Median of so many readings over their least up to which that is the machine's state: a clock that
steps does so for all of them. Beside a co-tenant they scatter (AMD Zen 3: 1.12 to 1.68 in the
first 15), and the least of a kernel's samples was taken between disturbances.
"""
_KEPT_TOGETHER = 3
"""Readings of which the file keeps the median: those that were taken one after the other."""
_SMALL_S = 1e-5
"""Time below which the call bounds a kernel that is no contraction."""


def at_reference(machine: Machine) -> Machine:
    """The machine with the slowdown of each entry over the reference state, in the place of the
    readings at its samples.

    The first calibration of a file defines its reference. Entries without readings stay as they
    are.
    """
    machine = with_reference(machine)
    course = StateCourse.of(machine)
    if course is None:
        return machine
    return replace(
        machine,
        readings=(*machine.readings[: course.first], *together(machine.readings[course.first :])),
        kernels=tuple(_kernel_at_reference(one, course, machine) for one in machine.kernels),
        bandwidths=tuple(
            _bandwidth_at_reference(one, course, machine) for one in machine.bandwidths
        ),
        costs=tuple(_cost_at_reference(one, course, machine) for one in machine.costs),
    )


def together(readings: Sequence[Reading]) -> list[Reading]:
    """Medians of every three readings in a row: what steps of some milliseconds see."""
    return [
        reading_of(readings[at : at + _KEPT_TOGETHER])
        for at in range(0, len(readings), _KEPT_TOGETHER)
    ]


@dataclass(frozen=True)
class StateCourse:
    """States of a machine over the time in which entries of its file were measured: those of its
    readings, from the `first` on that an entry refers to.
    """

    first: int
    states: tuple[State, ...]

    @classmethod
    def of(cls, machine: Machine) -> StateCourse | None:
        """The course of a machine; None where no entry refers to a reading."""
        first = first_referred(machine)
        if first is None or not (taken := machine.readings[first:]):
            return None
        reference = machine.reference or reading_of(machine.readings, LEAST)
        return cls(first, tuple(reading.over(reference) for reading in taken))

    @cached_property
    def _courses(self) -> dict[tuple[str, float], list[float]]:
        """What :meth:`_course` has found."""
        return {}

    def _course(self, bound: str, fraction: float) -> list[float]:
        """A running quantile of a bound's slowdowns; LEAST is what lasts of them."""
        if (bound, fraction) not in self._courses:
            raw = [state.factor(bound) for state in self.states]
            self._courses[bound, fraction] = (
                lasting(raw)
                if fraction == LEAST
                else [
                    quantile(raw[max(0, at - _BESIDE) : at + _BESIDE + 1], fraction)
                    for at in range(len(raw))
                ]
            )
        return self._courses[bound, fraction]

    def factors(self, numbers: Sequence[int], bound: str, fraction: float) -> list[float]:
        """Slowdowns of what something bounds around readings, of which the same quantile counts as
        of the samples; readings that are not there are left out.
        """
        indices = (number - self.first for number in numbers)
        known = (index for index in indices if 0 <= index < len(self.states))
        course = self._course(bound, fraction)
        return [course[index] for index in known]

    def after(self, number: int, bound: str) -> float:
        """Slowdown of a least sample between a reading and the next one: the lesser of the two. A
        slowdown that ended before a sample makes it no shorter.
        """
        return min(self.factors((number, number + 1), bound, LEAST), default=1.0)


def lasting(slowdowns: Sequence[float]) -> list[float]:
    """At each place what 45 in a row around it, or 15 at an end, all reach: the largest such
    slowdown (a morphological opening), or 1 where they are on both sides of it or scatter. Edges
    stay where they are.

    >>> lasting([1.0] * 20 + [1.4] * 14 + [1.0] * 20) == [1.0] * 54
    True
    >>> lasting([1.0] * 20 + [1.1, 1.2] * 23) == [1.0] * 20 + [1.1] * 46
    True
    >>> lasting([1.0] * 20 + [1.1, 1.4, 1.5] * 15) == [1.0] * 65
    True
    >>> lasting([0.8] * 20 + [1.2, 0.9] * 15) == [0.8] * 20 + [1.0] * 30
    True
    """
    slower, faster = (
        _opened([max(1.0, factor) for factor in factors])
        for factors in (slowdowns, [1.0 / factor for factor in slowdowns])
    )
    return [slow / fast for slow, fast in zip(slower, faster)]


def _opened(values: Sequence[float]) -> list[float]:
    beyond = [math.inf] * (_LASTING - _LASTING_AT_END)
    padded = [*beyond, *values, *beyond]
    windows = (padded[at : at + _LASTING] for at in range(len(padded) - _LASTING + 1))
    least = [_reached(window) for window in windows]
    return [
        max(least[max(0, at - _LASTING_AT_END + 1) : at + len(beyond) + 1])
        for at in range(len(values))
    ]


def _reached(window: Sequence[float]) -> float:
    """What all readings reach, where they agree, else 1."""
    known = sorted(value for value in window if value < math.inf)
    is_steady = known[len(known) // 2] <= _STEADY * known[0]
    return known[0] if is_steady else 1.0


def _kernel_at_reference(kernel: Kernel, course: StateCourse, machine: Machine) -> Kernel:
    """A kernel with the slowdown of its least sample, after each was divided by its own."""
    values, numbers = kernel.samples.values, kernel.readings
    n_before = len(values) - len(numbers)
    if not numbers or n_before < 0:
        return replace(kernel, readings=()) if numbers else kernel
    bound = bound_of(kernel, machine)
    earlier = [value / kernel.slowdown for value in values[:n_before]]
    later = [value / course.after(at, bound) for value, at in zip(values[n_before:], numbers)]
    least_s = min(earlier + later)
    slowdown = _rounded(kernel.samples.minimum / least_s) if least_s else 1.0
    return replace(kernel, slowdown=slowdown, readings=())


def _bandwidth_at_reference(one: Bandwidth, course: StateCourse, machine: Machine) -> Bandwidth:
    """A sweep with the lesser slowdown of the readings around it."""
    if not one.readings:
        return one
    factors = course.factors(one.readings, machine.level_of(one.working_set_bytes), LEAST)
    return replace(one, slowdown=_rounded(min(factors, default=1.0)), readings=())


def _cost_at_reference(cost: Cost, course: StateCourse, machine: Machine) -> Cost:
    """A cost with the slowdown of the statistic that counts of its samples, of readings meanwhile.
    A factor is relative already.
    """
    kind = KINDS[cost.key.kind]
    if not cost.readings:
        return cost
    fraction = {LOWER_QUARTILE: 0.25, MEDIAN: 0.5}.get(kind.statistic, LEAST)
    factors = course.factors(cost.readings, machine.bound_of(cost), fraction)
    if kind.unit == "factor" or not factors:
        slowdown = 1.0
    else:
        slowdown = quantile(factors, 0.0 if fraction == LEAST else fraction)
    return replace(cost, slowdown=_rounded(slowdown), readings=())


def _rounded(slowdown: float) -> float:
    """As in a file, where each kernel has one."""
    return float(f"{slowdown:.4g}")


def bound_of(kernel: Kernel, machine: Machine) -> str:
    """What bounds a kernel with warm caches: arithmetic, its call, or the level that holds its
    operands. Kernels of a machine file have no results whose bytes could be counted.
    """
    if is_contraction(kernel.op):
        return "compute"
    if kernel.seconds < _SMALL_S:
        return "overhead"
    return machine.level_of(sum(spec.nbytes for spec in kernel.op.inputs))

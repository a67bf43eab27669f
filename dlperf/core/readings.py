"""Readings of a machine's state that its file collects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dlperf.core.costs import Cost
from dlperf.core.machine import Bandwidth, Kernel, Machine
from dlperf.core.state import LEAST, Reading, reading_of

MOST_READINGS = 400
"""Readings that a file keeps: a calibration takes up to 200. What the machine was like long ago
goes.
"""


def with_readings(machine: Machine, readings: Iterable[Reading]) -> Machine:
    """The machine with further readings, of which the newest MOST_READINGS are kept; all of an
    unfinished calibration, whose entries refer to them.
    """
    found = (*machine.readings, *readings)
    n_dropped = 0 if first_referred(machine) is not None else max(0, len(found) - MOST_READINGS)
    return replace(machine, readings=found[n_dropped:])


def first_referred(machine: Machine) -> int | None:
    """The number of the first reading that an entry refers to; None where none does."""
    entries: list[Kernel | Bandwidth | Cost]
    entries = [*machine.kernels, *machine.bandwidths, *machine.costs]
    return min((min(one.readings) for one in entries if one.readings), default=None)


def with_reference(machine: Machine) -> Machine:
    """The machine with the least of its readings (their :data:`dlperf.core.state.LEAST` quantile,
    probe by probe) as its reference, where it has none yet; with the least parallel region of each
    further number of threads.
    """
    if not machine.readings:
        return machine
    least = reading_of(machine.readings, LEAST)
    if machine.reference is None:
        return replace(machine, reference=least)
    regions_s = least.parallel_region_s | machine.reference.parallel_region_s
    return replace(machine, reference=replace(machine.reference, parallel_region_s=regions_s))

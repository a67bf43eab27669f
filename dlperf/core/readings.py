"""Readings of a machine's state that its file collects."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dlperf.core.machine import Machine
from dlperf.core.state import Reading, reading_of

MOST_READINGS = 400
"""Readings that a file keeps: a calibration takes up to 200. What the machine was like long ago
goes.
"""


def with_readings(machine: Machine, readings: Iterable[Reading]) -> Machine:
    """The machine with further readings, of which the newest MOST_READINGS are kept."""
    return replace(machine, readings=(*machine.readings, *readings)[-MOST_READINGS:])


def with_reference(machine: Machine) -> Machine:
    """The machine with the median of its readings as its reference, where it has none yet."""
    if machine.reference is not None or not machine.readings:
        return machine
    return replace(machine, reference=reading_of(machine.readings))

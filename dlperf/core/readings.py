"""Readings of a machine's state that its file collects after its calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dlperf.core.costs import Cost
from dlperf.core.machine import Bandwidth, Kernel, Machine
from dlperf.core.state import Reading

MOST_READINGS = 200
"""Readings after a calibration that a file keeps. Their 5th and 95th percentiles then rest on ten
readings each, and what the machine was like long ago goes.
"""


def with_readings(machine: Machine, readings: Iterable[Reading]) -> Machine:
    """The machine with further readings; the newest MOST_READINGS are kept, and those up to the
    last that an entry of the file refers to.
    """
    entries: list[Kernel | Bandwidth | Cost]
    entries = [*machine.kernels, *machine.bandwidths, *machine.costs]
    n_referred = 1 + max((max(one.readings) for one in entries if one.readings), default=-1)
    later = (*machine.readings[n_referred:], *readings)[-MOST_READINGS:]
    return replace(machine, readings=(*machine.readings[:n_referred], *later))

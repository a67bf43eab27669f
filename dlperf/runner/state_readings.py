"""A reading of the machine's state right after the watched steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dlperf.core import host
from dlperf.core.errors import one_line
from dlperf.core.garbage import uncollected
from dlperf.runner.core_speed import is_traced

if TYPE_CHECKING:
    from dlperf.core.machine import Machine
    from dlperf.core.state import Reading

N_ROUNDS = 4
"""Rounds of a reading, of some 20 ms each: the program waits for it."""


class StateReadings:
    """The reading of the machine's state after the watched steps, for a prediction at that state.

    There is none without a machine file that has a reference and is of this processor, nor where
    Python is traced. `taken` is the latest; a failure is a note, ends them, and never reaches the
    program.
    """

    def __init__(self, machine: Machine | None = None) -> None:
        self.taken: tuple[Reading, ...] = ()
        self.notes: list[str] = []
        self._is_wanted = (
            machine is not None
            and machine.reference is not None
            and machine.cpu.model == host.this_cpu().model
        )

    def take(self, now: Callable[[], float]) -> float:
        """Take a reading, if any is wanted; returns the seconds that it took.

        The probe's memory is mapped for this reading alone.
        """
        if not self._is_wanted or is_traced():
            return 0.0
        begin = now()
        try:
            from dlperf.core import state_probe  # here: it imports numpy

            with uncollected():  # the script's garbage is not part of it
                self.taken = (state_probe.take_reading(N_ROUNDS),)
        except Exception as error:
            self._is_wanted = False
            self.notes.append(f"a reading of the machine's state failed ({one_line(error)})")
        return now() - begin

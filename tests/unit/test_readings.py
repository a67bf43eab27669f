"""Readings of a machine's state that a calibration takes, and that its file collects."""

from __future__ import annotations

from dataclasses import replace

from dlperf.core.machine import Cpu, Machine
from dlperf.core.readings import MOST_READINGS, with_readings, with_reference
from dlperf.core.state import Reading
from dlperf.microbench.worker import States


def reading(core_s: float) -> Reading:
    return Reading(core_s, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_reading_is_taken_where_the_last_one_is_old() -> None:
    now_s = 0.0
    taken: list[float] = []
    n_rounds: list[int] = []

    class Probe:
        def rounds(self, count: int) -> list[Reading]:
            taken.append(now_s)
            n_rounds.append(count)
            return [reading(1.0 + now_s)] * count

    states = States(Probe(), lambda: now_s, 7, 1.5)  # type: ignore[arg-type]
    found = []
    for moment in (0.0, 1.0, 1.4, 1.5, 2.0, 3.5):
        now_s = moment
        found.append(states.current())
    assert found == [15, 15, 15, 18, 18, 21]  # seven were taken in an earlier process
    assert taken == [0.0, 1.5, 3.5]
    assert [one.core_s for one in states.unsent()] == [1.0] * 9 + [2.5] * 3 + [4.5] * 3
    assert states.unsent() == ()
    now_s = 9.0
    assert (states.current(), len(states.unsent())) == (24, 3)
    states.take_last()
    assert states.current() == 33
    assert n_rounds == [9, 3, 3, 3, 9]  # the ends have no readings around them


def test_the_least_of_the_first_readings_is_the_reference() -> None:
    """A single one of forty that is fast does not count."""
    factors = (1.5, 0.5, *(1.13,) * 38)
    machine = with_readings(Machine(Cpu("x", 1)), map(reading, factors))
    assert with_reference(Machine(Cpu("x", 1))).reference is None
    found = with_reference(machine)
    assert found.reference is not None
    assert found.reference.core_s == 1.13
    later = with_reference(with_readings(found, [reading(2.0)] * 79))
    assert later.reference == found.reference
    assert later.usual_state.core == 2.0 / 1.13


def test_a_further_number_of_threads_joins_the_reference() -> None:
    def team(threads: int, region_s: float) -> Reading:
        return replace(reading(1.0), parallel_region_s={threads: region_s})

    first = with_reference(with_readings(Machine(Cpu("x", 4)), [team(2, 2e-6)] * 20))
    later = with_readings(first, [team(2, 1e-6)] * 20 + [team(4, 4e-6)] * 20)
    found = with_reference(later).reference
    assert found is not None
    assert found.parallel_region_s == {2: 2e-6, 4: 4e-6}


def test_the_oldest_readings_go() -> None:
    machine = replace(Machine(Cpu("x", 1)), readings=(reading(1.0),) * MOST_READINGS)
    found = with_readings(machine, [reading(2.0)])
    assert len(found.readings) == MOST_READINGS
    assert [one.core_s for one in found.readings[-2:]] == [1.0, 2.0]

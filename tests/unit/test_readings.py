"""Readings of a machine's state that a calibration takes, and that its file collects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dlperf.core.machine import Cpu, Machine
from dlperf.core.readings import MOST_READINGS, with_readings, with_reference
from dlperf.core.state import Reading
from dlperf.microbench.worker import States, framework_slowdown


def reading(core_s: float) -> Reading:
    return Reading(core_s, 1.0, 1.0, 1.0, 1.0, 1.0)


def test_a_reading_is_taken_where_the_last_one_is_old() -> None:
    now_s = 0.0
    taken: list[float] = []
    n_rounds: list[int] = []

    class Probe:
        def read(self, rounds: int) -> Reading:
            taken.append(now_s)
            n_rounds.append(rounds)
            return reading(1.0 + now_s)

    states = States(Probe(), lambda: now_s, 7, 1.5)  # type: ignore[arg-type]
    found = []
    for moment in (0.0, 1.0, 1.4, 1.5, 2.0, 3.5):
        now_s = moment
        found.append(states.current())
    assert found == [7, 7, 7, 8, 8, 9]  # seven were taken in an earlier process
    assert taken == [0.0, 1.5, 3.5]
    assert [one.core_s for one in states.unsent()] == [1.0, 2.5, 4.5]
    assert states.unsent() == ()
    now_s = 9.0
    assert (states.current(), len(states.unsent())) == (10, 1)
    states.take_last()
    assert states.current() == 11
    assert n_rounds == [8, 3, 3, 3, 8]  # the ends have no readings around them


def test_the_framework_slows_down_beyond_the_state_of_the_interpreter() -> None:
    """Its costs are measured at full speed, 40 s of the 80 s at 1.13. Contention adds 20 % on
    average all the time: the mean speed sample is 1.2 (1 + 1.13) / 2. In the slow half it is alike.
    """
    now_s = 0.0

    class Probe:
        def read(self, rounds: int) -> Reading:
            return replace(reading(1.0), interpreter_s=state(now_s))

    def state(time_s: float) -> float:
        return 1.0 if time_s < 40.0 else 1.13

    states = States(Probe(), lambda: now_s, 3, 1.5)  # type: ignore[arg-type]
    numbers = []
    for moment in range(80):
        now_s = float(moment)
        numbers.append(states.current())
    now_s = 80.0
    mean_s = 1.2 * (1.0 + 1.13) / 2
    for at, best_s in (((numbers[10], numbers[20]), 1.0), ((numbers[50], numbers[60]), 1.13)):
        over = states.interpreter_over(at)
        assert over == pytest.approx((1.0 + 1.13) / 2 / best_s, rel=5e-3)
        assert framework_slowdown(mean_s, [best_s] * 9, over) == pytest.approx(1.2, rel=5e-3)


def test_the_median_of_the_first_readings_is_the_reference() -> None:
    machine = with_readings(Machine(Cpu("x", 1)), map(reading, (1.0, 1.13, 1.13)))
    assert with_reference(Machine(Cpu("x", 1))).reference is None
    found = with_reference(machine)
    assert found.reference is not None
    assert found.reference.core_s == 1.13
    later = with_reference(with_readings(found, [reading(2.0)] * 9))
    assert later.reference == found.reference
    assert later.usual_state.core == 2.0 / 1.13


def test_the_oldest_readings_go() -> None:
    machine = replace(Machine(Cpu("x", 1)), readings=(reading(1.0),) * MOST_READINGS)
    found = with_readings(machine, [reading(2.0)])
    assert len(found.readings) == MOST_READINGS
    assert [one.core_s for one in found.readings[-2:]] == [1.0, 2.0]

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dlperf.runner.disturbance import core_times_s, disturbance_of
from dlperf.runner.watched_training import WatchedStep


def steps(core_frac: float, disturbed: int = 0, asleep_s: float = 0.0) -> list[WatchedStep]:
    """Ten steps of 100 ms, 20 ms of them loading, with so much of a core for the rest of the time
    that they do not sleep.
    """
    return [
        WatchedStep(
            forward_s=0.08,
            interval_s=0.1,
            loading_s=0.02,
            processor_s=core_frac * (0.08 - asleep_s),
            queue_wait_s=(1 - core_frac) * (0.08 - asleep_s),
            disturbed=number < disturbed,
            n_passes=1,
        )
        for number in range(10)
    ]


def test_a_quiet_run_is_not_notable() -> None:
    found = disturbance_of(steps(0.99, disturbed=2), 1, 1.05, 0.8)
    assert not found.is_notable
    assert found.core_frac == pytest.approx(0.99)


@pytest.mark.parametrize(("core_frac", "slowdown", "disturbed"), [(0.6, 1.0, 0), (1.0, 1.3, 0)])
def test_each_kind_of_disturbance_is_noticed(
    core_frac: float, slowdown: float, disturbed: int
) -> None:
    found = disturbance_of(steps(core_frac, disturbed), 1, slowdown, 4.2)
    assert found.is_notable
    # 80 of 100 ms have 80 % of the 32 ms of waiting; a slow core's steps took 80 ms of it at least
    assert found.step_s == (pytest.approx(0.08 - 0.8 * 0.032) if core_frac < 1 else None)
    assert ("On a core of its own" in found.to_text()) == (core_frac < 1)
    assert "the system's load was 4.2" in found.to_text()
    assert found.to_json()["is_notable"] is True


def test_several_threads_may_wait_for_each_other() -> None:
    found = disturbance_of(steps(0.6), 2, 1.0, None)
    assert found.core_frac is None
    assert not found.is_notable
    assert not disturbance_of(steps(1.0, disturbed=8), 2, 1.0, 1.0).is_notable
    full = disturbance_of(steps(1.0, disturbed=8), 2, 1.0, 99.0)
    assert full.is_notable
    assert "On a core of its own" not in full.to_text()
    assert "load" not in found.to_text()


def test_waiting_for_others_is_no_disturbance() -> None:
    """For children or a device: the thread sleeps 79 of 80 ms."""
    found = disturbance_of(steps(1.0, asleep_s=0.079), 1, 1.0, 0.5)
    assert (found.core_frac, found.is_notable) == (1.0, False)


def test_dropped_steps_are_not_corrected_for_a_second_time() -> None:
    """Four of ten steps wait for a core; the measurement is of the other six."""
    lost = [replace(step, disturbed=True) for step in steps(0.3)[:4]]
    found = disturbance_of([*lost, *steps(1.0)[4:]], 1, 1.0, 0.5)
    assert found.core_frac == pytest.approx(0.72)
    assert found.is_notable
    assert found.step_s is None


def test_no_step_is_quicker_than_the_least_processor_time() -> None:
    seen = [replace(step, processor_s=0.07 + 0.001 * i) for i, step in enumerate(steps(1.0))]
    assert disturbance_of(seen, 1, 2.0, None).step_s == pytest.approx(0.07)


def test_a_system_without_the_time_in_the_run_queue_has_no_estimate() -> None:
    seen = [replace(step, queue_wait_s=None) for step in steps(0.5)]
    found = disturbance_of(seen, 1, 1.3, None)
    assert found.is_notable
    assert (found.core_frac, found.step_s) == (None, None)


def test_the_time_in_the_run_queue_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = iter(["5000000 2000000 7\n", "0 0 0\n", "unfit"])
    monkeypatch.setattr(Path, "read_text", lambda _: next(texts))
    assert [core_times_s()[1] for _ in range(3)] == [2e-3, None, None]

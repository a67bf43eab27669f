from __future__ import annotations

import pytest

from dlperf.runner.disturbance import disturbance_of
from dlperf.runner.watched_training import WatchedStep


def steps(core_frac: float, disturbed: int = 0) -> list[WatchedStep]:
    """Ten steps of 100 ms, 20 ms of them loading, with so much of a core."""
    return [
        WatchedStep(
            forward_s=0.08,
            interval_s=0.1,
            loading_s=0.02,
            processor_s=core_frac * 0.08,
            disturbed=number < disturbed,
            n_passes=1,
        )
        for number in range(10)
    ]


def test_a_quiet_run_is_not_notable() -> None:
    found = disturbance_of(steps(0.99, disturbed=2), 1, 1.05, 0.8)
    assert not found.is_notable
    assert found.step_s == pytest.approx(0.08 * 0.99 / 1.05)


@pytest.mark.parametrize(("core_frac", "slowdown", "disturbed"), [(0.6, 1.0, 0), (1.0, 1.3, 0)])
def test_each_kind_of_disturbance_is_noticed(
    core_frac: float, slowdown: float, disturbed: int
) -> None:
    found = disturbance_of(steps(core_frac, disturbed), 1, slowdown, 4.2)
    assert found.is_notable
    assert found.step_s == pytest.approx(0.08 * core_frac / slowdown)
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

"""DDP's own costs: differences within a round, by a clock in hand; and the real thing once, for its
names.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from dlperf.core.clock import Clock
from dlperf.core.costs import Cost, CostKey
from dlperf.microbench import ddp


def test_rounds_time_calls_in_a_row_and_leave_disturbed_ones_out() -> None:
    now, switches = [0.0], [0]

    def taking(seconds: float) -> Callable[[], object]:
        def call() -> None:
            now[0] += seconds

        return call

    def slow_in_the_third_round() -> None:
        now[0] += 3.0
        calls[0] += 1
        switches[0] += calls[0] == 5  # two calls a round

    calls = [0]
    clock = Clock(now=lambda: now[0], switches=lambda: switches[0])
    found = ddp._rounds({"a": taking(1.0), "b": slow_in_the_third_round}, 4, 2, clock)
    assert found == [{"a": 1.0, "b": 3.0}] * 3


def test_one_more_gradient_is_the_slope_of_what_sending_adds() -> None:
    found = {"sent many": 80.0, "silent many": 10.0, "sent": 8.0, "silent": 2.0}
    assert ddp._each_s(found) == pytest.approx((70 - 6) / 64)


def test_a_difference_counts_by_its_median() -> None:
    from dlperf.core.clock import Samples

    assert Cost(CostKey("ddp_call"), 1, Samples((0.0, 2.0, 9.0))).value == 2.0


@pytest.mark.process
def test_the_real_costs() -> None:
    code = (
        "from dlperf.microbench import ddp; print([(str(c.key), c.threads, c.value >= 0) for c in"
        " ddp.measure(1, 'quick')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.strip() in (
        "[('ddp_call', 1, True), ('ddp_hook', 1, True), ('ddp_sync', 1, True)]",
        "[]",
    )

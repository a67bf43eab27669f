"""Page faults of a step by layer."""

from __future__ import annotations

from collections import defaultdict

import pytest

from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.predictors.allocator.process import StepPages
from dlperf.predictors.allocator.simulation import AllocatorSimulation
from dlperf.predictors.page_faults import page_items

OPS = tuple(Op("aten.relu.default", (TensorSpec.contiguous(1),), layer=name) for name in "ab")


def seconds_of(heap: tuple[int, int], others: dict[tuple[str, str], float]) -> dict[str, float]:
    """Seconds of page faults by layer: `a` has 100 in every step, of which so many (of `b` none)
    are the heap's; 1 us each.
    """
    step = StepPages((100, 0), heap, (0, 0), (0, 0, 0))
    simulated = AllocatorSimulation((100, 0), (), (), 0, (100, 100, 100), steps=(step,) * 3)
    costs_s = {"page_fault": 1e-6, "page_release": 0.0, "huge_page_fault": 0.0}
    found: dict[str, float] = defaultdict(float)
    trace = Trace("t", 1, (), OPS, inference=True)
    for item in page_items(trace, simulated, costs_s.__getitem__, 1.0, "measured", others):
        found[item.layer] += item.seconds
    return found


def test_layers_share_what_simulated_processes_do_not_tell_of_the_heap() -> None:
    others = {("a", "forward"): 1e-3, ("b", "forward"): 3e-3}
    found = seconds_of((100, 0), others)
    assert found == {"a": pytest.approx(60e-6 + 10e-6), "b": pytest.approx(30e-6)}
    assert seconds_of((0, 0), others) == {"a": pytest.approx(100e-6)}  # a mapping's are certain


def test_what_no_other_layer_could_have_stays() -> None:
    assert seconds_of((100, 0), {("a", "backward"): 1e-3}) == {"a": pytest.approx(100e-6)}

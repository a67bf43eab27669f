"""Instructions of Python: which count, whose they are, and what a step pays for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from calibrated_cases import machine, relu, step_keys
from calibrated_cases import trace as made_up
from torch import nn

from dlperf.core.costs import CODE_EVICTION, CostKey
from dlperf.core.garbage import uncollected
from dlperf.core.instructions import InstructionCounter
from dlperf.core.trace import Trace
from dlperf.forecast.prediction import predict
from dlperf.microbench.python_code import PythonForward
from dlperf.recorder.live_recording import LiveRecording
from dlperf.recorder.recording import record


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    """Coverage of the tests would keep the counter out."""
    before = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(before)


def sums(n: int) -> int:
    total = 0
    for number in range(n):
        total += number
    return total


def counted(*calls: int) -> tuple[int, int]:
    counter = InstructionCounter(lambda: "layer")
    counter.start()
    for n in calls:
        sums(n)
    counter.stop()
    assert sys.gettrace() is None
    assert not counter.is_kept_out
    return counter.of("layer")


def test_a_loop_executes_the_same_places_again() -> None:
    (once, places), (twice, same), (more, _) = counted(10), counted(10, 10), counted(20)
    assert 0 < places < once
    assert twice == 2 * once
    assert same == places
    assert (more - once) % 10 == 0
    assert more > once


def test_code_that_does_not_count_and_no_layer() -> None:
    for counter in (
        InstructionCounter(lambda: "layer", lambda code: code.co_name != "sums"),
        InstructionCounter(lambda: ""),
    ):
        counter.start()
        sums(3)
        counter.stop()
        assert counter.of("layer") == (0, 0)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring has room for several")
def test_a_trace_function_of_the_program_stays_alone() -> None:
    def own(*_: object) -> None:
        return None

    counter = InstructionCounter(lambda: "layer")
    sys.settrace(own)
    counter.start()
    kept = sys.gettrace()
    counter.stop()
    sys.settrace(None)
    assert kept is own
    assert counter.is_kept_out
    counter.start()
    sys.settrace(own)  # the program's debugger begins meanwhile
    counter.stop()
    kept = sys.gettrace()
    sys.settrace(None)
    assert kept is own


class Looping(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.n, self.linear, self.drop = n, nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sums(self.n)
        return self.drop(self.linear(x)) * 2.0


def layers(trace: Trace) -> dict[str, tuple[int, int]]:
    return {layer.name: (layer.n_instructions, layer.n_distinct) for layer in trace.layers}


def live(model: nn.Module) -> Trace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = LiveRecording(model, [optimizer])
    recording.start()
    recording.enter("forward")
    loss = model(torch.ones(2, 4)).sum()
    recording.enter("backward")
    loss.backward()
    recording.enter("optimizer")
    optimizer.step()
    assert recording.stop()
    return recording.trace("live")


@uncollected()  # a collection runs others' finalizers, whose code counts
def test_a_layer_has_its_own_code_in_both_recordings() -> None:
    for recorded in (lambda model: record(model, torch.ones(2, 4)), live):
        few, many = (layers(recorded(Looping(n))) for n in (10, 110))
        own = counted(110)[0] - counted(10)[0]
        assert many["Looping"][0] - few["Looping"][0] == own
        assert many["Looping"][1] == few["Looping"][1] > 0
        assert many["linear"] == many["drop"] == (0, 0)  # torch's own, without children
        assert sys.gettrace() is None
    assert layers(record(Looping(10), torch.ones(2, 4))) == layers(live(Looping(10)))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="sys.monitoring has room for several")
def test_a_traced_recording_says_that_it_counted_nothing() -> None:
    sys.settrace(lambda *_: None)
    try:
        trace = record(Looping(10), torch.ones(2, 4))
    finally:
        sys.settrace(None)
    assert layers(trace)["Looping"] == (0, 0)
    assert any("instructions of Python were not counted" in note for note in trace.notes)


def python_s(n_instructions: int, n_distinct: int) -> float:
    costs = {"python_instruction": 1e-8, CostKey(CODE_EVICTION, "instruction", 1): 1e-7}
    plain = made_up(relu(64))
    root = replace(plain.layers[0], n_instructions=n_instructions, n_distinct=n_distinct)
    step = replace(plain, layers=(root, *plain.layers[1:]))
    items = predict(step, machine(costs), threads=1).prices.items
    return sum(item.seconds for item in items if item.what == "Python code")


def test_a_step_pays_each_instruction_and_each_place_that_is_cold() -> None:
    assert python_s(0, 0) == 0
    assert python_s(500, 0) == pytest.approx(500 * 1e-8)
    assert python_s(500, 20) == pytest.approx(500 * 1e-8 + 20 * 1e-7)


@pytest.mark.parametrize(("n", "is_warned"), [(5, True), (0, False)])
def test_a_file_without_the_cost_says_so(n: int, is_warned: bool) -> None:
    plain = made_up(relu(64))
    step = replace(plain, layers=(replace(plain.layers[0], n_instructions=n), *plain.layers[1:]))
    held = machine({key: 1e-7 for key in step_keys() if key.kind != "python_instruction"})
    warnings = predict(step, held, threads=1).prices.warnings
    assert any("python_instruction" in line for line in warnings) == is_warned


def test_the_benchmark_counts_what_it_runs() -> None:
    forward = PythonForward()
    assert forward.n_instructions > forward.n_distinct > 200

"""The recording of a step that a program runs on its own tensors."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from dlperf.profiler.probe import measure_hook_overhead
from dlperf.recorder.live_recording import OUTSIDE, LiveRecording


def test_calls_outside_the_step_leave_no_shapes() -> None:
    """An agent that acts between the steps, with the module that it trains."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recording = LiveRecording(model, [optimizer])
    recording.start()
    recording.enter(OUTSIDE)
    with torch.no_grad():
        model(torch.rand(1, 4))
    recording.enter("forward")
    loss = model(torch.rand(16, 4)).sum()
    recording.enter("backward")
    loss.backward()
    recording.enter("optimizer")
    optimizer.step()
    recording.enter(OUTSIDE)
    with torch.no_grad():
        model(torch.rand(3, 4))
    assert recording.stop()
    trace = recording.trace("agent")
    assert trace.batch_size == recording.batch_size == 16
    shapes = {layer.name: [one.shape for one in layer.inputs] for layer in trace.layers}
    assert shapes["2"] == [(16, 8)]
    assert {layer.name: layer.callers for layer in trace.layers}["2"] == (("Sequential", 1),)


def test_global_hooks_of_the_program_see_no_modules_of_ours() -> None:
    seen: list[nn.Module] = []
    handle = register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        measure_hook_overhead(n_calls=100, n_backwards=1)
        assert not seen
        nn.Identity()(torch.zeros(1))
        assert len(seen) == 1
    finally:
        handle.remove()

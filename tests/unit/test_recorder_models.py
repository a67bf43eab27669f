"""A recording under fake tensors is what plain torch dispatches on real ones, for every kind of
model; and it leaves no trace behind.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from recorder_zoo import CASES, FALL_BACK, real_ops
from torch import nn

from dlperf.recorder.recording import record

# oneDNN sizes this workspace itself, and sparse tensors stand as their values
SHAPES_DIFFER = {"lstm", "sparse_gradients"}


def fingerprint(model, optimizer):
    """Everything that a recording must leave alone, by identity and by value."""
    found = []
    for name, module in model.named_modules():
        for key, value in module.__dict__.items():
            items = (
                list(value.items())
                if isinstance(value, dict)
                else list(value)
                if isinstance(value, (list, set, tuple))
                else [value]
            )
            found.append(
                (
                    name,
                    key,
                    id(value),
                    repr(items) if not isinstance(value, nn.Module) else "",
                    type(module),
                )
            )
    for tensor in [*model.parameters(), *model.buffers()]:
        if not isinstance(tensor, nn.parameter.UninitializedTensorMixin):
            found.append(
                (
                    id(tensor),
                    tensor._version,
                    tensor.detach().numpy().tobytes(),
                    id(tensor.grad),
                    tensor.requires_grad,
                    type(tensor),
                )
            )
    for group in optimizer.param_groups:
        found.append(
            (
                id(group),
                [id(p) for p in group["params"]],
                repr({k: v for k, v in group.items() if k != "params"}),
            )
        )
    found.append((id(optimizer.state), [(id(p), repr(s)) for p, s in optimizer.state.items()]))
    found.append(sorted(optimizer.__dict__))
    return found


def _out_of_place(name):
    """The name of an operator; under a mode, sums are never in place."""
    return name.replace("add_.Tensor", "add.Tensor")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_same_operations_as_on_real_tensors_and_nothing_changed(name):
    model, inputs, loss, optimizer = CASES[name]()
    before = fingerprint(model, optimizer)
    states = (
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state()[1].copy(),  # noqa: NPY002
    )
    trace = record(model, inputs, loss=loss, optimizer=optimizer)
    assert fingerprint(model, optimizer) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()  # noqa: NPY002
    assert trace.recorded_on == ("real tensors" if name in FALL_BACK else "fake tensors"), (
        trace.notes
    )
    assert len(trace.notes) == (name in FALL_BACK) + (name == "a_loss_with_parameters")
    expected = [(_out_of_place(op), shapes) for op, shapes in real_ops(CASES[name])]
    found = [(_out_of_place(op.name), tuple(t.shape for t in op.outputs)) for op in trace.ops]
    if name not in SHAPES_DIFFER:
        assert found == expected
    assert [op for op, _ in found] == [op for op, _ in expected]
    assert {op.layer for op in trace.ops} <= {layer.name for layer in trace.layers} | {"(loss)"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(CASES) - FALL_BACK - {"gradients_in_the_forward"}))
def test_inference(name):
    model, inputs, _, optimizer = CASES[name]()
    before = fingerprint(model, optimizer)
    trace = record(model, inputs, inference=True)
    assert fingerprint(model, optimizer) == before
    assert all(module.training for module in model.modules())
    expected = [_out_of_place(op) for op, _ in real_ops(CASES[name], inference=True)]
    assert [_out_of_place(op.name) for op in trace.ops] == expected
    assert {op.phase for op in trace.ops} == {"forward"}
    assert name == "autocast_bf16" or not any(
        op.grad for op in trace.ops
    )  # autocast's cached copies of weights are made with gradients
    assert trace.recorded_on == "fake tensors", trace.notes


@pytest.mark.parametrize(
    "make", [lambda: nn.LSTM(6, 8), lambda: nn.GRU(6, 8), lambda: nn.Linear(6, 8)]
)
def test_inference_mode_has_the_operators_of_no_grad(make):
    model, x = make(), torch.randn(5, 3, 6)
    expected = record(model, (x,), inference=True)
    model.forward = torch.inference_mode()(model.forward)
    found = record(model, (x,), inference=True)
    assert len(found.ops) > 3
    assert [(op.name, op.from_cpp) for op in found.ops] == [
        (op.name, op.from_cpp) for op in expected.ops
    ]

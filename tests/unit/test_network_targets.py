"""The short names' builders keep the contract of targets, on real and on fake tensors."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from networks.targets import SHORT_NAMES

NAMES = {
    "mlp",
    "lenet",
    "cnn-small",
    "cnn-medium",
    "cnn-large",
    "fc4096",
    "dlrm-bottom",
    "dlrm-top",
}


def builder(name: str):
    module, _, attribute = SHORT_NAMES[name].partition(":")
    assert module == "networks.targets"
    return getattr(importlib.import_module(module), attribute)


def step(built) -> torch.Tensor:
    model, inputs, loss, optimizer = built
    optimizer.zero_grad()
    value = loss(model(*inputs))
    value.backward()
    optimizer.step()
    return value


def test_all_short_names():
    assert set(SHORT_NAMES) == NAMES
    assert SHORT_NAMES["cnn-small"] == "networks.targets:cnn_small"


@pytest.mark.parametrize("name", sorted(NAMES))
@pytest.mark.parametrize("batch_size", [1, 5])
def test_builder_on_real_tensors(name, batch_size):
    built = builder(name)(batch_size)
    model, inputs, loss, optimizer = built
    assert isinstance(model, torch.nn.Module)
    assert model.training
    assert all(x.shape[0] == batch_size and x.dtype == torch.float32 for x in inputs)
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 0.01
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in model.parameters()
    }
    before = [p.detach().clone() for p in model.parameters()]
    value = step(built)
    assert value.shape == ()
    assert torch.isfinite(value)
    assert any(not torch.equal(b, p) for b, p in zip(before, model.parameters()))
    assert loss(model(*inputs)) <= value  # a small step along the gradient of the same batch


@pytest.mark.parametrize("name", sorted(NAMES))
def test_builder_on_fake_tensors(name):
    with FakeTensorMode():
        built = builder(name)(64)
        model, inputs, _, _ = built
        assert all(isinstance(x, FakeTensor) for x in (*inputs, *model.parameters()))
        value = step(built)
    assert isinstance(value, FakeTensor)
    assert value.shape == ()


def test_each_call_builds_anew():
    first, second = builder("lenet")(2), builder("lenet")(2)
    assert first[0] is not second[0]
    assert not {id(p) for p in first[0].parameters()} & {id(p) for p in second[0].parameters()}

"""Every network written for validation trains one step, on real and on fake tensors, and all of them are listed."""
from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from networks import further


def train_a_step(built: further.Built) -> torch.Tensor:
    model, inputs, loss, optimizer = built
    optimizer.zero_grad()
    value = loss(model(*inputs))
    value.backward()
    optimizer.step()
    return value


def test_all_are_listed() -> None:
    public = {name for name, value in vars(further).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert public == set(further.NAMES)
    assert len(further.NAMES) >= 10


@pytest.mark.parametrize("name", further.NAMES)
def test_trains_a_step(name: str) -> None:
    torch.manual_seed(0)
    built = getattr(further, name)(2)
    before = {key: parameter.detach().clone() for key, parameter in built[0].named_parameters()}
    value = train_a_step(built)
    assert value.shape == ()
    assert torch.isfinite(value)
    still = [key for key, parameter in built[0].named_parameters() if torch.equal(before[key], parameter)]
    assert not still, f"not trained: {still}"


@pytest.mark.parametrize("name", further.NAMES)
def test_builds_and_trains_under_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        assert train_a_step(getattr(further, name)(16)).shape == ()

"""Every network written for validation trains one step, on real and on fake tensors, and all of
them are listed.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from networks import further, uncommon


def train_a_step(built: further.Built) -> torch.Tensor:
    model, inputs, loss, optimizer = built
    optimizer.zero_grad()
    value = loss(model(*inputs))
    value.backward()
    optimizer.step()
    return value


MODULES = {"further": further, "uncommon": uncommon}
BUILDERS = [(module, name) for module, found in MODULES.items() for name in found.NAMES]


@pytest.mark.parametrize("module", MODULES)
def test_all_are_listed(module: str) -> None:
    found = MODULES[module]
    own = {
        name
        for name, value in vars(found).items()
        if inspect.isfunction(value)
        and value.__module__ == found.__name__
        and not name.startswith("_")
    }
    assert own == set(found.NAMES)


def test_at_least_ten_are_part_of_a_whole_study() -> None:
    assert len(further.NAMES) >= 10


@pytest.mark.parametrize(("module", "name"), BUILDERS)
def test_trains_a_step(module: str, name: str) -> None:
    torch.manual_seed(0)
    built = getattr(MODULES[module], name)(4)
    before = {key: parameter.detach().clone() for key, parameter in built[0].named_parameters()}
    value = train_a_step(built)
    assert value.shape == ()
    assert torch.isfinite(value)
    still = [
        key for key, parameter in built[0].named_parameters() if torch.equal(before[key], parameter)
    ]
    assert not still, f"not trained: {still}"


@pytest.mark.parametrize(("module", "name"), BUILDERS)
def test_builds_and_trains_under_fake_tensors(module: str, name: str) -> None:
    with FakeTensorMode():
        assert train_a_step(getattr(MODULES[module], name)(16)).shape == ()

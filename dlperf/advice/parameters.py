"""An optimizer keeps hold of a model's parameters when a change puts others in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from dlperf.core.errors import DlperfError
from dlperf.recorder.attribution import optimizers_in


class NotApplicable(DlperfError):
    """A change that cannot be made to this target; its text says why."""


def replace_parameters(
    optimizer: torch.optim.Optimizer | None, replacements: Mapping[int, nn.Parameter | None]
) -> None:
    """Put others in the place of an optimizer's parameters, by the ``id`` of the old one; None
    takes it out. State of those that go is dropped.
    """
    for part in optimizers_in(optimizer):
        for group in part.param_groups:
            for old in group["params"]:
                if replacements.get(id(old), old) is not old:
                    part.state.pop(old, None)
            group["params"] = [
                new
                for old in group["params"]
                if (new := replacements.get(id(old), old)) is not None
            ]


@contextlib.contextmanager
def keeping_parameters_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Inside, parameters of the model may become other objects; afterwards the optimizer holds
    those of the same names.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    yield
    after = dict(model.named_parameters(remove_duplicate=False))
    replace_parameters(optimizer, {id(old): after.get(name) for name, old in before.items()})

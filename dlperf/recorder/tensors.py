"""The tensors in nested data, and the memory that they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))


def parameters_in(optimizer: Any) -> Iterator[torch.Tensor]:
    """The parameters in an optimizer's groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def storage_key(tensor: Any) -> int | None:
    """The identity of a tensor's storage; None for a sparse, nested or uninitialised tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (AttributeError, NotImplementedError, RuntimeError, ValueError):
        return None

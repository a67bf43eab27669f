"""The loss of a user's training loop as a function, recorded while the loop computes it once.

A function mode records the calls between the model's output and the backward. Those that lead from
the output to the tensor where the backward starts are the loss; the rest (metrics, logging) is left
out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class _Slot:
    """The n-th tensor that the recomputation makes."""

    number: int


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    makes: tuple[int, ...]


class LossRecorder(TorchFunctionMode):
    """Records calls from the model's output to the backward; it changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Make the call and record it."""
        result = func(*args, **(kwargs or {}))
        if self.is_open and func is not torch.Tensor.backward:
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def close(self, output: Any, scalar: torch.Tensor) -> RecomputedLoss | None:
        """The calls that lead from the model's `output` to `scalar`; None where they do not."""
        self.is_open = False
        needed, chosen = {id(scalar)}, []
        for call in reversed(self._calls):
            if needed & _ids(call[3]):
                needed |= _ids(call[1:3])
                chosen.append(call)
        self._calls = []
        slots: dict[int, int] = {}
        inputs = tuple(slots.setdefault(id(leaf), len(slots)) for leaf in _tensors(output))
        is_made = any(id(scalar) in _ids(call[3]) for call in chosen)
        if not needed & set(slots) or not (is_made or id(scalar) in slots):
            return None
        calls = []
        for function, args, kwargs, result in reversed(chosen):
            args, kwargs = _templates((args, kwargs), slots)
            # an in-place call returns its own argument: the same slot, with its new value
            numbers = [slots.setdefault(id(leaf), len(slots)) for leaf in _tensors(result)]
            calls.append(_Call(function, args, kwargs, tuple(numbers)))
        return RecomputedLoss(tuple(calls), inputs, slots[id(scalar)])


@dataclass(frozen=True)
class RecomputedLoss:
    """The loss as a function of the model's output, with the targets of the recorded step."""

    calls: tuple[_Call, ...]
    inputs: tuple[int, ...]
    result: int

    def __call__(self, output: Any) -> torch.Tensor:
        """The loss of `output`, whose tensors have the order of the recorded ones."""
        values: dict[int, torch.Tensor] = dict(zip(self.inputs, _tensors(output)))

        def fill(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, _Slot) else leaf

        for call in self.calls:
            args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs))
            values.update(zip(call.makes, _tensors(call.function(*args, **kwargs))))
        return values[self.result]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _ids(tree: Any) -> set[int]:
    return {id(leaf) for leaf in _tensors(tree)}


def _templates(tree: Any, slots: dict[int, int]) -> Any:
    def template(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in slots:
            return _Slot(slots[id(leaf)])
        return leaf if leaf.is_leaf else leaf.detach()  # made before: without its graph

    return pytree.tree_map(template, tree)

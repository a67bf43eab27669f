"""The loss of a foreign training loop, written down while it is computed once, so that it can be
computed again.

Between the model's output and the backward a loop calls whatever it likes. A function mode sees
these calls; those that lead from the output to the tensor that the backward starts from are the
loss. The rest (metrics, logging) is left out.
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
    """A tensor that the replay itself makes: the n-th of them."""

    number: int


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    makes: tuple[int, ...]


class LossRecorder(TorchFunctionMode):
    """Active from the model's output to the backward; lets every call through unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.is_open = True
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the call and make it."""
        result = func(*args, **(kwargs or {}))
        if self.is_open and func is not torch.Tensor.backward:
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def close(self, output: Any, scalar: torch.Tensor) -> RecomputedLoss | None:
        """The calls that lead from the model's `output` to `scalar`; None where they do not."""
        self.is_open = False
        needed, chosen = {id(scalar)}, []
        for call in reversed(self._calls):
            makes = _ids(call[3])
            if needed & makes:
                needed |= _ids(call[1]) | _ids(call[2])
                chosen.append(call)
        self._calls = []
        chosen.reverse()
        slots: dict[int, int] = {}
        outputs = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        for leaf in outputs:
            slots.setdefault(id(leaf), len(slots))
        inputs = tuple(slots[id(leaf)] for leaf in outputs)
        if id(scalar) not in slots and not any(id(scalar) in _ids(call[3]) for call in chosen):
            return None
        if not needed & set(slots):
            return None
        calls = []
        for function, args, kwargs, result in chosen:
            template_args, template_kwargs = _templates((args, kwargs), slots)
            numbers = []
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    # an in-place call gives its own argument back: the same slot, with its new
                    # value
                    numbers.append(slots.setdefault(id(leaf), len(slots)))
            calls.append(_Call(function, template_args, template_kwargs, tuple(numbers)))
        return RecomputedLoss(tuple(calls), inputs, slots[id(scalar)])


@dataclass(frozen=True)
class RecomputedLoss:
    """A function of the model's output: the loss, with the targets it had when it was written down."""

    calls: tuple[_Call, ...]
    inputs: tuple[int, ...]
    result: int

    def __call__(self, output: Any) -> torch.Tensor:
        """The loss of `output`, whose tensors stand in the order of those that were seen."""
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        values: dict[int, torch.Tensor] = dict(zip(self.inputs, leaves))

        def fill(leaf: Any) -> Any:
            return values[leaf.number] if isinstance(leaf, _Slot) else leaf

        for call in self.calls:
            args, kwargs = pytree.tree_map(fill, (call.args, call.kwargs))
            made = [
                leaf
                for leaf in pytree.tree_leaves(call.function(*args, **kwargs))
                if isinstance(leaf, torch.Tensor)
            ]
            values.update(zip(call.makes, made))
        return values[self.result]


def _ids(tree: Any) -> set[int]:
    return {id(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)}


def _templates(tree: Any, slots: dict[int, int]) -> Any:
    def template(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in slots:
            return _Slot(slots[id(leaf)])
        return (
            leaf if leaf.is_leaf else leaf.detach()
        )  # what the loop made before: it must not hold its graph

    return pytree.tree_map(template, tree)

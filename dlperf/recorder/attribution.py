"""Attribution of operations and memory to layers.

- Forward: the innermost module whose ``forward`` runs.
- Backward: the layer whose forward made the autograd node. Autograd numbers nodes in the order of
  their creation. The numbers at entry and exit of each module divide this sequence into intervals,
  one layer each.
- Optimizer: the layer that owns the parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dlperf.core.trace import LOSS, TensorSpec, tensors_in

_UNNUMBERED = 2**63
"""AccumulateGrad nodes carry the largest unsigned number; they have no place in the sequence."""


def sequence_number() -> int:
    """The number that autograd gives to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of the model with its first qualified name; the root under its type's name."""
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


class ModuleStack:
    """The modules whose forward runs, and the intervals of autograd numbers that they made.

    A module that is not part of the model does not count: its work belongs to its caller.
    `outside`: the layer of work that no module's forward does, by default the root.
    """

    def __init__(self, model: nn.Module, outside: str = "") -> None:
        self.root = type(model).__name__
        self._outside = outside or self.root
        self._stack: list[str] = []
        self._starts: list[int] = [0]
        self._layers: list[str] = [self._outside]
        self._previous = self.root
        self._last_node: Any = None
        self._n_nodes = 0
        self._ordinals: dict[int, int] = {}

    @property
    def caller(self) -> str:
        """The layer whose forward runs; empty where none does."""
        return self._stack[-1] if self._stack else ""

    @property
    def top(self) -> str:
        """The layer whose forward runs."""
        return self.caller or self._outside

    def enter(self, name: str) -> None:
        """The forward of `name` begins."""
        self._stack.append(name)
        self.mark(sequence_number(), name)

    def leave(self, name: str) -> None:
        """The forward of `name` ended, by return or exception, and all calls inside it."""
        if name not in self._stack:
            return
        while self._stack.pop() != name:
            pass
        self.mark(sequence_number(), self.top)

    def mark(self, number: int, layer: str) -> None:
        """Autograd nodes from `number` on belong to `layer`, until the next mark."""
        if self._layers[-1] == layer or number < self._starts[-1]:
            return
        if self._starts[-1] == number:
            self._layers[-1] = layer
        else:
            self._starts.append(number)
            self._layers.append(layer)

    def backward_layer(self, node: Any) -> str:
        """The layer of an operation of the backward, in `node` (None: between two nodes).

        A module on the stack recomputes its forward (checkpointing): the work is its own. The
        accumulation of a gradient belongs to the layer of the operation before it.
        """
        if self._stack:
            self._previous = self._stack[-1]
        elif node is not None:
            number = node._sequence_nr()
            if number < _UNNUMBERED:
                self._previous = self._layers[bisect_right(self._starts, number) - 1]
        return self._previous

    def begin_backward(self) -> None:
        """Work before the first node (the gradient of the loss itself) belongs to the loss."""
        self._previous = LOSS

    def ordinal(self, node: Any) -> int:
        """The place of a node among the distinct nodes that ran; -1 for None."""
        if node is None:
            return -1
        number = node._sequence_nr()
        if number < _UNNUMBERED:
            self._last_node = None
            if number not in self._ordinals:
                self._ordinals[number] = self._n_nodes
                self._n_nodes += 1
            return self._ordinals[number]
        if node is not self._last_node:  # AccumulateGrad holds its parameter alone: safe to keep
            self._last_node = node
            self._n_nodes += 1
        return self._n_nodes - 1

    def has_run(self, number: int) -> bool:
        """Whether an operation ran in the autograd node of this number."""
        return number in self._ordinals

    def forget(self) -> None:
        """Drop the reference to the last node."""
        self._last_node = None


def optimizers_in(optimizers: Any) -> Iterator[torch.optim.Optimizer]:
    """The optimizer, or those of a sequence, and those that they wrap; none for None."""
    waiting = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    waiting, seen = [one for one in waiting if one is not None], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for value in vars(part).values():
            items = value if isinstance(value, (list, tuple)) else (value,)
            waiting += [item for item in items if isinstance(item, torch.optim.Optimizer)]


class OptimizerOwners:
    """The layers that own the optimizer's operands, by storage number."""

    def __init__(self, root: str) -> None:
        self._by_storage: dict[int, str] = {}
        self._last = root

    def add(self, storage: int, layer: str) -> None:
        """`storage` belongs to `layer`, unless an earlier call named its owner.

        Operations before any known owner belong to the first layer that is added.
        """
        if not self._by_storage:
            self._last = layer
        if storage >= 0:
            self._by_storage.setdefault(storage, layer)

    def own_any(self, operands: Sequence[Any]) -> bool:
        """Whether one of the operands has an owner."""
        return any(spec.storage in self._by_storage for spec in tensors_in(tuple(operands)))

    def attribute(
        self, operands: Sequence[Any], outputs: Iterable[TensorSpec]
    ) -> tuple[str, tuple[tuple[str, float], ...]]:
        """The layer of an optimizer's operation; for several layers each one's fraction of bytes.

        `operands` are the arguments. Results inherit the owner; those of a list of tensors inherit
        it position by position.
        """
        known, outputs = self._by_storage, tuple(outputs)
        by_layer: dict[str, int] = defaultdict(int)
        inherited: list[str] = []
        for operand in operands:
            if type(operand) is TensorSpec:
                if operand.storage in known:
                    by_layer[known[operand.storage]] += operand.numel * operand.item_bytes
            elif type(operand) is tuple:
                specs = [item for item in operand if type(item) is TensorSpec]
                layers = [known.get(spec.storage, self._last) for spec in specs]
                for spec, layer in zip(specs, layers):
                    by_layer[layer] += spec.numel * spec.item_bytes
                inherited = inherited or layers
        if not by_layer:
            by_layer[self._last] = 1
        self._last = max(by_layer, key=lambda layer: by_layer[layer])
        if len(inherited) != len(outputs):
            inherited = [self._last] * len(outputs)
        for spec, layer in zip(outputs, inherited):
            if spec.storage >= 0:
                known.setdefault(spec.storage, layer)
        total = sum(by_layer.values())
        if len(by_layer) == 1 or not total:
            return self._last, ()
        return self._last, tuple((layer, n_bytes / total) for layer, n_bytes in by_layer.items())

"""Whose work an operation is: the layer on the module stack, the layer whose forward made an
autograd node, the owner of a parameter.

Forward work belongs to the module whose ``forward`` is running. Backward work belongs to the layer
whose forward made the autograd node: nodes are numbered in the order in which they are made, so the
numbers seen when a module is entered and left cut the count into intervals, one layer each.
Optimizer work belongs to the layer that owns the parameter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from dlperf.core.trace import LOSS, TensorSpec

_UNNUMBERED = 2**63
"""Sequence numbers from here on belong to nodes without one (AccumulateGrad carries the largest
unsigned number).
"""


def sequence_number() -> int:
    """The number that autograd will give to the next node of this thread."""
    return int(torch._C._autograd._get_sequence_nr())  # type: ignore[attr-defined]


def layer_names(model: nn.Module) -> dict[nn.Module, str]:
    """Every module of the tree with its qualified name; the root by its type, a shared module by
    its first name.
    """
    return {module: name or type(model).__name__ for name, module in model.named_modules()}


class ModuleStack:
    """The modules whose forward is running, and the intervals of autograd numbers that they made.

    Modules outside the model's tree do not count: their work is their caller's.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for module, name in layer_names(model).items()}
        self.root = type(model).__name__
        self._stack: list[str] = []
        self._starts: list[int] = [0]
        self._layers: list[str] = [self.root]
        self._previous = self.root
        self._last_node: tuple[str, int] | Any = None
        self._n_nodes = 0
        self._ordinals: dict[int, int] = {}
        self.callers: dict[str, dict[str, int]] = {}

    def name(self, module: nn.Module) -> str | None:
        """The module's layer name; None where it is not part of the model."""
        return self._names.get(id(module))

    @property
    def top(self) -> str:
        """The layer whose forward is running; the root where none is."""
        return self._stack[-1] if self._stack else self.root

    def __bool__(self) -> bool:
        return bool(self._stack)

    def enter(self, name: str, counted: bool = True) -> None:
        """`name`'s forward begins. `counted` calls go into :attr:`callers`."""
        if counted and name != LOSS:
            calls = self.callers.setdefault(name, {})
            caller = self._stack[-1] if self._stack else ""
            calls[caller] = calls.get(caller, 0) + 1
        self._stack.append(name)
        self.mark(sequence_number(), name)

    def leave(self, name: str) -> None:
        """`name`'s forward ended, by return or by exception; what it called and did not leave is
        left as well.
        """
        if name not in self._stack:
            return
        while self._stack.pop() != name:
            pass
        self.mark(sequence_number(), self.top)

    def mark(self, number: int, layer: str) -> None:
        """Autograd nodes from `number` on are `layer`'s, until the next mark."""
        if self._layers[-1] == layer or number < self._starts[-1]:
            return
        if self._starts[-1] == number:
            self._layers[-1] = layer
        else:
            self._starts.append(number)
            self._layers.append(layer)

    def backward_layer(self, node: Any) -> str:
        """The layer of an operation that runs in the backward, in `node` (None: between nodes).

        A module on the stack means recomputation, and its layer wins. Accumulations of gradients,
        inside AccumulateGrad or between nodes, belong to the layer of the operation before.
        """
        if self._stack:
            self._previous = self._stack[-1]
        elif node is not None:
            number = node._sequence_nr()
            if number < _UNNUMBERED:
                self._previous = self._layers[bisect_right(self._starts, number) - 1]
        return self._previous

    def begin_backward(self) -> None:
        """What runs before the first node, the gradient of the loss itself, belongs to the loss."""
        self._previous = LOSS

    def ordinal(self, node: Any) -> int:
        """The node's place among the distinct nodes that ran; -1 for None."""
        if node is None:
            return -1
        number = node._sequence_nr()
        if number < _UNNUMBERED:
            place = self._ordinals.get(number)
            if place is None:
                place = self._ordinals[number] = self._n_nodes
                self._n_nodes += 1
            self._last_node = None
            return place
        if (
            node is not self._last_node
        ):  # AccumulateGrad holds nothing but its parameter, so it may be kept alive here
            self._last_node = node
            self._n_nodes += 1
        return self._n_nodes - 1

    def forget(self) -> None:
        """Drop the reference to the last node."""
        self._last_node = None


class OptimizerOwners:
    """The layers that own the optimizer's operands, by storage number."""

    def __init__(self, root: str) -> None:
        self._by_storage: dict[int, str] = {}
        self._last = root

    def add(self, storage: int, layer: str) -> None:
        """`storage` belongs to `layer`; the first to say so is right, and what runs before any
        owner is known is the first one's.
        """
        if not self._by_storage:
            self._last = layer
        if storage >= 0:
            self._by_storage.setdefault(storage, layer)

    def attribute(
        self, operands: Sequence[Any], outputs: Iterable[TensorSpec]
    ) -> tuple[str, tuple[tuple[str, float], ...]]:
        """The layer of an optimizer's operation and, where it serves several, each one's fraction
        of the bytes.

        `operands` are the op's arguments; results inherit their owner, position by position where a
        list goes in.
        """
        by_layer: dict[str, int] = defaultdict(int)
        first: list[str] | None = None
        known = self._by_storage
        for operand in operands:
            if type(operand) is TensorSpec:
                layer = known.get(operand.storage)
                if layer is not None:
                    by_layer[layer] += operand.numel * operand.item_bytes
            elif type(operand) is tuple:
                specs = [item for item in operand if type(item) is TensorSpec]
                layers = [known.get(spec.storage, self._last) for spec in specs]
                for spec, layer in zip(specs, layers):
                    by_layer[layer] += spec.numel * spec.item_bytes
                if first is None and specs:
                    first = layers
        outputs = tuple(outputs)
        if not by_layer:
            by_layer[self._last] = 1
        largest = max(by_layer, key=lambda layer: by_layer[layer])
        self._last = largest
        if first is not None and len(first) == len(outputs):
            inherited = first
        else:
            inherited = [largest] * len(outputs)
        for spec, layer in zip(outputs, inherited):
            if spec.storage >= 0:
                known.setdefault(spec.storage, layer)
        if len(by_layer) == 1:
            return largest, ()
        total = sum(by_layer.values())
        if not total:
            return largest, ()
        return largest, tuple((layer, n_bytes / total) for layer, n_bytes in by_layer.items())

"""Search for the training in a program: its rhythm, its optimizers and the models they train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from dlperf.core.trace import LOSS
from dlperf.models.buckets import ReducerOptions
from dlperf.recorder.tensors import parameters_in

MOST_OPTIMIZER_STEPS = 16
"""Optimizer steps in the longest period that is searched for."""
BY_HAND_BACKWARDS = 8
"""Backwards without a step of an optimizer, after which the program is taken to update by hand."""
_MOST_STEPS = 50  # without a module whose parameters they step
_IRREGULAR_STEPS = 4 * MOST_OPTIMIZER_STEPS  # without a period


@dataclass(frozen=True)
class FoundTraining:
    """A training.

    `called`: the modules that the program calls, in the order of their first call. `optimizers`:
    those that step in one period, in their order, each as often as it steps; empty for parameters
    that are updated by hand. `is_regular`: False where they step in no recognizable order: then a
    period ends with a step of the only one named. `roots`: the models, inside of wrappers.
    `beside`: types of the models that are called and not trained.
    """

    called: tuple[nn.Module, ...]
    roots: tuple[nn.Module, ...]
    optimizers: tuple[Any, ...]
    is_regular: bool = True
    beside: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What a report says about it."""
        notes = []
        if len(self.roots) > 1:
            names = ", ".join(type(root).__name__ for root in self.roots)
            notes.append(f"{len(self.roots)} models are trained together: {names}")
        if self.beside:
            notes.append(
                f"called without being trained: {', '.join(self.beside)}; between a forward and its"
                f" backward their time stands under {LOSS}, elsewhere it is no part of the step"
            )
        if len(self.optimizers) > 1:
            notes.append(
                f"a step is one period of the loop: {len(self.optimizers)} optimizer steps"
            )
        if not self.is_regular:
            kind = type(self.optimizers[0]).__name__
            notes.append(
                f"the optimizers step in no regular order: a step ends with one of {kind}, and"
                " contains what the others did meanwhile"
            )
        if not self.optimizers:
            notes.append(
                "no optimizer of torch.optim steps: work on parameters and gradients between a"
                " backward and the next forward is the update"
            )
        return notes


class TrainingSearch:
    """The search, from module calls, batches, backwards and optimizer steps.

    A period is the smallest number of optimizer steps after which the optimizers repeat, all that
    stepped lately among them. It begins with the first step before which a loader returned a batch.
    The models are the outermost modules that are called in training mode with gradients enabled,
    and whose parameters these optimizers step. `wanted`: the model that has to be among them.
    """

    def __init__(self, wanted: nn.Module | None = None) -> None:
        self._wanted = None if wanted is None else inner(wanted)
        self._inside: nn.Module | None = None
        self._called: dict[int, tuple[nn.Module, int]] = {}
        self._outermost: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()
        self._optimizers: dict[int, Any] = {}
        self._ids: list[int] = []
        self._with_batch: list[bool] = []
        self._has_batch = False
        self._n_known = 0
        self.n_backwards = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether many steps of this search belonged to no module that was called."""
        n_steps = len(self._ids) - self._n_known
        return n_steps >= _MOST_STEPS and not self._trained(self._optimizers.values())

    def begin_anew(self) -> None:
        """The training that was known has changed its rhythm."""
        self._n_known = len(self._ids)

    def enter(self, module: nn.Module) -> bool:
        """A module is called. Returns whether this may begin the first step."""
        if self._inside is None:
            self._inside = module
            self._outermost[id(module)] = module
            if module.training and torch.is_grad_enabled():
                self._called[id(module)] = (module, len(self._ids) + self.n_backwards)
                return not self._ids and not self.n_backwards
        return False

    def leave(self, module: nn.Module) -> None:
        """Its call is over."""
        if module is self._inside:
            self._inside = None

    def load(self) -> None:
        """A loader returned a batch."""
        self._has_batch = True

    def note(self, optimizer: Any) -> None:
        """An optimizer has stepped, in a training that is known."""
        self._inside = None
        self._optimizers[id(optimizer)] = optimizer
        self._ids.append(id(optimizer))
        self._with_batch.append(self._has_batch)
        self._has_batch = False

    def stepped(self, optimizer: Any) -> FoundTraining | None:
        """An optimizer has stepped. Returns the training where a period ends that is known."""
        self.note(optimizer)
        length = find_period(self._ids)
        if length is None:
            is_lasting = len(self._ids) >= _IRREGULAR_STEPS
            return self._irregular(optimizer) if is_lasting else None
        if not self._ends_here(length):
            return None
        optimizers = tuple(self._optimizers[one] for one in self._ids[-length:])
        return self._found(self._trained(optimizers), optimizers)

    def backward_ended(self, is_in_step: bool = False) -> FoundTraining | None:
        """A backward has ended. Returns the training where parameters are updated by hand.

        `is_in_step`: it ran in an optimizer's step, so in a closure.
        """
        self.n_backwards += 1
        if is_in_step or self._ids or self.n_backwards < BY_HAND_BACKWARDS:
            return None
        called = self._chosen(
            {
                id(parameter)
                for module, _ in self._called.values()
                for parameter in module.parameters()
                if parameter.grad is not None
            }
        )
        return self._found(called, ())

    def _ends_here(self, length: int) -> bool:
        """Whether a period of `length` steps ends with the last one."""
        ids = self._ids
        start = len(ids) - length
        while start > 0 and ids[start - 1] == ids[start - 1 + length]:
            start -= 1
        firsts = [start + shift for shift in range(length)]
        first = next((one for one in firsts if self._with_batch[one + length]), start)
        return (len(ids) - first) % length == 0

    def _irregular(self, optimizer: Any) -> FoundTraining | None:
        """A training without a period, of which every step of the largest optimizer ends one."""
        largest = max(
            self._optimizers.values(), key=lambda one: sum(p.numel() for p in parameters_in(one))
        )
        if optimizer is not largest:
            return None
        return self._found(self._trained(self._optimizers.values()), (largest,), is_regular=False)

    def _found(
        self, called: tuple[nn.Module, ...], optimizers: tuple[Any, ...], is_regular: bool = True
    ) -> FoundTraining | None:
        wanted = self._wanted
        roots = tuple(
            wanted if wanted is not None and contains(module, wanted) else inner(module)
            for module in called
        )
        trained = {id(parameter) for module in called for parameter in module.parameters()}
        beside = dict.fromkeys(
            type(module).__name__
            for module in self._outermost.values()
            if (own := {id(parameter) for parameter in module.parameters()}) and not own & trained
        )
        return FoundTraining(called, roots, optimizers, is_regular, (*beside,)) if called else None

    def _trained(self, optimizers: Any) -> tuple[nn.Module, ...]:
        return self._chosen(
            {id(one) for optimizer in optimizers for one in parameters_in(optimizer)}
        )

    def _chosen(self, trained: set[int]) -> tuple[nn.Module, ...]:
        """The outermost modules that were called lately and own one of the parameters."""
        latest = len(self._ids) + self.n_backwards - 2 * MOST_OPTIMIZER_STEPS
        found = [
            module
            for module, at in self._called.values()
            if at >= latest and any(id(parameter) in trained for parameter in module.parameters())
        ]
        outer = [
            module
            for module in found
            if not any(module is not other and contains(other, module) for other in found)
        ]
        if self._wanted is not None and not any(contains(one, self._wanted) for one in outer):
            return ()
        return tuple(outer)


def find_period(ids: Sequence[int]) -> int | None:
    """The smallest number of steps after which the optimizers `ids` repeat; None if unknown.

    It contains all that stepped lately: five steps of one and one of the other are a period of six.

    >>> find_period([1, 1]), find_period([1, 2, 1]), find_period([1, 2, 1, 2])
    (1, None, 2)
    >>> find_period([1, 1, 2, 1, 1]), find_period([1, 1, 2, 1, 1, 2])
    (None, 3)
    """
    recent = set(ids[-2 * MOST_OPTIMIZER_STEPS :])
    for length in range(1, min(MOST_OPTIMIZER_STEPS, len(ids) // 2) + 1):
        last = ids[-length:]
        if last == ids[-2 * length : -length] and set(last) == recent:
            return length
    return None


def _n_elements(optimizer: Any) -> int:
    return sum(parameter.numel() for parameter in parameters_in(optimizer))


def inner(module: nn.Module) -> nn.Module:
    """The module inside data-parallel wrappers."""
    while type(module).__name__ in ("DistributedDataParallel", "DataParallel"):
        wrapped = getattr(module, "module", None)
        if not isinstance(wrapped, nn.Module):
            break
        module = wrapped
    return module


def is_sharded(module: nn.Module) -> bool:
    """Whether each rank has a part of the parameters (FSDP, tensor parallelism).

    Then no rank can take a step alone.
    """
    parts = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    return parts or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def contains(module: nn.Module, other: nn.Module) -> bool:
    """Whether `other` is `module` or a part of it."""
    return any(part is other for part in module.modules())


def reducer_options(module: nn.Module) -> ReducerOptions | None:
    """The options of a DistributedDataParallel; None for any other module."""
    if type(module).__name__ != "DistributedDataParallel":
        return None
    is_default = getattr(module, "bucket_bytes_cap_default", True)
    return ReducerOptions(
        None if is_default else int(getattr(module, "bucket_bytes_cap", 1)),
        bool(getattr(module, "gradient_as_bucket_view", False)),
        bool(getattr(module, "static_graph", False)),
        bool(getattr(module, "find_unused_parameters", False)),
        bool(getattr(module, "broadcast_buffers", True)),
    )

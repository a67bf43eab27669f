"""Search for the training in a program: its model and optimizer, from the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlperf.models.buckets import ReducerOptions

_MOST_STEPS = 50  # without a module whose parameters they step


@dataclass(frozen=True)
class FoundTraining:
    """A training. `called`: the module that the program calls. `root`: the model in wrappers."""

    called: nn.Module
    root: nn.Module
    optimizer: Any
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Candidate:
    n_parameters: int
    module: nn.Module
    optimizer: Any
    beside: tuple[str, ...]


class TrainingSearch:
    """The search, from module calls and optimizer steps, until :meth:`stepped` returns a training.

    The model is an outermost module that is called in training mode with gradients enabled, and
    whose parameters the optimizer steps. At the second step of an optimizer every model has had its
    turn, and the largest is chosen. `wanted`: the only model that counts.
    """

    def __init__(self, wanted: nn.Module | None = None) -> None:
        self._wanted = None if wanted is None else inner(wanted)
        self._outermost: list[nn.Module] = []
        self._inside: nn.Module | None = None
        self._candidates: dict[int, _Candidate] = {}
        self._n_steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether many steps belonged to no module that was called."""
        return self._n_steps >= _MOST_STEPS

    def enter(self, module: nn.Module) -> None:
        """A module is called."""
        if self._inside is None:
            self._inside = module
            if (
                module.training
                and torch.is_grad_enabled()
                and not any(module is known for known in self._outermost)
            ):
                self._outermost.append(module)

    def leave(self, module: nn.Module) -> None:
        """Its call is over."""
        if module is self._inside:
            self._inside = None

    def stepped(self, optimizer: Any) -> FoundTraining | None:
        """An optimizer has stepped. Returns the training, once it is known."""
        self._n_steps += 1
        self._inside = None
        again = id(optimizer) in self._candidates
        candidate = self._candidate(optimizer)
        if candidate is not None:
            self._candidates[id(optimizer)] = candidate
        self._outermost = []
        return self._choice() if again else None

    def _candidate(self, optimizer: Any) -> _Candidate | None:
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        stepped = {
            module: n
            for module in self._outermost
            if (n := sum(p.numel() for p in module.parameters() if id(p) in ids))
            and (self._wanted is None or contains(module, self._wanted))
        }
        if not stepped:
            return None
        chosen = max(stepped, key=lambda module: stepped[module])
        beside = {type(module).__name__ for module in stepped if not contains(chosen, module)}
        return _Candidate(stepped[chosen], chosen, optimizer, tuple(sorted(beside)))

    def _choice(self) -> FoundTraining:
        chosen = max(self._candidates.values(), key=lambda candidate: candidate.n_parameters)
        root = self._wanted if self._wanted is not None else inner(chosen.module)
        name, notes = type(root).__name__, []
        others = [
            one.module for one in self._candidates.values() if one.module is not chosen.module
        ]
        rivals = sorted({type(inner(module)).__name__ for module in others})
        if rivals:
            notes.append(
                f"several models are trained: {name}, the largest, is watched;"
                f" {', '.join(rivals)} not"
            )
        if chosen.beside:
            notes.append(
                f"the same optimizer also steps {', '.join(chosen.beside)}, called beside {name}:"
                " that work stands under the loss"
            )
        return FoundTraining(chosen.module, root, chosen.optimizer, tuple(notes))


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

"""Which module a program trains, and which optimizer steps it: found from the calls that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlperf.models.buckets import ReducerOptions

_AT_MOST = 50  # optimizer steps without a module that belongs to them


@dataclass(frozen=True)
class FoundTraining:
    """A training: `called` is the module that the program calls, `root` the model in it (inside
    data-parallel wrappers).
    """

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
    """Told of every module call and every optimizer step, until :meth:`stepped` knows the training.

    The model is the outermost module that is called in training mode with gradients enabled, and
    whose parameters the optimizer steps; a loss called beside it has none. Once an optimizer comes
    round again, every model has had its turn, and the largest is chosen. `wanted`: look for this
    one only.
    """

    def __init__(self, wanted: nn.Module | None = None) -> None:
        self._wanted = None if wanted is None else inner(wanted)
        self._outermost: list[nn.Module] = []
        self._inside: nn.Module | None = None
        self._candidates: dict[int, _Candidate] = {}
        self._n_steps = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether many steps went by and none belonged to a module that was called."""
        return self._n_steps >= _AT_MOST

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
        """An optimizer has stepped; the training, once it is known."""
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
        counted = [
            (sum(p.numel() for p in module.parameters() if id(p) in ids), module)
            for module in self._outermost
        ]
        counted = [
            (n, module)
            for n, module in counted
            if n and (self._wanted is None or contains(module, self._wanted))
        ]
        if not counted:
            return None
        n, chosen = max(counted, key=lambda pair: pair[0])
        beside = sorted(
            {
                type(module).__name__
                for _, module in counted
                if module is not chosen and not contains(chosen, module)
            }
        )
        return _Candidate(n, chosen, optimizer, tuple(beside))

    def _choice(self) -> FoundTraining:
        chosen = max(self._candidates.values(), key=lambda candidate: candidate.n_parameters)
        root = self._wanted if self._wanted is not None else inner(chosen.module)
        name, notes = type(root).__name__, []
        rivals = sorted(
            {
                type(inner(other.module)).__name__
                for other in self._candidates.values()
                if other.module is not chosen.module
            }
        )
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
    """Whether ranks hold parts of its parameters (FSDP, tensor parallelism), so that no rank can
    take a step alone.
    """
    parts = any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
    return parts or any(type(parameter).__name__ == "DTensor" for parameter in module.parameters())


def contains(module: nn.Module, other: nn.Module) -> bool:
    """Whether `other` is `module` or a part of it."""
    return any(part is other for part in module.modules())


def reducer_options(module: nn.Module) -> ReducerOptions | None:
    """How a DistributedDataParallel was told to reduce; None for any other module."""
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

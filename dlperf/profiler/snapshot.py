"""Everything a training step changes, kept and put back to the bit.

What is kept: contents, identity and versions of parameters and buffers, gradients (None stays
None), the optimizer's state and settings, the random states of torch, numpy and Python, and the
attributes of the modules and of the objects that hang on them (counters, lists, flags, plain
tensors, random generators).

What is not: files, sockets, and state that lives in neither the model, the optimizer, the loss nor
their attributes.
"""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_DEEPEST = 5
_LONGEST = 10_000
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    types.BuiltinFunctionType,
    types.ModuleType,
    torch.dtype,
    torch.device,
)
_Undo = Callable[[], None]


class Snapshot:
    """The state of a model's training at one moment.

    ``snapshot = Snapshot(model, optimizer, loss, inputs)`` keeps it; :meth:`restore` puts all of it
    back, :meth:`put_back` only the values of tensors, so that a long series of steps does not drift
    (denormal numbers slow kernels). The gradients are taken away at once and come back with
    :meth:`restore`.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *others: Any) -> None:
        self._seen: dict[int, Any] = {}
        self._undo: list[_Undo] = []
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._random = _random_states()
        self._optimizer = optimizer
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._keep(model, 0)
        for group in getattr(optimizer, "param_groups", ()):
            for parameter in group["params"]:
                self._keep(parameter, 0)
        if optimizer is not None:
            self._keep(optimizer, 0)
        for other in others:
            self._keep(other, 0)
        for tensor, _ in self._gradients:
            tensor.grad = None

    @property
    def n_bytes(self) -> int:
        """Memory that the kept copies take."""
        return sum(kept.numel() * kept.element_size() for _, kept in self._values)

    def adopt(self, optimizer: Any) -> None:
        """An optimizer made after the snapshot: its state is put back with the rest, and needs no
        restoring.
        """
        self._optimizer = optimizer

    def settle(self) -> None:
        """Keep what the first steps have made (the optimizer's moments), so that :meth:`put_back`
        returns to it.
        """
        known = {id(tensor) for tensor, _ in self._values}
        for state in list(getattr(self._optimizer, "state", {}).values()):
            for tensor in _tensors(state):
                if id(tensor) not in known:
                    known.add(id(tensor))
                    self._values.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Values of parameters, buffers, inputs and the optimizer's state as they were kept."""
        for tensor, kept in self._values:
            _write(tensor, kept)

    def restore(self) -> None:
        """Everything as it was."""
        for undo in reversed(self._undo):
            undo()
        self.put_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        for tensor, version in self._versions:
            _set_version(tensor, version)
        _set_random_states(self._random)

    # -- keeping one thing -------------------------------------------------------------------------

    def _keep(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # held, so that the id stays its own
        if isinstance(value, torch.Tensor):
            self._keep_tensor(value)
        elif isinstance(value, nn.Module):
            # a module is a fresh start: its depth does not count against what hangs on it
            self._keep_attributes(value, 0)
        elif isinstance(value, dict):
            self._keep_dict(value, depth)
        elif isinstance(value, (list, deque)):
            self._keep_sequence(value, depth)
        elif isinstance(value, set):
            kept = set(value)

            def undo_set() -> None:
                value.clear()
                value.update(kept)

            self._undo.append(undo_set)
        elif isinstance(value, (tuple, frozenset)):
            self._keep_all(value, depth)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._undo.append(lambda: _discard(value.set_state(state)))
        elif isinstance(value, random.Random):
            python_state = value.getstate()
            self._undo.append(lambda: value.setstate(python_state))
        elif _is_numpy(value, "ndarray"):
            copy = value.copy()
            if value.flags.writeable:
                self._undo.append(lambda: _discard(value.__setitem__(..., copy)))
        elif _is_numpy(value, "Generator"):
            bits = value.bit_generator.state
            self._undo.append(lambda: setattr(value.bit_generator, "state", bits))
        elif _is_numpy(value, "RandomState"):
            legacy = value.get_state()
            self._undo.append(lambda: value.set_state(legacy))
        elif isinstance(value, types.FunctionType):
            for cell in value.__closure__ or ():
                self._keep_cell(cell, depth)
        elif isinstance(value, types.MethodType):
            self._keep(value.__self__, depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._keep_attributes(value, depth)

    def _keep_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._keep(value, depth + 1)

    def _keep_tensor(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            return  # a lazy module's; there is nothing to copy yet
        if (
            tensor.layout == torch.strided
            and tensor.device.type != "meta"
            and not _overlaps(tensor)
        ):
            self._values.append((tensor, tensor.detach().clone()))
            if not tensor.is_inference():  # which has no version
                self._versions.append((tensor, tensor._version))
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            flag = tensor.requires_grad

            def undo() -> None:
                if tensor.is_leaf and tensor.requires_grad != flag:
                    tensor.requires_grad_(flag)

            self._undo.append(undo)

    def _keep_cell(self, cell: types.CellType, depth: int) -> None:
        try:
            kept = cell.cell_contents
        except ValueError:  # not yet bound
            return

        def undo() -> None:
            cell.cell_contents = kept

        self._undo.append(undo)
        self._keep(kept, depth + 1)

    def _keep_dict(self, value: dict[Any, Any], depth: int) -> None:
        kept = dict(value)

        def undo() -> None:
            if [id(key) for key in value] != [id(key) for key in kept]:
                value.clear()
            value.update(kept)

        self._undo.append(undo)
        if len(kept) <= _LONGEST:
            self._keep_all(kept.values(), depth)

    def _keep_sequence(self, value: list[Any] | deque[Any], depth: int) -> None:
        kept = list(value)

        def undo() -> None:
            value.clear()
            value.extend(kept)

        self._undo.append(undo)
        if len(kept) <= _LONGEST:
            self._keep_all(kept, depth)

    def _keep_attributes(self, value: Any, depth: int) -> None:
        attributes = value.__dict__
        kept = dict(attributes)

        def undo() -> None:
            for key in attributes.keys() - kept.keys():
                del attributes[key]
            attributes.update(kept)

        self._undo.append(undo)
        self._keep_all(kept.values(), depth)


def _write(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    if tensor.is_inference():
        with torch.inference_mode():
            tensor.copy_(kept)
        return
    data = (
        tensor.data
    )  # a write to it leaves the version counter alone, and is allowed on parameters
    if data.shape == kept.shape and data.stride() == kept.stride():
        data.copy_(kept)
    else:
        tensor.data = kept.clone()


def _set_version(tensor: torch.Tensor, version: int) -> None:
    """Tell autograd that a tensor which holds its old values again was never written: a graph
    recorded before can still run backward.
    """
    if tensor._version != version and _SET_VERSION is not None:
        _SET_VERSION((tensor,), (version,))


def _find_set_version() -> Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] | None:
    """torch's own function behind torch.autograd._unsafe_preserve_version_counter; before 2.7 it
    took one tensor; None where there is none.
    """
    function: Any = getattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    if function is None:
        return None
    probe = torch.zeros(1)
    for call in (function, lambda tensors, versions: function(tensors[0], versions[0])):
        with contextlib.suppress(TypeError):
            call((probe,), (probe._version,))
            found: Callable[[tuple[torch.Tensor, ...], tuple[int, ...]], None] = call
            return found
    return None


_SET_VERSION = _find_set_version()


def _overlaps(tensor: torch.Tensor) -> bool:
    # an expanded tensor cannot be written in place, so no step writes it either
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape))


def _discard(_value: object) -> None:
    """Nothing: for expressions whose value does not matter."""


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [tensor for value in tree.values() for tensor in _tensors(value)]
    if isinstance(tree, (list, tuple, deque)):
        return [tensor for value in tree for tensor in _tensors(value)]
    return []


def _is_numpy(value: Any, name: str) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy" and type(value).__name__ == name


def _random_states() -> tuple[torch.Tensor, object, object]:
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        None if numpy is None else numpy.random.get_state(),
        random.getstate(),
    )


def _set_random_states(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])
    random.setstate(states[2])

"""Everything that a training step changes, saved and restored to the bit.

Saved are contents, identity and versions of parameters and buffers, gradients (None stays None),
the optimizer's state and settings, the random states of torch, numpy and Python, and the attributes
of the modules and of the objects that these reference (counters, lists, flags, plain tensors,
random generators).

Not saved are files, sockets, and state that neither the model, the optimizer, the loss nor their
attributes reference.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dlperf.recorder.isolation import save_random_states
from dlperf.recorder.substitution import Substitution, is_numpy
from dlperf.recorder.tensors import tensors_of


class Snapshot(Substitution):
    """The state of a model's training: every tensor is saved, and none exchanged.

    :meth:`restore` restores all of it. :meth:`put_back` restores the values of tensors, so that a
    long series of steps does not drift (denormal numbers slow kernels). The gradients are None
    until :meth:`restore`.
    """

    def __init__(self, model: nn.Module, optimizer: Any = None, *others: Any) -> None:
        super().__init__(self._save_tensor)
        self._optimizer = optimizer
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._undo_versions = contextlib.ExitStack()
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._restore_random_states = save_random_states()
        for part in (model, optimizer, *others):
            self.visit(part)
        for tensor, _ in self._gradients:
            tensor.grad = None

    def settle(self) -> None:
        """Save what the first steps made (the optimizer's moments) for :meth:`put_back`."""
        known = {id(tensor) for tensor, _ in self._values}
        for tensor in tensors_of(list(getattr(self._optimizer, "state", {}).values())):
            if id(tensor) not in known:
                known.add(id(tensor))
                self._values.append((tensor, tensor.detach().clone()))

    def put_back(self) -> None:
        """Restore the values of parameters, buffers, inputs and the optimizer's state."""
        for tensor, saved in self._values:
            if tensor.is_inference():
                with torch.inference_mode():
                    tensor.copy_(saved)
                continue
            data = tensor.data  # writing to it leaves the version counter alone
            if data.shape == saved.shape and data.stride() == saved.stride():
                data.copy_(saved)
            else:
                tensor.data = saved.clone()

    def restore(self) -> None:
        """Restore everything."""
        super().restore()
        self.put_back()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        self._undo_versions.close()
        self._restore_random_states()

    def _save_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor  # nothing to copy yet
        # an expanded tensor cannot be written in place, so no step writes it
        is_writable = tensor.layout == torch.strided and not any(
            stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape)
        )
        if is_writable and tensor.device.type != "meta":
            self._values.append((tensor, tensor.detach().clone()))
            if not tensor.is_inference():  # which has no version
                self._undo_versions.callback(_set_version, tensor, tensor._version)
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            flag = tensor.requires_grad

            def restore_flag() -> None:
                if tensor.is_leaf and tensor.requires_grad != flag:
                    tensor.requires_grad_(flag)

            self._undo.callback(restore_flag)
        return tensor

    def _save_state(self, value: Any) -> bool:
        if not is_numpy(value, "ndarray"):
            return super()._save_state(value)
        if value.flags.writeable:
            self._undo.callback(value.__setitem__, ..., value.copy())
        return True


def _set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version of a tensor with its old values: graphs recorded before still run."""
    if tensor._version != version:
        function: Any = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]
        takes_one = torch.__version__ < "2.7"
        function(*(tensor, version) if takes_one else ((tensor,), (version,)))

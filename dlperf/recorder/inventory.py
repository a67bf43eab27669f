"""What takes part in a step: the layers as they are called, and the tensors that are there before
it, with their owners.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dlperf.core.trace import LOSS, Layer, Parameter, TensorSpec
from dlperf.recorder.attribution import ModuleStack, OptimizerOwners, layer_names
from dlperf.recorder.isolation import DeferredInterrupts
from dlperf.recorder.op_recorder import OpRecorder, tensors_of


def optimizers_in(optimizer: torch.optim.Optimizer | None) -> Iterator[torch.optim.Optimizer]:
    """The optimizer and those that it wraps."""
    waiting, seen = [optimizer] if optimizer is not None else [], set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        for value in vars(part).values():
            waiting += [
                item
                for item in (value if isinstance(value, (list, tuple)) else (value,))
                if isinstance(item, torch.optim.Optimizer)
            ]


class StepOwners:
    """What is there before the recorded step: whose the parameters, gradients and optimizer states
    are, and what the memory is for.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        inputs: Any,
        tape: OpRecorder,
        stack: ModuleStack,
    ) -> None:
        self._tape, self._stack = tape, stack
        self._trained: list[tuple[torch.Tensor, str]] = []
        self._states: list[tuple[int, str]] = []
        self.notes: list[str] = []
        self.parameters: dict[str, tuple[tuple[str, TensorSpec], ...]] = {}
        owner: dict[int, str] = {}
        for module, layer in layer_names(model).items():
            rows = []
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owner.setdefault(id(parameter), layer)
                    tape.set_kind(parameter, "parameter")
                    rows.append((name, tape.spec(parameter)))
                    self._trained.append((parameter, owner[id(parameter)]))
            for buffer in module._buffers.values():
                if buffer is not None:
                    tape.set_kind(buffer, "buffer")
            self.parameters[layer] = tuple(rows)
        for tensor in tensors_of(inputs):
            tape.set_kind(tensor, "input")
        n_outside = 0
        for part in optimizers_in(optimizer):
            for group in part.param_groups:
                for trained in group["params"]:
                    if id(trained) not in owner:
                        owner[id(trained)] = LOSS
                        tape.set_kind(trained, "parameter")
                        self._trained.append((trained, LOSS))
                        n_outside += 1
            for trained, state in part.state.items():
                for tensor in tensors_of(state):
                    layer = owner.get(id(trained), stack.root)
                    self._states.append((tape.set_kind(tensor, "optimizer"), layer))
        if n_outside:
            self.notes.append(
                f"{n_outside} parameter(s) of the optimizer are not the model's; their work stands"
                f" under {LOSS}"
            )
        for trained, _ in self._trained:
            if trained.grad is not None:
                tape.set_kind(trained.grad, "gradient")

    def owners(self) -> OptimizerOwners:
        """Who owns the memory that the optimizer works on, as things are now."""
        owners = OptimizerOwners(self._stack.root)
        for parameter, layer in self._trained:
            owners.add(self._tape.spec(parameter).storage, layer)
            if parameter.grad is not None:
                owners.add(self._tape.set_kind(parameter.grad, "gradient"), layer)
        for storage, layer in self._states:
            owners.add(storage, layer)
        return owners


class ParameterOrder:
    """The model's parameters and buffers in the order in which they are defined, shared ones once,
    and the order in which gradients arrive.
    """

    def __init__(self, model: nn.Module, tape: OpRecorder) -> None:
        self._tape = tape
        self.parameters: list[Parameter] = []
        self.buffers: list[tuple[str, TensorSpec]] = []
        self.arrivals: list[tuple[int, int]] = []
        self._trained: list[tuple[int, torch.Tensor]] = []
        seen: set[int] = set()
        root = type(model).__name__
        for module, layer in layer_names(model).items():
            prefix = "" if layer == root and module is model else f"{layer}."
            sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    if parameter.requires_grad:
                        self._trained.append((len(self.parameters), parameter))
                    self.parameters.append(
                        Parameter(
                            prefix + name,
                            layer,
                            tape.spec(parameter),
                            parameter.requires_grad,
                            sparse,
                        )
                    )
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.buffers.append((prefix + name, tape.spec(buffer)))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Arrivals of gradients are noted inside."""

        def noting(index: int) -> Any:
            return lambda _: self.arrivals.append((index, self._tape.n_ops))

        handles = [
            parameter.register_post_accumulate_grad_hook(noting(index))  # type: ignore[no-untyped-call]
            for index, parameter in self._trained
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@dataclass
class _Seen:
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()


@dataclass
class ModuleCalls:
    """The layers as they are called: order, callers, shapes of the first call."""

    stack: ModuleStack
    tape: OpRecorder
    _first: dict[str, _Seen] = field(default_factory=dict)

    @contextlib.contextmanager
    def watching(self, interrupts: DeferredInterrupts) -> Iterator[None]:
        """Every module's call is seen inside; the modules themselves are not touched."""
        stack, tape, first = self.stack, self.tape, self._first

        thread = threading.get_ident()

        def before(module: nn.Module, args: Any) -> None:
            name = stack.name(module)
            if name is None or threading.get_ident() != thread:
                return
            interrupts.check()
            stack.enter(name, counted=tape.phase == "forward")
            first.setdefault(name, _Seen())

        def after(module: nn.Module, args: Any, *rest: Any) -> None:
            *kwargs, output = rest  # torch leaves the keywords out where the forward raised
            name = stack.name(module)
            if name is None or threading.get_ident() != thread:
                return
            stack.leave(name)
            seen = first.get(name)
            if seen is not None and not seen.inputs and not seen.outputs:
                try:
                    seen.inputs = tuple(
                        [tape.spec(tensor) for tensor in tensors_of((args, kwargs))]
                    )
                    seen.outputs = tuple([tape.spec(tensor) for tensor in tensors_of(output)])
                except Exception as error:
                    tape.error = tape.error or error

        handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def layers(
        self, model: nn.Module, parameters: dict[str, tuple[tuple[str, TensorSpec], ...]]
    ) -> tuple[Layer, ...]:
        """In the order of first execution; then those that were not called but own parameters."""
        modules = {name: module for module, name in reversed(layer_names(model).items())}
        names = list(self._first) + [
            name for name, rows in parameters.items() if rows and name not in self._first
        ]
        rows = []
        for name in names:
            module, seen = modules[name], self._first.get(name, _Seen())
            is_leaf = not any(child is not None for child in module._modules.values())
            callers = tuple(self.stack.callers.get(name, {}).items())
            rows.append(
                Layer(
                    name,
                    type(module).__name__,
                    is_leaf,
                    callers,
                    seen.inputs,
                    seen.outputs,
                    parameters.get(name, ()),
                )
            )
        return tuple(rows)

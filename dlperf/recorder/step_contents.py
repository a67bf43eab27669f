"""The layers of a recorded step, as they are called, and the tensors that exist before it."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dlperf.core.instructions import InstructionCounter
from dlperf.core.text import counted
from dlperf.core.trace import LOSS, Layer, Parameter, TensorSpec
from dlperf.recorder.attribution import (
    ModuleStack,
    OptimizerOwners,
    layer_names,
    optimizers_in,
)
from dlperf.recorder.isolation import DeferredInterrupts
from dlperf.recorder.op_recorder import OpRecorder
from dlperf.recorder.tensors import parameters_in, tensors_of


class ModuleCalls:
    """The calls of a model's modules: their order, callers, and the shapes of each first one in the
    step's forward passes.
    """

    def __init__(self, model: nn.Module, stack: ModuleStack, recorder: OpRecorder) -> None:
        self._stack, self._recorder = stack, recorder
        self._modules = {name: module for module, name in reversed(layer_names(model).items())}
        self._callers: dict[str, dict[str, int]] = defaultdict(partial(defaultdict, int))
        self._shapes: dict[str, list[tuple[TensorSpec, ...]]] = {}

    @contextlib.contextmanager
    def watching(
        self, interrupts: DeferredInterrupts, inside: nn.Module | None = None
    ) -> Iterator[None]:
        """Global hooks follow every module call of this thread; the modules stay untouched.

        `inside`: the module whose call has begun.
        """
        stack, recorder, thread = self._stack, self._recorder, threading.get_ident()
        names = {id(module): name for name, module in self._modules.items()}

        def name_of(module: nn.Module) -> str | None:
            return names.get(id(module)) if threading.get_ident() == thread else None

        def before(module: nn.Module, args: Any) -> None:
            name = name_of(module)
            if name is None:
                return
            interrupts.check()
            stack.enter(name)
            self._shapes.setdefault(name, [])

        def after(module: nn.Module, args: Any, *rest: Any) -> None:
            *kwargs, output = rest  # torch omits the keywords where the forward raised
            name = name_of(module)
            if name is None:
                return
            stack.leave(name)
            if recorder.phase != "forward" or not recorder.is_recording:
                return  # an evaluation between the steps, or a recomputation in the backward
            self._callers[name][stack.caller] += 1
            shapes = self._shapes.get(name)
            if shapes is None or any(shapes):
                return
            recorder.is_busy = True
            try:
                self._shapes[name] = [
                    tuple([recorder.spec(tensor) for tensor in tensors_of(value)])
                    for value in ((args, kwargs), output)
                ]
            except Exception as error:
                recorder.error = recorder.error or error
            finally:
                recorder.is_busy = False

        with contextlib.ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(before).remove)
            hook = register_module_forward_hook(after, with_kwargs=True, always_call=True)
            undo.callback(hook.remove)
            if inside is not None:
                before(inside, ())
            yield

    def layers(
        self,
        parameters: dict[str, tuple[tuple[str, TensorSpec], ...]],
        code: InstructionCounter,
        silent_nodes: Mapping[str, int],
    ) -> tuple[Layer, ...]:
        """Layers in the order of first execution, then those that own parameters and did not run.

        Shapes are those of a layer's first call; `code` holds the instructions of all of them,
        `silent_nodes` the autograd nodes of each layer in which no operation ran.
        """
        names = [*self._shapes, *(name for name, rows in parameters.items() if rows)]
        layers = []
        for name in dict.fromkeys(names):
            module, (inputs, outputs) = self._modules[name], self._shapes.get(name) or ((), ())
            layers.append(
                Layer(
                    name,
                    type(module).__name__,
                    next(module.children(), None) is None,
                    tuple(self._callers[name].items()),
                    inputs,
                    outputs,
                    parameters.get(name, ()),
                    *code.of(name),
                    silent_nodes.get(name, 0),
                )
            )
        return tuple(layers)


class StepTensors:
    """The tensors that exist before the recorded step, with their owners.

    `parameters` and `buffers` stand in the order of definition, shared ones once. `rows`: each
    layer's own parameters. `arrivals`: (index of a parameter, number of operations before) for each
    gradient, in the order of accumulation.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        inputs: Any,
        recorder: OpRecorder,
    ) -> None:
        self._recorder, self._root = recorder, type(model).__name__
        self.notes: list[str] = []
        self.rows: dict[str, tuple[tuple[str, TensorSpec], ...]] = {}
        self.parameters: list[Parameter] = []
        self.buffers: list[tuple[str, TensorSpec]] = []
        self.arrivals: list[tuple[int, int]] = []
        self._trained: list[tuple[int, torch.Tensor]] = []
        self._owned: dict[int, tuple[torch.Tensor, str]] = {}
        self._states: list[tuple[int, str]] = []
        seen: set[int] = set()
        for module, layer in layer_names(model).items():
            prefix = "" if module is model else f"{layer}."
            sparse = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
            rows = []
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                recorder.set_kind(parameter, "parameter")
                spec = recorder.spec(parameter)
                rows.append((name, spec))
                if id(parameter) not in self._owned:
                    self._owned[id(parameter)] = (parameter, layer)
                    if parameter.requires_grad:
                        self._trained.append((len(self.parameters), parameter))
                    self.parameters.append(
                        Parameter(prefix + name, layer, spec, parameter.requires_grad, sparse)
                    )
            self.rows[layer] = tuple(rows)
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
                recorder.set_kind(buffer, "buffer")
                if id(buffer) not in seen:
                    seen.add(id(buffer))
                    self.buffers.append((prefix + name, recorder.spec(buffer)))
        for tensor in tensors_of(inputs):
            recorder.set_kind(tensor, "input")
        n_of_model = len(self._owned)
        for part in optimizers_in(optimizers):
            for trained in parameters_in(part):
                if id(trained) not in self._owned:
                    self._owned[id(trained)] = (trained, LOSS)
                    recorder.set_kind(trained, "parameter")
            for trained, state in part.state.items():
                for tensor in tensors_of(state):
                    _, layer = self._owned.get(id(trained), (trained, self._root))
                    self._states.append((recorder.set_kind(tensor, "optimizer"), layer))
        n_others = len(self._owned) - n_of_model
        if n_others:
            self.notes.append(
                f"{counted(n_others, 'parameter')} of the optimizer not of the model; "
                f"their work stands under {LOSS}"
            )
        for trained, _ in self._owned.values():
            if trained.grad is not None:
                recorder.set_kind(trained.grad, "gradient")

    def owners(self) -> OptimizerOwners:
        """The present owners of the memory that the optimizer works on."""
        owners = OptimizerOwners(self._root)
        for parameter, layer in self._owned.values():
            owners.add(self._recorder.spec(parameter).storage, layer)
            if parameter.grad is not None:
                owners.add(self._recorder.set_kind(parameter.grad, "gradient"), layer)
        for storage, layer in self._states:
            owners.add(storage, layer)
        return owners

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks on the parameters note the arrivals of gradients."""

        def noting(index: int) -> Any:
            return lambda _: self.arrivals.append((index, len(self._recorder.ops)))

        with contextlib.ExitStack() as undo:
            for index, parameter in self._trained:
                hook = parameter.register_post_accumulate_grad_hook(noting(index))  # type: ignore[no-untyped-call]
                undo.callback(hook.remove)
            yield

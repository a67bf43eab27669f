"""Targets of commands: a builder, a module, or a trace file, given by name.

Forms: ``FILE.py:CALLABLE``, ``PACKAGE.MODULE:CALLABLE``, short names of a checkout's ``networks``,
exported programs (``FILE.pt2``: the forward pass), and trace files (:func:`is_trace_file`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from dlperf.core.errors import DlperfError, WorkFailed, describe
from dlperf.core.files import schema_of
from dlperf.core.text import counted
from dlperf.recorder.accelerator import CPU_ONLY, accelerator_of
from dlperf.recorder.target_lookup import find_object
from dlperf.recorder.tensors import parameters_in, tensors_of

_NO_CUDA = ("compiled with cuda", "support for cuda", "no cuda gpus", "nvidia driver")
"""Parts of torch's errors for a builder that asks for a GPU where there is none."""


@dataclass(frozen=True)
class Built:
    """The parts of a step: model, inputs, loss, optimizer.

    `inputs` is a tuple of positional or a dict of keyword arguments. `loss` and `optimizer` are
    None for inference. `n_passes`: forwards, each with a backward, of one training step.
    """

    model: nn.Module
    inputs: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], torch.Tensor] | None
    optimizer: torch.optim.Optimizer | None = None
    n_passes: int = 1

    def forward(self, inputs: tuple[Any, ...] | dict[str, Any] | None = None) -> Any:
        """The model's output on `inputs` (default: its own)."""
        inputs = self.inputs if inputs is None else inputs
        return self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)

    def step(self, inputs: tuple[Any, ...] | dict[str, Any] | None = None) -> None:
        """One training step, or one forward pass where there is no loss, on `inputs`."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        for _ in range(self.n_passes):
            output = self.forward(inputs)
            if self.loss is not None and self.optimizer is not None:
                scalar = self.loss(output)
                scalar.backward()  # type: ignore[no-untyped-call]
        if self.loss is not None and self.optimizer is not None:
            self.optimizer.step()


@contextlib.contextmanager
def calling(what: str) -> Iterator[None]:
    """User code that `what` describes runs inside; it prints to stderr.

    Raises WorkFailed where it raises or exits, DlperfError where it asks for a GPU.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except DlperfError:
        raise
    except Exception as error:
        text = f"{what} raises {describe(error)}"
        if any(words in str(error).lower() for words in _NO_CUDA):
            raise DlperfError(f"{text}; {CPU_ONLY}") from error
        raise WorkFailed(text) from error
    except SystemExit as error:
        raise WorkFailed(f"{what} called sys.exit({error.code!r})") from error


@dataclass(frozen=True)
class Target:
    """A named network with its batch size. :meth:`build` makes a fresh one.

    `_make` is the builder, a function of the batch size. `_changes` are applied to what it builds.
    """

    spec: str
    batch_size: int
    inference: bool
    _make: Callable[[int], Any] = field(repr=False)
    _changes: tuple[Callable[[Built], Built], ...] = field(default=(), repr=False)

    def at(self, batch_size: int) -> Target:
        """The same target, changes included, at another batch size."""
        return replace(self, batch_size=batch_size)

    def on(self, device: torch.device) -> Target:
        """The same target on an accelerator: its builder runs with that as torch's default device,
        and what it makes elsewhere is moved there.
        """

        def make(batch_size: int) -> Any:
            with device:
                return self._make(batch_size)

        return replace(self, _make=make, _changes=(*self._changes, _moved_to(device)))

    def changed(self, change: Callable[[Built], Built]) -> Target:
        """The same target with one more `change`, applied to what it builds."""
        return replace(self, _changes=(*self._changes, change))

    def build(self) -> Built:
        """Call the builder and check what it returns.

        Raises DlperfError for a wrong result, WorkFailed where the builder raises.
        """
        with calling(f"target {self.spec}: its builder"):
            made = self._make(self.batch_size)
        what = "expected (model, inputs, loss) or (model, inputs, loss, optimizer)"
        if not isinstance(made, (tuple, list)):
            raise DlperfError(f"target {self.spec}: returned {_kind(made)}; {what}")
        if len(made) not in (3, 4) and not (self.inference and len(made) == 2):
            n_values = counted(len(made), "value")
            raise DlperfError(f"target {self.spec}: returned {n_values}; {what}")
        model, inputs, loss, optimizer = (*made, None, None)[:4]
        built = as_built(model, inputs, loss, optimizer, self.inference)
        check_built(f"target {self.spec}", built, self.inference)
        if not self.inference and built.optimizer is None:
            built = replace(built, optimizer=default_optimizer(built.model))
        for change in self._changes:
            built = change(built)
        return built


def is_trace_file(spec: str) -> bool:
    """Whether `spec` names a file in which a trace is saved (rather than a builder)."""
    path = Path(spec)
    if os.path.isfile(path):
        return path.suffix == ".json" or schema_of(path) == "dlperf.trace"
    return spec.endswith(".json")


def resolve(
    spec: str,
    batch_size: int = 32,
    *,
    inference: bool = False,
    input_shape: tuple[int, ...] | None = None,
) -> Target:
    """The target that `spec` names.

    `input_shape` is the shape of one float32 sample, for an nn.Module class or instance; the batch
    size precedes it. An exported program has the batch size that it was exported with. Raises
    DlperfError, with the target and the way out, where there is none.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise DlperfError(f"batch size is {batch_size}; it must be at least 1")
    if input_shape is not None and (not input_shape or any(n < 1 for n in input_shape)):
        raise DlperfError(
            f"input shape is {','.join(map(str, input_shape))}; give positive sizes such as"
            " 3,224,224"
        )
    if spec.endswith(".pt2"):
        from dlperf.recorder.exported_program import load_program

        program = load_program(spec)
        size = first_batch_size(program.inputs)
        return Target(spec, size, True, lambda _: (program.model, program.inputs))
    found = find_object(spec)
    if isinstance(found, nn.Module) or (isinstance(found, type) and issubclass(found, nn.Module)):
        if input_shape is None:
            raise DlperfError(
                f"target {spec}: is a module; say what goes in with --input, for example --input"
                " 3,224,224 (the batch size is put in front)"
            )
        if isinstance(found, type):
            _check_call(spec, found, (), f"{found.__name__}()")

        def make(size: int) -> tuple[Any, ...]:
            model = found() if isinstance(found, type) else found
            return model, (torch.randn(size, *input_shape),), mean_of_output

        return Target(spec, batch_size, inference, make)
    if input_shape is not None:
        raise DlperfError(
            f"target {spec}: is no module but a {type(found).__name__}, which makes its own inputs;"
            " leave --input out"
        )
    wanted = "of the batch size, or an nn.Module"
    _check_call(spec, found, (batch_size,), "CALLABLE(batch_size)", wanted)
    return Target(spec, batch_size, inference, found)


def _moved_to(device: torch.device) -> Callable[[Built], Built]:
    def move(built: Built) -> Built:
        def moved(leaf: Any) -> Any:
            return leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf

        return replace(built, model=built.model.to(device), inputs=tree_map(moved, built.inputs))

    return move


def step_tensors(built: Built) -> Iterator[torch.Tensor]:
    """The model's parameters and buffers, and the inputs."""
    yield from (*built.model.parameters(), *built.model.buffers(), *tensors_of(built.inputs))


def default_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """SGD(lr=0.01) over all parameters: the optimizer of a target that names none."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def mean_of_output(output: Any) -> torch.Tensor:
    """The mean of the first floating tensor in a nested output: the default loss."""
    tensor = next(filter(torch.Tensor.is_floating_point, tensors_of(output)), None)
    if tensor is None:
        raise DlperfError(
            f"the output ({type(output).__name__}) holds no floating-point tensor to make a loss"
            " of; give a loss"
        )
    return tensor.mean()


def first_batch_size(inputs: Any) -> int:
    """First dimension of the first input tensor that has one; 1 if none does."""
    return next((max(1, int(one.shape[0])) for one in tensors_of(inputs) if one.dim() > 0), 1)


def check_built(name: str, built: Built, inference: bool) -> None:
    """Raise DlperfError where a part of a step has the wrong type or lies on a device that is not
    here, or nothing can be trained.
    """
    if not isinstance(built.model, nn.Module):
        raise DlperfError(f"{name}: the model is {_kind(built.model)}; expected an nn.Module")
    if not isinstance(built.inputs, (tuple, dict)):
        raise DlperfError(
            f"{name}: the inputs are {_kind(built.inputs)}; expected a tuple of positional or a"
            " dict of keyword arguments"
        )
    if isinstance(built.inputs, dict) and not all(isinstance(key, str) for key in built.inputs):
        raise DlperfError(f"{name}: the inputs' keys must be the names of the model's arguments")
    accelerator_of(name, step_tensors(built))
    if inference:
        return
    if not callable(built.loss):
        raise DlperfError(
            f"{name}: the loss is {_kind(built.loss)}; expected a function from the model's output"
            " to a scalar tensor"
        )
    parameters = list(built.model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        what = (
            f"none of the model's {len(parameters)} parameters requires grad"
            if parameters
            else "the model has no parameters to train"
        )
        raise DlperfError(
            f"{name}: {what}; only inference can be predicted or measured"
            " (--inference, inference=True)"
        )
    if built.optimizer is None:
        return
    if not isinstance(built.optimizer, torch.optim.Optimizer):
        raise DlperfError(
            f"{name}: the optimizer is {_kind(built.optimizer)}; expected a torch.optim.Optimizer"
        )
    own = set(map(id, parameters))
    if not any(id(parameter) in own for parameter in parameters_in(built.optimizer)):
        raise DlperfError(
            f"{name}: the optimizer {type(built.optimizer).__name__} holds none of the model's"
            " parameters; make it from model.parameters()"
        )


def check_needs_no_closure(name: str, optimizer: Any) -> None:
    """Raise DlperfError for an optimizer that runs the model itself."""
    kind = type(optimizer)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if isinstance(optimizer, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise DlperfError(
            f"{name}: optimizer {kind.__name__} calls a closure to run the model several times a"
            " step, which is not one step; choose one that steps without"
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"of type {type(value).__name__}"


def as_built(model: Any, inputs: Any, loss: Any, optimizer: Any, inference: bool) -> Built:
    """The parts of a step; inputs become a tuple or a dict. :func:`check_built` checks them."""
    if isinstance(inputs, list):
        inputs = tuple(inputs)
    elif isinstance(inputs, Mapping) and not isinstance(inputs, dict):
        inputs = dict(inputs)
    return Built(model, inputs, None if inference else loss, None if inference else optimizer)


def check_loss(name: str, scalar: Any) -> None:
    """Raise DlperfError unless the loss is a scalar tensor that can be differentiated."""
    if not isinstance(scalar, torch.Tensor):
        raise DlperfError(
            f"{name}: the loss returned {type(scalar).__name__}; it has to map the model's output"
            " to a scalar tensor"
        )
    if scalar.numel() != 1:
        raise DlperfError(
            f"{name}: the loss has shape {tuple(scalar.shape)}; it has to be a scalar (reduce it,"
            " for example by .mean())"
        )
    if not scalar.requires_grad:
        raise DlperfError(
            f"{name}: the loss depends on nothing that requires grad; check requires_grad and"
            " no_grad, or use inference"
        )


def _check_call(
    spec: str, found: Any, arguments: tuple[Any, ...], call: str, wanted: str = ""
) -> None:
    if not callable(found):
        raise DlperfError(
            f"target {spec}: is of type {type(found).__name__}, which cannot be called; name a"
            f" function {wanted}"
        )
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # a builtin has no signature to check
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise DlperfError(
            f"target {spec}: is called as {call}, but takes {signature} ({error}); wrap it in a"
            " function that fits"
        ) from None


def find_callable(spec: str, arguments: tuple[Any, ...], call: str) -> Callable[..., Any]:
    """The function that ``FILE.py:CALLABLE`` or ``PACKAGE.MODULE:CALLABLE`` names.

    It takes `arguments`; `call` is their description. Raises DlperfError where there is no such
    function, or it takes other arguments.
    """
    found = find_object(spec)
    _check_call(spec, found, arguments, call, wanted=call)
    return found  # type: ignore[no-any-return]

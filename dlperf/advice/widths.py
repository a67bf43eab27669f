"""Layers made wider, and everything that reads them made to fit: what a user does who changes one
number in a network's definition.

Kernels work in blocks of 16 channels (:data:`BLOCK`); a width between two multiples pays for the
next one, or for a slower kernel.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from dlperf.advice.variants import NotApplicable
from dlperf.recorder.attribution import optimizers_in
from dlperf.recorder.targets import Built
from dlperf.recorder.tensors import tensors_of

BLOCK = 16
"""float32 values in a register of 512 bits; oneDNN's blocked layouts pad channels to 8 or 16 of
them.
"""


def rounded(width: int) -> int:
    """The next multiple of :data:`BLOCK`.

    >>> rounded(20), rounded(32)
    (32, 32)
    """
    return -(-width // BLOCK) * BLOCK


def width_of(module: nn.Module) -> int | None:
    """Output channels or features of a layer that :func:`widen` can change; None for others
    (grouped convolutions included).
    """
    if isinstance(module, nn.Linear):
        return module.out_features if type(module) is nn.Linear else None
    if isinstance(module, _ConvNd) and module.groups == 1:
        return module.out_channels
    return None


def widen(built: Built, layers: Sequence[str]) -> Built:
    """The named convolutions and linear layers with their width rounded up to a multiple of
    :data:`BLOCK`, and their readers widened to fit.

    The readers are found by running the forward: convolutions, linear layers and normalisations
    take on as many inputs as arrive. The parameters of what changed start anew. Raises
    NotApplicable where something else insists on the old width, or the model's output would change.
    """
    model = built.model
    parameters = model.named_parameters(remove_duplicate=False)
    uses = Counter(id(parameter) for _, parameter in parameters)
    with keeping_parameters_by_name(model, built.optimizer):
        shapes = _output_shapes(built)
        for name in layers:
            module = model.get_submodule(name)
            width = width_of(module)
            if width is None:
                raise NotApplicable(
                    f"{name} ({type(module).__name__}) has no width that can be changed alone"
                )
            if any(uses[id(parameter)] > 1 for parameter in module.parameters()):
                raise NotApplicable(f"{name} shares its parameters with another layer")
            _resize(module, outputs=rounded(width))
        with contextlib.ExitStack() as hooks:
            for module in model.modules():
                hook = module.register_forward_pre_hook(_follow, with_kwargs=True)
                hooks.callback(hook.remove)
            after = _output_shapes(built)
        if after != shapes:
            who = layers[0] if len(layers) == 1 else f"one of {', '.join(layers)}"
            raise NotApplicable(f"the model's output would change ({who} makes it)")
    return built


def _output_shapes(built: Built) -> list[tuple[int, ...]]:
    try:
        with torch.no_grad():
            output = built.forward()
    except NotApplicable:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = lines[0] if lines else type(error).__name__
        raise NotApplicable(f"something else insists on the old width ({text[:120]})") from error
    return [tuple(tensor.shape) for tensor in tensors_of(output)]


def _follow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a reader fit what arrives (a forward pre-hook)."""
    x = next(tensors_of((args, kwargs)), None)
    if x is None:
        return
    if type(module) is nn.Linear:
        if x.shape[-1] != module.in_features:
            _resize(module, inputs=x.shape[-1])
    elif isinstance(module, _ConvNd):
        arriving = x.shape[-1 - len(module.kernel_size)]
        if arriving != module.in_channels:
            if module.groups > 1 and module.groups != module.in_channels:
                raise NotApplicable(f"a convolution in {module.groups} groups reads it")
            _resize(module, inputs=arriving)
    elif isinstance(module, _BatchNorm):
        module.num_features = _resize_norm(module, x.shape[1], module.num_features)
    elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        module.normalized_shape = (_resize_norm(module, x.shape[-1], module.normalized_shape[0]),)
    elif isinstance(module, nn.GroupNorm):
        if x.shape[1] % module.num_groups:
            raise NotApplicable(f"a GroupNorm of {module.num_groups} groups reads it")
        module.num_channels = _resize_norm(module, x.shape[1], module.num_channels)


def _resize(module: nn.Module, inputs: int | None = None, outputs: int | None = None) -> None:
    """Another number of inputs or outputs; the parameters start anew as the module's own class
    starts them.
    """
    if isinstance(module, nn.Linear):
        module.in_features = inputs or module.in_features
        module.out_features = n_out = outputs or module.out_features
        shape: tuple[int, ...] = (n_out, module.in_features)
    else:
        assert isinstance(module, _ConvNd)
        if inputs is not None and module.groups > 1:
            # depthwise: each input channel has its own outputs
            module.out_channels = module.out_channels // module.in_channels * inputs
            module.groups = inputs
        module.in_channels = inputs or module.in_channels
        module.out_channels = n_out = outputs or module.out_channels
        sides = n_out, module.in_channels
        first, second = reversed(sides) if isinstance(module, _ConvTransposeNd) else sides
        shape = (first, second // module.groups, *module.kernel_size)
    _refill(module, "weight", torch.empty(shape))
    _refill(module, "bias", torch.empty(n_out))
    module.reset_parameters()


def _resize_norm(module: nn.Module, width: int, before: int) -> int:
    """Weight, bias and running statistics of a normalisation for `width` channels: ones and zeros,
    as it starts. Returns the width.
    """
    if width != before:
        for name in ("weight", "running_var"):
            _refill(module, name, torch.ones(width))
        for name in ("bias", "running_mean"):
            _refill(module, name, torch.zeros(width))
    return width


def _refill(module: nn.Module, name: str, values: torch.Tensor) -> None:
    """Replace a parameter or buffer of the module, where it has one, by others in its dtype."""
    old = getattr(module, name, None)
    if old is not None:
        new = values.to(old.dtype)
        is_parameter = isinstance(old, nn.Parameter)
        setattr(module, name, nn.Parameter(new, old.requires_grad) if is_parameter else new)


# -- parameters of an optimizer --------------------------------------------------------------------


def replace_parameters(
    optimizer: torch.optim.Optimizer | None, replacements: Mapping[int, nn.Parameter | None]
) -> None:
    """Put others in the place of an optimizer's parameters, by the ``id`` of the old one; None
    takes it out. State of those that go is dropped.
    """
    for part in optimizers_in(optimizer):
        for group in part.param_groups:
            for old in group["params"]:
                if replacements.get(id(old), old) is not old:
                    part.state.pop(old, None)
            group["params"] = [
                new
                for old in group["params"]
                if (new := replacements.get(id(old), old)) is not None
            ]


@contextlib.contextmanager
def keeping_parameters_by_name(
    model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> Iterator[None]:
    """Inside, parameters of the model may become other objects; afterwards the optimizer holds
    those of the same names.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    yield
    after = dict(model.named_parameters(remove_duplicate=False))
    replace_parameters(optimizer, {id(old): after.get(name) for name, old in before.items()})

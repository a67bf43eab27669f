"""Layers made wider, and everything that reads them made to fit: what a user does who changes one
number in a network's definition.

Kernels work in blocks of 16 channels (:data:`BLOCK`); a width between two multiples pays for the
next one, or for a slower kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils import _pytree as pytree

from dlperf.advice.parameters import NotApplicable, keeping_parameters_by_name
from dlperf.recorder.targets import Built

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
    shared = _shared_parameters(model)
    hooks: list[Any] = []
    with keeping_parameters_by_name(model, built.optimizer):
        shapes = _output_shapes(built)
        for name in layers:
            module = model.get_submodule(name)
            width = width_of(module)
            if width is None:
                raise NotApplicable(
                    f"{name} ({type(module).__name__}) has no width that can be changed alone"
                )
            if shared & set(map(id, module.parameters())):
                raise NotApplicable(f"{name} shares its parameters with another layer")
            _resize(module, outputs=rounded(width))
        try:
            hooks += [
                module.register_forward_pre_hook(_follow, with_kwargs=True)
                for module in model.modules()
            ]
            after = _output_shapes(built)
        finally:
            for hook in hooks:
                hook.remove()
        if after != shapes:
            raise NotApplicable(f"the model's output would change ({_several(layers)} makes it)")
    return built


def _several(layers: Sequence[str]) -> str:
    return layers[0] if len(layers) == 1 else f"one of {', '.join(layers)}"


def _output_shapes(built: Built) -> list[tuple[int, ...]]:
    try:
        with torch.no_grad():
            output = (
                built.model(**built.inputs)
                if isinstance(built.inputs, dict)
                else built.model(*built.inputs)
            )
    except NotApplicable:
        raise
    except Exception as error:
        text = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        raise NotApplicable(f"something else insists on the old width ({text[:120]})") from error
    return [
        tuple(leaf.shape) for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)
    ]


def _shared_parameters(model: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in model.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _follow(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Make a reader fit what arrives (a forward pre-hook)."""
    x = next(
        (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None
    )
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
        if x.shape[1] != module.num_features:
            _resize_norm(module, x.shape[1])
            module.num_features = x.shape[1]
    elif isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        if x.shape[-1] != module.normalized_shape[0]:
            _resize_norm(module, x.shape[-1])
            module.normalized_shape = (x.shape[-1],)
    elif isinstance(module, nn.GroupNorm) and x.shape[1] != module.num_channels:
        if x.shape[1] % module.num_groups:
            raise NotApplicable(f"a GroupNorm of {module.num_groups} groups reads it")
        _resize_norm(module, x.shape[1])
        module.num_channels = x.shape[1]


def _resize(module: nn.Module, inputs: int | None = None, outputs: int | None = None) -> None:
    """Another number of inputs or outputs; the parameters start anew as the module's own class
    starts them.
    """
    if isinstance(module, nn.Linear):
        module.in_features, module.out_features = (
            inputs or module.in_features,
            outputs or module.out_features,
        )
        shape: tuple[int, ...] = (module.out_features, module.in_features)
        n_out = module.out_features
    else:
        assert isinstance(module, _ConvNd)
        if (
            inputs is not None and module.groups > 1
        ):  # depthwise: each input channel has its own outputs
            module.out_channels, module.groups = (
                module.out_channels // module.in_channels * inputs,
                inputs,
            )
        module.in_channels, module.out_channels = (
            inputs or module.in_channels,
            outputs or module.out_channels,
        )
        sides = (
            (module.in_channels, module.out_channels)
            if isinstance(module, _ConvTransposeNd)
            else (module.out_channels, module.in_channels)
        )
        shape = (sides[0], sides[1] // module.groups, *module.kernel_size)
        n_out = module.out_channels
    weight = module.weight
    module.weight = nn.Parameter(
        torch.empty(shape, dtype=weight.dtype), requires_grad=weight.requires_grad
    )
    if module.bias is not None:
        module.bias = nn.Parameter(
            torch.empty(n_out, dtype=module.bias.dtype), requires_grad=module.bias.requires_grad
        )
    module.reset_parameters()


def _resize_norm(module: nn.Module, width: int) -> None:
    """Weight, bias and running statistics of a normalisation for `width` channels: ones and zeros,
    as it starts.
    """
    for name, value in (("weight", 1.0), ("bias", 0.0)):
        old = getattr(module, name, None)
        if old is not None:
            setattr(
                module,
                name,
                nn.Parameter(
                    torch.full((width,), value, dtype=old.dtype), requires_grad=old.requires_grad
                ),
            )
    for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
        old = getattr(module, name, None)
        if old is not None:
            setattr(module, name, torch.full((width,), value, dtype=old.dtype))

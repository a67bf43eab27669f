"""Changes of what a target builds: another memory format, precision, optimizer, layer. Each is what
a user would write, applied to a fresh build.

They run under fake tensors when a step is recorded and on real ones when it is timed, so what was
predicted is what is tried.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dlperf.advice import widths
from dlperf.advice.variants import Edit, NotApplicable
from dlperf.advice.widths import keeping_parameters_by_name, replace_parameters
from dlperf.core.errors import DlperfError
from dlperf.recorder.targets import Built


def edit_built(built: Built, edits: Iterable[Edit]) -> Built:
    """`built` after all edits, in their order. Raises NotApplicable, naming the reason, where one
    cannot be made.
    """
    for edit in edits:
        if edit.kind not in _TRANSFORMATIONS:
            raise DlperfError(
                f"change {edit.kind!r} is unknown; known are {', '.join(_TRANSFORMATIONS)}"
            )
        built = _TRANSFORMATIONS[edit.kind](built, edit.layers)
    return built


# -- optimizer -------------------------------------------------------------------------------------


def _optimizer_of(built: Built) -> torch.optim.Optimizer:
    if built.optimizer is None:
        raise NotApplicable("there is no optimizer")
    return built.optimizer


def with_option(built: Built, _: Sequence[str], option: str) -> Built:
    """The optimizer with ``fused=True`` (one kernel over all parameters) or ``foreach=True`` (each
    operation once over all parameters).
    """
    optimizer = _optimizer_of(built)
    kind = type(optimizer)
    known = inspect.signature(kind.__init__).parameters
    if option not in known:
        raise NotApplicable(f"{kind.__name__} knows no {option}=True")
    if all(group.get(option) for group in optimizer.param_groups):
        raise NotApplicable(f"{kind.__name__} has {option}=True already")
    options: dict[str, Any] = {
        name: value for name, value in optimizer.defaults.items() if name in known
    }
    ways = {
        name: True if name == option else None for name in ("foreach", "fused") if name in known
    }
    try:
        made = kind([{**group, **ways} for group in optimizer.param_groups], **(options | ways))
    except Exception as error:
        raise NotApplicable(
            f"{kind.__name__}({option}=True) raises {type(error).__name__}: {error}"
        ) from error
    return replace(built, optimizer=made)


def set_gradients_to_none(built: Built, _: Sequence[str]) -> Built:
    """``zero_grad(set_to_none=True)``, whatever the optimizer's own default is."""
    optimizer = _optimizer_of(built)

    def zero_grad(set_to_none: bool = True) -> None:
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none=True)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    return built


# -- memory format and precision -------------------------------------------------------------------

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def use_channels_last(built: Built, _: Sequence[str]) -> Built:
    """Weights and inputs of convolutions with the channels innermost."""
    kinds = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    if not any(isinstance(module, kinds) for module in built.model.modules()):
        raise NotApplicable("the model has no Conv2d or Conv3d")
    with keeping_parameters_by_name(built.model, built.optimizer):
        for dims, memory_format in _FORMATS.items():
            if any(parameter.dim() == dims for parameter in built.model.parameters()):
                built.model.to(memory_format=memory_format)  # type: ignore[call-overload]

    def lay_out(tensor: torch.Tensor) -> torch.Tensor:
        memory_format = _FORMATS.get(tensor.dim())
        return tensor if memory_format is None else tensor.contiguous(memory_format=memory_format)

    return replace(built, inputs=_on_tensors(built.inputs, lay_out))


def use_autocast(built: Built, _: Sequence[str]) -> Built:
    """Forward and loss under ``torch.autocast("cpu", torch.bfloat16)``."""
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    built.model.forward = autocast(built.model.forward)
    return replace(built, loss=None if built.loss is None else autocast(built.loss))


def use_bfloat16(built: Built, _: Sequence[str]) -> Built:
    """Model and inputs in bfloat16; the loss sees the output in float32."""
    if not any(parameter.dtype == torch.float32 for parameter in built.model.parameters()):
        raise NotApplicable("the model has no parameter in float32")
    with keeping_parameters_by_name(built.model, built.optimizer):
        built.model.bfloat16()
    loss = built.loss

    def on_floats(output: Any) -> torch.Tensor:
        assert loss is not None
        return loss(_on_tensors(output, torch.Tensor.float))

    inputs = _on_tensors(built.inputs, torch.Tensor.bfloat16)
    return replace(built, inputs=inputs, loss=None if loss is None else on_floats)


def _on_tensors(nested: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`nested` with `change` applied to its floating-point tensors."""
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: change(leaf) if leaf.is_floating_point() else leaf, nested
    )


def use_inference_mode(built: Built, _: Sequence[str]) -> Built:
    """The forward under ``torch.inference_mode()``."""
    if built.loss is not None:
        raise NotApplicable("a training step needs its gradients; for --inference")
    built.model.forward = torch.inference_mode()(built.model.forward)
    return built


# -- layers ----------------------------------------------------------------------------------------


def activate_in_place(built: Built, layers: Sequence[str]) -> Built:
    """``inplace=True`` on the named modules."""
    for name in layers:
        module = built.model.get_submodule(name)
        if not hasattr(module, "inplace"):
            raise NotApplicable(f"{name} ({type(module).__name__}) has no inplace flag")
        module.inplace = True  # type: ignore[assignment]
    return built


def merge_linears(built: Built, layers: Sequence[str]) -> Built:
    """The named Linear layers, which read the same tensor, as one of all their outputs, which is
    cut up afterwards.
    """
    modules = map(built.model.get_submodule, layers)
    linears = [module for module in modules if type(module) is nn.Linear]
    if len(linears) < max(2, len(layers)):
        raise NotApplicable(f"{', '.join(layers)} are not several nn.Linear")
    kinds = {
        (one.in_features, one.bias is None, one.weight.dtype, one.weight.requires_grad)
        for one in linears
    }
    if len(kinds) != 1:
        raise NotApplicable(f"{', '.join(layers)} differ in more than their number of outputs")
    product = _Product(linears)
    replacements: dict[int, nn.Parameter | None] = {
        id(parameter): None for linear in linears for parameter in linear.parameters()
    }
    replacements.update(
        (id(old), new) for old, new in zip(linears[0].parameters(), product.merged.parameters())
    )
    for index, name in enumerate(layers):
        parent, _, child = name.rpartition(".")
        setattr(built.model.get_submodule(parent), child, _Output(product, index))
    replace_parameters(built.optimizer, replacements)
    return built


class _Product:
    """Several linear layers as one, whose outputs wait until each layer is called."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        first = linears[0]
        self.sizes = [linear.out_features for linear in linears]
        self.merged = nn.Linear(
            first.in_features,
            sum(self.sizes),
            bias=first.bias is not None,
            dtype=first.weight.dtype,
        )
        with torch.no_grad():
            for own, *parts in zip(
                self.merged.parameters(), *(linear.parameters() for linear in linears)
            ):
                own.copy_(torch.cat(parts))
        self.read: torch.Tensor | None = None
        self.waiting: dict[int, torch.Tensor] = {}


class _Output(nn.Module):
    """One of the layers that are one product now; the first owns and runs it."""

    def __init__(self, product: _Product, index: int) -> None:
        super().__init__()
        self._product, self._index = product, index
        self.merged = product.merged if index == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """This layer's output."""
        product = self._product
        if self.merged is not None:
            product.read = x
            product.waiting = dict(enumerate(self.merged(x).split(product.sizes, dim=-1)))
        if product.read is not x or self._index not in product.waiting:
            raise NotApplicable(
                "the layers are not called once each on the same tensor, the first of them first"
            )
        part = product.waiting.pop(self._index)
        if not product.waiting:
            product.read = None
        return part


_TRANSFORMATIONS: Mapping[str, Callable[[Built, Sequence[str]], Built]] = {
    "fused": functools.partial(with_option, option="fused"),
    "foreach": functools.partial(with_option, option="foreach"),
    "set-to-none": set_gradients_to_none,
    "channels-last": use_channels_last,
    "autocast": use_autocast,
    "bfloat16": use_bfloat16,
    "inference-mode": use_inference_mode,
    "in-place": activate_in_place,
    "merge": merge_linears,
    "widen": widths.widen,
}

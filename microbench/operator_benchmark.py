"""An op as data -> a call on real tensors: what lets one timer measure every kernel, and any op of
any trace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from dlperf.core.trace import Argument, Op, Symbol, TensorSpec
from dlperf.microbench.conv import corrupts

Prepare = Callable[[Op, list[Any]], None]
_PREPARE: dict[str, Prepare] = {}
_BRANCHING = frozenset(
    f"aten.{name}"
    for name in (
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
        "adaptive_max_pool2d",
        "adaptive_max_pool3d",
        "max",
        "min",
        "sort",
        "topk",
    )
)
"""Operators whose loops branch by what they compare. A core remembers the branches of so many
values that it has met a few times over.
"""
_REMEMBERED = 2**18
_MOST_VARIANTS = 64


class Unplayable(Exception):
    """The op cannot be called on its own; the message gives the reason."""


def prepare(*packets: str) -> Callable[[Prepare], Prepare]:
    """Register what makes the arguments of an operator valid (indices in range, a forward's
    workspace).
    """

    def register(function: Prepare) -> Prepare:
        for packet in packets:
            if packet in _PREPARE:
                raise ValueError(f"{packet} is prepared twice")
            _PREPARE[packet] = function
        return function

    return register


def build(op: Op, grad: bool = False) -> Callable[[], object]:
    """A call of `op` on tensors of its shapes, strides and dtypes, as Python's torch.ops calls it;
    with `grad` autograd records it, for its first floating operand.

    Values are small and random; what the op mutates holds zeros, so that thousands of repetitions
    reach neither infinities nor denormal numbers. Where an op branches by its values, calls go
    round other values, as steps do. Raises Unplayable for an op that torch does not know or that
    cannot be called with made-up values.
    """
    if corrupts(op):
        raise Unplayable(f"{op.name}: oneDNN writes past its workspace for this shape")
    function = _resolve(op.name)
    generator = torch.Generator().manual_seed(0)
    mutated = _mutated(function)
    args = [_materialise(a, generator, position in mutated) for position, a in enumerate(op.args)]
    kwargs = {name: _materialise(a, generator, name in mutated) for name, a in op.kwargs}
    try:
        with torch.no_grad():
            if op.packet in _PREPARE:
                _PREPARE[op.packet](op, args)
            function(*args, **kwargs)
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError) as error:
        raise Unplayable(f"{op.name}: {str(error).splitlines()[0]}") from error
    firsts = (
        [args[0]]
        if (n_variants := _n_variants(op)) == 1
        else [_materialise(op.args[0], generator, False) for _ in range(n_variants)]
    )
    if grad:
        for first in firsts:
            operands = itertools.chain(first if isinstance(first, list) else [first], args[1:])
            next(
                value
                for value in operands
                if isinstance(value, torch.Tensor) and value.is_floating_point()
            ).requires_grad_()
    if len(firsts) > 1:
        values = itertools.cycle(firsts)
        return lambda: function(next(values), *args[1:], **kwargs)
    return lambda: function(*args, **kwargs)


def _n_variants(op: Op) -> int:
    """How many first arguments of an op it takes until a core no longer remembers the branches of
    one when it comes to it again.
    """
    if op.packet not in _BRANCHING or not isinstance(op.args[0], TensorSpec):
        return 1
    return min(_MOST_VARIANTS, math.ceil(_REMEMBERED / max(op.args[0].numel, 1)))


def _resolve(name: str) -> Any:
    try:
        namespace, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except (ValueError, AttributeError) as error:
        raise Unplayable(f"{name}: this torch has no such operator") from error


def _mutated(function: Any) -> set[int | str]:
    """Positions and names of the arguments that the operator writes to."""
    found: set[int | str] = set()
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found |= {position, argument.name}
    return found


def _materialise(argument: Argument, generator: torch.Generator, mutated: bool) -> Any:
    if isinstance(argument, TensorSpec):
        return tensor(argument, generator, mutated)
    if isinstance(argument, tuple):
        return [_materialise(a, generator, mutated) for a in argument]
    if isinstance(argument, Symbol):
        return (
            torch.device(argument.name)
            if argument.kind == "device"
            else getattr(torch, argument.name)
        )
    return argument


_BLOCK, _N_BLOCKS = 2**16, 8
"""Elements of which a large tensor is made by repetition, and how many times as many are drawn:
more than a core remembers the branches of.
"""


@cache
def _drawn(dtype: torch.dtype) -> torch.Tensor:
    """Values from which all tensors of a dtype are cut, each at another place: drawing them anew
    would take longer than the kernels.
    """
    generator = torch.Generator().manual_seed(0)
    return torch.empty(_N_BLOCKS * _BLOCK).normal_(0.0, 0.5, generator=generator).to(dtype)


def tensor(spec: TensorSpec, generator: torch.Generator, zeros: bool = False) -> torch.Tensor:
    """A tensor of the spec's shape, strides and dtype: random around 0 if floating, zeros if
    integral, True if boolean.
    """
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise Unplayable(f"this torch has no dtype {spec.dtype}")
    extent = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.strides)) if spec.numel else 0
    if dtype.is_floating_point and not zeros:
        begin = int(torch.randint((_N_BLOCKS - 1) * _BLOCK, (), generator=generator))
        block = _drawn(dtype)[begin : begin + min(extent, _BLOCK)]
        memory = block.repeat(math.ceil(extent / _BLOCK))[:extent]
    elif dtype == torch.bool:
        memory = torch.ones(extent, dtype=dtype)
    else:
        memory = torch.zeros(extent, dtype=dtype)
    return memory.as_strided(spec.shape, spec.strides)


def _indices(like: torch.Tensor, below: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, max(below, 1), like.shape, generator=generator, dtype=like.dtype)


@prepare("aten.embedding", "aten.embedding_dense_backward")
def _embedding(op: Op, args: list[Any]) -> None:
    is_backward = op.packet.endswith("backward")
    args[1] = _indices(args[1], args[2] if is_backward else args[0].shape[0])


@prepare(
    "aten.nll_loss_forward",
    "aten.nll_loss2d_forward",
    "aten.nll_loss_backward",
    "aten.nll_loss2d_backward",
)
def _nll(op: Op, args: list[Any]) -> None:
    is_backward = op.packet.endswith("backward")
    scores, target = (1, 2) if is_backward else (0, 1)
    args[target] = _indices(args[target], args[scores].shape[1 if args[scores].dim() > 1 else 0])
    if is_backward:
        args[6] = torch.ones_like(args[6])


@prepare(
    "aten.index_select",
    "aten.gather",
    "aten.scatter",
    "aten.scatter_add",
    "aten.index_add",
    "aten.index_copy",
    "aten.gather_backward",
)
def _along_dim(_op: Op, args: list[Any]) -> None:
    dim, index = args[1], args[2]
    args[2] = _indices(index, args[0].shape[dim] if args[0].dim() else 1)


@prepare("aten.index", "aten.index_put", "aten.index_put_")
def _index(_op: Op, args: list[Any]) -> None:
    args[1] = [
        _indices(i, args[0].shape[d]) if i is not None and i.dtype == torch.int64 else i
        for d, i in enumerate(args[1])
    ]


@prepare("aten._embedding_bag", "aten._embedding_bag_backward")
def _embedding_bag(op: Op, args: list[Any]) -> None:
    """Bags of one size."""
    backward = op.packet.endswith("backward")
    tokens, bags = args[1], len(args[2])
    args[1] = _indices(tokens, args[6] if backward else args[0].shape[0])
    args[2] = torch.arange(bags) * (len(tokens) // bags)
    if backward:
        args[4] = torch.full_like(args[4], len(tokens) // bags)


@prepare("aten._ctc_loss", "aten._ctc_loss_backward")
def _ctc(op: Op, args: list[Any]) -> None:
    """Whole lengths, labels that are no blanks; the backward's losses are the forward's."""
    position = int(op.packet.endswith("backward"))
    scores, targets = args[position].log_softmax(-1), args[position + 1]
    args[position] = scores
    args[position + 1] = 1 + _indices(targets, scores.shape[-1] - 1)
    args[position + 2], args[position + 3] = (
        torch.full_like(args[position + 2], len(scores)),
        torch.full_like(args[position + 3], targets.shape[-1]),
    )
    if position:
        args[5], args[6] = torch.ops.aten._ctc_loss.Tensor(*args[1:5])


@prepare(
    "aten.max_pool2d_with_indices_backward",
    "aten.max_pool3d_with_indices_backward",
    "aten.adaptive_max_pool2d_backward",
    "aten.adaptive_max_pool3d_backward",
)
def _max_pool_backward(op: Op, args: list[Any]) -> None:
    """The indices that the forward returns."""
    forward = _resolve(op.packet.removesuffix("_backward") + ".default")
    if op.packet.startswith("aten.adaptive"):
        args[2] = forward(args[1], args[0].shape[-3 if "3d" in op.packet else -2 :])[1]
    else:
        args[7] = forward(args[1], *args[2:7])[1]


@prepare("aten.mkldnn_rnn_layer_backward")
def _rnn_backward(_op: Op, args: list[Any]) -> None:
    inputs, (hx, cx) = args[:5], args[5:7]
    (
        reverse,
        mode,
        hidden_size,
        num_layers,
        has_biases,
        train,
        bidirectional,
        batch_sizes,
        batch_first,
    ) = args[13:22]
    with (
        torch.enable_grad()
    ):  # only then does the forward keep the workspace that its backward needs
        made = torch.ops.aten.mkldnn_rnn_layer(
            *inputs,
            hx,
            cx,
            reverse,
            batch_sizes,
            mode,
            hidden_size,
            num_layers,
            has_biases,
            bidirectional,
            batch_first,
            train,
        )
    args[7], args[8], args[9], args[22] = made


@prepare("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def _attention_backward(_op: Op, args: list[Any]) -> None:
    # A log-sum-exp that belongs to these scores: made-up ones would overflow the recomputed
    # softmax.
    query, key, value = args[1:4]
    causal = args[7] if len(args) > 7 else False
    args[4], args[5] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal
    )


def _change_values(change: Callable[[torch.Tensor], torch.Tensor], where: slice) -> Prepare:
    """Changes the values of floating tensors among the arguments at `where`."""

    def changed(argument: Any) -> Any:
        if isinstance(argument, list):
            return [changed(one) for one in argument]
        is_floating = isinstance(argument, torch.Tensor) and argument.dtype.is_floating_point
        return change(argument) if is_floating else argument

    def prepare_values(_op: Op, args: list[Any]) -> None:
        args[where] = changed(args[where])

    return prepare_values


_VALUES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], slice]] = {
    "native_batch_norm_backward native_layer_norm_backward native_group_norm_backward": (
        lambda value: value.abs() + 0.5,
        slice(3, 7),
    ),
    "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training"
    " _batch_norm_with_update": (lambda value: value.abs() + 1.0, slice(4, 5)),
    "bernoulli multinomial log log_ sqrt sqrt_ rsqrt pow _foreach_sqrt _foreach_rsqrt _foreach_log"
    " _foreach_pow": (lambda value: value.abs().clamp_(max=1.0), slice(1)),
    "binary_cross_entropy binary_cross_entropy_backward": (
        lambda value: value.abs().clamp_(0.01, 0.99) if value.dim() else value,
        slice(None),
    ),
}
"""Variances, arguments of roots and logarithms, and probabilities: by the operators' names."""
for names, (change, where) in _VALUES.items():
    prepare(*(f"aten.{name}" for name in names.split()))(_change_values(change, where))

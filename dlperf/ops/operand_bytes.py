"""Bytes that an operator moves, if nothing it touches is in cache and each element is read and
written once.

The default: distinct input tensors once, outputs once. What an in-place operator updates is read
and written; what it only overwrites is written. Formulas below are for operators that touch less,
or more, than their arguments show.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlperf.core.trace import Op, TensorSpec, tensors_in
from dlperf.ops.elementwise import MAYBE_VIEWS, VIEWS
from dlperf.ops.registry import (
    BYTES,
    argument,
    byte_formula,
    find,
    is_in_place,
    names_of,
    tensor,
)

_OVERWRITTEN = """
fill_ zero_ copy_ copy normal_ uniform_ bernoulli_ random_ exponential_ geometric_ log_normal_
cauchy_ zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
_foreach_zero_ _foreach_copy_ normal_functional
"""
_SHAPE_OF_FORWARD = """
max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d
_adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d
fractional_max_pool3d reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d
replication_pad2d replication_pad3d index_select gather
"""
_UNREAD = {f"aten.{name}": 0 for name in _OVERWRITTEN.split()} | {
    f"aten.{name}_backward": 1 for name in _SHAPE_OF_FORWARD.split()
}
"""The place of the argument that an operator takes only for its shape, dtype or memory."""


def op_bytes(op: Op) -> int:
    """Bytes moved by the op, under the convention of :mod:`dlperf.ops.counts`.

    >>> x = TensorSpec.contiguous(100)
    >>> op_bytes(Op("aten.relu.default", (x,), outputs=(x,)))
    800
    """
    held = {spec.storage for spec in op.inputs if spec.storage >= 0}
    is_alias = op.packet in MAYBE_VIEWS and all(spec.storage in held for spec in op.outputs)
    if is_view(op) or is_alias:
        return 0
    return (find(BYTES, op.packet) or once_each)(op)


def streamed_bytes(op: Op) -> int:
    """Bytes of an op's operands, and of a result as large as the largest, but in place. Kernels of
    a machine file have no results whose bytes could be counted.

    >>> one = TensorSpec.contiguous(10)
    >>> [streamed_bytes(Op(f"aten.{name}.default", (one, one))) for name in ("mul", "mul_")]
    [120, 80]
    """
    held = [spec.nbytes for spec in op.inputs]
    return sum(held) + (0 if is_in_place(op.packet) else max(held, default=0))


def is_view(op: Op) -> bool:
    """Whether the op touches no element: a view, metadata, uninitialised memory."""
    return any(name in VIEWS for name in names_of(op.packet))


def bytes_read(op: Op, moved: int) -> list[tuple[TensorSpec, int]]:
    """The tensors that the op reads, as often as they stand among its arguments, and how many bytes
    of each, at most the op's `moved` ones in all (:func:`op_bytes`): of a table the rows looked up.

    >>> table, rows = TensorSpec.contiguous(1000, 8), TensorSpec.contiguous(2, 8)
    >>> indices = TensorSpec.contiguous(2, dtype="int64")
    >>> op = Op("aten.embedding.default", (table, indices), outputs=(rows,))
    >>> [n_bytes for _, n_bytes in bytes_read(op, op_bytes(op))]
    [144, 16]
    """
    return [(spec, min(spec.nbytes, moved)) for spec in _read(op)]


def _sum(specs: Iterable[TensorSpec]) -> int:
    """Bytes of tensors, one that stands twice counted once; tensors whose memory is not known are
    all different.
    """
    distinct = {spec if spec.storage >= 0 else index: spec for index, spec in enumerate(specs)}
    return sum(spec.nbytes for spec in distinct.values())


def _read(op: Op) -> tuple[TensorSpec, ...]:
    """The tensors among the op's arguments whose elements it reads."""
    unread = _UNREAD.get(op.packet)
    if unread is None and not any(key in _DESTINATIONS for key, _ in op.kwargs):
        return op.inputs
    kept = tuple(value for index, value in enumerate(op.args) if index != unread)
    return (
        *tensors_in(kept),
        *tensors_in(tuple(value for key, value in op.kwargs if key not in _DESTINATIONS)),
    )


def once_each(op: Op) -> int:
    """Bytes of the tensors that the op reads and of those that it writes."""
    written: Iterable[TensorSpec] = op.outputs
    if not op.outputs and op.args and is_in_place(op.packet):  # foreach operators return nothing
        written = tensors_in(op.args[0])
    return _sum(_read(op)) + _sum(written)


_DESTINATIONS = frozenset({"out", "grad_input", "values_out"})
"""Keywords of the tensors that an `out=` overload writes to."""


# -- gathers and scatters --------------------------------------------------------------------------


def _packed(spec: TensorSpec) -> int:
    return spec.numel * spec.item_bytes


@byte_formula(
    "aten.embedding",
    "aten.index",
    "aten._unsafe_index",
    "aten.index_select",
    "aten.gather",
    "aten.take",
    "aten.take_along_dim",
)
def gather(op: Op) -> int:
    """The elements gathered, read and written, and the indices."""
    return 2 * sum(map(_packed, op.outputs)) + sum(spec.nbytes for spec in op.inputs[1:])


def _rows(op: Op) -> int:
    """Bytes of the rows that are looked up in the first argument."""
    weight, indices = tensor(op, 0), tensor(op, 1)
    return indices.numel * weight.shape[-1] * weight.item_bytes


@byte_formula("aten._embedding_bag", "aten._embedding_bag_forward_only", "aten.embedding_bag")
def embedding_bag(op: Op) -> int:
    """The rows looked up, the indices and offsets, the outputs."""
    return _rows(op) + sum(spec.nbytes for spec in (*op.inputs[1:], *op.outputs))


@byte_formula("aten.embedding_renorm")
def embedding_renorm(op: Op) -> int:
    """The rows looked up, read and written, and the indices."""
    return 2 * _rows(op) + tensor(op, 1).nbytes


@byte_formula(
    "aten.embedding_dense_backward",
    "aten.embedding_backward",
    "aten._embedding_bag_dense_backward",
    "aten._embedding_bag_backward",
)
def embedding_backward(op: Op) -> int:
    """The table's gradient is written (zeros), the touched rows read and written again, gradient
    and indices read.
    """
    touched = _rows(op) if tensor(op, 0).shape else 0
    moved = sum(spec.nbytes for spec in (*op.inputs, *op.outputs))
    return moved + 2 * min(touched, sum(map(_packed, op.outputs)))


def _scatter(op: Op, n_values: int, moved: int, accumulates: bool) -> int:
    """`moved` bytes of indices and values, each place written, and read before where it
    accumulates; out of place the whole tensor is copied first.
    """
    target = tensor(op, 0)
    indices = n_values * target.item_bytes * (2 if accumulates else 1)
    return moved + indices + (0 if is_in_place(op.packet) else target.nbytes + _packed(target))


@byte_formula("aten.index_put", "aten._index_put_impl", "aten._unsafe_index_put")
def index_put(op: Op) -> int:
    """Indices and values read, the places written (and read where it accumulates).

    A boolean mask or an expanded value names fewer or more places than `values` has elements; the
    indices' broadcast decides.
    """
    values = tensor(op, 2)
    indices = tuple(tensors_in(op.args[1]))
    n_values = max(values.numel, max((spec.numel for spec in indices), default=0))
    return _scatter(
        op,
        n_values,
        values.nbytes + sum(spec.nbytes for spec in indices),
        bool(argument(op, 3, "accumulate", False)),
    )


@byte_formula("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
@byte_formula("aten.index_add", "aten.index_copy", "aten.index_reduce")
def scatter(op: Op) -> int:
    """Indices and source (elements or rows) read, the places written (and read in sums)."""
    index, source = tensor(op, 2), argument(op, 3, "src")
    by_rows = "index" in op.packet
    source_bytes = 0
    if isinstance(source, TensorSpec):
        source_bytes = source.nbytes if by_rows else index.numel * source.item_bytes
    n_values = tensor(op, 3).numel if by_rows else index.numel
    accumulates = op.packet.rstrip("_") not in ("aten.scatter", "aten.index_copy")
    return _scatter(op, n_values, index.nbytes + source_bytes, accumulates)


@byte_formula("aten.index_fill")
def index_fill(op: Op) -> int:
    """Whole rows written."""
    target, dim, index = tensor(op, 0), argument(op, 1, "dim", 0), tensor(op, 2)
    rows = target.numel // max(target.shape[dim] if target.shape else 1, 1) * index.numel
    return _scatter(op, rows, index.nbytes, accumulates=False)


@byte_formula(
    "aten.nll_loss_forward", "aten.nll_loss2d_forward", "aten.nll_loss", "aten.nll_loss2d"
)
def nll_loss(op: Op) -> int:
    """One log-probability per target is read, not all of them."""
    scores, targets = tensor(op, 0), tensor(op, 1)
    return (
        targets.nbytes
        + targets.numel * scores.item_bytes
        + sum(spec.nbytes for spec in (*op.inputs[2:], *op.outputs))
    )


@byte_formula("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(op: Op) -> int:
    """The whole gradient is written (zeros, then one entry per target); the scores are not read."""
    return tensor(op, 2).nbytes + tensor(op, 0).nbytes + sum(spec.nbytes for spec in op.outputs)


# -- optimizers ------------------------------------------------------------------------------------


@byte_formula("aten._fused_adam", "aten._fused_adamw", "aten._fused_adagrad", "aten._fused_sgd")
def fused_optimizer(op: Op) -> int:
    """Parameters and states read and written, gradients read: 28 bytes per fp32 parameter for Adam,
    20 for Adagrad, 12 for SGD, 20 with momentum (16 in the first step, which only writes the
    buffer).
    """
    options = dict(op.kwargs)
    lists = [_sum(tensors_in(value)) if isinstance(value, tuple) else 0 for value in op.args[:5]]
    once = (lists[1], lists[2] if options.get("is_first_step") else 0)
    return 2 * sum(lists) - sum(once)


@byte_formula("aten._local_scalar_dense", "aten.item")
def scalar(op: Op) -> int:
    """One element."""
    return op.inputs[0].item_bytes if op.inputs else 0

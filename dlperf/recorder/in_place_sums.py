"""Sums that torch forms in place, but not under a dispatch mode and so not in a recording.

Where several operators read the same tensor, autograd's engine adds the later gradient to the
earlier one, if nobody else holds that (torch/csrc/autograd/input_buffer.cpp). A linear layer whose
input is not contiguous adds its bias to the product (ATen/native/Linear.cpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dlperf.core.trace import Op, Storage, TensorSpec

_SUM, _IN_PLACE = "aten.add.Tensor", "aten.add_.Tensor"


def summed_in_place(
    ops: Sequence[Op], storages: Sequence[Storage]
) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
    """Operators and storages of a step as it runs outside of a recording.

    A sum is the engine's, and in place, where its first operand comes from another autograd node of
    the backward, is no view (which would hold its base), and is freed right after it. It is a
    linear layer's where a vector is added to a product with a transposed parameter that is freed
    right after it. The memory that a recording had for its result stays, without bytes.
    """
    found, kept, same = list(ops), list(storages), dict[int, int]()
    views = set[_Layout]()
    for index, recorded in enumerate(ops):
        op = found[index] = _with_storages(recorded, same)
        if not (
            _adds_bias(index, op, found, kept)
            or (_is_in_place(index, op, found, kept) and _layout(op.inputs[0]) not in views)
        ):
            _note_views(op, views)
            continue
        target, result = op.inputs[0], op.outputs[0].storage
        made = kept[result]
        kept[target.storage] = replace(
            kept[target.storage], dies=made.dies, kind=made.kind or kept[target.storage].kind
        )
        kept[result] = Storage(0)
        same[result] = target.storage
        found[index] = replace(op, name=_IN_PLACE, outputs=(target,))
    return tuple(found), tuple(kept)


_Layout = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Storage, shape and strides of a tensor."""


def _layout(spec: TensorSpec) -> _Layout:
    return spec.storage, spec.shape, spec.strides


def _note_views(op: Op, views: set[_Layout]) -> None:
    """Note of which layouts the last tensor is a view."""
    read = {spec.storage for spec in op.inputs}
    for spec in op.outputs:
        if spec.storage in read and not op.packet.endswith("_"):
            views.add(_layout(spec))
        else:
            views.discard(_layout(spec))


def _is_in_place(index: int, op: Op, ops: Sequence[Op], storages: Sequence[Storage]) -> bool:
    """Whether the engine forms the sum `op`, in the memory of its first operand."""
    inputs = op.inputs
    if (
        op.phase != "backward"
        or op.name != _SUM
        or op.kwargs
        or len(inputs) != 2
        or len(op.outputs) != 1
    ):
        return False
    first, result = inputs[0], op.outputs[0]
    if not (first.shape == inputs[1].shape == result.shape and first.dtype == result.dtype):
        return False
    numbers = first.storage, inputs[1].storage, result.storage
    if min(numbers) < 0 or len(set(numbers)) < 3:
        return False
    held = storages[first.storage]
    return (
        held.born >= 0
        and ops[held.born].phase == "backward"
        and ops[held.born].node != op.node
        and held.dies == index + 1
        and held.nbytes == storages[result.storage].nbytes
    )


def _adds_bias(index: int, op: Op, ops: Sequence[Op], storages: Sequence[Storage]) -> bool:
    """Whether `op` adds a linear layer's bias to its product, which nothing else holds."""
    if op.phase != "forward" or op.name != _SUM or op.kwargs or len(op.inputs) != 2:
        return False
    product, bias = op.inputs
    if product.storage < 0 or len(product.shape) < 3 or len(bias.shape) != 1:
        return False
    held = storages[product.storage]
    if held.born < 0 or held.dies != index + 1 or ops[held.born].packet != "aten.mm":
        return False
    weight = ops[held.born].inputs[1]
    is_parameter = weight.storage >= 0 and storages[weight.storage].born < 0
    return is_parameter and weight.strides[0] == 1


def _with_storages(op: Op, same: dict[int, int]) -> Op:
    """The operator with other numbers of storages."""

    def other(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            number = same.get(value.storage)
            return value if number is None else replace(value, storage=number)
        if isinstance(value, tuple):
            return tuple(map(other, value))
        return value

    if not any(spec.storage in same for spec in (*op.inputs, *op.outputs)):
        return op
    return replace(
        op,
        args=other(op.args),
        kwargs=tuple((name, other(value)) for name, value in op.kwargs),
        outputs=other(op.outputs),
    )

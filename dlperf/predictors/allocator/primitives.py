"""What oneDNN keeps for good of a convolution or recurrent layer that it computes for the first
time: its primitive and those that convert the layouts of its operands.

The chunks lie between the blocks of the first step, and so keep freed memory apart ever after.
Sizes were read with a malloc that logs (torch 2.13, x86-64 with AVX-512). Those below 1 KiB are
left out: a program has free chunks for them elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dlperf.core.trace import Op
from dlperf.predictors.allocator.stages import Scratch

_CONVERSION = (6352, 4824)
_SHAPES = (2144,) * 4


class _Pass(NamedTuple):
    """Bytes of each chunk that is made before the blocks of the operands, and after them."""

    before: tuple[int, ...]
    after: tuple[int, ...] = ()


_FORWARD = _Pass((2216, 6560, 13552, 13552, 4664))
_BACKWARD = _Pass((2216, 6560, 13552), (13552, 4592))
_STRIDED_BACKWARD = _Pass((2216, 6560, 12776, 13656, *_SHAPES), (12000, 13552, 13552, 4664))
_TRANSPOSED_FORWARD = _Pass(
    (2216, 6560, 12776, 13656, *_SHAPES, 12776, 13656, 13656) + (6032, 2144) * 4 + (4584, 2144) * 4
)
_TRANSPOSED_BACKWARD = _Pass(
    (2216, 6560, 13552, *_SHAPES), (13656, *(6032, 2144) * 4, *(4584, 2144) * 2)
)
_RECURRENT = {
    "aten.mkldnn_rnn_layer": (50_368, 30_904, 4_368),
    "aten.mkldnn_rnn_layer_backward": (12_184, 39_352, 4_344),
}
_PRODUCT_KERNELS = (3_624, 12_288) * 16  # code of oneDNN's own products
_STRIDE = {"aten.convolution": 3, "aten.convolution_backward": 4}
"""The place of ``stride`` among the arguments; ``transposed`` is the third after it."""


class Primitives(NamedTuple):
    """Bytes of each chunk that is kept from one stage of an operator: made `before` the blocks of
    its operands, `after` them, and, in a tuple of `conversions` for each, right after a block that
    is read or the first one that is written; `last` of all, once the result is there.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    conversions: tuple[tuple[int, ...], ...] = ()
    last: tuple[int, ...] = ()


def primitives(ops: Sequence[Op], scratch: Sequence[Scratch]) -> dict[tuple[int, int], Primitives]:
    """What is kept, by op and number of its stage. The next call of an equal shape finds it made.

    >>> from dlperf.core.trace import TensorSpec
    >>> from dlperf.predictors.allocator.stages import Stage
    >>> image, weight = TensorSpec.contiguous(8, 16, 9, 9), TensorSpec.contiguous(16, 16, 3, 3)
    >>> op = Op("aten.convolution.default", (image, weight, None, (1, 1), (1, 1), (1, 1), False))
    >>> blocks = (Stage(read=(2**16, 2**12), written=(2**16,)),)
    >>> first, second = primitives([op, op], [blocks, blocks]).values()
    >>> len(first.before), first.conversions, second == Primitives()
    (5, ((6352, 4824), (6352, 4824), (6352, 4824)), True)
    """
    known: set[Any] = set()

    def is_new(key: Any) -> bool:
        is_known = key in known
        known.add(key)
        return not is_known

    found = {}
    for index, (op, stages) in enumerate(zip(ops, scratch)):
        if op.packet in _RECURRENT and is_new(op.signature):
            weights = (spec.shape for spec in op.inputs[1:3])
            converted = sum(is_new((op.packet, shape)) for shape in weights)
            kernels = _PRODUCT_KERNELS if is_new(_PRODUCT_KERNELS) else ()
            last = (*_CONVERSION * converted, *_RECURRENT[op.packet], *kernels)
            found[index, 0] = Primitives(last=last)
        for number, stage in enumerate(stages if op.packet in _STRIDE else ()):
            blocks = [(True, n) for n in stage.read] + [(False, n) for n in stage.written[:1]]
            if not blocks:  # a product on the columns of an image
                continue
            kept = _pass_of(op) if is_new((op.signature, number)) else _Pass(())
            conversions = [_CONVERSION if is_new(block) else () for block in blocks]
            found[index, number] = Primitives(*kept, tuple(conversions) if any(conversions) else ())
    return found


def _pass_of(op: Op) -> _Pass:
    place = _STRIDE[op.packet]
    stride, is_backward = op.args[place], op.packet.endswith("backward")
    if op.args[place + 3]:
        return _TRANSPOSED_BACKWARD if is_backward else _TRANSPOSED_FORWARD
    if not is_backward:
        return _FORWARD
    is_strided = isinstance(stride, tuple) and any(step != 1 for step in stride)
    return _STRIDED_BACKWARD if is_strided else _BACKWARD

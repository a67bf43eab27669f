"""What oneDNN keeps for good of a convolution or recurrent layer that it computes for the first
time: its primitive and those that convert the layouts of its operands.

The chunks lie between the blocks of the first step, and so keep freed memory apart ever after.
Sizes and order were read with a malloc that logs (torch 2.13, x86-64 with AVX-512); negative ones
are aligned to 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dlperf.core.trace import Op
from dlperf.predictors.allocator.stages import Scratch

Chunks = tuple[int, ...]


class _Pass(NamedTuple):
    """Bytes of each chunk that is made before the blocks of the operands, after them, and before
    the result.
    """

    before: Chunks = ()
    after: Chunks = ()
    between: Chunks = ()


_NAME, _ENTRY = (24, 104, 224), (104, 104, 104)  # of a kernel; in the cache of primitives
_CODE, _POINT_CODE = 13_552, 19_696  # of a convolution, and of one of 1x1 kernels


def _primitive(code: int, kernel: int, rest: Chunks = (96, 264)) -> Chunks:
    """A primitive with a kernel of its own."""
    return (48, 48, 136, 88, -code, 24, -kernel, 44, *_NAME, *_ENTRY, *rest)


def _context(code: int) -> Chunks:
    """What ATen keeps of a convolution beside its primitive."""
    return (48, -2216, 6560, -code, 24, 32, 40, 420, 56)


_CONVERSION = _primitive(6352, 4824, (116,))
_SUM = (48, 48, 136, 88, -4672, 24, -3784, 29, *_NAME, 296, 104, 32, *_ENTRY, 96, 110)
"""Sums the parts of a gradient of the weight."""
_SHAPES = (136, 128) + (656, -2144, -768) * 4
_PRODUCT = (16, -6032, 28, *_NAME, -2144, -768, *_ENTRY, 48, 24, 48, 48)
_COPY = (-4584, 37, *_NAME, -2144, -768)
_PRODUCTS: Chunks = (48, 48, 136, 792, -13_656, 104, 48, 48, 48, 104, 40, 40, 40, 40, 24, 128, 128)
_PRODUCTS += (448, *_PRODUCT * 4, *_COPY * 2, 284)
"""Kernels of a strided pass over two times two places, and those that copy for them."""
_FIRST: Chunks = (72, 64) * 17 + (72, 256) * 47 + (72, 96) * 16 + (72, 224) * 12 + (72, 160) * 8
_FIRST += (72, 448) * 12 + (72, 768) * 9 + (56,) * 25
"""Of the very first primitive of a process."""

_FORWARD = _Pass(_context(_CODE) + _primitive(_CODE, 4664))
_BACKWARD = _Pass(_context(_CODE), _primitive(_CODE, 4592))
_WEIGHT = _Pass((), _primitive(_CODE, 4616), _SUM)
_POINT_FORWARD = _Pass(_context(_POINT_CODE) + _primitive(_POINT_CODE, 4184))
_POINT_BACKWARD = _Pass(_context(_POINT_CODE), _primitive(_POINT_CODE, 4184))
_POINT_WEIGHT = _Pass(
    (), _primitive(_POINT_CODE, 4184, (8, -3712, 35, *_NAME, 48, *_ENTRY, 1536, *_ENTRY, 96, 271))
)
_STRIDED_BACKWARD = _Pass(
    _context(_CODE) + _SHAPES, _primitive(5856, 3936) + _PRODUCTS, _primitive(4672, 3784)
)
_TRANSPOSED_FORWARD = _Pass(
    (64, 640, 64, 64, 64, 64, -12_776, -13_656, *_SHAPES, *_context(12_776), -13_656, *_PRODUCTS)
    + _COPY * 4
)
_RECURRENT = {
    "aten.mkldnn_rnn_layer": (50_368, -30_904, 4_368),
    "aten.mkldnn_rnn_layer_backward": (12_184, -39_352, 4_344),
}
_PRODUCT_KERNELS = (48,) * 541 + (-3_624, 46, *_NAME, 472, 472, 472, 12_288) * 16
"""Code of oneDNN's own products."""
_STRIDE = {"aten.convolution": 3, "aten.convolution_backward": 4}
"""The place of ``stride`` among the arguments; ``transposed`` is the third after it."""


class Primitives(NamedTuple):
    """Bytes of each chunk that is kept from one stage of an operator: made `before` the blocks of
    its operands, in a tuple of `conversions` for each right after a block that is read, `after` all
    blocks, `between` these and the result, and `last` of all.
    """

    before: Chunks = ()
    after: Chunks = ()
    between: Chunks = ()
    conversions: tuple[Chunks, ...] = ()
    last: Chunks = ()


def primitives(ops: Sequence[Op], scratch: Sequence[Scratch]) -> dict[tuple[int, int], Primitives]:
    """What is kept, by op and number of its stage. The next call of an equal shape finds it made.

    >>> from dlperf.core.trace import TensorSpec
    >>> from dlperf.predictors.allocator.stages import Stage
    >>> image, weight = TensorSpec.contiguous(8, 16, 9, 9), TensorSpec.contiguous(16, 16, 3, 3)
    >>> op = Op("aten.convolution.default", (image, weight, None, (1, 1), (1, 1), (1, 1), False))
    >>> blocks = (Stage(read=(2**16, 2**12), written=(2**16,)),)
    >>> first, second = primitives([op, op], [blocks, blocks]).values()
    >>> len(first.conversions), len(first.last), second == Primitives()
    (2, 15, True)
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
            first = _FIRST if is_new(_FIRST) else ()
            layer = (*_RECURRENT[op.packet], 39, *_NAME, 328, *(56,) * 262, *_ENTRY, 400)
            last = (*first, *_CONVERSION * converted, *layer, *kernels)
            found[index, 0] = Primitives(last=last)
        for number, stage in enumerate(stages if op.packet in _STRIDE else ()):
            if not (stage.read or stage.written):  # a product on the columns of an image
                continue
            kept = _pass_of(op, number) if is_new((op.signature, number)) else _Pass()
            if kept.before and is_new(_FIRST):
                kept = kept._replace(before=kept.before + _FIRST)
            reads = tuple(_CONVERSION if is_new((True, n)) else () for n in stage.read)
            new = [n for n in stage.written[:1] if is_new((False, n))]
            found[index, number] = Primitives(
                *kept, reads if any(reads) else (), _CONVERSION if new else ()
            )
    return found


def _pass_of(op: Op, number: int) -> _Pass:
    place = _STRIDE[op.packet]
    stride, is_backward = op.args[place], op.packet.endswith("backward")
    weight = op.inputs[2 if is_backward else 1]
    is_point = math.prod(weight.shape[2:]) == 1
    is_transposed = bool(op.args[place + 3])
    if not is_backward:
        if is_transposed:
            return _TRANSPOSED_FORWARD
        return _POINT_FORWARD if is_point else _FORWARD
    if number == 1:
        return _POINT_WEIGHT if is_point else _WEIGHT
    is_strided = isinstance(stride, tuple) and any(step != 1 for step in stride)
    if is_strided and not is_transposed:
        return _STRIDED_BACKWARD
    return _POINT_BACKWARD if is_point else _BACKWARD

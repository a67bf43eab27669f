"""What an operator does one after another within one call, each part with a curve of its own; no dispatcher, so no trace, sees them."""

from __future__ import annotations

from dataclasses import replace

from dlperf.trace import Op, Symbol, TensorSpec

_ROWS = {
    "native_layer_norm": (0,),
    "native_layer_norm_backward": (0, 1),
    "_softmax": (0,),
    "_log_softmax": (0,),
    "_softmax_backward_data": (0, 1),
    "_log_softmax_backward_data": (0, 1),
}
"""Operators that need row-major operands, and which these are (aten/src/ATen/native: layer_norm.cpp, SoftMax.cpp)."""
_IMAGES = {
    "native_batch_norm": (0,),
    "native_batch_norm_backward": (0, 1),
    "max_pool2d_with_indices": (0,),
    "max_pool2d_with_indices_backward": (0, 1),
    "avg_pool2d": (0,),
    "avg_pool2d_backward": (0, 1),
    "_adaptive_avg_pool2d": (0,),
    "_adaptive_avg_pool2d_backward": (0, 1),
}
"""Operators that need images with their channels first or last (batch_norm.cpp, MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp)."""
_MASK = 10
"""The place of ``output_mask`` among the arguments of ``aten.convolution_backward``."""
_FORMAT = ("memory_format", Symbol("memory_format", "contiguous_format"))


def parts(op: Op) -> tuple[Op, ...]:
    """The operators whose times add up to an op's: mostly itself.

    An operator that cannot use an operand as it lies copies it first. A convolution's backward computes the gradient of the input, then that of the
    weight with the bias's (ATen/native/Convolution.cpp, mkldnn/Conv.cpp, NaiveConvolutionTranspose2d.cpp): two passes, each with kernels of its own.

    >>> turned = TensorSpec((8, 4), (1, 8))
    >>> [part.name for part in parts(Op("aten._softmax.default", (turned, -1, False)))]
    ['aten._softmax.default', 'aten.clone.default']
    >>> parts(Op("aten.relu.default", (turned,))) == (Op("aten.relu.default", (turned,)),)
    True
    """
    if op.packet == "aten.convolution_backward":
        return _passes(op)
    return (op, *_copies(op))


def _passes(op: Op) -> tuple[Op, ...]:
    mask = op.args[_MASK] if len(op.args) > _MASK else None
    if not isinstance(mask, tuple) or not mask[0] or not any(mask[1:]):
        return (op,)
    return tuple(replace(op, args=(*op.args[:_MASK], wanted, *op.args[_MASK + 1 :])) for wanted in ((True, False, False), (False, *mask[1:])))


def _copies(op: Op) -> tuple[Op, ...]:
    """The copies that an op makes before it computes, as operators of their own."""
    name = op.packet.removeprefix("aten.")
    found = []
    for place in _ROWS.get(name, ()) + _IMAGES.get(name, ()):
        spec = op.args[place] if place < len(op.args) else None
        if isinstance(spec, TensorSpec) and not spec.is_contiguous and not (name in _IMAGES and _channels_last(spec)):
            found.append(Op("aten.clone.default", (spec,), (_FORMAT,)))
    return tuple(found)


def _channels_last(spec: TensorSpec) -> bool:
    """Whether an image's channels lie side by side, without gaps."""
    if len(spec.shape) != 4:
        return False
    _, channels, height, width = spec.shape
    return spec.strides == (channels * height * width, 1, channels * width, channels)

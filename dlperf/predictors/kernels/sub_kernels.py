"""Sub-kernels of an operator: the kernels that one call runs in turn, which no trace shows."""

from __future__ import annotations

from dataclasses import replace

from dlperf.core.trace import Op, Symbol, TensorSpec
from dlperf.predictors.allocator.stages import Scratch, Stage
from dlperf.predictors.kernels import onednn, recurrent
from dlperf.predictors.kernels.images import is_scaled_in_copies

_ROWS = {
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
    "embedding_dense_backward": 1,
}
"""Operators that need row-major operands, and how many of the first ones (aten/src/ATen/native:
layer_norm.cpp, SoftMax.cpp, Embedding.cpp).
"""
_IMAGES = {
    "native_batch_norm": 1,
    "native_batch_norm_backward": 2,
    "max_pool2d_with_indices": 1,
    "max_pool2d_with_indices_backward": 2,
    "avg_pool2d": 1,
    "avg_pool2d_backward": 2,
    "_adaptive_avg_pool2d": 1,
    "_adaptive_avg_pool2d_backward": 2,
    "upsample_nearest2d_backward": 1,
    "_upsample_nearest_exact2d_backward": 1,
    "upsample_bilinear2d_backward": 1,
}
"""Operators that need images with their channels first or last (batch_norm.cpp, MaxPoolKernel.cpp,
AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp, UpSampleKernel.cpp).
"""
_RESULT_FIRST = ("softmax", "_pool", "upsample", "embedding_dense_backward")
"""Parts of the names of operators that make their result before they copy an operand (read with a
malloc that logs, torch 2.13).
"""
_CONVOLUTIONS = {"convolution": 1, "convolution_backward": 2}
"""Operators whose operands must lie as their image, the last one, or the weight after it suggests
(Convolution.cpp).
"""
_MEANS = {
    "aten.mse_loss": 2,
    "aten.smooth_l1_loss": 2,
    "aten.huber_loss": 1,
    "aten.binary_cross_entropy": 1,
    "aten.soft_margin_loss": 1,
}
"""Losses, and how many tensors of their input's size they make before they are reduced (read with a
malloc that logs, torch 2.13).
"""
_BAGS = ("aten._embedding_bag_backward", "aten._embedding_bag_dense_backward")
_COUNT_BYTES = 8  # int64, for each row of the table
_MASK = 10
"""The place of ``output_mask`` among the arguments of ``aten.convolution_backward``."""
_FORMAT = ("memory_format", Symbol("memory_format", "contiguous_format"))


def contiguous_clone(spec: TensorSpec) -> Op:
    """The copy of a tensor into row-major order."""
    return Op("aten.clone.default", (spec,), (_FORMAT,))


def sub_kernels(op: Op) -> tuple[Op, ...]:
    """The operators whose times add up to an op's: mostly itself.

    An operator that cannot use an operand as it lies copies it first. A convolution's backward
    computes the gradient of the input, then that of the weight with the bias's
    (ATen/native/Convolution.cpp, mkldnn/Conv.cpp, NaiveConvolutionTranspose2d.cpp): two passes,
    each with kernels of its own.

    >>> turned = TensorSpec((8, 4), (1, 8))
    >>> [part.name for part in sub_kernels(Op("aten._softmax.default", (turned, -1, False)))]
    ['aten._softmax.default', 'aten.clone.default']
    >>> sub_kernels(Op("aten.relu.default", (turned,))) == (Op("aten.relu.default", (turned,)),)
    True
    """
    copies = tuple(contiguous_clone(spec) for spec in _copied(op))
    return (*_passes(op), *copies)


def scratch(op: Op, block: int = onednn.BLOCK) -> Scratch:
    """The blocks that an op allocates and frees within itself. `block` are the channels of one in
    oneDNN's layouts.

    Copies of operands, whatever a convolution converts to blocks of channels, what a recurrent
    layer works with, the mask of a safe softmax (SoftMax.cpp), a loss before it is reduced, two
    counts for each row of an embedding bag (EmbeddingBag.cpp), and a gradient that batch norm makes
    twice, the first time for nothing (batch_norm_backward_cpu, Normalization.cpp).

    >>> turned = TensorSpec((8, 4), (1, 8))
    >>> scratch(Op("aten._softmax.default", (turned, -1, False)))
    (Stage(held=(), read=(), written=(), after=(128,), untouched=()),)
    """
    held = tuple(spec.numel * spec.item_bytes for spec in _copied(op))
    after: tuple[int, ...] = ()
    untouched: tuple[int, ...] = ()
    if any(part in op.packet for part in _RESULT_FIRST):
        held, after = (), held
    if (
        op.packet == "aten.native_batch_norm_backward"
        and op.outputs
        and all(spec.is_contiguous for spec in op.inputs[:2])
    ):
        untouched = (op.outputs[0].nbytes,)
    if op.packet == "aten._safe_softmax":
        after += (op.outputs[0].numel,)  # a mask
    if op.packet in _MEANS and op.outputs[0].numel < op.inputs[0].numel:
        held += _MEANS[op.packet] * (op.inputs[0].nbytes,)
    if op.packet in _BAGS:
        after += 2 * (_COUNT_BYTES * op.outputs[0].shape[0],)
    if op.outputs and is_scaled_in_copies(op, op.outputs[0].shape[-2:]):
        after += op.inputs[0].nbytes, op.outputs[0].nbytes
    first, *others = onednn.scratch(op, block) or recurrent.scratch(op) or (Stage(),)
    first = first._replace(held=held + first.held, after=after + first.after, untouched=untouched)
    return (first, *others) if any(first) else ()


def _passes(op: Op) -> tuple[Op, ...]:
    mask = op.args[_MASK] if op.packet == "aten.convolution_backward" and op.args[_MASK:] else None
    if not isinstance(mask, tuple) or not mask[0] or not any(mask[1:]):
        return (op,)
    return tuple(
        replace(op, args=(*op.args[:_MASK], wanted, *op.args[_MASK + 1 :]))
        for wanted in ((True, False, False), (False, *mask[1:]))
    )


def _copied(op: Op) -> tuple[TensorSpec, ...]:
    """The operands that an op copies before it computes."""
    name = op.packet.removeprefix("aten.")
    n = (_ROWS | _IMAGES | _CONVOLUTIONS).get(name, 0)
    specs = [spec for spec in op.args[: n + 1] if isinstance(spec, TensorSpec)]
    if name in _CONVOLUTIONS and any(
        _channels_last(spec) and not spec.is_contiguous for spec in specs[-2:]
    ):
        return tuple(spec for spec in specs[:n] if not _channels_last(spec))
    return tuple(
        spec
        for spec in specs[:n]
        if not (spec.is_contiguous or (name in _IMAGES and _channels_last(spec)))
    )


def _channels_last(spec: TensorSpec) -> bool:
    """Whether an image's channels lie side by side, without gaps."""
    if len(spec.shape) != 4:
        return False
    _, channels, height, width = spec.shape
    return spec.strides == (channels * height * width, 1, channels * width, channels)

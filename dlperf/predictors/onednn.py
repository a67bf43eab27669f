"""Which convolutions go to oneDNN, and what they allocate on the way: PyTorch's and oneDNN's conditions as functions of shapes."""

from __future__ import annotations

import math

from dlperf.trace import Op, TensorSpec

BLOCK = 16
"""Channels of a block in oneDNN's layouts with 512-bit vectors of float32 (aBcd16b)."""
_PLAIN_WEIGHT_CHANNELS = 4
"""Up to so many input channels the gradient of the weight reads the image as it is; up to a block it takes kernels of 8 channels."""


def padded(channels: int) -> int:
    """Channels rounded up to whole blocks.

    >>> padded(20)
    32
    """
    return BLOCK * math.ceil(channels / BLOCK)


def first_layer_regime(c_in: int, forward: bool) -> str:
    """Which kernels a dense convolution of `c_in` channels and more than one tap takes: ``first``, ``half`` or ``blocked``.

    ONEDNN_VERBOSE tells: with fewer channels than a block the forward reads the plain image (wei Acdb16a); the
    gradient of the weight does so up to 4 channels, and between them and a block uses kernels of 8 lanes (jit:avx2).
    """
    if c_in >= BLOCK:
        return "blocked"
    return "first" if forward or c_in <= _PLAIN_WEIGHT_CHANNELS else "half"


def takes_onednn(image: TensorSpec, weight: TensorSpec, stride: tuple[int, ...], dilation: tuple[int, ...], groups: int, threads: int = 1) -> bool:
    """Whether a convolution, transposed or not, goes to oneDNN (ConvParams::use_mkldnn, ATen/native/Convolution.cpp).

    In bfloat16 and float16 all do, where the processor has instructions for them (assumed); in float64 and complex
    numbers none. In float32 torch looks at the last two sides of the kernel, and at the first four of the image; a 1d convolution counts as
    a 2d one of height 1.

    >>> one = TensorSpec.contiguous(1, 16, 8, 8); small = TensorSpec.contiguous(8, 16, 1, 1)
    >>> takes_onednn(one, small, (1, 1), (1, 1), 1)
    False
    """
    if image.dtype != "float32":
        return image.dtype in ("bfloat16", "float16")
    sides = (1, *weight.shape[2:])[-2:]
    size = image.numel if len(image.shape) < 5 else math.prod(image.shape[:4])
    moved = max(stride) > 1 or max(dilation) > 1 or image.shape[0] >= 16 or any(side != 1 for side in sides) or threads > 1
    large = groups > 1 or all(side > 3 for side in sides) or image.shape[0] > 1 or size > 20480
    return moved and large


def _blocked(spec: TensorSpec) -> int:
    """Bytes of an activation in blocked layout."""
    n, c = spec.shape[:2]
    return n * padded(c) * math.prod(spec.shape[2:]) * spec.item_bytes


def _blocked_weight(spec: TensorSpec) -> int:
    c_out, c_in = spec.shape[:2]
    return padded(c_out) * (c_in if c_in < BLOCK else padded(c_in)) * math.prod(spec.shape[2:]) * spec.item_bytes


_RECURRENT_FLOATS = 15.6
"""Floats that oneDNN keeps of an LSTM for each of its outputs, channels padded to whole blocks: gates and states of every step, for the backward. The
sizes that aten.mkldnn_rnn_layer returns: 159,744 bytes of 10 steps, batch 8, 24 channels; 10,240,000 of 20, 64 and 128."""


def workspace_bytes(op: Op) -> tuple[int, int] | None:
    """(storage, bytes) of what an op keeps for its backward where no recording on fake tensors can know its size; None for other ops.

    >>> step = TensorSpec.contiguous(10, 8, 24); kept = TensorSpec.contiguous(0, dtype="uint8", storage=7)
    >>> workspace_bytes(Op("aten.mkldnn_rnn_layer.default", outputs=(step, step, step, kept)))
    (7, 159744)
    """
    if op.packet != "aten.mkldnn_rnn_layer" or len(op.outputs) < 4 or len(op.outputs[0].shape) != 3 or op.outputs[3].storage < 0:
        return None
    steps, batch, channels = op.outputs[0].shape
    return op.outputs[3].storage, round(_RECURRENT_FLOATS * steps * batch * padded(channels) * 4)


def scratch(op: Op) -> tuple[tuple[int, ...], ...]:
    """Bytes of the blocks that an op allocates and frees within itself, by stage; () for an op without such.

    A convolution in oneDNN converts its NCHW operands to blocks of channels, computes there, and converts back; its
    backward does so once for the gradient of the input and once for that of the weight.
    """
    if op.packet == "aten.convolution":
        image, weight = op.args[0], op.args[1]
        if not (isinstance(image, TensorSpec) and isinstance(weight, TensorSpec) and op.outputs):
            return ()
        if not _goes(image, weight, op.args[3:9]):
            return ()
        plain = image.shape[1] < BLOCK and math.prod(weight.shape[2:]) > 1 and op.args[8] == 1
        incoming = () if plain else (_blocked(image),)
        return ((*incoming, _blocked_weight(weight), _blocked(op.outputs[0])),)
    if op.packet == "aten.convolution_backward":
        gradient, image, weight = op.args[:3]
        mask = op.args[10]
        if not (isinstance(gradient, TensorSpec) and isinstance(image, TensorSpec) and isinstance(weight, TensorSpec) and isinstance(mask, tuple)):
            return ()
        if not _goes(image, weight, op.args[4:10]):
            return ()
        incoming = (_blocked(image),) if image.shape[1] > _PLAIN_WEIGHT_CHANNELS else ()
        by_weight = (_blocked(gradient), *incoming, _blocked_weight(weight))
        by_input = (_blocked(gradient), _blocked_weight(weight), _blocked(image))
        return (by_input, by_weight) if mask[0] else (by_weight,)
    return ()


def _goes(image: TensorSpec, weight: TensorSpec, args: tuple[object, ...]) -> bool:
    stride, _, dilation, _, _, groups = args
    assert isinstance(stride, tuple)
    assert isinstance(dilation, tuple)
    assert isinstance(groups, int)
    return takes_onednn(image, weight, stride, dilation, groups)

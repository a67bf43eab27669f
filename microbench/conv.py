"""Convolutions, forward and backward: dense, pointwise, strided, depthwise, grouped, transposed, 1d
and 3d.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from dlperf.core.trace import Op, TensorSpec
from dlperf.microbench.plan import (
    Group,
    Point,
    filled,
    log_pick,
    pick,
    power_of_two,
    repeats,
    share,
    turn,
)

_MAX_FLOP = {"quick": 1.5e8, "full": 1.5e9, "thorough": 4e9}
_MAX_ELEMENTS = 2**23
_BLOCK = 16
"""Channels of a block in oneDNN's layouts with 512-bit vectors of float32."""
_SLOWER_DEPTHWISE = 5.0
"""By so much less work is asked of a depthwise convolution, whose gradient of the weight takes up
to a nanosecond a product.
"""


def convolution(
    n: int,
    c_in: int,
    c_out: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    bias: bool = True,
    transposed: bool = False,
    dtype: str = "float32",
    channels_last: bool = False,
    dilation: int = 1,
    output_padding: int = 0,
) -> Op:
    """``aten.convolution`` of n images of c_in channels."""
    spec = _channels_last if channels_last else TensorSpec.contiguous
    image = spec(n, c_in, *size, dtype=dtype)
    weight_shape = (
        (c_in, c_out // groups, *kernel) if transposed else (c_out, c_in // groups, *kernel)
    )
    d = len(size)
    return Op(
        "aten.convolution.default",
        (
            image,
            spec(*weight_shape, dtype=dtype),
            TensorSpec.contiguous(c_out, dtype=dtype) if bias else None,
            (stride,) * d,
            (padding,) * d,
            (dilation,) * d,
            transposed,
            (output_padding,) * d,
            groups,
        ),
    )


def _channels_last(*shape: int, dtype: str) -> TensorSpec:
    """A 4d tensor in torch.channels_last."""
    _, c, h, w = shape
    return TensorSpec(shape, (h * w * c, 1, w * c, c), dtype)


def output_size(
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int,
    padding: int,
    transposed: bool = False,
    dilation: int = 1,
    output_padding: int = 0,
) -> tuple[int, ...]:
    """Spatial size of a convolution's output.

    >>> output_size((28, 28), (5, 5), 1, 2)
    (28, 28)
    """
    if transposed:
        more = output_padding - 2 * padding
        return tuple((s - 1) * stride + k + more for s, k in zip(size, kernel))
    return tuple(
        (s + 2 * padding - dilation * (k - 1) - 1) // stride + 1 for s, k in zip(size, kernel)
    )


def _result(forward: Op) -> TensorSpec:
    """What a convolution gives, in the memory format of its input."""
    arguments: Any = forward.args
    image, weight, _, *windows, transposed, (more, *_), n_groups = arguments
    stride, padding, dilation = (first for first, *_ in windows)
    c_out = weight.shape[1] * n_groups if transposed else weight.shape[0]
    out = output_size(
        image.shape[2:], weight.shape[2:], stride, padding, transposed, dilation, more
    )
    spec = TensorSpec.contiguous if image.is_contiguous else _channels_last
    return spec(image.shape[0], c_out, *out, dtype=image.dtype)


def backward_of(forward: Op, wanted: tuple[bool, bool] = (True, True)) -> Op:
    """The backward of a convolution, for the gradients of its input, its weight (with that of its
    bias, if it has one) or both.
    """
    image, weight, bias, *settings = forward.args
    gradient = _result(forward)
    return Op(
        "aten.convolution_backward.default",
        (
            gradient,
            image,
            weight,
            (gradient.shape[1],) if bias is not None else None,
            *settings,
            (wanted[0], wanted[1], wanted[1] and bias is not None),
        ),
    )


def corrupts(op: Op) -> bool:
    """Whether a call would write over memory of others: oneDNN's gradient of the weight of a
    strided 1x1 convolution in channels_last, of fewer channels than a block, does
    (uxlfoundation/oneDNN#6035; here 3.x of torch 2.13 on AVX-512).

    >>> image, weight = TensorSpec((2, 4, 8, 8), (256, 1, 32, 4)), TensorSpec.contiguous(8, 4, 1, 1)
    >>> gradient = TensorSpec((2, 8, 4, 4), (128, 1, 32, 8))
    >>> settings = ((2, 2), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))
    >>> arguments = (gradient, image, weight, None, *settings)
    >>> corrupts(Op("aten.convolution_backward.default", arguments))
    True
    """
    if op.packet != "aten.convolution_backward":
        return False
    arguments: Any = op.args
    image, weight, stride, mask = (arguments[index] for index in (1, 2, 4, 10))
    is_strided_point = math.prod(weight.shape[2:]) == 1 and any(step != 1 for step in stride)
    return (
        bool(mask[1])
        and is_strided_point
        and image.strides[1] == 1
        and not image.is_contiguous
        and image.shape[1] < _BLOCK
    )


def _fits(op: Op, mode: str) -> bool:
    image, weight = op.inputs[:2]
    result, transposed = _result(op), op.args[6]
    if min(result.shape[2:]) < 1:
        return False
    positions = image if transposed else result  # at which the kernel is applied
    flop = 2.0 * positions.numel // positions.shape[1] * weight.numel
    is_depthwise = not transposed and 1 == weight.shape[1] < image.shape[1]
    limit = _MAX_FLOP[mode] / (_SLOWER_DEPTHWISE if is_depthwise else 1.0)
    return flop <= limit and max(image.numel, result.numel) <= _MAX_ELEMENTS


_DATA_SIDES = (28, 32, 32, 40, 48, 64, 64, 80, 96, 112, 128, 160)
"""Sides of images in data sets, or as they are cut."""


def _channels(u: float, low: int, high: int, tidy: bool) -> int:
    """Channel counts: multiples of 8 or 16 as in most networks, or whatever comes."""
    c = log_pick(u, low, high)
    return max(8, 16 * round(c / 16) or 8) if tidy else c


def _first_or(u: float, first: tuple[int, ...], low: int, high: int, tidy: bool) -> int:
    """Channel counts of which a quarter are those of `first` layers: images of few channels have
    kernels of their own.
    """
    if u < 0.25:
        return pick(u * 4 % 1, first)
    return _channels((u - 0.25) / 0.75, low, high, tidy)


def _side(index: int, size: int) -> int:
    """A side of an image: of two of five a power of two from 16 on, as in many networks. Planes of
    4 KiB and multiples of it lie in the same sets of a cache, and are put into blocks more slowly.
    """
    return power_of_two(size) if size >= 12 and turn(index, 5, 3) < 2 else size


def _dense(
    index: int,
    *point: float,
    dtype: str = "float32",
    channels_last: bool = False,
) -> Op | None:
    a, b, c, d, e, f, g = point
    tidy = turn(index, 5) < 3
    kernel = pick(a, (1, 3, 3, 3, 3, 3, 5, 7, 4, 2))
    c_in = _first_or(c, (1, 1, 3, 3, 3, 4), 4, 512, tidy)
    # Maps shrink to a few elements towards the end of a network, and to less than a padded kernel.
    # Images of few channels are mostly as data sets have them.
    size = _side(index, log_pick(b, min(kernel, 2), 128))
    if c_in < 4 and turn(index, 4, 2) > 0:
        size = pick(b, _DATA_SIDES)
    stride = pick(e, (1, 1, 1, 2)) if kernel > 1 else 2
    is_dilated = kernel > 1 and stride == 1 and 2 * (kernel - 1) < size and turn(index, 9, 2) == 0
    dilation = 2 if is_dilated else 1
    op = convolution(
        log_pick(g, 1, 128),
        c_in,
        _channels(d, 1, 512, tidy),
        (size, size),
        (kernel, kernel),
        stride,
        padding=pick(f, (0, 1, 1)) * ((dilation * (kernel - 1) + 1) // 2),
        bias=turn(index, 2, 1) == 0,
        dtype=dtype,
        channels_last=channels_last,
        dilation=dilation,
    )
    return op if channels_last != op.inputs[0].is_contiguous else None


def _one_tap(index: int, a: float, b: float, c: float, d: float) -> Op:
    """1x1 without a stride, half of whose images are too few for oneDNN to get them."""
    size, tidy = _side(index, log_pick(a, 2, 64)), turn(index, 5) < 3
    return convolution(
        log_pick(d, 2, 128),
        _channels(b, 4, 1024, tidy),
        _channels(c, 4, 1024, tidy),
        (size, size),
        (1, 1),
        bias=turn(index, 2, 1) == 0,
    )


def _depthwise(index: int, a: float, b: float, c: float, d: float) -> Op:
    kernel, channels, size = (
        pick(a, (3, 3, 3, 5, 7)),
        _channels(b, 4, 512, turn(index, 4) != 0),
        _side(index, log_pick(c, 3, 112)),
    )
    stride, with_bias, dilation = (
        1 + turn(index, 3, 2) // 2,
        turn(index, 2, 3) == 0,
        2 if turn(index, 7, 1) == 0 and kernel < 7 else 1,
    )
    padding = dilation * (kernel // 2)
    return convolution(
        log_pick(d, 1, 64),
        channels,
        channels,
        (size, size),
        (kernel, kernel),
        stride,
        padding,
        channels,
        with_bias,
        dilation=dilation,
    )


def _grouped(index: int, a: float, b: float, c: float, d: float, e: float) -> Op:
    """Groups of few channels or many, in two of three cases as wide as networks have them (4, 8 or
    multiples of 16), else of any width.
    """
    n_groups, tidy = pick(a, (2, 4, 8, 16, 32)), turn(index, 3, 1) > 0
    size = _side(index, log_pick(c, 4, 64))
    each_in = pick(b, (4, 8, 8, 16, 16, 32, 64)) if tidy else log_pick(b, 2, 64)
    each_out = (
        each_in if turn(index, 2) else pick(d, (4, 8, 16, 32, 64)) if tidy else log_pick(d, 1, 64)
    )
    stride, with_bias = 1 + turn(index, 3, 2) // 2, turn(index, 2, 3) == 0
    return convolution(
        log_pick(e, 1, 64),
        n_groups * each_in,
        n_groups * each_out,
        (size, size),
        (3, 3),
        stride,
        1,
        n_groups,
        with_bias,
    )


def _transposed(index: int, a: float, b: float, c: float, d: float, e: float) -> Op:
    """A quarter give an image of one to three channels, as the last layer of a generator does; a
    fifth are of one image, where torch has kernels of its own. Three quarters of the images are
    whole multiples of the stride. Two of seven are 1d.
    """
    kernel, size = pick(d, (2, 3, 4, 4, 5)), _side(index, log_pick(e, 2, 96))
    sizes = (size * size,) if turn(index, 7) < 2 else (size, size)
    n = 1 if turn(index, 5, 2) == 0 else log_pick(a, 1, 128)
    stride = pick(a * 7 % 1, (2, 1, 2, 2))
    is_whole = turn(index, 4, 3) > 0  # an odd kernel needs one more for that
    return convolution(
        n,
        _channels(b, 2, 256, turn(index, 3) > 0),
        _first_or(c, (1, 3, 3, 2), 4, 256, turn(index, 3, 1) > 0),
        sizes,
        len(sizes) * (kernel,),
        stride,
        (kernel - 1) // 2,
        transposed=True,
        output_padding=int(stride == 2 and (kernel + is_whole) % 2 == 0),
    )


def _one_dimensional(index: int, a: float, b: float, c: float, d: float, e: float) -> Op | None:
    kernel, length = pick(d, (1, 3, 3, 5, 7, 9)), _side(index, log_pick(e, 8, 4096))
    dilation = pick(a * 11 % 1, (1, 1, 1, 2, 4, 8)) if kernel > 1 else 1
    if dilation * (kernel - 1) >= length:
        return None
    channels = (
        _channels(b, 1, 256, turn(index, 2) == 0),
        _channels(c, 2, 256, turn(index, 2, 1) == 0),
    )
    return convolution(
        log_pick(a, 1, 128),
        *channels,
        (length,),
        (kernel,),
        1 + turn(index, 3, 2) // 2,
        dilation * (kernel - 1) // 2,
        dilation=dilation,
    )


def _three_dimensional(index: int, a: float, b: float, c: float, d: float, e: float) -> Op:
    """A quarter are first layers, on clips of one to three channels."""
    depth, side, kernel = (
        log_pick(d, 2, 16),
        _side(index, log_pick(e, 4, 32)),
        pick(a * 7 % 1, (3, 3, 3, 3, 2, 1)),
    )
    channels = (
        _first_or(b, (1, 3, 3, 2), 4, 96, turn(index, 2) == 0),
        _channels(c, 4, 96, turn(index, 2, 1) == 0),
    )
    stride = 2 if kernel == 2 else 1 + turn(index, 4, 2) // 3
    return convolution(
        log_pick(a, 1, 16), *channels, (depth, side, side), (kernel,) * 3, stride, kernel // 3
    )


def _input_needed(op: Op, index: int) -> bool:
    """Whether the gradient of the input is measured, too: of an image of few channels, which is
    mostly a network's own input, but of each third.
    """
    return op.inputs[0].shape[1] > 4 or turn(index, 3, 2) == 0


_KINDS: tuple[tuple[str, int, int, int, Callable[..., Op | None], int], ...] = (
    ("dense", 68, 160, 7, _dense, 1),
    ("1x1", 14, 64, 4, _one_tap, 1),
    ("depthwise", 8, 44, 4, _depthwise, 1),
    ("grouped", 6, 48, 5, _grouped, 1),
    ("transposed", 4, 44, 5, _transposed, 1),
    ("1d", 4, 28, 5, _one_dimensional, 1),
    ("3d", 2, 22, 5, _three_dimensional, 1),
    ("channels_last", 0, 24, 7, partial(_dense, channels_last=True), 2000),
    ("bfloat16", 0, 24, 7, partial(_dense, dtype="bfloat16"), 3000),
)
"""(name, quick and full number, dimensions of the design, what makes one of its points, first
point)
"""


def groups(mode: str, bfloat16: bool, times: int = 1) -> list[Group]:
    """Dense, depthwise and other convolutions, forward and backward; dense ones also in
    channels_last and in bfloat16. With `times` as many points the first are the same.
    """

    def fitting(make: Callable[..., Op | None], *point: float) -> Op | None:
        op = make(*point)
        return op if op is not None and _fits(op, mode) else None

    found = []
    for name, quick, full, n_dimensions, make, start in _KINDS[: None if bfloat16 else -1]:
        count = share(mode, quick, full, times)
        ops = filled(count, n_dimensions, partial(fitting, make), start)
        # Each pass by itself: a step's first convolution needs but one, and each has kernels of its
        # own.
        by_input = [
            backward_of(op, (True, False))
            for index, op in enumerate(ops)
            if _input_needed(op, index)
        ]
        by_weight = [backward_of(op, (False, True)) for op in ops]
        parts = {
            "forward": [Point("conv", op) for op in ops],
            "gradient of the input": [Point("conv_backward", op) for op in by_input],
            "gradient of the weight": [
                Point("conv_backward", op) for op in by_weight if not corrupts(op)
            ],
        }
        found += [
            Group(f"convolution {name} {part}", tuple(points), repeats(mode))
            for part, points in parts.items()
            if points
        ]
    return found

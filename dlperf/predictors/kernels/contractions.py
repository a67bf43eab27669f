"""Descriptions of contractions: matrix products and convolutions."""

from __future__ import annotations

import math

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.predictors.kernels.description import (
    KernelDescription,
    ints,
    kernel_features,
    kernel_features_by_threads,
    log2,
    tensor,
)
from dlperf.predictors.kernels.onednn import (
    BLOCK,
    Convolution,
    padded,
    remainders,
    takes_onednn,
    ways_of,
    window_of,
)

# -- matrix products -------------------------------------------------------------------------------


_TILES = ((8, 16), (4, 24), (8, 48))
"""Results that the libraries' kernels compute at once, rows by columns or columns by rows."""
_LOOPS = 400
"""Multiplications of one product below which torch goes through a batch by itself and asks no BLAS.
"""


def _transposed(spec: TensorSpec) -> bool:
    """Whether a matrix lies in memory column by column."""
    rows, columns = spec.strides[-2:]
    return columns != 1 and rows == 1 and spec.shape[-1] > 1


def _matrix(a: TensorSpec, b: TensorSpec, kind: str, with_bias: bool = False) -> KernelDescription:
    """A product, whatever the order of its operands in memory, which is a coordinate of its own.

    Where one operand is a vector BLAS takes other kernels (GEMV), which are variants of their own;
    so have the plain loops that a batch of products below :data:`_LOOPS` multiplications goes by
    (bmm_out_or_baddbmm_ in aten/src/ATen/native/LinearAlgebra.cpp).
    """
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    batch = math.prod(a.shape[:-2])
    # Kernels compute whole tiles of results, or cut what is left into parts, each of which takes as
    # long: which, depends on the library and its vectors.
    tiles = [
        math.ceil(m / rows) * rows * math.ceil(n / columns) * columns
        for sides in _TILES
        for rows, columns in (sides, sides[::-1])
    ]
    parts = (m * k * remainders(n), n * k * remainders(m))
    terms = (
        1.0,
        *(
            float(batch * amount)
            for amount in (1, m * n * k, m * n, m * k, n * k, *(tile * k for tile in tiles), *parts)
        ),
    )
    # Below a tile every size is a case of its own: there the coordinates are three times as long.
    features = (
        log2(m),
        log2(n),
        log2(k),
        2.0 * log2(min(m, BLOCK)),
        2.0 * log2(min(n, BLOCK)),
        *(0.35 * remainders(size) for size in (m, n, k)),
        float(_transposed(a)),
        float(_transposed(b)),
        float(with_bias),
        log2(batch),
    )
    implementations: tuple[str, ...] = ("vector", "matrix") if min(m, n) == 1 else ("matrix",)
    if kind == "bmm" and m * n * k < _LOOPS:
        implementations = ("loops", *implementations)
    kinds = (kind, "bmm" if kind == "gemm" else "gemm")
    variants = [
        (name, dtype, implementation)
        for dtype in dict.fromkeys((a.dtype, "float32"))
        for name in kinds
        for implementation in implementations
    ]
    return KernelDescription(variants[0], features, terms, tuple(variants[1:]))


@kernel_features("aten.mm")
def _mm(op: Op) -> KernelDescription:
    return _matrix(tensor(op.args[0]), tensor(op.args[1]), "gemm")


@kernel_features("aten.addmm", "aten._addmm_activation")
def _addmm(op: Op) -> KernelDescription:
    return _matrix(tensor(op.args[1]), tensor(op.args[2]), "gemm", with_bias=True)


@kernel_features("aten.bmm")
def _bmm(op: Op) -> KernelDescription:
    return _matrix(tensor(op.args[0]), tensor(op.args[1]), "bmm")


@kernel_features("aten.baddbmm")
def _baddbmm(op: Op) -> KernelDescription:
    return _matrix(tensor(op.args[1]), tensor(op.args[2]), "bmm", with_bias=True)


@kernel_features("aten.mv", "aten.addmv", "aten.dot", "aten.vdot")
def _mv(op: Op) -> KernelDescription:
    a, v = op.inputs[-2:]
    if len(a.shape) == 1:
        a = TensorSpec((1, *a.shape), (a.numel, *a.strides), a.dtype)
    return _matrix(a, TensorSpec((*v.shape, 1), (*v.strides, 1), v.dtype), "gemm")


# -- convolutions ----------------------------------------------------------------------------------


def _is_channels_last(image: TensorSpec) -> bool:
    return (
        len(image.shape) > 2
        and image.shape[1] > 1
        and image.strides[1] == 1
        and not image.is_contiguous
    )


def _convolution(
    image: TensorSpec,
    weight: TensorSpec,
    args: tuple[Argument, ...],
    output: tuple[int, ...],
    threads: int,
    needs: tuple[bool, bool] | None = None,
) -> KernelDescription:
    """A convolution, or a pass of its backward where `needs` says whether it is that for the
    gradient of the input or of the weight.

    A 1d convolution is a 2d one of height 1, as oneDNN computes it. A transposed one is described
    as the convolution that it is the gradient of.
    """
    stride, padding, dilation, transposed, _, groups_ = args
    groups = int(groups_)  # type: ignore[arg-type]
    n, c_in = image.shape[:2]
    c_out = weight.shape[1] * groups if transposed else weight.shape[0]
    before, after = image.shape[2:], output
    if transposed:
        c_in, c_out, before, after = c_out, c_in, after, before
    kernel, out = math.prod(weight.shape[2:]), math.prod(after)
    c_in_g, c_out_g = c_in // groups, c_out // groups
    d = len(weight.shape) - 2
    window = window_of(weight, ints(stride), ints(padding), ints(dilation), before)
    planar = f"{max(d, 2)}d"
    if transposed:
        kind = f"transposed{planar}"
    elif groups > 1:
        kind = f"depthwise{planar}" if c_in_g == c_out_g == 1 else f"grouped{planar}"
    else:
        kind = f"1x1 {planar}" if window.is_point else f"dense{planar}"
    onednn = takes_onednn(image, weight, window.stride, window.dilation, groups, threads)
    (way,) = ways_of(bool(transposed), needs) or ("weight",)
    implementation = (
        Convolution(c_in_g, c_out_g, groups, window).implementation(way) if onednn else "native"
    )
    # oneDNN computes on whole blocks of channels: what counts are padded channels, but for the
    # first layers' kernels and products along channels.
    whole = groups == 1 and onednn
    wide_in, wide_out = (padded(c_in_g), padded(c_out_g)) if whole else (c_in_g, c_out_g)
    lanes = padded(c_in) / c_in if groups > 1 and onednn else 1.0

    is_product = implementation in ("gemm", "native")
    # Multiplications and additions, those on padding included where the kernels do them.
    if is_product:
        products = float(n * out * kernel * groups * c_in_g * c_out_g)
    else:
        products = (
            n
            * window.taps
            * groups
            * (c_in_g if implementation == "first" else wide_in)
            * wide_out
            * lanes
        )
    features = (
        log2(n),
        log2(c_in_g if implementation == "first" else wide_in),
        log2(wide_out),
        log2(kernel),
        log2(out),
        2.0 * window.is_strided,
        log2(groups) * 0.5,
        0.5 * (c_in % BLOCK != 0),
        0.5 * (c_out % BLOCK != 0),
        float(window.is_dilated),
        float(d == 1),
        2.0 * (implementation == "strided" and window.fits_stride),
    )
    # brgconv_strided stores its blocks of results place by place, much more slowly where the kernel
    # is no multiple of the stride.
    stores = float(n * math.prod(before) * groups * wide_in) if implementation == "strided" else 0.0
    n_in, n_out = float(n * c_in * math.prod(before)), float(n * c_out * out)
    # What is put into blocks of channels and back; where the last block is partly empty, by slower
    # code.
    moved_in, moved_out = (
        0.0 if is_product or implementation == "first" else n_in,
        0.0 if is_product else n_out,
    )
    odd_in, odd_out = c_in % BLOCK != 0, c_out % BLOCK != 0
    terms = (
        1.0,
        products,
        stores * window.fits_stride,
        stores * (not window.fits_stride),
        n_in,
        n_out,
        float(weight.numel),
        float(n * out * kernel * c_in),
        moved_in,
        moved_in * odd_in,
        moved_out,
        moved_out * odd_out,
        float(n * groups * is_product),
    )
    what = "conv" if needs is None else "conv_input" if needs[0] else "conv_weight"
    dtype = image.dtype
    # In channels_last nothing is converted on the way in and out.
    implementations = tuple(dict.fromkeys((implementation, "blocked", "first", "native")))
    variants: list[tuple[str, ...]] = (
        [(what, dtype, kind, name, "channels_last") for name in implementations[:2]]
        if _is_channels_last(image)
        else []
    )
    variants += [(what, dtype, kind, name) for name in implementations]
    similar = {
        "grouped": f"depthwise{planar}",
        "1x1 ": f"dense{planar}",
        "depthwise": f"grouped{planar}",
    }
    for start, alternative in similar.items():
        if kind.startswith(start):
            variants += [
                (what, dtype, alternative, implementation),
                (what, dtype, alternative, "blocked"),
            ]
    if d == 3:
        variants += [
            (what, dtype, kind.replace("3d", "2d"), name) for name in (implementation, "blocked")
        ]
    variants += [
        (what, dtype, "dense2d", "blocked"),
        (what, "float32", kind, implementation),
        (what, "float32", kind, "blocked"),
        (what, "float32", "dense2d", "blocked"),
    ]
    return KernelDescription(variants[0], features, terms, tuple(dict.fromkeys(variants[1:])))


@kernel_features_by_threads("aten.convolution")
def _conv_forward(op: Op, threads: int) -> KernelDescription:
    image, weight = tensor(op.args[0]), tensor(op.args[1])
    return _convolution(image, weight, op.args[3:9], output_shape(op)[2:], threads)


def output_shape(op: Op) -> tuple[int, ...]:
    """Shape of the output of ``aten.convolution``: that of its record, or computed where the op has
    none.
    """
    if op.outputs:
        return op.outputs[0].shape
    image, weight = tensor(op.args[0]), tensor(op.args[1])
    stride, padding, dilation = (ints(op.args[place]) for place in (3, 4, 5))
    transposed, extra, groups = bool(op.args[6]), ints(op.args[7]), int(op.args[8])  # type: ignore[arg-type]
    d = len(weight.shape) - 2
    stride, padding, dilation, extra = (
        values * d if len(values) == 1 else values for values in (stride, padding, dilation, extra)
    )
    if not transposed:
        return (
            image.shape[0],
            weight.shape[0],
            *window_of(weight, stride, padding, dilation, image.shape[2:]).out,
        )
    sizes = (
        (image.shape[2 + axis] - 1) * stride[axis]
        - 2 * padding[axis]
        + dilation[axis] * (weight.shape[2 + axis] - 1)
        + extra[axis]
        + 1
        for axis in range(d)
    )
    return (image.shape[0], weight.shape[1] * groups, *sizes)


@kernel_features_by_threads("aten.convolution_backward")
def _conv_backward(op: Op, threads: int) -> KernelDescription | None:
    """One pass of a backward; both at once have no kernel model
    (:func:`dlperf.predictors.kernels.sub_kernels.parts`).
    """
    gradient, image, weight = (tensor(a) for a in op.args[:3])
    mask = op.args[10]
    assert isinstance(mask, tuple)
    if mask[0] and any(mask[1:]):
        return None
    return _convolution(
        image, weight, op.args[4:10], gradient.shape[2:], threads, (bool(mask[0]), not mask[0])
    )

"""Descriptions of contractions: matrix products and convolutions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

from dlperf.core.trace import Op, TensorSpec
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    ints,
    kernel_features,
    kernel_features_by_host,
    log2,
    tensor,
)
from dlperf.predictors.kernels.onednn import BLOCK, convolution_call, padded, remainders

# -- matrix products -------------------------------------------------------------------------------


_TILES = ((8, 16), (4, 24), (8, 48))
"""Results that the libraries' kernels compute at once, rows by columns or columns by rows."""
_PANEL = 192
"""Multiplications of a result after which MKL goes through all results once more."""
_ALIGNED_BYTES = 32
"""Rows of a result that begin at multiples of so many bytes are stored past the caches where it is
large; others not, and take much longer: (2200 x 96)(96 x n) reached 84 to 91 GFLOP/s with n of
1488, 1496, 1504, 1512 and 1520, 54 to 59 with 1492, 1500, 1501, 1508 and 1516; 2200 rows of half
the length the same in both (AMD EPYC of Zen 4, MKL of torch 2.13, within 4 %).
"""
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
    in_loops = kind == "bmm" and m * n * k < _LOOPS
    # Kernels compute whole tiles of results, or cut what is left into parts, each of which takes as
    # long: which, depends on the library and its vectors.
    tiles = [
        math.ceil(m / rows) * rows * math.ceil(n / columns) * columns
        for sides in _TILES
        for rows, columns in (sides, sides[::-1])
    ]
    parts = (m * k * remainders(n), n * k * remainders(m))
    blocked = (*(tile * k for tile in tiles), *parts)
    amounts = (1, m * n * k, m * n, m * k, n * k, *((0,) * len(blocked) if in_loops else blocked))
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
    if in_loops:
        implementations = ("loops", *implementations)
    variants = (
        (name, dtype, implementation)
        for dtype in (a.dtype, "float32")
        for name in (kind, "bmm" if kind == "gemm" else "gemm")
        for implementation in implementations
    )
    stored_bytes = float(batch * m * n * a.item_bytes * math.ceil(k / _PANEL))
    is_aligned = in_loops or min(m, n) == 1 or n * a.item_bytes % _ALIGNED_BYTES == 0
    return replace(
        described(variants, features, (batch * amount for amount in amounts)),
        stored_bytes=(stored_bytes, 0.0) if is_aligned else (0.0, stored_bytes),
        result_bytes=batch * m * n * a.item_bytes,
    )


@kernel_features("aten.mm", "aten.bmm", "aten.addmm", "aten._addmm_activation", "aten.baddbmm")
def _product(op: Op) -> KernelDescription:
    with_bias = "add" in op.packet
    a, b = tensor(op.args[with_bias]), tensor(op.args[with_bias + 1])
    return _matrix(a, b, "bmm" if "bmm" in op.packet else "gemm", with_bias)


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


_CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")
_LONG_COLUMN = 256
"""Pixels from which on oneDNN's product of columns and one channel takes longer, by an amount for
each column: a 5x5 depthwise gradient of the weight took 4.6 us an image and channel at 255 pixels,
7.0 us at 256, 9.3 us at 400 (AMD EPYC of Zen 4, oneDNN of torch 2.13).
"""
_ALIASED_BYTES = 4096
"""Planes of a multiple of so many bytes begin in the same set of a core's first cache (64 sets of
64 bytes): what reads a block of 16 of them evicts its own lines. A depthwise 3x3 of 64 channels
took 0.83 ms on images of 32x32, 0.54 on 32x31 and 0.58 on 32x33 (AMD EPYC of Zen 4).
"""


def sort_of(op: Op) -> tuple[str, ...]:
    """What the variant of a convolution begins with: its pass, dtype and kind; () for other
    operators, and for a backward with both passes.
    """
    if op.packet not in _CONVOLUTIONS:
        return ()
    backward, what = op.packet.endswith("backward"), "conv"
    if backward:
        of_input, *others = op.args[10] if isinstance(op.args[10], tuple) else (True,)
        if of_input and any(others):
            return ()
        what = "conv_input" if of_input and not any(others) else "conv_weight"
    image, weight, _, stride, _, _, transposed, _, groups = op.args[backward : 9 + backward]
    c_out, c_in, *kernel = tensor(weight).shape
    planar, n_groups = f"{max(len(kernel), 2)}d", math.prod(ints(groups))
    if transposed:
        kind = f"transposed{planar}"
    elif n_groups > 1:
        kind = f"depthwise{planar}" if c_in == 1 and c_out == n_groups else f"grouped{planar}"
    else:
        is_point = math.prod(kernel) == 1 and max(ints(stride)) == 1
        kind = f"1x1 {planar}" if is_point else f"dense{planar}"
    return what, tensor(image).dtype, kind


def sort_of_variant(variant: tuple[str, ...]) -> tuple[str, ...]:
    """The sort of all operators of a variant, as :func:`sort_of` gives it."""
    return variant[:3] if variant[0] in ("conv", "conv_weight", "conv_input") else ()


@kernel_features_by_host(*_CONVOLUTIONS)
def _convolution(op: Op, threads: int, block: int) -> KernelDescription | None:
    """A convolution, or a pass of its backward; a backward with both passes has no kernel model
    (:func:`dlperf.predictors.kernels.sub_kernels.sub_kernels`).

    A 1d convolution is a 2d one of height 1, as oneDNN computes it. A transposed one is described
    as the convolution that it is the gradient of.
    """
    call, sort = convolution_call(op, block), sort_of(op)
    if call is None or not sort:
        return None
    what, dtype, kind = sort
    image, weight, before, after = call.image, call.weight, call.before, call.after
    window, groups = call.convolution.window, call.convolution.groups
    c_in_g, c_out_g = call.convolution.c_in, call.convolution.c_out
    n, c_in, c_out = image.shape[0], groups * c_in_g, groups * c_out_g
    kernel, out, pixels = (
        math.prod(sides) for sides in (window.kernel, after.shape[2:], before.shape[2:])
    )
    d = len(window.kernel)
    onednn = call.takes_onednn(threads)
    (way,) = call.ways or ("weight",)
    implementation = call.convolution.implementation(way) if onednn else "native"
    # oneDNN computes on whole blocks of channels: what counts are padded channels, but for the
    # first layers' kernels and products along channels.
    whole = groups == 1 and onednn
    wide_in, wide_out = (
        (padded(c_in_g, block), padded(c_out_g, block)) if whole else (c_in_g, c_out_g)
    )
    lanes = padded(c_in, block) / c_in if groups > 1 and onednn else 1.0

    is_product = implementation in ("gemm", "native")
    # Multiplications and additions, those on padding included where the kernels do them.
    in_width = c_in_g if implementation == "first" else wide_in
    products = (
        float(n * out * kernel * groups * c_in_g * c_out_g)
        if is_product
        else n * window.taps * groups * in_width * wide_out * lanes
    )
    features = (
        log2(n),
        log2(in_width),
        log2(wide_out),
        log2(kernel),
        log2(out),
        2.0 * window.is_strided,
        log2(groups) * 0.5,
        0.5 * (c_in % block != 0),
        0.5 * (c_out % block != 0),
        float(window.is_dilated),
        float(d == 1),
        2.0 * (implementation == "strided" and window.fits_stride),
    )
    # brgconv_strided stores its blocks of results place by place, much more slowly where the kernel
    # is no multiple of the stride.
    n_in, n_out = n * c_in * pixels, n * c_out * out
    stores = biases = 0
    if implementation == "strided":
        stores = n * pixels * groups * wide_in
        # Where the strides do not divide the image, it adds the bias in a pass of its own.
        if any(side % step for side, step in zip(window.image, window.stride)):
            biases = n_in * (what == "conv" and op.args[2] is not None)
    # What is put into blocks of channels and back; where the last block is partly empty, by slower
    # code.
    moved_in = 0 if is_product or implementation == "first" else n * padded(c_in, block) * pixels
    moved_out = 0 if is_product else n * padded(c_out, block) * out
    aliased_in, aliased_out = (
        moved * (math.prod(spec.shape[2:]) * spec.item_bytes % _ALIASED_BYTES == 0)
        for moved, spec in ((moved_in, before), (moved_out, after))
    )
    # The product of an image by BLAS: rows, columns, depth; what is left of whole tiles costs more.
    rows, columns, depth = {
        "conv": (c_out_g, out, c_in_g * kernel),
        "conv_input": (c_in_g * kernel, out, c_out_g),
        "conv_weight": (c_out_g, c_in_g * kernel, out),
    }[what]
    parts = rows * depth * remainders(columns), columns * depth * remainders(rows)
    parts_of_rows, parts_of_columns = (n * groups * is_product * part for part in parts)
    has_long_columns = is_product and what == "conv_weight" and c_out_g == 1 and out >= _LONG_COLUMN
    work = (
        products,
        stores * window.fits_stride,
        stores * (not window.fits_stride),
        biases,
        n_in,
        n_out,
        weight.numel,
        n * out * kernel * c_in,
        moved_in,
        moved_in * (c_in % block != 0),
        moved_out,
        moved_out * (c_out % block != 0),
        moved_out * (kernel == 1 and window.is_strided),
        aliased_in * (c_in % block == 0) + aliased_out * (c_out % block == 0),
        aliased_in * (c_in % block != 0) + aliased_out * (c_out % block != 0),
        n * groups * is_product,
        parts_of_rows,
        parts_of_columns,
        n * c_in * kernel * has_long_columns,
    )
    variant, *others = _variants(what, dtype, kind, implementation, _is_channels_last(image))
    return KernelDescription(variant, features, (1.0, *map(float, work)), tuple(others))


@cache
def _variants(
    what: str, dtype: str, kind: str, implementation: str, is_channels_last: bool
) -> tuple[tuple[str, ...], ...]:
    """Variants of a convolution, the one that it is first."""
    planar = kind[-2:]
    # In channels_last nothing is converted on the way in and out.
    implementations = tuple(dict.fromkeys((implementation, "blocked", "first", "native")))
    last = implementations[:2] if is_channels_last else ()
    kinds = [(dtype, kind)]
    similar = {"grouped": "depthwise", "1x1 ": "dense", "depthwise": "grouped"}
    kinds += [
        (dtype, f"{alternative}{planar}")
        for start, alternative in similar.items()
        if kind.startswith(start)
    ]
    if planar == "3d":
        kinds.append((dtype, kind.replace("3d", "2d")))
    variants = (
        *((what, dtype, kind, name, "channels_last") for name in last),
        *((what, dtype, kind, name) for name in implementations),
        *((what, *one, name) for one in kinds for name in (implementation, "blocked")),
        (what, dtype, "dense2d", "blocked"),
        (what, "float32", kind, implementation),
        (what, "float32", kind, "blocked"),
        (what, "float32", "dense2d", "blocked"),
    )
    return tuple(dict.fromkeys(variants))

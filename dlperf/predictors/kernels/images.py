"""Descriptions of resampling, padding, im2col and unpooling."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dlperf.core.operators import ITEM_BYTES
from dlperf.core.trace import Op
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    in_dtypes,
    ints,
    kernel_features,
    log2,
    pass_of,
    tensor,
)
from dlperf.predictors.kernels.onednn import Window

_TAPS = {"nearest": 1, "linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16}
"""Elements of the coarse image that one of the fine image is made of."""
_ALIASED_BYTES = 4096
"""Distance of addresses that go to the same lines of a first-level cache."""
_SIDES = {"1d": 1, "2d": 2, "3d": 3}
_SCALED = (
    "aten.upsample_nearest2d",
    "aten._upsample_nearest_exact2d",
    "aten.upsample_bilinear2d",
)
_SMALL_SIDES = 128


# -- resampling ------------------------------------------------------------------------------------

_RESAMPLING = tuple(
    f"{name}{way}"
    for name in (
        *(
            f"{mark}{form}{d}"
            for d in _SIDES
            for mark, form in (("", "upsample_nearest"), ("_", "upsample_nearest_exact"))
        ),
        *(
            "upsample_linear1d",
            "upsample_bilinear2d",
            "upsample_trilinear3d",
            "upsample_bicubic2d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
        ),
    )
    for way in ("", "_backward")
)
_SIMILAR_RESAMPLING = {
    "upsample_linear1d": "upsample_bilinear2d",
    "upsample_trilinear3d": "upsample_bilinear2d",
}


def is_scaled_in_copies(op: Op, sides: Sequence[int]) -> bool:
    """Whether an op scales images to so many `sides` in copies with channels last
    (_use_vectorized_kernel_cond_2d, UpSampleKernel.cpp).
    """
    return op.packet in _SCALED and sum(sides) <= _SMALL_SIDES and tensor(op.args[0]).is_contiguous


@kernel_features(*(f"aten.{name}" for name in _RESAMPLING))
def _resampling(op: Op) -> KernelDescription:
    """Time goes by the elements of the resampled image and by how many of the other each is made of
    (aten/src/ATen/native/cpu/UpSampleKernel.cpp).
    """
    name = op.packet.removeprefix("aten.").lstrip("_").replace("_exact", "").replace("_aa", "")
    kernel, way, _ = name.partition("_backward")
    form, d = kernel.removeprefix("upsample_")[:-2], _SIDES[kernel[-2:]]
    first, size = tensor(op.args[0]), ints(op.args[2 if way else 1], d)
    planes = math.prod(first.shape[:-d])
    if way:
        fine, coarse, sides = first.numel, math.prod(size), first.shape[-d:]
    else:
        scales = op.args[-1] if op.name.endswith(".vec") and not size else ()
        scaled = (int(side * float(scale)) for side, scale in zip(first.shape[-d:], scales))  # type: ignore[arg-type]
        sides = op.outputs[0].shape[-d:] if op.outputs else tuple(size) or tuple(scaled)
        fine, coarse = planes * math.prod(sides), first.numel
    # The loop passes over planes first: their elements then lie in the same lines of a cache.
    plane_bytes = fine // max(planes, 1) * ITEM_BYTES[first.dtype]
    is_aliased = d == 2 and plane_bytes >= _ALIASED_BYTES and plane_bytes % _ALIASED_BYTES == 0
    similar = _SIMILAR_RESAMPLING.get(kernel, f"upsample_{form}2d")
    is_large = op.packet in _SCALED and first.is_contiguous and not is_scaled_in_copies(op, sides)
    large = (f"{kernel} large",) if is_large else ()
    return described(
        in_dtypes(first.dtype, *large, f"{kernel}{way}", f"{similar}{way}"),
        (log2(planes), log2(fine / max(planes, 1))),
        (fine * _TAPS[form], coarse, planes, fine * is_aliased),
    )


@kernel_features(
    "aten.grid_sampler_2d",
    "aten.grid_sampler_2d_backward",
    "aten.grid_sampler_3d",
    "aten.grid_sampler_3d_backward",
)
def _grid_sampler(op: Op) -> KernelDescription:
    _, image, (grid, *_) = pass_of(op)
    points = tensor(grid).numel // max(tensor(grid).shape[-1], 1)
    channels = image.shape[1]
    name = op.packet.removeprefix("aten.")
    return described(
        in_dtypes(image.dtype, name, name.replace("3d", "2d")),
        (log2(points), log2(channels)),
        (points * channels, points, image.numel),
    )


# -- padding ---------------------------------------------------------------------------------------


@kernel_features(
    *(
        f"aten.{name}_pad{d}{way}"
        for name in ("reflection", "replication")
        for d in _SIDES
        for way in ("", "_backward")
    )
)
def _padding(op: Op) -> KernelDescription:
    _, image, (given, *_) = pass_of(op)
    pads = ints(given)
    sides = [
        size + sum(pads[2 * axis : 2 * axis + 2])
        for axis, size in enumerate(reversed(image.shape))
        if 2 * axis < len(pads)
    ]
    planes = math.prod(image.shape[: len(image.shape) - len(sides)])
    padded = planes * math.prod(sides)
    name = op.packet.removeprefix("aten.")
    similar = name.replace("replication", "reflection")
    return described(
        in_dtypes(image.dtype, name, similar, similar.replace(f"{len(pads) // 2}d", "2d")),
        (log2(planes), log2(padded / max(planes, 1))),
        (padded, padded // max(sides[0], 1), planes),
    )


# -- windows as columns, unpooling -----------------------------------------------------------------


@kernel_features("aten.im2col", "aten.col2im")
def _columns(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.")
    given = tensor(op.args[0])
    window, *moves = (ints(values) for values in op.args[1 if name == "im2col" else 2 :])
    area = math.prod(window)
    if name == "col2im":
        columns = given.numel
    elif op.outputs:
        columns = op.outputs[0].numel
    else:
        dilation, padding, stride = moves
        steps = Window(window, stride, padding, dilation, given.shape[-2:]).out
        columns = math.prod(given.shape[:-2]) * area * math.prod(steps)
    return described(
        in_dtypes(given.dtype, name),
        (log2(columns), log2(area)),
        (columns, columns // max(area, 1)),
    )


@kernel_features("aten.max_unpool2d", "aten.max_unpool3d")
def _unpooling(op: Op) -> KernelDescription:
    pooled, sides = tensor(op.args[0]), ints(op.args[2])
    whole = math.prod(pooled.shape[: len(pooled.shape) - len(sides)]) * math.prod(sides)
    return described(in_dtypes(pooled.dtype, "max_unpool2d"), (log2(whole),), (whole, pooled.numel))

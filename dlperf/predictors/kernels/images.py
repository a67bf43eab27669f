"""Descriptions of resampling, padding, im2col and unpooling."""

from __future__ import annotations

import math

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.predictors.kernels.description import (
    KernelDescription,
    ints,
    kernel_features,
    log2,
    tensor,
)

_TAPS = {"nearest": 1, "linear": 2, "bilinear": 4, "trilinear": 8, "bicubic": 16}
"""Elements of the coarse image that one of the fine image is made of."""
_SIDES = {"1d": 1, "2d": 2, "3d": 3}


def _variants(
    name: str, dtype: str, *similar: str
) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Variant and fallbacks of a kernel: itself in float32, then similar kernels."""
    first, *others = (
        (kernel, precision)
        for kernel in (name, *similar)
        for precision in dict.fromkeys((dtype, "float32"))
    )
    return first, tuple(others)


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


def _resized(image: TensorSpec, size: Argument, scales: Argument, d: int) -> int:
    """Elements of an image resampled to a size, or by scale factors where none is given."""
    sides = ints(size)
    if sides:
        sides = sides * d if len(sides) == 1 else sides
        return math.prod(image.shape[:-d]) * math.prod(sides)
    factors = scales if isinstance(scales, tuple) else ()
    found = math.prod(image.shape[:-d])
    for side, factor in zip(image.shape[-d:], factors):
        found *= int(side * float(factor))  # type: ignore[arg-type]
    return found


@kernel_features(*(f"aten.{name}" for name in _RESAMPLING))
def _resampling(op: Op) -> KernelDescription:
    """Time goes by the elements of the resampled image and by how many of the other each is made of
    (aten/src/ATen/native/cpu/UpSampleKernel.cpp).
    """
    name = op.packet.removeprefix("aten.").lstrip("_").replace("_exact", "").replace("_aa", "")
    backward = name.endswith("_backward")
    form = name.removesuffix("_backward").removeprefix("upsample_")
    d = _SIDES[form[-2:]]
    first = tensor(op.args[0])
    if backward:
        fine, coarse = first.numel, math.prod(ints(op.args[2]))
    else:
        scales = op.args[-1] if op.name.endswith(".vec") else None
        fine, coarse = (
            op.outputs[0].numel if op.outputs else _resized(first, op.args[1], scales, d),
            first.numel,
        )
    planes = math.prod(first.shape[:-d])
    way = "_backward" if backward else ""
    kernel = f"upsample_{form}"
    similar = _SIMILAR_RESAMPLING.get(kernel, f"upsample_{form[:-2]}2d")
    variant, others = _variants(kernel + way, first.dtype, similar + way)
    terms = (1.0, float(fine * _TAPS[form[:-2]]), float(coarse), float(planes))
    return KernelDescription(variant, (log2(planes), log2(fine / max(planes, 1))), terms, others)


@kernel_features(
    "aten.grid_sampler_2d",
    "aten.grid_sampler_2d_backward",
    "aten.grid_sampler_3d",
    "aten.grid_sampler_3d_backward",
)
def _grid_sampler(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward")
    image, grid = (tensor(argument) for argument in op.args[int(backward) : int(backward) + 2])
    points, channels = grid.numel // max(grid.shape[-1], 1), image.shape[1]
    name = op.packet.removeprefix("aten.")
    variant, others = _variants(name, image.dtype, name.replace("3d", "2d"))
    terms = (1.0, float(points * channels), float(points), float(image.numel))
    return KernelDescription(variant, (log2(points), log2(channels)), terms, others)


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
    backward = op.packet.endswith("backward")
    image = tensor(op.args[1 if backward else 0])
    pads = ints(op.args[2 if backward else 1])
    sides = [
        size + sum(pads[2 * axis : 2 * axis + 2])
        for axis, size in enumerate(reversed(image.shape))
        if 2 * axis < len(pads)
    ]
    planes = math.prod(image.shape[: len(image.shape) - len(sides)])
    padded = planes * math.prod(sides)
    name = op.packet.removeprefix("aten.")
    d = name[name.index("pad") + 3 :][:2]
    variant, others = _variants(
        name,
        image.dtype,
        name.replace("replication", "reflection"),
        name.replace("replication", "reflection").replace(d, "2d"),
    )
    return KernelDescription(
        variant,
        (log2(planes), log2(padded / max(planes, 1))),
        (1.0, float(padded), float(padded // max(sides[0], 1)), float(planes)),
        others,
    )


# -- windows as columns, unpooling -----------------------------------------------------------------


@kernel_features("aten.im2col", "aten.col2im")
def _columns(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.")
    given = tensor(op.args[0])
    window = ints(op.args[1 if name == "im2col" else 2])
    if name == "col2im":
        columns = given.numel
    elif op.outputs:
        columns = op.outputs[0].numel
    else:
        dilation, padding, stride = (ints(argument) for argument in op.args[2:5])
        steps = (
            (size + 2 * pad - gap * (side - 1) - 1) // step + 1
            for size, side, gap, pad, step in zip(
                given.shape[-2:], window, dilation, padding, stride
            )
        )
        columns = math.prod(given.shape[:-2]) * math.prod(window) * math.prod(steps)
    variant, others = _variants(name, given.dtype)
    return KernelDescription(
        variant,
        (log2(columns), log2(math.prod(window))),
        (1.0, float(columns), float(columns // max(math.prod(window), 1))),
        others,
    )


@kernel_features("aten.max_unpool2d", "aten.max_unpool3d")
def _unpooling(op: Op) -> KernelDescription:
    pooled = tensor(op.args[0])
    sides = ints(op.args[2])
    planes = math.prod(pooled.shape[: len(pooled.shape) - len(sides)])
    whole = planes * math.prod(sides)
    variant, others = _variants("max_unpool2d", pooled.dtype)
    return KernelDescription(
        variant, (log2(whole),), (1.0, float(whole), float(pooled.numel)), others
    )

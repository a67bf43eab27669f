"""Descriptions of uncommon operators: distances, bilinear forms, margin losses, CTC, FFT."""

from __future__ import annotations

import math

from dlperf.core.trace import Op
from dlperf.predictors.kernels.description import (
    KernelDescription,
    ints,
    kernel_features,
    log2,
    tensor,
)


@kernel_features(
    "aten._cdist_forward",
    "aten._cdist_backward",
    "aten._euclidean_dist",
    "aten._pdist_forward",
    "aten._pdist_backward",
)
def _distances(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.").replace("pdist", "cdist")
    backward = name.endswith("backward")
    one = tensor(op.args[int(backward)])
    other = one if "pdist" in op.packet else tensor(op.args[int(backward) + 1])
    rows, columns, width = one.shape[-2], other.shape[-2], one.shape[-1]
    pairs = math.prod(one.shape[:-2]) * rows * columns // (2 if "pdist" in op.packet else 1)
    return KernelDescription(
        (name, "float32"),
        (log2(pairs), log2(width)),
        (1.0, float(pairs * width), float(pairs)),
        (("_cdist_forward", "float32"),),
    )


@kernel_features("aten._trilinear")
def _bilinear_form(op: Op) -> KernelDescription:
    """The products of a bilinear layer's two inputs and its weight, before they are summed
    (ATen/native/Linear.cpp).
    """
    one, weight, other = (tensor(argument) for argument in op.args[:3])
    products = one.numel * weight.numel // max(one.shape[-1], 1)
    return KernelDescription(
        ("trilinear", "float32"),
        (log2(products),),
        (1.0, float(products), float(weight.shape[0]), float(one.numel + other.numel)),
    )


@kernel_features(
    *(
        f"aten.{name}"
        for name in (
            "multi_margin_loss",
            "multi_margin_loss_backward",
            "multilabel_margin_loss_forward",
            "multilabel_margin_loss_backward",
        )
    )
)
def _margin_loss(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.")
    scores = max(op.inputs, key=lambda spec: (spec.numel, spec.dtype == "float32"))
    others = (
        (
            "soft_margin_loss_backward" if name.endswith("backward") else "soft_margin_loss",
            "2",
            "float32",
            "flat",
        ),
    )
    return KernelDescription(
        (name, "float32"), (log2(scores.numel),), (1.0, float(scores.numel)), others
    )


@kernel_features("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def _weight_norm(op: Op) -> KernelDescription:
    name = op.packet.removeprefix("aten.")
    weight, scale = tensor(op.args[0]), tensor(op.args[2 if name.endswith("backward") else 1])
    return KernelDescription(
        (name, "float32"), (log2(weight.numel),), (1.0, float(weight.numel), float(scale.numel))
    )


@kernel_features("aten._ctc_loss", "aten._ctc_loss_backward")
def _ctc(op: Op) -> KernelDescription:
    backward = op.packet.endswith("backward")
    scores, targets = (tensor(argument) for argument in op.args[int(backward) : int(backward) + 2])
    steps, batch, classes = (
        scores.shape if len(scores.shape) == 3 else (scores.shape[0], 1, scores.shape[1])
    )
    labels = targets.numel // max(batch, 1)
    states = steps * batch * (2 * labels + 1)
    name = "ctc_loss_backward" if backward else "ctc_loss"
    return KernelDescription(
        (name, "float32"),
        (log2(states), log2(classes)),
        (1.0, float(states), float(steps * batch * classes)),
    )


@kernel_features("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def _fourier(op: Op) -> KernelDescription:
    """n log2 n along the transformed dimensions."""
    spec = tensor(op.args[0])
    name = op.packet.removeprefix("aten.")
    dims = ints(op.args[1])
    lengths = [spec.shape[dim] for dim in dims]
    if name == "_fft_c2r":
        lengths[-1] = int(op.args[3])  # type: ignore[arg-type]
    numel = spec.numel // max(spec.shape[dims[-1]], 1) * lengths[-1]
    length = max(math.prod(lengths), 1)
    last = "last" if dims[-1] % len(spec.shape) == len(spec.shape) - 1 else "first"
    terms = (1.0, numel * log2(length), float(numel), float(numel // length))
    return KernelDescription(
        (name, last),
        (log2(numel), log2(length)),
        terms,
        ((name, "last"), ("_fft_c2c", last), ("_fft_c2c", "last")),
    )

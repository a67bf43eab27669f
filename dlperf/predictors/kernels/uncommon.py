"""Descriptions of uncommon operators: distances, bilinear forms, margin losses, CTC, FFT."""

from __future__ import annotations

import math

from dlperf.core.trace import Op
from dlperf.ops.registry import aten
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    ints,
    kernel_features,
    log2,
    pass_of,
    tensor,
)


@kernel_features(
    *aten("_cdist_forward _cdist_backward _euclidean_dist _pdist_forward _pdist_backward")
)
def _distances(op: Op) -> KernelDescription:
    _, one, rest = pass_of(op)
    is_within = "pdist" in op.packet
    other = one if is_within else tensor(rest[0])
    rows, columns, width = one.shape[-2], other.shape[-2], one.shape[-1]
    pairs = math.prod(one.shape[:-2]) * rows * columns // (2 if is_within else 1)
    name = op.packet.removeprefix("aten.").replace("pdist", "cdist")
    return described(
        ((name, "float32"), ("_cdist_forward", "float32")),
        (log2(pairs), log2(width)),
        (pairs * width, pairs),
    )


@kernel_features("aten._trilinear")
def _bilinear_form(op: Op) -> KernelDescription:
    """The products of a bilinear layer's two inputs and its weight, before they are summed
    (ATen/native/Linear.cpp).
    """
    one, weight, other = op.inputs[:3]
    products = one.numel * weight.numel // max(one.shape[-1], 1)
    return described(
        (("trilinear", "float32"),),
        (log2(products),),
        (products, weight.shape[0], one.numel + other.numel),
    )


@kernel_features(
    *aten("multi_margin_loss multilabel_margin_loss_forward"),
    *aten("multi_margin_loss_backward multilabel_margin_loss_backward"),
)
def _margin_loss(op: Op) -> KernelDescription:
    way, _, _ = pass_of(op)
    scores = max(op.inputs, key=lambda spec: (spec.numel, spec.dtype == "float32"))
    name = op.packet.removeprefix("aten.")
    return described(
        ((name, "float32"), (f"soft_margin_loss{way}", "2", "float32", "flat")),
        (log2(scores.numel),),
        (scores.numel,),
    )


@kernel_features("aten._weight_norm_interface", "aten._weight_norm_interface_backward")
def _weight_norm(op: Op) -> KernelDescription:
    weight, scale = tensor(op.args[0]), tensor(op.args[2 if op.packet.endswith("backward") else 1])
    return described(
        ((op.packet.removeprefix("aten."), "float32"),),
        (log2(weight.numel),),
        (weight.numel, scale.numel),
    )


@kernel_features("aten._ctc_loss", "aten._ctc_loss_backward")
def _ctc(op: Op) -> KernelDescription:
    way, scores, (targets, *_) = pass_of(op)
    steps, *batches, classes = scores.shape
    batch = math.prod(batches)
    states = steps * batch * (2 * (tensor(targets).numel // max(batch, 1)) + 1)
    return described(
        ((f"ctc_loss{way}", "float32"),),
        (log2(states), log2(classes)),
        (states, steps * batch * classes),
    )


@kernel_features("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def _fourier(op: Op) -> KernelDescription:
    """n log2 n along the transformed dimensions."""
    spec, dims = tensor(op.args[0]), ints(op.args[1])
    name = op.packet.removeprefix("aten.")
    lengths = [spec.shape[dim] for dim in dims]
    if name == "_fft_c2r":
        (lengths[-1],) = ints(op.args[3])
    numel = spec.numel // max(spec.shape[dims[-1]], 1) * lengths[-1]
    length = max(math.prod(lengths), 1)
    last = "last" if dims[-1] % len(spec.shape) == len(spec.shape) - 1 else "first"
    return described(
        ((kernel, side) for kernel in (name, "_fft_c2c") for side in (last, "last")),
        (log2(numel), log2(length)),
        (numel * log2(length), numel, numel // length),
    )

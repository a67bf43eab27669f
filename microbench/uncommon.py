"""Kernels that few networks have, with a shape of their own: resampled and padded images, windows
as columns, distances, bilinear forms, CTC, transforms.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.microbench.plan import log_pick, turn

T = TensorSpec.contiguous
_MAX_ELEMENTS = 2**20


def _resampled(name: str, image: TensorSpec, d: int, *arguments: Argument) -> list[Op]:
    """An image made twice as large along its last `d` sides, and the gradient of that."""
    sides, factors = tuple(2 * side for side in image.shape[-d:]), (2.0,) * d
    return [
        Op(f"aten.{name}.default", (image, sides, *arguments, *factors)),
        Op(
            f"aten.{name}_backward.default",
            (T(*image.shape[:-d], *sides), sides, image.shape, *arguments, *factors),
        ),
    ]


def _padded(name: str, image: TensorSpec, d: int, pad: int) -> list[Op]:
    pads = (pad,) * (2 * d)
    sides = tuple(side + 2 * pad for side in image.shape[-d:])
    return [
        Op(f"aten.{name}.default", (image, pads)),
        Op(f"aten.{name}_backward.default", (T(*image.shape[:-d], *sides), image, pads)),
    ]


def images(index: int, u: float, v: float, w: float) -> list[Op]:
    """Every other point 2d kernels, of the others half 1d and half 3d ones."""
    n, c = log_pick(u, 1, 32), log_pick(v, 2, 128)
    d = (2, 2, 1, 3)[turn(index, 4)]
    side = log_pick(w, *{1: (8, 4096), 2: (4, 64), 3: (3, 16)}[d])
    image = T(n, c, *(side,) * d)
    if 2**d * image.numel > _MAX_ELEMENTS:
        return []
    smooth = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[d]
    found = _resampled(f"upsample_nearest{d}d", image, d) + _resampled(smooth, image, d, False)
    found += _padded(f"reflection_pad{d}d", image, d, min(1 + turn(index, 3, 1), side - 1))
    if d != 2:
        return found
    found += _padded("replication_pad2d", image, 2, 1)
    if turn(index, 2, 2):
        if 16 * image.numel <= _MAX_ELEMENTS:
            found += _resampled("upsample_bicubic2d", image, 2, False)
        sampled = (image, T(n, side, side, 2), 0, 0, False)
        found += [
            Op("aten.grid_sampler_2d.default", sampled),
            Op("aten.grid_sampler_2d_backward.default", (image, *sampled, (True, True))),
        ]
    else:
        found += _columns(image, side)
    return found


def _columns(image: TensorSpec, side: int) -> list[Op]:
    n, c = image.shape[:2]
    windows: Sequence[tuple[int, ...]] = (
        (3, 3),
        (1, 1),
        (1, 1),
        (1, 1),
    )  # window, dilation, padding, stride
    pooled = T(n, c, max(1, side // 2), max(1, side // 2))
    found = [
        Op("aten.max_unpool2d.default", (pooled, T(*pooled.shape, dtype="int64"), (side, side)))
    ]
    if 9 * image.numel <= _MAX_ELEMENTS:
        found += [
            Op("aten.im2col.default", (image, *windows)),
            Op("aten.col2im.default", (T(n, c * 9, side * side), (side, side), *windows)),
        ]
    return found


def uncommon(index: int, u: float, v: float, w: float) -> list[Op]:
    """Distances between rows, losses of margins and of sequences, Fourier transforms, weights of a
    set length, bilinear forms.
    """
    rows, width = log_pick(u, 4, 512), log_pick(v, 4, 256)
    lines, pairs = T(rows, width), T(rows, rows)
    found = [
        Op("aten._cdist_forward.default", (lines, lines, 2.0, None)),
        Op("aten._cdist_backward.default", (pairs, lines, lines, 2.0, pairs)),
        Op("aten._euclidean_dist.default", (lines, lines)),
        Op("aten.multi_margin_loss.default", (lines, T(rows, dtype="int64"), 1, 1.0)),
        Op(
            "aten.multi_margin_loss_backward.default",
            (T(), lines, T(rows, dtype="int64"), 1, 1.0, None),
        ),
    ]
    length = 2 ** log_pick(w, 3, 10)
    spectrum, signal = T(rows, length // 2 + 1, dtype="complex64"), T(rows, length)
    found += [
        Op("aten._fft_r2c.default", (signal, (1,), 0, True)),
        Op("aten._fft_c2r.default", (spectrum, (1,), 2, length)),
        Op("aten._fft_c2c.default", (T(rows, length, dtype="complex64"), (1,), 0, True)),
    ]
    scale, weight = T(rows, 1, 1), T(rows, width, 3)
    found += [
        Op("aten._weight_norm_interface.default", (weight, scale)),
        Op("aten._weight_norm_interface_backward.default", (weight, weight, scale, scale, 0)),
    ]
    small = min(width, 64)
    if rows * small**3 <= 16 * _MAX_ELEMENTS:
        found.append(
            Op(
                "aten._trilinear.default",
                (
                    T(rows, small),
                    T(small, small, small),
                    T(rows, small),
                    (1, 3),
                    (0,),
                    (1, 2),
                    (2, 3),
                ),
            )
        )
    steps, batch, classes = log_pick(w, 8, 128), log_pick(u, 1, 16), log_pick(v, 8, 64)
    labels = max(1, steps // 4)
    scores, targets, lengths = (
        T(steps, batch, classes),
        T(batch, labels, dtype="int64"),
        T(batch, dtype="int64"),
    )
    losses, alphas = T(batch), T(batch, steps, 2 * labels + 1)
    found += [
        Op("aten._ctc_loss.Tensor", (scores, targets, lengths, lengths)),
        Op(
            "aten._ctc_loss_backward.Tensor",
            (losses, scores, targets, lengths, lengths, losses, alphas, 0),
        ),
    ]
    return found

"""Kernels that few networks have, with a shape of their own: resampled and padded images, windows
as columns, distances, bilinear forms, CTC, transforms.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.microbench.plan import chosen, log_count, log_pick, power_of_two, turn

T = TensorSpec.contiguous
_MAX_ELEMENTS, _MAX_IMAGE = 2**20, 2**22


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
    """Every other point 2d kernels, half of them of large images, which are resampled otherwise; of
    the others half 1d and half 3d ones.
    """
    d = (2, 2, 1, 3)[turn(index, 4)]
    c, side = log_pick(v, 2, 128), log_pick(w, *{1: (8, 4096), 2: (4, 32), 3: (3, 16)}[d])
    if d == 2 and turn(index, 8) % 2:
        c, side = log_pick(v, 2, 48), log_pick(w, 33, 80)
    if d == 2 and turn(index, 2, 3) == 0:
        side = power_of_two(side)
    n = log_count(u, 2**d * c * side**d, _MAX_IMAGE, 64)
    image = T(n, c, *(side,) * d)
    smooth = {1: "upsample_linear1d", 2: "upsample_bilinear2d", 3: "upsample_trilinear3d"}[d]
    second = turn(index, 2, 2) == 1
    sampled = (image, T(n, side, side, 2), 0, 0, False)
    windows: Sequence[tuple[int, ...]] = ((3, 3), (1, 1), (1, 1), (1, 1))
    pooled = T(n, c, max(1, side // 2), max(1, side // 2))
    return chosen(
        (True, _resampled(f"upsample_nearest{d}d", image, d)),
        (True, _resampled(smooth, image, d, False)),
        (True, _padded(f"reflection_pad{d}d", image, d, min(1 + turn(index, 3, 1), side - 1))),
        (d == 2, _padded("replication_pad2d", image, d, 1)),
        (
            d == 2 and second and 16 * image.numel <= _MAX_ELEMENTS,
            _resampled("upsample_bicubic2d", image, d, False),
        ),
        (
            d == 2 and second,
            [
                Op("aten.grid_sampler_2d.default", sampled),
                Op("aten.grid_sampler_2d_backward.default", (image, *sampled, (True, True))),
            ],
        ),
        (
            d == 2 and not second,
            [
                Op(
                    "aten.max_unpool2d.default",
                    (pooled, T(*pooled.shape, dtype="int64"), (side, side)),
                )
            ],
        ),
        (
            d == 2 and not second and 9 * image.numel <= _MAX_ELEMENTS,
            [  # window, dilation, padding, stride
                Op("aten.im2col.default", (image, *windows)),
                Op("aten.col2im.default", (T(n, c * 9, side * side), (side, side), *windows)),
            ],
        ),
    )


def uncommon(index: int, u: float, v: float, w: float) -> list[Op]:
    """Distances between rows, losses of margins and of sequences, Fourier transforms, weights of a
    set length, bilinear forms.
    """
    rows, width = log_pick(u, 4, 512), log_pick(v, 4, 256)
    lines, pairs, classes_of_rows = T(rows, width), T(rows, rows), T(rows, dtype="int64")
    length = 2 ** log_pick(w, 3, 10)
    spectrum, signal = T(rows, length // 2 + 1, dtype="complex64"), T(rows, length)
    scale, weight = T(rows, 1, 1), T(rows, width, 3)
    small = min(width, 64)
    few, cube = T(rows, small), T(small, small, small)
    steps, batch, classes = log_pick(w, 8, 128), log_pick(u, 1, 16), log_pick(v, 8, 64)
    labels = max(1, steps // 4)
    scores, losses, alphas = T(steps, batch, classes), T(batch), T(batch, steps, 2 * labels + 1)
    targets, lengths = T(batch, labels, dtype="int64"), T(batch, dtype="int64")
    sequences = (scores, targets, lengths, lengths)
    return chosen(
        (
            True,
            [
                Op("aten._cdist_forward.default", (lines, lines, 2.0, None)),
                Op("aten._cdist_backward.default", (pairs, lines, lines, 2.0, pairs)),
                Op("aten._euclidean_dist.default", (lines, lines)),
                Op("aten.multi_margin_loss.default", (lines, classes_of_rows, 1, 1.0)),
                Op(
                    "aten.multi_margin_loss_backward.default",
                    (T(), lines, classes_of_rows, 1, 1.0, None),
                ),
                Op("aten._fft_r2c.default", (signal, (1,), 0, True)),
                Op("aten._fft_c2r.default", (spectrum, (1,), 2, length)),
                Op("aten._fft_c2c.default", (T(rows, length, dtype="complex64"), (1,), 0, True)),
                Op("aten._weight_norm_interface.default", (weight, scale)),
                Op(
                    "aten._weight_norm_interface_backward.default",
                    (weight, weight, scale, scale, 0),
                ),
            ],
        ),
        (
            rows * small**3 <= 16 * _MAX_ELEMENTS,
            [Op("aten._trilinear.default", (few, cube, few, (1, 3), (0,), (1, 2), (2, 3)))],
        ),
        (
            True,
            [
                Op("aten._ctc_loss.Tensor", sequences),
                Op("aten._ctc_loss_backward.Tensor", (losses, *sequences, losses, alphas, 0)),
            ],
        ),
    )

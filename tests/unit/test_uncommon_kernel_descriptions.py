"""Operators that few networks have: described by hand, sampled by calibrations, and none of
torch.nn's layers without a price.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quick_curves import assert_has_a_curve
from torch import nn
from torch.nn import functional as F

from dlperf.core.trace import Op, Symbol, TensorSpec
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.description import KernelDescription
from dlperf.recorder.recording import record

T = TensorSpec.contiguous


def described(name: str, *args: Any, **kwargs: Any) -> KernelDescription:
    found = describe(Op(name, args, tuple(kwargs.items())))
    assert found is not None
    return found


# -- images ----------------------------------------------------------------------------------------


def test_a_resampled_image_counts_what_each_of_its_elements_is_made_of() -> None:
    found = described("aten.upsample_bilinear2d.default", T(2, 4, 8, 8), (16, 16), False, 2.0, 2.0)
    assert found.variant == ("upsample_bilinear2d", "float32")
    assert found.features == (3.0, 8.0)  # eight planes of 256
    assert found.terms == (1.0, 4 * 2 * 4 * 256, 2 * 4 * 64, 8.0, 0.0)
    backward = described(
        "aten.upsample_bilinear2d_backward.default",
        T(2, 4, 16, 16),
        (16, 16),
        (2, 4, 8, 8),
        False,
        2.0,
        2.0,
    )
    assert backward.variant == ("upsample_bilinear2d_backward", "float32")
    assert (backward.features, backward.terms) == (found.features, found.terms)
    # Planes of 4 KiB lie in the same lines of a cache.
    aliased = described("aten.upsample_nearest2d.default", T(2, 4, 16, 16), (32, 32), 2.0, 2.0)
    assert aliased.terms[-1] == 2 * 4 * 1024


@pytest.mark.parametrize(
    ("name", "kernel", "options"),
    [
        ("upsample_nearest2d", "upsample_nearest2d", ()),
        ("_upsample_nearest_exact2d", "upsample_nearest2d", ()),
        ("upsample_bilinear2d", "upsample_bilinear2d", (False,)),
    ],
)
def test_large_images_are_resampled_otherwise_unless_their_channels_come_last(
    name: str, kernel: str, options: tuple[bool, ...]
) -> None:
    """Those whose sides are more than 128 together; their gradients and bicubic ones are not."""
    sides, scales = (64, 65), (2.0, 2.0)
    image = T(1, 2, 32, 32)
    last = TensorSpec((1, 2, 32, 32), (2048, 1, 64, 2))
    large, last_too, small = (
        described(f"aten.{name}.default", spec, size, *options, *scales)
        for spec, size in ((image, sides), (last, sides), (image, (64, 64)))
    )
    plain = kernel, "float32"
    assert large.variant == (f"{kernel} large", "float32")
    assert plain in large.fallbacks
    assert last_too.variant == small.variant == plain
    back = T(1, 2, *sides), sides, (1, 2, 32, 32)
    gradient = described(f"aten.{name}_backward.default", *back, *options, *scales)
    assert gradient.variant == (f"{kernel}_backward", "float32")
    cubic = described("aten.upsample_bicubic2d.default", image, sides, False, *scales)
    assert cubic.variant == ("upsample_bicubic2d", "float32")


def test_sizes_come_from_scale_factors_where_none_is_given() -> None:
    by_size = described("aten.upsample_nearest2d.default", T(2, 4, 8, 8), (16, 16), 2.0, 2.0)
    by_factor = described("aten.upsample_nearest2d.vec", T(2, 4, 8, 8), None, (2.0, 2.0))
    assert (by_factor.variant, by_factor.features, by_factor.terms) == (
        by_size.variant,
        by_size.features,
        by_size.terms,
    )


def test_exact_and_antialiased_forms_take_the_curve_of_the_plain_ones() -> None:
    assert (
        described(
            "aten._upsample_nearest_exact2d.default", T(1, 1, 4, 4), (8, 8), 2.0, 2.0
        ).variant[0]
        == "upsample_nearest2d"
    )
    assert (
        described(
            "aten._upsample_bilinear2d_aa.default", T(1, 1, 4, 4), (8, 8), False, 2.0, 2.0
        ).variant[0]
        == "upsample_bilinear2d"
    )
    assert ("upsample_bilinear2d", "float32") in described(
        "aten.upsample_trilinear3d.default", T(1, 1, 4, 4, 4), (8, 8, 8), False
    ).fallbacks


def test_a_padded_image() -> None:
    found = described("aten.reflection_pad2d.default", T(2, 4, 6, 8), (1, 3, 1, 1))
    assert (found.variant, found.features[0], found.terms) == (
        ("reflection_pad2d", "float32"),
        3.0,
        (1.0, 8 * 8 * 12, 8 * 8, 8.0),
    )
    backward = described(
        "aten.reflection_pad2d_backward.default", T(2, 4, 8, 12), T(2, 4, 6, 8), (1, 3, 1, 1)
    )
    assert backward.terms == found.terms
    assert ("reflection_pad2d", "float32") in described(
        "aten.replication_pad3d.default", T(1, 4, 6, 6, 6), (1,) * 6
    ).fallbacks


def test_windows_as_columns() -> None:
    found = described("aten.im2col.default", T(2, 3, 8, 8), (3, 3), (1, 1), (1, 1), (2, 2))
    assert found.terms == (1.0, 2 * 3 * 9 * 16, 2 * 3 * 16)
    assert (
        described("aten.col2im.default", T(2, 27, 16), (8, 8), (3, 3), (1, 1), (1, 1), (2, 2)).terms
        == found.terms
    )


def test_zeros_around_an_image_are_copied_in_runs() -> None:
    rows = described("aten.constant_pad_nd.default", T(2, 3, 8, 8), (1, 1, 1, 1), 0.0)
    assert (rows.features[1], rows.terms) == (
        3.0,
        (1.0, 2 * 3 * 100, 2 * 3 * 64, 2 * 3 * 8),
    )  # row by row
    planes = described("aten.constant_pad_nd.default", T(2, 3, 8, 8), (0, 0, 0, 0, 1, 1), 0.0)
    assert planes.features[1] == pytest.approx(
        7.585, abs=1e-3
    )  # the three planes of an image at once
    assert (
        described("aten.constant_pad_nd.default", T(2, 3, 8, 8), (-1, -1, -1, -1)).variant[0]
        == "clone"
    )  # what is left, copied


# -- elements, rows, bags --------------------------------------------------------------------------


def test_one_element_everywhere_is_read_like_a_number() -> None:
    expanded = TensorSpec((8, 16), (0, 0))
    assert described("aten.mul.Tensor", expanded, T(8, 16)).variant == (
        "mul",
        "1",
        "float32",
        "flat",
    )
    assert ("gelu_backward", "2", "float32", "flat") in described(
        "aten.gelu_backward.default", expanded, T(8, 16)
    ).fallbacks


def test_an_expanded_column_is_read_like_a_column() -> None:
    column = described("aten.div.Tensor", T(8, 16), TensorSpec((8, 16), (1, 0)))
    assert column.variant == described("aten.div.Tensor", T(8, 16), T(8, 1)).variant


POWERS = [
    (2, "pow 2"),
    (2.0, "pow 2"),
    (3, "pow 3"),
    (0.75, "pow fraction"),
    (-2, "pow fraction"),
    (0.5, "sqrt"),
    (1.0, "clone"),
]


@pytest.mark.parametrize(("exponent", "key"), POWERS)
def test_powers_by_the_kernel_that_computes_them(exponent: float, key: str) -> None:
    assert described("aten.pow.Tensor_Scalar", T(8), exponent).variant[0] == key


def test_comparisons_and_the_two_kinds_of_gelu() -> None:
    assert ("eq", "1", "float32", "flat") in described("aten.ne.Scalar", T(8), 1.0).fallbacks
    tanh = described("aten.gelu.default", T(8), approximate="tanh")
    assert tanh.variant == ("gelu tanh", "1", "float32", "flat")
    assert ("gelu", "1", "float32", "flat") in tanh.fallbacks


def test_sorting_takes_longer_than_linearly() -> None:
    assert described("aten.sort.default", T(8, 64)).terms == (1.0, 512.0, 512.0 * 6, 8.0)
    assert described("aten.sort.stable", T(64, 8), stable=True, dim=0).terms == (
        1.0,
        512.0,
        512.0 * 6,
        8.0,
    )
    assert described("aten.topk.default", T(8, 64), 3).variant[0] == "topk"
    assert described("aten.median.dim", T(64, 8), 0).features == (3.0, 6.0)


def test_a_variance_of_all_has_a_curve_of_its_own() -> None:
    assert described("aten.std.correction", T(8, 64)).variant[0] == "var_all"
    assert (
        described("aten.var.correction", T(8, 64), (1,), correction=Symbol("x", "1")).variant[0]
        == "var"
    )


def test_bags_of_an_embedding() -> None:
    tokens, bags = T(24, dtype="int64"), T(4, dtype="int64")
    forward = described(
        "aten._embedding_bag.default", T(32, 16), tokens, bags, False, 1, False, None
    )
    assert (forward.variant, forward.terms) == (
        ("embedding_bag", "mean"),
        (1.0, 24.0, 24 * 16, 0.0, 4 * 16),
    )
    backward = described(
        "aten._embedding_bag_backward.default",
        T(4, 16),
        tokens,
        bags,
        T(0, dtype="int64"),
        bags,
        bags,
        32,
        False,
        0,
        False,
        None,
    )
    assert (backward.variant, backward.terms[3]) == (
        ("embedding_bag_backward", "sum"),
        32 * 16,
    )  # the table's gradient is filled


def test_a_repeated_tensor_counts_its_result() -> None:
    assert described("aten.repeat.default", T(8), (4, 2)).terms == (1.0, 64.0)


def test_distances_transforms_and_losses_by_hand() -> None:
    assert described("aten._cdist_forward.default", T(2, 8, 16), T(2, 4, 16), 2.0, None).terms == (
        1.0,
        2 * 8 * 4 * 16,
        2 * 8 * 4,
    )
    assert described("aten._fft_r2c.default", T(8, 64), (1,), 0, True).terms == (
        1.0,
        8 * 64 * 6,
        8 * 64,
        8.0,
    )
    assert described("aten._fft_c2r.default", T(8, 33, dtype="complex64"), (1,), 2, 64).terms == (
        1.0,
        8 * 64 * 6,
        8 * 64,
        8.0,
    )
    assert described("aten._ctc_loss.Tensor", T(10, 2, 8), T(2, 3, dtype="int64")).terms == (
        1.0,
        10 * 2 * 7,
        10 * 2 * 8,
    )
    assert described("aten._trilinear.default", T(4, 16), T(8, 16, 12), T(4, 12)).terms == (
        1.0,
        4 * 8 * 16 * 12,
        8.0,
        4 * 16 + 4 * 12,
    )


# -- layers of torch.nn ----------------------------------------------------------------------------

IMAGE, SIGNAL, VOLUME, ROWS = (2, 8, 8, 8), (2, 8, 12), (2, 4, 6, 6, 6), (4, 16)


class Around(nn.Module):
    """A layer, behind a parameter so that there is a backward."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.ones(1))

    def forward(self, *inputs: torch.Tensor) -> Any:
        out = self.layer(*(x * self.scale if x.is_floating_point() else x for x in inputs))
        return out[0] if isinstance(out, tuple) else out


def _layers() -> dict[str, tuple[Any, tuple[torch.Tensor, ...]]]:
    names = """ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid PReLU ReLU ReLU6 RReLU SELU CELU GELU Sigmoid SiLU Mish Softplus Softshrink
        Softsign Tanh Tanhshrink GLU""".split()
    found: dict[str, tuple[Any, tuple[torch.Tensor, ...]]] = {
        name: (getattr(nn, name)(), (torch.rand(ROWS),)) for name in names
    }
    for d, shape in ((1, SIGNAL), (2, IMAGE), (3, VOLUME)):
        x = torch.rand(shape)
        for name in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
            found[f"{name}{d}d"] = (getattr(nn, f"{name}{d}d")(1), (x,))
        for mode in {
            1: ("nearest", "linear"),
            2: ("nearest", "nearest-exact", "bilinear", "bicubic", "area"),
            3: ("nearest", "trilinear"),
        }[d]:
            found[f"Upsample {mode} {d}d"] = (nn.Upsample(scale_factor=2, mode=mode), (x,))
        found[f"InstanceNorm{d}d"] = (getattr(nn, f"InstanceNorm{d}d")(shape[1], affine=True), (x,))
        found[f"LPPool{d}d"] = (getattr(nn, f"LPPool{d}d")(2, 2), (x,))
    for mode in ("sum", "mean", "max"):
        found[f"EmbeddingBag {mode}"] = (
            nn.EmbeddingBag(32, 16, mode=mode),
            (torch.zeros(4, 6, dtype=torch.long),),
        )
    lines, image, labels = torch.rand(ROWS), torch.rand(IMAGE), torch.zeros(4, dtype=torch.long)
    return found | {
        "Bilinear": (nn.Bilinear(16, 16, 8), (lines, lines)),
        "LocalResponseNorm": (nn.LocalResponseNorm(3), (image,)),
        "Fold": (nn.Fold((8, 8), 3, padding=1), (torch.rand(2, 36, 64),)),
        "Unfold": (nn.Unfold(3, padding=1), (image,)),
        "MaxUnpool2d": (
            lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
            (image,),
        ),
        "grid_sample": (F.grid_sample, (torch.rand(1, 4, 8, 8), torch.rand(1, 4, 4, 2))),
        "weight_norm": (
            torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3)),
            (torch.rand(SIGNAL),),
        ),
        "ChannelShuffle": (nn.ChannelShuffle(4), (image,)),
        "MultiMarginLoss": (nn.MultiMarginLoss(), (lines, labels)),
        "SoftMarginLoss": (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), (lines,)),
        "KLDivLoss": (nn.KLDivLoss(reduction="batchmean"), (lines, torch.rand(ROWS))),
        "cdist": (torch.cdist, (lines, torch.rand(ROWS))),
        "topk": (lambda x: x.topk(3)[0], (lines,)),
        "sort": (lambda x: x.sort(1)[0], (lines,)),
        "cumprod": (lambda x: x.cumprod(1), (lines,)),
        "rfft": (lambda x: torch.view_as_real(torch.fft.rfft(x)), (lines,)),
    }


LAYERS = _layers()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_a_curve_even_in_a_quick_calibration(name: str) -> None:
    layer, inputs = LAYERS[name]
    for op in record(Around(layer), inputs, loss=lambda out: out.mean()).ops:
        assert_has_a_curve(op)

"""Descriptions of ops by hand, and what torch itself says of convolutions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_curves import assert_has_a_curve
from recorder_zoo import CASES
from torch import nn
from torch.nn import functional as F

from dlperf.core.errors import DlperfError
from dlperf.core.trace import Argument, Op, Symbol, TensorSpec
from dlperf.microbench.conv import backward_of, convolution
from dlperf.microbench.layers import recurrent
from dlperf.microbench.plan import MODES
from dlperf.microbench.worker import planned_groups
from dlperf.predictors.allocator.stages import Stage
from dlperf.predictors.kernels.catalog import describe, known
from dlperf.predictors.kernels.description import KernelDescription, kernel_features
from dlperf.predictors.kernels.onednn import convolution_call
from dlperf.predictors.kernels.sub_kernels import scratch, sub_kernels
from dlperf.recorder.recording import record

T = TensorSpec.contiguous


def described(name: str, *args: Any, **kwargs: Any) -> KernelDescription:
    found = describe(Op(name, args, tuple(kwargs.items())))
    assert found is not None
    return found


def spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(
        tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
    )


# -- by hand: place in octaves, terms in amounts of work -------------------------------------------


def test_a_linear_layer() -> None:
    # (8 x 16)(16 x 4) with the transposed weight of nn.Linear
    found = described("aten.addmm.default", T(4), T(8, 16), TensorSpec((16, 4), (1, 16)))
    assert found.variant == ("gemm", "float32", "matrix")
    # octaves; 8 and 4 are one part of a block of 16 each, 16 is whole; the weight is transposed;
    # there is a bias; one product
    assert found.features == (3.0, 2.0, 4.0, 6.0, 4.0, 0.35, 0.35, 0.0, 0.0, 1.0, 1.0, 0.0)
    # the products; whole tiles of 8 x 16, 4 x 24 and 8 x 48 and the same turned; the parts of a
    # side for each of the other two sides' products
    tiles = (8 * 16, 16 * 8, 8 * 24, 24 * 4, 8 * 48, 48 * 8)
    assert found.terms == (
        1.0,
        1.0,
        8 * 4 * 16,
        8 * 4,
        8 * 16,
        16 * 4,
        *(tile * 16 for tile in tiles),
        8 * 16,
        4 * 16,
    )
    assert found.fallbacks == (("bmm", "float32", "matrix"),)


def test_batched_products_and_vectors() -> None:
    found = described("aten.bmm.default", T(2, 8, 16), T(2, 16, 4))
    assert (found.variant, found.features[:3], found.features[-1], found.terms[2]) == (
        ("bmm", "float32", "matrix"),
        (3.0, 2.0, 4.0),
        1.0,
        2 * 8 * 4 * 16,
    )
    found = described("aten.mv.default", T(8, 16), T(16))
    assert (found.variant, found.features[:3]) == (("gemm", "float32", "vector"), (3.0, 0.0, 4.0))
    assert found.fallbacks[0] == ("gemm", "float32", "matrix")
    assert described("aten.dot.default", T(16), T(16)).features[:3] == (0.0, 0.0, 4.0)


@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_the_order_of_the_operands_in_memory(transposed: tuple[bool, bool]) -> None:
    left = torch.empty(6, 4).t() if transposed[0] else torch.empty(4, 6)
    right = torch.empty(5, 6).t() if transposed[1] else torch.empty(6, 5)
    assert described("aten.mm.default", spec(left), spec(right)).features[8:10] == tuple(
        map(float, transposed)
    )


@pytest.mark.parametrize(
    ("left", "right", "stored_bytes"),
    [
        (T(9, 16), T(16, 24), (4 * 9 * 24, 0)),  # rows of 96 bytes
        (T(9, 16), T(16, 25), (0, 4 * 9 * 25)),
        (T(9, 193), T(193, 25), (0, 2 * 4 * 9 * 25)),  # in two panels
        (T(9, 16, dtype="float64"), T(16, 12, dtype="float64"), (8 * 9 * 12, 0)),
        (T(1, 16), T(16, 25), (4 * 25, 0)),  # a vector has one row
    ],
)
def test_rows_that_begin_within_a_vector_are_stored_by_another_way(
    left: TensorSpec, right: TensorSpec, stored_bytes: tuple[int, int]
) -> None:
    found = described("aten.mm.default", left, right)
    assert found.stored_bytes == stored_bytes
    assert found.result_bytes == left.shape[0] * right.shape[1] * left.item_bytes


def test_tiny_products_of_a_batch_ask_no_blas() -> None:
    """399 multiplications are below torch's limit of 400; a batch of one that addmm computes knows
    no such limit.
    """
    below = described("aten.bmm.default", T(5, 3, 19), T(5, 19, 7))
    assert below.variant == ("bmm", "float32", "loops")
    assert below.fallbacks[0] == ("bmm", "float32", "matrix")
    assert described("aten.bmm.default", T(5, 4, 20), T(5, 20, 5)).variant == (
        "bmm",
        "float32",
        "matrix",
    )
    assert described("aten.bmm.default", T(5, 1, 19), T(5, 19, 7)).fallbacks[0] == (
        "bmm",
        "float32",
        "vector",
    )
    assert described("aten.mm.default", T(3, 19), T(19, 7)).variant == ("gemm", "float32", "matrix")


def test_a_matrix_of_one_column_is_row_major() -> None:
    assert described("aten.mm.default", TensorSpec((4, 1), (1, 4)), T(1, 3)).features[8:10] == (
        0.0,
        0.0,
    )


def test_a_convolution_by_one_thread_or_several() -> None:
    # a 1x1 convolution of few images stays with torch's own code unless several threads run it
    # (takes_onednn)
    op = convolution(2, 16, 16, (8, 8), (1, 1))
    keys = [found.variant for threads in (1, 2) if (found := describe(op, threads)) is not None]
    assert keys == [
        ("conv", "float32", "1x1 2d", "native"),
        ("conv", "float32", "1x1 2d", "blocked"),
    ]


def test_elementwise_by_access_pattern() -> None:
    def key(a: TensorSpec, b: TensorSpec) -> tuple[str, ...]:
        return described("aten.add.Tensor", a, b).variant

    assert key(T(8, 8), T(8, 8)) == ("add", "2", "float32", "flat")
    assert key(TensorSpec((8, 8), (1, 8)), TensorSpec((8, 8), (1, 8))) == (
        "add",
        "2",
        "float32",
        "flat",
    )  # one dense order
    assert key(T(8, 8), TensorSpec((8, 8), (1, 8))) == ("add", "2", "float32", "strided")
    assert key(T(8, 8), T(8)) == ("add", "1", "float32", "row")
    assert key(T(8, 8), T(8, 1)) == ("add", "1", "float32", "column")
    assert key(T(8, 8), T()) == ("add", "1", "float32", "flat")
    assert described("aten.clone.default", TensorSpec((8, 8), (1, 0))).variant[-1] == "broadcast"
    assert described("aten.add.Tensor", T(8, 16), T(8, 16)).features == (7.0,)
    assert described("aten.add.Tensor", T(8, 16), T(8, 16)).terms == (1.0, 128.0)


def test_gaps_between_long_runs_cost_nothing_and_short_runs_a_little() -> None:
    def pattern(*operands: TensorSpec, **options: object) -> str:
        return described(
            "aten.add.Tensor" if len(operands) > 1 else "aten.clone.default", *operands, **options
        ).variant[-1]

    whole = T(4, 6, 32, 32)
    sliced = TensorSpec(
        (4, 6, 32, 32), (12 * 1024, 1024, 32, 1)
    )  # half of the channels of a larger one
    assert pattern(whole, sliced) == "flat"  # runs of 6 x 1024
    heads = TensorSpec((2, 4, 8, 64), (8 * 4 * 64, 64, 4 * 64, 1))
    assert pattern(T(2, 4, 8, 64), heads) == "runs"  # of 64
    assert pattern(heads, memory_format=Symbol("memory_format", "contiguous_format")) == "runs"
    assert pattern(T(4, 8), TensorSpec((4, 8), (16, 2))) == "strided"
    assert described("aten.add.Tensor", T(2, 4, 8, 64), heads).fallbacks[0] == (
        "clone",
        "1",
        "float32",
        "runs",
    )


def test_powers_differ() -> None:
    assert (
        described("aten.pow.Tensor_Scalar", T(8), 2).variant
        != described("aten.pow.Tensor_Scalar", T(8), 3).variant
    )


def test_casts_name_both_dtypes() -> None:
    kinds = {
        described("aten._to_copy.default", T(8, dtype=d), dtype=Symbol("dtype", "float32")).variant
        for d in ("bfloat16", "float64")
    }
    assert len(kinds) == 2


def test_reductions() -> None:
    last, first = (
        described("aten.sum.dim_IntList", T(8, 32), (1,)),
        described("aten.sum.dim_IntList", T(8, 32), (0,), True),
    )
    assert (last.variant, last.features, last.terms) == (
        ("sum", "float32", "last"),
        (3.0, 5.0, 0.0, 0.0, 0.0),
        (1.0, 256.0, 8.0, 8.0, 0.0, 0.0, 0.0),
    )
    assert (first.variant, first.features, first.terms) == (
        ("sum", "float32", "first"),
        (0.0, 3.0, 5.0, 0.0, 0.0),
        (1.0, 256.0, 32.0, 1.0, 0.0, 0.0, 0.0),
    )
    assert described("aten.sum.default", T(8, 32)).features[:3] == (0.0, 8.0, 0.0)
    assert described("aten.mean.dim", T(4, 2, 8, 8), (-1, -2), True).features[:3] == (3.0, 6.0, 0.0)
    assert described("aten.max.other", T(8), T(8)).variant[0] == "max"


def test_rows_that_are_no_whole_vectors_have_work_of_their_own() -> None:
    whole, left, short = (
        described("aten._softmax.default", T(10, width), -1, False) for width in (48, 53, 12)
    )
    assert whole.terms[4:] == (0.0, 160.0, 0.0)  # three vectors: one is left over of pairs
    assert left.terms[4:] == (50.0, 210.0, 0.0)
    assert short.terms[4:] == (120.0, 120.0, 120.0)
    assert len({whole.features[3:], left.features[3:], short.features[3:]}) == 3
    assert described("aten._softmax.default", T(10, 53), 0, False).terms[4:] == (
        0.0,
        0.0,
        0.0,
    )  # along the first side vectors hold several columns


def test_softmax_pools_norms_and_moves() -> None:
    assert described("aten._log_softmax.default", T(8, 32), 1, False).features[:3] == (
        3.0,
        5.0,
        0.0,
    )
    pool = described("aten.max_pool2d_with_indices.default", T(2, 4, 8, 8), (2, 2), (2, 2), (0, 0))
    assert (pool.features, pool.terms) == (
        (3.0, 4.0, 2.0),
        (1.0, 128.0, 512.0, 512.0, 8.0),
    )  # 8 planes, 4 x 4 outputs of 2 x 2
    norm = described(
        "aten.native_batch_norm.default", T(2, 4, 8, 8), T(4), T(4), T(4), T(4), False, 0.1, 1e-5
    )
    assert (norm.variant[-1], norm.features) == ("evaluation", (1.0, 2.0, 6.0))
    rows = described("aten.embedding.default", T(1024, 16), T(8, dtype="int64"))
    assert (rows.features, rows.terms[2]) == ((3.0, 4.0, 5.0), 128.0)
    assert described("aten.cat.default", (T(8, 4), T(8, 4)), 1).features == (6.0, 2.0)
    assert described("aten.view.default", T(8), (8,)).terms == (1.0,)


@pytest.mark.parametrize(
    ("name", "arguments", "n_pieces"),
    [
        ("unbind.int", (), 30),
        ("unbind.int", (-1,), 20),
        ("split.Tensor", (7,), 5),
        ("split.Tensor", (8, 1), 3),
        ("unsafe_split.Tensor", (8, 1), 3),
        ("split_with_sizes.default", ((10, 20),), 2),
        ("split_with_sizes.default", ((30,),), 1),
        ("chunk.default", (4, 1), 4),
    ],
)
def test_views_of_pieces_take_time_by_piece(
    name: str, arguments: tuple[Argument, ...], n_pieces: int
) -> None:
    assert described(f"aten.{name}", T(30, 24, 20), *arguments).terms == (1.0, n_pieces)


@pytest.mark.parametrize(
    ("n_keys", "causal", "expected"),
    [(40, False, 40 * 40), (40, True, 40 * 40), (1100, True, 32 * 512 + 8 * 512)],
)
def test_attention_takes_blocks_of_keys_as_a_whole(
    n_keys: int, causal: bool, expected: int
) -> None:
    q, k = T(2, 4, 40, 8), T(2, 4, n_keys, 8)
    found = described(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", q, k, k, 0.0, causal
    )
    assert (
        found.terms[4] == 2 * 4 * expected
    )  # scores: a causal mask spares none of the first 512 keys
    assert (found.terms[15] > 0) == causal
    again = described(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
        q,
        q,
        k,
        k,
        q,
        T(2, 4, 40),
        0.0,
        causal,
    )
    assert (again.terms, again.features) == (found.terms, found.features)


def test_a_masked_attention_has_a_place_of_its_own() -> None:
    q = T(2, 4, 16, 8)
    plain, masked = (
        describe(Op("aten._scaled_dot_product_flash_attention_for_cpu.default", (q, q, q), named))
        for named in ((), (("attn_mask", T(16, 16)),))
    )
    assert plain is not None
    assert masked is not None
    assert plain.variant == masked.variant
    assert plain.features != masked.features
    assert (plain.terms[-1], masked.terms[-1]) == (0, 2 * 4 * 16 * 16)


def test_recurrent_layers_compute_whole_blocks() -> None:
    even, odd = (describe(recurrent(5, 3, 20, hidden)[0]) for hidden in (32, 20))
    assert even is not None
    assert odd is not None
    assert (even.terms[2], odd.terms[2]) == (5 * 3 * 4 * 32 * 20, 5 * 3 * 4 * 32 * 20)
    assert even.terms[3] > odd.terms[3]


def test_convolutions() -> None:
    found = described(
        "aten.convolution.default", *convolution(2, 16, 32, (8, 8), (3, 3), 1, 1).args
    )
    assert found.variant[:3] == ("conv", "float32", "dense2d")
    assert found.variant[3] != "native"
    assert (
        described(
            "aten.convolution.default",
            *convolution(2, 16, 32, (8, 8), (3, 3), dtype="float64").args,
        ).variant[3]
        == "native"
    )
    assert (
        found.terms[1] == 2 * 16 * 32 * (8 * 3 - 2) ** 2
    )  # multiply-adds: the taps of the rim lie outside the image
    assert (
        described(
            "aten.convolution.default", *convolution(2, 16, 16, (8, 8), (3, 3), groups=16).args
        ).variant[2]
        == "depthwise2d"
    )
    assert described(
        "aten.convolution.default", *convolution(2, 16, 32, (8, 8), (3, 3), groups=16).args
    ).variant[2:4] == ("grouped2d", "gemm")
    assert (
        described("aten.convolution.default", *convolution(2, 16, 32, (8,), (1,)).args).variant[2]
        == "1x1 2d"
    )
    up = described(
        "aten.convolution.default", *convolution(2, 16, 32, (8, 8), (2, 2), 2, transposed=True).args
    )
    assert (up.variant[2:4], up.terms[1]) == (("transposed2d", "strided"), 2 * 64 * 16 * 32 * 4)
    down = describe(backward_of(convolution(2, 32, 16, (16, 16), (2, 2), 2), (True, False)))
    assert down is not None
    assert down.terms == up.terms  # the same gradient of the same input


def test_a_convolutions_backward_is_two_passes_with_curves_of_their_own() -> None:
    forward = convolution(2, 16, 32, (8, 8), (3, 3), 1, 1)
    both = backward_of(forward)
    assert describe(both) is None
    by_input, by_weight = sub_kernels(both)
    assert (by_input, by_weight) == (
        backward_of(forward, (True, False)),
        backward_of(forward, (False, True)),
    )
    assert by_weight.args[10] == (False, True, True)  # with the gradient of the bias
    assert sub_kernels(by_weight) == (by_weight,)
    of_input, of_weight = describe(by_input), describe(by_weight)
    assert of_input is not None
    assert of_weight is not None
    assert (of_input.variant[0], of_weight.variant[0]) == ("conv_input", "conv_weight")
    assert (
        of_input.terms[1] == of_weight.terms[1]
    )  # as many products for the input as for the weight


def test_operands_that_lie_otherwise_are_copied_first() -> None:
    backward = backward_of(convolution(2, 16, 32, (8, 8), (3, 3), 1, 1))
    gap = TensorSpec((2, 32, 8, 8), (4096, 64, 8, 1))  # half of the channels of a larger image
    strided = replace(backward, args=(gap, *backward.args[1:]))
    assert [part.name for part in sub_kernels(strided)] == [
        *(part.name for part in sub_kernels(backward)),
        "aten.clone.default",
    ]
    assert [stage.held for stage in scratch(strided)] == [(2 * 32 * 64 * 4,), ()]  # made once
    last = TensorSpec((2, 32, 8, 8), (2048, 1, 256, 32))
    turned = replace(backward, args=(last, *backward.args[1:]))
    assert len(sub_kernels(turned)) == 3  # the image is in NCHW, so the gradient has to be
    all_last = backward_of(convolution(2, 16, 32, (8, 8), (3, 3), 1, 1, channels_last=True))
    assert len(sub_kernels(all_last)) == 2


def test_batch_norm_makes_its_gradient_twice() -> None:
    image = T(2, 4, 8, 8)
    backward = Op(
        "aten.native_batch_norm_backward.default",
        (image, image, T(4), T(4), T(4), T(4), T(4), True, 1e-5, (True, True, True)),
        outputs=(image,),
    )
    assert scratch(backward) == (Stage(untouched=(2048,)),)
    assert scratch(
        replace(
            backward,
            args=(T(2, 4, 8, 8), TensorSpec((2, 4, 8, 8), (512, 64, 8, 1)), *backward.args[2:]),
        )
    ) == (Stage((2048,)),)  # a copy instead


def test_what_the_gradient_of_a_weight_takes_names_its_curve() -> None:
    near, far = (
        describe(
            backward_of(
                convolution(16, 32, 32, (9, 9), (side, side), 1, side // 2, groups=32),
                (False, True),
            )
        )
        for side in (3, 5)
    )
    assert near is not None
    assert far is not None
    assert (near.variant[3], far.variant[3]) == ("blocked", "gemm")
    assert near.variant in far.fallbacks


@pytest.mark.parametrize(
    ("width", "c_in", "c_out", "aliased"),
    [
        (32, 16, 32, (48, 0)),
        (32, 20, 32, (32, 32)),  # 20 channels are put into two blocks, the second partly empty
        (31, 16, 32, (0, 0)),
    ],
)
def test_planes_of_whole_pages_are_put_into_blocks_more_slowly(
    width: int, c_in: int, c_out: int, aliased: tuple[int, int]
) -> None:
    found = describe(convolution(4, c_in, c_out, (32, width), (3, 3), padding=1), 1)
    assert found is not None
    assert found.terms[-6:-4] == tuple(4.0 * 32 * width * channels for channels in aliased)


def test_a_product_per_image_has_parts_of_its_sides() -> None:
    """A 1x1 convolution of 2 images, 12 channels to 20, on 5 x 5 pixels, by BLAS: (20 x 12)(12 x 25),
    the gradient of the input (12 x 20)(20 x 25), of the weight (20 x 25)(25 x 12). 25 is 16 + 8 + 1,
    20 is 16 + 4, 12 is 8 + 4.
    """
    forward = convolution(2, 12, 20, (5, 5), (1, 1))
    found = [describe(forward, 1), *map(describe, sub_kernels(backward_of(forward)))]
    assert [(one.variant[0], one.terms[-3:-1]) for one in found if one] == [
        ("conv", (2 * 20 * 12 * 2, 2 * 25 * 12 * 1)),
        ("conv_input", (2 * 12 * 20 * 2, 2 * 25 * 20 * 2)),
        ("conv_weight", (2 * 20 * 25 * 2, 2 * 12 * 25 * 1)),
    ]
    blocked = describe(convolution(4, 16, 20, (32, 32), (3, 3), padding=1), 1)
    assert blocked is not None
    assert blocked.terms[-3:-1] == (0, 0)


def test_a_bias_is_added_apart_where_strides_do_not_divide_the_image() -> None:
    found = [
        describe(
            convolution(
                4, 48, 24, (7, 7), (3, 3), 2, 1, bias=bias, transposed=True, output_padding=more
            ),
            1,
        )
        for bias, more in ((True, 0), (False, 0), (True, 1))
    ]
    assert [one.terms[4] for one in found if one] == [4 * 24 * 13 * 13, 0, 0]


def test_a_strided_kernel_of_one_tap_has_a_term_of_its_own() -> None:
    point, larger = (
        describe(convolution(4, 3, 20, (16, 16), (side, side), 2, side // 2), 1) for side in (1, 3)
    )
    assert point is not None
    assert larger is not None
    assert (point.terms[13], larger.terms[13]) == (4 * 32 * 8 * 8, 0)


@pytest.mark.parametrize(
    ("side", "c_out", "columns"),
    [
        (15, 32, 0),  # 225 pixels
        (16, 32, 8 * 32 * 25),  # 256
        (16, 64, 0),  # a product with two channels each
    ],
)
def test_columns_that_a_single_channel_is_multiplied_with_may_be_long(
    side: int, c_out: int, columns: int
) -> None:
    forward = convolution(8, 32, c_out, (side, side), (5, 5), 1, 2, groups=32)
    of_input, of_weight = map(describe, sub_kernels(backward_of(forward)))
    assert of_input is not None
    assert of_weight is not None
    assert of_weight.variant[3] == "gemm"
    assert (of_input.terms[-1], of_weight.terms[-1]) == (0.0, columns)


# -- torch as oracle -------------------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    """(image, weight, (stride, padding, dilation, transposed, output_padding, groups))."""
    d, transposed, groups = (
        draw(st.integers(1, 3)),
        draw(st.booleans()),
        draw(st.sampled_from([1, 1, 2, 4])),
    )
    c_in, c_out = (
        groups * draw(st.sampled_from([1, 3, 8, 16])),
        groups * draw(st.sampled_from([1, 4, 16])),
    )
    kernel = tuple(draw(st.sampled_from([1, 1, 2, 3, 4, 5])) for _ in range(d))
    size = tuple(draw(st.sampled_from([9, 14, 40] if d < 3 else [9, 14])) for _ in range(d))
    stride, padding, dilation = (
        (draw(st.sampled_from(choices)),) * d for choices in ([1, 1, 2], [0, 1], [1, 1, 2])
    )
    dtype = draw(st.sampled_from([torch.float32] * 4 + [torch.float64]))
    image = torch.empty(draw(st.sampled_from([1, 2, 15, 16])), c_in, *size, dtype=dtype)
    weight = torch.empty(
        *((c_in, c_out // groups) if transposed else (c_out, c_in // groups)), *kernel, dtype=dtype
    )
    return image, weight, (stride, padding, dilation, transposed, (0,) * d, groups)


@pytest.mark.skipif(
    not hasattr(torch._C, "_select_conv_backend") or not torch.backends.mkldnn.is_available(),
    reason="this torch does not tell",
)
@settings(deadline=None, max_examples=300)
@given(convolutions())
def test_torch_chooses_onednn_where_we_say(
    case: tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]],
) -> None:
    image, weight, arguments = case
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chosen = torch._C._select_conv_backend(
            image,
            weight,
            None,
            *map(list, arguments[:3]),
            arguments[3],
            list(arguments[4]),
            arguments[5],
        )
    finally:
        torch.set_num_threads(n_threads)
    # The enumerators of transposed convolutions in oneDNN are not bound to Python in every version
    # and print as "???".
    theirs = str(chosen).rsplit(".", 1)[-1].startswith(("Mkldnn", "???"))
    call = convolution_call(
        Op("aten.convolution.default", (spec(image), spec(weight), None, *arguments))
    )
    assert call is not None
    assert call.takes_onednn() == theirs


@settings(deadline=None, max_examples=100)
@given(convolutions())
def test_output_shapes_are_torchs(case: tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]) -> None:
    image, weight, arguments = case
    if any(
        size < (kernel - 1) * arguments[2][0] + 1
        for size, kernel in zip(image.shape[2:], weight.shape[2:])
    ):
        return
    out = torch.ops.aten.convolution(image.to("meta"), weight.to("meta"), None, *arguments)
    op = Op("aten.convolution.default", (spec(image), spec(weight), None, *arguments))
    call = convolution_call(op)
    assert call is not None
    assert (call.before if call.transposed else call.after).shape == tuple(out.shape)
    found = describe(op)
    assert found is not None
    assert found == describe(Op(op.name, op.args, outputs=(spec(out),)))


def test_native_convolutions_need_no_blocks() -> None:
    one = convolution(1, 16, 16, (8, 8), (1, 1))
    assert scratch(Op(one.name, one.args, outputs=(T(1, 16, 8, 8),))) == ()
    eight = convolution(8, 16, 20, (8, 8), (3, 3), 1, 1)
    # image; 20 output channels are two blocks of 16: weight 32 x 16 x 9, output 8 x 32 x 64, 4
    # bytes each
    image, weight, result = 4 * 8 * 16 * 64, 4 * 32 * 16 * 9, 4 * 8 * 32 * 64
    assert scratch(Op(eight.name, eight.args, outputs=(T(8, 20, 8, 8),))) == (
        Stage((), (image, weight), (result,)),
    )
    assert scratch(backward_of(eight)) == (
        Stage((), (result, weight), (image,)),
        Stage((), (result, image), (weight,)),
    )
    assert len(scratch(backward_of(eight, (False, True)))) == 1


def test_a_strided_gradient_of_the_input_is_copied_twice() -> None:
    """The image of 8 x 16 x 8 x 8 in channels last, then in NCHW, besides the gradient itself."""
    backward = backward_of(convolution(8, 16, 32, (8, 8), (3, 3), 2, 1))
    of_input, of_weight = scratch(backward)
    assert of_input.written == (4 * 8 * 16 * 64,) * 2
    assert len(of_weight.written) == 1


# -- everything is described -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_every_kernel_of_the_plan_is_described(mode: str) -> None:
    shapes: dict[tuple[str, ...], tuple[int, int]] = {}
    for group in planned_groups(mode, ("avx512_bf16",)):
        for point in group.points:
            found = describe(point.op)
            assert found is not None, point.op.signature
            assert all(
                math.isfinite(value) and value >= 0 for value in (*found.features, *found.terms)
            ), point.op.signature
            assert found.terms[0] == 1.0
            assert len(set(found.fallbacks)) < 40
            # One curve has one set of coordinates and terms.
            assert shapes.setdefault(found.variant, (len(found.features), len(found.terms))) == (
                len(found.features),
                len(found.terms),
            ), point.op.signature


NOT_DESCRIBED = {"aten.linalg_householder_product", "aten.sparse_mask", "aten._coalesce"}
"""Rare operators without a curve: they are priced by their bytes and named in every report."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_every_op_of_the_zoo_is_described_and_has_a_curve(name: str) -> None:
    model, inputs, loss, optimizer = CASES[name]()
    for op in record(model, inputs, loss=loss, optimizer=optimizer).ops:
        if op.packet in NOT_DESCRIBED:
            assert describe(op) is None
            continue
        assert_has_a_curve(op)


class Practice(nn.Module):
    """What ordinary networks are made of, in one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.Hardswish(),
            nn.Conv2d(8, 8, 3, 2, 1, groups=8),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.ConvTranspose2d(8, 8, 2, 2),
            nn.LeakyReLU(),
            nn.AvgPool2d(2),
            nn.Conv2d(8, 16, 1),
            nn.PReLU(),
            nn.Dropout(0.1),
        )
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm, self.rnn, self.head = (
            nn.LayerNorm(16),
            nn.GRU(16, 8, batch_first=True),
            nn.Linear(8, 5),
        )

    def forward(self, x: torch.Tensor) -> Any:
        x = self.features(x).flatten(2).transpose(1, 2)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.head(F.gelu(self.rnn(x)[0].mean(1)))


@pytest.mark.parametrize(
    "type_name",
    ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta"],
)
def test_every_op_of_an_ordinary_step_is_described(type_name: str) -> None:
    model = Practice()
    optimizer = getattr(torch.optim, type_name)(model.parameters(), lr=1e-3)
    trace = record(
        model,
        (torch.randn(2, 3, 16, 16),),
        loss=lambda y: F.cross_entropy(y, torch.zeros(2, dtype=torch.long)),
        optimizer=optimizer,
    )
    assert [
        part.name for op in trace.ops for part in sub_kernels(op) if describe(part) is None
    ] == []


def test_an_operator_is_described_once() -> None:
    with pytest.raises(DlperfError, match=r"aten.mm has two descriptions"):
        kernel_features("aten.mm")(lambda op: None)
    assert "aten.mm" in known()
    assert describe(Op("mine.mystery.default")) is None


def test_a_channels_last_convolution_has_a_curve_of_its_own() -> None:
    plain, last = (
        convolution(4, 16, 16, (8, 8), (3, 3), channels_last=flag) for flag in (False, True)
    )
    keys = [
        found.variant
        for op in (plain, last, backward_of(last, (False, True)))
        if (found := describe(op)) is not None
    ]
    assert keys == [
        ("conv", "float32", "dense2d", "blocked"),
        ("conv", "float32", "dense2d", "blocked", "channels_last"),
        ("conv_weight", "float32", "dense2d", "blocked", "channels_last"),
    ]
    found = describe(last)
    assert found is not None
    assert found.fallbacks[1] == (
        "conv",
        "float32",
        "dense2d",
        "blocked",
    )  # where a file has none of it, that of NCHW stands in
    real = torch.empty(4, 16, 8, 8).to(memory_format=torch.channels_last)
    assert spec(real) == last.inputs[0]


def test_a_loss_holds_what_it_reduces() -> None:
    for name, n_tensors in (("mse_loss", 2), ("huber_loss", 1), ("binary_cross_entropy", 1)):
        mean = Op(f"aten.{name}.default", (T(64, 500), T(64, 500)), outputs=(T(),))
        assert scratch(mean) == (Stage((128_000,) * n_tensors),)
        assert scratch(replace(mean, outputs=(T(64, 500),))) == ()


def test_the_gradient_of_an_embedding_bag_counts_the_rows() -> None:
    table = T(4000, 32)
    assert scratch(Op("aten._embedding_bag_backward.default", (T(64, 32),), outputs=(table,))) == (
        Stage(after=(32_000, 32_000)),
    )


def test_copies_of_operands_are_made_before_the_result_or_after_it() -> None:
    """The order in which a malloc that logs saw the blocks (torch 2.13)."""
    rows = TensorSpec((8, 4), (1, 8))
    image = TensorSpec((2, 3, 8, 8), (512, 64, 8, 1))  # some channels of more
    for name, operand, stage in (
        ("native_layer_norm", rows, Stage(held=(128,))),
        ("native_batch_norm", image, Stage(held=(1536,))),
        ("_log_softmax", rows, Stage(after=(128,))),
        ("embedding_dense_backward", rows, Stage(after=(128,))),
        ("avg_pool2d", image, Stage(after=(1536,))),
        ("upsample_bilinear2d_backward", image, Stage(after=(1536,))),
    ):
        assert scratch(Op(f"aten.{name}.default", (operand,))) == (stage,), name
    masked = Op("aten._safe_softmax.default", (T(8, 4), -1), outputs=(T(8, 4),))
    assert scratch(masked) == (Stage(after=(32,)),)


def test_scaled_images_are_copied_with_channels_last_where_they_are_small() -> None:
    image = T(2, 8, 16, 16)
    small, large = T(2, 8, 32, 32), T(2, 8, 96, 96)
    args = (image, (32, 32), 2.0, 2.0)
    scaled = Op("aten.upsample_nearest2d.default", args, outputs=(small,))
    assert scratch(scaled) == (Stage(after=(image.nbytes, small.nbytes)),)
    assert scratch(Op("aten.upsample_nearest2d.default", args, outputs=(large,))) == ()

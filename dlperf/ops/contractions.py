"""FLOPs of contractions: matrix products, convolutions, attention, recurrent layers.

A contraction counts 2 FLOP per multiply-add of its products; its bias and its scale factors are not
counted. What a fused operator does between its products (softmax, gates, norms) counts as those
operators do by themselves.
"""

from __future__ import annotations

import math

from dlperf.core.trace import Op, TensorSpec, tensors_in
from dlperf.ops.layers import LAYER_NORM_FLOPS, SOFTMAX_FLOPS
from dlperf.ops.registry import (
    argument,
    aten,
    find,
    flop_formula,
    n_first_out,
    tensor,
)

# -- matrix products -------------------------------------------------------------------------------


_LEFT = dict.fromkeys(aten("mm bmm _int_mm _scaled_mm"), 0) | dict.fromkeys(
    aten("addmm baddbmm addbmm _addmm_activation sparse_sampled_addmm addr"), 1
)
"""Index of the left matrix among the arguments; the right one follows."""


@flop_formula(*_LEFT)
def matrix_product(op: Op) -> int:
    """(b) m x k times (b) k x n: 2 b m k n, of an outer product 2 m n; the sum onto a first
    argument is not counted.
    """
    left = find(_LEFT, op.packet) or 0
    return 2 * tensor(op, left).numel * tensor(op, left + 1).shape[-1]


@flop_formula(
    *aten("mv addmv dot vdot inner matmul linear mkldnn_linear _mkldnn_linear"),
    "mkldnn._linear_pointwise",
    "mkl._mkl_linear",
)
def linear(op: Op) -> int:
    """Every output element contracts the last dimension, k, of the input: 2 numel(out) k."""
    left = tensor(op, 1 if op.packet.rstrip("_") == "aten.addmv" else 0)
    return 2 * n_first_out(op) * (left.shape[-1] if left.shape else 1)


@flop_formula("aten.linear_backward", "aten.mkldnn_linear_backward")
def linear_backward(op: Op) -> int:
    """One product as large as the forward's for the input's and one for the weight's gradient,
    where asked for.
    """
    return _n_gradients(op, 3) * 2 * tensor(op, 1).numel * tensor(op, 0).shape[-1]


def _n_gradients(op: Op, mask_index: int) -> int:
    """How many of the gradients of the input and of the weight a backward computes."""
    mask = argument(op, mask_index, "output_mask")
    return bool(mask[0]) + bool(mask[1]) if isinstance(mask, tuple) else 2


@flop_formula("aten._trilinear")
def trilinear(op: Op) -> int:
    """Sum over i, j of x_i w_oij y_j (nn.Bilinear): 3 FLOP (two products, one sum) per point of the
    full index space.
    """
    full: list[int] = []
    for index in range(3):
        sizes = list(tensor(op, index).shape)
        for dim in sorted(argument(op, 3 + index, f"expand{index + 1}", ())):
            sizes.insert(dim, 1)
        full = [max(a, b) for a, b in zip(full, sizes)] if full else sizes
    return 3 * math.prod(full)


# -- convolutions ----------------------------------------------------------------------------------


def _per_weight(image: TensorSpec, weight: TensorSpec) -> int:
    """2 FLOP for each use of each weight.

    `image` is the side whose pixels meet every filter tap once: the output, or the input of a
    transposed convolution. Its channels are the weight's first dimension, so numel(image) x
    numel(weight) / channels uses; groups are already in the weight's shape, so depthwise and
    grouped convolutions come out right.
    """
    return 2 * image.numel * math.prod(weight.shape[1:])


_CONVOLUTIONS = aten("convolution _convolution convolution_overrideable")
_PLAIN = """
conv1d conv2d conv3d mkldnn_convolution cudnn_convolution miopen_convolution _conv_depthwise2d
conv_depthwise3d miopen_depthwise_convolution thnn_conv2d _slow_conv2d_forward slow_conv3d
slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution
cudnn_convolution_relu cudnn_convolution_add_relu
"""
_TRANSPOSED = (
    *aten("""
conv_transpose1d conv_transpose2d conv_transpose3d slow_conv_transpose2d slow_conv_transpose3d
cudnn_convolution_transpose miopen_convolution_transpose
"""),
    "mkldnn._convolution_transpose_pointwise",
)


@flop_formula(*_CONVOLUTIONS, *aten(_PLAIN), "mkldnn._convolution_pointwise", *_TRANSPOSED)
def convolution(op: Op) -> int:
    """2 n c_out h_out w_out (c_in / groups) kh kw; transposed: 2 n c_in h w (c_out / groups) kh kw
    with the input's h, w.
    """
    transposed = op.packet in _TRANSPOSED or (
        op.packet in _CONVOLUTIONS and argument(op, 6, "transposed", False)
    )
    return _per_weight(tensor(op, 0) if transposed else op.outputs[0], tensor(op, 1))


_MASKS = {
    "aten.convolution_backward": 10,
    "aten.convolution_backward_overrideable": 10,
    "aten._slow_conv2d_backward": 6,
}
"""Index of ``output_mask`` among the arguments."""


@flop_formula(*_MASKS)
def convolution_backward(op: Op) -> int:
    """One contraction as large as the forward's for the input's and one for the weight's gradient,
    where `output_mask` asks.

    Each multiply-add of the forward appears once in either; the bias gradient (a sum) is not
    counted.
    """
    image = tensor(op, 1 if argument(op, 7, "transposed", False) else 0)
    return _n_gradients(op, _MASKS[op.packet]) * _per_weight(image, tensor(op, 2))


# -- attention -------------------------------------------------------------------------------------

SCORE_FLOPS = 1 + SOFTMAX_FLOPS
"""Per attention score: the scaling and the softmax."""


def _n_scores(query: TensorSpec, key: TensorSpec, causal: bool) -> int:
    """Scores of all heads: b h t_q t_k; under a causal mask only those up to the diagonal."""
    t_q, t_k = query.shape[-2], key.shape[-2]
    heads = math.prod(query.shape[:-2])
    if not causal:
        return heads * t_q * t_k
    square = min(t_q, t_k)
    return heads * (square * (square + 1) // 2 + (t_q - square) * t_k)


_CAUSAL = {
    "aten.scaled_dot_product_attention": 5,
    "aten._scaled_dot_product_attention_math": 5,
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
    "aten._scaled_dot_product_fused_attention_overrideable": 5,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten._scaled_dot_product_flash_attention_backward": 11,
    "aten._scaled_dot_product_efficient_attention_backward": 11,
    "aten._scaled_dot_product_cudnn_attention_backward": 14,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": 13,
}
"""Index of ``is_causal`` among the arguments."""


@flop_formula(*_CAUSAL)
def attention(op: Op) -> int:
    """softmax(Q K' / sqrt(d)) V: b h t_q t_k (2 d + 2 d_v + 6); backward (6 d + 4 d_v + 5).

    A causal mask leaves the triangle; other masks and dropout are not counted. The plain-math
    kernel computes the masked scores as well, so the count errs low there. Five products of the
    backward: Q K' again, dP = dO V', dV = P' dO, dQ = dS K, dK = dS' Q. Scores are rebuilt (scale,
    subtract, exp), and dS = P (dP - D).
    """
    backward = op.packet.endswith("_backward")
    query, key, value = (
        tensor(op, index, name) for index, name in enumerate(("query", "key", "value"), backward)
    )
    d, d_v = query.shape[-1], value.shape[-1]
    score_flops = 6 * d + 4 * d_v + 3 + 2 if backward else 2 * d + 2 * d_v + SCORE_FLOPS
    causal = argument(op, _CAUSAL[op.packet], "is_causal", False) is True
    return _n_scores(query, key, causal) * score_flops


def _self_attention(rows: TensorSpec, n_heads: int, *weights: TensorSpec) -> int:
    """The projections, each weight met by every row, and the attention of `n_heads` heads on (b, t,
    d) rows.
    """
    b, t, d = (1,) * (3 - len(rows.shape)) + rows.shape[-3:]
    head = TensorSpec.contiguous(b, n_heads, t, d // max(n_heads, 1))
    products = 2 * b * t * sum(weight.numel for weight in weights)
    return products + _n_scores(head, head, causal=False) * (4 * head.shape[-1] + SCORE_FLOPS)


@flop_formula("aten._native_multi_head_attention")
def multi_head_attention(op: Op) -> int:
    """Four d x d projections and the attention of the heads."""
    return _self_attention(
        tensor(op, 0), argument(op, 4, "num_head", 1), tensor(op, 5), tensor(op, 7)
    )


@flop_formula("aten._transformer_encoder_layer_fwd")
def transformer_encoder_layer(op: Op) -> int:
    """Attention with its projections, two feed-forward products, two layer norms, two residual
    sums, one activation.
    """
    x, n_heads = tensor(op, 0), argument(op, 2, "num_heads", 1)
    up, down = tensor(op, 14), tensor(op, 16)
    return (
        _self_attention(x, n_heads, tensor(op, 3), tensor(op, 5), up, down)
        + 2 * (LAYER_NORM_FLOPS + 1) * x.numel
        + _n_rows(x) * up.shape[0]
    )


def _n_rows(x: TensorSpec) -> int:
    """Vectors along the last dimension."""
    return x.numel // max(x.shape[-1], 1)


# -- recurrent layers ------------------------------------------------------------------------------

# per hidden unit and time step, by number of gates: 4 = LSTM, 3 = GRU, 1 = plain RNN
_CELL_FLOPS = {4: 4 + 5 + 4, 3: 4 + 3 + 3, 1: 1 + 1}
_CELL_BIAS_FLOPS = {4: 8, 3: 6, 1: 2}


def _cell(n_gates: int, with_bias: bool) -> int:
    """FLOPs of a hidden unit outside the products.

    LSTM: 4 sums of the two products, 3 sigmoid + 2 tanh, c = f c + i g (3), h = o tanh(c) (1). GRU:
    3 sums and r * (U h), 2 sigmoid + 1 tanh, h = n + z (h - n) (3). RNN: 1 sum, 1 tanh. Two biases
    add two sums a gate.
    """
    return _CELL_FLOPS[n_gates] + (_CELL_BIAS_FLOPS[n_gates] if with_bias else 0)


def _recurrent(op: Op, weight: int, has_biases: bool) -> int:
    """One layer in one direction over t steps of b samples: 2 t b (numel(W_ih) + numel(W_hh)) and
    the cells; `weight` is the index of W_ih, which W_hh follows.
    """
    w_ih, w_hh = tensor(op, weight), tensor(op, weight + 1)
    hidden = w_hh.shape[-1]
    cell = hidden * _cell(w_hh.shape[0] // max(hidden, 1), has_biases)
    return _n_rows(tensor(op, 0)) * (2 * (w_ih.numel + w_hh.numel) + cell)


@flop_formula("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward")
def recurrent_layer(op: Op) -> int:
    """One layer in one direction; the backward has each product twice, for the gradients of its
    input and its weight.
    """
    times, flag = (2, 17) if op.packet.endswith("_backward") else (1, 12)
    return times * _recurrent(op, 1, bool(argument(op, flag, "has_biases", True)))


@flop_formula("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def recurrent_cell(op: Op) -> int:
    """One step of one cell: its two products, 2 b numel(W), and the gates."""
    return _recurrent(op, 2, argument(op, 4, "b_ih") is not None)


@flop_formula("aten._cudnn_rnn", "aten.miopen_rnn")
def fused_recurrent_layers(op: Op) -> int:
    """All layers and directions at once: every weight matrix is met by each of the t b rows; the
    gates are not counted.
    """
    matrices = (weight.numel for weight in tensors_in(op.args[1]) if len(weight.shape) == 2)
    return 2 * _n_rows(tensor(op, 0)) * sum(matrices)


_CELLS = {
    "aten._thnn_fused_lstm_cell": (4, 2, 1),
    "aten._thnn_fused_gru_cell": (3, 2, 1),
    "aten._thnn_fused_lstm_cell_backward_impl": (4, 2, 2),
    "aten._thnn_fused_lstm_cell_backward": (4, 2, 2),
    "aten._thnn_fused_gru_cell_backward": (3, 0, 2),
}
"""Number of gates, index of an argument of the hidden state's size, passes."""


@flop_formula(*_CELLS)
def fused_cell(op: Op) -> int:
    """What follows a cell's two products, per hidden unit; a backward counts twice."""
    n_gates, state, n_passes = _CELLS[op.packet]
    with_bias = n_passes == 1 and argument(op, 3, "input_bias") is not None
    return n_passes * tensor(op, state).numel * _cell(n_gates, with_bias)


_N_GATES = {"aten.lstm": 4, "aten.gru": 3, "aten.rnn_tanh": 1, "aten.rnn_relu": 1}


@flop_formula(*_N_GATES)
def recurrent_layers(op: Op) -> int:
    """All layers and directions of a recurrent module at once: 2 t b numel(W) for every weight
    matrix, and the cells.
    """
    # .data: a packed sequence.
    weights = tuple(tensors_in(op.args[3 if op.name.endswith(".data") else 2]))
    matrices = [weight for weight in weights if len(weight.shape) == 2]
    n_gates = _N_GATES[op.packet]
    n_units = (
        sum(weight.shape[0] // n_gates for weight in matrices if weight.shape[0] % n_gates == 0)
        // 2
    )  # input and hidden matrix of each cell
    return _n_rows(tensor(op, 0)) * (
        2 * sum(weight.numel for weight in matrices)
        + n_units * _cell(n_gates, len(weights) > len(matrices))
    )


@flop_formula("aten.einsum")
def einsum(op: Op) -> int:
    """2 FLOP per point of the full index space, as if contracted in one go; errs high where three
    or more operands are contracted in turn.

    An ellipsis, and an operand whose indices do not fit its dimensions, count as dimensions of
    their own.
    """
    terms = str(op.args[0]).replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, spec in zip(terms, tensors_in(op.args[1])):
        n_more = len(spec.shape) - len(term.replace("...", ""))
        indices = (
            list(term.split("...")[0])
            + [f"...{index}" for index in range(-n_more, 0)]
            + list("".join(term.split("...")[1:]))
        )
        for index, size in zip(indices, spec.shape):
            sizes[index] = max(size, sizes.get(index, 1))
    return 2 * math.prod(sizes.values())

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
    flop_formula,
    n_first_out,
    tensor,
)

# -- matrix products -------------------------------------------------------------------------------


@flop_formula("aten.mm", "aten.bmm", "aten._int_mm", "aten._scaled_mm")
def matrix_product(op: Op) -> int:
    """(b) m x k times (b) k x n: 2 b m k n."""
    return 2 * tensor(op, 0).numel * tensor(op, 1).shape[-1]


@flop_formula(
    "aten.addmm",
    "aten.baddbmm",
    "aten.addbmm",
    "aten._addmm_activation",
    "aten.sparse_sampled_addmm",
)
def added_matrix_product(op: Op) -> int:
    """As the matrix product of the second and third argument; the sum onto the first is not
    counted.
    """
    return 2 * tensor(op, 1).numel * tensor(op, 2).shape[-1]


@flop_formula("aten.addmv")
def added_vector_product(op: Op) -> int:
    """2 m k."""
    return 2 * tensor(op, 1).numel


@flop_formula("aten.addr")
def added_outer_product(op: Op) -> int:
    """One multiply-add per element: 2 m n."""
    return 2 * n_first_out(op)


@flop_formula(
    "aten.mv",
    "aten.dot",
    "aten.vdot",
    "aten.inner",
    "aten.matmul",
    "aten.linear",
    "aten.mkldnn_linear",
    "aten._mkldnn_linear",
    "mkldnn._linear_pointwise",
    "mkl._mkl_linear",
)
def linear(op: Op) -> int:
    """Every output element contracts the last dimension, k, of the input: 2 numel(out) k."""
    left = tensor(op, 0)
    return 2 * n_first_out(op) * (left.shape[-1] if left.shape else 1)


@flop_formula("aten.linear_backward", "aten.mkldnn_linear_backward")
def linear_backward(op: Op) -> int:
    """One product as large as the forward's for the input's and one for the weight's gradient,
    where asked for.
    """
    x, mask = tensor(op, 0), argument(op, 3, "output_mask", (True, True, True))
    return (bool(mask[0]) + bool(mask[1])) * 2 * tensor(op, 1).numel * x.shape[-1]


@flop_formula("aten._trilinear")
def trilinear(op: Op) -> int:
    """Sum over i, j of x_i w_oij y_j (nn.Bilinear): 3 FLOP (two products, one sum) per point of the
    full index space.
    """
    full: list[int] = []
    for place in range(3):
        sizes = list(tensor(op, place).shape)
        for dim in sorted(argument(op, 3 + place, f"expand{place + 1}", ())):
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


@flop_formula("aten.convolution", "aten._convolution", "aten.convolution_overrideable")
def convolution(op: Op) -> int:
    """2 n c_out h_out w_out (c_in / groups) kh kw; transposed: 2 n c_in h w (c_out / groups) kh kw
    with the input's h, w.
    """
    transposed = argument(op, 6, "transposed", False)
    return _per_weight(tensor(op, 0) if transposed else op.outputs[0], tensor(op, 1))


_PLAIN = """
conv1d conv2d conv3d mkldnn_convolution cudnn_convolution miopen_convolution _conv_depthwise2d
conv_depthwise3d miopen_depthwise_convolution thnn_conv2d _slow_conv2d_forward slow_conv3d
slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d _nnpack_spatial_convolution
cudnn_convolution_relu cudnn_convolution_add_relu
"""
_TRANSPOSED = """
conv_transpose1d conv_transpose2d conv_transpose3d slow_conv_transpose2d slow_conv_transpose3d
cudnn_convolution_transpose miopen_convolution_transpose
"""


@flop_formula(*aten(_PLAIN), "mkldnn._convolution_pointwise")
def plain_convolution(op: Op) -> int:
    """As a convolution that is not transposed."""
    return _per_weight(op.outputs[0], tensor(op, 1))


@flop_formula(*aten(_TRANSPOSED), "mkldnn._convolution_transpose_pointwise")
def transposed_convolution(op: Op) -> int:
    """As a transposed convolution."""
    return _per_weight(tensor(op, 0), tensor(op, 1))


@flop_formula("aten.convolution_backward", "aten.convolution_backward_overrideable")
def convolution_backward(op: Op) -> int:
    """One contraction as large as the forward's for the input's and one for the weight's gradient,
    where `output_mask` asks.

    Each multiply-add of the forward appears once in either; the bias gradient (a sum) is not
    counted.
    """
    transposed = argument(op, 7, "transposed", False)
    mask = argument(op, 10, "output_mask", (True, True, True))
    return (bool(mask[0]) + bool(mask[1])) * _per_weight(
        tensor(op, 1) if transposed else tensor(op, 0), tensor(op, 2)
    )


@flop_formula("aten._slow_conv2d_backward")
def slow_convolution_backward(op: Op) -> int:
    """As convolution_backward; the mask is the last argument."""
    mask = argument(op, 6, "output_mask", (True, True, True))
    mask = mask if isinstance(mask, tuple) else (True, True, True)
    return (bool(mask[0]) + bool(mask[1])) * _per_weight(tensor(op, 0), tensor(op, 2))


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


def _attention(query: TensorSpec, key: TensorSpec, value: TensorSpec, causal: bool) -> int:
    return _n_scores(query, key, causal) * (2 * query.shape[-1] + 2 * value.shape[-1] + SCORE_FLOPS)


# Place of is_causal in each operator's schema.
_CAUSAL_PLACE = {
    "aten.scaled_dot_product_attention": 5,
    "aten._scaled_dot_product_attention_math": 5,
    "aten._scaled_dot_product_flash_attention_for_cpu": 4,
    "aten._scaled_dot_product_flash_attention": 4,
    "aten._scaled_dot_product_efficient_attention": 6,
    "aten._scaled_dot_product_cudnn_attention": 6,
    "aten._scaled_dot_product_fused_attention_overrideable": 5,
}
_CAUSAL_PLACE_BACKWARD = {
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "aten._scaled_dot_product_flash_attention_backward": 11,
    "aten._scaled_dot_product_efficient_attention_backward": 11,
    "aten._scaled_dot_product_cudnn_attention_backward": 14,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": 13,
}


@flop_formula(*_CAUSAL_PLACE)
def attention(op: Op) -> int:
    """softmax(Q K' / sqrt(d)) V: b h t_q t_k (2 d + 2 d_v + 6).

    A causal mask leaves the triangle; other masks and dropout are not counted. The plain-math
    kernel computes the masked scores as well, so the count errs low there.
    """
    causal = argument(op, _CAUSAL_PLACE[op.packet], "is_causal", False) is True
    return _attention(tensor(op, 0, "query"), tensor(op, 1, "key"), tensor(op, 2, "value"), causal)


@flop_formula(*_CAUSAL_PLACE_BACKWARD)
def attention_backward(op: Op) -> int:
    """b h t_q t_k (6 d + 4 d_v + 5).

    Five products: Q K' again, dP = dO V', dV = P' dO, dQ = dS K, dK = dS' Q. Scores are rebuilt
    (scale, subtract, exp), and dS = P (dP - D).
    """
    causal = argument(op, _CAUSAL_PLACE_BACKWARD[op.packet], "is_causal", False) is True
    query, key, value = (tensor(op, 1, "query"), tensor(op, 2, "key"), tensor(op, 3, "value"))
    return _n_scores(query, key, causal) * (6 * query.shape[-1] + 4 * value.shape[-1] + 3 + 2)


def _self_attention(rows: TensorSpec, n_heads: int, *weights: TensorSpec) -> int:
    """The projections, each weight met by every row, and the attention of `n_heads` heads on (b, t,
    d) rows.
    """
    b, t, d = (1,) * (3 - len(rows.shape)) + rows.shape[-3:]
    head = TensorSpec.contiguous(b, n_heads, t, d // max(n_heads, 1))
    return 2 * b * t * sum(weight.numel for weight in weights) + _attention(
        head, head, head, causal=False
    )


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


def _recurrent_layer(op: Op, has_biases: bool) -> int:
    """One layer in one direction over t steps of b samples: 2 t b (numel(W_ih) + numel(W_hh)) and
    the cells.
    """
    x, w_ih, w_hh = tensor(op, 0), tensor(op, 1), tensor(op, 2)
    hidden = w_hh.shape[-1]
    cell = hidden * _cell(w_hh.shape[0] // max(hidden, 1), has_biases)
    return _n_rows(x) * (2 * (w_ih.numel + w_hh.numel) + cell)


@flop_formula("aten.mkldnn_rnn_layer")
def recurrent_layer(op: Op) -> int:
    """One layer in one direction."""
    return _recurrent_layer(op, bool(argument(op, 12, "has_biases", True)))


@flop_formula("aten.mkldnn_rnn_layer_backward")
def recurrent_layer_backward(op: Op) -> int:
    """Twice the forward's: each product for the gradients of its input and its weight."""
    return 2 * _recurrent_layer(op, bool(argument(op, 17, "has_biases", True)))


@flop_formula("aten._cudnn_rnn", "aten.miopen_rnn")
def fused_recurrent_layers(op: Op) -> int:
    """All layers and directions at once: every weight matrix is met by each of the t b rows; the
    gates are not counted.
    """
    matrices = (weight.numel for weight in tensors_in(op.args[1]) if len(weight.shape) == 2)
    return 2 * _n_rows(tensor(op, 0)) * sum(matrices)


_CELLS = {"aten._thnn_fused_lstm_cell": 4, "aten._thnn_fused_gru_cell": 3}


@flop_formula(*_CELLS)
def fused_cell(op: Op) -> int:
    """What follows a cell's two products, per hidden unit."""
    return tensor(op, 2).numel * _cell(_CELLS[op.packet], argument(op, 3, "input_bias") is not None)


_CELL_BACKWARDS = {
    "aten._thnn_fused_lstm_cell_backward_impl": (4, 2),
    "aten._thnn_fused_lstm_cell_backward": (4, 2),
    "aten._thnn_fused_gru_cell_backward": (3, 0),
}
"""Number of gates, and place of an argument of the hidden state's size."""


@flop_formula(*_CELL_BACKWARDS)
def fused_cell_backward(op: Op) -> int:
    """Twice the forward's."""
    n_gates, place = _CELL_BACKWARDS[op.packet]
    return 2 * tensor(op, place).numel * _cell(n_gates, False)


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


@flop_formula("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def recurrent_cell(op: Op) -> int:
    """One step of one cell: its two products, 2 b numel(W), and the gates."""
    w_ih, w_hh = tensor(op, 2), tensor(op, 3)
    hidden = w_hh.shape[-1]
    cell = hidden * _cell(w_hh.shape[0] // max(hidden, 1), argument(op, 4, "b_ih") is not None)
    return _n_rows(tensor(op, 0)) * (2 * (w_ih.numel + w_hh.numel) + cell)


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
            + [f"...{place}" for place in range(-n_more, 0)]
            + list("".join(term.split("...")[1:]))
        )
        for index, size in zip(indices, spec.shape):
            sizes[index] = max(size, sizes.get(index, 1))
    return 2 * math.prod(sizes.values())

"""Random ops that are neither products nor convolutions: elementwise, normalisation, pooling, rows,
losses, moves, attention, recurrent layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dlperf.core.trace import Op, Symbol, TensorSpec
from dlperf.studies.accuracy.random_ops import (
    MAX_ELEMENTS,
    MAX_FLOP,
    OpMaker,
    Random,
    T,
    log_uniform,
    pick,
    size,
)

_UNARY = (
    "relu",
    "neg",
    "abs",
    "sqrt",
    "leaky_relu",
    "hardtanh",
    "clone",
    "relu_",
    "mul.Tensor",
    "add.Tensor",
    "hardswish",
)
_UNARY_ARGUMENTS: dict[str, tuple[float, ...]] = {
    "leaky_relu": (0.2,),
    "hardtanh": (0.0, 6.0),
    "mul.Tensor": (0.7,),
    "add.Tensor": (0.3,),
}
_BINARY = (
    "add.Tensor",
    "mul.Tensor",
    "sub.Tensor",
    "div.Tensor",
    "add_.Tensor",
    "mul_.Tensor",
    "copy_",
    "maximum",
    "threshold_backward",
)
_DEAR_UNARY = ("sigmoid", "tanh", "exp", "gelu", "silu", "log", "elu", "softplus")
_DEAR_BINARY = ("sigmoid_backward", "tanh_backward", "gelu_backward", "silu_backward")


def _named(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def _tensor(random: Random) -> TensorSpec:
    """A tensor of one to four dimensions, 2^8 to 2^22 elements."""
    numel = log_uniform(random, 2**8, MAX_ELEMENTS)
    rank = int(random.integers(1, 5))
    shape: list[int] = []
    for index in range(rank - 1):
        shape.append(max(1, round(numel ** (random.uniform(0.1, 0.9) / (rank - index)))))
        numel //= shape[-1]
    return T(*shape, max(1, numel))


def _elementwise(random: Random) -> Op | None:
    spec, u = _tensor(random), random.random()
    if u < 0.4:
        name = pick(random, _UNARY)
        return Op(_named(name), (spec, *_UNARY_ARGUMENTS.get(name, ())))
    if u < 0.8:
        name = pick(random, _BINARY)
        return Op(_named(name), (spec, spec, 0) if name == "threshold_backward" else (spec, spec))
    rows, width = log_uniform(random, 4, 4096), size(random, 4, 1024)
    if rows * width > MAX_ELEMENTS:
        return None
    other = T(width) if random.random() < 0.5 else T(rows, 1)
    return Op(
        _named("add.Tensor" if random.random() < 0.6 else "mul.Tensor"), (T(rows, width), other)
    )


def _transcendental(random: Random) -> Op | None:
    spec = _tensor(random)
    if random.random() < 0.6:
        return Op(_named(pick(random, _DEAR_UNARY)), (spec,))
    return Op(_named(pick(random, _DEAR_BINARY)), (spec, spec))


def _optimizer(random: Random) -> Op:
    spec = T(log_uniform(random, 2**6, MAX_ELEMENTS))
    return pick(
        random,
        (
            Op("aten.addcmul_.default", (spec, spec, spec), (("value", 0.01),)),
            Op("aten.addcdiv_.default", (spec, spec, spec), (("value", -0.01),)),
            Op("aten.lerp_.Scalar", (spec, spec, 0.1)),
            Op("aten.add_.Tensor", (spec, spec), (("alpha", -0.1),)),
        ),
    )


def _image(low: int, high: int, random: Random) -> TensorSpec | None:
    n, c, side = log_uniform(random, 1, 128), size(random, 2, 512), log_uniform(random, low, high)
    return T(n, c, side, side) if n * c * side * side <= MAX_ELEMENTS else None


def _lines(low: int, high: int, random: Random) -> TensorSpec | None:
    rows, width = log_uniform(random, 1, 16384), size(random, low, high)
    return T(rows, width) if 64 <= rows * width <= MAX_ELEMENTS else None


def _on(
    shape: Callable[[Random], TensorSpec | None],
    draw: Callable[[Random, TensorSpec], Op | None],
) -> OpMaker:
    """Ops on tensors of a random shape."""

    def make(random: Random) -> Op | None:
        spec = shape(random)
        return None if spec is None else draw(random, spec)

    return make


def _batch_norm(random: Random, image: TensorSpec) -> Op:
    c = T(image.shape[1])
    forward = Op("aten.native_batch_norm.default", (image, c, c, c, c, True, 0.1, 1e-5))
    backward = Op(
        "aten.native_batch_norm_backward.default",
        (image, image, c, c, c, c, c, True, 1e-5, (True, True, True)),
    )
    return forward if random.random() < 0.5 else backward


def _layer_norm(random: Random, lines: TensorSpec) -> Op:
    rows, width = lines.shape
    scale, per_row = T(width), T(rows, 1)
    forward = Op("aten.native_layer_norm.default", (lines, (width,), scale, scale, 1e-5))
    backward = Op(
        "aten.native_layer_norm_backward.default",
        (lines, lines, (width,), per_row, per_row, scale, scale, (True, True, True)),
    )
    return forward if random.random() < 0.5 else backward


def _pooling(random: Random, image: TensorSpec) -> Op:
    n, c, side, _ = image.shape
    kernel, stride, padding = pick(random, ((2, 2, 0), (3, 2, 1), (3, 1, 1)))
    out = (side + 2 * padding - kernel) // stride + 1
    window = ((kernel,) * 2, (stride,) * 2, (padding,) * 2)
    pooled, indices = T(n, c, out, out), T(n, c, out, out, dtype="int64")
    largest = Op("aten.max_pool2d_with_indices.default", (image, *window))
    return pick(
        random,
        (
            Op("aten.avg_pool2d.default", (image, *window)),
            Op("aten.avg_pool2d_backward.default", (pooled, image, *window, False, True, None)),
            largest,
            largest,
            Op(
                "aten.max_pool2d_with_indices_backward.default",
                (pooled, image, *window, (1, 1), False, indices),
            ),
        ),
    )


def _softmax(random: Random, lines: TensorSpec) -> Op:
    name, dim = ("_softmax", -1) if random.random() < 0.5 else ("_log_softmax", 1)
    forward = Op(f"aten.{name}.default", (lines, dim, False))
    backward = Op(
        f"aten.{name}_backward_data.default", (lines, lines, dim, Symbol("dtype", "float32"))
    )
    return forward if random.random() < 0.5 else backward


def _reduction(random: Random, lines: TensorSpec) -> Op:
    dim = int(random.integers(2))
    return pick(
        random,
        (
            Op("aten.sum.dim_IntList", (lines, (dim,), True)),
            Op("aten.sum.default", (lines,)),
            Op("aten.mean.default", (lines,)),
            Op("aten.mean.dim", (lines, (1,))),
            Op("aten.max.dim", (lines, 1)),
            Op("aten.amax.default", (lines, (1,))),
            Op("aten.var.correction", (lines, (1,))),
            Op("aten.linalg_vector_norm.default", (lines,)),
        ),
    )


def _loss(random: Random, lines: TensorSpec) -> Op:
    labels = T(lines.shape[0], dtype="int64")
    return pick(
        random,
        (
            Op("aten.nll_loss_forward.default", (lines, labels, None, 1, -100)),
            Op("aten.nll_loss_backward.default", (T(), lines, labels, None, 1, -100, T())),
            Op("aten.mse_loss.default", (lines, lines, 1)),
            Op("aten.mse_loss_backward.default", (T(), lines, lines, 1)),
            Op("aten.binary_cross_entropy_with_logits.default", (lines, lines, None, None, 1)),
            Op("aten.smooth_l1_loss.default", (lines, lines, 1, 1.0)),
        ),
    )


def _embedding(random: Random) -> Op | None:
    rows, width, table = (
        log_uniform(random, 1, 8192),
        size(random, 8, 512),
        log_uniform(random, 16, 30000),
    )
    if rows * width > MAX_ELEMENTS or table * width > 2 * MAX_ELEMENTS:
        return None
    tokens = T(rows, dtype="int64")
    forward = Op("aten.embedding.default", (T(table, width), tokens))
    backward = Op(
        "aten.embedding_dense_backward.default", (T(rows, width), tokens, table, -1, False)
    )
    return forward if random.random() < 0.5 else backward


def _move(random: Random, lines: TensorSpec) -> Op:
    rows, width = lines.shape
    transposed = TensorSpec((width, rows), (1, width))
    contiguous = (("memory_format", Symbol("memory_format", "contiguous_format")),)
    return pick(
        random,
        (
            Op("aten.cat.default", ((lines, lines), 0)),
            Op("aten.cat.default", ((lines, T(rows, max(1, width // 2))), 1)),
            Op("aten.index_select.default", (lines, 0, T(rows, dtype="int64"))),
            Op("aten.gather.default", (lines, 0, T(rows, width, dtype="int64"))),
            Op("aten.clone.default", (transposed,), contiguous),
            Op("aten.constant_pad_nd.default", (lines, (1, 1, 1, 1), 0.0)),
        ),
    )


def _resampling(random: Random, image: TensorSpec) -> Op | None:
    """An image made twice as large, or padded with what it holds."""
    if 4 * image.numel > MAX_ELEMENTS:
        return None
    n, c, side, _ = image.shape
    fine, sides, factors = T(n, c, 2 * side, 2 * side), (2 * side, 2 * side), (2.0, 2.0)
    padded = T(n, c, side + 2, side + 2)
    return pick(
        random,
        (
            Op("aten.upsample_nearest2d.default", (image, sides, *factors)),
            Op("aten.upsample_nearest2d_backward.default", (fine, sides, image.shape, *factors)),
            Op("aten.upsample_bilinear2d.default", (image, sides, False, *factors)),
            Op(
                "aten.upsample_bilinear2d_backward.default",
                (fine, sides, image.shape, False, *factors),
            ),
            Op("aten.reflection_pad2d.default", (image, (1, 1, 1, 1))),
            Op("aten.reflection_pad2d_backward.default", (padded, image, (1, 1, 1, 1))),
        ),
    )


def _attention(random: Random) -> Op | None:
    b, h, t, d = (
        log_uniform(random, 1, 64),
        log_uniform(random, 1, 16),
        log_uniform(random, 8, 1024),
        pick(random, (16, 24, 32, 64, 64, 128)),
    )
    if b * h * t * d > MAX_ELEMENTS or 4.0 * b * h * t * t * d > MAX_FLOP:
        return None
    interleaved = TensorSpec((b, h, t, d), (t * h * d, d, h * d, 1))
    q = interleaved if random.random() < 0.6 else T(b, h, t, d)
    causal = bool(random.random() < 0.5)
    name = "aten._scaled_dot_product_flash_attention_for_cpu"
    sums = TensorSpec((b, h, t), (h * t, 1, h))
    forward = Op(f"{name}.default", (q, q, q, 0.0, causal))
    backward = Op(
        f"{name}_backward.default", (interleaved, q, q, q, interleaved, sums, 0.0, causal)
    )
    return forward if random.random() < 0.5 else backward


def _recurrent(random: Random) -> Op | None:
    """One layer of an LSTM as oneDNN runs it, over time-major input."""
    t, b, inputs, hidden = (
        log_uniform(random, 1, 128),
        log_uniform(random, 1, 128),
        size(random, 8, 512),
        size(random, 8, 512),
    )
    if 8.0 * t * b * hidden * (inputs + hidden) > MAX_FLOP:
        return None
    mode, x, state, out = 2, T(t, b, inputs), T(1, b, hidden), T(t, b, hidden)
    weights = (T(4 * hidden, inputs), T(4 * hidden, hidden), T(4 * hidden), T(4 * hidden))
    shared = (mode, hidden, 1, True)
    forward = Op(
        "aten.mkldnn_rnn_layer.default",
        (x, *weights, state, state, False, (), *shared, False, False, True),
    )
    outputs = (out, state, state)
    backward = Op(
        "aten.mkldnn_rnn_layer_backward.default",
        (
            *(x, *weights, state, state),
            *outputs,
            *outputs,
            *(False, *shared, True, False, (), False, T(1, dtype="uint8")),
        ),
    )
    return forward if random.random() < 0.5 else backward


REST: tuple[tuple[str, OpMaker, int], ...] = (
    ("elementwise", _elementwise, 30),
    ("transcendental", _transcendental, 16),
    ("optimizer", _optimizer, 10),
    ("batch norm", _on(partial(_image, 2, 112), _batch_norm), 16),
    ("layer norm", _on(partial(_lines, 16, 4096), _layer_norm), 14),
    ("pooling", _on(partial(_image, 6, 112), _pooling), 16),
    ("softmax", _on(partial(_lines, 2, 8192), _softmax), 14),
    ("reduction", _on(partial(_lines, 2, 8192), _reduction), 16),
    ("loss", _on(partial(_lines, 2, 4096), _loss), 14),
    ("embedding", _embedding, 14),
    ("move", _on(partial(_lines, 4, 1024), _move), 14),
    ("resampling", _on(partial(_image, 3, 56), _resampling), 12),
    ("attention", _attention, 14),
    ("lstm", _recurrent, 12),
)
"""Kinds of the rest, each with how many of some 200."""

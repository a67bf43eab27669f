"""Kernels with a shape of their own: normalisation, pooling, softmax, losses, embeddings,
reductions, joins, attention, recurrent layers.
"""

from __future__ import annotations

from dlperf.core.trace import Op, Symbol, TensorSpec
from dlperf.microbench.plan import (
    Group,
    Point,
    chosen,
    filled,
    log_count,
    log_pick,
    log_sizes,
    pick,
    repeats,
    share,
    turn,
)
from dlperf.microbench.uncommon import images, uncommon

T = TensorSpec.contiguous
_MAX_ELEMENTS, _MAX_ROWS = 2**22, 2**15
_FLOAT32 = Symbol("dtype", "float32")


def _width(u: float, low: int, high: int, index: int) -> int:
    """The length of a row or a sequence: every other whole vectors, as most networks have."""
    width = log_pick(u, low, high)
    return max(16, 16 * round(width / 16)) if turn(index, 2, 2) else width


def _norms(index: int, u: float, v: float, w: float) -> list[Op]:
    c, size = log_pick(v, 4, 512), log_pick(w, 1, 96)
    n = log_count(u, c * size * size, _MAX_ELEMENTS, 256)
    if turn(index, 6, 1) == 0:  # as InstanceNorm calls it
        n, c = 1, n * c
    image, channel = T(n, c, size, size), T(c)
    if turn(index, 3) == 2:
        image = T(max(2, n * 4), c)
    moments = (channel,) * 4
    width = _width(v, 8, 4096, index)
    rows = log_count(u, width, _MAX_ELEMENTS, _MAX_ROWS)
    lines, per_row, per_column = T(rows, width), T(rows, 1), T(width)
    whole = 4 * max(1, round(c / 4))
    grouped, scale, stats, pixels = T(n, whole, size, size), T(whole), T(n, 4), size * size
    fits, three = image.numel <= _MAX_ELEMENTS, (True, True, True)
    return chosen(
        (
            fits,
            [
                Op("aten.native_batch_norm.default", (image, *moments, True, 0.1, 1e-5)),
                Op(
                    "aten.native_batch_norm_backward.default",
                    (image, image, channel, *moments, True, 1e-5, three),
                ),
            ],
        ),
        (
            fits and turn(index, 3) == 0,
            [Op("aten.native_batch_norm.default", (image, *moments, False, 0.1, 1e-5))],
        ),
        (
            fits and turn(index, 3) == 1,
            [
                Op(
                    "aten.native_group_norm.default",
                    (grouped, scale, scale, n, whole, pixels, 4, 1e-5),
                ),
                Op(
                    "aten.native_group_norm_backward.default",
                    (grouped, grouped, stats, stats, scale, n, whole, pixels, 4, three),
                ),
            ],
        ),
        (
            True,
            [
                Op(
                    "aten.native_layer_norm.default",
                    (lines, (width,), per_column, per_column, 1e-5),
                ),
                Op(
                    "aten.native_layer_norm_backward.default",
                    (lines, lines, (width,), per_row, per_row, per_column, per_column, three),
                ),
            ],
        ),
    )


def _pools(index: int, u: float, v: float, w: float) -> list[Op]:
    c, size = log_pick(v, 4, 256), log_pick(w, 6, 112)
    n = log_count(u, c * size * size, _MAX_ELEMENTS, 256)
    kernel, stride, padding = ((2, 2, 0), (2, 2, 0), (3, 2, 1), (3, 1, 1), (3, 3, 0))[
        turn(index, 5)
    ]
    image = T(n, c, size, size)
    out = (size + 2 * padding - kernel) // stride + 1
    pooled, window = T(n, c, out, out), ((kernel,) * 2, (stride,) * 2, (padding,) * 2)
    if turn(index, 4, 1) == 0:  # a sequence, as of MaxPool1d
        out = (size**2 + 2 * padding - kernel) // stride + 1
        image, pooled = T(n, c, 1, size**2), T(n, c, 1, out)
        window = ((1, kernel), (1, stride), (0, padding))
    side = 1 + turn(index, 7, 2)
    sides, adapted = (side, side), T(n, c, side, side)
    indices, adapted_indices = (T(*pool.shape, dtype="int64") for pool in (pooled, adapted))
    return chosen(
        (
            True,
            [
                Op("aten.max_pool2d_with_indices.default", (image, *window)),
                Op(
                    "aten.max_pool2d_with_indices_backward.default",
                    (pooled, image, *window, (1, 1), False, indices),
                ),
            ],
        ),
        (
            turn(index, 2) == 0,
            [
                Op("aten.avg_pool2d.default", (image, *window)),
                Op("aten.avg_pool2d_backward.default", (pooled, image, *window, False, True, None)),
                Op("aten.mean.dim", (image, (-1, -2), True)),
                Op("aten._adaptive_avg_pool2d.default", (image, sides)),
                Op("aten._adaptive_avg_pool2d_backward.default", (adapted, image)),
                Op("aten.adaptive_max_pool2d.default", (image, sides)),
                Op("aten.adaptive_max_pool2d_backward.default", (adapted, image, adapted_indices)),
            ],
        ),
    )


def _rows(index: int, u: float, v: float, w: float) -> list[Op]:
    width = _width(v, 2, 8192, index)
    rows = log_count(u, width, _MAX_ELEMENTS, _MAX_ROWS)
    lines, target = T(rows, width), T(rows, dtype="int64")
    three, five = turn(index, 3), turn(index, 5, 1)
    return chosen(
        (
            True,
            [
                Op("aten._log_softmax.default", (lines, 1, False)),
                Op("aten._log_softmax_backward_data.default", (lines, lines, 1, _FLOAT32)),
                Op("aten._softmax.default", (lines, -1, False)),
                Op("aten._softmax_backward_data.default", (lines, lines, -1, _FLOAT32)),
                Op("aten._safe_softmax.default", (lines, -1)),
                Op("aten.sum.dim_IntList", (lines, (0,), True)),
                Op("aten.sum.dim_IntList", (lines, (1,), True)),
                Op("aten.mean.dim", (lines, (1,))),
            ],
        ),
        (
            three == 0,
            [
                Op("aten.sum.default", (lines,)),
                Op("aten.mean.default", (lines,)),
                Op("aten.max.dim", (lines, 1)),
                Op("aten.amax.default", (lines, (1,))),
                Op("aten.argmax.default", (lines, 1)),
                Op("aten.var.correction", (lines, (1,))),
                Op("aten.cumsum.default", (lines, 1)),
                Op("aten.linalg_vector_norm.default", (lines,)),
            ],
        ),
        (
            three == 1,
            [
                Op("aten.linalg_vector_norm.default", (lines, 2, (1,), True)),
                Op("aten.logsumexp.default", (lines, (1,))),
            ],
        ),
        (
            five == 0,
            [
                Op("aten.std.correction", (lines,)),
                Op("aten.topk.default", (lines, 1 + width // 10)),
                Op("aten.linalg_vector_norm.default", (lines, 2, (0,))),
            ],
        ),
        (
            five == 1 and rows * width <= _MAX_ELEMENTS // 8,
            [Op("aten.sort.default", (lines,)), Op("aten.logcumsumexp.default", (lines, 1))],
        ),
        (
            True,
            [
                Op("aten.nll_loss_forward.default", (lines, target, None, 1, -100)),
                Op("aten.nll_loss_backward.default", (T(), lines, target, None, 1, -100, T())),
            ],
        ),
    )


def _moves(index: int, u: float, v: float, w: float) -> list[Op]:
    width, table = _width(v, 4, 1024, index), log_pick(w, 16, 50000)
    rows = log_count(u, width, _MAX_ELEMENTS, _MAX_ROWS)
    tokens, lines, half = T(rows, dtype="int64"), T(rows, width), max(1, width // 2)
    side = log_pick(v, 2, 64)
    image = T(max(1, rows // 16), 16, side, side)
    return chosen(
        (
            table * width <= 4 * _MAX_ELEMENTS,
            [
                Op("aten.embedding.default", (T(table, width), tokens)),
                Op("aten.embedding_dense_backward.default", (lines, tokens, table, -1, False)),
            ],
        ),
        (
            True,
            [
                Op("aten.cat.default", ((lines, lines), 0)),
                Op("aten.cat.default", ((lines, lines), 1)),
                Op("aten.stack.default", ((lines, lines),)),
                Op("aten.index_select.default", (lines, 0, tokens)),
                Op("aten.gather.default", (lines, 0, T(rows, width, dtype="int64"))),
                Op("aten.slice_backward.default", (T(rows, half), (rows, width), 1, 0, half, 1)),
                Op("aten.select_backward.default", (T(rows), (rows, width), 1, 0)),
                Op("aten.constant_pad_nd.default", (lines, (1, 1, 1, 1), 0.0)),
            ],
        ),
        (
            turn(index, 3, 2) == 0,
            [
                Op("aten.index_add.default", (lines, 0, tokens, lines)),
                Op("aten.index.Tensor", (lines, (tokens,))),
                Op("aten.index_put.default", (lines, (tokens,), lines, True)),
            ],
        ),
        (
            image.numel <= _MAX_ELEMENTS // 2,
            [Op("aten.constant_pad_nd.default", (image, (1, 1, 1, 1), 0.0))],
        ),
    )


def embedding_bags(index: int, u: float, v: float, w: float) -> list[Op]:
    """Sums or means of an embedding's rows, in bags of up to 16, forward and backward."""
    rows, width, table = log_pick(u, 1, 16384), log_pick(v, 4, 512), log_pick(w, 64, 2**17)
    if max(rows, table) * width > _MAX_ELEMENTS:
        return []
    bags, mode = max(1, rows // (1 + turn(index, 16, 3))), turn(index, 2, 2)
    tokens, offsets = T(rows, dtype="int64"), T(bags, dtype="int64")
    return [
        Op(
            "aten._embedding_bag.default",
            (T(table, width), tokens, offsets, False, mode, False, None),
        ),
        Op(
            "aten._embedding_bag_backward.default",
            (
                T(bags, width),
                tokens,
                offsets,
                T(0, dtype="int64"),
                offsets,
                offsets,
                table,
                False,
                mode,
                False,
                None,
            ),
        ),
    ]


def _attention(index: int, u: float, v: float, w: float) -> list[Op]:
    b, h, t, d = (
        log_pick(u, 1, 64),
        log_pick(v, 1, 16),
        _width(w, 8, 1024, index),
        pick(index * 0.3819660 % 1, (16, 24, 32, 48, 64, 64, 64, 96, 128)),
    )
    s = t if turn(index, 4, 3) else log_pick(index * 0.7320508 % 1, 8, 1024)
    if b * h * max(t, s) * d > 2**21 or 4.0 * b * h * t * s * d > 2e9:
        return []

    def interleaved(length: int) -> TensorSpec:
        return TensorSpec((b, h, length, d), (length * h * d, d, h * d, 1))

    # Queries, keys and values are views of one projection in most networks: heads are interleaved
    # in memory.
    q, k = (interleaved(t), interleaved(s)) if turn(index, 2, 1) else (T(b, h, t, d), T(b, h, s, d))
    causal = turn(index, 3) == 1 and s == t
    mask = (
        (("attn_mask", T(t, s) if turn(index, 2, 3) else T(b, 1, 1, s)),)
        if turn(index, 6) == 0
        else ()
    )
    lse, out = TensorSpec((b, h, t), (h * t, 1, h)), interleaved(t)
    forward = Op(
        "aten._scaled_dot_product_flash_attention_for_cpu.default", (q, k, k, 0.0, causal), mask
    )
    return [
        forward,
        Op(
            "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
            (out, q, k, k, out, lse, 0.0, causal),
            mask,
        ),
    ]


def recurrent(t: int, b: int, inputs: int, hidden: int) -> tuple[Op, Op]:
    """One LSTM layer of oneDNN in training, forward and backward; input (t, b, inputs)."""
    x, state = T(t, b, inputs), T(1, b, hidden)
    weights = (
        T(4 * hidden, inputs),
        T(4 * hidden, hidden),
        T(4 * hidden),
        T(4 * hidden),
    )
    out = T(t, b, hidden)
    shared = (2, hidden, 1, True)  # 2: LSTM
    forward = Op(
        "aten.mkldnn_rnn_layer.default",
        (x, *weights, state, state, False, (), *shared, False, False, True),
    )
    backward = Op(
        "aten.mkldnn_rnn_layer_backward.default",
        (
            x,
            *weights,
            state,
            state,
            out,
            state,
            state,
            out,
            state,
            state,
            False,
            *shared,
            True,
            False,
            (),
            False,
            T(1, dtype="uint8"),
        ),
    )
    return forward, backward


def _recurrent(index: int, u: float, v: float, w: float) -> list[Op]:
    t, b, hidden = log_pick(u, 1, 128), log_pick(v, 1, 128), _width(w, 8, 512, index)
    inputs = hidden if turn(index, 4) == 0 else _width(index * 0.3819660 % 1, 8, 512, index + 1)
    if 8.0 * t * b * hidden * (inputs + hidden) > 2e9:
        return []
    return list(recurrent(t, b, inputs, hidden))


def groups(mode: str) -> list[Group]:
    """One group a kind of layer."""
    plan = (
        ("normalisation", "norm", _norms, 8, 56),
        ("pooling", "pool", _pools, 8, 24),
        ("rows", "rows", _rows, 8, 24),
        ("moves", "moves", _moves, 12, 20),
        ("embedding bags", "moves", embedding_bags, 4, 16),
        ("attention", "attention", _attention, 12, 44),
        ("recurrent", "recurrent", _recurrent, 6, 40),
        ("images", "images", images, 6, 20),
        ("uncommon layers", "uncommon", uncommon, 3, 5),
    )
    found = [
        Group(
            title,
            tuple(
                Point(family, op) for ops in filled(share(mode, quick, full), 3, make) for op in ops
            ),
            repeats(mode),
        )
        for title, family, make, quick, full in plan
    ]
    views = [
        Op("aten.view.default", (T(64, 64), (4096,))),
        Op("aten.t.default", (T(64, 64),)),
        Op("aten.transpose.int", (T(4, 8, 16), 1, 2)),
        Op("aten.expand.default", (T(1, 64), (64, 64))),
        Op("aten.permute.default", (T(4, 8, 16), (2, 0, 1))),
        Op("aten.unsqueeze.default", (T(64), 0)),
        Op("aten.select.int", (T(8, 8), 0, 1)),
        Op("aten.slice.Tensor", (T(8, 8), 0, 1, 4)),
        Op("aten.detach.default", (T(8),)),
        Op("aten._unsafe_view.default", (T(64, 64), (4096,))),
        Op("aten.squeeze.dim", (T(1, 8), 0)),
        *(Op("aten.split.Tensor", (T(n, 8), 2)) for n in (4, 16, 128)),
        *(Op("aten.unbind.int", (T(n, 8),)) for n in (2, 8, 64)),
        Op("aten._local_scalar_dense.default", (T(),)),
        Op("aten.empty.memory_format", ((8,),)),
        Op("aten.empty_like.default", (T(8),)),
        Op("aten.zeros.default", ((8,),)),
        Op("aten.alias.default", (T(8),)),
        Op("aten.as_strided.default", (T(64), (8, 8), (8, 1))),
    ]
    found.append(Group("views", tuple(Point("view", op) for op in views), repeats(mode)))
    found.append(
        Group(
            "fills",
            tuple(
                Point("pointwise", Op("aten.zeros.default", ((n,),)))
                for n in log_sizes(64, 2**22, 0.25)
            ),
            repeats(mode),
        )
    )
    return found

"""Descriptions of attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Iterator

from dlperf.core.trace import Op
from dlperf.ops.registry import argument
from dlperf.predictors.kernels.description import (
    KernelDescription,
    described,
    in_dtypes,
    kernel_features,
    log2,
    pass_of,
    tensor,
)
from dlperf.predictors.kernels.onednn import BLOCK, padded, remainders

_KEYS = 512
"""Keys that flash attention on a CPU takes at once (kv_split_size in
aten/src/ATen/native/cpu/FlashAttentionKernel.cpp).
"""


def _query_rows(n_queries: int) -> int:
    """Queries that it takes at once (q_split_size, ibid.)."""
    return 256 if n_queries >= 768 else 64 if n_queries >= 192 else 32


def _blocks(n_queries: int, n_keys: int, causal: bool) -> Iterator[tuple[int, int, int]]:
    """The blocks of one head, some queries against some keys each: two products and a softmax
    between them. The third number are the results behind a causal mask: computed, then filled in.
    A causal mask spares whole blocks of keys alone.

    >>> list(_blocks(40, 40, causal=True))
    [(32, 40, 752), (8, 40, 28)]
    """
    rows = _query_rows(n_queries)
    for first in range(0, n_queries, rows):
        queries = min(rows, n_queries - first)
        reached = min(first + queries, n_keys) if causal else n_keys
        for start in range(0, reached, _KEYS):
            keys = min(_KEYS, n_keys - start)
            unused = (
                sum(max(0, start + keys - 1 - row) for row in range(first, first + queries))
                if causal and reached - start <= _KEYS
                else 0
            )
            yield queries, keys, unused


@kernel_features(
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_flash_attention_for_cpu_backward",
)
def _attention(op: Op) -> KernelDescription:
    way, query, (key, *_) = pass_of(op)
    batch, n_heads, n_queries, width = query.shape
    heads, n_keys = batch * n_heads, tensor(key).shape[2]
    causal = argument(op, 7 if way else 4, "is_causal", False) is True
    masked = dict(op.kwargs).get("attn_mask") is not None
    blocks = list(_blocks(n_queries, n_keys, causal))
    scores = sum(queries * keys for queries, keys, _ in blocks)
    per_head = (
        1,
        len(blocks),
        scores * width,
        scores,
        n_queries * width,
        n_keys * width,
        # Products: whole tiles, and the parts that what is left over is cut into. Softmax: what is
        # left over of vectors goes one by one.
        sum(queries * padded(keys) * width for queries, keys, _ in blocks),
        sum(padded(queries) * keys * width for queries, keys, _ in blocks),
        sum(queries * remainders(keys) * width for queries, keys, _ in blocks),
        sum(remainders(queries) * keys * width for queries, keys, _ in blocks),
        scores * padded(width),
        scores * remainders(width),
        sum(queries * (keys % BLOCK) for queries, keys, _ in blocks),
        sum(queries for queries, _, unused in blocks if unused),
        sum(unused for _, _, unused in blocks),
        scores * masked,
    )
    features = (
        log2(heads),
        log2(n_queries),
        log2(n_keys),
        log2(width),
        n_keys % BLOCK / BLOCK,
        0.35 * remainders(width),
        float(causal),
        float(masked),
        float(query.strides[2] != width),
    )
    return described(
        in_dtypes(query.dtype, f"attention{way}"),
        features,
        (heads * amount for amount in per_head),
    )


@kernel_features("aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward")
def _recurrent(op: Op) -> KernelDescription:
    x, w_input = tensor(op.args[0]), tensor(op.args[1])
    t, b, inputs = x.shape
    hidden = tensor(op.args[2]).shape[1]
    gates = w_input.shape[0] // max(hidden, 1)
    # Products over whole blocks of the hidden width, inputs for all times at once, states time by
    # time; the weights' reading, whose copy is made once.
    wide = gates * padded(hidden)
    weights = gates * hidden * hidden
    name = "rnn_backward" if op.packet.endswith("backward") else "rnn"
    return described(
        ((name, x.dtype, str(gates)), (name, x.dtype, "4"), (name, "float32", "4")),
        (
            log2(t),
            log2(b),
            log2(inputs),
            log2(hidden),
            0.35 * remainders(hidden),
            0.35 * remainders(inputs),
        ),
        (
            t,
            t * b * wide * inputs,
            t * b * wide * hidden,
            gates * hidden * inputs,
            weights,
            t * weights,
            t * b * (gates * hidden + inputs),
        ),
    )

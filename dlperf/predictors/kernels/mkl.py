"""What MKL allocates for products of matrices: sizes as functions of their shapes."""

from __future__ import annotations

from collections.abc import Sequence

from dlperf.core.trace import Op
from dlperf.predictors.kernels.onednn import padded

_PRODUCTS = ("aten.mm", "aten.addmm")
_DEPTH, _LEAST_DEPTH, _MOST_ROWS = 192, 128, 384
_LEAST_ROWS, _LEAST_COLUMNS = 4, 16  # narrower products are not packed
_OVERHEAD_BYTES, _ITEM_BYTES = 17_056, 4


def product_buffers(ops: Sequence[Op]) -> list[tuple[int, int]]:
    """(op, bytes) of each buffer into which MKL packs the operands of a product, made where none of
    those before is large enough, and kept for good: two blocks of one operand and a panel of the
    other, of 128 to 192 columns (read with a malloc that logs; torch 2.13, AMD Zen 4).

    >>> from dlperf.core.trace import TensorSpec
    >>> shapes = (384, 192, 576), (64, 64, 64), (384, 192, 3000), (32, 128, 10)
    >>> product_buffers([
    ...     Op("aten.mm.default", (TensorSpec.contiguous(m, k), TensorSpec.contiguous(k, n)))
    ...     for m, k, n in shapes
    ... ])
    [(0, 1049248), (2, 2917024)]
    """
    found, most = [], 0
    for index, op in enumerate(ops):
        operands = op.inputs[-2:] if op.packet in _PRODUCTS else ()
        if [(len(spec.shape), spec.dtype) for spec in operands] != 2 * [(2, "float32")]:
            continue
        (m, k), (_, n) = (spec.shape for spec in operands)
        if m < _LEAST_ROWS or n < _LEAST_COLUMNS:
            continue
        depth = max(_LEAST_DEPTH, k) if k <= _DEPTH else min(k // 2, _DEPTH)
        floats = depth * (2 * min(m, _MOST_ROWS) + padded(n))
        n_bytes = _OVERHEAD_BYTES + _ITEM_BYTES * floats
        if n_bytes > most:
            found.append((index, n_bytes))
            most = n_bytes
    return found

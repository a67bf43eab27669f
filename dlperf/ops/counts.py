"""FLOPs and bytes of operations: one short registered formula each.

The convention, for every formula:

- FLOPs count what the operation computes, not what a kernel spends on it. One multiply-add is 2 FLOP. A contraction
  (matrix product, convolution, attention) counts its products; its bias and scale factors (`alpha`, `beta`) are not counted.
- An elementwise operation counts 1 FLOP per output element, whatever the function; a comparison counts as a sum; a reduction
  1 FLOP per input element; drawing a random number 1. Operations fused of several count their parts.
- Copies, casts, fills, gathers count 0 FLOP. Views and metadata count 0 FLOP and 0 bytes.
- Bytes count each distinct input tensor once, if it is read, and each output once, so an in-place update counts read and write;
  dimensions of stride 0 count once; lookups count the rows they touch. Caches are not known here.
- An operation without a formula has unknown FLOPs, which is None and never 0; its bytes follow the default rule.

A new operation is one decorated function in the module whose idea it fits::

    @flop_formula("aten.my_op")
    def my_op(op: Op) -> int:
        return 3 * op.outputs[0].numel
"""

from __future__ import annotations

import weakref

from dlperf.core.trace import Op, Trace
from dlperf.ops import contractions, elementwise, layers, registry
from dlperf.ops.operand_bytes import bytes_read, op_bytes
from dlperf.ops.registry import byte_formula, flop_formula

__all__ = [
    "byte_formula",
    "bytes_read",
    "contractions",
    "elementwise",
    "flop_formula",
    "is_view",
    "layers",
    "op_bytes",
    "op_flops",
    "totals",
    "unknown_ops",
]


def op_flops(op: Op) -> int | None:
    """FLOPs of an op; None where no formula is registered for it.

    >>> from dlperf.core.trace import TensorSpec
    >>> a, b, c = TensorSpec.contiguous(2, 3), TensorSpec.contiguous(3, 5), TensorSpec.contiguous(2, 5)
    >>> op_flops(Op("aten.mm.default", (a, b), outputs=(c,)))  # 2 x 5 elementwise, 3 multiply-adds each
    60
    >>> op_flops(Op("mine.mystery.default", (a,), outputs=(a,))) is None
    True
    """
    formula = registry.find(registry.FLOPS, op.packet)
    return None if formula is None else formula(op)


def is_view(op: Op) -> bool:
    """Whether the op touches no element: a view, metadata, fresh memory. Copies that happened to be
    views are not told apart here.
    """
    return any(name in elementwise.VIEWS for name in registry.names_of(op.packet))


class _Counts:
    """FLOPs and bytes of a trace's ops, and which of them no formula knows."""

    def __init__(self, trace: Trace) -> None:
        flops = [op_flops(op) for op in trace.ops]
        self.flops = [0 if count is None else count for count in flops]
        self.bytes = [op_bytes(op) for op in trace.ops]
        self.unknown = tuple(place for place, count in enumerate(flops) if count is None)


_COUNTED: dict[int, tuple[weakref.ref[Trace], _Counts]] = {}


def _counts(trace: Trace) -> _Counts:
    # a trace is immutable but holds dicts, so it has no hash: its identity is the key for as long
    # as it lives
    key = id(trace)
    found = _COUNTED.get(key)
    if found is not None and found[0]() is trace:
        return found[1]
    counts = _Counts(trace)
    _COUNTED[key] = weakref.ref(trace, lambda gone: _forget(key, gone)), counts
    return counts


def _forget(key: int, gone: weakref.ref[Trace]) -> None:
    if key in _COUNTED and _COUNTED[key][0] is gone:
        del _COUNTED[key]


def totals(trace: Trace) -> tuple[list[int], list[int]]:
    """FLOPs and bytes of each op of a trace, in its order; unknown FLOPs as 0 (:func:`unknown_ops`
    names them). Worked out once per trace.
    """
    counts = _counts(trace)
    return list(counts.flops), list(counts.bytes)


def unknown_ops(trace: Trace) -> tuple[int, ...]:
    """The indices of the ops whose FLOPs no formula knows."""
    return _counts(trace).unknown

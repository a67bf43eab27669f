"""FLOPs and bytes of operators. Each has one registered formula.

Convention:

- FLOPs count what an operator computes, not what a kernel executes. One multiply-add is 2 FLOP. A
  contraction (matrix product, convolution, attention) counts its products; its bias and its scale
  factors (`alpha`, `beta`) are not counted.
- An elementwise function counts 1 FLOP per output element, a comparison too; a reduction 1 FLOP per
  input element; a random number 1 FLOP. A fused operator counts the sum of its parts.
- Copies, casts, fills and gathers count 0 FLOP. Views and metadata count 0 FLOP and 0 bytes.
- Bytes count each distinct input tensor once, if it is read, and each output once; an in-place
  update counts read and write. Dimensions of stride 0 count once. Look-ups count the rows that they
  touch. Caches do not matter here.
- FLOPs of an operator without a formula are None, never 0. Its bytes follow the default rule.

To add an operator, register one function in the module of its kind::

    @flop_formula("aten.my_op")
    def my_op(op: Op) -> int:
        return 3 * op.outputs[0].numel
"""

from __future__ import annotations

from dlperf.core.caching import cached_by_identity
from dlperf.core.trace import Op, Trace
from dlperf.ops import contractions, elementwise, fused, layers, registry
from dlperf.ops.operand_bytes import bytes_read, is_view, op_bytes

__all__ = ["bytes_read", "contractions", "elementwise", "fused", "is_view", "layers", "op_bytes"]


def op_flops(op: Op) -> int | None:
    """FLOPs of an op; None where no formula is registered for it.

    >>> from dlperf.core.trace import TensorSpec
    >>> a, b = TensorSpec.contiguous(2, 3), TensorSpec.contiguous(3, 5)
    >>> c = TensorSpec.contiguous(2, 5)
    >>> op_flops(Op("aten.mm.default", (a, b), outputs=(c,)))  # 2 x 5 x 3 multiply-adds
    60
    >>> op_flops(Op("mine.mystery.default", (a,), outputs=(a,))) is None
    True
    """
    formula = registry.find(registry.FLOPS, op.packet)
    return None if formula is None else formula(op)


@cached_by_identity
def _flops(trace: Trace) -> list[int | None]:
    return [op_flops(op) for op in trace.ops]


@cached_by_identity
def _bytes(trace: Trace) -> list[int]:
    return [op_bytes(op) for op in trace.ops]


def totals(trace: Trace) -> tuple[list[int], list[int]]:
    """FLOPs and bytes of each op; unknown FLOPs are 0 (:func:`unknown_ops` names them)."""
    return [flops or 0 for flops in _flops(trace)], list(_bytes(trace))


def unknown_ops(trace: Trace) -> tuple[int, ...]:
    """Indices of the ops without a FLOP formula."""
    return tuple(index for index, flops in enumerate(_flops(trace)) if flops is None)

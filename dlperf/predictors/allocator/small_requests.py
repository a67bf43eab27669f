"""Requests below 1 KiB that a training step makes beside the memory of its tensors.

No trace holds them, but they decide what glibc gives back: a small chunk that lives longer keeps
the free memory on both sides of it apart. Sizes and numbers were counted with a malloc that logs
(torch 2.13, x86-64).
"""

from __future__ import annotations

from dataclasses import dataclass

from dlperf.core.trace import Op, Trace
from dlperf.ops.operand_bytes import is_view

STORAGE = 96  #: c10::StorageImpl, made before its memory.
TENSOR = (176, 24)  #: c10::TensorImpl and its version counter, made after it.

OUTPUT = 184  #: AutogradMeta of an output that autograd records, made after it.
_NODE, _EDGE = 544, 16  # Node, Edge
_ACCUMULATE = 472  # AccumulateGrad, made anew by each forward
_VIEW = (16, 176, 312)  # sizes saved for the backward, TensorImpl, DifferentiableViewMeta
_SAVED = {"aten.convolution": (16,) * 5, "aten.addmm": (16,) * 4}  # sizes saved for the backward


@dataclass(frozen=True)
class SmallRequests:
    """Bytes of each small request, by op.

    `nodes` are made by an op of the forward that autograd records, before its output, and live to
    the end of the step. `optimizer` is its first op (the number of ops where there is none).
    """

    nodes: dict[int, tuple[int, ...]]
    optimizer: int


def small_requests(trace: Trace) -> SmallRequests:
    """The small requests of a step."""
    recorded = [index for index, op in enumerate(trace.ops) if op.phase == "forward" and op.grad]
    n_accumulated, per_node = 0, len(trace.parameters) / max(1, len(recorded))
    nodes = {}
    for number, index in enumerate(recorded, 1):
        n_more = int(number * per_node) - n_accumulated
        n_accumulated += n_more
        nodes[index] = _node(trace.ops[index]) + (_ACCUMULATE,) * n_more
    return SmallRequests(nodes, _first(trace, "optimizer"))


def _node(op: Op) -> tuple[int, ...]:
    """An autograd node, its edges (a vector that doubles), and what it saves."""
    n_edges = max(1, sum("float" in spec.dtype for spec in op.inputs))
    room = 1 << (n_edges - 1).bit_length()
    return (
        _NODE,
        room * _EDGE,
        *_SAVED.get(op.packet, ()),
        *(_VIEW if is_view(op) else ()),
    )


def _first(trace: Trace, phase: str) -> int:
    """The first op of a phase; the number of ops where there is none."""
    return next((index for index, op in enumerate(trace.ops) if op.phase == phase), len(trace.ops))

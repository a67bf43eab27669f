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
OTHER_PROGRAM = (24, 40, 56, 72, 104, 200, 500)
"""Requests of what ran before: torch's import, the model's modules."""

OUTPUT = 184  #: AutogradMeta of an output that autograd records, made after it.
_NODE, _EDGE = 544, 16  # Node, Edge
_ACCUMULATE = 472  # AccumulateGrad, made anew by each forward
_VIEW = (16, 176, 312)  # sizes saved for the backward, TensorImpl, DifferentiableViewMeta
_SAVED = {"aten.convolution": (16,) * 5, "aten.addmm": (16,) * 4}  # sizes saved for the backward
_ENGINE = (24,) * 8 + (40,) * 6 + (56,) * 4 + (72,) * 2 + (104,) * 3
_PER_NODE = 24  # an entry of GraphTask::dependencies_
_CONVOLUTION = (16,) * 24 + (40,) * 16 + (56,) * 6 + (32,) * 10 + (768,) * 6 + (824,) * 4
"""Attributes and descriptors of a call of oneDNN."""


@dataclass(frozen=True)
class SmallRequests:
    """Bytes of each small request, by op.

    `nodes` are made by an op of the forward that autograd records, before its output, and live to
    the end of the step. `within` are made and freed by an op. `engine` lives from op `backward` to
    op `optimizer`, the first ones of these phases (the number of ops where there is none).
    """

    nodes: dict[int, tuple[int, ...]]
    within: dict[int, tuple[int, ...]]
    engine: tuple[int, ...]
    backward: int
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
    return SmallRequests(
        nodes,
        {index: _CONVOLUTION for index, op in enumerate(trace.ops) if "convolution" in op.packet},
        (_PER_NODE,) * len(recorded) + _ENGINE if recorded else (),
        _first(trace, "backward"),
        _first(trace, "optimizer"),
    )


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

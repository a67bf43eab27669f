"""Small requests that a training step makes beside the memory of its tensors.

No trace holds them, but they decide what glibc gives back: a small chunk that lives longer keeps
the free memory on both sides of it apart. Sizes and numbers were counted with a malloc that logs
(torch 2.13, x86-64).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.ops.operand_bytes import is_view
from dlperf.predictors.allocator.stages import Scratch

STORAGE = 96  #: c10::StorageImpl, made before its memory.
TENSOR = (176, 24)  #: c10::TensorImpl and its version counter, made after it.

OUTPUT = 184  #: AutogradMeta of an output that autograd records, made after it.
_NODE, _EDGE = 544, 16  # Node, Edge
_ACCUMULATE = 472  # AccumulateGrad, made anew by each forward
_VIEW = (16, 176, 312)  # sizes saved for the backward, TensorImpl, DifferentiableViewMeta
# Below 1 KiB there is room for what oneDNN keeps: programs have many free chunks of such a size.
_CONVERSION = (6352, 4824)
_SIZES = (2144,) * 4
_PLAIN = {
    "aten.convolution": ((2216, 6560, 13552, 13552, 4664), ()),
    "aten.convolution_backward": ((2216, 6560, 13552), (13552, 4592)),
}
_STRIDED = {
    "aten.convolution": _PLAIN["aten.convolution"],
    "aten.convolution_backward": (
        (2216, 6560, 12776, 13656, *_SIZES),
        (12000, 13552, 13552, 4664),
    ),
}
_TRANSPOSED = {
    "aten.convolution": (
        (2216, 6560, 12776, 13656, *_SIZES, 12776, 13656, 13656, *(6032, 2144) * 4, *(4584, 2144) * 4),
        (),
    ),
    "aten.convolution_backward": (
        (2216, 6560, 13552, *_SIZES),
        (13656, *(6032, 2144) * 4, *(4584, 2144) * 2),
    ),
}
_STRIDE = {"aten.convolution": 3, "aten.convolution_backward": 4}
"""The place of ``stride`` among the arguments; ``transposed`` is three further."""
_SAVED = {"aten.convolution": (16,) * 5, "aten.addmm": (16,) * 4}  # sizes saved for the backward


@dataclass(frozen=True)
class SmallRequests:
    """Bytes of each small request, by op.

    `nodes` are made by an op of the forward that autograd records, before its output, and live to
    the end of the step. `optimizer` is its first op (the number of ops where there is none).
    """

    nodes: dict[int, tuple[int, ...]]
    optimizer: int


@dataclass(frozen=True)
class Primitives:
    """Bytes of each chunk that oneDNN keeps for good from the first call of one of its passes.

    `before` are made before the blocks of its operands, `after` after them; of `conversions` each
    tuple is made after one of these blocks, those that are read and the first that is written.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    conversions: tuple[tuple[int, ...], ...]


def primitives(ops: Sequence[Op], scratch: Sequence[Scratch]) -> dict[tuple[int, int], Primitives]:
    """What oneDNN keeps, by op and number of its stage. A second call of the same shape finds it."""
    known: set[Any] = set()

    def is_new(key: Any) -> bool:
        was_known = key in known
        known.add(key)
        return not was_known

    found = {}
    for index, (op, stages) in enumerate(zip(ops, scratch)):
        for number, stage in enumerate(stages if op.packet in _PLAIN else ()):
            blocks = [("read", n) for n in stage.read] + [("written", n) for n in stage.written[:1]]
            conversions = tuple(_CONVERSION if is_new(block) else () for block in blocks)
            before, after = _kind(op)[op.packet]
            if not blocks or not is_new((op.packet, number, tuple(_shapes(op)))):
                before = after = ()
            found[index, number] = Primitives(before, after, conversions)
    return found


def _kind(op: Op) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    stride, transposed = op.args[_STRIDE[op.packet]], op.args[_STRIDE[op.packet] + 3]
    if transposed:
        return _TRANSPOSED
    return _STRIDED if max(stride) > 1 else _PLAIN


def _shapes(op: Op) -> Iterator[Any]:
    """The arguments of an op, of tensors the shapes."""
    for value in op.args:
        yield value.shape if isinstance(value, TensorSpec) else value


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

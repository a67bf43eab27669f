"""Small requests that a training step makes beside the memory of its tensors.

No trace holds them, but they decide what glibc gives back: a small chunk in use keeps the free
memory on both sides of it apart. Most live as long as one operator or one node of the backward, and
are made and freed while tensors come and go. Sizes and numbers were read with a malloc that logs
(torch 2.13, x86-64). Negative ones are aligned to 64 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

# Autograd's engine.
_TASK = (32, 16, 8, 1112, 64, 512, 104, 64, 48, 24, 272)  # GraphTask and queues of a backward
_MEMBER, _DEPENDENCIES = 16, 24  # of each node: its place in the graph, what it waits for
_QUEUED = (8, 24, 48, 24)  # InputBuffer of a node that waits
_RUNNING = (64, 512, 104, 64, 104, 64, 16)  # thread state and list of outputs of one that runs

# oneDNN, for a convolution or a recurrent layer.
DESCRIPTION = (-16, -32, 40, 32, -768, 32)  #: Live while a memory and its block are made.
MEMORY = (56, -824, 8, -56, 32)  #: dnnl::memory and what holds it, made after its block.
_TENSOR_OF_CALL = (96, 176, 24)
CALL = (16,) * 8 + _TENSOR_OF_CALL  #: Made by a convolution's call, before memories and blocks.
STAGE = (
    (16,) * 4 + (32, 16) + (-768, 32) * 4 + (-2144, 32) * 3 + (-48, 32)
)  #: Made by each of its passes, before the blocks of that.
REORDER = (
    -2144,
    32,
    -768,
    32,
)  #: Live while the block of a layout is made, and while it is filled.
N_FILLING = 5  #: Memories that live while a block is filled.
N_BACK = 2  #: Memories more that live while a result is converted back from its block.

_ONEDNN = {
    "aten.convolution": (CALL, 4),
    "aten.convolution_backward": (CALL, 4),
    "aten.mkldnn_rnn_layer": (_TENSOR_OF_CALL, 13),
    "aten.mkldnn_rnn_layer_backward": (_TENSOR_OF_CALL, 19),
}  # what the call makes, and its number of memories
_POINTER_BYTES = 8  # of a tensor in the lists that a foreach operator takes and returns


@dataclass(frozen=True)
class SmallRequests:
    """Bytes of each small request, by op.

    `nodes` are made by an op of the forward that autograd records, before its output, and live to
    the end of the step. `calls` are made before all else of an op, and live through it, as do so
    many `memories` of an op of oneDNN; each pass of one makes :data:`STAGE`, each of its blocks a
    memory and what converts it. `backward` and `optimizer` are the first ops of these phases (the
    number of ops where there is none), `first_of_node` those of each node of the backward.
    """

    nodes: dict[int, tuple[int, ...]]
    calls: dict[int, tuple[int, ...]]
    memories: dict[int, int]
    first_of_node: frozenset[int]
    backward: int
    optimizer: int


class Engine:
    """The small requests of autograd's engine through one backward, made by `malloc` and given back
    by `free` (which empties the list).
    """

    def __init__(
        self,
        malloc: Callable[[Sequence[int]], list[int]],
        free: Callable[[list[int]], None],
    ) -> None:
        self._malloc, self._free = malloc, free
        self._task: list[int] = []
        self._waiting: list[int] = []
        self._running: list[int] = []

    def start(self, n_nodes: int) -> None:
        """A backward through so many nodes begins."""
        self._task = self._malloc(_TASK)
        for _ in range(n_nodes):
            self._task += self._malloc((_MEMBER,))
            self._waiting += self._malloc((_DEPENDENCIES,))
        self._waiting.reverse()

    def next_node(self) -> None:
        """The next node begins; what the one before it held is given back."""
        queued = self._malloc(_QUEUED)
        self._free(self._waiting[-1:])
        del self._waiting[-1:]
        self._free(self._running)
        self._running = queued + self._malloc(_RUNNING)

    def end(self) -> None:
        """The backward is over; nothing happens where none was started."""
        for held in (self._running, self._waiting, self._task):
            self._free(held)


def small_requests(trace: Trace, has_blocks: Callable[[int], bool]) -> SmallRequests:
    """The small requests of a step. `has_blocks` says of an op whether it allocates memory within
    itself.
    """
    recorded = [index for index, op in enumerate(trace.ops) if op.phase == "forward" and op.grad]
    n_accumulated, per_node = 0, len(trace.parameters) / max(1, len(recorded))
    nodes = {}
    for number, index in enumerate(recorded, 1):
        n_more = int(number * per_node) - n_accumulated
        n_accumulated += n_more
        nodes[index] = _node(trace.ops[index]) + (_ACCUMULATE,) * n_more
    calls: dict[int, tuple[int, ...]] = {}
    memories = {}
    for index, op in enumerate(trace.ops):
        if op.packet in _ONEDNN and has_blocks(index):
            calls[index], memories[index] = _ONEDNN[op.packet]
        elif op.packet.startswith("aten._foreach_") and len(op.outputs) > 1:
            n_bytes = _POINTER_BYTES * len(op.outputs)
            calls[index] = (n_bytes, n_bytes, _POINTER_BYTES, n_bytes)
    return SmallRequests(
        nodes,
        calls,
        memories,
        first_of_node(trace),
        _first(trace, "backward"),
        _first(trace, "optimizer"),
    )


def first_of_node(trace: Trace) -> frozenset[int]:
    """Indices of the ops with which an autograd node begins in the backward."""
    first = {op.node: index for index, op in reversed([*enumerate(trace.ops)])}
    return frozenset(index for node, index in first.items() if node >= 0)


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

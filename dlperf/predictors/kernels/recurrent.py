"""What oneDNN allocates for a recurrent layer (rnn:ref): sizes as functions of its shapes, read
with a malloc that logs (torch 2.13, x86-64 with AVX-512).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from dlperf.core.trace import Op
from dlperf.predictors.allocator.heap import PAGE_BYTES
from dlperf.predictors.allocator.stages import Scratch, Stage
from dlperf.predictors.kernels.description import tensor
from dlperf.predictors.kernels.onednn import PACKED_BYTES, padded

_FORWARD, _BACKWARD = "aten.mkldnn_rnn_layer", "aten.mkldnn_rnn_layer_backward"
_GRADIENTS = slice(10, 13)  # of output, hidden and cell state, among the backward's arguments
_ITEM_BYTES = 4
_PRIMITIVE_BYTES = 16_936  # made anew by each call
_SCRATCHPAD_BYTES = 4_664  # of a scratchpad, beside its regions
_ALIASED_BYTES = 1_024  # rows of whole multiples of it would share the sets of a cache


class _Layer(NamedTuple):
    """Sizes of a layer of one direction: steps, batch, inputs, hidden units and gates."""

    steps: int
    batch: int
    inputs: int
    hidden: int
    gates: int

    @property
    def gate_floats(self) -> int:
        """Length of a row that holds all gates of a hidden state."""
        return _row(self.gates * self.hidden)


def _layer(op: Op) -> _Layer | None:
    """The layer that an op is; None for other ops."""
    if op.packet not in (_FORWARD, _BACKWARD) or len(tensor(op.args[0]).shape) != 3:
        return None
    (steps, batch, inputs), weight = tensor(op.args[0]).shape, tensor(op.args[2])
    n_gates, hidden = weight.shape
    return _Layer(steps, batch, inputs, hidden, n_gates // max(1, hidden))


def _row(n_floats: int) -> int:
    """Floats from one row to the next: whole cache lines, one more where rows would alias.

    >>> _row(100), _row(512)
    (112, 528)
    """
    floats = padded(n_floats)
    return floats + 16 * ((floats * _ITEM_BYTES) % _ALIASED_BYTES == 0)


def _regions(*n_floats: int) -> int:
    """Bytes of regions of so many floats, each in whole pages."""
    return sum(PAGE_BYTES * math.ceil(n * _ITEM_BYTES / PAGE_BYTES) for n in n_floats)


def workspace_bytes(op: Op) -> tuple[int, int] | None:
    """(storage, bytes) of what an op keeps for its backward where no recording on fake tensors can
    know its size; None for other ops. Kept are the gates and the hidden, cell and gradient states
    of every step, some with room for the layer's inputs.

    >>> from dlperf.core.trace import TensorSpec
    >>> shapes = (10, 8, 24), (96, 24), (96, 24)
    >>> kept = TensorSpec.contiguous(0, dtype="uint8", storage=7)
    >>> step, *weights = (TensorSpec.contiguous(*shape) for shape in shapes)
    >>> operands, results = (step, *weights), (step, step, step, kept)
    >>> workspace_bytes(Op("aten.mkldnn_rnn_layer.default", operands, outputs=results))
    (7, 159744)
    """
    layer = _layer(op) if op.packet == _FORWARD else None
    if layer is None or len(op.outputs) < 4 or op.outputs[3].storage < 0:
        return None
    width, states = _row(max(layer.inputs, layer.hidden)), (layer.steps + 1) * layer.batch
    steps = layer.steps * layer.batch
    n_bytes = _regions(
        *(steps * layer.gate_floats, steps * _row(layer.hidden)),
        *(2 * states * width,) * 3,
        *(2 * states * layer.hidden,) * 2,
    )
    return op.outputs[3].storage, n_bytes


def scratch(op: Op) -> Scratch:
    """The blocks that a recurrent layer or its backward allocates and frees within itself:
    gradients that do not lie row by row or that nobody gave, weights in the layout of its products,
    its scratchpad and the packed operands of a product.

    >>> from dlperf.core.trace import TensorSpec
    >>> shapes = (40, 32, 64), (512, 64), (512, 128)
    >>> operands = tuple(TensorSpec.contiguous(*shape) for shape in shapes)
    >>> scratch(Op("aten.mkldnn_rnn_layer.default", operands))[0].after
    (16936, 135168, 270336, 2740792, 74176)
    """
    layer = _layer(op)
    if layer is None:
        return ()
    rows = layer.inputs, layer.hidden
    weights = tuple(n * layer.gate_floats * _ITEM_BYTES for n in rows)
    steps = layer.steps * layer.batch
    state = layer.batch * padded(layer.hidden)
    pad = _SCRATCHPAD_BYTES + _regions(steps * layer.gate_floats, state, state)
    primitives: tuple[int, ...] = (_PRIMITIVE_BYTES,)
    held: tuple[int, ...] = ()
    if op.packet == _BACKWARD:
        held = tuple(
            layer.batch * layer.hidden * _ITEM_BYTES if grad is None else tensor(grad).nbytes
            for grad in op.args[_GRADIENTS]
            if grad is None or not tensor(grad).is_contiguous
        )
        turned = (layer.gates * layer.hidden * _row(n) * _ITEM_BYTES for n in rows if _row(n) != n)
        primitives, weights = 2 * primitives, (*turned, *weights)
    return (Stage(held, after=(*primitives, *weights, pad, PACKED_BYTES)),)

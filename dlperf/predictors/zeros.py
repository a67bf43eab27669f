"""Which elements of an optimizer's state stay zero in a step: those of embedding rows that no index
meets.

A dense gradient of an embedding is zero wherever no index points, and so are the moments made of
it. Square roots take far longer there with some libraries (18 times as long on a Xeon with torch
2.13.0 and its MKL, which handles zeros and denormal numbers apart from others).
"""

from __future__ import annotations

from collections.abc import Iterator

from dlperf.core.trace import Argument, Op, TensorSpec, Trace
from dlperf.ops.counts import is_view

_TABLES = {"embedding_dense_backward": 2, "_embedding_bag_backward": 6}
"""Gradients of embeddings, and at which place of their arguments the number of rows stands."""
_OF_FIRST = ("div", "neg", "clone", "sqrt")
_MOMENTS = ("addcmul", "lerp", "maximum")


def roots_of_zero(trace: Trace) -> dict[int, float]:
    """By the index of an optimizer's op how many square roots of zero it takes, where any.

    Indices are taken as drawn alike from all rows of their table: of n draws from r rows (1 -
    1/r)^n of the rows are never met. State is taken as zero before the first step.
    """
    shares: dict[int, float] = {}
    found: dict[int, float] = {}
    for index, op in enumerate(trace.ops):
        name = op.packet.removeprefix("aten.")
        if name in _TABLES and op.phase == "backward":
            indices, n_rows = op.args[1], op.args[_TABLES[name]]
            if isinstance(indices, TensorSpec) and isinstance(n_rows, int) and n_rows > 0:
                shares |= {
                    spec.storage: (1 - 1 / n_rows) ** indices.numel
                    for spec in op.outputs
                    if spec.storage >= 0
                }
        elif shares and op.phase in ("backward", "optimizer") and not is_view(op):
            kernel = name.removeprefix("_foreach_").rstrip("_")
            if op.phase == "optimizer" and kernel == "sqrt":
                zeros = sum(
                    spec.numel * shares.get(spec.storage, 0.0)
                    for (spec, *_) in _lanes(op)
                    if isinstance(spec, TensorSpec)
                )
                found |= {index: zeros} if zeros else {}
            _pass_on(op, kernel, shares)
    return found


def _lanes(op: Op) -> Iterator[tuple[Argument, ...]]:
    """An op's arguments for each tensor that it makes or changes: those of a foreach op one place
    of its lists after the other.
    """
    if not (op.args and isinstance(op.args[0], tuple)):
        yield op.args
        return
    for index in range(len(op.args[0])):
        yield tuple(
            (value[index] if index < len(value) else None) if isinstance(value, tuple) else value
            for value in op.args
        )


def _pass_on(op: Op, kernel: str, shares: dict[int, float]) -> None:
    """Enter what an op leaves zero into the shares by storage; what it fills otherwise is
    forgotten.
    """
    lanes = list(_lanes(op))
    results = (
        list(op.outputs)
        if len(op.outputs) == len(lanes)
        else [lane[0] if lane else None for lane in lanes]
    )
    for lane, result in zip(lanes, results):
        if isinstance(result, TensorSpec) and result.storage >= 0:
            share = _share(kernel, lane, shares)
            shares.pop(result.storage, None)
            if share is not None:
                shares[result.storage] = share


def _share(kernel: str, lane: tuple[Argument, ...], shares: dict[int, float]) -> float | None:
    """The share of zeros in an elementwise op's result; None if nothing is known to be zero."""
    known = [shares.get(value.storage) if isinstance(value, TensorSpec) else None for value in lane]
    if kernel in _MOMENTS and len(known) > 1:
        # A state, zero at first, and what the gradient adds to it.
        moved = max((share for share in known[1:] if share is not None), default=None)
        return moved if known[0] is None or moved is None else min(known[0], moved)
    if kernel == "mul":
        return max((share for share in known if share is not None), default=None)
    if kernel == "add" and len(known) > 1:
        return None if known[0] is None or known[1] is None else min(known[0], known[1])
    if kernel == "copy" and len(known) > 1:
        return known[1]
    return known[0] if known and kernel in _OF_FIRST else None

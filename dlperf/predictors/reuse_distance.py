"""How much else a step touched since it last touched an operand or ran the same code: LRU stack
distances (Mattson et al. 1970), in bytes of tensors and in sizes of code.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from dlperf.core.code_footprint import CALLED, code_of, code_since, codes_of, relative_footprint
from dlperf.core.trace import Trace
from dlperf.ops import counts
from dlperf.predictors.allocator import simulation
from dlperf.predictors.allocator.memory_map import FRESH, UNUSED, Owners, owner_of_scratch

_SMALL_BYTES = 4096
"""Bytes below which memory that no tensor used before was used by something small just now."""


class LruStack:
    """What was touched, in the order of its last touch, each with its bytes.

    >>> recency = LruStack()
    >>> recency.touch("a", 10)
    >>> after = recency.now
    >>> for name, n_bytes in (("b", 20), ("a", 10), ("b", 20)):
    ...     recency.touch(name, n_bytes)
    >>> recency.since(after)
    30.0
    """

    def __init__(self) -> None:
        self._sizes = array("d")  # one a touch; 0 where a later touch took its place
        self._index: dict[Hashable, int] = {}

    @property
    def now(self) -> int:
        """A moment that :meth:`since` takes."""
        return len(self._sizes)

    def touch(self, name: Hashable, n_bytes: float) -> None:
        """`name` is what was touched last, `n_bytes` of it."""
        self.forget(name)
        self._index[name] = len(self._sizes)
        self._sizes.append(n_bytes)

    def forget(self, name: Hashable, n_bytes: float = inf) -> None:
        """So many bytes of `name` are no more, by default all."""
        if name in self._index:
            index = self._index[name]
            self._sizes[index] = max(0.0, self._sizes[index] - n_bytes)

    def since(self, moment: int) -> float:
        """Bytes of all that was touched after a moment, what was touched twice counted once."""
        return float(np.array(self._sizes[moment:]).sum())


@dataclass(frozen=True)
class ReuseDistances:
    """Reuse distances in a step that repeats.

    Per operand j of an op: op `operand_op`, `operand_bytes`, `operand_distance` in bytes (infinite
    at the first use) since op `operand_touched` used the same memory. What was never touched, or
    just now by the system, counts as touched by the op itself. Some are no tensors but blocks that
    the op allocates within itself (`operand_is_blocks`).

    Per op: the reuse distance of its code is `code_distance` in bytes and `code_since` in relative
    code footprint (:func:`dlperf.core.code_footprint.code_since`).

    Op numbers in `operand_touched` run over two steps: op i of the second one is len(ops) + i.
    `step_bytes` is the memory that a step touches, each byte once, `step_code` the
    code footprint of its operators.
    """

    operand_op: npt.NDArray[np.int64]
    operand_bytes: npt.NDArray[np.float64]
    operand_distance: npt.NDArray[np.float64]
    operand_touched: npt.NDArray[np.int64]
    operand_is_blocks: npt.NDArray[np.bool_]
    code_distance: tuple[float, ...]
    code_since: tuple[int, ...]
    step_bytes: float
    step_code: int


def reuse_distances(
    trace: Trace, simulated: simulation.AllocatorSimulation, n_bytes: Sequence[int]
) -> ReuseDistances:
    """Reuse distances in the second of two steps; each op moves `n_bytes`. Its passes use the same
    blocks, one after the other.

    Memory that the allocator reuses keeps its address: its former content leaves the stack. What
    comes from the system was zeroed just now. A view touches nothing. No distance exceeds the bytes
    that a step touches.
    """
    recency = LruStack()
    # The op, and the moment when it was done with all of its operands.
    last_touch: dict[int, tuple[int, int]] = {}
    last_run: dict[str, int] = {}
    operands: list[tuple[int, float, float, int, bool]] = []
    code: list[tuple[float, int]] = []
    recent: list[str] = []  # operators and calls of phases, what ran last at the end
    phase = ""
    read_by = [counts.bytes_read(op, moved) for op, moved in zip(trace.ops, n_bytes)]
    for number in range(2):
        operands, code = [], []
        for index, (op, reads) in enumerate(zip(trace.ops, read_by)):
            place = number * len(trace.ops) + index
            touched: list[tuple[int, int, Owners]] = [
                (spec.storage, size, ((spec.storage, size),))
                for spec, size in reads
                if spec.storage >= 0 and size
            ]
            read = {spec.storage for spec, _ in reads}
            for spec in op.outputs:
                if spec.storage >= 0 and spec.storage not in read and spec.numel:
                    held = trace.storages[spec.storage].born < 0 or spec in op.inputs
                    before = () if held else simulated.predecessors[spec.storage]
                    before = before or ((spec.storage, spec.nbytes),)
                    touched.append((spec.storage, spec.nbytes, before))
            if of_blocks := simulated.predecessors_of_blocks[index]:
                touched.append(
                    (owner_of_scratch(index), sum(part for _, part in of_blocks), of_blocks)
                )
            for storage, size, before in touched:
                whole = sum(part for _, part in before)
                for owner, part in before:
                    by, moment = last_touch.get(owner, (place, None))
                    away = inf if moment is None else recency.since(moment)
                    if owner == FRESH or (owner == UNUSED and size < _SMALL_BYTES):
                        away = 0.0
                    operands.append((index, size * part / whole, away, by, storage < UNUSED))
            if op.phase != phase:
                phase = op.phase
                if phase in CALLED:
                    _put_last(recent, phase)
            name = code_of(op.packet)
            since = last_run.get(name, recency.now)
            code.append((recency.since(since), code_since(name, recent)))
            _put_last(recent, op.packet)
            for storage, size, before in touched:
                for owner, part in before:
                    recency.forget(owner, part)
                recency.touch(storage, size)
            last_touch.update((storage, (place, recency.now)) for storage, _, _ in touched)
            last_run.update((brought, recency.now) for brought in codes_of(op.packet))
    columns = np.array(operands, dtype=float).reshape(-1, 5).T
    op_numbers, sizes, distances, touched_by, are_blocks = columns
    return ReuseDistances(
        op_numbers.astype(np.int64),
        sizes,
        np.minimum(distances, recency.since(0)),
        touched_by.astype(np.int64),
        are_blocks.astype(np.bool_),
        tuple(distance for distance, _ in code),
        tuple(others for _, others in code),
        recency.since(0),
        sum(map(relative_footprint, recent)),
    )


def _put_last(recent: list[str], name: str) -> None:
    if name in recent:
        recent.remove(name)
    recent.append(name)

"""What a trace says of itself, whatever the machine: descriptions of its ops, how far away their
operands are, what malloc does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dlperf.core.trace import Op, Trace
from dlperf.ops import counts
from dlperf.predictors.allocator import simulation
from dlperf.predictors.families import Description, describe
from dlperf.predictors.onednn import workspace_bytes
from dlperf.predictors.reuse_distance import distances
from dlperf.predictors.sub_kernels import parts, scratch
from dlperf.predictors.zeros import roots_of_zero

_KEPT = "_analysis"


@dataclass(frozen=True)
class Analysis:
    """Per op, aligned with ``trace.ops``: FLOP, bytes, whether it is the first op of its autograd
    node.

    `code_distance[i]` is how many bytes the step touched, and `code_since[i]` how much code it ran, since op `code_ran[i]` last ran the same
    code, `bytes_before[i]` how many bytes the op before it touched; `step_bytes` are all that the step touches, each counted once, `step_code` the
    size of its operators' code (:mod:`dlperf.predictors.reuse_distance`).
    Operands stand flat: of op `operand_op[j]`, `operand_bytes[j]` large, and `operand_distance[j]` bytes of the step away, which is what
    went by since that memory was last touched (infinite if it never was), by op `operand_touched[j]`. These ops are counted through two steps: op i of the
    second is number len(ops) + i. `working_bytes[i]` are all of op i's, `farthest[i]` the largest distance. `replay` is malloc's view, `roots_of_zero` as
    :func:`~dlperf.predictors.zeros.roots_of_zero` tells.
    """

    ops: tuple[Op, ...]
    flops: npt.NDArray[np.float64]
    n_bytes: npt.NDArray[np.float64]
    first_of_node: tuple[bool, ...]
    operand_op: npt.NDArray[np.int64]
    operand_bytes: npt.NDArray[np.float64]
    operand_distance: npt.NDArray[np.float64]
    operand_touched: npt.NDArray[np.int64]
    working_bytes: npt.NDArray[np.float64]
    farthest: npt.NDArray[np.float64]
    code_distance: tuple[float, ...]
    code_ran: tuple[int, ...]
    code_since: tuple[int, ...]
    bytes_before: tuple[float, ...]
    step_bytes: float
    step_code: int
    replay: simulation.Replay
    roots_of_zero: dict[int, float]
    _described: dict[bool, tuple[tuple[Description | None, ...], ...]] = field(
        default_factory=dict, repr=False
    )

    def descriptions(self, threads: int) -> tuple[tuple[Description | None, ...], ...]:
        """The descriptions of the ops' parts (:mod:`dlperf.predictors.sub_kernels`) where `threads`
        run them; None for a part that no family knows. Made once for one thread and once for
        several.
        """
        if (threads > 1) not in self._described:
            shared: dict[str, tuple[Description | None, ...]] = {}
            for op in self.ops:
                if op.signature not in shared:
                    shared[op.signature] = tuple(describe(part, threads) for part in parts(op))
            self._described[threads > 1] = tuple(shared[op.signature] for op in self.ops)
        return self._described[threads > 1]


def analyse(trace: Trace, malloc: str = "default") -> Analysis:
    """The analysis of a trace under a policy of malloc; made once and kept with it."""
    kept: dict[str, Analysis] = trace.__dict__.setdefault(
        _KEPT, {}
    )  # as functools.cached_property does; the trace's own fields stay untouched
    if malloc not in kept:
        kept[malloc] = _analyse(trace, malloc)
    return kept[malloc]


def _analyse(trace: Trace, malloc: str) -> Analysis:
    kept = [found for op in trace.ops if (found := workspace_bytes(op)) is not None]
    replay = simulation.replay(trace, scratch, malloc, kept)
    flops, n_bytes = counts.totals(trace)
    seen_nodes: set[int] = set()
    first = []
    for op in trace.ops:
        first.append(op.node >= 0 and op.node not in seen_nodes)
        seen_nodes.add(op.node)
    far = distances(trace, replay, n_bytes)
    flat = [(index, *part) for index, parts in enumerate(far.operands) for part in parts]
    owner, sizes, away, touched = (
        (np.array(column) for column in zip(*flat)) if flat else np.zeros((4, 0))
    )
    working = np.bincount(owner.astype(np.int64), sizes, minlength=len(trace.ops)).astype(float)
    farthest = np.zeros(len(trace.ops))
    np.maximum.at(farthest, owner.astype(np.int64), away)
    return Analysis(
        ops=trace.ops,
        flops=np.array(flops, dtype=float),
        n_bytes=np.array(n_bytes, dtype=float),
        first_of_node=tuple(first),
        operand_op=owner.astype(np.int64),
        operand_bytes=sizes.astype(float),
        operand_distance=away.astype(float),
        operand_touched=touched.astype(np.int64),
        working_bytes=working,
        farthest=farthest,
        code_distance=tuple(distance for distance, _, _ in far.code),
        code_ran=tuple(by for _, by, _ in far.code),
        code_since=tuple(others for _, _, others in far.code),
        bytes_before=(0.0, *working.tolist()[:-1]),
        step_bytes=far.step_bytes,
        step_code=far.step_code,
        replay=replay,
        roots_of_zero=roots_of_zero(trace),
    )

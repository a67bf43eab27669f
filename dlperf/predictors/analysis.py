"""What a trace says of itself, whatever the machine: descriptions of its ops, how far away their
operands are, what malloc does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.caching import cached_by_identity
from dlperf.core.trace import Op, Trace
from dlperf.ops import counts
from dlperf.predictors.allocator import simulation
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.description import KernelDescription
from dlperf.predictors.kernels.onednn import workspace_bytes
from dlperf.predictors.kernels.sub_kernels import scratch, sub_kernels
from dlperf.predictors.reuse_distance import reuse_distances
from dlperf.predictors.zeros import roots_of_zero


@dataclass(frozen=True)
class Analysis:
    """Arrays per op, aligned with ``trace.ops``, and per operand of an op.

    Per op i: `flops`, `n_bytes`, whether it is the `first_of_node` of its autograd node,
    `working_bytes` of all its operands, the `farthest` reuse distance among them in bytes,
    `bytes_before`, the working bytes of op i - 1. The reuse distance of its code is `code_distance`
    in bytes and `code_since` in relative code footprint, since op `code_ran` ran the same code.

    Per operand j: op `operand_op`, `operand_bytes`, `operand_distance` in bytes (infinite at the
    first use) since op `operand_touched` used the same memory.

    Op numbers in `code_ran` and `operand_touched` run over two steps: op i of the second one is
    len(ops) + i. `step_bytes` is the memory that a step touches, each byte once, `step_code` the
    code footprint of its operators. `allocator` is the allocator simulation, `roots_of_zero` as
    :func:`~dlperf.predictors.zeros.roots_of_zero` gives.
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
    allocator: simulation.AllocatorSimulation
    roots_of_zero: dict[int, float]

    def descriptions(self, threads: int) -> tuple[tuple[KernelDescription | None, ...], ...]:
        """Descriptions of the ops' sub-kernels on `threads`; None for an unknown operator."""
        shared: dict[str, tuple[KernelDescription | None, ...]] = {}
        for op in self.ops:
            if op.signature not in shared:
                shared[op.signature] = tuple(describe(one, threads) for one in sub_kernels(op))
        return tuple(shared[op.signature] for op in self.ops)


@cached_by_identity
def analyse(trace: Trace, malloc: str = "default") -> Analysis:
    """Analysis of a trace under an allocator policy."""
    kept = [found for op in trace.ops if (found := workspace_bytes(op)) is not None]
    allocator = simulation.simulate(trace, scratch, malloc, kept)
    flops, n_bytes = counts.totals(trace)
    seen_nodes: set[int] = set()
    first = []
    for op in trace.ops:
        first.append(op.node >= 0 and op.node not in seen_nodes)
        seen_nodes.add(op.node)
    far = reuse_distances(trace, allocator, n_bytes)
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
        allocator=allocator,
        roots_of_zero=roots_of_zero(trace),
    )

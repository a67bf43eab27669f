"""Properties of a trace on any machine of a vector width: reuse distances of operands and code,
what malloc does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.caching import cached_by_identity
from dlperf.core.trace import Trace
from dlperf.ops import counts
from dlperf.predictors.allocator import simulation
from dlperf.predictors.allocator.small_requests import first_of_node
from dlperf.predictors.kernels.mkl import product_buffers
from dlperf.predictors.kernels.onednn import BLOCK
from dlperf.predictors.kernels.recurrent import workspace_bytes
from dlperf.predictors.kernels.sub_kernels import scratch
from dlperf.predictors.reuse_distance import ReuseDistances, reuse_distances
from dlperf.predictors.zeros import roots_of_zero


@dataclass(frozen=True)
class Analysis(ReuseDistances):
    """Reuse distances and arrays per op, aligned with ``trace.ops``.

    Per op i: `flops`, `n_bytes`, `known_bytes` of all its operands, 0 where the trace does not know
    their memory, `working_bytes` of those and of the blocks that the op allocates within itself,
    and the `farthest` reuse distance among the operands in bytes. `first_of_node` are the ops with
    which an autograd node begins, `allocator` is the allocator simulation, `roots_of_zero` as
    :func:`~dlperf.predictors.zeros.roots_of_zero` gives.
    """

    flops: npt.NDArray[np.float64]
    n_bytes: npt.NDArray[np.float64]
    first_of_node: frozenset[int]
    known_bytes: npt.NDArray[np.float64]
    working_bytes: npt.NDArray[np.float64]
    farthest: npt.NDArray[np.float64]
    allocator: simulation.AllocatorSimulation
    roots_of_zero: dict[int, float]


@cached_by_identity
def analyse(trace: Trace, malloc: str, block: int = BLOCK) -> Analysis:
    """Analysis of a trace under an allocator policy, with oneDNN's blocks of so many channels
    (:func:`dlperf.predictors.kernels.onednn.block_of`).
    """
    kept = [found for op in trace.ops if (found := workspace_bytes(op)) is not None]
    allocator = simulation.simulate(
        trace, lambda op: scratch(op, block), malloc, kept, product_buffers(trace.ops)
    )
    flops, n_bytes = counts.totals(trace)
    far = reuse_distances(trace, allocator, n_bytes)
    n = len(trace.ops)
    of_tensors = np.where(far.operand_is_blocks, 0.0, far.operand_bytes)
    known, working = (
        np.bincount(far.operand_op, weights, minlength=n).astype(float)
        for weights in (of_tensors, far.operand_bytes)
    )
    farthest = np.zeros(n)
    np.maximum.at(farthest, far.operand_op, far.operand_distance)
    return Analysis(
        **vars(far),
        flops=np.array(flops, dtype=float),
        n_bytes=np.array(n_bytes, dtype=float),
        first_of_node=first_of_node(trace),
        known_bytes=known,
        working_bytes=working,
        farthest=farthest,
        allocator=allocator,
        roots_of_zero=roots_of_zero(trace),
    )

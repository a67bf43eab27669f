"""What a trace says of itself, whatever the machine: descriptions of its ops, how far away their operands are, what malloc does."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dlperf import allocator, work
from dlperf.predictors.code import code_of
from dlperf.predictors.families import Description, describe
from dlperf.predictors.onednn import scratch, workspace_bytes
from dlperf.predictors.zeros import roots_of_zero
from dlperf.trace import Op, Trace

_KEPT = "_analysis"


@dataclass(frozen=True)
class Analysis:
    """Per op, aligned with ``trace.ops``: FLOP, bytes, whether it is the first op of its autograd node.

    `code_distance[i]` is how many bytes the step touched since the same code last ran, `bytes_before[i]` how many the op before it
    touched; `step_bytes` are all that the step touches.
    Operands stand flat: of op `operand_op[j]`, `operand_bytes[j]` large, and `operand_distance[j]` bytes of the step away, which is what
    went by since that memory was last touched (infinite if it never was). `working_bytes[i]` are all of op i's, `farthest[i]` the largest
    distance. `replay` is malloc's view, `roots_of_zero` as :func:`~dlperf.predictors.zeros.roots_of_zero` tells.
    """

    ops: tuple[Op, ...]
    flops: npt.NDArray[np.float64]
    n_bytes: npt.NDArray[np.float64]
    first_of_node: tuple[bool, ...]
    operand_op: npt.NDArray[np.int64]
    operand_bytes: npt.NDArray[np.float64]
    operand_distance: npt.NDArray[np.float64]
    working_bytes: npt.NDArray[np.float64]
    farthest: npt.NDArray[np.float64]
    code_distance: tuple[float, ...]
    bytes_before: tuple[float, ...]
    step_bytes: float
    replay: allocator.Replay
    roots_of_zero: dict[int, float]
    _described: dict[bool, tuple[Description | None, ...]] = field(default_factory=dict, repr=False)

    def descriptions(self, threads: int) -> tuple[Description | None, ...]:
        """The ops' descriptions where `threads` run them (None if no family knows an op); made once for one thread and once for several."""
        if (threads > 1) not in self._described:
            shared: dict[str, Description | None] = {}
            for op in self.ops:
                if op.signature not in shared:
                    shared[op.signature] = describe(op, threads)
            self._described[threads > 1] = tuple(shared[op.signature] for op in self.ops)
        return self._described[threads > 1]


def analyse(trace: Trace, malloc: str = "default") -> Analysis:
    """The analysis of a trace under a policy of malloc; made once and kept with it."""
    kept: dict[str, Analysis] = trace.__dict__.setdefault(_KEPT, {})  # as functools.cached_property does; the trace's own fields stay untouched
    if malloc not in kept:
        kept[malloc] = _analyse(trace, malloc)
    return kept[malloc]


def _analyse(trace: Trace, malloc: str) -> Analysis:
    kept = [found for op in trace.ops if (found := workspace_bytes(op)) is not None]
    replay = allocator.replay(trace, scratch, malloc, kept)
    flops, n_bytes = work.totals(trace)
    seen_nodes: set[int] = set()
    first = []
    for op in trace.ops:
        first.append(op.node >= 0 and op.node not in seen_nodes)
        seen_nodes.add(op.node)
    operands = _operand_distances(trace, replay, n_bytes)
    flat = [(index, size, distance) for index, parts in enumerate(operands) for size, distance in parts]
    owner, sizes, distances = (np.array(column) for column in zip(*flat)) if flat else (np.zeros(0), np.zeros(0), np.zeros(0))
    working = np.bincount(owner.astype(np.int64), sizes, minlength=len(trace.ops)).astype(float)
    farthest = np.zeros(len(trace.ops))
    np.maximum.at(farthest, owner.astype(np.int64), distances)
    return Analysis(
        ops=trace.ops, flops=np.array(flops, dtype=float), n_bytes=np.array(n_bytes, dtype=float), first_of_node=tuple(first),
        operand_op=owner.astype(np.int64), operand_bytes=sizes.astype(float), operand_distance=distances.astype(float), working_bytes=working,
        farthest=farthest, code_distance=_code_distances(trace, working.tolist()), bytes_before=(0.0, *working.tolist()[:-1]),
        step_bytes=float(working.sum()), replay=replay, roots_of_zero=roots_of_zero(trace),
    )  # fmt: skip


def _operand_distances(trace: Trace, replay: allocator.Replay, n_bytes: list[int]) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Reuse distances over two steps, so that what the first step left in the caches is there for the second.

    The distance counts every byte touched in between, also twice; it errs high, so operands may seem colder than they are.
    """
    touched: dict[int, float] = {}
    clock_bytes = 0.0
    found: list[tuple[tuple[int, float], ...]] = []
    read_by = [work.bytes_read(op, moved) for op, moved in zip(trace.ops, n_bytes)]
    for _ in range(2):
        found = []
        for op, reads in zip(trace.ops, read_by):
            # A view counts as a pass over its tensor: caches forget sooner than their size says (random networks are predicted better so).
            sizes = [(spec.storage, size or spec.nbytes) for spec, size in reads if spec.storage >= 0]
            operands = [(storage, size, clock_bytes - touched.get(storage, -np.inf)) for storage, size in sizes if size]
            read = {spec.storage for spec, _ in reads}
            for spec in op.outputs:
                if spec.storage >= 0 and spec.storage not in read and spec.numel:
                    held = trace.storages[spec.storage].born < 0 or spec in op.inputs
                    before = spec.storage if held else replay.predecessor[spec.storage]
                    # Pages fresh from the kernel were zeroed just now: they are in the cache.
                    distance = 0.0 if before < 0 else clock_bytes - touched.get(before, -np.inf)
                    operands.append((spec.storage, spec.nbytes, distance))
            found.append(tuple((size, distance) for _, size, distance in operands))
            clock_bytes += sum(size for _, size, _ in operands)
            for storage, _, _ in operands:
                touched[storage] = clock_bytes
    return tuple(found)


def _code_distances(trace: Trace, touched: list[float]) -> tuple[float, ...]:
    """Bytes that went through the caches since an operator of the same code last ran, in a step that repeats."""
    last: dict[str, float] = {}
    passed = 0.0
    found: list[float] = []
    for _ in range(2):
        found = []
        for op, size in zip(trace.ops, touched):
            code = code_of(op.packet)
            found.append(passed - last.get(code, passed))
            passed += size
            last[code] = passed
    return tuple(found)

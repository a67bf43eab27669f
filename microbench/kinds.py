"""The kinds of work that workers do at once, to see what they cost one another: one for each
resource that bounds a step's items.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dlperf.core.machine import Cpu
from dlperf.core.trace import Trace
from dlperf.microbench import ceilings
from dlperf.microbench.cold_work import Call, churn
from dlperf.microbench.operator_benchmark import Unplayable, build
from dlperf.microbench.stream import arrays, triad

_SIDE = 256
"""Matrices of 256 KiB: a product keeps within a core's own caches, and computes for long before it
needs more.
"""
_PAGES_BYTES = 2**22
_CHUNK = 2**19
"""Elements of a large array that one call goes over, so that a call is short against a measuring
window.
"""


def make(work: str, cpu: Cpu, n_most: int, last_caches: int = 4) -> Call:
    """A call that `work` bounds, small against a second; `n_most` processes at most hold its
    operands at once.

    Those of ``DRAM`` are `last_caches` times as large as the last cache: 4 is STREAM's rule; fewer
    are made in less time, and take less memory.
    """
    l1, l2, l3 = cpu.caches_bytes
    room = cpu.memory_bytes // (4 * n_most) if cpu.memory_bytes else math.inf
    dram = int(min(max(last_caches * max(cpu.caches_bytes), 2**26), room))
    # Between the cache before it and itself, as far from both: a step's operands.
    within_l3 = round(math.sqrt(max(l2, l1, 2**15) * l3))
    makes: dict[str, Callable[[], Call]] = {
        "compute": _product,
        "L1": lambda: ceilings.update(l1 // 2)[0],
        "L2": lambda: ceilings.update(l2 // 2)[0],
        "L3": lambda: ceilings.update(within_l3)[0],
        "DRAM": lambda: _stream(dram),
        "page-faults": lambda: partial(churn, _PAGES_BYTES),
        "overhead": _small_step,
    }
    return makes[work]()


def _product() -> Call:
    a, b, out = (torch.rand(_SIDE, _SIDE) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def _stream(set_bytes: int) -> Call:
    """STREAM's triad over arrays of `set_bytes` together, a part of them a call, one after the
    other.
    """
    n = max(_CHUNK, set_bytes // 12)
    whole = arrays(n)
    parts = itertools.cycle(
        [
            tuple(array[begin : begin + _CHUNK] for array in whole)
            for begin in range(0, n - _CHUNK + 1, _CHUNK)
        ]
    )
    return lambda: triad(*next(parts))


def _small_step() -> Call:
    """A training step of a network so small that its kernels cost next to nothing."""
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 8),
        torch.nn.Tanh(),
        torch.nn.Linear(8, 1),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.rand(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()

    return step


def make_operations(recorded: dict[str, Any]) -> Call:
    """The operations of a recorded step one by one in their order, each on tensors of its own; what
    cannot be called on its own is left out.

    Raises Unplayable where none can.
    """
    trace = Trace.from_json(recorded)
    built: dict[str, Call] = {}
    for op in {op.signature: op for op in trace.ops}.values():
        with contextlib.suppress(Unplayable):
            built[op.signature] = build(op)
    calls = [built[op.signature] for op in trace.ops if op.signature in built]
    if not calls:
        raise Unplayable(f"{trace.target}: none of its operations can be called on its own")

    def run() -> None:
        for call in calls:
            call()

    return run

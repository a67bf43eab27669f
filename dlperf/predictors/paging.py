"""What pages cost in a step: first touches where memory is born, giving it back where it is freed; and how much memory a process takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from dlperf.allocator import Replay
from dlperf.allocator.heap import HUGE_PAGE_BYTES, PAGE_BYTES
from dlperf.machine import Machine
from dlperf.predictors.base import Item
from dlperf.trace import LOSS, Trace

BOUND = "page-faults"
N_OPERATORS = 11
"""Operators that a step has whose code is in the other footprints: those of a linear layer, its loss and its optimizer (microbench/memory.py)."""
_PER_HUGE_PAGE = HUGE_PAGE_BYTES // PAGE_BYTES


def cold_faults(replay: Replay, begin_s: Sequence[float], factor: Callable[[float], float]) -> tuple[float, ...]:
    """The first touches of 4 KiB pages by op, each counted as many times as `factor` says of the seconds since its page was given back.

    `begin_s` are the beginnings of the ops through two steps. The system hands out first what it got last; what nobody of the step gave back was given back
    long ago.
    """
    n = len(replay.faults)
    free: list[tuple[float, float]] = []  # pages, and when they were given back
    found: list[float] = []
    for step in range(2):
        found = []
        for place in range(n):
            at = float(begin_s[step * n + place])
            if replay.released and replay.released[place]:
                free.append((replay.released[place], at))
            left, counted = replay.faults[place], 0.0
            while left > 0 and free:
                pages, since = free.pop()
                taken = min(pages, left)
                counted, left = counted + taken * factor(at - since), left - taken
                if pages > taken:
                    free.append((pages - taken, since))
            found.append(counted + (left * factor(math.inf) if left > 0 else 0.0))
        if n and replay.released and replay.released[n]:
            free.append((replay.released[n], float(begin_s[step * n + n - 1])))
    return tuple(found)


def page_items(trace: Trace, replay: Replay, faults: Sequence[float], cost_s: Callable[[str], float], source: str) -> Iterator[Item]:
    """Items of time for a replayed step, `faults` by op of it, counted as :func:`cold_faults` does.

    `cost_s` gives the seconds of a ``page_fault`` (the first touch of 4 KiB), a ``page_release`` (giving 4 KiB back) and a
    ``huge_page_fault`` (2 MiB, from the first touch to giving back; where it was not measured, as much as the small pages in it).
    A first touch belongs to the op that takes the memory. Memory is given back by the op after which it is freed; gradients freed
    before the first op by zero_grad.
    """
    fault_s, release_s = cost_s("page_fault"), cost_s("page_release")
    huge_s = cost_s("huge_page_fault") or _PER_HUGE_PAGE * (fault_s + release_s)
    n_huge = math.fsum(replay.huge_faults)
    n_small = math.fsum(replay.faults)
    small_frac = n_small / (n_small + _PER_HUGE_PAGE * n_huge) if n_huge else 1.0
    huge_faults = replay.huge_faults or (0.0,) * len(trace.ops)
    for op, n_faults, n_huge_here in zip(trace.ops, faults, huge_faults):
        seconds = n_faults * fault_s + n_huge_here * huge_s
        if seconds:
            for layer, share in op.shares or ((op.layer, 1.0),):
                yield Item(layer, op.phase, seconds * share, BOUND, source, "page faults")
    for place, n_released in enumerate(replay.released):
        seconds = n_released * release_s * small_frac
        if not seconds:
            continue
        if place == 0 and not trace.inference:
            yield Item(LOSS, "zero_grad", seconds, BOUND, source, "page release")
            continue
        op = trace.ops[max(0, place - 1)]
        for layer, share in op.shares or ((op.layer, 1.0),):
            yield Item(layer, op.phase, seconds * share, BOUND, source, "page release")


def peak_memory_bytes(trace: Trace, machine: Machine, replay: Replay) -> int:
    """The most resident memory that three steps add to a process that has imported torch and built nothing yet: tensors as malloc holds them, and
    what torch takes for itself when it first runs, trains, convolves, and calls further operators (0 where the machine file holds no footprints).

    Kernels' code is read from libraries as it is called; operators share some of it, so many of them err high."""
    names = ["forward"]
    if not trace.inference:
        names.append("training")
    if any(op.packet == "aten.convolution" for op in trace.ops):
        names.append("convolution")
    n_further = max(0, len({op.packet for op in trace.ops}) - N_OPERATORS)
    return replay.peak_bytes + sum(machine.footprint_bytes(name) for name in names) + n_further * machine.footprint_bytes("operator")

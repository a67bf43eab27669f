"""Page faults: time of first touches and of releases of pages in a step; peak resident memory."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from dlperf.core.costs import SMALL_PAGE_COSTS
from dlperf.core.machine import Machine
from dlperf.core.prediction import Item
from dlperf.core.trace import LOSS, Trace
from dlperf.predictors.allocator.heap import HUGE_PAGE_BYTES, PAGE_BYTES
from dlperf.predictors.allocator.simulation import AllocatorSimulation

BOUND = "page-faults"
N_OPERATORS = 11
"""Operators that a step has whose code is in the other footprints: those of a linear layer, its
loss and its optimizer (microbench/memory.py).
"""
_PLACED = 0.6
"""How much of the heap's page faults that a layer has in simulated steps it has in real ones: 0.59
of the medians over 12 and 6 processes of 14 networks (AMD EPYC of Zen 5). Mappings have theirs in
every step.
"""
_NOTHING_S = 1e-12
_PER_HUGE_PAGE = HUGE_PAGE_BYTES // PAGE_BYTES


Seconds = Mapping[tuple[str, str], float]
"""By layer and phase."""


def page_items(
    trace: Trace,
    simulated: AllocatorSimulation,
    cost_s: Callable[[str], float],
    factor: float,
    source: str,
    others: Seconds,
) -> Iterator[Item]:
    """Items of a simulated step.

    `cost_s` gives the seconds of a ``page_fault`` (the first touch of 4 KiB), a ``page_release``
    (giving 4 KiB back) and a ``huge_page_fault`` (2 MiB, from the first touch to giving back; where
    it was not measured, as much as the small pages in it); 4 KiB of the heap take `factor` times as
    long (:func:`dlperf.core.verification.page_factor`). A first touch belongs to the op that
    takes the memory. Memory is given back by the op after which it is freed; gradients freed before
    the first op by zero_grad.

    A step and its phases have the mean over the simulated steps. A layer has what it has in its
    median step, of the heap's the part that simulated and real processes have in common. The rest
    of a phase's comes to some layer in most steps, no one knows to which: that is shared by all in
    proportion to their `others`' time. Where the medians add up to more than the phase's, all are
    that much shorter.
    """
    touched_s, released_s = _seconds(simulated, cost_s, factor)
    n_touched = sum(sum(step.faults) + sum(step.huge_faults) for step in simulated.steps)
    n_of_heap = sum(sum(step.heap_faults) for step in simulated.steps)
    placed = 1.0 - (1.0 - _PLACED) * n_of_heap / max(1, n_touched)
    members: dict[str, dict[str, float]] = defaultdict(dict)
    for (layer, phase), other_s in others.items():
        if other_s > 0:
            members[phase][layer] = other_s
    usual: dict[tuple[str, str, str], float] = {}
    usual_s: dict[str, float] = defaultdict(float)
    phase_s: dict[str, float] = defaultdict(float)
    n_ops = len(trace.ops)
    for what, seconds, owners in (
        ("page faults", touched_s, range(n_ops)),
        ("page release", released_s, range(-1, n_ops)),
    ):
        for (layer, phase), by_step in _by_layer(trace, seconds, owners).items():
            part = placed if len(members[phase]) > 1 else 1.0
            usual[what, layer, phase] = part * float(statistics.median(by_step))
            usual_s[phase] += usual[what, layer, phase]
            phase_s[phase] += float(np.mean(by_step))
    for (what, layer, phase), layer_s in usual.items():
        if layer_s:
            layer_s *= min(1.0, phase_s[phase] / usual_s[phase])
            yield Item(layer, phase, layer_s, BOUND, source, what)
    for phase in phase_s:
        rest_s = phase_s[phase] - usual_s[phase]
        total_s = math.fsum(members[phase].values())
        for layer, other_s in members[phase].items() if rest_s > _NOTHING_S else ():
            yield Item(
                layer, phase, rest_s * other_s / total_s, BOUND, source, "page faults of some layer"
            )


def _seconds(
    simulated: AllocatorSimulation, cost_s: Callable[[str], float], factor: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Seconds of first touches by step and op, and of giving back by step and op (a column more,
    for the step's end).
    """
    fault_s, release_s = map(cost_s, SMALL_PAGE_COSTS)
    more_s = (factor - 1.0) * (fault_s + release_s)
    huge_s = cost_s("huge_page_fault") or _PER_HUGE_PAGE * (fault_s + release_s)
    n_huge, n_small = math.fsum(simulated.huge_faults), math.fsum(simulated.faults)
    if n_huge:
        release_s *= n_small / (n_small + _PER_HUGE_PAGE * n_huge)
    touched_s = (
        np.array([step.faults for step in simulated.steps]) * fault_s
        + np.array([step.heap_faults for step in simulated.steps]) * more_s
        + np.array([step.huge_faults for step in simulated.steps]) * huge_s
    )
    return touched_s, np.array([step.released for step in simulated.steps]) * release_s


def _by_layer(
    trace: Trace, seconds: npt.NDArray[np.float64], owners: Iterable[int]
) -> dict[tuple[str, str], npt.NDArray[np.float64]]:
    """Rows of `seconds` are steps, columns those of the ops in `owners`, -1 for what comes before
    the first: sums by layer and phase.
    """
    found: dict[tuple[str, str], npt.NDArray[np.float64]] = defaultdict(
        lambda: np.zeros(len(seconds))
    )
    for column, owner in zip(seconds.T, owners):
        if not column.any():
            continue
        if owner < 0 and not trace.inference:
            found[LOSS, "zero_grad"] += column
            continue
        op = trace.ops[max(0, owner)]
        for layer, share in op.layer_shares:
            found[layer, op.phase] += share * column
    return found


def peak_memory_bytes(trace: Trace, machine: Machine, simulated: AllocatorSimulation) -> int:
    """The most resident memory that three steps add to a process that has imported torch and built
    nothing yet: tensors as malloc holds them, and what torch takes for itself when it first runs,
    trains, convolves, and calls further operators (0 where the machine file holds no footprints).

    Kernels' code is read from libraries as it is called; operators share some of it, so many of
    them err high.
    """
    names = ["forward"]
    if not trace.inference:
        names.append("training")
    if any(op.packet == "aten.convolution" for op in trace.ops):
        names.append("convolution")
    n_further = max(0, len({op.packet for op in trace.ops}) - N_OPERATORS)
    return (
        simulated.peak_bytes
        + sum(machine.footprint_bytes(name) for name in names)
        + n_further * machine.footprint_bytes("operator")
    )

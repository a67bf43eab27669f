"""The calibrated predictor: time of a step from the measurements of a machine file.

    t(step) = (sum over ops of kernel + cache-miss and cold-start penalties
               + framework overhead (autograd, module calls, parameter look-ups, optimizer)
               + page faults) * factor of the self-test

Kernels: :mod:`dlperf.predictors.kernel_cost_model`. Penalties: :mod:`dlperf.predictors.cache_model`
by the reuse distances of :mod:`dlperf.predictors.analysis`. Page faults: the allocator simulation.
All times are those of the machine's reference state.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlperf.core.blas import one_blas_thread
from dlperf.core.costs import CACHE_RESIDENCY, SMALL_PAGE_COSTS
from dlperf.core.items import NO_KERNEL
from dlperf.core.machine import Machine, lacks
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import Item, Prices
from dlperf.core.state import usual_state
from dlperf.core.trace import Trace
from dlperf.core.variation import HOUR_SPREAD, Z90
from dlperf.ops.fused import FUSED
from dlperf.predictors.analysis import analyse
from dlperf.predictors.base import register
from dlperf.predictors.kernel_cost_model import cost_model_of
from dlperf.predictors.kernels.description import KernelDescription, stacked
from dlperf.predictors.kernels.onednn import block_of
from dlperf.predictors.page_faults import peak_memory_bytes
from dlperf.predictors.step_items import LEAST_KERNEL_S, StepItems
from dlperf.predictors.transfer import as_measured, carried_cost_model

PROCESS_SPREAD, _OF_SEVERAL_THREADS = 0.033, 0.07
"""Relative standard deviation of a step's median over processes and hours, what states tell and
page faults aside, with one thread and with several. One thread: 9 networks in two processes each,
at two hours (AMD EPYC of Zen 5); 2.1 % between two processes at once (18 networks, Zen 4). Several:
5 % between processes, times the usual interval calibration factor.
"""
_FUSED_SPREAD = 0.4
"""Relative standard deviation of the time of a step's generated kernels: seven networks on AMD Zen
3, where predicted over measured was 0.2 to 1.4.
"""


@register
@dataclass(frozen=True)
class Calibrated:
    """Calibrated predictor; see the module.

    With `profiled_on`, the kernels are that machine's, carried over
    (:mod:`dlperf.predictors.transfer`). With `measured_there`, layers are as wrong as their
    prediction for that machine is.
    """

    name = "calibrated"
    profiled_on: Machine | None = None
    measured_there: Measurement | None = None

    @one_blas_thread
    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """Priced items of a step. Raises DlperfError for a file without kernels or bandwidths."""
        if not (self.profiled_on or machine).kernels:
            raise lacks(self.profiled_on or machine, "kernels")
        if self.profiled_on is None:
            cost_model = cost_model_of(machine, threads)
        else:
            cost_model = carried_cost_model(self.profiled_on, machine, threads)
            machine = cost_model.machine
        analysis = analyse(trace, malloc, block_of(machine.cpu.flags))
        step = StepItems(trace, cost_model, analysis, cost_model.threads == threads)
        step.notes |= cost_model.notes
        items = step.items()
        total_s = math.fsum(item.seconds for item in items)
        low, high = _interval(items, step, total_s)
        # Times of another number of threads: all of the work may scale with it, or none.
        scaled = cost_model.threads / threads
        low, high = low * min(1.0, scaled), high * max(1.0, scaled)
        # Of carried kernels no self-test of this machine says anything.
        factor = machine.kernel_factor(threads) if self.profiled_on is None else 1.0
        found = Prices(
            tuple(
                item if item.bound in NO_KERNEL else replace(item, seconds=factor * item.seconds)
                for item in items
            ),
            low_factor=low,
            high_factor=high,
            notes=tuple(sorted(step.notes)),
            warnings=_missing(machine, trace),
            peak_memory_bytes=peak_memory_bytes(trace, machine, analysis.allocator),
        )
        if self.profiled_on is None or self.measured_there is None:
            return found
        source, measured = self.profiled_on, self.measured_there
        there = Calibrated().price(trace, source, measured.threads, malloc)
        state = usual_state(measured.states_over(source.reference))
        return as_measured(found, there.at_state(state), trace, measured)


def pause_slowdowns(
    trace: Trace, machine: Machine, threads: int, malloc: str, pauses_s: Sequence[float]
) -> tuple[float, ...]:
    """Slowdowns of a step's computation by pauses in seconds between backward and optimizer.

    A rank that waits for others pauses there; co-tenants evict part of the shared cache meanwhile.
    1 where the file holds no cache residency.
    """
    if not machine.costs_of(CACHE_RESIDENCY):
        return tuple(1.0 for _ in pauses_s)
    analysis = analyse(trace, malloc, block_of(machine.cpu.flags))
    step = StepItems(trace, cost_model_of(machine, threads), analysis, True)

    def step_s(pause_s: float) -> float:
        step.stand_still(pause_s)
        return math.fsum(item.seconds for item in step.items())

    at_once_s = step_s(0.0)
    return tuple(step_s(pause_s) / at_once_s if at_once_s else 1.0 for pause_s in pauses_s)


def _missing(machine: Machine, trace: Trace) -> tuple[str, ...]:
    """A warning that names the costs that the file lacks; they count as 0."""
    unused = tuple(
        prefix
        for prefix, is_used in (
            ("optimizer_", trace.optimizer is not None),
            ("python_instruction", any(layer.n_instructions for layer in trace.layers)),
        )
        if not is_used
    )
    names = [
        name
        for names in machine.missing_costs(trace.inference).values()
        for name in names
        if not name.startswith(unused)
    ]
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    line = (
        f"{machine.path or 'the machine file'} holds no costs {', '.join(names[:4])}{more}, which"
        f" count as nothing: predictions come out too low; {machine.calibration()} adds them"
    )
    return (line,) if names else ()


def _interval(items: list[Item], step: StepItems, total_s: float) -> tuple[float, float]:
    """Factors of the 90 % interval at a known state: independent errors, added in quadrature.

    Kernel models: posterior covariance, more for an extrapolated op; 100 % for an unpriced one,
    less for a generated kernel; what carries kernels over from another machine. Then the variation
    between processes and hours. All of this is multiplied by the interval calibration factor, but
    that variation never by less than 1: the self-test's minute does not show it. At last the range
    of page faults.
    """
    if total_s <= 0:
        return 1.0, 1.0
    cost_model, simulated = step.cost_model, step.analysis.allocator
    machine, threads = cost_model.machine, cost_model.threads
    by_variant: dict[tuple[str, ...], dict[KernelDescription, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    unpriced_s = 0.0
    for item in items:
        if item.op < 0 or item.source == "measured":
            continue
        kernel = step.priced[item.op]
        if kernel is None or item.source == "unpriced":
            is_fused = step.trace.ops[item.op].packet == FUSED
            unpriced_s += item.seconds * (_FUSED_SPREAD if is_fused else 1.0)
            continue
        frac = item.seconds / max(kernel.seconds, LEAST_KERNEL_S)
        for piece in kernel.sub_kernels:
            seconds_of_piece = frac * piece.seconds * piece.error_factor
            by_variant[piece.variant][piece.description] += seconds_of_piece
    carried_s = 0.0
    of_processes = PROCESS_SPREAD if threads == 1 else _OF_SEVERAL_THREADS
    spread = math.hypot(of_processes, 0.0 if machine.states else HOUR_SPREAD)
    variance_s2 = unpriced_s**2
    for variant, members in by_variant.items():
        seconds = np.array(list(members.values()))
        covariance = cost_model.kernel_model(variant).covariance(*stacked(list(members)))
        variance_s2 += float(seconds @ covariance @ seconds)
        carried_s += cost_model.carried_spread(variant) * float(seconds.sum())
    variance_s2 += carried_s**2
    factor = machine.interval_factor(threads)
    half = Z90 * math.hypot(factor * math.sqrt(variance_s2) / total_s, max(1.0, factor) * spread)
    page_s = machine.page_factor(threads) * sum(map(cost_model.cost_s, SMALL_PAGE_COSTS))
    fewest, usual, most = simulated.faults_of_a_step
    fewer, more = (max(0.0, n) * page_s / total_s for n in (usual - fewest, most - usual))
    return max(0.05, 1.0 - math.hypot(half, fewer)), 1.0 + math.hypot(half, more)

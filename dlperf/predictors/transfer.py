"""Kernels that were profiled on one machine, carried over to another.

Where the other machine measured kernels of the same variant, the ratio of the times is theirs. Else
it follows from the roofs: a kernel keeps its efficiency under the roof that bounds it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dlperf.core.costs import ARITHMETIC, KINDS, Cost
from dlperf.core.errors import DlperfError
from dlperf.core.items import KEPT_FRAC, Item
from dlperf.core.machine import Machine, lacks
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import Prices
from dlperf.core.trace import Op, Trace
from dlperf.core.variation import Z90
from dlperf.core.what_if import scaled
from dlperf.ops import counts
from dlperf.ops.blocking import is_contraction
from dlperf.ops.roofs import Ceiling, Roof, Roofs, roofs_of
from dlperf.predictors.cache_model import CacheModel
from dlperf.predictors.kernel_cost_model import (
    KernelCostModel,
    PricedKernel,
    PricedSubKernel,
    Variant,
    cost_model_of,
)
from dlperf.predictors.kernel_model import Array, KernelModel, nearness
from dlperf.predictors.kernels.description import KernelDescription, stacked
from dlperf.predictors.measured_layers import layer_times_s, whole_s
from dlperf.predictors.resources import SMALL_FRAC, SMALL_S

_CONVOLUTION = "aten.convolution"
"""Not computed by the library of the matrix products, which may leave vector units of some
processors alone. Additions use them, and a multiply-add is two operations in their time.
"""
ROOFS_SPREAD = 0.33
"""Relative standard deviation of a step that was carried over by roofs: Intel Xeon to AMD EPYC and
back (reports/cross-machine).
"""
BASE_SPREAD = 0.17
"""Relative standard deviation that a measurement there adds: 16 steps of the same report."""
_ENOUGH = 3
"""Kernels of a variant from which on their measured ratios count."""
_PAGES = "page_fault", "page_release", "huge_page_fault"


@dataclass(frozen=True)
class Roofline:
    """Least seconds of an op's arithmetic and of its bytes on a machine, and of its call."""

    compute_s: float
    memory_s: float
    call_s: float


def roofline_of(op: Op, cost_model: KernelCostModel) -> Roofline:
    """The roofline of an op on repeated operands: its bytes lie where they fit."""
    flops, n_bytes = float(counts.op_flops(op) or 0), float(counts.op_bytes(op))
    caches = cost_model.caches
    ceiling = caches.roofs.ceiling(op.inputs[0].dtype if op.inputs else "")
    if ceiling is None:
        raise lacks(cost_model.machine, "matrix products")
    peak = ceiling.fma_flops_per_s if is_contraction(op) else ceiling.other_flops_per_s
    if op.packet.startswith(_CONVOLUTION):
        peak = max(peak, 2.0 * ceiling.other_flops_per_s)
    level = cost_model.machine.level_of(n_bytes)
    call_s = cost_model.cost_s("native_call") + cost_model.cost_s("boxed_call")
    return Roofline(flops / peak, n_bytes / caches.bytes_per_s[level], call_s)


def carried_s(seconds: float, there: Roofline, here: Roofline, core: float, call: float) -> float:
    """Seconds of a kernel here that takes `seconds` there:

        t' = c' + max(w n' / n, m', a'),    c' = call c,    w = t - c

    c is the call, w the work, n the need of the roof that bounds it there, m that of the bytes, a
    that of the arithmetic. So the work keeps its efficiency n / w under its roof. Where arithmetic
    bounds it, n' / n is `core`. A kernel that is a call and little else moves as a call.

    >>> there, here = Roofline(2.0, 1.0, 0.0), Roofline(1.0, 3.0, 0.0)
    >>> carried_s(4.0, there, here, 0.5, 1.0)  # half of the peak there, and here, but for the bytes
    3.0
    """
    called_s = min(seconds, there.call_s)
    work_s = seconds - called_s
    if seconds < SMALL_S and max(there.compute_s, there.memory_s) < SMALL_FRAC * seconds:
        return call * seconds
    if there.memory_s >= KEPT_FRAC * work_s and there.memory_s >= there.compute_s:
        moved_s = work_s * here.memory_s / there.memory_s
    else:
        moved_s = work_s * core
    return call * called_s + max(moved_s, here.compute_s, here.memory_s)


@dataclass
class CarriedCostModel(KernelCostModel):
    """Cost model of a machine whose kernels were profiled on another, `profiled`.

    Calls take `call_ratio` times as long as there.
    """

    profiled: KernelCostModel = field(kw_only=True)
    call_ratio: float = field(kw_only=True, default=1.0)
    roofs: Roofs | None = field(kw_only=True, default=None)
    _ratios: dict[Variant, tuple[Array, Array]] = field(default_factory=dict, kw_only=True)

    @cached_property
    def caches(self) -> CacheModel:
        """Cache penalties and bandwidths; those of `roofs` where the machine was not measured."""
        roofs = roofs_of(self.machine, self.threads) if self.roofs is None else self.roofs
        return CacheModel(self.machine, self.threads, roofs)

    def modelled(self, ops: Iterable[Op]) -> list[PricedKernel | None]:
        """Times of ops by the profiled machine's models, carried over."""
        asked = list(ops)
        return [
            None if priced is None else self._carried(op, priced)
            for op, priced in zip(asked, self.profiled.modelled(asked))
        ]

    def _carried(self, op: Op, priced: PricedKernel) -> PricedKernel:
        exact = self.profiled.machine.exact(op, self.profiled.threads)
        there_s = priced.seconds if exact is None else exact.seconds
        there, here = roofline_of(op, self.profiled), roofline_of(op, self)
        core = here.compute_s / there.compute_s if there.compute_s else self._core
        seconds = carried_s(there_s, there, here, core, self.call_ratio)
        by_roofs = seconds / priced.seconds if priced.seconds else 1.0
        exact_ratio = there_s / priced.seconds if priced.seconds else 1.0
        return PricedKernel(
            tuple(self._piece(one, by_roofs, exact_ratio) for one in priced.sub_kernels)
        )

    def _piece(self, one: PricedSubKernel, by_roofs: float, exact: float) -> PricedSubKernel:
        measured = self._measured_ratio(one.variant, one.description)
        ratio = by_roofs if measured is None else exact * measured
        return replace(one, seconds=ratio * one.seconds, is_inside=False)

    def _measured_ratio(self, variant: Variant, description: KernelDescription) -> float | None:
        """Time of a sub-kernel here over there, as kernels of its variant that were measured here
        have it, the nearer the more; None for fewer than _ENOUGH.
        """
        features, logs = self._ratios_of(variant)
        if len(logs) < _ENOUGH:
            return None
        octaves = np.abs(features - np.array(description.features)).mean(axis=1)
        return float(np.exp(np.average(logs, weights=nearness(octaves))))

    def _ratios_of(self, variant: Variant) -> tuple[Array, Array]:
        """Features of the variant's kernels that were measured here, and ln(here / there)."""
        if variant not in self._ratios:
            rows = self.rows(variant)
            self._ratios[variant] = np.zeros((0, 0)), np.zeros(0)
            if rows:
                described = (self.profiled.describe(kernel.op) for _, kernel in rows)
                features, terms = stacked([one for one in described if one is not None])
                there_s, _ = self.profiled.kernel_model(variant).predict(features, terms)
                here_s = np.array([kernel.seconds for _, kernel in rows])
                known = (there_s > 0) & (here_s > 0)
                logs = np.log(here_s[known] / there_s[known])
                self._ratios[variant] = features[known], logs
        return self._ratios[variant]

    @property
    def _core(self) -> float:
        """Time of arithmetic without a formula: that of additions in float32."""
        here, there = (of.caches.roofs.ceiling("float32") for of in (self, self.profiled))
        return there.other_flops_per_s / here.other_flops_per_s if here and there else 1.0

    @property
    def notes(self) -> set[str]:
        """Where the kernels are from."""
        source, target = self.profiled.machine, self.machine
        note = f"kernels as profiled on {source.cpu.model}, carried over to {target.cpu.model}"
        return {note}

    def carried_spread(self, variant: Variant) -> float:
        """Relative standard deviation of what carries a variant over."""
        return 0.0 if len(self._ratios_of(variant)[1]) >= _ENOUGH else ROOFS_SPREAD

    def kernel_model(self, variant: Variant) -> KernelModel:
        """The profiled machine's."""
        return self.profiled.kernel_model(variant)


def as_measured(here: Prices, there: Prices, trace: Trace, measured: Measurement) -> Prices:
    """The price list with each layer's phase times measured over predicted on the other machine.

    Raises DlperfError for a measurement of another network or step.
    """
    _, phases = whole_s(measured, trace)
    step = measured.batch_size, measured.inference
    if step != (trace.batch_size, trace.inference):
        kind = "a forward pass" if measured.inference else "a training step"
        raise DlperfError(
            f"the measurement of {measured.target} is of {kind} at batch size"
            f" {measured.batch_size}; a step is carried over from one of its own kind and size"
        )
    measured_s: dict[tuple[str, str], float] = defaultdict(float)
    predicted_s: dict[tuple[str, str], float] = defaultdict(float)
    for layer, phase, seconds in layer_times_s(measured, trace, phases):
        measured_s[layer, phase] += seconds
    for item in there.items:
        predicted_s[item.layer, item.phase] += item.seconds
    # What the measurement has for no layer of its own is spread over the step.
    total = math.fsum(measured_s.values()) / math.fsum(predicted_s.values())

    def corrected(item: Item) -> Item:
        key = item.layer, item.phase
        ratio = total
        if measured_s[key] > 0.0 < predicted_s[key]:
            ratio = measured_s[key] / predicted_s[key]
        return replace(item, seconds=ratio * item.seconds)

    low, high = here.low_factor, here.high_factor
    return replace(
        here.map_items(corrected),
        low_factor=low and max(0.05, 1.0 - math.hypot(1.0 - low, Z90 * BASE_SPREAD)),
        high_factor=high and 1.0 + math.hypot(high - 1.0, Z90 * BASE_SPREAD),
    )


def carried_cost_model(source: Machine, target: Machine, threads: int) -> CarriedCostModel:
    """Cost model of the target with the kernels of the source, at the nearest threads of both.

    Costs that the target lacks are the source's, times the median ratio of those of their unit that
    both have. A processor by its data sheet has the source's costs.
    """
    there = cost_model_of(source, threads)
    if target.data_sheet is not None:
        roofs = roofs_of_sheet(target, there.caches.roofs, threads)
        unmeasured = replace(target, data_sheet=None, kernels=(), costs=source.costs)
        return CarriedCostModel(unmeasured, there.threads, profiled=there, roofs=roofs)
    at = target.nearest_threads(threads)
    costs = (*target.costs, *_costs(source, target, there.threads))
    call_ratio = _ratio(source, target, there.threads, "s")
    return CarriedCostModel(replace(target, costs=costs), at, profiled=there, call_ratio=call_ratio)


def roofs_of_sheet(target: Machine, there: Roofs, threads: int) -> Roofs:
    """Roofs of a processor's data sheet for a number of threads.

    Arithmetic: the cores' part of the peak at the sustained clock; a rate without multiply-adds is
    in proportion to the one `there`. Data sheets state DRAM's bandwidth for all cores. One core
    draws what one does `there`, or its part where that is more. Caches are as fast as `there`.
    """
    sheet = target.data_sheet
    assert sheet is not None
    part = min(1.0, threads / target.cpu.n_cores)
    rates = {roof.level: roof.bytes_per_s for roof in there.bandwidths}
    drawn = max(part * sheet.dram_bytes_per_s, rates.get("DRAM", 0.0))
    ceilings = []
    for dtype in sheet.flops_per_s:
        peak = part * sheet.sustained_frac * sheet.peak_flops_per_s(dtype, contraction=True)
        one = there.ceiling(dtype)
        frac = one.other_flops_per_s / one.fma_flops_per_s if one else 0.5
        ceilings.append(Ceiling(dtype, peak, frac * peak, "data sheet"))
    rates["DRAM"] = min(sheet.dram_bytes_per_s, drawn)
    return Roofs(
        tuple(Roof(level, rate, "data sheet") for level, rate in rates.items()),
        tuple(sorted(ceilings, key=lambda one: -one.fma_flops_per_s)),
    )


def _ratio(source: Machine, target: Machine, threads: int, unit: str, *kinds: str) -> float:
    """Median ratio, target over source, of the costs of a unit that both have; 1 without any."""
    held = {cost.key: cost.value for cost in source.costs if cost.threads == threads}
    ratios = [
        cost.value / held[cost.key]
        for cost in target.costs
        if KINDS[cost.key.kind].unit == unit
        and (cost.key.kind in kinds if kinds else cost.key.kind != ARITHMETIC)
        and held.get(cost.key, 0.0) > 0.0 < cost.value
    ]
    return statistics.median(ratios) if ratios else 1.0


def _costs(source: Machine, target: Machine, threads: int) -> list[Cost]:
    """Costs of the source that the target lacks, at the target's speed."""
    held = {(cost.key.kind, cost.key.of, cost.key.variant) for cost in target.costs}
    ratios = {unit: _ratio(source, target, threads, unit) for unit in ("s", "s/byte")}
    pages = _ratio(source, target, threads, "s", *_PAGES)
    return [
        scaled(cost, pages if cost.key.kind in _PAGES else ratios[KINDS[cost.key.kind].unit])
        for cost in source.costs
        if (cost.key.kind, cost.key.of, cost.key.variant) not in held
        and KINDS[cost.key.kind].unit in ratios
    ]

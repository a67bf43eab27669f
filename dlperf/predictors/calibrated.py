"""The calibrated predictor: time of a step from the measurements of a machine file.

    t(step) = sum over ops of kernel + cache-miss and cold-start penalties
            + framework overhead (autograd, module calls, parameter look-ups, optimizer)
            + page faults

Kernels: :mod:`dlperf.predictors.kernel_cost_model`. Penalties: :mod:`dlperf.predictors.cache_model`
by the reuse distances of :mod:`dlperf.predictors.analysis`. Page faults: the allocator simulation.
All times are slowed by the contention that the calibration met.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dlperf.core.clock import LONG_CALL_S, SHORT_CALL_S, quantile
from dlperf.core.costs import (
    CACHE_RESIDENCY,
    CONTENTION_FRAMEWORK,
    CONTENTION_MEMORY,
    PAGE_RESIDENCY,
)
from dlperf.core.errors import DlperfError
from dlperf.core.machine import EXACT, Machine
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import ITEM_BYTES, LOSS, Op, Trace, own_operations
from dlperf.core.variation import Z90, core_speed_samples, kernel_sensitivity_frac
from dlperf.ops.roofs import LEVELS
from dlperf.predictors.allocator.simulation import PAGE_BYTES
from dlperf.predictors.analysis import Analysis, analyse
from dlperf.predictors.base import register
from dlperf.predictors.cache_model import ReuseDistance
from dlperf.predictors.kernel_cost_model import KernelCostModel, PricedKernel, cost_model_of
from dlperf.predictors.kernel_model import one_blas_thread
from dlperf.predictors.kernels.description import KernelDescription, stacked
from dlperf.predictors.optimizers import OptimizerCosts, optimizer_costs
from dlperf.predictors.page_faults import BOUND, Seconds, cold_faults, page_items, peak_memory_bytes

_LEAST_KERNEL_S = 2e-7
_SMALL_S = 1e-5
"""Time above which an op counts as bound by its kernel, whatever fraction of the peak it has."""
_QUIET_SLOWDOWN = 1.06
"""Contention slowdown up to which a machine counts as quiet."""
PROCESS_SPREAD = 0.05
"""Relative standard deviation of a step's median between processes."""
HOUR_SPREAD = 0.064
"""Relative standard deviation of the machine's speed between two hours.

Medians over the same 5,000 to 12,000 kernels in six calibrations of one day, on a virtual machine
with co-tenants, varied by 4.5 %; times sqrt(2).
"""


@register
class Calibrated:
    """Calibrated predictor; see the module."""

    name = "calibrated"

    @one_blas_thread
    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """Priced items of a step. Raises DlperfError for a file without kernels or bandwidths."""
        if not machine.kernels:
            raise DlperfError(
                f"{machine.path or 'machine'}: holds no kernels; run dlperf calibrate"
            )
        cost_model, analysis = cost_model_of(machine, threads), analyse(trace, malloc)
        priced = _Priced(
            trace, cost_model, analysis, measured_threads=cost_model.threads == threads
        )
        slowdown = machine.contention_slowdown(cost_model.threads)
        if slowdown > _QUIET_SLOWDOWN:
            priced.notes.add(
                f"contention during the calibration: slowdown {slowdown:.2f} of usual over best"
                " times; predictions contain it"
            )
        # A target's own operations have the slowdown of their own measurement. Contention slows the
        # framework more than kernels.
        own, long = (
            machine.contention_slowdown(cost_model.threads, f"{own_operations(trace)} "),
            machine.long_call_slowdown(cost_model.threads),
        )
        framework = machine.factor(CONTENTION_FRAMEWORK, cost_model.threads, slowdown)
        left = min(1.0, (long - 1.0) / (slowdown - 1.0)) if slowdown > 1.0 else 1.0
        memory = machine.factor(CONTENTION_MEMORY, cost_model.threads, slowdown)

        def slowed_s(item: Item) -> float:
            if item.bound == BOUND:
                return memory * item.seconds
            short = own if item.op in priced.exact else slowdown
            usual = 1.0 + (short - 1.0) * (1.0 - (1.0 - left) * _length(priced.kernel_s[item.op]))
            called_s, waited_s = (
                item.share * priced.overheads_s[item.op],
                item.share * priced.distances_s[item.op],
            )
            return (
                usual * item.seconds + (framework - usual) * called_s + (memory - usual) * waited_s
            )

        kernels, calls = priced.items()
        quiet = kernels + calls
        items = [replace(item, seconds=slowed_s(item)) for item in kernels]
        items += [replace(item, seconds=framework * item.seconds) for item in calls]
        total = math.fsum(item.seconds for item in items)
        low, high = _interval(
            items,
            priced.priced,
            analysis,
            cost_model,
            total,
            total / math.fsum(item.seconds for item in quiet) if total else slowdown,
        )
        notes = tuple(sorted(priced.notes))
        peak = peak_memory_bytes(trace, machine, analysis.allocator)
        return Prices(
            tuple(items),
            low_factor=low,
            high_factor=high,
            notes=notes,
            warnings=_missing(machine, trace),
            peak_memory_bytes=peak,
        )


def _length(seconds: float) -> float:
    """Position of a time between a short call (0: each sample is disturbed or not) and a long one
    (1: even the best sample is disturbed in part), on a logarithmic scale.
    """
    return min(
        1.0,
        max(
            0.0,
            math.log(max(seconds, SHORT_CALL_S) / SHORT_CALL_S)
            / math.log(LONG_CALL_S / SHORT_CALL_S),
        ),
    )


def pause_slowdowns(
    trace: Trace, machine: Machine, threads: int, malloc: str, pauses_s: Sequence[float]
) -> tuple[float, ...]:
    """Slowdowns of a step's computation by pauses in seconds between backward and optimizer.

    A rank that waits for others pauses there; co-tenants evict part of the shared cache meanwhile.
    1 where the file holds no cache residency.
    """
    if not machine.costs_of(CACHE_RESIDENCY, PAGE_RESIDENCY):
        return tuple(1.0 for _ in pauses_s)
    priced = _Priced(
        trace, cost_model_of(machine, threads), analyse(trace, malloc), measured_threads=True
    )

    def step_s(pause_s: float) -> float:
        priced.stand_still(pause_s)
        return math.fsum(item.seconds for items in priced.items() for item in items)

    at_once_s = step_s(0.0)
    return tuple(step_s(pause_s) / at_once_s if at_once_s else 1.0 for pause_s in pauses_s)


def _missing(machine: Machine, trace: Trace) -> tuple[str, ...]:
    """A warning that names the costs that the file lacks; they count as 0."""
    names = [name for names in machine.missing_costs(trace.inference).values() for name in names]
    if trace.optimizer is None:
        names = [name for name in names if not name.startswith("optimizer_")]
    if not names:
        return ()
    some = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    where = f" -o {machine.path}" if machine.path else ""
    line = (
        f"{machine.path or 'the machine file'} holds no costs {some}, which count as nothing:"
        " predictions come out too low"
    )
    return (f"{line}; dlperf calibrate{where} adds them",)


class _Priced:
    """Items of one trace on one machine."""

    def __init__(
        self, trace: Trace, cost_model: KernelCostModel, analysis: Analysis, measured_threads: bool
    ) -> None:
        self.trace, self.cost_model, self.analysis = trace, cost_model, analysis
        self.measured_threads = measured_threads
        self.cost_source = "measured" if measured_threads else "extrapolated"
        self.notes: set[str] = set()
        self.exact: set[int] = set()
        self.overheads_s: list[float] = []
        """Overhead of each op's call; :meth:`kernels` fills it and `distances_s`, the cache-miss
        penalties.
        """
        self.distances_s: list[float] = []
        self.optimizer: OptimizerCosts | None = (
            None if trace.optimizer is None else optimizer_costs(trace, cost_model)
        )
        self.priced = self._price_kernels()
        self.kernel_s, self.source = self._kernel_times()
        self.stand_still(0.0)

    def stand_still(self, seconds: float) -> None:
        """Set the pause between backward and optimizer: begin and end of each kernel over two
        steps.
        """
        n = len(self.trace.ops)
        took_s = np.tile(np.maximum(self.kernel_s, _LEAST_KERNEL_S), 2)
        first = next(
            (index for index, op in enumerate(self.trace.ops) if op.phase == "optimizer"), n
        )
        after_s = np.zeros(2 * n)
        after_s[[index for index in (first, n + first) if index < 2 * n]] = seconds
        self.end_s = np.cumsum(took_s + after_s)
        self.begin_s = self.end_s - took_s

    def items(self) -> tuple[list[Item], list[Item]]:
        """Items of kernels and page faults, and items of calls."""
        kernels, calls = list(self.kernels()), [*self.modules(), *self.calls()]
        others: dict[tuple[str, str], float] = defaultdict(float)
        for item in (*kernels, *calls):
            others[item.layer, item.phase] += item.seconds
        return [*kernels, *self.page_faults(others)], calls

    def _price_kernels(self) -> list[PricedKernel | None]:
        """Modelled time of each op."""
        descriptions = self.analysis.descriptions(self.cost_model.threads)
        distinct = {op.signature: found for op, found in zip(self.trace.ops, descriptions)}
        priced = dict(zip(distinct, self.cost_model.kernels_s(list(distinct.values()))))
        return [priced[op.signature] for op in self.trace.ops]

    def _kernel_times(self) -> tuple[list[float], list[str]]:
        """Seconds of each op with warm caches, and their source."""
        ops = self.trace.ops
        seconds, source = [0.0] * len(ops), ["unpriced"] * len(ops)
        for index, (op, priced) in enumerate(zip(ops, self.priced)):
            exact = self.cost_model.machine.exact(op.signature, self.cost_model.threads)
            if exact is not None:
                seconds[index], source[index] = exact.samples.minimum, "measured"
                if exact.family == EXACT:
                    self.exact.add(index)
            elif priced is None:
                self.notes.add(
                    f"{op.packet} has no kernel model: priced by its roofline + dispatch, a"
                    " lower bound"
                )
                seconds[index] = self.cost_model.unpriced_s(
                    float(self.analysis.flops[index]), float(self.analysis.n_bytes[index])
                )
            else:
                self._note_substitute(op, priced)
                seconds[index], source[index] = priced.seconds, priced.source
        if not self.measured_threads:
            source = [
                "extrapolated" if name in ("measured", "interpolated") else name for name in source
            ]
        return seconds, source

    def _note_substitute(self, op: Op, priced: PricedKernel) -> None:
        """Note an op that the model of another dtype or kind of convolution prices."""
        for one in priced.sub_kernels:
            wanted, variant = one.description.variant, one.variant
            if wanted == variant:
                continue
            formats = [
                next((word for word in names if word in ITEM_BYTES), "")
                for names in (wanted, variant)
            ]
            if "float" in formats[0] and formats[0] != formats[1]:
                self.notes.add(
                    f"{op.packet} in {formats[0]} has no kernel model: priced as in {formats[1]},"
                    " which may be far off"
                )
            elif wanted[0].startswith("conv") and wanted[2:3] != variant[2:3]:
                self.notes.add(
                    f"{op.packet} of kind {wanted[2]} in {formats[0]} has no kernel model: priced"
                    f" as {variant[2]}, which may be far off"
                )

    def _overhead_s(self, op: Op, index: int) -> float:
        """Overhead of op `index` in a step, beyond its kernel in the micro-benchmark.

        Cold-start penalties of the shared code (interpreter, dispatcher, allocator) by the op
        before, of the operator's own code since it last ran, and autograd.
        """
        before = ReuseDistance(self.analysis.bytes_before[index]) if index else self._whole_step
        shared = max(
            0.0,
            self.cost_model.caches.cold_start_s("first", before)
            - self.cost_model.caches.cold_start_s("next", before),
        )
        called = (
            shared
            + self.cost_model.caches.operator_cold_start_s(op.packet, self._since(index))
            - self.cost_model.cost_s("boxed_call")
        )
        if op.phase == "backward":
            return called + (
                self.cost_model.cost_s("autograd_node")
                if self.analysis.first_of_node[index]
                else 0.0
            )
        return called + (self.cost_model.cost_s("autograd_record") if op.grad else 0.0)

    def _since(self, index: int) -> ReuseDistance:
        """Reuse distance of an op's code."""
        seconds = float(
            self.begin_s[len(self.trace.ops) + index] - self.end_s[self.analysis.code_ran[index]]
        )
        return ReuseDistance(
            self.analysis.code_distance[index], self.analysis.code_since[index], seconds
        )

    @property
    def _whole_step(self) -> ReuseDistance:
        """Reuse distance of a whole step."""
        step_s = float(self.begin_s[len(self.trace.ops)]) if self.trace.ops else 0.0
        return ReuseDistance(
            self.analysis.step_bytes,
            self.analysis.step_code,
            step_s,
            PAGE_BYTES * sum(self.analysis.allocator.faults),
        )

    def _distance_s(self) -> list[float]:
        """Cache-miss penalty of each op's operands, in seconds, above that of its working set."""
        analysis, cost_model, n = self.analysis, self.cost_model, len(self.trace.ops)
        untouched_s = np.maximum(
            self.begin_s[n + analysis.operand_op] - self.end_s[analysis.operand_touched], 0.0
        )
        extra_s = np.array(
            [
                cost_model.caches.cold_start_s("operand", ReuseDistance(distance))
                for distance in analysis.operand_distance
            ]
        )
        packets = np.array([op.packet for op in self.trace.ops])[analysis.operand_op]
        for packet in set(packets.tolist()):
            which = packets == packet
            near = cost_model.caches.miss_s_per_byte(
                packet, analysis.working_bytes[analysis.operand_op[which]]
            )
            far = cost_model.caches.miss_s_per_byte(
                packet, analysis.operand_distance[which], untouched_s[which]
            )
            extra_s[which] += analysis.operand_bytes[which] * np.maximum(far - near, 0.0)
        return np.bincount(analysis.operand_op, extra_s, minlength=n).tolist()  # type: ignore[no-any-return]

    def _bounds(self, seconds: list[float]) -> list[str]:
        """Bound of each op: overhead, a level of the memory, or compute."""
        analysis, cost_model = self.analysis, self.cost_model
        levels = cost_model.caches.level_numbers(np.maximum(analysis.n_bytes, analysis.farthest))
        memory_s = analysis.n_bytes / cost_model.caches.level_rates[levels]
        peaks = cost_model.peak_flops_per_s
        highest = max(peaks.values(), default=math.inf)
        compute_s = analysis.flops / np.array(
            [
                peaks.get(op.inputs[0].dtype, highest) if op.inputs else highest
                for op in self.trace.ops
            ]
        )
        total_s = np.array(seconds)
        small = (np.maximum(memory_s, compute_s) < 0.25 * total_s) & (total_s < _SMALL_S)
        moving = (memory_s >= 0.4 * total_s) & (memory_s >= compute_s)
        return [
            "overhead" if s else LEVELS[level] if m else "compute"
            for s, m, level in zip(small, moving, levels)
        ]

    def kernels(self) -> Iterator[Item]:
        """Items of the ops, one for each layer that shares an op."""
        if not self.trace.ops:
            return
        root_s = self.cost_model.cost_s("optimizer_zero_root")
        seconds = []
        self.overheads_s, self.distances_s = [], self._distance_s()
        for index, op in enumerate(self.trace.ops):
            if op.phase == "optimizer" and self.optimizer is not None:
                overhead_s = 0.0
                own_s = (
                    max(0.0, self.kernel_s[index] - self.optimizer.floor_s(op))
                    + self.analysis.roots_of_zero.get(index, 0.0) * root_s
                )
            else:
                overhead_s = self._overhead_s(op, index)
                own_s = max(self.kernel_s[index] + overhead_s, _LEAST_KERNEL_S)
            self.overheads_s.append(max(0.0, overhead_s))
            seconds.append(own_s + self.distances_s[index])
        for index, (op, bound) in enumerate(zip(self.trace.ops, self._bounds(seconds))):
            for layer, share in op.shares or ((op.layer, 1.0),):
                yield Item(
                    layer,
                    op.phase,
                    seconds[index] * share,
                    bound,
                    self.source[index],
                    "kernel",
                    index,
                    share,
                )

    def page_faults(self, others: Seconds) -> Iterator[Item]:
        """Items of page faults and of the release of pages."""
        simulated = self.analysis.allocator
        faults = cold_faults(simulated, self.begin_s.tolist(), self.cost_model.caches.page_slowdown)
        yield from page_items(
            self.trace,
            simulated,
            faults,
            self.cost_model.cost_s,
            "interpolated" if self.measured_threads else "extrapolated",
            others,
        )

    def modules(self) -> Iterator[Item]:
        """Items of module calls (their callers'), parameter look-ups and gradient accumulation."""
        names = ("module_call", "module_body", "parameter_lookup", "accumulate_grad")
        call_s, body_s, lookup_s, accumulate_s = (self.cost_model.cost_s(name) for name in names)
        worked = {op.layer for op in self.trace.ops if op.phase == "backward"}
        root = self.trace.layers[0].name if self.trace.layers else ""
        last = self._code_of_layers()
        if not self.trace.inference:
            yield Item(
                LOSS,
                "forward",
                body_s
                + self.cost_model.caches.cold_start_s("module", last.get(LOSS, ReuseDistance())),
                "overhead",
                self.cost_source,
                "module body",
            )
        for layer in self.trace.layers:
            for caller, count in layer.callers:
                yield Item(
                    caller or root,
                    "forward",
                    count * call_s,
                    "overhead",
                    self.cost_source,
                    "module call",
                )
            if layer.is_leaf and layer.n_calls:
                penalty_s = self.cost_model.caches.cold_start_s(
                    "module", last.get(layer.name, ReuseDistance())
                )
                yield Item(
                    layer.name,
                    "forward",
                    layer.n_calls * body_s + penalty_s,
                    "overhead",
                    self.cost_source,
                    "module body",
                )
            if layer.parameters:
                yield Item(
                    layer.name,
                    "forward",
                    layer.n_calls * len(layer.parameters) * lookup_s,
                    "overhead",
                    self.cost_source,
                    "parameter look-up",
                )
                if not self.trace.inference and layer.name in worked:
                    yield Item(
                        layer.name,
                        "backward",
                        len(layer.parameters) * accumulate_s,
                        "overhead",
                        self.cost_source,
                        "gradient accumulation",
                    )

    def _code_of_layers(self) -> dict[str, ReuseDistance]:
        """Smallest reuse distance of a forward operator's code, by layer."""
        found: dict[str, ReuseDistance] = {}
        for index, op in enumerate(self.trace.ops):
            if op.phase == "forward":
                since = self._since(index)
                found[op.layer] = min(
                    found.get(op.layer, since),
                    since,
                    key=lambda distance: (distance.n_bytes, distance.seconds),
                )
        return found

    def calls(self) -> Iterator[Item]:
        """Items of the calls of backward, optimizer and zero_grad."""
        if self.trace.inference:
            return
        passed = self._whole_step
        backward_s = self.cost_model.cost_s("backward_call") + self.cost_model.caches.cold_start_s(
            "backward", passed
        )
        yield Item(LOSS, "backward", backward_s, "overhead", self.cost_source, "backward call")
        if self.optimizer is None or self.trace.optimizer is None:
            return
        n_tensors = self.trace.optimizer.n_tensors
        zero_s = (
            self.cost_model.cost_s("zero_grad_call")
            + n_tensors * self.cost_model.cost_s("zero_grad_tensor")
            + self.cost_model.caches.cold_start_s("zero_grad", passed)
        )
        yield Item(LOSS, "zero_grad", zero_s, "overhead", self.cost_source, "zero_grad")
        called_s = self.optimizer.call_s + self.cost_model.caches.cold_start_s("optimizer", passed)
        loop_s = called_s + n_tensors * self.optimizer.tensor_s
        owners = [
            (layer.name, len(layer.parameters)) for layer in self.trace.layers if layer.parameters
        ]
        n_owned = sum(count for _, count in owners)
        for name, count in owners:
            source = self.optimizer.source if self.measured_threads else "extrapolated"
            yield Item(
                name, "optimizer", loop_s * count / n_owned, "overhead", source, "optimizer loop"
            )


def _interval(
    items: list[Item],
    kernels: Sequence[PricedKernel | None],
    analysis: Analysis,
    cost_model: KernelCostModel,
    total: float,
    slowdown: float,
) -> tuple[float, float]:
    """Factors of the 90 % interval: independent errors, added in quadrature.

    Kernel models: posterior covariance times the interval calibration factor; twice the standard
    deviation for an extrapolated op, 100 % for an unpriced one; all wider by the factor of the
    file's self-test. Then the variation between processes and between hours, the range of page
    faults, and the 5 % to 95 % range of the core's speed during the calibration.
    """
    if total <= 0:
        return 1.0, 1.0
    by_variant: dict[tuple[str, ...], dict[KernelDescription, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    unpriced_s = 0.0
    for item in items:
        if item.op < 0 or item.source == "measured":
            continue
        kernel = kernels[item.op]
        if kernel is None or item.source == "unpriced":
            unpriced_s += item.seconds
            continue
        weight = (2.0 if item.source == "extrapolated" else 1.0) / max(
            kernel.seconds, _LEAST_KERNEL_S
        )
        for piece in kernel.sub_kernels:
            by_variant[piece.variant][piece.description] += item.seconds * weight * piece.seconds
    variance_s2 = unpriced_s**2 + (PROCESS_SPREAD**2 + HOUR_SPREAD**2) * total**2
    for variant, members in by_variant.items():
        seconds = np.array(list(members.values()))
        variance_s2 += float(
            seconds @ cost_model.kernel_model(variant).covariance(*stacked(list(members))) @ seconds
        )
    half = (
        cost_model.machine.interval_factor(cost_model.threads)
        * Z90
        * math.sqrt(variance_s2)
        / total
    )
    simulated = analysis.allocator
    fault_s = slowdown * (cost_model.cost_s("page_fault") + cost_model.cost_s("page_release"))
    now = sum(simulated.faults)
    fewer, more = (
        max(0.0, faults) * fault_s / total
        for faults in (now - simulated.fewest_faults, simulated.most_faults - now)
    )
    spells, part = (
        core_speed_samples(cost_model.machine, cost_model.threads),
        kernel_sensitivity_frac(cost_model.machine, cost_model.threads, slowdown),
    )
    fast, slow = (
        (quantile(spells.values, 0.05), quantile(spells.values, 0.95)) if spells else (1.0, 1.0)
    )
    faster, slower = part * (1.0 - fast), part * (slow - 1.0)
    return max(0.05, 1.0 - math.hypot(half, fewer, faster)), 1.0 + math.hypot(half, more, slower)

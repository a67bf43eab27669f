"""Items of a step: kernels with their penalties, framework overhead and page faults.

A kernel's item is its time with warm caches, the overhead of its call (cold-start penalties and
autograd) and the cache-miss penalties of its operands.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlperf.core.code_footprint import (
    CONVOLUTION,
    CONVOLUTION_KERNEL,
    LONG_OPTIMIZER,
    LONG_OPTIMIZER_OPERATORS,
    code_of,
)
from dlperf.core.costs import OPTIMIZER_CALL, OPTIMIZER_TENSOR, SHORT_ROWS
from dlperf.core.prediction import Item
from dlperf.core.trace import BY_HAND, ITEM_BYTES, LOSS, Argument, Op, TensorSpec, Trace
from dlperf.ops.fused import FUSED, fused_threads
from dlperf.predictors.allocator.heap import PAGE_BYTES
from dlperf.predictors.analysis import Analysis
from dlperf.predictors.base import op_items
from dlperf.predictors.cache_model import ReuseDistance, order_of, short_rows_frac
from dlperf.predictors.kernel_cost_model import KernelCostModel, PricedKernel
from dlperf.predictors.page_faults import page_items
from dlperf.predictors.resources import Array, resources_of

LEAST_KERNEL_S = 2e-7
_TINY = 16
_MOST_NAMED = 3
"""Operators that a note names."""
_COMPILED_CALL = (("forward", 18, 2.0), ("backward", 5, 2.5))
"""Overhead of a call of a compiled module: guards, and the functions around its graphs. By phase,
in calls of modules, and in look-ups of each parameter: medians over stacks of 1 to 40 small layers
on AMD Zen 3, Python 3.11, torch 2.13.
"""


@dataclass(frozen=True)
class OptimizerCosts:
    """Seconds a step (`call_s`) and a parameter tensor (`tensor_s`), kernels on tiny tensors
    included; `source` says if this very loop was measured.
    """

    call_s: float
    tensor_s: float
    source: str
    cost_model: KernelCostModel
    known: dict[tuple[str, int, int, str], float] = field(default_factory=dict)

    def floor_s(self, op: Op) -> float:
        """Seconds of the op on a tiny tensor: what the loop's cost holds already."""
        signature = (
            op.packet,
            len(op.args),
            len(op.inputs) if op.packet.startswith("aten._f") else 0,
            op.inputs[0].dtype if op.inputs else "",
        )
        if signature not in self.known:
            tiny = Op(
                op.name,
                tuple(_shrink(value) for value in op.args),
                tuple((name, _shrink(value)) for name, value in op.kwargs),
            )
            (priced,) = self.cost_model.modelled([tiny])
            self.known[signature] = (
                priced.seconds
                if priced is not None
                else self.cost_model.cost_s("native_call") + self.cost_model.cost_s("boxed_call")
            )
        return self.known[signature]


def _shrink(argument: Argument) -> Argument:
    """The argument with every tensor cut to a few elements; of a list of tensors one is left."""
    if isinstance(argument, TensorSpec):
        return TensorSpec.contiguous(*([_TINY] if argument.shape else []), dtype=argument.dtype)
    if isinstance(argument, tuple):
        shrunk = tuple(_shrink(item) for item in argument)
        return shrunk[:1] if shrunk and isinstance(shrunk[0], TensorSpec) else shrunk
    return argument


def _substitute_note(packets: Sequence[str], wanted: str, variant: str) -> str:
    """The operators that the models of another dtype price, the first ones by name.

    >>> _substitute_note(["aten.mm", "aten.relu"], "float64", "float32")[:44]
    'aten.mm, aten.relu in float64 have no kernel'
    """
    named, n_more = ", ".join(packets[:_MOST_NAMED]), len(packets) - _MOST_NAMED
    more = f" and {n_more} more" if n_more > 0 else ""
    have = "have" if len(packets) > 1 else "has"
    return (
        f"{named}{more} in {wanted} {have} no kernel model: priced as in {variant}, which may be"
        " far off"
    )


def optimizer_costs(trace: Trace, cost_model: KernelCostModel) -> OptimizerCosts:
    """The costs of the trace's optimizer: measured for its class and loop, else from a line through
    the measured ones over ops a tensor.
    """
    info, machine, threads = trace.optimizer, cost_model.machine, cost_model.threads
    assert info is not None
    is_loop = info.implementation == "for-loop"
    n_ops = sum(op.phase == "optimizer" for op in trace.ops)
    per_tensor = n_ops / max(info.n_tensors, 1) if is_loop else n_ops
    calls = [cost.value for cost in machine.costs_of(OPTIMIZER_CALL, threads=threads)]
    call_s = machine.cost_value(
        OPTIMIZER_CALL, threads, 0.0, of=info.type, variant=info.implementation
    ) or statistics.median(calls or [0.0])
    call_s *= info.type != BY_HAND  # a loop of the program's own, and no call
    alike = [
        (cost.key.of, cost.key.at, cost.value)
        for cost in machine.costs_of(OPTIMIZER_TENSOR, threads=threads)
        if cost.key.variant == info.implementation
    ]
    op_s = cost_model.cost_s("native_call")
    if alike:
        op_s = statistics.median(seconds / max(ops, 1) for _, ops, seconds in alike)
    own = [(ops, seconds) for kind, ops, seconds in alike if kind == info.type]
    if not own:
        source = "interpolated" if alike else "extrapolated"
        return OptimizerCosts(call_s, op_s * per_tensor, source, cost_model)
    ops, seconds = min(own, key=lambda measured: abs(measured[0] - per_tensor))
    # Another variant of the same class (weight decay, amsgrad) has a few ops more or less; those of
    # other loops serve all tensors at once.
    further_s = (per_tensor - ops) * op_s if is_loop else 0.0
    return OptimizerCosts(call_s, max(0.0, seconds + further_s), "measured", cost_model)


class StepItems:
    """Items of one trace on one machine."""

    def __init__(
        self, trace: Trace, cost_model: KernelCostModel, analysis: Analysis, measured_threads: bool
    ) -> None:
        self.trace, self.cost_model, self.analysis = trace, cost_model, analysis
        self.caches, self.cost_s = cost_model.caches, cost_model.cost_s
        self.measured_threads = measured_threads
        self.notes: set[str] = set()
        self._substituted: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
        self.optimizer = None if trace.optimizer is None else optimizer_costs(trace, cost_model)
        distinct = {op.signature: op for op in trace.ops}
        priced = dict(zip(distinct, cost_model.modelled(distinct.values())))
        self.priced = [priced[op.signature] for op in trace.ops]
        """Modelled time of each op."""
        self.kernel_s: list[float] = []
        """Seconds of each op with warm caches."""
        self.source: list[str] = []
        for index, op in enumerate(trace.ops):
            seconds, source = self._kernel_time(index, op)
            self.kernel_s.append(seconds)
            self.source.append(self._source(source))
        self.notes |= {_substitute_note([*of], *pair) for pair, of in self._substituted.items()}
        self.stand_still(0.0)

    def _source(self, source: str) -> str:
        """The source of a time from the measured thread count."""
        return source if self.measured_threads or source == "unpriced" else "extrapolated"

    def stand_still(self, seconds: float) -> None:
        """Set the pause between backward and optimizer: begin and end of each kernel over two
        steps.
        """
        phases = [op.phase for op in self.trace.ops]
        n = len(phases)
        first = phases.index("optimizer") if "optimizer" in phases else n
        took_s = np.tile(np.maximum(self.kernel_s, LEAST_KERNEL_S), 2)
        after_s = np.zeros(2 * n + 1)
        after_s[[first, n + first]] = seconds
        self.end_s = np.cumsum(took_s + after_s[:-1])
        self.begin_s = self.end_s - took_s
        self.overheads_s = [self._overhead_s(op, index) for index, op in enumerate(self.trace.ops)]
        """Overhead of each op's call."""
        self.operands_s = self._operand_s()
        """Cache-miss penalty of each operand."""
        missed_s = np.bincount(self.analysis.operand_op, self.operands_s, minlength=n)
        self.distances_s: list[float] = missed_s.tolist()
        """Cache-miss penalties of each op's operands."""

    def items(self) -> list[Item]:
        """Items of kernels, page faults and calls."""
        kernels, calls = self._kernels(), list(self._calls())
        others: dict[tuple[str, str], float] = defaultdict(float)
        for item in (*kernels, *calls):
            others[item.layer, item.phase] += item.seconds
        simulated = self.analysis.allocator
        factor = self.cost_model.machine.page_factor(self.cost_model.threads)
        source = self._source("interpolated")
        pages = page_items(self.trace, simulated, self.cost_s, factor, source, others)
        return [*kernels, *pages, *calls]

    def _kernel_time(self, index: int, op: Op) -> tuple[float, str]:
        """Seconds of an op with warm caches, and their source."""
        priced = self.priced[index]
        exact = self.cost_model.machine.exact(op, self.cost_model.threads)
        if exact is not None:
            return exact.seconds, "measured"
        if priced is not None:
            self._note_substitute(op, priced)
            return priced.seconds, priced.source
        flops, n_bytes = (float(of[index]) for of in (self.analysis.flops, self.analysis.n_bytes))
        if op.packet == FUSED:
            return self.cost_model.fused_s(flops, n_bytes, fused_threads(op)), "extrapolated"
        self.notes.add(
            f"{op.packet} has no kernel model: priced by its roofline + dispatch, a lower bound"
        )
        return self.cost_model.unpriced_s(flops, n_bytes), "unpriced"

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
                self._substituted[formats[0], formats[1]][op.packet] = None
            elif wanted[0].startswith("conv") and wanted[2:3] != variant[2:3]:
                self.notes.add(
                    f"{op.packet} of kind {wanted[2]} in {formats[0]} has no kernel model: priced"
                    f" as {variant[2]}, which may be far off"
                )

    def _overhead_s(self, op: Op, index: int) -> float:
        """Overhead of op `index` in a step, beyond its kernel in the micro-benchmark.

        Cold-start penalties of the shared code (interpreter, dispatcher, allocator) by the op
        before, or by the whole step before its first op and after the last of the backward; of the
        operator's own code since it last ran; and autograd. That of an optimizer's op is part of
        its loop. A kernel that is repeated in a micro-benchmark finds the code as cold as its own
        operands leave it: only what is colder in the step counts.
        """
        if op.phase == "optimizer" and self.optimizer is not None:
            return 0.0
        before, own = (
            ReuseDistance(float(self.analysis.working_bytes[number]))
            for number in (index - 1, index)
        )
        is_cold = index == 0 and not self.trace.inference
        shared_s = self._shared_cold_start_s(self._whole_step if is_cold else before)
        shared_s -= self._shared_cold_start_s(own)
        own_s = self.caches.operator_cold_start_s(op.packet, self._since(index))
        if code_of(op.packet) == CONVOLUTION and index in self._first_of_shape:
            kernel_s = self.caches.cold_start_s(CONVOLUTION_KERNEL, self._whole_step)
            own_s = max(own_s, kernel_s)
        own_s -= self.caches.operator_cold_start_s(op.packet, own)
        called_s = max(0.0, shared_s) + max(0.0, own_s) - self.cost_s("boxed_call")
        called_s -= self.cost_s("python_call") if op.from_cpp else 0.0
        if index == self._last_of_backward:
            called_s += self._shared_cold_start_s(self._whole_step)
        if op.phase == "backward":
            is_first = index in self.analysis.first_of_node
            return called_s + (self.cost_s("autograd_node") if is_first else 0.0)
        return called_s + (self.cost_s("autograd_record") if op.grad else 0.0)

    @cached_property
    def _first_of_shape(self) -> set[int]:
        """The first op of each signature in the step."""
        first = {op.signature: index for index, op in reversed([*enumerate(self.trace.ops)])}
        return set(first.values())

    @cached_property
    def _last_of_backward(self) -> int:
        """The last op of the backward, after which the engine returns to Python; -1 without one."""
        backward = (i for i, op in enumerate(self.trace.ops) if op.phase == "backward")
        return max(backward, default=-1)

    def _shared_cold_start_s(self, before: ReuseDistance) -> float:
        """Cold-start penalty of the code that all operators share."""
        first_s, next_s = (self.caches.cold_start_s(code, before) for code in ("first", "next"))
        return max(0.0, first_s - next_s)

    def _optimizer_cold_start_s(self, passed: ReuseDistance) -> float:
        """Cold-start penalty of the optimizer, linear in the logarithm of its different operators
        between one of a single one and one of many.
        """
        n = len({op.packet for op in self.trace.ops if op.phase == "optimizer"})
        share = min(1.0, math.log(max(n, 1)) / math.log(LONG_OPTIMIZER_OPERATORS))
        short_s, long_s = (
            self.caches.cold_start_s(code, passed) for code in ("optimizer", LONG_OPTIMIZER)
        )
        return short_s + share * max(0.0, long_s - short_s)

    def _since(self, index: int) -> ReuseDistance:
        """Reuse distance of an op's code."""
        return ReuseDistance(self.analysis.code_distance[index], self.analysis.code_since[index])

    @cached_property
    def _whole_step(self) -> ReuseDistance:
        """Reuse distance of a whole step."""
        return ReuseDistance(
            self.analysis.step_bytes,
            self.analysis.step_code,
            PAGE_BYTES * sum(self.analysis.allocator.faults),
        )

    def _operand_s(self) -> Array:
        """Cache-miss penalty of each operand, in seconds, above that of its op's working set."""
        analysis, n = self.analysis, len(self.trace.ops)
        middle_s = (self.begin_s + self.end_s) / 2
        untouched_s = np.maximum(
            middle_s[n + analysis.operand_op] - middle_s[analysis.operand_touched], 0.0
        )
        took_s = np.array(self.kernel_s)[analysis.operand_op]
        extra_s = np.array(
            [
                self.caches.cold_start_s("operand", ReuseDistance(distance))
                for distance in analysis.operand_distance
            ]
        )
        near_bytes = analysis.working_bytes[analysis.operand_op]
        # Both ops pass over all their operands at once: of what one touches, half lies between
        # its passing of an element and its beginning or end, on average.
        passed = near_bytes + analysis.working_bytes[analysis.operand_touched % n]
        far_bytes = np.minimum(analysis.operand_distance + passed / 2, analysis.step_bytes)
        short_frac = np.array([short_rows_frac(op) for op in self.trace.ops])[analysis.operand_op]
        for order in set(self._operand_orders.tolist()):
            of = self._operand_orders == order
            distances = far_bytes[of], near_bytes[of], untouched_s[of], took_s[of]
            missed_s = self.caches.miss_s_per_byte(*distances, order)
            if (short := short_frac[of]).any():
                short_s = self.caches.miss_s_per_byte(*distances, SHORT_ROWS)
                missed_s += short * np.maximum(short_s - missed_s, 0.0)
            extra_s[of] += analysis.operand_bytes[of] * missed_s
        return extra_s

    @cached_property
    def _operand_orders(self) -> npt.NDArray[np.object_]:
        """In which order each operand is touched, as the operator that was measured."""
        orders = np.array([order_of(op.packet) for op in self.trace.ops], dtype=object)
        return orders[self.analysis.operand_op]

    def _kernels(self) -> list[Item]:
        """Items of the ops, one for each layer that shares an op."""
        if not self.trace.ops:
            return []
        root_s = self.cost_s("optimizer_zero_root")
        seconds = []
        for index, op in enumerate(self.trace.ops):
            own_s = max(self.kernel_s[index] + self.overheads_s[index], LEAST_KERNEL_S)
            if op.phase == "optimizer" and self.optimizer is not None:
                roots_s = self.analysis.roots_of_zero.get(index, 0.0) * root_s
                own_s = max(0.0, self.kernel_s[index] - self.optimizer.floor_s(op)) + roots_s
            seconds.append(own_s + self.distances_s[index])
        found = resources_of(
            self.trace,
            self.cost_model,
            self.analysis,
            seconds,
            self.overheads_s,
            self.operands_s,
        )
        ops, core_responses = self.trace.ops, self.cost_model.core_responses
        distinct = {op.signature: index for index, op in enumerate(ops)}
        by_signature = {}
        for signature, index in distinct.items():
            kernel = self.priced[index], self.kernel_s[index]
            by_signature[signature] = core_responses.of(*kernel), core_responses.between(*kernel)
        responses, between = zip(*(by_signature[op.signature] for op in ops))
        return op_items(
            self.trace,
            seconds,
            found.bounds,
            self.source,
            found.parts,
            found.needs,
            responses,
            between,
        )

    def _call(
        self, layer: str, phase: str, seconds: float, what: str, source: str = "measured"
    ) -> Item:
        return Item(layer, phase, seconds, "overhead", self._source(source), what)

    def _calls(self) -> Iterator[Item]:
        """Items of module calls (their callers'), parameter look-ups, Python code and gradient
        accumulation; of the calls of backward, optimizer and zero_grad.
        """
        trace, is_training, passed = self.trace, not self.trace.inference, self._whole_step
        names = "module_call module_body parameter_lookup accumulate_grad autograd_node".split()
        call_s, body_s, lookup_s, accumulate_s, node_s = map(self.cost_s, names)
        worked = {op.layer for op in trace.ops if op.phase == "backward"}
        # Smallest reuse distance of a forward operator's code, by layer: the last one entered.
        distances = [
            (op.layer, self._since(index))
            for index, op in reversed([*enumerate(trace.ops)])
            if op.phase == "forward"
        ]
        distances.sort(key=lambda one: one[1].n_bytes, reverse=True)
        last = defaultdict(ReuseDistance, distances)
        if is_training:
            penalty_s = self.caches.cold_start_s("module", last[LOSS])
            yield self._call(LOSS, "forward", body_s + penalty_s, "module body")
        instruction_s = self.cost_s("python_instruction")
        cold_s = self.caches.cold_start_s("instruction", passed)
        for layer in trace.layers:
            name, n_calls, n_parameters = layer.name, layer.n_calls, len(layer.parameters)
            for caller, count in layer.callers:
                yield self._call(caller or name, "forward", count * call_s, "module call")
            if layer.is_leaf and n_calls:
                penalty_s = self.caches.cold_start_s("module", last[name])
                yield self._call(name, "forward", n_calls * body_s + penalty_s, "module body")
            if n_parameters and n_calls:
                seconds = n_calls * n_parameters * lookup_s
                yield self._call(name, "forward", seconds, "parameter look-up")
            if layer.n_instructions:
                seconds = layer.n_instructions * instruction_s + layer.n_distinct * cold_s
                yield self._call(name, "forward", seconds, "Python code")
            if layer.n_silent_nodes and is_training:
                seconds = layer.n_silent_nodes * node_s
                yield self._call(name, "backward", seconds, "autograd nodes")
            if n_parameters and is_training and name in worked:
                seconds = n_parameters * accumulate_s
                yield self._call(name, "backward", seconds, "gradient accumulation")
        if any(op.packet == FUSED for op in trace.ops):
            (layer,) = trace.layers
            for phase, n_modules, n_lookups in _COMPILED_CALL[: 1 + is_training]:
                seconds = n_modules * (call_s + body_s)
                seconds += n_lookups * len(layer.parameters) * lookup_s
                seconds *= layer.n_calls
                yield self._call(layer.name, phase, seconds, "compiled call", "extrapolated")
        if not is_training:
            return
        backward_s, zero_s = (
            self.caches.cold_start_s(code, passed) for code in ("backward", "zero_grad")
        )
        backward_s += self.cost_s("backward_call")
        yield self._call(LOSS, "backward", backward_s, "backward call")
        if self.optimizer is None or trace.optimizer is None:
            return
        n_tensors = trace.optimizer.n_tensors
        zero_s += self.cost_s("zero_grad_call") + n_tensors * self.cost_s("zero_grad_tensor")
        if trace.optimizer.zero_grad:
            yield self._call(LOSS, "zero_grad", zero_s, "zero_grad")
        optimizer_s = self._optimizer_cold_start_s(passed)
        optimizer_s += self.optimizer.call_s + n_tensors * self.optimizer.tensor_s
        # a shared parameter counts once, in the layer that owns it
        owned = Counter(trace.parameters[index].layer for index in dict(trace.arrivals))
        owned = owned or Counter(one.name for one in trace.layers for _ in one.parameters)
        for name in (layer.name for layer in trace.layers if layer.name in owned):
            seconds = optimizer_s * owned[name] / sum(owned.values())
            source = self.optimizer.source
            yield self._call(name, "optimizer", seconds, "optimizer loop", source)

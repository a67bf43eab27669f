"""dlperf's own predictor: op by op from the machine file, with the framework's costs, the caches
and malloc.

The time of a step is the sum of
- each op's kernel, measured at this very shape or interpolated over its family's surface,
- what its operands cost for lying farther away than in the micro-benchmark (by reuse distance, as operators were measured to take more),
- the framework: recording for autograd, running nodes, module calls, parameter look-ups, the optimizer's loop,
- page faults, by replaying malloc on the trace's allocations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from dlperf.core.clock import LONG_CALL_S, SHORT_CALL_S, quantile
from dlperf.core.errors import DlperfError
from dlperf.core.machine import (
    CACHE_RESIDENCY,
    CONTENTION_FRAMEWORK,
    CONTENTION_MEMORY,
    EXACT,
    Machine,
)
from dlperf.core.trace import ITEM_BYTES, LOSS, Op, Trace, own_operations
from dlperf.core.variation import Z90, core_speed_samples, kernel_sensitivity_frac
from dlperf.ops.roofs import LEVELS
from dlperf.predictors.allocator.simulation import PAGE_BYTES
from dlperf.predictors.analysis import Analysis, analyse
from dlperf.predictors.base import Item, Prices, register
from dlperf.predictors.features import Description, stacked
from dlperf.predictors.kernel_cost_model import Book, Passed, PricedKernel, book_of
from dlperf.predictors.kernel_model import one_blas_thread
from dlperf.predictors.optimizers import OptimizerCosts, optimizer_costs
from dlperf.predictors.page_faults import BOUND, Seconds, cold_faults, page_items, peak_memory_bytes

_LEAST_KERNEL_S = 2e-7
_SMALL_S = 1e-5
"""An op that takes longer is limited by its kernel, however little of the peak it reaches."""
_QUIET_UNREST = 1.06
"""Up to so much every machine is restless."""
PROCESS_SPREAD = 0.05
"""Standard deviation, as a fraction, of one step's median from process to process where nothing
else is known.
"""
HOUR_SPREAD = 0.064
"""Standard deviation, as a fraction, of the machine's pace from the hour of its calibration to
another: medians over the same 5,000 to 12,000 kernels in six calibrations of one day, on a virtual
machine that shares its host, varied by 4.5 %; times the root of two.
"""


@register
class Calibrated:
    """Prices every op of a trace from a machine file; see the module."""

    name = "calibrated"

    @one_blas_thread
    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list. Raises DlperfError where the file holds no kernels or no memory
        bandwidth.
        """
        if not machine.kernels:
            raise DlperfError(
                f"{machine.path or 'machine'}: holds no kernels; run dlperf calibrate"
            )
        book, analysis = book_of(machine, threads), analyse(trace, malloc)
        priced = _Priced(trace, book, analysis, measured_threads=book.threads == threads)
        unrest = machine.contention_slowdown(book.threads)
        if unrest > _QUIET_UNREST:
            priced.notes.add(
                f"while it was calibrated the machine usually took {100 * (unrest - 1):.0f} %"
                " longer than at best (neighbours); so do predictions"
            )
        # A target's own operations were measured at a moment of their own; what the framework does
        # suffers more from neighbours than kernels do.
        own, long = (
            machine.contention_slowdown(book.threads, f"{own_operations(trace)} "),
            machine.long_call_slowdown(book.threads),
        )
        framework = machine.cost_s(CONTENTION_FRAMEWORK, book.threads, unrest)
        left = min(1.0, (long - 1.0) / (unrest - 1.0)) if unrest > 1.0 else 1.0
        memory = machine.cost_s(CONTENTION_MEMORY, book.threads, unrest)

        def restless_s(item: Item) -> float:
            if item.bound == BOUND:
                return memory * item.seconds
            short = own if item.op in priced.exact else unrest
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
        items = [replace(item, seconds=restless_s(item)) for item in kernels]
        items += [replace(item, seconds=framework * item.seconds) for item in calls]
        total = math.fsum(item.seconds for item in items)
        low, high = _interval(
            items,
            priced.priced,
            analysis,
            book,
            total,
            total / math.fsum(item.seconds for item in quiet) if total else unrest,
        )
        notes = tuple(sorted(priced.notes))
        peak = peak_memory_bytes(trace, machine, analysis.replay)
        return Prices(
            tuple(items),
            low_factor=low,
            high_factor=high,
            notes=notes,
            warnings=_missing(machine, trace),
            peak_memory_bytes=peak,
        )


def _length(seconds: float) -> float:
    """From 0, a call that a neighbour is there for or not, to 1, one whose best samples had him for
    a part of their time.
    """
    return min(
        1.0,
        max(
            0.0,
            math.log(max(seconds, SHORT_CALL_S) / SHORT_CALL_S)
            / math.log(LONG_CALL_S / SHORT_CALL_S),
        ),
    )


def pause_factors(
    trace: Trace, machine: Machine, threads: int, malloc: str, pauses_s: Sequence[float]
) -> tuple[float, ...]:
    """How many times as long a step computes if it stands still for so many seconds between its
    backward and its optimizer, as a rank does that waits for others: meanwhile neighbours take
    their part of the shared cache, as the machine file's ``retention`` and ``retention_page`` have
    it. 1 where neither was measured.
    """
    if not any(cost.name.startswith(CACHE_RESIDENCY) for cost in machine.costs):
        return tuple(1.0 for _ in pauses_s)
    priced = _Priced(
        trace, book_of(machine, threads), analyse(trace, malloc), measured_threads=True
    )

    def step_s(pause_s: float) -> float:
        priced.stand_still(pause_s)
        return math.fsum(item.seconds for items in priced.items() for item in items)

    at_once_s = step_s(0.0)
    return tuple(step_s(pause_s) / at_once_s if at_once_s else 1.0 for pause_s in pauses_s)


def _missing(machine: Machine, trace: Trace) -> tuple[str, ...]:
    """One line on the costs that the file does not hold, which count as nothing."""
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
    """The items of one trace on one machine."""

    def __init__(
        self, trace: Trace, book: Book, analysis: Analysis, measured_threads: bool
    ) -> None:
        self.trace, self.book, self.analysis = trace, book, analysis
        self.measured_threads = measured_threads
        self.cost_source = "measured" if measured_threads else "extrapolated"
        self.notes: set[str] = set()
        self.exact: set[int] = set()
        self.overheads_s: list[float] = []
        """Of each op's item: what its call adds to its kernel; known once the kernels' items are.
        So are `distances_s`, what its operands' distance adds.
        """
        self.distances_s: list[float] = []
        self.optimizer: OptimizerCosts | None = (
            None if trace.optimizer is None else optimizer_costs(trace, book)
        )
        self.priced = self._from_curves()
        self.kernel_s, self.source = self._kernel_times()
        self.stand_still(0.0)

    def stand_still(self, seconds: float) -> None:
        """The step stands still for so long between its backward and its optimizer. Two steps' ops
        begin and end accordingly, as far as their kernels go.
        """
        n = len(self.trace.ops)
        took_s = np.tile(np.maximum(self.kernel_s, _LEAST_KERNEL_S), 2)
        first = next(
            (index for index, op in enumerate(self.trace.ops) if op.phase == "optimizer"), n
        )
        after_s = np.zeros(2 * n)
        after_s[[place for place in (first, n + first) if place < 2 * n]] = seconds
        self.end_s = np.cumsum(took_s + after_s)
        self.begin_s = self.end_s - took_s

    def items(self) -> tuple[list[Item], list[Item]]:
        """What runs kernels and touches memory, and what calls them."""
        kernels, calls = list(self.kernels()), [*self.modules(), *self.calls()]
        others: dict[tuple[str, str], float] = defaultdict(float)
        for item in (*kernels, *calls):
            others[item.layer, item.phase] += item.seconds
        return [*kernels, *self.page_faults(others)], calls

    def _from_curves(self) -> list[PricedKernel | None]:
        """What the curves say of each op."""
        descriptions = self.analysis.descriptions(self.book.threads)
        distinct = {op.signature: parts for op, parts in zip(self.trace.ops, descriptions)}
        priced = dict(zip(distinct, self.book.curves_s(list(distinct.values()))))
        return [priced[op.signature] for op in self.trace.ops]

    def _kernel_times(self) -> tuple[list[float], list[str]]:
        """Seconds of each op as torch.ops calls it with warm caches, and where the number comes
        from.
        """
        ops = self.trace.ops
        seconds, source = [0.0] * len(ops), ["unpriced"] * len(ops)
        for index, (op, priced) in enumerate(zip(ops, self.priced)):
            exact = self.book.machine.exact(op.signature, self.book.threads)
            if exact is not None:
                seconds[index], source[index] = exact.samples.minimum, "measured"
                if exact.family == EXACT:
                    self.exact.add(index)
            elif priced is None:
                self.notes.add(
                    f"{op.packet} has no curve: priced by its roofline + dispatch, which is a lower"
                    " bound"
                )
                seconds[index] = self.book.unpriced_s(
                    float(self.analysis.flops[index]), float(self.analysis.n_bytes[index])
                )
            else:
                self._note_stand_in(op, priced)
                seconds[index], source[index] = priced.seconds, priced.source
        if not self.measured_threads:
            source = [
                "extrapolated" if name in ("measured", "interpolated") else name for name in source
            ]
        return seconds, source

    def _note_stand_in(self, op: Op, priced: PricedKernel) -> None:
        """Says so where an op is priced by a curve of another number format, or a convolution by
        one of another kind.
        """
        for part in priced.parts:
            wanted, key = part.description.key, part.key
            if wanted == key:
                continue
            formats = [
                next((word for word in names if word in ITEM_BYTES), "") for names in (wanted, key)
            ]
            if "float" in formats[0] and formats[0] != formats[1]:
                self.notes.add(
                    f"{op.packet} in {formats[0]} has no curve: priced as in {formats[1]}, which"
                    " may be far off"
                )
            elif wanted[0].startswith("conv") and wanted[2:3] != key[2:3]:
                self.notes.add(
                    f"{op.packet} of kind {wanted[2]} in {formats[0]} has no curve: priced as"
                    f" {key[2]}, which may be far off"
                )

    def _overhead_s(self, op: Op, index: int) -> float:
        """What the call adds, in its place in a step, to the kernel as the micro-benchmark called
        it.

        What all operators share (interpreter, dispatcher, allocator) has left the caches as far as
        the op before drove it out, or, of the first of a step, the backward and the optimizer
        before; what is the operator's own as far as all that happened since it last ran.
        """
        before = Passed(self.analysis.bytes_before[index]) if index else self._whole_step
        shared = max(0.0, self.book.cold_s("first", before) - self.book.cold_s("next", before))
        called = (
            shared
            + self.book.cold_operator_s(op.packet, self._since(index))
            - self.book.cost_s("boxed_call")
        )
        if op.phase == "backward":
            return called + (
                self.book.cost_s("autograd_node") if self.analysis.first_of_node[index] else 0.0
            )
        return called + (self.book.cost_s("autograd_record") if op.grad else 0.0)

    def _since(self, index: int) -> Passed:
        """What passed since an op's code last ran."""
        seconds = float(
            self.begin_s[len(self.trace.ops) + index] - self.end_s[self.analysis.code_ran[index]]
        )
        return Passed(self.analysis.code_distance[index], self.analysis.code_since[index], seconds)

    @property
    def _whole_step(self) -> Passed:
        """What passes from step to step."""
        step_s = float(self.begin_s[len(self.trace.ops)]) if self.trace.ops else 0.0
        return Passed(
            self.analysis.step_bytes,
            self.analysis.step_code,
            step_s,
            PAGE_BYTES * sum(self.analysis.replay.faults),
        )

    def _distance_s(self) -> list[float]:
        """Seconds, by op, for operands that lie farther away than the op's own working set does
        when it is repeated, or were long not touched.
        """
        analysis, book, n = self.analysis, self.book, len(self.trace.ops)
        untouched_s = np.maximum(
            self.begin_s[n + analysis.operand_op] - self.end_s[analysis.operand_touched], 0.0
        )
        extra_s = np.array(
            [book.cold_s("operand", Passed(distance)) for distance in analysis.operand_distance]
        )
        packets = np.array([op.packet for op in self.trace.ops])[analysis.operand_op]
        for packet in set(packets.tolist()):
            which = packets == packet
            near = book.far_seconds_per_byte(
                packet, analysis.working_bytes[analysis.operand_op[which]]
            )
            far = book.far_seconds_per_byte(
                packet, analysis.operand_distance[which], untouched_s[which]
            )
            extra_s[which] += analysis.operand_bytes[which] * np.maximum(far - near, 0.0)
        return np.bincount(analysis.operand_op, extra_s, minlength=n).tolist()  # type: ignore[no-any-return]

    def _bounds(self, seconds: list[float]) -> list[str]:
        """What limits each op: its call, the memory that its bytes come from, or computing."""
        analysis, book = self.analysis, self.book
        levels = book.level_numbers(np.maximum(analysis.n_bytes, analysis.farthest))
        memory_s = analysis.n_bytes / book.level_rates[levels]
        peaks = book.peak_flops_per_s
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
        """One item an op (several where it serves several layers)."""
        if not self.trace.ops:
            return
        root_s = self.book.cost_s("optimizer_zero_root")
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
        """First touches of memory that malloc got anew from the system, and giving it back."""
        replay = self.analysis.replay
        faults = cold_faults(replay, self.begin_s.tolist(), self.book.page_factor)
        yield from page_items(
            self.trace,
            replay,
            faults,
            self.book.cost_s,
            "interpolated" if self.measured_threads else "extrapolated",
            others,
        )

    def modules(self) -> Iterator[Item]:
        """Calls of modules (their callers'), look-ups of parameters, gradients put into parameters."""
        names = ("module_call", "module_body", "parameter_lookup", "accumulate_grad")
        call_s, body_s, lookup_s, accumulate_s = (self.book.cost_s(name) for name in names)
        worked = {op.layer for op in self.trace.ops if op.phase == "backward"}
        root = self.trace.layers[0].name if self.trace.layers else ""
        last = self._code_of_layers()
        if not self.trace.inference:
            yield Item(
                LOSS,
                "forward",
                body_s + self.book.cold_s("module", last.get(LOSS, Passed())),
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
                cold_s = self.book.cold_s("module", last.get(layer.name, Passed()))
                yield Item(
                    layer.name,
                    "forward",
                    layer.n_calls * body_s + cold_s,
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

    def _code_of_layers(self) -> dict[str, Passed]:
        """What passed, by layer, since a module of its kind last ran: of its forward's operators,
        since that which ran last.
        """
        found: dict[str, Passed] = {}
        for index, op in enumerate(self.trace.ops):
            if op.phase == "forward":
                since = self._since(index)
                found[op.layer] = min(
                    found.get(op.layer, since),
                    since,
                    key=lambda passed: (passed.n_bytes, passed.seconds),
                )
        return found

    def calls(self) -> Iterator[Item]:
        """What comes once a step: the calls of backward, of the optimizer and its loop, of
        zero_grad.
        """
        if self.trace.inference:
            return
        passed = self._whole_step
        backward_s = self.book.cost_s("backward_call") + self.book.cold_s("backward", passed)
        yield Item(LOSS, "backward", backward_s, "overhead", self.cost_source, "backward call")
        if self.optimizer is None or self.trace.optimizer is None:
            return
        n_tensors = self.trace.optimizer.n_tensors
        zero_s = (
            self.book.cost_s("zero_grad_call")
            + n_tensors * self.book.cost_s("zero_grad_tensor")
            + self.book.cold_s("zero_grad", passed)
        )
        yield Item(LOSS, "zero_grad", zero_s, "overhead", self.cost_source, "zero_grad")
        called_s = self.optimizer.call_s + self.book.cold_s("optimizer", passed)
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
    book: Book,
    total: float,
    unrest: float,
) -> tuple[float, float]:
    """Factors of the 90 % interval, from what may go wrong independently.

    The error of each curve is that of its Gaussian process, made as wide as its held-out points ask
    for: ops of near places err alike, ops of far places and of different curves each by themselves.
    An extrapolated op counts twice its standard deviation, an unpriced one 100 %. Added in
    quadrature: the spread of processes and of hours, the steps that malloc may come to, and seconds
    in which the core is as fast or as slow as one of twenty was during the calibration. All errors
    of curves are wider by the file's interval calibration factor, which its self-test gives.
    """
    if total <= 0:
        return 1.0, 1.0
    by_curve: dict[tuple[str, ...], dict[Description, float]] = defaultdict(
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
        for piece in kernel.parts:
            by_curve[piece.key][piece.description] += item.seconds * weight * piece.seconds
    variance_s2 = unpriced_s**2 + (PROCESS_SPREAD**2 + HOUR_SPREAD**2) * total**2
    for key, members in by_curve.items():
        seconds = np.array(list(members.values()))
        variance_s2 += float(
            seconds @ book.surface(key).covariance(*stacked(list(members))) @ seconds
        )
    half = book.machine.interval_factor(book.threads) * Z90 * math.sqrt(variance_s2) / total
    replay = analysis.replay
    fault_s = unrest * (book.cost_s("page_fault") + book.cost_s("page_release"))
    now = sum(replay.faults)
    fewer, more = (
        max(0.0, faults) * fault_s / total
        for faults in (now - replay.fewest_faults, replay.most_faults - now)
    )
    spells, part = (
        core_speed_samples(book.machine, book.threads),
        kernel_sensitivity_frac(book.machine, book.threads, unrest),
    )
    fast, slow = (
        (quantile(spells.values, 0.05), quantile(spells.values, 0.95)) if spells else (1.0, 1.0)
    )
    faster, slower = part * (1.0 - fast), part * (slow - 1.0)
    return max(0.05, 1.0 - math.hypot(half, fewer, faster)), 1.0 + math.hypot(half, more, slower)

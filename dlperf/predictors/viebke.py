"""Viebke et al. 2019: strategies (a) and (b) as predictors of one worker's step, for any recorded
network.

What the paper takes for one image on one thread is priced here for a step and by layer; the model
over p workers, epochs, validation and tests is :func:`dlperf.models.threads.training_time` with
:meth:`dlperf.models.threads.ImageTimes.of_step`. Validation and tests take the step's forward, the
paper's FProp.

Both rest on one measured point: a measurement of the network (``--point``), or, without one, the
step that ``calibrated`` predicts.

- (a) ``viebke-a``: FLOPs of every op times OperationFactor / s, that one number fitted to the
  point's whole step. The paper's own operation counts are not FLOPs, so its 15 is of no use here.
  The model knows no bandwidth, no dispatch and no page fault: within a step it errs low for small
  and memory-bound layers, and high for the others.
- (b) ``viebke-b``: T_FProp and T_BProp as they are at the point, layer by layer.

A point at another batch size is scaled by images (the optimizer's step is not), and then
``extrapolated``; so is one of another number of threads.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import Item, Prices
from dlperf.core.text import counted
from dlperf.core.trace import Trace
from dlperf.models.threads import seconds_per_operation
from dlperf.ops import counts
from dlperf.predictors.analysis import analyse
from dlperf.predictors.base import op_items, register
from dlperf.predictors.calibrated import Calibrated
from dlperf.predictors.kernels.onednn import block_of
from dlperf.predictors.measured_layers import layer_times_s, whole_s
from dlperf.predictors.page_faults import peak_memory_bytes
from dlperf.predictors.roofline import Roofline

IMAGE_PHASES = ("forward", "backward")
"""The phases whose work grows with the batch."""


@register
@dataclass(frozen=True)
class ViebkeA:
    """Strategy (a): FLOPs times OperationFactor / s.

    Every op with a FLOP formula is ``interpolated`` at the point's own batch size and threads, else
    ``extrapolated``, and bound by ``compute``, the only thing that the model knows. Ops that
    compute nothing (copies) take no time in it; ops without a formula are ``unpriced`` and enter
    with bytes / bandwidth, which the fit leaves out.
    """

    name = "viebke-a"
    evaluates_by_forward = True
    point: Measurement | None = None

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list. Raises DlperfError where the point is of another network, or leaves
        nothing to fit.
        """
        if not trace.ops:
            return Prices(())
        flops, n_bytes = counts.totals(trace)
        unknown = counts.unknown_ops(trace)
        bandwidth = machine.dram_bytes_per_s(threads) if unknown else math.inf
        unpriced = {index: n_bytes[index] / bandwidth for index in unknown}
        if self.point is None:
            prices = Calibrated().price(trace, machine, threads, malloc)
            point_s, phases = math.fsum(item.seconds for item in prices.items), {*prices.phases}
            ratio, source, fitted_to = 1.0, "interpolated", "the step that calibrated predicts"
        else:
            prices = Prices((), peak_memory_bytes=_peak(trace, machine, malloc))
            point_s, phases = whole_s(self.point, trace)
            ratio, source, fitted_to = _scale(self.point, trace, threads, "interpolated")
        scales = {phase: ratio if phase in IMAGE_PHASES else 1.0 for phase in phases}
        weights = [scales.get(op.phase, 0.0) for op in trace.ops]
        each_s = seconds_per_operation(
            point_s,
            math.fsum(count * weight for count, weight in zip(flops, weights)),
            math.fsum(unpriced[index] * weights[index] for index in unknown),
        )
        note = f"{self.name}: OperationFactor / s is {each_s:.4g} s per FLOP, fitted to {fitted_to}"
        indices = range(len(trace.ops))
        items = op_items(
            trace,
            [unpriced.get(index, flops[index] * each_s) for index in indices],
            ["DRAM" if index in unpriced else "compute" for index in indices],
            ["unpriced" if index in unpriced else source for index in indices],
        )
        return replace(
            prices,
            items=tuple(items),
            notes=(note, *prices.notes),
        )


@register
@dataclass(frozen=True)
class ViebkeB:
    """Strategy (b): forward and backward as measured, or as ``calibrated`` predicts them.

    Of a measurement: the layers' times in proportion, so that each phase, and the step, add up to
    what was measured without instruments. ``measured`` at the point's own batch size and threads,
    else ``extrapolated``. A measurement does not say what bounds a layer; `bound` is that of the
    roofline.
    """

    name = "viebke-b"
    evaluates_by_forward = True
    point: Measurement | None = None

    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """The price list. Raises DlperfError where the point is of another network, or a forward
        pass alone for a training step.
        """
        if self.point is None:
            prices = Calibrated().price(trace, machine, threads, malloc)
            return replace(
                prices,
                notes=(
                    f"{self.name}: T_FProp and T_BProp are those that calibrated predicts",
                    *prices.notes,
                ),
            )
        if self.point.inference and not trace.inference:
            raise DlperfError(
                f"{self.name}: the point, {self.point.target}, is a forward pass, which says"
                " nothing of T_BProp; measure without --inference"
            )
        _, phases = whole_s(self.point, trace)
        ratio, source, taken_from = _scale(self.point, trace, threads, "measured")
        bounds = _bounds(trace, machine, threads)
        items = [
            Item(
                layer,
                phase,
                seconds / (ratio if phase in IMAGE_PHASES else 1.0),
                bounds.get((layer, phase), "overhead"),
                source,
                what=phase,
            )
            for layer, phase, seconds in layer_times_s(self.point, trace, phases)
        ]
        return Prices(
            tuple(items),
            notes=(f"{self.name}: T_FProp and T_BProp are those of {taken_from}",),
            peak_memory_bytes=_peak(trace, machine, malloc),
        )


# -- the point -------------------------------------------------------------------------------------


def _scale(point: Measurement, trace: Trace, threads: int, source: str) -> tuple[float, str, str]:
    """The point's images to the trace's, what a price from it may call itself, and what it is in
    words.
    """
    words = (
        f"the measurement of {point.target} at batch size {point.batch_size} with"
        f" {counted(point.threads, 'thread')}"
    )
    if point.inference != trace.inference:
        words += ", its forward pass alone"
    at_home = (
        point.batch_size == trace.batch_size
        and point.threads == threads
        and point.inference == trace.inference
    )
    return point.batch_size / trace.batch_size, source if at_home else "extrapolated", words


def _bounds(trace: Trace, machine: Machine, threads: int) -> dict[tuple[str, str], str]:
    """What bounds most of each layer's time in each phase by the roofline."""
    sums: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for item in Roofline().price(trace, machine, threads).items:
        sums[item.layer, item.phase][item.bound] += item.seconds
    return {index: max(found, key=lambda bound: found[bound]) for index, found in sums.items()}


def _peak(trace: Trace, machine: Machine, malloc: str) -> int:
    return peak_memory_bytes(
        trace, machine, analyse(trace, malloc, block_of(machine.cpu.flags)).allocator
    )

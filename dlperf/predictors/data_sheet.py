"""The data-sheet predictor: time of a step on a device that was not calibrated.

    t(step) = sum over ops of kernel

A kernel that the machine file holds (``dlperf machine import``) has its measured time; one like it
that of its kernel model; any other one that of the device's data sheet
(:mod:`dlperf.predictors.device_kernels`). Kernels run one after another. The host is not priced: it
runs ahead of the device, so Python and dispatch count only where they take longer than the device
does. Views start no kernel. Operands come from the device's memory, as after a kernel that
touched more than the caches hold. Errs low where the host is slower than the device, and high where
operands are still in a cache.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from dlperf.core.blas import one_blas_thread
from dlperf.core.data_sheet import UNMEASURED
from dlperf.core.errors import DlperfError
from dlperf.core.items import Shares
from dlperf.core.machine import Machine
from dlperf.core.prediction import Item, Prices
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.core.variation import Z90
from dlperf.ops import counts
from dlperf.predictors.base import op_items, register
from dlperf.predictors.device_kernels import dtype_of, sheet_needs_s, sheet_of, sheet_s
from dlperf.predictors.kernel_cost_model import (
    KernelCostModel,
    PricedKernel,
    PricedSubKernel,
    cost_model_of,
)
from dlperf.predictors.kernels.description import KernelDescription, stacked

DATA_SHEET = "data-sheet"
"""Name of the predictor, and the source of what stands on the data sheet alone."""
_SPREAD = 0.35
"""Standard deviation of ln t of a kernel by the data sheet: root mean square of ln(predicted /
measured) over 8,509 ReLU calls and convolutions on an NVIDIA A100. All kernels of a step are taken
to err alike.
"""
_ROOFS = "compute", "DRAM"
_STEP_SPREAD = 0.1
"""Standard deviation of ln t between a sum of kernels that are timed one by one and a step."""


@register
class DataSheetPredictor:
    """Data-sheet predictor; see the module."""

    name = DATA_SHEET

    @one_blas_thread
    def price(
        self, trace: Trace, machine: Machine, threads: int, malloc: str = "default"
    ) -> Prices:
        """Priced items of a step. Raises DlperfError for a machine without a data sheet."""
        if machine.data_sheet is None:
            raise DlperfError(
                f"{machine.path or 'machine'}: holds no data sheet; dlperf machine new makes a"
                " machine from one, and the predictor calibrated takes this file"
            )
        # Imported kernels ran on all cores.
        part = min(1.0, threads / machine.threads[0])
        cost_model = cost_model_of(machine, threads) if machine.kernels and part == 1.0 else None
        unknown = frozenset(counts.unknown_ops(trace))
        priced = _price_ops(trace, machine, part, cost_model, unknown)
        items = op_items(
            trace,
            [one.seconds for one in priced],
            [one.bound for one in priced],
            [one.source for one in priced],
            [one.parts for one in priced],
            [one.needs for one in priced],
        )
        low, high = _interval(items, priced, cost_model)
        return Prices(
            tuple(items),
            low_factor=low,
            high_factor=high,
            notes=(*_notes(machine, priced), *_peak_notes(machine, trace)),
        )


class _Priced(NamedTuple):
    """Seconds of an op, what bounds it, where they are from, its needs by the data sheet, and its
    kernel by a model.
    """

    seconds: float
    bound: str
    source: str
    needs_s: Mapping[str, float] = {}
    kernel: PricedSubKernel | None = None

    @property
    def needs(self) -> Shares:
        """Fractions of the time that arithmetic and bytes take at least."""
        known = [(name, self.needs_s.get(name, 0.0)) for name in _ROOFS]
        return tuple((name, min(1.0, need_s / self.seconds)) for name, need_s in known if need_s)

    @property
    def parts(self) -> Shares:
        """The start of a kernel, and what keeps one busy that is bound by its start."""
        start_s = min(self.needs_s.get("overhead", 0.0), self.seconds)
        if not start_s:
            return ()
        if self.bound != "overhead":
            return (("overhead", start_s / self.seconds),)
        busy = max(_ROOFS, key=lambda name: self.needs_s[name])
        return ((busy, 1.0 - start_s / self.seconds),)


def _price_ops(
    trace: Trace,
    machine: Machine,
    part: float,
    cost_model: KernelCostModel | None,
    unknown: frozenset[int],
) -> list[_Priced]:
    """The price of every op of a trace; `part` is the share of a processor's cores."""
    plain = [_without_bias(op) for op in trace.ops]
    modelled: Sequence[PricedKernel | None] = (
        [None] * len(plain)
        if cost_model is None
        else cost_model.modelled([alone for alone, _ in plain])
    )
    found = []
    for index, (op, flops, n_bytes) in enumerate(zip(trace.ops, *counts.totals(trace))):
        if counts.is_view(op) or (not flops and not n_bytes):
            found.append(_Priced(0.0, "overhead", DATA_SHEET))
            continue
        seconds, bound = sheet_s(machine, op, flops, n_bytes, part)
        needs_s = sheet_needs_s(machine, op, flops, n_bytes, part)
        alone, bias_bytes = plain[index]
        bias_s = 0.0
        if bias_bytes:
            bias_s, _ = sheet_s(machine, replace(op, name="aten.add_.Tensor"), 0, bias_bytes)
        exact = None if cost_model is None else machine.exact(alone, cost_model.threads)
        kernel = modelled[index]
        if exact is not None:
            found.append(_Priced(exact.seconds + bias_s, bound, "measured", needs_s))
        elif kernel is not None:
            (inner,) = kernel.sub_kernels
            found.append(_Priced(kernel.seconds + bias_s, bound, kernel.source, needs_s, inner))
        else:
            source = "unpriced" if index in unknown else DATA_SHEET
            found.append(_Priced(seconds, bound, source, needs_s))
    return found


def _without_bias(op: Op) -> tuple[Op, int]:
    """A convolution without its bias, which a kernel of its own adds on an accelerator, and the
    bytes that this one moves; any other operator and 0.
    """
    if op.packet != "aten.convolution" or not isinstance(op.args[2], TensorSpec):
        return op, 0
    moved = 2 * sum(spec.nbytes for spec in op.outputs)
    return replace(op, args=(*op.args[:2], None, *op.args[3:])), moved


def _interval(
    items: list[Item], priced: Sequence[_Priced], cost_model: KernelCostModel | None
) -> tuple[float, float]:
    """Factors of the 90 % interval: what the data sheet prices errs as one, what kernel models
    price by their covariance, and a step differs from the sum of its kernels.
    """
    total_s = math.fsum(item.seconds for item in items)
    if total_s <= 0:
        return 1.0, 1.0
    by_sheet_s = math.fsum(one.seconds for one in priced if one.source in (DATA_SHEET, "unpriced"))
    by_variant: dict[tuple[str, ...], dict[KernelDescription, float]] = defaultdict(
        lambda: defaultdict(float)
    )
    for one in priced:
        if one.kernel is not None:
            seconds = one.seconds * one.kernel.error_factor
            by_variant[one.kernel.variant][one.kernel.description] += seconds
    variance = (_SPREAD * by_sheet_s / total_s) ** 2 + _STEP_SPREAD**2
    for variant, members in by_variant.items():
        assert cost_model is not None
        shares = np.array(list(members.values())) / total_s
        covariance = cost_model.kernel_model(variant).covariance(*stacked(list(members)))
        variance += float(shares @ covariance @ shares)
    half = Z90 * math.sqrt(variance)
    return math.exp(-half), math.exp(half)


def _notes(machine: Machine, priced: Sequence[_Priced]) -> tuple[str, ...]:
    sheet, kernels = sheet_of(machine), [one for one in priced if one.seconds]
    n_known = sum(one.kernel is not None or one.source == "measured" for one in kernels)
    known, model = f"{n_known:,} of {len(kernels):,} kernels stand on", machine.cpu.model
    if machine.mode == UNMEASURED:
        what = "imported kernels and the data sheet" if n_known else "the data sheet"
        first = f"predicted from {what} of {model}, not from a calibration: {known} imported ones"
    else:
        first = f"{known} those timed on {model}, the others on its roofs"
    notes = [first]
    if sheet.kind == "processor":
        notes.append(
            "the host is not priced: Python and dispatch take their time between all kernels, so"
            " steps of short ones err low"
        )
    else:
        notes.append(
            "the host is not priced: where Python and dispatch take longer than the device, the"
            " step takes as long as they do"
        )
        if not sheet.launch_s:
            notes.append(f"no published launch time of {machine.cpu.model}: short kernels err low")
    return tuple(notes)


def _peak_notes(machine: Machine, trace: Trace) -> list[str]:
    """A note where the data sheet has no peak for a dtype that the step computes in."""
    sheet = sheet_of(machine)
    used = {dtype_of(op) for op in trace.ops if counts.op_flops(op)}
    missing = sorted(used - {*sheet.flops_per_s, *sheet.matrix_flops_per_s})
    names = ", ".join(name for name in missing if name.startswith(("float", "bfloat")))
    return [f"no peak for {names} of {machine.cpu.model}: the highest counts"] if names else []

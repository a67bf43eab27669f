"""A predicted step for DistributedDataParallel: computation until each gradient arrives, and DDP's
overhead.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.state import State
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.forecast.loop import accumulation_s
from dlperf.forecast.prediction import Prediction
from dlperf.models.buckets import Gradient, ReducerOptions
from dlperf.models.overlap import Computation
from dlperf.predictors.allocator.policies import policy_of
from dlperf.predictors.calibrated import Calibrated, pause_slowdowns
from dlperf.predictors.kernel_cost_model import KernelCostModel, cost_model_of

DDP_CALL, DDP_SYNC, DDP_HOOK = "ddp_call", "ddp_sync", "ddp_hook"
"""Costs in a machine file: DDP's wrapper around a forward, what a step that synchronises takes
besides, and each of its gradients.
"""
_MEMORY = ("L3", "DRAM", "page-faults")
_PAUSES_S = (0.0, 0.004, 0.008, 0.012, 0.016, 0.032)
"""Pauses that a step is priced with; a longer one counts as the longest, by which a shared cache
has forgotten nearly all that it forgets.
"""


@dataclass(frozen=True)
class Profile:
    """One rank's step at one batch size (of each of the batches, where several are accumulated),
    alone. `computation` includes DDP's wrapper; `step_s` does not.

    `memory_frac` is the share of the backward that waits for memory; `bounds` the seconds of the
    step by what bounds them. `flops` and `memory_bytes` are those of the whole step, all of its
    batches. `pauses` are seconds for which a step stood still, and how many times as long it
    computes then.
    """

    batch_size: int
    step_s: float
    computation: Computation
    low_factor: float
    high_factor: float
    memory_frac: float
    bounds: tuple[tuple[str, float], ...]
    flops: float
    memory_bytes: float
    pauses: tuple[tuple[float, float], ...] = ((0.0, 1.0),)

    def cold_factor(self, waited_s: float) -> float:
        """How many times as long the rank computes that waited for so long in the step: others have
        taken their part of a shared cache.
        """
        pauses_s, factors = zip(*self.pauses)
        return float(np.interp(waited_s, pauses_s, factors))

    @property
    def bound(self) -> str:
        """What bounds the largest share of the step."""
        return max(self.bounds, key=lambda pair: pair[1])[0] if self.bounds else "overhead"


def gradients_of(trace: Trace) -> tuple[Gradient, ...]:
    """The gradients of the trained parameters, in the order of the model's definition.

    Raises DlperfError for a forward pass, for a trace of an older version, and where nothing is
    trained.
    """
    if trace.inference:
        raise DlperfError(
            f"{trace.target}: is a forward pass, which synchronises nothing; record a training step"
        )
    if not trace.parameters and trace.n_parameters:
        raise DlperfError(
            f"{trace.target}: the trace does not say in which order gradients arrive (an older"
            " version made it); record it again"
        )
    found = tuple(
        Gradient(p.spec.numel * p.spec.item_bytes, p.spec.dtype, p.sparse)
        for p in trace.parameters
        if p.trained
    )
    if not found:
        raise DlperfError(
            f"{trace.target}: has no trained parameter, so there is nothing to synchronise; give it"
            " one with requires_grad"
        )
    return found


def arrivals_of(trace: Trace) -> tuple[int, ...]:
    """The indices in :func:`gradients_of` in the order in which gradients arrive, each once."""
    indices = _gradient_indices(trace)
    return tuple(dict.fromkeys(indices[parameter] for parameter, _ in trace.arrivals))


def _gradient_indices(trace: Trace) -> dict[int, int]:
    trained = (index for index, parameter in enumerate(trace.parameters) if parameter.trained)
    return {parameter: index for index, parameter in enumerate(trained)}


def profile_of(prediction: Prediction, options: ReducerOptions) -> Profile:
    """The profile of a predicted step. Items that are no operation (page faults, module calls) go
    to their layer's operations in proportion to their time.

    Raises DlperfError where the predictor gives no whole step.
    """
    step, trace = prediction.step, prediction.trace
    if (
        step.total_s is None
        or step.forward_s is None
        or step.backward_s is None
        or step.optimizer_s is None
    ):
        raise DlperfError(
            f"predictor {prediction.predictor!r} predicts no whole step, so no scaling; use"
            " calibrated or roofline"
        )
    cost_model = cost_model_of(prediction.machine, prediction.threads)
    state = prediction.state
    call_s, hook_s, sync_s = (
        state.interpreter * cost_model.cost_s(what) for what in (DDP_CALL, DDP_HOOK, DDP_SYNC)
    )
    specs = [parameter.spec for parameter in trace.parameters if parameter.trained]
    total_bytes = float(sum(spec.nbytes for spec in specs))
    copy_in, copy_out = _copies_s(cost_model, specs, total_bytes, state)
    more_s = (options.accumulate - 1) * (step.forward_s + step.backward_s + call_s)
    if options.accumulate > 1:
        # the gradients of the first batch are put in place, the others are added
        more_s += (options.accumulate - 1) * accumulation_s(prediction)
    computation = Computation(
        call_s + (step.zero_grad_s or 0.0) + more_s + step.forward_s,
        _arrivals_s(prediction),
        step.backward_s,
        step.optimizer_s,
        tuple(copy_in),
        tuple(0.0 if options.gradient_as_bucket_view else s for s in copy_out),
        hook_s,
        sync_s,
    )
    prices = prediction.prices
    bounds: dict[str, float] = defaultdict(float)
    backward: dict[bool, float] = defaultdict(float)
    for item in prices.items:
        bounds[item.bound] += item.seconds
        if item.phase == "backward":
            backward[item.bound in _MEMORY] += item.seconds
    ops = prediction.ops
    times = np.where(
        ops["phase"].isin(("forward", "backward")), options.accumulate, 1
    )  # what each batch of a step runs anew
    flops, memory_bytes = (float((times * ops[name]).sum()) for name in ("flops", "bytes"))
    return Profile(
        trace.batch_size,
        step.total_s + more_s,
        computation,
        1.0 if prices.low_factor is None else prices.low_factor,
        1.0 if prices.high_factor is None else prices.high_factor,
        backward[True] / (math.fsum(backward.values()) or 1.0),
        tuple(sorted(bounds.items())),
        flops,
        memory_bytes,
        _pauses_of(prediction),
    )


def _pauses_of(prediction: Prediction) -> tuple[tuple[float, float], ...]:
    """Pauses and their factors; none for predictors that know no caches."""
    if prediction.predictor != Calibrated.name:
        return ((0.0, 1.0),)
    factors = pause_slowdowns(
        prediction.trace,
        prediction.machine,
        prediction.threads,
        policy_of(prediction.malloc).name,
        _PAUSES_S,
    )
    return tuple(zip(_PAUSES_S, factors))


def _arrivals_s(prediction: Prediction) -> tuple[tuple[float, int], ...]:
    """Seconds of the backward's computing after which each gradient has arrived, in order."""
    trace = prediction.trace
    items = [item for item in prediction.prices.items if item.phase == "backward"]
    own = np.zeros(len(trace.ops) + 1)
    for item in items:
        own[item.op] += item.seconds if item.op >= 0 else 0.0
    by_layer: dict[str, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "backward":
            for layer, _ in op.layer_shares:
                by_layer[layer].append(index)
    spread, start_s = own.copy(), 0.0
    for item in (item for item in items if item.op < 0):
        ops = by_layer.get(item.layer, [])
        total_s = own[ops].sum()
        if not ops or item.what == "backward call":
            start_s += item.seconds
        else:
            spread[ops] += item.seconds * (own[ops] / total_s if total_s > 0 else 1.0 / len(ops))
    until = start_s + np.concatenate(([0.0], np.cumsum(spread)))
    indices = _gradient_indices(trace)
    # where a parameter's gradient arrives in parts (recomputation), the last one counts
    found = {indices[parameter]: float(until[n_ops]) for parameter, n_ops in trace.arrivals}
    return tuple(sorted(((at, index) for index, at in found.items()), key=lambda pair: pair[0]))


def _copies_s(
    cost_model: KernelCostModel, specs: Sequence[TensorSpec], total_bytes: float, state: State
) -> tuple[list[float], list[float]]:
    """Seconds of dividing each gradient into its bucket and of copying the sum back.

    Kernels with warm caches, plus the cache-miss penalty: on the way in of the bucket, last touched
    a step ago; on the way back of both sides, after all other gradients.
    """

    @functools.cache
    def copies_s(flat: TensorSpec) -> tuple[float, float]:
        distances = 2.0 * flat.nbytes, 2.0 * flat.nbytes + 2.0 * total_bytes
        near, far = (np.array([distance]) for distance in distances)
        extra_s = flat.nbytes * float(cost_model.caches.miss_s_per_byte(far, near)[0])
        divide_s = _kernel_s(cost_model, Op("aten.mul.Tensor", (flat, 0.5), outputs=(flat,)))
        copy_s = _kernel_s(cost_model, Op("aten.copy_.default", (flat, flat), outputs=(flat,)))
        slowdown, far_slowdown = (
            state.factor(cost_model.machine.level_of(distance)) for distance in distances
        )
        extra_s *= far_slowdown
        return slowdown * divide_s + extra_s, slowdown * copy_s + 2 * extra_s

    both = [copies_s(TensorSpec.contiguous(spec.numel, dtype=spec.dtype)) for spec in specs]
    return [divide_s for divide_s, _ in both], [copy_s for _, copy_s in both]


def _kernel_s(cost_model: KernelCostModel, op: Op) -> float:
    priced = cost_model.kernel_s(op)
    n_bytes = 2.0 * op.outputs[0].nbytes
    return (
        priced[0]
        if priced is not None
        else n_bytes * float(cost_model.caches.seconds_per_byte(np.array([n_bytes]))[0])
        + cost_model.cost_s("native_call")
    )


def buffer_copies_s(prediction: Prediction, n_bytes: float) -> float:
    """Seconds to put buffers into one vector for their broadcast and back: each byte is read and
    written twice.
    """
    bytes_per_s = prediction.machine.dram_bytes_per_s(prediction.threads)
    return prediction.state.dram * 4 * n_bytes / bytes_per_s


def between(profiles: Sequence[Profile], batch_size: int) -> Profile:
    """The profile at a batch size: recorded there, or linear between the two recorded around it.
    Raises DlperfError outside the recorded ones.
    """
    ordered = sorted(profiles, key=lambda profile: profile.batch_size)
    low = next((p for p in reversed(ordered) if p.batch_size <= batch_size), None)
    high = next((p for p in ordered if p.batch_size >= batch_size), None)
    if low is None or high is None:
        recorded = ", ".join(str(profile.batch_size) for profile in ordered)
        raise DlperfError(
            f"batch size {batch_size} lies outside of the recorded ones ({recorded}); record the"
            " step at it, too"
        )
    if low is high:
        return low
    t = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)

    def mixed(a: Any, b: Any, *names: str) -> dict[str, Any]:
        return {name: (1 - t) * getattr(a, name) + t * getattr(b, name) for name in names}

    at_high = {index: at for at, index in high.computation.arrivals}
    arrivals = [
        ((1 - t) * at + t * at_high.get(index, at), index) for at, index in low.computation.arrivals
    ]
    ends = dict(high.bounds)
    return replace(
        low if t < 0.5 else high,
        batch_size=batch_size,
        computation=replace(
            low.computation,
            arrivals=tuple(sorted(arrivals, key=lambda pair: pair[0])),
            **mixed(low.computation, high.computation, "before_s", "backward_s", "after_s"),
        ),
        bounds=tuple((name, (1 - t) * a + t * ends.get(name, 0.0)) for name, a in low.bounds),
        **mixed(low, high, "step_s", "memory_frac", "flops", "memory_bytes"),
    )

"""A predicted step for DistributedDataParallel: computation until each gradient arrives, and DDP's
overhead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.prediction import Item
from dlperf.core.trace import Op, TensorSpec, Trace
from dlperf.forecast.loop import accumulation_s
from dlperf.forecast.prediction import Prediction
from dlperf.models.buckets import Gradient, ReducerOptions
from dlperf.models.overlap import Computation
from dlperf.predictors.allocator.simulation import policy_of
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
    places = _places(trace)
    return tuple(dict.fromkeys(places[index] for index, _ in trace.arrivals))


def _places(trace: Trace) -> dict[int, int]:
    trained = [index for index, parameter in enumerate(trace.parameters) if parameter.trained]
    return {index: place for place, index in enumerate(trained)}


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
    cost_model, slowdown = (
        cost_model_of(prediction.machine, prediction.threads),
        prediction.machine.contention_slowdown(prediction.threads),
    )
    arrivals = _arrivals_s(prediction)
    specs = [parameter.spec for parameter in trace.parameters if parameter.trained]
    total_bytes = float(sum(spec.nbytes for spec in specs))
    copy_in, copy_out = _copies_s(cost_model, specs, total_bytes)
    more_s = (options.accumulate - 1) * (
        step.forward_s + step.backward_s + slowdown * cost_model.cost_s(DDP_CALL)
    )
    if (
        options.accumulate > 1
    ):  # the gradients of the first batch are put in place, the others are added
        more_s += (options.accumulate - 1) * accumulation_s(prediction)
    zero_s = step.zero_grad_s or 0.0
    computation = Computation(
        slowdown * cost_model.cost_s(DDP_CALL) + zero_s + more_s + step.forward_s,
        arrivals,
        step.backward_s,
        step.optimizer_s,
        tuple(slowdown * s for s in copy_in),
        tuple(0.0 if options.gradient_as_bucket_view else slowdown * s for s in copy_out),
        slowdown * cost_model.cost_s(DDP_HOOK),
        slowdown * cost_model.cost_s(DDP_SYNC),
    )
    bounds: dict[str, float] = defaultdict(float)
    backward: dict[bool, float] = defaultdict(float)
    for item in prediction.prices.items:
        bounds[item.bound] += item.seconds
        if item.phase == "backward":
            backward[item.bound in _MEMORY] += item.seconds
    low, high = prediction.prices.low_factor, prediction.prices.high_factor
    ops = prediction.ops
    times = np.where(
        ops["phase"].isin(("forward", "backward")), options.accumulate, 1
    )  # what each batch of a step runs anew
    flops, memory_bytes = (float((times * ops[name]).sum()) for name in ("flops", "bytes"))
    return Profile(
        trace.batch_size,
        step.total_s + more_s,
        computation,
        1.0 if low is None else low,
        1.0 if high is None else high,
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
    own = np.zeros(len(trace.ops) + 1)
    loose: list[Item] = []
    for item in prediction.prices.items:
        if item.phase != "backward":
            continue
        if item.op >= 0:
            own[item.op] += item.seconds
        else:
            loose.append(item)
    by_layer: dict[str, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        if op.phase == "backward":
            for layer, _ in op.shares or ((op.layer, 1.0),):
                by_layer[layer].append(index)
    spread, start_s = own.copy(), 0.0
    for item in loose:
        places = by_layer.get(item.layer, [])
        weights = own[places]
        if not places or item.what == "backward call":
            start_s += item.seconds
        else:
            spread[places] += item.seconds * (
                weights / weights.sum() if weights.sum() > 0 else 1.0 / len(places)
            )
    until = start_s + np.concatenate(([0.0], np.cumsum(spread)))
    places_of = _places(trace)
    found: dict[int, float] = {}
    for (
        index,
        n_ops,
    ) in (
        trace.arrivals
    ):  # where a parameter's gradient arrives in parts (recomputation), the last one counts
        found[places_of[index]] = float(until[n_ops])
    return tuple(sorted(((at, place) for place, at in found.items()), key=lambda pair: pair[0]))


def _copies_s(
    cost_model: KernelCostModel, specs: Sequence[TensorSpec], total_bytes: float
) -> tuple[list[float], list[float]]:
    """Seconds of dividing each gradient into its bucket and of copying the sum back.

    Kernels with warm caches, plus the cache-miss penalty: on the way in of the bucket, last touched
    a step ago; on the way back of both sides, after all other gradients.
    """
    in_s, out_s = [], []
    known: dict[TensorSpec, tuple[float, float]] = {}
    for spec in specs:
        flat = TensorSpec.contiguous(spec.numel, dtype=spec.dtype)
        if flat not in known:
            near, far = cost_model.caches.miss_s_per_byte(
                "aten.copy_", np.array([2.0 * flat.nbytes, 2.0 * flat.nbytes + 2.0 * total_bytes])
            )
            extra_s = flat.nbytes * max(0.0, float(far - near))
            divide = _kernel_s(cost_model, Op("aten.mul.Tensor", (flat, 0.5), outputs=(flat,)))
            copy = _kernel_s(cost_model, Op("aten.copy_.default", (flat, flat), outputs=(flat,)))
            known[flat] = divide + extra_s, copy + 2 * extra_s
        divide_s, copy_s = known[flat]
        in_s.append(divide_s)
        out_s.append(copy_s)
    return in_s, out_s


def _kernel_s(cost_model: KernelCostModel, op: Op) -> float:
    priced = cost_model.kernel_s(op)
    n_bytes = 2.0 * op.outputs[0].nbytes
    return (
        priced[0]
        if priced is not None
        else n_bytes * float(cost_model.caches.seconds_per_byte(np.array([n_bytes]))[0])
        + cost_model.cost_s("native_call")
    )


def buffer_copies_s(machine: Machine, threads: int, n_bytes: float) -> float:
    """Seconds to put buffers into one vector for their broadcast and back: each byte is read and
    written twice.
    """
    return machine.contention_slowdown(threads) * 4 * n_bytes / machine.dram_bytes_per_s(threads)


def between(profiles: Sequence[Profile], batch_size: int) -> Profile:
    """The profile at a batch size: recorded there, or linear between the two recorded around it.
    Raises DlperfError outside the recorded ones.
    """
    ordered = sorted(profiles, key=lambda profile: profile.batch_size)
    for profile in ordered:
        if profile.batch_size == batch_size:
            return profile
    if not ordered or not ordered[0].batch_size < batch_size < ordered[-1].batch_size:
        recorded = ", ".join(str(profile.batch_size) for profile in ordered)
        raise DlperfError(
            f"batch size {batch_size} lies outside of the recorded ones ({recorded}); record the"
            " step at it, too"
        )
    high = next(profile for profile in ordered if profile.batch_size > batch_size)
    low = next(profile for profile in reversed(ordered) if profile.batch_size < batch_size)
    t = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)

    def mix(a: float, b: float) -> float:
        return (1 - t) * a + t * b

    nearest = low if t < 0.5 else high
    ends = dict(high.bounds)
    return replace(
        nearest,
        batch_size=batch_size,
        step_s=mix(low.step_s, high.step_s),
        computation=_mixed(low.computation, high.computation, t),
        bounds=tuple((name, mix(value, ends.get(name, 0.0))) for name, value in low.bounds),
        memory_frac=mix(low.memory_frac, high.memory_frac),
        flops=mix(low.flops, high.flops),
        memory_bytes=mix(low.memory_bytes, high.memory_bytes),
    )


def _mixed(low: Computation, high: Computation, t: float) -> Computation:
    at_high = {index: at for at, index in high.arrivals}
    arrivals = tuple(
        ((1 - t) * at + t * at_high.get(index, at), index) for at, index in low.arrivals
    )
    return replace(
        low,
        before_s=(1 - t) * low.before_s + t * high.before_s,
        backward_s=(1 - t) * low.backward_s + t * high.backward_s,
        after_s=(1 - t) * low.after_s + t * high.after_s,
        arrivals=tuple(sorted(arrivals, key=lambda pair: pair[0])),
    )

"""Measure a training step: the whole step without instruments, then its layers with them, then the
whole step again.

The step is zero_grad, forward with loss, backward, optimizer; its median over undisturbed steps is
what a prediction is held against. The layers come from :mod:`dlperf.profiler.probe`, the
optimizer's division over them from :mod:`dlperf.profiler.optimizer_shares`. The model, the
optimizer and the random states are afterwards what they were before, to the bit
(:mod:`dlperf.profiler.snapshot`).
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from dlperf.core import host
from dlperf.core.clock import SLOW, Clock, CoreSpeed, Samples, minor_faults, undisturbed
from dlperf.core.errors import DlperfError, WorkFailed, check_count, check_type
from dlperf.core.host import usual_threads_of_file
from dlperf.core.machine import default_path
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.trace import LOSS
from dlperf.profiler.optimizer_shares import (
    OptimizerShares,
    parameter_owners,
    shares_by_bytes,
    shares_by_timing,
)
from dlperf.profiler.probe import OUTSIDE, LayerProbe, StepTimes, measure_hook_overhead
from dlperf.profiler.snapshot import Snapshot
from dlperf.recorder.targets import check_device

if TYPE_CHECKING:
    from dlperf.recorder.targets import Target

_PUT_BACK_EVERY = 25  # steps; a network that has learnt its one batch has gradients of denormal numbers, which slow kernels tens of times
_MOST_STEPS = 20_000
_BUSY_FRAC = 0.2
_SETTLE_S = 0.5
_MOST_COLD = 2.0
_SAME_FAULTS = 0.1
"""Page faults a step of two passes that differ by less, of the larger number, leave the passes'
difference to the machine.
"""
_APART_FRAC = 0.15


@dataclass(frozen=True)
class _Timed:
    """One uninstrumented step: seconds by phase, page faults, and whether the core was lost
    meanwhile.
    """

    seconds: Mapping[str, float]
    faults: int
    disturbed: bool


class _Step:
    """A model, its inputs, loss and optimizer, ready to be stepped with or without instruments."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        loss: Callable[[Any], Any],
        optimizer: Any,
        inference: bool,
        clock: Clock,
    ) -> None:
        self.model, self.loss, self.optimizer, self.inference, self.clock = (
            model,
            loss,
            optimizer,
            inference,
            clock,
        )
        self._args: Sequence[Any] = (
            ()
            if isinstance(inputs, Mapping)
            else tuple(inputs)
            if isinstance(inputs, (tuple, list))
            else (inputs,)
        )
        self._kwargs: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}

    def _now(self) -> float:
        if self.clock.synchronize is not None:
            self.clock.synchronize()
        return self.clock.now()

    def plain(self) -> _Timed:
        """A step with nothing but time stamps between its phases."""
        now, switches = self._now, self.clock.switches
        faults, before = minor_faults(), switches()
        t0 = now()
        if self.inference:
            output = self.model(*self._args, **self._kwargs)
            t1 = now()
            seconds = {"forward": t1 - t0, "total": t1 - t0}
            del output
        else:
            self.optimizer.zero_grad()
            t1 = now()
            output = self.model(*self._args, **self._kwargs)
            scalar = self.loss(output)
            t2 = now()
            scalar.backward()
            t3 = now()
            self.optimizer.step()
            t4 = now()
            seconds = {
                "zero_grad": t1 - t0,
                "forward": t2 - t1,
                "backward": t3 - t2,
                "optimizer": t4 - t3,
                "total": t4 - t0,
            }
        return _Timed(seconds, minor_faults() - faults, switches() != before)

    def check(self) -> None:
        """A first step that looks at what it is given. Raises DlperfError where the loss is no
        scalar that can be differentiated.
        """
        output = self.model(*self._args, **self._kwargs)
        if self.inference:
            return
        scalar = self.loss(output)
        if not isinstance(scalar, torch.Tensor) or scalar.numel() != 1:
            what = (
                f"a tensor of shape {tuple(scalar.shape)}"
                if isinstance(scalar, torch.Tensor)
                else type(scalar).__name__
            )
            raise DlperfError(f"the loss is {what}; it must be a scalar tensor")
        if not scalar.requires_grad:
            raise DlperfError(
                "the loss does not depend on anything that requires grad; measure with inference,"
                " or unfreeze parameters"
            )

    def layered(self, probe: LayerProbe) -> StepTimes:
        """A step whose forward and backward go through the probe's hooks."""
        if self.inference:
            probe.start()
            output = self.model(*self._args, **self._kwargs)
            probe.stop()
            del output
            return probe.finish()
        self.optimizer.zero_grad()
        probe.start()
        output = self.model(*self._args, **self._kwargs)
        scalar = self.loss(output)
        scalar.backward()
        probe.stop()
        self.optimizer.step()
        # tensors are freed in the same order as in plain(), else malloc's heap would be in another
        # state
        return probe.finish()


def default_loss(output: Any) -> torch.Tensor:
    """The mean of the output; of several floating-point tensors the sum of their means."""
    means = [
        tensor.mean()
        for tensor in pytree.tree_leaves(output)
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point()
    ]
    if not means:
        raise DlperfError(
            "the model returns no floating-point tensor to take a mean of; give a loss"
        )
    return torch.stack(means).sum() if len(means) > 1 else means[0]


def measure(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Any] | None = None,
    optimizer: Any = None,
    inference: bool = False,
    seconds: float = 4.0,
    target: str = "",
    batch_size: int | None = None,
    clock: Clock = Clock(),
    with_layers: bool = True,
    with_trace: bool = True,
    threads: int | None = None,
) -> Measurement:
    """Time one training step of a model, or its forward, as a whole and, unless `with_layers` is
    false, layer by layer.

    `inputs` is a tuple of positional or a dict of keyword arguments; `loss` maps the output to a
    scalar (default: its mean), `optimizer` defaults to SGD(lr=0.01). `seconds` is what the
    measuring takes for steps that are short beside it; a few steps of each kind are always taken.
    The samples are of steps (layers: summed over a layer's calls in a step), those during which the
    core was lost are dropped (:func:`dlperf.core.clock.undisturbed`), and the hooks' own cost is
    subtracted from the layers. With `with_trace` the step is recorded afterwards, under fake
    tensors, into the measurement's trace; where that fails, a note contains the reason. Rows of
    layers add up to the step less zero_grad, but for noise and for what overlaps with the clock.

    `threads` is torch's thread count meanwhile; by default the one that :func:`dlperf.predict`
    takes with this machine's file, torch's own without a file. Parameters, buffers, gradients,
    optimizer state, random states, flags and attributes are afterwards as before, the thread count
    too.

    Raises DlperfError for an argument of another type, where there is nothing to train or the loss
    is no scalar, WorkFailed where the model raises.
    """
    _check_arguments(model, inputs, loss, optimizer, seconds, target)
    if batch_size is None:
        batch_size = batch_size_of(inputs)
    check_count("batch_size", batch_size)
    if threads is None:
        threads = usual_threads_of_file(default_path())
    check_count("threads", threads)
    check_device(target or type(model).__name__, model, inputs)
    if any(
        leaf.device.type == "meta"
        for leaf in (*model.parameters(), *pytree.tree_leaves(inputs))
        if isinstance(leaf, torch.Tensor)
    ):
        raise DlperfError(
            f"{target or type(model).__name__} lies on the meta device, which has no data to"
            " compute with; build it on the CPU to measure it"
        )
    if not inference:
        _check_trainable(model, optimizer)
    loss, own_optimizer = loss or default_loss, optimizer
    snapshot = Snapshot(model, optimizer, loss, inputs)
    try:
        if model.training == inference:
            model.train(not inference)
        if optimizer is None and not inference:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            snapshot.adopt(optimizer)
        step = _Step(model, inputs, loss, optimizer, inference, clock)
        with (
            _threads(threads),
            torch.set_grad_enabled(not inference),
            _failures(target or type(model).__name__),
        ):
            found = (_measure if with_layers else _measure_whole)(
                step, snapshot, seconds, target or type(model).__name__, batch_size
            )
    finally:
        snapshot.restore()
    return _with_trace(found, model, inputs, loss, own_optimizer) if with_trace else found


def _with_trace(
    found: Measurement, model: nn.Module, inputs: Any, loss: Callable[[Any], Any], optimizer: Any
) -> Measurement:
    """The measurement with the trace of its step; with a note where the step cannot be recorded."""
    from dlperf.recorder.recording import record  # here: a wrapped script must not wait for it

    try:
        trace = record(
            model,
            inputs,
            loss=loss,
            optimizer=optimizer,
            inference=found.inference,
            target=found.target,
            batch_size=found.batch_size,
        )
    except DlperfError as error:
        return replace(found, notes=(*found.notes, f"the measurement contains no trace: {error}"))
    return replace(found, trace=trace)


def measure_target(
    target: Target, *, seconds: float = 4.0, with_layers: bool = True, with_trace: bool = False
) -> Measurement:
    """Build a target on real tensors and measure it; see :func:`measure`.

    The core's speed (:class:`dlperf.core.clock.CoreSpeed`) is looked at around every step, and a note
    says so where it was slow. Steps on a slow core count like all others: who trains there sees
    them.
    """
    speed = CoreSpeed()
    speed.settle(_SETTLE_S)

    def switches() -> int:
        speed.sample()
        return speed.switches()

    built = target.build()
    found = measure(
        built.model,
        built.inputs,
        loss=built.loss,
        optimizer=built.optimizer,
        inference=target.inference,
        seconds=seconds,
        target=target.spec,
        batch_size=target.batch_size,
        with_layers=with_layers,
        with_trace=with_trace,
        clock=Clock(speed.now, switches),
        threads=torch.get_num_threads(),
    )
    ratio = speed.mean_s / speed.best_s
    slow = (
        (
            (
                f"the core took {ratio:.2f} times its best for a fixed piece of work, on average:"
                " others used it, too"
            ),
        )
        if ratio > SLOW
        else ()
    )
    return replace(found, noise={**found.noise, "core_speed": ratio}, notes=(*found.notes, *slow))


def batch_size_of(inputs: Any) -> int:
    """The first dimension of the first tensor that has one; 1 where there is none."""
    for leaf in pytree.tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0]:
            return int(leaf.shape[0])
    return 1


def _check_arguments(
    model: object, inputs: object, loss: object, optimizer: object, seconds: object, target: object
) -> None:
    """What would otherwise fail somewhere inside, or be blamed on the model."""
    check_type("measure", "model", model, nn.Module, "an instance, not its class or its name")
    check_type("measure", "target", target, str, "a name for reports")
    if not isinstance(inputs, (torch.Tensor, tuple, list, Mapping)):
        what = "None" if inputs is None else f"of type {type(inputs).__name__}"
        raise DlperfError(
            f"measure: the inputs are {what}; expected a tuple of positional or a dict of keyword"
            " arguments"
        )
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise DlperfError(
            f"seconds is {seconds!r:.60} (of type {type(seconds).__name__}); it must be a number of"
            " more than 0"
        )
    if not 0 < float(seconds) < math.inf:
        raise DlperfError(f"seconds is {seconds}; it must be more than 0 and finite")
    if loss is not None and not callable(loss):
        raise DlperfError(
            f"measure: the loss is of type {type(loss).__name__}; expected a function from the"
            " model's output to a scalar tensor"
        )
    if optimizer is not None and (
        isinstance(optimizer, type)
        or not all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad"))
    ):
        what = (
            f"the class {optimizer.__name__}"
            if isinstance(optimizer, type)
            else f"of type {type(optimizer).__name__}"
        )
        raise DlperfError(
            f"measure: the optimizer is {what}; expected an optimizer with step and zero_grad, such"
            " as torch.optim.SGD(model.parameters())"
        )


def _check_trainable(model: nn.Module, optimizer: Any) -> None:
    if any(is_lazy(parameter) for parameter in model.parameters()):
        raise DlperfError(
            f"{type(model).__name__} has lazy parameters; call it once on a batch first"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise DlperfError(
            f"{type(model).__name__} has no parameter that requires grad; measure its inference, or"
            " unfreeze some"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise DlperfError(
            "LBFGS steps with a closure, which holds several forward and backward passes; choose an"
            " optimizer that steps without one"
        )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch computes with `count` threads."""
    own = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(own)


@contextlib.contextmanager
def _failures(target: str) -> Iterator[None]:
    try:
        yield
    except DlperfError:
        raise
    except Exception as error:
        raise WorkFailed(f"{target}: {type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says anything."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The probe's own lists would bring collections on that the user's steps do not have."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _measure_whole(
    step: _Step, snapshot: Snapshot, seconds: float, target: str, batch_size: int
) -> Measurement:
    """The step alone, without instruments: a fifth of the time settles it, the rest is counted."""
    step.check()
    for _ in range(3):
        step.plain()
    snapshot.settle()
    _repeat(step.plain, 0.2 * seconds, 3, snapshot, step.clock)
    snapshot.put_back()
    step.plain()
    timed = _repeat(step.plain, 0.8 * seconds, 8, snapshot, step.clock)
    phases = {
        name: undisturbed([(t.seconds[name], t.disturbed) for t in timed])
        for name in timed[0].seconds
    }
    noise = {
        "steps": float(len(timed)),
        "page_faults_per_step": float(median(t.faults for t in timed)),
        "spread_frac": phases["total"].spread_frac,
    }
    return Measurement(
        target=target,
        batch_size=batch_size,
        threads=torch.get_num_threads(),
        step=phases,
        layers=(),
        inference=step.inference,
        noise=noise,
        versions=host.versions(),
        machine=host.this_cpu().model,
    )


def _measure(
    step: _Step, snapshot: Snapshot, seconds: float, target: str, batch_size: int
) -> Measurement:
    clock = step.clock
    step.check()
    for _ in range(3):
        step.plain()
    snapshot.settle()
    _repeat(step.plain, 0.12 * seconds, 3, snapshot, clock)
    snapshot.put_back()
    step.plain()
    timed = _repeat(step.plain, 0.35 * seconds, 8, snapshot, clock)
    costs = measure_hook_overhead(clock)
    probe = LayerProbe(step.model, clock, costs)

    def pair() -> tuple[_Timed, StepTimes]:
        # side by side, so that what the hooks take in this very step shows in the difference
        plain = step.plain()
        with probe:
            return plain, step.layered(probe)

    snapshot.put_back()
    with _no_garbage_collection():
        pair()
        pairs = _repeat(pair, 0.35 * seconds, 6, snapshot, clock)
    layered = [times for _, times in pairs]
    factors = cost_factors(
        [
            (plain.seconds["forward"], plain.seconds.get("backward", 0.0), times)
            for plain, times in pairs
        ]
    )
    shares = (
        OptimizerShares({}) if step.inference else _optimizer_shares(step, snapshot, 0.05 * seconds)
    )
    snapshot.put_back()
    step.plain()
    again = _repeat(step.plain, 0.18 * seconds, 4, snapshot, clock)

    phases = {
        name: undisturbed([(t.seconds[name], t.disturbed) for t in timed])
        for name in timed[0].seconds
    }
    layers, notes = layer_rows(
        probe, layered, phases.get("optimizer"), shares, inference=step.inference, factors=factors
    )
    layered_faults, plain_faults = (
        median(plain.faults for plain, _ in pairs),
        median(times.faults for times in timed),
    )
    n_disturbed = sum(t.disturbed for t in timed)
    if n_disturbed > _BUSY_FRAC * len(timed):
        notes.append(
            f"the machine was busy: {n_disturbed} of {len(timed)} steps lost their core to others"
        )
    totals = [t.seconds["total"] for t in timed]
    third = max(1, len(totals) // 3)
    expected_s = phases["total"].median - (
        phases["zero_grad"].median if "zero_grad" in phases else 0.0
    )
    sum_frac = _ratio(sum_of_rows_s(layers), expected_s)
    if abs(sum_frac - 1) > _APART_FRAC:
        notes.append(
            f"the layers add up to {100 * sum_frac:.0f} % of the step:"
            f" {_why_apart(layered_faults, plain_faults)}"
        )
    noise = {
        "steps": float(len(timed)),
        "layer_steps": float(len(layered)),
        "disturbed_frac": n_disturbed / len(timed),
        "page_faults_per_step": float(plain_faults),
        "hook_inside_s": factors[0] * costs.inside_s,
        "hook_outside_s": factors[0] * costs.outside_s,
        "prehook_s": factors[1] * costs.node_s,
        "spread_frac": phases["total"].spread_frac,
        "drift_frac": _ratio(median(totals[-third:]), median(totals[:third])) - 1,
        "layer_sum_frac": sum_frac,
        "page_faults_per_layer_step": float(layered_faults),
    }
    return Measurement(
        target=target,
        batch_size=batch_size,
        threads=torch.get_num_threads(),
        step=phases,
        layers=layers,
        inference=step.inference,
        repeat=undisturbed([(t.seconds["total"], t.disturbed) for t in again]),
        noise=noise,
        notes=tuple(notes),
        versions=host.versions(),
        machine=host.this_cpu().model,
    )


def _why_apart(layered_faults: float, plain_faults: float) -> str:
    """What set the pass over the layers and the one over whole steps apart, by the page faults a
    step of each.

    >>> _why_apart(147, 148)
    'the machine changed its speed between the two passes'
    """
    if abs(layered_faults - plain_faults) <= _SAME_FAULTS * max(layered_faults, plain_faults):
        return "the machine changed its speed between the two passes"
    states = (
        f"({layered_faults:.0f} page faults a step in the layers' pass, {plain_faults:.0f} in the"
        " step's)"
    )
    return f"the two passes saw the memory allocator in different states {states}"


def _ratio(value: float, base: float) -> float:
    return value / base if base else 1.0


def sum_of_rows_s(layers: Sequence[LayerTimes]) -> float:
    """The rows' medians of all phases, added up; what could not be attributed counts as nothing."""
    return sum(
        samples.median
        for row in layers
        for samples in (row.forward, row.backward, row.optimizer)
        if samples is not None
    )


def _repeat(
    once: Callable[[], Any], seconds: float, least: int, snapshot: Snapshot, clock: Clock
) -> list[Any]:
    taken: list[Any] = []
    begin = clock.now()
    while len(taken) < least or (clock.now() - begin < seconds and len(taken) < _MOST_STEPS):
        if taken and len(taken) % _PUT_BACK_EVERY == 0:
            snapshot.put_back()
            once()  # the first step after the copies finds cold caches; it is not kept
        taken.append(once())
    return taken


def _optimizer_shares(step: _Step, snapshot: Snapshot, seconds: float) -> OptimizerShares:
    owners = parameter_owners(step.model)
    if not hasattr(step.optimizer, "param_groups"):
        return OptimizerShares(
            {},
            f"{type(step.optimizer).__name__} does not say which parameters it steps: its time"
            " stands under no layer",
        )
    snapshot.put_back()
    step.plain()  # leaves gradients behind
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return shares_by_bytes(
            step.optimizer, owners
        )  # the step may hold collectives, which all ranks would have to join
    return shares_by_timing(step.optimizer, owners, step.clock, seconds)


def cost_factors(pairs: Sequence[tuple[float, float, StepTimes]]) -> tuple[float, float]:
    """How many times their calibrated cost the hooks take in this step, in the forward and in the
    backward, between 1 and 2.

    The calibration runs with warm caches; after a large kernel the hooks' code is cold. `pairs`
    hold the forward and the backward of an uninstrumented step and the instrumented one beside it;
    their difference is what the hooks took. Where noise hides it, the hooks are too small to matter
    and the calibrated cost (1) stands.
    """
    factors = []
    for place, name in ((0, "forward"), (1, "backward")):
        costs = [sum(getattr(pair[2], f"{name}_cost").values()) for pair in pairs]
        extra = [
            sum((getattr(pair[2], name) or {}).values()) - float(pair[place])  # type: ignore[arg-type]
            for pair in pairs
        ]
        cost_s = median(costs) if costs else 0.0
        factors.append(min(_MOST_COLD, max(1.0, median(extra) / cost_s)) if cost_s > 0 else 1.0)
    return factors[0], factors[1]


def layer_rows(
    probe: LayerProbe,
    steps: Sequence[StepTimes],
    optimizer: Samples | None,
    shares: OptimizerShares,
    *,
    inference: bool = False,
    n_passes: int = 1,
    factors: tuple[float, float] = (1.0, 1.0),
) -> tuple[tuple[LayerTimes, ...], list[str]]:
    """One row a module that did work, in the order of first execution, the loss last; and what is
    to be said about them.

    `optimizer` are the samples of the whole optimizer step, divided by `shares`. `n_passes`:
    forward passes that each of `steps` holds; the rows are of one. `factors`: see
    :func:`cost_factors`.
    """
    notes = [] if shares.note is None else [shares.note]
    order = dict.fromkeys(index for times in steps for index in times.forward)
    order.update(dict.fromkeys(index for times in steps for index in times.backward or ()))
    order.update(dict.fromkeys(shares.fractions))
    with_backward = not inference and all(times.backward is not None for times in steps)
    if not inference and not with_backward:
        notes.append("the backward could not be attributed to layers")
    places = [index for index in order if index != OUTSIDE] + (
        [] if inference or OUTSIDE not in order else [OUTSIDE]
    )
    rows = []
    for index in places:
        forward = undisturbed(
            [
                (times.net_forward_s(index, factors[0]) / n_passes, times.forward_disturbed)
                for times in steps
            ]
        )
        backward = spent = None
        if with_backward:
            backward = undisturbed(
                [
                    (times.net_backward_s(index, factors[1]) / n_passes, times.backward_disturbed)
                    for times in steps
                ]
            )
        if optimizer is not None and shares.fractions:
            share = shares.fractions.get(index, 0.0)
            spent = Samples(
                tuple(share * value for value in optimizer.values), optimizer.n_disturbed
            )
        name, kind = (
            (LOSS, "Loss") if index == OUTSIDE else (probe.names[index], probe.types[index])
        )
        rows.append(LayerTimes(name, kind, forward, backward, spent))
    return tuple(rows), notes

"""Measures a training step: the whole step without hooks, its layers with hooks, the whole again.

The step is zero_grad, forward with loss, backward, optimizer. The median of undisturbed steps is
the reference for a prediction. :mod:`dlperf.profiler.probe` times the layers,
:mod:`dlperf.profiler.optimizer_shares` divides the optimizer's time over them. Model, optimizer and
random states are restored to the bit (:mod:`dlperf.profiler.snapshot`).
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dlperf.core import host
from dlperf.core.clock import SLOW, Clock, CoreSpeed, minor_faults, undisturbed
from dlperf.core.device_clock import seconds_of, stamper
from dlperf.core.errors import DlperfError, WorkFailed, check_count, check_type, one_line
from dlperf.core.host import usual_threads_of_file
from dlperf.core.machine import default_path
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.state_probe import N_ROUNDS, StateProbe
from dlperf.core.trace import PHASES
from dlperf.profiler.layer_times import (
    StepTimes,
    layer_rows,
    overhead_factors,
    sum_of_rows_s,
)
from dlperf.profiler.optimizer_shares import (
    OptimizerShares,
    parameter_owners,
    shares_by_bytes,
    shares_by_timing,
)
from dlperf.profiler.peak_memory import measure_device_memory
from dlperf.profiler.probe import LayerProbe, measure_hook_overhead
from dlperf.profiler.snapshot import Snapshot
from dlperf.recorder.accelerator import accelerator_of, device_clock
from dlperf.recorder.device_defaults import with_device_defaults
from dlperf.recorder.isolation import without_garbage_collection
from dlperf.recorder.targets import (
    Built,
    as_built,
    check_built,
    check_loss,
    check_needs_no_closure,
    default_optimizer,
    first_batch_size,
    mean_of_output,
    step_tensors,
)
from dlperf.recorder.tensors import tensors_of

if TYPE_CHECKING:
    from dlperf.recorder.targets import Target

_PUT_BACK_EVERY = 25
"""Steps. A network that has learnt its batch has denormal gradients, which slow its kernels."""
_MOST_STEPS = 20_000
_BUSY_FRAC = 0.2
_SETTLE_S = 0.5
_ROUNDS_PER_S, _LEAST_ROUNDS = 25, 28
"""Rounds of the readings around a measurement, by its length, and at least."""
_SAME_FAULTS = 0.1
"""Page faults per step of two passes, alike within this fraction of the larger number."""
_APART_FRAC = 0.15
_HOST_BOUND = "the device waits for the host, which the hooks slow down"


@dataclass(frozen=True)
class _TimedStep:
    """One step: seconds by phase, page faults, whether the core was lost; on a device, seconds of
    the host until it had ended.
    """

    seconds: Mapping[str, float]
    faults: int
    disturbed: bool
    host_s: float = 0.0


@dataclass(frozen=True)
class _Stepper:
    """Steps a model with or without hooks; None as the loss: inference."""

    built: Built
    clock: Clock
    snapshot: Snapshot
    name: str

    def step(self, probe: LayerProbe | None = None) -> _TimedStep:
        """A step with time stamps between its phases; forward and backward run under the hooks of
        a probe. A device is waited for at the end alone.
        """
        built, clock = self.built, self.clock
        now, switches = stamper(clock), clock.switches
        optimizer: Any = built.optimizer
        begin_s = 0.0 if clock.device is None else clock.now()
        faults, before = minor_faults(), switches()
        stamps = [now()]
        if built.loss is not None:
            optimizer.zero_grad()
            stamps.append(now())
        if probe is not None:
            probe.start()
            probe.resume()
        output = built.forward()
        if built.loss is not None:
            scalar = built.loss(output)
            stamps.append(now())
            scalar.backward()  # type: ignore[no-untyped-call]
            stamps.append(now())
        if probe is not None:
            probe.stop()
        if built.loss is not None:
            optimizer.step()
        stamps.append(now())
        stamps = list(seconds_of(clock, stamps))
        host_s = 0.0 if clock.device is None else clock.now() - begin_s
        phases = ("forward",) if built.loss is None else PHASES
        seconds = {name: end - begin for name, begin, end in zip(phases, stamps, stamps[1:])}
        seconds["total"] = stamps[-1] - stamps[0]
        return _TimedStep(seconds, minor_faults() - faults, switches() != before, host_s)

    def warm_up(self, seconds: float) -> None:
        """First steps, which make gradients and optimizer state. Raises as :func:`check_loss`."""
        output = self.built.forward()
        if self.built.loss is not None:
            check_loss(self.name, self.built.loss(output))
        del output
        for _ in range(3):
            self.step()
        self.snapshot.settle()
        self.repeat(self.step, seconds, 3)

    def plain_steps(self, seconds: float, least: int) -> list[_TimedStep]:
        """Steps without hooks, from the initial state on, the first one left out."""
        self.snapshot.put_back()
        self.step()
        return self.repeat(self.step, seconds, least)

    def repeat(self, once: Callable[[], Any], seconds: float, least: int) -> list[Any]:
        """The results of at least `least` calls, and as many as begin within `seconds`."""
        taken: list[Any] = []
        begin = self.clock.now()
        while len(taken) < least or (
            self.clock.now() - begin < seconds and len(taken) < _MOST_STEPS
        ):
            if taken and len(taken) % _PUT_BACK_EVERY == 0:
                self.snapshot.put_back()
                once()  # finds cold caches after the copies; it is not kept
            taken.append(once())
        return taken


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
    """Time one training step of a model, or with `inference` its forward, layer by layer.

    `inputs` is a tuple of positional or a dict of keyword arguments. `loss` maps the output to a
    scalar (default: the mean of the first floating tensor of the output), `optimizer` defaults to
    SGD(lr=0.01). `seconds` is the duration of the measurement where steps are short; a few steps of
    each kind are always measured. `with_layers=False` measures the whole step only.

    The samples are of steps; a layer's are summed over its calls in a step. Samples during which
    the core was lost are dropped (:func:`dlperf.core.clock.undisturbed`). The hooks' own overhead
    is subtracted from the layers. The layers add up to the step less zero_grad, but for noise and
    for what overlaps with the clock. `with_trace` records the step afterwards, under fake tensors,
    into the measurement's trace; where that fails, a note contains the reason.

    `threads` is torch's thread count meanwhile; by default the one that :func:`dlperf.predict`
    takes with this machine's file, torch's own without a file. Parameters, buffers, gradients,
    optimizer state, random states, flags, attributes and the thread count are restored.

    A model on an accelerator is timed by events of its device, and each step begins on an idle one;
    `threads` are then 1 by default.
    ``host_s`` of the noise is the host's time from a step's begin to its end on the device.

    Raises DlperfError for an argument of another type, where there is nothing to train or the loss
    is no scalar, WorkFailed where the model raises.
    """
    check_type("measure", "model", model, nn.Module, "an instance, not its class or its name")
    check_type("measure", "target", target, str, "a name for reports")
    name = target or type(model).__name__
    _check_seconds(seconds)
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    given = as_built(model, inputs, loss or mean_of_output, optimizer, inference)
    _check_measurable(name, given, inference)
    batch_size = first_batch_size(given.inputs) if batch_size is None else batch_size
    check_count("batch_size", batch_size)
    if (device := accelerator_of(name, step_tensors(given))) is not None:
        clock = replace(clock, device=device_clock(device))
        threads = 1 if threads is None else threads
    threads = usual_threads_of_file(default_path()) if threads is None else threads
    check_count("threads", threads)
    snapshot = Snapshot(model, optimizer, loss, inputs)
    with contextlib.ExitStack() as undo:
        undo.callback(snapshot.restore)
        undo.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads)
        undo.enter_context(torch.set_grad_enabled(not inference))
        if model.training == inference:
            model.train(not inference)
        built = given
        if optimizer is None and not inference:
            built = replace(given, optimizer=default_optimizer(model))
        stepper = _Stepper(built, clock, snapshot, name)
        try:
            found = _measure(stepper, seconds, batch_size, with_layers)
        except DlperfError:
            raise
        except Exception as error:
            raise WorkFailed(f"{name}: {one_line(error)}") from error
    return _with_trace(found, given) if with_trace else found


def _check_seconds(seconds: object) -> None:
    if not isinstance(seconds, Real) or isinstance(seconds, bool):
        raise DlperfError(
            f"seconds is {seconds!r:.60} (of type {type(seconds).__name__}); it must be a number of"
            " more than 0"
        )
    if not 0 < float(seconds) < math.inf:
        raise DlperfError(f"seconds is {seconds}; it must be more than 0 and finite")


def _check_measurable(name: str, built: Built, inference: bool) -> None:
    """Raise DlperfError for parts of a step that cannot be measured.

    An optimizer of another kind needs no more than step and zero_grad.
    """
    foreign = not isinstance(built.optimizer, (type, torch.optim.Optimizer)) and all(
        callable(getattr(built.optimizer, method, None)) for method in ("step", "zero_grad")
    )
    check_built(name, replace(built, optimizer=None) if foreign else built, inference)
    if not inference and any(is_lazy(parameter) for parameter in built.model.parameters()):
        raise DlperfError(f"{name}: has lazy parameters; call the model once on a batch first")
    if built.optimizer is not None and not foreign:
        check_needs_no_closure(name, built.optimizer)
    tensors = (*built.model.parameters(), *tensors_of(built.inputs))
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise DlperfError(
            f"{name} lies on the meta device, which has no data to compute with; build it on the"
            " CPU to measure it"
        )


def _with_trace(found: Measurement, built: Built) -> Measurement:
    """The measurement with the trace of its step, or with a note where recording fails."""
    from dlperf.recorder.recording import record  # here: a wrapped script must not wait for it

    try:
        trace = record(
            built.model,
            built.inputs,
            loss=built.loss,
            optimizer=built.optimizer,
            inference=found.inference,
            target=found.target,
            batch_size=found.batch_size,
        )
    except DlperfError as error:
        return replace(found, notes=(*found.notes, f"the measurement contains no trace: {error}"))
    return replace(found, trace=trace)


def measure_target(
    target: Target,
    *,
    seconds: float = 4.0,
    with_layers: bool = True,
    with_trace: bool = False,
    device: torch.device | None = None,
) -> Measurement:
    """Build a target on real tensors, of an accelerator with a `device`, and measure it; see
    :func:`measure`. The trace is then recorded as for a prediction for a device.

    The core speed (:class:`dlperf.core.clock.CoreSpeed`) is sampled around every step. A slow core
    gives a note; steps on it count like all others, since a training there meets it, too. The
    machine's state is read before the warm-up, which fills the caches again, and after the last
    step. The probe keeps its mappings in between, and allocates nothing by malloc.
    """
    probe = StateProbe(host.this_cpu())
    n_rounds = min(N_ROUNDS, max(_LEAST_ROUNDS, round(_ROUNDS_PER_S * seconds)))
    speed = CoreSpeed()
    speed.settle(_SETTLE_S)

    def switches() -> int:
        speed.sample()
        return speed.switches()

    placed = target if device is None else target.on(device)
    peaks = None if device is None else measure_device_memory(placed, device)
    built = placed.build()
    before = probe.read(n_rounds)
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
        with_trace=False,
        clock=Clock(speed.now, switches),
        threads=torch.get_num_threads(),
    )
    found = replace(found, states=(before, probe.read(n_rounds)), device_memory=peaks)
    slowdown = speed.mean_s / speed.best_s
    note = (
        f"the core took {slowdown:.2f} times its best for a fixed piece of work, on average: others"
        " used it, too"
    )
    notes = (*found.notes, note) if slowdown > SLOW else found.notes
    found = replace(found, noise={**found.noise, "core_slowdown": slowdown}, notes=notes)
    if device is not None and with_trace:
        built = target.changed(with_device_defaults).build()
    return _with_trace(found, built) if with_trace else found


def _measure(stepper: _Stepper, seconds: float, batch_size: int, with_layers: bool) -> Measurement:
    """The whole step: a part of the time warms up, the rest is measured."""
    warm_up_frac, measured_frac = (0.12, 0.35) if with_layers else (0.2, 0.8)
    stepper.warm_up(warm_up_frac * seconds)
    timed = stepper.plain_steps(measured_frac * seconds, 8)
    phases = {
        name: undisturbed([(step.seconds[name], step.disturbed) for step in timed])
        for name in timed[0].seconds
    }
    noise = {
        "steps": float(len(timed)),
        "page_faults_per_step": float(median(step.faults for step in timed)),
        "spread_frac": phases["total"].spread_frac,
    }
    clock = stepper.clock.device
    if clock is not None:
        noise["host_s"] = median(step.host_s for step in timed)
    found = Measurement(
        target=stepper.name,
        batch_size=batch_size,
        threads=torch.get_num_threads(),
        step=phases,
        layers=(),
        inference=stepper.built.loss is None,
        noise=noise,
        versions=host.versions(),
        machine=host.this_cpu().model if clock is None else clock.name,
    )
    return _with_layers(found, stepper, timed, seconds) if with_layers else found


def _with_layers(
    found: Measurement, stepper: _Stepper, timed: Sequence[_TimedStep], seconds: float
) -> Measurement:
    """The measurement with the layers' times, and the whole step once more."""
    clock, snapshot = stepper.clock, stepper.snapshot
    overhead = measure_hook_overhead(clock)
    probe = LayerProbe(stepper.built.model, clock, overhead)

    def pair() -> tuple[_TimedStep, StepTimes]:
        # side by side: the difference is the hooks' overhead in this very step
        plain = stepper.step()
        with probe:
            stepper.step(probe)
        return plain, probe.finish()

    snapshot.put_back()
    gc.collect()
    with without_garbage_collection():  # the probe's lists would bring collections on
        pair()
        pairs = stepper.repeat(pair, 0.35 * seconds, 6)
    layered = [times for _, times in pairs]
    least = 1.0 if clock.device is None else 0.0
    factors = overhead_factors([(plain.seconds, times) for plain, times in pairs], least)
    shares = _optimizer_shares(stepper, 0.05 * seconds)
    again = [
        (step.seconds["total"], step.disturbed) for step in stepper.plain_steps(0.18 * seconds, 4)
    ]
    rows = layer_rows(probe.names, layered, found.step.get("optimizer"), shares.fractions, factors)
    layered_faults = float(median(plain.faults for plain, _ in pairs))
    totals = [step.seconds["total"] for step in timed]
    third = max(1, len(totals) // 3)
    n_disturbed = sum(step.disturbed for step in timed)
    noise = {
        **found.noise,
        "layer_steps": float(len(layered)),
        "disturbed_frac": n_disturbed / len(timed),
        **overhead.to_noise(factors),
        "drift_frac": _ratio(median(totals[-third:]), median(totals[:third])) - 1,
        "layer_sum_frac": layer_sum_frac(found, rows),
        "page_faults_per_layer_step": layered_faults,
    }
    notes = [] if shares.note is None else [shares.note]
    if not found.inference and any(times.backward is None for times in layered):
        notes.append(NO_BACKWARD)
    if n_disturbed > _BUSY_FRAC * len(timed):
        notes.append(
            f"the machine was busy: {n_disturbed} of {len(timed)} steps lost their core to others"
        )
    if (note := sum_note(noise["layer_sum_frac"])) is not None:
        why = (
            _HOST_BOUND
            if clock.device is not None
            else _why_apart(layered_faults, found.noise["page_faults_per_step"])
        )
        notes.append(f"{note}: {why}")
    return replace(found, layers=rows, repeat=undisturbed(again), noise=noise, notes=tuple(notes))


NO_BACKWARD = "the backward could not be attributed to layers"


def layer_sum_frac(measurement: Measurement, rows: Sequence[LayerTimes]) -> float:
    """The sum of the rows over the step less zero_grad."""
    zero_grad = measurement.step.get("zero_grad")
    step_s = measurement.step["total"].median - (zero_grad.median if zero_grad else 0.0)
    return _ratio(sum_of_rows_s(rows), step_s)


def sum_note(sum_frac: float, apart_frac: float = _APART_FRAC) -> str | None:
    """A note where the layers do not add up to the step, within `apart_frac`; else None.

    >>> sum_note(1.2), sum_note(1.1)
    ('the layers add up to 120 % of the step', None)
    """
    is_apart = abs(sum_frac - 1) > apart_frac
    return f"the layers add up to {100 * sum_frac:.0f} % of the step" if is_apart else None


def _why_apart(layered_faults: float, plain_faults: float) -> str:
    """The cause of a difference between two passes, from the page faults per step of each.

    >>> _why_apart(147, 148)
    'the core speed changed between the two passes'
    """
    if abs(layered_faults - plain_faults) <= _SAME_FAULTS * max(layered_faults, plain_faults):
        return "the core speed changed between the two passes"
    return (
        "the two passes saw the memory allocator in different states"
        f" ({layered_faults:.0f} page faults a step in the layers' pass, {plain_faults:.0f} in the"
        " step's)"
    )


def _ratio(value: float, base: float) -> float:
    return value / base if base else 1.0


def _optimizer_shares(stepper: _Stepper, seconds: float) -> OptimizerShares:
    """The layers' shares of the optimizer's step; they change parameters and state."""
    model, optimizer = stepper.built.model, stepper.built.optimizer
    if optimizer is None:
        return OptimizerShares({})
    if not hasattr(optimizer, "param_groups"):
        return OptimizerShares(
            {},
            f"{type(optimizer).__name__} does not say which parameters it steps: its time stands"
            " under no layer",
        )
    stepper.snapshot.put_back()
    stepper.step()  # leaves gradients behind
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # the step may contain collectives, which all ranks would have to join
        return shares_by_bytes(optimizer, parameter_owners(model))
    return shares_by_timing(optimizer, parameter_owners(model), stepper.clock, seconds)

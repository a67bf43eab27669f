"""Findings on a watched training: measurement, trace, prediction, loading, forecast of an epoch."""

from __future__ import annotations

import inspect
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dlperf.core import host
from dlperf.core.clock import Clock, undisturbed
from dlperf.core.errors import DlperfError, one_line
from dlperf.core.files import device_path
from dlperf.core.measurement import STEP_PHASES, Measurement
from dlperf.profiler.layer_times import layer_rows, overhead_factors
from dlperf.profiler.optimizer_shares import (
    OptimizerShares,
    parameter_owners,
    shares_by_bytes,
    shares_by_timing,
)
from dlperf.profiler.snapshot import Snapshot
from dlperf.profiler.step_profiler import NO_BACKWARD, layer_sum_frac, sum_note
from dlperf.recorder.targets import first_batch_size
from dlperf.recorder.tensors import parameters_in
from dlperf.runner.core_speed import own_usual_speed
from dlperf.runner.disturbance import Disturbance, disturbance_of
from dlperf.runner.missing_training import steps_seen, why_no_training
from dlperf.runner.step_rate import typical_s
from dlperf.runner.training_search import is_sharded
from dlperf.runner.watched_training import FEWEST, WatchedStep, WatchedTraining
from dlperf.runner.watcher import Watcher

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.core.machine import Machine
    from dlperf.core.state import State
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.report.comparison import Report
    from dlperf.runner.live_eta import LiveEta
    from dlperf.runner.parallel_step import ParallelStep
    from dlperf.runner.ranks import MergedRanks

_SHARES_S = 0.2
"""About how long the shares of all optimizers' steps are timed after the training."""
TRACED = (
    "Python was traced (coverage, a debugger, a profiler): steps are slower, and the core speed was"
    " not sampled"
)
_APART_FRAC = 0.5
"""Layers and step come from different steps, few of each: smaller differences are noise."""


@dataclass(frozen=True)
class EpochForecast:
    """The forecast of an epoch after the first watched steps, and the measured epochs, in seconds.

    `n_steps`: optimizer steps of an epoch, up to a break that the live ETA knows. `from_steps_s`:
    n_steps times the mean watched interval between the ends of steps, so with loading and whatever
    else the loop does. `from_prediction_s`: n_steps times the predicted step plus what the loop was
    seen to do around it. `is_epoch`: False where no loader told an epoch's length; then it is of
    all steps.
    """

    n_steps: int
    from_steps_s: float | None
    from_prediction_s: float | None
    measured_s: tuple[float, ...]
    is_epoch: bool = True

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        return {
            "steps": self.n_steps,
            "from_measured_steps_s": self.from_steps_s,
            "from_prediction_s": self.from_prediction_s,
            "measured_s": list(self.measured_s),
            "is_epoch": self.is_epoch,
        }


class Findings:
    """The results of a :class:`dlperf.runner.watcher.Watcher` that has watched a training.

    `name`: the training's name in the report. With a machine there are predictions. `live`: the ETA
    that was shown meanwhile. `ranks`: the findings of all ranks where there are several; `cluster`:
    the links between them. Raises DlperfError where too few steps were seen.
    """

    def __init__(
        self,
        watcher: Watcher,
        machine: Machine | None = None,
        name: str = "",
        live: LiveEta | None = None,
        ranks: MergedRanks | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        watched = watcher.watched
        if watched is None or len(watched.plain) < FEWEST:
            raise DlperfError(why_no_training(watcher))
        if watched.recording is not None and not watched.recording.has_update:
            raise DlperfError(
                "no training was found: backward ran, and nothing changed a parameter or a gradient"
            )
        self.name, self.notes = name or watched.root_type, list(watched.notes)
        self.machine = machine if watched.device is None else self._device_machine(machine, watched)
        self.watched, self.live, self.ranks = watched, live, ranks
        self._log, self._cluster = watcher.epochs, cluster
        self._speed_samples, self._readings = watcher.speed_samples, watcher.state_readings.taken
        n_layered, plan = len(watched.layered), watcher.plan
        if watcher.epochs.n_steps < plan.n_steps and n_layered < plan.layered:
            timed = f"layers were timed in {n_layered} of {plan.layered} steps"
            self.notes.append(f"the training ended early, {timed}: {steps_seen(watcher)}")
        if len(watched.speed_samples_s) < len(watched.plain):
            self.notes.append(TRACED)
        self.notes += watcher.state_readings.notes
        self.notes += [] if ranks is None else ranks.remarks
        self.notes += [] if live is None else live.notes

    def _device_machine(self, machine: Machine | None, watched: WatchedTraining) -> Machine | None:
        """The machine file of the accelerator that the training ran on; None, and a note, where
        there is none.
        """
        from dlperf.core.machine import Machine

        assert watched.device is not None
        device = watched.device.device
        sheet = None if machine is None else machine.data_sheet
        if sheet is not None and sheet.kind == "accelerator":
            return machine
        if os.path.exists(path := device_path(str(device))):
            try:
                return Machine.load(path)
            except DlperfError as error:
                self.notes.append(f"no prediction: {error}")
                return None
        self.notes.append(
            f"no prediction: the training ran on {watched.device.name}; dlperf calibrate --device"
            f" {device.type} makes its machine file"
        )
        return None

    # -- measured ----------------------------------------------------------------------------------

    @cached_property
    def batch_size(self) -> int:
        """Samples of one forward pass."""
        if self.watched.recording is not None:
            return self.watched.recording.batch_size
        return 1 if self.watched.inputs is None else first_batch_size(self.watched.inputs)

    @cached_property
    def n_passes(self) -> int:
        """Forward and backward passes of one step."""
        return self.watched.n_passes

    @cached_property
    def measurement(self) -> Measurement:
        """The watched steps."""
        n, notes = self.n_passes, list(self.notes)
        if n > 1:
            seen = statistics.median(step.n_batches for step in self.watched.plain)
            batches = f" over {seen:.0f} batch{'es' if seen > 1 else ''}" if seen else ""
            notes.append(f"a step has {n} forward and backward passes{batches}")
        return self._with_layers(replace(self._step, notes=tuple(notes)))

    @cached_property
    def _step(self) -> Measurement:
        """The watched steps without layers and notes, with the reading of the machine's state."""
        watched, device = self.watched, self.watched.device
        phases = [(_seconds_by_phase(step), step.disturbed) for step in watched.plain]
        step = {
            name: undisturbed([(seconds[name], disturbed) for seconds, disturbed in phases])
            for name in (name for name in STEP_PHASES if name in phases[0][0])
        }
        return Measurement(
            target=self.name,
            batch_size=self.batch_size,
            threads=watched.threads,
            step=step,
            layers=(),
            noise={
                "steps": float(len(watched.plain)),
                "layer_steps": float(len(watched.layered)),
                "spread_frac": step["total"].spread_frac,
            },
            versions=host.versions(),
            machine=host.this_cpu().model if device is None else device.name,
            states=self._readings,
            device_memory=watched.device_memory,
        )

    def _with_layers(self, found: Measurement) -> Measurement:
        watched, probe = self.watched, self.watched.probe
        if probe is None or not watched.layered:
            return found
        medians = {name: samples.median for name, samples in found.step.items()}
        least = 1.0 if watched.device is None else 0.0
        factors = overhead_factors([(medians, times) for times in watched.layered], least)
        fractions, optimizer = self._shares.fractions, found.step["optimizer"]
        rows = layer_rows(probe.names, watched.layered, optimizer, fractions, factors)
        rows = tuple(sorted(rows, key=lambda row: row.layer != probe.names[0][0]))
        notes = [] if self._shares.note is None else [self._shares.note]
        if any(times.backward is None for times in watched.layered):
            notes.append(NO_BACKWARD)
        elif (note := sum_note(layer_sum_frac(found, rows), _APART_FRAC)) is not None:
            notes.append(f"{note}: the core speed or the memory allocator changed between them")
        noise = found.noise | probe.overhead.to_noise(factors)
        return replace(found, layers=rows, noise=noise, notes=(*found.notes, *notes))

    @cached_property
    def _shares(self) -> OptimizerShares:
        """Shares of the optimizers' steps, found after the training; everything is restored."""
        optimizers = self.watched.distinct_optimizers
        found = [self._shares_of(optimizer) for optimizer in optimizers]
        weights = [
            statistics.median(step.by_optimizer.get(id(one), 0.0) for step in self.watched.plain)
            for one in optimizers
        ]
        fractions: dict[int, float] = {}
        for shares, weight in zip(found, weights):
            for index, fraction in shares.fractions.items():
                part = fraction * weight / (sum(weights) or 1.0)
                fractions[index] = fractions.get(index, 0.0) + part
        notes = [shares.note for shares in found if shares.note is not None]
        return OptimizerShares(fractions, notes[0] if notes else None)

    def _shares_of(self, optimizer: Any) -> OptimizerShares:
        model, only = self.watched.model, set(self.watched.with_gradient)
        owners = parameter_owners(model)
        is_one_of_several = (
            self.ranks is not None
            or is_sharded(model)
            or (torch.distributed.is_available() and torch.distributed.is_initialized())
        )
        has_hooks = (
            _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        )
        if is_one_of_several or has_hooks:  # a step would reach other processes, or foreign code
            return shares_by_bytes(optimizer, owners, only)
        snapshot = Snapshot(model, optimizer)
        try:
            for parameter in parameters_in(optimizer):
                if id(parameter) in only:
                    parameter.grad = torch.zeros_like(parameter)
            seconds = _SHARES_S / len(self.watched.distinct_optimizers)
            return shares_by_timing(optimizer, owners, Clock(device=self.watched.device), seconds)
        except Exception:
            return shares_by_bytes(optimizer, owners, only)
        finally:
            snapshot.restore()

    @cached_property
    def disturbance(self) -> Disturbance:
        """What other programs took from the watched steps."""
        watched = self.watched
        usual = own_usual_speed(self.machine, watched.threads)
        state = self._speed_samples.core_state(watched.speed_samples_s, usual)
        # a step on a device also waits for it, which is no wait for a core
        threads = watched.threads if watched.device is None else 0
        return disturbance_of(watched.plain, threads, state.slowdown, watched.load)

    # -- predicted ---------------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace | None:
        """The recorded step; None, and a note, where that failed."""
        watched = self.watched
        if is_sharded(watched.model):
            self.notes.append(
                "no prediction: the model is sharded, and no rank can take a step alone"
            )
            return None
        try:
            if watched.recording is not None:
                return watched.recording.trace(self.name)
            if watched.is_compiled and watched.inputs is None:
                self.notes.append("no prediction: the model's inputs were not seen")
            elif watched.is_compiled:
                return self._recorded_afterwards()
        except Exception as error:
            self.notes.append(f"no prediction: the step could not be recorded ({one_line(error)})")
        return None

    def _recorded_afterwards(self) -> Trace:
        """The step of a compiled model, run eagerly with the inputs of its first pass."""
        from dlperf.recorder.recording import record_target
        from dlperf.recorder.targets import Target, mean_of_output

        watched, model = self.watched, self.watched.model
        if watched.loss is None:
            self.notes.append(
                "the model returns no loss; the prediction takes the mean of the output instead"
            )
        inputs, loss = inputs_of(model, watched.inputs), watched.loss or mean_of_output
        parts = (model, inputs, loss, watched.optimizers[0])
        target = Target(self.name, self.batch_size, False, lambda _: parts).changed(
            lambda built: replace(built, n_passes=self.n_passes)
        )
        flags = {module: module.training for module in model.modules()}
        try:
            _set_flags(watched.flags or {})
            return record_target(target)
        finally:
            _set_flags(flags)

    @cached_property
    def state(self) -> State | None:
        """The machine's state while the steps were watched; None where it was not read."""
        from dlperf.report.step_comparison import state_during

        return None if self.machine is None else state_during(self._step, self.machine)

    @cached_property
    def blind_prediction(self) -> Prediction | None:
        """The recorded step on the machine in its usual state; None without a machine or trace, or
        where it fails.
        """
        if self.machine is None or self.trace is None:
            return None
        from dlperf.forecast.prediction import predict

        try:
            return predict(self.trace, self.machine, threads=self.watched.threads)
        except DlperfError as error:
            self.notes.append(f"no prediction: {error}")
            return None

    @cached_property
    def prediction(self) -> Prediction | None:
        """The same in the state that the machine had while the steps were watched, where that is
        known.
        """
        blind = self.blind_prediction
        if blind is None or self.state is None:
            return blind
        from dlperf.forecast.prediction import predict

        return predict(blind.trace, blind.machine, blind.threads, state=self.state)

    @cached_property
    def compiled_prediction(self) -> Prediction | None:
        """The compiled step on the machine; None where :attr:`prediction` is, and where no step of
        a compiled model was recorded.
        """
        recording = self.watched.compiled
        if recording is None or self.prediction is None or self.machine is None:
            return None
        from dlperf.forecast.prediction import predict

        try:
            trace = recording.trace(self.name, self.batch_size)
            threads = self.watched.threads
            return predict(trace, self.machine, threads=threads, state=self.state)
        except Exception as error:
            self.notes.append(f"no prediction of the compiled step: {one_line(error)}")
            return None

    @cached_property
    def report(self) -> Report | None:
        """Predicted beside actual, per layer; None without a prediction."""
        prediction, blind = self.prediction, self.blind_prediction
        if prediction is None or blind is None:
            return None
        from dlperf.report.comparison import compare

        both = () if prediction is blind else (blind,)
        return replace(compare(prediction, self.measurement, blind=both), recommends=False)

    @cached_property
    def parallel_step(self) -> ParallelStep | None:
        """The step of all ranks; None for one rank, and where their findings do not fit together.

        With a cluster file it has a prediction.
        """
        if self.ranks is None:
            return None
        from dlperf.runner.parallel_step import compare_step

        found = compare_step(
            self.ranks,
            self.prediction,
            self.watched.reducer,
            self.batch_size,
            self._cluster,
        )
        self.notes += [] if found is None else found.notes
        return found

    # -- the run -----------------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """The median uninstrumented step, without loading."""
        return statistics.median(step.own_s for step in self.watched.plain)

    @property
    def intervals_s(self) -> tuple[float, ...]:
        """Intervals between the ends of uninstrumented steps."""
        return tuple(step.interval_s for step in self.watched.plain if step.interval_s is not None)

    @property
    def interval_s(self) -> float | None:
        """The mean interval without outliers; None where no interval was seen."""
        seen = [step for step in self.watched.plain if step.interval_s is not None]
        has_workers = all(step.loaded.n_made is not None for step in seen)
        return typical_s(self.intervals_s, [s.loading_s for s in seen] if has_workers else ())

    @property
    def loading_frac(self) -> float | None:
        """The part of the watched time spent waiting for the loader; None without an interval."""
        steps = [step for step in self.watched.plain if step.interval_s]
        whole = sum(step.interval_s or 0.0 for step in steps)
        return sum(step.loading_s for step in steps) / whole if whole else None

    @cached_property
    def forecast(self) -> EpochForecast | None:
        """The forecast from the first watched steps; None where no interval was seen."""
        interval_s, log, epochs = self.interval_s, self._log, self._log.epochs
        if interval_s is None:
            return None
        batches = next((epoch.n_batches for epoch in epochs if epoch.n_batches), None)
        is_epoch = batches is not None or len(epochs) > 1
        if batches is not None:
            per_step = self.watched.n_batches
            n_steps, least = max(1, math.ceil(batches / per_step)), batches // per_step
            forecast = None if self.live is None else self.live.first
            if forecast is not None and forecast.steps and forecast.steps < least:
                n_steps, least = math.ceil(forecast.steps), math.floor(forecast.steps)
            measured_s = tuple(epoch.seconds for epoch in epochs if epoch.n_steps >= least)
        elif is_epoch:
            n_steps, measured_s = epochs[0].n_steps, tuple(epoch.seconds for epoch in epochs)
        else:
            n_steps, whole_s = log.n_steps, log.whole.seconds
            measured_s = (whole_s,) if whole_s > 0 else ()
        prediction = self.compiled_prediction or self.prediction
        predicted_s, step = None, None if prediction is None else prediction.step
        if step is not None and step.total_s is not None:
            predicted_s = n_steps * (step.total_s + max(0.0, interval_s - self.step_s))
        return EpochForecast(n_steps, n_steps * interval_s, predicted_s, measured_s, is_epoch)


def _seconds_by_phase(step: WatchedStep) -> dict[str, float]:
    names = ("optimizer",) if step.is_whole else ("zero_grad", "forward", "backward", "optimizer")
    return {name: getattr(step, f"{name}_s") for name in names} | {"total": step.own_s}


def _set_flags(flags: Mapping[nn.Module, bool]) -> None:
    for module, training in flags.items():
        module.training = training


def inputs_of(
    model: nn.Module, seen: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> tuple[Any, ...] | dict[str, Any]:
    """Positional and keyword inputs as one of the two.

    Raises DlperfError for positional ones without a name beside keywords.
    """
    args, kwargs = seen
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    positional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
        elif parameter.kind in positional and parameter.name in named:
            raise DlperfError(
                f"{type(model).__name__}.forward takes {parameter.name} by position and others by"
                " keyword"
            )
    return named

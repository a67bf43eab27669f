"""The watched steps of a training, and the recording of one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dlperf.core.clock import Clock
from dlperf.core.device_clock import DeviceClock, DevicePeaks
from dlperf.core.errors import one_line
from dlperf.core.trace import BY_HAND
from dlperf.models.buckets import ReducerOptions
from dlperf.profiler.layer_times import StepTimes
from dlperf.profiler.probe import LayerProbe
from dlperf.recorder.accelerator import accelerator_of, device_clock
from dlperf.recorder.compiled_recording import CompiledRecording, WatchCalls
from dlperf.recorder.live_recording import OUTSIDE, LiveRecording
from dlperf.recorder.tensors import parameters_in
from dlperf.runner.compilation import scalar_of
from dlperf.runner.epoch_log import LoaderProgress

FEWEST = 2
"""The fewest timed steps for a report."""


@dataclass(frozen=True)
class WatchPlan:
    """Numbers of watched periods, which are single optimizer steps in most trainings.

    After `warm` ones follow `plain` ones, with time stamps alone, and `layered` ones, with the
    probe.
    """

    warm: int = 3
    plain: int = 8
    layered: int = 6

    @property
    def n_least(self) -> int:
        """The fewest optimizer steps of a loop: two to find it, warm-up, two that are timed."""
        return 2 + self.warm + FEWEST

    @property
    def n_steps(self) -> int:
        """Optimizer steps until everything was watched."""
        return 2 + self.warm + self.plain + self.layered


@dataclass
class WatchedStep:
    """One period of the program, in seconds by phase, each without the phases inside it.

    `interval_s`: from the end of the period before to the end of this one; None where something
    else than training lay between. `outside_s`: the rest. `by_optimizer`: seconds of each one, by
    its id. `n_passes`: forwards with a backward. `n_batches`: those that loaders returned.
    `processor_s`, `queue_wait_s`: see :func:`dlperf.runner.disturbance.core_times_s`.
    `speed_sample_s`: see :class:`dlperf.runner.core_speed.SpeedSamples`; None where the program
    traces itself. `began`: the first call of a model for it. `is_whole`: only interval, loading and
    the optimizer were timed. `laps`: on a device, the moments at which phases ended.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    zero_grad_s: float = 0.0
    loading_s: float = 0.0
    outside_s: float = 0.0
    by_optimizer: dict[int, float] = field(default_factory=dict)
    interval_s: float | None = None
    n_passes: int = 0
    n_batches: int = 0
    disturbed: bool = False
    loaded: LoaderProgress = LoaderProgress()
    processor_s: float = 0.0
    queue_wait_s: float | None = None
    speed_sample_s: float | None = None
    began: float | None = None
    is_whole: bool = False
    laps: list[tuple[str, Any]] = field(default_factory=list)

    def lap(self, phase: str, clock: Clock) -> None:
        """A phase ends now; its moment is noted where a device computes."""
        if clock.device is not None:
            self.laps.append((phase, clock.device.stamp()))

    def settle(self, device: DeviceClock) -> None:
        """Replace the host's times of a step on a device by those between its laps."""
        laps, self.laps = self.laps, []
        if len(laps) < 2:
            return
        moments = device.seconds([moment for _, moment in laps])
        before_s = self.optimizer_s
        self.forward_s = self.backward_s = self.optimizer_s = 0.0
        self.zero_grad_s = self.loading_s = self.outside_s = 0.0
        for (phase, _), begin, end in zip(laps[1:], moments, moments[1:]):
            self.add(phase, end - begin)
        if self.interval_s is not None:
            self.interval_s = moments[-1]
        factor = self.optimizer_s / before_s if before_s else 0.0
        self.by_optimizer = {one: factor * value for one, value in self.by_optimizer.items()}

    def add(self, phase: str, seconds: float) -> None:
        """Add to a phase's time."""
        name = f"{phase}_s"
        setattr(self, name, getattr(self, name) + seconds)

    @property
    def own_s(self) -> float:
        """The step itself, without loading, moving data, logging (a whole one: with these two)."""
        if self.is_whole:
            return (self.interval_s or 0.0) - self.loading_s
        return self.zero_grad_s + self.forward_s + self.backward_s + self.optimizer_s


class Models(nn.Module):
    """Several models that are trained together; it is never called."""


def clock_on(models: Sequence[nn.Module], clock: Clock) -> Clock:
    """The clock of a training of models: that of their device, if they lie on an accelerator.

    Raises DlperfError where they lie on several, or on one that torch does not find.
    """
    name = " and ".join(type(model).__name__ for model in models)
    device = accelerator_of(name, (p for model in models for p in model.parameters()))
    return clock if device is None else replace(clock, device=device_clock(device))


def together(models: Sequence[nn.Module]) -> nn.Module:
    """One model as it is; several as parts of one, under the names of their types."""
    if len(models) == 1:
        return models[0]
    names: dict[str, nn.Module] = {}
    for model in models:
        name = type(model).__name__
        n_alike = sum(type(other) is type(model) for other in names.values())
        names[f"{name}{n_alike + 1}" if n_alike else name] = model
    whole = Models()
    for name, model in names.items():
        whole.add_module(name, model)
    return whole


@dataclass
class WatchedTraining:
    """A training: models and optimizers, the steps by kind, and the recording of one.

    They are referenced here, since most scripts drop them before they end. `compiled`: the
    recording of a step of a compiled model. `optimizers`: those of
    one period, in their order. `reducer`: the options of the DistributedDataParallel around the
    model. `inputs`, `loss`, `flags` (the modules' training flags): what is needed to record a step
    afterwards, of a compiled model; `n_calls`: its calls in one period. `with_gradient`: ids of the
    parameters that have a gradient. `load`: the system's load while the steps were watched.
    `device`: the accelerator that they ran on; `device_memory`: what its allocator had at most
    until they were watched.
    """

    roots: tuple[nn.Module, ...]
    optimizers: tuple[Any, ...]
    plain: list[WatchedStep] = field(default_factory=list)
    probed: list[WatchedStep] = field(default_factory=list)
    layered: list[StepTimes] = field(default_factory=list)
    probe: LayerProbe | None = None
    recording: LiveRecording | None = None
    compiled: CompiledRecording | None = None
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None
    flags: Mapping[nn.Module, bool] | None = None
    n_calls: int = 0
    with_gradient: frozenset[int] = frozenset()
    threads: int = 1
    reducer: ReducerOptions | None = None
    notes: list[str] = field(default_factory=list)
    is_compiled: bool = False
    load: float | None = None
    device: DeviceClock | None = None
    device_memory: DevicePeaks | None = None

    def settle(self) -> Exception | None:
        """The device's times of the steps, in place of the host's, and its memory until now; the
        error where they cannot be had.
        """
        if self.device is not None and self.device_memory is None:
            try:
                for step in (*self.plain, *self.probed):
                    step.settle(self.device)
                self.device_memory = self.device.peaks()
            except Exception as error:
                return error
        return None

    def __post_init__(self) -> None:
        self.model = together(self.roots)

    def start_recording(
        self, inside: nn.Module | None, watch_calls: WatchCalls
    ) -> LiveRecording | CompiledRecording | None:
        """Begin to record a step in the call of `inside`; None, and a note, where that fails."""
        recording: LiveRecording | CompiledRecording
        what = "no prediction: the step was not recorded"
        if self.is_compiled:
            what = "no prediction of the compiled step: it was not recorded"
            recording = CompiledRecording(self.model, self.distinct_optimizers, watch_calls)
        else:
            recording = LiveRecording(self.model, self.distinct_optimizers)
        try:
            recording.start(inside)
        except Exception as error:
            self.notes.append(f"{what} ({one_line(error)})")
            return None
        if isinstance(recording, CompiledRecording):
            self.compiled = recording
        else:
            self.recording = recording
        recording.enter(OUTSIDE)
        return recording

    def note_call(self, args: Any, kwargs: Any, output: Any) -> None:
        """Count a call of a compiled model in training. Of the first one, keep what is needed to
        record the step afterwards.
        """
        if not (self.model.training and torch.is_grad_enabled()):
            return
        self.n_calls += 1
        if self.n_calls > 1:
            return
        self.inputs = pytree.tree_map(_detached, (args, kwargs))
        self.flags = {module: module.training for module in self.model.modules()}
        self.loss = None if scalar_of(output) is None else scalar_of

    def note_gradients(self) -> None:
        """Note which of the optimizers' parameters have a gradient now."""
        self.with_gradient = frozenset(
            id(parameter)
            for optimizer in self.optimizers
            for parameter in parameters_in(optimizer)
            if parameter.grad is not None
        )

    @property
    def distinct_optimizers(self) -> list[Any]:
        """The optimizers, each once."""
        return list({id(one): one for one in self.optimizers}.values())

    @property
    def root_type(self) -> str:
        """The models' types."""
        return " and ".join(type(root).__name__ for root in self.roots)

    @property
    def optimizer_type(self) -> str:
        """The optimizers' types, each once."""
        kinds = dict.fromkeys(type(one).__name__ for one in self.optimizers)
        return " and ".join(kinds) or BY_HAND

    @property
    def speed_samples_s(self) -> list[float]:
        """The samples of the core speed after the plain steps."""
        return [s.speed_sample_s for s in self.plain if s.speed_sample_s is not None]

    @property
    def n_passes(self) -> int:
        """Forward and backward passes of one period."""
        return round(statistics.median(step.n_passes for step in self.plain))

    @property
    def n_batches(self) -> int:
        """Batches of one period: those seen; as many as passes, where none were seen.

        Two passes over one batch (a GAN's losses, SAM) are no gradient accumulation.
        """
        seen = round(statistics.median(step.n_batches for step in self.plain))
        return seen or self.n_passes


def _detached(leaf: Any) -> Any:
    is_result = isinstance(leaf, torch.Tensor) and not leaf.is_leaf
    return leaf.detach() if is_result else leaf

"""The watched steps of a training, and the inputs and loss to record a step afterwards."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dlperf.models.buckets import ReducerOptions
from dlperf.profiler.layer_times import StepTimes
from dlperf.profiler.probe import LayerProbe
from dlperf.runner.epoch_log import LoaderProgress

FEWEST = 2
"""The fewest timed steps for a report."""


@dataclass(frozen=True)
class WatchPlan:
    """Numbers of watched optimizer steps.

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
    """One optimizer step of the program, in seconds; forward and backward summed over its passes.

    `interval_s`: from the end of the optimizer step before to the end of this one; None where
    something else than training lay between. `n_batches`: those that loaders returned.
    `processor_s`: processor time in it. `speed_sample_s`: see
    :class:`dlperf.runner.core_speed.SpeedSamples`. `began`: the first call of
    the model for it. `is_whole`: only interval, loading and the optimizer were timed.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    zero_grad_s: float = 0.0
    loading_s: float = 0.0
    interval_s: float | None = None
    n_passes: int = 0
    n_batches: int = 0
    disturbed: bool = False
    loaded: LoaderProgress = LoaderProgress()
    processor_s: float = 0.0
    speed_sample_s: float | None = None
    began: float | None = None
    is_whole: bool = False

    @property
    def own_s(self) -> float:
        """The step itself, without loading, moving data, logging (a whole one: with these two)."""
        if self.is_whole:
            return (self.interval_s or 0.0) - self.loading_s
        return self.zero_grad_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclass
class WatchedTraining:
    """A training: model and optimizer, the steps by kind, and the parts to record a step.

    Model and optimizer are referenced here, since most scripts drop them before they end.
    `reducer`: the options of the DistributedDataParallel around the model. `flags`: the modules'
    training flags. `with_gradient`: ids of the parameters that have a gradient.
    """

    root: nn.Module
    optimizer: Any
    root_type: str
    optimizer_type: str
    plain: list[WatchedStep] = field(default_factory=list)
    probed: list[WatchedStep] = field(default_factory=list)
    layered: list[StepTimes] = field(default_factory=list)
    probe: LayerProbe | None = None
    inputs: Any = None
    loss: Callable[[Any], Any] | None = None
    flags: Mapping[nn.Module, bool] | None = None
    with_gradient: frozenset[int] = frozenset()
    threads: int = 1
    reducer: ReducerOptions | None = None
    notes: list[str] = field(default_factory=list)
    is_compiled: bool = False

    @property
    def n_passes(self) -> int:
        """Forward and backward passes of one optimizer step."""
        return round(statistics.median(step.n_passes for step in self.plain))

    @property
    def n_batches(self) -> int:
        """Batches of one optimizer step: those seen; as many as passes, where none were seen.

        Two passes over one batch (a GAN's losses, SAM) are no gradient accumulation.
        """
        seen = round(statistics.median(step.n_batches for step in self.plain))
        return seen or self.n_passes

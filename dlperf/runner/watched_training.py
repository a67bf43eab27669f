"""What was seen of a training: its steps, who trained, and what is needed to record a step
afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from dlperf.models.buckets import ReducerOptions
from dlperf.profiler.layer_times import StepTimes
from dlperf.profiler.probe import LayerProbe
from dlperf.runner.epoch_log import LoaderProgress
from dlperf.runner.recomputed_loss import RecomputedLoss

FEWEST = 2
"""Timed steps below which there is nothing to say."""


@dataclass(frozen=True)
class WatchPlan:
    """How many optimizer steps are watched: after `warm`, `plain` ones with time stamps alone and
    `layered` ones with the probe.
    """

    warm: int = 3
    plain: int = 8
    layered: int = 6

    @property
    def n_least(self) -> int:
        """Optimizer steps that a loop needs: two in which its training is found, warm-up, two that
        are timed.
        """
        return 2 + self.warm + FEWEST

    @property
    def n_steps(self) -> int:
        """Optimizer steps until everything was watched."""
        return 2 + self.warm + self.plain + self.layered


@dataclass
class WatchedStep:
    """One optimizer step of the program, in seconds; forward and backward summed over its passes.

    `interval_s` is from the end of the optimizer step before to the end of this one, everything between included; None
    where something else than training lay between. `processor_s`: what the process used of processors in it. `pace_s`: see
    :class:`dlperf.runner.core_speed.SpeedSamples`. `began` is when the model was first called for it.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    zero_grad_s: float = 0.0
    loading_s: float = 0.0
    interval_s: float | None = None
    n_passes: int = 0
    disturbed: bool = False
    loaded: LoaderProgress = LoaderProgress()
    processor_s: float = 0.0
    pace_s: float | None = None
    began: float | None = None

    @property
    def own_s(self) -> float:
        """The step itself; the rest of the interval is loading, moving data, logging."""
        return self.zero_grad_s + self.forward_s + self.backward_s + self.optimizer_s


@dataclass
class WatchedTraining:
    """What was seen of a training: who trained, the steps by kind, and what is needed to record a
    step afterwards.

    The model and its optimizer are held, since most scripts let go of them before they end.
    `reducer` is how DistributedDataParallel around it reduces.
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
    loss: RecomputedLoss | None = None
    flags: Mapping[nn.Module, bool] | None = None
    with_gradient: frozenset[int] = frozenset()
    threads: int = 1
    reducer: ReducerOptions | None = None
    notes: list[str] = field(default_factory=list)

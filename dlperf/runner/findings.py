"""What watching a training found: measurement, trace, prediction, data loading, and the forecast of
an epoch beside its real time.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from dlperf.core import host, units
from dlperf.core.clock import undisturbed
from dlperf.core.errors import DlperfError, one_line
from dlperf.core.measurement import STEP_PHASES, Measurement
from dlperf.core.text import fit, text_width
from dlperf.profiler.layer_times import layer_rows, overhead_factors
from dlperf.profiler.optimizer_shares import (
    OptimizerShares,
    parameter_owners,
    shares_by_bytes,
    shares_by_timing,
)
from dlperf.profiler.snapshot import Snapshot
from dlperf.profiler.step_profiler import NO_BACKWARD
from dlperf.recorder.targets import first_batch_size
from dlperf.report.machine_check import find_mismatches
from dlperf.runner.step_rate import typical_s
from dlperf.runner.training_search import is_sharded
from dlperf.runner.watched_training import FEWEST, WatchedStep
from dlperf.runner.watcher import Watcher

if TYPE_CHECKING:
    from dlperf.core.cluster import Cluster
    from dlperf.core.machine import Machine
    from dlperf.core.trace import Trace
    from dlperf.forecast.prediction import Prediction
    from dlperf.report.comparison import Report
    from dlperf.runner.live_eta import LiveEta
    from dlperf.runner.parallel_step import ParallelStep
    from dlperf.runner.ranks import MergedRanks

_ALONE = (
    "step and layers: predicted for one rank on its own, measured with what they wait for the"
    " others; the distributed step is compared below them"
)


@dataclass(frozen=True)
class EpochForecast:
    """An epoch forecast after the first watched steps, in seconds, beside the real times of the
    epochs.

    `n_steps` are the optimizer steps of an epoch. `from_steps_s`: as many times the mean of the
    watched intervals from one step's end to the next, so with loading and whatever else the loop
    does. `from_prediction_s`: as many times the predicted step plus what the loop was seen to do
    around it. `is_epoch`: False where no loader told an epoch's length, and the forecast is of the
    steps that the run made after those watched.
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
    """The result of a :class:`dlperf.runner.watcher.Watcher` that has seen a training.

    `name` is what the training is called in the report. With a machine there are predictions;
    `live` is the forecast that was shown meanwhile. `team` are the findings of all ranks where
    there are several, `cluster` the links between them. Raises DlperfError where too few steps were
    seen.
    """

    def __init__(
        self,
        watcher: Watcher,
        machine: Machine | None = None,
        name: str = "",
        live: LiveEta | None = None,
        team: MergedRanks | None = None,
        cluster: Cluster | None = None,
    ) -> None:
        watched = watcher.watched
        if watched is None or len(watched.plain) < FEWEST:
            raise DlperfError(why_no_training(watcher))
        self.machine = machine
        self.name = name or watched.root_type
        self.notes = list(watched.notes)
        self._watched, self._log, self._live = watched, watcher.epochs, live
        self.team, self._cluster = team, cluster
        n_layered, plan = len(watched.layered), watcher.plan
        if watcher.epochs.n_steps < plan.n_steps and n_layered < plan.layered:
            timed = f"layers were timed in {n_layered} of {plan.layered} steps"
            self.notes.append(f"the training ended early, {timed}: {_steps_seen(watcher)}")
        self.notes += [] if team is None else team.remarks
        if live is not None:
            self.notes += live.notes

    # -- what was measured -------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Samples of one forward pass."""
        return first_batch_size(self._watched.inputs) if self._watched.inputs is not None else 1

    @cached_property
    def n_passes(self) -> int:
        """Forward and backward passes of one optimizer step (gradient accumulation makes more than
        one).
        """
        return round(statistics.median(step.n_passes for step in self._watched.plain))

    @cached_property
    def measurement(self) -> Measurement:
        """The watched steps. With gradient accumulation: one pass and one optimizer step."""
        watched, n = self._watched, self.n_passes
        notes = list(self.notes)
        if n > 1:
            notes.append(
                f"{n} passes accumulate gradients for one optimizer step: the times are of one pass"
                " and one optimizer step"
            )
        step = {
            name: undisturbed(
                [(seconds[name], s.disturbed) for s in watched.plain for seconds in [_phases_of(s)]]
            )
            for name in STEP_PHASES
        }
        layers: Sequence[Any] = ()
        noise: dict[str, float] = {
            "steps": float(len(watched.plain)),
            "layer_steps": float(len(watched.layered)),
            "spread_frac": step["total"].spread_frac,
        }
        if watched.probe is not None and watched.layered:
            medians = {name: samples.median for name, samples in step.items()}
            factors = overhead_factors([(medians, times) for times in watched.layered])
            layers = layer_rows(
                watched.probe.names,
                watched.layered,
                step["optimizer"],
                self._shares.fractions,
                factors,
            )
            notes += [] if self._shares.note is None else [self._shares.note]
            if any(times.backward is None for times in watched.layered):
                notes.append(NO_BACKWARD)
            noise.update(watched.probe.overhead.to_noise(factors))
        return Measurement(
            target=self.name,
            batch_size=self.batch_size,
            threads=watched.threads,
            step=step,
            layers=tuple(layers),
            noise=noise,
            notes=tuple(notes),
            versions=host.versions(),
            machine=host.this_cpu().model,
        )

    @cached_property
    def _shares(self) -> OptimizerShares:
        """Found after the training: its optimizer is stepped on zero gradients, and everything put
        back.
        """
        model, optimizer = self._watched.root, self._watched.optimizer
        owners = parameter_owners(model)
        only = set(self._watched.with_gradient)
        alone = (
            self.team is None
            and not is_sharded(model)
            and not (torch.distributed.is_available() and torch.distributed.is_initialized())
        )
        hooked = bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
        if (
            not alone
            or hooked
            or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            or getattr(optimizer, "_optimizer_step_post_hooks", None)
        ):
            return shares_by_bytes(
                optimizer, owners, only
            )  # a step would reach other processes, or foreign code
        snapshot = Snapshot(model, optimizer)
        try:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) in only:
                        parameter.grad = torch.zeros_like(parameter)
            return shares_by_timing(optimizer, owners, seconds=0.2)
        except Exception:
            return shares_by_bytes(optimizer, owners, only)
        finally:
            snapshot.restore()

    # -- what is predicted -------------------------------------------------------------------------

    @cached_property
    def trace(self) -> Trace | None:
        """The step recorded under fake tensors, with the inputs and the loss that were seen; None
        (and a note) where that fails.
        """
        watched = self._watched
        model = watched.root
        if watched.inputs is None or is_sharded(model):
            why = (
                "the model's inputs were not seen"
                if watched.inputs is None
                else "the model is sharded, and no rank can take a step alone"
            )
            self.notes.append(f"no prediction: {why}")
            return None
        from dlperf.recorder.recording import record

        if watched.loss is None:
            self.notes.append(
                "the loss could not be followed from the model's output; the prediction takes the"
                " mean of the output instead"
            )
        flags = {module: module.training for module in model.modules()}
        try:
            inputs = inputs_of(model, watched.inputs)
            for module, training in (watched.flags or {}).items():
                module.training = training
            try:
                return record(
                    model,
                    inputs,
                    loss=watched.loss,
                    optimizer=watched.optimizer,
                    target=self.name,
                    batch_size=self.batch_size,
                )
            except Exception:
                if watched.loss is None:
                    raise
                trace = record(
                    model,
                    inputs,
                    optimizer=watched.optimizer,
                    target=self.name,
                    batch_size=self.batch_size,
                )
                self.notes.append(
                    "the loss could not be repeated; the prediction takes the mean of the output"
                    " instead"
                )
                return trace
        except Exception as error:
            self.notes.append(f"no prediction: the step could not be recorded ({one_line(error)})")
            return None
        finally:
            for module, training in flags.items():
                module.training = training

    @cached_property
    def prediction(self) -> Prediction | None:
        """The recorded step on the machine; None where there is no machine, or the step cannot be
        recorded or priced.
        """
        if self.machine is None or self.trace is None:
            return None
        from dlperf.forecast.prediction import predict

        try:
            prediction = predict(self.trace, self.machine, threads=self._watched.threads)
            return (
                prediction.cross_machine()
                if find_mismatches(self.machine, host.this_cpu(), host.versions())
                else prediction
            )
        except DlperfError as error:
            self.notes.append(f"no prediction: {error}")
            return None

    @cached_property
    def report(self) -> Report | None:
        """Predicted beside actual, per layer; None without a prediction."""
        if self.prediction is None:
            return None
        from dlperf.report.comparison import compare

        return compare(self.prediction, self.measurement)

    @cached_property
    def parallel_step(self) -> ParallelStep | None:
        """The step of all ranks, with a cluster file beside its prediction; None for one rank, and
        where the ranks could not be put together.
        """
        if self.team is None:
            return None
        from dlperf.runner.parallel_step import compare_step

        found = compare_step(
            self.team,
            self.prediction,
            self._watched.reducer,
            self.batch_size,
            self.n_passes,
            self._cluster,
        )
        self.notes += [] if found is None else found.notes
        return found

    # -- the run -----------------------------------------------------------------------------------

    @property
    def intervals_s(self) -> tuple[float, ...]:
        """From one optimizer step's end to the next, of the uninstrumented steps."""
        return tuple(step.interval_s for step in self._watched.plain if step.interval_s is not None)

    @property
    def interval_s(self) -> float | None:
        """Their mean, without what happened once; None where no interval was seen."""
        seen = [step for step in self._watched.plain if step.interval_s is not None]
        waited_s = [step.loading_s for step in seen if step.loaded.n_made is not None]
        return typical_s(self.intervals_s, waited_s if len(waited_s) == len(seen) else ())

    @property
    def loading_frac(self) -> float | None:
        """Share of the watched time that the loop waited for its data loader; None where no
        interval was seen.
        """
        steps = [step for step in self._watched.plain if step.interval_s]
        whole = sum(step.interval_s or 0.0 for step in steps)
        return sum(step.loading_s for step in steps) / whole if whole else None

    @cached_property
    def forecast(self) -> EpochForecast | None:
        """The forecast that the first watched steps allow; None where no interval was seen."""
        interval_s = self.interval_s
        epochs = self._log.epochs
        batches = next((epoch.n_batches for epoch in epochs if epoch.n_batches), None)
        if interval_s is None:
            return None
        if batches is not None:
            n_steps = max(1, math.ceil(batches / self.n_passes))
            measured_s = tuple(
                epoch.seconds for epoch in epochs if epoch.n_steps >= batches // self.n_passes
            )
        elif epochs and len(epochs) > 1:
            n_steps, measured_s = epochs[0].n_steps, tuple(epoch.seconds for epoch in epochs)
        else:
            first, last = self._log.first_step, self._log.last_step
            n_steps = max(1, self._log.n_steps - 1)
            measured_s = (
                (last - first,) if first is not None and last is not None and last > first else ()
            )
        predicted_s = None
        if self.prediction is not None and self.prediction.step.total_s is not None:
            step = self.prediction.step
            once = (step.zero_grad_s or 0.0) + (step.optimizer_s or 0.0)
            total_s = once + self.n_passes * ((step.forward_s or 0.0) + (step.backward_s or 0.0))
            predicted_s = n_steps * (total_s + max(0.0, interval_s - self._own_s()))
        return EpochForecast(
            n_steps,
            n_steps * interval_s,
            predicted_s,
            measured_s,
            is_epoch=bool(epochs) and (batches is not None or len(epochs) > 1),
        )

    def _own_s(self) -> float:
        """What of an interval is the step itself: the rest is loading, moving data, logging."""
        return statistics.median(step.own_s for step in self._watched.plain)

    # -- as text and data --------------------------------------------------------------------------

    def to_text(self, width: int | None = None) -> str:
        """The report for people: layers, loading, forecast, notes; `width` columns wide (default:
        the terminal's).
        """
        width = text_width() if width is None else width
        body = self._body(width)
        ranks = self.rank_lines(width)
        alone = [f"{_ALONE}\n"] if ranks and self.report is not None else []
        notes = [
            note
            for note in dict.fromkeys([*self.notes, *self.measurement.notes])
            if note not in body
        ]
        return fit(
            "\n".join(
                [*alone, body, "", *self.run_lines(), *ranks, *(f"note: {note}" for note in notes)]
            ),
            width,
        )

    def rank_lines(self, width: int | None = None) -> list[str]:
        """The table of the ranks and that of their step; none for one rank, and where the ranks
        could not be put together, which is a note.
        """
        if self.team is None or self.team.trace is None:
            return []
        return [
            "",
            *self.team.lines(width),
            "",
            *([] if self.parallel_step is None else [*self.parallel_step.lines(width), ""]),
        ]

    def _body(self, width: int) -> str:
        if self.report is not None:
            return self.report.to_text(width)
        from dlperf.report.step_pages import measurement_to_text

        return measurement_to_text(self.measurement, width)

    def run_lines(self) -> list[str]:
        """What was watched, the forecasts and what became of them, one sentence a line."""
        seconds, percent = units.format_seconds, units.format_percent
        first = (
            f"watched {self._watched.root_type} with {self._watched.optimizer_type}:"
            f" {len(self._watched.plain)} steps"
        )
        if self.loading_frac is not None:
            first += (
                f", one every {seconds(self.interval_s)}, {percent(self.loading_frac)} of it"
                " waiting for data"
            )
        forecast = self.forecast
        if forecast is None:
            return [first]
        what = (
            f"epoch of {forecast.n_steps} steps"
            if forecast.is_epoch
            else f"{forecast.n_steps} steps (no data loader tells an epoch's length)"
        )
        parts = [f"forecast after the watched steps, {what}:"]
        if forecast.from_prediction_s is not None:
            parts.append(f"{seconds(forecast.from_prediction_s)} from the prediction,")
        parts.append(f"{seconds(forecast.from_steps_s)} from the measured steps;")
        parts.append(
            "real: "
            + (_listed(forecast.measured_s) if forecast.measured_s else "no epoch was finished")
        )
        return [first, " ".join(parts), *(self._live.lines() if self._live is not None else [])]

    def to_json(self) -> dict[str, Any]:
        """The findings as JSON data (schema ``dlperf.run``)."""
        return {
            "schema": "dlperf.run",
            "schema_version": 1,
            "target": self.name,
            "batch_size": self.batch_size,
            "threads": self._watched.threads,
            "model": self._watched.root_type,
            "optimizer": self._watched.optimizer_type,
            "passes_per_step": self.n_passes,
            "loading_frac": self.loading_frac,
            "interval_s": self.interval_s,
            "forecast": (
                None
                if self.forecast is None
                else {
                    **self.forecast.to_json(),
                    **(self._live.to_json() if self._live is not None else {}),
                }
            ),
            "ranks": None if self.team is None else self.team.to_json(),
            "parallel_step": None if self.parallel_step is None else self.parallel_step.to_json(),
            "measurement": self.measurement.to_json(),
            "report": None if self.report is None else self.report.to_json(),
            "notes": list(dict.fromkeys([*self.notes, *self.measurement.notes])),
            "versions": host.versions(),
        }


def _phases_of(step: WatchedStep) -> dict[str, float]:
    forward_s, backward_s = step.forward_s / step.n_passes, step.backward_s / step.n_passes
    total_s = step.zero_grad_s + forward_s + backward_s + step.optimizer_s
    return {
        "zero_grad": step.zero_grad_s,
        "forward": forward_s,
        "backward": backward_s,
        "optimizer": step.optimizer_s,
        "total": total_s,
    }


def why_no_training(watcher: Watcher) -> str:
    """One line that says why a watcher has nothing to report."""
    if watcher.reason is not None:
        return f"no training to watch: {watcher.reason}"
    if watcher.watched is None:
        return (
            "no training was found: no optimizer of torch.optim stepped twice the parameters of a"
            f" module called in training mode ({_steps_seen(watcher)})"
        )
    return f"the training of {watcher.watched.root_type} ended too early: {_steps_seen(watcher)}"


def _steps_seen(watcher: Watcher) -> str:
    """How many optimizer steps were seen, and how many are needed."""
    n, plan = watcher.epochs.n_steps, watcher.plan
    seen = f"{n} optimizer step{'s were' if n != 1 else ' was'} seen"
    return f"{seen}, at least {plan.n_least} are needed, {plan.n_steps} with the times of layers"


def inputs_of(
    model: nn.Module, seen: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> tuple[Any, ...] | dict[str, Any]:
    """Positional and keyword inputs as one of the two. Raises DlperfError where they cannot be
    (positional ones that have no name beside keywords).
    """
    import inspect

    args, kwargs = seen
    if not kwargs:
        return tuple(args)
    if not args:
        return dict(kwargs)
    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
        elif (
            parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
            and parameter.name in named
        ):
            raise DlperfError(
                f"{type(model).__name__}.forward takes {parameter.name} by position and others by"
                " keyword"
            )
    return named


def _listed(values: Iterable[float]) -> str:
    shown = [units.format_seconds(value) for value in values]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:5], "...", shown[-1]])

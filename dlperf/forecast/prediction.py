"""Trace x Machine x predictor -> Prediction: items of time gathered into ops, layers, the step."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_count, check_type
from dlperf.core.files import write_json
from dlperf.core.host import usual_threads
from dlperf.core.machine import Machine
from dlperf.core.trace import LOSS, Trace
from dlperf.ops import counts
from dlperf.ops import roofs as measured_roofs
from dlperf.predictors import registry
from dlperf.predictors.allocator.simulation import POLICIES, policy_of
from dlperf.predictors.base import Prices
from dlperf.predictors.layer_traffic import LayerTraffic, layer_traffic

if TYPE_CHECKING:
    from dlperf.core.loader_sample import SampledLoader
    from dlperf.core.measurement import Measurement
    from dlperf.forecast.allocator_recommendations import PageFaults
    from dlperf.forecast.epoch import Epoch

SCHEMA, SCHEMA_VERSION = "dlperf.prediction", 1
_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Step:
    """A step's predicted time by phase, in seconds; None where the predictor does not speak of a
    phase.

    `low_s`..`high_s` is a 90 % interval for the median step of a fresh process on a quiet machine.
    """

    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    zero_grad_s: float | None
    total_s: float | None
    low_s: float | None
    high_s: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, repr=False)
class Prediction(Displayed, by="dlperf.report.summaries"):
    """What a predictor says of a trace on a machine. `workers` is how many processes run such a
    step at once (:func:`dlperf.forecast.worker_processes.predict_co_run`).

    >>> # prediction.step.total_s; prediction.layers (DataFrame); prediction.ops (DataFrame)
    """

    trace: Trace
    machine: Machine
    threads: int
    predictor: str
    prices: Prices
    warnings: tuple[str, ...] = ()
    malloc: str = "default"
    workers: int = 1
    is_cross_machine: bool = False

    @cached_property
    def step(self) -> Step:
        """The sums of the items by phase."""
        sums: dict[str, float | None] = {}
        for phase in ("zero_grad", *_PHASES):
            terms = [item.seconds for item in self.prices.items if item.phase == phase]
            sums[phase] = math.fsum(terms) if phase in self.prices.phases else None
        if self.prices.unsupported:
            for phase in _PHASES:
                sums[phase] = None
        needed = ("forward",) if self.trace.inference else ("zero_grad", *_PHASES)
        parts = [sums[phase] for phase in needed]
        total = (
            None
            if any(part is None for part in parts)
            else math.fsum(part for part in parts if part is not None)
        )
        low, high = self.prices.low_factor, self.prices.high_factor
        return Step(
            sums["forward"],
            sums["backward"],
            sums["optimizer"],
            sums["zero_grad"],
            total,
            None if total is None or low is None else low * total,
            None if total is None or high is None else high * total,
            self.prices.peak_memory_bytes,
        )

    @cached_property
    def layer_shares(self) -> dict[str, dict[tuple[str, str], float]]:
        """Seconds of every layer's row by (bound, source)."""
        shares: dict[str, dict[tuple[str, str], float]] = {}
        for item in self.prices.items:
            if item.phase != "zero_grad":
                shares.setdefault(item.layer, defaultdict(float))[item.bound, item.source] += (
                    item.seconds
                )
        return shares

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row per module that did work, in the order of first execution, the loss last.

        Columns: layer, type, forward_s, backward_s, optimizer_s (NaN where the predictor does not
        speak), flops, bytes (of all phases), bound and source (those of the row's largest share of
        time).
        """
        order = {layer.name: (place, layer.type) for place, layer in enumerate(self.trace.layers)}
        seconds: dict[str, dict[str, float]] = {}
        for item in self.prices.items:
            if item.phase == "zero_grad":
                continue
            row = seconds.setdefault(item.layer, dict.fromkeys(_PHASES, 0.0))
            row[item.phase] += item.seconds
        flops: dict[str, float] = defaultdict(float)
        n_bytes: dict[str, float] = defaultdict(float)
        for op, op_flops, op_bytes in zip(self.trace.ops, *counts.totals(self.trace)):
            if op.phase == "zero_grad":
                continue
            for layer, share_frac in op.shares or ((op.layer, 1.0),):
                flops[layer] += share_frac * op_flops
                n_bytes[layer] += share_frac * op_bytes
        for layer in self.prices.unsupported:
            seconds.setdefault(layer, dict.fromkeys(_PHASES, math.nan))
        rows = []
        for layer in sorted(seconds, key=lambda name: order.get(name, (len(order), ""))[0]):
            by_phase = {
                phase: (
                    math.nan
                    if phase not in self.prices.phases or layer in self.prices.unsupported
                    else seconds[layer][phase]
                )
                for phase in _PHASES
            }
            both = self.layer_shares.get(layer)
            bound = _largest(both, 0) if both else None
            source = _largest(both, 1) if both else None
            rows.append(
                {
                    "layer": layer,
                    "type": "Loss" if layer == LOSS else order.get(layer, (0, ""))[1],
                    **{f"{phase}_s": value for phase, value in by_phase.items()},
                    "flops": round(flops[layer]),
                    "bytes": round(n_bytes[layer]),
                    "bound": bound,
                    "source": source,
                }
            )
        return pd.DataFrame(
            rows,
            columns=[
                "layer",
                "type",
                "forward_s",
                "backward_s",
                "optimizer_s",
                "flops",
                "bytes",
                "bound",
                "source",
            ],
        )

    @cached_property
    def ops(self) -> pd.DataFrame:
        """One row per item of time: op (name or what it is), layer, phase, seconds, what, bound,
        source, flops, bytes.
        """
        flops, n_bytes = counts.totals(self.trace)
        rows = []
        for item in self.prices.items:
            with_op = item.op >= 0
            rows.append(
                {
                    "op": self.trace.ops[item.op].name if with_op else item.what,
                    "layer": item.layer,
                    "phase": item.phase,
                    "seconds": item.seconds,
                    "what": item.what,
                    "bound": item.bound,
                    "source": item.source,
                    "flops": item.share * flops[item.op] if with_op else 0,
                    "bytes": item.share * n_bytes[item.op] if with_op else 0,
                    "index": item.op,
                }
            )
        return pd.DataFrame(
            rows,
            columns=[
                "op",
                "layer",
                "phase",
                "seconds",
                "what",
                "bound",
                "source",
                "flops",
                "bytes",
                "index",
            ],
        )

    @cached_property
    def roofs(self) -> measured_roofs.Roofs:
        """The machine's measured roofs: bandwidth by level of the memory, peak arithmetic by
        precision.
        """
        return measured_roofs.roofs_of(self.machine, self.threads)

    @cached_property
    def layer_traffic(self) -> tuple[LayerTraffic, ...]:
        """What every layer moves at every level of the memory, by phase: a model; see
        :mod:`dlperf.predictors.traffic`.
        """
        return layer_traffic(self.trace, self.machine, self.threads, self.roofs)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """The layers under the hierarchical roofline (Yang et al. 2019): one row per layer and
        phase that did work, in the order of execution.

        Columns: layer, phase, dtype, flops, fma_frac (fused multiply-adds among floating-point
        instructions), L1_bytes, L2_bytes, L3_bytes, DRAM_bytes (NaN for a level that the processor
        is not known to have), roof (``compute`` or the level that binds), least_s (the time that
        this roof allows).
        """
        rows = [
            {
                "layer": t.layer,
                "phase": t.phase,
                "dtype": t.dtype,
                "flops": round(t.flops),
                "fma_frac": _or_nan(t.fma_frac),
                **{f"{level}_bytes": _or_nan(t.bytes_at(level)) for level in measured_roofs.LEVELS},
                "roof": t.binding(self.roofs),
                "least_s": _or_nan(t.least_s(self.roofs)),
            }
            for t in self.layer_traffic
        ]
        levels = [f"{level}_bytes" for level in measured_roofs.LEVELS]
        return pd.DataFrame(
            rows,
            columns=["layer", "phase", "dtype", "flops", "fma_frac", *levels, "roof", "least_s"],
        )

    @cached_property
    def unpriced(self) -> dict[str, int]:
        """The ops that could not be priced, by name, with their number."""
        found: dict[str, int] = defaultdict(int)
        for index in {
            item.op for item in self.prices.items if item.source == "unpriced" and item.op >= 0
        }:
            found[self.trace.ops[index].packet] += 1
        return dict(sorted(found.items()))

    @cached_property
    def priced_time_frac(self) -> float:
        """1 less the share of the time that stands on unpriced ops."""
        total = math.fsum(item.seconds for item in self.prices.items)
        unpriced = math.fsum(
            item.seconds for item in self.prices.items if item.source == "unpriced"
        )
        return 1.0 - unpriced / total if total else 1.0

    @cached_property
    def page_faults(self) -> PageFaults | None:
        """What page faults cost and what would cure them, where they are a notable part of the
        step; see :func:`dlperf.forecast.allocator_recommendations.recommend_allocators`.
        """
        from dlperf.forecast.allocator_recommendations import recommend_allocators

        return recommend_allocators(self)

    def cross_machine(self) -> Prediction:
        """The same prediction for another machine or torch than the file was measured on:
        everything extrapolated, the interval twice as wide.

        Said twice it stays the same.
        """
        if self.is_cross_machine:
            return self
        prices = self.prices
        items = tuple(
            (
                replace(item, source="extrapolated")
                if item.source in ("measured", "interpolated")
                else item
            )
            for item in prices.items
        )
        low = (
            None if prices.low_factor is None else max(0.05, 1.0 - 2.0 * (1.0 - prices.low_factor))
        )
        high = None if prices.high_factor is None else 1.0 + 2.0 * (prices.high_factor - 1.0)
        return replace(
            self,
            prices=replace(prices, items=items, low_factor=low, high_factor=high),
            is_cross_machine=True,
        )

    def epoch(
        self,
        samples: int,
        epochs: int = 1,
        val_samples: int = 0,
        test_samples: int = 0,
        evaluation: Prediction | None = None,
        last: Prediction | None = None,
        loader: SampledLoader | None = None,
        workers: int | None = None,
        **loop: Any,
    ) -> Epoch:
        """Forecast an epoch and a whole run; see :func:`dlperf.forecast.epoch.forecast`. `loop` are
        fields of :class:`dlperf.forecast.loop.Loop`, such as ``accumulate=4``.

        With `workers` so many processes are started, and each trains on a share; see
        :func:`dlperf.forecast.worker_processes.forecast_workers`. The predictors of published
        strategies have a law of their own:
        :func:`dlperf.forecast.published_strategies.forecast_published`.
        """
        from dlperf.forecast.epoch import forecast
        from dlperf.forecast.loop import Loop

        known = [field.name for field in fields(Loop)]
        if unknown := set(loop) - set(known):
            raise DlperfError(
                f"epoch: {', '.join(sorted(unknown))} is unknown; a loop has {', '.join(known)}"
            )
        if registry.evaluates_by_forward(self.predictor):
            from dlperf.forecast.published_strategies import forecast_published

            return forecast_published(self, workers, samples, epochs, val_samples, test_samples)
        if workers is not None:
            from dlperf.forecast.worker_processes import forecast_workers

            return forecast_workers(
                self,
                workers,
                samples,
                epochs,
                val_samples,
                test_samples,
                evaluation,
                last,
                Loop(**loop),
                loader,
            )
        return forecast(
            self, samples, epochs, val_samples, test_samples, evaluation, last, Loop(**loop), loader
        )

    def to_json(self, epoch: Epoch | None = None) -> dict[str, Any]:
        """The prediction as JSON data (schema in the README)."""
        step, faults = self.step, self.page_faults
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.trace.target,
            "batch_size": self.trace.batch_size,
            "threads": self.threads,
            "inference": self.trace.inference,
            "machine": self.machine.path or self.machine.cpu.model,
            "predictor": self.predictor,
            "malloc": self.malloc,
            "workers": self.workers,
            "step": {
                "forward_s": step.forward_s,
                "backward_s": step.backward_s,
                "optimizer_s": step.optimizer_s,
                "zero_grad_s": step.zero_grad_s,
                "total_s": step.total_s,
                "low_s": step.low_s,
                "high_s": step.high_s,
                "peak_memory_bytes": step.peak_memory_bytes,
            },
            "layers": [
                {
                    key: None if isinstance(value, float) and math.isnan(value) else value
                    for key, value in row.items()
                }
                for row in self.layers.astype(object).to_dict("records")
            ],
            "epoch": None if epoch is None else epoch.to_json(),
            "coverage": {
                "priced_time_frac": self.priced_time_frac,
                "unpriced": [{"op": op, "count": count} for op, count in self.unpriced.items()],
                "unsupported": list(self.prices.unsupported),
            },
            "page_faults": (
                None
                if faults is None
                else {
                    "seconds": faults.seconds,
                    "recommendations": [
                        {"malloc": c.malloc, "settings": c.settings, "saved_s": c.saved_s}
                        for c in faults.recommendations
                    ],
                }
            ),
            "warnings": list(self.warnings),
            "notes": [*self.trace.notes, *self.prices.notes],
            "versions": {**self.trace.versions, "machine": self.machine.cpu.model},
        }

    def save(self, path: str | Path) -> None:
        """Write the prediction as JSON, whole or not at all."""
        write_json(path, self.to_json())


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _largest(shares: dict[tuple[str, str], float], place: int) -> str:
    sums: dict[str, float] = defaultdict(float)
    for key, value in shares.items():
        sums[key[place]] += value
    return max(sums, key=lambda name: sums[name])


def predict(
    trace: Trace,
    machine: Machine,
    threads: int | None = None,
    predictor: str = "calibrated",
    malloc: str = "default",
    point: Measurement | None = None,
) -> Prediction:
    """Predict a recorded step on a measured machine without running it.

    `threads` defaults to torch's own number where the machine file holds it, else to the nearest
    that it holds. `malloc` is the policy of memory that the process is started with, one of
    :data:`dlperf.predictors.allocator.simulation.POLICIES`. `point` is a measurement of the network for the predictors
    that rest on one (``viebke-a``, ``viebke-b``).
    Raises DlperfError for an argument of another type, an unknown predictor or policy, threads below 1, where the machine file lacks what the predictor
    needs, or for a point of another network.
    """
    for name, value, kind, way in (
        ("trace", trace, Trace, "dlperf.record makes one"),
        ("machine", machine, Machine, "Machine.load(path) reads one"),
    ):
        check_type("predict", name, value, kind, way)
    if threads is None:
        threads = usual_threads(machine)
    check_count("threads", threads)
    check_type("predict", "predictor", predictor, str, f"one of {', '.join(registry.names())}")
    check_type("predict", "malloc", malloc, str, f"one of {', '.join(POLICIES)}")
    warnings = []
    if threads > machine.cpu.n_cores:
        warnings.append(
            f"{threads} threads asked for, the machine has {machine.cpu.n_cores} cores:"
            " extrapolated"
        )
    if machine.threads and threads not in machine.threads:
        warnings.append(
            f"the machine file holds {', '.join(map(str, machine.threads))} thread(s), not"
            f" {threads}: extrapolated; dlperf calibrate --threads {threads} measures it"
        )
    prices = registry.get(predictor, point).price(trace, machine, threads, policy_of(malloc).name)
    return Prediction(
        trace, machine, threads, predictor, prices, (*warnings, *prices.warnings), malloc
    )

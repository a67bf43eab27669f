"""Prediction: trace x machine x predictor -> step, layers, ops, memory traffic, epochs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError, check_count, check_type
from dlperf.core.files import write_json
from dlperf.core.host import usual_threads
from dlperf.core.loader_sample import SampledLoader
from dlperf.core.machine import Machine
from dlperf.core.machine_doubts import doubts_of, find_unmeasured_threads, is_cross_machine
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import PHASES, PredictedStep
from dlperf.core.state import State, usual_state
from dlperf.core.trace import LOSS, Trace
from dlperf.core.units import format_bytes, format_seconds
from dlperf.core.what_if import MachineFactors
from dlperf.forecast.epoch import Epoch, forecast
from dlperf.forecast.loop import Loop
from dlperf.forecast.worker_processes import (
    forecast_published,
    forecast_workers,
    predict_co_run,
)
from dlperf.ops import counts
from dlperf.ops import roofs as measured_roofs
from dlperf.predictors import registry
from dlperf.predictors.allocator.device_memory import DeviceMemory, memory_on
from dlperf.predictors.allocator.policies import POLICIES, policy_of
from dlperf.predictors.data_sheet import DATA_SHEET
from dlperf.predictors.layer_traffic import LayerTraffic, layer_traffic
from dlperf.predictors.page_faults import BOUND

if TYPE_CHECKING:
    import pandas as pd

SCHEMA, SCHEMA_VERSION = "dlperf.prediction", 1
_LAYER_COLUMNS = [
    *("layer", "type", *(f"{phase}_s" for phase in PHASES)),
    *("flops", "bytes", "bound", "source"),
]
_LEVELS = tuple(f"{level}_bytes" for level in measured_roofs.LEVELS)


WORTH_FRAC = 0.05
"""Least share of page faults in the step for which recommendations are looked for."""


@dataclass(frozen=True)
class AllocatorRecommendation:
    """An allocator policy, the settings that start a process with it, and the seconds that it takes
    off the predicted step.
    """

    malloc: str
    settings: str
    saved_s: float


@dataclass(frozen=True)
class PageFaults:
    """Seconds of a predicted step (`step_s`) for touching fresh pages and giving them back; the
    recommendations by what they save, the best first.
    """

    seconds: float
    step_s: float
    recommendations: tuple[AllocatorRecommendation, ...] = ()

    def sentence(self) -> str:
        """The cost, and the best recommendation that needs nothing installed.

        >>> best = AllocatorRecommendation("tuned", "MALLOC_MMAP_MAX_=0", 0.0101)
        >>> PageFaults(0.0123, 0.0807, (best,)).sentence()
        '12.3 ms of 80.7 ms; with MALLOC_MMAP_MAX_=0 the step would take 70.6 ms'
        """
        best = next((one for one in self.recommendations if "LD_PRELOAD" not in one.settings), None)
        way_out = ""
        if best is not None:
            other = format_seconds(self.step_s - best.saved_s)
            way_out = f"; with {best.settings} the step would take {other}"
        return f"{format_seconds(self.seconds)} of {format_seconds(self.step_s)}{way_out}"

    def to_json(self) -> dict[str, Any]:
        """The cost and the recommendations as JSON data."""
        return {"seconds": self.seconds, "recommendations": [*map(asdict, self.recommendations)]}


def page_fault_cost(prediction: PredictedStep) -> PageFaults | None:
    """Cost of page faults where it is at least WORTH_FRAC of the step; else None."""
    step_s = prediction.step.total_s
    seconds = math.fsum(item.seconds for item in prediction.prices.items if item.bound == BOUND)
    return PageFaults(seconds, step_s) if step_s and seconds >= WORTH_FRAC * step_s else None


def recommend_allocators(prediction: PredictedStep) -> PageFaults | None:
    """Cost of page faults with recommendations; None for a small share of the step.

    Each other policy's step is predicted anew, since memory that is kept is also colder than pages
    just zeroed. A policy that saves nothing is left out. There are none for kernels that were
    profiled on another machine.
    """
    cost, step_s = page_fault_cost(prediction), prediction.step.total_s
    if cost is None or step_s is None:
        return None
    if prediction.profiled_on is not None:
        return cost  # of kernels that lie elsewhere in the caches, nothing is known here
    price = registry.get(prediction.predictor).price
    found = []
    for name, policy in POLICIES.items():
        if name not in ("default", prediction.malloc):
            prices = price(prediction.trace, prediction.machine, prediction.threads, name)
            alone = replace(prediction, prices=prices.at_state(prediction.state), workers=1)
            at_factors = alone.prices.by_bound().at_state(prediction.what_if.state)
            alone = replace(alone, prices=at_factors)
            other = predict_co_run(alone, prediction.workers).step.total_s
            if other is not None and other < step_s:
                found.append(AllocatorRecommendation(name, policy.settings, step_s - other))
    return replace(cost, recommendations=tuple(sorted(found, key=lambda one: -one.saved_s)))


@dataclass(frozen=True, repr=False)
class Prediction(PredictedStep, Displayed, by="dlperf.report.summaries"):
    """Prediction of a trace on a machine, by a predictor. `device_memory` is its memory on an
    accelerator.

    >>> # prediction.step.total_s; prediction.layers (DataFrame); prediction.ops (DataFrame)
    """

    device_memory: DeviceMemory | None = None

    @cached_property
    def layers(self) -> pd.DataFrame:
        """One row per module that did work, in the order of first execution, the loss last.

        Columns: layer, type, forward_s, backward_s, optimizer_s (NaN for a phase that the predictor
        does not support), flops, bytes (of all phases), bound and source (those of the row's
        largest share of time).
        """
        import pandas as pd  # here: a report on a wrapped script does not wait for it

        return pd.DataFrame(list(self.layer_rows), columns=_LAYER_COLUMNS)

    @cached_property
    def layer_rows(self) -> tuple[dict[str, Any], ...]:
        """The rows of :attr:`layers`, each by column."""
        order = {layer.name: (index, layer.type) for index, layer in enumerate(self.trace.layers)}
        seconds: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
        for item in self.prices.items:
            if item.phase != "zero_grad":
                seconds[item.layer][item.phase] += item.seconds
        for layer in self.prices.unsupported:
            seconds[layer] = {}
        work: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for op, flops, n_bytes in zip(self.trace.ops, *counts.totals(self.trace)):
            if op.phase != "zero_grad":
                for layer, share_frac in op.layer_shares:
                    work[layer][0] += share_frac * flops
                    work[layer][1] += share_frac * n_bytes
        rows = []
        for layer in sorted(seconds, key=lambda name: order.get(name, (len(order), ""))[0]):
            shares = self.layer_shares.get(layer)
            row = (
                layer,
                "Loss" if layer == LOSS else order.get(layer, (0, ""))[1],
                *(
                    seconds[layer].get(phase, math.nan) if phase in self.prices.phases else math.nan
                    for phase in PHASES
                ),
                *map(round, work[layer]),
                *(_largest(shares, key) if shares else None for key in (0, 1)),
            )
            rows.append(dict(zip(_LAYER_COLUMNS, row)))
        return tuple(rows)

    @cached_property
    def ops(self) -> pd.DataFrame:
        """One row per item of time.

        Columns: op (its name, or what the item is), layer, phase, seconds, what, bound, source,
        flops, bytes, index (of the op in the trace; -1 for none).
        """
        import pandas as pd

        flops, n_bytes = counts.totals(self.trace)
        rows = [
            (
                self.trace.ops[item.op].name if item.op >= 0 else item.what,
                item.layer,
                item.phase,
                item.seconds,
                item.what,
                item.bound,
                item.source,
                item.share * flops[item.op] if item.op >= 0 else 0,
                item.share * n_bytes[item.op] if item.op >= 0 else 0,
                item.op,
            )
            for item in self.prices.items
        ]
        return pd.DataFrame(
            rows, columns="op layer phase seconds what bound source flops bytes index".split()
        )

    @cached_property
    def roofs(self) -> measured_roofs.Roofs:
        """Measured roofs: bandwidth by memory level, peak arithmetic by precision."""
        return measured_roofs.roofs_of(self.machine, self.threads).at_state(self.what_if.state)

    @cached_property
    def layer_traffic(self) -> tuple[LayerTraffic, ...]:
        """Modelled bytes of every layer at every memory level, by phase."""
        return layer_traffic(self.trace, self.machine, self.threads, self.roofs)

    @cached_property
    def traffic(self) -> pd.DataFrame:
        """Hierarchical roofline (Yang et al. 2019): one row per layer and phase with work, in the
        order of execution.

        Columns: layer, phase, dtype, flops, fma_frac (fused multiply-adds among floating-point
        instructions), L1_bytes, L2_bytes, L3_bytes, DRAM_bytes (NaN for a level that the processor
        is not known to have), roof (``compute`` or the level that binds), least_s (the time that
        this roof allows).
        """
        import pandas as pd

        rows = [
            (
                t.layer,
                t.phase,
                t.dtype,
                round(t.flops),
                t.fma_frac,
                *map(t.bytes_at, measured_roofs.LEVELS),
                t.binding(self.roofs),
                t.least_s(self.roofs),
            )
            for t in self.layer_traffic
        ]
        frame = pd.DataFrame(
            rows,
            columns=["layer", "phase", "dtype", "flops", "fma_frac", *_LEVELS, "roof", "least_s"],
        )
        return frame.astype(dict.fromkeys(("fma_frac", *_LEVELS, "least_s"), float))

    @cached_property
    def page_faults(self) -> PageFaults | None:
        """Cost of page faults and allocator recommendations; None for a small share of the step."""
        return recommend_allocators(self)

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
        """Forecast of an epoch and of a whole run (:func:`dlperf.forecast.epoch.forecast`).

        `loop` are fields of :class:`dlperf.forecast.loop.Loop`, such as ``accumulate=4``. With
        `workers`, a given number of processes train on a share each
        (:func:`dlperf.forecast.worker_processes.forecast_workers`). The predictors of published
        strategies have an equation of their own
        (:func:`dlperf.forecast.worker_processes.forecast_published`).
        """
        known = [field.name for field in fields(Loop)]
        if unknown := set(loop) - set(known):
            raise DlperfError(
                f"epoch: {', '.join(sorted(unknown))} is unknown; a loop has {', '.join(known)}"
            )
        run = (samples, epochs, val_samples, test_samples)
        if registry.evaluates_by_forward(self.predictor):
            return forecast_published(self, workers, *run)
        around = (evaluation, last, Loop(**loop), loader)
        if workers is None:
            return forecast(self, *run, *around)
        return forecast_workers(self, workers, *run, *around)

    def to_json(
        self, epoch: Epoch | None = None, page_faults: PageFaults | None = None
    ) -> dict[str, Any]:
        """The prediction as JSON data; nothing is predicted for it: `page_faults` are null unless
        given, for example as :attr:`page_faults`.
        """
        trace, source, device = self.trace, self.profiled_on, self.device_memory
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": trace.target,
            "batch_size": trace.batch_size,
            "threads": self.threads,
            "inference": trace.inference,
            "machine": self.machine.path or self.machine.cpu.model,
            "predictor": self.predictor,
            "malloc": self.malloc,
            "workers": self.workers,
            "state": asdict(self.state),
            "what_if": self.what_if.changed,
            "profiled_on": source and (source.path or source.cpu.model),
            "step": {
                **asdict(self.step),
                "peak_allocated_bytes": None if device is None else device.peak_allocated_bytes,
                "peak_reserved_bytes": None if device is None else device.peak_reserved_bytes,
            },
            "layers": [
                {name: None if value != value else value for name, value in row.items()}
                for row in self.layer_rows
            ],
            "epoch": None if epoch is None else epoch.to_json(),
            "coverage": {
                "priced_time_frac": self.priced_time_frac,
                "unpriced": [{"op": op, "count": count} for op, count in self.unpriced.items()],
                "unsupported": list(self.prices.unsupported),
            },
            "page_faults": None if page_faults is None else page_faults.to_json(),
            "device_memory": None if device is None else device.to_json(),
            "warnings": list(self.warnings),
            "notes": [*trace.notes, *self.prices.notes],
            "versions": {**trace.versions, "machine": self.machine.cpu.model},
        }

    def save(self, path: str | Path) -> None:
        """Write the prediction with its page faults as JSON, whole or not at all."""
        write_json(path, self.to_json(page_faults=self.page_faults))


def _largest(shares: dict[tuple[str, str], float], key: int) -> str:
    """The bound (key 0) or the source (key 1) with the most seconds."""
    sums: dict[str, float] = defaultdict(float)
    for names, value in shares.items():
        sums[names[key]] += value
    return max(sums, key=lambda name: sums[name])


def predict(
    trace: Trace,
    machine: Machine,
    threads: int | None = None,
    predictor: str = "calibrated",
    malloc: str = "default",
    point: Measurement | None = None,
    state: State | Sequence[State] | None = None,
    what_if: Mapping[str, float] | None = None,
    profiled_on: Machine | None = None,
) -> Prediction:
    """Predict a recorded step on a measured machine without running it.

    `threads` defaults to torch's own number where the machine file contains it, else to the nearest
    that it contains. `malloc` is the allocator policy of the process, one of
    :data:`dlperf.predictors.allocator.policies.POLICIES`. `point` is a measurement of the network
    for the predictors that need one (``viebke-a``, ``viebke-b``). `state` is the machine's
    (:data:`dlperf.core.state.REFERENCE`: that of its file), of several the median; by default it is
    the median of the states that the file contains. The interval contains the spread of several.
    `what_if` are factors on the machine's resources by name
    (:class:`dlperf.core.what_if.MachineFactors`), such as ``{"memory_bandwidth": 2}``; the
    interval is wider by what is unknown of their overlap. For a machine file of another
    machine or torch than this, all times are extrapolated and the interval is twice as wide; the
    prediction's warnings say so, and what else makes the file doubtful. A
    device of a data sheet is predicted by ``data-sheet`` where the predictor is ``calibrated``.
    With `profiled_on`, the kernels are those of that machine, carried over to `machine` by what
    bounds them (:mod:`dlperf.predictors.transfer`); a `point` is then a measurement of the step
    there.

    Raises DlperfError for an argument of another type, an unknown predictor or policy, threads
    below 1, a machine file without what the predictor needs, a point of another network, or a
    what-if factor that is unknown or not positive.
    """
    for name, value, kind, way in (
        ("trace", trace, Trace, "dlperf.record makes one"),
        ("machine", machine, Machine, "Machine.load(path) reads one"),
        ("predictor", predictor, str, f"one of {', '.join(registry.names())}"),
        ("malloc", malloc, str, f"one of {', '.join(POLICIES)}"),
    ):
        check_type("predict", name, value, kind, way)
    if point is not None:
        check_type("predict", "point", point, Measurement, "Measurement.load(path) reads one")
    if state is not None:
        check_type("predict", "state", state, (State, list, tuple), "machine.states are some")
    given = (state,) if isinstance(state, State) else tuple(state or ())
    for one in given:
        check_type("predict", "state", one, State, "machine.states are some")
    if profiled_on is not None:
        check_type("predict", "profiled_on", profiled_on, Machine, "Machine.load(path) reads one")
    factors = MachineFactors.of(what_if or {})
    if threads is None:
        threads = usual_threads(machine)
    check_count("threads", threads)
    is_device = machine.data_sheet is not None
    if profiled_on is not None:
        if profiled_on.data_sheet is not None:
            raise DlperfError(
                f"{profiled_on.path or profiled_on.cpu.model}: is a device by its data sheet, on"
                " which nothing was profiled; give the file of a calibrated machine"
            )
        if machine.data_sheet is not None and machine.data_sheet.kind != "processor":
            raise DlperfError(
                f"{machine.path or machine.cpu.model}: is an accelerator; kernels of a processor"
                " are carried over to a processor"
            )
        is_device = False
    if is_device and predictor == "calibrated":
        predictor = DATA_SHEET
    if is_device and predictor != DATA_SHEET:
        raise DlperfError(
            f"predictor {predictor!r} needs a measured machine; {machine.path or machine.cpu.model}"
            " is a device by its data sheet: leave the predictor out"
        )
    warnings = doubts_of(machine, trace, threads)
    if threads > machine.cpu.n_cores:
        warnings.append(
            f"{threads} threads asked for, the machine has {machine.cpu.n_cores} cores:"
            " extrapolated"
        )
    if unmeasured := find_unmeasured_threads(machine, threads):
        warnings.append(unmeasured)
    if profiled_on is not None:
        versions = profiled_on.versions.get("torch"), machine.versions.get("torch")
        if None not in versions and versions[0] != versions[1]:
            warnings.append(
                f"kernels were profiled with torch {versions[0]}, the machine file has"
                f" {versions[1]}: their kernels may differ"
            )
    chosen = registry.get(predictor, point, profiled_on)
    prices = chosen.price(trace, machine, threads, policy_of(malloc).name)
    memory = memory_on(trace, machine)
    if memory is not None:
        notes = (*prices.notes, *memory.notes)
        prices = replace(prices, peak_memory_bytes=memory.peak_reserved_bytes, notes=notes)
    elif 0 < machine.cpu.memory_bytes < (prices.peak_memory_bytes or 0):
        warnings.append(
            f"the step needs {format_bytes(prices.peak_memory_bytes or 0)} of memory, the machine"
            f" has {format_bytes(machine.cpu.memory_bytes)}: it does not fit"
        )
    states = given or machine.states
    at = usual_state(states)
    prediction = Prediction(
        trace,
        machine,
        threads,
        predictor,
        prices.at_state(at, () if len(given) == 1 else states),
        (*warnings, *prices.warnings),
        malloc,
        state=at,
        profiled_on=profiled_on,
        device_memory=memory,
    ).under(factors)
    return prediction.cross_machine() if is_cross_machine(machine) else prediction

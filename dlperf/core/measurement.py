"""A measured training step as data: times of the step and its layers, with their samples.

Nothing here imports torch; :mod:`dlperf.profiler.step_profiler` takes the measurement.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlperf.core import files
from dlperf.core.clock import Samples, samples_from_record
from dlperf.core.conversion import (
    PositiveSamplesRecord,
    SamplesRecord,
    check_unique,
    convert,
    refuse,
)
from dlperf.core.device_clock import DevicePeaks
from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.records.measurement import MeasurementRecord
from dlperf.core.state import Reading, State
from dlperf.core.trace import Trace, trace_from_record

if TYPE_CHECKING:
    import pandas as pd

SCHEMA, SCHEMA_VERSION = files.MEASUREMENT, 5
LAYER_PHASES = ("forward", "backward", "optimizer")
STEP_PHASES = ("zero_grad", "forward", "backward", "optimizer", "total")


@dataclass(frozen=True)
class LayerTimes:
    """One layer's times in seconds a step, summed over its calls; None where a phase could not be
    attributed to it.
    """

    layer: str
    type: str
    forward: Samples | None
    backward: Samples | None = None
    optimizer: Samples | None = None

    def phase(self, name: str) -> Samples | None:
        """The samples of ``forward``, ``backward`` or ``optimizer``."""
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}[
            name
        ]


@dataclass(frozen=True)
class OpTimes:
    """Times of all calls of one operator (``aten.addmm``) in a phase of a step, in seconds."""

    op: str
    phase: str
    n_calls: int
    times: Samples


@dataclass(frozen=True, repr=False)
class Measurement(Displayed, by="dlperf.report.summaries"):
    """A step of a target, measured.

    `step` holds, for ``zero_grad``, ``forward`` (loss included), ``backward``, ``optimizer`` and
    ``total``, the samples of steps without any instrumentation; with `inference` only ``forward``
    and ``total``, of a compiled step only ``optimizer`` and ``total``. `layers` come from a second,
    instrumented pass, the instrument's own cost subtracted. `repeat` holds the total of an
    independent repetition, if one was made: the two medians' distance is the repeatability. `noise`
    counts disturbed samples and faults.
    `peak_memory_bytes` is the most that three steps add to a fresh process
    (:func:`dlperf.profiler.peak_memory.measure_peak_memory`), None where it was not asked for.
    `trace` is the recorded step, so that a prediction needs no code; None where it was not
    recorded. `ops` are the times of operators, of a profile of torch.profiler alone. `states` are
    readings of the machine's state right before and right after the measurement. `device_memory`
    is that of a step on an accelerator, which is then the `machine`.
    """

    target: str
    batch_size: int
    threads: int
    step: dict[str, Samples]
    layers: tuple[LayerTimes, ...]
    inference: bool = False
    repeat: Samples | None = None
    noise: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    peak_memory_bytes: int | None = None
    trace: Trace | None = None
    ops: tuple[OpTimes, ...] = ()
    states: tuple[Reading, ...] = ()
    device_memory: DevicePeaks | None = None

    def __post_init__(self) -> None:
        if "total" not in self.step:
            raise DlperfError("measurement: the step has no 'total' samples")

    @property
    def repeatability_frac(self) -> float | None:
        """Repeatability: |median - median of the repetition| / median of the step; None
        without a repetition.
        """
        if self.repeat is None:
            return None
        return abs(self.repeat.median - self.step["total"].median) / self.step["total"].median

    def states_over(self, reference: Reading | None) -> tuple[State, ...]:
        """The machine's states around the measurement over a reference; none where either is
        unknown.
        """
        return () if reference is None else tuple(one.over(reference) for one in self.states)

    @property
    def frame(self) -> pd.DataFrame:
        """One row a layer: layer, type, forward_s, backward_s, optimizer_s (medians, NaN if
        unknown) and their ``*_spread_frac``.
        """
        import pandas as pd  # here: a wrapped script must not wait for it

        rows = []
        for times in self.layers:
            found = [times.phase(phase) for phase in LAYER_PHASES]
            values = [
                (math.nan, math.nan) if one is None else (one.median, one.spread_frac)
                for one in found
            ]
            rows.append((times.layer, times.type, *itertools.chain(*values)))
        columns = [f"{phase}_{kind}" for phase in LAYER_PHASES for kind in ("s", "spread_frac")]
        return pd.DataFrame(rows, columns=["layer", "type", *columns])

    def save(self, path: str | Path) -> None:
        """Write the measurement as JSON, whole or not at all."""
        files.write_json(path, self.to_json(), indent=1 if self.trace is None else None)

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read a measurement. Raises DlperfError naming the file and what is wrong with it."""
        return files.load(path, SCHEMA, SCHEMA_VERSION, cls.from_json, "Measure again.")

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "batch_size": self.batch_size,
            "threads": self.threads,
            "inference": self.inference,
            "peak_memory_bytes": self.peak_memory_bytes,
            "machine": self.machine,
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "noise": dict(self.noise),
            "states": [vars(reading) for reading in self.states],
            "step": {name: _to_json(self.step[name]) for name in STEP_PHASES if name in self.step},
            "repeat": _to_json(self.repeat),
            "layers": [
                {
                    "layer": t.layer,
                    "type": t.type,
                    "forward": _to_json(t.forward),
                    "backward": _to_json(t.backward),
                    "optimizer": _to_json(t.optimizer),
                }
                for t in self.layers
            ],
            "trace": None if self.trace is None else self.trace.to_json(),
            "ops": [
                {"op": o.op, "phase": o.phase, "n_calls": o.n_calls, "times": _to_json(o.times)}
                for o in self.ops
            ],
            **({} if self.device_memory is None else {"device_memory": vars(self.device_memory)}),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """The measurement that :meth:`to_json` wrote."""
        record = convert(data, MeasurementRecord)
        check_unique("layers[{}].layer", [row.layer for row in record.layers])
        phases = {name: _from_record(getattr(record.step, name)) for name in STEP_PHASES}
        trace = None if record.trace is None else trace_from_record(record.trace, "trace.")
        for name in ("batch_size", "inference") if trace is not None else ():
            if getattr(trace, name) != getattr(record, name):
                refuse(
                    f"trace.{name}",
                    getattr(trace, name),
                    f"that of the measurement, {getattr(record, name)}",
                )
        return cls(
            target=record.target,
            batch_size=record.batch_size,
            threads=record.threads,
            step={name: samples for name, samples in phases.items() if samples is not None},
            layers=tuple(
                LayerTimes(
                    r.layer,
                    r.type,
                    _from_record(r.forward),
                    _from_record(r.backward),
                    _from_record(r.optimizer),
                )
                for r in record.layers
            ),
            inference=record.inference,
            repeat=_from_record(record.repeat),
            noise=record.noise,
            notes=tuple(record.notes),
            versions=record.versions,
            machine=record.machine,
            peak_memory_bytes=record.peak_memory_bytes,
            trace=trace,
            states=record.states,
            device_memory=record.device_memory,
            ops=tuple(
                OpTimes(o.op, o.phase, o.n_calls, samples_from_record(o.times)) for o in record.ops
            ),
        )


def _to_json(samples: Samples | None) -> dict[str, Any] | None:
    if samples is None:
        return None
    return {
        "median_s": float(f"{samples.median:.6g}"),
        "samples_s": [float(f"{v:.6g}") for v in samples.values],
        "disturbed": samples.n_disturbed,
    }


def _from_record(record: SamplesRecord | PositiveSamplesRecord | None) -> Samples | None:
    return None if record is None else samples_from_record(record)

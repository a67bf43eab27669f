"""A measured training step as data: what the step and its layers took, with the samples behind every number.

Nothing here imports torch; :mod:`dlperf.stopwatch` takes the measurement.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlperf.clock import Samples
from dlperf.display import Displayed
from dlperf.errors import DlperfError
from dlperf.files import read_json, write_json

if TYPE_CHECKING:
    import pandas as pd

SCHEMA, SCHEMA_VERSION = "dlperf.measurement", 1
STEP_PHASES = ("zero_grad", "forward", "backward", "optimizer", "total")


@dataclass(frozen=True)
class LayerTimes:
    """One layer's times in seconds a step, summed over its calls; None where a phase could not be attributed to it."""

    layer: str
    type: str
    forward: Samples | None
    backward: Samples | None = None
    optimizer: Samples | None = None

    def phase(self, name: str) -> Samples | None:
        """The samples of ``forward``, ``backward`` or ``optimizer``."""
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}[name]


@dataclass(frozen=True, repr=False)
class Measurement(Displayed, by="dlperf.report.summaries"):
    """A step of a target, measured.

    `step` holds, for ``zero_grad``, ``forward`` (loss included), ``backward``, ``optimizer`` and ``total``, the samples
    of steps without any instrumentation; with `inference` only ``forward`` and ``total``. `layers` come from a second,
    instrumented pass, the instrument's own cost subtracted. `repeat` holds the total of an independent repetition, if
    one was made: the two medians' distance is the repeatability floor. `noise` says what was seen (disturbed samples, faults).
    `peak_memory_bytes` is the most that three steps add to a fresh process (:func:`dlperf.residence.measure_peak_memory`), None where it was not asked for.
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

    def __post_init__(self) -> None:
        for name in ("forward", "total"):
            if name not in self.step:
                raise DlperfError(f"measurement: the step has no {name!r} samples")

    @property
    def floor_frac(self) -> float | None:
        """Repeatability floor: |median - median of the repetition| / median of the step; None without a repetition."""
        if self.repeat is None:
            return None
        return abs(self.repeat.median - self.step["total"].median) / self.step["total"].median

    @property
    def frame(self) -> pd.DataFrame:
        """One row a layer: layer, type, forward_s, backward_s, optimizer_s (medians, NaN if unknown) and their ``*_spread_frac``."""
        import pandas as pd  # here: a wrapped script must not wait for it

        rows = []
        for times in self.layers:
            row: dict[str, Any] = {"layer": times.layer, "type": times.type}
            for phase in ("forward", "backward", "optimizer"):
                samples = times.phase(phase)
                row[f"{phase}_s"] = float("nan") if samples is None else samples.median
                row[f"{phase}_spread_frac"] = float("nan") if samples is None else samples.spread_frac
            rows.append(row)
        columns = ["layer", "type", *(f"{p}_{kind}" for p in ("forward", "backward", "optimizer") for kind in ("s", "spread_frac"))]
        return pd.DataFrame(rows, columns=columns)

    def save(self, path: str | Path) -> None:
        """Write the measurement as JSON, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Measurement:
        """Read a measurement. Raises DlperfError naming the file and what is wrong with it."""
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return cls.from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DlperfError(f"{path}: is damaged ({type(error).__name__}: {error}); measure again") from error
        except DlperfError as error:
            raise DlperfError(f"{path}: {error}; measure again") from error

    def to_json(self) -> dict[str, Any]:
        """The measurement as JSON data."""
        return {
            "schema": SCHEMA, "schema_version": SCHEMA_VERSION, "target": self.target, "batch_size": self.batch_size, "threads": self.threads,
            "inference": self.inference, "peak_memory_bytes": self.peak_memory_bytes,
            "machine": self.machine, "versions": dict(self.versions), "notes": list(self.notes), "noise": dict(self.noise),
            "step": {name: _to_json(samples) for name, samples in self.step.items()}, "repeat": _to_json(self.repeat),
            "layers": [
                {"layer": t.layer, "type": t.type, "forward": _to_json(t.forward), "backward": _to_json(t.backward), "optimizer": _to_json(t.optimizer)}
                for t in self.layers
            ],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measurement:
        """The measurement that :meth:`to_json` wrote."""
        step = {name: samples for name, row in data["step"].items() if (samples := _from_json(row)) is not None}
        return cls(
            target=data["target"], batch_size=data["batch_size"], threads=data["threads"], step=step,
            layers=tuple(
                LayerTimes(r["layer"], r["type"], _from_json(r["forward"]), _from_json(r["backward"]), _from_json(r["optimizer"])) for r in data["layers"]
            ),
            inference=data["inference"], repeat=_from_json(data["repeat"]), noise=data["noise"], notes=tuple(data["notes"]),
            versions=data["versions"], machine=data["machine"], peak_memory_bytes=data.get("peak_memory_bytes"),
        )  # fmt: skip


def _to_json(samples: Samples | None) -> dict[str, Any] | None:
    if samples is None:
        return None
    return {"median_s": float(f"{samples.median:.6g}"), "samples_s": [float(f"{v:.6g}") for v in samples.values], "disturbed": samples.n_disturbed}


def _from_json(row: dict[str, Any] | None) -> Samples | None:
    return None if row is None else Samples(tuple(row["samples_s"]), row["disturbed"])

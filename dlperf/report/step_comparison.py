"""One measured step beside the predictions of one or several predictors, as data: frames, CSV and
JSON.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dlperf.core import host
from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement
from dlperf.core.prediction import Step
from dlperf.core.state import State, usual_state
from dlperf.core.text import counted, frame_to_csv
from dlperf.core.units import format_percent
from dlperf.forecast.prediction import Prediction, page_fault_cost
from dlperf.ops.roofs import LEVELS
from dlperf.report.layer_comparison import (
    MEASURED,
    PREDICTED,
    LayerComparison,
    PhaseAccuracy,
    Times,
    accuracy_of,
    names_of,
    phases_of,
    root_of,
    rows_of,
)
from dlperf.report.layer_table import TreeLine, layer_tree
from dlperf.report.op_comparison import OpComparison, op_rows_of

if TYPE_CHECKING:
    import pandas as pd

SCHEMA, SET_SCHEMA, SCHEMA_VERSION = "dlperf.report", "dlperf.reports", 2
_TEXTS = ("bound", "source")


@dataclass(frozen=True)
class StepComparison:
    """Predictions of a step beside its measurement.

    `predictors` are the names of the predictions, each once. `created` is the time of the
    comparison (ISO 8601, UTC), `command` the command line that made it, if one did. A comparison
    that `recommends` allocators predicts the step with each. Where the predictions are for the
    state during the measurement, `blind` are the steps that were predicted without it, aligned with
    them.
    """

    predictions: tuple[Prediction, ...]
    measurement: Measurement
    predictors: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    command: str = ""
    created: str = ""
    recommends: bool = True
    blind: tuple[Step, ...] = ()

    @property
    def state(self) -> State | None:
        """The machine's state during the measurement; None where it is unknown."""
        return state_during(self.measurement, self.predictions[0].machine)

    def blind_step(self, index: int) -> Step | None:
        """The step that a prediction without the state said; None where that is all there is."""
        return self.blind[index] if self.blind else None

    @property
    def target(self) -> str:
        """What was predicted and measured."""
        return (
            self.measurement.target
            or self.predictions[0].trace.target
            or root_of(self.predictions[0].trace)
        )

    @property
    def batch_size(self) -> int:
        """Samples a step."""
        return self.measurement.batch_size

    @property
    def inference(self) -> bool:
        """Whether the step is a forward pass alone."""
        return self.measurement.inference

    @property
    def machine(self) -> str:
        """The measuring machine's processor, else the predicted one's."""
        return self.measurement.machine or self.predictions[0].machine.cpu.model

    @cached_property
    def rows(self) -> tuple[tuple[LayerComparison, ...], ...]:
        """The rows of each predictor, aligned with `predictors`."""
        return tuple(
            rows_of(prediction, self.measurement, label)
            for prediction, label in zip(self.predictions, self.predictors)
        )

    @cached_property
    def ops(self) -> tuple[tuple[OpComparison, ...], ...]:
        """The operators of each predictor, aligned with `predictors`; empty without times."""
        return tuple(
            op_rows_of(prediction, self.measurement, label)
            for prediction, label in zip(self.predictions, self.predictors)
        )

    @cached_property
    def accuracy(self) -> tuple[PhaseAccuracy, ...]:
        """Each predictor's accuracy by phase, the step last."""
        return tuple(
            entry
            for rows, prediction, label in zip(self.rows, self.predictions, self.predictors)
            for entry in accuracy_of(rows, prediction, self.measurement, label)
        )

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a layer and predictor, the layers in the order of execution.

        Columns: layer, type, predictor; for each of forward, backward, optimizer (forward alone in
        inference) and total ``*_predicted_s``, ``*_actual_s``, ``*_error_frac`` (predicted / actual
        - 1); bound, flops, bytes, source; ``*_spread_frac`` ((90th - 10th percentile) / median of
        the measured samples); side (``both``, ``predicted only``, ``measured only``); L1_bytes,
        L2_bytes, L3_bytes, DRAM_bytes, which each level of the memory moves in all phases (a model,
        :mod:`dlperf.predictors.layer_traffic`). NaN where unknown; a total lacking a part is NaN.
        """
        import pandas as pd  # here: a report on a wrapped script does not wait for it

        records = [_record(row, self.inference) for rows in self.rows for row in rows]
        columns = _record(LayerComparison("", "", "", Times(), None, None), self.inference)
        return pd.DataFrame(records, columns=list(columns))

    @cached_property
    def mape(self) -> pd.DataFrame:
        """The accuracy as a table: one row a predictor and phase (``step`` is the whole); see
        :class:`dlperf.report.layer_comparison.PhaseAccuracy`.

        `mape_frac` is over the layers of at least 1 % of their phase, `mape_all_frac` over all
        measured layers; `repeatability_frac` and `spread_frac` are differences between repeated
        measurements. NaN where unknown.
        """
        import pandas as pd

        rows = [
            {name: math.nan if value is None else value for name, value in asdict(entry).items()}
            for entry in self.accuracy
        ]
        return pd.DataFrame(rows, columns=[f.name for f in fields(PhaseAccuracy)])

    @property
    def unpredicted(self) -> tuple[str, ...]:
        """Measured layers without a row of any predictor."""
        first, *others = (names_of(rows, MEASURED) for rows in self.rows)
        return tuple(name for name in first if all(name in names for names in others))

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """Predicted layers that the measurement does not contain."""
        return tuple(
            dict.fromkeys(name for rows in self.rows for name in names_of(rows, PREDICTED))
        )

    @cached_property
    def remarks(self) -> tuple[str, ...]:
        """One-sided layers, unpriced ops, what predictors do not support, warnings, notes."""
        found = [f"warning: {text}" for text in self.warnings]
        for rows, prediction, label in zip(self.rows, self.predictions, self.predictors):
            first = () if prediction is self.predictions[0] else self.predictions[0].warnings
            found += [f"warning: {label}: {w}" for w in prediction.warnings if w not in first]
            if names := names_of(rows, MEASURED):
                found.append(
                    f"{label}: no predicted row for {counted(len(names), 'measured layer')}, taken"
                    f" as a prediction of 0: {_first_names(names)}"
                )
            found += coverage_remarks(prediction, f"{label}: ")
            faults = prediction.page_faults if self.recommends else page_fault_cost(prediction)
            if faults is not None:
                more = "" if self.recommends else "; dlperf predict recommends allocators"
                found.append(f"{label}: page faults are {faults.sentence()}{more}")
            found += [f"{label}: {note}" for note in prediction.prices.notes]
        if n := len(self.unmeasured):
            was = "was" if n == 1 else "were"
            found.append(
                f"{counted(n, 'predicted layer')} {was} not measured:"
                f" {_first_names(self.unmeasured)}"
            )
        found += [*self.predictions[0].trace.notes, *self.measurement.notes]
        total = self.measurement.step["total"]
        if total.n_disturbed:
            found.append(
                f"{counted(total.n_disturbed, 'disturbed step')}"
                f" {'was' if total.n_disturbed == 1 else 'were'} dropped from"
                f" {total.n_disturbed + len(total.values)} measured ones"
            )
        return tuple(dict.fromkeys(found))

    @cached_property
    def provenance(self) -> tuple[str, ...]:
        """Versions, machine file, date and command behind the numbers, one line each."""
        versions = (f"{name} {version}" for name, version in self.measurement.versions.items())
        lines = [f"measured with {', '.join(versions)}"] if self.measurement.versions else []
        for machine in (prediction.machine for prediction in self.predictions):
            file = filter(None, (f"{machine.mode} calibration", machine.created, machine.path))
            lines.append(f"predicted for {machine.cpu.model} ({', '.join(file)})")
        lines += [f"compared {self.created}"] if self.created else []
        lines += [f"command: {self.command}"] if self.command else []
        return tuple(dict.fromkeys(lines))

    def layer_tree(self, predictor: str, max_lines: int | None = None) -> tuple[TreeLine, ...]:
        """One predictor's rows in the shape of the model, in at most about `max_lines` lines; see
        :func:`dlperf.report.layer_table.layer_tree`.
        """
        index = self.predictors.index(predictor)
        return layer_tree(self.rows[index], self.predictions[index].trace, max_lines)


def states_during(measurement: Measurement, machine: Machine) -> tuple[State, ...]:
    """The machine's states around a measurement; none without readings, without a reference, or
    where the machine file is of another processor.
    """
    is_same = measurement.machine == machine.cpu.model
    return measurement.states_over(machine.reference) if is_same else ()


def state_during(measurement: Measurement, machine: Machine) -> State | None:
    """The median of the machine's states around a measurement; None where there are none."""
    states = states_during(measurement, machine)
    return usual_state(states) if states else None


def _blind_to_json(step: Step | None, actual_s: float) -> dict[str, Any] | None:
    """The blind prediction of a step, and its error."""
    if step is None:
        return None
    error_frac = None if step.total_s is None else step.total_s / actual_s - 1
    return {"step": asdict(step), "error_frac": error_frac}


def coverage_remarks(prediction: Prediction, prefix: str = "") -> list[str]:
    """The ops without a price, and the layers and phases that the predictor does not support."""
    remarks, prices = [], prediction.prices
    if prediction.unpriced:
        names = ", ".join(f"{op} x{count}" for op, count in prediction.unpriced.items())
        share = format_percent(1 - prediction.priced_time_frac)
        remarks.append(
            f"{prefix}{share} of the predicted time stands on"
            f" {counted(sum(prediction.unpriced.values()), 'op')} without a price: {names}"
        )
    if prices.unsupported:
        remarks.append(
            f"{prefix}does not support {counted(len(prices.unsupported), 'layer')}:"
            f" {_first_names(prices.unsupported)}"
        )
    if silent := [p for p in phases_of(prediction.trace.inference) if p not in prices.phases]:
        remarks.append(f"{prefix}does not support the {' and the '.join(silent)}")
    return remarks


def _first_names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:12])
    return shown if len(names) <= 12 else f"{shown} and {len(names) - 12} more"


def _record(row: LayerComparison, inference: bool) -> dict[str, Any]:
    """A row of the frame."""
    phases = phases_of(inference)
    record: dict[str, Any] = {"layer": row.layer, "type": row.type, "predictor": row.predictor}
    for phase in (*phases, "total"):
        times = row.phase(phase) or Times()
        record[f"{phase}_predicted_s"], record[f"{phase}_actual_s"] = times.whole_s
        record[f"{phase}_error_frac"] = times.error_frac
    record |= {"bound": row.bound, "flops": row.flops, "bytes": row.bytes, "source": row.source}
    for phase in phases:
        record[f"{phase}_spread_frac"] = (row.phase(phase) or Times()).spread_frac
    record["side"] = row.side
    moved = row.level_bytes
    for level in LEVELS:
        record[f"{level}_bytes"] = round(moved[level]) if level in moved else None
    return {
        name: math.nan if value is None and name not in _TEXTS else value
        for name, value in record.items()
    }


# -- CSV and JSON ----------------------------------------------------------------------------------


def reports_to_csv(reports: Sequence[StepComparison]) -> str:
    """The frames of all reports below each other; every row carries its case and provenance."""
    import pandas as pd

    frames = []
    for report in reports:
        measurement = report.measurement
        versions = (f"{name} {version}" for name, version in sorted(measurement.versions.items()))
        whole = ("flops", "bytes", *(f"{level}_bytes" for level in LEVELS))
        frame = report.frame.astype(dict.fromkeys(whole, "Int64")).assign(
            machine=report.machine,
            versions="; ".join(versions),
            created=report.created,
            command=report.command,
        )
        for index, name in enumerate(("target", "batch_size", "threads")):
            frame.insert(index, name, getattr(report if index < 2 else measurement, name))
        frames.append(frame)
    return frame_to_csv(pd.concat(frames, ignore_index=True))


def reports_to_json(reports: Sequence[StepComparison]) -> dict[str, Any]:
    """One report as it is, several as a list under the schema ``dlperf.reports``."""
    if len(reports) == 1:
        return report_to_json(reports[0])
    return {
        "schema": SET_SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "versions": host.versions(),
        "machine": "; ".join(dict.fromkeys(report.machine for report in reports)),
        "reports": [report_to_json(report) for report in reports],
    }


def report_to_json(report: StepComparison) -> dict[str, Any]:
    """A report as JSON data: the step, the accuracy and the layers, null where a side does not
    know. The hierarchical roofline is that of the first prediction's trace and machine.
    """
    measurement, first = report.measurement, report.predictions[0]
    device = measurement.device_memory
    data = {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "target": report.target,
        "batch_size": report.batch_size,
        "threads": measurement.threads,
        "inference": report.inference,
        "machine": report.machine,
        "created": report.created,
        "command": report.command,
        "versions": {
            **host.versions(),
            **{f"measured with {name}": version for name, version in measurement.versions.items()},
        },
        "measured": {
            "step": {f"{name}_s": samples.median for name, samples in measurement.step.items()},
            "spread_frac": {
                name: samples.spread_frac for name, samples in measurement.step.items()
            },
            "repeatability_frac": measurement.repeatability_frac,
            "states": [vars(reading) for reading in measurement.states],
            **({} if device is None else {"device_memory": vars(device)}),
        },
        "state": None if report.state is None else asdict(report.state),
        "predicted": [
            {
                "predictor": label,
                "machine_file": prediction.machine.path,
                "machine": prediction.machine.cpu.model,
                "threads": prediction.threads,
                "step": asdict(prediction.step),
                "state": asdict(prediction.state),
                "blind": _blind_to_json(report.blind_step(index), measurement.step["total"].median),
                "priced_time_frac": prediction.priced_time_frac,
                "unpriced": [
                    {"op": op, "count": count} for op, count in prediction.unpriced.items()
                ],
                "unsupported": list(prediction.prices.unsupported),
            }
            for index, (label, prediction) in enumerate(zip(report.predictors, report.predictions))
        ],
        "accuracy": [asdict(entry) for entry in report.accuracy],
        "layers": report.frame.astype(object).to_dict("records"),
        "ops": [
            {
                **{name: getattr(row, name) for name in ("op", "phase", "predictor")},
                "n_predicted": row.n_predicted,
                "n_measured": row.n_measured,
                "predicted_s": row.times.predicted_s,
                "actual_s": row.times.actual_s,
                "error_frac": row.times.error_frac,
            }
            for rows in report.ops
            for row in rows
        ],
        "hierarchy": {
            "levels": [asdict(roof) for roof in first.roofs.bandwidths],
            "ceilings": [asdict(ceiling) for ceiling in first.roofs.ceilings],
            "layers": first.traffic.astype(object).to_dict("records"),
        },
        "unpredicted": list(report.unpredicted),
        "unmeasured": list(report.unmeasured),
        "remarks": list(report.remarks),
    }
    return dict(_finite(data))


def _finite(value: Any) -> Any:
    """The same data with null for NaN and infinities, which JSON does not know."""
    match value:
        case dict():
            return {key: _finite(entry) for key, entry in value.items()}
        case list() | tuple():
            return [_finite(entry) for entry in value]
        case float() if not math.isfinite(value):
            return None
    return value

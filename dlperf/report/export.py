"""Reports as CSV and JSON, for other programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from dlperf.core import host
from dlperf.core.text import frame_to_csv
from dlperf.ops.roofs import LEVELS
from dlperf.report.step_comparison import StepComparison

SCHEMA, SET_SCHEMA, SCHEMA_VERSION = "dlperf.report", "dlperf.reports", 2


def reports_to_csv(reports: Sequence[StepComparison]) -> str:
    """The frames of all reports below each other; every row carries its case and provenance."""
    frames = []
    for report in reports:
        frame = report.frame.copy()
        frame["flops"] = frame["flops"].astype("Int64")
        frame["bytes"] = frame["bytes"].astype("Int64")
        for level in LEVELS:
            frame[f"{level}_bytes"] = frame[f"{level}_bytes"].astype("Int64")
        frame.insert(0, "target", report.target)
        frame.insert(1, "batch_size", report.batch_size)
        frame.insert(2, "threads", report.measurement.threads)
        frame["machine"] = report.machine
        frame["versions"] = "; ".join(
            f"{name} {version}" for name, version in sorted(report.measurement.versions.items())
        )
        frame["created"] = report.created
        frame["command"] = report.command
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
    know.
    """
    measurement = report.measurement
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
        },
        "predicted": [
            {
                "predictor": label,
                "machine_file": prediction.machine.path,
                "machine": prediction.machine.cpu.model,
                "threads": prediction.threads,
                "step": asdict(prediction.step),
                "priced_time_frac": prediction.priced_time_frac,
                "unpriced": [
                    {"op": op, "count": count} for op, count in prediction.unpriced.items()
                ],
                "unsupported": list(prediction.prices.unsupported),
            }
            for label, prediction in zip(report.predictors, report.predictions)
        ],
        "accuracy": [asdict(entry) for entry in report.accuracy],
        "layers": report.frame.astype(object).to_dict("records"),
        "hierarchy": _hierarchy(report),
        "unpredicted": list(report.unpredicted),
        "unmeasured": list(report.unmeasured),
        "remarks": list(report.remarks),
    }
    finite = _finite(data)
    assert isinstance(finite, dict)
    return finite


def _hierarchy(report: StepComparison) -> dict[str, Any]:
    """The hierarchical roofline of the first prediction's trace and machine: measured roofs, and
    each layer's traffic by phase.
    """
    prediction = report.predictions[0]
    return {
        "levels": [asdict(roof) for roof in prediction.roofs.bandwidths],
        "ceilings": [asdict(ceiling) for ceiling in prediction.roofs.ceilings],
        "layers": prediction.traffic.astype(object).to_dict("records"),
    }


def _finite(value: Any) -> Any:
    """The same data with null for NaN and infinities, which JSON does not know."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""The formats of the measurements that a validation keeps."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from dlperf.core.records.conversion import Name, Positive, PositiveSeconds, Seconds, Text, Whole

Amount = Annotated[float, Meta(ge=0, le=1e18)]
"""Seconds, bytes, or samples per second."""
PositiveAmount = Annotated[float, Meta(ge=1e-9, le=1e18)]


class PairRecord(Struct, gc=False):
    """A forecast and its measurement."""

    predicted: Amount
    measured: PositiveAmount


class TrainingForecastRecord(Struct, gc=False):
    """A case of the validation of trainings."""

    kind: Name
    case: Name
    pairs: Annotated[list[PairRecord], Meta(min_length=1)]
    unit: Text
    network: Text
    workers: Positive | None = None


class LayerEstimateRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """A baseline tool's estimate of a layer."""

    name: Name
    forward_s: Seconds | None
    backward_s: Seconds | None


class BaselineEstimateRecord(Struct, gc=False):
    """A baseline tool's estimate of a step."""

    baseline: Name
    forward_s: Seconds | None
    backward_s: Seconds | None
    optimizer_s: Seconds | None
    total_s: Seconds | None
    layers: list[LayerEstimateRecord]
    problem: str


class AllReducesRecord(Struct, gc=False):
    """Measured all-reduces by size in bytes."""

    all_reduce_s: dict[Positive, PositiveSeconds]


class StepRunRecord(Struct, gc=False):
    """A measured data-parallel step."""

    step_s: PositiveSeconds
    compute_s: PositiveSeconds
    first_step_s: PositiveSeconds
    bucket_bytes: list[Whole]

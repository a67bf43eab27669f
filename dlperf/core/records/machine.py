"""The format of a machine file."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from dlperf.core.records.conversion import (
    CoRunRecord,
    Name,
    Positive,
    PositiveSamplesRecord,
    PositiveSeconds,
    Seconds,
    Text,
    Threads,
    Whole,
)
from dlperf.core.records.trace import TensorRecord

Octaves = Annotated[float, Meta(ge=1e-9, le=1e6)]
Error = Annotated[float, Meta(ge=0, le=1e12)]


class CpuRecord(Struct, gc=False):
    """The processor. Sizes in bytes."""

    model: Text
    family: Text
    n_cores: Threads
    caches_bytes: tuple[Whole, Whole, Whole]
    memory_bytes: Whole
    flags: list[Text]
    n_physical_cores: Annotated[int, Meta(ge=0, le=2**16)] = 0


class BandwidthRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """A memory kernel at one working set."""

    kernel: Name
    threads: Threads
    working_set_bytes: Positive
    moved_bytes: Positive


class CostRecord(Struct, gc=False, kw_only=True):
    """A framework or system cost; `unit` and `statistic` are those of its kind."""

    kind: Name
    of: Text = ""
    at: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    variant: Text = ""
    threads: Threads
    unit: Name
    statistic: Name
    samples: Annotated[list[Seconds], Meta(min_length=1)]
    disturbed: Whole = 0


class KernelModelRecord(Struct, gc=False):
    """GP hyperparameters of a kernel model, and its leave-one-out errors."""

    variant: Annotated[list[Text], Meta(min_length=1)]
    family: Name
    threads: Threads
    length_scales: list[Octaves]
    signal: Octaves
    noise: Octaves
    leave_one_out_fracs: list[Error]


class FootprintRecord(Struct, gc=False):
    """Memory that torch itself takes."""

    name: Name
    bytes: Annotated[float, Meta(ge=0, le=2**53)]


class KernelOpRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """The operator call of a kernel."""

    name: Name
    args: list[Any]
    kwargs: dict[str, Any]


class KernelRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """An operator timed at one shape."""

    family: Name
    op: KernelOpRecord
    threads: Threads


class CoverageRecord(Struct, gc=False):
    """How many planned points of a group of kernels were measured."""

    group: Name
    threads: Threads
    n_measured: Whole
    n_planned: Whole


class DisturbanceRecord(Struct, gc=False):
    """A group of measurements that co-tenants disturbed."""

    group: Name
    threads: Threads
    switches_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    n_unsteady: Whole
    n_kernels: Whole


class SelfTestRecord(Struct, gc=False):
    """A step of a random network, predicted and measured."""

    name: Name
    threads: Threads
    seed: Whole
    predicted_s: PositiveSeconds
    low_s: PositiveSeconds
    high_s: PositiveSeconds
    measured_s: PositiveSeconds


class MachineRecord(Struct, gc=False):
    """A measured machine."""

    created: Text
    versions: dict[str, Text]
    cpu: CpuRecord
    mode: Text
    groups: list[Text]
    complete: bool
    notes: list[Text]
    bandwidths: list[BandwidthRecord]
    costs: list[CostRecord]
    kernel_models: list[KernelModelRecord]
    footprints: list[FootprintRecord]
    kernels: list[KernelRecord]
    tensors: list[TensorRecord]
    coverage: list[CoverageRecord]
    disturbances: list[DisturbanceRecord]
    self_tests: list[SelfTestRecord]
    co_runs: list[CoRunRecord] = []

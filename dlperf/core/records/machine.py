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

    model: Text  #: Name of the model.
    family: Text  #: Vendor, family, model, stepping.
    n_cores: Threads  #: Cores that the process may use.
    caches_bytes: tuple[Whole, Whole, Whole]  #: L1, L2, L3; 0 if unknown.
    memory_bytes: Whole  #: Main memory.
    flags: list[Text]  #: Instruction sets.
    n_physical_cores: Annotated[int, Meta(ge=0, le=2**16)] = 0  #: Cores without SMT; 0 if unknown.


class BandwidthRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """A memory kernel at one working set."""

    kernel: Name  #: `copy`, `scale`, `add` or `triad`.
    threads: Threads  #: Number of threads.
    working_set_bytes: Positive  #: Bytes of all arrays.
    moved_bytes: Positive  #: Bytes of a sweep, counted as STREAM does.


class CostRecord(Struct, gc=False, kw_only=True):
    """A framework or system cost; `unit` and `statistic` are those of its kind."""

    kind: Name  #: Kind of cost; see the table of kinds.
    of: Text = ""  #: Operator, phase, group or optimizer.
    at: Annotated[int, Meta(ge=0, lt=2**53)] = 0  #: Amount at which it was measured.
    variant: Text = ""  #: Optimizer's implementation, or dtype.
    threads: Threads  #: Number of threads.
    unit: Name  #: Unit of the samples.
    statistic: Name  #: Statistic of the samples that counts.
    samples: Annotated[list[Seconds], Meta(min_length=1)]  #: Raw samples.
    disturbed: Whole = 0  #: Samples that were dropped.


class KernelModelRecord(Struct, gc=False):
    """GP hyperparameters of a kernel model, and its leave-one-out errors."""

    variant: Annotated[list[Text], Meta(min_length=1)]  #: Operator, dtype, and further names.
    family: Name  #: Family of kernels.
    threads: Threads  #: Number of threads.
    length_scales: list[Octaves]  #: One per feature, in octaves.
    signal: Octaves  #: Standard deviation of ln t.
    noise: Octaves  #: Standard deviation of ln t of a sample.
    leave_one_out_fracs: list[Error]  #: Errors at left-out points.


class FootprintRecord(Struct, gc=False):
    """Memory that torch itself takes."""

    name: Name  #: `forward`, `training`, `convolution` or `operator`.
    bytes: Annotated[float, Meta(ge=0, le=2**53)]  #: Resident memory.


class KernelOpRecord(Struct, gc=False, array_like=True, forbid_unknown_fields=True):
    """The operator call of a kernel."""

    name: Name  #: Name in torch.ops.
    args: list[Any]  #: Positional arguments; tensors by number.
    kwargs: dict[str, Any]  #: Keyword arguments.


class KernelRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """An operator timed at one shape."""

    family: Name  #: Family of kernels.
    op: KernelOpRecord  #: The call.
    threads: Threads  #: Number of threads.


class CoverageRecord(Struct, gc=False):
    """How many planned points of a group of kernels were measured."""

    group: Name  #: Group of kernels.
    threads: Threads  #: Number of threads.
    n_measured: Whole  #: Measured points.
    n_planned: Whole  #: Planned points.


class DisturbanceRecord(Struct, gc=False):
    """A group of measurements that co-tenants disturbed."""

    group: Name  #: Group of kernels.
    threads: Threads  #: Number of threads.
    switches_per_s: Annotated[float, Meta(ge=0, le=1e12)]  #: Involuntary context switches.
    n_unsteady: Whole  #: Kernels without an undisturbed sample.
    n_kernels: Whole  #: Kernels of the group.


class SelfTestRecord(Struct, gc=False):
    """A step of a random network, predicted and measured."""

    name: Name  #: Kind of network.
    threads: Threads  #: Number of threads.
    seed: Whole  #: Seed of its sizes.
    predicted_s: PositiveSeconds  #: Predicted step.
    low_s: PositiveSeconds  #: Lower end of the 90 % interval.
    high_s: PositiveSeconds  #: Upper end of the 90 % interval.
    measured_s: PositiveSeconds  #: Measured step.


class MachineRecord(Struct, gc=False):
    """A measured machine."""

    created: Text  #: Time of the calibration, ISO 8601.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    cpu: CpuRecord  #: The processor.
    mode: Text  #: `quick`, `full` or `thorough`.
    groups: list[Text]  #: Finished groups; a calibration resumes after them.
    complete: bool  #: Whether no planned point is left out.
    notes: list[Text]  #: Remarks of the calibration.
    bandwidths: list[BandwidthRecord]  #: Memory sweeps.
    costs: list[CostRecord]  #: Framework and system costs.
    kernel_models: list[KernelModelRecord]  #: What a search found, for each kernel variant.
    footprints: list[FootprintRecord]  #: Memory that torch takes.
    kernels: list[KernelRecord]  #: Timed operators.
    tensors: list[TensorRecord]  #: The tensors that calls refer to by number.
    coverage: list[CoverageRecord]  #: Points by group.
    disturbances: list[DisturbanceRecord]  #: Groups that co-tenants disturbed.
    self_tests: list[SelfTestRecord]  #: Steps of random networks.
    co_runs: list[CoRunRecord] = []  #: Worker processes at once.

"""The format of a machine file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from dlperf.core.conversion import (
    CoRunRecord,
    Name,
    Positive,
    PositiveSamplesRecord,
    Seconds,
    Text,
    Threads,
    Whole,
)
from dlperf.core.data_sheet import DataSheet
from dlperf.core.records.trace import TensorRecord
from dlperf.core.state import Reading
from dlperf.core.verification import Coverage, Disturbance, PageTest, SelfTest

Slowdown = Annotated[float, Meta(ge=1e-6, le=1e6)]
Response = Annotated[float, Meta(ge=-1, le=1e3)]
SharedCore = Annotated[float, Meta(ge=1, le=1e3)]
Octaves = Annotated[float, Meta(ge=1e-9, le=1e6)]
Weight = Annotated[float, Meta(ge=0, le=1e6)]
Error = Annotated[float, Meta(ge=0, le=1e12)]


class CpuRecord(Struct, gc=False):
    """The processor. Sizes in bytes."""

    model: Text  #: Name of the model.
    family: Text  #: Vendor, family, model, stepping.
    n_cores: Threads  #: Cores that the process may use.
    caches_bytes: tuple[Whole, Whole, Whole]  #: L1, L2, L3; 0 if unknown.
    memory_bytes: Whole  #: Main memory.
    flags: tuple[Text, ...]  #: Instruction sets.
    n_physical_cores: Annotated[int, Meta(ge=0, le=2**16)] = 0  #: Cores without SMT; 0 if unknown.


class BandwidthRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """A memory kernel at one working set."""

    kernel: Name  #: `copy`, `scale`, `add` or `triad`.
    threads: Threads  #: Number of threads.
    working_set_bytes: Positive  #: Bytes of all arrays.
    moved_bytes: Positive  #: Bytes of a sweep, counted as STREAM does.
    readings: tuple[Whole, ...] = ()  #: Readings around it, of an unfinished calibration.
    slowdown: Slowdown = 1.0  #: Of its samples over the reference state.


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
    readings: tuple[Whole, ...] = ()  #: Readings meanwhile, of an unfinished calibration.
    slowdown: Slowdown = 1.0  #: Of the statistic over the reference state.


@dataclass(frozen=True)
class KernelModelFit:
    """GP hyperparameters of a kernel model, its weights, noises and leave-one-out errors, found
    once at the end of a calibration; see :class:`dlperf.predictors.kernel_model.KernelModel`.

    `leave_one_out_fracs` are |predicted / measured - 1| of every kernel, predicted from all the
    others.
    """

    #: Operator, dtype, and further names.
    variant: Annotated[tuple[Text, ...], Meta(min_length=1)]
    family: Name  #: Family of kernels.
    threads: Threads  #: Number of threads.
    length_scales: tuple[Octaves, ...]  #: One per feature, in octaves.
    signal: Octaves  #: Standard deviation of ln t.
    noise: Octaves  #: Standard deviation of ln t of a sample.
    leave_one_out_fracs: tuple[Error, ...]  #: Errors at left-out points.
    weights: tuple[Weight, ...] = ()  #: Seconds of each regression term.
    noises: tuple[Octaves, ...] = ()  #: Standard deviation of ln t of each point.
    points: Whole = 0  #: CRC-32 of the points that weights and noises fit.


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
    readings: tuple[Whole, ...] = ()  #: Readings before its samples, of an unfinished calibration.
    slowdown: Slowdown = 1.0  #: Of the least sample over the reference state.
    shared_core: SharedCore | None = None  #: While a co-tenant has the same core.
    core_to_core: Response | None = None  #: Part more where a parallel region takes twice as long.


class MachineRecord(Struct, gc=False):
    """A measured machine."""

    created: Text  #: Time of the calibration, ISO 8601.
    versions: dict[str, Text]  #: dlperf, Python, system, torch, numpy.
    cpu: CpuRecord  #: The processor.
    mode: Text  #: `quick`, `full` or `thorough`.
    groups: tuple[Text, ...]  #: Finished groups; a calibration resumes after them.
    complete: bool  #: Whether no planned point is left out.
    notes: tuple[Text, ...]  #: Remarks of the calibration.
    bandwidths: list[BandwidthRecord]  #: Memory sweeps.
    costs: list[CostRecord]  #: Framework and system costs.
    kernel_models: tuple[KernelModelFit, ...]  #: What a search found, for each kernel variant.
    footprints: list[FootprintRecord]  #: Memory that torch takes.
    kernels: list[KernelRecord]  #: Timed operators.
    tensors: list[TensorRecord]  #: The tensors that calls refer to by number.
    coverage: tuple[Coverage, ...]  #: Points by group.
    disturbances: tuple[Disturbance, ...]  #: Groups that co-tenants disturbed.
    self_tests: tuple[SelfTest, ...]  #: Steps of random networks.
    page_tests: tuple[PageTest, ...]  #: Such steps with page faults and without.
    reference: Reading | None  #: The reading to whose state times are normalised.
    readings: tuple[Reading, ...]  #: Readings of the machine's state.
    co_runs: list[CoRunRecord] = []  #: Worker processes at once.
    data_sheet: DataSheet | None = None  #: A device by its data sheet; null if measured.

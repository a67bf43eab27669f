"""A measured machine as data: what it is, how fast its kernels, memory and framework are, and how
that was found out.

Nothing here imports torch. A machine file keeps raw samples and provenance; fits are made when it
is used: a better predictor needs no new measurement.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from dlperf.core import files
from dlperf.core.co_run import CoRun
from dlperf.core.costs import (
    ARITHMETIC,
    KINDS,
    PAGE_COSTS,
    SMALL_PAGE_COSTS,
    STEP_COSTS,
    Cost,
    CostKey,
)
from dlperf.core.data_sheet import DataSheet
from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.files import default_path, find_path
from dlperf.core.machine_entries import (
    Bandwidth,
    Cpu,
    Footprint,
    Kernel,
    check_unique,
)
from dlperf.core.machine_format import (
    SCHEMA,
    SCHEMA_VERSION,
    fields_from_json,
    machine_to_json,
)
from dlperf.core.operators import Op
from dlperf.core.records.machine import KernelModelFit
from dlperf.core.state import REFERENCE, Reading, State, usual_state
from dlperf.core.verification import (
    Coverage,
    Disturbance,
    PageTest,
    SelfTest,
    check_tests,
    interval_factor,
    kernel_factor,
    page_factor,
)

__all__ = [
    "EXACT",
    "SCHEMA",
    "SCHEMA_VERSION",
    "STREAM_BYTES_PER_ELEMENT",
    "Bandwidth",
    "Coverage",
    "Cpu",
    "Disturbance",
    "Footprint",
    "Kernel",
    "KernelModelFit",
    "Machine",
    "PageTest",
    "SelfTest",
    "default_path",
    "lacks",
]

_LEAST_LEFT_OUT = 20
AnyTest = TypeVar("AnyTest", SelfTest, PageTest)
EXACT = "exact"
"""The family of operations that were measured because a target's step consists of them."""
STREAM_BYTES_PER_ELEMENT = {"copy": 2, "scale": 2, "add": 3, "triad": 3}
"""Arrays that each STREAM kernel reads and writes (McCalpin's convention; write-allocate not
counted).
"""


@dataclass(frozen=True, repr=False)
class Machine(Displayed, by="dlperf.report.summaries"):
    """Everything known of one machine.

    `mode` is the calibration's depth (``quick``, ``full``, ``thorough``), `groups` the parts of the
    plan that are finished (a calibration resumes after them), `coverage` how many of their points
    were measured, `disturbances` its groups that co-tenants disturbed, `notes` what else was
    noticed, and `self_tests` how well the file predicted steps of networks that were timed in the
    end. It is `complete` if no planned point is left out. Times are normalised to the state of the
    `reference`, the least of the first calibration's readings; `readings` are all that were taken.
    A device that was not calibrated has a `data_sheet`.
    """

    cpu: Cpu
    kernels: tuple[Kernel, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()
    costs: tuple[Cost, ...] = ()
    mode: str = "full"
    groups: tuple[str, ...] = ()
    complete: bool = False
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    path: str = ""
    kernel_models: tuple[KernelModelFit, ...] = ()
    footprints: tuple[Footprint, ...] = ()
    co_runs: tuple[CoRun, ...] = ()
    coverage: tuple[Coverage, ...] = ()
    disturbances: tuple[Disturbance, ...] = ()
    self_tests: tuple[SelfTest, ...] = ()
    page_tests: tuple[PageTest, ...] = ()
    reference: Reading | None = None
    readings: tuple[Reading, ...] = ()
    data_sheet: DataSheet | None = None

    # -- questions ---------------------------------------------------------------------------------

    @cached_property
    def threads(self) -> tuple[int, ...]:
        """The thread counts that were measured: those of the kernels, as without kernels nothing
        can be predicted. A device counts as one thread, a processor of a data sheet has its cores.
        """
        if self.data_sheet is not None:
            return (self.cpu.n_cores if self.data_sheet.kind == "processor" else 1,)
        others = {b.threads for b in self.bandwidths} | {c.threads for c in self.costs}
        return tuple(sorted({k.threads for k in self.kernels} or others))

    def nearest_threads(self, threads: int) -> int:
        """The nearest measured thread count, the lower one of two. Raises DlperfError for none."""
        if not self.threads:
            raise lacks(self, "measurements")
        return _nearest(self.threads, threads)

    @cached_property
    def _by_family(self) -> dict[tuple[str, int], tuple[Kernel, ...]]:
        found: dict[tuple[str, int], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            found[kernel.family, kernel.threads].append(kernel)
        return {key: tuple(value) for key, value in found.items()}

    def family(self, name: str, threads: int) -> tuple[Kernel, ...]:
        """The kernels of one family at exactly `threads` threads."""
        return self._by_family.get((name, threads), ())

    def families(self, threads: int) -> tuple[str, ...]:
        """The names of the families that were measured with `threads` threads."""
        return tuple(sorted(name for name, t in self._by_family if t == threads))

    @cached_property
    def _alike(self) -> dict[tuple[str, tuple[int, ...], int], list[Kernel]]:
        """Kernels by name, shape of the first tensor and threads: few are compared by signature."""
        found: dict[tuple[str, tuple[int, ...], int], list[Kernel]] = defaultdict(list)
        for kernel in self.kernels:
            found[kernel.op.name, kernel.op.first_shape, kernel.threads].append(kernel)
        return found

    def exact(self, op: Op, threads: int) -> Kernel | None:
        """The measurement of this very op, if there is one."""
        alike = self._alike.get((op.name, op.first_shape, threads), ())
        return next((one for one in reversed(alike) if one.op.signature == op.signature), None)

    @cached_property
    def _costs_by_kind(self) -> dict[str, dict[CostKey, dict[int, Cost]]]:
        found: dict[str, dict[CostKey, dict[int, Cost]]] = defaultdict(lambda: defaultdict(dict))
        for cost in self.costs:
            found[cost.key.kind][cost.key][cost.threads] = cost
        return found

    def costs_of(self, *kinds: str, threads: int | None = None) -> list[Cost]:
        """All costs of these kinds, in the order of the file; of all thread counts or one."""
        return [
            cost
            for kind in kinds
            for by_threads in self._costs_by_kind.get(kind, {}).values()
            for cost in by_threads.values()
            if threads in (None, cost.threads)
        ]

    def cost(self, key: CostKey, threads: int) -> Cost | None:
        """A cost at the nearest measured thread count; None if it was never measured."""
        found = self._costs_by_kind.get(key.kind, {}).get(key)
        return found[_nearest(found, threads)] if found else None

    def cost_value(
        self,
        kind: str,
        threads: int,
        default: float | None = None,
        *,
        of: str = "",
        variant: str = "",
        state: State = REFERENCE,
    ) -> float:
        """A cost (:attr:`dlperf.core.costs.Cost.value`) in the unit of its kind at a state of the
        machine, at the nearest measured thread count.

        Raises DlperfError if it was never measured and no default is given.
        """
        key = CostKey(kind, of, variant=variant)
        if (found := self.cost(key, threads)) is not None:
            return found.value * state.factor(self.bound_of(found))
        if default is None:
            raise lacks(self, f"cost {str(key)!r}")
        return default

    def bound_of(self, cost: Cost) -> str:
        """What bounds a cost: the system, arithmetic, the level that holds its bytes, or the
        interpreter.
        """
        kind = cost.key.kind
        if kind in PAGE_COSTS:
            return "page-faults"
        if kind == ARITHMETIC:
            return "compute"
        if KINDS[kind].unit == "s/byte":
            return self.level_of(cost.key.at) if cost.key.at else "DRAM"
        return "overhead"

    @cached_property
    def states(self) -> tuple[State, ...]:
        """The states of the machine that were seen, relative to the reference. Those of one thread
        have what others have of :attr:`dlperf.core.state.State.core_to_core`, in turns.
        """
        if self.reference is None:
            return ()
        found = [reading.over(self.reference) for reading in self.readings]
        known = [
            state.core_to_core
            for state, reading in zip(found, self.readings)
            if reading.parallel_region_s
        ]
        turns = itertools.cycle(known or [1.0])
        return tuple(
            state if reading.parallel_region_s else replace(state, core_to_core=next(turns))
            for state, reading in zip(found, self.readings)
        )

    @property
    def usual_state(self) -> State:
        """What is usual of the states that were seen (:func:`dlperf.core.state.usual_state`)."""
        return usual_state(self.states)

    @property
    def mean_slowdown(self) -> float:
        """Mean over median slowdown of the core, at least 1: a step's median times this is its
        share of an epoch. 1 without readings.
        """
        if not self.states:
            return 1.0
        mean = statistics.fmean(state.core for state in self.states)
        return max(1.0, mean / self.usual_state.core)

    def missing_costs(
        self, inference: bool = False, threads: int | None = None
    ) -> dict[str, tuple[str, ...]]:
        """The costs of a step that the file does not hold (with `threads`: not for that
        count), by group of :data:`dlperf.core.costs.STEP_COSTS`.
        """
        keys = [cost.key for cost in self.costs if threads in (None, cost.threads)]
        held = {key.kind for key in keys} | {f"{key.kind} {key.of}" for key in keys}
        missing = {
            group: tuple(str(key) for key in keys if str(key) not in held)
            for group, keys in STEP_COSTS.items()
            if not inference or "training" not in group
        }
        return {group: names for group, names in missing.items() if names}

    def calibration(self, *options: str) -> str:
        """The command that measures into this file.

        >>> Machine(Cpu("", 1), path="m.json").calibration("--quick")
        'dlperf calibrate --quick -o m.json'
        """
        is_elsewhere = self.path and Path(self.path) != default_path()
        file = (f"-o {self.path}",) if is_elsewhere else ()
        return " ".join(("dlperf calibrate", *options, *file))

    def busy_groups(self, threads: int) -> tuple[str, ...]:
        """The groups that were measured with `threads` while others had a part of the machine, as
        the calibration noted.
        """
        return tuple(one.group for one in self.disturbances if one.threads == threads)

    def leave_one_out_errors(self, threads: int) -> dict[str, float]:
        """Mean error of every family's kernels, each predicted from the others, as fractions; a
        family of few kernels says nothing.
        """
        errors: dict[str, list[float]] = defaultdict(list)
        for model in self.kernel_models:
            if model.threads == threads:
                errors[model.family].extend(model.leave_one_out_fracs)
        return {
            name: math.fsum(values) / len(values)
            for name, values in sorted(errors.items())
            if len(values) >= _LEAST_LEFT_OUT
        }

    def n_left_out(self, threads: int) -> int:
        """How many planned points there was no time for."""
        return sum(
            one.n_planned - one.n_measured for one in self.coverage if one.threads == threads
        )

    def self_tests_of(self, threads: int) -> tuple[SelfTest, ...]:
        """The self-tests at the measured thread count nearest to `threads`."""
        return _of_nearest(self.self_tests, threads)

    def interval_factor(self, threads: int) -> float:
        """Interval calibration factor (:func:`dlperf.core.verification.interval_factor`)."""
        return interval_factor(self.self_tests_of(threads))

    def kernel_factor(self, threads: int) -> float:
        """Factor on steps' kernels (:func:`dlperf.core.verification.kernel_factor`)."""
        return kernel_factor(self.self_tests_of(threads))

    def page_factor(self, threads: int) -> float:
        """Factor on pages' cost in steps (:func:`dlperf.core.verification.page_factor`)."""
        page_s = sum(self.cost_value(kind, threads, 0.0) for kind in SMALL_PAGE_COSTS)
        return page_factor(_of_nearest(self.page_tests, threads), page_s)

    def footprint_bytes(self, name: str) -> int:
        """The named footprint in bytes; 0 where it was not measured."""
        return next(
            (footprint.n_bytes for footprint in self.footprints if footprint.name == name), 0
        )

    def co_runs_of(self, work: str) -> dict[int, CoRun]:
        """Co-runs of one kind of work, by the number of workers."""
        return {co_run.workers: co_run for co_run in self.co_runs if co_run.work == work}

    def bandwidth_curve(self, kernel: str, threads: int) -> list[Bandwidth]:
        """The sweep of one memory kernel at the nearest measured thread count, by rising working
        set.
        """
        at = {b.threads for b in self.bandwidths if b.kernel == kernel}
        if not at:
            return []
        nearest = _nearest(at, threads)
        return sorted(
            (b for b in self.bandwidths if b.kernel == kernel and b.threads == nearest),
            key=lambda b: b.working_set_bytes,
        )

    def dram_bytes_per_s(self, threads: int) -> float:
        """STREAM's answer: the best rate of the best kernel on arrays far larger than the last
        cache, bytes per second.

        Raises DlperfError where the file holds no memory measurement.
        """
        rates = [
            curve[-1].best_bytes_per_s
            for kernel in STREAM_BYTES_PER_ELEMENT
            if (curve := self.bandwidth_curve(kernel, threads))
        ]
        if not rates:
            raise lacks(self, "memory bandwidth")
        return max(rates)

    def level_of(self, working_set_bytes: float) -> str:
        """``L1``, ``L2``, ``L3`` or ``DRAM``: the nearest memory that holds a number of bytes."""
        for name, size in zip(("L1", "L2", "L3"), self.cpu.caches_bytes):
            if size and working_set_bytes <= size:
                return name
        return "DRAM"

    def level_bytes_per_s(self, level: str, threads: int, kernel: str = "triad") -> float | None:
        """The bandwidth of one level: the median rate over working sets well inside it; None where
        none was measured.
        """
        curve = self.bandwidth_curve(kernel, threads)
        caches = self.cpu.caches_bytes
        if level == "DRAM":
            low, high = 2.0 * max(caches, default=0), math.inf
        else:
            number = ("L1", "L2", "L3").index(level)
            low, high = 1.3 * max(caches[:number], default=0), 0.7 * caches[number]
        rates = [b.best_bytes_per_s for b in curve if low < b.working_set_bytes <= high]
        if level == "DRAM" and not rates:
            rates = [b.best_bytes_per_s for b in curve[-1:]]
        return sorted(rates)[len(rates) // 2] if rates else None

    # -- changes -----------------------------------------------------------------------------------

    def with_kernels(self, kernels: Iterable[Kernel]) -> Machine:
        """The machine with more kernels; a newer measurement of the same op replaces the older."""
        merged = {(k.op.signature, k.threads): k for k in (*self.kernels, *kernels)}
        return replace(self, kernels=tuple(merged.values()))

    # -- files -------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the machine file, whole or not at all."""
        files.write_json(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path | None = None) -> Machine:
        """Read a machine file, by default the one that the command line finds.

        Raises DlperfError naming the file, the entry and the way out: missing, truncated, a newer
        schema, negative or NaN values.
        """

        def read(data: dict[str, Any]) -> Machine:
            machine = cls.from_json(data)
            check_unique(machine.kernels, machine.costs)
            check_tests(machine.self_tests)
            return machine

        path = find_path(path)
        found = files.load(path, SCHEMA, SCHEMA_VERSION, read, "Recalibrate, or edit the file.")
        return replace(found, path=str(path))

    def to_json(self) -> dict[str, Any]:
        """The machine as JSON data."""
        return machine_to_json(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Machine:
        """The machine that :meth:`to_json` wrote. Raises DlperfError naming the entry that no
        measurement can have made.
        """
        return cls(**fields_from_json(data))


def _of_nearest(tests: Sequence[AnyTest], threads: int) -> tuple[AnyTest, ...]:
    """The tests at the measured thread count nearest to `threads`."""
    counts = {test.threads for test in tests}
    nearest = _nearest(counts, threads) if counts else threads
    return tuple(test for test in tests if test.threads == nearest)


def lacks(machine: Machine, what: str, way_out: str = "") -> DlperfError:
    """The error of what a machine file does not hold; by default a calibration is the way out."""
    way_out = way_out or f"; run {machine.calibration()}"
    return DlperfError(f"{machine.path or 'machine'}: holds no {what}{way_out}")


def _nearest(counts: Iterable[int], threads: int) -> int:
    """The thread count nearest to `threads` by ratio, the lower one of two."""
    return min(counts, key=lambda count: (abs(math.log(count / threads)), count))

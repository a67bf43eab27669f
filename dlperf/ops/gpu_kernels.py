"""The work of GPU kernels, as counters give it, and its place under the roofs of a device."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.models import gpu_counters, memory_hierarchy
from dlperf.ops.roofs import Ceiling, Roofs, roofs_of

LEVELS = ("L1", "L2", "DRAM")
"""The levels of a GPU's memory, innermost first. DRAM is HBM on data-center devices."""
PRECISIONS = {"half": "float16", "float": "float32", "double": "float64"}
"""Precisions of the CUDA cores by the profiler's word, and the dtype of their roof."""
TENSOR = "tensor "
"""Begins the dtype of a roof of the tensor cores: ``tensor float16``."""
COMPUTE = "compute"


class Instructions(NamedTuple):
    """Instructions of the CUDA cores in one precision, one for each thread."""

    n_add: float = 0.0
    n_mul: float = 0.0
    n_fma: float = 0.0

    @property
    def flops(self) -> float:
        """add + mul + 2 fma."""
        return float(gpu_counters.thread_flops(*self))


@dataclass(frozen=True, slots=True)
class KernelWork:
    """What a kernel did. None stands for what was not counted.

    `instructions` holds the precisions of the CUDA cores that were profiled, `tensor` the FLOPs of
    the tensor cores by dtype (``""`` where it is unknown); without `has_tensor` nobody counted them
    in the whole file. `level_bytes` has all :data:`LEVELS`.
    """

    time_s: float | None
    instructions: Mapping[str, Instructions | None]
    tensor: Mapping[str, float] | None
    has_tensor: bool
    level_bytes: Mapping[str, float | None]

    @property
    def flops(self) -> float | None:
        """All FLOPs, those of the tensor cores included; None where a part of them is unknown.

        Precisions that nobody profiled in the whole file are no part.
        """
        parts = [self.flops_of(precision) for precision in self.instructions]
        parts += [self.tensor_flops] * self.has_tensor
        return sum_known(parts)

    @property
    def tensor_flops(self) -> float | None:
        """FLOPs of the tensor cores."""
        return None if self.tensor is None else float(sum(self.tensor.values()))

    def flops_of(self, precision: str) -> float | None:
        """FLOPs of the CUDA cores in a precision."""
        found = self.instructions.get(precision)
        return None if found is None else found.flops

    @property
    def fma_frac(self) -> float | None:
        """Share of multiply-adds among the instructions of the CUDA cores; None without any."""
        known = [found for found in self.instructions.values() if found is not None]
        if len(known) < len(self.instructions) or not any(map(sum, known)):
            return None
        n_fma = sum(found.n_fma for found in known)
        n_other = sum(found.n_add + found.n_mul for found in known)
        return float(memory_hierarchy.fma_fraction(n_fma, n_other))

    @property
    def flops_per_s(self) -> float | None:
        """The rate that the kernel reached."""
        return self.flops / self.time_s if self.flops is not None and self.time_s else None

    def intensity(self, level: str) -> float | None:
        """FLOP per byte that a level moved; None where it moved nothing, or where a count is
        unknown.
        """
        n_bytes = self.level_bytes[level]
        if self.flops is None or not n_bytes:
            return None
        return float(memory_hierarchy.level_intensities(self.flops, [n_bytes])[0])

    def __add__(self, other: KernelWork) -> KernelWork:
        def added(one: Instructions | None, two: Instructions | None) -> Instructions | None:
            if one is None or two is None:
                return None
            return Instructions(*map(operator.add, one, two))

        precisions = {**self.instructions, **other.instructions}
        return KernelWork(
            sum_known((self.time_s, other.time_s)),
            {p: added(self.instructions.get(p), other.instructions.get(p)) for p in precisions},
            None
            if self.tensor is None or other.tensor is None
            else _sums(self.tensor, other.tensor),
            self.has_tensor or other.has_tensor,
            {
                level: sum_known((self.level_bytes[level], other.level_bytes[level]))
                for level in LEVELS
            },
        )


def _sums(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
    return {key: one.get(key, 0.0) + two.get(key, 0.0) for key in {**one, **two}}


def sum_known(values: list[float | None] | tuple[float | None, ...]) -> float | None:
    """The sum; None where a value is unknown, or where there is none.

    >>> sum_known([1.0, 2.0]), sum_known([1.0, None])
    (3.0, None)
    """
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def device_roofs(machine: Machine) -> Roofs:
    """The roofs of a GPU by its data sheet. A level whose bandwidth the sheet does not tell has
    none; without FMA half of the peak (Yang et al. 2019, section II.A).

    Raises DlperfError for a machine that is no accelerator.
    """
    sheet = machine.data_sheet
    if sheet is None or sheet.kind != "accelerator":
        raise DlperfError(
            f"{machine.path or machine.cpu.model}: is no GPU; --machine takes a device of the"
            " shelf, such as a100, or a file of dlperf machine new"
        )
    ceilings = [
        *(Ceiling(f"{TENSOR}{t}", peak, peak, "") for t, peak in sheet.matrix_flops_per_s.items()),
        *(Ceiling(t, peak, peak / 2, "half of FMA") for t, peak in sheet.flops_per_s.items()),
    ]
    ceilings.sort(key=lambda ceiling: -ceiling.fma_flops_per_s)
    return Roofs(roofs_of(machine, 1).bandwidths, tuple(ceilings))


class Placement(NamedTuple):
    """A kernel under the roofs of a device.

    `bound` is the lowest roof: ``compute`` or a level of the memory. `least_s` is the time that the
    roofs allow, `attainable_flops_per_s` the rate in that time.
    """

    bound: str
    least_s: float
    attainable_flops_per_s: float


def placement(work: KernelWork, roofs: Roofs) -> Placement | None:
    """The lowest roof above a kernel (Yang, Kurth, Williams 2019, equations 1 and 7).

    Multiply-adds run at the FMA peak of their precision, other instructions at the peak without
    FMA, the tensor cores at theirs, one after the other; every level moves its bytes at its full
    rate meanwhile. So the least time errs low where latency counts. A level without a roof limits
    nothing; a precision without one has the highest of its kind. None where a count is unknown,
    where there is no roof of DRAM or of arithmetic that the kernel does, or where it does nothing.
    """
    compute_s = _compute_s(work, roofs)
    known = {roof.level: roof.bytes_per_s for roof in roofs.bandwidths if roof.level in LEVELS}
    moved = {level: work.level_bytes[level] for level in known}
    if compute_s is None or work.flops is None or None in moved.values() or "DRAM" not in known:
        return None
    levels = [level for level in LEVELS if level in known]
    level_rates = [known[level] for level in levels]
    level_bytes = [moved[level] or 0.0 for level in levels]
    least_s = float(memory_hierarchy.time_s(compute_s, level_bytes, level_rates))
    if not least_s:
        return None
    level = int(memory_hierarchy.binding_level(compute_s, level_bytes, level_rates))
    bound = COMPUTE if level == memory_hierarchy.COMPUTE else levels[level]
    return Placement(bound, least_s, work.flops / least_s)


def _compute_s(work: KernelWork, roofs: Roofs) -> float | None:
    """Least time of the arithmetic; None where a count or its roof is unknown."""
    of_threads = {c.dtype: c for c in roofs.ceilings if not c.dtype.startswith(TENSOR)}
    of_tensor = {
        c.dtype.removeprefix(TENSOR): c for c in roofs.ceilings if c.dtype.startswith(TENSOR)
    }
    total_s = 0.0
    for precision, found in work.instructions.items():
        if found is None or (found.flops and not of_threads):
            return None
        if found.flops:
            ceiling = _ceiling(of_threads, PRECISIONS[precision])
            total_s += float(
                memory_hierarchy.compute_s(
                    2 * found.n_fma,
                    found.n_add + found.n_mul,
                    ceiling.fma_flops_per_s,
                    ceiling.other_flops_per_s,
                )
            )
    for dtype, flops in (work.tensor or {}).items():
        if flops and not of_tensor:
            return None
        if flops:
            total_s += flops / _ceiling(of_tensor, dtype).fma_flops_per_s
    return total_s


def _ceiling(ceilings: Mapping[str, Ceiling], dtype: str) -> Ceiling:
    """The ceiling of a dtype, else the highest."""
    highest = max(ceilings.values(), key=lambda ceiling: ceiling.fma_flops_per_s)
    return ceilings.get(dtype, highest)

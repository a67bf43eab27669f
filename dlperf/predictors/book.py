"""A machine's measurements as curves: surfaces fitted to its kernels when they are first needed, bandwidths, costs."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlperf import work
from dlperf.machine import Kernel, Machine
from dlperf.predictors.families import Description, describe
from dlperf.predictors.surface import Surface

_KEPT, _DESCRIBED = "_books", "_described_kernels"
LEVELS = ("L1", "L2", "L3", "DRAM")


@dataclass
class Book:
    """One machine at one thread count; ask :func:`book_of` for it."""

    machine: Machine
    threads: int
    _surfaces: dict[tuple[str, ...], Surface] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> dict[tuple[str, ...], list[tuple[Description, Kernel]]]:
        """Described kernels by key."""
        return _described(self.machine).get(self.threads, {})

    def resolve(self, description: Description) -> tuple[str, ...] | None:
        """The first of the description's keys that the machine has measured; None if it has none of them."""
        return next((key for key in (description.key, *description.fallbacks) if key in self.kernels), None)

    def surface(self, key: tuple[str, ...]) -> Surface:
        """The fitted surface of a measured key."""
        if key not in self._surfaces:
            rows = self.kernels[key]
            self._surfaces[key] = Surface.fit(
                np.array([d.place for d, _ in rows], dtype=float).reshape(len(rows), -1), np.array([d.terms for d, _ in rows], dtype=float),
                np.array([k.samples.median for _, k in rows], dtype=float),
            )  # fmt: skip
        return self._surfaces[key]

    @cached_property
    def bytes_per_s(self) -> dict[str, float]:
        """Bandwidth by level; a level that the sweep did not hit takes that of the next one outwards."""
        found: dict[str, float] = {}
        outer = self.machine.dram_bytes_per_s(self.threads)
        for level in reversed(LEVELS):
            outer = max(outer, self.machine.level_bytes_per_s(level, self.threads) or outer)
            found[level] = outer
        return found

    @cached_property
    def level_rates(self) -> npt.NDArray[np.float64]:
        """Bytes per second in the order of LEVELS."""
        return np.array([self.bytes_per_s[level] for level in LEVELS])

    def level_numbers(self, n_bytes: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        """For each amount of bytes the place in LEVELS of the nearest memory that holds it."""
        sizes = self.machine.cpu.caches_bytes
        number = np.full(len(n_bytes), len(LEVELS) - 1)
        for place in reversed(range(len(sizes))):
            if sizes[place]:
                number[n_bytes <= sizes[place]] = place
        return number

    @cached_property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Highest GEMM rate by dtype."""
        found: dict[str, float] = {}
        for kernel in self.machine.family("gemm", self.threads):
            flops = work.op_flops(kernel.op) or 0
            dtype = kernel.op.inputs[0].dtype
            found[dtype] = max(found.get(dtype, 0.0), flops / kernel.samples.minimum)
        return found

    def cost_s(self, name: str) -> float:
        """A named cost in seconds; 0 where a (partial) file does not hold it."""
        if name not in self._costs:
            self._costs[name] = self.machine.cost_s(name, self.threads, default=0.0)
        return self._costs[name]

    @cached_property
    def _cold_curves(self) -> dict[str, tuple[list[float], list[float]]]:
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for cost in self.machine.costs:
            if cost.name.startswith(("cold/", "churn/")) and cost.threads == self.threads:
                kind, what, n_bytes = cost.name.split("/")
                found[f"{kind}/{what}"].append((math.log2(float(n_bytes)), cost.samples.median))
        curves = {}
        for what, points in found.items():
            points.sort()
            seconds = np.maximum.accumulate([second for _, second in points])
            # A quarter of the least amount measured leaves the call's own code where it is.
            curves[what] = ([points[0][0] - 2.0, *(size for size, _ in points)], [0.0, *map(float, seconds)])
        return curves

    def cold_s(self, what: str, passed_bytes: float, fresh_bytes: float = 0.0) -> float:
        """Seconds that a ``call``, ``optimizer`` or ``backward`` takes more after `passed_bytes` since it last ran, `fresh_bytes` on new pages."""
        seconds = 0.0
        for kind, n_bytes in (("cold", passed_bytes), ("churn", fresh_bytes)):
            curve = self._cold_curves.get(f"{kind}/{what}")
            if curve is not None and n_bytes > 0:
                seconds = max(seconds, float(np.interp(math.log2(n_bytes), *curve)))
        return seconds

    @cached_property
    def held_out(self) -> dict[str, float]:
        """Median held-out error by the kernels' families: every kernel predicted from the others of its key."""
        errors: dict[str, list[float]] = defaultdict(list)
        for key, rows in self.kernels.items():
            error = self.surface(key).held_out_error
            if not math.isnan(error):
                for _, kernel in rows:
                    errors[kernel.family].append(error)
        return {name: float(np.median(values)) for name, values in sorted(errors.items())}


def _described(machine: Machine) -> dict[int, dict[tuple[str, ...], list[tuple[Description, Kernel]]]]:
    """Every described kernel by thread count and key; made once and kept with the machine, for all its books."""
    kept: dict[int, dict[tuple[str, ...], list[tuple[Description, Kernel]]]] | None = machine.__dict__.get(_DESCRIBED)
    if kept is None:
        kept = {}
        known: dict[str, Description | None] = {}
        for kernel in machine.kernels:
            signature = kernel.op.signature
            if signature not in known:
                known[signature] = describe(kernel.op)
            description = known[signature]
            if description is not None:
                kept.setdefault(kernel.threads, {}).setdefault(description.key, []).append((description, kernel))
        machine.__dict__[_DESCRIBED] = kept
    return kept


def book_of(machine: Machine, threads: int) -> Book:
    """The book of a machine at its measured thread count nearest to `threads`; made once and kept with the machine."""
    nearest = machine.nearest_threads(threads)
    books: dict[int, Book] = machine.__dict__.setdefault(_KEPT, {})
    if nearest not in books:
        books[nearest] = Book(machine, nearest)
    return books[nearest]

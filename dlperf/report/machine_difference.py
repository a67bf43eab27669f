"""Two machine files compared: ratios of the times that both contain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dlperf.core.machine import STREAM_BYTES_PER_ELEMENT, Machine
from dlperf.ops.roofs import LEVELS, roofs_of
from dlperf.report.document import Column, format_table


@dataclass(frozen=True)
class Ratio:
    """Time in the second machine file / time in the first: the geometric mean over the `n_shared`
    points of both, and its extremes.
    """

    what: str
    threads: int
    ratio: float
    low: float
    high: float
    n_shared: int


@dataclass(frozen=True)
class Difference:
    """Two machine files: `ratios` of what both contain, `notes` on what only one contains."""

    first: Machine
    second: Machine
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]

    def to_text(self) -> str:
        """A table; below 1 the second machine is faster."""
        found = self.ratios
        columns = [
            Column("what", tuple(r.what for r in found), align_left=True),
            Column("threads", tuple(str(r.threads) for r in found)),
            Column("ratio", tuple(f"{r.ratio:.3f}" for r in found)),
            Column("least", tuple(f"{r.low:.3f}" for r in found)),
            Column("most", tuple(f"{r.high:.3f}" for r in found)),
            Column("points", tuple(str(r.n_shared) for r in found)),
        ]
        table = format_table(columns, None) if found else "nothing is in both"
        head = (
            f"time in {self.second.path or 'the second'} / time in"
            f" {self.first.path or 'the first'}; below 1 the second is faster"
        )
        return "\n".join([head, "", table, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """The difference as JSON data."""
        return {
            "schema": "dlperf.machine-diff",
            "schema_version": 1,
            "first": self.first.path,
            "second": self.second.path,
            "notes": list(self.notes),
            "ratios": [
                {
                    "what": r.what,
                    "threads": r.threads,
                    "ratio": r.ratio,
                    "low": r.low,
                    "high": r.high,
                    "points": r.n_shared,
                }
                for r in self.ratios
            ],
        }


def compare_machines(first: Machine, second: Machine) -> Difference:
    """Ratios of times by family, bandwidth level and cost, over what both files contain."""
    ratios: dict[tuple[str, int], list[float]] = defaultdict(list)
    theirs = {(k.op.signature, k.threads): k.samples.median for k in second.kernels}
    for kernel in sorted(first.kernels, key=lambda k: (k.family, k.threads)):
        if other_s := theirs.get((kernel.op.signature, kernel.threads)):
            ratios[kernel.family, kernel.threads].append(other_s / kernel.samples.median)
    for threads in sorted(set(first.threads) & set(second.threads)):
        ours, others = (
            {roof.level: roof for roof in roofs_of(machine, threads).bandwidths}
            for machine in (first, second)
        )
        for level in (level for level in LEVELS if level in ours and level in others):
            a, b = ours[level], others[level]
            if (a.kernel in STREAM_BYTES_PER_ELEMENT) == (b.kernel in STREAM_BYTES_PER_ELEMENT):
                ratios[f"memory {level}", threads].append(a.bytes_per_s / b.bytes_per_s)
    costs = {(c.key, c.threads): c.samples.minimum for c in second.costs}
    for cost in sorted(first.costs, key=lambda c: (c.key, c.threads)):
        other_s = costs.get((cost.key, cost.threads))
        if other_s and cost.samples.median:
            ratios[f"cost {cost.key}", cost.threads].append(other_s / cost.samples.median)
    found = [
        Ratio(*key, math.exp(fmean(map(math.log, values))), min(values), max(values), len(values))
        for key, values in ratios.items()
    ]
    return Difference(first, second, tuple(found), tuple(_only_in_one(first, second)))


def _only_in_one(first: Machine, second: Machine) -> Iterable[str]:
    if first.cpu.identity != second.cpu.identity:
        yield (
            f"other machines: {first.cpu.model} ({first.cpu.n_cores} cores), {second.cpu.model}"
            f" ({second.cpu.n_cores} cores)"
        )
    for name in sorted(set(first.versions) | set(second.versions)):
        a, b = first.versions.get(name, "none"), second.versions.get(name, "none")
        if a != b:
            yield f"{name} {a}, {b}"
    if first.mode != second.mode:
        yield f"calibrations of other depth: {first.mode}, {second.mode}"
    if first.threads != second.threads:
        yield (
            f"thread counts {', '.join(map(str, first.threads)) or 'none'};"
            f" {', '.join(map(str, second.threads)) or 'none'}"
        )
    a_keys, b_keys = (
        {(k.op.signature, k.threads) for k in machine.kernels} for machine in (first, second)
    )
    if a_keys ^ b_keys:
        yield (
            f"{len(a_keys - b_keys)} points are only in the first, {len(b_keys - a_keys)} only in"
            " the second"
        )

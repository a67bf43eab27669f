"""How right forecasts of data-parallel steps are: each beside what was measured on ranks behind
links of known rates, and every bar with its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from dlperf.core.units import UNSHAPED
from dlperf.studies.accuracy.study import Provenance

SCHEMA, SCHEMA_VERSION = "dlperf.distributed_validation", 1
LINK_BOUND_FRAC = 0.10
"""A case counts as bound by its link, for the reader, where so much of its measured step is exposed
communication.
"""


@dataclass(frozen=True)
class Kind:
    """What is forecast, in words; the unit of its pairs (``s``, ``frac``, or nothing); the bars on
    its rows' errors, by statistic.

    `relative` errors are predicted / measured - 1, others predicted - measured. Where `by_link`
    stands every link has its own bars.
    """

    text: str
    unit: str
    bars: tuple[tuple[str, float], ...] = ()
    relative: bool = True
    by_link: bool = False


KINDS = {
    "all-reduce": Kind(
        "all-reduce of sizes that the calibration did not measure",
        "s",
        (("mean", 0.12),),
        by_link=True,
    ),
    "step": Kind("step of DistributedDataParallel", "s", (("median", 0.10), ("worst", 0.25))),
    "share": Kind(
        "exposed communication, share of the step", "frac", (("worst", 0.08),), relative=False
    ),
    "buckets": Kind("sizes of the buckets", "bytes", (("right", 1.0),)),
    "bound": Kind("bounding resource", "frac", (("right", 0.90),), relative=False),
    "replay": Kind(
        "step replayed from a recording at another rate", "s", (("median", 0.10), ("worst", 0.25))
    ),
    "first-step": Kind("first step", "s"),
    "alone": Kind("step without synchronisation", "s"),
}
"""Kinds of rows, in the order of the tables. The last two have no bar: they say where an error of
the step comes from.
"""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "worst": max,
}


@dataclass(frozen=True)
class Pair:
    """A forecast and one run of what it was of, in the same unit."""

    predicted: float
    measured: float


@dataclass(frozen=True)
class Row:
    """A forecast beside the runs of it: a pair a run. `rate` is the links' while it ran,
    `calibrated_at` their rate when what the forecast rests on was measured (of a replay: recorded).

    `right` is for kinds that are right or wrong (buckets, bound); `inside` tells whether the
    forecast's interval holds the median run, where there is one.
    """

    kind: str
    case: str
    ranks: int
    rate: str
    calibrated_at: str
    pairs: tuple[Pair, ...]
    right: bool | None = None
    inside: bool | None = None
    remark: str = ""

    @property
    def unit(self) -> str:
        """The unit of the pairs."""
        return KINDS[self.kind].unit

    @property
    def predicted(self) -> float:
        """The median forecast."""
        return median(pair.predicted for pair in self.pairs)

    @property
    def measured(self) -> float:
        """The median run."""
        return median(pair.measured for pair in self.pairs)

    @property
    def error(self) -> float:
        """predicted / measured - 1 (of shares and gains predicted - measured), the median over the
        runs.

        >>> Row("share", "a", 2, "1gbit", "1gbit", (Pair(0.50, 0.45), Pair(0.50, 0.35))).error
        0.1
        """
        relative = KINDS[self.kind].relative
        return round(
            median(
                p.predicted / p.measured - 1 if relative else p.predicted - p.measured
                for p in self.pairs
            ),
            12,
        )

    @property
    def floor(self) -> float | None:
        """(largest - smallest) / median of the runs, of shares and gains without the division; None
        of a single run.
        """
        values = [pair.measured for pair in self.pairs]
        if len(values) < 2:
            return None
        return (max(values) - min(values)) / (median(values) if KINDS[self.kind].relative else 1.0)

    @property
    def changed(self) -> bool:
        """Whether the link's rate was changed on paper (what-if) since it was measured."""
        return self.rate != self.calibrated_at

    @property
    def bar(self) -> float | None:
        """How far off this one row may be at most; None where no bar stands: kinds without one, and
        links as they are, which repeat only to a factor.
        """
        bars = KINDS[self.kind].bars
        return None if self.rate == UNSHAPED or not bars else bars[-1][1]

    @property
    def met(self) -> bool | None:
        """Whether this row is right, or within its bar; None where no bar stands."""
        if self.bar is None:
            return None
        return self.right if self.right is not None else abs(self.error) <= self.bar


@dataclass(frozen=True)
class Verdict:
    """One bar over the rows that it is for: `statistic` of their errors is `value`, `bar` what it
    may be at most (of right ones: at least).

    `bar` is None where none stands; `floor` is the same rows' median floor.
    """

    kind: str
    where: str
    statistic: str
    n: int
    value: float
    bar: float | None
    floor: float | None

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where none stands."""
        if self.bar is None:
            return None
        return self.value >= self.bar if self.statistic == "right" else self.value <= self.bar


@dataclass(frozen=True)
class LinkRow:
    """A link as its calibration found it: the fit of long messages."""

    ranks: int
    rate: str
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class DistributedStudy:
    """Rows, links, and what failed, as lines. `hosts` says in words where the ranks ran."""

    provenance: Provenance
    hosts: str
    rows: tuple[Row, ...]
    links: tuple[LinkRow, ...] = ()
    failures: tuple[str, ...] = ()

    @cached_property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Every bar, in the order of KINDS; for each kind first the links as calibrated, then those
        changed on paper, then links as they are.
        """
        found: list[Verdict] = []
        for kind in KINDS:
            groups: dict[str, list[Row]] = {}
            for row in sorted(
                (row for row in self.rows if row.kind == kind),
                key=lambda row: (row.rate == UNSHAPED, row.changed),
            ):
                groups.setdefault(_where(row), []).append(row)
            for where, rows in groups.items():
                found += _verdicts(kind, where, rows)
        return tuple(found)

    @property
    def n_link_bound(self) -> tuple[int, int]:
        """Of how many measured steps, cases at shaped rates, much of the time is exposed
        communication; and how many there are.
        """
        shares = {
            (row.case, row.ranks, row.rate): row.measured
            for row in self.rows
            if row.kind == "share" and row.rate != UNSHAPED
        }
        return sum(share > LINK_BOUND_FRAC for share in shares.values()), len(shares)

    def to_json(self) -> dict[str, Any]:
        """The study as JSON data; errors, floors and bars are fractions."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(self.provenance),
            "hosts": self.hosts,
            "verdicts": [{**asdict(verdict), "met": verdict.met} for verdict in self.verdicts],
            "rows": [
                {
                    **asdict(row),
                    "unit": row.unit,
                    "error": row.error,
                    "floor": row.floor,
                    "bar": row.bar,
                    "met": row.met,
                }
                for row in self.rows
            ],
            "links": [asdict(link) for link in self.links],
            "failures": list(self.failures),
        }


def _where(row: Row) -> str:
    if row.kind == "replay":
        return "recorded behind links of another rate"
    link = (
        f"{row.ranks} ranks, {row.rate}"
        if KINDS[row.kind].by_link
        else "links as they are"
        if row.rate == UNSHAPED
        else "links as calibrated"
    )
    if not row.changed:
        return link
    return (
        f"{link} from {row.calibrated_at}"
        if KINDS[row.kind].by_link
        else "links calibrated at another rate (--what-if)"
    )


def _verdicts(kind: str, where: str, rows: Sequence[Row]) -> list[Verdict]:
    floors = [row.floor for row in rows if row.floor is not None]
    floor = median(floors) if floors else None
    judged = any(row.rate != UNSHAPED for row in rows)
    found = []
    for statistic, bar in KINDS[kind].bars or (("median", None), ("worst", None)):
        if statistic == "right":
            value = fmean(bool(row.right) for row in rows)
            floor = None if kind == "buckets" else floor
        else:
            value = STATISTICS[statistic]([abs(row.error) for row in rows])
        found.append(
            Verdict(kind, where, statistic, len(rows), value, bar if judged else None, floor)
        )
    return found

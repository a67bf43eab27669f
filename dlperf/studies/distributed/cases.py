"""How right forecasts of data-parallel steps are: each beside what was measured on ranks behind
links of known rates, and every threshold with its repeatability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Any

from dlperf.core.units import UNSHAPED
from dlperf.studies.accuracy.cases import median_or_none
from dlperf.studies.results import MeasuredForecast, Pair, Provenance

SCHEMA, SCHEMA_VERSION = "dlperf.distributed_validation", 2
LINK_BOUND_FRAC = 0.10
"""A case counts as bound by its link, for the reader, where so much of its measured step is exposed
communication.
"""


@dataclass(frozen=True)
class ForecastKind:
    """What is forecast, in words; the unit of its pairs (``s``, ``frac``, or nothing); the
    thresholds on its rows' errors, by statistic.

    `relative` errors are predicted / measured - 1, others predicted - measured. Where `by_link`
    stands every link has its own thresholds.
    """

    text: str
    unit: str
    thresholds: tuple[tuple[str, float], ...] = ()
    relative: bool = True
    by_link: bool = False


KINDS = {
    "all-reduce": ForecastKind(
        "all-reduce of sizes that the calibration did not measure",
        "s",
        (("mean", 0.12),),
        by_link=True,
    ),
    "step": ForecastKind(
        "step of DistributedDataParallel", "s", (("median", 0.10), ("worst", 0.25))
    ),
    "share": ForecastKind(
        "exposed communication, share of the step", "frac", (("worst", 0.08),), relative=False
    ),
    "buckets": ForecastKind("sizes of the buckets", "bytes", (("right", 1.0),)),
    "bound": ForecastKind("bounding resource", "frac", (("right", 0.90),), relative=False),
    "replay": ForecastKind(
        "step replayed from a recording at another rate", "s", (("median", 0.10), ("worst", 0.25))
    ),
    "first-step": ForecastKind("first step", "s"),
    "alone": ForecastKind("step without synchronisation", "s"),
}
"""Kinds of rows, in the order of the tables. The last two have no threshold: they say where an
error of the step comes from.
"""
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "median": median,
    "worst": max,
}


@dataclass(frozen=True)
class DistributedForecast(MeasuredForecast):
    """A forecast beside the runs of it: a pair a run. `rate` is the links' while it ran,
    `calibrated_at` their rate when what the forecast rests on was measured (of a replay: recorded).

    `right` is for kinds that are right or wrong (buckets, bound); `inside` states whether the
    forecast's interval holds the median run, where there is one.

    >>> pairs = Pair(0.50, 0.45), Pair(0.50, 0.35)
    >>> DistributedForecast("share", "a", 2, "1gbit", "1gbit", pairs).error_frac
    0.1
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
    def unit(self) -> str:  # type: ignore[override]
        """The unit of the pairs."""
        return KINDS[self.kind].unit

    @property
    def is_relative(self) -> bool:  # type: ignore[override]
        """Whether errors are relative."""
        return KINDS[self.kind].relative

    @property
    def changed(self) -> bool:
        """Whether the link's rate was changed on paper (what-if) since it was measured."""
        return self.rate != self.calibrated_at

    @property
    def threshold(self) -> float | None:
        """How far off this one row may be at most; None where no threshold stands: kinds without
        one, and links as they are, which repeat only to a factor.
        """
        thresholds = KINDS[self.kind].thresholds
        return None if self.rate == UNSHAPED or not thresholds else thresholds[-1][1]

    @property
    def met(self) -> bool | None:
        """Whether this row is right, or within its threshold; None where no threshold stands."""
        if self.threshold is None:
            return None
        return self.right if self.right is not None else abs(self.error_frac) <= self.threshold


@dataclass(frozen=True)
class ThresholdCheck:
    """One threshold over the rows that it is for: `statistic` of their errors is `value`,
    `threshold` what it may be at most (of right ones: at least).

    `threshold` is None where none stands; `repeatability` is the same rows' median repeatability.
    """

    kind: str
    where: str
    statistic: str
    n: int
    value: float
    threshold: float | None
    repeatability: float | None

    @property
    def met(self) -> bool | None:
        """Whether the threshold is met; None where none stands."""
        if self.threshold is None:
            return None
        return (
            self.value >= self.threshold
            if self.statistic == "right"
            else self.value <= self.threshold
        )


@dataclass(frozen=True)
class CalibratedLink:
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
    rows: tuple[DistributedForecast, ...]
    links: tuple[CalibratedLink, ...] = ()
    failures: tuple[str, ...] = ()

    @cached_property
    def checks(self) -> tuple[ThresholdCheck, ...]:
        """Every threshold, in the order of KINDS; for each kind first the links as calibrated, then
        those changed on paper, then links as they are.
        """
        found: list[ThresholdCheck] = []
        for kind in KINDS:
            groups: dict[str, list[DistributedForecast]] = {}
            for row in sorted(
                (row for row in self.rows if row.kind == kind),
                key=lambda row: (row.rate == UNSHAPED, row.changed),
            ):
                groups.setdefault(_where(row), []).append(row)
            for where, rows in groups.items():
                found += _checks(kind, where, rows)
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
        """The study as JSON data; errors, repeatabilities and thresholds are fractions."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(self.provenance),
            "hosts": self.hosts,
            "checks": [{**asdict(check), "met": check.met} for check in self.checks],
            "rows": [
                {
                    **asdict(row),
                    "unit": row.unit,
                    "error": row.error_frac,
                    "repeatability": row.repeatability_frac,
                    "threshold": row.threshold,
                    "met": row.met,
                }
                for row in self.rows
            ],
            "links": [asdict(link) for link in self.links],
            "failures": list(self.failures),
        }


def _where(row: DistributedForecast) -> str:
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


def _checks(kind: str, where: str, rows: Sequence[DistributedForecast]) -> list[ThresholdCheck]:
    repeatability = median_or_none(row.repeatability_frac for row in rows)
    has_threshold = any(row.rate != UNSHAPED for row in rows)
    found = []
    for statistic, threshold in KINDS[kind].thresholds or (("median", None), ("worst", None)):
        if statistic == "right":
            value = fmean(bool(row.right) for row in rows)
            repeatability = None if kind == "buckets" else repeatability
        else:
            value = STATISTICS[statistic]([abs(row.error_frac) for row in rows])
        found.append(
            ThresholdCheck(
                kind,
                where,
                statistic,
                len(rows),
                value,
                threshold if has_threshold else None,
                repeatability,
            )
        )
    return found

"""How right forecasts of whole trainings are: each case's forecasts beside what was measured, and
the errors of each kind of case beside its thresholds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median
from typing import Annotated, Any

from msgspec import Meta

from dlperf.core.conversion import Name, Positive, Text
from dlperf.models.threads import delta_frac
from dlperf.studies.accuracy.cases import median_or_none
from dlperf.studies.results import MeasuredForecast, Pair, Provenance

SCHEMA, SCHEMA_VERSION = "dlperf.training_validation", 2


@dataclass(frozen=True)
class TrainingKind:
    """What is forecast, in words, and how far off it may be (`threshold_frac`) and should be
    (`target_frac`).
    """

    text: str
    threshold_frac: float
    target_frac: float


KINDS = {
    "workers": TrainingKind("total training time, no more workers than cores", 0.07, 0.03),
    "oversubscribed": TrainingKind("total training time, more workers than cores", 0.15, 0.07),
    "wrapped": TrainingKind(
        "epoch of a wrapped script, forecast after its first steps", 0.05, 0.02
    ),
    "epoch": TrainingKind("epoch from calibration alone, loader included", 0.10, 0.04),
    "choice": TrainingKind(
        "rate of the configuration that tune chose, against the best measured", 0.05, 0.02
    ),
    "memory": TrainingKind("peak memory", 0.10, 0.04),
}


@dataclass(frozen=True)
class TrainingForecast(MeasuredForecast):
    """A case: its kind (a key of KINDS), a label, one pair a run, the unit (``s``, ``bytes`` or
    ``samples/s``); `network`, and `workers` where it has any.

    >>> pairs = Pair(9.0, 10.0), Pair(9.0, 9.0), Pair(12.0, 10.0)
    >>> TrainingForecast("epoch", "a", pairs, "s", "a").error_frac
    0.0
    """

    kind: Name
    case: Name
    pairs: Annotated[tuple[Pair, ...], Meta(min_length=1)]
    unit: Text
    network: Text
    workers: Positive | None = None

    @property
    def delta_frac(self) -> float:
        """|measured - predicted| / predicted, as Viebke et al. 2019 have it."""
        return delta_frac(self.measured, self.predicted)


@dataclass(frozen=True)
class KindSummary:
    """All cases of a kind: |error| of the median and the worst one, the share within the must, the
    median repeatability.
    """

    kind: str
    n: int
    median_frac: float
    worst_frac: float
    within_frac: float
    repeatability_frac: float | None


@dataclass(frozen=True)
class ForecastTable:
    """A table of forecasts that nothing was measured for: row titles, column titles, seconds (None:
    could not be forecast).
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    seconds: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True)
class TrainingStudy:
    """Rows, forecasts beyond them, and what failed, as lines."""

    provenance: Provenance
    rows: tuple[TrainingForecast, ...]
    tables: tuple[ForecastTable, ...] = ()
    failures: tuple[str, ...] = ()

    @cached_property
    def summaries(self) -> tuple[KindSummary, ...]:
        """Each kind that has rows, in the order of KINDS."""
        return tuple(
            _summary(kind, own)
            for kind in KINDS
            if (own := [row for row in self.rows if row.kind == kind])
        )

    def to_json(self) -> dict[str, Any]:
        """The study as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "provenance": asdict(self.provenance),
            "summary": [
                {
                    **asdict(s),
                    "threshold_frac": KINDS[s.kind].threshold_frac,
                    "target_frac": KINDS[s.kind].target_frac,
                }
                for s in self.summaries
            ],
            "rows": [
                {
                    **asdict(row),
                    "error_frac": row.error_frac,
                    "delta_frac": row.delta_frac,
                    "repeatability_frac": row.repeatability_frac,
                }
                for row in self.rows
            ],
            "tables": [asdict(table) for table in self.tables],
            "failures": list(self.failures),
        }


def _summary(kind: str, rows: Sequence[TrainingForecast]) -> KindSummary:
    errors = [abs(row.error_frac) for row in rows]
    return KindSummary(
        kind,
        len(rows),
        median(errors),
        max(errors),
        fmean(error <= KINDS[kind].threshold_frac for error in errors),
        median_or_none(row.repeatability_frac for row in rows),
    )

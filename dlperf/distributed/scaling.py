"""A scaling forecast as data: rows over numbers of ranks, and how they are written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dlperf.core.display import Displayed
from dlperf.core.text import csv_text
from dlperf.models.ridgeline import Rates

SCHEMA, SCHEMA_VERSION = "dlperf.scaling", 1


@dataclass(frozen=True)
class CollectiveTime:
    """One collective alone: kind, size of the vector, ranks, seconds."""

    kind: str
    n_bytes: int
    ranks: int
    time_s: float


@dataclass(frozen=True)
class Row:
    """One number of ranks. `batch_size` is the rank's own (of the one with most samples).

    `step_s` is the slowest rank's, `compute_s` the same step without synchronisation,
    `communication_s` how long anything is sent, `network_gain_frac` what links of twice the rate
    would save. `p10_s`..`p90_s` is the spread from step to step (of the slowest rank),
    `low_s`..`high_s` the 90 % interval of the median. `flops`, `memory_bytes` and `network_bytes`
    are a rank's in one step, `arithmetic_intensity` and `memory_intensity` their place on the
    Ridgeline plane (FLOP per byte of memory, bytes of memory per byte of network; None where there
    is nothing to divide by) and `ridgeline` the resource that bounds it there: compute, memory or
    network (None without rates).
    """

    ranks: int
    batch_size: int
    step_s: float
    low_s: float
    high_s: float
    first_step_s: float
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    efficiency: float
    samples_per_s: float
    bound: str
    speedup: float
    network_gain_frac: float
    p10_s: float
    p90_s: float
    epoch_s: float | None
    flops: float
    memory_bytes: float
    network_bytes: float
    arithmetic_intensity: float | None
    memory_intensity: float | None
    ridgeline: str | None


@dataclass(frozen=True, repr=False)
class Scaling(Displayed, by="dlperf.report.scaling_text"):
    """The forecast of a target over numbers of ranks. `sigma` and `link_sigma` are the spreads that
    the slowest of n follows from.

    `rates` are what one rank of the largest number can do, which divide the Ridgeline plane; None
    where they are not known, or one rank is alone.
    """

    target: str
    batch_size: int
    scaling: str
    threads: int
    ranks_per_node: int
    buckets_bytes: tuple[int, ...]
    collectives: tuple[CollectiveTime, ...]
    rows: tuple[Row, ...]
    what_if: dict[str, float] = field(default_factory=dict)
    samples: int | None = None
    machine: str = ""
    cluster: str = ""
    sigma: float = 0.0
    link_sigma: float = 0.0
    rates: Rates | None = None
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> Row:
        """The row with most samples a second; of equals the one with the fewest ranks."""
        return max(sorted(self.rows, key=lambda row: row.ranks), key=lambda row: row.samples_per_s)

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "batch_size": self.batch_size,
            "scaling": self.scaling,
            "threads": self.threads,
            "ranks_per_node": self.ranks_per_node,
            "machine": self.machine,
            "cluster": self.cluster,
            "what_if": dict(self.what_if),
            "samples": self.samples,
            "buckets_bytes": list(self.buckets_bytes),
            "collectives": [
                {"kind": c.kind, "bytes": c.n_bytes, "ranks": c.ranks, "time_s": c.time_s}
                for c in self.collectives
            ],
            "rows": [asdict(row) for row in self.rows],
            "spread": {"compute_sigma": self.sigma, "link_sigma": self.link_sigma},
            "rates": None if self.rates is None else asdict(self.rates),
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def to_csv(self) -> str:
        """One line for each number of ranks, SI units; `own_batch_size` is the rank's."""
        own = {
            "target": self.target,
            "batch_size": self.batch_size,
            "threads": self.threads,
            "scaling": self.scaling,
        }
        names = [
            "own_batch_size" if column.name == "batch_size" else column.name
            for column in fields(Row)
        ]
        return csv_text(
            [*own, *names],
            ({**asdict(row), "own_batch_size": row.batch_size, **own} for row in self.rows),
        )

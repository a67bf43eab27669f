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
class ScalingPoint:
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
    rows: tuple[ScalingPoint, ...]
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
    def best(self) -> ScalingPoint:
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
            for column in fields(ScalingPoint)
        ]
        return csv_text(
            [*own, *names],
            ({**asdict(row), "own_batch_size": row.batch_size, **own} for row in self.rows),
        )


@dataclass(frozen=True)
class ReplayPoint:
    """One number of ranks. `step_s` is the slowest rank's median step: the replayed one and the
    constant `overhead_s`.

    `compute_s` is the same step over a network that takes no time, where ranks still wait for one
    another (`waiting_s` of it) and the overhead stays; `exposed_communication_s` is the rest.
    `efficiency` is the step of a rank on its own, if that computes as one does here, over step_s,
    and `speedup` so many times the ranks. `low_s`..`high_s` is a 90 % interval of the median by how
    much the recorded steps and the measured links vary, `p10_s`..`p90_s` the spread from step to
    step. `first_step_s` is None where the first step after wrapping was not recorded.
    """

    ranks: int
    step_s: float
    low_s: float
    high_s: float
    first_step_s: float | None
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    waiting_s: float
    overhead_s: float
    efficiency: float
    speedup: float
    steps_per_s: float
    bound: str
    network_gain_frac: float
    p10_s: float
    p90_s: float
    network_bytes: float


@dataclass(frozen=True)
class Shares:
    """A rank's usual step: computing (and all else that is the script's own), exposed communication
    (issuing calls and leaving them included), waiting for slower ranks; seconds, each the median
    over the steps.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    waiting_s: float


@dataclass(frozen=True)
class RankReplay:
    """One rank as it was recorded, and as it was replayed over the other cluster, without the
    overhead.
    """

    rank: int
    host: str
    recorded: Shares
    replayed: Shares


@dataclass(frozen=True)
class CallTimes:
    """The calls of one kind, size and number of ranks: how many a step, the median of how long they
    ran in the recording (beside computing and one another), and what each takes alone over the
    cluster it was recorded on (None where that was not named) and over the other.
    """

    kind: str
    n_bytes: int
    ranks: int
    per_step: float
    recorded_s: float
    recorded_on_s: float | None
    replayed_s: float


@dataclass(frozen=True, repr=False)
class CommunicationReplay(Displayed, by="dlperf.report.replay_text"):
    """A trace replayed over `cluster`. `recorded_step_s` is the slowest rank's median step as
    recorded, `replayed_step_s` what the replay over the cluster it was recorded on gives, both over
    `n_steps` steps, the first after wrapping left out; their difference is the overhead that is
    carried over.
    """

    target: str
    threads: int
    ranks_per_node: int
    n_steps: int
    recorded_step_s: float
    replayed_step_s: float
    buckets_bytes: tuple[int, ...]
    collectives: tuple[CollectiveTime, ...]
    rows: tuple[ReplayPoint, ...]
    ranks: tuple[RankReplay, ...]
    calls: tuple[CallTimes, ...]
    trace: str = ""
    cluster: str = ""
    recorded_on: str = ""
    machine: str = ""
    what_if: dict[str, float] = field(default_factory=dict)
    sigma: float = 0.0
    link_sigma: float = 0.0
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def overhead_s(self) -> float:
        """The constant overhead of a step (Choi et al. 2020): what the replay over the recorded
        cluster does not explain; negative where that is too slow.
        """
        return self.recorded_step_s - self.replayed_step_s

    def to_json(self) -> dict[str, Any]:
        """The replay as JSON data: the fields of a scaling forecast, null where a trace cannot
        tell, and those of its own.
        """
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "batch_size": None,
            "scaling": "weak",
            "threads": self.threads,
            "ranks_per_node": self.ranks_per_node,
            "machine": self.machine,
            "cluster": self.cluster,
            "what_if": dict(self.what_if),
            "samples": None,
            "buckets_bytes": list(self.buckets_bytes),
            "collectives": [
                {"kind": c.kind, "bytes": c.n_bytes, "ranks": c.ranks, "time_s": c.time_s}
                for c in self.collectives
            ],
            "rows": [{**asdict(row), "samples_per_s": None, "epoch_s": None} for row in self.rows],
            "spread": {"compute_sigma": self.sigma, "link_sigma": self.link_sigma},
            "trace": self.trace,
            "recorded_on": self.recorded_on or None,
            "recorded": {
                "ranks": len(self.ranks),
                "steps": self.n_steps,
                "step_s": self.recorded_step_s,
                "replayed_step_s": self.replayed_step_s,
                "overhead_s": self.overhead_s,
            },
            "ranks": [asdict(rank) for rank in self.ranks],
            "calls": [
                {
                    "kind": c.kind,
                    "bytes": c.n_bytes,
                    "ranks": c.ranks,
                    "per_step": c.per_step,
                    "recorded_s": c.recorded_s,
                    "recorded_on_s": c.recorded_on_s,
                    "replayed_s": c.replayed_s,
                }
                for c in self.calls
            ],
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def to_csv(self) -> str:
        """One line for each number of ranks, SI units; a trace knows no batch size."""
        own = {
            "target": self.target,
            "batch_size": "",
            "threads": self.threads,
            "scaling": "weak",
            "recorded_step_s": self.recorded_step_s,
        }
        return csv_text(
            [*own, *(column.name for column in fields(ReplayPoint))],
            ({**asdict(row), **own} for row in self.rows),
        )

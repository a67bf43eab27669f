"""Steps over numbers of ranks as data: forecast (Scaling) or replayed from a trace of communication
(CommunicationReplay).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dlperf.core.display import Displayed
from dlperf.core.text import csv_text
from dlperf.models.overlap import TimeLine
from dlperf.models.ridgeline import Rates

SCHEMA, SCHEMA_VERSION = "dlperf.scaling", 1


@dataclass(frozen=True)
class CollectiveTime:
    """One collective alone: kind, size of the vector, ranks, seconds."""

    kind: str
    n_bytes: int
    ranks: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class RanksPoint:
    """The step on one number of ranks, in seconds.

    `step_s` is the slowest rank's median, `low_s`..`high_s` its 90 % interval, `p10_s`..`p90_s` the
    spread from step to step. `compute_s` is the step without synchronisation, `communication_s` the
    time for which anything is sent, `exposed_communication_s` = step_s - compute_s.
    `network_gain_frac` is the share of the step that links of twice the bandwidth save,
    `network_bytes` what a rank sends. `efficiency` is `speedup` / ranks.
    """

    ranks: int
    step_s: float
    low_s: float
    high_s: float
    first_step_s: float | None
    compute_s: float
    communication_s: float
    exposed_communication_s: float
    efficiency: float
    speedup: float
    bound: str
    network_gain_frac: float
    p10_s: float
    p90_s: float
    network_bytes: float


@dataclass(frozen=True, kw_only=True)
class ScalingPoint(RanksPoint):
    """The forecast on one number of ranks. `batch_size` is that of the rank with most samples.

    `flops`, `memory_bytes` and `network_bytes` are a rank's in one step. `arithmetic_intensity`
    (FLOP per byte of memory) and `memory_intensity` (bytes of memory per byte of network) are its
    coordinates on the Ridgeline plane, None for a division by zero; `ridgeline` is the resource
    that bounds it there: compute, memory or network (None without rates).
    """

    first_step_s: float
    batch_size: int
    samples_per_s: float
    epoch_s: float | None
    flops: float
    memory_bytes: float
    arithmetic_intensity: float | None
    memory_intensity: float | None
    ridgeline: str | None


@dataclass(frozen=True)
class StepTimeLine:
    """The predicted step of each of `n_ranks` ranks, which are all as slow as the slowest.

    `collectives`: kind and bytes of each one, in the order of their launch.
    """

    n_ranks: int
    line: TimeLine
    collectives: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReplayPoint(RanksPoint):
    """The replayed step on one number of ranks, the constant `overhead_s` included.

    `compute_s` is the step over a network that takes no time: ranks wait for one another
    (`waiting_s` of it), and the overhead stays. `efficiency` is the step of a rank on its own over
    step_s. The interval contains the variation of the recorded steps and of the measured links.
    `first_step_s` is None where the first step after wrapping was not recorded.
    """

    waiting_s: float
    overhead_s: float
    steps_per_s: float


@dataclass(frozen=True, kw_only=True)
class _OverRanks:
    """What a forecast and a replay share. `sigma` and `link_sigma` are the standard deviations of
    log time, of computing and of links, that the slowest of n ranks follows from.
    """

    target: str
    threads: int
    ranks_per_node: int
    buckets_bytes: tuple[int, ...]
    collectives: tuple[CollectiveTime, ...]
    what_if: dict[str, float] = field(default_factory=dict)
    machine: str = ""
    cluster: str = ""
    sigma: float = 0.0
    link_sigma: float = 0.0
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)

    def _shared_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "target": self.target,
            "threads": self.threads,
            "ranks_per_node": self.ranks_per_node,
            "machine": self.machine,
            "cluster": self.cluster,
            "what_if": dict(self.what_if),
            "buckets_bytes": list(self.buckets_bytes),
            "collectives": [
                {"kind": c.kind, "bytes": c.n_bytes, "ranks": c.ranks, "time_s": c.time_s}
                for c in self.collectives
            ],
            "spread": {"compute_sigma": self.sigma, "link_sigma": self.link_sigma},
            "notes": list(self.notes),
            "versions": dict(self.versions),
        }

    def _csv(self, rows: Sequence[RanksPoint], batch_size: int | None, own: dict[str, Any]) -> str:
        own = {
            "target": self.target,
            "batch_size": batch_size,
            "threads": self.threads,
            **own,
        }
        renamed = {"batch_size": "own_batch_size"}
        points = [{renamed.get(name, name): v for name, v in asdict(row).items()} for row in rows]
        return csv_text([*own, *points[0]], ({**point, **own} for point in points))


@dataclass(frozen=True, repr=False, kw_only=True)
class Scaling(Displayed, _OverRanks, by="dlperf.report.scaling_pages"):
    """The forecast of a target over numbers of ranks.

    `rates` are those of one rank of the largest number, which divide the Ridgeline plane; None
    where they are unknown, or one rank is alone. `step`: the step on the largest number.
    """

    batch_size: int
    scaling: str
    rows: tuple[ScalingPoint, ...]
    samples: int | None = None
    rates: Rates | None = None
    step: StepTimeLine | None = None

    @property
    def best(self) -> ScalingPoint:
        """The row with most samples a second; of equals the one with the fewest ranks."""
        return max(sorted(self.rows, key=lambda row: row.ranks), key=lambda row: row.samples_per_s)

    def to_json(self) -> dict[str, Any]:
        """The forecast as JSON data."""
        return {
            **self._shared_json(),
            "batch_size": self.batch_size,
            "scaling": self.scaling,
            "samples": self.samples,
            "rows": [asdict(row) for row in self.rows],
            "rates": None if self.rates is None else asdict(self.rates),
        }

    def to_csv(self) -> str:
        """One line per number of ranks, SI units; `own_batch_size` is the rank's."""
        return self._csv(self.rows, self.batch_size, {"scaling": self.scaling})


@dataclass(frozen=True)
class Shares:
    """A rank's steady-state step in seconds, each the median over the steps: computing (and all
    else of the script's own), exposed communication (issuing calls and leaving them included),
    waiting for slower ranks.
    """

    step_s: float
    compute_s: float
    exposed_communication_s: float
    waiting_s: float


@dataclass(frozen=True)
class RankReplay:
    """One rank as recorded, and as replayed over the other cluster without the overhead."""

    rank: int
    host: str
    recorded: Shares
    replayed: Shares


@dataclass(frozen=True)
class CallTimes:
    """The calls of one kind, size and number of ranks, in seconds.

    `per_step` is their number in a step. `recorded_s` is the median recorded duration (beside
    computing and one another); `recorded_on_s` the time alone over the cluster of the recording
    (None where it was not named), `replayed_s` over the other.
    """

    kind: str
    n_bytes: int
    ranks: int
    per_step: float
    recorded_s: float
    recorded_on_s: float | None
    replayed_s: float


@dataclass(frozen=True, repr=False, kw_only=True)
class CommunicationReplay(Displayed, _OverRanks, by="dlperf.report.scaling_pages"):
    """A trace of communication replayed over `cluster`.

    `recorded_step_s` is the slowest rank's recorded median step, `replayed_step_s` the replay over
    the cluster of the recording, both over `n_steps` steps without the first after wrapping. Their
    difference is the overhead that is carried over.
    """

    n_steps: int
    recorded_step_s: float
    replayed_step_s: float
    rows: tuple[ReplayPoint, ...]
    ranks: tuple[RankReplay, ...]
    calls: tuple[CallTimes, ...]
    trace: str = ""
    recorded_on: str = ""

    @property
    def overhead_s(self) -> float:
        """The constant overhead of a step (Choi et al. 2020) that the replay over the recorded
        cluster does not explain; negative where that is too slow.
        """
        return self.recorded_step_s - self.replayed_step_s

    def to_json(self) -> dict[str, Any]:
        """The replay as JSON data: the fields of a scaling forecast, null where a trace does not
        contain them, and its own.
        """
        calls = [asdict(call) for call in self.calls]
        return {
            **self._shared_json(),
            "batch_size": None,
            "scaling": "weak",
            "samples": None,
            "rows": [{**asdict(row), "samples_per_s": None, "epoch_s": None} for row in self.rows],
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
            "calls": [{"bytes": call.pop("n_bytes"), **call} for call in calls],
        }

    def to_csv(self) -> str:
        """One line per number of ranks, SI units; a trace contains no batch size."""
        own = {"scaling": "weak", "recorded_step_s": self.recorded_step_s}
        return self._csv(self.rows, None, own)

"""What was measured on the ranks, as data, and how far off each roofline is (Table 2.6, anew)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from dlperf.models import ridgeline
from dlperf.studies.papers.cardwell_parallel import mape_percent, percentage_change

SCHEMA, SCHEMA_VERSION = "dlperf.cardwell-kernels", 1
MODELS = ("original", "communication", "combined", "extended")
"""Equation 2.1; equation 2.3; equation 2.5; 2.5 with the latency of every message and no overlap
(beyond the paper).
"""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The rates of the slowest rank while all run: dgemm [FLOP/s], best STREAM kernel, ping-pong at
    its best size [bytes/s], half an empty trip [s].
    """

    dgemm_flops_per_s: float
    stream_bytes_per_s: float
    stream_kernel: str
    ping_pong_bytes_per_s: float
    ping_pong_bytes: int
    latency_s: float

    @property
    def rates(self) -> ridgeline.Rates:
        """The three roofs."""
        return ridgeline.Rates(
            self.dgemm_flops_per_s, self.stream_bytes_per_s, self.ping_pong_bytes_per_s
        )


@dataclass(frozen=True, slots=True)
class Run:
    """One algorithm at one size: Table 2.4's counts of one rank, the median time of the slowest
    rank, and what the meter saw on rank 0 (a mean).
    """

    algorithm: str
    size: int
    flops: float
    memory_bytes: float
    network_bytes: float
    n_messages: float
    metered_bytes: float
    communication_s: float
    samples_s: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """The median."""
        return median(self.samples_s)

    @property
    def communication_frac(self) -> float:
        """Share of the time that rank 0 spent inside calls of the network."""
        return self.communication_s / fmean(self.samples_s)

    @property
    def flops_per_s(self) -> float:
        """The rate of one rank."""
        return self.flops / self.seconds

    def predicted_flops_per_s(self, peaks: Peaks) -> tuple[float, ...]:
        """The rate that each of :data:`MODELS` predicts."""
        work = (self.flops, self.memory_bytes, self.network_bytes, peaks.rates)
        compute_s, memory_s, network_s = ridgeline.terms_s(*work).tolist()
        times_s = (
            max(compute_s, memory_s),
            max(compute_s, network_s),
            max(compute_s, memory_s, network_s),
            float(ridgeline.projected_s(*work, self.n_messages, peaks.latency_s, 0.0)),
        )
        return tuple(self.flops / seconds for seconds in times_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An algorithm's MAPE in percent by each of :data:`MODELS`, over its sizes, and the improvement
    of each over the original.
    """

    algorithm: str
    mape: tuple[float, ...]

    @property
    def changes(self) -> tuple[float, ...]:
        """Percentage change of the models after the first (positive is better)."""
        return tuple(percentage_change(self.mape[0], new) for new in self.mape[1:])


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was measured."""

    peaks: Peaks
    runs: tuple[Run, ...]
    n_ranks: int
    backend: str
    cpu: str
    versions: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    def comparisons(self) -> list[Comparison]:
        """One for each algorithm, in the order of the runs."""
        found = []
        for name in dict.fromkeys(run.algorithm for run in self.runs):
            own = [run for run in self.runs if run.algorithm == name]
            measured = [run.flops_per_s for run in own]
            by_model = zip(*(run.predicted_flops_per_s(self.peaks) for run in own))
            mape = tuple(mape_percent(measured, predicted) for predicted in by_model)
            found.append(Comparison(name, mape))
        return found

    def to_json(self) -> dict[str, Any]:
        """As a dlperf file."""
        compared = [
            {
                "algorithm": c.algorithm,
                "mape_percent": dict(zip(MODELS, c.mape)),
                "percentage_change": dict(zip(MODELS[1:], c.changes)),
            }
            for c in self.comparisons()
        ]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "n_ranks": self.n_ranks,
            "backend": self.backend,
            "cpu": self.cpu,
            "versions": dict(self.versions),
            "notes": list(self.notes),
            "peaks": asdict(self.peaks),
            "runs": [asdict(run) for run in self.runs],
            "comparisons": compared,
        }

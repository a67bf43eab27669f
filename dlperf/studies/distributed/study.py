"""A study of data-parallel steps: what it measures, in which order and for about how long, and the
forecasts beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from dlperf.core.cluster import Cluster
from dlperf.core.errors import DlperfError
from dlperf.core.units import UNSHAPED, format_bytes, format_rate, parse_rate
from dlperf.distributed import forecast as scaling
from dlperf.distributed import scenario
from dlperf.distributed.collective_times import LinkFactors, collective_s
from dlperf.distributed.forecast import NETWORK_GAIN_FRAC
from dlperf.distributed.link_fits import fit_link
from dlperf.distributed.scaling import Scaling
from dlperf.distributed.scenario import WhatIf
from dlperf.studies.distributed.cases import CalibratedLink, DistributedForecast
from dlperf.studies.distributed.runs import DistributedCase, Piece, RankRunner, StepRun
from dlperf.studies.results import Pair

PARTS = ("all-reduce", "steps", "bound", "replay")
Found = TypeVar("Found")
Replay = Callable[[Path, Cluster, Cluster], tuple[float, float]]
"""A recording's file, links, and the links that it was recorded on -> seconds of its step replayed
over the first, and of its step as recorded.
"""


@dataclass
class Findings:
    """What a study has so far: rows, links, notes of forecasts, and what failed."""

    rows: list[DistributedForecast] = field(default_factory=list)
    links: list[CalibratedLink] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def has_failed(self, what: str) -> bool:
        """Whether an attempt of this name has failed."""
        return any(line.startswith(f"{what}: ") for line in self.failures)

    def attempt(self, what: str, make: Callable[..., Found], *arguments: Any) -> Found | None:
        """What `make` gives; None where it fails, which is noted, and the others go on. What failed
        once is not tried again.
        """
        if self.has_failed(what):
            return None
        try:
            return make(*arguments)
        except DlperfError as error:
            self.failures.append(f"{what}: {error}")
            return None


@dataclass(frozen=True)
class Measured:
    """What ran: links by ranks and rate; the runs of all-reduces by ranks and rate, of steps and
    recorded trainings by case and rate.
    """

    clusters: dict[tuple[int, str], Cluster]
    reduces: dict[tuple[int, str], list[dict[int, float]]]
    steps: dict[tuple[DistributedCase, str], list[StepRun]]
    recordings: dict[tuple[DistributedCase, str], list[Path]]


def run_study(
    runner: RankRunner,
    cases: Sequence[DistributedCase],
    ranks: Sequence[int],
    rates: Sequence[str],
    parts: Iterable[str],
    warn: Callable[[str], None],
    replay: Replay,
) -> Findings:
    """Measure links, all-reduces and steps, then forecast each from every rate's cluster file. What
    is finished is kept, whatever happens.

    Steps run on the first of `ranks`, all-reduces on each (over links as they are on the first,
    where there are others). With the part ``bound`` steps run behind links of twice the rate, too.
    With ``replay`` a training of each case is recorded at every shaped rate, and `replay` tells its
    step at the others.
    """
    wanted, found = set(parts), Findings()
    measured = _measure(runner, cases, ranks, rates, wanted, found)
    for line in found.failures:
        warn(line)
    for (n, rate), times in measured.reduces.items():
        for calibrated_at, cluster in _sources(measured.clusters, n, rate):
            found.rows += (
                found.attempt(
                    f"all-reduces, {n} ranks at {rate}",
                    all_reduce_rows,
                    cluster,
                    n,
                    rate,
                    calibrated_at,
                    times,
                )
                or ()
            )
    for (case, rate), runs in measured.steps.items():
        if runs and rate in rates:
            twice = (
                measured.steps.get((case, doubled(rate)), [])
                if "bound" in wanted and rate != UNSHAPED
                else []
            )
            for calibrated_at, cluster in _sources(measured.clusters, ranks[0], rate):
                scaling_forecast = found.attempt(
                    f"forecast of {case.label} at {rate} from {calibrated_at}",
                    forecast,
                    case,
                    cluster,
                    ranks[0],
                    rate,
                    calibrated_at,
                )
                if scaling_forecast is not None:
                    found.rows += [
                        row
                        for row in step_rows(
                            scaling_forecast, case, rate, calibrated_at, runs, twice
                        )
                        if "steps" in wanted or row.kind == "bound"
                    ]
                    found.notes += [
                        note for note in scaling_forecast.notes if note not in found.notes
                    ]
    for case in dict.fromkeys(case for case, _ in measured.recordings):
        found.rows += (
            found.attempt(f"replay of {case.label}", replay_rows, measured, case, ranks[0], replay)
            or ()
        )
    return found


def _measure(
    runner: RankRunner,
    cases: Sequence[DistributedCase],
    ranks: Sequence[int],
    rates: Sequence[str],
    wanted: set[str],
    found: Findings,
) -> Measured:
    """Everything once, then everything again, so that the runs of a case lie as far apart as the
    study allows: the repeatability holds the machine's drift.
    """
    step_rates: list[str] = []
    for rate in (
        rates if wanted & {"steps", "bound"} else ()
    ):  # the doubled one next to it: what a case gains is the difference of two runs
        step_rates += dict.fromkeys((rate, doubled(rate) if "bound" in wanted else rate))
    shaped = [rate for rate in rates if rate != UNSHAPED] or rates
    reducing = (
        [(n, rate) for n in ranks for rate in (rates if n == ranks[0] else shaped)]
        if "all-reduce" in wanted
        else []
    )
    stepping = [(case, rate) for case in cases for rate in dict.fromkeys(step_rates)]
    recording = (
        [(case, rate) for case in cases for rate in rates if rate != UNSHAPED]
        if "replay" in wanted
        else []
    )
    measured = Measured(
        {},
        {key: [] for key in reducing},
        {key: [] for key in stepping},
        {key: [] for key in recording},
    )

    def keep_links(n: int, rate: str) -> Callable[[Cluster], None]:
        def keep(cluster: Cluster) -> None:
            measured.clusters[n, rate] = cluster
            found.links += _link_rows(n, rate, cluster)

        return keep

    plan: list[tuple[Piece[Any], Callable[[Any], None]]] = []
    plan += [
        (runner.links(n, rate), keep_links(n, rate))
        for n, rate in reducing or [(ranks[0], rate) for rate in rates]
    ]
    for run in range(1, runner.n_runs + 1):
        plan += [
            (runner.all_reduces(n, rate, run), times.append)
            for (n, rate), times in measured.reduces.items()
        ]
        plan += [
            (runner.steps(case, ranks[0], rate, run), runs.append)
            for (case, rate), runs in measured.steps.items()
        ]
        plan += [
            (runner.recording(case, ranks[0], rate, run), files.append)
            for (case, rate), files in measured.recordings.items()
        ]
    _carry_out(runner, plan, found)
    return measured


def _carry_out(
    runner: RankRunner, plan: Sequence[tuple[Piece[Any], Callable[[Any], None]]], found: Findings
) -> None:
    """Get every piece, and tell how many there are to measure, which one begins and about how long
    the rest takes.
    """
    missing = {
        piece.path: piece.expected_s for piece, _ in plan if not runner.archive.holds(piece.path)
    }
    n, left_s = len(missing), sum(missing.values())
    if n:
        kept = f", {len(plan) - n} others are kept from before" if n < len(plan) else ""
        runner.log(
            f"{n} measurements, about {_minutes(left_s)}{kept}; what is finished stays in"
            f" {runner.archive.folder}"
        )
    for piece, keep in plan:
        if piece.path in missing:
            if not found.has_failed(piece.what):
                runner.log(
                    f"{n - len(missing) + 1} of {n}, about {_minutes(left_s)} left: {piece.text}"
                )
            left_s -= missing.pop(piece.path)
        result = found.attempt(piece.what, piece.get)
        if result is not None:
            keep(result)


def _minutes(seconds: float) -> str:
    """Seconds as roughly as they are known here.

    >>> _minutes(874.0), _minutes(20.0)
    ('15 min', '1 min')
    """
    return f"{max(1, round(seconds / 60))} min"


def replay_rows(
    measured: Measured, case: DistributedCase, n: int, replay: Replay
) -> list[DistributedForecast]:
    """A case's recordings at every rate replayed at every other rate, beside what was recorded
    there, run by run.
    """
    files = {
        rate: own
        for (one, rate), own in measured.recordings.items()
        if one == case and own and (n, rate) in measured.clusters
    }
    links = {rate: measured.clusters[n, rate] for rate in files}
    recorded_s = {
        rate: [replay(file, links[rate], links[rate])[1] for file in own]
        for rate, own in files.items()
    }
    return [
        DistributedForecast(
            "replay",
            case.label,
            n,
            rate,
            at,
            tuple(
                Pair(replay(file, links[rate], links[at])[0], there)
                for file, there in zip(own, recorded_s[rate])
            ),
        )
        for at, own in files.items()
        for rate in files
        if rate != at
    ]


def doubled(rate: str) -> str:
    """Twice the rate; a link as it is stays so."""
    return rate if rate == UNSHAPED else format_rate(2 * parse_rate(rate))


def factor_of(rate: str, calibrated_at: str) -> float:
    """How many times the calibrated rate a rate is."""
    return 1.0 if rate == calibrated_at else parse_rate(rate) / parse_rate(calibrated_at)


def _sources(
    clusters: dict[tuple[int, str], Cluster], n: int, rate: str
) -> Iterator[tuple[str, Cluster]]:
    """The cluster files that contain a rate: its own first, then those of other shaped rates."""
    for (ranks, at), cluster in sorted(clusters.items(), key=lambda entry: entry[0][1] != rate):
        if ranks == n and (at == rate or UNSHAPED not in (at, rate)):
            yield at, cluster


def _link_rows(n: int, rate: str, cluster: Cluster) -> list[CalibratedLink]:
    link = cluster.link("network") or cluster.link("node") or cluster.link("socket")
    if link is None:
        return []
    fit = fit_link(link)
    return [CalibratedLink(n, rate, fit.latency_s, 1 / fit.s_per_byte)] if fit.s_per_byte else []


def all_reduce_rows(
    cluster: Cluster, n: int, rate: str, calibrated_at: str, runs: Sequence[dict[int, float]]
) -> list[DistributedForecast]:
    """Every size, forecast from a cluster file beside its runs."""
    if not runs:
        return []
    sizes = sorted(set.intersection(*(set(times) for times in runs)))
    per_node = scenario.ranks_per_node_of(cluster, (n,))
    guesses = collective_s(
        cluster,
        "all_reduce",
        np.array(sizes, dtype=float),
        n,
        per_node,
        LinkFactors(link_bandwidth=factor_of(rate, calibrated_at)),
    )
    return [
        DistributedForecast(
            "all-reduce",
            format_bytes(size),
            n,
            rate,
            calibrated_at,
            tuple(Pair(float(guess), times[size]) for times in runs),
        )
        for size, guess in zip(sizes, guesses)
    ]


def forecast(
    case: DistributedCase, cluster: Cluster, n: int, rate: str, calibrated_at: str
) -> Scaling:
    """What ``dlperf scale`` says of a case over a cluster file, with ``--what-if link_bandwidth``
    where it was calibrated at another rate.
    """
    what_if = WhatIf(link_bandwidth=factor_of(rate, calibrated_at))
    per_node, per_system = (
        scenario.ranks_per_node_of(cluster, (n,)),
        scenario.hosts_per_system_of(cluster),
    )
    return scaling.forecast(
        lambda size: case.prediction,
        cluster,
        scenario.ScalingScenario((n,), case.batch_size, "weak", per_node, per_system, what_if),
    )


def step_rows(
    scaling_forecast: Scaling,
    case: DistributedCase,
    rate: str,
    calibrated_at: str,
    runs: Sequence[StepRun],
    twice: Sequence[StepRun] = (),
) -> list[DistributedForecast]:
    """A forecast beside its runs, kind by kind; `twice` are runs of the same case behind links of
    twice the rate, one for each of `runs`.

    The bounding resource is the network where such links gain more than NETWORK_GAIN_FRAC of the
    measured step.
    """
    (row,) = scaling_forecast.rows
    actual_s = median(run.step_s for run in runs)
    share = row.exposed_communication_s / row.step_s

    def make(
        kind: str,
        pairs: Iterable[tuple[float, float]],
        right: bool | None = None,
        inside: bool | None = None,
        remark: str = "",
    ) -> DistributedForecast:
        return DistributedForecast(
            kind,
            case.label,
            row.ranks,
            rate,
            calibrated_at,
            tuple(Pair(*pair) for pair in pairs),
            right,
            inside,
            remark,
        )

    wrong = [run.bucket_bytes for run in runs if run.bucket_bytes != scaling_forecast.buckets_bytes]
    told = (
        f"DDP {_sizes(wrong[0])}, predicted {_sizes(scaling_forecast.buckets_bytes)}"
        if wrong
        else ""
    )
    rows = [
        make(
            "step",
            ((row.step_s, run.step_s) for run in runs),
            inside=row.low_s <= actual_s <= row.high_s,
        ),
        make("share", ((share, run.share) for run in runs)),
        make("first-step", ((row.first_step_s, run.first_step_s) for run in runs)),
    ]
    if rate == calibrated_at:  # what no link decides is told once
        totals = (
            (float(sum(scaling_forecast.buckets_bytes)), float(sum(run.bucket_bytes)))
            for run in runs
        )
        rows += [
            make("buckets", totals, right=not wrong, remark=told),
            make("alone", ((row.compute_s, run.compute_s) for run in runs)),
        ]
    gains = [1 - fast.step_s / slow.step_s for slow, fast in zip(runs, twice)]
    if gains:
        by_network = fmean(gains) > NETWORK_GAIN_FRAC
        named = (
            f"named {row.bound}; {'the network' if by_network else 'not the network'} by the"
            " measured gain"
        )
        if any((gain > NETWORK_GAIN_FRAC) != by_network for gain in gains):
            named += ", on which the runs disagree"
        rows.append(
            make(
                "bound",
                ((row.network_gain_frac, gain) for gain in gains),
                right=(row.bound == "network") == by_network,
                remark=named,
            )
        )
    return rows


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))

"""The runs behind a study of data-parallel steps, each result kept as soon as it is there, and the forecasts beside them."""
from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from dlperf import scaling
from dlperf.cluster import Cluster
from dlperf.errors import DlperfError, WorkFailed
from dlperf.files import read_json, schema_of, write_json, write_text
from dlperf.host import this_cpu, versions
from dlperf.network import LinkFactors, collective_s, fit_link
from dlperf.prediction import Prediction
from dlperf.report.writing import slug
from dlperf.scaling.forecast import NETWORK_GAIN_FRAC
from dlperf.trace import Trace
from dlperf.units import KIB, MIB, format_bytes, format_rate, parse_rate
from dlperf.validation.archive import Archive
from dlperf.validation.distributed import LinkRow, Pair, Row
from dlperf.values import UNSHAPED

ALL_REDUCE_BYTES = (320 * KIB, 512 * KIB, 5 * MIB // 4, 3 * MIB // 2, 3 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 24 * MIB, 48 * MIB)
"""From 256 KiB to 64 MiB, and none of a calibration's own sizes."""
PARTS = ("all-reduce", "steps", "bound", "replay")
LIMIT_S, RUN_LIMIT_S = 60.0, 600.0
"""How long a single collective, and all ranks of one run, may take."""
RECORDED_STEPS = 40
"""Steps of a training whose communication is recorded: ``dlperf run`` watches the first half of them."""
_ALL_REDUCE_FACTOR = 4.0
"""An all-reduce run times all its sizes, and gets so many times the seconds of a step."""
_SCHEMA = "dlperf.distributed_run"
Found = TypeVar("Found")
Launch = Callable[[Sequence[str], int, str], None]
"""Runs Python with so many words on each of so many ranks behind links of a rate (or UNSHAPED); raises WorkFailed where a rank fails."""

Replay = Callable[[Path, Cluster, Cluster], tuple[float, float]]
"""A recording's file, links, and the links that it was recorded on -> seconds of its step replayed over the first, and of its step as recorded."""


@dataclass(frozen=True)
class Case:
    """A target at a batch size of each rank, with one rank's prediction; `trace` tells a changed network from the one that was measured."""

    target: str
    batch_size: int
    prediction: Prediction = field(repr=False, compare=False, hash=False)

    @property
    def trace(self) -> Trace:
        """The recorded step."""
        return self.prediction.trace

    @property
    def ops(self) -> str:
        """A digest of what the step does."""
        return hashlib.sha256("\n".join(sorted({op.signature for op in self.trace.ops})).encode()).hexdigest()

    @property
    def label(self) -> str:
        """Short, for tables: ``dlrm-top@64``."""
        return f"{self.target.rsplit(':', 1)[-1]}@{self.batch_size}"


@dataclass(frozen=True)
class StepRun:
    """What one fresh start measured: seconds of the slowest rank's step, of the same without synchronisation, of the first; DDP's buckets."""

    step_s: float
    compute_s: float
    first_step_s: float
    bucket_bytes: tuple[int, ...]

    @property
    def share(self) -> float:
        """The exposed communication's share of the step."""
        return 1 - self.compute_s / self.step_s


@dataclass(frozen=True)
class Bench:
    """How runs are made: the launch, runs a case, seconds of each, what keeps results, how progress is told, where ranks run in words, rough links or not, and
    the machine file of recorded trainings."""

    launch: Launch
    n_runs: int
    seconds: float
    archive: Archive
    narrate: Callable[[str], None]
    hosts: str = ""
    quick_links: bool = False
    machine_file: str = ""

    def cluster(self, n: int, rate: str) -> Cluster:
        """The links between `n` ranks at a rate, measured by ``microbench.network``."""
        mode = "quick" if self.quick_links else "full"
        path = self._path("links", f"{n} ranks at {rate}", mode)

        def take() -> Cluster:
            self.narrate(f"measuring the links of {n} ranks, {_links(rate)}")
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                out = Path(folder) / "cluster.json"
                self.launch(["-m", "microbench.network", "-o", str(out), *(["--quick"] if self.quick_links else [])], n, rate)
                return Cluster.load(out)

        return self.archive.keep(path, Cluster.load, take, lambda taken: taken.save(path))

    def all_reduces(self, n: int, rate: str, run: int) -> dict[int, float]:
        """Seconds of all-reduces by size."""
        seconds = _ALL_REDUCE_FACTOR * self.seconds
        order = {"kind": "all-reduces", "sizes": list(ALL_REDUCE_BYTES), "seconds": seconds}
        found = self._measured("all-reduces", f"{n} ranks at {rate}", f"run {run}", order, n, rate)
        return {int(size): float(seconds) for size, seconds in found["all_reduce_s"].items()}

    def steps(self, case: Case, n: int, rate: str, run: int) -> StepRun:
        """Steps of a case."""
        order = {"kind": "steps", "target": case.target, "batch_size": case.batch_size, "seconds": self.seconds}
        found = self._measured(f"steps-{case.label}", f"{case.target}, {n} ranks at {rate}", f"run {run}, ops {case.ops}", order, n, rate)
        return StepRun(float(found["step_s"]), float(found["compute_s"]), float(found["first_step_s"]), tuple(map(int, found["bucket_bytes"])))

    def recording(self, case: Case, n: int, rate: str, run: int) -> Path:
        """The file with the communication of a training of the case, as ``dlperf run`` records it."""
        path = self._path(f"recording-{case.label}", f"{case.target}, {n} ranks at {rate}", f"run {run}, ops {case.ops}")

        def take() -> str:
            self.narrate(f"run {run}: recording {case.label}, {n} ranks, {_links(rate)}")
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                out, paper = Path(folder) / "communication.json", Path(folder) / "order.json"
                order = {"target": case.target, "batch_size": case.batch_size, "steps": RECORDED_STEPS, "meeting": str(Path(folder) / "meeting")}
                paper.write_text(json.dumps({**order, "threads": 1, "limit_s": LIMIT_S}))
                options = ("--machine", self.machine_file, "--threads", "1", "--communication", str(out))
                self.launch(["-m", "dlperf", "run", *options, "-m", "dlperf.validation.rank_training", str(paper)], n, rate)
                if not out.exists():
                    raise WorkFailed("dlperf run recorded no communication")
                return out.read_text(encoding="utf-8")

        def load(found: Path) -> str:
            if schema_of(found) is None:
                raise DlperfError(f"{found}: is damaged")
            return found.read_text(encoding="utf-8")

        self.archive.keep(path, load, take, lambda taken: write_text(path, taken))
        return path

    def _measured(self, kind: str, what: str, detail: str, order: dict[str, Any], n: int, rate: str) -> dict[str, Any]:
        path = self._path(kind, what, f"{detail}, {self.seconds:g} s")

        def take() -> dict[str, Any]:
            self.narrate(f"{detail.partition(',')[0]}: {kind.replace('steps-', '')}, {n} ranks, {_links(rate)}")
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                places = {name: str(Path(folder) / name) for name in ("meeting", "answer")}
                (paper := Path(folder) / "order.json").write_text(json.dumps({**order, **places, "threads": 1, "limit_s": LIMIT_S}))
                self.launch(["-m", "dlperf.validation.rank_process", str(paper)], n, rate)
                answer: dict[str, Any] = json.loads(Path(places["answer"]).read_text(encoding="utf-8"))
                return answer

        def save(answer: dict[str, Any]) -> None:
            write_json(path, {"schema": _SCHEMA, "schema_version": 1, "versions": versions(), "machine": this_cpu().model, "what": what, **answer})

        return self.archive.keep(path, lambda found: read_json(found, _SCHEMA, 1), take, save)

    def _path(self, kind: str, what: str, detail: str) -> Path:
        where = (*map(str, this_cpu().identity), *(f"{k}={v}" for k, v in sorted(versions().items()) if k in ("torch", "python")), self.hosts)
        digest = hashlib.sha256("\n".join((kind, what, detail, *where)).encode()).hexdigest()[:12]
        return self.archive.folder / f"{slug(kind, 50)}-{slug(what.rsplit(', ', 1)[-1])}-{digest}.json"


# -- the study ------------------------------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What a study has so far: rows, links, notes of forecasts, and what failed."""

    rows: list[Row] = field(default_factory=list)
    links: list[LinkRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def attempt(self, what: str, make: Callable[..., Found], *arguments: Any) -> Found | None:
        """What `make` gives; None where it fails, which is noted, and the others go on. What failed once is not tried again."""
        if any(line.startswith(f"{what}: ") for line in self.failures):
            return None
        try:
            return make(*arguments)
        except DlperfError as error:
            self.failures.append(f"{what}: {error}")
            return None


@dataclass(frozen=True)
class Measured:
    """What ran: links by ranks and rate; the runs of all-reduces by ranks and rate, of steps and recorded trainings by case and rate."""

    clusters: dict[tuple[int, str], Cluster]
    reduces: dict[tuple[int, str], list[dict[int, float]]]
    steps: dict[tuple[Case, str], list[StepRun]]
    recordings: dict[tuple[Case, str], list[Path]]


def run_study(
    bench: Bench, cases: Sequence[Case], ranks: Sequence[int], rates: Sequence[str], parts: Iterable[str], warn: Callable[[str], None], replay: Replay,
) -> Findings:  # fmt: skip
    """Measure links, all-reduces and steps, then forecast each from every rate's cluster file. What is finished is kept, whatever happens.

    Steps run on the first of `ranks`, all-reduces on each. With the part ``bound`` steps run behind links of twice the rate, too. With
    ``replay`` a training of each case is recorded at every shaped rate, and `replay` tells its step at the others.
    """
    wanted, found = set(parts), Findings()
    measured = _measure(bench, cases, ranks, rates, wanted, found)
    for line in found.failures:
        warn(line)
    for (n, rate), times in measured.reduces.items():
        for calibrated_at, cluster in _sources(measured.clusters, n, rate):
            found.rows += found.attempt(f"all-reduces, {n} ranks at {rate}", all_reduce_rows, cluster, n, rate, calibrated_at, times) or ()
    for (case, rate), runs in measured.steps.items():
        if runs and rate in rates:
            twice = measured.steps.get((case, doubled(rate)), []) if "bound" in wanted and rate != UNSHAPED else []
            for calibrated_at, cluster in _sources(measured.clusters, ranks[0], rate):
                made = found.attempt(f"forecast of {case.label} at {rate} from {calibrated_at}", forecast, case, cluster, ranks[0], rate, calibrated_at)
                if made is not None:
                    found.rows += [row for row in step_rows(made, case, rate, calibrated_at, runs, twice) if "steps" in wanted or row.kind == "bound"]
                    found.notes += [note for note in made.notes if note not in found.notes]
    for case in dict.fromkeys(case for case, _ in measured.recordings):
        found.rows += found.attempt(f"replay of {case.label}", replay_rows, measured, case, ranks[0], replay) or ()
    return found


def _measure(bench: Bench, cases: Sequence[Case], ranks: Sequence[int], rates: Sequence[str], wanted: set[str], found: Findings) -> Measured:
    """Everything once, then everything again, so that the runs of a case lie as far apart as the study allows: the floor holds the machine's drift."""
    step_rates: list[str] = []
    for rate in rates if wanted & {"steps", "bound"} else ():  # the doubled one next to it: what a case gains is the difference of two runs
        step_rates += [rate, *([doubled(rate)] if "bound" in wanted else [])]
    reducing = [(n, rate) for n in ranks for rate in rates] if "all-reduce" in wanted else []
    measured = Measured({}, {key: [] for key in reducing}, {(case, rate): [] for case in cases for rate in step_rates}, {})
    for case in cases if "replay" in wanted else ():
        measured.recordings.update({(case, rate): [] for rate in rates if rate != UNSHAPED})
    for n, rate in reducing or [(ranks[0], rate) for rate in rates]:
        cluster = found.attempt(f"links of {n} ranks at {rate}", bench.cluster, n, rate)
        if cluster is not None:
            measured.clusters[n, rate] = cluster
            found.links += _link_rows(n, rate, cluster)
    for run in range(1, bench.n_runs + 1):
        for (n, rate), reduces in measured.reduces.items():
            times = found.attempt(f"all-reduces, {n} ranks at {rate}", bench.all_reduces, n, rate, run)
            reduces += [] if times is None else [times]
        for (case, rate), steps in measured.steps.items():
            step = found.attempt(f"{case.label} at {rate}", bench.steps, case, ranks[0], rate, run)
            steps += [] if step is None else [step]
        for (case, rate), files in measured.recordings.items():
            file = found.attempt(f"recording of {case.label} at {rate}", bench.recording, case, ranks[0], rate, run)
            files += [] if file is None else [file]
    return measured


def replay_rows(measured: Measured, case: Case, n: int, replay: Replay) -> list[Row]:
    """A case's recordings at every rate replayed at every other rate, beside what was recorded there, run by run."""
    files = {rate: own for (one, rate), own in measured.recordings.items() if one == case and own and (n, rate) in measured.clusters}
    links = {rate: measured.clusters[n, rate] for rate in files}
    recorded_s = {rate: [replay(file, links[rate], links[rate])[1] for file in own] for rate, own in files.items()}
    return [
        Row("replay", case.label, n, rate, at, tuple(Pair(replay(file, links[rate], links[at])[0], there) for file, there in zip(own, recorded_s[rate])))
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


def _sources(clusters: dict[tuple[int, str], Cluster], n: int, rate: str) -> Iterator[tuple[str, Cluster]]:
    """The cluster files that speak of a rate: its own first, then those of other shaped rates."""
    for (ranks, at), cluster in sorted(clusters.items(), key=lambda entry: entry[0][1] != rate):
        if ranks == n and (at == rate or UNSHAPED not in (at, rate)):
            yield at, cluster


def _link_rows(n: int, rate: str, cluster: Cluster) -> list[LinkRow]:
    link = cluster.link("network") or cluster.link("node") or cluster.link("socket")
    if link is None:
        return []
    fit = fit_link(link)
    return [LinkRow(n, rate, fit.latency_s, 1 / fit.s_per_byte)] if fit.s_per_byte else []


def all_reduce_rows(cluster: Cluster, n: int, rate: str, calibrated_at: str, runs: Sequence[dict[int, float]]) -> list[Row]:
    """Every size, forecast from a cluster file beside its runs."""
    if not runs:
        return []
    sizes = sorted(set.intersection(*(set(times) for times in runs)))
    per_node = scaling.ranks_per_node_of(cluster, (n,))
    guesses = collective_s(cluster, "all_reduce", np.array(sizes, dtype=float), n, per_node, LinkFactors(link_bandwidth=factor_of(rate, calibrated_at)))
    return [
        Row("all-reduce", format_bytes(size), n, rate, calibrated_at, tuple(Pair(float(guess), times[size]) for times in runs))
        for size, guess in zip(sizes, guesses)
    ]


def forecast(case: Case, cluster: Cluster, n: int, rate: str, calibrated_at: str) -> scaling.Scaling:
    """What ``dlperf scale`` says of a case over a cluster file, with ``--what-if link_bandwidth`` where it was calibrated at another rate."""
    what_if = scaling.WhatIf(link_bandwidth=factor_of(rate, calibrated_at))
    per_node, per_system = scaling.ranks_per_node_of(cluster, (n,)), scaling.hosts_per_system_of(cluster)
    return scaling.forecast(lambda size: case.prediction, cluster, scaling.Question((n,), case.batch_size, "weak", per_node, per_system, what_if))


def step_rows(made: scaling.Scaling, case: Case, rate: str, calibrated_at: str, runs: Sequence[StepRun], twice: Sequence[StepRun] = ()) -> list[Row]:
    """A forecast beside its runs, kind by kind; `twice` are runs of the same case behind links of twice the rate, one for each of `runs`.

    The bounding resource is the network where such links gain more than NETWORK_GAIN_FRAC of the measured step.
    """
    (row,) = made.rows
    actual_s = median(run.step_s for run in runs)
    share = row.exposed_communication_s / row.step_s

    def make(kind: str, pairs: Iterable[tuple[float, float]], right: bool | None = None, inside: bool | None = None, remark: str = "") -> Row:
        return Row(kind, case.label, row.ranks, rate, calibrated_at, tuple(Pair(*pair) for pair in pairs), right, inside, remark)

    wrong = [run.bucket_bytes for run in runs if run.bucket_bytes != made.buckets_bytes]
    told = f"DDP {_sizes(wrong[0])}, predicted {_sizes(made.buckets_bytes)}" if wrong else ""
    rows = [
        make("step", ((row.step_s, run.step_s) for run in runs), inside=row.low_s <= actual_s <= row.high_s),
        make("share", ((share, run.share) for run in runs)),
        make("first-step", ((row.first_step_s, run.first_step_s) for run in runs)),
    ]
    if rate == calibrated_at:  # what no link decides is told once
        totals = ((float(sum(made.buckets_bytes)), float(sum(run.bucket_bytes))) for run in runs)
        rows += [make("buckets", totals, right=not wrong, remark=told), make("alone", ((row.compute_s, run.compute_s) for run in runs))]
    gains = [1 - fast.step_s / slow.step_s for slow, fast in zip(runs, twice)]
    if gains:
        by_network = fmean(gains) > NETWORK_GAIN_FRAC
        named = f"named {row.bound}; {'the network' if by_network else 'not the network'} by the measured gain"
        if any((gain > NETWORK_GAIN_FRAC) != by_network for gain in gains):
            named += ", on which the runs disagree"
        rows.append(make("bound", ((row.network_gain_frac, gain) for gain in gains), right=(row.bound == "network") == by_network, remark=named))
    return rows


def _links(rate: str) -> str:
    return "links as they are" if rate == UNSHAPED else f"links of {rate}"


def _sizes(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))

"""The runs behind a study of data-parallel steps: each a piece that says about how long it takes,
and whose result is kept as soon as it is there.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from dlperf.core.cluster import Cluster
from dlperf.core.conversion import Positive, PositiveSeconds, Whole, convert
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.files import schema_of, write_text
from dlperf.core.host import available_cores, this_cpu, versions
from dlperf.core.trace import Trace
from dlperf.core.units import KIB, MIB, UNSHAPED, parse_rate
from dlperf.forecast.prediction import Prediction
from dlperf.report.writing import slug
from dlperf.studies.accuracy.archive import Archive, environment

ALL_REDUCE_BYTES = (
    320 * KIB,
    640 * KIB,
    5 * MIB // 4,
    3 * MIB,
    5 * MIB,
    10 * MIB,
    20 * MIB,
    48 * MIB,
)
"""From 256 KiB to 64 MiB, and none of a calibration's own sizes."""
LIMIT_S, RUN_LIMIT_S = 60.0, 600.0
"""How long a single collective, and all ranks of one run, may take."""
RECORDED_STEPS = 24
"""Steps of a training whose communication is recorded: more than ``dlperf run`` watches."""
STEPS, CALLS = (12, 60), (2, 25)
"""The least and the most steps of a run, and all-reduces of a size and pass."""
PASSES = 2
"""How often a run goes through its sizes of all-reduces."""
_ALL_REDUCE_FACTOR = 4.0
"""An all-reduce run times all its sizes, and gets so many times the seconds of a step."""
_START_S, _WATCH_S, _WARM_STEPS = 3.0, 5.0, 8
"""What a run takes besides, roughly, which only the study's own length is told from: ranks to start
and to meet, ``dlperf run`` to judge what it watched, and steps that are not kept.
"""
_SCHEMA = "dlperf.distributed_run"
Answer = TypeVar("Answer")
Result = TypeVar("Result")
Launch = Callable[[Sequence[str], int, str], None]
"""Runs Python with so many words on each of a number of ranks behind links of a rate (or UNSHAPED);
raises WorkFailed where a rank fails.
"""


@dataclass(frozen=True)
class DistributedCase:
    """A target at a batch size of each rank, with one rank's prediction; `trace` tells a changed
    network from the one that was measured.
    """

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
        return hashlib.sha256(
            "\n".join(sorted({op.signature for op in self.trace.ops})).encode()
        ).hexdigest()

    @property
    def compute_s(self) -> float:
        """Predicted seconds of one rank's step without synchronisation."""
        return self.prediction.step.total_s or 0.0

    @property
    def gradient_bytes(self) -> int:
        """The gradients of a rank's step."""
        return sum(p.spec.numel * p.spec.item_bytes for p in self.trace.parameters if p.trained)

    @property
    def label(self) -> str:
        """Short, for tables: ``dlrm-top@64``."""
        return f"{self.target.rsplit(':', 1)[-1]}@{self.batch_size}"


@dataclass(frozen=True)
class StepRun:
    """What one fresh start measured: seconds of the slowest rank's step, of the same without
    synchronisation, of the first; DDP's buckets.
    """

    step_s: PositiveSeconds
    compute_s: PositiveSeconds
    first_step_s: PositiveSeconds
    bucket_bytes: tuple[Whole, ...]

    @property
    def share(self) -> float:
        """The exposed communication's share of the step."""
        return 1 - self.compute_s / self.step_s


@dataclass(frozen=True)
class AllReduces:
    """Measured seconds of all-reduces by size in bytes."""

    all_reduce_s: dict[Positive, PositiveSeconds]


@dataclass(frozen=True)
class Piece(Generic[Result]):
    """One measurement of a study: of what (as a failure names it), what is told when it begins,
    where its result is kept, and about how long it takes.

    `get` gives what is kept, else what it measures now; it raises DlperfError where that fails.
    """

    what: str
    text: str
    path: Path
    expected_s: float
    get: Callable[[], Result]


@dataclass(frozen=True)
class RankRunner:
    """How runs are made: the launch, runs a case, seconds of each, what keeps results,
    how progress is logged, the ranks' hosts in words, rough links or not, seconds of measuring
    them, and the machine file of recorded trainings.
    """

    launch: Launch
    n_runs: int
    seconds: float
    archive: Archive
    log: Callable[[str], None]
    hosts: str = ""
    quick_links: bool = False
    links_s: float = 0.0
    machine_file: str = ""

    def links(self, n: int, rate: str) -> Piece[Cluster]:
        """The links between `n` ranks at a rate, measured by ``dlperf.microbench.network``."""
        path = self._path("links", f"{n} ranks at {rate}", "quick" if self.quick_links else "full")

        def take() -> Cluster:
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                out = Path(folder) / "cluster.json"
                quick = ["--quick"] if self.quick_links else []
                self.launch(["-m", "dlperf.microbench.network", "-o", str(out), *quick], n, rate)
                return Cluster.load(out)

        return Piece(
            f"links of {n} ranks at {rate}",
            f"the links of {n} ranks, {_links(rate)}",
            path,
            _start_s(n) + self.links_s,
            lambda: self.archive.keep(path, Cluster.load, take, lambda taken: taken.save(path)),
        )

    def all_reduces(self, n: int, rate: str, run: int) -> Piece[dict[int, float]]:
        """Seconds of all-reduces by size."""
        seconds = _ALL_REDUCE_FACTOR * self.seconds
        order = {
            "kind": "all-reduces",
            "sizes": list(ALL_REDUCE_BYTES),
            "seconds": seconds,
            "least": CALLS[0],
            "most": CALLS[1],
            "passes": PASSES,
        }
        share_s = seconds / (PASSES * len(ALL_REDUCE_BYTES))
        calls_s = [wire_s(size, n, rate) for size in ALL_REDUCE_BYTES]
        path = self._path("all-reduces", f"{n} ranks at {rate}", f"run {run}, {self.seconds:g} s")
        return Piece(
            f"all-reduces, {n} ranks at {rate}",
            f"run {run}: all-reduces, {n} ranks, {_links(rate)}",
            path,
            _start_s(n) + PASSES * sum(max(share_s, CALLS[0] * one) + one for one in calls_s),
            lambda: self._measured(path, order, n, rate, AllReduces).all_reduce_s,
        )

    def steps(self, case: DistributedCase, n: int, rate: str, run: int) -> Piece[StepRun]:
        """Steps of a case."""
        least, most = STEPS
        order = {
            "kind": "steps",
            "target": case.target,
            "batch_size": case.batch_size,
            "seconds": self.seconds,
            "least": least,
            "most": most,
        }
        step_s = case.compute_s + wire_s(case.gradient_bytes, n, rate)
        n_steps = _WARM_STEPS + max(least, min(most, self.seconds / step_s))
        path = self._path(
            f"steps-{case.label}",
            f"{case.target}, {n} ranks at {rate}",
            f"run {run}, ops {case.ops}, {self.seconds:g} s",
        )
        return Piece(
            f"{case.label} at {rate}",
            f"run {run}: {case.label}, {n} ranks, {_links(rate)}",
            path,
            _start_s(n) + n_steps * (step_s + case.compute_s),
            lambda: self._measured(path, order, n, rate, StepRun),
        )

    def recording(self, case: DistributedCase, n: int, rate: str, run: int) -> Piece[Path]:
        """File of a training's communication, as ``dlperf run`` records it."""
        path = self._path(
            f"recording-{case.label}",
            f"{case.target}, {n} ranks at {rate}",
            f"run {run}, ops {case.ops}",
        )
        order = {
            "target": case.target,
            "batch_size": case.batch_size,
            "steps": RECORDED_STEPS,
        }

        def take() -> str:
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                out = Path(folder) / "communication.json"
                watch = ["-m", "dlperf", "run", "--machine", self.machine_file, "--threads", "1"]
                watch += ["--communication", str(out), "-m"]
                module = "dlperf.studies.distributed.rank_training"
                self.launch([*watch, module, _write_order(folder, order)], n, rate)
                if not out.exists():
                    raise WorkFailed("dlperf run recorded no communication")
                return out.read_text(encoding="utf-8")

        def load(found: Path) -> str:
            if schema_of(found) is None:
                raise DlperfError(f"{found}: is damaged")
            return found.read_text(encoding="utf-8")

        def get() -> Path:
            self.archive.keep(path, load, take, lambda taken: write_text(path, taken))
            return path

        step_s = case.compute_s + wire_s(case.gradient_bytes, n, rate)
        return Piece(
            f"recording of {case.label} at {rate}",
            f"run {run}: recording {case.label}, {n} ranks, {_links(rate)}",
            path,
            _start_s(n) + _WATCH_S + RECORDED_STEPS * step_s,
            get,
        )

    def _measured(
        self, path: Path, order: dict[str, Any], n: int, rate: str, kind: type[Answer]
    ) -> Answer:
        """Rank 0's answer to an order, of which a damaged file is measured anew."""

        def take() -> dict[str, Any]:
            with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
                module = "dlperf.studies.distributed.rank_process"
                self.launch(["-m", module, _write_order(folder, order)], n, rate)
                answer = json.loads((Path(folder) / "answer").read_text(encoding="utf-8"))
            what = {"ranks": n, "rate": rate, "order": order}
            return {"versions": versions(), "machine": this_cpu().model, **what, **answer}

        return self.archive.keep_json(path, _SCHEMA, lambda data: convert(data, kind), take)

    def _path(self, kind: str, what: str, detail: str) -> Path:
        name = f"{slug(kind, 50)}-{slug(what.rsplit(', ', 1)[-1])}"
        return self.archive.path(name, kind, what, detail, *environment(), self.hosts)


def _write_order(folder: str, order: dict[str, Any]) -> str:
    """Write an order for ranks, which meet and answer in files of the folder; the order's file."""
    files = {name: str(Path(folder) / name) for name in ("meeting", "answer")}
    paper = Path(folder) / "order.json"
    paper.write_text(json.dumps({**order, **files, "threads": 1, "limit_s": LIMIT_S}))
    return str(paper)


def wire_s(n_bytes: float, n: int, rate: str) -> float:
    """The least time of an all-reduce behind links of a rate: each rank sends 2 (n - 1) / n of the
    bytes. Of a link as it is, 0.

    >>> wire_s(12_500_000, 2, "1gbit"), wire_s(12_500_000, 2, "none")
    (0.1, 0.0)
    """
    return 0.0 if rate == UNSHAPED else 2 * (n - 1) / n * 8 * n_bytes / parse_rate(rate)


def _start_s(n: int) -> float:
    return _START_S * max(1.0, n / available_cores())


def _links(rate: str) -> str:
    return "links as they are" if rate == UNSHAPED else f"links of {rate}"

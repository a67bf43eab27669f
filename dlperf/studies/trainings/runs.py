"""The runs behind a study of trainings: ordinary commands in processes of their own, each result
kept as soon as it is there.

Scripts and loaders are those of a checkout's ``networks``; they are run, never imported.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dlperf.core import child_process
from dlperf.core.errors import WorkFailed
from dlperf.core.files import read_json, write_json
from dlperf.core.machine import Machine
from dlperf.profiler import peak_memory
from dlperf.report.writing import slug
from dlperf.studies.accuracy.archive import Archive
from dlperf.studies.trainings.cases import Pair, TrainingForecast

EPOCHS = 2
LOADERS = {
    "mlp": "mlp",
    "lenet": "lenet",
    "cnn-small": "cnn",
    "cnn-medium": "cnn",
    "cnn-large": "cnn",
}
"""Networks that the training scripts and ``networks.loaders`` know, with their loader."""
BATCH_SIZE = 32
TUNED_BATCH_SIZES = (16, 64)
LEAST_EPOCH_S = 20.0
"""An epoch forecast after its first steps is at least so long."""
_PROBE_SAMPLES = 10_000
_ROW_SCHEMA = "dlperf.training_row"
_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class TrainingRunner:
    """Where and how runs are made: the checkout's folder, the machine file, runs a case, seconds of
    each, what keeps the rows, how progress is told.
    """

    checkout: Path
    machine: Machine
    n_runs: int
    seconds: float
    archive: Archive
    log: Callable[[str], None]
    _sample_s: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    # -- commands ----------------------------------------------------------------------------------

    def run(self, *command: str) -> dict[str, Any]:
        """The JSON that a command writes with ``--json FILE``. Raises WorkFailed with the last line
        that it identity.
        """
        with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
            out = Path(folder) / "out.json"
            place = command.index("--json") + 1
            words = [sys.executable, *command[:place], str(out), *command[place:]]
            done = subprocess.run(
                words,
                cwd=self.checkout,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_TIMEOUT_S,
            )
            if done.returncode == child_process.INTERRUPTED:  # Ctrl-C reaches the whole group
                raise KeyboardInterrupt
            if done.returncode or not out.exists():
                identity = child_process.last_line(done.stderr or done.stdout)
                why = identity or f"ended with status {done.returncode}"
                raise WorkFailed(f"{' '.join(command[:4])} ...: {why}")
            data: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return data

    def predict(self, network: str, samples: int, *options: str) -> dict[str, Any]:
        """The epoch of ``dlperf predict``, with the loader of the scripts."""
        loader = f"networks.loaders:{LOADERS[network]}"
        found = self.run(
            "-m",
            "dlperf",
            "predict",
            network,
            "--json",
            "--machine",
            self.machine.path,
            "--batch-size",
            str(BATCH_SIZE),
            "--samples",
            str(samples),
            "--threads",
            "1",
            "--loader",
            loader,
            "--accuracy",
            *options,
        )
        epoch: dict[str, Any] = found["epoch"]
        return epoch

    def samples_for(self, network: str, seconds: float) -> int:
        """Samples whose epoch takes about so many seconds, a whole number of batches."""
        if (
            network not in self._sample_s
            # sampled once: all cases of a network train on as many samples
        ):
            self._sample_s[network] = (
                float(self.predict(network, _PROBE_SAMPLES)["epoch_s"]) / _PROBE_SAMPLES
            )
        return BATCH_SIZE * max(2, math.ceil(seconds / self._sample_s[network] / BATCH_SIZE))

    # -- keeping -----------------------------------------------------------------------------------

    def kept(self, kind: str, case: str, make: Callable[[], TrainingForecast]) -> TrainingForecast:
        """The row of an earlier study of the same machine file and settings, else a new one, which
        is then kept.
        """
        identity = "\n".join(
            (
                kind,
                case,
                self.machine.created,
                *sorted(map(str, self.machine.versions.items())),
                f"{self.n_runs} {self.seconds:g}",
            )
        )
        digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
        path = self.archive.folder / f"{slug(kind)}-{slug(case, 40)}-{digest}.json"

        def take() -> TrainingForecast:
            self.log(f"{kind}: {case}")
            return make()

        def save(row: TrainingForecast) -> None:
            write_json(path, {"schema": _ROW_SCHEMA, "schema_version": 1, "row": asdict(row)})

        return self.archive.keep(
            path,
            lambda found: TrainingForecast.from_json(read_json(found, _ROW_SCHEMA, 1)["row"]),
            take,
            save,
        )

    # -- the kinds ---------------------------------------------------------------------------------

    def workers(
        self, network: str, counts: Sequence[int]
    ) -> Iterator[Callable[[], TrainingForecast]]:
        """Total training times of ``networks/train_workers.py``."""
        for p in counts:
            yield lambda p=p: self._workers(network, p)  # type: ignore[misc]

    def _workers(self, network: str, p: int) -> TrainingForecast:
        kind = "workers" if p <= self.machine.cpu.n_cores else "oversubscribed"
        case = f"{network}, p = {p}"

        def make() -> TrainingForecast:
            n = max(self.samples_for(network, self.seconds / EPOCHS), BATCH_SIZE * p)
            counts = (
                "--samples",
                str(n),
                "--epochs",
                str(EPOCHS),
                "--val-samples",
                str(n // 5),
                "--test-samples",
                str(n // 5),
            )
            predicted = self.predict(network, n, *counts[2:], "--workers", str(p))["total_s"]
            script = (
                "networks/train_workers.py",
                "--net",
                network,
                "--workers",
                str(p),
                "--batch-size",
                str(BATCH_SIZE),
                *counts,
                "--json",
            )
            runs = [self.run(*script) for _ in range(self.n_runs)]
            # making or reading the images is the script's own preparation, which no forecast knows
            return TrainingForecast(
                kind,
                case,
                tuple(Pair(predicted, times["total_s"] - times["data_s"]) for times in runs),
                "s",
                network,
                p,
            )

        return self.kept(kind, case, make)

    def epochs(self, network: str, loader_workers: int) -> Iterator[Callable[[], TrainingForecast]]:
        """An epoch of ``networks/train.py`` under ``dlperf run``: as forecast there after its first
        steps, and from calibration alone.
        """
        case = f"{network}, {loader_workers} loader worker(s)"
        both: list[tuple[Pair, Pair]] = []

        def runs() -> list[tuple[Pair, Pair]]:
            if not both:
                n = self.samples_for(network, max(LEAST_EPOCH_S * 1.1, self.seconds))
                how = ("--loader-workers", str(loader_workers))
                epoch = self.predict(
                    network, n, *how, *(("--persistent-workers",) if loader_workers else ())
                )
                alone_s = epoch["epoch_s"] + (epoch["first_step_s"] or 0.0) + epoch["start_s"]
                for _ in range(self.n_runs):
                    found = self.run(
                        "-m",
                        "dlperf",
                        "run",
                        "--machine",
                        self.machine.path,
                        "--json",
                        "networks/train.py",
                        "--net",
                        network,
                        "--samples",
                        str(n),
                        "--val-samples",
                        "0",
                        "--test-samples",
                        "0",
                        "--batch-size",
                        str(BATCH_SIZE),
                        "--threads",
                        "1",
                        *how,
                    )["forecast"]
                    if (
                        found is None
                        or found["epoch_s"] is None
                        or found["epoch_measured_s"] is None
                    ):
                        raise WorkFailed(f"{case}: dlperf run forecast no epoch")
                    both.append(
                        (
                            Pair(found["epoch_s"], found["epoch_measured_s"]),
                            Pair(alone_s, found["epoch_measured_s"]),
                        )
                    )
            return both

        for place, kind in enumerate(("wrapped", "epoch")):
            yield lambda place=place, kind=kind: self.kept(  # type: ignore[misc]
                kind,
                case,
                lambda: TrainingForecast(
                    kind, case, tuple(pairs[place] for pairs in runs()), "s", network
                ),
            )

    def choice(self, network: str) -> Iterator[Callable[[], TrainingForecast]]:
        """The configuration that ``dlperf tune`` proposes against the best of all that it compares,
        measured in turns.
        """
        case = f"{network}, batch sizes {', '.join(map(str, TUNED_BATCH_SIZES))}"

        def make() -> TrainingForecast:
            found = self.run(
                "-m",
                "dlperf",
                "tune",
                network,
                "--json",
                "--machine",
                self.machine.path,
                "--batch-sizes",
                ",".join(map(str, TUNED_BATCH_SIZES)),
                "--loader-workers",
                "0",
                "--samples",
                "20000",
                "--try",
                "--best",
                "99",
                "--runs",
                str(self.n_runs),
                "--seconds",
                f"{self.seconds / 4:g}",
            )
            tried = [one for one in found["tried"] if one["measured_samples_per_s"]]
            best = {
                key: found["best"][key]
                for key in ("threads", "batch_size", "loader_workers", "workers")
            }
            chosen = next(
                (one for one in tried if all(one[key] == value for key, value in best.items())),
                None,
            )
            if chosen is None:
                raise WorkFailed(f"{case}: the proposed configuration could not be measured")
            fastest = max(tried, key=lambda one: float(one["measured_samples_per_s"]))
            pairs = zip(chosen["runs_samples_per_s"], fastest["runs_samples_per_s"])
            return TrainingForecast(
                "choice", case, tuple(Pair(*pair) for pair in pairs), "samples/s", network
            )

        yield lambda: self.kept("choice", case, make)

    def memory(
        self, target: str, batch_sizes: Sequence[int]
    ) -> Iterator[Callable[[], TrainingForecast]]:
        """Peak memory of three steps in fresh processes."""
        for size in batch_sizes:
            yield lambda size=size: self._memory(target, size)  # type: ignore[misc]

    def _memory(self, target: str, batch_size: int) -> TrainingForecast:
        case = f"{target} @ {batch_size}"

        def make() -> TrainingForecast:
            from dlperf.forecast.prediction import predict
            from dlperf.recorder import recording, targets

            step = predict(
                recording.record_target(targets.resolve(target, batch_size)), self.machine, 1
            ).step
            if step.peak_memory_bytes is None:
                raise WorkFailed(f"{case}: no peak memory was predicted")
            runs = [peak_memory.measure_peak_memory(target, batch_size) for _ in range(self.n_runs)]
            return TrainingForecast(
                "memory",
                case,
                tuple(Pair(step.peak_memory_bytes, found) for found in runs),
                "bytes",
                target,
            )

        return self.kept("memory", case, make)

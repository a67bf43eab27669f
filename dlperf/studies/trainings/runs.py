"""The runs behind a study of trainings: ordinary commands in processes of their own, each result
kept as soon as it is there.

Scripts and loaders are those of a checkout's ``networks``; they are run, never imported.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from dlperf.core import child_process
from dlperf.core.conversion import convert
from dlperf.core.errors import WorkFailed
from dlperf.core.machine import Machine
from dlperf.core.text import counted
from dlperf.profiler import peak_memory
from dlperf.report.writing import slug
from dlperf.studies.accuracy.archive import Archive
from dlperf.studies.results import Pair
from dlperf.studies.trainings.cases import TrainingForecast

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
    _epochs: dict[str, dict[str, tuple[Pair, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )

    # -- commands ----------------------------------------------------------------------------------

    def run(self, *command: str) -> dict[str, Any]:
        """The JSON that a command writes with ``--json FILE``. Raises WorkFailed with the last line
        that it printed.
        """
        with tempfile.TemporaryDirectory(prefix="dlperf-") as folder:
            out = Path(folder) / "out.json"
            index = command.index("--json") + 1
            words = [sys.executable, *command[:index], str(out), *command[index:]]
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
                said = child_process.last_line(done.stderr or done.stdout)
                why = said or f"ended with status {done.returncode}"
                raise WorkFailed(f"{' '.join(command[:4])} ...: {why}")
            data: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return data

    def predict(self, network: str, samples: int, *options: str) -> dict[str, Any]:
        """The epoch of ``dlperf predict``, with the loader of the scripts."""
        command = _options(
            machine=self.machine.path,
            batch_size=BATCH_SIZE,
            samples=samples,
            threads=1,
            loader=f"networks.loaders:{LOADERS[network]}",
        )
        predict = ("-m", "dlperf", "predict", network, "--json", "--accuracy")
        epoch: dict[str, Any] = self.run(*predict, *command, *options)["epoch"]
        return epoch

    def samples_for(self, network: str, seconds: float) -> int:
        """Samples whose epoch takes about a given number of seconds, a whole number of batches."""
        if (
            network not in self._sample_s
            # sampled once: all cases of a network train on as many samples
        ):
            epoch_s = float(self.predict(network, _PROBE_SAMPLES)["epoch_s"])
            self._sample_s[network] = epoch_s / _PROBE_SAMPLES
        return BATCH_SIZE * max(2, math.ceil(seconds / self._sample_s[network] / BATCH_SIZE))

    # -- keeping -----------------------------------------------------------------------------------

    def kept(self, kind: str, case: str, make: Callable[[], TrainingForecast]) -> TrainingForecast:
        """The row of an earlier study of the same machine file and settings, else a new one, which
        is then kept.
        """

        def take() -> dict[str, Any]:
            self.log(f"{kind}: {case}")
            return {"row": asdict(make())}

        path = self.archive.path(
            f"{slug(kind)}-{slug(case, 40)}",
            kind,
            case,
            self.machine.created,
            *sorted(map(str, self.machine.versions.items())),
            f"{self.n_runs} {self.seconds:g}",
        )
        return self.archive.keep_json(
            path, _ROW_SCHEMA, lambda data: convert(data["row"], TrainingForecast), take
        )

    # -- the kinds ---------------------------------------------------------------------------------

    def workers(self, network: str, p: int) -> TrainingForecast:
        """Total training time of ``networks/train_workers.py``."""
        kind = "workers" if p <= self.machine.cpu.n_cores else "oversubscribed"
        case = f"{network}, p = {p}"

        def make() -> TrainingForecast:
            n = max(self.samples_for(network, self.seconds / EPOCHS), BATCH_SIZE * p)
            tests = _options(val_samples=n // 5, test_samples=n // 5)
            counts = _options(epochs=EPOCHS, workers=p)
            predicted = self.predict(network, n, *counts, *tests)["total_s"]
            script = _options(net=network, batch_size=BATCH_SIZE, samples=n)
            runs = [
                self.run("networks/train_workers.py", *script, *counts, *tests, "--json")
                for _ in range(self.n_runs)
            ]
            # making or reading the images is the script's own preparation, which no forecast knows
            pairs = tuple(Pair(predicted, times["total_s"] - times["data_s"]) for times in runs)
            return TrainingForecast(kind, case, pairs, "s", network, p)

        return self.kept(kind, case, make)

    def epoch(self, kind: str, network: str, loader_workers: int) -> TrainingForecast:
        """An epoch of ``networks/train.py`` under ``dlperf run``: as forecast there after its first
        steps (``wrapped``), or from calibration alone (``epoch``). One run serves both.
        """
        case = f"{network}, {counted(loader_workers, 'loader worker')}"

        def make() -> TrainingForecast:
            if case not in self._epochs:
                self._epochs[case] = self._time_epochs(case, network, loader_workers)
            return TrainingForecast(kind, case, self._epochs[case][kind], "s", network)

        return self.kept(kind, case, make)

    def _time_epochs(
        self, case: str, network: str, loader_workers: int
    ) -> dict[str, tuple[Pair, ...]]:
        n = self.samples_for(network, max(LEAST_EPOCH_S * 1.1, self.seconds))
        how = _options(loader_workers=loader_workers)
        persistent = ("--persistent-workers",) if loader_workers else ()
        epoch = self.predict(network, n, *how, *persistent)
        alone_s = epoch["epoch_s"] + (epoch["first_step_s"] or 0.0) + epoch["start_s"]
        script = _options(
            net=network,
            samples=n,
            val_samples=0,
            test_samples=0,
            batch_size=BATCH_SIZE,
            threads=1,
        )
        wrapped, alone = [], []
        for _ in range(self.n_runs):
            watch = ("-m", "dlperf", "run", "--machine", self.machine.path, "--json")
            found = self.run(*watch, "networks/train.py", *script, *how)["forecast"]
            if found is None or found["epoch_s"] is None or found["epoch_measured_s"] is None:
                raise WorkFailed(f"{case}: dlperf run forecast no epoch")
            wrapped.append(Pair(found["epoch_s"], found["epoch_measured_s"]))
            alone.append(Pair(alone_s, found["epoch_measured_s"]))
        return {"wrapped": tuple(wrapped), "epoch": tuple(alone)}

    def choice(self, network: str) -> TrainingForecast:
        """The configuration that ``dlperf tune`` proposes against the best of all that it compares,
        measured in turns.
        """
        sizes = ",".join(map(str, TUNED_BATCH_SIZES))
        case = f"{network}, batch sizes {sizes.replace(',', ', ')}"

        def make() -> TrainingForecast:
            options = _options(
                machine=self.machine.path,
                batch_sizes=sizes,
                loader_workers=0,
                samples=20000,
                best=99,
                runs=self.n_runs,
                seconds=f"{self.seconds / 4:g}",
            )
            found = self.run("-m", "dlperf", "tune", network, "--json", "--try", *options)
            tried = [one for one in found["tried"] if one["measured_samples_per_s"]]
            settings = itemgetter("threads", "batch_size", "loader_workers", "workers")
            best = settings(found["best"])
            chosen = next((one for one in tried if settings(one) == best), None)
            if chosen is None:
                raise WorkFailed(f"{case}: the proposed configuration could not be measured")
            fastest = max(tried, key=itemgetter("measured_samples_per_s"))
            pairs = map(Pair, chosen["runs_samples_per_s"], fastest["runs_samples_per_s"])
            return TrainingForecast("choice", case, tuple(pairs), "samples/s", network)

        return self.kept("choice", case, make)

    def memory(self, target: str, batch_size: int) -> TrainingForecast:
        """Peak memory of three steps in fresh processes."""
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
            pairs = tuple(Pair(step.peak_memory_bytes, found) for found in runs)
            return TrainingForecast("memory", case, pairs, "bytes", target)

        return self.kept("memory", case, make)


def _options(**options: object) -> tuple[str, ...]:
    """Options of a command.

    >>> _options(batch_size=32, net="mlp")
    ('--batch-size', '32', '--net', 'mlp')
    """
    return tuple(
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    )

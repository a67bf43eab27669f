"""Trying configurations: the best few in turns, each with as many fresh processes as it has
workers, training side by side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dlperf.advice.grid import Configuration
from dlperf.core import child_process
from dlperf.core.errors import DlperfError, WorkFailed

Measure = Callable[[Configuration], float]
_DEADLINE_S = 600.0


@dataclass(frozen=True)
class Try:
    """What became of one configuration: samples per second of each run, or why it could not be run."""

    configuration: Configuration
    runs_samples_per_s: tuple[float, ...] = ()
    error: str = ""

    @property
    def samples_per_s(self) -> float | None:
        """The median of its runs; None without any."""
        return median(self.runs_samples_per_s) if self.runs_samples_per_s else None


@dataclass(frozen=True)
class Contest:
    """All that was tried, the proposed configuration first."""

    tries: tuple[Try, ...]
    seconds: float
    is_interrupted: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def winner(self) -> Try | None:
        """The fastest by measurement; None where nothing could be measured."""
        done = [one for one in self.tries if one.samples_per_s is not None]
        return max(done, key=lambda one: one.samples_per_s or 0.0, default=None)

    @property
    def loss_frac(self) -> float | None:
        """By how much the proposed configuration was slower than the fastest measured one; None
        where it was not measured.

        >>> one, two = Try(Configuration(1, 1, 0, 32), (95.0,)), Try(Configuration(1, 2, 0, 32), (100.0,))
        >>> round(Contest((one, two), 1.0).loss_frac, 3)
        0.05
        """
        proposed, winner = self.tries[0].samples_per_s if self.tries else None, self.winner
        return (
            None
            if proposed is None or winner is None or winner.samples_per_s is None
            else 1.0 - proposed / winner.samples_per_s
        )

    def try_of(self, configuration: Configuration) -> Try | None:
        """What became of a configuration; None where it was not tried."""
        return next((one for one in self.tries if one.configuration == configuration), None)


def run_contest(
    configurations: Sequence[Configuration],
    measure: Measure,
    *,
    seconds: float,
    n_runs: int,
    log: Callable[[str], None] = lambda line: None,
) -> Contest:
    """Measure the configurations `n_runs` times in turns, forwards and backwards, so that what
    drifts meets all of them alike.

    One that fails is left out of later rounds and keeps its error. An interruption (Ctrl-C) ends
    the contest, and what was finished stays.
    """
    runs: dict[Configuration, list[float]] = {one: [] for one in configurations}
    errors: dict[Configuration, str] = {}
    interrupted = False
    try:
        for number in range(n_runs):
            for one in configurations if number % 2 == 0 else reversed(configurations):
                if one in errors:
                    continue
                try:
                    runs[one].append(measure(one))
                except DlperfError as error:
                    errors[one] = str(error)
                    log(f"{one.label}: {error}")
                    continue
                log(f"run {number + 1} of {n_runs}, {one.label}: {runs[one][-1]:.4g} samples/s")
    except KeyboardInterrupt:
        interrupted = True
        n_done = sum(map(len, runs.values()))
        log(
            f"interrupted{f'; {n_done} finished run(s) are shown' if n_done else ' before a first run was finished; the prediction alone is shown'}"
        )
    return Contest(
        tuple(Try(one, tuple(runs[one]), errors.get(one, "")) for one in configurations),
        seconds,
        interrupted,
    )


def measure_apart(
    configuration: Configuration,
    spec: str,
    *,
    inference: bool,
    input_shape: tuple[int, ...] | None,
    seconds: float,
    with_loader: bool,
    loader: str | None = None,
) -> float:
    """Samples per second of a configuration: its workers start, warm up, and train side by side for
    `seconds`; the sum of their rates.

    With `with_loader` every batch comes from a DataLoader over samples in memory, or from the one
    that `loader`, FILE.py:CALLABLE, makes. Raises WorkFailed with the last line that a process
    said; none is left running.
    """
    order: dict[str, Any] = {
        "spec": spec,
        "batch_size": configuration.batch_size,
        "threads": configuration.threads,
        "loader_workers": configuration.loader_workers,
        "inference": inference,
        "input": list(input_shape) if input_shape else None,
        "seconds": seconds,
        "with_loader": with_loader,
        "loader": loader,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(configuration.threads)}
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(configuration.workers):
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dlperf.advice.tuning_trial_process"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    env=environment,
                )
            )
        _say(processes, json.dumps(order))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise _failure(process)
        _say(processes, "go")
        rates = []
        for process in processes:
            out, err = process.communicate(timeout=_DEADLINE_S + seconds)
            if process.returncode:
                raise child_process.failure(process.returncode, err, unusable=WorkFailed)
            rates.append(float(json.loads(out)["samples_per_s"]))
        return sum(rates)
    except subprocess.TimeoutExpired as error:
        raise WorkFailed(
            f"{configuration.label}: a worker did not end within {_DEADLINE_S + seconds:.0f} s"
        ) from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None and not stream.closed:
                    stream.close()


def _say(processes: Sequence[subprocess.Popen[str]], line: str) -> None:
    for process in processes:
        assert process.stdin is not None
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise _failure(process) from None


def _failure(process: subprocess.Popen[str]) -> BaseException:
    process.kill()
    assert process.stderr is not None
    text = process.stderr.read()
    return child_process.failure(process.wait(), text, unusable=WorkFailed)

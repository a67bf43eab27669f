"""Trials: changes of a step, or configurations of a training, measured in fresh processes.

Changes alternate with the baseline: baseline, change, baseline, change, ... baseline. A change is
compared with the mean of the two baselines around it, so that drift meets both. The differences of
neighbouring baselines are the repeatability.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from dlperf.advice.allocators import environment_under, malloc_of
from dlperf.advice.grid import Configuration
from dlperf.advice.variants import BASELINE, Suggestion, Variant
from dlperf.core import host
from dlperf.core.child_process import Child
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.measurement import Measurement
from dlperf.core.units import format_seconds

_DEADLINE_S = 600.0


@dataclass(frozen=True)
class ChangeRun:
    """One run of a variant and of the baselines beside it: median seconds a sample, page faults a
    step.
    """

    variant_s: float
    baselines_s: tuple[float, ...]
    variant_faults: float = 0.0
    baseline_faults: float = 0.0

    @property
    def gain_frac(self) -> float:
        """The gain in samples per second that this run saw."""
        return fmean(self.baselines_s) / self.variant_s - 1.0


@dataclass(frozen=True)
class ChangeTrial:
    """What became of one variant: its runs, or why it could not be run."""

    name: str
    batch_size: int = 0
    pairs: tuple[ChangeRun, ...] = ()
    error: str = ""

    @property
    def gain_frac(self) -> float | None:
        """The median gain of its runs; None without any."""
        return median(pair.gain_frac for pair in self.pairs) if self.pairs else None

    @property
    def gains_frac(self) -> tuple[float, ...]:
        """The gain of each run."""
        return tuple(pair.gain_frac for pair in self.pairs)

    @property
    def sample_s(self) -> float | None:
        """Median seconds a sample of its runs; None without any."""
        return median(pair.variant_s for pair in self.pairs) if self.pairs else None

    @property
    def step_s(self) -> float | None:
        """Median seconds a step of its runs; None without any."""
        return None if self.sample_s is None else self.sample_s * self.batch_size


@dataclass(frozen=True)
class ChangeTrials:
    """All that was tried. `baselines_s` are the baselines' median seconds a sample, in the order
    taken; `seconds` is how long each process timed.
    """

    batch_size: int
    baselines_s: tuple[float, ...]
    trials: tuple[ChangeTrial, ...]
    seconds: float
    n_runs: int
    is_interrupted: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def baseline_step_s(self) -> float | None:
        """The baseline's step: the median over its processes."""
        return median(self.baselines_s) * self.batch_size if self.baselines_s else None

    @property
    def repeatability_frac(self) -> float | None:
        """What baselines beside each other differ by (median of |difference| / mean over
        neighbours): the repeatability floor. None for a single one.
        """
        pairs = list(zip(self.baselines_s, self.baselines_s[1:]))
        return median(abs(a - b) / fmean((a, b)) for a, b in pairs) if pairs else None

    def trial_of(self, name: str) -> ChangeTrial | None:
        """The trial of a variant by its name; None where it was not tried."""
        return next((trial for trial in self.trials if trial.name == name), None)


def cannot_be_tried(suggestion: Suggestion, memory_bytes: int) -> str:
    """Why a suggestion cannot be tried on this machine, "" if it can."""
    variant = suggestion.variant
    if suggestion.step_s is None:
        return suggestion.reason or "does not apply"
    if variant.threads is not None and variant.threads > host.available_cores():
        return f"takes {variant.threads} cores, this process may use {host.available_cores()}"
    if variant.malloc is not None and (missing := malloc_of(variant.malloc).missing):
        return missing
    if memory_bytes and (suggestion.peak_memory_bytes or 0) > 0.9 * memory_bytes:
        return "would not fit in memory"
    return ""


def run_change_trials(
    variants: Sequence[Variant],
    measure: Callable[[Variant], Measurement],
    batch_size: int,
    *,
    seconds: float,
    n_runs: int,
    log: Callable[[str], None] = lambda line: None,
) -> ChangeTrials:
    """Measure the baseline and each variant `n_runs` times with `measure`, one process each;
    `seconds` is what each takes, for the record.

    A variant that fails is left out of the later rounds and keeps its error. An interruption
    (Ctrl-C) ends the trials, and what was finished stays. Raises what the baseline raises.
    """
    baselines: list[float] = []
    pairs: dict[str, list[ChangeRun]] = {variant.name: [] for variant in variants}
    sizes: dict[str, int] = {}
    errors: dict[str, str] = {}
    interrupted = False
    try:
        before = measure(BASELINE)
        baselines.append(_sample_s(before))
        for variant in [variant for _ in range(n_runs) for variant in variants]:
            if variant.name in errors:
                continue
            try:
                own = measure(variant)
            except DlperfError as error:
                errors[variant.name] = str(error)
                log(f"{variant.name}: {error}")
                continue
            after = measure(BASELINE)
            baselines.append(_sample_s(after))
            sizes[variant.name] = own.batch_size
            pair = ChangeRun(
                _sample_s(own),
                (_sample_s(before), _sample_s(after)),
                _faults(own),
                fmean((_faults(before), _faults(after))),
            )
            pairs[variant.name].append(pair)
            log(
                f"run {len(pairs[variant.name])} of {n_runs}, {variant.name}:"
                f" {format_seconds(pair.variant_s * own.batch_size)} a step,"
                f" {100 * pair.gain_frac:+.1f} % samples/s"
            )
            before = after
    except KeyboardInterrupt:
        interrupted = True
        _log_interruption(sum(map(len, pairs.values())), "change was tried", log)
    tried = [name for name in pairs if pairs[name] or name in errors]
    trials = tuple(
        ChangeTrial(name, sizes.get(name, 0), tuple(pairs[name]), errors.get(name, ""))
        for name in tried
    )
    return ChangeTrials(batch_size, tuple(baselines), trials, seconds, n_runs, interrupted)


def _sample_s(measurement: Measurement) -> float:
    return measurement.step["total"].median / measurement.batch_size


def _faults(measurement: Measurement) -> float:
    return measurement.noise.get("page_faults_per_step", 0.0)


@dataclass(frozen=True)
class ConfigurationTrial:
    """Trial of one configuration: samples per second of each run, or the reason of a failure."""

    configuration: Configuration
    runs_samples_per_s: tuple[float, ...] = ()
    error: str = ""

    @property
    def samples_per_s(self) -> float | None:
        """The median of its runs; None without any."""
        return median(self.runs_samples_per_s) if self.runs_samples_per_s else None


@dataclass(frozen=True)
class ConfigurationTrials:
    """All that was tried, the proposed configuration first."""

    trials: tuple[ConfigurationTrial, ...]
    seconds: float
    is_interrupted: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def fastest(self) -> ConfigurationTrial | None:
        """The fastest by measurement; None where nothing could be measured."""
        done = [one for one in self.trials if one.samples_per_s is not None]
        return max(done, key=lambda one: one.samples_per_s or 0.0, default=None)

    @property
    def loss_frac(self) -> float | None:
        """By how much the proposed configuration was slower than the fastest measured one; None
        where it was not measured.

        >>> one = ConfigurationTrial(Configuration(1, 1, 0, 32), (95.0,))
        >>> two = ConfigurationTrial(Configuration(1, 2, 0, 32), (100.0,))
        >>> round(ConfigurationTrials((one, two), 1.0).loss_frac, 3)
        0.05
        """
        proposed, fastest = self.trials[0].samples_per_s if self.trials else None, self.fastest
        return (
            None
            if proposed is None or fastest is None or fastest.samples_per_s is None
            else 1.0 - proposed / fastest.samples_per_s
        )

    def trial_of(self, configuration: Configuration) -> ConfigurationTrial | None:
        """What became of a configuration; None where it was not tried."""
        return next((one for one in self.trials if one.configuration == configuration), None)


def run_configuration_trials(
    configurations: Sequence[Configuration],
    measure: Callable[[Configuration], float],
    *,
    seconds: float,
    n_runs: int,
    log: Callable[[str], None] = lambda line: None,
) -> ConfigurationTrials:
    """Measure the configurations `n_runs` times in turns, forwards and backwards, so that what
    drifts meets all of them alike.

    One that fails is left out of later rounds and keeps its error. An interruption (Ctrl-C) ends
    the trials, and what was finished stays.
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
        _log_interruption(sum(map(len, runs.values())), "run was finished", log)
    return ConfigurationTrials(
        tuple(
            ConfigurationTrial(one, tuple(runs[one]), errors.get(one, "")) for one in configurations
        ),
        seconds,
        interrupted,
    )


def _log_interruption(n_done: int, what: str, log: Callable[[str], None]) -> None:
    shown = (
        f"; {n_done} finished run(s) are shown"
        if n_done
        else f" before a first {what}; the prediction alone is shown"
    )
    log(f"interrupted{shown}")


# -- processes -------------------------------------------------------------------------------------


def measure_change(
    variant: Variant,
    spec: str,
    batch_size: int,
    *,
    threads: int,
    inference: bool,
    input_shape: tuple[int, ...] | None,
    seconds: float,
) -> Measurement:
    """A variant of a target timed in a fresh process, in its own environment. Raises WorkFailed
    with the last line that the process wrote.
    """
    order: dict[str, Any] = {
        "spec": spec,
        "batch_size": variant.batch_size or batch_size,
        "threads": variant.threads or threads,
        "inference": inference,
        "input": input_shape,
        "seconds": seconds,
        "variant": variant.to_json(),
    }
    (answer,) = run_apart(order, environment_under(variant.malloc))
    return Measurement.from_json(answer)


def measure_configuration(
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
    wrote.
    """
    order: dict[str, Any] = {
        "spec": spec,
        "batch_size": configuration.batch_size,
        "threads": configuration.threads,
        "loader_workers": configuration.loader_workers,
        "inference": inference,
        "input": input_shape,
        "seconds": seconds,
        "with_loader": with_loader,
        "loader": loader,
    }
    answers = run_apart(order, os.environ, configuration.workers)
    return sum(float(answer["samples_per_s"]) for answer in answers)


def run_apart(
    order: dict[str, Any], environment: Mapping[str, str], n_processes: int = 1
) -> list[dict[str, Any]]:
    """The answers of fresh processes that carry out an order side by side, from the moment when all
    are ready. None is left running.

    Raises WorkFailed with the last line that a process wrote.
    """
    limit_s = None if "variant" in order else _DEADLINE_S + order["seconds"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                Child(
                    "dlperf.advice.trial_process", threads=order["threads"], environment=environment
                )
            )
            for _ in range(n_processes)
        ]
        for process in processes:
            process.write(json.dumps(order))
        for process in processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":  # it ends, and its answer is why
                process.answer(unusable=WorkFailed)
        for process in processes:
            process.write("go")
        try:
            return [process.answer(limit_s=limit_s, unusable=WorkFailed) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise WorkFailed(
                f"{order['spec']}: a worker did not end within {limit_s:.0f} s"
            ) from error

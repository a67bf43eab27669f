"""Trials: changes of a step, or configurations of a training, measured in fresh processes.

Changes alternate with the baseline: baseline, change, baseline, change, ... baseline. A change is
compared with the mean of the two baselines around it, so that drift meets both. The differences of
neighbouring baselines are the repeatability.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeVar

from dlperf.advice.grid import Configuration
from dlperf.advice.variants import BASELINE, Suggestion, Variant, environment_under, malloc_of
from dlperf.core import host
from dlperf.core.child_process import Child
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.measurement import Measurement
from dlperf.core.text import counted
from dlperf.core.units import format_seconds

_DEADLINE_S = 600.0
Key = TypeVar("Key", bound=Hashable)
Run = TypeVar("Run")


@dataclass(frozen=True)
class ChangeRun:
    """One run of a variant and of the baselines around it: median seconds a sample."""

    variant_s: float
    baselines_s: tuple[float, ...]

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
    notes: tuple[str, ...] = ()

    @property
    def baseline_step_s(self) -> float | None:
        """The baseline's step: the median over its processes."""
        return median(self.baselines_s) * self.batch_size if self.baselines_s else None

    @property
    def repeatability_frac(self) -> float | None:
        """What baselines beside each other differ by (median of |difference| / mean over
        neighbours): the repeatability. None for a single one.
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


def _take_turns(
    turns: Iterable[Key],
    run: Callable[[Key], Run],
    finish: Callable[[Key, Run], str],
    name_of: Callable[[Key], str],
    first: str,
    log: Callable[[str], None],
) -> tuple[dict[Key, str], bool]:
    """Run what has its turn; the errors, and whether Ctrl-C interrupted the runs.

    What fails is left out of later turns. `finish` keeps a run and describes it for the log;
    `first` names the first run. Raises what `turns` and `finish` raise.
    """
    errors: dict[Key, str] = {}
    n_done = 0
    try:
        for one in turns:
            if one in errors:
                continue
            try:
                found = run(one)
            except DlperfError as error:
                errors[one] = str(error)
                log(f"{name_of(one)}: {error}")
                continue
            log(finish(one, found))
            n_done += 1
    except KeyboardInterrupt:
        nothing = f" before a first {first}; the prediction alone is shown"
        shown = f"; {counted(n_done, 'finished run')} shown" if n_done else nothing
        log(f"interrupted{shown}")
        return errors, True
    return errors, False


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
    baselines_s: list[float] = []
    pairs: dict[str, list[ChangeRun]] = {variant.name: [] for variant in variants}
    sizes: dict[str, int] = {}

    def turns() -> Iterator[Variant]:
        baselines_s.append(_sample_s(measure(BASELINE)))
        for _ in range(n_runs):
            yield from variants

    def finish(variant: Variant, own: Measurement) -> str:
        name, own_s = variant.name, _sample_s(own)
        baselines_s.append(_sample_s(measure(BASELINE)))
        pair = ChangeRun(own_s, tuple(baselines_s[-2:]))
        pairs[name].append(pair)
        sizes[name] = own.batch_size
        return (
            f"run {len(pairs[name])} of {n_runs}, {name}: {format_seconds(own_s * own.batch_size)}"
            f" a step, {100 * pair.gain_frac:+.1f} % samples/s"
        )

    failed, is_interrupted = _take_turns(
        turns(), measure, finish, lambda variant: variant.name, "change was tried", log
    )
    errors = {variant.name: error for variant, error in failed.items()}
    trials = tuple(
        ChangeTrial(name, sizes.get(name, 0), tuple(own), errors.get(name, ""))
        for name, own in pairs.items()
        if own or name in errors
    )
    return ChangeTrials(batch_size, tuple(baselines_s), trials, seconds, n_runs, is_interrupted)


def _sample_s(measurement: Measurement) -> float:
    return measurement.step["total"].median / measurement.batch_size


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
    is_interrupted: bool = False

    @property
    def fastest(self) -> ConfigurationTrial | None:
        """The fastest by measurement; None where nothing could be measured."""
        done = (one for one in self.trials if one.runs_samples_per_s)
        return max(done, key=lambda one: one.samples_per_s or 0.0, default=None)

    @property
    def loss_frac(self) -> float | None:
        """By how much the proposed configuration was slower than the fastest measured one; None
        where it was not measured.

        >>> one = ConfigurationTrial(Configuration(1, 1, 0, 32), (95.0,))
        >>> two = ConfigurationTrial(Configuration(1, 2, 0, 32), (100.0,))
        >>> round(ConfigurationTrials((one, two)).loss_frac, 3)
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
    n_runs: int,
    log: Callable[[str], None] = lambda line: None,
) -> ConfigurationTrials:
    """Measure the configurations `n_runs` times in turns, forwards and backwards, so that what
    drifts meets all of them alike.

    One that fails is left out of later rounds and keeps its error. An interruption (Ctrl-C) ends
    the trials, and what was finished stays.
    """
    runs: dict[Configuration, list[float]] = {one: [] for one in configurations}
    rounds = itertools.islice(itertools.cycle((configurations, configurations[::-1])), n_runs)

    def finish(one: Configuration, samples_per_s: float) -> str:
        runs[one].append(samples_per_s)
        return f"run {len(runs[one])} of {n_runs}, {one.label}: {samples_per_s:.4g} samples/s"

    errors, is_interrupted = _take_turns(
        itertools.chain.from_iterable(rounds),
        measure,
        finish,
        lambda one: one.label,
        "run was finished",
        log,
    )
    trials = tuple(
        ConfigurationTrial(one, tuple(own), errors.get(one, "")) for one, own in runs.items()
    )
    return ConfigurationTrials(trials, is_interrupted)


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
        "edits": [asdict(edit) for edit in variant.edits],
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
    limit_s = None if "edits" in order else _DEADLINE_S + order["seconds"]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(n_processes):
            child = Child(
                "dlperf.advice.trial_process", threads=order["threads"], environment=environment
            )
            processes.append(stack.enter_context(child))
            child.write(json.dumps(order))
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

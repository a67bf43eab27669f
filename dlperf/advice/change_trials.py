"""Trying changes: baseline and variants in fresh processes, one after the other, so that what
drifts meets both.

The order of a round is baseline, variant, baseline, variant, ... baseline: a variant is held
against the mean of the two baselines around it, and all baselines together say what the same step
differs by from process to process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from dlperf.advice.mallocs import environment_under, malloc_of
from dlperf.advice.variants import BASELINE, Suggestion, Variant
from dlperf.core import child_process, host
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.measurement import Measurement
from dlperf.core.units import format_seconds

Measure = Callable[[Variant], Measurement]


@dataclass(frozen=True)
class Pair:
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
class Trial:
    """What became of one variant: its runs, or why it could not be run."""

    name: str
    batch_size: int = 0
    pairs: tuple[Pair, ...] = ()
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
class Trials:
    """All that was tried. `baselines_s` are the baselines' median seconds a sample, in the order
    taken; `seconds` is how long each process timed.
    """

    batch_size: int
    baselines_s: tuple[float, ...]
    trials: tuple[Trial, ...]
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

    def trial_of(self, name: str) -> Trial | None:
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


def run_trials(
    variants: Sequence[Variant],
    measure: Measure,
    batch_size: int,
    *,
    seconds: float,
    n_runs: int,
    log: Callable[[str], None] = lambda line: None,
) -> Trials:
    """Measure the baseline and each variant `n_runs` times with `measure`, one process each;
    `seconds` is what each takes, for the record.

    A variant that fails is left out of the later rounds and keeps its error. An interruption
    (Ctrl-C) ends the trials, and what was finished stays. Raises what the baseline raises.
    """
    baselines: list[float] = []
    pairs: dict[str, list[Pair]] = {variant.name: [] for variant in variants}
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
            pair = Pair(
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
        n_runs_done = sum(map(len, pairs.values()))
        shown = (
            f"; {n_runs_done} finished run(s) are shown"
            if n_runs_done
            else " before a first change was tried; the prediction alone is shown"
        )
        log(f"interrupted{shown}")
    tried = [name for name in pairs if pairs[name] or name in errors]
    trials = tuple(
        Trial(name, sizes.get(name, 0), tuple(pairs[name]), errors.get(name, "")) for name in tried
    )
    return Trials(batch_size, tuple(baselines), trials, seconds, n_runs, interrupted)


def _sample_s(measurement: Measurement) -> float:
    return measurement.step["total"].median / measurement.batch_size


def _faults(measurement: Measurement) -> float:
    return measurement.noise.get("page_faults_per_step", 0.0)


def measure_apart(
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
    with the last line that the process said.
    """
    environment = {
        **environment_under(variant.malloc),
        "OMP_NUM_THREADS": str(variant.threads or threads),
    }
    order: dict[str, Any] = {
        "spec": spec,
        "batch_size": variant.batch_size or batch_size,
        "threads": variant.threads or threads,
        "inference": inference,
        "input": list(input_shape) if input_shape else None,
        "seconds": seconds,
        "variant": variant.to_json(),
    }
    done = subprocess.run(
        [sys.executable, "-m", "dlperf.advice.change_trial_process"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
    )
    if done.returncode:
        raise child_process.failure(done.returncode, done.stderr, unusable=WorkFailed)
    return Measurement.from_json(json.loads(done.stdout))

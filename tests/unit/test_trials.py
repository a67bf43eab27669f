"""ChangeTrials with a measure of our own: their order, what counts as gain and as repeatability, what is kept
when something fails or somebody interrupts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dlperf.advice.trials import ChangeRun, ChangeTrials, cannot_be_tried, run_change_trials
from dlperf.advice.variants import (
    DOES_NOT_APPLY,
    PAYS,
    AllocatorSetting,
    Edit,
    Suggestion,
    Variant,
    environment_under,
    settings_in,
)
from dlperf.core import host
from dlperf.core.clock import Samples
from dlperf.core.errors import WorkFailed
from dlperf.core.measurement import Measurement

FUSED, WIDE, LARGE = (
    Variant("fused", (Edit("fused"),)),
    Variant("wide", (Edit("widen"),)),
    Variant("large", batch_size=20),
)
MALLOC_VARIABLES = {
    "MALLOC_MMAP_MAX_": "0",
    "LD_PRELOAD": "/usr/lib/libjemalloc.so.2",
    "PATH_TO": "x",
}


@dataclass
class Machine:
    """A machine whose steps take what it is told, times a drift that grows with every process."""

    steps_s: dict[str, float]
    drift: float = 1.0
    fails: tuple[str, ...] = ()
    interrupted_at: int | None = None
    seen: list[str] = field(default_factory=list)

    def measure(self, variant: Variant) -> Measurement:
        if self.interrupted_at == len(self.seen):
            raise KeyboardInterrupt
        self.seen.append(variant.name)
        if variant.name in self.fails:
            raise WorkFailed("it broke")
        seconds = self.steps_s[variant.name] * self.drift ** (len(self.seen) - 1)
        return Measurement(
            "t",
            variant.batch_size or 10,
            1,
            {"forward": Samples((seconds,)), "total": Samples((seconds,))},
            (),
        )


def run(machine: Machine, *variants: Variant, n_runs: int = 2) -> ChangeTrials:
    return run_change_trials(variants, machine.measure, 10, seconds=1.0, n_runs=n_runs)


def test_baselines_stand_around_every_variant():
    machine = Machine({"baseline": 2.0, "fused": 1.0, "wide": 4.0})
    trials = run(machine, FUSED, WIDE)
    assert machine.seen == [
        "baseline",
        "fused",
        "baseline",
        "wide",
        "baseline",
        "fused",
        "baseline",
        "wide",
        "baseline",
    ]
    assert trials.trial_of("fused").gains_frac == (1.0, 1.0)  # 2 s -> 1 s: twice the samples
    assert trials.trial_of("wide").gain_frac == -0.5
    assert trials.baseline_step_s == 2.0
    assert trials.repeatability_frac == 0.0
    assert trials.trial_of("unknown") is None


def test_gains_are_per_sample():
    (trial,) = run(Machine({"baseline": 1.0, "large": 1.6}), LARGE).trials
    assert trial.gain_frac == pytest.approx(0.25)  # 10 samples/s -> 20 / 1.6 = 12.5
    assert (trial.batch_size, trial.step_s) == (20, pytest.approx(1.6))


def test_a_steady_drift_cancels():
    trials = run(Machine({"baseline": 2.0, "fused": 1.0}, drift=1.01), FUSED, n_runs=3)
    # neighbours 1 and 1.01^2, the variant 1.01 between: their mean is 1.01 to 5e-5
    assert trials.trial_of("fused").gain_frac == pytest.approx(1.0, abs=2e-4)
    assert trials.repeatability_frac == pytest.approx(1.01**2 - 1, rel=0.02)


def test_a_variant_that_fails_is_left_out_and_named():
    machine = Machine({"baseline": 2.0, "fused": 1.0}, fails=("wide",))
    trials = run(machine, WIDE, FUSED)
    assert machine.seen.count("wide") == 1
    assert trials.trial_of("wide").error == "it broke"
    assert trials.trial_of("wide").gain_frac is None
    assert len(trials.trial_of("fused").pairs) == 2


def test_an_interruption_keeps_what_was_finished():
    trials = run(
        Machine({"baseline": 2.0, "fused": 1.0, "wide": 1.0}, interrupted_at=4), FUSED, WIDE
    )  # in the baseline after the second variant
    assert trials.is_interrupted
    assert [trial.name for trial in trials.trials] == ["fused"]
    said: list[str] = []
    run_change_trials(
        [FUSED, WIDE],
        Machine({"baseline": 2.0, "fused": 1.0}, interrupted_at=3).measure,
        10,
        seconds=1.0,
        n_runs=2,
        log=said.append,
    )
    assert said[-1] == "interrupted; 1 finished run shown"  # baseline, fused, baseline
    run_change_trials(
        [FUSED],
        Machine({"baseline": 2.0}, interrupted_at=1).measure,
        10,
        seconds=1.0,
        n_runs=2,
        log=said.append,
    )
    assert said[-1] == "interrupted before a first change was tried; the prediction alone is shown"
    at_once = run(Machine({}, interrupted_at=0), FUSED)
    assert at_once.is_interrupted
    assert (at_once.trials, at_once.baseline_step_s, at_once.repeatability_frac) == ((), None, None)


def test_a_baseline_that_fails_ends_it():
    with pytest.raises(WorkFailed, match="it broke"):
        run(Machine({}, fails=("baseline",)), FUSED)


def test_gain_of_a_pair():
    assert ChangeRun(2.0, (2.0, 4.0)).gain_frac == 0.5  # mean 3 against 2


@pytest.mark.process
def test_what_cannot_be_tried_here(monkeypatch):
    def suggest(variant: Variant, **rest):
        return Suggestion(variant, PAYS, batch_size=1, threads=1, step_s=1.0, gain_frac=1.0, **rest)

    assert cannot_be_tried(suggest(FUSED), 0) == ""
    assert "cores" in cannot_be_tried(suggest(Variant("t", threads=host.available_cores() + 1)), 0)
    assert "memory" in cannot_be_tried(suggest(FUSED, peak_memory_bytes=2**40), 2**30)
    assert cannot_be_tried(Suggestion(FUSED, DOES_NOT_APPLY, "why"), 0) == "why"
    assert "libnonesuch" in AllocatorSetting("n", "LD_PRELOAD=libnonesuch.so.4").missing
    monkeypatch.setattr("platform.libc_ver", lambda: ("musl", "1"))
    assert "glibc" in cannot_be_tried(suggest(Variant("m", malloc="tuned")), 0)


def test_a_baseline_runs_under_the_default_malloc(monkeypatch):
    monkeypatch.setattr("os.environ", dict(MALLOC_VARIABLES))
    assert settings_in(MALLOC_VARIABLES) == ("MALLOC_MMAP_MAX_", "LD_PRELOAD")
    assert settings_in({"LD_PRELOAD": "libother.so"}) == ()
    assert environment_under(None) == {"PATH_TO": "x"}
    tuned = environment_under("tuned")
    assert (tuned["MALLOC_MMAP_MAX_"], tuned["PATH_TO"]) == ("0", "x")
    assert int(tuned["MALLOC_TRIM_THRESHOLD_"]) == 2**32
    assert AllocatorSetting("j", "LD_PRELOAD=libjemalloc.so.2").environment == {
        "LD_PRELOAD": "libjemalloc.so.2"
    }

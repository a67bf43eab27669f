"""The live forecast on a scripted sequence of steps, loader waits, validation pauses and epochs,
with a clock held in the hand.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest

from dlperf.core.clock import Clock
from dlperf.runner.epoch_log import EpochLog
from dlperf.runner.eta import Progress, describe, estimate_eta
from dlperf.runner.eta_report import eta_lines, eta_to_json
from dlperf.runner.live_eta import LiveEta, RoundLength
from dlperf.runner.loops import enclosing_loops
from dlperf.runner.step_rate import (
    ObservedStep,
    Rate,
    StepBlock,
    pooled_rate,
    rate_of,
    typical_s,
)


class Line:
    """What would have stood on stderr."""

    def __init__(self, is_terminal: bool = False) -> None:
        self.shown: list[str] = []
        self.is_terminal = is_terminal

    def show(self, text: str) -> None:
        self.shown.append(text)

    def close(self) -> None:
        pass


class Loader:
    """A loader of some batches of four, seen through what the log asks of it."""

    def __init__(self, n_batches: int | None, n_samples: int | None = None) -> None:
        self.n_batches, self.batch_size = n_batches, 4
        self.sampler = range(n_samples if n_samples is not None else 4 * (n_batches or 0))

    def __len__(self) -> int:
        if self.n_batches is None:
            raise TypeError("no length")
        return self.n_batches


class Pass:
    """A loader's iterator."""

    def __init__(self) -> None:
        self._num_yielded = 0


class Run:
    """A training whose time passes as the test says."""

    def __init__(
        self, n_epochs: int | None = None, line: Line | None = None, n_steps: int | None = None
    ) -> None:
        self.now = 100.0
        self.line = line or Line()
        clock = Clock(now=lambda: self.now)
        self.log = EpochLog(clock)
        self.live = LiveEta(self.log, clock, self.line, n_epochs, n_steps)  # type: ignore[arg-type]
        self.iterator = Pass()

    def loader(self, loader: Loader) -> None:
        self.iterator = Pass()
        self.log.begin(loader, self.iterator, self.now)

    def step(self, seconds: float, n: int = 1) -> None:
        for _ in range(n):
            self.now += seconds
            self.iterator._num_yielded += 1
            self.log.count(self.now)

    def watch(
        self, steps: list[ObservedStep], n_before: int = 11, slow_s: float = 3.0, passes: int = 1
    ) -> None:
        """`n_before` slow steps, then those that were watched; the forecast is made with the last
        of them.
        """
        self.step(slow_s, n_before)
        for step in steps[:-1]:
            self.step(step.interval_s)
        self.live.begin(steps, passes)
        self.step(steps[-1].interval_s)


# -- the pace --------------------------------------------------------------------------------------


def test_pace_is_a_mean_without_outliers() -> None:
    rate = rate_of([ObservedStep(s) for s in (1.0, 3.0, 1.0, 3.0, 100.0)])
    assert rate is not None
    assert (rate.step_s, rate.n) == (
        2.0,
        4,
    )  # (1 + 3 + 1 + 3) / 4; 100 is beyond twice the 75th percentile, 3
    # stdev of 1, 3, 1, 3 is sqrt(4/3); its standard error half of that
    assert rate.high_s - rate.step_s == pytest.approx(1.645 * math.sqrt(4 / 3) / 2)
    assert rate.step_s - rate.low_s == pytest.approx(rate.high_s - rate.step_s)
    assert rate_of([]) is None
    assert typical_s([]) is None


def test_doubt_widens_the_interval() -> None:
    rate = rate_of([ObservedStep(2.0)] * 4, doubt_frac=0.25)
    assert rate == Rate(2.0, 1.5, 2.5, 4)  # no spread; 25 % to either side


def seen(
    interval_s: float, waiting_s: float, n_loaded: int, idle: bool = False, n_workers: int = 1
) -> ObservedStep:
    return ObservedStep(
        interval_s, waiting_s, n_loaded, idle, n_workers, 1 - waiting_s / interval_s
    )


def test_batches_made_ahead_do_not_pass_for_the_pace_of_the_loader() -> None:
    """A worker has made four batches ahead, and makes one every 1.5 s; the steps take 1 s as long
    as that store lasts.
    """
    steps = [seen(1.0, 0.0, 4, idle=True)] + [seen(1.0, 0.0, 4 + n) for n in (1, 1, 2, 3, 3, 4)]
    rate = rate_of(steps)
    assert rate is not None
    assert rate.by_loader
    # least squares through 0, 1, 1, 2, 3, 3, 4 at 0 ... 6 s: sum (t - 3)(y - 2) / sum (t - 3)^2 =
    # 18 / 28 batches a second
    assert rate.step_s == rate.floor_s == pytest.approx(28 / 18)
    off = 1.645 / math.sqrt(12 * 28) / (18 / 28)
    assert (rate.low_s, rate.high_s) == (
        pytest.approx(28 / 18 / (1 + off)),
        pytest.approx(28 / 18 / (1 - off)),
    )
    twice = rate_of(
        [seen(1.0, 0.0, 4, idle=True)] + [seen(1.0, 0.0, 4 + n) for n in (1, 3, 5, 6, 8, 9)],
        passes=2,
    )
    assert twice is not None
    assert twice.step_s == pytest.approx(
        2 / (44 / 28)
    )  # sum (t - 3)(y - mean) of 0, 1, 3, 5, 6, 8, 9 is 44


def test_a_store_that_holds_leaves_the_pace_to_the_steps() -> None:
    idle = [seen(1.0, 0.0, 4 + n, idle=True) for n in range(8)]
    assert rate_of(idle) == Rate(1.0, 1.0, 1.0, 8)
    one_less = [seen(1.0, 0.0, 4, idle=True)] + [seen(1.0, 0.0, 4 + n) for n in (1, 2, 3, 3)]
    # 0.8 +- 1.645 / sqrt(12 * 10) batches a step: that they are fewer than 1 may be chance, so only
    # the upper end says it
    assert rate_of(one_less) == Rate(1.0, 1.0, pytest.approx(1 / (0.8 - 1.645 / math.sqrt(120))), 5)
    waiting = [seen(1.5, 0.5, 4 + n) for n in range(5)]
    assert rate_of(waiting) == Rate(
        1.5, 1.5, 1.5, 5, busy_frac=pytest.approx(2 / 3), floor_s=1.5
    )  # taken as they are made: the loader's already


def test_batches_that_come_several_at_once_count_with_their_wait() -> None:
    """Four workers end together every 8 s: a wait of 4 s, and four steps of 1 s. After the first
    wait two whole rounds of four count.
    """
    steps = [
        seen(5.0 if n % 4 == 1 else 1.0, 4.0 if n % 4 == 1 else 0.0, 4 * (n // 4 + 1), n_workers=4)
        for n in range(12)
    ]
    rate = rate_of(steps)
    assert rate is not None
    assert (rate.step_s, rate.floor_s, rate.busy_frac) == (2.0, 2.0, 0.5)
    assert rate.high_s == pytest.approx(2.0 * (1 + 1.645 / math.sqrt(12) / 2))  # two stairs


# -- ahead -----------------------------------------------------------------------------------------


def past(**changes: Any) -> Progress:
    return Progress(
        **{
            "now_s": 50.0,
            "after_steps": 20,
            "running_s": 50.0,
            "n_running": 20,
            "steps": 100.0,
            "n_epochs": 3,
            **changes,
        }
    )


def test_epoch_is_what_passed_and_the_steps_to_come() -> None:
    outlook = estimate_eta(past(), Rate(2.0, 1.0, 4.0, 8))
    assert (outlook.epoch_s, outlook.low_s, outlook.high_s) == (50 + 80 * 2, 50 + 80, 50 + 80 * 4)
    assert outlook.run_s == 210 + 2 * 100 * 2  # two further epochs of 100 steps
    assert (outlook.run_low_s, outlook.run_high_s) == (50 + 80 + 200, 50 + 320 + 800)
    assert (outlook.left_s, outlook.pause_s) == (160 + 400, None)


def test_pauses_and_starts_come_in_once_they_were_seen() -> None:
    second = past(now_s=300.0, running_s=40.0, epochs_s=(230.0,), pauses_s=(30.0,), starts_s=(5.0,))
    outlook = estimate_eta(second, Rate(2.0, 2.0, 2.0, 8))
    assert outlook.number == 2
    # 300 passed; 80 steps and a pause; one epoch more: 5 to its first step, 99 steps, a pause
    assert outlook.run_s == 300 + 80 * 2 + 30 + (5 + 99 * 2 + 30)
    assert outlook.epoch_s == 40 + 80 * 2


def test_what_cannot_be_told_is_none() -> None:
    no_length = estimate_eta(past(steps=None), Rate(2.0, 2.0, 2.0, 8))
    assert (no_length.epoch_s, no_length.run_s, no_length.left_s) == (None, None, None)
    assert "0.5 steps/s" in describe(no_length)
    assert "no length" in describe(no_length)
    no_number = estimate_eta(past(n_epochs=None), Rate(2.0, 2.0, 2.0, 8))
    assert (no_number.run_s, no_number.left_s) == (None, 160)
    assert "--epochs" in describe(no_number)


def test_pooling_weighs_steps_alike_and_the_first_forecast_as_two_stretches_at_first() -> None:
    first = Rate(1.0, 0.9, 1.1, 8)
    assert pooled_rate(first, []) is first
    assert pooled_rate(first, [StepBlock(44.0, 22)]).step_s == (38.5 * 1 + 44) / (
        38.5 + 22
    )  # 2 - 1/4 stretches of 22 steps
    assert (
        pooled_rate(first, [StepBlock(4.0, 2)]).step_s == (8 * 1 + 4) / 10
    )  # its own eight steps are more than that
    assert pooled_rate(first, [StepBlock(44.0, 22)] * 8).step_s == pytest.approx(
        (8 * 1 + 352) / (8 + 176)
    )
    by_loader = Rate(1.0, 0.9, 1.1, 8, by_loader=True)
    assert pooled_rate(by_loader, [StepBlock(4.0, 2)]).step_s == (6 * 1 + 4) / 8
    assert pooled_rate(by_loader, [StepBlock(44.0, 22)]).step_s == 2.0


def test_the_interval_comes_from_the_spread_between_stretches() -> None:
    sure = Rate(1.0, 1.0, 1.0, 8)
    even = pooled_rate(sure, [StepBlock(10.0, 10)] * 4)
    assert (even.low_s, even.high_s) == (1.0, 1.0)  # four stretches alike
    quiet, contended = (
        [StepBlock(10.0 * (1 + swing * (-1) ** (index // of)), 10) for index in range(32)]
        for swing, of in ((0.01, 1), (0.2, 4))
    )
    widths = [
        (rate.high_s - rate.low_s) / 2
        for rate in (pooled_rate(sure, series) for series in (quiet, contended))
    ]
    # alternating stretches are negatively correlated, which counts as 0: 1 % (32/34 of it: three
    # degrees of freedom are a prior's) / sqrt(32), t(34) = 1.69
    assert widths[0] == pytest.approx(0.01 * math.sqrt(32 / 34) / math.sqrt(32) * 1.691, rel=0.02)
    assert widths[1] > 3 * 0.2 / math.sqrt(
        32
    )  # those of four stretches alike are eight pieces of evidence, not 32
    soon = pooled_rate(sure, contended, left_s=10.0)
    assert (
        soon.high_s - soon.low_s
    ) / 2 > 1.69 * 0.19  # a single stretch to come is as uncertain as any


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_of_epochs_with_validation() -> None:
    run = Run(n_epochs=3)
    run.loader(Loader(100))
    run.watch([ObservedStep(1.0)] * 8)
    first = run.live.first
    assert first is not None
    # 11 slow steps of 3 s, 8 of 1 s, 81 to come
    assert (first.after_steps, first.epoch_s, first.run_s) == (19, 33 + 8 + 81, 122 + 2 * 100)
    run.step(1.0, 81)
    half = run.live.half
    assert half is not None
    assert half.n_running == 50
    for _ in range(2):
        run.loader(Loader(7))  # validation: no step
        run.now += 20
        run.loader(Loader(100))
        run.step(1.0, 100)
    run.now += 20
    run.live.finish()
    assert run.live.epoch.error_frac == 0.0
    assert run.live.epoch_at_half.error_frac == 0.0
    assert run.live.training.to_json() == {"predicted_s": 322, "measured_s": 322, "error_frac": 0.0}
    with_pause = run.live.with_pause
    assert with_pause is not None
    # renewed by the second epoch's first step: 122 + 20 + 1 passed, 99 steps and 100, and a pause
    # after each
    assert with_pause.run_s == 143 + 99 + 100 + 2 * 20
    assert run.live.run.error_frac == 0.0  # 382 s to the end, the last validation included
    assert "error_frac" in eta_to_json(run.live)
    assert run.line.shown[0].startswith("dlperf: epoch 1 of 3: step 19 of 100, ")
    assert "without validation" in run.line.shown[0]
    assert len(run.line.shown) < 12  # a few plain lines for 322 s


def test_a_terminal_is_renewed_at_most_once_a_second() -> None:
    run = Run(n_epochs=1, line=Line(is_terminal=True))
    run.loader(Loader(1000))
    run.watch([ObservedStep(0.125)] * 8, slow_s=0.125)
    run.step(0.125, 80)  # ten seconds
    assert 9 <= len(run.line.shown) <= 11


def test_it_gets_better_while_it_goes_on() -> None:
    """WatchedTraining in a bad moment: twice as slow as all that follows."""
    run = Run()
    run.loader(Loader(500))
    run.watch([ObservedStep(2.0)] * 8, slow_s=2.0)
    run.step(1.0, 481)
    run.live.finish()
    measured_s = 19 * 2 + 481
    assert run.live.epoch.error_frac == pytest.approx((38 + 481 * 2) / measured_s - 1)
    # half way: 38 + 231 passed; the mean of 8 steps of 2 s and 231 of 1 s for the other 250
    assert run.live.epoch_at_half.error_frac == pytest.approx(
        (38 + 231 + 250 * (16 + 231) / 239) / measured_s - 1
    )


def test_accumulation_and_a_smaller_last_batch() -> None:
    run = Run()
    run.loader(Loader(100, n_samples=398))  # 99.5 batches
    run.watch([ObservedStep(4.0)] * 8, slow_s=4.0, passes=4)
    assert run.live.first is not None
    assert run.live.first.steps == 99.5 / 4
    assert run.live.first.epoch_s == 19 * 4 + (99.5 / 4 - 19) * 4


def test_a_loop_that_breaks_is_known_after_its_first_epoch() -> None:
    run = Run(n_epochs=2)
    run.loader(Loader(100))
    run.watch([ObservedStep(1.0)] * 8, slow_s=1.0)
    run.step(1.0, 41)  # breaks after 60 steps
    run.loader(Loader(100))
    run.step(1.0, 60)
    run.live.finish()
    assert run.live.with_pause is not None
    assert run.live.with_pause.epoch_s == 60
    assert run.live.run.error_frac == 0.0
    assert run.live.epoch.to_json()["measured_s"] == 60


def test_validation_within_an_epoch_does_not_end_it() -> None:
    run = Run()
    run.loader(Loader(100))
    run.watch([ObservedStep(1.0)] * 8, slow_s=1.0)
    training = run.iterator
    run.loader(Loader(7))
    run.now += 10
    run.iterator = training
    run.step(1.0, 81)
    run.live.finish()
    (epoch,) = run.log.epochs
    assert (epoch.n_steps, epoch.seconds) == (100, 110)
    assert run.live.epoch.measured_s == 110


def test_without_length_per_step_and_after_an_epoch_by_its_steps() -> None:
    run = Run()
    run.loader(Loader(None))
    run.watch([ObservedStep(0.5)] * 8, slow_s=0.5)
    assert "2 steps/s" in run.line.shown[0]
    assert "no length" in run.line.shown[0]
    run.step(0.5, 21)
    run.loader(Loader(None))
    run.step(0.5, 4)
    assert run.live.history[-1].epoch_s == 20  # 40 steps, as the epoch before


def counted(run: Run, seconds: float = 1.0, forecast_at: int = 19) -> None:
    """A step of a loop that the test itself runs, so that its own loops are those around it."""
    if not run.log.n_steps:
        run.log.began = run.now
    run.now += seconds
    if run.log.n_steps == forecast_at - 1:
        run.live.begin([ObservedStep(seconds)] * 8, 1)
    run.log.count(run.now)


def test_a_plain_list_has_a_length() -> None:
    run, batches = Run(), [0] * 100
    for _epoch in range(3):
        for _ in enumerate(batches):
            counted(run)
        run.now += 10
    run.live.finish()
    first = run.live.first
    assert first is not None
    assert (first.steps, first.epoch_s) == (300, 300)  # without the pauses of 10 s, which nothing
    # tells beforehand
    assert run.live.epoch.measured_s == 320
    assert "run " in run.line.shown[0]


def test_what_has_no_length_is_known_after_its_first_round() -> None:
    run = Run()
    for _epoch in range(4):
        for _ in (0 for _ in range(60)):
            counted(run)
    run.live.finish()
    assert run.live.first is not None
    assert run.live.first.epoch_s is None
    later = run.live.history[-1]
    assert later.epoch_s == pytest.approx(240)
    by_sixty = next(
        outlook
        for outlook in run.live.history
        if outlook.after_steps >= 61 and outlook.epoch_s is not None
    )
    assert by_sixty.epoch_s == pytest.approx(240, abs=2)
    assert any("it took" in line for line in eta_lines(run.live))


def test_a_list_without_a_known_loop_around_it_is_as_long_as_the_user_says() -> None:
    run, batches = Run(n_epochs=2), [0] * 50
    for _epoch in iter((0, 1)):
        for _ in batches:
            counted(run)
    assert run.live.first is not None
    assert run.live.first.steps == 100
    unsaid = Run()
    for _epoch in iter((0, 1)):
        for _ in batches:
            counted(unsaid)
    assert unsaid.live.first is not None
    assert unsaid.live.first.steps is None


def test_rounds_that_differ_go_by_the_latest() -> None:
    rounds = RoundLength(100.0)
    assert rounds.steps(0, 60) == 100
    assert rounds.steps(1, 61) == 45.25  # it ended after 60 at most: between 61 / 2 and 60
    assert rounds.steps(2, 160) == pytest.approx((160 / 3 + 60) / 2)


def test_a_run_that_ends_before_the_users_steps_says_so() -> None:
    run = Run(n_steps=500)
    run.watch([ObservedStep(1.0)] * 8)
    run.step(1.0, 170)
    assert not any("the run ended" in line for line in eta_lines(run.live))  # it goes on
    run.live.finish()
    n_steps = run.live.n_steps
    assert 170 <= n_steps < 500
    assert eta_lines(run.live)[0].endswith(f"; the run ended after {n_steps} of 500 steps")


def test_an_interrupted_run_keeps_its_forecast() -> None:
    run = Run(n_epochs=2)
    run.loader(Loader(100))
    run.watch([ObservedStep(1.0)] * 8, slow_s=1.0)
    run.step(1.0, 10)
    run.live.finish()
    assert run.live.epoch.to_json() == {"predicted_s": 100, "measured_s": None, "error_frac": None}
    assert any("not finished" in line for line in eta_lines(run.live))


def test_what_is_left_out_is_in_no_epoch_and_no_pause() -> None:
    run = Run()
    run.loader(Loader(3))
    run.step(1.0, 3)
    run.now += 2.0
    run.loader(Loader(3))
    run.step(1.0, 2)
    run.now += 50.0
    run.log.leave_out(50.0)
    run.step(1.0)
    first, second = run.log.epochs
    assert (first.seconds, second.seconds) == (3.0, 3.0)
    assert second.began - first.ended == 2.0
    # from the end of the first step: 2 more, the pause, 3 steps
    assert run.log.whole.seconds == 7.0


def test_history_stays_small() -> None:
    run = Run()
    run.loader(Loader(10_000))
    run.watch([ObservedStep(2.0)] * 8, slow_s=2.0)
    run.step(2.0, 5000)
    assert 16 <= len(run.live.history) <= 64
    assert run.live.history[-1].epoch_s == 20_000


@pytest.mark.parametrize("broken", ["_eta", "_show", "_add_block"])
def test_a_failure_inside_ends_the_forecast_alone(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("ours")

    run = Run()
    monkeypatch.setattr(run.live, broken, fail)
    run.loader(Loader(100))
    run.watch([ObservedStep(1.0)] * 8)
    run.step(1.0, 81)
    assert isinstance(run.live.error, ZeroDivisionError)
    assert run.log.n_steps == 100


# -- loops -----------------------------------------------------------------------------------------


def in_file(tmp_path: Any, source: str) -> Callable[..., Any]:
    path = tmp_path / "script.py"
    path.write_text(source)
    names: dict[str, Any] = {}
    exec(compile(source, str(path), "exec"), names)
    return names["train"]  # type: ignore[no-any-return]


LOOPS = [
    ("for epoch in range(5):\n  if epoch == 2: return look()", [(2, 5, True)]),
    (
        "for epoch in range(3, a.epochs + 1):\n  if epoch == 4: out.append(look())\nreturn out[0]",
        [(1, 5, False)],
    ),
    (
        (
            "for fold in range(2):\n  for epoch in tqdm(range(c['epochs'])):\n    for x in [1]:"
            " out.append(look())\nreturn out[3]"
        ),
        [(0, 3, False), (1, 2, False)],
    ),
    (
        (
            "for epoch in range(5):\n  m.eval()\n  for x in [1]:\n    out.append(look())\n   "
            " break\nreturn out[1]"
        ),
        [(1, 5, False)],
    ),
    ("for epoch in range(own()):\n  return look()", []),
    ("for epoch in range(a.asked):\n  found = look()\n  assert a.n_asked == 1\n  return found", []),
    ("for epoch in range(5):\n  epoch = 7\n  return look()", []),
    (  # before 3.13 a look at the frame's names would change what the program keeps
        "kept = locals()\nfor epoch in range(5):\n  return look()",
        [(0, 5, True)] if sys.version_info >= (3, 13) else [],
    ),
    (
        "def again(): return look()\nfor epoch in range(4):\n  out.append(again())\nreturn out[3]",
        [(3, 4, False)],
    ),
    ("while True:\n  return look()", []),
]


@pytest.mark.parametrize(("body", "expected"), LOOPS)
def test_loops_around_a_frame(
    tmp_path: Any, body: str, expected: list[tuple[int, int, bool]]
) -> None:
    indented = "\n".join("    " + line for line in body.splitlines())
    head = (
        "class A:\n    epochs, n_asked = 7, 0\n    @property\n    def asked(self):\n       "
        " self.n_asked += 1\n        return 5\nclass M:\n    def eval(self): pass\ndef tqdm(it):"
        " return it\ndef own(): return 5\n"
    )
    train = in_file(
        tmp_path,
        f"{head}def train(look, a=A(), m=M(), c={{'epochs': 3}}):\n    out = []\n{indented}\n",
    )
    found = train(lambda: enclosing_loops(sys._getframe(1)))
    assert [(loop.index, loop.length, loop.may_end_early) for loop in found] == expected


def test_the_frames_objects_are_not_kept(tmp_path: Any) -> None:
    """A snapshot of a function's names must not keep alive what the function deletes."""
    source = (
        "import weakref\nclass Big: pass\ndef train(look):\n    big = Big()\n    there ="
        " weakref.ref(big)\n    for epoch in range(3):\n        look()\n        big = None\n       "
        " return there()\n"
    )
    train = in_file(tmp_path, source)
    found = []
    assert train(lambda: found.append(enclosing_loops(sys._getframe(1)))) is None
    assert found[0][0].length == 3


@pytest.mark.parametrize("has_loader", [False, True])
def test_the_user_may_tell_the_number_of_steps(has_loader: bool) -> None:
    """200 steps of 2 s, of which 11 slow ones and 8 watched ones are over."""
    run = Run(n_steps=200)
    if has_loader:  # which says nothing: the loop takes batches from it again and again
        run.loader(Loader(30))
    run.watch([ObservedStep(2.0, 0.0)] * 8)
    first = run.live.first
    assert first is not None
    assert first.left_s == pytest.approx((200 - 19) * 2.0, rel=0.02)
    assert "step 19 of 200" in run.line.shown[-1]
    assert "run " in run.line.shown[-1]

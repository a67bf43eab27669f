"""The period of the program that runs now: its phases, passes and optimizer steps, in seconds."""

from __future__ import annotations

from typing import Any

from dlperf.core.clock import Clock
from dlperf.recorder.compiled_recording import CompiledRecording
from dlperf.recorder.live_recording import OUTSIDE, LiveRecording
from dlperf.runner.disturbance import SystemReadings
from dlperf.runner.watched_training import WatchedStep


class RunningPeriod:
    """The running period, and the recording that follows its phases, if one does.

    `step`: its times so far. `phase`: the one that runs. `stepper`: the optimizer that steps.
    `in_pass`: a forward began and no optimizer stepped since; `had_backward`: its backward ended.
    `is_spoilt`: something else than training lay in it. `last_end`: the end of the period before.
    """

    def __init__(self, clock: Clock) -> None:
        self.step = WatchedStep()
        self.phase = OUTSIDE
        self.stepper: Any = None
        self.in_pass = self.had_backward = self.is_spoilt = False
        self.last_end: float | None = None
        self.recording: LiveRecording | CompiledRecording | None = None
        self._clock, self._since = clock, 0.0
        self._after_pass = OUTSIDE
        self._stepper_s = 0.0
        self._system = SystemReadings()

    def forget(self) -> None:
        """The program's rhythm has changed: a new search begins."""
        self.last_end = self.stepper = None
        self.step, self.in_pass = WatchedStep(), False

    def begin_first(self, clock: Clock, is_by_hand: bool) -> None:
        """A training was found; `is_by_hand`: parameters are updated without optimizers."""
        self._clock = clock
        self._after_pass = "optimizer" if is_by_hand else OUTSIDE
        self.phase, self._since = OUTSIDE, clock.now()
        self.step.lap("", clock)

    def enter(self, phase: str) -> str:
        """A phase begins; returns the one that it interrupts or follows."""
        now, before = self._clock.now(), self.phase
        self.step.add(before, now - self._since)
        self.step.lap(before, self._clock)
        self.phase, self._since = phase, now
        if self.recording is not None:
            self.recording.enter(OUTSIDE if phase == "loading" else phase)
        return before

    def stop_recording(self) -> bool:
        """End the recording, if one runs; False where that has to wait."""
        if self.recording is None or self.recording.stop():
            self.recording = None
            return True
        return False

    # -- passes and optimizer steps ----------------------------------------------------------------

    def await_pass(self, is_by_hand: bool) -> None:
        """A pass is about to begin."""
        self.end_pass()
        self._after_pass = "optimizer" if is_by_hand else self.phase

    def begin_pass(self) -> None:
        """A forward begins."""
        self.in_pass, self.had_backward = True, False
        self.step.n_passes += 1
        self.enter("forward")
        if self.step.began is None:
            self.step.began = self._since

    def end_backward(self) -> None:
        """The backward of a pass has ended."""
        self.had_backward = True
        self.enter(self._after_pass)

    def end_pass(self) -> None:
        """No pass runs any more."""
        self.in_pass = self.had_backward = False

    def begin_optimizer(self) -> None:
        """The optimizer `stepper` begins its step."""
        self.end_pass()
        self.enter("optimizer")
        self._stepper_s = self.step.optimizer_s

    def end_optimizer(self, optimizer: Any) -> None:
        """An optimizer has ended its step."""
        self.end_pass()
        self.enter(OUTSIDE)
        taken = self.step.by_optimizer
        own_s = self.step.optimizer_s - self._stepper_s
        taken[id(optimizer)] = taken.get(id(optimizer), 0.0) + own_s

    # -- its end -----------------------------------------------------------------------------------

    def end(self, now: float) -> WatchedStep:
        """The period ends; its times."""
        self.step.lap(self.phase, self._clock)
        self._system.end(self.step, self._clock)
        if self.last_end is not None and not self.is_spoilt:
            self.step.interval_s = now - self.last_end
        return self.step

    def begin_next(self) -> None:
        """The next period begins; what passed since the last one's end is in neither."""
        self.step, self.is_spoilt = WatchedStep(), False
        self._system.begin(self._clock)
        self._since = self.last_end = self._clock.now()
        self.step.lap("", self._clock)

"""The forecast while the run goes on: one line on stderr, and what became of it.

Made after the watched steps, then renewed by the first step that ends a second after the last time;
between, the training pays for a counter and a comparison alone. Whatever fails here is remembered,
ends the forecast, and never reaches the program.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from dlperf.core.clock import Clock
from dlperf.core.streams import write_err
from dlperf.core.text import visible
from dlperf.core.units import format_seconds
from dlperf.runner.core_speed import CoreState
from dlperf.runner.epoch_log import EpochLog, EpochTimes
from dlperf.runner.eta import (
    Eta,
    ObservedStep,
    Progress,
    Rate,
    StepBlock,
    estimate_eta,
    pooled_rate,
    rate_of,
)
from dlperf.runner.loops import RunningLoop, enclosing_loops, innermost_length

_RENEW_S = 1.0
_LINE_S = 10.0
_MOST = 64
"""Stretches and points of history kept; more are thinned to half, each then twice as long."""


class StderrLine:
    """A line that renews itself on a terminal; elsewhere a few plain ones. Its failures (a closed
    stream) are its caller's.
    """

    def __init__(self) -> None:
        self._open = False

    @property
    def is_terminal(self) -> bool:
        """Whether lines can be renewed."""
        return (
            sys.stderr is not None
            and sys.stderr.isatty()
            and os.environ.get("TERM", "dumb") != "dumb"
        )

    def show(self, text: str) -> None:
        """The line as it is now."""
        if self.is_terminal:
            text = visible(text)
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write(f"\r\x1b[K{text[: max(1, width - 3)]}  ")
            sys.stderr.flush()
            self._open = True
        else:
            write_err(text)

    def close(self) -> None:
        """What comes next stands on a line of its own."""
        if self._open:
            self._open = False
            sys.stderr.write("\n")
            sys.stderr.flush()


@dataclass(frozen=True)
class EtaResult:
    """A forecast beside what happened: seconds that it said and that it took, None where it was not
    to be seen.
    """

    predicted_s: float | None
    measured_s: float | None

    @property
    def error_frac(self) -> float | None:
        """said / real - 1."""
        return (
            self.predicted_s / self.measured_s - 1
            if self.predicted_s is not None and self.measured_s
            else None
        )

    def to_json(self) -> dict[str, float | None]:
        """The comparison as JSON data."""
        return {
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "error_frac": self.error_frac,
        }


class LiveEta:
    """The forecast of one run, made from an :class:`EpochLog`. `n_epochs`: as the user said; None:
    to be found in the program's loops.

    `line` shows it (None: it is kept and not shown).
    """

    def __init__(
        self,
        log: EpochLog,
        clock: Clock = Clock(),
        line: StderrLine | None = None,
        n_epochs: int | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.first: Eta | None = None
        self.half: Eta | None = None
        self.with_pause: Eta | None = None
        self.history: list[Eta] = []
        self.notes: list[str] = []
        self.ended: float | None = None
        self.is_epoch = True
        self.moment = CoreState()
        self._log, self._clock, self._line = log, clock, line
        self._n_epochs, self._epochs_before = n_epochs, 0
        self._said_by_user = n_epochs is not None
        self._loops_of: dict[int, tuple[RunningLoop, ...]] = {}
        self._rate: Rate | None = None
        self._passes = 1
        self._name = ""
        self._n_first = 0
        self._steps_of_run: float | None = None
        self._rounds: RoundLength | None = None
        self._unsure = 0.0
        self._stretches: list[StepBlock] = []
        self._mark: tuple[EpochTimes | None, float, int] = (None, 0.0, 0)
        self._next_line = 0.0
        self._pid = os.getpid()
        log.on_pass = self._look_for_loops

    # -- when it is called -------------------------------------------------------------------------

    def begin(
        self,
        steps: Sequence[ObservedStep],
        passes: int,
        name: str = "",
        moment: Callable[[], CoreState] = CoreState,
    ) -> None:
        """The watching is over: forecast as soon as the step that runs has been counted. `moment`:
        how slow the core was meanwhile.
        """

        def start() -> None:
            self._passes, self._name = passes, name
            self.moment = moment()
            self._rate = rate_of(steps, passes, self.moment.half_frac)
            if self._rate is not None:
                self._log.call_at(-math.inf, lambda at: self._safely(lambda: self._start(at)))

        self._safely(start)

    def finish(self, at: float | None = None) -> None:
        """The program has ended; nothing happens the second time."""
        if self.ended is None:
            self.ended = self._clock.now() if at is None else at
            self._safely(self._stop)

    def _safely(self, action: Callable[[], None]) -> None:
        if self.error is not None or os.getpid() != self._pid:
            return
        try:
            action()
        except Exception as error:  # nothing of ours may reach the program
            self.error = error
            self._log.call_at(math.inf, None)
            self._log.on_pass = None

    def _stop(self) -> None:
        self._log.call_at(math.inf, None)
        self._log.on_pass = None
        if self._line is not None:
            self._line.close()

    def _look_for_loops(self, epoch: EpochTimes, frame: FrameType) -> None:
        self._safely(lambda: self._loops_of.update({id(epoch): enclosing_loops(frame)}))

    # -- the forecast ------------------------------------------------------------------------------

    def _start(self, at: float) -> None:
        epochs = self._epochs()
        current = epochs[-1]
        loops = self._loops_of.get(id(current), ())
        self._log.on_pass, self._loops_of = None, {}
        self.is_epoch = current.n_batches is not None or bool(self._log.epochs)
        if self.is_epoch:
            self._count_epochs(loops, len(epochs) - 1)
        else:
            self._count_steps(enclosing_loops(sys._getframe()), innermost_length(sys._getframe()))
        self._n_first = len(epochs) - 1
        self.first = self._outlook(at)
        self.history.append(self.first)
        now = self._clock.now()
        self._mark = (current, now, current.n_steps)
        self._show(self.first, at, first=True)
        self._again(now)

    def _renew(self, at: float) -> None:
        if self._rounds is not None:
            self._count_rounds(enclosing_loops(sys._getframe()))
        self._add_stretch(at)
        outlook = self._outlook(at)
        if (
            self.half is None
            and outlook.steps
            and len(self._epochs()) - 1 == self._n_first
            and outlook.n_running >= outlook.steps / 2
        ):
            self.half = outlook
        learnt = outlook.pause_s is not None and self.with_pause is None
        if learnt:
            self.with_pause = outlook
        self.history = _thinned([*self.history, outlook], lambda earlier, later: later)
        self._show(outlook, at, first=learnt)
        self._again(self._clock.now())

    def _again(self, at: float) -> None:
        self._log.call_at(at + _RENEW_S, lambda then: self._safely(lambda: self._renew(then)))

    def _epochs(self) -> list[EpochTimes]:
        """Passes that trained; without any loader the whole run, from its first step on."""
        log = self._log
        if log.epochs:
            return log.epochs
        first, last = log.first_step or 0.0, log.last_step or 0.0
        return [EpochTimes(None, first, last, max(0, log.n_steps - 1), first)]

    def _count_epochs(self, loops: Sequence[RunningLoop], n_finished: int) -> None:
        """How many passes the loops around this one make, and which this one is; a loop further out
        that may end early is not counted.
        """
        if self._n_epochs is not None or not loops:
            return
        index, length = _place(loops)
        if index >= n_finished:
            self._n_epochs, self._epochs_before = length, index - n_finished
            if loops[0].may_end_early:
                self.notes.append(
                    f"the loop over {loops[0].length} epochs may end early; the forecast is for all"
                    " of them"
                )

    def _count_steps(self, loops: Sequence[RunningLoop], n_batches: int | None) -> None:
        """No loader: the loops around the step count steps or passes, if the innermost is as far as
        the steps are, or goes over `n_batches`.
        """
        n_steps, passes = self._log.n_steps, self._passes
        if loops and loops[0].index + 1 in (n_steps, n_steps * passes):
            per_round = n_steps / (loops[0].index + 1)
            self._steps_of_run = per_round * math.prod(
                loop.length for loop in loops if loop is loops[0] or not loop.may_end_early
            )
            return
        self._rounds = RoundLength(
            n_batches / passes if n_batches and (loops or self._n_epochs) else None
        )
        self._count_rounds(loops)

    def _count_rounds(self, loops: Sequence[RunningLoop]) -> None:
        """The run's steps by those of a round of the loops around them, known beforehand or once a
        round was seen.
        """
        if self._rounds is None:
            return
        index, length = _place(loops) if loops else (None, self._n_epochs or 1)
        steps = self._rounds.steps(index, self._log.n_steps)
        self._steps_of_run = None if steps is None else steps * length
        self._unsure = self._rounds.unsure * length

    def _steps(self, epochs: Sequence[EpochTimes]) -> float | None:
        """Steps of an epoch: of the last one where it made others than its loader's length says (a
        loop that breaks), else by that length.
        """
        if not self.is_epoch:
            return None if self._steps_of_run is None else self._steps_of_run - 1
        current = epochs[-1]
        planned = None if current.worth is None else current.worth / self._passes
        if len(epochs) > 1 and (planned is None or abs(epochs[-2].n_steps - planned) > 1):
            planned = float(epochs[-2].n_steps)
        return planned

    def _outlook(self, at: float) -> Eta:
        assert self._rate is not None
        epochs = self._epochs()
        current = epochs[-1]
        past = Progress(
            now_s=at - epochs[0].began,
            after_steps=self._log.n_steps,
            running_s=at - current.began,
            n_running=current.n_steps,
            steps=self._steps(epochs),
            n_epochs=self._n_epochs if self.is_epoch else None,
            epochs_s=tuple(epoch.seconds for epoch in epochs[:-1]),
            pauses_s=tuple(
                after.began - before.ended for before, after in itertools.pairwise(epochs)
            ),
            starts_s=tuple(
                epoch.first - epoch.began for epoch in epochs[1:] if epoch.first is not None
            ),
            epochs_before=self._epochs_before,
        )
        left_s = math.inf if past.steps_left is None else past.steps_left * self._rate.step_s
        return estimate_eta(
            past,
            pooled_rate(self._rate.on_core(self.moment.factor(left_s)), self._stretches, left_s),
        )

    def _add_stretch(self, at: float) -> None:
        """What the counter saw since the last time, without the pauses between epochs and the
        starts of loaders.
        """
        epochs = self._epochs()
        marked, since, n_before = self._mark
        place = (
            next((i for i, epoch in enumerate(epochs) if epoch is marked), len(epochs) - 1)
            if self.is_epoch
            else 0
        )
        seconds, n = epochs[place].ended - since, epochs[place].n_steps - n_before
        for epoch in epochs[place + 1 :]:
            if epoch.first is not None:
                seconds, n = seconds + epoch.ended - epoch.first, n + epoch.n_steps - 1
        if n > 0 and seconds > 0:
            self._stretches = _thinned(
                [*self._stretches, StepBlock(seconds, n)],
                lambda a, b: StepBlock(a.seconds + b.seconds, a.n + b.n),
            )
        self._mark = (epochs[-1], at, epochs[-1].n_steps)

    # -- what is said ------------------------------------------------------------------------------

    def _show(self, outlook: Eta, at: float, first: bool) -> None:
        if self._line is None:
            return
        if self._line.is_terminal:
            self._line.show(f"dlperf: {describe(outlook, self.is_epoch)}")
        elif first or at >= self._next_line:
            self._line.show(
                "dlperf:"
                f" {self._name + ', ' if outlook is self.first and self._name else ''}{describe(outlook, self.is_epoch)}"
            )
            began = self._epochs()[0].began
            self._next_line = at + max(_LINE_S, at - began)

    # -- what became of it -------------------------------------------------------------------------

    def _is_finished(self, place: int) -> bool:
        epochs = self._epochs()
        if place >= len(epochs):
            return False
        steps = self._steps(epochs[: place + 1])
        return place < len(epochs) - 1 or (
            steps is not None and epochs[place].n_steps >= math.floor(steps - self._unsure)
        )

    @property
    def epoch(self) -> EtaResult:
        """The epoch, as forecast after the watched steps."""
        return self._epoch_verdict(self.first)

    @property
    def epoch_at_half(self) -> EtaResult:
        """The same epoch, as forecast half way."""
        return self._epoch_verdict(self.half)

    def _epoch_verdict(self, outlook: Eta | None) -> EtaResult:
        measured_s = (
            self._epochs()[self._n_first].seconds
            if self.first is not None and self._is_finished(self._n_first)
            else None
        )
        return EtaResult(None if outlook is None else outlook.epoch_s, measured_s)

    @property
    def _whole(self) -> bool:
        epochs = self._epochs()
        return (
            self._n_epochs is not None
            and len(epochs) + self._epochs_before == self._n_epochs
            and self._is_finished(len(epochs) - 1)
        )

    @property
    def training(self) -> EtaResult:
        """All epochs without the pauses between them, as forecast after the watched steps; real
        only where all were made.
        """
        epochs = self._epochs()
        predicted_s = (
            None
            if self.first is None or self.first.run_s is None
            else self.first.run_s - sum(self.first_pauses)
        )
        return EtaResult(
            predicted_s, sum(epoch.seconds for epoch in epochs) if self._whole else None
        )

    @property
    def first_pauses(self) -> Sequence[float]:
        """The pauses that stand in the forecast after the watched steps: where an epoch is shorter
        than these, some.
        """
        if self.first is None or self.first.pause_s is None or self.first.n_epochs is None:
            return ()
        return [self.first.pause_s] * (self.first.n_epochs - self._epochs_before)

    @property
    def run(self) -> EtaResult:
        """The whole run to the program's end, as forecast when the first pause between epochs had
        been seen.
        """
        measured_s = (
            self.ended - self._epochs()[0].began if self._whole and self.ended is not None else None
        )
        return EtaResult(None if self.with_pause is None else self.with_pause.run_s, measured_s)

    def to_json(self) -> dict[str, Any] | None:
        """The forecast and what became of it; None where none was made."""
        if self.first is None:
            return None
        first = self.first
        return {
            "after_steps": first.after_steps,
            "epoch_s": first.epoch_s,
            "low_s": first.low_s,
            "high_s": first.high_s,
            "step_s": first.step_s,
            "by_loader": first.by_loader,
            "slowed": self.moment.slowed,
            "usually_slowed": self.moment.usual,
            "epoch_measured_s": self.epoch.measured_s,
            "error_frac": self.epoch.error_frac,
            "n_epochs": self._n_epochs,
            "n_epochs_from_user": self._said_by_user,
            "half": (
                None
                if self.half is None
                else {**self.half.to_json(), **self.epoch_at_half.to_json()}
            ),
            "training": self.training.to_json(),
            "run": self.run.to_json(),
            "history": [[o.after_steps, o.epoch_s, o.left_s] for o in self.history],
        }

    def lines(self) -> list[str]:
        """What became of the forecast, for people."""
        if self.first is None:
            return []
        first, found = self.first, []
        if first.epoch_s is None and first.steps is None:
            found.append(
                f"live forecast after {first.after_steps} steps: {describe(first, self.is_epoch)}"
            )
        else:
            what = "epoch" if self.is_epoch else "run"
            between = f" ({format_seconds(first.low_s)} .. {format_seconds(first.high_s)})"
            found.append(
                f"live forecast after {first.after_steps} steps: {what}"
                f" {format_seconds(first.epoch_s)}{between}; {_verdict(self.epoch)}"
            )
        if self.half is not None:
            found.append(
                f"half way: {format_seconds(self.half.epoch_s)}; {_verdict(self.epoch_at_half)}"
            )
        if self.training.predicted_s is not None:
            found.append(
                f"all {first.n_epochs} epochs, without what lies between them:"
                f" {format_seconds(self.training.predicted_s)}; {_verdict(self.training)}"
            )
        if self.with_pause is not None and self.with_pause.run_s is not None:
            found.append(
                "whole run, once the pause after an epoch was seen:"
                f" {format_seconds(self.with_pause.run_s)}; {_verdict(self.run)}"
            )
        return found


def _verdict(verdict: EtaResult) -> str:
    if verdict.error_frac is None:
        return "it was not finished"
    return (
        f"it took {format_seconds(verdict.measured_s)} (forecast {100 * verdict.error_frac:+.1f} %)"
    )


def describe(outlook: Eta, is_epoch: bool = True) -> str:
    """The forecast in one line."""

    def between(value: float | None, low: float | None, high: float | None) -> str:
        return f"{format_seconds(value)} ({format_seconds(low)} .. {format_seconds(high)})"

    step_s = outlook.step_s
    pace = f"{1 / step_s:.3g} steps/s" if step_s else "no time per step"
    if outlook.epoch_s is None or outlook.steps is None:
        why = (
            "the loader has no length"
            if is_epoch
            else "no loader or loop tells how many there will be"
        )
        return f"{outlook.after_steps} steps, {pace}, {format_seconds(step_s)} each; {why}"
    first = not is_epoch  # a run's forecast begins after its first step
    parts = [f"step {outlook.n_running + first} of {math.ceil(outlook.steps) + first}, {pace}"]
    if is_epoch:
        number = f"epoch {outlook.number}" + (
            f" of {outlook.n_epochs}" if outlook.n_epochs is not None else ""
        )
        parts[0] = f"{number}: {parts[0]}"
        parts.append(f"epoch {between(outlook.epoch_s, outlook.low_s, outlook.high_s)}")
        if outlook.run_s is not None:
            parts.append(f"run {between(outlook.run_s, outlook.run_low_s, outlook.run_high_s)}")
    else:
        parts.append(f"run {between(outlook.epoch_s, outlook.low_s, outlook.high_s)}")
    whose = (
        ""
        if outlook.run_s is not None or not is_epoch
        else " of this epoch (dlperf run --epochs E forecasts the run)"
    )
    parts.append(f"{format_seconds(outlook.left_s)} left{whose}")
    if outlook.by_loader:
        parts.append("waiting for the loader")
    if is_epoch and outlook.run_s is not None and outlook.pause_s is None:
        parts.append("without validation and other pauses, which show after the first epoch")
    return ", ".join(parts)


def _place(loops: Sequence[RunningLoop]) -> tuple[int, int]:
    """Which round the program is in, of how many, over the innermost loop and those around it; one
    further out that may end early is not counted.
    """
    index, length = 0, 1
    for loop in loops:
        if loop is loops[0] or not loop.may_end_early:
            index, length = index + loop.index * length, length * loop.length
    return index, length


class RoundLength:
    """Steps of a round (an epoch that no loader tells of), from looks at which round the program is
    in after how many steps.

    In round i, from 0, the n-th step has i s < n <= (i + 1) s of rounds of s steps. `steps`: known
    beforehand, and believed until the rounds disagree.

    >>> rounds = RoundLength()
    >>> rounds.steps(0, 19), rounds.steps(0, 95), rounds.steps(1, 110), rounds.steps(2, 201)
    (None, None, 102.0, 97.5)
    """

    def __init__(self, steps: float | None = None) -> None:
        self._known = steps
        self._least, self._most = 0.0, math.inf

    @property
    def unsure(self) -> float:
        """How many steps more or fewer a round may have."""
        return (
            (self._most - self._least) / 2 if self._known is None and self._most < math.inf else 0.0
        )

    def steps(self, index: int | None, n_steps: int) -> float | None:
        """What a round has by all looks, this one included; None where none has ended yet. `index`:
        None where no loop tells it.
        """
        if index is None:
            return self._known
        least, most = n_steps / (index + 1), (n_steps - 1) / index if index else math.inf
        if self._known is not None and not math.floor(least) <= self._known <= math.ceil(
            most if index else self._known
        ):
            self._known = None
        if self._known is not None:
            return self._known
        self._least, self._most = max(self._least, least), min(self._most, most)
        if self._least > self._most:  # rounds differ: by the latest
            self._least, self._most = least, most
        return (self._least + self._most) / 2 if self._most < math.inf else None


def _thinned(values: list[Any], merge: Callable[[Any, Any], Any]) -> list[Any]:
    """At most so many: of more, neighbours become one."""
    if len(values) <= _MOST:
        return values
    return [
        merge(*values[i : i + 2]) if len(values[i : i + 2]) == 2 else values[i]
        for i in range(0, len(values), 2)
    ]

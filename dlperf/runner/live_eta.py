"""The live ETA of a run: one line on stderr while it goes on.

It is made after the watched steps and renewed by the first step that ends a second after the last
renewal. Between, the training pays for a counter and a comparison. A failure of the forecast is
kept, ends it, and never reaches the program.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from dlperf.core.clock import Clock
from dlperf.core.errors import one_line
from dlperf.runner.core_speed import CoreState
from dlperf.runner.counters import Counter
from dlperf.runner.epoch_log import EpochLog, EpochTimes
from dlperf.runner.eta import Eta, EtaResult, Progress, describe, estimate_eta
from dlperf.runner.evaluation import UNKNOWN_EVALUATION, Evaluation, evaluation_of
from dlperf.runner.loops import (
    RunningLoop,
    enclosing_loops,
    innermost_length,
    running_counters,
    running_lines,
)
from dlperf.runner.run_length import (
    BegunPass,
    RoundLength,
    SeenLoops,
    place_in,
    rounds_left,
    steps_left,
)
from dlperf.runner.stderr_line import StderrLine
from dlperf.runner.step_rate import ObservedStep, Rate, StepBlock, pooled_rate, rate_of
from dlperf.runner.trainers import TrainerLength, trainer_length

_RENEW_S = 1.0
_LINE_S = 10.0
_MOST = 64  # blocks and points of history; of more, neighbours are merged


class LiveEta:
    """The ETA of one run, from an :class:`EpochLog`.

    `n_epochs`, `n_steps`: the user's numbers of epochs or steps of the run; None: those of the
    program's Trainer or loops; then `is_users_number` is False. `line` shows the ETA (None: nothing
    is shown). `first`, `half`, `with_pause` are the ETAs after the watched steps, half way through
    their epoch, and once a pause between epochs was seen; None before.
    """

    def __init__(
        self,
        log: EpochLog,
        clock: Clock = Clock(),
        line: StderrLine | None = None,
        n_epochs: int | None = None,
        n_steps: int | None = None,
    ) -> None:
        self.error: BaseException | None = None
        self.first: Eta | None = None
        self.half: Eta | None = None
        self.with_pause: Eta | None = None
        self.history: list[Eta] = []
        self.notes: list[str] = []
        self.ended: float | None = None
        self.is_epoch = True
        self.core_state = CoreState()
        self._log, self._clock, self._line = log, clock, line
        self.n_epochs, self._epochs_before, self._n_steps = n_epochs, 0, n_steps
        self.is_users_number = n_epochs is not None
        self._begun: dict[int, BegunPass] = {}
        self._evaluation: Evaluation | None = None
        self._seen_s = 0.0
        self._rate: Rate | None = None
        self._passes, self._name, self._n_first = 1, "", 0
        self._steps_of_run: float | None = None
        self._most_steps = math.inf  # of an epoch, by a counter
        self._first_seen: SeenLoops | None = None
        self._round_length: RoundLength | None = None
        self._unsure, self._rounds_before = 0.0, 0
        self._blocks: list[StepBlock] = []
        self._mark: tuple[EpochTimes | None, float, int] = (None, 0.0, 0)
        self._next_line = 0.0
        self._pid = os.getpid()
        log.on_pass = self._note_loops
        log.call_at(math.inf, lambda _: self._safely(self._note_step))

    # -- events ------------------------------------------------------------------------------------

    def begin(
        self,
        steps: Sequence[ObservedStep],
        passes: int,
        name: str = "",
        core_state: Callable[[], CoreState] = CoreState,
        seen_s: float = 0.0,
    ) -> None:
        """The watching is over: the first ETA follows once the running step is counted.

        `core_state`: the state of the core meanwhile. `seen_s`: seconds of a batch in evaluation,
        where it has as many samples as one of the training.
        """

        def start() -> None:
            self._passes, self._name, self.core_state = passes, name, core_state()
            self._seen_s = seen_s
            self._rate = rate_of(steps, passes, self.core_state.half_frac)
            if self._rate is not None:
                self._log.call_at(-math.inf, lambda at: self._safely(lambda: self._start(at)))

        self._safely(start)

    def finish(self, at: float | None = None) -> None:
        """The program has ended; a second call has no effect."""
        if self.ended is None:
            self.ended = self._clock.now() if at is None else at
            self._safely(self._stop)

    def _safely(self, action: Callable[[], None]) -> None:
        """Call `action`; its failure ends the forecast."""
        if self.error is not None or os.getpid() != self._pid:
            return
        try:
            action()
        except Exception as error:
            self.error = error
            self.notes.append(f"the live forecast failed and was given up: {one_line(error)}")
            self._detach()

    def _detach(self) -> None:
        self._log.call_at(math.inf, None)
        self._log.on_pass = None

    def _stop(self) -> None:
        self._detach()
        if self._line is not None:
            self._line.close()

    def _note_loops(self, epoch: EpochTimes, loader: Any, frame: FrameType) -> None:
        def note() -> None:
            self._begun[id(epoch)] = BegunPass(
                enclosing_loops(frame), running_lines(frame), evaluation_of(frame, loader)
            )

        self._safely(note)

    def _note_step(self) -> None:
        """The training was found, and its first counted step ends."""
        self._first_seen = self._seen()

    def _seen(self) -> SeenLoops:
        frame, n_steps = sys._getframe(), self._log.n_steps + self._log.n_ahead
        return SeenLoops(n_steps, enclosing_loops(frame), running_counters(frame))

    # -- the forecast ------------------------------------------------------------------------------

    def _start(self, at: float) -> None:
        seen, passes_seen, frame = self._seen(), self._log.epochs, sys._getframe(1)
        begun = self._begun.get(id(passes_seen[-1]) if passes_seen else 0, BegunPass())
        self._log.on_pass, self._begun = None, {}
        self._evaluation = begun.evaluation
        before = self._first_seen or seen
        ends = steps_left(before, seen, self._passes)
        self.is_epoch = bool(passes_seen)
        trainer = trainer_length(frame, seen.n_steps, self._passes, self._log.updates_per_step)
        if trainer is not None:
            self._take_trainers(trainer)
            self._evaluation = trainer.evaluation
        elif self.is_epoch and (
            self.is_users_number or not begun.is_drawn_from(frame, before, seen, self._passes)
        ):
            self._count_epochs(begun.loops, ends)
        else:
            if self.is_epoch and not begun.is_inside(seen):  # once in some steps, not passes
                found = evaluation_of(frame, None)
                self._evaluation = found and Evaluation(None)
            self.is_epoch = False
            self._count_steps(seen, ends)
        if self._n_steps is not None:
            self._take_users_steps(self._n_steps)
        epochs = self._epochs()
        current = epochs[-1]
        self._n_first = len(epochs) - 1
        if self._evaluation is not None and self._evaluation.batches is None:
            self._say(UNKNOWN_EVALUATION)
        self.first = self._eta(at)
        self.history.append(self.first)
        now = self._clock.now()
        self._mark = (current, now, current.n_steps)
        self._show(self.first, at, is_news=True)
        self._call_again(now)

    def _renew(self, at: float) -> None:
        if self._round_length is not None:
            self._count_rounds(self._round_length, enclosing_loops(sys._getframe()))
        self._add_block(at)
        eta = self._eta(at)
        is_first_epoch = len(self._epochs()) - 1 == self._n_first
        if self.half is None and is_first_epoch and eta.steps and 2 * eta.n_running >= eta.steps:
            self.half = eta
        is_news = eta.pause_s is not None and self.with_pause is None
        if is_news:
            self.with_pause = eta
        self.history = _thinned([*self.history, eta], lambda earlier, later: later)
        self._show(eta, at, is_news)
        self._call_again(self._clock.now())

    def _call_again(self, at: float) -> None:
        self._log.call_at(at + _RENEW_S, lambda then: self._safely(lambda: self._renew(then)))

    def _epochs(self) -> list[EpochTimes]:
        """Passes that trained; without a loader the whole run."""
        return self._log.epochs if self.is_epoch else [self._log.whole]

    def _count_epochs(
        self, loops: Sequence[RunningLoop], ends: Sequence[tuple[float, Counter]]
    ) -> None:
        """The number of epochs, by the loops around this pass of the loader.

        A counter that begins anew with each epoch ends the epoch, another one the run: at once, or
        between two passes of the loader.
        """
        epochs = self._epochs()
        n_finished, done = len(epochs) - 1, epochs[-1].n_steps
        self._most_steps = min(
            (done + left for left, counter in ends if counter.restarts), default=math.inf
        )
        found, before = None, 0
        if loops:
            index, length = place_in(loops)
            if index >= n_finished:
                found, before = length, index - n_finished
        self._heed_epochs(found, before, "script's loop")
        n_epochs = self.n_epochs
        if found is not None and not self.is_users_number:
            self._note_early(loops, "epochs")
        run_ends = [end for end in ends if not end[1].restarts]
        if self.is_users_number or not run_ends:
            return
        left, counter = min(run_ends, key=lambda end: end[0])
        steps = self._steps(epochs)
        n_further = math.inf if n_epochs is None else n_epochs - before - n_finished - 1
        if steps and not counter.counts_rounds:
            most = max(0, math.ceil((left + done) / steps - 1))
            self.n_epochs = round(before + n_finished + 1 + min(n_further, most))
        elif not steps or left < (n_further + 1) * steps - done - 0.5:
            self.is_epoch, self._steps_of_run = False, self._log.n_steps + left

    def _heed_epochs(self, found: int | None, before: int, what: str) -> None:
        """Take the number of epochs that was found, where the user gave none."""
        if not self.is_users_number:
            self.n_epochs, self._epochs_before = found, before
        elif found is not None and self.n_epochs not in (found, found - before):
            self._say(
                f"--epochs {self.n_epochs} was given, and the {what} has {found} epochs; the"
                f" forecast is for {self.n_epochs}"
            )

    def _take_trainers(self, trainer: TrainerLength) -> None:
        """The length by the Trainer's own numbers."""
        n_begun = len(self._epochs())
        if trainer.steps_left is not None and not self.is_users_number:
            self.is_epoch = False
            self._steps_of_run = self._log.n_steps + max(0.0, trainer.steps_left)
        elif self.is_epoch:
            before = max(0, (trainer.n_begun or n_begun) - n_begun)
            self._heed_epochs(trainer.n_epochs, before, "Trainer")

    def _count_steps(self, seen: SeenLoops, ends: Sequence[tuple[float, Counter]]) -> None:
        """Without a loader: the number of steps, by the loops around this step.

        They count steps or passes where they advance as the steps do, or the innermost is as far
        or over a plain list; else rounds of steps.
        """
        loops, n_steps, passes = seen.loops, seen.n_steps, self._passes
        totals = [n_steps + left for left, counter in ends if not counter.restarts]
        further = rounds_left(self._first_seen or seen, seen, passes)
        if further is not None:
            totals.append(n_steps + further)
        elif loops and loops[0].index + 1 in (n_steps, n_steps * passes):
            totals.append(n_steps / (loops[0].index + 1) * place_in(loops)[1])
        if totals:
            self._steps_of_run = min(totals)
        else:
            first = self._first_seen
            before = place_in(first.loops)[0] if first is not None else 0
            # of a run that goes on with an earlier one
            self._rounds_before = before if first is not None and before > first.n_steps else 0
            n_batches = innermost_length(sys._getframe())
            is_known = n_batches and (loops or self.n_epochs)
            self._round_length = RoundLength(n_batches / passes if n_batches and is_known else None)
            self._count_rounds(self._round_length, loops)
        self._note_early(loops, "rounds")

    def _note_early(self, loops: Sequence[RunningLoop], what: str) -> None:
        self.notes += [
            f"the loop over {loop.length} {what} may end early; the forecast is for all of them"
            for loop in loops
            if loop.may_end_early
        ]

    def _take_users_steps(self, n_steps: int) -> None:
        """The user's number of steps; a note where the script's source tells another one."""
        found, steps = self._steps_of_run, self._steps(self._epochs())
        if self.is_epoch and steps is not None and self.n_epochs is not None:
            found = steps * (self.n_epochs - self._epochs_before)
        if found is not None and abs(found - n_steps) > 1:
            self._say(
                f"--steps {n_steps} was given, and the script's loops have {math.ceil(found)}"
                f" steps; the forecast is for {n_steps}"
            )
        self.is_epoch, self._steps_of_run, self._unsure = False, float(n_steps), 0.0
        self._round_length = None

    def _say(self, note: str) -> None:
        self.notes.append(note)
        if self._line is not None:
            self._line.show(f"dlperf: {note}")
            self._line.close()

    def _count_rounds(self, round_length: RoundLength, loops: Sequence[RunningLoop]) -> None:
        """The run's steps, by the length of a round of the loops around them."""
        index, length = None, self.n_epochs or 1
        if loops:
            index, length = (value - self._rounds_before for value in place_in(loops))
        steps = round_length.steps(index, self._log.n_steps)
        self._steps_of_run = None if steps is None else steps * length
        self._unsure = round_length.unsure * length

    def _steps(self, epochs: Sequence[EpochTimes]) -> float | None:
        """Steps of an epoch, by the length of its loader.

        Where the epoch before had another number (a loop that breaks), by that.
        """
        if not self.is_epoch:
            return self._steps_of_run
        worth = epochs[-1].worth
        planned = None if worth is None else worth / self._passes
        if len(epochs) > 1 and (planned is None or abs(epochs[-2].n_steps - planned) > 1):
            planned = float(epochs[-2].n_steps)
        return (
            planned if self._most_steps == math.inf else min(planned or math.inf, self._most_steps)
        )

    def _eta(self, at: float) -> Eta:
        assert self._rate is not None
        epochs = self._epochs()
        current = epochs[-1]
        pairs = itertools.pairwise(epochs)
        progress = Progress(
            now_s=at - epochs[0].began,
            after_steps=self._log.n_steps,
            running_s=at - current.began,
            n_running=current.n_steps,
            steps=self._steps(epochs),
            n_epochs=self.n_epochs if self.is_epoch else None,
            epochs_s=tuple(epoch.seconds for epoch in epochs[:-1]),
            pauses_s=tuple(after.began - before.ended for before, after in pairs),
            starts_s=tuple(e.first - e.began for e in epochs[1:] if e.first is not None),
            epochs_before=self._epochs_before,
            **self._expected_evaluation(),
        )
        n_left = progress.steps_left
        left_s = math.inf if n_left is None else n_left * self._rate.step_s
        rate = self._rate.on_core(self.core_state.factor(left_s))
        return estimate_eta(progress, pooled_rate(rate, self._blocks, left_s))

    def _expected_evaluation(self) -> dict[str, float]:
        if self._evaluation is None:
            return {}
        epoch_steps = None
        if not self.is_epoch and self._log.epochs and self._log.epochs[0].worth:
            epoch_steps = self._log.epochs[0].worth / self._passes
        return self._evaluation.expected(self._seen_s, self._log.n_steps, epoch_steps)

    def _add_block(self, at: float) -> None:
        """The steps since the last renewal, without pauses and the starts of loaders."""
        epochs = self._epochs()
        marked, since, n_before = self._mark
        index = 0
        if self.is_epoch:
            indices = (i for i, epoch in enumerate(epochs) if epoch is marked)
            index = next(indices, len(epochs) - 1)
        seconds, n = epochs[index].ended - since, epochs[index].n_steps - n_before
        for epoch in epochs[index + 1 :]:
            if epoch.first is not None:
                seconds, n = seconds + epoch.ended - epoch.first, n + epoch.n_steps - 1
        if n > 0 and seconds > 0:
            self._blocks = _thinned(
                [*self._blocks, StepBlock(seconds, n)],
                lambda a, b: StepBlock(a.seconds + b.seconds, a.n + b.n),
            )
        self._mark = (epochs[-1], at, epochs[-1].n_steps)

    def _show(self, eta: Eta, at: float, is_news: bool) -> None:
        if self._line is None:
            return
        text = describe(eta, self.is_epoch)
        if self._line.is_terminal:
            self._line.show(f"dlperf: {text}")
        elif is_news or at >= self._next_line:
            name = f"{self._name}, " if eta is self.first and self._name else ""
            self._line.show(f"dlperf: {name}{text}")
            self._next_line = at + max(_LINE_S, at - self._epochs()[0].began)

    # -- forecast and measured times ---------------------------------------------------------------

    def _is_finished(self, place: int) -> bool:
        epochs = self._epochs()
        if place >= len(epochs):
            return False
        steps = self._steps(epochs[: place + 1])
        is_complete = steps is not None and epochs[place].n_steps >= math.floor(
            steps - self._unsure
        )
        return place < len(epochs) - 1 or is_complete

    @property
    def n_steps(self) -> int:
        """Steps so far."""
        return self._log.n_steps

    @property
    def epoch(self) -> EtaResult:
        """The epoch, as forecast after the watched steps."""
        return self._epoch_result(self.first)

    @property
    def epoch_at_half(self) -> EtaResult:
        """The same epoch, as forecast half way."""
        return self._epoch_result(self.half)

    def _epoch_result(self, eta: Eta | None) -> EtaResult:
        measured_s = None
        if self.first is not None and self._is_finished(self._n_first):
            measured_s = self._epochs()[self._n_first].seconds
        return EtaResult(None if eta is None else eta.epoch_s, measured_s)

    @property
    def _is_whole(self) -> bool:
        """Whether all epochs were made."""
        n = len(self._epochs())
        return self.n_epochs == n + self._epochs_before and self._is_finished(n - 1)

    @property
    def training(self) -> EtaResult:
        """All epochs without the pauses between them, as forecast after the watched steps."""
        predicted_s, first = None, self.first
        if first is not None and first.run_s is not None and first.n_epochs is not None:
            predicted_s = first.run_s - first.pauses_s
        measured_s = sum(epoch.seconds for epoch in self._epochs()) if self._is_whole else None
        return EtaResult(predicted_s, measured_s)

    @property
    def run(self) -> EtaResult:
        """The run to the program's end, as forecast after the first pause between epochs."""
        is_measured = self._is_whole and self.ended is not None
        measured_s = (self.ended or 0.0) - self._epochs()[0].began if is_measured else None
        return EtaResult(None if self.with_pause is None else self.with_pause.run_s, measured_s)


def _thinned(values: list[Any], merge: Callable[[Any, Any], Any]) -> list[Any]:
    """The values, neighbours merged where they are too many."""
    if len(values) <= _MOST:
        return values
    pairs = itertools.zip_longest(values[::2], values[1::2])
    return [one if other is None else merge(one, other) for one, other in pairs]

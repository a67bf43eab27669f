"""Watches some steps of a training in a program that knows nothing of dlperf.

Global hooks find the training (:mod:`dlperf.runner.training_search`): a step is one period of the
program's rhythm, with any number of models, optimizers, backwards and batches. The last warm step
is recorded while it runs (:mod:`dlperf.recorder.live_recording`). Then some steps are timed with
time stamps alone (one hook call per forward), some more with
:class:`dlperf.profiler.probe.LayerProbe`. At the end all hooks are removed but the two of
:class:`dlperf.runner.epoch_log.EpochLog`. A failure inside a hook is kept, removes all hooks, and
never reaches the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import data

from dlperf.core.clock import Clock
from dlperf.core.errors import DlperfError
from dlperf.core.patching import wrap_attribute
from dlperf.profiler.layer_times import HookOverhead
from dlperf.profiler.probe import LayerProbe, measure_hook_overhead
from dlperf.recorder.compiled_recording import has_compiled_graph
from dlperf.recorder.live_recording import OUTSIDE
from dlperf.runner.communication_recording import StepMark
from dlperf.runner.compilation import (
    COMPILED,
    FUNCTION,
    NOT_COMPILED,
    Compilations,
    has_compiled_function,
    is_compiled,
    module_stepped_by,
)
from dlperf.runner.core_speed import SpeedSamples, is_traced
from dlperf.runner.disturbance import system_load
from dlperf.runner.epoch_log import EpochLog
from dlperf.runner.running_period import RunningPeriod
from dlperf.runner.state_readings import StateReadings
from dlperf.runner.training_search import FoundTraining, TrainingSearch, reducer_options
from dlperf.runner.watched_training import WatchedStep, WatchedTraining, WatchPlan, clock_on

if TYPE_CHECKING:
    from dlperf.runner.collectives import CollectiveRecorder

SEEK, WARM, PLAIN, LAYERED, DONE = range(5)


class Watcher:
    """Watches one training. `model`: this one, instead of the one that is found."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        clock: Clock = Clock(),
        plan: WatchPlan = WatchPlan(),
        on_watched: Callable[[Watcher], None] | None = None,
        speed_samples: SpeedSamples | None = None,
        state_readings: StateReadings | None = None,
    ) -> None:
        self.clock, self.plan, self.on_watched = clock, plan, on_watched
        self.speed_samples = SpeedSamples() if speed_samples is None else speed_samples
        self.state_readings = StateReadings() if state_readings is None else state_readings
        self.stage = SEEK
        self.watched: WatchedTraining | None = None
        self.error: BaseException | None = None
        self.reason: str | None = None
        self.epochs = EpochLog(clock)
        self.recorder: CollectiveRecorder | None = None
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], object]] = []
        self._undo_search: list[Callable[[], object]] = []
        self._undo_step: list[Callable[[], object]] = []
        self._undo_calls: list[Callable[[], object]] = []
        self._undo_root: Callable[[], object] | None = None
        self._wanted = model
        self._search = TrainingSearch(model)
        self._compilations = Compilations(
            self._without_hooks, lambda: self.give_up(FUNCTION, at_once=True)
        )
        self._is_compiled = False
        self._undo_hooks: list[Callable[[], object]] = []
        self._found: FoundTraining | None = None
        self._turn = self._count = self._depth = 0
        self._period = RunningPeriod(clock)
        self._probe: LayerProbe | None = None
        self._overhead = HookOverhead()

    # -- setting and removing ----------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks."""
        safely = self._guarded
        self._undo_step = [
            register_optimizer_step_pre_hook(safely(self._before_step)).remove,
            register_optimizer_step_post_hook(safely(self._after_step)).remove,
        ]
        self._seek()
        self._undo_hooks = [
            wrap_attribute(torch.autograd, "backward", self._timed_backward),
            wrap_attribute(torch.optim.Optimizer, "zero_grad", self._timed("zero_grad")),
            wrap_attribute(nn.Module, "zero_grad", self._timed("zero_grad")),
        ]
        self._undo.append(self._compilations.install())
        iterator = getattr(data.dataloader, "_BaseDataLoaderIter", None)
        if iterator is not None:
            self._undo.append(wrap_attribute(iterator, "__next__", self._load))
        self.epochs.install()
        if self._wanted is not None and has_compiled_function():
            self.give_up(FUNCTION, at_once=True)
        elif self._wanted is not None and is_compiled(self._wanted):
            self._without_hooks()

    def _without_hooks(self) -> None:
        """Something is about to be compiled: from now on, steps are timed as a whole."""
        if self._is_compiled or self.stage == DONE:
            return
        self._is_compiled = True
        self._period.stop_recording()
        self._undo_root_hook()
        if self._probe is not None:
            self._probe.detach()
        self._undo_all("_undo_search")
        self._undo_all("_undo_hooks")
        self.plan = replace(self.plan, layered=0)
        self._search = TrainingSearch(self._wanted)
        self._seek()

    def follow(self, recorder: CollectiveRecorder) -> None:
        """Tell a recorder every step, and remove it when the watching ends."""
        self.recorder = recorder
        self._undo.append(recorder.remove)

    def remove(self) -> None:
        """Remove every hook; a second call has no effect. Not from within an optimizer's step."""
        self._stop_watching()
        self._undo_all("_undo_step")
        self.epochs.remove()

    def _undo_all(self, name: str) -> None:
        actions: list[Callable[[], object]] = getattr(self, name)
        setattr(self, name, [])
        for action in reversed(actions):
            action()

    def _remove_step_hooks_later(self) -> None:
        """Remove the optimizer's hooks at the next module call: a running step iterates on them.

        In a program that compiles they stay, idle: it gets no module hook.
        """
        if self._is_compiled:
            return

        def leave(_module: nn.Module, _args: Any) -> None:
            if threading.get_ident() == self._thread:
                self._undo_all("_undo_step")

        self._undo_step.append(register_module_forward_pre_hook(leave).remove)

    def _stop_watching(self) -> None:
        self._period.stop_recording()
        self._undo_root_hook()
        if self._probe is not None:
            self._probe.detach()
        for name in ("_undo_calls", "_undo_search", "_undo_hooks", "_undo"):
            self._undo_all(name)
        if self.watched is not None:
            self.error = self.error or self.watched.settle()
        if self.stage != DONE:
            self.stage = DONE
            self._remove_step_hooks_later()

    def give_up(self, reason: str, at_once: bool = False) -> None:
        """Stop watching a kind of training that cannot be watched.

        `at_once`: with all hooks. Not from within an optimizer's step.
        """
        self.reason = reason
        self._is_compiled |= at_once
        self._stop_watching()
        if at_once:
            self.remove()

    def fail(self, error: BaseException) -> None:
        """Keep an error of dlperf's own and stop watching."""
        self.error = error
        try:
            self._stop_watching()
        except Exception:  # it may not reach the program
            self._undo = []

    def _guarded(self, hook: Callable[..., object]) -> Callable[..., None]:
        """The hook in this thread, until the watching ends; its failure ends the watching."""

        def guarded(*args: Any) -> None:
            if threading.get_ident() != self._thread or self.stage == DONE:
                return
            try:
                hook(*args)
            except Exception as error:
                self.fail(error)

        return guarded

    # -- finding the training ----------------------------------------------------------------------

    def _seek(self) -> None:
        """Search for a training, anew where the program's rhythm has changed."""
        self._undo_all("_undo_calls")
        self.stage, self.watched, self._found = SEEK, None, None
        self._search.begin_anew()
        self._probe = None
        self._period.forget()
        if self._is_compiled or self._undo_search:
            return
        enter, leave = self._guarded(self._search_enter), self._guarded(self._search_leave)
        self._undo_search = [
            register_module_forward_pre_hook(enter).remove,
            register_module_forward_hook(leave, always_call=True).remove,
        ]

    def _search_enter(self, module: nn.Module, _args: Any) -> None:
        if self._search.enter(module):
            self.epochs.began = self.clock.now()

    def _search_leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        self._search.leave(module)

    def _search_step(self, optimizer: Any) -> None:
        if self._is_compiled:
            module = self._wanted or self._compilations.module or module_stepped_by(optimizer)
            if module is not None:
                self._search.enter(module)
        found = self._search.stepped(optimizer)
        if found is not None:
            self._begin(found)
        elif self._search.is_exhausted:
            self.give_up(
                "no module was called in training mode whose parameters the optimizer steps"
            )

    def _begin(self, found: FoundTraining) -> None:
        """Watch the training that was found, from the end of one of its periods on."""
        try:
            self.clock = clock_on(found.roots, self.clock)
        except DlperfError as error:
            return self.give_up(str(error))
        self._found, self._turn = found, 0
        compiled_note = COMPILED if has_compiled_graph() else NOT_COMPILED
        self.epochs.follow(found.optimizers, self._search.n_backwards)
        self.watched = WatchedTraining(
            found.roots,
            found.optimizers,
            threads=torch.get_num_threads(),
            reducer=reducer_options(found.called[0]),
            notes=[compiled_note] * self._is_compiled + found.notes,
            is_compiled=self._is_compiled,
            device=self.clock.device,
        )
        self._undo_all("_undo_search")
        self.stage, self._count = WARM, 0
        self._period.begin_first(self.clock, not found.optimizers)
        self._await_root()
        if self._is_compiled and self._compilations.module is self.watched.model:
            note = self._guarded(self.watched.note_call)
            undo = self._compilations.watch_calls(lambda: None, note)
            self._undo_calls = [] if undo is None else [undo]

    # -- phases of a period ------------------------------------------------------------------------

    def _timed(self, phase: str) -> Callable[..., Any]:
        """A wrapper of a function that is a phase of its own."""

        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            period = self._period
            if threading.get_ident() != self._thread or period.phase == phase:
                return original(*args, **kwargs)
            before = period.phase
            self._guarded(period.enter)(phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._guarded(period.enter)(before)

        return timed

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        period = self._period
        if period.phase == "optimizer" and period.stepper is None:  # updates by hand are over
            self._guarded(period.enter)(OUTSIDE)
        batch = self._timed("loading")(original, *args, **kwargs)
        period.step.n_batches += 1
        self._search.load()
        return batch

    def _await_root(self) -> None:
        """Set one global hook until the next call of a model; the forward runs without it."""
        if (
            not self._is_compiled
            and self._undo_root is None
            and self.stage in (WARM, PLAIN, LAYERED)
        ):
            hook = self._guarded(self._root_enter)
            self._undo_root = register_module_forward_pre_hook(hook).remove

    def _undo_root_hook(self) -> None:
        if self._undo_root is not None:
            self._undo_root()
            self._undo_root = None

    def _root_enter(self, module: nn.Module, _args: Any) -> None:
        found, watched, period = self._found, self.watched, self._period
        if found is None or watched is None or not any(module is one for one in found.called):
            return
        if not (module.training and torch.is_grad_enabled()):
            period.is_spoilt |= not module.training  # an evaluation: no training step's time
            return
        self._undo_root_hook()
        if period.in_pass and not period.had_backward:
            return  # called again before the backward: the same pass
        # the root's own hook has run already; the inner module of a wrapper (DDP) follows
        inside = module if any(module is root for root in watched.roots) else None
        if period.had_backward and not found.optimizers:
            period.enter(OUTSIDE)
            self._end_period(None, inside)
            self._undo_root_hook()
            if self.stage == DONE:
                return
        period.await_pass(not found.optimizers)
        if self._probe is not None:
            self._probe.resume(inside)
        period.begin_pass()

    def _timed_backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_own_thread = threading.get_ident() == self._thread
        if self._depth or not is_own_thread or not (self._period.in_pass or self.stage == SEEK):
            return original(tensors, *args, **kwargs)
        self._depth += 1
        self._guarded(self._period.enter)("backward")
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self._depth -= 1
            self._guarded(self._backward_ended)()

    def _backward_ended(self) -> None:
        self._period.end_backward()
        if self._probe is not None:
            self._probe.stop()
        if self.stage == SEEK:
            found = self._search.backward_ended(is_in_step=self._period.stepper is not None)
            if found is not None:
                self._begin(found)
        else:
            self._await_root()

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        period = self._period
        if period.stepper is not None and period.stepper is not optimizer:
            return  # inside of another one's step
        period.stepper = optimizer
        if self.stage != SEEK:
            period.begin_optimizer()
            self._await_root()  # a closure may call the models

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer is not self._period.stepper:
            return
        self._period.stepper = None
        if self.stage != SEEK:
            self._period.end_optimizer(optimizer)
            if self._is_period_over(optimizer):
                self._end_period(optimizer)
                return
        if self.stage == SEEK:
            now = self.clock.now()
            self._search_step(optimizer)
            self._period.last_end = None
            self._tell(StepMark(id(optimizer), now, self.clock.now()), is_watched=False)

    def _is_period_over(self, optimizer: Any) -> bool:
        """Whether this step is the period's last. One out of turn begins a new search."""
        found = self._found
        assert found is not None
        if not found.is_regular:
            return optimizer is found.optimizers[-1]
        if not found.optimizers or optimizer is not found.optimizers[self._turn]:
            self._period.stop_recording()
            self._undo_root_hook()
            if self._probe is not None:
                self._probe.detach()
            self._seek()
            return False
        self._search.note(optimizer)  # a new search knows what was seen
        self._turn = (self._turn + 1) % len(found.optimizers)
        return self._turn == 0

    def _end_period(self, optimizer: Any, inside: nn.Module | None = None) -> None:
        """A period is over; `inside`: the model whose call begins the next one."""
        now = self.clock.now()
        if optimizer is None:
            self.epochs.count(now)
        step, is_plain = self._period.end(now), self.stage == PLAIN
        if self._is_compiled and self.watched is not None:
            step.n_passes, step.is_whole = self.watched.n_calls or 1, True
            step.began = self._period.last_end
            self._undo_all("_undo_calls")  # those of one period were counted
        if self.stage in (PLAIN, LAYERED):
            step.loaded = self.epochs.loaded
        if step.n_passes:
            step.speed_sample_s = None if is_traced() else self.speed_samples.take()
            self._keep(step, inside)
        self._await_root()
        is_plain = is_plain and step.interval_s is not None and step.n_passes > 0
        mark = StepMark(id(optimizer), now, self.clock.now(), is_plain, step.began, step.own_s)
        self._tell(mark, is_watched=True)
        self._period.begin_next()

    def _tell(self, mark: StepMark, is_watched: bool) -> None:
        if self.recorder is not None:
            self.recorder.after_step(mark, is_watched)
            if self.stage in (LAYERED, DONE):
                self.recorder.remove()

    def _keep(self, step: WatchedStep, inside: nn.Module | None) -> None:
        assert self.watched is not None
        self._count += 1
        if self.stage == WARM:
            self._warm(inside)
        elif self.stage == PLAIN:
            if step.is_whole and step.interval_s is None:
                self._count -= 1
                return
            self.watched.plain.append(step)
            if self._count >= self.plan.plain:
                self._begin_layers() if self.plan.layered else self._finish()
        elif self.stage == LAYERED:
            assert self._probe is not None
            self.watched.probed.append(step)
            self.watched.layered.append(self._probe.finish())
            if self._count >= self.plan.layered:
                self._finish()
            else:
                self._probe.start()

    def _warm(self, inside: nn.Module | None) -> None:
        """The last warm period is recorded."""
        watched, period = self.watched, self._period
        assert watched is not None
        if self._count == self.plan.warm - 1:
            period.recording = watched.start_recording(inside, self._compilations.watch_calls)
        elif self._count >= self.plan.warm and period.stop_recording():
            self._overhead = measure_hook_overhead(self.clock, n_calls=300, n_backwards=3)
            self.stage, self._count = PLAIN, 0

    def _begin_layers(self) -> None:
        assert self.watched is not None
        self._undo_root_hook()  # it has to follow the probe's
        self._probe = LayerProbe(self.watched.model, self.clock, self._overhead)
        self.watched.probe = self._probe
        self._probe.attach()
        self._probe.start()
        self.stage, self._count = LAYERED, 0

    def _finish(self) -> None:
        assert self.watched is not None
        self.watched.note_gradients()
        self.watched.load = system_load()
        self._stop_watching()
        self._read_state()
        if not self.watched.optimizers:
            self.epochs.count_backwards()
        self._found = None
        self._search = TrainingSearch()
        if self.on_watched is not None:
            self.on_watched(self)

    def _read_state(self) -> None:
        """Read the machine's state, of a processor that trains; no step and no pass contains it."""
        if self.watched is not None and self.watched.device is None:
            self.epochs.leave_out(self.state_readings.take(self.clock.now))

"""Watches some steps of a training in a program that knows nothing of dlperf.

Nothing is registered on the program's objects. Global hooks find the training
(:mod:`dlperf.runner.training_search`). After warm-up some steps are timed with time stamps alone
(one hook call per forward), some more with :class:`dlperf.profiler.probe.LayerProbe`. Then all
hooks are removed but the two of :class:`dlperf.runner.epoch_log.EpochLog`. A failure inside a hook
is kept, removes all hooks, and never reaches the program.
"""

from __future__ import annotations

import threading
import time
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
from torch.utils import _pytree as pytree
from torch.utils import data

from dlperf.core.clock import Clock
from dlperf.core.patching import wrap_attribute
from dlperf.profiler.layer_times import HookOverhead
from dlperf.profiler.probe import LayerProbe, measure_hook_overhead
from dlperf.recorder.targets import CPU_DEVICES, CPU_ONLY
from dlperf.runner.communication_recording import StepMark
from dlperf.runner.compilation import (
    COMPILED,
    FUNCTION,
    Compilations,
    has_compiled_function,
    is_compiled,
    module_stepped_by,
    scalar_of,
)
from dlperf.runner.core_speed import SpeedSamples
from dlperf.runner.epoch_log import EpochLog
from dlperf.runner.recomputed_loss import LossRecorder
from dlperf.runner.training_search import FoundTraining, TrainingSearch, reducer_options
from dlperf.runner.watched_training import WatchedStep, WatchedTraining, WatchPlan

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
    ) -> None:
        self.clock, self.plan, self.on_watched = clock, plan, on_watched
        self.speed_samples = SpeedSamples() if speed_samples is None else speed_samples
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
        self._undo_root: Callable[[], object] | None = None
        self._wanted = model
        self._search = TrainingSearch(model)
        self._compilations = Compilations(
            self._without_hooks, lambda: self.give_up(FUNCTION, at_once=True)
        )
        self._is_compiled = False
        self._undo_hooks: list[Callable[[], object]] = []
        # the step that is running
        self._root: nn.Module | None = None
        self._optimizer: Any = None
        self._step = WatchedStep()
        self._count = 0
        self._pass_began: float | None = None
        self._after_backward = False
        self._stepping: float | None = None
        self._last_end: float | None = None
        self._used = 0.0
        self._switches = self._depth = 0
        self._spoilt = False
        self._probe: LayerProbe | None = None
        self._overhead = HookOverhead()
        self._loss_recorder: LossRecorder | None = None
        self._output: Any = None
        self._is_recording_due = True

    # -- setting and removing ----------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks."""
        safely = self._guarded
        self._undo_step = [
            register_optimizer_step_pre_hook(safely(self._before_step)).remove,
            register_optimizer_step_post_hook(safely(self._after_step)).remove,
        ]
        enter, leave = safely(self._search_enter), safely(self._search_leave)
        self._undo_search = [
            register_module_forward_pre_hook(enter).remove,
            register_module_forward_hook(leave, always_call=True).remove,
        ]
        self._undo_hooks = [
            wrap_attribute(torch.autograd, "backward", self._timed_backward),
            wrap_attribute(torch.optim.Optimizer, "zero_grad", self._timed("zero_grad_s")),
            wrap_attribute(nn.Module, "zero_grad", self._timed("zero_grad_s")),
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
        self._stop_recording_loss()
        self._undo_root_hook()
        if self._probe is not None:
            self._probe.detach()
        self._undo_all("_undo_search")
        self._undo_all("_undo_hooks")
        self.plan = replace(self.plan, layered=0)
        self.stage, self.watched, self._probe, self._last_end = SEEK, None, None, None
        self._search, self._step = TrainingSearch(self._wanted), WatchedStep()

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
        self._stop_recording_loss()
        self._undo_root_hook()
        if self._probe is not None:
            self._probe.detach()
        self._undo_all("_undo_search")
        self._undo_all("_undo_hooks")
        self._undo_all("_undo")
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

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
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

    def _search_enter(self, module: nn.Module, _args: Any) -> None:
        self._search.enter(module)

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
        """Watch the training that was found."""
        for parameter in found.root.parameters():
            if parameter.device.type not in CPU_DEVICES:
                name = type(found.root).__name__
                return self.give_up(f"{name} lies on {parameter.device}; {CPU_ONLY}")
        self._root, self._optimizer = found.called, found.optimizer
        self.epochs.optimizer = found.optimizer
        self.watched = WatchedTraining(
            found.root,
            found.optimizer,
            type(found.root).__name__,
            type(found.optimizer).__name__,
            threads=torch.get_num_threads(),
            reducer=reducer_options(found.called),
            notes=[COMPILED] * self._is_compiled + list(found.notes),
            is_compiled=self._is_compiled,
        )
        self._search = TrainingSearch()
        self._undo_all("_undo_search")
        self.stage, self._count = WARM, 0
        self._await_root()
        if self._is_compiled:
            self._note_compiled_call()

    def _note_compiled_call(self) -> None:
        """Keep the inputs of the compiled module's next call, for a recording afterwards."""

        def seen(args: Any, kwargs: Any, output: Any) -> None:
            if self.watched is not None:
                self.watched.inputs = pytree.tree_map(_detached, (args, kwargs))
                root = self.watched.root
                self.watched.flags = {module: module.training for module in root.modules()}
                self.watched.loss = None if scalar_of(output) is None else scalar_of

        if self.watched is not None and self._compilations.module is self.watched.root:
            undo = self._compilations.watch_call(self._guarded(seen))
            if undo is not None:
                self._undo.append(undo)

    # -- one step of the program -------------------------------------------------------------------

    def _await_root(self) -> None:
        """Set one global hook until the next call of the root; the forward runs without it."""
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
        if module is not self._root:
            return
        if not (module.training and torch.is_grad_enabled()):
            self._spoilt = True  # an evaluation pass: this interval is no training step's
            return
        if self._stepping is not None:
            return self.give_up(
                f"{type(self._optimizer).__name__} calls the model from within its step (a"
                " closure); such training is not watched"
            )
        self._undo_root_hook()
        if self._pass_began is not None and not self._after_backward:
            return  # called again before the backward: the same pass
        self._close_pass()
        if self.stage == WARM and self._count == self.plan.warm - 1 and self._is_recording_due:
            self._record_loss()
        if self._probe is not None and self.watched is not None:
            # the root's own hook has run already; the inner module of a wrapper (DDP) follows
            self._probe.start(inside_root=module is self.watched.root)
        self._after_backward = False
        self._step.n_passes += 1
        self._pass_began = self.clock.now()
        if self._step.began is None:
            self._step.began = self._pass_began

    def _timed_backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_own_thread = threading.get_ident() == self._thread
        if self._depth or not is_own_thread or self._pass_began is None:
            return original(tensors, *args, **kwargs)
        self._guarded(self._backward_begins)(tensors, self.clock.now())
        self._depth += 1
        began = self.clock.now()
        try:
            return original(tensors, *args, **kwargs)
        finally:
            ended = self.clock.now()
            self._depth -= 1
            self._guarded(self._backward_ended)(ended - began, ended)

    def _backward_begins(self, tensors: Any, at: float) -> None:
        if self._pass_began is not None:
            self._step.forward_s += at - self._pass_began
        recorder = self._loss_recorder
        if recorder is not None and recorder.is_open and isinstance(tensors, torch.Tensor):
            assert self.watched is not None
            self.watched.loss = recorder.close(self._output, tensors)

    def _backward_ended(self, seconds: float, at: float) -> None:
        self._step.backward_s += seconds
        self._pass_began, self._after_backward = at, True
        self._await_root()

    def _close_pass(self) -> None:
        """The pass before is over: keep its layers' times."""
        if self._after_backward and self._probe is not None and self.watched is not None:
            self._probe.stop()
            self.watched.layered.append(self._probe.finish())
        self._pass_began, self._after_backward = None, False

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.stage != SEEK and optimizer is self._optimizer and self._stepping is None:
            self._stop_recording_loss()
            self._close_pass()
            self._stepping = self.clock.now()
            self._await_root()  # to notice a closure

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        now = self.clock.now()
        if self.stage == SEEK:
            self._search_step(optimizer)
            self._last_end = None
            self._tell(StepMark(id(optimizer), now, self.clock.now()), is_watched=False)
            return
        if optimizer is not self._optimizer:
            # another model's turn: what the root did for it is none of its own training
            self._close_pass()
            self._step.n_passes, self._step.forward_s, self._step.backward_s = 0, 0.0, 0.0
            return
        if self._stepping is None:
            return
        step, is_plain = self._step, self.stage == PLAIN
        step.optimizer_s = now - self._stepping
        self._stepping = None
        step.disturbed = self.clock.switches() != self._switches
        if self._last_end is not None and not self._spoilt:
            step.interval_s = now - self._last_end
        step.processor_s = time.process_time() - self._used
        if self._is_compiled:
            step.n_passes, step.is_whole = 1, True
            step.began = self._last_end
        if self.stage in (PLAIN, LAYERED):
            step.loaded = self.epochs.loaded
        if step.n_passes:
            step.speed_sample_s = self.speed_samples.take()
            self._keep(step)
        self._step, self._spoilt, self._switches = WatchedStep(), False, self.clock.switches()
        self._await_root()
        is_plain = is_plain and step.interval_s is not None and step.n_passes > 0
        mark = StepMark(id(optimizer), now, self.clock.now(), is_plain, step.began, step.own_s)
        self._tell(mark, is_watched=True)
        self._last_end, self._used = self.clock.now(), time.process_time()

    def _tell(self, mark: StepMark, is_watched: bool) -> None:
        if self.recorder is not None:
            self.recorder.after_step(mark, is_watched)
            if self.stage in (LAYERED, DONE):
                self.recorder.remove()

    def _keep(self, step: WatchedStep) -> None:
        assert self.watched is not None
        self._count += 1
        if self.stage == WARM and self._count >= self.plan.warm:
            self._overhead = measure_hook_overhead(self.clock, n_calls=300, n_backwards=3)
            self.stage, self._count = PLAIN, 0
        elif self.stage == PLAIN:
            if step.is_whole and step.interval_s is None:
                self._count -= 1
                return
            self.watched.plain.append(step)
            if self._count >= self.plan.plain:
                self._begin_layers() if self.plan.layered else self._finish()
        elif self.stage == LAYERED:
            self.watched.probed.append(step)
            if self._count >= self.plan.layered:
                self._finish()

    def _begin_layers(self) -> None:
        assert self.watched is not None
        self.watched.probe = self._probe = LayerProbe(self.watched.root, self.clock, self._overhead)
        self._probe.attach()
        self.stage, self._count = LAYERED, 0

    def _finish(self) -> None:
        assert self.watched is not None
        self.watched.with_gradient = frozenset(
            id(parameter)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        )
        self._stop_watching()
        self._root = self._optimizer = None
        if self.on_watched is not None:
            self.on_watched(self)

    # -- the loss ----------------------------------------------------------------------------------

    def _record_loss(self) -> None:
        """In one warm step: keep the root's inputs, and record the loss from its output on."""
        assert self.watched is not None
        self._is_recording_due, watched = False, self.watched

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            is_own_thread = threading.get_ident() == self._thread
            if module is not watched.root or self._output is not None or not is_own_thread:
                return
            undo()
            self._guarded(start)(args, kwargs, output)

        def start(args: Any, kwargs: Any, output: Any) -> None:
            watched.inputs = pytree.tree_map(_detached, (args, kwargs))
            watched.flags = {module: module.training for module in watched.root.modules()}
            self._output, self._loss_recorder = output, LossRecorder()
            self._loss_recorder.__enter__()  # type: ignore[no-untyped-call]

        undo = register_module_forward_hook(leave, with_kwargs=True).remove
        self._undo.append(undo)

    def _stop_recording_loss(self) -> None:
        recorder, self._loss_recorder, self._output = self._loss_recorder, None, None
        if recorder is not None:
            recorder.is_open = False
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = self._timed("loading_s")(original, *args, **kwargs)
        self._step.n_batches += 1
        return batch

    def _timed(self, name: str) -> Callable[..., Any]:
        """A wrapper that adds a method's time to a field of the running step."""

        def timed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            began = self.clock.now()
            try:
                return original(*args, **kwargs)
            finally:
                step = self._step
                setattr(step, name, getattr(step, name) + self.clock.now() - began)

        return timed


def _detached(leaf: Any) -> Any:
    is_result = isinstance(leaf, torch.Tensor) and not leaf.is_leaf
    return leaf.detach() if is_result else leaf

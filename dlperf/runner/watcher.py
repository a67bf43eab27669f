"""Finds the training in a program that knows nothing of dlperf, watches a few of its steps, and
goes away.

Nothing is registered on the program's objects. Global hooks find the outermost module that is
called for training and the optimizer that steps its parameters. After warm-up a few steps are timed
with time stamps alone (one hook call a forward), a few more with
:class:`dlperf.profiler.probe.LayerProbe`; then every hook is taken out but two that see the start
of an epoch and count steps. Whatever fails inside a hook is remembered, takes all hooks out, and
never reaches the program.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
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
from dlperf.profiler.layer_times import HookOverhead
from dlperf.profiler.probe import LayerProbe, measure_hook_overhead
from dlperf.recorder.targets import CPU_DEVICES, CPU_ONLY
from dlperf.runner.communication_recording import StepMark
from dlperf.runner.core_speed import SpeedSamples
from dlperf.runner.epoch_log import EpochLog
from dlperf.runner.patching import replace
from dlperf.runner.recomputed_loss import LossRecorder
from dlperf.runner.training_search import FoundTraining, TrainingSearch, reducer_options
from dlperf.runner.watched_training import WatchedStep, WatchedTraining, WatchPlan

if TYPE_CHECKING:
    from dlperf.runner.collectives import CollectiveRecorder

SEEK, WARM, PLAIN, LAYERED, DONE = range(5)


class Watcher:
    """Watches one training; see the module. `model`: watch this one instead of looking for one."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        clock: Clock = Clock(),
        plan: WatchPlan = WatchPlan(),
        on_watched: Callable[[Watcher], None] | None = None,
        looks: SpeedSamples | None = None,
    ) -> None:
        self.clock, self.plan, self.looks = clock, plan, SpeedSamples() if looks is None else looks
        self.stage = SEEK
        self.watched: WatchedTraining | None = None
        self.error: BaseException | None = None
        self.reason: str | None = None
        self.epochs = EpochLog(clock)
        self.on_watched = on_watched
        self.recorder: CollectiveRecorder | None = None
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []
        self._step_hooks: list[Any] = []
        self._root_handle: Any = None
        self._seeker = TrainingSearch(model)
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
        self._switches, self._depth = 0, 0
        self._spoilt = False
        self._tape: LossRecorder | None = None
        self._taping: tuple[Any, ...] | None = None
        self._costs = HookOverhead()

    # -- setting and removing ----------------------------------------------------------------------

    def install(self) -> None:
        """Set the hooks."""
        self._step_hooks = [
            register_optimizer_step_pre_hook(self._guard(self._before_step)),
            register_optimizer_step_post_hook(self._guard(self._after_step)),
        ]
        self._undo += [
            _removal(register_module_forward_pre_hook(self._guard(self._seek_enter))),
            _removal(register_module_forward_hook(self._guard(self._seek_leave), always_call=True)),
            replace(torch.autograd, "backward", self._timed_backward),
            replace(torch.optim.Optimizer, "zero_grad", self._timed("zero_grad_s")),
        ]
        iterator = getattr(data.dataloader, "_BaseDataLoaderIter", None)
        if iterator is not None:
            self._undo.append(replace(iterator, "__next__", self._timed("loading_s")))
        self.epochs.install()

    def follow(self, recorder: CollectiveRecorder) -> None:
        """Tell it of every step, and take it out when the watching ends; after :meth:`install`."""
        self.recorder = recorder
        self._undo.append(recorder.remove)

    def remove(self) -> None:
        """Take every hook out; nothing happens the second time. Not to be called from within an
        optimizer's step.
        """
        self._stop_watching()
        self._remove_step_hooks()
        self.epochs.remove()

    def _remove_step_hooks(self) -> None:
        for handle in self._step_hooks:
            handle.remove()
        self._step_hooks = []

    def _remove_step_hooks_later(self) -> None:
        """An optimizer that is stepping goes through its hooks, none may leave: the next module
        that is called takes them out.
        """
        handle: list[Any] = []

        def leave(_module: nn.Module, _args: Any) -> None:
            if threading.get_ident() == self._thread:
                handle[0].remove()
                self._remove_step_hooks()

        handle.append(register_module_forward_pre_hook(leave))
        self._step_hooks.append(handle[0])

    def _stop_watching(self) -> None:
        self._close_tape()
        if self._root_handle is not None:
            self._root_handle.remove()
            self._root_handle = None
        if self.watched is not None and self.watched.probe is not None:
            self.watched.probe.detach()
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        if self.stage != DONE:
            self.stage = DONE
            self._remove_step_hooks_later()

    def give_up(self, reason: str) -> None:
        """Stop watching because the training is of a kind that cannot be watched."""
        self.reason = reason
        self._stop_watching()

    def fail(self, error: BaseException) -> None:
        """Remember an error of our own and get out of the program's way."""
        self.error = error
        try:
            self._stop_watching()
        except Exception:  # nothing of ours may reach the program
            self._undo = []

    def _guard(self, hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def guarded(*args: Any) -> None:
            if threading.get_ident() != self._thread or self.stage == DONE:
                return
            try:
                hook(*args)
            except Exception as error:
                self.fail(error)

        return guarded

    def _seek_enter(self, module: nn.Module, _args: Any) -> None:
        self._seeker.enter(module)

    def _seek_leave(self, module: nn.Module, _args: Any, _output: Any) -> None:
        self._seeker.leave(module)

    def _seek_step(self, optimizer: Any) -> None:
        found = self._seeker.stepped(optimizer)
        if found is not None:
            self._begin(found)
        elif self._seeker.is_exhausted:
            self.give_up(
                "no module was called in training mode whose parameters the optimizer steps"
            )

    def _begin(self, found: FoundTraining) -> None:
        """The training is known: from here on only its own calls matter."""
        device = next(
            (p.device for p in found.root.parameters() if p.device.type not in CPU_DEVICES), None
        )
        if device is not None:
            self.give_up(f"{type(found.root).__name__} lies on {device}; {CPU_ONLY}")
            return
        self._root, self._optimizer = found.called, found.optimizer
        self.epochs.optimizer = found.optimizer
        self.watched = WatchedTraining(
            found.root,
            found.optimizer,
            type(found.root).__name__,
            type(found.optimizer).__name__,
            threads=torch.get_num_threads(),
        )
        self.watched.notes += found.notes
        self.watched.reducer = reducer_options(found.called)
        self._seeker = TrainingSearch()
        for undo in self._undo[:2]:
            undo()
        del self._undo[:2]
        self.stage, self._count = WARM, 0
        self._await_root()

    # -- one step of the program -------------------------------------------------------------------

    def _await_root(self) -> None:
        """One global hook until the root is called next; the rest of its forward runs as if there
        were none.
        """
        if self._root_handle is None and self.stage in (WARM, PLAIN, LAYERED):
            self._root_handle = register_module_forward_pre_hook(self._guard(self._root_enter))

    def _root_enter(self, module: nn.Module, _args: Any) -> None:
        if module is not self._root:
            return
        if not (module.training and torch.is_grad_enabled()):
            self._spoilt = True  # an evaluation pass: this interval is no training step's
            return
        if self._stepping is not None:
            self.give_up(
                f"{type(self._optimizer).__name__} calls the model from within its step (a"
                " closure); such training is not watched"
            )
            return
        self._root_handle.remove()
        self._root_handle = None
        if self._pass_began is not None and not self._after_backward:
            return  # called again before the backward: the same pass
        self._close_pass()
        if self.stage == WARM and self._count == self.plan.warm - 1 and self._taping is None:
            self._open_tape()
        if self.stage == LAYERED and self.watched is not None and self.watched.probe is not None:
            # the root's own hook has run already; a wrapper's (DDP) inner module is entered in its
            # own time
            self.watched.probe.start(inside_root=module is self.watched.root)
        self._after_backward = False
        self._step.n_passes += 1
        self._pass_began = self.clock.now()
        if self._step.began is None:
            self._step.began = self._pass_began

    def _timed_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = (
                self._depth == 0
                and threading.get_ident() == self._thread
                and self._pass_began is not None
            )
            if not outermost:
                return original(tensors, *args, **kwargs)
            began = self.clock.now()
            self._quietly(lambda: self._backward_begins(tensors, began))
            self._depth += 1
            began = self.clock.now()
            try:
                return original(tensors, *args, **kwargs)
            finally:
                ended = self.clock.now()
                self._depth -= 1
                self._quietly(lambda: self._backward_ended(ended - began, ended))

        return backward

    def _backward_begins(self, tensors: Any, at: float) -> None:
        if self._pass_began is not None:
            self._step.forward_s += at - self._pass_began
        if (
            self._tape is not None
            and self._tape.is_open
            and self.watched is not None
            and self._taping
            and isinstance(tensors, torch.Tensor)
        ):
            self.watched.loss = self._tape.close(self._taping[0], tensors)

    def _backward_ended(self, seconds: float, at: float) -> None:
        self._step.backward_s += seconds
        self._pass_began, self._after_backward = at, True
        self._await_root()

    def _close_pass(self) -> None:
        """The pass before is over: its layers' times."""
        probe = None if self.watched is None else self.watched.probe
        if (
            self._after_backward
            and self.stage == LAYERED
            and probe is not None
            and self.watched is not None
        ):
            probe.stop()
            self.watched.layered.append(probe.finish())
        self._pass_began, self._after_backward = None, False

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if self.stage == SEEK:
            return
        if optimizer is self._optimizer and self._stepping is None:
            self._close_tape()
            self._close_pass()
            self._stepping = self.clock.now()
            self._await_root()  # to notice a closure

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        now = self.clock.now()
        if self.stage == SEEK:
            self._seek_step(optimizer)
            self._last_end = None
            self._tell(optimizer, now)
            return
        if optimizer is not self._optimizer:
            # another model's turn: what the root did for it is none of its own training
            self._close_pass()
            self._step.n_passes, self._step.forward_s, self._step.backward_s = 0, 0.0, 0.0
            return
        if self._stepping is None:
            return
        step = self._step
        step.optimizer_s = now - self._stepping
        self._stepping = None
        switches = self.clock.switches()
        step.disturbed = switches != self._switches
        if self._last_end is not None and not self._spoilt:
            step.interval_s = now - self._last_end
        step.processor_s = time.process_time() - self._used
        if self.stage in (PLAIN, LAYERED):
            step.loaded = self.epochs.loaded
        is_plain = self.stage == PLAIN and step.interval_s is not None and step.n_passes > 0
        if step.n_passes:
            step.pace_s = self.looks.take()
            self._keep(step)
        self._step, self._spoilt, self._switches = WatchedStep(), False, self.clock.switches()
        if self.stage != DONE:
            self._await_root()
        self._tell(optimizer, now, step, is_plain)
        self._last_end, self._used = self.clock.now(), time.process_time()

    def _tell(
        self, optimizer: Any, ended: float, step: WatchedStep | None = None, is_plain: bool = False
    ) -> None:
        if self.recorder is not None:
            began, own_s = (None, 0.0) if step is None else (step.began, step.own_s)
            self.recorder.after_step(
                StepMark(id(optimizer), ended, self.clock.now(), is_plain, began, own_s),
                is_watched=step is not None,
            )
            if self.stage in (LAYERED, DONE):
                self.recorder.remove()

    def _keep(self, step: WatchedStep) -> None:
        assert self.watched is not None
        self._count += 1
        if self.stage == WARM and self._count >= self.plan.warm:
            self._costs = measure_hook_overhead(self.clock, n_calls=300, n_backwards=3)
            self.stage, self._count = PLAIN, 0
        elif self.stage == PLAIN:
            self.watched.plain.append(step)
            if self._count >= self.plan.plain:
                self._begin_layers() if self.plan.layered else self._finish()
        elif self.stage == LAYERED:
            self.watched.probed.append(step)
            if self._count >= self.plan.layered:
                self._finish()

    def _begin_layers(self) -> None:
        assert self.watched is not None
        root = self.watched.root
        if any(type(module).__name__ == "OptimizedModule" for module in root.modules()) or getattr(
            self._root, "_compiled_call_impl", None
        ):
            self.watched.notes.append(
                "the model is compiled: its layers run as one and are not timed"
            )
            self._finish()
            return
        self.watched.probe = LayerProbe(root, self.clock, self._costs)
        self.watched.probe.attach()
        self.stage, self._count = LAYERED, 0

    def _finish(self) -> None:
        assert self.watched is not None
        self.watched.with_gradient = frozenset(
            id(p)
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        )
        self._stop_watching()
        self._root = self._optimizer = None
        if self.on_watched is not None:
            self.on_watched(self)

    # -- the loss ----------------------------------------------------------------------------------

    def _open_tape(self) -> None:
        """In one warm step: the root's inputs, and what the program makes of its output."""
        self._taping = ()
        handle: list[Any] = []

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module is not self._taped() or self._taping or threading.get_ident() != self._thread:
                return
            handle[0].remove()
            self._quietly(lambda: self._tape_from(args, kwargs, output))

        handle.append(register_module_forward_hook(leave, with_kwargs=True))
        self._undo.append(_removal(handle[0]))

    def _taped(self) -> nn.Module | None:
        return None if self.watched is None else self.watched.root

    def _tape_from(self, args: Any, kwargs: Any, output: Any) -> None:
        assert self.watched is not None
        root = self.watched.root
        self.watched.inputs = _detached((args, kwargs))
        self.watched.flags = {module: module.training for module in root.modules()}
        self._taping = (output,)
        self._tape = LossRecorder()
        self._tape.__enter__()  # type: ignore[no-untyped-call]

    def _close_tape(self) -> None:
        if self._tape is not None:
            tape, self._tape, self._taping = self._tape, None, (None,)
            tape.is_open = False
            tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    # -- wrappers ----------------------------------------------------------------------------------

    def _timed(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Add what a method takes to a field of the running step."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                began = self.clock.now()
                try:
                    return original(*args, **kwargs)
                finally:
                    step = self._step
                    setattr(step, name, getattr(step, name) + self.clock.now() - began)

            return timed

        return wrap

    def _quietly(self, action: Callable[[], None]) -> None:
        if self.stage == DONE:
            return
        try:
            action()
        except Exception as error:
            self.fail(error)


def _detached(tree: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) and not leaf.is_leaf else leaf,
        tree,
    )


def _removal(handle: Any) -> Callable[[], None]:
    return lambda: handle.remove()

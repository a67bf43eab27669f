"""Records one step of a model under fake tensors: nothing is allocated, computed or changed.

The step is zero_grad, forward, loss, backward, optimizer. It runs twice. The first time makes
gradients and optimizer state; the second, which is like every later step, is recorded.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dlperf.core import host
from dlperf.core.errors import DlperfError, WorkFailed, check_count, check_type, describe, one_line
from dlperf.core.instructions import InstructionCounter
from dlperf.core.trace import BY_HAND, LOSS, Op, OptimizerInfo, Trace
from dlperf.recorder.attribution import ModuleStack, optimizers_in
from dlperf.recorder.isolation import DeferredInterrupts, ExternalState, preserved_environment
from dlperf.recorder.op_recorder import OpRecorder
from dlperf.recorder.python_code import KEPT_OUT, instruction_counter
from dlperf.recorder.step_contents import ModuleCalls, StepTensors
from dlperf.recorder.substitution import (
    FakeMode,
    NotFakeable,
    Substitution,
    clone_substitute,
    converting_fake_parameters,
    fake_substitute,
)
from dlperf.recorder.targets import (
    Built,
    Target,
    as_built,
    check_built,
    check_loss,
    check_needs_no_closure,
    first_batch_size,
    mean_of_output,
)
from dlperf.recorder.tensors import parameters_in, tensors_of

_FAKE_ONLY = (NotFakeable,) + tuple(
    getattr(fake_tensor, name)
    for name in (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
        "UnsupportedMutationAliasingException",
        "MetadataMismatchError",
        "FakeTensorDeviceMismatchError",
    )
    if hasattr(fake_tensor, name)
)
"""What fake tensors raise where real ones would not."""
_INPLACE = "modified by an inplace operation"


def record(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    inference: bool = False,
    target: str = "",
    batch_size: int | None = None,
) -> Trace:
    """Record one training step, or with `inference` one forward pass, of `model` on `inputs`.

    `inputs` is a tuple of positional arguments, a dict of keyword arguments, or a single tensor.
    `loss` maps the model's output to a scalar tensor (default: the mean of the first floating
    tensor of the output). The default `optimizer` is SGD(lr=0.01). `batch_size` is by default the
    first dimension of the first input tensor.

    The step runs under fake tensors: nothing is allocated, and no parameter, buffer, gradient,
    optimizer state, random state or attribute changes. Where fake tensors cannot represent the step
    (shapes or branches depend on data), it runs on copies of the real ones; a note of the trace
    contains the reason.

    Raises DlperfError for what is no model, no input or nothing to train, WorkFailed where the
    model raises.
    """
    check_type("record", "target", target, str, "a name for reports")
    name = target or (type(model).__name__ if isinstance(model, nn.Module) else "record")
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    built = as_built(model, inputs, mean_of_output if loss is None else loss, optimizer, inference)
    check_built(name, built, inference)
    batch_size = first_batch_size(built.inputs) if batch_size is None else batch_size
    check_count("batch size", batch_size)
    parts = (built.model, built.inputs, built.loss, built.optimizer)
    return record_target(Target(name, batch_size, inference, lambda _: parts), _mode_of(built))


def record_target(target: Target, mode: FakeTensorMode | None = None) -> Trace:
    """Record a step of a target under fake tensors, else on real ones. So runs its builder, too.

    `mode` is the fake-tensor mode that the model's tensors already belong to. Raises DlperfError
    where the builder returns the wrong thing, WorkFailed where it or the model raises.
    """
    with preserved_environment(), DeferredInterrupts() as interrupts, _eager():
        attempt = _Attempt(target, interrupts)
        try:
            return attempt.run(mode or FakeMode(allow_non_fake_inputs=True))
        except WorkFailed as error:
            reason = error.__cause__
            if mode is not None or _INPLACE in str(reason):
                raise  # autograd counts versions of fake tensors as it does of real ones
            memory_bytes = host.this_cpu().memory_bytes or sys.maxsize
            if 5 * attempt.parameter_bytes > memory_bytes and not isinstance(reason, _FAKE_ONLY):
                raise  # real tensors would not fit in memory, and fake ones are not the cause
            note = f"recorded on real tensors, because under fake ones {_why(reason)}"
        return _Attempt(target, interrupts, note).run(None)


def _eager() -> contextlib.AbstractContextManager[Any]:
    """Compiled models run eagerly: their compiled form is unknown before the compiler runs."""
    is_used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_used else contextlib.nullcontext()


def _why(reason: BaseException | None) -> str:
    """Why fake tensors cannot represent the step, in words."""
    text = one_line(reason) if reason is not None else "it failed"
    if isinstance(reason, fake_tensor.DynamicOutputShapeException):
        return f"the shape of a result depends on data ({text})"
    if isinstance(reason, fake_tensor.DataDependentOutputException):
        return f"the step reads the value of a tensor ({text})"
    return str(reason) if isinstance(reason, NotFakeable) else f"it raises {text}"


class _Attempt:
    """One recording, under fake tensors or on real ones."""

    def __init__(self, target: Target, interrupts: DeferredInterrupts, *notes: str) -> None:
        self.parameter_bytes = 0
        self._target, self._interrupts, self._notes = target, interrupts, list(notes)
        self._doing = ""

    def run(self, mode: FakeTensorMode | None) -> Trace:
        """The trace. Whatever user code raises becomes WorkFailed, after all modes are left."""
        target = self._target
        substitution = Substitution(clone_substitute() if mode is None else fake_substitute(mode))
        external = ExternalState(real=mode is None)
        with contextlib.ExitStack() as undo:
            undo.callback(external.restore)
            undo.callback(substitution.restore)
            undo.enter_context(torch.set_grad_enabled(not target.inference))
            if mode is not None:
                # real tensors that the model reaches on its own are accepted, whoever made the mode
                undo.callback(setattr, mode, "allow_non_fake_inputs", mode.allow_non_fake_inputs)
                mode.allow_non_fake_inputs = True
            try:
                with mode or contextlib.nullcontext(), converting_fake_parameters():
                    built = target.build()
                for part in (built.model, built.loss, built.optimizer):
                    substitution.visit(part)
                self.parameter_bytes = sum(
                    parameter.nbytes
                    for parameter in built.model.parameters()
                    if not nn.parameter.is_lazy(parameter)
                )
                built = replace(built, inputs=substitution.value(built.inputs))
                with mode or contextlib.nullcontext():
                    return self._record(built, external)
            except (DlperfError, KeyboardInterrupt):
                raise
            except BaseException as error:  # SystemExit of a model's own included
                raise WorkFailed(
                    f"{target.spec}: {self._doing or 'recording'} raises {describe(error)}"
                ) from error

    def _record(self, built: Built, external: ExternalState) -> Trace:
        target, model = self._target, built.model
        tensors = (*model.parameters(), *model.buffers(), *tensors_of(built.inputs))
        if any(tensor.device.type == "meta" for tensor in tensors):
            self._notes.append(
                "the target lies on the meta device, which has shapes and no data: predicted as if"
                " it lay on the CPU; it cannot be measured"
            )
        if target.inference:
            model.eval()
        else:
            check_needs_no_closure(target.spec, built.optimizer)
        stack = ModuleStack(model)
        recorder = OpRecorder(stack, external)
        if external.real:
            for tensor in _all_tensors(built):
                external.own(tensor)
        with recorder:
            self._step(built, stack, recorder)  # makes gradients, optimizer state and caches
            existing = StepTensors(model, built.optimizer, built.inputs, recorder)
            code = instruction_counter(model, stack, recorder)
            calls = ModuleCalls(model, stack, recorder)
            with calls.watching(self._interrupts), existing.watching():
                recorder.start()
                self._step(built, stack, recorder, existing, code)
        ops, storages = recorder.stop()
        self._interrupts.check()
        return Trace(
            target=target.spec,
            batch_size=target.batch_size,
            layers=calls.layers(existing.rows, code, recorder.silent_nodes()),
            ops=ops,
            storages=storages,
            optimizer=None if target.inference else optimizer_info([built.optimizer], ops),
            inference=target.inference,
            recorded_on="real tensors" if external.real else "fake tensors",
            notes=(*self._notes, *existing.notes, *((KEPT_OUT,) * code.is_kept_out)),
            versions=host.versions(),
            parameters=tuple(existing.parameters),
            buffers=tuple(existing.buffers),
            arrivals=tuple(existing.arrivals),
        )

    def _step(
        self,
        built: Built,
        stack: ModuleStack,
        recorder: OpRecorder,
        existing: StepTensors | None = None,
        code: InstructionCounter | None = None,
    ) -> None:
        """One step. `existing` tells the owners of gradients while the step is recorded, `code`
        counts the instructions of its forward.
        """

        def enter(phase: str, doing: str) -> None:
            self._enter(doing)
            recorder.phase = phase
            if existing is not None and phase in ("zero_grad", "optimizer"):
                recorder.owners = existing.owners()

        if built.optimizer is not None:
            enter("zero_grad", "the optimizer's zero_grad")
            built.optimizer.zero_grad()
        for _ in range(built.n_passes):
            enter("forward", "the model's forward")
            try:
                if code is not None:
                    code.start()
                output = built.forward()
            finally:
                if code is not None:
                    code.stop()
            if built.loss is None or built.optimizer is None:
                return
            self._enter("the loss")
            stack.enter(LOSS)
            scalar = built.loss(output)
            stack.leave(LOSS)
            check_loss(self._target.spec, scalar)
            enter("backward", "the backward")
            stack.begin_backward()
            scalar.backward()  # type: ignore[no-untyped-call]
        assert built.optimizer is not None
        enter("optimizer", "the optimizer's step")
        built.optimizer.step()
        self._enter("the end of the step")

    def _enter(self, doing: str) -> None:
        self._doing = doing
        self._interrupts.check()


def _mode_of(built: Built) -> FakeTensorMode | None:
    """The fake-tensor mode that the model's parameters or inputs belong to."""
    tensors = (*built.model.parameters(), *tensors_of(built.inputs))
    return next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), None)


def _all_tensors(built: Built) -> Iterator[torch.Tensor]:
    """The tensors of the model, the loss, the inputs and the optimizer."""
    for module in (built.model, built.loss):
        if isinstance(module, nn.Module):
            yield from (*module.parameters(), *module.buffers())
    yield from tensors_of(built.inputs)
    for part in optimizers_in(built.optimizer):
        yield from tensors_of((part.param_groups, list(part.state.values())))


def optimizer_info(
    optimizers: Sequence[Any], ops: tuple[Op, ...], n_trained: int = 0, zero_grad: bool = True
) -> OptimizerInfo:
    """The optimizers as one: its type is that of the one with the most parameters. Without any, the
    program updates `n_trained` parameters by hand.
    """
    names = [op.name for op in ops if op.phase == "optimizer"]
    implementation = next(
        (
            kind
            for kind in ("fused", "foreach")
            if any(name.startswith(f"aten._{kind}_") for name in names)
        ),
        "for-loop",
    )
    if not optimizers:
        return OptimizerInfo(BY_HAND, implementation, n_trained, zero_grad)
    trained = [
        {
            id(parameter)
            for part in optimizers_in(optimizer)
            for parameter in parameters_in(part)
            if parameter.grad is not None
        }
        for optimizer in optimizers
    ]
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    kind = max(zip(map(len, trained), kinds))[1]
    return OptimizerInfo(kind, implementation, len(set().union(*trained)), zero_grad)

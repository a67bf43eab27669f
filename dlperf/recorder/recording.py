"""One step of a model, run under fake tensors and written down: nothing is allocated, computed or
changed.

The step is zero_grad, forward, loss, backward, optimizer. It runs twice: the first time gradients
and the optimizer's state come into being, the second, which is what every later step does, is
recorded.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from dlperf.core import host
from dlperf.core.errors import DlperfError, WorkFailed, check_count, check_type, describe
from dlperf.core.trace import LOSS, Op, OptimizerInfo, Trace
from dlperf.recorder.attribution import ModuleStack
from dlperf.recorder.inventory import ModuleCalls, ParameterOrder, StepOwners, optimizers_in
from dlperf.recorder.isolation import DeferredInterrupts, ExternalState, preserved_environment
from dlperf.recorder.op_recorder import OpRecorder, tensors_of
from dlperf.recorder.substitution import (
    NotFakeable,
    Substitution,
    clone_substitute,
    converting_fake_parameters,
    fake_substitute,
)
from dlperf.recorder.targets import (
    Built,
    Target,
    check_built,
    default_optimizer,
    first_batch_size,
    mean_of_output,
)

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
    `loss` maps the model's output to a scalar tensor; without one the mean of the output's first
    floating tensor is taken. The default `optimizer` is SGD(lr=0.01). `batch_size` is by default
    the first dimension of the first input tensor.

    The step runs under fake tensors, so that nothing is allocated and no parameter, buffer,
    gradient, optimizer state, random state or attribute changes. Where fake tensors cannot go
    (shapes or branches that depend on data), it runs on copies of the real ones, and a note in the
    trace says why.

    Raises DlperfError for what is no model, no input or nothing to train, WorkFailed where the
    model raises.
    """
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    elif isinstance(inputs, list):
        inputs = tuple(inputs)
    elif isinstance(inputs, Mapping) and not isinstance(inputs, dict):
        inputs = dict(inputs)
    check_type("record", "target", target, str, "a name for reports")
    name = target or (type(model).__name__ if isinstance(model, nn.Module) else "record")
    if not inference and loss is None:
        loss = mean_of_output
    built = Built(model, inputs, None if inference else loss, None if inference else optimizer)
    check_built(name, built, inference)
    if batch_size is None:
        batch_size = first_batch_size(inputs)
    check_count("batch size", batch_size)
    plan = _Plan(lambda: built, name, batch_size, inference, keeps=True)
    return replace(plan.record(_mode_of(built)), target=target or name)


def record_target(target: Target) -> Trace:
    """Record a step of a target. Its builder is called under fake tensors too, so that no weights
    are allocated.

    Raises DlperfError where the builder returns the wrong thing, WorkFailed where it or the model
    raises.
    """
    return _Plan(
        target.build, target.spec, target.batch_size, target.inference, keeps=False
    ).record(None)


@dataclass
class _Plan:
    """What to record. `keeps` says that `build` returns somebody's own objects, not fresh ones."""

    build: Callable[[], Built]
    name: str
    batch_size: int
    inference: bool
    keeps: bool

    def record(self, mode: FakeTensorMode | None) -> Trace:
        """Under fake tensors, else on real ones. `mode` is the one that the model's tensors already
        belong to.
        """
        with preserved_environment(), DeferredInterrupts() as interrupts, _eager():
            attempt = _Attempt(self, interrupts)
            try:
                return attempt.run(mode or FakeTensorMode(allow_non_fake_inputs=True))
            except WorkFailed as error:
                reason = error.__cause__
                if mode is not None or _INPLACE in str(reason):
                    raise  # autograd counts versions of fake tensors as it does of real ones
                if not isinstance(reason, _FAKE_ONLY) and attempt.parameter_bytes * 5 > (
                    host.this_cpu().memory_bytes or sys.maxsize
                ):
                    raise  # a model that would not fit in memory, and an error that does not look like fake tensors' doing
                note = f"recorded on real tensors, because under fake ones {_why(reason)}"
            return _Attempt(self, interrupts, note).run(None)


def _why(reason: BaseException | None) -> str:
    """Why fake tensors could not go on, in words."""
    text = one_line(reason) if reason is not None else "it failed"
    if isinstance(reason, getattr(fake_tensor, "DynamicOutputShapeException", ())):
        return f"the shape of a result depends on data ({text})"
    if isinstance(reason, getattr(fake_tensor, "DataDependentOutputException", ())):
        return f"the step reads the value of a tensor ({text})"
    return str(reason) if isinstance(reason, NotFakeable) else f"it raises {text}"


def one_line(error: BaseException) -> str:
    """An exception as ``Type: first line of its message``."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if len(text) > 240:
        text = text[:237] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class _Attempt:
    """One recording, under fake tensors or on real ones."""

    def __init__(self, plan: _Plan, interrupts: DeferredInterrupts, *notes: str) -> None:
        self.parameter_bytes = 0
        self._plan = plan
        self._interrupts = interrupts
        self._notes = list(notes)
        self._doing = ""

    def run(self, mode: FakeTensorMode | None) -> Trace:
        """The trace. Whatever user code raises arrives as WorkFailed, after all modes are left."""
        plan = self._plan
        fake = mode is not None
        substitution = Substitution(
            fake_substitute(mode) if mode is not None else clone_substitute()
        )
        foreign = ExternalState(real=not fake)
        try:
            with _accepting_real_tensors(mode), torch.set_grad_enabled(not plan.inference):
                with mode or contextlib.nullcontext(), converting_fake_parameters():
                    built = plan.build()
                substituted = self._substitute(built, substitution)
                with mode or contextlib.nullcontext():
                    return self._record(substituted, foreign, fake)
        except DlperfError:
            raise
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit of a model's own included
            raise WorkFailed(
                f"{plan.name}: {self._doing or 'recording'} raises {describe(error)}"
            ) from error
        finally:
            substitution.restore()
            foreign.restore()

    def _substitute(self, built: Built, substitution: Substitution) -> Built:
        """`built` with substitutes in every place."""
        substitution.visit(built.model)
        if built.loss is not None:
            substitution.visit(built.loss)
        optimizer = built.optimizer
        if optimizer is not None:
            substitution.visit(optimizer)
        self.parameter_bytes = sum(
            p.numel() * p.element_size()
            for p in built.model.parameters()
            if not nn.parameter.is_lazy(p)
        )
        return Built(built.model, substitution.value(built.inputs), built.loss, optimizer)

    def _record(self, built: Built, foreign: ExternalState, fake: bool) -> Trace:
        plan = self._plan
        model = built.model
        if any(
            tensor.device.type == "meta"
            for tensor in (*model.parameters(), *model.buffers(), *tensors_of(built.inputs))
        ):
            self._notes.append(
                "the target lies on the meta device, which has shapes and no data: predicted as if"
                " it lay on the CPU; it cannot be measured"
            )
        if plan.inference:
            model.eval()
        optimizer = None
        if not plan.inference:
            optimizer = built.optimizer or default_optimizer(model)
            _check_steps_alone(plan.name, optimizer)
        stack = ModuleStack(model)
        tape = OpRecorder(stack, foreign)
        if not fake:
            for tensor in _all_tensors(built, optimizer):
                foreign.own(tensor)
        seen = ModuleCalls(stack, tape)
        step = _Step(built, optimizer, stack, tape, plan.name, self._enter_phase)
        with tape:
            step.run()  # gradients, optimizer state and caches come into being
            known = StepOwners(model, optimizer, built.inputs, tape, stack)
            definition = ParameterOrder(model, tape)
            with seen.watching(self._interrupts), definition.watching():
                tape.start()
                step.run(known)
        ops, storages = tape.stop()
        self._interrupts.check()
        info = _optimizer_info(optimizer, ops) if optimizer is not None else None
        return Trace(
            target=plan.name,
            batch_size=plan.batch_size,
            layers=seen.layers(model, known.parameters),
            ops=ops,
            storages=storages,
            optimizer=info,
            inference=plan.inference,
            recorded_on="fake tensors" if fake else "real tensors",
            notes=tuple(self._notes + known.notes),
            versions=host.versions(),
            parameters=tuple(definition.parameters),
            buffers=tuple(definition.buffers),
            arrivals=tuple(definition.arrivals),
        )

    def _enter_phase(self, doing: str) -> None:
        self._doing = doing
        self._interrupts.check()


class _Step:
    """The step itself, as a training loop would write it."""

    def __init__(
        self,
        built: Built,
        optimizer: torch.optim.Optimizer | None,
        stack: ModuleStack,
        tape: OpRecorder,
        name: str,
        enter_phase: Callable[[str], None],
    ) -> None:
        self._built, self._optimizer, self._stack, self._tape, self._name, self._enter_phase = (
            built,
            optimizer,
            stack,
            tape,
            name,
            enter_phase,
        )

    def run(self, known: StepOwners | None = None) -> None:
        """Once through all phases. `known` is told of gradients while the step is recorded."""
        model, inputs, tape = self._built.model, self._built.inputs, self._tape
        optimizer = self._optimizer
        if optimizer is not None:
            self._enter_phase("the optimizer's zero_grad")
            tape.phase = "zero_grad"
            if known is not None:
                tape.owners = known.owners()
            optimizer.zero_grad()
        self._enter_phase("the model's forward")
        tape.phase = "forward"
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        if optimizer is None:
            return
        self._enter_phase("the loss")
        self._stack.enter(LOSS)
        assert self._built.loss is not None
        scalar = self._built.loss(output)
        self._stack.leave(LOSS)
        self._check_loss(scalar)
        self._enter_phase("the backward")
        tape.phase = "backward"
        self._stack.begin_backward()
        scalar.backward()  # type: ignore[no-untyped-call]
        self._enter_phase("the optimizer's step")
        tape.phase = "optimizer"
        if known is not None:
            tape.owners = known.owners()
        optimizer.step()
        self._enter_phase("the end of the step")

    def _check_loss(self, scalar: Any) -> None:
        if not isinstance(scalar, torch.Tensor):
            raise DlperfError(
                f"{self._name}: the loss returned {type(scalar).__name__}; it has to map the"
                " model's output to a scalar tensor"
            )
        if scalar.numel() != 1:
            raise DlperfError(
                f"{self._name}: the loss has shape {tuple(scalar.shape)}; it has to be a scalar"
                " (reduce it, for example by .mean())"
            )
        if not scalar.requires_grad:
            raise DlperfError(
                f"{self._name}: the loss depends on nothing that requires grad; check requires_grad"
                " and no_grad, or use inference"
            )


@contextlib.contextmanager
def _eager() -> Iterator[None]:
    """Compiled models run as they are written: what a compiler makes of them is not known before it
    has run.
    """
    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextlib.contextmanager
def _accepting_real_tensors(mode: FakeTensorMode | None) -> Iterator[None]:
    """Real tensors that the model reaches on its own count as fake ones inside, whoever made the
    mode.
    """
    if mode is None:
        yield
        return
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


def _mode_of(built: Built) -> FakeTensorMode | None:
    """The fake-tensor mode that the model's parameters already live in."""
    for tensor in (*built.model.parameters(), *tensors_of(built.inputs)):
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return None


def _all_tensors(built: Built, optimizer: torch.optim.Optimizer | None) -> Iterator[torch.Tensor]:
    yield from built.model.parameters()
    yield from built.model.buffers()
    yield from tensors_of(built.inputs)
    if isinstance(built.loss, nn.Module):
        yield from built.loss.parameters()
        yield from built.loss.buffers()
    for part in optimizers_in(optimizer):
        for group in part.param_groups:
            yield from tensors_of(group)
        for state in part.state.values():
            yield from tensors_of(state)


def _check_steps_alone(name: str, optimizer: torch.optim.Optimizer) -> None:
    kind = type(optimizer)
    closure = (
        inspect.signature(kind.step).parameters.get("closure")
        if not isinstance(optimizer, torch.optim.LBFGS)
        else None
    )
    if isinstance(optimizer, torch.optim.LBFGS) or (
        closure is not None and closure.default is inspect.Parameter.empty
    ):
        raise DlperfError(
            f"{name}: optimizer {kind.__name__} calls a closure to run the model several times a"
            " step, which is not one step; choose one that steps without"
        )


def _optimizer_info(optimizer: torch.optim.Optimizer, ops: tuple[Op, ...]) -> OptimizerInfo:
    names = [op.name for op in ops if op.phase == "optimizer"]
    if any(name.startswith("aten._fused_") for name in names):
        implementation = "fused"
    elif any(name.startswith("aten._foreach_") for name in names):
        implementation = "foreach"
    else:
        implementation = "for-loop"
    trained = {
        id(p)
        for part in optimizers_in(optimizer)
        for group in part.param_groups
        for p in group["params"]
        if p.grad is not None
    }
    return OptimizerInfo(type(optimizer).__name__, implementation, len(trained))

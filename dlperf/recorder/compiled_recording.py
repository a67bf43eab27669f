"""Records a step of a compiled model while a program computes it: the kernels that Inductor made.

Compiled graphs are watched from outside while they run, so nothing is compiled, and graphs from
Inductor's caches are like others. Library calls (matrix products, convolutions, attention) pass the
dispatcher, where :class:`~dlperf.recorder.op_recorder.OpRecorder` sees them. Generated kernels do
not: for the recorded step, each stands behind a wrapper in the module that calls it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dlperf.core import host
from dlperf.core.errors import DlperfError
from dlperf.core.patching import wrap_attribute
from dlperf.core.trace import Layer, Op, Storage, Trace
from dlperf.ops.fused import FUSED
from dlperf.recorder.attribution import ModuleStack
from dlperf.recorder.generated_code import GeneratedKernel, generated_kernels
from dlperf.recorder.live_recording import OUTSIDE
from dlperf.recorder.op_recorder import OpRecorder
from dlperf.recorder.recording import optimizer_info
from dlperf.recorder.step_contents import StepTensors

_LANES = {"AVX512": 16, "AVX2": 8}
"""Elements of float32 in a vector by the capability that torch reports; 4 for others."""


WatchCalls = Callable[
    [Callable[[], None], Callable[[Any, Any, Any], None]], Callable[[], None] | None
]


def _generated_modules() -> list[Any]:
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    return getattr(cache, "modules", None) or []


def has_compiled_graph() -> bool:
    """Whether Dynamo has made a graph in this program, for any backend.

    For a module that is compiled in place and whose ``forward`` is torch's own it makes none.
    """
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(_generated_modules() or counters.get("stats", {}).get("unique_graphs"))


class CompiledRecording:
    """The recording of one step of a compiled `model` that `optimizers` step.

    `watch_calls` sets what to call before and after each call of the model, and returns a function
    that ends this; it returns None where the model's calls cannot be watched.
    From :meth:`start` to :meth:`stop` the program runs it. Between the first call of the model and
    the end of the optimizer's step everything counts.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Any], watch_calls: WatchCalls
    ) -> None:
        self._model, self._optimizers, self._watch_calls = model, optimizers, watch_calls
        self._thread, self._n_threads = threading.get_ident(), torch.get_num_threads()
        self._recorder = _Recorder(ModuleStack(model))
        self._existing: StepTensors | None = None
        self._hooks = contextlib.ExitStack()
        self._kernels: list[tuple[int, GeneratedKernel, dict[str, int]]] = []
        self._modules: list[Any] = []
        self._n_modules = self._n_graphs = self._n_unseen = 0
        self._n_calls = 0
        self._error: Exception | None = None
        self._recorded: tuple[tuple[Op, ...], tuple[Storage, ...]] | None = None

    def start(self, inside: nn.Module | None = None) -> None:
        """Begin the step. Raises DlperfError where no graph of Inductor can be watched."""
        graph = getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)
        modules = _generated_modules()
        if not has_compiled_graph():
            raise DlperfError("nothing was compiled")
        if graph is None or not modules:
            raise DlperfError("another backend than Inductor compiles the model")
        if torch._C._len_torch_dispatch_stack():
            raise DlperfError("the program has a dispatch mode of its own")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise DlperfError("it is one of several ranks")
        self._existing = StepTensors(self._model, self._optimizers, (), self._recorder)
        with contextlib.ExitStack() as hooks:
            undo = self._watch_calls(self._before_call, self._after_call)
            if undo is None:
                raise DlperfError("it was not seen how one module was compiled")
            hooks.callback(undo)
            hooks.callback(wrap_attribute(graph, "__call__", self._run_graph))
            self._modules, self._n_modules = modules, len(modules)
            for module in modules:
                path = Path(getattr(module, "__file__", None) or "")
                if not path.is_file() or not hasattr(module, "call"):
                    continue
                for name, kernel in generated_kernels(path.read_text()):
                    if callable(getattr(module, name, None)):
                        hooks.callback(wrap_attribute(module, name, self._runner_of(kernel)))
            self._hooks = hooks.pop_all()

    def enter(self, phase: str) -> None:
        """A phase begins; only the optimizer's counts."""
        if phase == "optimizer":
            self._recorder.phase = phase
            self._push()
        elif phase == OUTSIDE:
            self._pop()

    def _before_call(self) -> None:
        """Guards are checked in the call: nothing may lie on the program's dispatch modes."""
        self._attempt(self._pop)
        self._recorder.phase = "forward"
        self._n_calls += 1

    def _after_call(self, _args: Any, _kwargs: Any, _output: Any) -> None:
        """The loss and the backward follow."""
        self._attempt(self._push)

    def stop(self) -> bool:
        """End the step; nothing is left. False where the program's own dispatch mode is on top."""
        if not self._pop():
            return False
        self._hooks.close()
        try:
            self._recorded = self._recorder.stop()
            if len(self._modules) > self._n_modules:
                raise DlperfError("the model was compiled anew in the recorded step")
            if not self._n_graphs:
                raise DlperfError("no graph of Inductor ran in the recorded step")
            if self._n_unseen:
                raise DlperfError("a graph ran no kernel that can be seen from Python")
        except Exception as error:
            self._error = self._error or error
        return True

    def _attempt(self, action: Callable[[], bool]) -> bool:
        """The result of an action of dlperf's own, whose failure may not reach the program."""
        try:
            return action()
        except Exception as error:
            self._error = self._error or error
            return False

    def _push(self) -> bool:
        """Record from now on; whether this changes anything. Only the training's own thread."""
        if self._recorder.is_recording or threading.get_ident() != self._thread:
            return False
        self._recorder.__enter__()  # type: ignore[no-untyped-call]
        self._recorder.start()
        return True

    def _pop(self) -> bool:
        return not self._recorder.is_recording or self._recorder.leave()

    def _run_graph(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._n_graphs += 1
        is_begun, n_before = self._attempt(self._push), len(self._recorder.ops)
        try:
            return original(*args, **kwargs)
        finally:
            self._n_unseen += len(self._recorder.ops) == n_before
            if is_begun:
                self._attempt(self._pop)

    def _runner_of(self, kernel: GeneratedKernel) -> Callable[..., Any]:
        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._attempt(lambda: self._note(kernel, args))
            return original(*args, **kwargs)

        return run

    def _note(self, kernel: GeneratedKernel, args: tuple[Any, ...]) -> bool:
        recorder = self._recorder
        if not recorder.is_recording:
            return False
        named = list(zip(kernel.parameters, args))
        sizes = {name: value for (name, _), value in named if isinstance(value, int)}
        tensors = [(one, value) for one, value in named if isinstance(value, torch.Tensor)]
        reads = [
            recorder.spec(value)
            for (name, is_written), value in tensors
            if not is_written or name.startswith("in_out")
        ]
        writes = [recorder.spec(value) for (_, is_written), value in tensors if is_written]
        self._kernels.append((len(recorder.ops), kernel, sizes))
        recorder.note(Op(f"{FUSED}.default", (tuple(reads),), (), tuple(writes)))
        return True

    def trace(self, target: str, batch_size: int) -> Trace:
        """The step, all of it in one layer. Raises what stopped the recording."""
        if self._error is not None:
            raise self._error
        if self._recorded is None or self._existing is None:
            raise DlperfError("the step did not end")
        ops, storages = list(self._recorded[0]), list(self._recorded[1])
        lanes = _LANES.get(torch.backends.cpu.get_cpu_capability().split("_")[0], 4)
        for index, kernel, sizes in self._kernels:
            work = {
                "instructions": kernel.instructions(sizes),
                "lanes": lanes,
                "threads": self._n_threads if kernel.is_parallel else 1,
            }
            ops[index] = replace(ops[index], kwargs=tuple(work.items()))
        root = type(self._model).__name__
        ops = [replace(_plain(op), layer=root, shares=()) for op in ops]
        rows = [row for rows in self._existing.rows.values() for row in rows]
        parameters = tuple((f"{number}", spec) for number, (_, spec) in enumerate(rows))
        return Trace(
            target=target,
            batch_size=batch_size,
            layers=(Layer(root, root, False, (("", self._n_calls),), parameters=parameters),),
            ops=tuple(ops),
            storages=tuple(_born(ops, storages)),
            optimizer=optimizer_info(self._optimizers, tuple(ops)),
            recorded_on="real tensors",
            versions=host.versions(),
            parameters=tuple(self._existing.parameters),
            buffers=tuple(self._existing.buffers),
        )


class _Recorder(OpRecorder):  # type: ignore[no-untyped-call]
    """Its phase is the backward from the first autograd node on."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            self._follow_backward()
        except Exception as error:
            self.error = self.error or error
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _follow_backward(self) -> Any:
        node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        if node is not None and self.phase != "optimizer":
            self.phase = "backward"
        return node

    def note(self, op: Op) -> None:
        """Add an operation that does not pass the dispatcher."""
        node = self._stack.ordinal(self._follow_backward())
        self.ops.append(replace(op, phase=self.phase, node=node))


def _plain(op: Op) -> Op:
    """The op as an eager step would call it: with a result instead of a destination."""
    usual = {"alpha": 1, "beta": 1}
    kept = [(name, value) for name, value in op.kwargs if name not in usual or value != usual[name]]
    if all(name != "out" for name, _ in kept):
        return replace(op, kwargs=tuple(kept))
    kwargs = tuple((name, value) for name, value in kept if name != "out")
    return replace(op, name=f"{op.packet}.default", kwargs=kwargs)


def _born(ops: Sequence[Op], storages: Sequence[Storage]) -> Iterator[Storage]:
    """The storages; one that an op writes before any reads it was made for that op."""
    first: dict[int, int] = {}
    for index, op in enumerate(ops):
        read = {spec.storage for spec in op.inputs}
        for spec in (*op.inputs, *op.outputs):
            first.setdefault(spec.storage, -1 if spec.storage in read else index)
    for number, storage in enumerate(storages):
        is_new = storage.born < 0 and not storage.kind
        yield replace(storage, born=first.get(number, -1)) if is_new else storage

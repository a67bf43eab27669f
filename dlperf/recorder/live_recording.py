"""Records a step while a program computes it, on its own tensors.

A dispatch mode and hooks follow the step. They change no value, no graph and no random state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dlperf.core import host
from dlperf.core.errors import DlperfError
from dlperf.core.trace import LOSS, Layer, Op, Storage, Trace, tensors_in
from dlperf.recorder.attribution import ModuleStack, layer_names
from dlperf.recorder.isolation import DeferredInterrupts
from dlperf.recorder.op_recorder import OpRecorder
from dlperf.recorder.python_code import KEPT_OUT, instruction_counter
from dlperf.recorder.recording import optimizer_info
from dlperf.recorder.step_contents import ModuleCalls, StepTensors

OUTSIDE = "outside"
"""The phase of work that is no part of the step: loading, metrics, logging."""
_SEQUENCE_FIRST = (
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.Transformer,
)
"""Layers whose inputs have the sequence in the first dimension, unless ``batch_first``."""


class LiveRecording:
    """The recording of one step of `model` that `optimizers` step.

    From :meth:`start` to :meth:`stop` the program runs it; :meth:`enter` names its phases.
    Without optimizers the program updates by hand: work on parameters or gradients in the phase
    ``optimizer`` is the update, and all else in it no part of the step.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Any] = ()) -> None:
        self._model, self._optimizers = model, optimizers
        self._stack = ModuleStack(model, outside=LOSS)
        self._recorder = OpRecorder(self._stack)
        self._calls = ModuleCalls(model, self._stack, self._recorder)
        self._code = instruction_counter(model, self._stack, self._recorder)
        self._existing: StepTensors | None = None
        self._hooks = contextlib.ExitStack()
        self._recorded: tuple[tuple[Op, ...], tuple[Storage, ...]] | None = None
        self._error: Exception | None = None
        self._is_over = self._zeroes = False

    def start(self, inside: nn.Module | None = None) -> None:
        """Begin the step; `inside`: the module whose call has begun.

        Raises DlperfError in a program with a dispatch mode of its own.
        """
        if torch._C._len_torch_dispatch_stack():
            raise DlperfError("the program has a dispatch mode of its own")
        self._existing = StepTensors(self._model, self._optimizers, (), self._recorder)
        self._hooks.enter_context(self._calls.watching(DeferredInterrupts(), inside))
        self._hooks.enter_context(self._existing.watching())
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def enter(self, phase: str) -> None:
        """A phase begins."""
        recorder = self._recorder
        self._code.stop()
        recorder.pause()
        if phase == OUTSIDE or self._is_over:
            return
        self._zeroes |= phase == "zero_grad"
        recorder.phase = phase
        recorder.is_owned_only = phase == "optimizer" and not self._optimizers
        if phase in ("zero_grad", "optimizer") and self._existing is not None:
            recorder.owners = self._existing.owners()
        elif phase == "backward":
            self._stack.begin_backward()
        elif phase == "forward":
            self._code.start()
        recorder.start()

    def stop(self) -> bool:
        """End the step; no hook is left. False where the program's own dispatch mode is on top:
        then it is too early.
        """
        self._is_over = True
        self._code.stop()
        self._recorder.pause()
        if not self._recorder.leave():
            return False
        self._hooks.close()
        try:
            self._recorded = self._recorder.stop()
        except Exception as error:
            self._error = error
        return True

    def trace(self, target: str) -> Trace:
        """The step. Raises what stopped the recording."""
        if self._error is not None:
            raise self._error
        if self._recorded is None or self._existing is None:
            raise DlperfError("the step did not end")
        ops, storages, arrivals = _without_reducer(*self._recorded, self._existing.arrivals)
        layers = self._calls.layers(self._existing.rows, self._code, self._recorder.silent_nodes())
        if all(layer.name != self._stack.root for layer in layers):
            layers = (Layer(self._stack.root, self._stack.root, False), *layers)
        inputs = {
            spec.storage
            for layer in layers
            if any(caller in ("", LOSS) for caller, _ in layer.callers)
            for spec in layer.inputs
        }
        return Trace(
            target=target,
            batch_size=self.batch_size,
            layers=layers,
            ops=ops,
            storages=tuple(
                replace(one, kind="input")
                if number in inputs and one.born < 0 and not one.kind
                else one
                for number, one in enumerate(storages)
            ),
            optimizer=optimizer_info(
                self._optimizers, ops, len({index for index, _ in arrivals}), self._zeroes
            ),
            recorded_on="real tensors",
            notes=(*self._existing.notes, *((KEPT_OUT,) * self._code.is_kept_out)),
            versions=host.versions(),
            parameters=tuple(self._existing.parameters),
            buffers=tuple(self._existing.buffers),
            arrivals=arrivals,
        )

    @property
    def has_update(self) -> bool:
        """Whether an optimizer, or the program by hand, did anything; True where unknown."""
        if self._recorded is None:
            return True
        return any(op.phase == "optimizer" for op in self._recorded[0])

    @property
    def batch_size(self) -> int:
        """Samples of one forward pass: the first dimension of the first input tensor.

        It is the second one where layers take the sequence first, and the inputs are alike.
        """
        layers = [layer for layer in self._calls.layers({}, self._code, {}) if layer.inputs]
        if not layers or not layers[0].inputs[0].shape:
            return 1
        shape = layers[0].inputs[0].shape
        modules = {name: module for module, name in layer_names(self._model).items()}
        for layer in layers:
            module, own = modules[layer.name], layer.inputs[0].shape
            attention = getattr(module, "self_attn", module)
            is_second = isinstance(module, _SEQUENCE_FIRST) and not getattr(
                attention, "batch_first", False
            )
            if is_second and len(own) == 3 and len(shape) > 1 and own[:2] == shape[:2]:
                return max(1, shape[1])
        return max(1, shape[0])


def _without_reducer(
    ops: tuple[Op, ...], storages: tuple[Storage, ...], arrivals: Sequence[tuple[int, int]]
) -> tuple[tuple[Op, ...], tuple[Storage, ...], tuple[tuple[int, int], ...]]:
    """The step of one rank on its own: without collectives and the copies to and from buckets."""
    buckets = {
        spec.storage
        for op in ops
        if op.name.startswith("c10d.")
        for spec in (*tensors_in(op.args), *op.outputs)
    }

    def is_own(op: Op) -> bool:
        if op.name.startswith("c10d."):
            return False
        return op.phase != "backward" or not any(
            spec.storage in buckets for spec in (*tensors_in(op.args), *op.outputs)
        )

    kept = [is_own(op) for op in ops]
    before = [0]
    for one in kept:
        before.append(before[-1] + one)
    return (
        tuple(op for op, is_kept in zip(ops, kept) if is_kept),
        tuple(
            replace(
                one,
                born=before[one.born] if one.born >= 0 and kept[one.born] else -1,
                dies=None if one.dies is None else before[one.dies],
            )
            for one in storages
        ),
        tuple((parameter, before[at]) for parameter, at in arrivals),
    )

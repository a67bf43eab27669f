"""Records every aten operation of a step at dispatch, with the memory it allocates and frees."""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.core.trace import Argument, Op, Storage, Symbol, TensorSpec
from dlperf.recorder.attribution import ModuleStack, OptimizerOwners, sequence_number
from dlperf.recorder.in_place_sums import summed_in_place
from dlperf.recorder.isolation import ExternalState
from dlperf.recorder.substitution import NotFakeable
from dlperf.recorder.tensors import tensors_of

_DEVICE = torch.ops.prim.device.default
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_READ = torch.ops.aten._local_scalar_dense.default
_COUNT = torch.ops.aten.add_.Tensor
_UNREAL_NAMESPACES = frozenset({"prim", "profiler", "debugprims"})
"""A dispatch mode sees these namespaces, and no kernel runs."""
_BETWEEN = ("dlperf.recorder.", "torch._dynamo.", "torch._compile", "torch._ops")
"""Modules whose frames lie between a caller of an operator and the dispatch mode."""
_ENGINE, _INTERPRETER, _N_FRAMES = "_engine_run_backward", "torch.fx.", 6
_PLAIN = frozenset({int, float, bool, str, type(None)})
_DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}
_SYMBOLS = {
    torch.dtype: "dtype",
    torch.device: "device",
    torch.layout: "layout",
    torch.memory_format: "memory_format",
}
_IN_PLACE_NAMES = "add_ sub_ mul_ div_ addcmul_ addcdiv_ lerp_ sqrt_ neg_ zero_ fill_ copy_"
_IN_PLACE = frozenset(getattr(torch.ops.aten, name) for name in _IN_PLACE_NAMES.split())
_name = functools.cache(str)


def _shortcut(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an optimizer's elementwise in-place operation on fake tensors; else None.

    The result is the first argument. A fake tensor with a known value (a step counter) is counted
    and read as the fake mode does it. Optimizers consist of these operations; the shortcut past the
    fake mode halves the time of a recording.
    """
    target = args[0] if args else None
    if type(target) is not FakeTensor:
        return None
    if target.constant is not None:
        if func is _READ:
            return target.constant.item()
        if func is _COUNT and type(args[1]) in (int, float) and target.dim() == 0:
            with no_dispatch():
                func(target.constant, *args[1:])
            return target
        return None
    if func.overloadpacket not in _IN_PLACE or not target.is_floating_point():
        return None
    shape = target.shape
    for value in args[1:]:
        kind = type(value)
        if not (
            kind is float
            or kind is int
            or (kind is FakeTensor and value.shape == shape and value.dtype is target.dtype)
        ):
            return None
    return target


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records operations; it is pushed above the fake-tensor mode.

    Until :meth:`start` it only lets `external` save what the operations could change (None: they
    are the program's own, and may change it). `is_owned_only`: in the optimizer's phase it records
    no operation but those on parameters, gradients and state, and on results of such operations.
    `is_busy`: the code that runs is an operation's or the recording's, not the program's.

    No error may leave :meth:`__torch_dispatch__`: torch queries fake tensors from code that cannot
    raise. The first error is kept, and :meth:`stop` raises it.
    """

    def __init__(self, stack: ModuleStack, external: ExternalState | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.owners: OptimizerOwners | None = None
        self.error: Exception | None = None
        self.is_owned_only = False
        self.is_recording = self.is_busy = False
        self.ops: list[Op] = []
        self._stack, self._external = stack, external
        self._storages: list[Storage] = []
        self._index: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._made: list[tuple[str, int]] = []
        self._place: list[tuple[int, int]] = []
        self._called = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing compiled runs while it records, and torch would import its compiler, which
        takes longer than a second, in the middle of a training that does not use it.
        """
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` and record it."""
        was_busy, self.is_busy = self.is_busy, True
        try:
            return self._dispatch(func, args, kwargs or {})
        finally:
            self.is_busy = was_busy

    def _dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # the answer of the mode below, sooner
        if func.namespace in _UNREAL_NAMESPACES:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), _COMPOSITE
        ):
            # Here autograd takes no composite operator apart before it comes.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        described = node = None
        number = 0
        try:
            if self._external is not None:
                self._external.before(func, args, kwargs)
            if self.is_recording:
                node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
                number = sequence_number()
                argument = self._argument
                described = (
                    tuple([argument(a) for a in args]),
                    tuple([(name, argument(value)) for name, value in kwargs.items()]),
                )
        except Exception as error:
            self.error = self.error or error
        if self.phase != "optimizer" or (result := _shortcut(func, args)) is None:
            result = func(*args, **kwargs)
        try:
            if self._external is not None and self._external.real:
                self._external.after(args, kwargs, result)
            if described is not None:
                self._record(func, described, result, node, number)
        except Exception as error:
            self.error = self.error or error
        return result

    def _record(
        self, func: Any, described: tuple[Any, Any], result: Any, node: Any, number: int
    ) -> None:
        args, kwargs = described
        operands = args + tuple([value for _, value in kwargs])
        is_restricted = self.is_owned_only and self.phase == "optimizer"
        if is_restricted and self.owners is not None and not self.owners.own_any(operands):
            return
        born = len(self.ops)
        outputs = tuple([self.spec(tensor, born) for tensor in tensors_of(result)])
        grad = number > self._number and torch.is_grad_enabled()
        made, self._number = range(self._number, number), number
        shares: tuple[tuple[str, float], ...] = ()
        layer, index = self._stack.root, -1
        if self.phase == "forward":
            layer = self._stack.top
            self._made += [(layer, node_number) for node_number in made if grad]
        elif self.phase == "backward":
            layer, index = self._stack.backward_layer(node), self._stack.ordinal(node)
        elif self.owners is not None:
            layer, shares = self.owners.attribute(operands, outputs)
        if grad:
            self._stack.mark(number - 1, layer)
        name = _name(func)
        from_cpp = self._is_from_cpp(name)
        self.ops.append(
            Op(name, args, kwargs, outputs, self.phase, layer, index, grad, shares, from_cpp)
        )

    def _is_from_cpp(self, name: str) -> bool:
        """Whether no call from Python begins with this op: Python stands where it stood at the op
        before. An op of the same name as the call's first begins another, in a loop.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and _module_of(frame).startswith(_BETWEEN):
            frame = frame.f_back
        if frame is None or frame.f_code.co_name == _ENGINE:
            return True
        is_interpreted = _module_of(frame).startswith(_INTERPRETER)
        place: list[tuple[int, int]] = []
        while frame is not None and len(place) < _N_FRAMES:
            place.append((id(frame.f_code), frame.f_lasti))
            frame = frame.f_back
        if place == self._place and name != self._called and not is_interpreted:
            return True
        self._place, self._called = place, name
        return False

    def _argument(self, value: Any) -> Argument:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind is FakeTensor or isinstance(value, torch.Tensor):
            return self.spec(value)
        if isinstance(value, (list, tuple)):
            return tuple([self._argument(item) for item in value])
        if kind in _SYMBOLS:
            return Symbol(_SYMBOLS[kind], str(value).removeprefix("torch."))
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, torch.Generator):
            return None
        return str(value) if isinstance(value, complex) else kind.__name__

    def spec(self, tensor: torch.Tensor, born: int = -1) -> TensorSpec:
        """The description of `tensor`; its memory is watched from now on.

        `born` is the operation that made it, where it is new. A sparse tensor is described by its
        values: they are the memory that moves.
        """
        if tensor.layout is torch.strided:
            try:
                dtype = _DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype)[6:]
                return TensorSpec(
                    tuple(tensor.shape), tensor.stride(), dtype, self._storage(tensor, born)
                )
            except (RuntimeError, NotImplementedError):  # a nested tensor has no shape
                return TensorSpec.contiguous(tensor.numel(), dtype=str(tensor.dtype)[6:])
        if isinstance(tensor, FakeTensor):
            raise NotFakeable(
                f"it makes {str(tensor.layout)[6:]} tensors, whose size depends on data"
            )
        # reading the values is an operation
        was_recording, self.is_recording = self.is_recording, False
        try:
            values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
            return self.spec(values, born)
        except Exception:  # opaque and blocked layouts tell no more than their number of elements
            return TensorSpec.contiguous(tensor.numel(), dtype=str(tensor.dtype)[6:])
        finally:
            self.is_recording = was_recording

    def _storage(self, tensor: torch.Tensor, born: int) -> int:
        """The number of a tensor's storage; -1 where it has none."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -1
        key, n_bytes = storage._cdata, storage.nbytes()
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._storages)
            self._storages.append(Storage(n_bytes, born, None, ""))

            def freed(watch: Any) -> None:  # the address is free for another storage
                if self._watches.get(key) is watch:
                    del self._watches[key]
                    was_busy, self.is_busy = self.is_busy, True
                    self._change(self._index.pop(key), dies=len(self.ops))
                    self.is_busy = was_busy

            self._watches[key] = weakref.ref(storage, freed)
        elif born >= 0 and n_bytes > self._storages[index].nbytes:
            self._change(index, nbytes=n_bytes)
        return index

    def _change(self, index: int, **values: Any) -> None:
        self._storages[index] = replace(self._storages[index], **values)

    def set_kind(self, tensor: torch.Tensor, kind: str) -> int:
        """Set the kind of a tensor's memory, unless it has one. Returns its storage number."""
        index = self.spec(tensor).storage
        if index >= 0 and not self._storages[index].kind:
            self._change(index, kind=kind)
        return index

    def silent_nodes(self) -> Counter[str]:
        """Autograd nodes in which no operation ran (of an addition, a clone), by the layer whose
        forward made them.
        """
        return Counter(layer for layer, number in self._made if not self._stack.has_run(number))

    def start(self) -> None:
        """Begin to record, or go on; memory that is alive and unknown existed before the step."""
        self._number = sequence_number()
        self.is_recording = True

    def pause(self) -> None:
        """Let operations pass unrecorded until :meth:`start`; the memory is watched on."""
        self.is_recording = False

    def leave(self) -> bool:
        """Leave torch's stack of dispatch modes; False where another mode is on top of it."""
        depth = torch._C._len_torch_dispatch_stack()
        if not depth or torch._C._get_dispatch_stack_at(depth - 1) is not self:
            return False
        self.pause()
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return True

    def stop(self) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        """End the recording. Returns operations and storages as outside of one; raises the first
        error kept.
        """
        self.is_recording = False
        self._index.clear()
        self._watches.clear()
        self._stack.forget()
        if self.error is not None:
            raise self.error
        return summed_in_place(self.ops, self._storages)

"""Every aten operation of a step, written down as it is dispatched, with the memory that it makes
and the memory that dies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dlperf.core.trace import Argument, Op, Storage, Symbol, TensorSpec
from dlperf.recorder.attribution import ModuleStack, OptimizerOwners, sequence_number
from dlperf.recorder.isolation import ExternalState
from dlperf.recorder.substitution import NotFakeable

_DEVICE = torch.ops.prim.device.default
_READ = torch.ops.aten._local_scalar_dense.default
_COUNT = torch.ops.aten.add_.Tensor
_UNREAL_NAMESPACES = frozenset({"prim", "profiler", "debugprims"})
"""Namespaces of what a dispatch mode sees and no kernel runs."""
_PLAIN = frozenset({int, float, bool, str, type(None)})
_DTYPE_NAMES = {
    value: name
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and str(value) == f"torch.{name}"
}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name, None))


_IN_PLACE = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "add_",
        "sub_",
        "mul_",
        "div_",
        "addcmul_",
        "addcdiv_",
        "lerp_",
        "sqrt_",
        "neg_",
        "zero_",
        "fill_",
        "copy_",
    )
)


def _shortcut(func: Any, args: tuple[Any, ...]) -> Any:
    """The result of an optimizer's elementwise in-place operation on fake tensors, which is its
    first argument; else None.

    A fake tensor with a known value, such as a step counter, is counted up and read as the fake
    mode would do it. Optimizers consist of these; not sending them through the fake mode halves the
    time of a recording.
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


@dataclass
class _StorageLife:
    """A storage while it is being watched; see :class:`dlperf.core.trace.Storage`."""

    nbytes: int
    born: int
    dies: int | None = None
    kind: str = ""


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that writes down operations; push it above the fake-tensor mode.

    Until :meth:`start` it only shows `foreign` what the operations could change.

    Nothing that goes wrong in here may leave :meth:`__torch_dispatch__`: torch asks fake tensors
    for their device from code that cannot raise. The first such error is kept, and :meth:`stop`
    raises it.
    """

    def __init__(self, stack: ModuleStack, foreign: ExternalState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "forward"
        self.owners: OptimizerOwners | None = None
        self.error: Exception | None = None
        self._recording = False
        self._ops: list[Op] = []
        self._stack = stack
        self._foreign = foreign
        self._lives: list[_StorageLife] = []
        self._index: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        self._number = 0
        self._names: dict[Any, str] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` and write it down."""
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # what the mode below would answer, without the way there
        kwargs = kwargs or {}
        if func.namespace in _UNREAL_NAMESPACES:
            return func(*args, **kwargs)
        described = node = None
        number = 0
        try:
            self._foreign.before(func, args, kwargs)
            if self._recording:
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
            if self._foreign.real:
                self._foreign.after(args, kwargs, result)
            if described is not None:
                self._write(func, described, result, node, number)
        except Exception as error:
            self.error = self.error or error
        return result

    def _write(
        self, func: Any, described: tuple[Any, Any], result: Any, node: Any, number: int
    ) -> None:
        args, kwargs = described
        born = len(self._ops)
        if isinstance(result, torch.Tensor):
            outputs: tuple[TensorSpec, ...] = (self.spec(result, born),)
        else:
            outputs = tuple([self.spec(tensor, born) for tensor in tensors_of(result)])
        grad = number > self._number and torch.is_grad_enabled()
        self._number = number
        shares: tuple[tuple[str, float], ...] = ()
        place = -1
        if self.phase == "forward":
            layer = self._stack.top
        elif self.phase == "backward":
            layer = self._stack.backward_layer(node)
            place = self._stack.ordinal(node)
        elif self.owners is not None:
            layer, shares = self.owners.attribute(
                args + tuple([value for _, value in kwargs]), outputs
            )
        else:
            layer = self._stack.root
        if grad:
            self._stack.mark(number - 1, layer)
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = str(func)
        self._ops.append(Op(name, args, kwargs, outputs, self.phase, layer, place, grad, shares))

    def _argument(self, value: Any) -> Argument:
        kind = type(value)
        if kind in _PLAIN:
            return value  # type: ignore[no-any-return]
        if kind is FakeTensor or isinstance(value, torch.Tensor):
            return self.spec(value)
        if isinstance(value, (list, tuple)):
            return tuple([self._argument(item) for item in value])
        if kind is torch.dtype:
            return Symbol("dtype", str(value)[6:])
        if kind is torch.device:
            return Symbol("device", str(value))
        if kind is torch.layout:
            return Symbol("layout", str(value)[6:])
        if kind is torch.memory_format:
            return Symbol("memory_format", str(value)[6:])
        if isinstance(value, torch.SymInt):
            return int(value)
        if isinstance(value, (int, float)):
            return value
        if isinstance(value, torch.Generator):
            return None
        return str(value) if isinstance(value, complex) else kind.__name__

    def spec(self, tensor: torch.Tensor, born: int = -1) -> TensorSpec:
        """`tensor` described; its memory is watched from now on, as made by operation `born` where
        it is new.

        A sparse tensor stands as its values: that is the memory which is moved.
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
        recording, self._recording = (
            self._recording,
            False,
        )  # looking at the values is an operation itself
        try:
            values = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
            return TensorSpec(
                tuple(values.shape),
                values.stride(),
                str(tensor.dtype)[6:],
                self._storage(values, born),
            )
        except Exception:  # opaque and blocked layouts: the number of elements is all there is
            return TensorSpec.contiguous(tensor.numel(), dtype=str(tensor.dtype)[6:])
        finally:
            self._recording = recording

    def _storage(self, tensor: torch.Tensor, born: int) -> int:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return -1
        key = storage._cdata
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._lives)
            self._lives.append(_StorageLife(storage.nbytes(), born))
            self._watches[key] = weakref.ref(storage, self._death_callback(key))
        elif born >= 0:
            n_bytes = storage.nbytes()
            if n_bytes > self._lives[index].nbytes:  # resized
                self._lives[index].nbytes = n_bytes
        return index

    def _death_callback(self, key: int) -> Callable[[Any], None]:
        def storage_died(watch: Any) -> None:
            # From here on the address is free for another storage.
            if self._watches.get(key) is watch:
                del self._watches[key]
                self._lives[self._index.pop(key)].dies = len(self._ops)

        return storage_died

    def set_kind(self, tensor: torch.Tensor, kind: str) -> int:
        """Say what a tensor's memory is for; the first to say so is right. Returns the number of
        its storage.
        """
        index = self.spec(tensor).storage
        if index >= 0 and not self._lives[index].kind:
            self._lives[index].kind = kind
        return index

    @property
    def n_ops(self) -> int:
        """How many operations stand on the tape."""
        return len(self._ops)

    def start(self) -> None:
        """Begin to write: all memory that is alive was there before."""
        self._number = sequence_number()
        self._recording = True

    def stop(self) -> tuple[tuple[Op, ...], tuple[Storage, ...]]:
        """End of the recording: the operations, and the storages that they and the layers refer to."""
        self._recording = False
        self._index.clear()
        self._watches.clear()
        self._stack.forget()
        if self.error is not None:
            raise self.error
        return tuple(self._ops), tuple(
            Storage(life.nbytes, life.born, life.dies, life.kind) for life in self._lives
        )

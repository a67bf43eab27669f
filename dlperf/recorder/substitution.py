"""Substitution of the tensors of a model and its optimizer, for the time of a recording.

A step on a user's own model changes parameters, buffers, optimizer state, counters and caches. So a
substitute (a fake tensor, or a clone) replaces every tensor, and every object that references one
gets its content back afterwards. The originals are never written to.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.utils import _pytree as pytree


class NotFakeable(RuntimeError):
    """The step has or makes something that fake tensors cannot represent."""


_MAX_VISITED = 200_000
"""Further plain objects are not looked into."""
_DICTS = (dict, OrderedDict, defaultdict)
_SCALARS = (int, float, str, bool, type(None), bytes)
_CONTAINERS = (*_DICTS, list, tuple, set, deque, FunctionType, MethodType, functools.partial)
_FOREIGN_PACKAGES = frozenset(
    "torch numpy pandas logging threading _thread multiprocessing concurrent asyncio socket io"
    " _io builtins functools weakref re unittest _pytest pytest dlperf datetime pathlib enum"
    " contextvars queue subprocess collections inspect ctypes tqdm tensorboard wandb".split()
)
"""Objects of these packages are not part of a model, and other threads may change them."""


class Substitution:
    """Exchanges the tensors in modules, optimizers and the objects that these reference.

    `substitute` makes a tensor's substitute, once for each original, so that ties stay ties. Every
    object that can hold a tensor is saved first; :meth:`restore` puts its content back. Random
    generators are saved, too.
    """

    def __init__(self, substitute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._substitute = substitute
        self._memo: dict[int, torch.Tensor] = {}
        self._undo = contextlib.ExitStack()
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an id is unique only while its object lives

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """The substitute for `original`; a substitute stands for itself."""
        known = self._memo.get(id(original))
        if known is None:
            known = self._substitute(original)
            self._memo[id(original)] = self._memo[id(known)] = known
            self._alive += [original, known]
            for hook in (hook for hooks in _gradient_hooks(original) for hook in hooks):
                self.visit(hook)
        return known

    def value(self, value: Any) -> Any:
        """A copy of nested tuples, lists and dicts with substitutes for tensors, for inputs."""
        return pytree.tree_map(self.visit, value)

    def visit(self, value: Any) -> Any:
        """Exchange the tensors in `value` and what it references. Returns what replaces `value`."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if kind in _SCALARS or id(value) in self._seen or len(self._seen) > _MAX_VISITED:
            return value
        if isinstance(value, tuple):
            items = [self.visit(item) for item in value]
            return value if _are_same(items, value) else _like(value, items)
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, _DICTS):
            self._visit_dict(value)
        elif isinstance(value, (list, deque, set)):
            self._visit_collection(value)
        elif isinstance(value, MethodType):
            self.visit(value.__self__)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                if not isinstance(item, torch.Tensor):  # cannot be exchanged: an external tensor
                    self.visit(item)
        elif isinstance(value, FunctionType):
            for cell in value.__closure__ or ():
                self._visit_cell(cell)
        elif not self._save_state(value) and (
            isinstance(value, (nn.Module, torch.optim.Optimizer)) or _is_plain(value)
        ):
            self._visit_object(value)
        return value

    def restore(self) -> None:
        """Put the content of every object back, last change first."""
        self._undo.close()

    def _save_state(self, value: Any) -> bool:
        """Save the state of a random generator. Returns False for any other object."""
        if isinstance(value, random.Random):
            self._undo.callback(value.setstate, value.getstate())
        elif isinstance(value, torch.Generator) or is_numpy(value, "RandomState"):
            self._undo.callback(value.set_state, value.get_state())
        elif is_numpy(value, "Generator"):
            bits = value.bit_generator
            self._undo.callback(setattr, bits, "state", bits.state)
        else:
            return False
        return True

    def _visit_object(self, value: Any) -> None:
        kind = type(value)

        def restore_class() -> None:  # a lazy module becomes another class at its first call
            if type(value) is not kind:
                value.__class__ = kind

        self._undo.callback(restore_class)
        self._seen.add(id(value.__dict__))
        self._alive.append(value.__dict__)
        self._visit_dict(value.__dict__)

    def _visit_dict(self, value: dict[Any, Any]) -> None:
        before = list(value.items())
        # past what a subclass makes of an assignment
        base = OrderedDict if isinstance(value, OrderedDict) else dict

        def write(items: list[tuple[Any, Any]]) -> None:
            if not _are_same(
                [part for pair in value.items() for part in pair],
                [part for pair in items for part in pair],
            ):
                base.clear(value)
                for key, item in items:
                    base.__setitem__(value, key, item)

        self._undo.callback(write, before)
        write(
            [
                (self.visit(key) if isinstance(key, torch.Tensor) else key, self.visit(item))
                for key, item in before
            ]
        )

    def _visit_collection(self, value: Any) -> None:
        before = list(value)
        base: Any = next(kind for kind in (list, deque, set) if isinstance(value, kind))

        def write(items: list[Any]) -> None:
            if not _are_same(list(value), items):
                base.clear(value)
                (base.update if base is set else base.extend)(value, items)

        self._undo.callback(write, before)
        if not isinstance(value, set):
            write([self.visit(item) for item in before])

    def _visit_cell(self, cell: CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # empty
            return
        self._undo.callback(setattr, cell, "cell_contents", before)
        after = before if _is_foreign(before) else self.visit(before)
        if after is not before:
            cell.cell_contents = after


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(values) == len(others) and all(map(operator.is_, values, others))


def _like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """A tuple, or named tuple, of `items`."""
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def is_numpy(value: Any, name: str) -> bool:
    """Whether `value` is an instance of numpy's class of this name; numpy is not imported."""
    return type(value).__module__.partition(".")[0] == "numpy" and type(value).__name__ == name


def _is_plain(value: Any) -> bool:
    """Whether `value` is an object of the model's own code."""
    is_code = isinstance(value, (type, ModuleType, BuiltinFunctionType))
    attributes = getattr(value, "__dict__", None)
    return not is_code and isinstance(attributes, dict) and not _is_foreign(value)


def _is_foreign(value: Any) -> bool:
    """Whether `value` is a function or plain object of a package that is not part of a model."""
    if isinstance(value, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
        return False
    owner = value if isinstance(value, FunctionType) else type(value)
    package = (getattr(owner, "__module__", None) or "").partition(".")[0]
    return package in _FOREIGN_PACKAGES and type(value) not in _CONTAINERS


def _gradient_hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """The hooks on a leaf's gradient: before and after its accumulation."""
    if not (tensor.requires_grad and tensor.is_leaf):
        return [], []
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return list((tensor._backward_hooks or {}).values()), list((after or {}).values())


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode of fake tensors that a copied module's tensors share (nn.TransformerEncoder copies its
    layer): a tensor of another mode is one whose views have memory of their own.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> FakeMode:
        return self


def fake_substitute(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes fake tensors of `mode`; nothing is allocated. A 0-dim tensor keeps its value."""

    def substitute(original: torch.Tensor) -> torch.Tensor:
        if isinstance(original, FakeTensor):
            return original
        if isinstance(original, UninitializedTensorMixin):
            raise NotFakeable("it has lazy modules, whose parameters do not exist yet")
        if (
            original.dim() == 0
            and not original.requires_grad
            and original.device.type == "cpu"
            and original.layout is torch.strided
        ):
            number = original.item()
            with mode:
                return torch.tensor(number, dtype=original.dtype)
        fake: torch.Tensor = mode.from_tensor(original.detach(), static_shapes=True)
        return _as_original(fake, original)

    return substitute


def clone_substitute() -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes real copies; views of one memory stay views of one memory."""
    memo: dict[int, Any] = {}

    def substitute(original: torch.Tensor) -> torch.Tensor:
        if isinstance(original, UninitializedTensorMixin):
            lazy: torch.Tensor = type(original)(requires_grad=original.requires_grad)
            return lazy
        return _as_original(copy.deepcopy(original.detach(), memo), original)

    return substitute


def _as_original(substitute: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`substitute` as a parameter or leaf that requires grad, as the original, with its hooks."""
    if isinstance(original, nn.Parameter):
        substitute = nn.Parameter(substitute, requires_grad=original.requires_grad)
    elif original.requires_grad:
        substitute.requires_grad_()
    before, after = _gradient_hooks(original)
    for hook in before:
        substitute.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in after:
        substitute.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return substitute


@contextlib.contextmanager
def converting_fake_parameters() -> Iterator[None]:
    """Inside, ``module.to(...)``, ``.double()`` and the like work on fake parameters.

    torch swaps the contents of a fake parameter with those of the converted one. That fails because
    the fake-tensor mode keeps weak references. Here the converted parameter replaces the other in
    its module. One that does not change (``.to("cpu")``) stays the same object; ties stay ties.
    """
    original = nn.Module._apply
    converted: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def apply(
        self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)  # type: ignore[no-untyped-call]
        fakes: dict[str, Any] = {
            key: value for key, value in self._parameters.items() if isinstance(value, FakeTensor)
        }
        for key, parameter in fakes.items():
            if id(parameter) not in converted:
                with torch.no_grad():
                    result = fn(parameter)
                unchanged = result is parameter or (
                    result.dtype,
                    result.device,
                    result.stride(),
                ) == (parameter.dtype, parameter.device, parameter.stride())
                converted[id(parameter)] = (
                    parameter,
                    (
                        parameter
                        if unchanged
                        else nn.Parameter(result, requires_grad=parameter.requires_grad)
                    ),
                )
            self._parameters[key] = None
        try:
            original(self, fn, recurse=False)  # type: ignore[no-untyped-call]
        finally:
            for key, parameter in fakes.items():
                self._parameters[key] = converted[id(parameter)][1]
        return self

    nn.Module._apply = apply  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]

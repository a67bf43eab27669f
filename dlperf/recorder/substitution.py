"""Substitutes for the tensors of a model and its optimizer, put in for the time of a recording.

A step that is recorded on a user's own model changes parameters, buffers, optimizer state,
counters, caches. So every tensor that the model and the optimizer hold is replaced by a substitute
(a fake tensor, or a clone), and every object that holds one gets its content back afterwards. The
originals are never written to, so giving them back is enough.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]


class NotFakeable(RuntimeError):
    """The step has or makes something that fake tensors cannot stand for."""


_MAX_VISITED = 200_000
"""Objects that a substitution looks at; beyond, attributes of plain objects are left alone."""
_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = frozenset(
    {
        dict,
        OrderedDict,
        defaultdict,
        list,
        tuple,
        set,
        deque,
        types.FunctionType,
        types.MethodType,
        functools.partial,
    }
)
_FOREIGN_CODE = frozenset(
    {
        "torch",
        "numpy",
        "pandas",
        "logging",
        "threading",
        "_thread",
        "multiprocessing",
        "concurrent",
        "asyncio",
        "socket",
        "io",
        "_io",
        "builtins",
        "functools",
        "weakref",
        "re",
        "unittest",
        "_pytest",
        "pytest",
        "dlperf",
        "datetime",
        "pathlib",
        "enum",
        "contextvars",
        "queue",
        "subprocess",
        "collections",
        "inspect",
        "ctypes",
        "tqdm",
        "tensorboard",
        "wandb",
    }
)
"""Packages whose objects are not looked into: they are no part of a model, and other threads may be
at work in them.
"""


class Substitution:
    """Puts substitutes of tensors into modules, optimizers and what they hold; :meth:`restore` puts
    the originals back.

    `substitute` makes one; each original gets a single one, so that ties stay ties.
    """

    def __init__(self, substitute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._substitute = substitute
        self._memo: dict[int, torch.Tensor] = {}
        self._originals: list[torch.Tensor] = []
        self._undo: list[Callable[[], None]] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []

    def tensor(self, original: torch.Tensor) -> torch.Tensor:
        """The substitute for `original`; a substitute stands for itself."""
        known = self._memo.get(id(original))
        if known is None:
            known = self._substitute(original)
            self._memo[id(original)] = self._memo[id(known)] = known
            self._originals += [original, known]  # an id is unique only while its object lives
            if original.requires_grad and original.is_leaf:
                for hooks in (
                    original._backward_hooks,
                    getattr(original, "_post_accumulate_grad_hooks", None),
                ):
                    for hook in (hooks or {}).values():
                        self.visit(hook)
        return known

    def value(self, value: Any) -> Any:
        """A copy of nested tuples, lists and dicts with substitutes in place of tensors, for
        inputs.
        """
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, tuple):
            items = [self.value(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if type(value) is list:
            return [self.value(item) for item in value]
        if isinstance(value, _DICTS) and type(value) in _DICTS:
            copied = value.copy()
            for key, item in value.items():
                copied[key] = self.value(item)
            return copied
        self.visit(value)
        return value

    def visit(self, value: Any) -> Any:
        """Put substitutes into `value` and all that it holds; what to write where `value` stands."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        kind = type(value)
        if (
            kind in (int, float, str, bool, type(None), bytes)
            or id(value) in self._seen
            or len(self._seen) > _MAX_VISITED
        ):
            return value
        if isinstance(value, tuple):
            items = [self.visit(item) for item in value]
            if all(new is old for new, old in zip(items, value)):
                return value
            return kind(*items) if hasattr(value, "_fields") else tuple(items)
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, _DICTS):
            self._visit_dict(value)
        elif kind is list:
            self._visit_list(value)
        elif kind is set or kind is deque:
            self._remember_collection(value)
        elif isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self._visit_callable(value)
        elif isinstance(value, (nn.Module, torch.optim.Optimizer)) or self._is_plain(value):
            self._visit_object(value)
        return value

    def restore(self) -> None:
        """Give every object its content back, last change first."""
        while self._undo:
            self._undo.pop()()

    @staticmethod
    def _is_plain(value: Any) -> bool:
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or not isinstance(
            getattr(value, "__dict__", None), dict
        ):
            return False
        return not Substitution._is_foreign_code(value)

    @staticmethod
    def _is_foreign_code(value: Any) -> bool:
        """Functions and plain objects of packages that are no part of a model."""
        if isinstance(value, (torch.Tensor, nn.Module, torch.optim.Optimizer)):
            return False
        where = (
            getattr(value, "__module__", None)
            if isinstance(value, types.FunctionType)
            else type(value).__module__
        )
        return (where or "").partition(".")[0] in _FOREIGN_CODE and type(value) not in _CONTAINERS

    def _visit_object(self, value: Any) -> None:
        attributes = value.__dict__
        kind = type(value)

        def restore_class() -> None:  # a lazy module becomes another class at its first call
            if type(value) is not kind:
                value.__class__ = kind

        self._undo.append(restore_class)
        self._seen.add(id(attributes))
        self._alive.append(attributes)
        self._visit_dict(attributes)

    def _visit_dict(self, value: dict[Any, Any]) -> None:
        before = list(value.items())
        base = (
            OrderedDict if isinstance(value, OrderedDict) else dict
        )  # past what a subclass makes of an assignment

        def write(items: list[tuple[Any, Any]]) -> None:
            base.clear(value)
            for key, item in items:
                base.__setitem__(value, key, item)

        def restore() -> None:
            if len(value) != len(before) or any(
                a is not c or b is not d for (a, b), (c, d) in zip(value.items(), before)
            ):
                write(before)

        self._undo.append(restore)
        after = [
            (self.visit(key) if isinstance(key, torch.Tensor) else key, self.visit(item))
            for key, item in before
        ]
        if any(a is not c or b is not d for (a, b), (c, d) in zip(after, before)):
            write(after)

    def _visit_list(self, value: list[Any]) -> None:
        before = list(value)

        def restore() -> None:
            if len(value) != len(before) or any(new is not old for new, old in zip(value, before)):
                value[:] = before

        self._undo.append(restore)
        for place, item in enumerate(before):
            new = self.visit(item)
            if new is not item:
                value[place] = new

    def _remember_collection(self, value: Any) -> None:
        before = list(value)

        def restore() -> None:
            if len(value) != len(before) or any(new is not old for new, old in zip(value, before)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(before)

        self._undo.append(restore)

    def _visit_callable(self, value: Any) -> None:
        """What a function carries: the object of a method, the arguments of a partial, what a
        closure captured.
        """
        if isinstance(value, types.MethodType):
            self.visit(value.__self__)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                if not isinstance(
                    item, torch.Tensor
                ):  # these cannot be exchanged, and count as foreign
                    self.visit(item)
        else:
            for cell in value.__closure__ or ():
                self._visit_cell(cell)

    def _visit_cell(self, cell: types.CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # empty
            return
        if self._is_foreign_code(before):
            return

        def restore() -> None:
            cell.cell_contents = before

        self._undo.append(restore)
        after = self.visit(before)
        if after is not before:
            cell.cell_contents = after


def fake_substitute(mode: FakeTensorMode) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes fake tensors of `mode` without allocating anything. Numbers (0-dim) keep their value,
    so that it can be read.
    """

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
    storages: dict[int, torch.UntypedStorage] = {}

    def substitute(original: torch.Tensor) -> torch.Tensor:
        if isinstance(original, UninitializedTensorMixin):
            lazy: torch.Tensor = type(original)(requires_grad=original.requires_grad)
            return lazy
        plain = original.detach()
        if (
            type(plain) is not torch.Tensor
            or plain.layout is not torch.strided
            or plain.is_quantized
        ):
            return _as_original(plain.clone(), original)
        storage = plain.untyped_storage()
        if storage._cdata not in storages:
            storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]
        copy = torch.empty(0, dtype=plain.dtype, device=plain.device)
        copy.set_(storages[storage._cdata], plain.storage_offset(), plain.shape, plain.stride())  # type: ignore[call-overload]
        return _as_original(copy, original)

    return substitute


def _as_original(substitute: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """`substitute` as a parameter, or as a leaf that requires gradients, where the original is one;
    with the original's hooks.
    """
    if isinstance(original, nn.Parameter):
        substitute = nn.Parameter(substitute, requires_grad=original.requires_grad)
    elif original.requires_grad:
        substitute.requires_grad_()
    if original.requires_grad and original.is_leaf:
        for hook in (original._backward_hooks or {}).values():
            substitute.register_hook(hook)  # type: ignore[no-untyped-call]
        for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
            substitute.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return substitute


@contextlib.contextmanager
def converting_fake_parameters() -> Iterator[None]:
    """Inside, ``module.to(...)``, ``.double()`` and their like work on fake parameters too.

    torch exchanges a fake parameter's contents with those of the converted one, which fails because
    the fake-tensor mode itself keeps weak references. Here the converted parameter takes the
    other's place in its module; one that does not change (``.to("cpu")``) stays the same object,
    tied ones stay tied.
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

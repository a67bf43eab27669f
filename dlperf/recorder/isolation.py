"""What a recording must leave as it was: tensors that nobody gave it, random states, interrupts."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch


class ExternalState:
    """Tensors that the step reaches without the model holding them, such as those that are global
    variables.

    Their gradients and contents and the states of generators are noted before the first operation
    that could change them. Among fake tensors every real one is foreign (operations on real ones
    alone are real there, too); with `real` all that was neither given to :meth:`own` nor made by
    the recording.
    """

    def __init__(self, real: bool) -> None:
        self.real = real
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._contents: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._own: dict[int, weakref.ref[Any]] = {}
        self._written: dict[Any, tuple[tuple[int, ...], tuple[str, ...]]] = {}

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Note what `func` could change."""
        for value in args:
            self._note(value)
        for value in kwargs.values():
            self._note(value)
        written = self._written.get(func)
        if written is None:
            written = self._written[func] = _written_by(func)
        for place in written[0]:
            if place < len(args):
                self._save(args[place])
        for name in written[1]:
            if name in kwargs:
                self._save(kwargs[name])

    def after(self, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        """What `func` made is the recording's own."""
        given = {_storage_key(t) for t in (*_flat(args), *_flat(kwargs.values()))}
        for tensor in _flat(results if isinstance(results, (list, tuple)) else (results,)):
            if _storage_key(tensor) not in given:
                self.own(tensor)

    def own(self, tensor: torch.Tensor) -> None:
        """`tensor` was made for the recording; whatever happens to it harms nobody."""
        key = _storage_key(tensor)
        if key is None or key in self._own:
            return
        self._own[key] = weakref.ref(
            tensor.untyped_storage(), lambda _: self._own.pop(key, None) and None
        )

    def restore(self) -> None:
        """Put gradients, contents and generator states back."""
        for tensor, grad in self._leaves.values():
            tensor.grad = grad
        for storage, content in self._contents.values():
            storage.copy_(content)
        for generator, state in self._generators.values():
            generator.set_state(state)

    def _note(self, value: Any) -> None:
        kind = type(value)
        if kind is FakeTensor or kind is float or kind is int:
            return
        if isinstance(value, torch.Tensor):
            if (
                value.requires_grad
                and value.is_leaf
                and id(value) not in self._leaves
                and _storage_key(value) not in self._own
            ):
                self._leaves[id(value)] = (value, value.grad)
        elif kind is list or kind is tuple:
            for item in value:
                self._note(item)
        elif isinstance(value, torch.Generator) and id(value) not in self._generators:
            with no_dispatch():
                self._generators[id(value)] = (value, value.get_state())

    def _save(self, value: Any) -> None:
        if type(value) is FakeTensor:
            return
        if isinstance(value, (list, tuple)):
            for item in value:
                self._save(item)
            return
        key = _storage_key(value)
        if key is not None and key not in self._own and key not in self._contents:
            storage = value.untyped_storage()
            with no_dispatch():
                self._contents[key] = (storage, storage.clone())  # type: ignore[no-untyped-call]


def _written_by(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Places and names of the arguments that an operation writes to."""
    places, names = [], []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            names.append(argument.name)
            if not argument.kwarg_only:
                places.append(place)
    return tuple(places), tuple(names)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _flat(value)


def _storage_key(tensor: Any) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (
        AttributeError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ):  # sparse, nested, or not yet initialized
        return None


class DeferredInterrupts:
    """Ctrl-C (or SIGTERM, where somebody handles it) while fake tensors are at work: torch asks
    them for what they are from code that cannot raise.

    Inside the context an interrupt that meets torch or dlperf is kept, and :meth:`check` raises it;
    one that meets the user's own code is raised at once.
    """

    _TORCH = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
    _LIBRARY = os.path.dirname(os.__file__) + os.sep

    def __init__(self) -> None:
        self._pending: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> DeferredInterrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if error[0] is None:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt if one arrived at a bad moment."""
        if self._pending is not None:
            number, self._pending = self._pending, None
            self._before[number](number, None)  # raises, and knows which signal it was
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: types.FrameType | None) -> None:
        if self._may_raise(frame):
            self._before[number](number, frame)
        else:
            self._pending = number

    def _may_raise(self, frame: types.FrameType | None) -> bool:
        """Whether the innermost code that is no library's is the user's, and no dispatch mode is
        under way around it.
        """
        is_users = None
        while frame is not None:
            name = frame.f_code.co_filename
            if is_users is None:
                if name.startswith(self._TORCH):
                    return False
                if not name.startswith((self._LIBRARY, "<frozen")) or "site-packages" in name:
                    is_users = True
            if frame.f_code.co_name == "__torch_dispatch__":
                return False
            frame = frame.f_back
        return bool(is_users)


@contextlib.contextmanager
def preserved_environment() -> Iterator[None]:
    """Random states, default dtype and autocast caches come back as they were; what the model
    prints goes to stderr.

    The garbage collector rests, so that it does not end the life of a tensor at a moment of its own
    choosing.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_random = sys.modules.get("numpy.random")
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    dtype = torch.get_default_dtype()
    log = logging.getLogger(
        "torch._subclasses.fake_tensor"
    )  # it logs every error that we are about to report ourselves
    disabled = log.disabled
    collecting = gc.isenabled()
    gc.disable()
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.disabled = True
            yield
    finally:
        if collecting:
            gc.enable()
        log.disabled = disabled
        torch.set_default_dtype(dtype)
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)
        torch.clear_autocast_cache()

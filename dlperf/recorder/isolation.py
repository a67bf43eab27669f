"""Isolation of a recording: foreign tensors, random states and interrupts are left as they were."""

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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from dlperf.recorder.accelerator import save_device_random_states
from dlperf.recorder.tensors import storage_key, tensors_of


class ExternalState:
    """Tensors and generators that the step reaches but the model does not hold (global variables).

    Their gradients, contents and states are saved before the first operation that could change
    them. Among fake tensors every real one is external: an operation on real ones alone really
    runs. With `real`, external is what was neither passed to :meth:`own` nor made by the recording.
    """

    def __init__(self, real: bool) -> None:
        self.real = real
        self._undo = contextlib.ExitStack()  # its arguments keep what was saved alive
        self._saved: set[int] = set()
        self._own: dict[int, weakref.ref[Any]] = {}
        self._written: dict[Any, list[tuple[int | None, str]]] = {}

    def before(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Save what `func` could change."""
        for value in (*args, *kwargs.values()):
            self._note(value)
        if func not in self._written:
            self._written[func] = [
                (None if argument.kwarg_only else index, argument.name)
                for index, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
        for index, name in self._written[func]:
            if index is not None and index < len(args):
                self._save(args[index])
            if name in kwargs:
                self._save(kwargs[name])

    def after(self, args: Any, kwargs: dict[str, Any], results: Any) -> None:
        """The recording owns what `func` made."""
        given = {storage_key(tensor) for tensor in tensors_of((args, kwargs))}
        for tensor in tensors_of(results):
            if storage_key(tensor) not in given:
                self.own(tensor)

    def own(self, tensor: torch.Tensor) -> None:
        """The recording owns `tensor`: its changes concern nobody else."""
        key = storage_key(tensor)
        if key is not None and key not in self._own:
            self._own[key] = weakref.ref(
                tensor.untyped_storage(), lambda _: self._own.pop(key, None) and None
            )

    def restore(self) -> None:
        """Put gradients, contents and generator states back."""
        self._undo.close()

    def _note(self, value: Any) -> None:
        kind = type(value)
        if kind is FakeTensor or kind is float or kind is int:
            return
        if isinstance(value, torch.Tensor):
            is_new = value.requires_grad and value.is_leaf and id(value) not in self._saved
            if is_new and storage_key(value) not in self._own:
                self._saved.add(id(value))
                self._undo.callback(setattr, value, "grad", value.grad)
        elif kind is list or kind is tuple:
            for item in value:
                self._note(item)
        elif isinstance(value, torch.Generator) and id(value) not in self._saved:
            self._saved.add(id(value))
            with no_dispatch():
                self._undo.callback(value.set_state, value.get_state())

    def _save(self, value: Any) -> None:
        for tensor in tensors_of(value):
            key = None if type(tensor) is FakeTensor else storage_key(tensor)
            if key is not None and key not in self._own and key not in self._saved:
                self._saved.add(key)
                storage = tensor.untyped_storage()
                with no_dispatch():
                    self._undo.callback(storage.copy_, storage.clone())  # type: ignore[no-untyped-call]


class DeferredInterrupts:
    """Ctrl-C (and SIGTERM, where it has a handler) during a recording.

    torch queries fake tensors from code that cannot raise. So an interrupt inside torch or dlperf
    is kept until :meth:`check`; one inside the user's code is raised at once.
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
        """Raise KeyboardInterrupt where an interrupt was kept."""
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
        """Whether the innermost code outside libraries is the user's and no dispatch mode runs."""
        is_users = False
        while frame is not None:
            name = frame.f_code.co_filename
            if not is_users:
                if name.startswith(self._TORCH):
                    return False
                is_library = name.startswith((self._LIBRARY, "<frozen"))
                is_users = not is_library or "site-packages" in name
            if frame.f_code.co_name == "__torch_dispatch__":
                return False
            frame = frame.f_back
        return is_users


def save_random_states() -> Callable[[], None]:
    """Save the random states of torch, numpy and Python; the result restores them."""
    undo = contextlib.ExitStack()
    undo.callback(torch.set_rng_state, torch.get_rng_state())
    undo.callback(save_device_random_states())
    undo.callback(random.setstate, random.getstate())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        undo.callback(numpy_random.set_state, numpy_random.get_state())
    return undo.close


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """No cyclic garbage collection inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def preserved_environment() -> Iterator[None]:
    """Random states, default dtype and autocast caches are restored; stdout becomes stderr.

    Garbage collection is off, so that tensors are freed where the step frees them. torch's own log
    of failures under fake tensors is off: the recording reports them.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with contextlib.ExitStack() as undo:
        undo.callback(torch.clear_autocast_cache)
        undo.callback(save_random_states())
        undo.callback(torch.set_default_dtype, torch.get_default_dtype())
        undo.callback(setattr, log, "disabled", log.disabled)
        undo.enter_context(without_garbage_collection())
        undo.enter_context(contextlib.redirect_stdout(sys.stderr))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        log.disabled = True
        yield

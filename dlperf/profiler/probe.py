"""Hooks that time layers: module hooks in the forward, a prehook on every autograd node.

The hooks append events to a flat list; :mod:`dlperf.profiler.layer_times` computes the times after
the step. The module hooks are global: nothing is registered on the model, and code that looks for
hooks on its modules (the fast path of nn.TransformerEncoder) does not see them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_calls
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dlperf.core.clock import Clock
from dlperf.core.device_clock import seconds_of, stamper
from dlperf.core.patching import wrap_attribute
from dlperf.profiler.layer_times import (
    END,
    ENTER,
    EXIT,
    FOREIGN,
    PAUSE,
    REACHED,
    RUN,
    START,
    Event,
    HookOverhead,
    StepTimes,
    attribute,
)
from dlperf.recorder.attribution import layer_names, sequence_number

_MOST_EVENTS = 500_000


def graph_nodes(roots: Iterable[Any]) -> list[Any]:
    """The autograd nodes that a backward from `roots` (``grad_fn``s, None allowed) may run."""
    seen, stack, found = set(), list(roots), []
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.append(node)
            stack.extend(following for following, _ in node.next_functions)
    return found


class LayerProbe:
    """Times the layers of a model, one step at a time.

    ``with probe:`` sets the hooks. :meth:`start` begins a step, :meth:`resume` and :meth:`stop`
    enclose each of its passes, :meth:`finish` returns its :class:`StepTimes`. In a pass the model
    is called, and the backward runs through ``torch.autograd.backward`` (which ``Tensor.backward``
    calls).
    """

    def __init__(
        self, model: nn.Module, clock: Clock = Clock(), overhead: HookOverhead = HookOverhead()
    ) -> None:
        self._layers = layer_names(model)  # keeps the modules, so that their ids stay their own
        self.names = [(name, type(module).__name__) for module, name in self._layers.items()]
        self.overhead = overhead
        self._index = {id(module): index for index, module in enumerate(self._layers)}
        self._clock, self._now = clock, stamper(clock)
        self._thread = threading.get_ident()
        # not emptied between steps: its growth would move the heap under the step
        self._events: list[Event] = []
        self._first = 0
        self._hooks = contextlib.ExitStack()
        self._depth = 0

    # -- hooks -------------------------------------------------------------------------------------

    def __enter__(self) -> LayerProbe:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Set the hooks."""
        append, now, index = self._events.append, self._now, self._index
        thread, own = threading.get_ident, self._thread

        def noting(kind: int) -> Callable[..., None]:
            def hook(module: nn.Module, *_: Any) -> None:
                if thread() == own:
                    append((kind, now(), index.get(id(module), FOREIGN), sequence_number()))

            return hook

        enter, leave = noting(ENTER), noting(EXIT)
        self._hooks.callback(register_module_forward_pre_hook(enter).remove)
        self._hooks.callback(register_module_forward_hook(leave, always_call=True).remove)
        self._hooks.callback(wrap_attribute(torch.autograd, "backward", self._backward))

    def detach(self) -> None:
        """Remove every hook."""
        self._hooks.close()

    def _backward(
        self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """The real backward with a prehook on each of its nodes; setting them is not timed."""
        if threading.get_ident() != self._thread:
            return original(tensors, *args, **kwargs)
        events, now, switches = self._events, self._now, self._clock.switches
        events.append((PAUSE, now(), 0, switches()))
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        handles = [
            node.register_prehook(_reached(events.append, now, node._sequence_nr()))
            for node in graph_nodes([getattr(root, "grad_fn", None) for root in roots])
            if type(node).__name__ != "AccumulateGrad"
            and hasattr(node, "register_prehook")
            and hasattr(node, "_sequence_nr")
        ]
        del roots
        self._depth += 1
        count = switches()
        events.append((RUN, now(), 0, count))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            events.append((END, now(), 0, switches()))
            self._depth -= 1
            for handle in handles:
                handle.remove()
            if self._depth:  # inside another backward (reentrant checkpointing), which goes on
                count = switches()
                events.append((START, now(), 0, count))

    # -- a step ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin a step; its time runs from :meth:`resume` on."""
        if len(self._events) > _MOST_EVENTS:
            self._events.clear()
        self._first = len(self._events)

    def resume(self, inside: nn.Module | None = None) -> None:
        """A pass begins. `inside`: the root whose forward hook has run already."""
        if inside is not None and self._events:
            self._events.pop()
            self._first = min(self._first, len(self._events))
        switches = self._clock.switches()
        self._events.append((START, self._now(), 0, switches))
        if inside is not None:
            own = self._index[id(inside)]
            self._events.append((ENTER, self._now(), own, sequence_number()))

    def stop(self) -> None:
        """End the backward (the forward, without one); what follows belongs to no layer."""
        self._events.append((PAUSE, self._now(), 0, self._clock.switches()))

    def finish(self) -> StepTimes:
        """The layers' times of the step, after :meth:`stop`."""
        events = self._events[self._first :]
        if self._clock.device is not None:
            del self._events[self._first :]  # their moments belong to the device's clock again
            moments = seconds_of(self._clock, [event[1] for event in events])
            events = [
                (kind, at, key, number) for (kind, _, key, number), at in zip(events, moments)
            ]
        return attribute(events, self.overhead)


def _reached(
    append: Callable[[Event], None], now: Callable[[], float], number: int
) -> Callable[[Any], None]:
    return lambda _gradients: append((REACHED, now(), number, 0))


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Modules are called without the program's global hooks, which see its own modules alone."""
    hooks = [
        value
        for name, value in vars(module_calls).items()
        if name.startswith("_global_") and "hooks" in name and isinstance(value, dict)
    ]
    kept = [dict(value) for value in hooks]
    for value in hooks:
        value.clear()
    try:
        yield
    finally:
        for value, before in zip(hooks, kept):
            value.update(before)


def measure_hook_overhead(
    clock: Clock = Clock(), n_calls: int = 1500, n_backwards: int = 15
) -> HookOverhead:
    """The hooks' overhead, on an empty module and on a chain of 200 tiny additions."""
    device, now = None if clock.device is None else clock.device.device, stamper(clock)
    one, empty = torch.zeros(1, device=device), nn.Identity()
    probe = LayerProbe(empty, clock)

    def call_s() -> float:
        begin = now()
        for _ in range(100):
            empty(one)
        begin, end = seconds_of(clock, (begin, now()))
        return (end - begin) / 100

    plain, hooked, inside = [], [], []
    with _without_global_hooks():
        for _ in range(n_calls // 100):
            plain.append(call_s())
            probe.attach()
            hooked.append(call_s())
            probe.detach()
            stamps = seconds_of(clock, [event[1] for event in probe._events])
            inside += [leave - enter for enter, leave in zip(stamps[::2], stamps[1::2])]
            probe._events.clear()
    reached: list[Event] = []
    hook = _reached(reached.append, now, 0)

    def backward_s(with_hooks: bool) -> float:
        y = torch.zeros(1, device=device, requires_grad=True)
        for _ in range(200):
            y = y + 1.0
            if with_hooks:
                y.grad_fn.register_prehook(hook)  # type: ignore[union-attr]
        begin = now()
        torch.autograd.backward(y)
        begin, end = seconds_of(clock, (begin, now()))
        return end - begin

    with torch.enable_grad():
        pairs = [(backward_s(False), backward_s(True)) for _ in range(n_backwards)]
    plain_s, hooked_s = (median(taken) for taken in zip(*pairs))
    inside_s = max(0.0, median(inside))
    outside_s = max(0.0, median(hooked) - median(plain) - inside_s)
    node_s = max(0.0, (hooked_s - plain_s) / 200)
    return HookOverhead(inside_s, outside_s, node_s)

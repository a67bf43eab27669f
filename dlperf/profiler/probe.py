"""The instrument that times layers: global module hooks for the forward, a prehook on every
autograd node for the backward.

The hooks only append to a flat list; everything is computed after the step. Time belongs to
whatever ran between two events: in the forward to the innermost module, in the backward to the
layer whose forward made the autograd node (by the node's sequence number), so that in-place
activations, branches, shared modules and functional calls need no rule of their own. A gradient
accumulation runs right after the node that produced it and stays with it; a module that is called
again in the backward (checkpointing) gets that time as backward.

The hooks are global ones: nothing is registered on the model, and code that looks for hooks on its
modules (the fast path of nn.TransformerEncoder) does not see them.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dlperf.core.clock import Clock

OUTSIDE = -1
"""The index of what no module of the model ran: the loss."""

_ENTER, _EXIT, _REACHED, _START, _PAUSE, _RUN, _END = range(7)
_Event = tuple[
    int, float, int, int
]  # kind, time, module index or node number, sequence number or disturbance count
_MOST_EVENTS = 500_000
_FOREIGN = -2  # a module that is not the model's: its time stays with whoever called it

sequence_number: Callable[[], int] | None = getattr(torch._C._autograd, "_get_sequence_nr", None)
"""The number that the next autograd node will get; None where this torch does not tell (then no
backward is attributed).
"""


@dataclass(frozen=True)
class HookOverhead:
    """What the instrument itself takes, in seconds.

    `inside_s`: between a module's two time stamps with an empty forward. `outside_s`: what a hooked
    call costs its caller beyond that. `node_s`: what a prehook adds to a backward.
    """

    inside_s: float = 0.0
    outside_s: float = 0.0
    node_s: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """One instrumented step: seconds by module index (:data:`OUTSIDE` for the loss), and whether
    the core was lost in each phase.

    The seconds are as the clock saw them; `forward_cost` and `backward_cost` are the part that the hooks took, as
    :class:`HookOverhead` prices them. `backward` is None where none was seen, or its nodes could not be told apart.
    """

    forward: dict[int, float]
    backward: dict[int, float] | None
    forward_cost: dict[int, float] = field(default_factory=dict)
    backward_cost: dict[int, float] = field(default_factory=dict)
    forward_disturbed: bool = False
    backward_disturbed: bool = False

    def net_forward_s(self, index: int, factor: float = 1.0) -> float:
        """A layer's forward less `factor` times the hooks' cost, at least 0."""
        return max(0.0, self.forward.get(index, 0.0) - factor * self.forward_cost.get(index, 0.0))

    def net_backward_s(self, index: int, factor: float = 1.0) -> float:
        """A layer's backward less `factor` times the hooks' cost, at least 0."""
        return max(
            0.0, (self.backward or {}).get(index, 0.0) - factor * self.backward_cost.get(index, 0.0)
        )


def graph_nodes(roots: Iterable[Any]) -> list[Any]:
    """The autograd nodes that a backward from `roots` (``grad_fn``s, None allowed) may run,
    gradient accumulations included.
    """
    seen, stack, found = set(), list(roots), []
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found.append(node)
        stack.extend(following for following, _ in node.next_functions)
    return found


def layer_names(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of the model once, under its first qualified name; the root under its type's."""
    return [(name or type(module).__name__, module) for name, module in model.named_modules()]


class LayerProbe:
    """Times the layers of a model through one step at a time.

    ``with probe:`` holds the hooks. :meth:`start` begins a step, :meth:`stop` ends it,
    :meth:`finish` gives its :class:`StepTimes`; in between the model is called, and the backward
    runs through ``torch.autograd.backward`` (which ``Tensor.backward`` calls).
    """

    def __init__(
        self, model: nn.Module, clock: Clock = Clock(), costs: HookOverhead = HookOverhead()
    ) -> None:
        named = layer_names(model)
        self.names = tuple(name for name, _ in named)
        self.types = tuple(type(module).__name__ for _, module in named)
        self.costs = costs
        self._index = {id(module): place for place, (_, module) in enumerate(named)}
        self._modules = [module for _, module in named]  # keeps the ids from being given away
        self._clock = clock
        self._thread = threading.get_ident()
        self._events: list[
            _Event
        ] = []  # not emptied between steps: its growth would move the heap under the step
        self._first = 0
        self._handles: list[Any] = []
        self._undo: Callable[[], None] | None = None
        self._depth = 0

    # -- hooks -------------------------------------------------------------------------------------

    def __enter__(self) -> LayerProbe:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Set the hooks; nothing changes if they are set."""
        if self._handles:
            return
        append, now, index, thread, own = (
            self._events.append,
            self._now,
            self._index,
            threading.get_ident,
            self._thread,
        )
        numbered = sequence_number or (lambda: 0)

        def before(module: nn.Module, _args: Any) -> None:
            if thread() == own:
                append((_ENTER, now(), index.get(id(module), _FOREIGN), numbered()))

        def after(module: nn.Module, _args: Any, _output: Any) -> None:
            if thread() == own:
                append((_EXIT, now(), index.get(id(module), _FOREIGN), numbered()))

        self._handles = [
            register_module_forward_pre_hook(before),
            register_module_forward_hook(after, always_call=True),
        ]
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            return self._backward(original, tensors, args, kwargs)

        torch.autograd.backward = backward

        def undo() -> None:
            # somebody may have replaced it in the meantime; then it is theirs
            if torch.autograd.backward is backward:
                torch.autograd.backward = original

        self._undo = undo

    def detach(self) -> None:
        """Take every hook away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _now(self) -> float:
        if self._clock.synchronize is not None:
            self._clock.synchronize()
        return self._clock.now()

    def _backward(
        self,
        original: Callable[..., Any],
        tensors: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The real backward with a prehook on each of its nodes; the walk over the graph is outside
        the clock.
        """
        if threading.get_ident() != self._thread:
            return original(tensors, *args, **kwargs)
        events, now, switches = self._events, self._now, self._clock.switches
        events.append((_PAUSE, now(), 0, switches()))
        handles = []
        if sequence_number is not None:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            for node in graph_nodes([getattr(root, "grad_fn", None) for root in roots]):
                if (
                    type(node).__name__ == "AccumulateGrad"
                    or not hasattr(node, "register_prehook")
                    or not hasattr(node, "_sequence_nr")
                ):
                    continue
                handles.append(
                    node.register_prehook(_reached(events.append, now, node._sequence_nr()))
                )
            node = roots = None
        self._depth += 1
        count = switches()
        events.append((_RUN, now(), 0, count))
        try:
            return original(tensors, *args, **kwargs)
        finally:
            events.append((_END, now(), 0, switches()))
            self._depth -= 1
            for handle in handles:
                handle.remove()
            if self._depth:  # inside another backward (reentrant checkpointing), which goes on
                count = switches()
                events.append((_START, now(), 0, count))

    # -- a step ------------------------------------------------------------------------------------

    def start(self, inside_root: bool = False) -> None:
        """Begin a step: forget what was seen. `inside_root`: the root's forward hook has run
        already.
        """
        if len(self._events) > _MOST_EVENTS:
            self._events.clear()
        self._first = len(self._events)
        switches = self._clock.switches()
        self._events.append((_START, self._now(), 0, switches))
        if inside_root:
            self._events.append(
                (_ENTER, self._now(), 0, sequence_number() if sequence_number is not None else 0)
            )

    def stop(self) -> None:
        """The backward (the forward, without one) is over; what follows is nobody's."""
        self._events.append((_PAUSE, self._now(), 0, self._clock.switches()))

    def finish(self) -> StepTimes:
        """What the step took by layer, after :meth:`stop`."""
        return attribute(self._events[self._first :], self.costs)


def _reached(
    append: Callable[[_Event], None], now: Callable[[], float], number: int
) -> Callable[[Any], None]:
    def hook(_gradients: Any) -> None:
        append((_REACHED, now(), number, 0))

    return hook


def attribute(events: list[_Event], costs: HookOverhead = HookOverhead()) -> StepTimes:
    """Give every interval between two events to the layer that ran in it.

    Frames are a stack: a module that is inside its forward, or a running backward, whose frame
    holds the owner of the node that it is at. Sequence numbers rise with time, so the module that
    was innermost when a node got its number is found by bisection.
    """
    forward: dict[int, float] = {}
    backward: dict[int, float] = {}
    forward_cost: dict[int, float] = {}
    backward_cost: dict[int, float] = {}
    numbers, makers = (
        [-1],
        [OUTSIDE],
    )  # from this sequence number on, nodes were made by that module
    frames: list[tuple[bool, int, int]] = []  # is a backward, owner, module index
    in_backward = nodes_seen = began = 0
    before_root = (
        0  # the call of the root has no caller among the modules; it is left with the root, index 0
    )
    running, since = False, 0.0
    disturbed = [False, False]

    def charge(seconds: float, owner: int) -> None:
        into = backward if in_backward else forward
        into[owner] = into.get(owner, 0.0) + seconds

    def spend(seconds: float, owner: int) -> None:
        into = backward_cost if in_backward else forward_cost
        into[owner] = into.get(owner, 0.0) + seconds

    def current() -> int:
        return frames[-1][1] if frames else before_root

    for kind, at, key, number in events:
        if running:
            charge(at - since, current())
        since = at
        if kind == _ENTER:
            spend(costs.outside_s, current())
            before_root = OUTSIDE
            frames.append((False, current() if key == _FOREIGN else key, key))
            numbers.append(number)
            makers.append(current())
        elif kind == _EXIT:
            # called also when the forward raises, so frames match but where something swallowed an
            # error
            depth = _depth_of(frames, key)
            if depth is not None:
                spend(costs.inside_s, current())
                del frames[depth:]
                numbers.append(number)
                makers.append(current())
        elif kind == _REACHED:
            while frames and not frames[-1][0]:
                frames.pop()
            if frames:
                owner = makers[bisect_right(numbers, key) - 1]
                frames[-1] = (True, owner, OUTSIDE)
                spend(costs.node_s, owner)
                nodes_seen += 1
        elif kind == _START:
            running, began = True, number
        elif kind == _PAUSE:
            disturbed[bool(in_backward)] |= running and number != began
            running = False
        elif kind == _RUN:
            frames.append((True, current(), OUTSIDE))
            in_backward += 1
            running, began = True, number
        elif kind == _END:
            disturbed[1] |= number != began
            while frames and not frames.pop()[0]:
                pass
            in_backward -= 1
            running = False
    return StepTimes(
        forward,
        backward if nodes_seen else None,
        forward_cost,
        backward_cost,
        forward_disturbed=disturbed[0],
        backward_disturbed=disturbed[1],
    )


def _depth_of(frames: list[tuple[bool, int, int]], key: int) -> int | None:
    """Where module `key` stands in the stack, counted from the top and no further than the nearest
    backward.
    """
    for depth in range(len(frames) - 1, -1, -1):
        is_backward, _, module = frames[depth]
        if is_backward:
            return None
        if module == key:
            return depth
    return None


def measure_hook_overhead(
    clock: Clock = Clock(), n_calls: int = 1500, n_backwards: int = 15
) -> HookOverhead:
    """Measure what the hooks cost on an empty module and on a chain of 200 tiny additions, with
    them and without.
    """
    one, empty = torch.zeros(1), nn.Identity()
    probe = LayerProbe(empty, clock)
    durations: dict[bool, list[float]] = {False: [], True: []}
    inside = []
    for _ in range(n_calls // 100):
        for hooked in (False, True):
            if hooked:
                probe.attach()
            begin = clock.now()
            for _ in range(100):
                empty(one)
            durations[hooked].append((clock.now() - begin) / 100)
            probe.detach()
        stamps = [event[1] for event in probe._events]
        inside += [leave - enter for enter, leave in zip(stamps[::2], stamps[1::2])]
        probe._events.clear()
    inside_s = max(0.0, median(inside))
    outside_s = max(0.0, median(durations[True]) - median(durations[False]) - inside_s)
    times: dict[bool, list[float]] = {False: [], True: []}
    reached: list[_Event] = []
    with torch.enable_grad():
        for _ in range(n_backwards):
            for hooked in (False, True):
                x = torch.zeros(1, requires_grad=True)
                y = x
                for _ in range(200):
                    y = y + 1.0
                    if hooked:
                        y.grad_fn.register_prehook(_reached(reached.append, probe._now, 0))  # type: ignore[union-attr]
                begin = clock.now()
                torch.autograd.backward(y)
                times[hooked].append(clock.now() - begin)
                reached.clear()
    return HookOverhead(
        inside_s, outside_s, max(0.0, (median(times[True]) - median(times[False])) / 200)
    )

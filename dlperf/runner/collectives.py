"""Records every call of a program on its process groups.

A kernel at the dispatch key BackendSelect precedes those of torch's c10d operators, which leave it
free. So calls from C++ (the reducer of DistributedDataParallel), from Python (the program, FSDP,
communication hooks) and functional collectives are recorded alike; process groups, models and
communication hooks do not change. The overhead is 50 to 200 us per call (a blocking all-reduce of
4 B to 4 MB between two processes of a two-core machine), half of it for the completion callback.

- Exact: kind, bytes, group and launch of a call; blocking in Python (`Work.wait`, functional
  `wait_tensor`).
- Late, never early: completion, by the time until its callback gets Python's lock.
- Inferred: blocking in C++ (:mod:`dlperf.runner.communication_recording`), from the closing
  callbacks of autograd around DDP's wait for its buckets, and from the duration of its broadcast of
  buffers.
- Not seen: a wait on a call's future in Python, and the inside of a call. On an accelerator
  launches and waits are the host's, not the streams'. In a first step with static_graph no callback
  can precede DDP's wait: it counts as computation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from dlperf.core.clock import Clock
from dlperf.core.patching import wrap_attribute
from dlperf.core.records.communication import Kind
from dlperf.recorder.tensors import tensors_of
from dlperf.runner.communication_recording import (
    CollectiveCall,
    RecordedStep,
    StepMark,
    WaitRegion,
    assemble,
)

_KINDS: dict[str, tuple[Kind, str]] = {
    "allreduce_": ("all_reduce", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors"),
    "allgather_": ("all_gather", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "_allgather_base_": ("all_gather", "output_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "broadcast_": ("broadcast", "tensors"),
    "reduce_": ("reduce", "tensors"),
    "gather_": ("gather", "input_tensors"),
    "scatter_": ("scatter", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors"),
    "alltoall_base_": ("all_to_all", "input"),
    "barrier": ("barrier", ""),
    "monitored_barrier_": ("barrier", ""),
    "send": ("send", "tensors"),
    "recv_": ("recv", "tensors"),
    "recv_any_source_": ("recv", "tensors"),
}
"""The kinds of c10d's operators, and the argument whose bytes count.

For a gather and a scatter it is a rank's own share of the vector.
"""
_PEERS = ("root_rank", "dst", "src")
_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


class CollectiveRecorder:
    """Records from :meth:`install` to :meth:`remove`.

    A failure inside is kept in `error`, ends the recording, and never reaches the program.
    `between` is called after steps whose successors are not kept. `most_calls` are kept before the
    first step of an optimizer; more are dropped, since a program may run for days and never train.
    """

    def __init__(
        self,
        clock: Clock = Clock(),
        between: Callable[[], None] | None = None,
        most_calls: int = 100_000,
    ) -> None:
        self.clock, self._between, self.most_calls = clock, between, most_calls
        self.error: BaseException | None = None
        self.groups: dict[str, tuple[int, ...]] = {}  # torch's name: ranks of the world
        self.backend = ""
        self.has_forgotten = False  # more than `most_calls` before any optimizer stepped
        self._calls: list[CollectiveCall] = []
        self._regions: dict[tuple[str, int], WaitRegion] = {}
        self._marks: list[StepMark] = []
        self._optimizer: int | None = None
        self._first_began: float | None = None
        self._is_open = False
        # a work must live for its id to be its own
        self._works: dict[int, tuple[Any, CollectiveCall]] = {}
        self._storages: dict[int, CollectiveCall] = {}
        self._without_future: set[str] = set()
        self._n_broadcasts = 0
        self._region: tuple[str, int] | None = None
        self._backward: tuple[str, int] | None = None
        self._library: Any = None
        self._first: Any = None
        self._undo: list[Callable[[], None]] = []

    # -- setting and removing ----------------------------------------------------------------------

    def install(self) -> None:
        """Set the kernels; no effect where torch has no process groups."""
        if not distributed.is_available():
            return
        self._is_open = True
        self._library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name, (kind, argument) in _KINDS.items():
            if hasattr(torch.ops.c10d, name):
                self._put(name, kind, argument)
        functional = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        waiting = self._waiting_kernel(torch.ops._c10d_functional.wait_tensor.default)
        functional.impl("wait_tensor", waiting, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        self._first = register_module_forward_pre_hook(self._forward_begins)
        self._undo = [
            functional._destroy,
            self._library._destroy,
            self._first.remove,
            wrap_attribute(distributed.Work, "wait", self._timed_wait),
            wrap_attribute(distributed, "_broadcast_coalesced", self._timed_broadcast),
        ]

    def remove(self) -> None:
        """Remove the kernels; the recording stays. A second call has no effect."""
        self._is_open = False
        undo, self._undo = self._undo, []
        for action in reversed(undo):
            action()
        self._library = None
        self._works, self._storages = {}, {}

    def fail(self, error: BaseException) -> None:
        """Keep an error of dlperf's own and end the recording."""
        self.error, self._is_open = error, False

    def after_step(self, mark: StepMark, is_watched: bool) -> None:
        """The watched optimizer, or one that may become it, has stepped."""
        if is_watched and self._optimizer is None:
            self._optimizer = mark.optimizer
        self._marks.append(mark)
        recent = self._marks[-2].ended if len(self._marks) > 1 else 0.0
        self._works = {key: pair for key, pair in self._works.items() if pair[1].at >= recent}
        self._storages = {key: call for key, call in self._storages.items() if call.at >= recent}
        if self._between is not None and not mark.plain:
            self._between()

    @property
    def steps(self) -> tuple[RecordedStep, ...]:
        """The first step and the plain ones; the whole run where no optimizer stepped."""
        if self.has_forgotten and not self._marks:
            return ()
        return assemble(
            self._calls,
            self._regions,
            self._marks,
            self._optimizer,
            self._first_began,
            list(self.groups),
        )

    # -- calls -------------------------------------------------------------------------------------

    def _put(self, name: str, kind: Kind, argument: str) -> None:
        operator = getattr(torch.ops.c10d, name).default
        names = [one.name for one in operator._schema.arguments]
        tensors = names.index(argument) if argument else names.index("tensor")
        group = names.index("process_group")
        peer = next((names.index(one) for one in _PEERS if one in names), None)
        now = self.clock.now

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_open:
                return operator.redispatch(keys & _BELOW, *args, **kwargs)
            at = now()
            result = operator.redispatch(keys & _BELOW, *args, **kwargs)
            until = now()
            try:
                moved = list(tensors_of(args[tensors]))
                if not any(tensor.is_meta for tensor in moved):  # tracing is no call
                    name, ranks = self._group(args[group])
                    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in moved)
                    if kind == "barrier":
                        n_bytes = 0
                    elif kind in ("gather", "scatter"):
                        n_bytes *= len(ranks)
                    other = None if peer is None else ranks[args[peer]]
                    region = self._region_now()
                    call = CollectiveCall(kind, n_bytes, name, at, until, other, region)
                    work = result[-1] if isinstance(result, tuple) else result
                    self._issued(call, tensors_of(args[0]), work)
            except Exception as error:
                self.fail(error)
            return result

        self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def _group(self, boxed: Any) -> tuple[str, tuple[int, ...]]:
        group = distributed.ProcessGroup.unbox(boxed)
        name = str(group.group_name)
        if name not in self.groups:
            self.groups[name] = tuple(distributed.get_process_group_ranks(group))
            self.backend = self.backend or str(distributed.get_backend(group))
        return name, self.groups[name]

    def _issued(self, call: CollectiveCall, tensors: Iterable[torch.Tensor], boxed: Any) -> None:
        if len(self._calls) >= self.most_calls and not self._marks:
            self._calls, self._works, self._storages, self.has_forgotten = [], {}, {}, True
        self._calls.append(call)
        if boxed is None:  # a barrier that blocks by itself
            call.waits.append((call.at, call.until))
            call.until = call.at
            return
        work = distributed.Work.unbox(boxed)
        self._works[id(work)] = (work, call)
        for tensor in tensors:
            if tensor.layout == torch.strided:
                self._storages[tensor.untyped_storage()._cdata] = call
        if call.kind not in self._without_future:
            try:
                future = work.get_future()
            except (RuntimeError, NotImplementedError):
                self._without_future.add(call.kind)
                return
            future.add_done_callback(functools.partial(_complete, call, self.clock.now))

    # -- waits -------------------------------------------------------------------------------------

    def _timed_wait(
        self, original: Callable[..., Any], work: Any, *args: Any, **kwargs: Any
    ) -> Any:
        at = self.clock.now()
        try:
            return original(work, *args, **kwargs)
        finally:
            until = self.clock.now()
            _, call = self._works.pop(id(work), (None, None))
            if call is not None:
                call.waits.append((at, until))

    def _waiting_kernel(self, operator: Any) -> Callable[..., Any]:
        now = self.clock.now

        def kernel(keys: Any, tensor: torch.Tensor) -> Any:
            at = now()
            result = operator.redispatch(keys & _BELOW, tensor)
            until = now()
            try:
                call = (
                    None
                    if tensor.is_meta
                    else self._storages.pop(tensor.untyped_storage()._cdata, None)
                )
                if call is not None:
                    call.waits.append((at, until))
            except Exception as error:
                self.fail(error)
            return result

        return kernel

    # -- code in C++ that waits --------------------------------------------------------------------

    def _region_now(self) -> tuple[str, int] | None:
        if self._region is not None:
            return self._region
        task = torch._C._current_graph_task_id()
        if task == -1:
            return None
        region = ("backward", int(task))
        if region != self._backward:
            self._backward = region
            torch.autograd.Variable._execution_engine.queue_callback(
                functools.partial(self._gradients_done, region)
            )
        return region

    def _gradients_done(self, region: tuple[str, int]) -> None:
        """The first of autograd's closing callbacks; DDP's own follows, then one appended here."""
        try:
            at = self.clock.now()
            self._regions[region] = WaitRegion(at, at)
            torch.autograd.Variable._execution_engine.queue_callback(
                functools.partial(self._backward_done, region)
            )
        except Exception as error:
            self.fail(error)

    def _backward_done(self, region: tuple[str, int]) -> None:
        self._regions[region].until = self.clock.now()

    def _timed_broadcast(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._n_broadcasts += 1
        region = self._region = ("broadcast", self._n_broadcasts)
        at = self.clock.now()
        try:
            return original(*args, **kwargs)
        finally:
            self._regions[region] = WaitRegion(at, self.clock.now())
            self._region = None

    def _forward_begins(self, module: nn.Module, _args: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._first_began = self.clock.now()
            self._first.remove()


def _complete(call: CollectiveCall, now: Callable[[], float], _future: Any) -> None:
    call.done = now()

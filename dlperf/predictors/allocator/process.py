"""One process that runs a trace's steps: its requests for memory, on any allocator."""

from __future__ import annotations

import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from dlperf.core.trace import Op, Trace
from dlperf.core.units import KIB
from dlperf.predictors.allocator.caching import CachingAllocator
from dlperf.predictors.allocator.glibc import Heap
from dlperf.predictors.allocator.heap import Jemalloc
from dlperf.predictors.allocator.memory_map import (
    FRESH,
    UNUSED,
    MemoryMap,
    Owners,
    owner_of_scratch,
    run_of,
)
from dlperf.predictors.allocator.policies import Policy
from dlperf.predictors.allocator.primitives import Primitives, primitives
from dlperf.predictors.allocator.small_requests import (
    DESCRIPTION,
    MEMORY,
    N_BACK,
    N_FILLING,
    OUTPUT,
    REORDER,
    STAGE,
    STORAGE,
    TENSOR,
    Engine,
    small_requests,
)
from dlperf.predictors.allocator.stages import Scratch, Stage

N_STEPS, N_COUNTED = 14, 9
"""Steps run and the last of them, which are counted; the thresholds settle within the first few."""
FREE_CHUNKS = (
    (1, 256 * KIB, 416 * KIB),
    (3, 64 * KIB, 220 * KIB),
    (5, KIB, 4 * KIB),
    (87, 136, KIB),
    (93, 24, 120),
)
"""Number and least and largest bytes of the free chunks in a process that has imported torch and
built a model.
"""
PEAK_STEPS = 3
"""Steps whose peak counts. After them the process copies its state, as a measurement does to put it
back, or a script for its best epoch: what is made between steps keeps freed memory apart. A bare
loop that makes nothing there gives back more.
"""
_STATE = ("parameter", "buffer", "optimizer")
IMPORTED_BYTES = 943 * KIB
"""The largest mapping that a process has freed which has imported torch (2.13, Python 3.11): from
there glibc's thresholds start.
"""


def allocator_of(policy: Policy) -> Heap | Jemalloc:
    """A fresh process' allocator under a policy."""
    return Jemalloc(policy) if policy.purges else Heap(policy)


@dataclass(frozen=True)
class StepPages:
    """One step of a process by op: faults of 4 KiB pages, those of them by which the heap grew,
    faults of 2 MiB pages, and pages given back before it (`released` has a place more, for the
    step's end).
    """

    faults: tuple[int, ...]
    heap_faults: tuple[int, ...]
    huge_faults: tuple[int, ...]
    released: tuple[int, ...]


_NONE_KEPT = Primitives()


@dataclass(frozen=True)
class Process:
    """The counted steps of one process; both `predecessors` (of the last of them) and `peak_bytes`
    as in :class:`AllocatorSimulation`; requests for memory in all steps.
    """

    steps: tuple[StepPages, ...]
    predecessors: tuple[Owners, ...]
    predecessors_of_blocks: tuple[Owners, ...]
    peak_bytes: int
    n_requests: int

    @property
    def usual_faults(self) -> float:
        """First touches of 4 KiB pages in the median step."""
        return statistics.median(sum(step.faults) for step in self.steps)


class Script:
    """A trace's allocations by op, ready to be run by any allocator. `kept` are (storage, bytes) of
    memory whose size no recording could know. `lasting` are (op, bytes) of blocks that the first
    run of an op makes and nothing frees.
    """

    def __init__(
        self,
        trace: Trace,
        scratch_bytes: Callable[[Op], Scratch],
        kept: Sequence[tuple[int, int]] = (),
        lasting: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._sizes = [storage.nbytes for storage in trace.storages]
        for index, n_bytes in kept:
            self._sizes[index] = max(self._sizes[index], n_bytes)
        self._copied = [
            n_bytes
            for storage, n_bytes in zip(trace.storages, self._sizes)
            if storage.kind in _STATE and n_bytes
        ]
        self._n_ops = len(trace.ops)
        self._before: list[int] = []  # there before the first step and after the last
        # Made in the first step alone, before an op.
        self._once: dict[int, list[int]] = defaultdict(list)
        self._born: dict[int, list[int]] = defaultdict(list)
        self._dying: dict[int, list[int]] = defaultdict(list)
        self._scratch = [scratch_bytes(op) for op in trace.ops]
        self._small = small_requests(trace, lambda index: bool(self._scratch[index]))
        momenta = _momenta(trace)
        for index, storage in enumerate(trace.storages):
            if not self._sizes[index]:
                continue
            if storage.born >= 0:
                self._born[storage.born].append(index)
            elif storage.kind == "optimizer":
                # It comes with gradients alive and activations gone.
                self._once[momenta.get(index, self._small.optimizer)].append(index)
            elif storage.dies is None:
                self._before.append(index)
            if storage.dies is not None:
                self._dying[storage.dies].append(index)
        for dying in self._dying.values():  # a node's gradients before what it saved
            dying.sort(key=lambda index: trace.storages[index].born < self._small.backward)
        for index, n_bytes in lasting:
            self._once[index].append(len(self._sizes))
            self._sizes.append(n_bytes)
        self._stages = list(map(self._stages_of, range(self._n_ops)))
        self._primitives = primitives(trace.ops, self._scratch)
        self._survivors = _survivors(trace)

    def run(self, policy: Policy, seed: int = 0) -> Process:
        """Run the steps in a fresh process; `seed` decides which small chunks are free in it."""
        heap = allocator_of(policy)
        if policy.adapts:
            heap.free(heap.allocate(IMPORTED_BYTES)[0])
        if isinstance(heap, Heap):  # others keep small requests apart from tensors
            dice, free = random.Random(seed), []
            for n_chunks, least, most in FREE_CHUNKS:
                for _ in range(n_chunks):
                    free.append(heap.malloc(dice.randrange(least, most)))
                    heap.malloc(OUTPUT)
            heap.fill_cache()
            for address in free:
                heap.free(address)
        return self.run_on(heap, copies=True)

    def run_on(
        self,
        heap: Heap | Jemalloc | CachingAllocator,
        watch: Callable[[int, Collection[int]], None] | None = None,
        copies: bool = False,
    ) -> Process:
        """Run the steps on a fresh allocator. `watch` gets each op and the storages that live while
        it runs. With `copies`, the process copies its state after the first steps.
        """
        address: dict[int, int] = {}
        beside: dict[int, list[int]] = {}
        predecessors: list[Owners] = [()] * len(self._sizes)
        blocks: list[Counter[int]] = []
        memory = MemoryMap()
        small, steps, at_first = self._small, [], heap.resident_bytes
        live_bytes = 0

        def malloc(sizes: Sequence[int]) -> list[int]:
            if not sizes:  # most of the time
                return []
            return [at for n_bytes in sizes if (at := heap.malloc(n_bytes)) is not None]

        def free(addresses: list[int]) -> None:
            while addresses:
                heap.free(addresses.pop())

        def take(sizes: Iterable[int]) -> list[int]:
            made = []
            for n_bytes in sizes:
                at, n_faults = heap.allocate(n_bytes)
                for owner, part in memory.take(at, n_bytes, this_run).items():
                    if owner != this_run:  # an earlier pass
                        blocks[index][FRESH if n_faults else owner] += part
                made.append(at)
                faults[index] += n_faults
            return made

        def take_untouched(sizes: Iterable[int]) -> list[int]:
            """Of a mapping no page is there before it is touched; where the heap grows, the next
            one to use its pages touches them, mostly in the same step.
            """
            n_heap = heap.heap_faults
            made = [heap.allocate(n_bytes)[0] for n_bytes in sizes]
            faults[index] += heap.heap_faults - n_heap
            return made

        def describe(sizes: Sequence[int]) -> list[int]:
            passing = malloc(DESCRIPTION)
            made = take(sizes) + malloc(MEMORY)
            free(passing)
            return made

        def memories(count: int) -> list[int]:
            return [at for _ in range(count) for at in describe(())]

        def convert(sizes: Sequence[int], conversions: Iterable[Sequence[int]] = ()) -> list[int]:
            if index not in small.memories:
                return take(sizes)
            made: list[int] = []
            for n_bytes, chunks in zip(sizes, chain(conversions, repeat(()))):
                passing = malloc(REORDER)
                made += describe((n_bytes,))
                malloc(chunks)
                free(passing + malloc(REORDER) + memories(N_FILLING))
            return made

        def make(storage: int) -> int:
            nonlocal live_bytes
            live_bytes += self._sizes[storage]
            records = malloc((STORAGE,))
            address[storage], n_faults = heap.allocate(self._sizes[storage])
            beside[storage] = records + malloc(TENSOR)
            return n_faults

        def drop(storages: Iterable[int]) -> None:
            nonlocal live_bytes
            for storage in storages:
                if storage in address:
                    live_bytes -= self._sizes[storage]
                    heap.free(address.pop(storage))
                    free(beside.pop(storage))

        for storage in self._before:
            make(storage)
        peak = max(heap.resident_bytes, at_first + live_bytes)  # some lie in what was free
        for step in range(N_STEPS):
            kept = self._primitives if step == 0 else {}
            faults, heap_faults, huge_faults = ([0] * self._n_ops for _ in range(3))
            released = [0] * (self._n_ops + 1)
            graph: list[int] = []
            blocks = [Counter() for _ in range(self._n_ops)]
            engine = Engine(malloc, free)
            for index in range(self._n_ops):
                this_run = owner_of_scratch(step * self._n_ops + index)
                if index == small.backward:
                    engine.start(len(small.first_of_node))
                if index == small.optimizer:
                    engine.end()
                if index in small.first_of_node:
                    engine.next_node()
                n_released = heap.released_pages
                drop(self._dying.get(index, ()))
                released[index] += heap.released_pages - n_released
                n_huge, n_heap = heap.huge_faults, heap.heap_faults
                n_released = heap.released_pages
                for storage in self._once.get(index, ()) if step == 0 else ():
                    make(storage)
                graph += malloc(small.nodes.get(index, ()))
                call = malloc(small.calls.get(index, ())) + memories(small.memories.get(index, 0))
                for number, (stage, results) in enumerate(self._stages[index]):
                    first = kept.get((index, number), _NONE_KEPT)
                    within = malloc(STAGE if index in small.memories else ())
                    held = take_untouched(stage.untouched) + take(stage.held)
                    malloc(first.before)
                    read = convert(stage.read, first.conversions)
                    written = convert(stage.written[:1])
                    malloc(first.after)
                    if step < PEAK_STEPS:
                        peak = max(peak, heap.resident_bytes)
                    free(read)
                    written += take(stage.written[1:])
                    malloc(first.between)
                    for storage in results:
                        # It may have outlived the last step: no trace shows who frees it.
                        drop((storage,))
                        n_faults = make(storage)
                        faults[index] += n_faults
                        former = memory.take(address[storage], self._sizes[storage], storage)
                        predecessors[storage] = (
                            ((FRESH, self._sizes[storage]),) if n_faults else tuple(former.items())
                        )
                    if written and index in small.memories:
                        free(malloc(REORDER) + memories(N_BACK + N_FILLING))
                    after = convert(stage.after)
                    malloc(first.last)
                    if watch is not None:
                        watch(index, address.keys())
                    if step < PEAK_STEPS:
                        peak = max(peak, heap.resident_bytes, at_first + live_bytes)
                    for ends_with_stage in (after, written, held, within):
                        free(ends_with_stage)
                free(call)
                if index in small.nodes:
                    graph += malloc((OUTPUT,))
                heap_faults[index] = heap.heap_faults - n_heap
                huge_faults[index] = heap.huge_faults - n_huge
                released[index + 1] += heap.released_pages - n_released  # by the op itself
            engine.end()
            n_released = heap.released_pages
            drop(self._dying.get(self._n_ops, ()))
            free(graph)
            released[self._n_ops] += heap.released_pages - n_released
            in_step = faults, heap_faults, huge_faults, released
            steps.append(StepPages(*map(tuple, in_step)))
            # Survivors of this step are what the next step expects from before it.
            for made, old in self._survivors.items():
                if made in address and old not in address:
                    address[old], beside[old] = address.pop(made), beside.pop(made)
            for n_bytes in self._copied if copies and step == PEAK_STEPS - 1 else ():
                malloc((STORAGE,))
                heap.allocate(n_bytes)
                malloc(TENSOR)
        counted = tuple(steps[-N_COUNTED:])
        by_op = self._by_op
        return Process(
            counted,
            tuple(map(by_op, predecessors)),
            tuple(by_op(owners.items()) for owners in blocks),
            peak - at_first,
            heap.n_requests,
        )

    def _by_op(self, owners: Iterable[tuple[int, int]]) -> Owners:
        """Owners of memory, the runs of an op as one."""
        found: Counter[int] = Counter()
        for owner, n_bytes in owners:
            is_run = owner < UNUSED
            found[owner_of_scratch(run_of(owner) % self._n_ops) if is_run else owner] += n_bytes
        return tuple(found.items())

    def _stages_of(self, index: int) -> list[tuple[Stage, Sequence[int]]]:
        """The stages of an op, each with the storages that it makes: of a convolution's backward
        the first makes the gradient of the input.
        """
        stages, born = self._scratch[index] or (Stage(),), self._born.get(index, ())
        if len(stages) == 1:
            return [(stages[0], born)]
        return [
            (stage, born[:1] if number == 0 else born[1:] if number == 1 else ())
            for number, stage in enumerate(stages)
        ]


def _momenta(trace: Trace) -> dict[int, int]:
    """Storages of SGD's momentum, each with the op that uses it first and, in the first step, makes
    it: other optimizers make all their state before they compute (torch/optim).
    """
    is_sgd = trace.optimizer is not None and trace.optimizer.type == "SGD"
    first: dict[int, int] = {}
    for index, op in enumerate(trace.ops if is_sgd else ()):
        if op.phase == "optimizer":
            for spec in op.inputs:
                first.setdefault(spec.storage, index)
    return first


def _survivors(trace: Trace) -> dict[int, int]:
    """Storages that outlive the step, each matched to one of equal size that was there before and
    dies in it (a gradient to the last one).
    """
    waiting: dict[int, list[int]] = defaultdict(list)
    matched = {}
    for index, storage in enumerate(trace.storages):
        if storage.born < 0 and storage.dies is not None:
            waiting[storage.nbytes].append(index)
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.dies is None and waiting[storage.nbytes]:
            matched[index] = waiting[storage.nbytes].pop(0)
    return matched

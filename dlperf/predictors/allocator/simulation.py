"""Allocator simulation of a trace: page faults of a steady step, peak memory, and whose memory
each tensor takes over.

glibc (malloc/malloc.c, 2.36): a request of at least ``mmap_threshold`` bytes is a mapping of its
own, every page of it faulted in anew; freeing one raises the threshold to its size (up to 32 MiB)
and ``trim_threshold`` to twice that. Other requests, and such as a free piece can serve, come from
the heap: best fit among free chunks, which coalesce, else the top. The top is given back to the
system once it exceeds ``trim_threshold``, and faults again when it grows. Whether it can be is
decided by small requests, which keep free chunks apart
(:mod:`dlperf.predictors.allocator.small_requests`). Other policies stand in
:mod:`dlperf.predictors.allocator.policies`. Assumed: one arena, every chunk is touched whole, the
step's loss is let go at its end.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

from dlperf.core.clock import quantile
from dlperf.core.trace import Op, Trace
from dlperf.core.units import KIB
from dlperf.predictors.allocator.caching import CachingAllocator
from dlperf.predictors.allocator.glibc import Heap
from dlperf.predictors.allocator.heap import PAGE_BYTES, Jemalloc
from dlperf.predictors.allocator.memory_map import (
    FRESH,
    UNUSED,
    MemoryMap,
    Owners,
    owner_of_scratch,
    run_of,
)
from dlperf.predictors.allocator.policies import POLICIES, Policy, policy_of
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

__all__ = [
    "N_PROCESSES",
    "PAGE_BYTES",
    "POLICIES",
    "AllocatorSimulation",
    "Heap",
    "Jemalloc",
    "Policy",
    "StepPages",
    "allocator_of",
    "policy_of",
    "simulate",
]

N_STEPS, N_COUNTED = 14, 9
"""Steps run and the last of them, which are counted; the thresholds settle within the first few."""
N_PROCESSES = 15
"""Processes simulated where memory is given back, each with other small requests before it."""
N_REQUESTS, N_REQUESTS_OTHERWISE = 2_500_000, 500_000
"""About as many requests for memory are simulated under the default policy and under another, which
is mostly for a recommendation; about 3 us each (AMD EPYC of Zen 4). Where a process has many, there
are fewer processes.
"""
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


@dataclass(frozen=True)
class AllocatorSimulation:
    """A steady step as malloc sees it.

    `steps` are steps of processes, without the quarter of fewest faults and that of most: few
    processes have several times as many as others. `faults` are first touches of 4 KiB pages by op,
    on average over them, `huge_faults` those of 2 MiB pages; `released[i]` are pages of 4 KiB given
    back before op i, the last entry those at the step's end. `predecessors[s]` are the owners whose
    memory storage `s` took over in the process of median faults, `predecessors_of_blocks[i]` those
    of the blocks that op i allocates within itself. `peak_bytes` is the most that was resident in
    the first steps, in the median of the processes. Of first touches in a step
    `faults_of_a_step` are the mean, between the 10 and 90 % quantiles of all processes' median
    steps.
    """

    faults: tuple[float, ...]
    predecessors: tuple[Owners, ...]
    predecessors_of_blocks: tuple[Owners, ...]
    peak_bytes: int
    faults_of_a_step: tuple[float, float, float]
    huge_faults: tuple[float, ...] = ()
    released: tuple[float, ...] = ()
    steps: tuple[StepPages, ...] = ()


def simulate(
    trace: Trace,
    scratch_bytes: Callable[[Op], Scratch],
    policy: str = "default",
    kept: Sequence[tuple[int, int]] = (),
    lasting: Sequence[tuple[int, int]] = (),
) -> AllocatorSimulation:
    """Simulate a trace's allocations over steps of several processes; the last steps count.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout
    conversions, workspaces); `kept` are (storage, bytes) of memory whose size no recording could
    know, `lasting` (op, bytes) of blocks that are made once for good. What is given back, and so
    faults again, is decided by small requests between the tensors
    (:mod:`dlperf.predictors.allocator.small_requests`). It differs from process to process and from
    step to step.

    Raises DlperfError for an unknown policy.
    """
    chosen = policy_of(policy)
    script = Script(trace, scratch_bytes, kept, lasting)
    varies = not (chosen.purges or chosen.keeps)
    runs = [script.run(chosen)]
    if varies:
        n_requests = N_REQUESTS if policy == "default" else N_REQUESTS_OTHERWISE
        n_processes = min(N_PROCESSES, n_requests // runs[0].n_requests)
        runs += [script.run(chosen, seed) for seed in range(1, n_processes)]
        runs.sort(key=lambda run: run.usual_faults)
    peak_bytes = round(statistics.median(run.peak_bytes for run in runs))
    by_process = [run.usual_faults for run in runs]
    likely = runs[(len(runs) - 1) // 2]
    n_apart = len(runs) // 4
    steps = tuple(step for run in runs[n_apart : len(runs) - n_apart] for step in run.steps)
    if chosen.keeps:  # the memory that small requests keep apart is there from some step on
        steps = (min(steps, key=lambda step: sum(step.faults)),)
        by_process = [sum(steps[0].faults)]
    faults = _means([step.faults for step in steps])
    return AllocatorSimulation(
        faults,
        likely.predecessors,
        likely.predecessors_of_blocks,
        peak_bytes,
        (
            quantile(by_process, 0.1),
            math.fsum(faults),
            quantile(by_process, 0.9),
        ),
        _means([step.huge_faults for step in steps]),
        _means([step.released for step in steps]),
        steps,
    )


def _means(rows: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Mean of every column."""
    return tuple(sum(column) / len(rows) for column in zip(*rows))

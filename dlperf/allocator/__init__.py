"""malloc's policy replayed on a trace: page faults of a steady step, peak memory, and whose memory each tensor takes over.

glibc (malloc/malloc.c, 2.36): a request of at least ``mmap_threshold`` bytes is a mapping of its own, every page of it
faulted in anew; freeing one raises the threshold to its size (up to 32 MiB) and ``trim_threshold`` to twice that.
Smaller requests come from the heap: best fit among free chunks, which coalesce, else the top. The top is given back to
the system once it exceeds ``trim_threshold``, and faults again when it grows. Other policies stand in :mod:`dlperf.allocator.policies`.
Assumed: one arena, every chunk is touched whole; bins' order among equal sizes and chunks below 1 KiB are not modelled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from dlperf.allocator.heap import PAGE_BYTES, Heap, Jemalloc, allocator_of
from dlperf.allocator.policies import POLICIES, Policy, policy_of
from dlperf.trace import Op, Trace

__all__ = ["FREE_TOP_WEIGHT", "PAGE_BYTES", "POLICIES", "Heap", "Jemalloc", "Policy", "Replay", "Scratch", "allocator_of", "policy_of", "replay"]

_SMALL = 1024
FREE_TOP_WEIGHT = 1 / 3
"""Weight of the history in which the heap's top is free, against that in which it is pinned."""
N_STEPS = 6
"""Steps replayed; the thresholds settle within the first few, the last two are counted."""

Scratch = tuple[tuple[int, ...], ...]
"""Blocks that an op allocates and frees within itself, in stages: those of a stage live together, a result is allocated while the first stage does."""


@dataclass(frozen=True)
class Replay:
    """A steady step as malloc sees it.

    `faults` are first touches of 4 KiB pages by op (means over histories, so not whole), `huge_faults` those of 2 MiB pages;
    `released[i]` are pages of 4 KiB given back before op i, the last entry those at the step's end. `predecessor[s]` is the storage
    whose memory storage `s` took over (-1: memory fresh from the system, or never used before). `peak_bytes` is the most that was resident.
    `fewest_faults` and `most_faults` are totals of `faults` a step over the replayed histories of a process.
    """

    faults: tuple[float, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int
    fewest_faults: int
    most_faults: int
    huge_faults: tuple[float, ...] = ()
    released: tuple[float, ...] = ()


def replay(trace: Trace, scratch_bytes: Callable[[Op], Scratch], policy: str = "default") -> Replay:
    """Replay the trace's storages for some steps under one of POLICIES, and tell the last ones.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout conversions, workspaces).
    Two histories are replayed: in one nothing else lives on the heap, and its top is given back after each step; in the
    other small blocks that stay (the engine's, a cached primitive's, the script's own) came to lie at the top when it
    was highest, and what is below stays. Processes of the same step are seen in either state and between them: the
    faults are a mean of both, with the weight that counting the faults of random networks gave
    (benchmarks/page_faults.py), and what the histories differ by is uncertain. Where nothing is trimmed there is one history.
    Raises DlperfError for an unknown policy.
    """
    chosen = policy_of(policy)
    free = _run(trace, scratch_bytes, chosen, pinned=False)
    if not chosen.adapts:
        return free
    pinned = _run(trace, scratch_bytes, chosen, pinned=True)

    def mean(one: tuple[float, ...], other: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(FREE_TOP_WEIGHT * a + (1.0 - FREE_TOP_WEIGHT) * b for a, b in zip(one, other))

    totals = free.most_faults, pinned.most_faults
    return Replay(
        mean(free.faults, pinned.faults), free.predecessor, max(free.peak_bytes, pinned.peak_bytes), min(totals), max(totals),
        mean(free.huge_faults, pinned.huge_faults), mean(free.released, pinned.released),
    )  # fmt: skip


def _run(trace: Trace, scratch_bytes: Callable[[Op], Scratch], policy: Policy, pinned: bool) -> Replay:
    storages, n_ops = trace.storages, len(trace.ops)
    heap = allocator_of(policy)
    address: dict[int, int] = {}
    born: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    first_optimizer = next((index for index, op in enumerate(trace.ops) if op.phase == "optimizer"), n_ops)
    first_backward = next((index for index, op in enumerate(trace.ops) if op.phase == "backward"), -1)
    late: list[int] = []
    for index, storage in enumerate(storages):
        if storage.nbytes < _SMALL:
            continue
        if storage.born >= 0:
            born[storage.born].append(index)
        elif storage.kind == "optimizer":
            late.append(index)  # the first step makes it, with gradients alive and activations gone
        elif storage.dies is None:
            address[index] = heap.allocate(storage.nbytes)[0]
        if storage.dies is not None:
            dying[storage.dies].append(index)
    survivors = _survivors(trace)
    scratch = {index: stages for index, op in enumerate(trace.ops) if (stages := scratch_bytes(op))}
    last_at: dict[int, int] = {}
    predecessor = [-1] * len(storages)
    peak = 0
    counted: list[_Counts] = []
    for step in range(N_STEPS):
        counts = _Counts([0] * n_ops, [0] * n_ops, [0] * (n_ops + 1))
        for index in range(n_ops + 1):
            released = heap.released_pages
            for storage_index in dying.get(index, ()):
                if storage_index in address:
                    heap.free(address.pop(storage_index))
            counts.released[index] += heap.released_pages - released
            if index == n_ops:
                break
            huge_faults, released = heap.huge_faults, heap.released_pages
            if isinstance(heap, Heap) and pinned and step == 1 and index == first_backward:
                heap.pin()
            if step == 0 and index == first_optimizer:
                for storage_index in late:
                    address[storage_index] = heap.allocate(storages[storage_index].nbytes)[0]
            stages = scratch.get(index, ((),))
            for number, stage in enumerate(stages):
                blocks = []
                for n_bytes in stage:
                    place, n_faults = heap.allocate(n_bytes)
                    blocks.append(place)
                    counts.faults[index] += n_faults
                for storage_index in born.get(index, ()) if number == 0 else ():
                    if storage_index in address:  # outlived the last step although the trace does not say who frees it
                        heap.free(address.pop(storage_index))
                    place, n_faults = heap.allocate(storages[storage_index].nbytes)
                    address[storage_index] = place
                    counts.faults[index] += n_faults
                    predecessor[storage_index] = -1 if n_faults else last_at.get(place, -1)
                    last_at[place] = storage_index
                peak = max(peak, heap.resident_bytes)
                for place in blocks:
                    heap.free(place)
            counts.huge_faults[index] = heap.huge_faults - huge_faults
            counts.released[index + 1] += heap.released_pages - released  # by the op itself
        counted.append(counts)
        if isinstance(heap, Heap) and pinned and step < 2:
            heap.pin()
        # Survivors of this step stand where the next step expects what was there before it.
        for new, old in survivors.items():
            if new in address and old not in address:
                address[old] = address.pop(new)
    before, last = counted[-2:]
    faults = _means(before.faults, last.faults)
    total = round(sum(faults))
    return Replay(
        faults, tuple(predecessor), peak, total, total, _means(before.huge_faults, last.huge_faults), _means(before.released, last.released)
    )


@dataclass(frozen=True)
class _Counts:
    """One step's pages by op; `released` has a place more, for the step's end."""

    faults: list[int]
    huge_faults: list[int]
    released: list[int]


def _means(one: list[int], other: list[int]) -> tuple[float, ...]:
    return tuple((a + b) / 2 for a, b in zip(one, other))


def _survivors(trace: Trace) -> dict[int, int]:
    """Storages that outlive the step, each matched to one of equal size that was there before and dies in it (a gradient to the last one)."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if storage.born < 0 and storage.dies is not None:
            waiting[storage.nbytes].append(index)
    matched = {}
    for index, storage in enumerate(trace.storages):
        if storage.born >= 0 and storage.dies is None and waiting.get(storage.nbytes):
            matched[index] = waiting[storage.nbytes].pop(0)
    return matched

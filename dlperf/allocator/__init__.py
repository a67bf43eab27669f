"""malloc's policy replayed on a trace: page faults of a steady step, peak memory, and whose memory each tensor takes over.

glibc (malloc/malloc.c, 2.36): a request of at least ``mmap_threshold`` bytes is a mapping of its own, every page of it
faulted in anew; freeing one raises the threshold to its size (up to 32 MiB) and ``trim_threshold`` to twice that.
Other requests, and such as a free piece can serve, come from the heap: best fit among free chunks, which coalesce, else the top. The top is given back to
the system once it exceeds ``trim_threshold``, and faults again when it grows. Other policies stand in :mod:`dlperf.allocator.policies`.
Assumed: one arena, every chunk is touched whole; bins' order among equal sizes and chunks below 1 KiB are not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dlperf.allocator.heap import PAGE_BYTES, Heap, Jemalloc, allocator_of
from dlperf.allocator.policies import POLICIES, Policy, policy_of
from dlperf.allocator.steps import History, Scratch, Script
from dlperf.trace import Op, Trace
from dlperf.units import KIB, MIB

__all__ = ["PAGE_BYTES", "POLICIES", "Heap", "History", "Jemalloc", "Policy", "Replay", "Scratch", "allocator_of", "histories_of", "policy_of", "replay"]

_HOLES: tuple[tuple[int, ...], ...] = ((), (256 * KIB,) * 8, (5 * MIB, 3 * MIB, 2 * MIB, MIB, MIB, *(256 * KIB,) * 8))
_PINNED, _PINNED_CHAIN = 0.75, 0.4
"""Share of steps in which small blocks hold the heap up: most processes come to it within some ten steps, but fewer of those of a chain of convolutions."""


def histories_of(trace: Trace) -> tuple[History, ...]:
    """The histories that are replayed of a trace where they matter, with weights that add up to 1."""
    pinned = _PINNED_CHAIN if _is_chain_of_convolutions(trace) else _PINNED
    return tuple(History(holes, held, (pinned if held else 1 - pinned) / len(_HOLES)) for holes in _HOLES for held in (False, True))


def _is_chain_of_convolutions(trace: Trace) -> bool:
    """Whether every operator of the forward works on what a single one before it made, convolutions among them, so that the step's memory is born and
    freed like a stack: no residual connections, no attention."""
    forward = [op for op in trace.ops if op.phase == "forward"]
    made = ({spec.storage for spec in op.inputs if spec.storage >= 0 and trace.storages[spec.storage].born >= 0} for op in forward)
    return any(op.packet == "aten.convolution" for op in forward) and all(len(storages) <= 1 for storages in made)


@dataclass(frozen=True)
class Replay:
    """A steady step as malloc sees it.

    `faults` are first touches of 4 KiB pages by op, on average over the histories, `huge_faults` those of 2 MiB pages;
    `released[i]` are pages of 4 KiB given back before op i, the last entry those at the step's end. `predecessor[s]` is the storage
    whose memory storage `s` took over in the history of median faults (-1: memory fresh from the system, or never used before).
    `peak_bytes` is the most that was resident.
    `fewest_faults` and `most_faults` are totals of `faults` a step over the replayed histories of a process.
    """

    faults: tuple[float, ...]
    predecessor: tuple[int, ...]
    peak_bytes: int
    fewest_faults: int
    most_faults: int
    huge_faults: tuple[float, ...] = ()
    released: tuple[float, ...] = ()


def replay(
    trace: Trace, scratch_bytes: Callable[[Op], Scratch], policy: str = "default", kept: Sequence[tuple[int, int]] = ()
) -> Replay:
    """Replay the trace's storages for some steps under one of POLICIES, and tell the last ones.

    `scratch_bytes` gives the blocks that an op allocates and frees within itself (layout conversions, workspaces); `kept` are (storage, bytes) of memory
    whose size no recording could know.
    What else lives on the heap decides what of it is given back: with nothing there its top is freed after each step; where small blocks that
    stay (a tensor's own record, which malloc keeps for the next one; the engine's; the script's) came to lie above what a forward leaves to its
    backward, that stays, and what the backward takes above it is given back; and free pieces below take small tensors, which then leave room
    above. A process goes through these states and those between them, most of its steps with the heap held up, fewer where it is a chain of convolutions:
    the faults are the histories' mean, by weights chosen by the faults of random networks (benchmarks/page_faults.py), and what the histories differ
    by is uncertain. Where nothing is trimmed one history is enough.

    Raises DlperfError for an unknown policy.
    """
    chosen = policy_of(policy)
    script = Script(trace, scratch_bytes, kept)
    histories = histories_of(trace) if chosen.adapts else (History((), False, 1.0),)
    runs = [script.run(chosen, history) for history in histories]

    totals = [round(sum(run.faults)) for run in runs]
    weights = [history.weight for history in histories]
    likely = runs[_weighted_median(totals, weights)]
    return Replay(
        _means([run.faults for run in runs], weights), likely.predecessor, max(run.peak_bytes for run in runs), min(totals), max(totals),
        _means([run.huge_faults for run in runs], weights), _means([run.released for run in runs], weights),
    )  # fmt: skip


def _means(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> tuple[float, ...]:
    """Weighted mean of every column."""
    return tuple(math.fsum(weight * value for weight, value in zip(weights, column)) for column in zip(*rows))


def _weighted_median(values: Sequence[float], weights: Sequence[float]) -> int:
    """The place of the value at which half of the weight lies below or at it.

    >>> _weighted_median([30, 10, 20], [0.2, 0.5, 0.3])
    1
    """
    passed = 0.0
    order = sorted(range(len(values)), key=lambda place: values[place])
    for place in order:
        passed += weights[place]
        if passed >= 0.5 * sum(weights) - 1e-9:
            return place
    return order[-1]

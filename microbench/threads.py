"""What waking a team of threads costs."""

from __future__ import annotations

from functools import partial

import torch

from dlperf.core.clock import Clock, Repeats, Sampler, Samples, take_turns
from dlperf.core.costs import Cost, CostKey

GRAIN_SIZE = 32768
"""Elements above which at::parallel_for wakes the whole team (ATen/Parallel.h)."""


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Fork and join: an element past the grain against the grain itself, per call; 0 for one
    thread.
    """
    if threads == 1:
        return [Cost(CostKey("fork_join"), 1, Samples((0.0,)))]
    n_samples = 5 if mode == "quick" else 15
    results = []
    for n in (GRAIN_SIZE, GRAIN_SIZE + 1):
        a, out = torch.rand(n), torch.empty(n)
        sampler = Sampler(
            partial(torch.add, a, a, out=out),
            Repeats(1e-3, n_samples),
            clock,  # type: ignore[misc]
        )
        take_turns([sampler])
        results.append(sampler.result())
    inside, outside = results
    # The same work, shared by the team, takes 1/threads of the time; what is over is the waking and
    # the waiting.
    floor = inside.median / threads
    return [
        Cost(
            CostKey("fork_join"),
            threads,
            Samples(
                tuple(max(0.0, value - floor) for value in outside.values), outside.n_disturbed
            ),
        )
    ]

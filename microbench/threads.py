"""What waking a team of threads costs."""

from __future__ import annotations

from functools import partial

import torch

from dlperf.core.clock import Clock, Repeats, Samples, sample_in_turns
from dlperf.core.costs import Cost, CostKey
from dlperf.core.state_probe import GRAIN_SIZE


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """Fork and join: an element past the grain against the grain itself, per call; 0 for one
    thread.
    """
    if threads == 1:
        return [Cost(CostKey("fork_join"), 1, Samples((0.0,)))]
    n_samples = 5 if mode == "quick" else 15
    inside, outside = (
        sample_in_turns(
            [partial(torch.add, a, a, out=torch.empty(n))],  # type: ignore[misc]
            Repeats(1e-3, n_samples),
            clock,
        )[0]
        for n in (GRAIN_SIZE, GRAIN_SIZE + 1)
        for a in (torch.rand(n),)
    )
    # The same work, shared by the team, takes 1/threads of the time; what is over is the waking and
    # the waiting.
    return [Cost(CostKey("fork_join"), threads, outside.minus(inside.median / threads))]

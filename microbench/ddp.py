"""What DistributedDataParallel itself costs around a step, whatever is sent: its wrapper, a step
that synchronises, each gradient's hook.

Measured in a group of this one process, whose all-reduce sends nothing; that all-reduce is taken
off again. The gradients' copies into and out of the buckets are taken off, too: a forecast prices
them by their size.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from dlperf.core.clock import Clock, Samples
from dlperf.core.costs import Cost, CostKey

_SETTLE_S = 0.05
"""Time in which gloo's thread lets go of the last collective's tensors, for which it needs Python's
lock. A group that ends earlier, while this thread holds that lock, waits for ever.
"""
_FEW, _MANY = 8, 72
_ELEMENTS = 4
_LOOPBACK = {
    "linux": {"GLOO_SOCKET_IFNAME": "lo"},
    "darwin": {"GLOO_SOCKET_IFNAME": "lo0"},
}
Call = Callable[[], object]


class _Sum(nn.Module):
    """Adds its parameters to its input: a node and a gradient for each, and nothing else."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.terms = nn.ParameterList([nn.Parameter(torch.zeros(_ELEMENTS)) for _ in range(n)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and all parameters."""
        for term in self.terms:
            x = x + term
        return x


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """A default process group of this process alone, on the loopback device."""
    before = dict(os.environ)
    os.environ.update(_LOOPBACK.get(sys.platform, {}))
    with contextlib.ExitStack() as stack:
        stack.callback(os.environ.update, before)
        stack.callback(os.environ.pop, "GLOO_SOCKET_IFNAME", None)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        stack.callback(dist.destroy_process_group)
        stack.callback(time.sleep, _SETTLE_S)
        yield


def _steps(n: int) -> tuple[Call, Call, Call]:
    """Forward and backward of n parameters: bare, under ``no_sync``, and synchronised."""
    x = torch.zeros(_ELEMENTS)
    bare, wrapped = _Sum(n), nn.parallel.DistributedDataParallel(_Sum(n))

    def step(model: nn.Module) -> None:
        model(x).sum().backward()
        model.zero_grad()

    def silent() -> None:
        with wrapped.no_sync():
            step(wrapped)

    return lambda: step(bare), silent, lambda: step(wrapped)


def _rounds(
    calls: dict[str, Call], n_rounds: int, n_calls: int, clock: Clock
) -> list[dict[str, float]]:
    """Seconds of one call of each, in rounds: what stands in one round was taken in a row and met
    the same machine.

    Disturbed rounds are left out where enough others are.
    """
    clean: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    for _ in range(n_rounds):
        before = clock.switches()
        found: dict[str, float] = {}
        for name, call in calls.items():
            begin = clock.now()
            for _ in range(n_calls):
                call()
            found[name] = (clock.now() - begin) / n_calls
        (clean if clock.switches() == before else disturbed).append(found)
    return clean if 2 * len(clean) >= n_rounds else clean + disturbed


def measure(threads: int, mode: str, clock: Clock = Clock()) -> list[Cost]:
    """``ddp_call`` (the wrapper around a forward), ``ddp_sync`` (a step that sends besides) and
    ``ddp_hook`` (each gradient), seconds.

    They are differences within a round. Nothing where this torch has no gloo.
    """
    if not dist.is_available() or not dist.is_gloo_available() or dist.is_initialized():
        return []
    with _group_of_one():
        few, many = _steps(_FEW), _steps(_MANY)
        grad, view, vector = map(torch.zeros, (_ELEMENTS, _ELEMENTS, _FEW * _ELEMENTS))
        ops = torch.ops.aten
        calls: dict[str, Call] = {
            "bare": few[0],
            "silent": few[1],
            "sent": few[2],
            "silent many": many[1],
            "sent many": many[2],
            "reduced": lambda: dist.all_reduce(vector),
            "copied": lambda: (ops.mul.Tensor(grad, 0.5), ops.copy_.default(grad, view)),
        }
        _rounds(calls, 3, 3, clock)  # buckets are rebuilt after the first step
        rounds = _rounds(calls, 15 if mode == "quick" else 60, 4, clock)
    return [
        Cost(CostKey(name), threads, Samples(tuple(max(0.0, value) for value in values)))
        for name, values in (
            ("ddp_call", [r["silent"] - r["bare"] for r in rounds]),
            ("ddp_hook", [_each_s(r) - r["copied"] for r in rounds]),
            (
                "ddp_sync",
                [r["sent"] - r["silent"] - _FEW * _each_s(r) - r["reduced"] for r in rounds],
            ),
        )
    ]


def _each_s(found: dict[str, float]) -> float:
    """What one more gradient adds to a step that sends, over one that does not."""
    return ((found["sent many"] - found["silent many"]) - (found["sent"] - found["silent"])) / (
        _MANY - _FEW
    )

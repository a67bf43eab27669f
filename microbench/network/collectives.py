"""Collectives over sizes and groups of ranks, the sum under a reduction, and what computing and a
collective cost each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch
import torch.distributed as dist

from dlperf.core.clock import Clock, Repeats, sample_in_turns, samples_to_json
from dlperf.core.cluster import KINDS, Collective, Interference, Kind, Reduction, Timed
from dlperf.core.units import KIB, MIB
from dlperf.microbench.network.links import over_sizes
from dlperf.microbench.network.passes import Passes
from dlperf.microbench.network.team import Group, Team

SIZES = {
    "quick": (4, 8 * KIB, 128 * KIB, MIB, 6 * MIB),
    "full": (
        4,
        512,
        4 * KIB,
        32 * KIB,
        128 * KIB,
        256 * KIB,
        768 * KIB,
        2 * MIB,
        6 * MIB,
        12 * MIB,
        32 * MIB,
        64 * MIB,
    ),
}
_WEIGHTS = {"all_reduce": 3.0, "reduce_scatter": 1.0, "all_gather": 1.5, "broadcast": 1.5}
_INTERFERENCE_BYTES = {"quick": (4 * MIB,), "full": (2 * MIB, 12 * MIB)}
_GEMM_SIZE, _SLICE, _STREAM_ELEMENTS = 192, 2**16, 2**23
_COMPUTE_S = 0.06
Key = tuple[Kind, int, int, int]  # what a Collective is but for its samples
_reduce_scatter: Callable[..., object] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)  # renamed in torch 2.13


def groups_of(nodes: list[list[int]]) -> list[tuple[int, ...]]:
    """Groups of ranks to measure, all with rank 0: of the first node, one rank a node, and
    everyone; of each 2, 3, 4, then powers of two, and all.

    >>> groups_of([[0, 1], [2, 3]])
    [(0, 1), (0, 2), (0, 1, 2, 3)]
    """
    found = [
        tuple(ranks[:count])
        for ranks in (nodes[0], [node[0] for node in nodes])
        for count in _counts(len(ranks))
    ]
    everyone = tuple(sorted(rank for node in nodes for rank in node))
    return list(dict.fromkeys([*found, *([everyone] if len(everyone) > 1 else [])]))


def _counts(n: int) -> list[int]:
    steps = [2, 3, *(2**power for power in range(2, n.bit_length()))]
    return sorted({count for count in [*steps, n] if 2 <= count <= n})


def measure_collectives(
    team: Team, mode: str, budget: Clock, passes: Passes[Key]
) -> list[Collective]:
    """All kinds over all groups, their samples through `passes`; rank 0 gets them."""
    plan = [(kind, team.group(ranks)) for ranks in groups_of(team.nodes()) for kind in KINDS]
    n_passes = 1 if mode == "quick" else 2
    turns = plan * n_passes
    for number, (kind, group) in enumerate(turns):
        own = budget.part(_WEIGHTS[kind] / sum(_WEIGHTS[later] for later, _ in turns[number:]))
        if team.rank in group.ranks:
            make = partial(prepare, team, kind, group=group)
            for size, _, lists in over_sizes(team, group, SIZES[mode], own, make):
                joined = max if kind == "broadcast" else fmean
                key = (kind, size, len(group.ranks), group.ranks_per_node)
                passes.add(key, number // len(plan), map(joined, zip(*lists)))
        team.watch.begin(f"waiting for {kind} of other ranks")
        team.wait()
    return [
        Collective(*key, **samples_to_json(samples)) for key, samples in passes.samples().items()
    ]


def prepare(team: Team, kind: str, n_bytes: int, group: Group) -> Callable[[], float]:
    """A call that runs one collective of float32 and returns its seconds; sizes are rounded up so
    that every rank has an equal part.
    """
    n_ranks = len(group.ranks)
    team.watch.begin(f"{kind} of {n_bytes} bytes over {n_ranks} ranks")
    part = -(-n_bytes // (4 * n_ranks))
    whole = torch.zeros(
        n_bytes // 4 if kind in ("all_reduce", "broadcast") else part * n_ranks, device=team.device
    )
    own = torch.zeros(part, device=team.device)
    parts = list(whole.chunk(n_ranks)) if kind == "all_gather" else []
    data = group.data
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=data),
        "reduce_scatter": lambda: _reduce_scatter(own, whole, group=data),
        "all_gather": lambda: dist.all_gather(parts, own, group=data),
        "broadcast": lambda: dist.broadcast(whole, 0, group=data),
    }
    run = calls[kind]

    def call() -> float:
        begin = team.now()
        run()
        team.synchronize()
        return team.now() - begin

    return call


def measure_reductions(mode: str) -> list[Reduction]:
    """The sum of two vectors in one thread, of a segment's size and less."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    for size in (256 * KIB, MIB):
        a, b = torch.zeros(size // 4), torch.zeros(size // 4)
        (samples,) = sample_in_turns(
            [partial(a.add_, b)],  # type: ignore[misc]
            Repeats(5e-4, 5 if mode == "quick" else 15),
            Clock(),
        )
        found.append(Reduction(size, **samples_to_json(samples)))
    torch.set_num_threads(threads)
    return found


def kernels(device: torch.device) -> dict[str, Callable[[], object]]:
    """Two computations of a fraction of a millisecond: a product from the caches, and a triad that
    walks through arrays larger than them.
    """
    square, product = (
        torch.rand(_GEMM_SIZE, _GEMM_SIZE, device=device),
        torch.empty(_GEMM_SIZE, _GEMM_SIZE, device=device),
    )
    arrays = [torch.zeros(_STREAM_ELEMENTS, device=device).view(-1, _SLICE) for _ in range(3)]
    slices = itertools.cycle(zip(*arrays))

    def stream() -> None:
        a, b, out = next(slices)
        torch.add(a, b, alpha=3.0, out=out)

    return {"gemm": lambda: torch.mm(square, square, out=product), "stream": stream}


def measure_interference(team: Team, mode: str, budget: Clock) -> list[Interference]:
    """An all-reduce of everyone in the background of each computation, and each without the other,
    all in turns; rank 0 gets them.
    """
    group = team.group(team.everyone.ranks)
    cases = [(name, size) for name in ("gemm", "stream") for size in _INTERFERENCE_BYTES[mode]]
    found = []
    computations = kernels(team.device)
    for place, (name, size) in enumerate(cases):
        team.watch.begin(f"{name} during an all-reduce of {size} bytes")
        vector = torch.zeros(size // 4, device=team.device)
        series = _in_turns(
            team, group, computations[name], vector, budget.part(1 / (len(cases) - place))
        )
        if series:
            found.append(
                Interference(
                    name, torch.get_num_threads(), size, team.n_ranks, group.ranks_per_node, *series
                )
            )
    return found


def _in_turns(
    team: Team, group: Group, compute: Callable[[], object], vector: torch.Tensor, budget: Clock
) -> list[Timed]:
    lists: list[list[float]] = [[], [], [], []]
    team.wait()
    while team.decide(group, int((budget.left_s > 0 and len(lists[0]) < 15) or len(lists[0]) < 2)):
        team.watch.begin(team.watch.step)
        rows = []
        team.wait()
        rows.append(_compute_for(team, compute, _COMPUTE_S))
        team.wait()
        begin = team.now()
        dist.all_reduce(vector, group=group.data)
        team.synchronize()
        rows.append(team.now() - begin)
        team.wait()
        rows += _both(team, group, compute, vector)
        for values, place in zip(zip(*team.collect(group, rows)), (0, 2, 1, 3)):
            lists[place].append(fmean(values))
    return [Timed(samples_s=tuple(values)) for values in lists]


def _compute_for(team: Team, compute: Callable[[], object], seconds: float) -> float:
    """Seconds a call."""
    begin, n_calls = team.now(), 0
    while (end := team.now()) - begin < seconds or not n_calls:
        compute()
        n_calls += 1
        team.synchronize()
    return (end - begin) / n_calls


def _both(
    team: Team, group: Group, compute: Callable[[], object], vector: torch.Tensor
) -> list[float]:
    """Seconds of a call of the computation while the all-reduce runs, and of the all-reduce (to
    within such a call).
    """
    begin, n_calls = team.now(), 0
    work = dist.all_reduce(vector, group=group.data, async_op=True)
    while True:
        compute()
        n_calls += 1
        team.finish_computation()
        if work is None or work.is_completed():
            break
    end = team.now()
    if work is not None:
        work.wait()
    team.synchronize()
    return [(end - begin) / n_calls, end - begin]

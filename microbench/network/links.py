"""Messages between pairs of ranks: ping-pong by size and number of pairs, trains of messages, and
what the sender's call takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median_high

import torch
import torch.distributed as dist

from dlperf.core.clock import Clock, samples_to_json
from dlperf.core.cluster import PING_PONG, SEND, TRAIN, Distance, Link, Message, What
from dlperf.core.text import counted
from dlperf.core.units import KIB, MIB
from dlperf.microbench.network.passes import Passes
from dlperf.microbench.network.team import Group, Team

SIZES = {
    "quick": (0, 4, 512, 8 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB),
    "full": (
        0,
        4,
        64,
        512,
        4 * KIB,
        8 * KIB,
        32 * KIB,
        128 * KIB,
        256 * KIB,
        512 * KIB,
        MIB,
        2 * MIB,
        8 * MIB,
        32 * MIB,
        64 * MIB,
    ),
}
_TRAIN_MESSAGES = 16
_LATENCY_BYTES = 64 * KIB
Key = tuple[Distance, What, int, int, int]  # distance, and what a Message is but for its samples
_ACKNOWLEDGEMENT_BYTES = 4


@dataclass(frozen=True)
class Pairs:
    """Pairs of ranks at one distance, disjoint, that may talk at once; rank 0 leads the first."""

    distance: Distance
    pairs: tuple[tuple[int, int], ...]


def find_pairs(nodes: list[list[int]], sockets: list[int]) -> list[Pairs]:
    """The pairs that these ranks have: of the first node with each other, and with the second
    node's. `sockets` by rank, -1 unknown (then one).

    >>> find_pairs([[0, 1], [2, 3]], [-1] * 4)
    [Pairs(distance='socket', pairs=((0, 1),)), Pairs(distance='network', pairs=((0, 2), (1, 3)))]
    """
    first = nodes[0]
    same = [rank for rank in first if sockets[rank] == sockets[first[0]]]
    other = [rank for rank in first if sockets[rank] != sockets[first[0]]]
    found = (
        Pairs("socket", tuple(zip(same[::2], same[1::2]))),
        Pairs("node", tuple(zip(same, other))),
        Pairs("network", tuple(zip(*nodes[:2])) if len(nodes) > 1 else ()),
    )
    return [one for one in found if one.pairs]


def measure_links(team: Team, mode: str, budget: Clock, passes: Passes[Key]) -> list[Link]:
    """Every link that the team has, its samples through `passes`; rank 0 gets them, the others
    empty links.
    """
    found = find_pairs(team.nodes(), [place.socket for place in team.places])
    plan = []
    for pairs in found:
        counts = sorted({1, min(2, len(pairs.pairs)), len(pairs.pairs)})
        plan += [
            (
                pairs.distance,
                pairs.pairs[:count],
                team.group([rank for pair in pairs.pairs[:count] for rank in pair]),
            )
            for count in counts
        ]
    n_passes = 1 if mode == "quick" else 2
    for number in range(n_passes):
        for place, (distance, chosen, group) in enumerate(plan):
            share = budget.part(1 / (len(plan) * (n_passes - number) - place))
            _one_pass(team, mode, distance, chosen, group, share, passes, number)
    messages = [
        (distance, Message(what, n_bytes, n_pairs, n_messages, **samples_to_json(samples)))
        for (distance, what, n_bytes, n_pairs, n_messages), samples in passes.samples().items()
    ]
    return [
        Link(
            pairs.distance,
            tuple(message for distance, message in messages if distance == pairs.distance),
        )
        for pairs in found
    ]


def _one_pass(
    team: Team,
    mode: str,
    distance: Distance,
    pairs: tuple[tuple[int, int], ...],
    group: Group,
    budget: Clock,
    passes: Passes[Key],
    number: int,
) -> None:
    if team.rank in group.ranks:

        def prepare(size: int) -> Callable[[], float]:
            team.watch.begin(
                f"ping-pong of {size} bytes, {distance}, {counted(len(pairs), 'pair')}"
            )
            return _ping_pong(team, group, pairs, size)

        for size, share, lists in over_sizes(team, group, SIZES[mode], budget, prepare):
            trips = [max(values) / 2 for values in zip(*lists[::2])]  # of those who lead
            passes.add((distance, PING_PONG, size, len(pairs), 1), number, trips)
            if len(pairs) == 1 and size <= 64 * KIB and size > 0:
                for n_messages in (1, _TRAIN_MESSAGES):
                    sends: list[float] = []
                    lists = team.repeat(
                        group,
                        _train(team, group, pairs[0], size, n_messages, sends),
                        budget.left_s * share / 4,
                        0.0,
                        most=15,
                    )
                    passes.add((distance, TRAIN, size, 1, n_messages), number, lists[0])
                if sends:  # the leader's own; they are those of the trains
                    passes.add((distance, SEND, size, 1, 1), number, sends[-len(lists[0]) :])
    team.watch.begin(f"waiting for the pairs, {distance}")
    team.wait()


def shares(sizes: tuple[int, ...]) -> Iterator[tuple[int, float]]:
    """Each size with its share of the time that is then left; from some MiB on, a size gets more
    with its square root.

    >>> list(shares((4, 8 * MIB)))
    [(4, 0.3333333333333333), (8388608, 1.0)]
    """
    weights = [max(1.0, math.sqrt(size / (2 * MIB))) for size in sizes]
    for place, size in enumerate(sizes):
        yield size, weights[place] / sum(weights[place:])


def over_sizes(
    team: Team,
    group: Group,
    sizes: tuple[int, ...],
    budget: Clock,
    prepare: Callable[[int], Callable[[], float]],
) -> Iterator[tuple[int, float, list[list[float]]]]:
    """Each size that fits the budget, its share of the time left, and its samples by rank, in
    seconds. A larger message is expected to take more in proportion where bytes decide, not where
    latency does.
    """
    expected_s, last = 0.0, 0
    for size, share in shares(sizes):
        expected_s *= max(size, _LATENCY_BYTES) / max(last, _LATENCY_BYTES)
        lists = team.repeat(group, prepare(size), budget.left_s * share, expected_s)
        if not lists:
            return
        expected_s, last = median_high(map(max, zip(*lists))), size
        yield size, share, lists


def _ping_pong(
    team: Team, group: Group, pairs: tuple[tuple[int, int], ...], n_bytes: int
) -> Callable[[], float]:
    """A round trip in every pair; returns its seconds."""
    between = team.messages(group)
    message = torch.zeros(n_bytes, dtype=torch.uint8, device=team.device)
    leads, peer = next(
        (team.rank == a, b if team.rank == a else a) for a, b in pairs if team.rank in (a, b)
    )

    def call() -> float:
        begin = team.now()
        if leads:
            dist.send(message, peer, group=between)
            dist.recv(message, peer, group=between)
        else:
            dist.recv(message, peer, group=between)
            dist.send(message, peer, group=between)
        team.synchronize()
        return team.now() - begin

    return call


def _train(
    team: Team,
    group: Group,
    pair: tuple[int, int],
    n_bytes: int,
    n_messages: int,
    sends: list[float],
) -> Callable[[], float]:
    """A train of messages and a short answer; returns the seconds, and leaves those of the first
    send's call in `sends`.
    """
    between = team.messages(group)
    messages = [
        torch.zeros(n_bytes, dtype=torch.uint8, device=team.device) for _ in range(n_messages)
    ]
    answer = torch.zeros(_ACKNOWLEDGEMENT_BYTES, dtype=torch.uint8, device=team.device)
    leads, peer = (True, pair[1]) if team.rank == pair[0] else (False, pair[0])

    def call() -> float:
        begin = team.now()
        if leads:
            works = [dist.isend(messages[0], peer, group=between)]
            sends.append(team.now() - begin)
            works += [dist.isend(message, peer, group=between) for message in messages[1:]]
            for work in works:
                if work is not None:
                    work.wait()
            dist.recv(answer, peer, group=between)
        else:
            works = [dist.irecv(message, peer, group=between) for message in messages]
            for work in works:
                if work is not None:
                    work.wait()
            dist.send(answer, peer, group=between)
        team.synchronize()
        return team.now() - begin

    return call

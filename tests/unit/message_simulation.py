"""An event simulator of messages: what the models of collectives are checked against. It knows no
formula.

Every rank is a generator with a clock of its own. It posts sends and receives (which block nobody),
yields what it waits for, and computes. A message begins when both sides have posted it and both
ports are free, the earliest first, and a port carries one message at a time in each direction. Data
travel with the messages, so that a wrong algorithm shows in its result.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(eq=False)
class Handle:
    """One side of a message; `end_s` is known when it has been transferred."""

    rank: int
    peer: int
    posted_s: float
    payload: Vector | None = None
    end_s: float | None = None
    tag: int = 0


Program = Generator[Handle, None, Vector]


@dataclass(frozen=True)
class Link:
    """`latency_on_port`: the ports are busy for the latency too (the textbook's single port); else
    a message arrives that much later (gloo's models).
    """

    latency_s: float
    s_per_byte: float
    latency_on_port: bool = True
    handshake_s: float = 0.0


@dataclass
class Rank:
    number: int
    n_ranks: int
    network: Network
    clock_s: float = 0.0

    def send(self, peer: int, payload: Vector, tag: int = 0) -> Handle:
        return self.network.post(
            "send", Handle(self.number, peer, self.clock_s, payload.copy(), tag=tag)
        )

    def recv(self, peer: int, tag: int = 0) -> Handle:
        return self.network.post("recv", Handle(self.number, peer, self.clock_s, tag=tag))

    def compute(self, seconds: float) -> None:
        self.clock_s += seconds


@dataclass
class Network:
    """Links between every two ranks; `link_between` may differ by pair (nodes), `port_of` may let
    ranks share a port (a node's adapter).
    """

    link_between: Callable[[int, int], Link]
    port_of: Callable[[int, int], object] = field(default=lambda rank, peer: rank)
    waiting: dict[tuple[str, int, int, int], deque[Handle]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    matched: list[tuple[Handle, Handle]] = field(default_factory=list)
    out_free_s: dict[object, float] = field(default_factory=lambda: defaultdict(float))
    in_free_s: dict[object, float] = field(default_factory=lambda: defaultdict(float))
    n_messages: int = 0

    def post(self, kind: str, handle: Handle) -> Handle:
        other = "recv" if kind == "send" else "send"
        partners = self.waiting[other, handle.peer, handle.rank, handle.tag]
        if partners:
            partner = partners.popleft()
            self.matched.append((handle, partner) if kind == "send" else (partner, handle))
        else:
            self.waiting[kind, handle.rank, handle.peer, handle.tag].append(handle)
        return handle

    def _begin_s(self, send: Handle, recv: Handle) -> float:
        link = self.link_between(send.rank, send.peer)
        delay = 0.0 if link.latency_on_port else link.latency_s
        out_free, in_free = (
            self.out_free_s[self.port_of(send.rank, send.peer)],
            self.in_free_s[self.port_of(recv.rank, recv.peer)],
        )
        return max(send.posted_s, recv.posted_s + link.handshake_s, out_free, in_free - delay)

    def transfer_one(self) -> None:
        begins = [self._begin_s(*pair) for pair in self.matched]
        index = int(np.argmin(begins))  # the first posted of those that begin at the same time
        begin = begins[index]
        send, recv = self.matched.pop(index)
        link = self.link_between(send.rank, send.peer)
        assert send.payload is not None
        busy = link.s_per_byte * send.payload.nbytes + (
            link.latency_s if link.latency_on_port else 0.0
        )
        delay = 0.0 if link.latency_on_port else link.latency_s
        send.end_s, recv.end_s, recv.payload = begin + busy, begin + busy + delay, send.payload
        (
            self.out_free_s[self.port_of(send.rank, send.peer)],
            self.in_free_s[self.port_of(recv.rank, recv.peer)],
        ) = (
            send.end_s,
            recv.end_s,
        )
        self.n_messages += 1


def simulate(
    program: Callable[[Rank, Vector], Program], inputs: Sequence[Vector], network: Network | Link
) -> tuple[float, list[Vector]]:
    """The time when the last rank is done, and every rank's result."""
    link = network
    net = Network(lambda rank, peer: link) if isinstance(link, Link) else link
    ranks = [Rank(number, len(inputs), net) for number in range(len(inputs))]
    programs = [program(rank, vector.copy()) for rank, vector in zip(ranks, inputs)]
    results: dict[int, Vector] = {}
    blocked: dict[int, Handle | None] = dict.fromkeys(range(len(inputs)))

    def advance(number: int) -> None:
        while number not in results:
            handle = blocked[number]
            if handle is not None:
                if handle.end_s is None:
                    return
                ranks[number].clock_s = max(ranks[number].clock_s, handle.end_s)
            try:
                blocked[number] = next(programs[number])
            except StopIteration as stop:
                results[number] = stop.value

    for number in range(len(inputs)):
        advance(number)
    while len(results) < len(inputs):
        assert net.matched, f"deadlock: {[n for n in blocked if n not in results]} wait for ever"
        net.transfer_one()
        for number in range(len(inputs)):
            advance(number)
    assert not net.matched
    assert not any(net.waiting.values()), "a message was posted on one side only"
    return max(rank.clock_s for rank in ranks), [results[number] for number in range(len(inputs))]

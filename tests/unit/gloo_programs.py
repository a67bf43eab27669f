"""gloo's collectives as programs for the simulator, from reading its sources; uneven and empty
segments included.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from message_simulation import Program, Rank, Vector


def ring_all_reduce(
    add_s_per_byte: float, max_segment_bytes: int
) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        p, item = me.n_ranks, vector.itemsize
        most = item * max(1, max_segment_bytes // item)
        total = vector.nbytes
        n = math.ceil(max(math.ceil(total / most), 2 * p) / p) * p
        per_rank = n // p
        size = math.ceil(math.ceil(total / n) / item)  # elements
        to, source = (me.number - 1) % p, (me.number + 1) % p

        def span(first: int, i: int) -> slice:
            begin = (first * per_rank + i) % n * size
            return slice(min(begin, len(vector)), min(begin + size, len(vector)))

        for phase in (1, 0):
            sends, recvs = {}, {}
            for i in range(n - per_rank + 2):
                if i >= 2:
                    here = span(me.number + phase + 1, i - 2)
                    if here.stop > here.start:
                        yield recvs[i - 2]
                        if phase:
                            vector[here] += recvs[i - 2].payload
                            me.compute(add_s_per_byte * (here.stop - here.start) * item)
                        else:
                            vector[here] = recvs[i - 2].payload
                    if i - 2 in sends:
                        yield sends[i - 2]
                if i < n - per_rank:
                    there, here = span(me.number + phase, i), span(me.number + phase + 1, i)
                    if here.stop > here.start:
                        recvs[i] = me.recv(source)
                    if there.stop > there.start:
                        sends[i] = me.send(to, vector[there])
        return vector

    return program


def all_gather(me: Rank, vector: Vector) -> Program:
    """`vector` is the rank's contribution."""
    p, n = me.n_ranks, len(vector)
    out = np.zeros(p * n)
    out[me.number * n : (me.number + 1) * n] = vector
    halves = (slice(0, n // 2), slice(n // 2, n))
    handles = []

    def part(block: int, half: int) -> Vector:
        return out[block % p * n : (block % p + 1) * n][halves[half]]

    for i in range(2 * (p - 1) + 2):
        if i >= 2:
            send, recv = handles[i - 2]
            yield send
            yield recv
            part(me.number - (i - 2) // 2 - 1, i % 2)[:] = recv.payload
        if i < 2 * (p - 1):
            handles.append(
                (
                    me.send((me.number + 1) % p, part(me.number - i // 2, i % 2)),
                    me.recv((me.number - 1) % p),
                )
            )
    return out


def broadcast(me: Rank, vector: Vector) -> Program:
    """The root is rank 0; the others' vectors are overwritten."""
    depth = (me.n_ranks - 1).bit_length()
    sends = []
    for bit in range(depth):
        peer = me.number ^ 1 << bit
        if me.number >> bit + 1 or peer >= me.n_ranks:
            continue
        if me.number < peer:
            sends.append(me.send(peer, vector))
        else:
            handle = me.recv(peer)
            yield handle
            vector = handle.payload.copy()
    yield from sends
    return vector


def bcube_all_reduce(add_s_per_byte: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        sizes, rest = [], me.n_ranks
        while rest % 2 == 0:
            sizes.append(2)
            rest //= 2
        sizes += [rest] if rest > 1 else []
        steps, distance, begin, length = [], 1, 0, len(vector)
        for size in sizes:
            mine = me.number // distance % size
            base, chunk = me.number - mine * distance, length // size
            peers = [
                (base + i * distance, slice(begin + i * chunk, begin + (i + 1) * chunk))
                for i in range(size)
            ]
            steps.append((mine, peers))
            begin, length, distance = begin + mine * chunk, chunk, distance * size
        for adding in (True, False):
            for mine, peers in steps if adding else reversed(steps):
                own = peers[mine][1]
                others = [(peer, where) for i, (peer, where) in enumerate(peers) if i != mine]
                recvs = [(me.recv(peer), where) for peer, where in others]
                sends = [me.send(peer, vector[where if adding else own]) for peer, where in others]
                for handle, _ in recvs:
                    yield handle
                yield from sends
                for handle, where in recvs:
                    if adding:
                        vector[own] += handle.payload
                        me.compute(add_s_per_byte * handle.payload.nbytes)
                    else:
                        vector[where] = handle.payload
        return vector

    return program


def gather(me: Rank, vector: Vector) -> Program:
    """The root is rank 0; `vector` is the rank's contribution."""
    if me.number:
        yield me.send(0, vector)
        return vector
    handles = [me.recv(rank) for rank in range(1, me.n_ranks)]
    yield from handles
    return np.concatenate([vector, *(handle.payload for handle in handles)])


def scatter(me: Rank, vector: Vector) -> Program:
    """The root is rank 0, whose vector is divided."""
    parts = np.split(vector, me.n_ranks)
    if me.number:
        handle = me.recv(0)
        yield handle
        return handle.payload
    yield from [me.send(rank, parts[rank]) for rank in range(1, me.n_ranks)]
    return parts[0]


def all_to_all(me: Rank, vector: Vector) -> Program:
    """Part i of each vector goes to rank i."""
    p, parts = me.n_ranks, np.split(vector, me.n_ranks)
    handles = {}
    for i in range(1, p):
        to, source = (me.number + i) % p, (me.number - i) % p
        handles[to, True], handles[source, False] = me.send(to, parts[to]), me.recv(source)
    yield from handles.values()
    return np.concatenate(
        [parts[rank] if rank == me.number else handles[rank, False].payload for rank in range(p)]
    )


def barrier(me: Rank, vector: Vector) -> Program:
    """Dissemination."""
    p, distance = me.n_ranks, 1
    while distance < p:
        recv, send = (
            me.recv((me.number - distance) % p),
            me.send((me.number + distance) % p, vector[:0]),
        )
        yield recv
        yield send
        distance *= 2
    return vector


def reduce(add_s_per_byte: float) -> Callable[[Rank, Vector], Program]:
    """The root is rank 0. Whole segments only: two for each rank, of at most `kMaxSegmentSize`."""

    def program(me: Rank, vector: Vector) -> Program:
        p = me.n_ranks
        size = len(vector) // (2 * p)
        to, source = (me.number - 1) % p, (me.number + 1) % p

        def span(first: int, i: int) -> slice:
            begin = (first * 2 + i) % (2 * p) * size
            return slice(begin, begin + size)

        handles = []
        for i in range(2 * p):
            if i >= 2:
                send, recv = handles[i - 2]
                yield recv
                here = span(me.number + 2, i - 2)
                vector[here] += recv.payload
                me.compute(add_s_per_byte * size * vector.itemsize)
                yield send
            if i < 2 * p - 2:
                recv = me.recv(source)
                handles.append((me.send(to, vector[span(me.number + 1, i)]), recv))
        own = slice(me.number * 2 * size, (me.number + 1) * 2 * size)
        if me.number:
            yield me.send(0, vector[own])
            return vector
        parts = [me.recv(rank) for rank in range(1, p)]
        yield from parts
        return np.concatenate([vector[own], *(part.payload for part in parts)])

    return program

"""The textbook's collectives as programs for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import numpy as np
from message_simulation import Handle, Program, Rank, Vector

Part = Generator[Handle, None, None]


def exchange(me: Rank, to: int, payload: Vector, source: int) -> Generator[Handle, None, Vector]:
    send, recv = me.send(to, payload), me.recv(source)
    yield send
    yield recv
    assert recv.payload is not None
    return recv.payload


def ring_reduce_scatter_part(
    me: Rank, group: Sequence[int], parts: list[Vector], add: float
) -> Part:
    """Afterwards place i of the group holds the sum of part i."""
    p, index = len(group), list(group).index(me.number)
    for step in range(p - 1):
        out, own = (index - 1 - step) % p, (index - 2 - step) % p
        got = yield from exchange(me, group[(index + 1) % p], parts[out], group[(index - 1) % p])
        parts[own] += got
        me.compute(add * got.nbytes)


def ring_all_gather_part(me: Rank, group: Sequence[int], parts: list[Vector]) -> Part:
    p, index = len(group), list(group).index(me.number)
    for step in range(p - 1):
        got = yield from exchange(
            me, group[(index + 1) % p], parts[(index - step) % p], group[(index - 1) % p]
        )
        parts[(index - 1 - step) % p][:] = got


def ring_all_reduce(add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        parts, group = np.split(vector, me.n_ranks), range(me.n_ranks)
        yield from ring_reduce_scatter_part(me, group, parts, add)
        yield from ring_all_gather_part(me, group, parts)
        return vector

    return program


def ring_reduce_scatter(add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        parts = np.split(vector, me.n_ranks)
        yield from ring_reduce_scatter_part(me, range(me.n_ranks), parts, add)
        return parts[me.number]

    return program


def ring_all_gather(me: Rank, vector: Vector) -> Program:
    """`vector`: the whole, of which the rank's own part counts."""
    parts = np.split(vector, me.n_ranks)
    yield from ring_all_gather_part(me, range(me.n_ranks), parts)
    return vector


def hierarchical_all_reduce(ranks_per_node: int, add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        node, local = divmod(me.number, ranks_per_node)
        mates = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        peers = range(local, me.n_ranks, ranks_per_node)
        parts = np.split(vector, ranks_per_node)
        yield from ring_reduce_scatter_part(me, mates, parts, add)
        pieces = np.split(parts[local], len(peers))
        yield from ring_reduce_scatter_part(me, peers, pieces, add)
        yield from ring_all_gather_part(me, peers, pieces)
        yield from ring_all_gather_part(me, mates, parts)
        return vector

    return program


def folded(add: float, halving: bool) -> Callable[[Rank, Vector], Program]:
    """Recursive doubling of whole vectors, or halving and doubling (Rabenseifner)."""

    def program(me: Rank, vector: Vector) -> Program:
        core = 1 << me.n_ranks.bit_length() - 1
        extra = me.n_ranks - core
        if me.number < 2 * extra and me.number % 2:
            yield me.send(me.number - 1, vector)
            back = me.recv(me.number - 1)
            yield back
            assert back.payload is not None
            return back.payload
        if me.number < 2 * extra:
            got = me.recv(me.number + 1)
            yield got
            vector += got.payload
            me.compute(add * vector.nbytes)
        new = me.number // 2 if me.number < 2 * extra else me.number - extra

        def old(place: int) -> int:
            return 2 * place if place < extra else place + extra

        span, bit, spans = slice(0, len(vector)), core >> 1, []
        while bit:
            peer, half = old(new ^ bit), (span.start + span.stop) // 2
            keep, give = (
                (span, span) if not halving else (slice(span.start, half), slice(half, span.stop))
            )
            keep, give = (give, keep) if halving and new & bit else (keep, give)
            other = yield from exchange(me, peer, vector[give], peer)
            vector[keep] += other
            me.compute(add * other.nbytes)
            spans.append((peer, keep, give))
            span, bit = keep, bit >> 1
        for peer, keep, give in reversed(spans if halving else []):
            vector[give] = yield from exchange(me, peer, vector[keep], peer)
        if me.number < 2 * extra:
            yield me.send(me.number + 1, vector)
        return vector

    return program


def recursive_halving_reduce_scatter(add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        span, bit = slice(0, len(vector)), me.n_ranks >> 1
        while bit:
            half = (span.start + span.stop) // 2
            low, high = slice(span.start, half), slice(half, span.stop)
            keep, give = (high, low) if me.number & bit else (low, high)
            vector[keep] += yield from exchange(me, me.number ^ bit, vector[give], me.number ^ bit)
            me.compute(add * vector[keep].nbytes)
            span, bit = keep, bit >> 1
        return vector[span]

    return program


def bruck_all_gather(me: Rank, vector: Vector) -> Program:
    """`vector`: the whole, of which the rank's own part counts."""
    p = me.n_ranks
    blocks = [np.split(vector, p)[me.number]]
    while len(blocks) < p:
        n = min(len(blocks), p - len(blocks))
        got = yield from exchange(
            me,
            (me.number - len(blocks)) % p,
            np.concatenate(blocks[:n]),
            (me.number + len(blocks)) % p,
        )
        blocks += np.split(got, n)
    return np.concatenate(blocks[p - me.number :] + blocks[: p - me.number])


def binomial_broadcast(me: Rank, vector: Vector) -> Program:
    bit = 1
    while bit < me.n_ranks and not me.number & bit:
        bit <<= 1
    if me.number:
        got = me.recv(me.number - bit)
        yield got
        assert got.payload is not None
        vector = got.payload.copy()
    bit >>= 1
    while bit:
        if me.number + bit < me.n_ranks:
            yield me.send(me.number + bit, vector)
        bit >>= 1
    return vector


def binomial_all_reduce(add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        bit = 1
        while bit < me.n_ranks and not me.number & bit:
            if me.number + bit < me.n_ranks:
                got = me.recv(me.number + bit)
                yield got
                vector += got.payload
                me.compute(add * vector.nbytes)
            bit <<= 1
        if me.number:
            yield me.send(me.number - bit, vector)
        return (yield from binomial_broadcast(me, vector))

    return program


def scatter_all_gather_broadcast(me: Rank, vector: Vector) -> Program:
    parts = np.split(vector, me.n_ranks)
    bit = 1
    while bit < me.n_ranks and not me.number & bit:
        bit <<= 1
    if me.number:
        got = me.recv(me.number - bit)
        yield got
        own = np.split(got.payload, min(bit, me.n_ranks - me.number))
        for i, part in enumerate(own):
            parts[me.number + i][:] = part
    bit >>= 1
    while bit:
        peer = me.number + bit
        if peer < me.n_ranks:
            yield me.send(peer, np.concatenate(parts[peer : min(peer + bit, me.n_ranks)]))
        bit >>= 1
    yield from ring_all_gather_part(me, range(me.n_ranks), parts)
    return vector


def binary_tree(place: int, n: int) -> tuple[int | None, list[int]]:
    """Parent and children in a binary tree whose leaves are the odd places; place 0 is the root,
    with a single child.
    """
    bit = place & -place if place else 1 << (n - 1).bit_length()
    parent = None
    if place:
        up = (place ^ bit) | bit << 1
        parent = up if up < n else place ^ bit
    children, step = [], bit >> 1
    if place and step:
        children.append(place - step)
    while step and place + step >= n:
        step >>= 1
    return parent, children + ([place + step] if step else [])


def two_trees(number: int, n: int) -> list[tuple[int | None, list[int]]]:
    """Of both trees, the second mirrored or shifted so that an inner place of one is a leaf of the
    other.
    """
    to = (lambda place: n - 1 - place) if n % 2 == 0 else (lambda place: (place + 1) % n)
    back = (lambda place: n - 1 - place) if n % 2 == 0 else (lambda place: (place - 1) % n)
    parent, children = binary_tree(back(number), n)
    return [
        binary_tree(number, n),
        (None if parent is None else to(parent), [to(child) for child in children]),
    ]


def double_tree_all_reduce(n_blocks: int, add: float) -> Callable[[Rank, Vector], Program]:
    def program(me: Rank, vector: Vector) -> Program:
        trees = two_trees(me.number, me.n_ranks)
        blocks = [np.split(half, n_blocks) for half in np.split(vector, 2)]
        order = [
            (i, t) for i in range(n_blocks) for t in sorted((0, 1), key=lambda t: -len(trees[t][1]))
        ]
        inner = [(i, t) for i, t in order if trees[t][1]]
        up = {(i, t, child): me.recv(child, t) for i, t in inner for child in trees[t][1]}
        sends = [
            me.send(parent, blocks[t][i], t)
            for i in range(n_blocks)
            for t, (parent, children) in enumerate(trees)
            if not children and parent is not None
        ]
        for i, t in inner:
            for child in trees[t][1]:
                yield up[i, t, child]
                blocks[t][i] += up[i, t, child].payload
                me.compute(add * blocks[t][i].nbytes)
            if trees[t][0] is not None:
                sends.append(me.send(trees[t][0], blocks[t][i], t))
        yield from sends
        down = {
            (i, t): me.recv(trees[t][0], t) for i, t in sorted(order) if trees[t][0] is not None
        }
        sends = []
        for i, t in inner + [index for index in order if index not in inner]:
            if (i, t) in down:
                yield down[i, t]
                blocks[t][i][:] = down[i, t].payload
            sends += [me.send(child, blocks[t][i], t) for child in trees[t][1]]
        yield from sends
        return vector

    return program


def coloured_steps(n_ranks: int, n_blocks: int) -> int:
    """Steps of Sanders' schedule down both trees: links in two colours, no two of one colour at a
    port, each used every other step.
    """
    links = [
        (parent, rank, t)
        for rank in range(n_ranks)
        for t, (parent, _) in enumerate(two_trees(rank, n_ranks))
        if parent is not None
    ]
    colour: dict[tuple[int, int, int], int] = {}
    for first in links:
        todo = [] if first in colour else [(first, 0)]
        while todo:
            link, shade = todo.pop()
            if link not in colour:
                colour[link] = shade
                todo += [
                    (other, 1 - shade)
                    for other in links
                    if other != link and (other[0] == link[0] or other[1] == link[1])
                ]
    has = {
        (rank, t): n_blocks if two_trees(rank, n_ranks)[t][0] is None else 0
        for rank in range(n_ranks)
        for t in (0, 1)
    }
    step = 0
    while min(has.values()) < n_blocks:
        before, out, into = dict(has), set(), set()
        for parent, rank, t in links:
            if (
                colour[parent, rank, t] == step % 2
                and before[parent, t] > before[rank, t]
                and parent not in out
                and rank not in into
            ):
                has[rank, t] += 1
                out.add(parent)
                into.add(rank)
        step += 1
    return step

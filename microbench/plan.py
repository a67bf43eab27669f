"""What a calibration consists of: groups of kernels to time, in an order in which every prefix
covers the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dlperf.core.clock import Repeats
from dlperf.core.trace import Op

MODES = ("quick", "full", "thorough")


@dataclass(frozen=True)
class Point:
    """One kernel to time and the family under which the machine file keeps it; in a group those of
    lower `rank` are timed first.
    """

    family: str
    op: Op
    rank: int = 0


@dataclass(frozen=True)
class Group:
    """Points measured together, interleaved, and written together; `repeats` states how each is
    sampled.
    """

    name: str
    points: tuple[Point, ...]
    repeats: Repeats


def repeats(mode: str) -> Repeats:
    """How kernels are sampled: raw samples of at least a millisecond (less when quick), several of
    each.
    """
    return {
        "quick": Repeats(sample_s=2e-4, n_samples=3),
        "full": Repeats(sample_s=1e-3, n_samples=5),
        "thorough": Repeats(sample_s=2e-3, n_samples=9, warmup=2),
    }[mode]


def share(mode: str, quick: int, full: int, times: int = 1) -> int:
    """How many points of a design a mode takes, or `times` as many; thorough takes five times those
    of full.
    """
    return times * {"quick": quick, "full": full, "thorough": 5 * full}[mode]


def halton(index: int, base: int) -> float:
    """The van der Corput sequence in `base`: fills [0, 1) evenly at every length (Halton 1960).

    >>> [halton(i, 2) for i in (1, 2, 3)]
    [0.5, 0.25, 0.75]
    """
    fraction, value = 1.0, 0.0
    while index > 0:
        fraction /= base
        value += fraction * (index % base)
        index //= base
    return value


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def design(n_dimensions: int, start: int = 1) -> Iterator[tuple[float, ...]]:
    """Points of a Halton sequence in the unit cube, for ever."""
    for index in itertools.count(start):
        yield tuple(halton(index, base) for base in _PRIMES[:n_dimensions])


Found = TypeVar("Found")
_MOST_TRIES = 50


def filled(
    count: int, n_dimensions: int, make: Callable[..., Found | None], start: int = 1
) -> list[Found]:
    """The first `count` results of `make`, which gets the number and the coordinates of a point of
    the design, and returns nothing for a point that does not fit.

    >>> filled(2, 1, lambda index, u: u if u < 0.3 else None)
    [0.25, 0.125]
    """
    points = zip(range(_MOST_TRIES * count + 2), design(n_dimensions, start))
    results = (make(index, *point) for index, point in points)
    return list(itertools.islice(filter(None, results), count))


_IRRATIONALS = (0.6180339887498949, 0.7548776662466927, 0.41421356237309515, 0.30277563773199456)


def turn(index: int, n: int, which: int = 0) -> int:
    """One of n cases, 0 to n - 1, for a design's point: evenly, and in step with none of its
    coordinates, as `index % n` would be (a coordinate in base n knows the remainder). `which` of
    four sequences, so that several choices are in no step with one another.

    >>> [turn(index, 2) for index in range(6)]
    [1, 0, 1, 0, 0, 1]
    """
    return int((index + 1) * _IRRATIONALS[which] % 1.0 * n)


def chosen(*cases: tuple[bool, Sequence[Op]]) -> list[Op]:
    """The operations of those cases whose condition holds."""
    return [op for is_chosen, ops in cases if is_chosen for op in ops]


def log_pick(u: float, low: float, high: float) -> int:
    """A whole number in [low, high], uniform in its logarithm.

    >>> log_pick(0.5, 1, 100)
    10
    """
    return max(1, round(low * math.pow(high / low, u)))


def log_count(u: float, n_elements: int, most_elements: int, high: int) -> int:
    """How many times `n_elements`, uniform in its logarithm: up to `high`, with at most
    `most_elements` in all. Sizes that are drawn one by one and thrown away where their product is
    too large would be small ones, mostly.

    >>> [log_count(u, 100, 10_000, 1000) for u in (0.0, 0.5, 1.0)]
    [1, 10, 100]
    """
    return log_pick(u, 1, max(1, min(high, most_elements // n_elements)))


def power_of_two(size: int) -> int:
    """The power of two nearest to a size by logarithms, as many networks' images have for a side.

    >>> [power_of_two(size) for size in (16, 22, 23)]
    [16, 16, 32]
    """
    return 1 << round(math.log2(size))


def pick(u: float, choices: Sequence[int]) -> int:
    """One of the choices, each with equal weight.

    >>> pick(0.99, (1, 3, 5))
    5
    """
    return choices[min(len(choices) - 1, int(u * len(choices)))]


def log_sizes(low: int, high: int, per_octave: float) -> list[int]:
    """Sizes from `low` to `high`, evenly spaced in the logarithm, both ends included.

    >>> log_sizes(64, 1024, 0.5)
    [64, 256, 1024]
    """
    steps = max(1, round(per_octave * math.log2(high / low)))
    return sorted({round(low * (high / low) ** (i / steps)) for i in range(steps + 1)})

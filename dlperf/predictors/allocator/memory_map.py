"""Whose memory each block takes over."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict

FRESH, UNUSED = -1, -2
"""Memory from the system, and memory that nothing used in the steps before, as owners."""
Owners = tuple[tuple[int, int], ...]
"""Owners of a storage's memory before it, and their bytes: storages, :data:`FRESH`,
:data:`UNUSED`, or the blocks within an op (:func:`owner_of_scratch`).
"""


def owner_of_scratch(run: int) -> int:
    """The owner that stands for the blocks that run number `run` of an op allocates within itself,
    or any run where ops are numbered.
    """
    return UNUSED - 1 - run


def run_of(owner: int) -> int:
    """The run (or op) whose blocks an owner stands for.

    >>> run_of(owner_of_scratch(3))
    3
    """
    return UNUSED - 1 - owner


class MemoryMap:
    """Who used each byte of the addresses last.

    >>> memory = MemoryMap()
    >>> [memory.take(*block) for block in ((0, 8, 5), (8, 4, 6), (4, 6, 7))]
    [{-2: 8}, {-2: 4}, {5: 4, 6: 2}]
    """

    def __init__(self) -> None:
        self._begins, self._owners = [0], [UNUSED]

    def take(self, begin: int, n_bytes: int, owner: int) -> dict[int, int]:
        """Give a range to a new owner; its bytes by former owner."""
        begins, owners, end = self._begins, self._owners, begin + n_bytes
        first, after = bisect_right(begins, begin) - 1, bisect_left(begins, end)
        found: dict[int, int] = defaultdict(int)
        for low, high, former in zip(
            [begin, *begins[first + 1 : after]],
            [*begins[first + 1 : after], end],
            owners[first:after],
        ):
            found[former] += high - low
        is_whole = after < len(begins) and begins[after] == end
        kept = begins[first] < begin
        last = owners[after - 1]
        begins[first + kept : after] = [begin] if is_whole else [begin, end]
        owners[first + kept : after] = [owner] if is_whole else [owner, last]
        return dict(found)

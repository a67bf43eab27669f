"""Samples of several passes over the same measurements, without passes that were disturbed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from statistics import median
from typing import Generic, TypeVar

from dlperf.core.clock import Samples

Key = TypeVar("Key", bound=Hashable)
SLOWED = 1.3
"""A pass whose median is more than so many times that of the fastest counts as slowed from outside.
"""


class Passes(Generic[Key]):
    """What was sampled, by measurement and pass."""

    def __init__(self) -> None:
        self._found: dict[Key, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, key: Key, number: int, times_s: Iterable[float]) -> None:
        """Samples of a measurement in pass `number`, seconds."""
        for time_s in times_s:
            self._found[key][number].append(time_s)

    def samples(self) -> dict[Key, Samples]:
        """For each measurement the samples of all passes but the slowed ones, in the order of
        measuring.

        >>> passes = Passes(); passes.add("a", 0, (5.0, 9.0, 6.0)); passes.add("a", 1, (3.0, 3.5))
        >>> passes.samples()["a"].values
        (3.0, 3.5)
        """
        return {
            key: Samples(tuple(value for values in self._kept(passes) for value in values))
            for key, passes in self._found.items()
        }

    def n_slowed(self) -> tuple[int, int]:
        """Measurements with a slowed pass, and those with several passes."""
        several = [passes for passes in self._found.values() if len(passes) > 1]
        return sum(len(self._kept(passes)) < len(passes) for passes in several), len(several)

    @staticmethod
    def _kept(passes: dict[int, list[float]]) -> list[list[float]]:
        least = min(median(values) for values in passes.values())
        return [values for values in passes.values() if median(values) <= SLOWED * least]

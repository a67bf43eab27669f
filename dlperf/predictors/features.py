"""What decides an op's time: its family, the key of its curve, and the numbers that the curve runs
over.

One registered function a family turns an op into a :class:`Description`. The kernels of a machine
file and the ops of a trace pass through the same functions, so a new op costs one function here
(and, if it has a kernel of its own, one micro-benchmark).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.trace import Argument, Op, TensorSpec


@dataclass(frozen=True, slots=True)
class Description:
    """Where an op lies in its family.

    `key` names the curve (operator, dtype, regime); `place` are its coordinates, logarithms to base
    2; `terms` are non-negative amounts of work of which the time is a weighted sum in first
    approximation (1 for the call itself, multiply-adds, elements moved, ...). `fallbacks` are keys
    to try, in order, where the machine file lacks `key`.
    """

    key: tuple[str, ...]
    place: tuple[float, ...]
    terms: tuple[float, ...]
    fallbacks: tuple[tuple[str, ...], ...] = ()


def stacked(
    descriptions: Sequence[Description],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Places (n, d) and terms (n, q) of ops of one curve."""
    n = len(descriptions)
    return np.array([one.place for one in descriptions], dtype=float).reshape(n, -1), np.array(
        [one.terms for one in descriptions], dtype=float
    ).reshape(n, -1)


Describe = Callable[[Op], "Description | None"]
DescribeByThreads = Callable[[Op, int], "Description | None"]
_REGISTRY: dict[str, DescribeByThreads] = {}


def family_by_threads(*packets: str) -> Callable[[DescribeByThreads], DescribeByThreads]:
    """Register the description of operators whose kernel depends on the number of threads. An
    operator described twice is an error.
    """

    def register(function: DescribeByThreads) -> DescribeByThreads:
        for packet in packets:
            if packet in _REGISTRY:
                raise ValueError(f"{packet} is described twice")
            _REGISTRY[packet] = function
        return function

    return register


def family(*packets: str) -> Callable[[Describe], Describe]:
    """Register the description of operators. An operator described twice is an error."""

    def register(function: Describe) -> Describe:
        family_by_threads(*packets)(lambda op, _threads: function(op))
        return function

    return register


def describe(op: Op, threads: int = 1) -> Description | None:
    """The op's description where `threads` run it; None for an operator that no family knows."""
    function = _REGISTRY.get(op.packet)
    return None if function is None else function(op, threads)


def known() -> tuple[str, ...]:
    """The operators that some family knows."""
    return tuple(sorted(_REGISTRY))


def log2(value: float) -> float:
    """Octaves above 1; 0 for what is smaller."""
    return math.log2(max(value, 1.0))


def tensor(argument: Argument) -> TensorSpec:
    """An argument that is known to be a tensor."""
    assert isinstance(argument, TensorSpec)
    return argument


def ints(argument: Argument) -> tuple[int, ...]:
    """An int or a tuple of ints as a tuple."""
    if isinstance(argument, int):
        return (int(argument),)
    return tuple(int(a) for a in argument) if isinstance(argument, tuple) else ()  # type: ignore[arg-type]

"""Kernel descriptions: the variant of kernel that an operator runs, and the features of its call.

A registered function per operator turns an op into a :class:`KernelDescription`. The kernels of a
machine file and the ops of a trace go through the same functions. To add an operator, register one
function in a module of :mod:`dlperf.predictors.kernels`, and add a micro-benchmark if the operator
has a kernel of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlperf.core.trace import Argument, Op, TensorSpec
from dlperf.ops.registry import register


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """Variant, features and regression terms of one kernel call.

    `variant` identifies the kernel model: operator, dtype, implementation. `features` are the
    coordinates of the Gaussian process, logarithms to base 2. `terms` are the non-negative
    regression terms: 1 for the call, then amounts of work (multiply-adds, elements moved, ...).
    `fallbacks` are the variants to use, in order, where the machine file lacks `variant`.

    `stored_bytes` are those that a kernel stores, by the way in which it does, while the result is
    one of `result_bytes`: each is a term by itself where the result leaves the caches.
    """

    variant: tuple[str, ...]
    features: tuple[float, ...]
    terms: tuple[float, ...]
    fallbacks: tuple[tuple[str, ...], ...] = ()
    stored_bytes: tuple[float, ...] = ()
    result_bytes: int = 0


def described(
    variants: Iterable[tuple[str, ...]], features: Iterable[float], work: Iterable[float]
) -> KernelDescription:
    """Description of a call with amounts of `work`; the variants after the first are fallbacks."""
    first, *others = dict.fromkeys(variants)
    return KernelDescription(first, tuple(features), (1.0, *map(float, work)), tuple(others))


def in_dtypes(dtype: str, *kernels: str) -> tuple[tuple[str, str], ...]:
    """Variants of kernels by name and dtype, each also in float32.

    >>> in_dtypes("float64", "layer_norm")
    (('layer_norm', 'float64'), ('layer_norm', 'float32'))
    """
    return tuple((kernel, one) for kernel in kernels for one in (dtype, "float32"))


def stacked(
    descriptions: Sequence[KernelDescription],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Features (n, d) and regression terms (n, q) of calls of one variant."""
    n = len(descriptions)
    return np.array([one.features for one in descriptions], dtype=float).reshape(n, -1), np.array(
        [one.terms for one in descriptions], dtype=float
    ).reshape(n, -1)


Describe = Callable[[Op], "KernelDescription | None"]
DescribeOnHost = Callable[[Op, int, int], "KernelDescription | None"]
DESCRIPTIONS: dict[str, DescribeOnHost] = {}
"""Description function of each operator, by packet name."""


def kernel_features_by_host(*packets: str) -> Callable[[DescribeOnHost], DescribeOnHost]:
    """Register a description function of an op, a thread count, and the channels of a block in
    oneDNN's layouts, for operators by packet name.

    Raises DlperfError for an operator that is already described.
    """
    return register(packets, DESCRIPTIONS, "descriptions")


def kernel_features(*packets: str) -> Callable[[Describe], Describe]:
    """Register a description function of an op; see :func:`kernel_features_by_host`."""

    def add(function: Describe) -> Describe:
        kernel_features_by_host(*packets)(lambda op, _threads, _block: function(op))
        return function

    return add


def log2(value: float) -> float:
    """Logarithm to base 2 of the larger of `value` and 1."""
    return math.log2(max(value, 1.0))


def tensor(argument: Argument) -> TensorSpec:
    """`argument` as a tensor, for type checkers."""
    assert isinstance(argument, TensorSpec)
    return argument


def ints(argument: Argument, n_axes: int = 1) -> tuple[int, ...]:
    """`argument` as a tuple of ints; a single one stands for all of `n_axes`."""
    values = argument if isinstance(argument, tuple) else (argument,)
    found = tuple([int(value) for value in values if isinstance(value, int)])
    return found * n_axes if len(found) == 1 else found


def pass_of(op: Op) -> tuple[str, TensorSpec, tuple[Argument, ...]]:
    """``_backward`` or nothing, the input, and the arguments after it; those of a backward begin
    with the incoming gradient.
    """
    backward = "backward" in op.packet
    return "_backward" if backward else "", tensor(op.args[backward]), op.args[backward + 1 :]

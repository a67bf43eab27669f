"""The arguments of formulas, checked by their names and made into arrays."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.errors import DlperfError

Reals = NDArray[np.float64]
Quantity = float | Reals
"""A number, or an array of numbers."""
P = ParamSpec("P")
T = TypeVar("T")
_ABOVE_ZERO, _FINITE = 5e-324, sys.float_info.max


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `least` to `most`, and how an error describes them."""

    words: str
    least: float = 0.0
    most: float = _FINITE
    whole: bool = False

    def check(self, name: str, value: ArrayLike) -> Reals:
        """The argument as an array. Raises DlperfError where a number lies outside of the range."""
        array = np.asarray(value, dtype=np.float64)
        within = (array >= self.least) & (array <= self.most)
        if not np.all(within & (array == np.floor(array)) if self.whole else within):
            raise DlperfError(f"{name} is {value!r}; it must be {self.words}")
        return array


AMOUNT = Range("finite and at least 0")
INTENSITY = Range("at least 0", most=np.inf)
POSITIVE = Range("positive", _ABOVE_ZERO, np.inf)
POSITIVE_FINITE = Range("positive and finite", _ABOVE_ZERO)
FRACTION = Range("a fraction from 0 to 1", most=1.0)
FROM_ONE = Range("finite and at least 1", 1.0)


def count(least: int = 1) -> Range:
    """The whole numbers from `least` on."""
    return Range(f"a whole number of at least {least}", least, whole=True)


RANGES = {
    **dict.fromkeys(
        """n_bytes latency_s s_per_byte reduce_s_per_byte handshake_s overhead_s gap_s
        gap_per_byte_s added_bytes_per_s n_senders n_inter n_messages flops moved_bytes memory_bytes
        network_bytes level_bytes compute_s fma_flops other_flops fma_instructions
        other_instructions n_elements intra_latency_s intra_s_per_byte inter_latency_s
        inter_s_per_byte network_latency_s duration_s link_frac stolen_s delayed_s spared_s
        n_validation n_test n_test_passes forward_s backward_s preparation_s forward backward
        preparation n_add n_mul n_fma n_tensor n_sectors cycles flops_per_instruction""".split(),
        AMOUNT,
    ),
    **dict.fromkeys(
        """base_bytes_per_s injection_bytes_per_s peak_flops_per_s bytes_per_s memory_bytes_per_s
        network_bytes_per_s level_bytes_per_s fma_flops_per_s other_flops_per_s gemm_flops_per_s
        intra_bytes_per_s inter_bytes_per_s compute_capability max_segment_bytes n_total
        cycles_per_s""".split(),
        POSITIVE,
    ),
    **dict.fromkeys(
        """n_ranks n_nodes ranks_per_node n_links n_channels n_blocks item_bytes n n_rows n_columns
        n_edges""".split(),
        count(),
    ),
    **dict.fromkeys(("intensity", "operational", "communication", "level_intensity"), INTENSITY),
    **dict.fromkeys(("memory_intensity", "arithmetic_intensity"), POSITIVE),
    **dict.fromkeys(("alpha", "overlap_frac"), FRACTION),
    **dict.fromkeys(("n_epochs", "n_training", "bucket_bytes", "accumulate"), FROM_ONE),
    **dict.fromkeys(("link_bandwidth", "link_latency"), POSITIVE_FINITE),
}
"""The range of each argument and field that is checked; a formula may have other ones."""


def check_fields(record: Any, **ranges: Range) -> None:
    """Check the fields of a record by their names; `ranges` are its own. Raises DlperfError for a
    number outside of its range.
    """
    for name in record.__dataclass_fields__:
        value, allowed = getattr(record, name), ranges.get(name) or RANGES.get(name)
        if allowed is not None and value is not None:
            allowed.check(name, value)


class Checked:
    """A dataclass whose fields are checked by their names. Raises DlperfError for a number outside
    of its range.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        check_fields(self)


class Formula(Generic[P, T]):
    """A function of checked arguments: arrays go in, and numbers come out where numbers went in."""

    def __init__(self, function: Callable[P, T], ranges: dict[str, Range]) -> None:
        functools.update_wrapper(self, function)
        self._function, self.signature = function, inspect.signature(function)
        self.ranges = {**RANGES, **ranges}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """The value of the formula. Raises DlperfError for an argument outside of its range."""
        bound = self.signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            if name in self.ranges and value is not None:
                bound.arguments[name] = self.ranges[name].check(name, value)
        result: T = plain(self._function(*bound.args, **bound.kwargs))
        return result


def formula(**ranges: Range) -> Callable[[Callable[P, T]], Formula[P, T]]:
    """Checks the arguments of a function by their names; `ranges` are its own."""
    return functools.partial(Formula, ranges=ranges)


def plain(value: Any) -> Any:
    """A number where the array has no axis, else the value itself."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and not value.ndim else value

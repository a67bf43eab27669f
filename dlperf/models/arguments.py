"""The arguments of a model checked and made into arrays; its result made into a number again where
numbers went in.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dlperf.core.errors import DlperfError
from dlperf.models.roofline import Quantity

Reals = NDArray[np.float64]


def at_least(name: str, value: ArrayLike, least: float = 0.0) -> Reals:
    """The argument as an array of finite numbers. Raises DlperfError where one is below `least`,
    infinite or not a number.
    """
    array = np.asarray(value, dtype=np.float64)
    if not np.all((array >= least) & np.isfinite(array)):
        raise DlperfError(f"{name} is {value!r}; it must be finite and at least {least:g}")
    return array


def positive(name: str, value: ArrayLike) -> Reals:
    """The argument as an array of positive numbers; a rate may be infinite. Raises DlperfError
    otherwise.
    """
    array = np.asarray(value, dtype=np.float64)
    if not np.all(array > 0):
        raise DlperfError(f"{name} is {value!r}; it must be positive")
    return array


def counts(name: str, value: ArrayLike, least: int = 1) -> Reals:
    """The argument as an array of whole numbers. Raises DlperfError where one is below `least` or
    no whole number.
    """
    array = at_least(name, value, least)
    if not np.all(array == np.floor(array)):
        raise DlperfError(f"{name} is {value!r}; it must be a whole number")
    return array


def plain(value: Reals) -> Quantity:
    """A number where the array has no axis, else the array."""
    return float(value) if np.ndim(value) == 0 else value

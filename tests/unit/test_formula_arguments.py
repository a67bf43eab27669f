"""Every number that goes into a formula is checked, and its kind is known by its name."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

import numpy as np
import pytest

from dlperf import models
from dlperf.core.errors import DlperfError
from dlperf.models.arguments import Checked, Formula, Quantity, count, formula

MODULES = [
    importlib.import_module(f"dlperf.models.{found.name}")
    for found in pkgutil.iter_modules(models.__path__)
]
FORMULAS = {
    f"{module.__name__}.{name}": value
    for module in MODULES
    for name, value in vars(module).items()
    if isinstance(value, Formula)
}


def test_no_argument_of_a_formula_is_left_out() -> None:
    assert len(FORMULAS) > 50
    unknown = {
        f"{name}({parameter.name})"
        for name, of in FORMULAS.items()
        for parameter in of.signature.parameters.values()
        if "Quantity" in str(parameter.annotation) and parameter.name not in of.ranges
    }
    assert not unknown


@formula(n_ranks=count(2))
def doubled_s(latency_s: Quantity, n_ranks: Quantity = 2) -> Quantity:
    """Twice the latency."""
    return 2 * latency_s + 0 * n_ranks


def test_numbers_stay_numbers_and_lists_become_arrays() -> None:
    assert doubled_s(1.5) == 3.0
    assert isinstance(doubled_s(1.5), float)
    assert np.array_equal(doubled_s([1, 2]), [2.0, 4.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("latency_s", "n_ranks", "message"),
    [
        (-1, 2, "latency_s is -1; it must be finite and at least 0"),
        (float("nan"), 2, "latency_s is nan"),
        (1.0, 1, "n_ranks is 1; it must be a whole number of at least 2"),
        (1.0, 2.5, "n_ranks is 2.5"),
    ],
)
def test_numbers_outside_of_their_range_are_named(
    latency_s: float, n_ranks: float, message: str
) -> None:
    with pytest.raises(DlperfError, match=message):
        doubled_s(latency_s, n_ranks=n_ranks)


def test_records_are_checked_by_the_same_names() -> None:
    @dataclass(frozen=True)
    class Link(Checked):
        latency_s: float | None
        name: str = ""

    assert Link(None).latency_s is None
    with pytest.raises(DlperfError, match="latency_s is inf"):
        Link(float("inf"))

"""What a predicted step is made of: every item of its price list put under exactly one heading, so
that the parts are the whole.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dlperf.core.errors import DlperfError
from dlperf.core.prediction import BOUNDS, Item
from dlperf.forecast.prediction import Prediction

OPTIMIZER, UNPRICED = "optimizer", "unpriced"
PARTS = (*BOUNDS, UNPRICED, OPTIMIZER)
"""The headings: what bounds an item of forward, backward or zero_grad; ``unpriced`` where it has no
measured price; the optimizer apart, whatever bounds it.
"""


def part_of(item: Item) -> str:
    """The heading that an item of time stands under.

    >>> phases = "forward", "optimizer"
    >>> tuple(part_of(Item("fc", phase, 1e-6, "L2", "measured")) for phase in phases)
    ('L2', 'optimizer')
    """
    if item.phase == "optimizer":
        return OPTIMIZER
    return UNPRICED if item.source == UNPRICED else item.bound


Name = TypeVar("Name", bound=Hashable)


def sums_by_name(pairs: Iterable[tuple[Name, float]]) -> dict[Name, float]:
    """Sums of the numbers by name."""
    sums: dict[Name, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    return sums


@dataclass(frozen=True)
class LayerParts:
    """One layer's seconds by heading (only those that occur)."""

    layer: str
    type: str
    parts_s: tuple[tuple[str, float], ...]

    @property
    def total_s(self) -> float:
        """The layer's share of the step, all phases, in seconds."""
        return math.fsum(seconds for _, seconds in self.parts_s)

    def part_s(self, part: str) -> float:
        """Seconds under one heading; 0 where the layer has none."""
        return dict(self.parts_s).get(part, 0.0)


@dataclass(frozen=True)
class Expense:
    """One kind of work of one layer, summed over a step: `count` items that took `seconds`, limited
    by `bound`, priced from `source`.

    `what` is the operator (``aten.convolution``) or what is none (``module call``); `bound` and
    `source` are those of the largest share.
    """

    layer: str
    phase: str
    what: str
    count: int
    seconds: float
    bound: str
    source: str


@dataclass(frozen=True)
class Breakdown:
    """A predicted step taken apart; `parts_s` and the layers add up to `total_s`. Seconds."""

    total_s: float
    parts_s: tuple[tuple[str, float], ...]
    layers: tuple[LayerParts, ...]
    expenses: tuple[Expense, ...]

    def share_frac(self, part: str) -> float:
        """A heading's share of the step."""
        return dict(self.parts_s).get(part, 0.0) / self.total_s if self.total_s else 0.0


def step_s_of(prediction: Prediction) -> float:
    """Seconds of a predicted step. Raises DlperfError for a predictor that supports none."""
    if prediction.step.total_s is None:
        raise DlperfError(
            f"predictor {prediction.predictor!r} predicts no whole step; explain with calibrated"
        )
    return prediction.step.total_s


def break_down(prediction: Prediction) -> Breakdown:
    """Take a predicted step apart by what its time is made of, by layer and by kind of work, the
    most expensive first.

    The parts add up to ``prediction.step.total_s`` (to rounding): each item counts once. Raises
    DlperfError for a predictor that does not support the whole step.
    """
    total_s = step_s_of(prediction)
    items, types = prediction.prices.items, {row.name: row.type for row in prediction.trace.layers}
    by_part = sums_by_name((part_of(item), item.seconds) for item in items)
    by_layer = sums_by_name(((item.layer, part_of(item)), item.seconds) for item in items)
    present = {name for name, _ in by_layer}
    layers = tuple(
        LayerParts(
            name,
            types.get(name, "Loss"),
            tuple((part, by_layer[name, part]) for part in PARTS if (name, part) in by_layer),
        )
        for name in dict.fromkeys((*types, *(item.layer for item in items)))
        if name in present
    )
    parts_s = tuple((part, by_part[part]) for part in PARTS if by_part.get(part))
    return Breakdown(total_s, parts_s, layers, _expenses(prediction))


def _expenses(prediction: Prediction) -> tuple[Expense, ...]:
    groups: dict[tuple[str, str, str], list[Item]] = defaultdict(list)
    for item in prediction.prices.items:
        what = prediction.trace.ops[item.op].packet if item.op >= 0 else item.what
        groups[item.layer, item.phase, what].append(item)
    found = []
    for (layer, phase, what), items in groups.items():
        bounds = sums_by_name(((item.bound, item.source), item.seconds) for item in items)
        bound, source = max(bounds, key=lambda key: bounds[key])
        found.append(
            Expense(
                layer,
                phase,
                what,
                len(items),
                math.fsum(item.seconds for item in items),
                bound,
                source,
            )
        )
    return tuple(sorted(found, key=lambda expense: -expense.seconds))

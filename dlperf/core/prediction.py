"""Prices of a step's pieces and the times that they add up to: the data of a prediction."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from dlperf.core.clock import quantile
from dlperf.core.items import BOUNDS, SOURCES, Item, ItemTimes
from dlperf.core.machine import Machine
from dlperf.core.state import REFERENCE, State
from dlperf.core.trace import Trace
from dlperf.core.what_if import MachineFactors

__all__ = [
    "BOUNDS",
    "PHASES",
    "SOURCES",
    "Item",
    "Predicted",
    "PredictedStep",
    "Prices",
    "Step",
]

PHASES = ("forward", "backward", "optimizer")
"""Phases that a row of a layer has; ``zero_grad`` comes before them and belongs to no layer."""

Predicted = TypeVar("Predicted", bound="PredictedStep")


@dataclass(frozen=True)
class Prices:
    """Price list of a trace.

    `items` add up to the step. A predictor supports `phases`; the others are null in the
    prediction. It does not support the layers `unsupported`: their rows are null in every phase.
    The 90 % interval is `low_factor` to `high_factor` times the step's time; None without an
    interval. `warnings` make the whole prediction doubtful, `notes` do not.
    """

    items: tuple[Item, ...]
    phases: tuple[str, ...] = ("zero_grad", *PHASES)
    unsupported: tuple[str, ...] = ()
    low_factor: float | None = None
    high_factor: float | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    peak_memory_bytes: int | None = None

    def map_items(self, change: Callable[[Item], Item]) -> Prices:
        """The price list with every item changed."""
        return replace(self, items=tuple(map(change, self.items)))

    def by_bound(self) -> Prices:
        """The price list whose items move with their bounds alone, as with resources that change
        for good.
        """
        return self.map_items(lambda item: replace(item, response=None, response_between=0.0))

    def at_state(self, state: State, others: Sequence[State] = ()) -> Prices:
        """The price list of the reference state at another one, as
        :class:`dlperf.core.items.ItemTimes` moves items.

        The interval contains the 5th to 95th percentile of the step in the `others`, and the step
        under both extreme assumptions on how resources overlap.
        """
        if state == REFERENCE and not others:
            return self
        times = ItemTimes(self.items)
        now_s = float(times.seconds(state).sum())
        moved = self if state == REFERENCE else replace(self, items=times.moved(state))
        low, high = self.low_factor, self.high_factor
        if low is None or high is None or not now_s:
            return moved
        steps = [float(times.seconds(other).sum()) / now_s for other in others] or [1.0]
        fastest, slowest = (quantile(steps, fraction) for fraction in (0.05, 0.95))
        extremes = [seconds / now_s for seconds in times.extremes(state)]
        faster, slower = min(0.0, min(extremes) - 1.0), max(0.0, max(extremes) - 1.0)
        return replace(
            moved,
            low_factor=max(0.05, 1.0 - math.hypot(1.0 - low, min(0.0, fastest - 1.0), faster)),
            high_factor=1.0 + math.hypot(high - 1.0, max(0.0, slowest - 1.0), slower),
        )


@dataclass(frozen=True)
class Step:
    """Predicted time of a step by phase, in seconds; None for a phase without a prediction.

    `low_s`..`high_s` is a 90 % interval for the median step of a fresh process on a quiet machine.
    """

    forward_s: float | None
    backward_s: float | None
    optimizer_s: float | None
    zero_grad_s: float | None
    total_s: float | None
    low_s: float | None
    high_s: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, repr=False)
class PredictedStep:
    """Prices of a trace on a machine, by a predictor.

    `malloc` is the allocator policy, `workers` the number of processes that run such a step at
    once. `is_cross_machine`: the machine file describes another machine. `state` is the machine's,
    `what_if` are factors on its resources. The kernels are those of the machine `profiled_on`,
    carried over, if there is one.
    """

    trace: Trace
    machine: Machine
    threads: int
    predictor: str
    prices: Prices
    warnings: tuple[str, ...] = ()
    malloc: str = "default"
    workers: int = 1
    is_cross_machine: bool = False
    state: State = REFERENCE
    what_if: MachineFactors = MachineFactors()
    profiled_on: Machine | None = None

    @cached_property
    def step(self) -> Step:
        """Sums of the items by phase."""
        sums: dict[str, float | None] = {}
        for phase in ("zero_grad", *PHASES):
            is_supported = phase in self.prices.phases and not (
                self.prices.unsupported and phase in PHASES
            )
            terms = (item.seconds for item in self.prices.items if item.phase == phase)
            sums[phase] = math.fsum(terms) if is_supported else None
        parts = [sums["forward"]] if self.trace.inference else list(sums.values())
        known = [part for part in parts if part is not None]
        total = math.fsum(known) if len(known) == len(parts) else None
        low, high = self.prices.low_factor, self.prices.high_factor
        return Step(
            sums["forward"],
            sums["backward"],
            sums["optimizer"],
            sums["zero_grad"],
            total,
            None if total is None or low is None else low * total,
            None if total is None or high is None else high * total,
            self.prices.peak_memory_bytes,
        )

    @cached_property
    def layer_shares(self) -> dict[str, dict[tuple[str, str], float]]:
        """Seconds of every layer's row by (bound, source)."""
        shares: dict[str, dict[tuple[str, str], float]] = {}
        for item in self.prices.items:
            if item.phase != "zero_grad":
                own = shares.setdefault(item.layer, defaultdict(float))
                own[item.bound, item.source] += item.seconds
        return shares

    @cached_property
    def unpriced(self) -> dict[str, int]:
        """Number of ops without a price, by name."""
        found: dict[str, int] = defaultdict(int)
        for index in {
            item.op for item in self.prices.items if item.source == "unpriced" and item.op >= 0
        }:
            found[self.trace.ops[index].packet] += 1
        return dict(sorted(found.items()))

    @cached_property
    def priced_time_frac(self) -> float:
        """1 less the share of the time that stands on unpriced ops."""
        total = math.fsum(item.seconds for item in self.prices.items)
        unpriced = math.fsum(
            item.seconds for item in self.prices.items if item.source == "unpriced"
        )
        return 1.0 - unpriced / total if total else 1.0

    def under(self: Predicted, factors: MachineFactors) -> Predicted:
        """The same prediction with factors on the machine's resources."""
        if not factors.changed:
            return self
        prices = self.prices.by_bound().at_state(factors.state)
        if math.isclose(*(math.fsum(i.seconds for i in p.items) for p in (self.prices, prices))):
            note = f"{', '.join(factors.changed)}: no time of this step moves with this"
            prices = replace(prices, notes=(*prices.notes, note))
        machine = factors.of_machine(self.machine)
        return replace(self, prices=prices, machine=machine, what_if=factors)

    def cross_machine(self: Predicted) -> Predicted:
        """The same prediction for a machine or torch other than the machine file's.

        Everything is extrapolated, and the interval is twice as wide. A second call changes
        nothing.
        """
        if self.is_cross_machine:
            return self
        low, high = self.prices.low_factor, self.prices.high_factor
        prices = self.prices.map_items(
            lambda item: (
                replace(item, source="extrapolated")
                if item.source in ("measured", "interpolated")
                else item
            )
        )
        prices = replace(
            prices,
            low_factor=None if low is None else max(0.05, 1.0 - 2.0 * (1.0 - low)),
            high_factor=None if high is None else 1.0 + 2.0 * (high - 1.0),
        )
        return replace(self, prices=prices, is_cross_machine=True)

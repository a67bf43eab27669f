"""Items of a step's time, and how they move with the resources that they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlperf.core.state import State

BOUNDS = ("compute", "L1", "L2", "L3", "DRAM", "overhead", "page-faults", "network")
NO_KERNEL = ("overhead", "page-faults", "network")
"""Bounds of what no kernel takes."""
SOURCES = ("measured", "interpolated", "extrapolated", "data-sheet", "unpriced")
_LEAST_FACTOR = 0.1
"""Factor below which no response takes an item, however far a state is below the reference."""
KEPT_FRAC = 0.4
"""An item whose resources move keeps its bound down to this part of the bound's share before."""

Shares = tuple[tuple[str, float], ...]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Item:
    """Time of one piece of a step.

    `op` is the index of the op in the trace, -1 for no op (a module's call, the optimizer's
    loop, page faults of ...). `what` names the piece in reports (``kernel``, ``dispatch``, ``module
    call``, ``page faults``, ``optimizer loop``, ...). `share` is the fraction of the op that
    belongs to the layer.

    `parts` are the fractions of the seconds that move with other bounds than `bound`. `needs` are
    the fractions that resources take at least, whatever the others do: their rooflines.

    `response` is by which part its main part and its arithmetic take longer where short work does
    by 1 (:attr:`dlperf.core.state.State.sharing`); None where they move with their bounds.
    `response_between` is by which part all of it takes longer where a short parallel region
    does by 1 (:attr:`dlperf.core.state.State.core_to_core`); below 0 where cores far apart have
    more caches.
    """

    layer: str
    phase: str
    seconds: float
    bound: str
    source: str
    what: str = "kernel"
    op: int = -1
    share: float = 1.0
    parts: Shares = ()
    needs: Shares = ()
    response: float | None = None
    response_between: float = 0.0


class ItemTimes:
    """Times of items at states of the machine.

    With t the seconds of an item, p_b its part of bound b, n_b its need of it, and f_b the state's
    slowdown of b:

        t' = max(sum over b of p_b f_b, max over b of n_b f_b)

    Parts add up to t, and no need exceeds it, so at f = 1 the time is t; it falls with no f_b, and
    never below a need. Of an item with a response r its main part, its arithmetic, and its need of
    that have 1 + r s in the place of f_b, s the sharing of the core: what a co-tenant on the same
    core leaves depends on the kernel. All factors of an item with a response r' to how far cores
    are apart are r' (c - 1) larger, c the slowdown of a short parallel region.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        column = {bound: index for index, bound in enumerate(BOUNDS)}
        self.main = np.array([column[item.bound] for item in items], dtype=int)
        seconds = np.array([item.seconds for item in items], dtype=float)
        self._parts = np.zeros((len(items), len(BOUNDS)))
        self._needs = np.zeros_like(self._parts)
        for index, item in enumerate(items):
            for bound, frac in item.parts:
                self._parts[index, column[bound]] += frac
            for bound, frac in item.needs:
                self._needs[index, column[bound]] = min(1.0, frac)
        rest = np.maximum(1.0 - self._parts.sum(axis=1), 0.0)
        np.add.at(self._parts, (np.arange(len(items)), self.main), rest)
        self._parts *= seconds[:, None]
        self._needs *= seconds[:, None]
        known = [(at, item.response) for at, item in enumerate(items) if item.response is not None]
        self._responding = np.array([at for at, _ in known], dtype=int)
        self._responses = np.array([response for _, response in known], dtype=float)
        self._between = np.array([item.response_between for item in items], dtype=float)

    def _factors(self, state: State) -> tuple[Array, Array]:
        """Slowdown of each part and of each need (n, bounds)."""
        usual = np.array([state.factor(bound) for bound in BOUNDS])
        farther = self._between * (state.core_to_core - 1.0)
        needs = np.maximum(usual + farther[:, None], np.minimum(usual, _LEAST_FACTOR))
        own = 1.0 + self._responses * state.sharing + farther[self._responding]
        own = np.maximum(own, _LEAST_FACTOR)
        needs[self._responding, BOUNDS.index("compute")] = own
        parts = needs.copy()
        parts[self._responding, self.main[self._responding]] = own
        return parts, needs

    def seconds(self, state: State) -> Array:
        """Seconds of each item at a state (n,)."""
        of_parts, of_needs = self._factors(state)
        parts_s = (self._parts * of_parts).sum(axis=1)
        return np.asarray(np.maximum(parts_s, (self._needs * of_needs).max(axis=1)))

    def extremes(self, state: State) -> tuple[float, float]:
        """Seconds of all items under the two extreme assumptions on how resources overlap.

        Entirely: an item moves as a whole with what bounds it, down to its needs. Not at all: each
        need is a part of the item's time of its own.
        """
        of_parts, of_needs = self._factors(state)
        main = of_parts[np.arange(len(self.items)), self.main]
        least = (self._needs * of_needs).max(axis=1)
        whole = self._parts.sum(axis=1)
        overlapping = np.maximum(whole * main, least)
        sums = self._needs.sum(axis=1)
        needs = self._needs * (whole / np.maximum(np.maximum(sums, whole), 1e-300))[:, None]
        rest = whole - needs.sum(axis=1)
        serial = np.maximum((needs * of_needs).sum(axis=1) + rest * main, least)
        return float(overlapping.sum()), float(serial.sum())

    def moved(self, state: State) -> tuple[Item, ...]:
        """The items at a state. A need that is longer than all parts becomes the bound; else the
        largest share of the time where that of the old bound has fallen below KEPT_FRAC of what it
        was. So factors that do not concern an item leave its bound. From there they move with
        their bounds alone.
        """
        of_parts, of_needs = self._factors(state)
        before = np.maximum(self._parts, self._needs)[np.arange(len(self.items)), self.main]
        whole = np.maximum(self._parts.sum(axis=1), self._needs.max(axis=1))
        parts, needs = self._parts * of_parts, self._needs * of_needs
        seconds = np.maximum(parts.sum(axis=1), needs.max(axis=1))
        weights = np.maximum(parts, needs)
        now = weights[np.arange(len(self.items)), self.main]
        kept = now * whole >= KEPT_FRAC * before * seconds
        mains = np.where(kept, self.main, weights.argmax(axis=1))
        mains = np.where(needs.max(axis=1) > parts.sum(axis=1), needs.argmax(axis=1), mains)
        by_time = np.where(seconds > 0, seconds, 1.0)[:, None]
        rows = zip(self.items, seconds.tolist(), mains.tolist(), parts / by_time, needs / by_time)
        return tuple(
            replace(
                item,
                seconds=now_s,
                bound=BOUNDS[main],
                parts=_shares(part, main) if item.parts else (),
                needs=_shares(need) if item.needs else (),
                response=None,
                response_between=0.0,
            )
            for item, now_s, main, part, need in rows
        )


def _shares(fracs: Array, but: int = -1) -> Shares:
    """Fractions above 0 by bound, without that of one column."""
    found = enumerate(fracs.tolist())
    return tuple((BOUNDS[index], frac) for index, frac in found if frac > 0 and index != but)

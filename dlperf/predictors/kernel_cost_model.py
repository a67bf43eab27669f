"""A machine's measurements as curves: surfaces fitted to its kernels when they are first needed,
bandwidths, costs.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dlperf.core.code_footprint import code_of
from dlperf.core.machine import (
    CACHE_MISS_COSTS,
    CACHE_RESIDENCY,
    COLD_START_COSTS,
    EXACT,
    PAGE_RESIDENCY,
    Curve,
    Kernel,
    Machine,
)
from dlperf.core.trace import Op
from dlperf.models.roofline import time_s
from dlperf.ops.roofs import LEVELS, Roofs, roofs_of
from dlperf.predictors.families import Description, describe
from dlperf.predictors.features import stacked
from dlperf.predictors.kernel_model import (
    Array,
    Smoothness,
    Surface,
    find_smoothness,
    one_blas_thread,
)
from dlperf.predictors.sub_kernels import parts

_ENOUGH_POINTS = 3
"""A curve through fewer says less of a shape than that of a related regime; a calibration short of
time has every kernel's ends and middle first.
"""
_SPAN, _NEAR, _CALLS = 64.0, 8.0, 4.0
"""A key whose largest kernel has so many times the work of its smallest tells its call from its
work; another speaks of so many times more or less work than it was measured with, and its call
takes at most so many usual ones.
"""
_KEPT, _DESCRIBED = "_books", "_described_kernels"


@dataclass(frozen=True)
class Passed:
    """What passed since some code last ran: bytes touched, those of them on new pages, code that
    operators ran (:func:`dlperf.core.code_footprint.relative_footprint`), seconds.
    """

    n_bytes: float = 0.0
    code_size: int = 0
    seconds: float = 0.0
    fresh_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class PricedPart:
    """What the curve `key` says of a part of an op: its `seconds`, and whether it lies where that
    very curve was measured.
    """

    key: tuple[str, ...]
    description: Description
    seconds: float
    is_inside: bool


@dataclass(frozen=True, slots=True)
class PricedKernel:
    """What curves say of an op."""

    parts: tuple[PricedPart, ...]

    @property
    def seconds(self) -> float:
        """All parts together."""
        return math.fsum(part.seconds for part in self.parts)

    @property
    def source(self) -> str:
        """``interpolated``, or ``extrapolated`` where any part is."""
        return "interpolated" if all(part.is_inside for part in self.parts) else "extrapolated"


@dataclass
class Book:
    """One machine at one thread count; ask :func:`book_of` for it."""

    machine: Machine
    threads: int
    _surfaces: dict[tuple[str, ...], Surface] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict)
    _works: dict[tuple[str, ...], tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> dict[tuple[str, ...], list[tuple[Description, Kernel]]]:
        """Described kernels by key."""
        return _described(self.machine, self.threads)

    def resolve(self, description: Description) -> tuple[str, ...] | None:
        """The first of the description's keys of which the machine has enough points, near in size
        or over a range; or else that of most, None if it has none.

        Kernels of one size leave open what of their time is call and what is work, so of one many
        times as large, or small, they say less than a relative's.
        """
        keys = [key for key in (description.key, *description.fallbacks) if key in self.kernels]
        speaking = [
            key for key in keys if self._spans(key) or self._is_near(key, description)
        ] or keys
        most = max(speaking, key=lambda key: len(self.kernels[key]), default=None)
        return next((key for key in speaking if len(self.kernels[key]) >= _ENOUGH_POINTS), most)

    def _work(self, key: tuple[str, ...]) -> tuple[float, float]:
        """The least and the most work of a key's kernels, in what its terms count."""
        if key not in self._works:
            work = [sum(description.terms[1:]) for description, _ in self.kernels[key]]
            self._works[key] = min(work), max(work)
        return self._works[key]

    def _spans(self, key: tuple[str, ...]) -> bool:
        """Whether a key's kernels differ so much in work that what a call takes, and what its work,
        follows from them.
        """
        least, most = self._work(key)
        return most >= _SPAN * least

    def _is_near(self, key: tuple[str, ...], description: Description) -> bool:
        """Whether the work lies about where a key's kernels were measured."""
        least, most = self._work(key)
        return (
            least <= _NEAR * sum(description.terms[1:])
            and sum(description.terms[1:]) <= _NEAR * most
        )

    def surface(self, key: tuple[str, ...]) -> Surface:
        """The fitted surface of a measured key."""
        if key not in self._surfaces:
            curve = self._curves.get(key)
            smoothness = (
                None if curve is None else Smoothness(curve.scales, curve.signal, curve.noise)
            )
            self._surfaces[key] = Surface.fit(*self.points(key), smoothness, self.most_call_s(key))
        return self._surfaces[key]

    def points(self, key: tuple[str, ...]) -> tuple[Array, Array, Array]:
        """Places (n, d), terms (n, q) and seconds (n,) of a key's kernels."""
        rows = self.kernels[key]
        return *stacked([description for description, _ in rows]), np.array(
            [kernel.samples.minimum for _, kernel in rows], dtype=float
        )

    def most_call_s(self, key: tuple[str, ...]) -> float:
        """The most that a call can take, in seconds, whatever its work.

        The shortest of a key's kernels bounds it. Where these are all of about one size, they leave
        open what is call and what is work: then a call takes at most a few times what calls of the
        same family take that were measured down to tiny sizes.
        """
        rows = self.kernels[key]
        least_s = min(kernel.samples.minimum for _, kernel in rows)
        if self._spans(key):
            return least_s
        return min(
            least_s,
            _CALLS
            * self._calls_s.get(
                rows[0][1].family, self.cost_s("boxed_call") + self.cost_s("native_call")
            )
            or math.inf,
        )

    @cached_property
    def _calls_s(self) -> dict[str, float]:
        """Seconds of a usual call by family: the median of the shortest kernels of its keys that
        were measured down to tiny sizes.
        """
        found: dict[str, list[float]] = defaultdict(list)
        for key, rows in self.kernels.items():
            if self._spans(key):
                found[rows[0][1].family].append(min(kernel.samples.minimum for _, kernel in rows))
        return {family: statistics.median(values) for family, values in found.items()}

    @cached_property
    def _curves(self) -> dict[tuple[str, ...], Curve]:
        return {curve.key: curve for curve in self.machine.curves if curve.threads == self.threads}

    def kernel_s(self, op: Op) -> tuple[float, str] | None:
        """Seconds of one op as torch.ops calls it with warm caches, and the number's source; None
        where no curve serves it.
        """
        exact = self.machine.exact(op.signature, self.threads)
        if exact is not None:
            return exact.samples.minimum, "measured"
        (found,) = self.curves_s([tuple(describe(part, self.threads) for part in parts(op))])
        return (found.seconds, found.source) if found is not None else None

    def curves_s(self, ops: Sequence[Sequence[Description | None]]) -> list[PricedKernel | None]:
        """What the curves say of ops, given the descriptions of their parts, whether or not these
        very ops were measured; None for an op of which a part has no curve. A call is dispatched
        once, however many parts it has.
        """
        wanted: dict[tuple[str, ...], list[tuple[int, int, Description]]] = defaultdict(list)
        found: dict[int, dict[int, PricedPart]] = defaultdict(dict)
        for index, descriptions in enumerate(ops):
            for number, description in enumerate(descriptions):
                if (
                    description is not None
                    and (key := self.resolve(description)) is not None
                    and self.surface(key).fits(description)
                ):
                    wanted[key].append((index, number, description))
        for key, members in wanted.items():
            times, inside = self.surface(key).predict(
                *stacked([description for *_, description in members])
            )
            for (index, number, description), seconds, within in zip(members, times, inside):
                again_s = self.cost_s("native_call") if number else 0.0
                is_inside = bool(within) and key == description.key
                found[index][number] = PricedPart(
                    key, description, max(0.0, float(seconds) - again_s), is_inside
                )
        return [
            (
                PricedKernel(tuple(found[index].values()))
                if len(found[index]) == len(descriptions)
                else None
            )
            for index, descriptions in enumerate(ops)
        ]

    def unpriced_s(self, flops: float, n_bytes: float) -> float:
        """A lower bound for an op that no curve serves: its roofline, in seconds, and a dispatch."""
        peak = max(self.peak_flops_per_s.values(), default=math.inf)
        bound_s = float(
            time_s(flops, n_bytes, peak, self.bytes_per_s[self.machine.level_of(n_bytes)])
        )
        return bound_s + self.cost_s("native_call") + self.cost_s("boxed_call")

    @cached_property
    def bytes_per_s(self) -> dict[str, float]:
        """Bandwidth by level, the roofs that reports draw (:func:`dlperf.ops.roofs.roofs_of`); a
        level without one takes that of the next one outwards.

        Raises DlperfError where the file holds no memory measurement.
        """
        roofs = {roof.level: roof.bytes_per_s for roof in self._roofs.bandwidths}
        outer = roofs.get("DRAM") or self.machine.dram_bytes_per_s(self.threads)
        found: dict[str, float] = {}
        for level in reversed(LEVELS):
            outer = roofs.get(level, outer)
            found[level] = outer
        return found

    @cached_property
    def _roofs(self) -> Roofs:
        return roofs_of(self.machine, self.threads)

    @cached_property
    def level_rates(self) -> Array:
        """Bytes per second in the order of LEVELS."""
        return np.array([self.bytes_per_s[level] for level in LEVELS])

    @cached_property
    def _sweep(self) -> tuple[Array, Array]:
        """Logarithms of working sets, and seconds a byte of STREAM's triad over them, never less
        for more.
        """
        curve = self.machine.bandwidth_curve("triad", self.threads)
        if not curve:
            return np.zeros(1), np.full(1, 1.0 / self.bytes_per_s["DRAM"])
        # Neighbours only add: what a larger set takes, a smaller one takes at most.
        costs = np.minimum.accumulate(
            [1.0 / point.median_bytes_per_s for point in reversed(curve)]
        )[::-1]
        return np.log2([point.working_set_bytes for point in curve]), costs

    def seconds_per_byte(self, n_bytes: Array) -> Array:
        """What a byte costs that comes from as far away as a working set of `n_bytes` reaches, by
        the measured sweep of STREAM's triad.

        Between two working sets linear in the logarithm; never less for more. What a shared cache
        really keeps for this core shows here, whatever its size.
        """
        found: Array = np.interp(np.log2(np.clip(n_bytes, 1.0, 2.0**60)), *self._sweep)
        return found

    @property
    def own_bytes(self) -> float:
        """What the caches hold that no other core shares; 0 where it is not known."""
        return float(self.threads * max(self.machine.cpu.caches_bytes[:2]))

    def far_seconds_per_byte(
        self, packet: str, n_bytes: Array, seconds: Array | float = 0.0
    ) -> Array:
        """What an operator takes more, in seconds a byte, whose operands lie as far away as so many
        bytes that others touched since, than one whose operands are in a core's own caches; where
        no operator of the same code was measured, as an elementwise one. What was not touched for
        so many `seconds` is the farther away the more of a shared cache others took meanwhile.
        """
        curve = self._cold_curves.get(f"far/{code_of(packet)}", self._cold_curves.get("far/next"))
        if curve is None:
            return np.zeros(len(n_bytes))
        found = np.interp(np.log2(np.clip(n_bytes, 1.0, 2.0**60)), *curve)
        lost = np.where(
            n_bytes > self.own_bytes,
            self._forgotten_frac(np.broadcast_to(seconds, len(n_bytes))),
            0.0,
        )
        farther: Array = found + lost * (curve[1][-1] - found)
        return farther

    @cached_property
    def _retention(self) -> tuple[Array, Array]:
        """Milliseconds and factors, both rising; 1 throughout where nothing was measured."""
        return self._pauses(CACHE_RESIDENCY)

    @cached_property
    def _page_retention(self) -> tuple[Array, Array]:
        return self._pauses(PAGE_RESIDENCY)

    def page_factor(self, seconds: float) -> float:
        """How many times as long a page's first touch takes so long after it was given back, as at
        once.
        """
        return float(np.interp(1e3 * seconds, *self._page_retention))

    def _pauses(self, what: str) -> tuple[Array, Array]:
        at = [
            cost
            for cost in self.machine.costs
            if cost.name.startswith(f"{what}/") and cost.threads == self.threads
        ]
        found = sorted((float(cost.name.partition("/")[2]), cost.seconds) for cost in at)
        pauses, factors = np.array([(0.0, 1.0), *found]).T
        return pauses, _rising(factors)

    def level_numbers(self, n_bytes: Array) -> npt.NDArray[np.int64]:
        """For each amount of bytes the place in LEVELS of the nearest memory that holds it."""
        sizes = self.machine.cpu.caches_bytes
        number = np.full(len(n_bytes), len(LEVELS) - 1)
        for place in reversed(range(len(sizes))):
            if sizes[place]:
                number[n_bytes <= sizes[place]] = place
        return number

    @cached_property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Highest GEMM rate by dtype."""
        return {ceiling.dtype: ceiling.fma_flops_per_s for ceiling in self._roofs.ceilings}

    def cost_s(self, name: str) -> float:
        """A named cost in seconds; 0 where a (partial) file does not hold it."""
        if name not in self._costs:
            self._costs[name] = self.machine.cost_s(name, self.threads, default=0.0)
        return self._costs[name]

    @cached_property
    def _cold_curves(self) -> dict[str, tuple[list[float], list[float]]]:
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for cost in self.machine.costs:
            if (
                cost.name.startswith((*COLD_START_COSTS, CACHE_MISS_COSTS))
                and cost.threads == self.threads
            ):
                kind, what, amount = cost.name.split("/")
                found[f"{kind}/{what}"].append((_cold_place(kind, float(amount)), cost.seconds))
        curves = {}
        for name, points in found.items():
            points.sort()
            seconds = _rising(np.array([second for _, second in points]))
            # A quarter of the least amount of bytes measured leaves the call's own code where it
            # is; so does no other operator.
            nothing = 0.0 if name.startswith("varied/") else points[0][0] - 2.0
            curves[name] = ([nothing, *(place for place, _ in points)], [0.0, *map(float, seconds)])
        return curves

    def cold_operator_s(self, packet: str, since: Passed) -> float:
        """:meth:`cold_s` of an operator's own code; where no operator of the same code was
        measured, of an elementwise one's.
        """
        code = code_of(packet)
        return self.cold_s(code if f"cold/{code}" in self._cold_curves else "next", since)

    def cold_s(self, what: str, since: Passed) -> float:
        """Seconds that an operator (``first``, ``next``, ``aten.NAME``), a ``module``,
        ``optimizer``, ``backward`` or ``zero_grad`` takes more after all that passed since it last
        ran: what drives out most counts. What a shared cache has forgotten meanwhile comes from as
        far as after the most bytes measured.
        """
        found = 0.0
        for kind, amount in (
            ("cold", since.n_bytes),
            ("churn", since.fresh_bytes),
            ("varied", since.code_size),
        ):
            curve = self._cold_curves.get(f"{kind}/{what}")
            if curve is not None and amount > 0:
                near = float(np.interp(_cold_place(kind, amount), *curve))
                lost = (
                    float(self._forgotten_frac(np.array([since.seconds]))[0])
                    if kind == "cold" and amount > self.own_bytes
                    else 0.0
                )
                found = max(found, near + lost * (curve[1][-1] - near))
        return found

    def _forgotten_frac(self, seconds: Array) -> Array:
        """The part of what lay in the shared cache that comes from DRAM after so long, by what it
        costs.
        """
        found: Array = np.minimum(
            1.0, self._forgetting * (np.interp(1e3 * seconds, *self._retention) - 1.0)
        )
        return found

    @cached_property
    def _forgetting(self) -> float:
        """The part that a sweep twice as long as from the shared cache has lost; 0 where memory is
        as near.
        """
        dram_s, shared_s = (
            self._sweep[1][-1],
            self.seconds_per_byte(np.array([8 * self.own_bytes]))[0],
        )
        return float(shared_s / (dram_s - shared_s)) if dram_s > shared_s else 0.0


def _rising(values: Array) -> Array:
    """Halfway between the rising curves just above and just below: one point that a busy moment
    raised raises no other as far.

    >>> [float(value) for value in _rising(np.array([1.0, 4.0, 2.0, 8.0]))]
    [1.0, 3.0, 3.0, 8.0]
    """
    halfway: Array = (np.maximum.accumulate(values) + np.minimum.accumulate(values[::-1])[::-1]) / 2
    return halfway


def _cold_place(kind: str, amount: float) -> float:
    """Where an amount lies on a curve of costs: bytes by their logarithm, code by its size."""
    return amount if kind == "varied" else math.log2(amount)


def _described(
    machine: Machine, threads: int
) -> dict[tuple[str, ...], list[tuple[Description, Kernel]]]:
    """Every described kernel of a thread count by key; the descriptions are made once and kept with
    the machine, for all its books.
    """
    known: dict[tuple[str, bool], Description | None] = machine.__dict__.setdefault(_DESCRIBED, {})
    found: dict[tuple[str, ...], list[tuple[Description, Kernel]]] = defaultdict(list)
    for kernel in machine.kernels:
        if kernel.threads != threads:
            continue
        signature = kernel.op.signature, threads > 1
        if signature not in known:
            known[signature] = describe(kernel.op, threads)
        description = known[signature]
        if description is not None:
            found[description.key].append((description, kernel))
    return dict(found)


def book_of(machine: Machine, threads: int) -> Book:
    """The book of a machine at its measured thread count nearest to `threads`; made once and kept
    with the machine.
    """
    nearest = machine.nearest_threads(threads)
    books: dict[int, Book] = machine.__dict__.setdefault(_KEPT, {})
    if nearest not in books:
        books[nearest] = Book(machine, nearest)
    return books[nearest]


@one_blas_thread
def learn(machine: Machine) -> Machine:
    """The machine with the smoothness and the held-out errors of all its curves: the last part of a
    calibration.

    Operations measured for a target are not held out: they are no sample of their family.
    """
    curves = []
    for threads in machine.threads:
        book = Book(replace(machine, curves=()), threads)
        for key, rows in book.kernels.items():
            points, most_call_s = book.points(key), book.most_call_s(key)
            smoothness = find_smoothness(*points, most_call_s)
            held_out = Surface.fit(*points, smoothness, most_call_s).held_out
            drawn = [place for place, (_, kernel) in enumerate(rows) if kernel.family != EXACT]
            family = rows[drawn[0]][1].family if drawn else EXACT
            fracs = (
                tuple(float(abs(np.expm1(held_out[place]))) for place in drawn)
                if len(held_out)
                else ()
            )
            curves.append(
                Curve(
                    key,
                    family,
                    threads,
                    smoothness.scales,
                    smoothness.signal,
                    smoothness.noise,
                    fracs,
                )
            )
    return replace(machine, curves=tuple(curves))

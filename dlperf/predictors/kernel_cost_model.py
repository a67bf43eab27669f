"""Kernel cost model: seconds of an operator on one machine at one thread count.

An op that the machine file holds exactly has its measured time. Any other op, a matrix product for
example, is split into sub-kernels; each has a description
(:mod:`dlperf.predictors.kernels.catalog`), whose variant selects a fitted
:class:`~dlperf.predictors.kernel_model.KernelModel`.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from dlperf.core.caching import cached_by_identity
from dlperf.core.machine import EXACT, Kernel, KernelModelFit, Machine
from dlperf.core.trace import Op
from dlperf.models.roofline import time_s
from dlperf.ops.operand_bytes import is_view, streamed_bytes
from dlperf.ops.roofs import roofs_of
from dlperf.predictors.cache_model import CacheModel
from dlperf.predictors.device_kernels import describe_on
from dlperf.predictors.kernel_model import (
    Array,
    Hyperparameters,
    KernelModel,
    Related,
    fit_hyperparameters,
)
from dlperf.predictors.kernels.catalog import describe
from dlperf.predictors.kernels.contractions import sort_of, sort_of_variant
from dlperf.predictors.kernels.description import KernelDescription, stacked
from dlperf.predictors.kernels.onednn import block_of
from dlperf.predictors.kernels.sub_kernels import sub_kernels
from dlperf.predictors.shared_core import CoreResponses

Variant = tuple[str, ...]
Rows = list[tuple[KernelDescription, Kernel]]
_ENOUGH_POINTS = 2
"""Points of a variant below which the model of a fallback is preferred."""
_RELATED_POINTS = 0.01
"""For how many points of a variant its fallbacks count together, and the rest of its family."""
_WIDE_RANGE = 64.0
"""Ratio of the largest to the smallest work of a variant's kernels above which its model separates
the time of the call from that of the work.
"""
_EXTRAPOLATED, _BY_FALLBACK = 2.0, 3.5
"""How many times larger errors are outside the measured range, and of another variant's model:
kernels left out of full calibrations.
"""
_MAX_PASSES = 3.0
"""Upper bound of how often a kernel streams its operands."""
_MAX_CALL_RATIO = 4.0
"""Upper bound of a call's time, in usual calls of its family, without such a range."""


@dataclass(frozen=True, slots=True)
class PricedSubKernel:
    """Predicted time of one sub-kernel, from the model of `variant`.

    `is_inside` where that variant is the described one and its features lie in the measured range.
    """

    variant: Variant
    description: KernelDescription
    seconds: float
    is_inside: bool

    @property
    def error_factor(self) -> float:
        """How many times larger its error is than the model's within the measured range of its own
        variant.
        """
        if self.is_inside:
            return 1.0
        return _EXTRAPOLATED if self.variant == self.description.variant else _BY_FALLBACK


@dataclass(frozen=True, slots=True)
class PricedKernel:
    """Predicted time of an op: the sum of its sub-kernels."""

    sub_kernels: tuple[PricedSubKernel, ...]

    @property
    def seconds(self) -> float:
        """Sum of the sub-kernels' times."""
        return math.fsum(one.seconds for one in self.sub_kernels)

    @property
    def source(self) -> str:
        """``interpolated``, or ``extrapolated`` where any sub-kernel is."""
        return "interpolated" if all(one.is_inside for one in self.sub_kernels) else "extrapolated"


@dataclass
class KernelCostModel:
    """Kernel models of one machine at one thread count; :func:`cost_model_of` makes it."""

    machine: Machine
    threads: int
    _models: dict[Variant, KernelModel] = field(default_factory=dict)
    _costs: dict[str, float] = field(default_factory=dict)
    _by_sort: dict[tuple[str, ...], dict[Variant, Rows]] = field(default_factory=dict)

    @property
    def notes(self) -> set[str]:
        """What a prediction from the models says of them."""
        return set()

    @property
    def kernels(self) -> dict[Variant, Rows]:
        """Measured kernels with their descriptions, by variant."""
        return {
            variant: rows for sort in self._sorts for variant, rows in self._described(sort).items()
        }

    @cached_property
    def _sorts(self) -> dict[tuple[str, ...], list[Kernel]]:
        """Measured kernels by sort. Half of a machine file are convolutions, whose descriptions
        take longest; few sorts of them are in a step.
        """
        found: dict[tuple[str, ...], list[Kernel]] = defaultdict(list)
        for kernel in self.machine.kernels:
            if kernel.threads == self.threads:
                found[self._sort_of(kernel.op)].append(kernel)
        return dict(found)

    def _described(self, sort: tuple[str, ...]) -> dict[Variant, Rows]:
        """Measured kernels of a sort with their descriptions, by variant."""
        if sort not in self._by_sort:
            found: dict[Variant, Rows] = defaultdict(list)
            for kernel in self._sorts.get(sort, ()):
                if (description := self.describe(kernel.op)) is not None:
                    found[description.variant].append((description, kernel))
            self._by_sort[sort] = dict(found)
        return self._by_sort[sort]

    def rows(self, variant: Variant) -> Rows:
        """Measured kernels of a variant with their descriptions."""
        return self._described(self._sort_of_variant(variant)).get(variant, [])

    def describe(self, op: Op) -> KernelDescription | None:
        """Description of an operator's kernel on this machine. Its last term is the time in which
        STREAM triad moves as many bytes: times bend where operands leave a cache. Those before it
        are by how much longer that takes for what it stores than within the core's own caches.
        """
        if self.machine.data_sheet is not None:
            return describe_on(self.machine, op)
        found = describe(op, self.threads, block_of(self.machine.cpu.flags))
        if found is None or len(found.terms) == 1 or is_view(op) or not self.machine.bandwidths:
            return found
        n_bytes = streamed_bytes(op)
        sizes = np.array([n_bytes, found.result_bytes, self.caches.private_bytes])
        moved_s, stored_s, least_s = map(float, self.caches.seconds_per_byte(sizes))
        stores_s = (one * max(0.0, stored_s - least_s) for one in found.stored_bytes)
        return replace(found, terms=(*found.terms, *stores_s, n_bytes * moved_s))

    def _sort_of(self, op: Op) -> tuple[str, ...]:
        """The sort of an operator; on a device its name."""
        return sort_of(op) if self.machine.data_sheet is None else (op.packet.rstrip("_"),)

    def _sort_of_variant(self, variant: Variant) -> tuple[str, ...]:
        """The sort of all operators of a variant."""
        return sort_of_variant(variant) if self.machine.data_sheet is None else variant[:1]

    def resolve(self, description: KernelDescription) -> Variant | None:
        """Variant whose model serves a description: the first of its variant and fallbacks with
        enough points, else with any; None where none was measured.
        """
        variants = (description.variant, *description.fallbacks)
        measured = [variant for variant in variants if self.rows(variant)]
        enough = (one for one in measured if len(self.rows(one)) >= _ENOUGH_POINTS)
        return next(enough, measured[0] if measured else None)

    def _has_wide_range(self, variant: Variant) -> bool:
        """Whether the work of a variant's kernels, as the sum of their terms, differs widely."""
        amounts = [sum(description.terms[1:]) for description, _ in self.rows(variant)]
        return max(amounts) >= _WIDE_RANGE * min(amounts)

    def kernel_model(self, variant: Variant) -> KernelModel:
        """Fitted model of a measured variant."""
        if variant not in self._models:
            hyperparameters, earlier = None, None
            if (fit := self._fits.get(variant)) is not None:
                hyperparameters = Hyperparameters(fit.length_scales, fit.signal, fit.noise)
                if fit.points == self.checksum(variant):
                    earlier = np.array(fit.weights), np.array(fit.noises)
            self._models[variant] = KernelModel.fit(
                *self._points(variant),
                hyperparameters,
                self._most(variant),
                earlier,
                None if earlier else self._related(variant),
            )
        return self._models[variant]

    def carried_spread(self, variant: Variant) -> float:
        """Relative standard deviation of what carries a variant over from another machine."""
        return 0.0

    def refit(self, variant: Variant) -> KernelModel:
        """Model of a measured variant with hyperparameters that are searched anew."""
        points, most = self._points(variant), self._most(variant)
        related = self._related(variant)
        found = fit_hyperparameters(*points, most, related)
        found = replace(found, signal=float(f"{found.signal:.4g}"))  # as in a file
        return KernelModel.fit(*points, found, most, related=related)

    def checksum(self, variant: Variant) -> int:
        """CRC-32 of what the fit to a variant rests on: its points, the upper bounds of its
        weights, and the times of all other kernels.
        """
        points = [*self._points(variant), self._most(variant), self._sampled_s]
        return zlib.crc32(b"".join(array.tobytes() for array in points))

    @cached_property
    def _sampled(self) -> dict[Variant, tuple[str, Rows]]:
        """Measured kernels by variant, but for those of a target, after their family without its
        pass.
        """
        found: dict[Variant, tuple[str, Rows]] = {}
        for variant, rows in self.kernels.items():
            if sampled := [row for row in rows if row[1].family != EXACT]:
                found[variant] = _without_pass(sampled[0][1].family), sampled
        return found

    @cached_property
    def _sampled_s(self) -> Array:
        """Seconds of all measured kernels but those of a target."""
        sampled = (one for kernels in self._sorts.values() for one in kernels)
        return np.array([kernel.seconds for kernel in sampled if kernel.family != EXACT])

    def _points(self, variant: Variant) -> tuple[Array, Array, Array]:
        """Features (n, d), terms (n, q) and seconds (n,) of a variant's kernels."""
        rows = self.rows(variant)
        return *stacked([description for description, _ in rows]), np.array(
            [kernel.seconds for _, kernel in rows], dtype=float
        )

    def _related(self, variant: Variant) -> Related | None:
        """Kernels whose times are sums of the same terms as those of a variant: of its fallbacks,
        and of its family, forward and backward.
        """
        own, family = self.rows(variant)[0][0], _without_pass(self.family(variant))
        near: Rows = []
        rest: Rows = []
        for one, (other_family, rows) in self._sampled.items():
            if one == variant or not _is_alike(rows[0][0], own):
                continue
            if one in own.fallbacks:
                near += rows
            elif other_family == family:
                rest += rows
        if not near + rest:
            return None
        counts = np.concatenate(
            [np.full(len(rows), _RELATED_POINTS / max(1, len(rows))) for rows in (near, rest)]
        )
        terms = stacked([description for description, _ in near + rest])[1]
        times_s = np.array([kernel.seconds for _, kernel in near + rest])
        return Related(terms, times_s, counts)

    def family(self, variant: Variant) -> str:
        """Family of a variant's kernels, but for those that were measured for a target."""
        families = (kernel.family for _, kernel in self.rows(variant))
        return next((family for family in families if family != EXACT), EXACT)

    def _most(self, variant: Variant) -> Array:
        """Upper bounds (q,) of the weights of a variant's terms: of its call and of its streaming,
        which in the measured range other terms may resemble, but not beyond.
        """
        most = np.full(len(self.rows(variant)[0][0].terms), math.inf)
        if len(most) > 1:
            most[-1] = math.inf if self.machine.data_sheet else _MAX_PASSES
            most[0] = self._max_call_s(variant)
        return most

    def _max_call_s(self, variant: Variant) -> float:
        """Upper bound in seconds of a variant's call, whatever its work.

        The shortest kernel; without a wide range of work also a multiple of a usual call of the
        family.
        """
        rows = self.rows(variant)
        shortest_s = min(kernel.seconds for _, kernel in rows)
        if self._has_wide_range(variant):
            return shortest_s
        return min(shortest_s, _MAX_CALL_RATIO * self._call_s(variant) or math.inf)

    def _call_s(self, variant: Variant) -> float:
        """Seconds of a usual call of a variant's family: median of the shortest kernels of its
        variants with a wide range of work.
        """
        family = self.family(variant)
        found = [
            min(kernel.seconds for _, kernel in rows)
            for sort, kernels in self._sorts.items()
            if any(kernel.family == family for kernel in kernels)
            for one, rows in self._described(sort).items()
            if self.family(one) == family and self._has_wide_range(one)
        ]
        if not found:
            return self.cost_s("boxed_call") + self.cost_s("native_call")
        return statistics.median(found)

    @cached_property
    def _fits(self) -> dict[Variant, KernelModelFit]:
        return {
            one.variant: one for one in self.machine.kernel_models if one.threads == self.threads
        }

    def kernel_s(self, op: Op) -> tuple[float, str] | None:
        """Seconds of a call of one op with warm caches, and their source; None without a model."""
        exact = self.machine.exact(op, self.threads)
        if exact is not None:
            return exact.seconds, "measured"
        (found,) = self.modelled([op])
        return (found.seconds, found.source) if found is not None else None

    def modelled(self, ops: Iterable[Op]) -> list[PricedKernel | None]:
        """Modelled times of ops; None for an op without a model."""
        is_device = self.machine.data_sheet is not None
        return self.kernels_s(
            [tuple(map(self.describe, (op,) if is_device else sub_kernels(op))) for op in ops]
        )

    def kernels_s(
        self, ops: Sequence[Sequence[KernelDescription | None]]
    ) -> list[PricedKernel | None]:
        """Modelled times of ops from the descriptions of their sub-kernels, even of ops that were
        measured; None for an op with a sub-kernel without a model.

        An op is dispatched once, so the call's cost counts for its first sub-kernel only.
        """
        wanted: dict[Variant, list[tuple[int, int, KernelDescription]]] = defaultdict(list)
        found: dict[int, dict[int, PricedSubKernel]] = defaultdict(dict)
        for index, descriptions in enumerate(ops):
            for number, description in enumerate(descriptions):
                if (
                    description is not None
                    and (variant := self.resolve(description)) is not None
                    and self.kernel_model(variant).fits(description)
                ):
                    wanted[variant].append((index, number, description))
        for variant, members in wanted.items():
            times, inside = self.kernel_model(variant).predict(
                *stacked([description for *_, description in members])
            )
            for (index, number, description), seconds, within in zip(members, times, inside):
                again_s = self.cost_s("native_call") if number else 0.0
                is_inside = bool(within) and variant == description.variant
                found[index][number] = PricedSubKernel(
                    variant, description, max(0.0, float(seconds) - again_s), is_inside
                )
        return [
            PricedKernel(tuple(found[index].values()))
            if len(found[index]) == len(descriptions)
            else None
            for index, descriptions in enumerate(ops)
        ]

    def unpriced_s(self, flops: float, n_bytes: float) -> float:
        """Lower bound in seconds for an op without a model: its roofline plus a dispatch."""
        peak = max(self.peak_flops_per_s.values(), default=math.inf)
        rate = self.caches.bytes_per_s[self.machine.level_of(n_bytes)]
        bound_s = float(time_s(flops, n_bytes, peak, rate))
        return bound_s + self.cost_s("native_call") + self.cost_s("boxed_call")

    def fused_s(self, flops: float, n_bytes: float, threads: int) -> float:
        """Seconds of a kernel that a compiler generated, which `threads` run: its roofline, whose
        peak is that of sums or products alone, one launch without dispatch, and the start of a
        team.
        """
        ceiling = self.caches.roofs.ceiling("float32")
        peak = math.inf if ceiling is None else ceiling.other_flops_per_s
        rate = self.caches.bytes_per_s[self.machine.level_of(n_bytes)]
        share = min(1.0, threads / self.threads)
        started_s = self.cost_s("boxed_call") + (self.cost_s("fork_join") if threads > 1 else 0.0)
        return float(time_s(flops, n_bytes, share * peak, rate)) + started_s

    @cached_property
    def caches(self) -> CacheModel:
        """Cache penalties and bandwidths."""
        return CacheModel(self.machine, self.threads, roofs_of(self.machine, self.threads))

    @cached_property
    def core_responses(self) -> CoreResponses:
        """Responses of kernels to a core that a co-tenant shares."""
        return CoreResponses(self)

    @cached_property
    def peak_flops_per_s(self) -> dict[str, float]:
        """Highest measured GEMM rate by dtype, in FLOP/s."""
        return {one.dtype: one.fma_flops_per_s for one in self.caches.roofs.ceilings}

    def cost_s(self, name: str) -> float:
        """A named cost in seconds; 0 where the file does not hold it."""
        if name not in self._costs:
            self._costs[name] = self.machine.cost_value(name, self.threads, default=0.0)
        return self._costs[name]


def _without_pass(family: str) -> str:
    """The family of a forward for that of its backward."""
    return family.removesuffix("_backward")


def _is_alike(one: KernelDescription, other: KernelDescription) -> bool:
    """Whether two descriptions have as many features and terms."""
    return len(one.features) == len(other.features) and len(one.terms) == len(other.terms)


_cost_model = cached_by_identity(KernelCostModel)


def cost_model_of(machine: Machine, threads: int) -> KernelCostModel:
    """Kernel cost model of a machine at its measured thread count nearest to `threads`."""
    return _cost_model(machine, machine.nearest_threads(threads))

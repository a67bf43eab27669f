"""Prices of small and large operators where a family was measured at few sizes: what a call takes,
and work at the slowness that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from calibrated_cases import CALL_S, ELEMENTS_PER_S, MIB, T, machine, relu, relu_s

from dlperf.core.clock import Samples
from dlperf.core.machine import Kernel
from dlperf.core.trace import Op
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.predictors.kernel_model import KernelModel, Related


def gradient(n: int) -> Op:
    return Op("aten.threshold_backward.default", (T(n), T(n), 0), outputs=(T(n),))


def book_with(
    sizes: Sequence[int], seconds: Sequence[float], op: object = gradient
) -> KernelCostModel:
    extra = tuple(Kernel(op(n), "pointwise", 1, Samples((s,))) for n, s in zip(sizes, seconds))  # type: ignore[operator]
    return KernelCostModel(machine({"boxed_call": 0.5e-6, "native_call": 0.5e-6}, extra=extra), 1)


def price(cost_model: KernelCostModel, op: Op) -> float:
    found = cost_model.kernel_s(op)
    assert found is not None
    return found[0]


@pytest.mark.parametrize("n_points", [1, 3, 6])
def test_what_was_measured_at_one_size_alone_is_not_priced_flat_below_it(n_points: int) -> None:
    """A ReLU's gradient of a million elements takes 200 us: one of 64 elements is a call, however
    many points of about that size there are.
    """
    sizes = [MIB + 4096 * index for index in range(n_points)]
    cost_model = book_with(sizes, [2e-4 * n / MIB for n in sizes])
    for n in (1, 64, 4096, 2**16):
        assert price(cost_model, gradient(n)) <= 4 * relu_s(64) + 1.3 * 2e-4 * n / MIB
    assert price(cost_model, gradient(MIB)) == pytest.approx(2e-4, rel=0.05)
    assert price(cost_model, gradient(4 * MIB)) == pytest.approx(8e-4, rel=0.1)


def test_what_was_measured_at_tiny_sizes_alone_says_nothing_of_large_ones() -> None:
    """The noise of tiny kernels must not be multiplied: curves of relatives speak for the slope."""
    sums = tuple(
        Kernel(Op("aten.add.Tensor", (T(n), T(n))), "pointwise", 1, Samples((relu_s(n),)))
        for n in (64, 4096, MIB)
    )
    tiny = tuple(
        Kernel(gradient(n), "pointwise", 1, Samples((seconds,)))
        for n, seconds in ((64, 1.7e-6), (100, 2.0e-6), (160, 2.4e-6))  # some 7 ns an element
    )
    cost_model = KernelCostModel(machine(extra=(*sums, *tiny)), 1)
    assert relu_s(MIB) / 3 < price(cost_model, gradient(MIB)) < 3 * relu_s(MIB)
    assert price(cost_model, gradient(100)) == pytest.approx(2e-6, rel=0.2)


def test_a_term_that_few_points_leave_open_costs_what_it_does_in_related_kernels() -> None:
    """One of three points has a little of a term, and noise: alone, the term would stand for the
    noise. Related kernels are twice as fast and know better.
    """
    terms = np.array([[1.0, 1e3, 0.0], [1.0, 4e3, 0.0], [1.0, 1e3, 1.0]])
    times = np.array([1.0, 4.0, 1.5]) * 1e-3
    others = np.array([[1.0, 1e3, 500.0], [1.0, 1e3, 2000.0], [1.0, 9e3, 100.0]])
    law_s = np.array([1e-6, 5e-7, 5e-7])
    related = Related(others, others @ law_s, np.full(3, 1 / 3))
    asked = np.array([[1.0, 1e3, 1e3]])
    for known, least_s, most_s in ((None, 0.1, 1.0), (related, 1.5e-3, 2.5e-3)):
        kernel_model = KernelModel.fit(np.log2(terms[:, 1:2]), terms, times, related=known)
        (found_s,), _ = kernel_model.predict(np.log2(asked[:, 1:2]), asked)
        assert least_s < found_s < most_s


def test_no_price_is_above_the_law_at_the_slowness_that_was_measured() -> None:
    """Random points with noise, asked for anywhere: at most what the terms say times the largest
    residual.
    """
    generator = np.random.default_rng(5)
    for _ in range(20):
        n = 2.0 ** generator.uniform(6, 22, 9)
        terms = np.stack([np.ones_like(n), n], axis=1)
        times = (CALL_S + n / ELEMENTS_PER_S) * np.exp(generator.normal(0.0, 0.4, len(n)))
        kernel_model = KernelModel.fit(np.log2(n)[:, None], terms, times)
        asked = 2.0 ** np.linspace(0, 34, 200)
        asked_terms = np.stack([np.ones_like(asked), asked], axis=1)
        predicted, _ = kernel_model.predict(np.log2(asked)[:, None], asked_terms)
        slowness = np.max(times / (terms @ kernel_model.weights))
        assert np.all(predicted <= asked_terms @ kernel_model.weights * slowness * (1 + 1e-9))
        assert np.all(predicted > 0)


def test_a_call_is_bounded_by_the_shortest_kernel_and_work_carries_the_rest() -> None:
    terms = np.array([[1.0, 1000.0], [1.0, 1100.0]])
    kernel_model = KernelModel.fit(
        np.log2(terms[:, 1:]), terms, np.array([1e-3, 1.1e-3]), most=np.array([2e-6, np.inf])
    )
    assert (
        kernel_model.weights == pytest.approx([2e-6, 0.998e-6], rel=0.01)
        or kernel_model.weights[0] < 1e-12
    )
    small, _ = kernel_model.predict(np.array([[0.0]]), np.array([[1.0, 1.0]]))
    assert small[0] < 5e-6


def test_a_whole_curve_is_what_it_was() -> None:
    cost_model = book_with(
        [64, 1024, 2**15, MIB], [CALL_S + n / ELEMENTS_PER_S for n in (64, 1024, 2**15, MIB)]
    )
    for n in (64, 500, 9000, 2**18, 4 * MIB):
        assert price(cost_model, gradient(n)) == pytest.approx(
            CALL_S + n / ELEMENTS_PER_S, rel=0.02
        )
        assert price(cost_model, relu(n)) == pytest.approx(CALL_S + n / ELEMENTS_PER_S, rel=0.02)

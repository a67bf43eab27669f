"""What must hold of the Ridgeline for any work on any machine."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlperf.models import ridgeline, roofline

amounts = st.floats(1e-3, 1e18)
rates = st.builds(ridgeline.Rates, st.floats(1e3, 1e16), st.floats(1e3, 1e14), st.floats(1e3, 1e13))
works = st.tuples(amounts, amounts, amounts)


@given(works, rates)
def test_projected_time_is_the_longest_term(
    work: tuple[float, float, float], machine: ridgeline.Rates
) -> None:
    flops, memory, network = work
    longest = max(
        flops / machine.peak_flops_per_s,
        memory / machine.memory_bytes_per_s,
        network / machine.network_bytes_per_s,
    )
    assert ridgeline.projected_s(*work, machine) == pytest.approx(longest)


@given(works)
def test_network_intensity_is_the_product_of_the_coordinates(
    work: tuple[float, float, float],
) -> None:
    flops, memory, network = work
    product = ridgeline.arithmetic_intensity(flops, memory) * ridgeline.memory_intensity(
        memory, network
    )
    assert ridgeline.network_intensity(flops, network) == pytest.approx(product)


@given(works, rates)
def test_the_region_is_that_of_the_longest_term(
    work: tuple[float, float, float], machine: ridgeline.Rates
) -> None:
    terms = ridgeline.terms_s(*work, machine)
    where = int(
        ridgeline.region(
            ridgeline.memory_intensity(work[1], work[2]),
            ridgeline.arithmetic_intensity(work[0], work[1]),
            machine,
        )
    )
    assert terms[where] == pytest.approx(terms.max())  # on a border either may be named
    if np.sort(terms)[-2] < 0.999999 * terms.max():
        assert where == int(ridgeline.bounding_resource(*work, machine))


@given(works, rates)
def test_the_attainable_rate_is_flops_over_projected_time_and_cardwell_s(
    work: tuple[float, float, float], machine: ridgeline.Rates
) -> None:
    flops, memory, network = work
    x, y = (
        ridgeline.memory_intensity(memory, network),
        ridgeline.arithmetic_intensity(flops, memory),
    )
    rate = ridgeline.attainable_flops_per_s(x, y, machine)
    assert rate == pytest.approx(flops / ridgeline.projected_s(*work, machine))
    cardwell = roofline.attainable_with_network_flops_per_s(
        y,
        ridgeline.network_intensity(flops, network),
        machine.peak_flops_per_s,
        machine.memory_bytes_per_s,
        machine.network_bytes_per_s,
    )
    assert rate == pytest.approx(cardwell)


@given(works, rates, st.integers(0, 10_000), st.floats(0, 1))
def test_no_latency_and_full_overlap_are_the_published_form(
    work: tuple[float, float, float], machine: ridgeline.Rates, n_messages: int, overlap: float
) -> None:
    published = ridgeline.projected_s(*work, machine)
    assert (
        ridgeline.projected_s(
            *work, machine, n_messages=n_messages, latency_s=0.0, overlap_frac=1.0
        )
        == published
    )
    extended = ridgeline.projected_s(
        *work, machine, n_messages=n_messages, latency_s=1e-6, overlap_frac=overlap
    )
    assert extended >= published
    assert extended <= ridgeline.terms_s(*work, machine, n_messages, 1e-6).sum() * (1 + 1e-12)


@given(works, rates)
def test_doubled_rates_halve_the_time_and_keep_the_region(
    work: tuple[float, float, float], machine: ridgeline.Rates
) -> None:
    doubled = ridgeline.Rates(*(2 * rate for rate in astuple(machine)))
    assert ridgeline.projected_s(*work, doubled) == pytest.approx(
        ridgeline.projected_s(*work, machine) / 2
    )
    assert ridgeline.bounding_resource(*work, doubled) == ridgeline.bounding_resource(
        *work, machine
    )


@given(rates, st.floats(1e-6, 1e9))
def test_the_ridge_parts_compute_from_the_rest(machine: ridgeline.Rates, x: float) -> None:
    height = ridgeline.ridge(x, machine)
    assert ridgeline.region(x, height * 1.001, machine) == ridgeline.COMPUTE
    assert ridgeline.region(x, height * 0.999, machine) != ridgeline.COMPUTE

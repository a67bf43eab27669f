"""The models of the hierarchical roofline on numbers worked out by hand, and their relation to the
plain roofline.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlperf.core.errors import DlperfError
from dlperf.models import memory_hierarchy, roofline

positive = st.floats(1e-3, 1e3)


def test_the_lowest_of_all_roofs_decides() -> None:
    # 12 FLOP; 24, 6, 1 bytes at 100, 40, 4 byte/s: 0.24, 0.15, 0.25 s
    intensities = memory_hierarchy.level_intensities(12.0, [24.0, 6.0, 1.0])
    assert intensities.tolist() == [0.5, 2.0, 12.0]
    assert memory_hierarchy.attainable_flops_per_s(
        intensities, 1000.0, [100.0, 40.0, 4.0]
    ) == pytest.approx(48.0)  # 12 x 4
    assert memory_hierarchy.time_s(0.012, [24.0, 6.0, 1.0], [100.0, 40.0, 4.0]) == pytest.approx(
        0.25
    )
    assert int(memory_hierarchy.binding_level(0.012, [24.0, 6.0, 1.0], [100.0, 40.0, 4.0])) == 2
    assert (
        int(memory_hierarchy.binding_level(0.3, [24.0, 6.0, 1.0], [100.0, 40.0, 4.0]))
        == memory_hierarchy.COMPUTE
    )


def test_a_level_that_moves_nothing_limits_nothing() -> None:
    intensities = memory_hierarchy.level_intensities([8.0, 0.0], [[4.0, 0.0], [4.0, 0.0]])
    assert intensities.tolist() == [[2.0, np.inf], [0.0, np.inf]]
    assert np.asarray(
        memory_hierarchy.attainable_flops_per_s(intensities, 100.0, [10.0, 1.0])
    ).tolist() == [
        20.0,
        0.0,
    ]


@given(
    positive,
    st.lists(positive, min_size=3, max_size=3),
    positive,
    st.lists(positive, min_size=3, max_size=3),
)
def test_time_and_rate_are_one_law_and_one_level_is_williams(
    flops: float, moved: list[float], peak: float, rates: list[float]
) -> None:
    rate = memory_hierarchy.attainable_flops_per_s(
        memory_hierarchy.level_intensities(flops, moved), peak, rates
    )
    assert flops / float(rate) == pytest.approx(
        float(memory_hierarchy.time_s(flops / peak, moved, rates))
    )
    assert float(memory_hierarchy.time_s(flops / peak, moved[:1], rates[:1])) == pytest.approx(
        float(roofline.time_s(flops, moved[0], peak, rates[0]))
    )
    assert float(rate) <= float(
        roofline.attainable_flops_per_s(flops / moved[1], peak, rates[1])
    ) * (1 + 1e-12)
    index = int(memory_hierarchy.binding_level(flops / peak, moved, rates))
    alone = flops / peak if index == memory_hierarchy.COMPUTE else moved[index] / rates[index]
    assert alone == pytest.approx(float(memory_hierarchy.time_s(flops / peak, moved, rates)))


@given(st.floats(0, 1), positive)
def test_the_measured_mix_is_equation_7_where_no_fma_is_half(alpha: float, peak: float) -> None:
    assert memory_hierarchy.mixed_flops_per_s(alpha, peak, peak / 2) == pytest.approx(
        float(memory_hierarchy.fma_mix_fraction(alpha)) * peak
    )
    assert memory_hierarchy.mixed_flops_per_s(1.0, peak, 0.1) == pytest.approx(peak)
    assert memory_hierarchy.mixed_flops_per_s(0.0, peak, 0.1) == pytest.approx(0.1)


def test_what_is_out_of_range_is_refused() -> None:
    for call in (
        lambda: memory_hierarchy.fma_mix_fraction(1.1),
        lambda: memory_hierarchy.mixed_flops_per_s(-0.1, 1.0, 1.0),
        lambda: memory_hierarchy.fma_fraction(0, 0),
        lambda: memory_hierarchy.attainable_flops_per_s([1.0], 1.0, [0.0]),
        lambda: memory_hierarchy.time_s(1.0, [-1.0], [1.0]),
        lambda: memory_hierarchy.level_intensities(-1.0, [1.0]),
    ):
        with pytest.raises(DlperfError):
            call()

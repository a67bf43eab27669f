"""The roofline models on numbers and arrays; their values are worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dlperf.core.errors import DlperfError
from dlperf.models import roofline as model


def test_karst_in_figure_2_1() -> None:
    # Table 2.3: 13.9 GB/s, 22 GFLOP/s; at OI 1 the slope gives 13.9 GFLOP/s, right of 22 / 13.9 =
    # 1.583 the roof 22
    assert model.attainable_flops_per_s(1.0, 22e9, 13.9e9) == 13.9e9
    assert model.attainable_flops_per_s(2.0, 22e9, 13.9e9) == 22e9
    ridge = model.ridge_point(22e9, 13.9e9)
    assert model.attainable_flops_per_s(ridge, 22e9, 13.9e9) == pytest.approx(22e9)


def test_network_is_the_third_roof() -> None:
    # Jetstream: 13.1 and 0.34 GB/s, 43.4 GFLOP/s; at OI 2 and CAI 10 the network allows 3.4 GFLOP/s
    attainable = model.attainable_with_network_flops_per_s(2.0, 10.0, 43.4e9, 13.1e9, 0.34e9)
    assert attainable == pytest.approx(3.4e9)
    assert model.attainable_with_network_flops_per_s(
        2.0, np.inf, 43.4e9, 13.1e9, 0.34e9
    ) == pytest.approx(26.2e9)


def test_example_of_section_3_9() -> None:
    # fc1 at batch 128: 0.000207 s; consistently counted, 2 x 5,017,600 FLOP and 4 x (128 x 784 +
    # 784 x 50 + 128 x 50) bytes
    flops, moved_bytes = 2 * 5_017_600, 4 * 145_952
    intensity = model.operational_intensity(flops, moved_bytes)
    assert intensity == pytest.approx(17.19, abs=0.005)
    rate = model.parameterised_flops_per_s(flops / 0.000207, intensity, 12_937.6e6)
    assert flops / float(rate) == pytest.approx(0.000207)


def test_arrays_broadcast() -> None:
    flops, n_bytes = np.array([100.0, 0.0, 10.0]), np.array([10.0, 10.0, 100.0])
    seconds = model.time_s(flops, n_bytes, np.array([10.0, 10.0, 20.0]), 20.0)
    assert np.array_equal(seconds, [10.0, 0.5, 5.0])
    assert isinstance(model.time_s(1.0, 1.0, 1.0, 1.0), float)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_rates_must_be_positive(bad: float) -> None:
    for call in (
        lambda: model.time_s(1.0, 1.0, bad, 1.0),
        lambda: model.time_s(1.0, 1.0, 1.0, bad),
        lambda: model.ridge_point(bad, 1.0),
        lambda: model.attainable_flops_per_s(1.0, 1.0, np.array([1.0, bad])),
        lambda: model.activation_s(1.0, bad),
    ):
        with pytest.raises(DlperfError, match="positive"):
            call()
    with pytest.raises(DlperfError, match="flops is -1"):
        model.time_s(-1.0, 1.0, 1.0, 1.0)

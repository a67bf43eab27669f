"""The Ridgeline and the counts of seven parallel algorithms on numbers worked out by hand, and at
their limits.
"""

from __future__ import annotations

import numpy as np
import pytest

from dlperf.core.errors import DlperfError
from dlperf.models import parallel_algorithms as algorithms
from dlperf.models import ridgeline

CLX = ridgeline.Rates(4.2e12, 105e9, 12e9)


def test_a_layer_of_4096_at_batch_512_is_next_to_the_ridge() -> None:
    # F = 6 x 512 x 4096^2, B_M = 4 (2 x 512 x 4096 + 4096^2), B_N = 2 x 4 x 4096^2: I_N = 6 x 512 /
    # 8 = 384 against 350
    flops, memory, network = 6 * 512 * 4096**2, 4 * (2 * 512 * 4096 + 4096**2), 8 * 4096**2
    assert ridgeline.network_intensity(flops, network) == 384.0
    x, y = (
        ridgeline.memory_intensity(memory, network),
        ridgeline.arithmetic_intensity(flops, memory),
    )
    assert (x, y) == (pytest.approx(0.625), pytest.approx(614.4))
    assert ridgeline.ridge(x, CLX) == pytest.approx(350 / 0.625)
    assert ridgeline.region(x, y, CLX) == ridgeline.COMPUTE
    assert ridgeline.region(x, y / 2, CLX) == ridgeline.NETWORK  # batch 256


def test_regions_are_the_paper_s_quadrants() -> None:
    corners = {
        (1.0, 1.0): "network",
        (100.0, 1.0): "memory",
        (100.0, 100.0): "compute",
        (0.5, 100.0): "network",
        (8.0, 100.0): "compute",
    }
    for (x, y), expected in corners.items():
        assert ridgeline.RESOURCES[int(ridgeline.region(x, y, CLX))] == expected


def test_latency_and_overlap_extend_the_paper() -> None:
    rates = ridgeline.Rates(20.0, 10.0, 4.0)  # 40 / 20 = 2 s, 10 / 10 = 1 s, 12 / 4 = 3 s
    assert ridgeline.projected_s(40.0, 10.0, 12.0, rates) == 3.0
    assert ridgeline.projected_s(40.0, 10.0, 12.0, rates, overlap_frac=0.0) == 5.0
    assert ridgeline.projected_s(40.0, 10.0, 12.0, rates, overlap_frac=0.75) == 3.5
    assert ridgeline.projected_s(40.0, 10.0, 12.0, rates, n_messages=4, latency_s=0.5) == 5.0
    assert ridgeline.communication_frac(40.0, 10.0, 12.0, rates) == pytest.approx(3 / 5)
    assert ridgeline.communication_frac(40.0, 10.0, 12.0, rates, overlap_frac=1.0) == pytest.approx(
        1 / 3
    )
    assert ridgeline.communication_frac(0.0, 0.0, 0.0, rates) == 0.0
    assert (
        ridgeline.bounding_resource(40.0, 10.0, 0.0, rates, n_messages=5, latency_s=0.5)
        == ridgeline.NETWORK
    )  # 2.5 s of waiting against 2


def test_what_sends_nothing_is_bound_by_the_node() -> None:
    assert ridgeline.memory_intensity(1.0, 0.0) == ridgeline.network_intensity(1.0, 0.0) == np.inf
    assert ridgeline.region(np.inf, 1.0, CLX) == ridgeline.MEMORY
    assert ridgeline.attainable_flops_per_s(np.inf, 1.0, CLX) == 105e9


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: ridgeline.Rates(1.0, 0.0, 1.0), "memory_bytes_per_s is 0.0"),
        (lambda: ridgeline.Rates(1.0, 1.0, np.inf), "network_bytes_per_s is inf"),
        (
            lambda: ridgeline.projected_s(1.0, 1.0, 1.0, CLX, overlap_frac=1.5),
            "overlap_frac is 1.5",
        ),
        (lambda: ridgeline.terms_s(-1.0, 1.0, 1.0, CLX), "flops is -1.0"),
        (lambda: ridgeline.arithmetic_intensity(1.0, 0.0), "memory_bytes is 0.0"),
        (lambda: ridgeline.region(0.0, 1.0, CLX), "memory_intensity is 0.0"),
        (lambda: algorithms.fft(1, 2), "n is 1"),
        (lambda: algorithms.dgemv(8, 0), "n_ranks is 0"),
    ],
)
def test_errors_name_the_argument(call, named: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DlperfError, match=named.replace(".", r"\.")):
        call()


# -- Table 2.4 -------------------------------------------------------------------------------------


def test_summa_is_the_printed_formula_on_a_square_grid() -> None:
    n, root = 61_952, 11  # 121 processes, the largest size of Table 2.5
    p, found = root**2, algorithms.summa(61_952, 11, 11)
    assert found.flops == pytest.approx((2 * n**3 + 2 * n**2) / p)
    assert found.memory_bytes == pytest.approx(8 * 8 * (1 + n**2 / 8 + n**3 / (8 * 2048**0.5)) / p)
    assert found.network_bytes == pytest.approx(
        2 * root * (8 * (n / root) ** 2 * 4)
    )  # ceil(log2 11) = 4
    # 1 x 2: each process sends or receives the other's half of A once, 8 x N/2 x N bytes for either
    # panel
    assert algorithms.summa(1000, 1, 2).network_bytes == 8 * 1000 * 500 * 2


def test_limits_of_operational_intensity() -> None:
    huge = 2**40
    assert algorithms.summa(huge, 4, 4).operational_intensity == pytest.approx(
        2 * 2048**0.5 / 8, rel=1e-6
    )  # 11.3
    assert algorithms.dgemv(huge, 16).operational_intensity == pytest.approx(2 / 8)
    assert algorithms.ddot(huge, 16).operational_intensity == pytest.approx(2 / 16)
    assert algorithms.fft(2**29, 128).operational_intensity == pytest.approx(
        5 * 29 / 48
    )  # grows with log N
    assert algorithms.stencil(huge, 16).operational_intensity == pytest.approx(4 / 56)


def test_limits_of_communication_intensity() -> None:
    def ratio(work) -> float:  # type: ignore[no-untyped-def]
        return float(work(2**30).communication_intensity / work(2**29).communication_intensity)

    assert ratio(lambda n: algorithms.summa(n, 4, 4)) == pytest.approx(2, rel=1e-6)  # N^3 / N^2
    assert ratio(lambda n: algorithms.dgemv(n, 16)) == pytest.approx(2, rel=1e-6)
    assert ratio(lambda n: algorithms.ddot(n, 16)) == pytest.approx(2, rel=1e-6)
    assert ratio(lambda n: algorithms.stencil(n, 16)) == pytest.approx(2, rel=1e-6)
    assert ratio(lambda n: algorithms.fft(n, 16)) == pytest.approx(30 / 29)
    # DGEMV: 2 N^2 / (8 N (P - 1)); DDOT: 2 (N/P) / (8 log P)
    assert algorithms.dgemv(2**20, 5).communication_intensity == pytest.approx(
        2 * 2**20 / (8 * 4), rel=1e-5
    )
    assert algorithms.ddot(2**20, 8).communication_intensity == pytest.approx(
        2 * 2**17 / (8 * 3), rel=1e-5
    )
    # FFT: 5 log N / (32 log P), the same for every N of the same log; MST with E = 16 V: 16 / P /
    # (6 x 4 + 12), uniform in V as in Figure 2.7
    assert algorithms.fft(2**20, 16).communication_intensity == pytest.approx(5 * 20 / (32 * 4))
    for v in (2**16, 2**26):
        assert algorithms.boruvka(v, 16 * v, 16).communication_intensity == pytest.approx(
            16 / 16 / (6 * 4 + 12)
        )
    # Dijkstra on a dense graph: V^2 / P / (V (16 x 4 + 4 x 4 / 16)) = V / 16 / 65
    assert algorithms.dijkstra(2**20, 2**40, 16).communication_intensity == pytest.approx(
        2**20 / 16 / 65, rel=1e-4
    )


def test_one_process_sends_nothing() -> None:
    for work in (
        algorithms.summa(64, 1, 1),
        algorithms.dgemv(64, 1),
        algorithms.ddot(64, 1),
        algorithms.fft(64, 1),
        algorithms.stencil(64, 1),
        algorithms.boruvka(64, 1024, 1),
        algorithms.dijkstra(64, 4096, 1),
    ):
        assert (work.network_bytes, work.communication_intensity) == (0.0, np.inf)

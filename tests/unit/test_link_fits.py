"""Parameters of links are found again in samples that were made from them."""

from __future__ import annotations

import pytest

from dlperf.core.clock import Samples
from dlperf.core.cluster import Link, Message
from dlperf.distributed.link_fits import LOW, fit_link, level_s

SIZES = (0, 64, 1024, 8192, 2**15, 2**17, 2**18, 2**20, 2**22, 2**24)


def message(
    n_bytes: int, seconds: float, what: str = "ping_pong", n_pairs: int = 1, n_messages: int = 1
) -> Message:
    return Message(what, n_bytes, n_pairs, n_messages, samples_s=[seconds])


def postal(latency_s: float, s_per_byte: float) -> list[Message]:
    return [message(size, latency_s + s_per_byte * size) for size in SIZES]


def test_postal_in_every_band() -> None:
    fit = fit_link(Link("network", tuple(postal(5e-5, 8e-9))))
    assert [band.name for band in fit.bands] == ["short", "medium", "long"]
    for band in fit.bands:
        assert band.latency_s == pytest.approx(5e-5, rel=1e-4)
        assert band.s_per_byte == pytest.approx(8e-9, rel=1e-4)
        assert band.residual_frac < 1e-5
        assert band.base_bytes_per_s is None
        assert band.overhead_s is None
    assert (fit.latency_s, fit.s_per_byte) == pytest.approx((5e-5, 8e-9), rel=1e-4)


def test_bands_of_a_protocol_each_have_their_own() -> None:
    slow = [message(size, 1e-4 + 1e-9 * size) for size in (2**18 + 1, 2**20, 2**24)]
    fit = fit_link(Link("network", (*[m for m in postal(1e-5, 4e-9) if m.n_bytes <= 2**17], *slow)))
    assert [round(band.s_per_byte * 1e9, 3) for band in fit.bands] == [4.0, 4.0, 1.0]


def test_a_token_bucket_lets_the_first_bytes_pass() -> None:
    sizes = (2**18, 2**20, 2**22, 2**24)
    fit = fit_link(Link("network", tuple(message(size, 8e-9 * (size - 2**17)) for size in sizes)))
    assert fit.bands[0].burst_bytes == pytest.approx(2**17, rel=1e-3)
    assert fit.bands[0].latency_s == 0
    assert fit.s_per_byte == pytest.approx(8e-9, rel=1e-4)


def test_a_links_burst_passes_before_its_rate_counts() -> None:
    """T = 50 us + 8 ns a byte beyond the first 128 KiB: the fitted line meets the axis 50 us x 125
    MB/s before them.
    """
    short = [message(size, 5e-5 + 1e-10 * size) for size in (0, 64, 8192)]
    messages = (
        *short,
        *(message(size, 5e-5 + 8e-9 * (size - 2**17)) for size in (2**18, 2**20, 2**22, 2**24)),
    )
    assert fit_link(Link("network", messages)).burst_bytes == pytest.approx(2**17, rel=1e-3)
    assert (
        fit_link(Link("network", messages, bandwidth_bytes_per_s=1e8)).burst_bytes == 0
    )  # a data sheet's link is not that one
    assert fit_link(Link("network", tuple(postal(5e-5, 8e-9)))).burst_bytes == 0


def test_max_rate_of_several_pairs() -> None:
    """R_Cb = 100 MB/s alone, each further pair adds 50 MB/s: two pairs move 2 n at 150 MB/s, four 4
    n at 250 MB/s.
    """
    sizes, alpha = (2**19, 2**20, 2**22), 1e-5
    messages = [
        message(n, alpha + k * n / rate, n_pairs=k)
        for k, rate in ((1, 100e6), (2, 150e6), (4, 250e6))
        for n in sizes
    ]
    band = fit_link(Link("network", tuple(messages))).bands[0]
    assert band.base_bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert band.added_bytes_per_s == pytest.approx(50e6, rel=1e-3)
    assert band.max_rate_residual_frac is not None
    assert band.max_rate_residual_frac < 1e-3


def test_loggp_from_trains_and_sends() -> None:
    """o = 4 us; 16 messages take 15 x 3 us longer than one; L = alpha - 2 o = 20 - 8 us."""
    further = [
        message(64, 4e-6, "send"),
        message(64, 30e-6, "train"),
        message(64, 75e-6, "train", n_messages=16),
    ]
    band = fit_link(Link("socket", (*postal(20e-6, 1e-10), *further))).bands[0]
    assert band.overhead_s == pytest.approx(4e-6)
    assert band.gap_s == pytest.approx(3e-6)
    assert band.wire_latency_s == pytest.approx(12e-6, rel=1e-3)


def test_a_data_sheet_stands_above_samples() -> None:
    fit = fit_link(
        Link("network", tuple(postal(5e-5, 8e-9)), latency_s=1e-6, bandwidth_bytes_per_s=1e9)
    )
    assert (fit.latency_s, fit.s_per_byte) == (1e-6, 1e-9)


def test_latency_is_low_and_throughput_usual() -> None:
    samples = Samples(tuple(float(value) for value in range(1, 12)))  # 1 ... 11
    assert level_s(8, samples) == pytest.approx(1 + 10 * LOW)
    assert level_s(2**20, samples) == 6

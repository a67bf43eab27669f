"""Parsing and formatting of quantities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (1e-9, "1.00 ns"),
        (4.5e-5, "45.0 us"),
        (0.00123, "1.23 ms"),
        (0.1234, "123 ms"),
        (0.99949, "999 ms"),
        (0.99951, "1.00 s"),
        (1.0, "1.00 s"),
        (59.94, "59.9 s"),
        (99.96, "100 s"),
        (119.9, "120 s"),
        (120, "2 min 00 s"),
        (185, "3 min 05 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7384, "2 h 03 min"),
        (360000, "100 h 00 min"),
        (None, "-"),
        (math.nan, "-"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (2.53e9, "2.53 GFLOP/s"),
        (950, "950 FLOP/s"),
        (999.9, "1.00 kFLOP/s"),
        (1e12, "1.00 TFLOP/s"),
        (0, "0 FLOP/s"),
        (None, "-"),
        (math.nan, "-"),
    ],
)
def test_si(value: float | None, text: str) -> None:
    assert format_si(value, "FLOP/s") == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (32 * 2**20, "32.0 MiB"),
        (2**30, "1.00 GiB"),
        (None, "-"),
    ],
)
def test_bytes(n: float | None, text: str) -> None:
    assert format_bytes(n) == text


def test_percent() -> None:
    assert format_percent(0.1234) == "12.3 %"
    assert format_percent(0.05, signed=True) == "+5.0 %"
    assert format_percent(math.nan) == format_percent(None) == "-"


@pytest.mark.parametrize(
    ("text", "n"),
    [
        ("0", 0),
        ("17", 17),
        ("512M", 512 * 10**6),
        ("512MB", 512 * 10**6),
        ("512MiB", 512 * 2**20),
        ("4GiB", 2**32),
        ("4gib", 2**32),
        ("1.5 GB", 1_500_000_000),
        ("1e9", 10**9),
        ("2K", 2000),
        ("2Ki", 2048),
        (" 1 TiB ", 2**40),
        ("1e-3M", 1000),
        ("8b", 8),
    ],
)
def test_sizes_as_people_type_them(text: str, n: int) -> None:
    assert parse_bytes(text) == n


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "1 2",
        "4XB",
        "1,5G",
        "ten",
        "0x10",
        "inf",
        "nan",
        "1..2M",
        ".",
        "1e400",
        "1e9999",
    ],
)
def test_what_is_no_size_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write for example 512M, 4GiB or 1e9"):
        parse_bytes(text)


@given(st.floats(1e-9, 119))
def test_seconds_read_back_to_three_digits(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == pytest.approx(
        seconds, rel=0.006
    )


@given(st.integers(0, 2**50))
def test_whole_bytes_survive(n: int) -> None:
    assert parse_bytes(str(n)) == n
    assert parse_bytes(f"{n}KiB") == 1024 * n

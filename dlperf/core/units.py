"""Parse and format quantities.

Everything inside dlperf is in SI base units (seconds, bytes, FLOP, and their ratios); human units
exist only here. GB is 10^9 bytes, GiB is 2^30.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

KIB, MIB, GIB = 2**10, 2**20, 2**30
KILO, MEGA, GIGA, TERA = 1e3, 1e6, 1e9, 1e12

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SUFFIX = {
    "": 1,
    "K": KILO,
    "M": MEGA,
    "G": GIGA,
    "T": TERA,
    "KI": KIB,
    "MI": MIB,
    "GI": GIB,
    "TI": 2**40,
}


def format_seconds(seconds: float | None) -> str:
    """Three significant digits in the unit that suits them: ``1.23 ms``, ``45.0 us``, ``2 h 03
    min``.

    >>> format_seconds(0.00123), format_seconds(7384), format_seconds(None)
    ('1.23 ms', '2 h 03 min', '-')
    """
    if seconds is None or math.isnan(seconds):
        return "-"
    size = abs(seconds)
    if size >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02d} min"
    if size >= 120:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    return _scaled(seconds, _TIMES, f"{seconds * 1e9:.2f} ns") if size else "0 s"


def _scaled(
    value: float, scales: Sequence[tuple[float, str]], below: str, rounded_up: float = 0.9995
) -> str:
    """Three digits in the first unit whose scale the value reaches, if rounded; `below` all of them
    another text.
    """
    for scale, unit in scales:
        scaled = value / scale
        if abs(scaled) >= rounded_up:
            digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
            return f"{scaled:.{digits}f} {unit}"
    return below


def format_si(value: float | None, unit: str) -> str:
    """Three significant digits with a decimal prefix.

    >>> format_si(2.53e9, "FLOP/s"), format_si(950, "B")
    ('2.53 GFLOP/s', '950 B')
    """
    if value is None or math.isnan(value):
        return "-"
    return _scaled(value, _DECIMAL, f"{value:.3g} ") + unit


def format_bytes(n_bytes: float | None) -> str:
    """Bytes with a binary prefix, as cache and memory sizes are written.

    >>> format_bytes(32 * 2**20), format_bytes(900)
    ('32.0 MiB', '900 B')
    """
    if n_bytes is None or math.isnan(n_bytes):
        return "-"
    return _scaled(n_bytes, _BINARY, f"{n_bytes:.0f} B", rounded_up=1.0)


def format_percent(fraction: float | None, signed: bool = False) -> str:
    """A fraction as percent with one decimal.

    >>> format_percent(0.1234), format_percent(-0.05, signed=True)
    ('12.3 %', '-5.0 %')
    """
    if fraction is None or math.isnan(fraction):
        return "-"
    return f"{100 * fraction:+.1f} %" if signed else f"{100 * fraction:.1f} %"


def parse_bytes(text: str) -> int:
    """A size as people type it: ``4GiB``, ``512M``, ``1e9``.

    Raises ValueError with the text and the forms that are understood.

    >>> parse_bytes("4GiB") == 4 * 2**30, parse_bytes("1.5 GB")
    (True, 1500000000)
    """
    match = re.fullmatch(
        r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:E[+-]?[0-9]{1,3})?)\s*([KMGT]?I?)B?\s*",
        text,
        re.IGNORECASE,
    )
    if not match or math.isinf(float(match.group(1))):
        raise ValueError(f"{text!r} is no size; write for example 512M, 4GiB or 1e9")
    return int(float(match.group(1)) * _SUFFIX[match.group(2).upper()])


UNSHAPED = "none"
"""In place of a rate: a link without a limit."""
_RATE_UNITS = {"kbit": KILO, "mbit": MEGA, "gbit": GIGA}


def parse_rate(text: str) -> float:
    """The rate of a link in bits a second, as the system's traffic control takes it: ``300mbit``,
    ``1gbit``.

    Raises ValueError with the text and the forms that are understood.

    >>> parse_rate("300mbit"), parse_rate("2.5Gbit")
    (300000000.0, 2500000000.0)
    """
    match = re.fullmatch(
        r"\s*([0-9]{1,6}(?:\.[0-9]{1,6})?)(kbit|mbit|gbit)\s*", text, re.IGNORECASE
    )
    if not match or not float(match.group(1)):
        raise ValueError(f"{text!r} is no rate; write for example 300mbit or 1gbit")
    return float(match.group(1)) * _RATE_UNITS[match.group(2).lower()]


def format_rate(bits_per_s: float) -> str:
    """The rate as :func:`parse_rate` reads it.

    >>> format_rate(2e9), format_rate(parse_rate("300mbit")), format_rate(1.25e8)
    ('2gbit', '300mbit', '125mbit')
    """
    unit = next(
        (unit for unit, scale in reversed(_RATE_UNITS.items()) if bits_per_s >= scale), "kbit"
    )
    return f"{bits_per_s / _RATE_UNITS[unit]:.10g}{unit}"

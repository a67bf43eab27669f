"""Postal, LogGP and max-rate parameters of a link, fitted from its raw samples when a cluster file
is used.

Latencies go by a low quantile, because what disturbs a short message only adds; throughput by the
median, because a long one meets what is usual. Every fit is weighted relatively
(`scipy.optimize.curve_fit` with the times as sigma), so that a short message counts as much as a
long one.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlperf.core.clock import Samples, quantile
from dlperf.core.cluster import PING_PONG, SEND, TRAIN, Link, Message
from dlperf.core.units import KIB

SHORT_BYTES, MEDIUM_BYTES = 8 * KIB, 256 * KIB
BANDS = (
    ("short", 0, SHORT_BYTES),
    ("medium", SHORT_BYTES, MEDIUM_BYTES),
    ("long", MEDIUM_BYTES, math.inf),
)
"""Bands of sizes by name, each above its lower and up to its upper bound in bytes. gloo has one
protocol for all messages, but over TCP a short one fits a few packets, and a long one fills every
buffer (and token bucket) on the way. They stand where Choi et al. have short, eager and rendezvous.
"""
LOW = 0.1
"""The quantile that is a latency."""


@dataclass(frozen=True)
class Band:
    """One band of sizes: postal alpha + beta n, LogGP where it was measured, and max-rate where
    several pairs were.

    `latency_s` is the fitted intercept where it is positive. Where it is negative a link lets the
    first bytes pass faster than its rate (a token bucket): `burst_bytes` = -intercept / beta, and
    `latency_s` is 0. `residual_frac` is the mean of |fitted / measured - 1|. max-rate: T = alpha +
    k n / (R_Cb + (k - 1) R_Ci) for k pairs at once (Choi et al. 2020, equation 2):
    `base_bytes_per_s`, `added_bytes_per_s`. LogGP: `overhead_s` o, `gap_s` g between messages, G =
    `s_per_byte`, L = alpha - 2 o. None where too little was measured.
    """

    name: str
    latency_s: float
    s_per_byte: float
    burst_bytes: float
    residual_frac: float
    base_bytes_per_s: float | None = None
    added_bytes_per_s: float | None = None
    max_rate_residual_frac: float | None = None
    overhead_s: float | None = None
    gap_s: float | None = None

    @property
    def wire_latency_s(self) -> float | None:
        """LogGP's L = alpha - 2 o, not below 0; None without an overhead."""
        return None if self.overhead_s is None else max(0.0, self.latency_s - 2 * self.overhead_s)


@dataclass(frozen=True)
class LinkFit:
    """A link's parameters: `latency_s` of its shortest messages, `s_per_byte` of its longest, and
    those of every band that was measured.

    `burst_bytes` pass at once where it has rested: T = latency_s + (n - burst_bytes) s_per_byte of
    long messages (ping-pongs let each direction rest).
    """

    distance: str
    latency_s: float
    s_per_byte: float
    bands: tuple[Band, ...] = ()
    burst_bytes: float = 0.0


def level_s(n_bytes: int, samples: Samples) -> float:
    """What a message of this size takes: a low quantile of short ones, the median of the others;
    seconds.
    """
    return quantile(samples.values, LOW) if n_bytes <= SHORT_BYTES else samples.median


@functools.lru_cache(maxsize=64)
def fit_link(link: Link) -> LinkFit:
    """The parameters of a link; numbers from a data sheet, where it has them, stand above fitted
    ones.
    """
    messages = [message for message in link.messages if message.what == PING_PONG]
    bands = tuple(
        band for bounds in BANDS if (band := _fit_band(bounds, link.messages)) is not None
    )
    alone = sorted((m for m in messages if m.n_pairs == 1), key=lambda m: m.n_bytes)
    latency, s_per_byte, burst = 0.0, 0.0, 0.0
    if bands:
        first, last = bands[0], bands[-1]
        latency = first.latency_s or level_s(alone[0].n_bytes, alone[0].samples)
        s_per_byte = last.s_per_byte
        burst = last.burst_bytes and last.burst_bytes + first.latency_s / s_per_byte
    if link.latency_s is not None:
        latency = link.latency_s
    if link.bandwidth_bytes_per_s is not None:
        s_per_byte, burst = 1 / link.bandwidth_bytes_per_s, 0.0
    return LinkFit(link.distance, latency, s_per_byte, bands, burst)


def _fit_band(bounds: tuple[str, float, float], messages: Sequence[Message]) -> Band | None:
    """A band needs two sizes; the one at its lower bound counts too, so that neighbouring bands
    meet.
    """
    name, low, high = bounds
    inside = [m for m in messages if low <= m.n_bytes <= high]
    alone = sorted(
        (m for m in inside if m.what == PING_PONG and m.n_pairs == 1), key=lambda m: m.n_bytes
    )
    if len({m.n_bytes for m in alone}) < 2:
        return None
    sizes = np.array([m.n_bytes for m in alone], dtype=np.float64)
    times = np.array([level_s(m.n_bytes, m.samples) for m in alone])
    intercept, slope = _straight(sizes, times)
    residual = float(np.mean(np.abs((intercept + slope * sizes) / times - 1)))
    rates = _max_rate([m for m in inside if m.what == PING_PONG], max(intercept, 0.0), slope)
    overhead, gap = _overhead_and_gap(inside)
    return Band(
        name,
        max(intercept, 0.0),
        slope,
        max(-intercept / slope, 0.0) if slope > 0 else 0.0,
        residual,
        *rates,
        overhead,
        gap,
    )


def _straight(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope (not below 0) of times over sizes, weighted relatively."""
    from scipy.optimize import curve_fit

    # in units of the data's own size, since the optimizer's steps know no seconds per byte
    length, duration = float(sizes.max()) or 1.0, float(times.max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two points leave nothing to estimate a covariance from
        found, _ = curve_fit(
            lambda x, a, b: a + b * x,
            sizes / length,
            times / duration,
            p0=(times.min() / duration, 0.5),
            sigma=times / duration,
            bounds=((-np.inf, 0.0), (np.inf, np.inf)),
        )
    return float(found[0]) * duration, float(found[1]) * duration / length


def _max_rate(
    messages: Sequence[Message], latency_s: float, s_per_byte: float
) -> tuple[float | None, float | None, float | None]:
    """R_Cb, R_Ci and the residual of three-parameter max-rate, from ping-pongs of one and of
    several pairs; alpha is the band's own.
    """
    from scipy.optimize import curve_fit

    if len({m.n_pairs for m in messages}) < 2 or s_per_byte <= 0:
        return None, None, None
    pairs = np.array([m.n_pairs for m in messages], dtype=np.float64)
    sizes = np.array([m.n_bytes for m in messages], dtype=np.float64)
    times = np.array([level_s(m.n_bytes, m.samples) for m in messages])

    def model(_: NDArray[np.float64], base: float, added: float) -> NDArray[np.float64]:
        return np.asarray(
            latency_s + pairs * sizes * s_per_byte / (base + (pairs - 1) * added), dtype=np.float64
        )

    found, _ = curve_fit(
        model, sizes, times, p0=(1.0, 0.5), sigma=times, bounds=((1e-9, 0.0), (np.inf, np.inf))
    )
    residual = float(np.mean(np.abs(model(sizes, *found) / times - 1)))
    return float(found[0]) / s_per_byte, float(found[1]) / s_per_byte, residual


def _overhead_and_gap(messages: Sequence[Message]) -> tuple[float | None, float | None]:
    """LogGP's o, the least that a send took in this band, and g, from trains of its shortest
    messages.
    """
    sends = [quantile(m.samples.values, LOW) for m in messages if m.what == SEND]
    trains = sorted(
        (m for m in messages if m.what == TRAIN), key=lambda m: (m.n_bytes, m.n_messages)
    )
    gap = None
    for one, many in pairwise(trains):
        if one.n_bytes == many.n_bytes and many.n_messages > one.n_messages:
            gap = max(
                0.0,
                (quantile(many.samples.values, LOW) - quantile(one.samples.values, LOW))
                / (many.n_messages - one.n_messages),
            )
            break
    return (min(sends) if sends else None), gap

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dlperf.core.clock import Samples, quantile
from dlperf.core.cluster import PING_PONG, SEND, TRAIN, Link, Message
from dlperf.core.units import KIB
from dlperf.models.arguments import Reals

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
    bands = tuple(
        band for bounds in BANDS if (band := _fit_band(bounds, link.messages)) is not None
    )
    latency, s_per_byte, burst = 0.0, 0.0, 0.0
    if bands:
        first, last = bands[0], bands[-1]
        shortest = min(
            (m for m in link.messages if m.what == PING_PONG and m.n_pairs == 1),
            key=lambda m: m.n_bytes,
        )
        latency = first.latency_s or level_s(shortest.n_bytes, shortest.samples)
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
    pings = sorted((m for m in inside if m.what == PING_PONG), key=lambda m: m.n_bytes)
    alone = [m for m in pings if m.n_pairs == 1]
    if len({m.n_bytes for m in alone}) < 2:
        return None
    intercept, slope, residual = _straight(alone)
    return Band(
        name,
        max(intercept, 0.0),
        slope,
        max(-intercept / slope, 0.0) if slope > 0 else 0.0,
        residual,
        *_max_rate(pings, max(intercept, 0.0), slope),
        *_overhead_and_gap(inside),
    )


def _straight(messages: Sequence[Message]) -> tuple[float, float, float]:
    """Intercept and slope (not below 0) of times over sizes, and the residual."""
    sizes, _, times = _columns(messages)
    # in units of the data's own size, since the optimizer's steps know no seconds per byte
    length, duration = sizes.max() or 1.0, times.max()
    (intercept, slope), residual = _fitted(
        lambda x, a, b: a + b * x,
        sizes / length,
        times / duration,
        (times.min() / duration, 0.5),
        (-np.inf, 0.0),
    )
    return intercept * duration, slope * duration / length, residual


def _max_rate(
    messages: Sequence[Message], latency_s: float, s_per_byte: float
) -> tuple[float | None, float | None, float | None]:
    """R_Cb, R_Ci and the residual of three-parameter max-rate, from ping-pongs of one and of
    several pairs; alpha is the band's own.
    """
    sizes, pairs, times = _columns(messages)
    if len(set(pairs)) < 2 or s_per_byte <= 0:
        return None, None, None
    (base, added), residual = _fitted(
        lambda n, base, added: latency_s + pairs * n * s_per_byte / (base + (pairs - 1) * added),
        sizes,
        times,
        (1.0, 0.5),
        (1e-9, 0.0),
    )
    return base / s_per_byte, added / s_per_byte, residual


def _columns(messages: Sequence[Message]) -> tuple[Reals, Reals, Reals]:
    """Sizes, numbers of pairs, times."""
    rows = [(m.n_bytes, m.n_pairs, level_s(m.n_bytes, m.samples)) for m in messages]
    sizes, pairs, times = np.array(rows, dtype=np.float64).T
    return sizes, pairs, times


def _fitted(
    model: Callable[..., Reals],
    sizes: Reals,
    times: Reals,
    start: tuple[float, float],
    least: tuple[float, float],
) -> tuple[tuple[float, float], float]:
    """The two parameters of a model of times over sizes, weighted relatively, and the mean of
    |fitted / measured - 1|.
    """
    from scipy.optimize import curve_fit

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two points leave nothing to estimate a covariance from
        found, _ = curve_fit(model, sizes, times, start, times, bounds=(least, (np.inf, np.inf)))
    residual = float(np.mean(np.abs(model(sizes, *found) / times - 1)))
    return (float(found[0]), float(found[1])), residual


def _overhead_and_gap(messages: Sequence[Message]) -> tuple[float | None, float | None]:
    """LogGP's o, the least that a send took in this band, and g, from trains of its shortest
    messages.
    """
    least = {m: quantile(m.samples.values, LOW) for m in messages if m.what in (SEND, TRAIN)}
    trains = sorted((m for m in least if m.what == TRAIN), key=lambda m: (m.n_bytes, m.n_messages))
    gaps = (
        max(0.0, (least[many] - least[one]) / (many.n_messages - one.n_messages))
        for one, many in pairwise(trains)
        if one.n_bytes == many.n_bytes and many.n_messages > one.n_messages
    )
    return min((s for m, s in least.items() if m.what == SEND), default=None), next(gaps, None)

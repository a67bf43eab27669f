"""How much steps and links vary, and what the slowest of n takes."""
from __future__ import annotations

import math
import statistics

from dlperf.clock import Samples, quantile
from dlperf.cluster import Cluster
from dlperf.errors import DlperfError
from dlperf.machine import Machine
from dlperf.units import KIB

_STANDARD = statistics.NormalDist()
_DECILES_APART = 2 * _STANDARD.inv_cdf(0.9)
_LONG_BYTES = 256 * KIB
_LONG_S = 1e-3
"""Kernels from here on last as long as the disturbances that a step meets."""


def sigma_of(samples: Samples) -> float:
    """The standard deviation of the logarithm of repeated measurements, from their deciles: ln(q90 / q10) / 2.56; 0 for one sample."""
    if len(samples.values) < 2:
        return 0.0
    low, high = quantile(samples.values, 0.1), quantile(samples.values, 0.9)
    return math.log(high / low) / _DECILES_APART if low > 0 else 0.0


def machine_sigma(machine: Machine, threads: int) -> float:
    """How much the same computation varies from one time to the next: the median over the machine's long kernels (all, where none is long); 0 without any."""
    at = machine.nearest_threads(threads)
    found = [(kernel.samples.median, sigma_of(kernel.samples)) for kernel in machine.kernels if kernel.threads == at and len(kernel.samples.values) > 2]
    long = [sigma for median, sigma in found if median >= _LONG_S]
    return statistics.median(long or [sigma for _, sigma in found] or [0.0])


def link_sigma(cluster: Cluster) -> float:
    """How much the links vary: the median over the measured all-reduces from 256 KiB up, where the link decides; 0 where none was measured.

    What shorter ones vary by is the scheduler's doing (:func:`dlperf.scaling.traffic.unsteady_s`).
    """
    found = [sigma_of(c.samples) for c in cluster.collectives if c.kind == "all_reduce" and len(c.samples.values) > 2 and c.n_bytes >= _LONG_BYTES]
    return statistics.median(found or [0.0])


def slowest_factor(n: int, sigma: float, fraction: float = 0.5) -> float:
    """A quantile of the slowest of n, over the median of one: exp(sigma z) with P(z < Z)^n = `fraction`, where logarithms vary by a normal law.

    The median of the slowest grows like sqrt(2 ln n). Independent ranks are assumed: errs high where they are disturbed together. Raises DlperfError for n
    below 1, a negative sigma or a fraction outside (0, 1).

    >>> slowest_factor(1, 0.1), round(slowest_factor(2, 0.1), 4)  # of two, z = 0.5449: 0.5 ** 0.5 = 0.7071 lie below
    (1.0, 1.056)
    """
    if n < 1 or sigma < 0 or not 0 < fraction < 1:
        raise DlperfError(f"the slowest of {n} with a spread of {sigma} at quantile {fraction}: expected n >= 1, spread >= 0, quantile in (0, 1)")
    if n == 1 and fraction == 0.5:
        return 1.0
    return math.exp(sigma * _STANDARD.inv_cdf(fraction ** (1 / n)))


def mean_factor(n: int, sigma: float, n_points: int = 99) -> float:
    """The mean of the slowest of n over its median, from evenly spaced quantiles: what an epoch's sum takes more than so many medians."""
    points = [slowest_factor(n, sigma, (place + 0.5) / n_points) for place in range(n_points)]
    return statistics.fmean(points) / slowest_factor(n, sigma)

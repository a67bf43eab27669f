"""Variation of times: between seconds on one machine, and of the slowest of n ranks."""

from __future__ import annotations

import math
import statistics

from dlperf.core.clock import Samples, quantile
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine

Z90 = 1.645
"""Half width of a two-sided 90 % interval of a normal distribution, in standard deviations."""
HOUR_SPREAD = 0.064
"""Relative standard deviation of the machine's speed between two hours, for a file without readings
of its state.

Medians over the same 5,000 to 12,000 kernels in six calibrations of one day, on a virtual machine
with co-tenants, varied by 4.5 %; times sqrt(2).
"""
INTERFERENCE_INTERVAL_S = 5.0
"""Interference interval: mean time between changes of a core's speed by co-tenants. The correlation
of core speeds is 0.7 to 0.9 one second apart, and half of that five seconds apart.
"""
_LEAST_READINGS = 5
_STANDARD = statistics.NormalDist()
_DECILES_APART = 2 * _STANDARD.inv_cdf(0.9)


def log_sigma(samples: Samples) -> float:
    """Standard deviation of the logarithm of repeated measurements: ln(q90 / q10) / 2.56; 0 for one
    sample.
    """
    if len(samples.values) < 2:
        return 0.0
    low, high = quantile(samples.values, 0.1), quantile(samples.values, 0.9)
    return math.log(high / low) / _DECILES_APART if low > 0 else 0.0


def machine_log_sigma(machine: Machine) -> float:
    """Standard deviation of the logarithm of kernels' times from one moment to another: that of the
    core's slowdowns in the machine's readings, each the median of three in a row, so that a single
    odd one does not count. 0 for fewer than five readings.
    """
    factors = [state.core for state in machine.states]
    if len(factors) < _LEAST_READINGS:
        return 0.0
    in_a_row = zip(factors, factors[1:], factors[2:])
    return log_sigma(Samples(tuple(map(statistics.median, in_a_row))))


def slowest_factor(n: int, sigma: float, fraction: float = 0.5) -> float:
    """Quantile of the slowest of n over the median of one: exp(sigma z) with P(Z < z)^n =
    `fraction`, for log-normal times.

    The median of the slowest grows like sqrt(2 ln n). Ranks are independent: errs high where they
    are disturbed together. Raises DlperfError for n below 1, a negative sigma or a fraction outside
    (0, 1).

    Of two, 0.5 ** 0.5 = 0.7071 lie below z = 0.5449:

    >>> slowest_factor(1, 0.1), round(slowest_factor(2, 0.1), 4)
    (1.0, 1.056)
    """
    if n < 1 or sigma < 0 or not 0 < fraction < 1:
        raise DlperfError(
            f"the slowest of {n} with a sigma of {sigma} at quantile {fraction}: expected n >= 1,"
            " sigma >= 0, quantile in (0, 1)"
        )
    if n == 1 and fraction == 0.5:
        return 1.0
    return math.exp(sigma * _STANDARD.inv_cdf(fraction ** (1 / n)))


def mean_factor(n: int, sigma: float, n_points: int = 99) -> float:
    """Mean of the slowest of n over its median, from evenly spaced quantiles."""
    points = [slowest_factor(n, sigma, (index + 0.5) / n_points) for index in range(n_points)]
    return statistics.fmean(points) / slowest_factor(n, sigma)


def initial_state_frac(seconds: float) -> float:
    """Share of the initial core state in the mean over a number of seconds T: t/T (1 - exp(-T/t)).

    States last t = INTERFERENCE_INTERVAL_S on average, exponentially distributed.

    >>> initial_state_frac(0.0), round(initial_state_frac(INTERFERENCE_INTERVAL_S), 3)
    (1.0, 0.632)
    """
    intervals = seconds / INTERFERENCE_INTERVAL_S
    return -math.expm1(-intervals) / intervals if intervals > 0 else 1.0


def sigma_over(sigma: float, seconds: float) -> float:
    """Standard deviation of the mean over a given number of seconds T of what varies by `sigma` in
    interference intervals of t: sigma sqrt(2 t/T (1 - t/T (1 - exp(-T/t)))).

    >>> round(sigma_over(0.1, 100 * INTERFERENCE_INTERVAL_S), 4)  # 0.1 sqrt(2 / 100 * 0.99)
    0.0141
    """
    intervals = seconds / INTERFERENCE_INTERVAL_S
    return (
        sigma * math.sqrt(min(1.0, 2 / intervals * (1 - initial_state_frac(seconds))))
        if intervals > 0
        else sigma
    )


def waiting_s(n: int, sigma: float, seconds: float) -> float:
    """Mean seconds that `n` workers wait for the slowest of them, each with `seconds` of work that
    varies by `sigma` in interference intervals.

    Workers are independent. With the 0.084 of a machine file (:func:`machine_log_sigma`) two
    workers wait 4.6 % of rounds of 1 s and 4.2 % of rounds of 4 s; in two series of a convolutional
    network's steps on that virtual machine they waited 4.1 and 6.0 %, 3.2 and 5.4 %.

    Raises DlperfError as :func:`slowest_factor` does.
    """
    over = sigma_over(sigma, seconds)
    return (
        seconds * (slowest_factor(n, over) * mean_factor(n, over) / mean_factor(1, over) - 1.0)
        if n > 1
        else 0.0
    )

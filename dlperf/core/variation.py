"""How much steps vary from one time to the next, and what the slowest of n takes."""

from __future__ import annotations

import math
import statistics

from dlperf.core.clock import Samples, quantile
from dlperf.core.costs import CONTENTION_FRAMEWORK, INTERFERENCE, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine

Z90 = 1.645
"""Half width of a two-sided 90 % interval of a normal distribution, in standard deviations."""
INTERFERENCE_INTERVAL_S = 5.0
"""How long a state of a core lasts whose neighbours come and go: paces of one second and the next
were alike (correlation 0.7 to 0.9), those five seconds apart half so.
"""
_STANDARD = statistics.NormalDist()
_DECILES_APART = 2 * _STANDARD.inv_cdf(0.9)


def log_sigma(samples: Samples) -> float:
    """The standard deviation of the logarithm of repeated measurements, from their deciles: ln(q90
    / q10) / 2.56; 0 for one sample.
    """
    if len(samples.values) < 2:
        return 0.0
    low, high = quantile(samples.values, 0.1), quantile(samples.values, 0.9)
    return math.log(high / low) / _DECILES_APART if low > 0 else 0.0


def machine_log_sigma(machine: Machine, threads: int) -> float:
    """How much the same computation varies from one second to the next: as the core's pace did
    while the machine was measured, less by how much less than the interpreter, whose pace that is,
    kernels suffer from a neighbour; 0 where nobody looked at the pace.
    """
    spells = core_speed_samples(machine, threads)
    return (
        kernel_sensitivity_frac(machine, threads, machine.contention_slowdown(threads))
        * log_sigma(spells)
        if spells
        else 0.0
    )


def core_speed_samples(machine: Machine, threads: int) -> Samples | None:
    """The core's pace in single seconds of the calibration, in usual ones; None where nobody looked
    at it.
    """
    found = machine.cost(CostKey(INTERFERENCE), threads)
    return None if found is None else found.samples


def kernel_sensitivity_frac(machine: Machine, threads: int, unrest: float) -> float:
    """How much of a change of the core's pace is seen by what usually takes `unrest` times as long
    as at best: all, if the interpreter takes no longer.

    A neighbour who is usually half there adds u - 1 to it and f - 1 to the interpreter, so a change
    of the interpreter's time by a fraction changes this by (1 - 1/u) / (1 - 1/f) of that.
    """
    framework = machine.factor(CONTENTION_FRAMEWORK, threads)
    return (
        min(1.0, max(0.0, 1.0 - 1.0 / unrest) / (1.0 - 1.0 / framework)) if framework > 1.0 else 1.0
    )


def slowest_factor(n: int, sigma: float, fraction: float = 0.5) -> float:
    """A quantile of the slowest of n, over the median of one: exp(sigma z) with P(z < Z)^n =
    `fraction`, where logarithms vary by a normal law.

    The median of the slowest grows like sqrt(2 ln n). Independent ranks are assumed: errs high
    where they are disturbed together. Raises DlperfError for n below 1, a negative sigma or a
    fraction outside (0, 1).

    >>> slowest_factor(1, 0.1), round(slowest_factor(2, 0.1), 4)  # of two, z = 0.5449: 0.5 ** 0.5 = 0.7071 lie below
    (1.0, 1.056)
    """
    if n < 1 or sigma < 0 or not 0 < fraction < 1:
        raise DlperfError(
            f"the slowest of {n} with a spread of {sigma} at quantile {fraction}: expected n >= 1,"
            " spread >= 0, quantile in (0, 1)"
        )
    if n == 1 and fraction == 0.5:
        return 1.0
    return math.exp(sigma * _STANDARD.inv_cdf(fraction ** (1 / n)))


def mean_factor(n: int, sigma: float, n_points: int = 99) -> float:
    """The mean of the slowest of n over its median, from evenly spaced quantiles: what an epoch's
    sum takes more than so many medians.
    """
    points = [slowest_factor(n, sigma, (place + 0.5) / n_points) for place in range(n_points)]
    return statistics.fmean(points) / slowest_factor(n, sigma)


def initial_state_frac(seconds: float) -> float:
    """The share of the state at their beginning in the mean over so many seconds, where states last
    INTERFERENCE_INTERVAL_S by an exponential law: t/T (1 - exp(-T/t)).

    >>> initial_state_frac(0.0), round(initial_state_frac(INTERFERENCE_INTERVAL_S), 3)
    (1.0, 0.632)
    """
    spells = seconds / INTERFERENCE_INTERVAL_S
    return -math.expm1(-spells) / spells if spells > 0 else 1.0


def sigma_over(sigma: float, seconds: float) -> float:
    """The standard deviation of the mean over so many seconds of what varies by `sigma` in spells:
    sigma^2 2 t/T (1 - t/T (1 - exp(-T/t))).

    >>> sigma_over(0.1, 0.0), round(sigma_over(0.1, 100 * INTERFERENCE_INTERVAL_S), 4)  # sqrt(2 / 100 * 0.99)
    (0.1, 0.0141)
    """
    spells = seconds / INTERFERENCE_INTERVAL_S
    return (
        sigma * math.sqrt(min(1.0, 2 / spells * (1 - initial_state_frac(seconds))))
        if spells > 0
        else sigma
    )


def waiting_s(n: int, sigma: float, seconds: float) -> float:
    """Seconds that `n` workers wait for the slowest of them, on average, where each has `seconds`
    of work that varies by `sigma` in spells.

    Independent workers are assumed. With the 0.084 of a machine file (:func:`machine_log_sigma`) two
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

"""A time as a function of shape, learnt from the kernels of one family: a physical first
approximation, corrected by a Gaussian process.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.linalg import cho_factor, cho_solve
from scipy.linalg.lapack import dpotri
from scipy.optimize import nnls
from threadpoolctl import threadpool_limits

from dlperf.core.variation import Z90
from dlperf.predictors.features import Description

Array = npt.NDArray[np.float64]
F = TypeVar("F", bound=Callable[..., object])


def one_blas_thread(function: F) -> F:
    """A function that fits curves, with one thread of BLAS meanwhile: on matrices this small a team
    waits for itself, twenty times as long on two cores.
    """
    limited: F = threadpool_limits.wrap(limits=1, user_api="blas")(function)
    return limited


REACH = 1.5
"""How far, in octaves, a point may lie outside the measured range of a coordinate and still count
as interpolated.
"""
_SCALES = (0.7, 1.5, 3.0, 6.0, 15.0, 60.0)
_NOISES = (0.02, 0.05, 0.1, 0.2)
_TUNED_POINTS = 400
"""Points that the search for the smoothness looks at, spread over the order of measuring."""
_LEVEL = 1.0
"""Variance of the correction's level: large, so that it is learnt from the points."""
_LEAST_SIGNAL = 0.05
_SURPRISE = 2.0
"""Standard deviations beyond which a point's own noise is held to be larger."""
_WANTED = 0.9
"""Share of the points that lie within 1.645 standard deviations of what the others predict."""
_LEAST_POINTS = 10
"""Fewer held-out points say nothing of how wide their distribution is."""
_UNKNOWN = 0.2
"""Standard deviation of the logarithm of a time where too few points were measured to know."""


@dataclass(frozen=True)
class Smoothness:
    """How the correction may vary: `scales` (d,) in the units of the coordinates over which it
    changes, `signal` by how much, and the `noise` of one measurement; the latter two are standard
    deviations of logarithms.
    """

    scales: tuple[float, ...]
    signal: float
    noise: float

    def covariance(self, a: Array, b: Array) -> Array:
        """Covariance (n, m) of the correction between places (n, d) and (m, d): Matern 3/2."""
        a, b = a / np.array(self.scales), b / np.array(self.scales)
        squared = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :] - 2.0 * a @ b.T
        distance = np.sqrt(3.0 * np.maximum(squared, 0.0))
        found: Array = _LEVEL + self.signal**2 * (1.0 + distance) * np.exp(-distance)
        return found


@dataclass(frozen=True)
class Surface:
    """t(place, terms) = (terms . weights) x exp(correction(place, log2(terms . weights))).

    The weights are non-negative (each term costs time) and fitted to relative errors; the
    correction is the mean of a Gaussian process through the points' logarithmic residuals
    (Rasmussen and Williams 2006, eq. 2.25), which takes part of a residual for noise. What the
    terms say of the time is a coordinate like those of the place: kernels of like length err alike.
    Far outside the measured points it fades to its level, so that an extrapolation follows the
    physical terms.
    """

    places: Array
    weights: Array
    smoothness: Smoothness
    coefficients: Array
    """The process's weights of the points: K^-1 residuals."""
    held_out: Array
    """ln(predicted / measured) of each point, predicted from all the others (ibid., eq. 5.12);
    empty for fewer than three points.
    """
    factor: tuple[Array, bool]
    """The covariance of the points with their noise, as scipy.linalg.cho_factor gives it."""
    sharpness: float
    """The factor on the process's standard deviations under which 90 % of the held-out points lie
    in their 90 % intervals; NaN where too few points were measured to know.
    """
    least_s: float = 0.0
    """The shortest time measured: what an op costs that has none of the work the terms count (an
    empty tensor).
    """
    most_correction: float = math.inf
    """The largest logarithmic residual of a point: nothing is slower than its terms say by more
    than what was measured was.
    """

    @classmethod
    def fit(
        cls,
        places: Array,
        terms: Array,
        times_s: Array,
        smoothness: Smoothness | None = None,
        most_call_s: float = math.inf,
    ) -> Surface:
        """Fit to points: places (n, d) in octaves, terms (n, q) non-negative, times (n,) in
        seconds, positive.

        `most_call_s` bounds the weight of the first term, the call, in seconds.
        """
        weights, residuals = _first_approximation(terms, times_s, most_call_s)
        places = _with_length(places, terms, weights)
        smooth = (
            smoothness
            if smoothness is not None and len(smoothness.scales) == places.shape[1]
            else default_smoothness(places, residuals)
        )
        covariance = smooth.covariance(places, places)
        factor, coefficients, spread = _solve(
            covariance, residuals, np.full(len(residuals), smooth.noise)
        )
        if len(times_s) < 3:
            return cls(
                places,
                weights,
                smooth,
                coefficients,
                np.zeros(0),
                factor,
                float("nan"),
                float(times_s.min()),
                float(residuals.max()),
            )
        # A point that the others contradict was disturbed while it was measured: it counts with as
        # much noise as it seems to have.
        surprise = np.abs(coefficients) * np.sqrt(spread)
        noise = smooth.noise * np.maximum(1.0, surprise / _SURPRISE)
        factor, coefficients, spread = _solve(covariance, residuals, noise)
        sharpness = float("nan")
        if len(times_s) >= _LEAST_POINTS:
            # A disturbed point is no less an error of the curve: it counts with the noise of the
            # others.
            usual = spread - noise**2 + smooth.noise**2
            ordered = np.sort(
                np.abs(coefficients * spread) / np.sqrt(np.maximum(usual, smooth.noise**2))
            )
            # Of n + 1 exchangeable points a new one lies below the k-th of the others with
            # probability k / (n + 1) (Vovk et al. 2005).
            sharpness = (
                float(ordered[min(len(ordered), math.ceil(_WANTED * (len(ordered) + 1))) - 1]) / Z90
            )
        return cls(
            places,
            weights,
            smooth,
            coefficients,
            -coefficients * spread,
            factor,
            sharpness,
            float(times_s.min()),
            float(residuals.max()),
        )

    def covariance(self, places: Array, terms: Array) -> Array:
        """Covariance (m, m) of the errors of ln t at different places (m, d) with their terms (m,
        q): the process's own given the points (ibid., eq. 2.26) and, for each place by itself, the
        noise of one; both times `sharpness` squared. Near places err alike, far ones each by
        themselves.
        """
        if np.isnan(self.sharpness):
            # Nothing is known of how errors hang together: the same for all.
            return np.full((len(places), len(places)), _UNKNOWN**2)
        places = _with_length(places, terms, self.weights)
        across = self.smoothness.covariance(places, self.places)
        found: Array = self.smoothness.covariance(places, places) - across @ cho_solve(
            self.factor, across.T
        )
        return self.sharpness**2 * (found + self.smoothness.noise**2 * np.eye(len(places)))

    @property
    def held_out_error(self) -> float:
        """Median |t / t_measured - 1| of points predicted from all the others; NaN for fewer than
        three.
        """
        return (
            float(np.median(np.abs(np.expm1(self.held_out))))
            if len(self.held_out)
            else float("nan")
        )

    def fits(self, description: Description) -> bool:
        """Whether a place and terms have as many numbers as this surface's: a curve that stands in
        for another may have others.
        """
        return len(description.place) == self.places.shape[1] - 1 and len(description.terms) == len(
            self.weights
        )

    def predict(self, places: Array, terms: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Times (m,) in seconds, and whether each place lies within the measured range.

        A time is at most what the terms say times the slowness that was measured, wherever the
        place lies.
        """
        base = terms @ self.weights
        correction = (
            self.smoothness.covariance(_with_length(places, terms, self.weights), self.places)
            @ self.coefficients
        )
        times = np.where(
            base > 0, base * np.exp(np.minimum(correction, self.most_correction)), self.least_s
        )
        measured = self.places[:, :-1]
        inside: npt.NDArray[np.bool_] = np.all(
            (places >= measured.min(axis=0) - REACH) & (places <= measured.max(axis=0) + REACH),
            axis=1,
        )
        return times, inside


def _with_length(places: Array, terms: Array, weights: Array) -> Array:
    """The places with one more coordinate: octaves of what the terms say; of what has no work at
    all, 0 s counts as a picosecond.
    """
    return np.hstack([places, np.log2(np.maximum(terms @ weights, 1e-12))[:, None]])


def _first_approximation(terms: Array, times_s: Array, most_call_s: float) -> tuple[Array, Array]:
    """Weights of the terms (q,), that of the call at most `most_call_s`, and what they leave: ln(t
    / (terms . weights)) (n,).
    """
    scale = np.maximum(terms.max(axis=0), 1e-300)
    scaled, wanted = terms / scale / times_s[:, None], np.ones(len(times_s))
    weights, _ = nnls(scaled, wanted)
    weights = weights / scale
    if weights[0] > most_call_s and len(weights) > 1:
        work, _ = nnls(scaled[:, 1:], np.maximum(wanted - most_call_s / times_s, 0.0))
        weights = np.array([most_call_s, *(work / scale[1:])])
    base = terms @ weights
    # A point that no term explains (all its weights came out 0) stands for itself.
    return weights, np.log(times_s / np.where(base > 0, base, times_s))


def _solve(
    covariance: Array, residuals: Array, noise: Array
) -> tuple[tuple[Array, bool], Array, Array]:
    """(K's factor, K^-1 residuals, 1 / diag K^-1), the latter the variance of each point as the
    others predict it (Rasmussen and Williams, eq. 5.12).
    """
    factor = cho_factor(covariance + np.diag(noise**2), lower=True)
    inverse, _ = dpotri(factor[0], lower=True)
    return factor, cho_solve(factor, residuals), 1.0 / np.diag(inverse)


def _noisy(smoothness: Smoothness, places: Array) -> Array:
    return smoothness.covariance(places, places) + smoothness.noise**2 * np.eye(len(places))


def default_smoothness(places: Array, residuals: Array) -> Smoothness:
    """What is assumed of a curve whose smoothness nobody has looked for: changes over some octaves,
    7 % noise.
    """
    return Smoothness((3.0,) * places.shape[1], max(_LEAST_SIGNAL, float(np.std(residuals))), 0.07)


def find_smoothness(
    places: Array, terms: Array, times_s: Array, most_call_s: float = math.inf
) -> Smoothness:
    """The smoothness under which the points are predicted best from one another: least mean
    absolute held-out error.

    A coordinate at a time, twice around; a scale is left as it is where another makes no difference
    of a hundredth.
    """
    weights, residuals = _first_approximation(terms, times_s, most_call_s)
    places = _with_length(places, terms, weights)
    best = default_smoothness(places, residuals)
    if len(times_s) < 6:
        return best
    chosen = np.unique(
        np.linspace(0, len(times_s) - 1, min(len(times_s), _TUNED_POINTS)).astype(int)
    )
    places, residuals = places[chosen], residuals[chosen]

    def loss(smoothness: Smoothness) -> float:
        inverse = np.linalg.inv(_noisy(smoothness, places))
        return float(np.mean(np.abs(inverse @ residuals / np.diag(inverse))))

    least = loss(best)
    for _ in range(2):
        for place in range(len(best.scales)):
            if np.ptp(places[:, place]) == 0.0:
                continue
            for scale in _SCALES:
                tried = Smoothness(
                    (*best.scales[:place], scale, *best.scales[place + 1 :]),
                    best.signal,
                    best.noise,
                )
                if (found := loss(tried)) < 0.99 * least:
                    best, least = tried, found
        for noise in _NOISES:
            tried = Smoothness(best.scales, best.signal, noise)
            if (found := loss(tried)) < 0.99 * least:
                best, least = tried, found
    return best

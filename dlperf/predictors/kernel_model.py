"""Kernel model: time of a kernel variant as a function of features and regression terms.

    t(x, f) = (f . w) exp(g(x, log2(f . w)))

f are the regression terms (q,), w >= 0 their weights in seconds, x the features (d,) in octaves,
g the posterior mean of a Gaussian process with a Matern-3/2 kernel over the logarithmic residuals
(Rasmussen and Williams 2006).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlperf.core.variation import Z90
from dlperf.predictors.kernels.description import KernelDescription

Array = npt.NDArray[np.float64]


REACH = 1.5
"""Distance in octaves outside the measured range of a feature up to which a prediction counts as
interpolated.
"""
_SCALES = (0.7, 1.5, 3.0, 6.0, 15.0, 60.0)
_NOISES = (0.02, 0.05, 0.1, 0.2)
_TUNED_POINTS = 400
"""Points that the hyperparameter search uses, spread over the order of measurement."""
_LEVEL = 1.0
"""Prior variance of the level of the correction; large, so that the points determine it."""
_LEAST_SIGNAL = 0.05
_SURPRISE = 2.0
"""Leave-one-out residual, in standard deviations, above which the noise of a point is raised."""
_LEAST_POINTS = 10
"""Points below which the interval calibration factor is unknown."""
_BLOCK = 64
"""Rows of a triangular matrix that are inverted at once."""
_UNKNOWN = 0.35
"""Standard deviation of ln t where the interval calibration factor is unknown: kernels left out of
full calibrations, in the measured range of two to nine points.
"""


def nearness(octaves: Array) -> Array:
    """Weights (n,) of points at distances (n,) in octaves."""
    return np.asarray(1.0 / (0.5 + octaves) ** 2)


@dataclass(frozen=True)
class Related:
    """Kernels of related variants, by which a fit knows what its own points leave open: `terms`
    (m, q), `times_s` (m,), and for how many of its own points each counts, `counts` (m,).
    """

    terms: Array
    times_s: Array
    counts: Array


@dataclass(frozen=True)
class Hyperparameters:
    """GP hyperparameters: `length_scales` (d,) in the units of the features, standard deviation
    `signal` of the correction and `noise` of one measurement, both of ln t.
    """

    length_scales: tuple[float, ...]
    signal: float
    noise: float

    def covariance(self, a: Array, b: Array) -> Array:
        """Prior covariance (n, m) between features (n, d) and (m, d), Matern 3/2."""
        a, b = a / np.array(self.length_scales), b / np.array(self.length_scales)
        # In place: the pages of a large array take longer than its numbers.
        found = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1)[None, :]
        other = 2.0 * a @ b.T
        found -= other
        np.maximum(found, 0.0, out=found)
        found *= 3.0
        distance = np.sqrt(found, out=found)
        decay = np.exp(np.negative(distance, out=other), out=other)
        found += 1.0
        found *= self.signal**2
        found *= decay
        found += _LEVEL
        return np.asarray(found)


@dataclass(frozen=True)
class KernelModel:
    """Fitted model of one kernel variant; equation in the module's docstring.

    The weights minimise relative errors (non-negative least squares). The correction is the
    posterior mean (ibid., eq. 2.25); f . w is one of its features, since kernels of like length err
    alike. Far from the measured points it tends to its level, so an extrapolation follows the
    regression terms.
    """

    features: Array
    weights: Array
    hyperparameters: Hyperparameters
    noise: Array
    """Standard deviation of ln t of each point (n,)."""
    coefficients: Array
    """K^-1 residuals (n,)."""
    leave_one_out: Array
    """ln(predicted / measured) of each point, predicted from all others (ibid., eq. 5.12); empty
    for fewer than three points.
    """
    inverse: Array
    """Inverse of the Cholesky factor L of K = L L^T, the covariance of the points with their noise.
    """
    interval_calibration: float
    """Interval calibration factor: scales the standard deviations so that 90 % of the points lie in
    their leave-one-out 90 % intervals; NaN for fewer than ten points.
    """
    least_s: float = 0.0
    """Shortest measured time: the time of a call without work (an empty tensor)."""
    max_correction: float = math.inf
    """Largest logarithmic residual of a point: an upper bound of the correction."""

    @classmethod
    def fit(
        cls,
        features: Array,
        terms: Array,
        times_s: Array,
        hyperparameters: Hyperparameters | None = None,
        most: Array | None = None,
        earlier: tuple[Array, Array] | None = None,
        related: Related | None = None,
    ) -> KernelModel:
        """Fit to features (n, d) in octaves, terms (n, q) >= 0 and times (n,) > 0 in seconds.

        `most` (q,) are upper bounds of the weights. `earlier` are weights and noise of an earlier
        fit to the same points.
        """
        weights, noise = earlier or (_fit_weights(terms, times_s, most, related), None)
        residuals = _residuals(terms, times_s, weights)
        features = _with_length(features, terms, weights)
        if hyperparameters is None or len(hyperparameters.length_scales) != features.shape[1]:
            hyperparameters = default_hyperparameters(features, residuals)
        usual = hyperparameters.noise
        covariance = hyperparameters.covariance(features, features)
        if noise is None:
            noise = np.full(len(residuals), usual)
            if len(times_s) >= 3:
                # A point that the others contradict was disturbed: its noise is raised to its
                # residual.
                _, coefficients, variance = _solve(covariance, residuals, noise)
                surprise = np.abs(coefficients) * np.sqrt(variance)
                noise = usual * np.maximum(1.0, surprise / _SURPRISE)
        inverse, coefficients, variance = _solve(covariance, residuals, noise)
        leave_one_out = -coefficients * variance if len(times_s) >= 3 else np.zeros(0)
        calibration = math.nan
        if len(times_s) >= _LEAST_POINTS:
            # A disturbed point counts as an error of the model, with the noise of the others.
            deviation = np.sqrt(np.maximum(variance - noise**2 + usual**2, usual**2))
            ordered = np.sort(np.abs(leave_one_out) / deviation)
            # A new one of n + 1 exchangeable points lies below the k-th of the others with
            # probability k / (n + 1) (Vovk et al. 2005).
            k = min(len(ordered), math.ceil(0.9 * (len(ordered) + 1)))
            calibration = float(ordered[k - 1]) / Z90
        return cls(
            features,
            weights,
            hyperparameters,
            noise,
            coefficients,
            leave_one_out,
            inverse,
            calibration,
            float(times_s.min()),
            float(residuals.max()),
        )

    def covariance(self, features: Array, terms: Array) -> Array:
        """Covariance (m, m) of the errors of ln t at distinct features (m, d) with terms (m, q).

        Posterior covariance (ibid., eq. 2.26) plus the noise of one measurement on the diagonal,
        times `interval_calibration` squared.
        """
        if np.isnan(self.interval_calibration):
            # Unknown correlation: all errors are one.
            return np.full((len(features), len(features)), _UNKNOWN**2)
        features = _with_length(features, terms, self.weights)
        across = self.hyperparameters.covariance(features, self.features)
        prior = self.hyperparameters.covariance(features, features)
        noise = self.hyperparameters.noise**2 * np.eye(len(features))
        explained = self.inverse @ across.T
        posterior = prior - explained.T @ explained
        return np.asarray(self.interval_calibration**2 * (posterior + noise))

    def fits(self, description: KernelDescription) -> bool:
        """Whether a description has the model's number of features and terms."""
        return len(description.features) == self.features.shape[1] - 1 and len(
            description.terms
        ) == len(self.weights)

    def predict(self, features: Array, terms: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Times (m,) in seconds at features (m, d) and terms (m, q), and whether each lies within
        the measured range.
        """
        base = terms @ self.weights
        wanted = _with_length(features, terms, self.weights)
        correction = self.hyperparameters.covariance(wanted, self.features) @ self.coefficients
        corrected = base * np.exp(np.minimum(correction, self.max_correction))
        least, most = self.features.min(axis=0)[:-1] - REACH, self.features.max(axis=0)[:-1] + REACH
        inside = np.all((features >= least) & (features <= most), axis=1)
        return np.where(base > 0, corrected, self.least_s), inside


def _with_length(features: Array, terms: Array, weights: Array) -> Array:
    """Features (n, d + 1) with log2(terms . weights) appended; 0 s counts as 1 ps."""
    return np.hstack([features, np.log2(np.maximum(terms @ weights, 1e-12))[:, None]])


def _fit_weights(
    terms: Array, times_s: Array, most: Array | None = None, related: Related | None = None
) -> Array:
    """Weights (q,) of the terms, up to `most` (q,).

    Few points leave most weights open, and the least squares would put their noise there. So
    related kernels count a little, their times scaled by the root of the median ratio of the points
    to the sum that fits the related kernels alone: half of such a ratio is the call's or noise.
    """
    rows, wanted = terms / times_s[:, None], np.ones(len(times_s))
    if related is not None:
        others, root = related.terms / related.times_s[:, None], np.sqrt(related.counts)
        expected_s = terms @ _least_squares(root[:, None] * others, root)
        known = expected_s > 0
        if known.any():
            ratio = math.sqrt(np.median(times_s[known] / expected_s[known]))
            rows = np.vstack([rows, root[:, None] * others / ratio])
            wanted = np.concatenate([wanted, root])
    weights = _least_squares(rows, wanted)
    if most is None:
        return weights
    # What exceeds its bound is set to it, and the others are fitted anew.
    bounded = np.zeros(len(weights), dtype=bool)
    while (above := ~bounded & (weights > most)).any() and not (bounded | above).all():
        bounded |= above
        weights = np.where(bounded, most, 0.0)
        weights[~bounded] = _least_squares(
            rows[:, ~bounded], wanted - rows[:, bounded] @ most[bounded]
        )
    return weights


def _least_squares(rows: Array, wanted: Array) -> Array:
    """Non-negative least squares of `rows` (n, q), whose columns may differ in size by any factor,
    to `wanted` (n,).
    """
    from scipy.optimize import nnls  # here: its import takes longer than a prediction

    scale = np.maximum(rows.max(axis=0), 1e-300)
    return np.asarray(nnls(rows / scale, wanted)[0] / scale)


def _residuals(terms: Array, times_s: Array, weights: Array) -> Array:
    """ln(t / (terms . weights)) (n,); 0 for a point without a term of positive weight."""
    base = terms @ weights
    return np.asarray(np.log(times_s / np.where(base > 0, base, times_s)))


def _solve(covariance: Array, residuals: Array, noise: Array) -> tuple[Array, Array, Array]:
    """Inverse of the Cholesky factor of K, K^-1 residuals, and the leave-one-out variances
    1 / diag K^-1 (ibid., eq. 5.12).
    """
    covariance.flat[:: len(covariance) + 1] += noise**2
    inverse = _inverted(np.asarray(np.linalg.cholesky(covariance), dtype=float))
    covariance.flat[:: len(covariance) + 1] -= noise**2
    variance = 1.0 / np.einsum("ij,ij->j", inverse, inverse)
    return inverse, inverse.T @ (inverse @ residuals), variance


def _inverted(factor: Array) -> Array:
    """Inverse of a lower triangular matrix (n, n), by blocks of rows."""
    found = np.zeros_like(factor)
    for first in range(0, len(factor), _BLOCK):
        rows = slice(first, first + _BLOCK)
        found[rows, rows] = corner = np.linalg.inv(factor[rows, rows])
        found[rows, :first] = -corner @ (factor[rows, :first] @ found[:first, :first])
    return found


def default_hyperparameters(features: Array, residuals: Array) -> Hyperparameters:
    """Hyperparameters without a search: length scales of 3 octaves, 7 % noise."""
    return Hyperparameters(
        (3.0,) * features.shape[1], max(_LEAST_SIGNAL, float(np.std(residuals))), 0.07
    )


def fit_hyperparameters(
    features: Array,
    terms: Array,
    times_s: Array,
    most: Array | None = None,
    related: Related | None = None,
) -> Hyperparameters:
    """Hyperparameters of the least mean absolute leave-one-out error.

    Two passes of coordinate search; a value changes only where the error falls by 1 % or more.
    """
    weights = _fit_weights(terms, times_s, most, related)
    residuals = _residuals(terms, times_s, weights)
    features = _with_length(features, terms, weights)
    best = default_hyperparameters(features, residuals)
    if len(times_s) < 6:
        return best
    chosen = np.unique(
        np.linspace(0, len(times_s) - 1, min(len(times_s), _TUNED_POINTS)).astype(int)
    )
    features, residuals = features[chosen], residuals[chosen]

    def error(tried: Hyperparameters) -> float:
        noise = tried.noise**2 * np.eye(len(features))
        inverse = np.linalg.inv(tried.covariance(features, features) + noise)
        return float(np.mean(np.abs(inverse @ residuals / np.diag(inverse))))

    least = error(best)
    varying = [axis for axis in range(len(best.length_scales)) if np.ptp(features[:, axis]) > 0.0]
    for _ in range(2):
        changes = [
            *((axis, scale) for axis in varying for scale in _SCALES),
            *((None, noise) for noise in _NOISES),
        ]
        for axis, value in changes:
            scales = tuple(
                value if number == axis else scale
                for number, scale in enumerate(best.length_scales)
            )
            noise = value if axis is None else best.noise
            tried = replace(best, length_scales=scales, noise=noise)
            if (found := error(tried)) < 0.99 * least:
                best, least = tried, found
    return best

"""A time as a function of shape, learnt from the kernels of one family: a physical first approximation, corrected by its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

Array = npt.NDArray[np.float64]

NEIGHBOURS = 8
REACH = 1.5
"""How far, in octaves, a point may lie outside the measured range of a coordinate and still count as interpolated."""
_SOFTENING = 0.15
_HELD_OUT = 64
"""Points that the held-out error is taken over, spread over the order of measuring."""


@dataclass(frozen=True)
class Surface:
    """t(place, terms) = (terms . weights) x exp(correction(place)).

    The weights are non-negative (each term costs time) and fitted to relative errors; the correction is the mean of
    the nearest points' logarithmic residuals, weighted by 1 / distance^2 (Shepard 1968), or linear interpolation
    where there is one coordinate. Outside the measured points the correction stays that of the nearest ones, so a
    far extrapolation follows the physical terms alone.
    """

    places: Array
    weights: Array
    residuals: Array
    held_out_error: float
    """Median |t / t_measured - 1| of points predicted from all the others; NaN for fewer than three."""
    least_s: float = 0.0
    """The shortest time measured: what an op costs that has none of the work the terms count (an empty tensor)."""

    @classmethod
    def fit(cls, places: Array, terms: Array, times_s: Array) -> Surface:
        """Fit to points: places (n, d) in octaves, terms (n, q) non-negative, times (n,) in seconds, positive."""
        scale = np.maximum(terms.max(axis=0), 1e-300)
        weights, _ = nnls(terms / scale / times_s[:, None], np.ones(len(times_s)))
        weights = weights / scale
        base = terms @ weights
        # A point that no term explains (all its weights came out 0) stands for itself.
        residuals = np.log(times_s / np.where(base > 0, base, times_s))
        least_s = float(times_s.min())
        surface = cls(places, weights, residuals, float("nan"), least_s)
        if len(times_s) < 3:
            return surface
        held = np.unique(np.linspace(0, len(times_s) - 1, min(len(times_s), _HELD_OUT)).astype(int))
        held_out = surface._correction(places[held], left_out=held)
        return cls(places, weights, residuals, float(np.median(np.abs(np.expm1(held_out - residuals[held])))), least_s)

    def predict(self, places: Array, terms: Array) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Times (m,) in seconds, and whether each place lies within the measured range."""
        base = terms @ self.weights
        times = np.where(base > 0, base * np.exp(self._correction(places)), self.least_s)
        if places.shape[1] == 0:
            return times, np.ones(len(times), dtype=bool)
        inside = np.all((places >= self.places.min(axis=0) - REACH) & (places <= self.places.max(axis=0) + REACH), axis=1)
        return times, inside

    def _correction(self, places: Array, left_out: npt.NDArray[np.int64] | None = None) -> Array:
        n, d = self.places.shape
        if d == 0:
            return np.full(len(places), float(np.median(self.residuals)))
        if d == 1 and n > 1 and left_out is None:
            order = np.argsort(self.places[:, 0])
            x, y = self.places[order, 0], self.residuals[order]
            return np.asarray(np.interp(places[:, 0], x, y))
        distances = np.sqrt(((places[:, None, :] - self.places[None, :, :]) ** 2).sum(axis=2))
        if left_out is not None:
            distances[np.arange(len(left_out)), left_out] = np.inf
        k = min(NEIGHBOURS if d > 1 else 2, n if left_out is None else n - 1)
        nearest = np.argpartition(distances, k - 1, axis=1)[:, :k]
        near = np.take_along_axis(distances, nearest, axis=1)
        weight = 1.0 / (near + _SOFTENING) ** 2
        return np.asarray((weight * self.residuals[nearest]).sum(axis=1) / weight.sum(axis=1))

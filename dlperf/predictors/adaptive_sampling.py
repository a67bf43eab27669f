"""Where a calibration should measure more: at the operations that its curves would miss by most."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dlperf.core.machine import Machine
from dlperf.core.trace import Op
from dlperf.predictors.families import Description, describe
from dlperf.predictors.features import stacked
from dlperf.predictors.kernel_cost_model import Book
from dlperf.predictors.kernel_model import Surface, find_smoothness, one_blas_thread

_UNKNOWN = 1.0
"""What is assumed of a curve with too few points to hold any out: they come first."""


@one_blas_thread
def where_curves_err(
    machine: Machine, threads: int, pool: Mapping[str, Sequence[Op]], n_ops: int
) -> dict[str, list[int]]:
    """The places, by group, of the `n_ops` operations of a `pool` that the curves are likely to
    miss by most.

    By the standard deviation of the curve's Gaussian process there (MacKay 1992, sec. 3), made as
    wide as its held-out points ask for: where their errors are large, and where points are far.

    >>> from dlperf.core.machine import Cpu
    >>> where_curves_err(Machine(Cpu("", 1)), 1, {"one": ()}, 5)
    {}
    """
    book = Book(replace(machine, curves=()), threads)
    members: dict[tuple[str, ...], list[tuple[str, int, Description]]] = defaultdict(list)
    for name, ops in pool.items():
        for place, op in enumerate(ops):
            if (description := describe(op, threads)) is not None:
                members[description.key].append((name, place, description))
    scored = [
        (score, name, place)
        for key, rows in members.items()
        for score, (name, place, _) in zip(
            _errors(book, key, [description for _, _, description in rows]), rows
        )
    ]
    found: dict[str, list[int]] = defaultdict(list)
    for _, name, place in heapq.nlargest(n_ops, scored):
        found[name].append(place)
    return {name: sorted(places) for name, places in found.items()}


def _errors(book: Book, key: tuple[str, ...], descriptions: Sequence[Description]) -> list[float]:
    """Standard deviation of the logarithm of what a curve says at each place."""
    if key not in book.kernels:
        return [_UNKNOWN] * len(descriptions)
    points, most_call_s = book.points(key), book.most_call_s(key)
    surface = Surface.fit(*points, find_smoothness(*points, most_call_s), most_call_s)
    if not len(surface.held_out):
        return [_UNKNOWN] * len(descriptions)
    return [float(value) for value in np.sqrt(np.diag(surface.covariance(*stacked(descriptions))))]

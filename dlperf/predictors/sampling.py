"""Where a calibration should measure more: at the operations that its curves would miss by most."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from dlperf.machine import Machine
from dlperf.predictors.book import Book
from dlperf.predictors.families import Description, describe
from dlperf.predictors.surface import Array, Surface, find_smoothness
from dlperf.trace import Op

_UNKNOWN_ERROR = 0.5
"""What is assumed of a curve with too few points to hold any out."""
_MOST_ERROR = 1.0
"""A single point that is missed by more is an accident."""
_PRIOR_WEIGHT = 1.0
"""How many near points the curve's mean counts for in a place's own error."""


def where_curves_err(machine: Machine, threads: int, pool: Mapping[str, Sequence[Op]], n_ops: int) -> dict[str, list[int]]:
    """The places, by group, of the `n_ops` operations of a `pool` whose curves err most near them.

    An operation's score is the mean held-out error of its curve's points, the near ones counting by their correlation with it (adaptive sampling by
    cross-validation; Liu, Ong and Cai 2018).

    >>> from dlperf.machine import Cpu
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
        for score, (name, place, _) in zip(_errors(book, key, [description for _, _, description in rows]), rows)
    ]
    found: dict[str, list[int]] = defaultdict(list)
    for _, name, place in heapq.nlargest(n_ops, scored):
        found[name].append(place)
    return {name: sorted(places) for name, places in found.items()}


def _errors(book: Book, key: tuple[str, ...], descriptions: Sequence[Description]) -> list[float]:
    """The error to expect of a curve at each place, as a fraction."""
    if key not in book.kernels:
        return [_UNKNOWN_ERROR] * len(descriptions)
    points = book.points(key)
    smoothness = find_smoothness(*points)
    held_out = Surface.fit(*points, smoothness).held_out
    if not len(held_out):
        return [_UNKNOWN_ERROR] * len(descriptions)
    errors: Array = np.minimum(np.abs(np.expm1(held_out)), _MOST_ERROR)
    near = smoothness.correlation(np.array([d.place for d in descriptions], dtype=float).reshape(len(descriptions), -1), points[0])
    local: Array = (near @ errors + _PRIOR_WEIGHT * errors.mean()) / (near.sum(axis=1) + _PRIOR_WEIGHT)
    return [float(error) for error in local]

"""Held-out single ops: random kernels that no calibration sampled, timed there and then, against
what the curves of the machine file say.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from dlperf.core.clock import quantile
from dlperf.core.errors import DlperfError, check_count
from dlperf.core.machine import Kernel
from dlperf.core.trace import Op
from dlperf.ops import counts as work
from dlperf.predictors.kernel_cost_model import KernelCostModel
from dlperf.studies.accuracy.cases import spread_frac
from dlperf.studies.accuracy.random_layers import REST
from dlperf.studies.accuracy.random_ops import (
    CONVOLUTION_BACKWARDS,
    CONVOLUTIONS,
    PRODUCTS,
    OpMaker,
)

PLAN: dict[str, tuple[tuple[str, OpMaker, int], ...]] = {
    "gemm": PRODUCTS,
    "convolution forward": CONVOLUTIONS,
    "convolution backward": CONVOLUTION_BACKWARDS,
    "the rest": REST,
}
"""By family its kinds: name, how to make one, how many."""
_TRIES = 1000
MOST_OPS = 2000
"""More ops of a family than this are a slip of the keyboard: each takes some tenths of a second in
each process.
"""


@dataclass(frozen=True)
class RandomOp:
    """One random op with its family and the finer kind within it."""

    family: str
    kind: str
    op: Op


def counts_of(kinds: Sequence[tuple[str, object, int]], n_ops: int) -> list[int]:
    """How many of `n_ops` each kind of a family gets: in proportion to its usual number, the
    largest remainders rounded up.

    >>> counts_of([("a", None, 6), ("b", None, 3), ("c", None, 1)], 5)  # 3.0, 1.5, 0.5
    [3, 2, 0]
    """
    usual = sum(count for _, _, count in kinds)
    counts = [n_ops * count // usual for _, _, count in kinds]
    by_remainder = sorted(range(len(kinds)), key=lambda place: -(n_ops * kinds[place][2] % usual))
    for place in by_remainder[: n_ops - sum(counts)]:
        counts[place] += 1
    return counts


def make_random_ops(
    seed: int, known: Container[str] = (), n_ops: int | None = None
) -> tuple[RandomOp, ...]:
    """Random ops of every family, none twice and none whose signature is `known`; the same for the
    same seed.

    `n_ops` of each family, by default as many as PLAN says. Raises DlperfError for more than
    MOST_OPS or less than one.
    """
    if n_ops is not None:
        check_count("ops", n_ops)
        if n_ops > MOST_OPS:
            raise DlperfError(
                f"ops is {n_ops}; at most {MOST_OPS} of a family can be made, which takes hours to"
                " time"
            )
    random = np.random.default_rng(seed)
    found: list[RandomOp] = []
    seen: set[str] = set()
    for family, kinds in PLAN.items():
        counts = [count for _, _, count in kinds] if n_ops is None else counts_of(kinds, n_ops)
        for (kind, make, _), count in zip(kinds, counts):
            wanted = len(found) + count
            for _ in range(_TRIES * count):
                op = make(random)
                if op is None or op.signature in seen or op.signature in known:
                    continue
                seen.add(op.signature)
                found.append(RandomOp(family, kind, op))
                if len(found) == wanted:
                    break
    return tuple(found)


@dataclass(frozen=True)
class SingleOp:
    """One held-out op: predicted and measured seconds a call, warm caches, without the framework
    around it; the floor over the runs.
    """

    family: str
    kind: str
    op: str
    threads: int
    predicted_s: float
    actual_s: float
    repeatability_frac: float | None
    source: str

    @property
    def error_frac(self) -> float:
        """predicted / actual - 1."""
        return self.predicted_s / self.actual_s - 1


@dataclass(frozen=True)
class OpGroup:
    """The held-out ops of one family (`kind` is ``all``) or one kind: mean, median and 90th
    percentile of abs(predicted / actual - 1).

    `bias_frac` is the median signed error, `repeatability_frac` the median of what two fresh
    processes of the same op differ by.
    """

    family: str
    kind: str
    threads: int
    n_ops: int
    mape_frac: float
    median_frac: float
    p90_frac: float
    bias_frac: float
    repeatability_frac: float | None
    n_unpriced: int


def kernel_s(cost_model: KernelCostModel, op: Op) -> tuple[float, str]:
    """Seconds of one op as the calibrated predictor prices it, without anything around it, and
    where the price comes from.

    The one place that knows how a book is asked.
    """
    priced = cost_model.kernel_s(op)
    if priced is not None:
        return priced
    return cost_model.unpriced_s(work.op_flops(op) or 0, work.op_bytes(op)), "unpriced"


def score_ops(
    random_ops: Sequence[RandomOp],
    runs: Sequence[Iterable[Kernel]],
    price: Callable[[Op], tuple[float, str]],
    threads: int,
) -> tuple[SingleOp, ...]:
    """Each random op that at least one run has timed: the median over the runs of the least sample,
    which is what a calibration goes by, against its price.
    """
    taken: list[Mapping[str, Kernel]] = [
        {kernel.op.signature: kernel for kernel in run} for run in runs
    ]
    found = []
    for one in random_ops:
        seconds = [
            run[one.op.signature].samples.minimum for run in taken if one.op.signature in run
        ]
        if seconds:
            predicted_s, source = price(one.op)
            floor = spread_frac(seconds) if len(seconds) > 1 else None
            found.append(
                SingleOp(
                    one.family,
                    one.kind,
                    one.op.signature,
                    threads,
                    predicted_s,
                    median(seconds),
                    floor,
                    source,
                )
            )
    return tuple(found)


def op_groups(ops: Sequence[SingleOp]) -> tuple[OpGroup, ...]:
    """By thread count each family as a whole, then each of its kinds."""
    found = []
    for threads in dict.fromkeys(one.threads for one in ops):
        for family, kinds in PLAN.items():
            members = [one for one in ops if one.threads == threads and one.family == family]
            for kind in ("all", *(name for name, _, _ in kinds)):
                part = [one for one in members if kind in ("all", one.kind)]
                if part:
                    found.append(_group(family, kind, threads, part))
    return tuple(found)


def _group(family: str, kind: str, threads: int, ops: Sequence[SingleOp]) -> OpGroup:
    errors = [abs(one.error_frac) for one in ops]
    repeatabilities = [one.repeatability_frac for one in ops if one.repeatability_frac is not None]
    return OpGroup(
        family,
        kind,
        threads,
        len(ops),
        fmean(errors),
        median(errors),
        quantile(errors, 0.9),
        median([one.error_frac for one in ops]),
        median(repeatabilities) if repeatabilities else None,
        sum(one.source == "unpriced" for one in ops),
    )

"""Held-out single ops: random kernels that no calibration sampled, timed there and then, against
what the curves of the machine file say.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import pandas as pd

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
from dlperf.studies.accuracy.scoring import error_statistics

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

    `n_ops` of each family, by default as many as PLAN has. Raises DlperfError for more than
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


OP_COLUMNS = [
    *("family", "kind", "op", "threads", "predicted_s", "actual_s"),
    *("repeatability_frac", "source", "error_frac"),
]


def kernel_s(cost_model: KernelCostModel, op: Op) -> tuple[float, str]:
    """Seconds of one op as the calibrated predictor prices it, without anything around it, and
    where the price comes from.
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
) -> pd.DataFrame:
    """A frame of OP_COLUMNS: each random op that at least one run has timed, warm caches, without
    the framework around it.

    The measured time is the median over the runs of the least sample, which is what a calibration
    goes by.
    """
    taken = [{kernel.op.signature: kernel.samples.minimum for kernel in run} for run in runs]
    rows = []
    for one in random_ops:
        name = one.op.signature
        seconds = [run[name] for run in taken if name in run]
        if seconds:
            predicted_s, source = price(one.op)
            actual_s = median(seconds)
            repeatability = spread_frac(seconds) if len(seconds) > 1 else None
            error = predicted_s / actual_s - 1
            row = (
                one.family,
                one.kind,
                name,
                threads,
                predicted_s,
                actual_s,
                repeatability,
                source,
            )
            rows.append((*row, error))
    return pd.DataFrame(rows, columns=OP_COLUMNS).astype({"repeatability_frac": float})


def op_groups(ops: pd.DataFrame) -> pd.DataFrame:
    """By thread count each family as a whole (`kind` is ``all``), then each of its kinds: errors,
    the median of what two fresh processes differ by, and how many ops are unpriced.
    """
    family = ops.groupby(["threads", "family"], sort=False).ngroup()
    both = pd.concat([ops.assign(kind="all", number=family), ops.assign(number=family)])
    both = both.sort_values("number", kind="stable")
    by = ["family", "kind", "threads"]
    unpriced = (both.source == "unpriced").groupby([both[name] for name in by], sort=False).sum()
    groups = error_statistics(both, by, "n_ops", "median")
    return groups.assign(n_unpriced=unpriced.to_numpy())

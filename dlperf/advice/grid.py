"""The grid of configurations, as numbers: what each takes, which of them fit, which is best.

Nothing here knows of models or machine files: :mod:`dlperf.advice.rates` says what a configuration
takes at the batch sizes that were recorded.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlperf.core.errors import DlperfError
from dlperf.core.units import format_bytes
from dlperf.core.variation import waiting_s

THROUGHPUT, EPOCH = "throughput", "epoch"
OBJECTIVES = (EPOCH, THROUGHPUT)
PREDICTED, INTERPOLATED = "predicted", "interpolated"
TIE_FRAC = 0.005
"""Configurations that differ by less count as equally good: no prediction tells them apart."""
_MOST_BATCH_SIZE, _MOST_CONFIGURATIONS = 2**24, 1_000_000


@dataclass(frozen=True, order=True)
class Configuration:
    """One way to train. The order is that of simplicity: fewer processes, threads and loading
    workers before smaller batches.

    `workers` processes train an instance each on their share of the samples, with `threads`
    threads, batches of `batch_size`, and `loader_workers` each.
    """

    workers: int
    threads: int
    loader_workers: int
    batch_size: int

    @property
    def label(self) -> str:
        """How lists name it.

        >>> Configuration(1, 2, 0, 64).label
        'threads 2, batch size 64, loader workers 0, workers 1'
        """
        return (
            f"threads {self.threads}, batch size {self.batch_size}, loader workers"
            f" {self.loader_workers}, workers {self.workers}"
        )


@dataclass(frozen=True)
class Axes:
    """The values to combine, each rising and without repetition. Raises DlperfError for an empty
    axis, values below 1 (0 for loader workers) or absurd ones.
    """

    threads: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    loader_workers: tuple[int, ...] = (0,)
    workers: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name, least, most in (
            ("threads", 1, 1024),
            ("batch_sizes", 1, _MOST_BATCH_SIZE),
            ("loader_workers", 0, 1024),
            ("workers", 1, 4096),
        ):
            values = getattr(self, name)
            if not values:
                raise DlperfError(
                    f"{name.replace('_', ' ')}: there is nothing to choose from; give at least one"
                    " value"
                )
            for value in values:
                if not least <= value <= most:
                    raise DlperfError(
                        f"{name.replace('_', ' ')} holds {value}; values from {least} to {most}"
                        " make sense"
                    )
            object.__setattr__(self, name, tuple(sorted(set(values))))
        if self.size > _MOST_CONFIGURATIONS:
            raise DlperfError(
                f"the grid has {self.size} configurations; up to {_MOST_CONFIGURATIONS} are"
                " compared: give fewer values"
            )

    @property
    def size(self) -> int:
        """Number of combinations."""
        return (
            len(self.threads) * len(self.batch_sizes) * len(self.loader_workers) * len(self.workers)
        )


@dataclass(frozen=True)
class Rate:
    """What one worker does in a configuration: `step_s` from batch to batch once everything runs,
    `once_s` more in each epoch, `peak_memory_bytes` of the worker with what loads for it, and what
    its time is bound by. It varies by `sigma`, apart from `n_apart` - 1 others that wait for the
    slowest.
    """

    step_s: float
    once_s: float
    peak_memory_bytes: int
    bound: str
    sigma: float = 0.0
    n_apart: int = 1


@dataclass(frozen=True)
class ConfigurationForecast:
    """A configuration's forecast. `peak_memory_bytes` are of all its processes together; `epoch_s`
    is None where the number of samples is not known.
    """

    configuration: Configuration
    step_s: float
    samples_per_s: float
    epoch_s: float | None
    peak_memory_bytes: int
    bound: str
    fits: bool
    source: str = PREDICTED


@dataclass(frozen=True)
class Objective:
    """What is sought: the shortest epoch of `samples`, or the best throughput, within
    `memory_limit_bytes`.

    Raises DlperfError for an epoch without samples, or an unknown objective.
    """

    kind: str = THROUGHPUT
    samples: int | None = None
    memory_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise DlperfError(
                f"objective {self.kind!r} is unknown; known are {', '.join(OBJECTIVES)}"
            )
        if self.kind == EPOCH and self.samples is None:
            raise DlperfError(
                "the shortest epoch depends on how many samples it has; give --samples N, or"
                " --objective throughput"
            )

    def cost(self, row: ConfigurationForecast) -> float:
        """What is to be as small as possible: seconds an epoch, or seconds a sample."""
        if self.kind == EPOCH:
            assert row.epoch_s is not None
            return row.epoch_s
        return 1.0 / row.samples_per_s


RateOf = Callable[[Configuration], Rate]


def survey(
    axes: Axes,
    rate_of: RateOf,
    recorded: Sequence[int],
    objective: Objective,
    allowed: Callable[[Configuration], bool] = lambda _: True,
) -> list[ConfigurationForecast]:
    """Every allowed configuration's forecast, in the order of the axes.

    `rate_of` is asked at the `recorded` batch sizes alone; between two of them step, overhead and
    memory are interpolated linearly in the batch size, and outside of them nothing is said (those
    configurations are left out). A batch larger than a worker's share of the samples is left out
    too.

    An epoch is ceil(share / batch) steps, share = ceil(samples / workers), what several workers
    wait for the slowest, and `once_s`; a last, smaller batch counts as a whole one, so it errs high
    by less than a step.
    """
    known, limit_bytes = sorted(set(recorded)), objective.memory_limit_bytes
    rows = []
    for workers, threads, loader_workers, batch_size in itertools.product(
        axes.workers, axes.threads, axes.loader_workers, axes.batch_sizes
    ):
        one = Configuration(workers, threads, loader_workers, batch_size)
        share = None if objective.samples is None else math.ceil(objective.samples / workers)
        if (
            not known[0] <= batch_size <= known[-1]
            or not allowed(one)
            or (share is not None and batch_size > share)
        ):
            continue
        index = bisect_left(known, batch_size)
        rate = rate_of(replace(one, batch_size=known[index]))
        is_known = known[index] == batch_size
        if not is_known:
            low = known[index - 1]
            part = (batch_size - low) / (known[index] - low)
            rate = _between(rate_of(replace(one, batch_size=low)), rate, part)
        epoch_s = None
        if share is not None:
            steps_s = math.ceil(share / batch_size) * rate.step_s
            epoch_s = steps_s + waiting_s(rate.n_apart, rate.sigma, steps_s) + rate.once_s
        memory_bytes = workers * rate.peak_memory_bytes
        rows.append(
            ConfigurationForecast(
                one,
                rate.step_s,
                workers * batch_size / rate.step_s,
                epoch_s,
                memory_bytes,
                rate.bound,
                limit_bytes is None or memory_bytes <= limit_bytes,
                PREDICTED if is_known else INTERPOLATED,
            )
        )
    return rows


def _between(low: Rate, high: Rate, part: float) -> Rate:
    def mix(a: float, b: float) -> float:
        return a + part * (b - a)

    return replace(
        low,
        step_s=mix(low.step_s, high.step_s),
        once_s=mix(low.once_s, high.once_s),
        peak_memory_bytes=math.ceil(mix(low.peak_memory_bytes, high.peak_memory_bytes)),
        bound=low.bound if part < 0.5 else high.bound,
    )


def ranked(
    rows: Sequence[ConfigurationForecast], objective: Objective
) -> list[ConfigurationForecast]:
    """The rows that fit, the best first. Rows within TIE_FRAC of the best of the remaining ones are
    equally good; of them the simplest comes first.

    Raises DlperfError where none fits, naming the least need, or where there is no row at all.
    """
    if not rows:
        raise DlperfError(
            "the grid is empty: every configuration was left out; give smaller batch sizes, fewer"
            " workers, or more samples"
        )
    left = sorted(
        (row for row in rows if row.fits), key=lambda row: (objective.cost(row), row.configuration)
    )
    if not left:
        least = min(rows, key=lambda row: (row.peak_memory_bytes, row.configuration))
        raise DlperfError(
            f"nothing fits into {format_bytes(objective.memory_limit_bytes)}: the smallest need is"
            f" {format_bytes(least.peak_memory_bytes)} ({least.configuration.label}); raise"
            " --memory-limit, or give smaller --batch-sizes"
        )
    ties: list[list[ConfigurationForecast]] = []
    for row in left:
        if ties and objective.cost(row) <= (1.0 + TIE_FRAC) * objective.cost(ties[-1][0]):
            ties[-1].append(row)
        else:
            ties.append([row])
    return [row for rows in ties for row in sorted(rows, key=lambda row: row.configuration)]


def spread_sizes(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """At most `most` of the rising sizes, evenly spaced in their logarithms, both ends included.

    >>> spread_sizes((1, 2, 4, 8, 16), 3)
    (1, 4, 16)
    """
    if len(sizes) <= most:
        return tuple(sizes)
    wanted = np.geomspace(sizes[0], sizes[-1], most)
    return tuple(sorted({min(sizes, key=lambda size: abs(math.log(size / one))) for one in wanted}))

"""Time that a training waits for batches, fetched in its own process or by loader workers.

Nothing here imports torch. What the loader costs stands in the machine file
(``microbench/loader.py``), what a dataset costs beyond that is sampled
(:mod:`dlperf.profiler.loader_sampling`); this module combines the two over an epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dlperf.core.costs import LOADER_BYTE
from dlperf.core.machine import Machine, lacks
from dlperf.core.state import REFERENCE, State

if TYPE_CHECKING:
    from dlperf.core.trace import Trace

_MOST_THRESHOLD_BYTES = 2**25
"""Memory of a given number of bytes malloc takes anew from the system each time (glibc's
DEFAULT_MMAP_THRESHOLD_MAX).
"""
_PAGE_BYTES = 4096


# -- the pipeline ----------------------------------------------------------------------------------


def rates(
    n_active: int, threads: int, n_cores: float, busy_frac: float = 1.0
) -> tuple[float, float]:
    """Relative speeds, from 0 to 1, of a training with `threads` and of each of `n_active` loader
    workers on `n_cores`.

    A worker needs a core for `busy_frac` of its time; for the rest it waits (for a disk, a network,
    a clock). Where more is needed than there are cores, each gets an equal share. Threads that work
    on one kernel together wait for the slowest of them, which shares its core with the most others.

    >>> rates(1, 1, 2), rates(2, 1, 2), rates(1, 2, 2)
    ((1.0, 1.0), (0.6666666666666666, 0.6666666666666666), (0.5, 0.6666666666666666))
    >>> rates(4, 1, 2, busy_frac=0.25)
    (1.0, 1.0)
    """
    n_busy = threads + n_active * busy_frac
    if n_busy <= n_cores:
        return 1.0, 1.0
    share = n_cores / n_busy
    return (share if threads == 1 else 1.0 / math.ceil(n_busy / n_cores)), 1.0 / (
        1.0 - busy_frac + busy_frac / share
    )


@dataclass(frozen=True)
class Period:
    """The steady state of a training and its workers: seconds from batch to batch, and whether the
    training waits for the workers.
    """

    seconds: float
    waits: bool


def period(
    consumer_s: float,
    producer_s: float,
    n_workers: int,
    threads: int,
    n_cores: float,
    busy_frac: float = 1.0,
) -> Period:
    """Seconds from batch to batch once everything runs: `consumer_s` the training takes for one,
    `producer_s` a worker, each alone on its cores.

    For `busy_frac` of its time a worker needs a core.

    With cores for all it is max(consumer, producer / workers). Where they share cores, so many
    workers are active on average that batches are made as fast as they are used; if all of them are
    not enough, the training waits, and while it does the workers have its cores.
    """
    if producer_s <= 0.0:
        return Period(consumer_s, waits=False)
    made = [n * rates(n, threads, n_cores, busy_frac)[1] / producer_s for n in range(n_workers + 1)]
    if consumer_s > 0.0:
        used = [rates(n, threads, n_cores, busy_frac)[0] / consumer_s for n in range(n_workers + 1)]
        for n in range(n_workers):
            if made[n + 1] >= used[n + 1]:
                part = (used[n] - made[n]) / ((made[n + 1] - made[n]) - (used[n + 1] - used[n]))
                return Period(1.0 / (made[n] + part * (made[n + 1] - made[n])), waits=False)
        busy_s = 1.0 / used[n_workers]
    else:
        busy_s = 0.0
    alone = n_workers * rates(n_workers, 0, n_cores, busy_frac)[1] / producer_s
    return Period(busy_s + (1.0 - busy_s * made[n_workers]) / alone, waits=True)


def pipeline_s(
    n_batches: int,
    consumer_s: float,
    producer_s: float,
    n_workers: int,
    threads: int = 1,
    n_cores: float = 2**20,
    busy_frac: float = 1.0,
) -> float:
    """Seconds from the workers' start to the end of the training's last batch.

    Workers take batches in turn and the training uses them in order, so batch i (of W workers) is
    ready in round floor(i / W) + 1. No batch is used before it is ready nor before the one ahead of
    it is done; the longest chain starts with the first batch, or with the first one of the last
    round:

        T = max(p + n c, R p + (n - (R - 1) W) c),  R = ceil(n / W)

    Exact where cores suffice for all and each worker holds at least two batches in advance
    (``prefetch_factor``); where they share cores, p and c are those of the steady state. Without
    workers the batches are fetched in between: n (c + p).
    """
    if n_batches == 0:
        return 0.0
    if n_workers == 0:
        return n_batches * (consumer_s + producer_s)
    n_workers = min(n_workers, n_batches)
    steady = period(consumer_s, producer_s, n_workers, threads, n_cores, busy_frac)
    first_s = producer_s / rates(n_workers, 0, n_cores, busy_frac)[1]
    if steady.waits:
        made_s, used_s = (
            steady.seconds * n_workers,
            consumer_s / rates(n_workers, threads, n_cores, busy_frac)[0],
        )
    else:
        made_s, used_s = producer_s, steady.seconds
    n_rounds = math.ceil(n_batches / n_workers)
    return max(
        first_s + n_batches * used_s,
        n_rounds * made_s + (n_batches - (n_rounds - 1) * n_workers) * used_s,
    )


# -- what batches cost -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Batches:
    """A batch: `fetch_s` to make it, in the process that wants it or in a worker, `waiting_frac` of
    it without need of a core; `hand_over_s` of a worker beyond that, `take_over_s` of the training.
    """

    fetch_s: float
    hand_over_s: float = 0.0
    take_over_s: float = 0.0
    waiting_frac: float = 0.0

    @property
    def busy_frac(self) -> float:
        """The part of a worker's time in which it needs a core.

        >>> Batches(fetch_s=3.0, hand_over_s=1.0, waiting_frac=0.5).busy_frac
        0.625
        """
        return 1.0 - self.waiting_frac * self.fetch_s / self.made_s if self.made_s else 1.0

    @property
    def made_s(self) -> float:
        """A worker's time from batch to batch when nothing else holds it up.

        Taking over is a part: the memory of a batch is handed over by a thread of the worker, under
        the same interpreter lock as its work, and the worker is told its next batch only
        afterwards. Errs high where a batch takes much longer to make than to take over and the lock
        is often let go.
        """
        return self.fetch_s + self.hand_over_s + self.take_over_s


@dataclass(frozen=True)
class Starts:
    """What comes once a start of workers (`start_s`), an end (`stop_s`), and an epoch with workers
    that stayed (`resume_s`).
    """

    start_s: float = 0.0
    stop_s: float = 0.0
    resume_s: float = 0.0


_NEEDED = ("batch", "batch_tensor", "sample", "tensor", "shuffle")
_NEEDED_BY_WORKERS = (
    "receive_batch",
    "receive_tensor",
    "receive_byte",
    "send_batch",
    "send_tensor",
    "send_byte",
    "start_call",
    "start_worker",
    "stop_call",
    "stop_worker",
    "resume",
    "fork_byte",
)


@dataclass(frozen=True)
class LoaderCosts:
    """The machine's costs of loading (seconds each) at a thread count and a state, times the `mean`
    time over the usual one.

    Raises DlperfError where the machine file does not hold them, naming the command that adds them.
    """

    machine: Machine
    threads: int
    state: State = REFERENCE
    mean: float = 1.0

    def __post_init__(self) -> None:
        if not has_costs(self.machine):
            way_out = f"; {self.machine.calibration()} adds them"
            raise lacks(self.machine, "costs of loading data", way_out)

    def _cost_s(self, name: str) -> float:
        return self._at_state_s(f"loader_{name}")

    def _at_state_s(self, kind: str, default: float | None = None) -> float:
        at = self.state
        return self.mean * self.machine.cost_value(kind, self.threads, default, state=at)

    def byte_s(self, row_bytes: float) -> float:
        """Seconds for each byte of a sample of `row_bytes`, from where it lies into the batch;
        between two measured sizes linear in the logarithm.
        """
        costs = self.machine.costs_of(LOADER_BYTE)
        counts = {cost.threads for cost in costs}
        nearest = min(counts, key=lambda t: (abs(math.log(t / self.threads)), t))
        points = sorted(
            (cost.key.at, self.state.factor(self.machine.bound_of(cost)) * cost.value)
            for cost in costs
            if cost.threads == nearest
        )
        sizes, seconds = np.array(points).T
        wanted = math.log2(max(row_bytes, 1.0))
        return self.mean * float(np.interp(wanted, np.log2(sizes), seconds))

    def fetch_s(self, batch_size: int, sample_bytes: tuple[int, ...], shuffled: bool) -> float:
        """Seconds for a batch of samples in memory, each of tensors of `sample_bytes`, by torch's
        default collation.
        """
        n_tensors = len(sample_bytes)
        sample_s = (
            self._cost_s("sample")
            + n_tensors * self._cost_s("tensor")
            + (self._cost_s("shuffle") if shuffled else 0.0)
        )
        copied_s = math.fsum(n_bytes * self.byte_s(n_bytes) for n_bytes in sample_bytes)
        return (
            self._cost_s("batch")
            + n_tensors * self._cost_s("batch_tensor")
            + batch_size * (sample_s + copied_s)
            + self._faults_s(batch_size, sample_bytes)
        )

    def _faults_s(self, batch_size: int, sample_bytes: tuple[int, ...]) -> float:
        n_bytes = sum(
            batch_size * size for size in sample_bytes if batch_size * size >= _MOST_THRESHOLD_BYTES
        )
        page_s = sum(self._at_state_s(kind, 0.0) for kind in ("page_fault", "page_release"))
        return n_bytes / _PAGE_BYTES * page_s

    def batches(
        self,
        fetch_s: float,
        tensor_bytes: tuple[int, ...],
        n_workers: int,
        waiting_frac: float = 0.0,
    ) -> Batches:
        """A batch of tensors of so many bytes that takes `fetch_s` to make, `waiting_frac` of it
        without need of a core.
        """
        if n_workers == 0:
            return Batches(fetch_s, waiting_frac=waiting_frac)
        self._check_workers()
        n_tensors, n_bytes = len(tensor_bytes), sum(tensor_bytes)
        send_s, receive_s = (
            self._cost_s(f"{way}_batch")
            + n_tensors * self._cost_s(f"{way}_tensor")
            + n_bytes * self._cost_s(f"{way}_byte")
            for way in ("send", "receive")
        )
        return Batches(fetch_s, send_s, receive_s, waiting_frac)

    def starts(self, n_workers: int, memory_bytes: float) -> Starts:
        """Starting and ending loader workers of a training that writes to `memory_bytes`."""
        if n_workers == 0:
            return Starts()
        self._check_workers()
        copied_s = memory_bytes * self._cost_s("fork_byte")
        start_s, stop_s = (
            self._cost_s(f"{way}_call") + n_workers * self._cost_s(f"{way}_worker")
            for way in ("start", "stop")
        )
        return Starts(start_s + copied_s, stop_s, self._cost_s("resume"))

    def _check_workers(self) -> None:
        if not all(self.machine.costs_of(f"loader_{name}") for name in _NEEDED_BY_WORKERS):
            raise lacks(
                self.machine,
                "costs of loading workers, which this system refused while it was calibrated",
                "; ask for 0 of them",
            )


def has_costs(machine: Machine) -> bool:
    """Whether a machine file holds the costs of loading."""
    return all(machine.costs_of(f"loader_{name}") for name in (*_NEEDED, "byte"))


def sample_bytes(trace: Trace) -> tuple[int, ...]:
    """Bytes of one sample of each tensor that the step reads from outside (its inputs and what its
    loss compares with).

    Those are tensors that were there before the step, are no part of the model, and have the batch
    as their first dimension.
    """
    found: dict[int, int] = {}
    for op in trace.ops:
        for spec in op.inputs:
            if spec.storage >= 0 and spec.shape and spec.shape[0] == trace.batch_size:
                storage = trace.storages[spec.storage]
                if storage.born < 0 and storage.kind in ("input", ""):
                    found[spec.storage] = storage.nbytes // trace.batch_size
    return tuple(found.values())

"""What torch's DataLoader costs: batches fetched in the training process, batches handed over by
worker processes, starting and stopping those.

Datasets lie in memory, so that what is measured is the loader's own: the sampler, the calls of
``__getitem__``, the collation, the queues and the shared memory. What a dataset of one's own takes
beyond that is for ``predict --loader`` to find out.
"""

from __future__ import annotations

import gc
import itertools
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset, default_collate

from dlperf.core.clock import (
    Clock,
    Repeats,
    Samples,
    quantile,
    sample_in_turns,
    take_single,
    timed,
)
from dlperf.core.costs import LOADER_BYTE, Cost, CostKey

_FEW, _MANY = 8, 72
_ROWS = 4096
ROW_BYTES = (4096, 65536, 1048576)
"""Sizes of one sample at which the collation of bytes is measured."""
_BATCH_BYTES = 2**20
"""A batch that a worker hands over, for what its bytes cost."""
_DATA_BYTES = {"quick": 2**26, "full": 2**27, "thorough": 2**27}
"""Memory out of which rows are drawn: more than the nearer caches hold, as a training set is."""
_LONGEST_WAIT_S = 60.0
"""A worker that hands over nothing for so long has died or hangs."""
Call = Callable[[], object]


def ignore_interrupts(_worker: int) -> None:
    """Ctrl-C is for the measuring process, which ends its loading workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _stamped(rows: list[Any]) -> tuple[Any, float]:
    """The default collation, and how much time of a processor the process that does it has used so
    far.
    """
    return default_collate(rows), time.process_time()


def _dataset(n_tensors: int, row_bytes: int, n_rows: int = _ROWS) -> TensorDataset:
    return TensorDataset(*(torch.zeros(n_rows, row_bytes // 4) for _ in range(n_tensors)))


def _loader(
    dataset: TensorDataset, batch_size: int = 1, num_workers: int = 1, **options: Any
) -> DataLoader[Any]:
    """A loader with worker processes."""
    return DataLoader(
        dataset,
        batch_size,
        num_workers=num_workers,
        worker_init_fn=ignore_interrupts,
        timeout=_LONGEST_WAIT_S,
        **options,
    )


def _next_of(dataset: TensorDataset, batch_size: int, shuffled: bool) -> Call:
    n_rows = len(dataset)
    sampler: Any = (
        RandomSampler(dataset, num_samples=2**20 * n_rows)
        if shuffled
        else itertools.cycle(range(n_rows))
    )
    iterator = iter(DataLoader(dataset, batch_size=batch_size, sampler=sampler))
    return lambda: next(iterator)


def in_process(repeats: Repeats, data_bytes: int, clock: Clock) -> dict[CostKey, Samples]:
    """Batches fetched by the training process itself.

    A batch of b samples of k tensors takes batch + k batch_tensor + b (sample + k tensor) and its
    bytes; the four follow from the times at two values of b and two of k. Shuffling adds to a
    sample its share of the permutation.
    """
    tiny = {n_tensors: _dataset(n_tensors, 4) for n_tensors in (1, 3)}
    cases = {
        (size, n_tensors): _next_of(dataset, size, False)
        for n_tensors, dataset in tiny.items()
        for size in (_FEW, _MANY)
    }
    shuffled = _next_of(tiny[1], _MANY, True)
    results = sample_in_turns([*cases.values(), shuffled], repeats, clock)
    found = dict(zip(cases, results))
    least = {case: samples.minimum for case, samples in found.items()}
    slope = {
        n_tensors: max(0.0, least[_MANY, n_tensors] - least[_FEW, n_tensors]) / (_MANY - _FEW)
        for n_tensors in (1, 3)
    }
    start = {
        n_tensors: max(0.0, least[_FEW, n_tensors] - _FEW * slope[n_tensors])
        for n_tensors in (1, 3)
    }
    tensor_s, batch_tensor_s = max(0.0, slope[3] - slope[1]) / 2, max(0.0, start[3] - start[1]) / 2

    single = found[_MANY, 1]
    costs = {
        CostKey("loader_batch"): found[_FEW, 1].minus(_FEW * slope[1] + batch_tensor_s),
        CostKey("loader_batch_tensor"): found[_FEW, 3].minus(_FEW * slope[3] + start[1], 2.0),
        CostKey("loader_sample"): single.minus(
            least[_FEW, 1] + (_MANY - _FEW) * tensor_s, _MANY - _FEW
        ),
        CostKey("loader_tensor"): found[_MANY, 3].minus(
            least[_FEW, 3] + (_MANY - _FEW) * slope[1], 2.0 * (_MANY - _FEW)
        ),
        CostKey("loader_shuffle"): results[-1].minus(single.minimum, _MANY),
    }
    for row_bytes in ROW_BYTES:
        size = max(1, min(32, 2**22 // row_bytes))
        dataset = _dataset(1, row_bytes, data_bytes // row_bytes)
        alone_s = start[1] + size * slope[1]
        (big,) = sample_in_turns([_next_of(dataset, size, True)], repeats, clock)
        costs[CostKey(LOADER_BYTE, at=row_bytes)] = big.minus(
            alone_s + size * costs[CostKey("loader_shuffle")].minimum,
            size * row_bytes,
        )
    return costs


def _until_next(iterator: Any, gap_s: float, clock: Clock, kept: list[Any]) -> Callable[[], Call]:
    """Prepares a call that takes a batch which lies ready: the processor is kept busy meanwhile, as
    a training step would.
    """

    def prepare() -> Call:
        end = clock.now() + gap_s
        while clock.now() < end:
            pass

        def take() -> None:
            tensors, stamp = next(iterator)
            for tensor in tensors:
                tensor.view(-1)[::1024].sum()  # the pages are mapped at their first use
            kept[:] = [tensors, *kept[1:], stamp]

        return take

    return prepare


def _handed_over(
    n_tensors: int, row_bytes: int, batch_size: int, n_samples: int, clock: Clock
) -> tuple[Samples, float]:
    """Seconds in which the training process takes over a batch that is ready, and the processor
    time that a worker spends on one.

    Of the latter the tenth part of the quickest decides: no counter shows which batches were
    disturbed.
    """
    dataset = _dataset(n_tensors, row_bytes, 256)
    endless: Any = itertools.cycle(range(len(dataset)))
    iterator = iter(_loader(dataset, batch_size, sampler=endless, collate_fn=_stamped))
    try:
        for _ in range(4):
            next(iterator)
        begin, kept = clock.now(), list[Any]()
        for _ in range(4):
            kept = [None, next(iterator)[1]]
        gap_s = 2.0 * (clock.now() - begin) / 4 + 1e-3
        taken = take_single(_until_next(iterator, gap_s, clock, kept), n_samples, clock)
        stamps = kept[1:]
        spent = [after - before for before, after in itertools.pairwise(stamps)]
        return taken, quantile(spent, 0.1)
    finally:
        del iterator
        gc.collect()


def with_worker(
    fetched: dict[CostKey, Samples], n_samples: int, clock: Clock
) -> dict[CostKey, Samples]:
    """Batches that a worker process makes: ``receive_*`` in the training process, ``send_*`` in the
    worker beyond what fetching takes.

    ``batch`` is a batch without tensors, ``tensor`` one tensor of it (each lies in shared memory of
    its own, whose file descriptor is passed through a socket), ``byte`` a byte.
    """
    single, triple = (
        _handed_over(1, 4, _FEW, n_samples, clock),
        _handed_over(3, 4, _FEW, n_samples, clock),
    )
    big = _handed_over(1, _BATCH_BYTES // _FEW, _FEW, n_samples, clock)
    cost = {key: samples.minimum for key, samples in fetched.items()}

    def fetch_s(n_tensors: int) -> float:
        return (
            cost[CostKey("loader_batch")]
            + n_tensors * cost[CostKey("loader_batch_tensor")]
            + _FEW * (cost[CostKey("loader_sample")] + n_tensors * cost[CostKey("loader_tensor")])
        )

    receive_tensor_s = max(0.0, triple[0].minimum - single[0].minimum) / 2
    send = {
        n_tensors: max(0.0, spent_s - fetch_s(n_tensors))
        for n_tensors, spent_s in ((1, single[1]), (3, triple[1]))
    }
    send_tensor_s = max(0.0, send[3] - send[1]) / 2
    copied_s = _BATCH_BYTES * cost[CostKey(LOADER_BYTE, at=ROW_BYTES[1])]
    return {
        CostKey("loader_receive_batch"): single[0].minus(receive_tensor_s),
        CostKey("loader_receive_tensor"): triple[0].minus(single[0].minimum, 2),
        CostKey("loader_receive_byte"): big[0].minus(single[0].minimum, _BATCH_BYTES),
        CostKey("loader_send_batch"): Samples((max(0.0, send[1] - send_tensor_s),)),
        CostKey("loader_send_tensor"): Samples((send_tensor_s,)),
        CostKey("loader_send_byte"): Samples(
            (max(0.0, big[1] - single[1] - copied_s) / _BATCH_BYTES,)
        ),
    }


def _lives(n_workers: int, persistent: bool, clock: Clock) -> tuple[float, float, float]:
    """Seconds from asking for an iterator to its first batch, of ending it after its last, and of
    starting the next epoch with the same workers.
    """
    dataset = _dataset(1, 4, n_workers)
    loader = _loader(dataset, num_workers=n_workers, persistent_workers=persistent)
    begin = clock.now()
    iterator = iter(loader)
    for _ in range(n_workers):
        next(iterator)
    ready = clock.now()
    for _ in iterator:
        pass
    end = clock.now()
    resumed_s = 0.0
    if persistent:
        again = clock.now()
        iterator = iter(loader)
        next(iterator)
        resumed_s = clock.now() - again
    del iterator, loader
    gc.collect()
    return ready - begin, end - ready, resumed_s


def starts(mode: str, clock: Clock) -> dict[CostKey, Samples]:
    """What comes once for each start of workers: ``start_*``, ``stop_*`` (a call, and a worker
    more), ``resume`` of those that stay, and ``fork_byte``: a process whose memory was copied pays
    for each page when it next writes to it.
    """
    times = 2 if mode == "quick" else 4
    found: dict[CostKey, list[float]] = {}
    for turn in range(times):
        if turn and clock.is_late:
            break
        start_s, stop_s, resume_s = zip(
            *(_lives(n_workers, False, clock) for n_workers in (1, 2)), _lives(1, True, clock)
        )
        values = {
            "start_call": max(0.0, 2 * start_s[0] - start_s[1]),
            "start_worker": max(0.0, start_s[1] - start_s[0]),
            "stop_call": max(0.0, 2 * stop_s[0] - stop_s[1]),
            "stop_worker": max(0.0, stop_s[1] - stop_s[0]),
            "resume": resume_s[2],
        }
        for name, value in values.items():
            found.setdefault(CostKey(f"loader_{name}"), []).append(value)
    forks = found.setdefault(CostKey("loader_fork_byte"), [])
    while not forks or (len(forks) < times and not clock.is_late):
        forks.append(_fork_byte_s(2**25 if mode == "quick" else 2**27, clock))
    return {name: Samples(tuple(values)) for name, values in found.items()}


def _fork_byte_s(n_bytes: int, clock: Clock) -> float:
    memory = torch.zeros(n_bytes // 4)
    memory.fill_(1.0)
    warm_s, _ = timed(lambda: memory.fill_(2.0), clock)
    iterator = iter(_loader(_dataset(1, 4, 8)))
    next(iterator)
    shared_s, _ = timed(lambda: memory.fill_(3.0), clock)
    del iterator
    gc.collect()
    return max(0.0, shared_s - warm_s) / n_bytes


def measure(threads: int, mode: str, clock: Clock = Clock()) -> tuple[list[Cost], list[str]]:
    """Every cost of loading, in seconds each, and what could not be measured: a system may refuse
    processes or shared memory.
    """
    repeats = Repeats(
        sample_s=2e-4 if mode == "quick" else 1e-3, n_samples=5 if mode == "quick" else 11
    )
    found = in_process(repeats, _DATA_BYTES[mode], clock.part(0.3))
    refused: list[str] = []
    try:
        found |= with_worker(found, 8 if mode == "quick" else 25, clock.part(0.5))
        found |= starts(mode, clock)
    except (OSError, RuntimeError) as error:
        refused.append(
            f"worker processes of a data loader ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:120]})"
        )
    return [Cost(key, threads, samples) for key, samples in found.items()], refused

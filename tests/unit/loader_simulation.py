"""A data loader acted out event by event: the oracle of the closed form in
``dlperf.forecast.loading``.
"""

from __future__ import annotations

import math


def paces(n_active: int, main_busy: bool, threads: int, n_cores: int) -> tuple[float, float]:
    """Paces of the training and of each active worker, by the rule that every runnable thread gets
    an equal share of the cores, and that the threads of one kernel go by the slowest.
    """
    if not main_busy:
        return 0.0, min(1.0, n_cores / max(1, n_active))
    n = threads + n_active
    if n <= n_cores:
        return 1.0, 1.0
    return (n_cores / n if threads == 1 else 1.0 / math.ceil(n / n_cores)), n_cores / n


def simulate(
    n_batches: int,
    consumer_s: float,
    producer_s: float,
    n_workers: int,
    threads: int = 1,
    n_cores: int = 10**6,
    prefetch: int = 2,
) -> float:
    """Seconds to the end of the last batch. Workers get `prefetch` batches each in turn, and one
    more for each that the training takes, in order.
    """
    queues: list[list[int]] = [[] for _ in range(n_workers)]
    given = 0

    def give() -> None:
        nonlocal given
        if given < n_batches:
            queues[given % n_workers].append(given)
            given += 1

    for _ in range(prefetch * n_workers):
        give()
    left = [producer_s] * n_workers
    ready: set[int] = set()
    now, wanted, main_left = 0.0, 0, 0.0
    main_busy = False
    while True:
        for worker, queue in enumerate(queues):  # what is finished, in case it takes no time
            while queue and left[worker] <= 1e-12:
                ready.add(queue.pop(0))
                left[worker] = producer_s
        if main_busy and main_left <= 1e-12:
            main_busy = False
            wanted += 1
        if wanted == n_batches:
            return now
        if not main_busy and wanted in ready:
            main_busy, main_left = True, consumer_s
            give()
            continue
        active = [worker for worker, queue in enumerate(queues) if queue]
        main_pace, worker_pace = paces(len(active), main_busy, threads, n_cores)
        events = [left[worker] / worker_pace for worker in active] + (
            [main_left / main_pace] if main_busy else []
        )
        step = min(events)
        now += step
        main_left -= step * main_pace
        for worker in active:
            left[worker] -= step * worker_pace

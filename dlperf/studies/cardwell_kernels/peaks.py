"""The three rates of section 2.3.3 on these ranks: dgemm, STREAM, ping-pong, one thread each, all
ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlperf.core.rank_program import Watch
from dlperf.core.units import KIB, MIB
from dlperf.studies.cardwell_kernels.findings import Peaks
from dlperf.studies.cardwell_kernels.wire import ProcessWire

DGEMM_N = 1024
STREAM_ELEMENTS = 16 * MIB
"""128 MiB an array, four times a cache of 32 MiB."""
MESSAGES = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
REPEATS = 6
SHORT_REPEATS = 40


def measure_peaks(wire: ProcessWire, watch: Watch, now: Callable[[], float]) -> Peaks:
    """The slowest rank's best samples. Every rank calls it, and there are at least two."""
    watch.begin("dgemm")
    a, b = (
        torch.ones(DGEMM_N, DGEMM_N, dtype=torch.float64),
        torch.ones(DGEMM_N, DGEMM_N, dtype=torch.float64),
    )
    out = torch.empty_like(a)
    flops_per_s = 2 * DGEMM_N**3 / _least_s(wire, lambda: torch.mm(a, b, out=out), now)
    watch.begin("STREAM")
    x, y, z = (torch.ones(STREAM_ELEMENTS, dtype=torch.float64) for _ in range(3))
    sweeps: dict[str, tuple[int, Callable[[], object]]] = {
        "copy": (2, lambda: z.copy_(x)),
        "scale": (2, lambda: torch.mul(x, 3.0, out=z)),
        "add": (3, lambda: torch.add(x, y, out=z)),
        "triad": (3, lambda: torch.add(x, y, alpha=3.0, out=z)),
    }
    rates = {
        name: n_arrays * 8 * STREAM_ELEMENTS / _least_s(wire, call, now)
        for name, (n_arrays, call) in sweeps.items()
    }
    kernel = max(rates, key=lambda name: rates[name])
    trips = {n_bytes: _half_trip_s(wire, watch, n_bytes, now) for n_bytes in MESSAGES}
    best = max(MESSAGES, key=lambda n_bytes: n_bytes / trips[n_bytes])
    return Peaks(flops_per_s, rates[kernel], kernel, best / trips[best], best, min(trips.values()))


def _least_s(wire: ProcessWire, call: Callable[[], object], now: Callable[[], float]) -> float:
    call()
    samples = []
    for _ in range(REPEATS):
        wire.barrier()
        begin = now()
        call()
        samples.append(now() - begin)
    return _agreed(min(samples))


def _half_trip_s(wire: ProcessWire, watch: Watch, n_bytes: int, now: Callable[[], float]) -> float:
    """Half the least round trip between ranks 0 and 1, for all."""
    watch.begin(f"ping-pong of {n_bytes} bytes")
    message = torch.zeros(n_bytes, dtype=torch.uint8)
    samples = []
    wire.barrier()
    for _ in range((SHORT_REPEATS if n_bytes <= 64 * KIB else REPEATS) if wire.rank < 2 else 0):
        begin = now()
        for sender in (0, 1):
            if wire.rank == sender:
                dist.send(message, 1 - sender)
            else:
                dist.recv(message, sender)
        samples.append((now() - begin) / 2)
    return _agreed(min(samples[1:], default=0.0))


def _agreed(seconds: float) -> float:
    """The largest of all ranks' numbers."""
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)

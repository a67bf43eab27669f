"""Every algorithm at every size, timed on these ranks, and the three rates of section 2.3.3: dgemm,
STREAM, ping-pong, one thread each, all ranks at once.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dlperf.core import host
from dlperf.core.rank_program import Watch
from dlperf.core.units import KIB, MIB
from dlperf.models import parallel_algorithms as counts
from dlperf.studies.cardwell_kernels import algorithms
from dlperf.studies.cardwell_kernels.algorithms import Meter, Wire, share
from dlperf.studies.cardwell_kernels.findings import Findings, Peaks, Run
from dlperf.studies.papers.cardwell import EDGES_PER_VERTEX

MOST_SAMPLES, LEAST_SAMPLES = 30, 3
PEAKS_SHARE = 0.25
DGEMM_N = 1024
STREAM_ELEMENTS = 16 * MIB
"""128 MiB an array, four times a cache of 32 MiB."""
MESSAGES = (8, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
REPEATS = 6
SHORT_REPEATS = 40


@dataclass(frozen=True)
class KernelCase:
    """An algorithm at a size, ready to be called again and again, and Table 2.4's counts of one
    rank.
    """

    size: int
    call: Callable[[], object]
    work: counts.Work


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _summa(wire: Wire, size: int) -> KernelCase:
    grid = algorithms.make_grid(wire)
    n = _multiple(size, grid.n_panels)
    a, b, c = _random(3, n // grid.n_rows, n // grid.n_columns)
    work = counts.summa(n, grid.n_rows, grid.n_columns)
    return KernelCase(n, lambda: algorithms.summa(grid, a, b, c, 1.0, 0.5), work)


def _dgemv(wire: Wire, size: int) -> KernelCase:
    n = _multiple(size, wire.n_ranks)
    a, x, y = _random(n // wire.n_ranks, n), *_random(2, n // wire.n_ranks)
    work = counts.dgemv(n, wire.n_ranks)
    return KernelCase(n, lambda: algorithms.dgemv(wire, a, x, y, 1.0, 0.5), work)


def _ddot(wire: Wire, size: int) -> KernelCase:
    x, y = _random(2, len(share(size, wire.rank, wire.n_ranks)))
    work = counts.ddot(size, wire.n_ranks)
    return KernelCase(size, lambda: algorithms.ddot(wire, x, y), work)


def _fft(wire: Wire, size: int) -> KernelCase:
    n = wire.n_ranks**2
    while n < size:
        n *= 2
    x = torch.rand(n // wire.n_ranks, dtype=torch.complex128)
    factors = algorithms.twiddles(wire, n)
    work = counts.fft(n, wire.n_ranks)
    return KernelCase(n, lambda: algorithms.fft(wire, x, factors), work)


def _stencil(wire: Wire, size: int) -> KernelCase:
    n = max(size, wire.n_ranks + 2)
    values = _random(len(share(n - 2, wire.rank, wire.n_ranks)) + 2, n)
    room = values.clone()
    work = counts.stencil(n, wire.n_ranks)
    return KernelCase(n, lambda: algorithms.stencil(wire, values, room, 1), work)


def _boruvka(wire: Wire, size: int) -> KernelCase:
    mine = share(EDGES_PER_VERTEX * size, wire.rank, wire.n_ranks)
    ends, weights = torch.randint(0, size, (len(mine), 2)), torch.randint(1, 2**20, (len(mine),))
    work = counts.boruvka(size, EDGES_PER_VERTEX * size, wire.n_ranks)
    return KernelCase(size, lambda: algorithms.boruvka(wire, size, ends, weights, mine.start), work)


def _dijkstra(wire: Wire, size: int) -> KernelCase:
    lengths = _random(len(share(size, wire.rank, wire.n_ranks)), size) + 0.01
    work = counts.dijkstra(size, size * size, wire.n_ranks)
    return KernelCase(size, lambda: algorithms.dijkstra(wire, lengths, 0, size), work)


CASES: dict[str, tuple[Callable[[Wire, int], KernelCase], tuple[int, ...]]] = {
    "SUMMA": (_summa, (96, 240, 480, 960, 1440)),
    "DGEMV": (_dgemv, (256, 1024, 2048, 4096)),
    "DDOT": (_ddot, (2**10, 2**14, 2**18, 2**22, 2**24)),
    "1D FFT": (_fft, (2**10, 2**13, 2**16, 2**19, 2**21)),
    "Stencil": (_stencil, (128, 512, 1024, 2048, 4096)),
    "MST": (_boruvka, (2**10, 2**12, 2**14, 2**16)),
    "Dijkstra": (_dijkstra, (64, 256, 512, 1024)),
}
"""What makes each case, and the sizes: N, for the graphs |V|. Sizes are rounded up to what the
ranks can share.
"""


def run_study(
    watch: Watch,
    seconds: float,
    now: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> Findings:
    """Measure the peaks and every case within about `seconds`. Every rank of the launcher calls it;
    each gets the same findings.

    Raises whatever torch.distributed does when another rank is gone.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=watch.limit_s))
    store = dist.distributed_c10d._get_default_store()
    watch.claim = lambda: int(store.add("dlperf/ended", 1)) == 1
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 + rank)
    meter = Meter()
    wire = Wire(range(n_ranks), dist.group.WORLD, rank, meter, now)
    say(f"peaks of {n_ranks} ranks")
    peaks = measure_peaks(wire, watch, now)
    share_s = (1 - PEAKS_SHARE) * seconds / sum(len(sizes) for _, sizes in CASES.values())
    runs = []
    for name, (make, sizes) in CASES.items():
        say(name)
        for size in sizes:
            watch.begin(f"{name} of size {size}")
            runs.append(
                replace(time_case(wire, meter, make(wire, size), share_s, now), algorithm=name)
            )
    notes = (f"{n_ranks} ranks on {host.available_cores()} cores of this host",)
    return Findings(
        peaks,
        tuple(runs),
        n_ranks,
        "gloo",
        host.this_cpu().model,
        tuple(host.versions().items()),
        notes,
    )


def time_case(
    wire: Wire, meter: Meter, case: KernelCase, budget_s: float, now: Callable[[], float]
) -> Run:
    """One call to warm up, then as many as fit the budget by rank 0's clock; of each the slowest
    rank's time.
    """
    wire.barrier()
    begin = now()
    case.call()
    wire.barrier()
    fitting = torch.tensor(
        [max(LEAST_SAMPLES, min(MOST_SAMPLES, int(budget_s / max(now() - begin, 1e-9))))]
    )
    if wire.n_ranks > 1:
        dist.broadcast(fitting, 0)
    n_samples = int(fitting)
    before = replace(meter)
    own = []
    for _ in range(n_samples):
        wire.barrier()
        begin = now()
        case.call()
        own.append(now() - begin)
    work = case.work
    return Run(
        "",
        case.size,
        float(work.flops),
        float(work.memory_bytes),
        float(work.network_bytes),
        (meter.n_messages - before.n_messages) / n_samples,
        (meter.n_bytes - before.n_bytes) / n_samples,
        (meter.seconds - before.seconds) / n_samples,
        tuple(_slowest(own, wire.n_ranks).tolist()),
    )


# -- peaks -----------------------------------------------------------------------------------------


def measure_peaks(wire: Wire, watch: Watch, now: Callable[[], float]) -> Peaks:
    """The slowest rank's best samples. Every rank calls it, and there are at least two."""
    watch.begin("dgemm")
    a, b, out = torch.ones(3, DGEMM_N, DGEMM_N, dtype=torch.float64)
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
    kernel = max(rates, key=rates.__getitem__)
    trips = {n_bytes: _half_trip_s(wire, watch, n_bytes, now) for n_bytes in MESSAGES}
    best = max(MESSAGES, key=lambda n_bytes: n_bytes / trips[n_bytes])
    return Peaks(flops_per_s, rates[kernel], kernel, best / trips[best], best, min(trips.values()))


def _least_s(wire: Wire, call: Callable[[], object], now: Callable[[], float]) -> float:
    call()
    samples = []
    for _ in range(REPEATS):
        wire.barrier()
        begin = now()
        call()
        samples.append(now() - begin)
    return float(_slowest([min(samples)]))


def _half_trip_s(wire: Wire, watch: Watch, n_bytes: int, now: Callable[[], float]) -> float:
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
    return float(_slowest([min(samples[1:], default=0.0)]))


def _slowest(own: Sequence[float], n_ranks: int = 2) -> Tensor:
    """The largest of all ranks' numbers, one by one."""
    values = torch.tensor(own, dtype=torch.float64)
    if n_ranks > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values

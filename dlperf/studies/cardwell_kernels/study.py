"""Every algorithm at every size, timed on these ranks."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dlperf.core import host
from dlperf.core.rank_program import Watch
from dlperf.models import parallel_algorithms as counts
from dlperf.studies.cardwell_kernels import dense, graphs
from dlperf.studies.cardwell_kernels.dense import share
from dlperf.studies.cardwell_kernels.findings import Findings, Run
from dlperf.studies.cardwell_kernels.peaks import measure_peaks
from dlperf.studies.cardwell_kernels.wire import Meter, ProcessWire
from dlperf.studies.papers.cardwell_parallel import EDGES_PER_VERTEX

MOST_SAMPLES, LEAST_SAMPLES = 30, 3
PEAKS_SHARE = 0.25


@dataclass(frozen=True)
class KernelCase:
    """An algorithm at a size, ready to be called again and again, and Table 2.4's counts of one
    rank.
    """

    size: int
    call: Callable[[], object]
    work: counts.Work


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _summa(wire: ProcessWire, size: int) -> KernelCase:
    grid = dense.make_grid(wire)
    n = _multiple(size, grid.n_panels)
    shapes = [(n // grid.n_rows, n // grid.n_columns)] * 3
    a, b, c = (torch.rand(shape, dtype=torch.float64) for shape in shapes)
    return KernelCase(
        n,
        lambda: dense.summa(grid, a, b, c, 1.0, 0.5),
        counts.summa(n, grid.n_rows, grid.n_columns),
    )


def _dgemv(wire: ProcessWire, size: int) -> KernelCase:
    n = _multiple(size, wire.n_ranks)
    a, x, y = (
        torch.rand(n // wire.n_ranks, n, dtype=torch.float64),
        *(torch.rand(n // wire.n_ranks, dtype=torch.float64) for _ in range(2)),
    )
    return KernelCase(
        n, lambda: dense.dgemv(wire, a, x, y, 1.0, 0.5), counts.dgemv(n, wire.n_ranks)
    )


def _ddot(wire: ProcessWire, size: int) -> KernelCase:
    x, y = (
        torch.rand(len(share(size, wire.rank, wire.n_ranks)), dtype=torch.float64) for _ in range(2)
    )
    return KernelCase(size, lambda: dense.ddot(wire, x, y), counts.ddot(size, wire.n_ranks))


def _fft(wire: ProcessWire, size: int) -> KernelCase:
    n = wire.n_ranks**2
    while n < size:
        n *= 2
    x = torch.rand(n // wire.n_ranks, dtype=torch.complex128)
    factors = dense.twiddles(wire, n)
    return KernelCase(n, lambda: dense.fft(wire, x, factors), counts.fft(n, wire.n_ranks))


def _stencil(wire: ProcessWire, size: int) -> KernelCase:
    n = max(size, wire.n_ranks + 2)
    values = torch.rand(len(share(n - 2, wire.rank, wire.n_ranks)) + 2, n, dtype=torch.float64)
    room = values.clone()
    return KernelCase(
        n, lambda: dense.stencil(wire, values, room, 1), counts.stencil(n, wire.n_ranks)
    )


def _boruvka(wire: ProcessWire, size: int) -> KernelCase:
    mine = share(EDGES_PER_VERTEX * size, wire.rank, wire.n_ranks)
    ends, weights = torch.randint(0, size, (len(mine), 2)), torch.randint(1, 2**20, (len(mine),))
    return KernelCase(
        size,
        lambda: graphs.boruvka(wire, size, ends, weights, mine.start),
        counts.boruvka(size, EDGES_PER_VERTEX * size, wire.n_ranks),
    )


def _dijkstra(wire: ProcessWire, size: int) -> KernelCase:
    lengths = (
        torch.rand(len(share(size, wire.rank, wire.n_ranks)), size, dtype=torch.float64) + 0.01
    )
    return KernelCase(
        size,
        lambda: graphs.dijkstra(wire, lengths, 0, size),
        counts.dijkstra(size, size * size, wire.n_ranks),
    )


CASES: dict[str, tuple[Callable[[ProcessWire, int], KernelCase], tuple[int, ...]]] = {
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
    wire = ProcessWire(range(n_ranks), dist.group.WORLD, rank, meter, now)
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
    wire: ProcessWire, meter: Meter, case: KernelCase, budget_s: float, now: Callable[[], float]
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
    slowest = torch.tensor(own, dtype=torch.float64)
    if wire.n_ranks > 1:
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    work = case.work
    n_messages = (meter.n_messages - before.n_messages) / n_samples
    metered_bytes, communication_s = (
        (meter.n_bytes - before.n_bytes) / n_samples,
        (meter.seconds - before.seconds) / n_samples,
    )
    amounts = (float(work.flops), float(work.memory_bytes), float(work.network_bytes))
    return Run(
        "", case.size, *amounts, n_messages, metered_bytes, communication_s, tuple(slowest.tolist())
    )

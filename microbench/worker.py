"""Measures one thread count in a fresh process and tells its parent, a JSON line a group. Started by the suite alone.

``python -m microbench.worker`` reads a job from stdin. What decides the timing (OMP and malloc settings) is in its
environment before torch is imported.
"""

from __future__ import annotations

import hashlib
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dlperf import host
from dlperf.clock import Clock, Pace, Repeats, Sampler, Samples, involuntary_switches, take_turns
from dlperf.machine import EXACT, PACE, Bandwidth, Cost, Kernel, Machine
from dlperf.trace import Trace, own_operations
from microbench.job import Say, do_job
from microbench.plan import Group, Point, repeats

_CHUNK_POINTS, _CHUNK_BYTES = 16, 2**28
_LONG_CALL_S = 0.005


def environment(threads: int) -> dict[str, str]:
    """Settings for a worker: its threads, and a malloc that keeps what it has, so that no kernel's time contains page faults."""
    big = str(2**40)
    return {
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": big,
        "MALLOC_TOP_PAD_": str(2**26),
    }  # fmt: skip


def has_bfloat16(flags: tuple[str, ...]) -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


def planned_groups(mode: str, flags: tuple[str, ...]) -> list[Group]:
    """The kernels' part of the plan, the most needed first."""
    from microbench import conv, gemm, layers, pointwise

    dtypes = ("float32", *(("bfloat16",) if has_bfloat16(flags) else ()), "float64")
    return [*gemm.groups(mode, dtypes), *pointwise.groups(mode, has_bfloat16(flags)), *layers.groups(mode), *conv.groups(mode, has_bfloat16(flags))]


PATIENCE_S = {"quick": 1.0, "full": 40.0, "thorough": 400.0}
"""How long a worker may wait, in all, for a core that others slow down."""
BUDGET_S = {"quick": 14.0, "full": 275.0, "thorough": 1700.0}
"""How long a worker's plan may take, what a target's exact operations take aside: on a slow machine it measures fewer points, not for longer."""
_DEAR = {"conv": 3.0, "conv_backward": 4.0, "gemm": 1.5, "bmm": 1.5, "attention": 3.0, "recurrent": 4.0}
"""How much longer than elementwise kernels those of a family take to measure, for sharing out the time."""
SETTLE_S = {"quick": 0.2, "full": 1.0, "thorough": 2.0}
"""How long a worker looks at the core's pace before it measures."""


def _weight(group: Group) -> float:
    return sum(_DEAR.get(point.family, 1.0) for point in group.points)


def settled_pace(mode: str, best_s: float = math.inf) -> Pace:
    """The core's pace, looked at for some time; `best_s` is what an earlier process found."""
    pace = Pace(best_s=best_s, patience_s=PATIENCE_S[mode])
    pace.settle(SETTLE_S[mode])
    return pace


SYSTEM_GROUPS = ("framework", "memory", "threads", "stream", "ceilings", "loader", "loop", "ddp")


def trace_group(trace: Trace, mode: str) -> Group:
    """The distinct operations of a trace's step, one by one."""
    distinct = {op.signature: op for op in trace.ops}
    # The digest makes a target whose code has changed another group, to be measured again.
    digest = hashlib.sha256("\n".join(sorted(distinct)).encode()).hexdigest()[:8]
    return Group(f"{own_operations(trace)} ops {digest})", tuple(Point(EXACT, op) for op in distinct.values()), repeats(mode))


@dataclass
class Timed:
    """A group's kernels, what could not be called on its own, how many kernels have no undisturbed sample, how many points there was no time for,
    and, of each kernel, the median and the mean of all its raw samples in seconds, disturbed ones included."""

    kernels: list[Kernel] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    n_unsteady: int = 0
    n_left_out: int = 0
    usual_s: list[float] = field(default_factory=list)
    mean_s: list[float] = field(default_factory=list)


def time_group(group: Group, threads: int, progress: Callable[[int], None], clock: Clock = Clock(), allowance_s: float = math.inf) -> Timed:
    """Time the group's kernels, in about `allowance_s` at most.

    Every kernel is sampled in two passes, some time apart and in other memory: what a neighbour or the place of the
    operands in the caches does to one pass, it seldom does to both. Where time is short, the second pass is cut first.
    """
    from microbench.replay import Unplayable, build

    taken: dict[int, list[tuple[Samples, bool]]] = {}  # and whether they are undisturbed; a sampler would keep its operands alive
    everything: dict[int, list[float]] = {}
    found = Timed()
    begin = clock.now()
    for number, n_samples in enumerate(_passes(group.repeats.n_samples)):
        order = list(taken) if number else list(range(len(group.points)))
        random.Random(number).shuffle(order)  # any part of a rank covers its space
        order.sort(key=lambda place: group.points[place].rank)
        for chunk in _chunks(group.points, order):
            if taken and clock.now() - begin > allowance_s:
                break
            running: list[tuple[int, Sampler]] = []
            for place in chunk:
                try:
                    call = build(group.points[place].op)
                except (Unplayable, MemoryError) as error:
                    if number == 0:
                        found.refused.append(str(error))
                        progress(1)
                    continue
                running.append((place, _sampler(call, replace(group.repeats, n_samples=n_samples), clock)))
            take_turns([sampler for _, sampler in running])
            for place, sampler in running:
                taken.setdefault(place, []).append((sampler.result(), sampler.n_clean > 0))
                everything.setdefault(place, []).extend(sampler.everything)
                if number == 0:
                    progress(1)
    for place, parts in sorted(taken.items()):
        steady = [samples for samples, clean in parts if clean]
        kept = steady or [samples for samples, _ in parts]
        samples = Samples(tuple(value for part in kept for value in part.values), sum(part.n_disturbed for part in kept))
        point = group.points[place]
        found.kernels.append(Kernel(point.op, point.family, threads, samples))
        found.usual_s.append(statistics.median(everything[place]))
        found.mean_s.append(statistics.fmean(everything[place]))
        found.n_unsteady += not steady
    found.n_left_out = len(group.points) - len(found.kernels) - len(found.refused)
    return found


def _passes(n_samples: int) -> tuple[int, ...]:
    return (n_samples - n_samples // 2, n_samples // 2) if n_samples > 1 else (n_samples,)


def _sampler(call: Callable[[], object], wanted: Repeats, clock: Clock) -> Sampler:
    begin = clock.now()
    call()
    if clock.now() - begin < _LONG_CALL_S:
        return Sampler(call, wanted, clock)
    return Sampler(call, Repeats(0.0, 1 if wanted.n_samples < 5 else 2, warmup=0), clock)


def _chunks(points: tuple[Point, ...], order: list[int]) -> Iterator[list[int]]:
    """Places of points that are measured in turn: few enough, and small enough, to be in memory together."""
    from microbench.replay import n_bytes

    chunk: list[int] = []
    size = 0
    for place in order:
        grown = n_bytes(points[place].op)
        if chunk and (len(chunk) >= _CHUNK_POINTS or size + grown > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(place)
        size += grown
    if chunk:
        yield chunk


def run(job: dict[str, Any], say: Say) -> None:
    """Measure the groups that the job names; `say` gets progress and, a group at a time, results."""
    import torch

    from microbench import ceilings, ddp, framework, loader, loop, memory, stream, threads

    n_threads, mode = job["threads"], job["mode"]
    torch.set_num_threads(n_threads)
    torch.manual_seed(0)
    cpu = host.this_cpu()
    pace = settled_pace(mode, job["pace_s"])
    clock = pace.clock()
    system: dict[str, Callable[[], tuple[list[Bandwidth], list[Cost]]]] = {
        "framework": lambda: ([], framework.measure(n_threads, mode, clock)),
        "memory": lambda: ([], memory.measure(n_threads, mode, clock)),
        "threads": lambda: ([], threads.measure(n_threads, mode, clock)),
        "stream": lambda: (stream.measure(n_threads, mode, cpu.caches_bytes[2], clock), stream.measure_retention(n_threads, mode, cpu.caches_bytes, clock)),
        "ceilings": lambda: ceilings.measure(n_threads, mode, cpu.caches_bytes, clock),
        "loop": lambda: ([], loop.measure(n_threads, mode, clock)),
        "ddp": lambda: ([], ddp.measure(n_threads, mode, clock)),
    }
    groups = {group.name: group for group in planned_groups(mode, cpu.flags)}
    exact: set[str] = set()
    for path in job["traces"]:
        group = trace_group(Trace.load(Path(path)), mode)
        groups[group.name] = group
        exact.add(group.name)

    def progress(n_points: int) -> None:
        say({"progress": n_points})

    begun = time.perf_counter()
    for place, name in enumerate(job["groups"]):
        timed = Timed()
        bandwidths: list[Bandwidth] = []
        costs: list[Cost] = []
        switches, begin = involuntary_switches(), time.perf_counter()
        if name == "loader":
            costs, timed.refused = loader.measure(n_threads, mode, clock)
        elif name in system:
            bandwidths, costs = system[name]()
        else:
            ahead = [_weight(groups[other]) for other in job["groups"][place:] if other in groups and other not in exact]
            left_s = max(0.0, BUDGET_S[mode] - (time.perf_counter() - begun))
            allowance_s = math.inf if name in exact else left_s * ahead[0] / sum(ahead)
            timed = time_group(groups[name], n_threads, progress, clock, allowance_s)
        switches, seconds = involuntary_switches() - switches, time.perf_counter() - begin
        costs.append(Cost(PACE, n_threads, Samples((pace.best_s,))))
        footprints = tuple(memory.measure_footprints()) if name == "memory" and mode != "quick" else ()  # it takes some 5 s
        part = Machine(cpu, kernels=tuple(timed.kernels), bandwidths=tuple(bandwidths), costs=tuple(costs), footprints=footprints)
        say(
            {"group": name, "part": part.to_json(), "switches": switches, "seconds": seconds, "refused": timed.refused, "unsteady": timed.n_unsteady,
             "left_out": timed.n_left_out, "usual_s": timed.usual_s, "mean_s": timed.mean_s}
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(do_job(run))

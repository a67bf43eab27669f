"""Measures one thread count in a fresh process and tells its parent, a JSON line a group. Started by the suite alone.

``python -m microbench.worker`` reads a job from stdin. What decides the timing (OMP and malloc settings) is in its
environment before torch is imported.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dlperf import host
from dlperf.clock import Clock, Repeats, Sampler, involuntary_switches
from dlperf.machine import Bandwidth, Cost, Kernel, Machine
from dlperf.trace import Trace
from microbench.plan import Group, Point, repeats

_CHUNK_POINTS, _CHUNK_BYTES = 16, 2**28
_LONG_CALL_S = 0.02


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
    return [*gemm.groups(mode, dtypes), *pointwise.groups(mode, has_bfloat16(flags)), *layers.groups(mode), *conv.groups(mode)]


SYSTEM_GROUPS = ("framework", "memory", "threads", "stream")


def trace_group(trace: Trace, mode: str) -> Group:
    """The distinct operations of a trace's step, one by one."""
    distinct = {op.signature: op for op in trace.ops}
    step = "forward pass" if trace.inference else "step"
    # The digest makes a target whose code has changed another group, to be measured again.
    digest = hashlib.sha256("\n".join(sorted(distinct)).encode()).hexdigest()[:8]
    return Group(f"for {trace.target}@{trace.batch_size} ({step}, ops {digest})", tuple(Point("exact", op) for op in distinct.values()), repeats(mode))


def time_group(group: Group, threads: int, progress: Callable[[int], None], clock: Clock = Clock()) -> tuple[list[Kernel], list[str]]:
    """The group's kernels, and what could not be called on its own."""
    from microbench.replay import Unplayable, build

    kernels, refused = [], []
    for chunk in _chunks(group.points):
        running: list[tuple[Point, Sampler, int]] = []
        for point in chunk:
            try:
                call = build(point.op)
            except (Unplayable, MemoryError) as error:
                refused.append(str(error))
                progress(1)
                continue
            running.append((point, *_sampler(call, group.repeats, clock)))
        for turn in range(group.repeats.n_samples):
            for _, sampler, n_samples in running:
                if turn < n_samples:
                    sampler.take()
        for point, sampler, _ in running:
            kernels.append(Kernel(point.op, point.family, threads, sampler.result()))
            progress(1)
    return kernels, refused


def _sampler(call: Callable[[], object], wanted: Repeats, clock: Clock) -> tuple[Sampler, int]:
    begin = clock.now()
    call()
    if clock.now() - begin < _LONG_CALL_S:
        return Sampler(call, wanted, clock), wanted.n_samples
    return Sampler(call, Repeats(0.0, 3, warmup=0), clock), min(3, wanted.n_samples)


def _chunks(points: tuple[Point, ...]) -> Iterator[list[Point]]:
    from microbench.replay import n_bytes

    chunk: list[Point] = []
    size = 0
    for point in points:
        grown = n_bytes(point.op)
        if chunk and (len(chunk) >= _CHUNK_POINTS or size + grown > _CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(point)
        size += grown
    if chunk:
        yield chunk


def run(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """Measure the groups that the job names; `say` gets progress and, a group at a time, results."""
    import torch

    from microbench import framework, memory, stream, threads

    n_threads, mode = job["threads"], job["mode"]
    torch.set_num_threads(n_threads)
    torch.manual_seed(0)
    cpu = host.this_cpu()
    system: dict[str, Callable[[], tuple[list[Bandwidth], list[Cost]]]] = {
        "framework": lambda: ([], framework.measure(n_threads, mode)),
        "memory": lambda: ([], memory.measure(n_threads, mode)),
        "threads": lambda: ([], threads.measure(n_threads, mode)),
        "stream": lambda: (stream.measure(n_threads, mode, cpu.caches_bytes[2]), []),
    }
    groups = {group.name: group for group in planned_groups(mode, cpu.flags)}
    for path in job["traces"]:
        group = trace_group(Trace.load(Path(path)), mode)
        groups[group.name] = group

    def progress(n_points: int) -> None:
        say({"progress": n_points})

    for name in job["groups"]:
        refused: list[str] = []
        kernels: list[Kernel] = []
        bandwidths: list[Bandwidth] = []
        costs: list[Cost] = []
        switches, begin = involuntary_switches(), time.perf_counter()
        if name in system:
            bandwidths, costs = system[name]()
        else:
            kernels, refused = time_group(groups[name], n_threads, progress)
        switches, seconds = involuntary_switches() - switches, time.perf_counter() - begin
        footprints = tuple(memory.measure_footprints()) if name == "memory" and mode != "quick" else ()  # it takes some 5 s
        part = Machine(cpu, kernels=tuple(kernels), bandwidths=tuple(bandwidths), costs=tuple(costs), footprints=footprints)
        say({"group": name, "part": part.to_json(), "switches": switches, "seconds": seconds, "refused": refused})


def main() -> int:
    """Read the job from stdin, write JSON lines to stdout."""
    job = json.loads(sys.stdin.readline())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints goes to stderr, not between our lines

    def say(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        run(job, say)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

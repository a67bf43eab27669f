"""Measures one thread count in a fresh process and tells its parent, a JSON line a group. Started
by the suite alone.

``python -m dlperf.microbench.worker`` reads a job from stdin. What decides the timing (OMP and
malloc settings) is in its environment before torch is imported.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from dlperf.core import host
from dlperf.core.child_process import read_job
from dlperf.core.clock import Clock, CoreSpeed, Samples, involuntary_switches
from dlperf.core.costs import CORE_SPEED, SHARED_CORE, Cost, CostKey
from dlperf.core.machine import EXACT, Bandwidth, Machine
from dlperf.core.state import Reading
from dlperf.core.state_probe import ParallelRegion, StateProbe
from dlperf.core.trace import Trace
from dlperf.microbench.job import Say, do_job
from dlperf.microbench.plan import Group, Point, repeats
from dlperf.microbench.timing import Timed, Timing


def environment(threads: int) -> dict[str, str]:
    """Settings for a worker: its threads, and a malloc that keeps what it has, so that no kernel's
    time contains page faults.

    oneDNN's cache of primitives has room for as many as a network has: every pass calls all
    convolutions and has to make them anew, and beside a thousand others a convolution took 5 %
    longer than in a process that has few, a recurrent layer 10 to 14 %.
    """
    big = str(2**40)
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "MALLOC_MMAP_THRESHOLD_": str(2**32),
        "MALLOC_TRIM_THRESHOLD_": big,
        "MALLOC_TOP_PAD_": str(2**26),
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    }


def has_bfloat16(flags: tuple[str, ...]) -> bool:
    """Whether the processor multiplies bfloat16 itself."""
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & set(flags))


@cache
def planned_groups(mode: str, flags: tuple[str, ...]) -> tuple[Group, ...]:
    """The kernels' part of the plan, the most needed first."""
    from dlperf.microbench import conv, gemm, layers, pointwise

    dtypes = ("float32", *(("bfloat16",) if has_bfloat16(flags) else ()), "float64")
    return (
        *gemm.groups(mode, dtypes),
        *pointwise.groups(mode, has_bfloat16(flags)),
        *layers.groups(mode),
        *conv.groups(mode, has_bfloat16(flags)),
    )


_TIMES = 6


def further_points(mode: str, flags: tuple[str, ...]) -> dict[str, tuple[Point, ...]]:
    """More points, by group of those families whose curves have many sides, from which a
    calibration takes some: those where the curves err most.
    """
    from dlperf.microbench import conv, gemm

    planned = {
        group.name: {point.op.signature for point in group.points}
        for group in planned_groups(mode, flags)
    }
    dtypes = ("float32", *(("bfloat16",) if has_bfloat16(flags) else ()))
    longer = [*gemm.groups(mode, dtypes, _TIMES), *conv.groups(mode, has_bfloat16(flags), _TIMES)]
    found = {
        group.name: tuple(
            point for point in group.points if point.op.signature not in planned[group.name]
        )
        for group in longer
    }
    return {name: points for name, points in found.items() if points}


FURTHER = {"quick": 0, "full": 5000, "thorough": 6000}
"""The most points that a calibration takes where its curves err most."""
_PASSES = 2
"""Passes over all kernels before there are further points (docs/development/decisions.md)."""
_FURTHER_FRAC = 0.8
"""Part of the time left that these may take, each as long as a planned one so far."""
BACK_OFF_S = {"quick": 0.5, "full": 20.0, "thorough": 200.0}
"""Total back-off of a worker on a slow core."""
BUDGET_S = {"quick": 18.0, "full": 205.0, "thorough": 1700.0}
"""How long a worker's plan may take, what a target's exact operations take aside: on a slow machine
it measures fewer points, not for longer.
"""
SHARES = {
    "framework": 0.25,
    "memory": 0.04,
    "threads": 0.02,
    "stream": 0.04,
    "ceilings": 0.04,
    "loader": 0.06,
    "loop": 0.015,
    "ddp": 0.015,
}
"""Part of the budget that may go into the repeated samples of a group of costs, so that none takes
the time of another.
"""
LEAST_FRAC = {"quick": 0.2, "full": 0.3, "thorough": 0.3}
"""Part of the budget that the least designs of all families, which come first, may take together.
"""
_DEAR = {
    "conv": 3.0,
    "conv_backward": 3.0,
    "gemm": 1.5,
    "bmm": 1.5,
    "attention": 3.0,
    "recurrent": 4.0,
}
"""How much longer than elementwise kernels those of a family take to measure, for sharing out the
time.
"""
SETTLE_S = {"quick": 0.2, "full": 1.0, "thorough": 2.0}
"""How long a worker samples the core speed before it measures."""


def _weight(points: Iterable[Point]) -> float:
    return sum(_DEAR.get(point.family, 1.0) for point in points)


_FIRST_FRAC = 0.95
"""Part of the time left that the first samples of all kernels may take; where time is short, later
ones are cut first.
"""


_HEAP_BYTES, _HEAP_FRAC = 2**29, 1 / 16
"""How much of the heap a worker writes to before it measures, and at most which part of the memory.
"""
_READ_EVERY_S = {"quick": 1.0, "full": 1.5, "thorough": 5.0}
_ROUNDS, _END_ROUNDS = 3, 9
"""Readings that are taken at a time, and at the ends, where there are no others around."""


class States:
    """Readings of the machine's state between samples, `n_before` of them in an earlier process."""

    def __init__(
        self, probe: StateProbe, now: Callable[[], float], n_before: int, every_s: float
    ) -> None:
        self._probe, self._now, self._every_s = probe, now, every_s
        self._taken: list[Reading] = []
        self._taken_s = -math.inf
        self._n_before, self._n_sent = n_before, 0

    def current(self) -> int:
        """The number of a reading that is not old; some are taken where the last one is."""
        if self._now() - self._taken_s >= self._every_s:
            self._take(_ROUNDS if self._taken else _END_ROUNDS)
        return self._n_before + len(self._taken) - 1

    def take_last(self) -> None:
        """Readings after the last sample."""
        self._take(_END_ROUNDS)

    def _take(self, n_rounds: int) -> None:
        self._taken += self._probe.rounds(n_rounds)
        self._taken_s = self._now()

    def unsent(self) -> tuple[Reading, ...]:
        """The readings since the last call."""
        begin, self._n_sent = self._n_sent, len(self._taken)
        return tuple(self._taken[begin:])


def settled_core_speed(mode: str, best_s: float = math.inf) -> CoreSpeed:
    """A core speed with some samples; `best_s` is that of an earlier process."""
    speed = CoreSpeed(best_s=best_s, back_off_s=BACK_OFF_S[mode])
    speed.settle(SETTLE_S[mode])
    return speed


def touch_heap(memory_bytes: int) -> None:
    """Write to pages that malloc keeps then.

    A freed result is too short for the next of its size, for which an aligned block is requested;
    with something small between them, each call's result lies further up the heap, on new pages.
    """
    import torch

    torch.empty(min(_HEAP_BYTES, int(_HEAP_FRAC * memory_bytes)), dtype=torch.uint8).fill_(1)


AGAIN = {"quick": 0, "full": 3, "thorough": 8}
"""Passes over the kernels in which costs that depend on the shared cache are measured again."""
SYSTEM_GROUPS = tuple(SHARES)


def trace_group(trace: Trace, mode: str) -> Group:
    """The distinct operations of a trace's step, one by one."""
    distinct = {op.signature: op for op in trace.ops}
    # The digest makes a target whose code has changed another group, to be measured again.
    digest = hashlib.sha256("\n".join(sorted(distinct)).encode()).hexdigest()[:8]
    what = "forward pass" if trace.inference else "step"
    return Group(
        f"for {trace.target}@{trace.batch_size} ({what}, ops {digest})",
        tuple(Point(EXACT, op) for op in distinct.values()),
        repeats(mode),
    )


def run(job: dict[str, Any], say: Say, speed: CoreSpeed | None = None) -> None:
    """Measure the groups of a job; `say` gets progress and the result of each group.

    Order: the smallest designs of all families; the groups of costs, each within its share of the
    time; the other kernels. So every family covers its range whenever time runs out. Then all
    kernels are sampled in further passes while they lack samples and time is left, since
    interference rarely lasts for two passes; so are costs of cold caches. A group of kernels
    reports after its first samples and at the end. A job that `asks` receives further points as a
    line on stdin, indices by group. Points in the job's `measured`, indices by group, are left out.
    """
    import torch
    import torch._dynamo  # the first optimizer does, which takes seconds that are no cost of a step

    from dlperf.microbench import (
        ceilings,
        cold_start,
        ddp,
        framework,
        loader,
        loop,
        memory,
        stream,
        threads,
    )

    n_threads, mode = job["threads"], job["mode"]
    torch.set_num_threads(n_threads)
    torch.manual_seed(0)
    cpu = host.this_cpu()
    touch_heap(cpu.memory_bytes)
    speed = speed or settled_core_speed(mode, job["core_speed_s"])
    clock = speed.clock()
    probe = StateProbe(cpu, is_slow=speed.slow)
    states = States(probe, speed.now, job["n_readings"], _READ_EVERY_S[mode])
    region = ParallelRegion(speed.now) if n_threads > 1 else None
    budget = Clock(speed.now).within(BUDGET_S[mode])
    least = budget.part(LEAST_FRAC[mode])

    def data_residency(own: Clock) -> list[Cost]:
        return stream.measure_residency(n_threads, mode, cpu.caches_bytes, own)

    def sweeps(own: Clock) -> tuple[list[Bandwidth], list[Cost]]:
        bandwidths = stream.measure(n_threads, mode, cpu.caches_bytes, own.part(0.8))
        return bandwidths, data_residency(own)

    # What each group of costs measures: bandwidths, costs, and what was refused.
    system: dict[str, Callable[[Clock], tuple[list[Bandwidth], list[Cost], list[str]]]] = {
        "framework": lambda own: ([], framework.measure(n_threads, mode, own), []),
        "memory": lambda own: ([], memory.measure(n_threads, mode, own), []),
        "threads": lambda own: ([], threads.measure(n_threads, mode, own), []),
        "stream": lambda own: (*sweeps(own), []),
        "ceilings": lambda own: (*ceilings.measure(n_threads, mode, cpu.caches_bytes, own), []),
        "loader": lambda own: ([], *loader.measure(n_threads, mode, own)),
        "loop": lambda own: ([], loop.measure(n_threads, mode, own), []),
        "ddp": lambda own: ([], ddp.measure(n_threads, mode, own), []),
    }
    again: dict[str, Callable[[Clock], Mapping[CostKey, Samples]]] = {
        "framework": lambda own: cold_start.measure(mode, own),
        "stream": lambda own: {cost.key: cost.samples for cost in data_residency(own)},
    }
    exact = {
        group.name: group
        for group in (trace_group(Trace.from_json(trace), mode) for trace in job["traces"])
    }
    groups = {group.name: group for group in planned_groups(mode, cpu.flags)} | exact
    timings = {
        name: Timing(
            _without(groups[name], job["measured"].get(name, ())),
            n_threads,
            clock,
            states.current,
            region,
        )
        for name in job["groups"]
        if name in groups
    }
    spent = {name: {"switches": 0.0, "seconds": 0.0} for name in job["groups"]}
    around: dict[str, tuple[int, int]] = {}
    system_costs: dict[str, list[Cost]] = {}

    @contextmanager
    def measuring(name: str, number: int = 1) -> Iterator[Clock]:
        """Report that a group's sample begins, and note the time and the switches that it takes,
        and the machine's readings around it. Its clock has the group's share of the time.
        """
        say({"now": f"{name}, sample {number}" if number > 1 else name})
        before = states.current()
        switches, begin = involuntary_switches(), speed.now()
        yield clock.within(SHARES.get(name, 0.0) * BUDGET_S[mode])
        spent[name]["switches"] += involuntary_switches() - switches
        spent[name]["seconds"] += speed.now() - begin
        around[name] = before, states.current()

    def tell(
        name: str,
        timed: Timed = Timed(),
        bandwidths: Sequence[Bandwidth] = (),
        costs: Sequence[Cost] = (),
        sampled_once: bool = False,
    ) -> None:
        footprints = (
            tuple(memory.measure_footprints()) if name == "memory" and mode != "quick" else ()
        )  # it takes some 5 s
        found = {CostKey(CORE_SPEED): speed.best_s}
        found |= {CostKey(SHARED_CORE, name): one for name, one in probe.shared_core().items()}
        costs = (*costs, *(Cost(key, n_threads, Samples((one,))) for key, one in found.items()))
        part = Machine(
            cpu,
            kernels=timed.kernels,
            bandwidths=tuple(bandwidths),
            costs=costs,
            footprints=footprints,
            readings=states.unsent(),
        )
        say(
            {
                "group": name,
                "part": part.to_json(),
                **spent[name],
                "refused": timed.refused,
                "unsteady": timed.n_unsteady,
                "left_out": timed.n_left_out,
                "sampled_once": sampled_once,
            }
        )

    def take(
        ahead: dict[str, list[int]],
        time_left: Clock,
        number: int = 1,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Iterator[str]:
        """A sample of each of these points of groups; the groups share the time left by how long
        their kernels take. The names of groups, as they are done.
        """
        weights = {
            name: _weight(timings[name].group.points[index] for index in indices)
            for name, indices in ahead.items()
            if name not in exact
        }
        for name, indices in ahead.items():
            of_all = math.fsum(weights.values())
            weight = weights.pop(name, 0.0)
            with measuring(name, number):
                allowance_s = time_left.part(weight / of_all).left_s if of_all else 0.0
                timings[name].take(indices, progress, math.inf if name in exact else allowance_s)
            yield name

    def first_samples(most_rank: float, time_left: Clock) -> None:
        ahead = {
            name: indices
            for name, timing in timings.items()
            if (indices := timing.unsampled(0 if name in exact else most_rank))
        }
        for name in take(ahead, time_left, progress=lambda n_points: say({"progress": n_points})):
            tell(name, timings[name].result(), sampled_once=True)

    def lacking() -> dict[str, list[int]]:
        """Points that want samples for which there is time, by group."""
        return {
            name: indices
            for name, timing in timings.items()
            if (indices := timing.lacking) and (name in exact or budget.left_s > 0)
        }

    def affordable() -> int:
        """Points beyond the planned ones that fit the time left, in as many passes."""
        seconds = math.fsum(spent[name]["seconds"] for name in timings)
        n_points = sum(len(timing.group.points) for timing in timings.values())
        n_affordable = _FURTHER_FRAC * budget.left_s * n_points / seconds if seconds > 0 else 0
        return min(FURTHER[mode], int(n_affordable))

    def ask_for_further() -> None:
        """Add the further points that the parent chooses, as many as there is time for."""
        if n_further := affordable():
            say({"wants": n_further})
            more = further_points(mode, cpu.flags)
            for name, indices in read_job().items():
                timings[name].extend([more[name][index] for index in indices])

    first_samples(0, least)
    for name in job["groups"]:
        if name in timings:
            continue
        with measuring(name) as own:
            bandwidths, costs, refused = system[name](own)
        bandwidths = [replace(one, readings=around[name]) for one in bandwidths]
        costs = [replace(one, readings=around[name]) for one in costs]
        system_costs[name] = costs
        tell(name, Timed(refused=tuple(refused)), bandwidths, costs)
    first_samples(math.inf, budget.part(_FIRST_FRAC))
    number, asks = 1, job["asks"]
    while (ahead := lacking()) or asks:
        if asks and (number >= _PASSES or not ahead):
            asks = False
            ask_for_further()
            continue
        number += 1
        if number % 2 == 0:
            ahead = dict(reversed(ahead.items()))  # time runs out on others each time
        for _ in take(ahead, budget, number):
            pass
        for name in sorted(again.keys() & system_costs):
            if number <= 1 + AGAIN[mode] and budget.left_s > 0:
                with measuring(name, number) as own:
                    found = again[name](own)
                system_costs[name] = cold_start.joined(system_costs[name], found, around[name])
    states.take_last()
    for name in again.keys() & system_costs:
        tell(name, costs=system_costs[name])
    slowed = [pair for timing in timings.values() for pair in timing.slowed]
    excesses = [one for timing in timings.values() for one in timing.excesses(slowed)]
    responses = [pair for timing in timings.values() for pair in timing.responses]
    for name, timing in timings.items():
        tell(name, timing.result(slowed, excesses, responses))


def _without(group: Group, indices: Sequence[int]) -> Group:
    """The group without the points of these indices."""
    points = (point for index, point in enumerate(group.points) if index not in indices)
    return replace(group, points=tuple(points))


if __name__ == "__main__":
    sys.exit(do_job(run))

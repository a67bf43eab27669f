"""What ranks that share a computer cost one another while they compute: one of them alone and all
at once, in turns, for every kind of work.

The measuring is that of :mod:`dlperf.microbench.co_run`, done by the ranks themselves. Who has
nothing to do waits in a barrier, which blocks in the system and takes no processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from dlperf.core.clock import Clock, Samples
from dlperf.core.co_run import CoRun
from dlperf.core.machine import Cpu
from dlperf.microbench import kinds
from dlperf.microbench.co_run import batch_of, resources, time_window, warm_s, window_s_of
from dlperf.microbench.network.team import Team

WINDOW_S = {"quick": 0.05, "full": 0.1}
LEAST_ROUNDS, MOST_ROUNDS = {"quick": 3, "full": 6}, 15
_LAST_CACHES = 2
"""Arrays in DRAM are so many times as large as the last cache: each rank makes its own, and has to
have room for them.
"""


def sharing_ranks(systems: list[str]) -> tuple[int, ...]:
    """The ranks of the computer that has the most of them, the first of several; `systems` names
    the computer of each rank.

    >>> sharing_ranks(["a", "b", "b", "a"])
    (0, 3)
    """
    most = max(systems, key=systems.count)
    return tuple(rank for rank, system in enumerate(systems) if system == most)


@dataclass
class _Work:
    """A kind of work made ready: its call, the windows for one rank alone and for all at once, and
    what was found in seconds a call.
    """

    name: str
    call: Callable[[], object]
    batch: int
    alone_s: float
    together_s: float
    alone: list[float] = field(default_factory=list)
    together: list[float] = field(default_factory=list)

    def seconds_a_call(self, window_s: float, clock: Clock) -> float:
        window = time_window(self.call, self.batch, window_s, clock)
        return window.seconds / window.n_calls


def measure_co_runs(
    team: Team,
    mode: str,
    budget: Clock,
    cpu: Cpu,
    make: Callable[[str, Cpu, int, int], Callable[[], object]] = kinds.make,
    clock: Clock | None = None,
) -> list[CoRun]:
    """Every kind of work that the processors of all ranks have, one thread a rank. Of several
    computers all ranks work at once, and those of the fullest count.

    Each of these is alone in its turn. The kinds take turns, too, so that an
    interference interval does not disturb one kind alone. Rank 0 decides how many rounds fit
    `budget`; all ranks get what was found.
    """
    ranks = sharing_ranks([place.system or place.host for place in team.places])
    lists = team.gather(resources(cpu))
    works = [
        _prepare(team, name, len(ranks), mode, cpu, make)
        for name in lists[0]
        if all(name in other for other in lists)
    ]
    n_rounds = 0
    while team.decide(
        team.everyone,
        int((budget.left_s > 0 and n_rounds < MOST_ROUNDS) or n_rounds < LEAST_ROUNDS[mode]),
    ):
        for work in works:
            team.watch.begin(f"{work.name} by {len(ranks)} ranks of one computer at once")
            _measure_once(team, work, ranks, ranks[n_rounds % len(ranks)], clock or Clock(team.now))
        n_rounds += 1
    return [
        CoRun(work.name, len(ranks), Samples(tuple(work.together)), Samples(tuple(work.alone)))
        for work in works
    ]


def _prepare(
    team: Team,
    name: str,
    n: int,
    mode: str,
    cpu: Cpu,
    make: Callable[[str, Cpu, int, int], Callable[[], object]],
) -> _Work:
    team.watch.begin(f"making {name} ready for {n} ranks of one computer")
    call = make(name, cpu, n, _LAST_CACHES)
    found = team.collect(team.everyone, [warm_s(call, team.now), float(cpu.n_cores)])
    call_s, n_cores = (
        max(seconds for seconds, _ in found),
        int(min(cores for _, cores in found)),
    )  # windows are the same for all ranks
    alone_s, together_s = (
        window_s_of(call_s, WINDOW_S[mode], workers, n_cores) for workers in (1, n)
    )
    return _Work(name, call, batch_of(call_s), alone_s, together_s)


def _measure_once(
    team: Team, work: _Work, ranks: tuple[int, ...], single: int, clock: Clock
) -> None:
    team.wait()
    own_s = work.seconds_a_call(work.alone_s, clock) if team.rank == single else 0.0
    team.wait()
    beside_s = work.seconds_a_call(work.together_s, clock)
    times = team.collect(team.everyone, [own_s, beside_s])
    work.alone.append(times[single][0])
    work.together.append(fmean(times[rank][1] for rank in ranks))

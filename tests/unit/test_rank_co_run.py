"""What ranks of one computer cost one another, measured by a made-up team whose clock passes in
calls alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from dlperf.core.clock import Clock, Samples
from dlperf.core.cluster import Cluster, Rank
from dlperf.core.co_run import CoRun
from dlperf.core.machine import Cpu
from dlperf.microbench.network import suite
from dlperf.microbench.network.co_run import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    measure_co_runs,
    sharing_ranks,
)

CPU = Cpu("Made-up CPU", 2, (2**15, 0, 0))
WORKS = ["compute", "L1", "DRAM", "overhead", "page-faults"]
ALONE_S, BESIDE_S, OTHER_BESIDE_S = 1e-3, 1.5e-3, 2.5e-3


class Steps:
    """Stands for the watch."""

    def __init__(self) -> None:
        self.steps: list[str] = []

    def begin(self, step: str) -> None:
        self.steps.append(step)


class Team:
    """Rank 0 of two on one computer (and one elsewhere): a call takes 1 ms alone; beside the other,
    1.5 ms here and 2.5 ms there.
    """

    def __init__(self, other_works: list[str] | None = None, backend: str = "gloo") -> None:
        self.rank, self.n_ranks, self.everyone, self.watch, self.backend = (
            0,
            3,
            None,
            Steps(),
            backend,
        )
        self.places = (Rank("a", 0, "one"), Rank("b", 0, "two"), Rank("c", 0, "one"))
        self.other_works, self.time, self.n_calls, self.n_waits, self.calls_alone = (
            other_works,
            0.0,
            0,
            0,
            [],
        )  # type: ignore[var-annotated]

    def now(self) -> float:
        return self.time

    def call(self) -> None:
        self.n_calls += 1
        self.time += BESIDE_S if self.n_waits and self.n_waits % 2 == 0 else ALONE_S

    def wait(self) -> None:
        if self.n_waits % 2:
            self.calls_alone.append(self.n_calls)
        self.n_calls = 0
        self.n_waits += 1

    def decide(self, group: object, value: int) -> int:
        return value

    def gather(self, own: list[str]) -> list[Any]:
        return [own, self.other_works or own, own]

    def collect(self, group: object, own: list[float]) -> list[list[float]]:
        other = [ALONE_S, OTHER_BESIDE_S] if self.n_waits else own
        return [own, [9.0, 9.0] if self.n_waits else own, other]


def make(team: Team) -> Callable[[str, Cpu, int, int], Callable[[], object]]:
    return lambda *_: team.call


def measured(team: Team, budget_s: float = 0.0) -> list[CoRun]:
    return measure_co_runs(
        team, "quick", Clock(team.now).within(budget_s), CPU, make(team), Clock(team.now, lambda: 0)
    )  # type: ignore[arg-type]


def test_the_ranks_of_the_fullest_computer_count() -> None:
    team = Team()
    found = measured(team)
    assert [(co_run.work, co_run.workers) for co_run in found] == [
        (work, 2) for work in WORKS
    ]  # the third rank has a computer of its own
    for co_run in found:
        assert co_run.alone.values == pytest.approx((ALONE_S,) * LEAST_ROUNDS["quick"])
        assert co_run.samples.values == pytest.approx(
            ((BESIDE_S + OTHER_BESIDE_S) / 2,) * LEAST_ROUNDS["quick"]
        )
        assert co_run.slowdown == pytest.approx(2.0)
    assert sharing_ranks(["a", "b", "b"]) == (1, 2)
    assert (
        "DRAM by 2 ranks of one computer at once" in team.watch.steps
    )  # what a rank that hangs is found in


def test_ranks_are_alone_in_turns() -> None:
    team = Team()
    measured(team)
    here = [
        n_calls > 0 for n_calls in team.calls_alone
    ]  # five kinds of work a round: rank 0's turn, rank 2's, rank 0's
    assert here == [True] * len(WORKS) + [False] * len(WORKS) + [True] * len(WORKS)


def test_rounds_fill_the_budget() -> None:
    assert {len(co_run.samples.values) for co_run in measured(Team(), 1e6)} == {MOST_ROUNDS}
    # five kinds, each 0.05 s beside and in every other round 0.05 s alone: 0.5 s, 0.25 s, 0.5 s,
    # ...; the fifth round begins after 1.5 s
    assert {len(co_run.samples.values) for co_run in measured(Team(), 1.6)} == {5}


def test_only_what_all_processors_have_is_measured() -> None:
    assert [co_run.work for co_run in measured(Team([work for work in WORKS if work != "L1"]))] == [
        work for work in WORKS if work != "L1"
    ]


def test_ranks_apart_on_gpus_or_of_several_threads_measure_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    co_run = CoRun("compute", 2, Samples((2.0,)), Samples((1.0,)))
    monkeypatch.setattr(suite, "measure_co_runs", lambda *_: [co_run])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    team, cluster = Team(), Cluster(ranks=Team().places)

    def added(team: Team, cluster: Cluster = cluster) -> Cluster:
        return suite._with_co_runs(team, cluster, "quick", Clock().within(1.0))  # type: ignore[arg-type]

    assert added(team).co_runs == (co_run,)
    assert added(Team(backend="nccl")) is cluster
    apart = replace(cluster, ranks=cluster.ranks[:2])
    assert added(team, apart) is apart
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    several = added(team)
    assert several.co_runs == ()
    assert "ranks compute with up to 2 threads" in several.notes[0]

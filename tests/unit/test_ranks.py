"""Ranks put together: which steps they have in common, groups by name, who is missing; and how they
hand their findings over.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dlperf.core.cluster import Cluster, Link
from dlperf.core.communication import Event, RankStep
from dlperf.models.buckets import ReducerOptions
from dlperf.runner.communication_recording import WHOLE_RUN, RecordedStep
from dlperf.runner.parallel_step import compare_step
from dlperf.runner.ranks import MergedRanks, RankFindings
from dlperf.runner.rendezvous import Rendezvous, World


def recorded(number: int, group: int = 0, at_s: float = 1.0, first: bool = False) -> RecordedStep:
    """A step of 10 s: an all-reduce launched at `at_s` and waited for until 5."""
    begin = 20.0 * number
    events = (
        Event("launch", number, "all_reduce", 8, group, at_s, at_s, None, 5.0),
        Event("wait", number, "all_reduce", 8, group, at_s, 5.0),
    )
    return RecordedStep(
        number, RankStep(begin, begin + 10.0, events, first), 0.0 if first else 8.0, 5.0 - at_s
    )


def found(
    rank: int, *steps: RecordedStep, n_ranks: int = 2, status: int = 0, reason: str = ""
) -> RankFindings:
    return RankFindings(
        rank, f"host{rank}", status, reason, steps, (("world", tuple(range(n_ranks))),), "gloo", 1
    )


def team(*ranks: RankFindings, n_ranks: int = 2) -> MergedRanks:
    return MergedRanks(
        {one.rank: RankFindings.from_json(json.loads(json.dumps(one.to_json()))) for one in ranks},
        n_ranks,
        "train.py",
    )


def test_ranks_are_put_together() -> None:
    merged = team(
        found(0, recorded(0, first=True), recorded(5)),
        found(1, recorded(0, first=True), recorded(5, at_s=3.0)),
    )
    assert merged.trace is not None
    assert (
        merged.trace.hosts,
        merged.trace.groups,
        merged.trace.n_steps,
        merged.trace.backend,
    ) == (("host0", "host1"), ((0, 1),), 2, "gloo")
    assert [(row.step_s, row.compute_s, row.waiting_s, row.exposed_s) for row in merged.shares] == [
        (10.0, 6.0, 2.0, 2.0),
        (10.0, 8.0, 0.0, 2.0),
    ]
    assert [(own.step_s, own.compute_s) for own in merged.step_times] == [(8.0, 4.0), (8.0, 6.0)]
    assert (merged.problem, merged.remarks) == ("", [])
    lines = "\n".join(merged.lines())
    assert "2 ranks on 2 hosts, gloo: medians of 1 step" in lines
    assert "communication share" in lines
    assert merged.to_json()["rows"][0]["communication_frac"] == 0.4


def test_ranks_that_never_trained_are_compared_over_their_runs() -> None:
    run = replace(recorded(0), number=WHOLE_RUN)
    assert (
        "the run from its first call to its last"
        in team(found(0, run, reason="no optimizer"), found(1, run)).lines()[0]
    )
    assert (
        team(found(0, run), found(1, recorded(5))).problem == "they have no watched step in common"
    )
    none = replace(run, step=replace(run.step, events=()))
    assert [
        remark
        for remark in team(found(0, run), found(1, none)).remarks
        if "1 call not issued by all" in remark
    ]


def test_only_steps_that_all_have_count_and_a_wait_without_its_launch_goes_with_it() -> None:
    late = Event("wait", 5, "all_reduce", 8, 0, 0.0, 1.0)
    after = replace(
        recorded(6), step=replace(recorded(6).step, events=(late, *recorded(6).step.events))
    )
    merged = team(found(0, recorded(5), after), found(1, recorded(6)))
    assert merged.trace is not None
    assert [len(steps[0].events) for steps in merged.trace.steps] == [2, 2]


def test_groups_go_by_their_names() -> None:
    one = RankFindings(
        0, "a", 0, "", (recorded(0, group=1),), (("7", (0, 1)), ("world", (0, 1))), "gloo", 1
    )
    other = RankFindings(1, "a", 0, "", (recorded(0, group=0),), (("world", (0, 1)),), "gloo", 1)
    trace = team(one, other).trace
    assert trace is not None
    assert [event.group for steps in trace.steps for event in steps[0].events] == [1, 1, 1, 1]
    assert trace.groups == ((0, 1), (0, 1))


def test_a_training_without_calls_is_all_computation() -> None:
    silent = [
        RankFindings(rank, "a", 0, "", (RecordedStep(3, RankStep(0.0, 2.0, (), first=False), 1.0),))
        for rank in range(2)
    ]
    merged = team(*silent)
    assert merged.trace is not None
    assert (merged.trace.groups, merged.trace.backend) == (((0, 1),), "none")
    assert [(row.compute_s, row.communication_frac) for row in merged.shares] == [(2.0, 0.0)] * 2


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((found(0, recorded(5), n_ranks=3),), "ranks 1, 2 left no findings"),
        (
            (
                found(0, recorded(5), n_ranks=3),
                found(1, n_ranks=3, reason="no optimizer stepped"),
                found(2, recorded(5), n_ranks=3),
            ),
            "rank 1 saw no training to watch (no optimizer stepped)",
        ),
        (
            (
                found(0, recorded(5), n_ranks=3),
                found(1, recorded(6), n_ranks=3),
                found(2, recorded(5), n_ranks=3),
            ),
            "they have no watched step in common",
        ),
    ],
)
def test_what_cannot_be_put_together_is_said_in_one_line(
    ranks: tuple[RankFindings, ...], words: str
) -> None:
    merged = team(*ranks, n_ranks=3)
    assert merged.trace is None
    assert (merged.lines(), merged.shares, merged.step_times) == ([], (), ())
    (line,) = merged.remarks
    assert line.startswith("no comparison of the 3 ranks: ")
    assert words in line
    assert words in merged.to_json()["reason"]


def test_calls_that_do_not_fit_are_said() -> None:
    strange = replace(
        recorded(5),
        step=replace(recorded(5).step, events=(Event("launch", 0, "barrier", 0, 0, 1.0, 1.0),)),
    )
    (line,) = team(found(0, recorded(5)), found(1, strange)).remarks
    assert (
        "their calls do not fit together: call 0 on group 0 is all_reduce on rank 0 and barrier on"
        " rank 1" in line
    )


def test_a_script_that_failed_late_has_its_steps_and_its_remark() -> None:
    merged = team(found(0, recorded(5)), found(1, recorded(5), status=3))
    assert merged.trace is not None
    assert merged.remarks == ["rank 1 ended with status 3"]


def test_the_distributed_step_without_and_with_a_reason_for_no_prediction() -> None:
    merged = team(found(0, recorded(5)), found(1, recorded(5, at_s=3.0)))
    cluster = Cluster((Link("network", latency_s=1e-5, bandwidth_bytes_per_s=1e9),))
    alone = compare_step(merged, None, ReducerOptions(), 4, None)
    assert alone is not None
    assert (alone.actual, alone.predicted, alone.notes) == ((8.0, 6.0, 2.0), None, ())
    for options, words in (
        (None, "not wrapped in DistributedDataParallel"),
        (ReducerOptions(), "none of a single rank's"),
    ):
        found_step = compare_step(merged, None, options, 4, cluster)
        assert found_step is not None
        assert words in found_step.notes[0]
    assert compare_step(team(found(0, recorded(5))), None, None, 4, None) is None


class Shelf:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Broken(Shelf):
    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("connection lost")


def exchange(
    rank: int, shelf: Shelf, n_ranks: int = 3, limit_s: float = 10.0
) -> tuple[Rendezvous, list[float]]:
    """On a clock in hand that runs while the exchange sleeps."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    made = Rendezvous(World(rank, n_ranks), limit_s, lambda: clock[0], sleep)
    made._store = shelf
    return made, clock


def test_findings_are_handed_over_and_rank_0_waits_for_no_more_than_its_limit() -> None:
    shelf = Shelf()
    for rank in (1, 2):
        exchange(rank, shelf)[0].give({"rank": rank})
    own, clock = exchange(0, shelf)
    assert own.collect() == {1: {"rank": 1}, 2: {"rank": 2}}
    assert clock == [0.0]
    patient, clock = exchange(0, shelf, n_ranks=4)
    assert sorted(patient.collect()) == [1, 2]
    assert clock[0] == pytest.approx(10.0, abs=0.1)
    hasty, clock = exchange(0, shelf, n_ranks=4)
    assert sorted(hasty.collect(1.0)) == [1, 2]
    assert clock[0] == pytest.approx(1.0, abs=0.1)


def test_a_store_that_is_gone_leaves_what_came() -> None:
    assert exchange(0, Broken())[0].collect() == {}


def test_a_restarted_training_reads_nothing_old(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    exchange(1, shelf, 2)[0].give({"rank": 1})
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert exchange(0, shelf, 2, 0.1)[0].collect() == {}

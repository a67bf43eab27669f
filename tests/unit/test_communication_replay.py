"""Recordings of known programs, replayed over other clusters: what comes of them must be what the
programs take there.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from recorded_runs import call, record, run, steps_s

from dlperf.core.cluster import Cluster, Interference, Link, Timed
from dlperf.core.communication import Communication, Event, RankStep
from dlperf.core.errors import DlperfError
from dlperf.distributed.collective_costs import CallCosts
from dlperf.distributed.collective_times import LinkFactors
from dlperf.distributed.communication_replay import replay_communication
from dlperf.distributed.programs import Call, recorded_segments
from dlperf.distributed.scaling import CommunicationReplay
from dlperf.models.communication_replay import Compute, Launch, Mark, Task, Wait
from dlperf.report.scaling_pages import scaling_to_text, write
from dlperf.report.scaling_plots import replay_figure

MIB = 2**20
HOSTS = ("a", "b")


def cluster(
    bandwidth: float = MIB, latency_s: float = 0.0, stolen: float = 0.0, path: str = ""
) -> Cluster:
    links = (
        Link("network", latency_s=latency_s, bandwidth_bytes_per_s=bandwidth),
        Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1e15),
    )

    def series(seconds: float) -> Timed:
        return Timed(samples_s=[seconds])

    taking = Interference(
        "gemm", 1, MIB, 2, 1, series(1.0), series(1 / (1 - stolen)), series(1.0), series(1.0)
    )
    return Cluster(links=links, interferences=(taking,) if stolen else (), path=path)


def step(before: float, behind: float, number: int, last: float = 0.0) -> list[Task]:
    """Computes, launches a call, computes while it runs, waits for it, and computes."""
    return [Compute(before), Launch(number), Compute(behind), Wait(number), Compute(last), Mark()]


def twice(a: list[list[Task]], b: list[list[Task]]) -> list[list[Task]]:
    """Two ranks of as many steps each."""
    return [[task for one in a for task in one], [task for one in b for task in one]]


# an all-reduce of 1 MiB over two ranks at 1 MiB/s takes 1 s
EVEN = twice([step(1.0, 0.4, n, 0.5) for n in range(3)], [step(1.0, 0.4, n, 0.5) for n in range(3)])
CALLS = [call() for _ in range(3)]


def test_a_step_in_the_head() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS)
    assert trace.steps[0][1].seconds == pytest.approx(2.5)  # 1 + 1 (0.4 of it hidden) + 0.5
    found = replay_communication(trace, cluster(MIB / 4), cluster())
    (row,) = found.rows
    assert found.recorded_step_s == pytest.approx(2.5)
    assert found.overhead_s == pytest.approx(0.0, abs=1e-9)
    assert row.step_s == pytest.approx(1.0 + 4.0 + 0.5)
    assert row.compute_s == pytest.approx(1.9)
    assert row.exposed_communication_s == pytest.approx(3.6)
    assert (row.waiting_s, row.bound) == (pytest.approx(0.0, abs=1e-9), "network")
    assert row.communication_s == pytest.approx(4.0)
    assert row.efficiency == pytest.approx(1.9 / 5.5)
    assert row.network_gain_frac == pytest.approx(2.0 / 5.5)  # 4 s become 2
    assert row.network_bytes == MIB
    assert row.low_s == pytest.approx(row.step_s)
    assert (row.p10_s, row.p90_s) == (pytest.approx(5.5), pytest.approx(5.5))
    rank = found.ranks[1]
    assert rank.recorded.exposed_communication_s == pytest.approx(0.6)
    assert rank.replayed.exposed_communication_s == pytest.approx(3.6)
    assert rank.replayed.compute_s == pytest.approx(1.9)
    (times,) = found.calls
    assert (times.per_step, times.recorded_s, times.recorded_on_s, times.replayed_s) == (
        1.0,
        pytest.approx(1.0),
        pytest.approx(1.0),
        pytest.approx(4.0),
    )
    assert found.buckets_bytes == (MIB,)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("recorded_on", [True, False])
@pytest.mark.parametrize("stolen", [0.0, 0.3])
def test_the_recorded_cluster_gives_the_recorded_step(
    seen: bool, recorded_on: bool, stolen: float
) -> None:
    uneven = twice(
        [step(1.0, 0.4, n, 0.5) for n in range(3)], [step(1.3, 0.2, n, 0.6) for n in range(3)]
    )
    own = cluster(stolen=stolen)
    trace = record(uneven, CALLS, own, HOSTS, seen=seen, origins=(0.0, 77.0))
    found = replay_communication(trace, own, own if recorded_on else None)
    assert found.rows[0].step_s == pytest.approx(found.recorded_step_s)
    assert found.overhead_s == pytest.approx(
        0.0, abs=1e-9
    )  # also where only the ends of waits are known, since all wait here


@pytest.mark.parametrize("seed", range(12))
def test_any_run_over_another_cluster_takes_what_its_programs_take_there(seed: int) -> None:
    random_ = random.Random(seed)
    n_ranks, n_steps = random_.randint(2, 4), 4
    hosts = (
        [f"host{rank // random_.choice((1, 2))}" for rank in range(n_ranks)]
        if n_ranks % 2 == 0
        else [f"host{rank}" for rank in range(n_ranks)]
    )
    hosts = (
        hosts
        if len(set(map(hosts.count, hosts))) == 1
        else [f"host{rank}" for rank in range(n_ranks)]
    )
    world = tuple(range(n_ranks))
    calls: list[Call] = []
    programs: list[list[Task]] = [[] for _ in world]
    for _ in range(n_steps):
        for _ in range(random_.randint(1, 3)):
            calls.append(
                call(
                    random_.choice(("all_reduce", "all_gather", "reduce_scatter", "barrier")),
                    random_.choice((0, 1000, MIB)),
                    world,
                )
            )
            delay = random_.random()
            for program in programs:
                program += [
                    Compute(random_.random()),
                    Launch(len(calls) - 1),
                    Compute(delay * random_.random()),
                    Wait(len(calls) - 1),
                ]
        for program in programs:
            program += [Compute(random_.random()), Mark()]
    here, there = cluster(MIB * 2, 0.01, 0.2), cluster(MIB / 3, 0.02, 0.2)
    trace = record(programs, calls, here, hosts, origins=[random_.uniform(-9, 9) for _ in world])
    found = replay_communication(trace, there, here)
    expected = steps_s(run(programs, calls, there, hosts))
    assert found.overhead_s == pytest.approx(0.0, abs=1e-6)
    assert found.rows[0].step_s == pytest.approx(
        max(sorted(steps)[1] + sorted(steps)[2] for steps in expected) / 2, rel=1e-6
    )


def test_computing_is_freed_of_what_calls_cost_it_and_burdened_anew() -> None:
    """0.3 of the processor for 1 s per MiB: 0.3 s are lost beside a call, whatever its link."""
    own = cluster(MIB / 2, stolen=0.3)
    programs = twice([step(1.0, 5.0, n) for n in range(3)], [step(1.0, 5.0, n) for n in range(3)])
    trace = record(programs, CALLS, own, HOSTS)
    assert trace.steps[0][0].seconds == pytest.approx(6.3)
    assert replay_communication(trace, cluster(MIB / 4, stolen=0.3), own).rows[
        0
    ].step_s == pytest.approx(6.3)  # still all of it beside computing
    freed = replay_communication(trace, cluster(1e15, stolen=1e-9), own).rows[0]
    assert freed.step_s == pytest.approx(6.0)
    silent = replay_communication(
        trace, cluster(MIB / 4), own
    )  # a data sheet does not say: as where it was recorded
    assert silent.rows[0].step_s == pytest.approx(6.3)
    assert any("taken from the other cluster file" in note for note in silent.notes)
    assert any(
        "recorded interference stays" in note
        for note in replay_communication(trace, cluster(), cluster()).notes
    )


def test_the_constant_overhead_is_carried_over() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS, extra_s=0.25)
    assert trace.steps[0][1].seconds == pytest.approx(2.75)
    slow = cluster(MIB / 4)
    # what no event tells of lies outside of all events, so it counts as the rank's own
    assert replay_communication(trace, slow, cluster()).rows[0].step_s == pytest.approx(5.75)
    # a forecast that is 0.5 s short of each call leaves 0.5 s, whatever the network
    found = replay_communication(trace, slow, cluster(2 * MIB))
    assert found.overhead_s == pytest.approx(0.5)
    assert found.rows[0].step_s == pytest.approx(5.75 + 0.5)
    assert found.rows[0].overhead_s == pytest.approx(0.5)
    assert "a constant overhead of 500 ms is carried over" in scaling_to_text(found, 200)


def test_a_negative_overhead_does_not_beat_a_network_that_takes_no_time() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS)
    found = replay_communication(
        trace, cluster(1e15), cluster(MIB / 10)
    )  # 10 s a call where it took 1
    assert found.overhead_s == pytest.approx(-9.0)
    assert found.rows[0].step_s == pytest.approx(1.9)
    assert found.rows[0].exposed_communication_s == pytest.approx(0.0, abs=1e-9)
    assert any("overhead is negative" in note for note in found.notes)


def test_waiting_for_a_slow_rank_is_kept() -> None:
    programs = twice([step(1.0, 0.0, n) for n in range(3)], [step(3.0, 0.0, n) for n in range(3)])
    trace = record(programs, CALLS, cluster(), HOSTS)
    found = replay_communication(trace, cluster(1e15), cluster())
    assert found.rows[0].step_s == pytest.approx(3.0)
    assert found.rows[0].exposed_communication_s == pytest.approx(0.0, abs=1e-6)
    fast, slow = found.ranks
    assert (fast.recorded.waiting_s, fast.replayed.waiting_s) == (
        pytest.approx(2.0),
        pytest.approx(2.0),
    )
    assert (slow.replayed.waiting_s, slow.replayed.compute_s) == (0.0, pytest.approx(3.0))


def test_ranks_that_are_slow_in_turn_wait_for_one_another_even_without_a_network() -> None:
    """In every step one rank takes 1 s before the first call and 3 before the second, the other 3
    and 1: 6 s, 2 of them waiting.
    """

    def both(a: float, b: float) -> list[list[Task]]:
        return [
            [
                Compute(a),
                Launch(2 * n),
                Wait(2 * n),
                Compute(b),
                Launch(2 * n + 1),
                Wait(2 * n + 1),
                Mark(),
            ]
            for n in range(3)
        ]

    trace = record(
        twice(both(1.0, 3.0), both(3.0, 1.0)), [call() for _ in range(6)], cluster(), HOSTS
    )
    row = replay_communication(trace, cluster(1e15), cluster()).rows[0]
    assert row.step_s == pytest.approx(6.0)
    assert row.waiting_s == pytest.approx(2.0)


def test_messages_are_matched_and_take_their_link_and_an_empty_one_its_latency() -> None:
    calls = [call("send", size, (0, 1)) for size in (MIB, 0)]
    sender: list[Task] = [Compute(1.0), Launch(0), Wait(0), Launch(1), Wait(1), Mark()]
    receiver: list[Task] = [Launch(0), Wait(0), Launch(1), Wait(1), Compute(0.5), Mark()]
    trace = record([sender, receiver], calls, cluster(latency_s=0.1), HOSTS)
    found = replay_communication(trace, cluster(MIB / 2, latency_s=0.2), cluster(latency_s=0.1))
    assert found.recorded_step_s == pytest.approx(1.0 + 1.1 + 0.1 + 0.5)
    assert found.rows[0].step_s == pytest.approx(1.0 + 2.2 + 0.2 + 0.5)
    with pytest.raises(
        DlperfError,
        match=(
            r"--ranks 4: the trace was recorded on 2 ranks, and its calls \(send of ranks 0, 1\) do"
            r" not say"
        ),
    ):
        replay_communication(trace, cluster(), ranks=(2, 4))


def test_both_directions_of_a_link_are_apart() -> None:
    calls = [call("send", MIB, (0, 1)), call("send", MIB, (1, 0))]
    programs: list[list[Task]] = [[Launch(0), Launch(1), Wait(0), Wait(1), Mark()] for _ in HOSTS]
    assert record(programs, calls, cluster(), HOSTS).steps[0][0].seconds == pytest.approx(1.0)
    same_way = [call("send", MIB, (0, 1)), call("send", MIB, (0, 1))]
    assert record(programs, same_way, cluster(), HOSTS).steps[0][0].seconds == pytest.approx(
        2.0, rel=1e-4
    )  # the first 4 bytes count as latency


def test_two_groups_share_the_link_of_their_nodes() -> None:
    calls = [call("all_reduce", MIB, (0, 2), 1), call("all_reduce", MIB, (1, 3), 2)]
    programs: list[list[Task]] = [[Launch(rank % 2), Wait(rank % 2), Mark()] for rank in range(4)]
    hosts = ("a", "a", "b", "b")
    trace = record(programs, calls, cluster(), hosts, groups=((0, 2), (1, 3)))
    assert trace.steps[0][0].seconds == pytest.approx(2.0, rel=1e-3)
    apart = replay_communication(
        trace, cluster(), cluster(), ranks_per_node=1
    )  # every rank on a node of its own
    assert apart.rows[0].step_s == pytest.approx(1.0, rel=1e-3)
    together = replay_communication(trace, cluster(), cluster(), ranks_per_node=4)
    assert together.rows[0].step_s == pytest.approx(0.0, abs=1e-6)


def test_other_numbers_of_ranks() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS)
    found = replay_communication(trace, cluster(), cluster(), ranks=(1, 2, 4, 16384))
    one, two, four, many = found.rows
    assert (one.step_s, one.communication_s, one.network_bytes) == (pytest.approx(1.9), 0.0, 0.0)
    assert two.step_s == pytest.approx(2.5)
    assert four.step_s == pytest.approx(1.0 + 1.5 + 0.5)  # 2 x 3/4 MiB at 1 MiB/s
    assert many.step_s == pytest.approx(1.0 + 2.0 + 0.5, rel=1e-2)
    assert many.network_bytes == pytest.approx(2 * MIB, rel=1e-3)
    assert four.speedup == pytest.approx(4 * 1.9 / 3.0)
    assert any(
        "every rank is taken to compute as the recorded ones do" in note for note in found.notes
    )
    assert {c.ranks for c in found.collectives} == {16384}
    gathered = record(EVEN, [call("all_gather") for _ in range(3)], cluster(), HOSTS)
    with pytest.raises(DlperfError, match="leave --ranks out, or record it on 4"):
        replay_communication(gathered, cluster(), ranks=(4,))


def test_more_ranks_have_a_slower_slowest_one() -> None:
    programs = twice(
        [step(1.0 + n / 10, 0.0, n) for n in range(9)],
        [step(1.0 + n / 10, 0.0, n) for n in range(9)],
    )
    trace = record(programs, [call() for _ in range(9)], cluster(1e15), HOSTS)
    rows = replay_communication(trace, cluster(1e15), cluster(1e15), ranks=(1, 2, 64)).rows
    assert rows[0].step_s < rows[1].step_s < rows[2].step_s
    assert rows[1].step_s == pytest.approx(1.4)
    assert rows[1].p10_s < rows[1].low_s < rows[1].step_s < rows[1].high_s < rows[1].p90_s


def test_the_first_step_is_apart() -> None:
    programs = twice(
        [step(3.0, 0.0, 0), step(1.0, 0.0, 1), step(1.0, 0.0, 2)],
        [step(3.0, 0.0, 0), step(1.0, 0.0, 1), step(1.0, 0.0, 2)],
    )
    trace = record(programs, CALLS, cluster(), HOSTS, firsts=(0,))
    row = replay_communication(trace, cluster(MIB / 2), cluster()).rows[0]
    assert (row.step_s, row.first_step_s) == (pytest.approx(3.0), pytest.approx(5.0))
    assert (
        replay_communication(record(EVEN, CALLS, cluster(), HOSTS), cluster()).rows[0].first_step_s
        is None
    )


def test_a_wait_may_lie_in_the_next_step_and_steps_may_be_left_out() -> None:
    late: list[Task] = [Compute(1.0), Launch(0), Mark(), Compute(0.2), Wait(0), Mark()]
    trace = record([late, late], [call()], cluster(), HOSTS)
    found = replay_communication(trace, cluster(MIB / 3), cluster())
    assert [step.seconds for step in trace.steps[0]] == [pytest.approx(1.0), pytest.approx(1.0)]
    assert found.rows[0].step_s == pytest.approx((1.0 + 3.0) / 2)  # the median of 1 and 3
    apart = replace(
        trace,
        steps=tuple(
            (a, replace(b, begin_s=b.begin_s + 9, end_s=b.end_s + 9)) for a, b in trace.steps
        ),
    )
    kept = replay_communication(apart, cluster(MIB / 3), cluster())
    assert kept.rows[0].step_s == pytest.approx(1.0)
    assert any(
        "2 waits for calls that were not launched by all ranks" in note for note in kept.notes
    )


def test_calls_that_nobody_waits_for_and_clocks_that_nothing_ties() -> None:
    programs: list[list[Task]] = [[Compute(1.0), Launch(0), Compute(3.0), Mark()]] * 2
    trace = record(programs, [call()], cluster(), HOSTS, seen=False, origins=(0.0, 50.0))
    found = replay_communication(trace, cluster(MIB / 8), cluster())
    assert found.rows[0].step_s == pytest.approx(4.0)
    assert any("rank 1's clock" in note for note in found.notes)


def test_a_trace_without_a_call() -> None:
    trace = Communication(
        ("a",),
        ((0,),),
        ((RankStep(0.0, 1.5, (), first=False), RankStep(1.5, 3.0, (), first=False)),),
    )
    row = replay_communication(trace, cluster()).rows[0]
    assert (row.step_s, row.exposed_communication_s, row.bound) == (1.5, 0.0, "compute")
    empty = replace(trace, steps=((RankStep(0.0, 0.0, (), first=False),),))
    assert (
        replay_communication(empty, cluster()).rows[0].step_s,
        replay_communication(empty, cluster()).rows[0].p90_s,
    ) == (0.0, 0.0)


def test_traces_and_clusters_that_do_not_do() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS)
    inside = Cluster(links=(Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1.0),))
    with pytest.raises(DlperfError, match="contains no link between nodes"):
        replay_communication(trace, inside)
    with pytest.raises(DlperfError, match="contains no link inside a node"):
        replay_communication(trace, replace(cluster(), links=cluster().links[:1]), ranks_per_node=2)
    with pytest.raises(DlperfError, match="3 ranks do not fill nodes of 2"):
        replay_communication(trace, cluster(), ranks=(3,), ranks_per_node=2)
    with pytest.raises(DlperfError, match="contains no step"):
        replay_communication(replace(trace, steps=((), ())), cluster())


def test_uneven_nodes_are_taken_for_one_rank_a_node() -> None:
    hosts = ("a", "a", "b")
    programs: list[list[Task]] = [[Launch(0), Wait(0), Mark()]] * 3
    trace = record(programs, [call(ranks=(0, 1, 2))], cluster(), hosts)
    assert replay_communication(trace, cluster(), cluster()).rows[0].step_s == pytest.approx(
        4 / 3, rel=1e-2
    )


def test_a_link_of_twice_the_rate_is_never_slower() -> None:
    trace = record(EVEN, CALLS, cluster(), HOSTS)
    steps = [
        replay_communication(trace, cluster(), cluster(), what_if=LinkFactors(factor))
        .rows[0]
        .step_s
        for factor in (0.1, 0.3, 1.0, 2.0, 10.0)
    ]
    assert steps == sorted(steps, reverse=True)
    assert replay_communication(trace, cluster(), what_if=LinkFactors(0.25)).rows[
        0
    ].step_s == pytest.approx(5.5)


def test_waking_up_after_a_call_is_kept() -> None:
    events = (
        Event("launch", 0, "all_reduce", MIB, 0, 1.0, 1.0, None, 2.0),
        Event("wait", 0, "all_reduce", MIB, 0, 1.0, 2.1),
    )
    trace = Communication(
        HOSTS,
        ((0, 1),),
        ((RankStep(0.0, 2.5, events, first=False),), (RankStep(0.0, 2.5, events, first=False),)),
    )
    found = replay_communication(trace, cluster(MIB / 2), cluster())
    assert found.rows[0].step_s == pytest.approx(1.0 + 2.0 + 0.1 + 0.4)
    assert found.ranks[0].replayed.exposed_communication_s == pytest.approx(2.1)


def test_calls_of_a_group_start_in_order_in_the_recording() -> None:
    """Three calls of 1 s launched at once in two lanes that share the link: the first two end at 2
    s, the third begins there.
    """
    calls = [call() for _ in range(3)]
    programs: list[list[Task]] = [
        [Launch(0), Launch(1), Launch(2), Wait(0), Wait(1), Wait(2), Mark()]
    ] * 2
    (segment,), _ = recorded_segments(record(programs, calls, cluster(), HOSTS))
    assert [(one.start_s, one.end_s) for one in segment.calls] == [
        pytest.approx(times, rel=1e-4) for times in ((0.0, 2.0), (0.0, 2.0), (2.0, 3.0))
    ]


def test_sent_bytes() -> None:
    costs = CallCosts(cluster(), (), (0, 1, 2, 3))
    four = (0, 1, 2, 3)
    sent = {
        kind: costs.sent_bytes(costs.shape(call(kind, 400, four)))
        for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
    }
    assert sent == {
        "all_reduce": 600.0,
        "reduce_scatter": 600.0,
        "all_gather": 300.0,
        "broadcast": 400.0,
        "barrier": 0.0,
    }
    assert costs.sent_bytes(costs.shape(call("send", 400, (0, 1)))) == 400.0


@pytest.fixture
def found() -> CommunicationReplay:
    return replay_communication(
        record(EVEN, CALLS, cluster(), HOSTS),
        cluster(MIB / 4, path="other.json"),
        cluster(path="own.json"),
        ranks=(2, 8),
    )


def test_the_page_the_data_and_the_plot(found: CommunicationReplay, tmp_path: object) -> None:
    text = scaling_to_text(found, 200)
    assert "train.py: recorded on 2 ranks, 3 steps; replayed over other.json" in text
    assert "replayed over own.json 2.50 s" in text
    data = found.to_json()
    assert (data["schema"], data["target"], data["batch_size"], data["recorded_on"]) == (
        "dlperf.scaling",
        "train.py",
        None,
        "own.json",
    )
    row = data["rows"][0]
    assert row["exposed_communication_s"] == pytest.approx(row["step_s"] - row["compute_s"])
    assert [c["bytes"] for c in data["collectives"]] == [65536, 524288, 4194304, 16777216]
    assert data["recorded"]["overhead_s"] == pytest.approx(0.0, abs=1e-9)
    assert (
        found.to_csv()
        .splitlines()[0]
        .startswith("target,batch_size,threads,scaling,recorded_step_s,ranks,step_s")
    )
    (axes,) = replay_figure(found).axes
    assert axes.get_ylabel() == "step"
    written = write(found, tmp_path)  # type: ignore[arg-type]
    assert [path.name for path in written] == [
        "scaling.txt",
        "scaling.csv",
        "scaling.json",
        "replay.png",
    ]
    write(found, tmp_path)  # type: ignore[arg-type]  # its own files are replaced


def test_a_completion_that_is_told_late_does_not_outlast_a_wait() -> None:
    def rank(last_done_s: float) -> tuple[RankStep, ...]:
        events = []
        for number, done_s in enumerate((1.5, 2.5, last_done_s)):  # the first two tie the clocks
            events.append(
                Event(
                    "launch", number, "all_reduce", MIB, 0, 1.0 + number, 1.0 + number, None, done_s
                )
            )
            events.append(Event("wait", number, "all_reduce", MIB, 0, 1.0 + number, 1.5 + number))
        return (RankStep(0.0, 4.0, tuple(events), first=False),)

    (segment,), _ = recorded_segments(Communication(HOSTS, ((0, 1),), (rank(3.5), rank(3.9))))
    assert [one.end_s for one in segment.calls] == [1.5, 2.5, 3.5]

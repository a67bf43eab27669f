"""The forecast over ranks, on a made-up machine, network and cluster whose sums can be done in the
head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dlperf.core.clock import Samples
from dlperf.core.cluster import Cluster, Collective, Interference, Link, Rank, Timed
from dlperf.core.co_run import CoRun, operations_of
from dlperf.core.costs import Cost, CostKey
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Bandwidth, Cpu, Kernel, Machine
from dlperf.core.prediction import Item, Prices
from dlperf.core.state import Reading, State
from dlperf.core.trace import Layer, Op, OptimizerInfo, Parameter, TensorSpec, Trace
from dlperf.core.units import MIB
from dlperf.core.variation import log_sigma, machine_log_sigma, mean_factor, slowest_factor
from dlperf.distributed.collective_costs import interference_of, link_sigma, mean_excess_s
from dlperf.distributed.forecast import forecast
from dlperf.distributed.scaling import Scaling
from dlperf.distributed.scenario import (
    ScalingScenario,
    WhatIf,
    hosts_per_system_of,
    ranks_per_node_of,
)
from dlperf.distributed.step_profile import (
    arrivals_of,
    between,
    buffer_copies_s,
    gradients_of,
    profile_of,
)
from dlperf.forecast.prediction import Prediction
from dlperf.models.buckets import ReducerOptions
from dlperf.report.scaling_pages import scaling_to_text
from dlperf.report.scaling_plots import pngs_of

MEGA = TensorSpec.contiguous(2**18)  # 1 MiB
PARAMETERS = (
    Parameter("a.weight", "a", MEGA),
    Parameter("a.still", "a", MEGA, trained=False),
    Parameter("b.weight", "b", MEGA),
    Parameter("b.bias", "b", MEGA),
)


def machine(**rest: object) -> Machine:
    """One that copies in no time to speak of."""
    fast = Bandwidth("triad", 1, 2**30, 10**18, Samples((1.0,)))
    return Machine(Cpu("made-up", 4), kernels=(), bandwidths=(fast,), **rest)  # type: ignore[arg-type]


def op(phase: str = "forward", layer: str = "") -> Op:
    few = TensorSpec.contiguous(4)
    return Op("aten.relu.default", (few,), outputs=(few,), phase=phase, layer=layer)


def trace(batch_size: int = 32) -> Trace:
    ops = tuple(
        op(phase, layer)
        for phase, layer in (
            ("forward", "a"),
            ("forward", "b"),
            ("backward", "b"),
            ("backward", "a"),
            ("optimizer", "a"),
        )
    )
    layers = (Layer("a", "Linear", True, (("", 1),)), Layer("b", "Linear", True, (("", 1),)))
    return Trace(
        "made-up",
        batch_size,
        layers,
        ops,
        optimizer=OptimizerInfo("SGD", "for-loop", 0),
        parameters=PARAMETERS,
        arrivals=((3, 3), (2, 3), (0, 4)),
    )


def prediction(batch_size: int = 32, own: Machine | None = None, scale: float = 1.0) -> Prediction:
    """Forward 2 s + 1 s, backward 3 s for b (and 1 s of page faults) and 2 s for a, optimizer 1 s."""
    items = [
        Item("a", "forward", 2.0, "compute", "measured", op=0),
        Item("b", "forward", 1.0, "compute", "measured", op=1),
        Item("b", "backward", 3.0, "DRAM", "measured", op=2),
        Item("b", "backward", 1.0, "page-faults", "measured", "page faults"),
        Item("a", "backward", 2.0, "compute", "measured", op=3),
        Item("a", "optimizer", 1.0, "DRAM", "measured", op=4),
    ]
    scaled = tuple(replace(item, seconds=scale * item.seconds) for item in items)
    return Prediction(
        trace(batch_size),
        own or machine(),
        1,
        "calibrated",
        Prices(scaled, low_factor=0.9, high_factor=1.2),
    )


def cluster(latency_s: float = 0.0, bandwidth: float = MIB, **rest: object) -> Cluster:
    inside = Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1e15)
    return Cluster(
        links=(Link("network", latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), inside),
        **rest,
    )  # type: ignore[arg-type]


def ask(
    ranks: tuple[int, ...] = (1, 2), own: Cluster | None = None, at: object = None, **rest: object
) -> Scaling:
    question = ScalingScenario(ranks, **{"batch_size": 32, **rest})  # type: ignore[arg-type]
    return forecast(at or (lambda size: prediction(size)), own or cluster(), question)  # type: ignore[arg-type]


def test_gradients_are_those_of_trained_parameters_and_arrive_in_order() -> None:
    assert [gradient.n_bytes for gradient in gradients_of(trace())] == [MIB] * 3
    assert arrivals_of(trace()) == (2, 1, 0)


def test_a_profile_says_when_gradients_arrive() -> None:
    profile = profile_of(prediction(), ReducerOptions())
    computation = profile.computation
    assert (computation.before_s, computation.backward_s, computation.after_s) == (3.0, 6.0, 1.0)
    assert computation.arrivals == (
        (4.0, 2),
        (4.0, 1),
        (6.0, 0),
    )  # b after its 3 s and their page faults
    assert profile.step_s == 10.0
    assert profile.memory_frac == pytest.approx(4 / 6)
    assert profile.bound == "compute"  # 5 s, DRAM 4 s, page faults 1 s


def test_accumulating_three_batches_repeats_forward_and_backward() -> None:
    profile = profile_of(prediction(), ReducerOptions(accumulate=3))
    assert profile.computation.before_s == pytest.approx(3.0 + 2 * 9.0, rel=1e-3)
    assert profile.step_s == pytest.approx(28.0, rel=1e-3)


def test_between_two_batch_sizes_a_profile_is_linear() -> None:
    both = [
        profile_of(prediction(size, scale=scale), ReducerOptions())
        for size, scale in ((10, 1.0), (30, 3.0))
    ]
    middle = between(both, 20)
    assert middle.step_s == pytest.approx(20.0)
    assert middle.computation.arrivals == ((8.0, 2), (8.0, 1), (12.0, 0))
    with pytest.raises(
        DlperfError, match=r"batch size 31 lies outside of the recorded ones \(10, 30\)"
    ):
        between(both, 31)


def test_one_rank_costs_no_communication() -> None:
    row = ask((1,)).rows[0]
    assert (
        row.step_s,
        row.compute_s,
        row.communication_s,
        row.exposed_communication_s,
        row.efficiency,
    ) == (10.0, 10.0, 0.0, 0.0, 1.0)
    assert row.samples_per_s == 3.2
    assert row.bound == "compute"


def test_two_ranks_hide_what_they_can() -> None:
    found = ask()
    # buckets: the first closes at 1 MiB with b's bias; the others share the second
    assert found.buckets_bytes == (MIB, 2 * MIB)
    row = found.rows[1]
    # an all-reduce over 2 ranks sends each byte once each way: 1 s and 2 s. The second starts with
    # the last gradient, 3 + 6 s, and ends at 11 s; optimizer 1 s
    assert row.step_s == pytest.approx(12.0, rel=1e-3)
    assert row.compute_s == 10.0
    assert row.exposed_communication_s == pytest.approx(2.0, rel=1e-2)
    assert row.communication_s == pytest.approx(3.0, rel=1e-2)
    assert row.efficiency == pytest.approx(10 / 12, rel=1e-3)
    assert row.samples_per_s == pytest.approx(64 / 12, rel=1e-3)
    assert row.network_gain_frac == pytest.approx(
        1 / 12, rel=1e-2
    )  # twice the rate saves one second
    assert row.bound == "compute"
    assert row.first_step_s == pytest.approx(
        3 + 6 + 3 + 1, rel=1e-3
    )  # one bucket of 3 MiB, nothing hidden
    assert (row.low_s, row.high_s) == (
        pytest.approx(9 + 2, rel=1e-2),
        pytest.approx(12 + 2, rel=1e-2),
    )
    assert row.network_bytes == 3 * MIB


def test_a_slow_link_is_the_bound_and_a_what_if_says_what_a_better_one_brings() -> None:
    slow = cluster(bandwidth=MIB / 4)
    assert ask(own=slow).rows[1].bound == "network"
    better = ask(own=slow, what_if=WhatIf.of({"link_bandwidth": 4.0}))
    assert better.rows[1].step_s == pytest.approx(12.0, rel=1e-3)
    assert better.what_if == {"link_bandwidth": 4.0}


def test_faster_arithmetic_and_memory() -> None:
    assert (
        ask((1,), what_if=WhatIf.of({"memory_bandwidth": 2.0})).rows[0].step_s == 8.0
    )  # of 4 s DRAM half
    assert (
        ask((1,), what_if=WhatIf.of({"flops": 5.0})).rows[0].step_s == 6.0
    )  # of 5 s computing a fifth


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"links": 2.0}, "'links' is unknown; known are flops"),
        ({"flops": 0.0}, "must be finite and above 0"),
        ({"flops": math.inf}, "flops=inf"),
        ({"flops": -1.0}, "flops=-1"),
    ],
)
def test_what_ifs_that_make_no_sense(factors: dict[str, float], message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        WhatIf.of(factors)


def test_ranks_of_one_node_do_not_need_the_network() -> None:
    inside = ask((1, 2, 4), ranks_per_node=2).rows
    assert inside[1].exposed_communication_s == pytest.approx(0.0, abs=1e-3)
    assert inside[2].exposed_communication_s > 1.0


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_latency_never_makes_a_step_shorter(ranks: int) -> None:
    options = ReducerOptions(bucket_bytes=MIB)  # three buckets, two of them on their way at once
    rows = [
        ask((ranks,), cluster(latency_s), options=options).rows[0]
        for latency_s in (0.0, 1e-3, 0.01, 0.03, 0.1, 1.0)
    ]
    assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    assert all(
        row.communication_s >= row.network_bytes / MIB - 1e-9 for row in rows
    )  # no less than the bytes take to pass


def test_a_step_that_waits_for_latency_is_bound_by_the_network() -> None:
    row = ask((64,), cluster(latency_s=1.0, bandwidth=1e15)).rows[0]
    assert row.network_gain_frac < 0.01
    assert row.bound == "network"


def test_links_that_nobody_uses_are_named() -> None:
    faster = WhatIf.of({"link_bandwidth": 2.0})
    assert any(
        "link_bandwidth and link_latency change nothing there" in note
        for note in ask((1, 2), ranks_per_node=2, what_if=faster).notes
    )
    assert not any(
        "change nothing" in note
        for found in (ask((1, 2), what_if=faster), ask((1, 2), ranks_per_node=2))
        for note in found.notes
    )


def test_strong_scaling_divides_the_batch() -> None:
    asked: list[int] = []

    def at(size: int) -> Prediction:
        asked.append(size)
        return prediction(size, scale=size / 32)

    rows = ask((1, 2, 4), own=cluster(bandwidth=1e15), at=at, scaling="strong").rows
    assert sorted(asked) == [8, 16, 32]
    assert [row.batch_size for row in rows] == [32, 16, 8]
    assert [row.step_s for row in rows] == [
        pytest.approx(10.0),
        pytest.approx(5.0),
        pytest.approx(2.5),
    ]
    assert [row.efficiency for row in rows] == [pytest.approx(1.0)] * 3
    assert rows[2].samples_per_s == pytest.approx(32 / 2.5)


def test_strong_scaling_records_a_few_batch_sizes_and_says_so() -> None:
    asked: list[int] = []

    def at(size: int) -> Prediction:
        asked.append(size)
        return prediction(size, scale=size / 1024)

    found = ask(
        tuple(2**k for k in range(11)),
        own=cluster(bandwidth=1e15),
        at=at,
        scaling="strong",
        batch_size=1024,
    )
    assert sorted(asked) == [1, 4, 32, 256, 1024] or len(asked) == 5
    assert {min(asked), max(asked)} == {1, 1024}
    assert found.rows[3].step_s == pytest.approx(10 / 8)  # linear between
    assert any("linear between" in note for note in found.notes)


def test_an_epoch_rounds_steps_up() -> None:
    row = ask(samples=100).rows[1]
    assert row.epoch_s == pytest.approx(2 * row.step_s)  # 64 samples a step: two


def test_buffers_are_broadcast_unless_told_otherwise() -> None:
    def at(size: int) -> Prediction:
        own = prediction(size)
        return replace(own, trace=replace(own.trace, buffers=(("mean", MEGA),)))

    with_buffers, without = (
        ask(at=at).rows[1],
        ask(at=at, options=ReducerOptions(broadcast_buffers=False)).rows[1],
    )
    assert with_buffers.step_s - without.step_s == pytest.approx(1.0, rel=1e-2)  # 1 MiB at 1 MiB/s


def test_computing_is_slower_while_something_is_sent() -> None:
    def series(seconds: float) -> Timed:
        return Timed(samples_s=[seconds])

    one = Interference(
        "gemm", 1, MIB, 2, 1, series(1.0), series(2.0), series(1.0), series(1.0)
    )  # half of the processor for 1 s per MiB
    own = cluster(interferences=(one,))
    assert interference_of(own, 1).compute_s_per_byte * MIB == pytest.approx(0.5)  # type: ignore[union-attr]
    # the first bucket's all-reduce (1 s at 7 s) takes half of the processor from a's backward: 0.5
    # s more in the end
    assert ask(own=own).rows[1].step_s == pytest.approx(12.5, rel=1e-2)


def test_unused_parameters_are_looked_for_and_named() -> None:
    def at(size: int) -> Prediction:
        own = prediction(size)
        return replace(own, trace=replace(own.trace, arrivals=own.trace.arrivals[:2]))

    found = ask(at=at)
    assert found.buckets_bytes == (
        2 * MIB,
        MIB,
    )  # as they are defined, backwards: b, then the first of 1 MiB
    assert "a.weight" in found.notes[0]
    assert "find_unused_parameters" in found.notes[0]


def test_ranks_that_wait_compute_with_colder_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ask(own=cluster(bandwidth=MIB / 4)).rows[1]
    assert alone.exposed_communication_s > 4.0
    monkeypatch.setattr(
        "dlperf.distributed.step_profile.pause_slowdowns", lambda *_: (1.0, 1.1, 1.1, 1.1, 1.1, 1.1)
    )
    colder = ask(own=cluster(bandwidth=MIB / 4)).rows
    assert (colder[0].step_s, colder[1].compute_s) == (10.0, 10.0)  # waiting for nobody
    assert alone.step_s < colder[1].step_s <= alone.step_s + 1.0


def co_runs(workers: int = 2, **together_s: float) -> tuple[CoRun, ...]:
    """Slowdowns by kind of work, beside 1 s alone."""
    return tuple(
        CoRun(work.replace("_", "-"), workers, Samples((seconds,)), Samples((1.0,)))
        for work, seconds in together_s.items()
    )


def test_side_by_side_ranks_without_a_measurement_of_it_are_said() -> None:
    (note,) = (note for note in ask(ranks_per_node=2).notes if "share a computer" in note)
    assert (
        "(overhead, compute, DRAM, page-faults; dlperf.microbench.network on ranks of one computer"
        " measures it, and so does dlperf calibrate" in note
    )
    assert note.endswith("taken for nothing")
    partly = ask(
        ranks_per_node=2, own=cluster(co_runs=co_runs(overhead=1.0, compute=2.0, page_faults=2.0))
    )
    assert any("contains their co-run slowdown (DRAM; " in note for note in partly.notes)
    assert partly.rows[1].compute_s == 10.0


def test_ranks_of_one_computer_are_slowed_down_as_the_clusters_own_were() -> None:
    own = cluster(co_runs=co_runs(overhead=1.0, compute=1.5, DRAM=2.0, page_faults=3.0))
    found = ask(own=own, ranks_per_node=2)
    assert [row.compute_s for row in found.rows] == [
        10.0,
        pytest.approx(1.5 * 5 + 2 * 4 + 3 * 1),
    ]  # alone: 5 s computing, 4 s DRAM, 1 s page faults
    assert found.rows[1].step_s == pytest.approx(18.5, rel=1e-3)
    assert not any("share a computer" in note for note in found.notes)
    assert ask(own=own, ranks_per_node=1).rows[1].compute_s == 10.0  # each has its own


def test_the_clusters_slowdowns_come_before_the_machines_and_the_targets_own_before_both() -> None:
    file = machine(
        co_runs=(
            *co_runs(overhead=1.0, compute=9.0, DRAM=9.0, page_faults=9.0),
            *co_runs(4, compute=7.0, DRAM=7.0, page_faults=7.0),
        )
    )
    own = cluster(co_runs=co_runs(compute=1.5, DRAM=2.0))
    found = ask((1, 2, 4), own, lambda size: prediction(size, file), ranks_per_node=4)
    assert [note for note in found.notes if "the machine file's" in note] == [
        (
            "what 4 ranks of a computer cost one another is the machine file's; the cluster file, which"
            " counts first, has it of 2 ranks"
        )
    ]
    rows = found.rows
    assert rows[1].compute_s == pytest.approx(
        1.5 * 5 + 2 * 4 + 9 * 1
    )  # page faults are in the machine file alone
    assert rows[2].compute_s == pytest.approx(
        7 * 10
    )  # four side by side were measured on the machine alone
    target = replace(
        file,
        co_runs=(
            *file.co_runs,
            CoRun(operations_of("made-up", 32, False), 2, Samples((1.25,)), Samples((1.0,))),
        ),
    )
    assert ask(own=own, at=lambda size: prediction(size, target), ranks_per_node=2).rows[
        1
    ].compute_s == pytest.approx(1.25 * 9 + 9 * 1)


def test_slowdowns_are_those_of_one_thread_a_rank() -> None:
    own = cluster(co_runs=co_runs(overhead=1.0, compute=1.5, DRAM=2.0, page_faults=3.0))
    found = ask(own=own, at=lambda size: replace(prediction(size), threads=2), ranks_per_node=2)
    assert found.rows[1].compute_s == 10.0
    assert any("several threads" in note for note in found.notes)


def test_namespaces_of_one_computer_are_not_taken_for_several() -> None:
    own = cluster(ranks=(Rank("host0", 0, "boot"), Rank("host1", 0, "boot")))
    assert (ranks_per_node_of(own, (2,)), hosts_per_system_of(own)) == (1, 2)
    apart = cluster(ranks=(Rank("host0", 0, "boot"), Rank("host1", 0, "other")))
    assert hosts_per_system_of(apart) == 1
    assert (ranks_per_node_of(None, (2,)), hosts_per_system_of(None)) == (1, 1)
    assert ScalingScenario((2,), 1, hosts_per_system=2).side_by_side(2) == 2
    assert any(
        "up to 4 ranks compute side by side" in note
        for note in ask((2, 4), ranks_per_node=2, hosts_per_system=2).notes
    )
    assert not any(
        "side by side" in note for note in ask((2, 4), ranks_per_node=1, hosts_per_system=2).notes
    )


def test_a_file_of_one_computer_keeps_all_ranks_there() -> None:
    own = Cluster(
        links=(Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1e9),),
        ranks=(Rank("host", 0, "boot"), Rank("host", 1, "boot")),
    )
    assert ranks_per_node_of(own, (1, 2, 8)) == 8
    assert any("ranks share one" in note for note in ask((1, 2, 8), own, ranks_per_node=8).notes)
    assert not any("ranks share one" in note for note in ask((1, 2), own, ranks_per_node=2).notes)


def test_the_slowest_of_n() -> None:
    assert slowest_factor(1, 0.3) == 1.0
    assert slowest_factor(2, 0.1) == pytest.approx(math.exp(0.1 * 0.5449), rel=1e-4)
    assert slowest_factor(1000, 0.1) == pytest.approx(
        math.exp(0.1 * 3.1989), rel=1e-3
    )  # 0.5 ** 0.001 = 0.999307
    assert mean_factor(4, 0.0) == 1.0
    assert mean_factor(1, 0.2) == pytest.approx(
        math.exp(0.02), rel=5e-3
    )  # the mean of a log-normal distribution
    with pytest.raises(DlperfError, match="slowest of 0"):
        slowest_factor(0, 0.1)


def read(machine: Machine, factors: Sequence[float]) -> Machine:
    """The machine with readings of the core; its reference is 1."""
    readings = tuple(Reading(factor, *(1.0,) * 5) for factor in factors)
    return replace(machine, reference=Reading(*(1.0,) * 6), readings=readings)


def test_spread_comes_from_measurements() -> None:
    even = Samples(tuple(1.0 + index / 100 for index in range(11)))  # deciles 1.01 and 1.09
    assert log_sigma(even) == pytest.approx(math.log(1.09 / 1.01) / 2.5631, rel=1e-3)
    rising = (1.0, *even.values, 1.1)
    assert machine_log_sigma(read(machine(), rising)) == pytest.approx(log_sigma(even))
    assert machine_log_sigma(read(machine(), [1.0, 1.0, 3.0, 1.0, 1.0])) == 0.0  # a single one
    assert machine_log_sigma(read(machine(), [1.0, 1.1, 1.2, 1.3])) == 0.0  # too few
    assert machine_log_sigma(machine()) == 0.0
    own = cluster(
        collectives=(
            Collective("all_reduce", MIB, 2, 1, samples_s=[*even.values]),
            Collective("all_reduce", 4, 2, 1, samples_s=[1.0, 1.0, 5.0]),
        )
    )
    assert link_sigma(own) == log_sigma(even)
    assert mean_excess_s(own, "all_reduce", True) == pytest.approx(
        (0.0 + 4 / 3) / 2
    )  # means less medians: 0 and 7/3 - 1


def test_stragglers_make_more_ranks_slower() -> None:
    even = Samples(tuple(1.0 + index / 10 for index in range(11)))
    own = read(machine(), even.values)
    rows = ask((1, 2, 64), own=cluster(bandwidth=1e15), at=lambda size: prediction(size, own)).rows
    assert rows[0].compute_s < rows[1].compute_s < rows[2].compute_s
    assert rows[2].p10_s < rows[2].step_s < rows[2].p90_s


def test_ddp_itself_costs_what_the_machine_file_says() -> None:
    costs = tuple(
        Cost(CostKey(f"ddp_{name}"), 1, Samples((seconds,)))
        for name, seconds in (("call", 0.5), ("sync", 0.25), ("hook", 0.125))
    )
    row = ask(
        at=lambda size: prediction(size, machine(costs=costs)), own=cluster(bandwidth=1e15)
    ).rows[1]
    assert row.compute_s == 10.5
    assert row.step_s == pytest.approx(10.5 + 0.25 + 3 * 0.125)


def test_ddp_is_as_slow_as_the_interpreter_in_the_state_of_a_prediction() -> None:
    """Its calls take twice as long; the step's items are at the state already."""
    costs = tuple(Cost(CostKey(f"ddp_{name}"), 1, Samples((0.5,))) for name in ("call", "sync"))
    slow = State(interpreter=2.0)
    row = ask(
        at=lambda size: replace(prediction(size, machine(costs=costs)), state=slow),
        own=cluster(bandwidth=1e15),
    ).rows[1]
    assert row.compute_s == 10.0 + 2 * 0.5
    assert row.step_s == pytest.approx(11.0 + 2 * 0.5)


def test_buffers_are_copied_at_the_speed_of_memory_in_the_state() -> None:
    one = prediction(32)
    usual_s = buffer_copies_s(one, 1e6)
    assert usual_s == pytest.approx(4e6 / one.machine.dram_bytes_per_s(1))
    assert buffer_copies_s(replace(one, state=State(dram=1.5)), 1e6) == pytest.approx(1.5 * usual_s)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"ranks": (3,), "ranks_per_node": 2}, "3 ranks do not fill nodes of 2"),
        ({"ranks": (64,), "scaling": "strong"}, "a batch of 32 is smaller than 64 ranks"),
        ({"ranks": (2,), "scaling": "sideways"}, "'sideways' is unknown"),
        ({"ranks": ()}, "name at least one"),
        ({"ranks": (2,), "ranks_per_node": 0}, "ranks_per_node is 0"),
    ],
)
def test_questions_that_make_no_sense(question: dict[str, object], message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        ask(**question)  # type: ignore[arg-type]


def test_networks_and_clusters_that_do_not_do() -> None:
    with pytest.raises(DlperfError, match="several ranks need a cluster file"):
        forecast(prediction, None, ScalingScenario((2,), 32))
    with pytest.raises(DlperfError, match="contains no link between nodes"):
        ask(own=Cluster(links=(Link("socket", latency_s=0.0, bandwidth_bytes_per_s=1.0),)))
    empty = replace(trace(), parameters=())
    with pytest.raises(DlperfError, match="no trained parameter"):
        ask(at=lambda size: replace(prediction(size), trace=empty))
    with pytest.raises(DlperfError, match="is a forward pass"):
        gradients_of(replace(trace(), inference=True))
    older = replace(
        trace(), parameters=(), layers=(Layer("a", "Linear", True, parameters=(("weight", MEGA),)),)
    )
    with pytest.raises(DlperfError, match="record it again"):
        gradients_of(older)


def test_sixteen_thousand_ranks() -> None:
    """No wall time is asserted; that it ends says that nothing is done rank by rank."""
    found = ask(tuple(2**k for k in range(15)))
    assert [row.ranks for row in found.rows][-1] == 16384
    assert found.rows[-1].step_s < 100


def test_every_row_has_its_place_on_the_ridgeline_plane() -> None:
    a, b = TensorSpec.contiguous(100, 50), TensorSpec.contiguous(50, 200)
    both = Op("aten.mm.default", (a, b), outputs=(TensorSpec.contiguous(100, 200),))
    product = Kernel(both, "gemm", 1, Samples((0.001,)))  # 2 x 100 x 50 x 200 FLOP in 1 ms
    own = replace(machine(), kernels=(product,))
    found = ask(
        (1, 2, 4),
        ranks_per_node=2,
        at=lambda size: prediction(size, own),
        what_if=WhatIf.of({"link_bandwidth": 3.0, "flops": 2.0}),
    )
    one, inside, between = found.rows
    rates = found.rates
    assert rates is not None
    assert (rates.peak_flops_per_s, rates.memory_bytes_per_s) == (4e9, 1e18)
    assert rates.network_bytes_per_s == pytest.approx(
        3 * MIB
    )  # the slowest link of the largest number of ranks
    assert (one.memory_intensity, one.ridgeline) == (None, None)
    assert between.network_bytes == 2 * 3 / 4 * 3 * MIB
    assert between.memory_intensity == between.memory_bytes / between.network_bytes
    assert between.arithmetic_intensity == between.flops / between.memory_bytes
    assert (inside.ridgeline, between.ridgeline) == (
        "compute",
        "network",
    )  # a few FLOP and bytes; inside a node 3 MiB take 3 ns
    assert {"peak_flops_per_s", "memory_bytes_per_s", "network_bytes_per_s"} == set(
        found.to_json()["rates"]
    )
    text = scaling_to_text(found, 250)
    assert "Ridgeline" in text
    assert set(pngs_of(found, 60)) == {"step.png", "communication.png", "ridgeline.png"}
    assert any(line.split()[-2:] == ["network", "DRAM"] for line in text.splitlines())


def test_without_a_peak_there_is_no_plane_and_that_is_said() -> None:
    found = ask()
    assert set(pngs_of(found, 60)) == {"step.png", "communication.png"}
    assert found.rates is None
    assert found.to_json()["rates"] is None
    assert {row.ridgeline for row in found.rows} == {None}
    assert any("no Ridgeline plane" in note for note in found.notes)
    assert not any("Ridgeline" in note for note in ask((1,)).notes)


def test_accumulated_batches_compute_and_move_so_many_times_as_much() -> None:
    one, three = (ask(options=ReducerOptions(accumulate=k)).rows[1] for k in (1, 3))
    n_bytes = prediction().ops.groupby("phase")["bytes"].sum()
    assert (
        three.memory_bytes - one.memory_bytes == 2 * (n_bytes["forward"] + n_bytes["backward"]) > 0
    )
    assert three.network_bytes == one.network_bytes


def test_the_page_and_the_data() -> None:
    found = ask(samples=1000)
    text = scaling_to_text(found, 200)
    assert "made-up: weak scaling, batch size 32 per rank" in text
    assert "12.0 s" in text
    assert "83.3 %" in text
    data = found.to_json()
    assert data["schema"] == "dlperf.scaling"
    assert [c["bytes"] for c in data["collectives"]] == [65536, 524288, 4194304, 16777216]
    assert {c["ranks"] for c in data["collectives"]} == {2}
    assert data["collectives"][2]["time_s"] == pytest.approx(4.0, rel=1e-6)
    head = found.to_csv().splitlines()[0]
    assert head.startswith("target,batch_size,threads,scaling,ranks,step_s")
    assert "own_batch_size" in head.split(",")
    assert len(found.to_csv().splitlines()) == 3

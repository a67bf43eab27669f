"""The time line of a rank: sums that can be done in the head, and every program against small steps
of time.
"""

from __future__ import annotations

import random

import pytest
from time_stepping import step_through

from dlperf.core.errors import DlperfError
from dlperf.models.communication_replay import Collective, Compute, Wait
from dlperf.models.overlap import (
    Computation,
    Launch,
    Synchronisation,
    Task,
    ddp_program,
    simulate,
)


def test_a_collective_hides_behind_computing() -> None:
    line = simulate([Compute(1.0), Launch(0, Collective(2.0)), Compute(3.0), Wait(0), Compute(1.0)])
    assert line.total_s == 5.0  # 1 + 3 + 1; the collective ran from 1 to 3
    assert (line.waited_s, line.communication_s, line.spans_s) == (0.0, 2.0, ((1.0, 3.0),))


def test_what_is_not_hidden_is_waited_for() -> None:
    line = simulate([Compute(1.0), Launch(0, Collective(2.0)), Compute(0.5), Wait(0), Compute(1.0)])
    assert line.total_s == 4.0  # ends at 1 + 2, then 1
    assert line.waited_s == 1.5


def test_one_lane_sends_one_after_the_other_and_two_share_the_link() -> None:
    program: list[Task] = [Launch(0, Collective(2.0)), Launch(1, Collective(2.0)), Wait(0), Wait(1)]
    assert simulate(program, n_lanes=1).spans_s == ((0.0, 2.0), (2.0, 4.0))
    assert simulate(program, n_lanes=2).spans_s == ((0.0, 4.0), (0.0, 4.0))  # half the rate each


def test_two_that_wait_for_latency_do_not_disturb_each_other() -> None:
    program: list[Task] = [
        Launch(0, Collective(2.0, link_frac=0.5)),
        Launch(1, Collective(3.0, link_frac=0.5)),
        Wait(0),
        Wait(1),
    ]
    assert simulate(program, n_lanes=2).total_s == 3.0


def test_the_third_waits_for_a_lane() -> None:
    program: list[Task] = [Launch(i, Collective(2.0, link_frac=0.0)) for i in range(3)] + [Wait(2)]
    assert simulate(program, n_lanes=2).spans_s[2] == (2.0, 4.0)


def test_a_collective_takes_processor_time() -> None:
    # 2 s long, 0.5 s of processor: computing runs at 3/4 meanwhile. 2 s x 3/4 = 1.5 s are done when
    # it ends, 0.5 s are left: 2.5 s in all
    line = simulate([Launch(0, Collective(2.0, stolen_s=0.5)), Compute(2.0), Wait(0)])
    assert line.total_s == pytest.approx(2.5)


def test_computing_keeps_half_of_the_processor() -> None:
    line = simulate([Launch(0, Collective(2.0, stolen_s=10.0)), Compute(1.0), Wait(0)])
    assert line.total_s == pytest.approx(2.0)  # at half speed


def test_a_collective_is_delayed_only_while_the_rank_computes() -> None:
    # 3 s beside computing: after 1.5 s it is half done; the other half takes 1 s
    line = simulate([Launch(0, Collective(2.0, delayed_s=1.0)), Compute(1.5), Wait(0)])
    assert line.total_s == pytest.approx(2.5)


def test_a_link_that_has_rested_spares_the_next_collective() -> None:
    two = [
        Launch(0, Collective(2.0, spared_s=1.0)),
        Wait(0),
        Compute(0.25),
        Launch(1, Collective(2.0, spared_s=1.0)),
        Wait(1),
    ]
    assert simulate(two, bucket_s=0.75).spans_s == (
        (0.0, 1.25),
        (1.5, 3.25),
    )  # all that the bucket holds, and then what it stored meanwhile
    assert simulate(two, bucket_s=9.0).spans_s == (
        (0.0, 1.0),
        (1.25, 2.25),
    )  # no more than a collective can be spared
    assert simulate(two, bucket_s=9.0, rested_s=0.5).spans_s == ((0.0, 1.5), (1.75, 3.5))
    assert simulate(two).total_s == 4.25
    assert (
        simulate([Launch(0, Collective(2.0, 0.25, spared_s=9.0)), Wait(0)], bucket_s=9.0).total_s
        == 1.5
    )  # what it needs of the link, at most
    assert simulate([Launch(0, Collective(2.0, spared_s=2.0)), Wait(0)], bucket_s=9.0).spans_s == (
        (0.0, 0.0),
    )


def test_what_still_runs_at_the_end_delays_nothing() -> None:
    line = simulate([Launch(0, Collective(5.0)), Compute(1.0)])
    assert (line.total_s, line.waited_s, line.communication_s) == (1.0, 0.0, 5.0)


@pytest.mark.parametrize(
    ("program", "lanes", "message"),
    [([Wait(3)], 2, "operation 3"), ([Compute(-1.0)], 2, "work is -1.0"), ([], 0, "n_lanes is 0")],
)
def test_programs_that_make_no_sense(program: list[Task], lanes: int, message: str) -> None:
    with pytest.raises(DlperfError, match=message):
        simulate(program, lanes)


def test_a_collective_of_negative_time() -> None:
    with pytest.raises(DlperfError, match="stolen_s is -1"):
        Collective(1.0, stolen_s=-1)


STEP = Computation(
    1.0,
    ((1.0, 2), (2.0, 1), (4.0, 0)),
    5.0,
    0.5,
    copy_in_s=(0.1, 0.1, 0.1),
    copy_out_s=(0.2, 0.2, 0.2),
    hook_s=0.01,
    sync_s=0.03,
)


def test_a_step_of_ddp_in_the_head() -> None:
    sync = Synchronisation(((2, 1), (0,)), (Collective(3.0, 0.0), Collective(1.0, 0.0)))
    line = simulate(ddp_program(STEP, sync))
    # begins at 0.03; forward until 1.03; two gradients after 2 s with two copies and hooks: 3.25;
    # the third after 2 s more: 5.36; end of backward 6.36
    assert line.spans_s == (pytest.approx((3.25, 6.25)), pytest.approx((5.36, 6.36)))
    # the first bucket has arrived, 0.4 s of copying; the second too, 0.2 s; optimizer 0.5 s
    assert line.total_s == pytest.approx(6.36 + 0.4 + 0.2 + 0.5)
    assert STEP.alone_s == 6.5


def test_buckets_are_launched_in_order_even_if_a_later_one_is_full_first() -> None:
    sync = Synchronisation(((0,), (2, 1)), (Collective(3.0), Collective(1.0)))
    starts = [start for start, _ in simulate(ddp_program(STEP, sync), n_lanes=1).spans_s]
    assert starts[0] == pytest.approx(0.03 + 1 + 4 + 0.33)  # with the last gradient
    assert starts[1] == pytest.approx(starts[0] + 3.0)


def test_copying_out_one_bucket_hides_the_next() -> None:
    step = Computation(0.0, ((1.0, 0), (1.0, 1)), 1.0, 0.0, copy_out_s=(2.0, 0.0))
    sync = Synchronisation(((0,), (1,)), (Collective(1.0), Collective(1.0)))
    assert (
        simulate(ddp_program(step, sync), n_lanes=1).total_s == 4.0
    )  # 1 + 1, then 2 s of copying during which the second ends


def test_buffers_are_waited_for_before_the_forward() -> None:
    sync = Synchronisation(
        ((2, 1, 0),), (Collective(0.0),), buffers=(Collective(0.7),), buffer_copies_s=0.1
    )
    without = Synchronisation(((2, 1, 0),), (Collective(0.0),))
    assert simulate(ddp_program(STEP, sync)).total_s == pytest.approx(
        simulate(ddp_program(STEP, without)).total_s + 0.8
    )


def test_nothing_overlaps_in_the_first_step_of_a_static_graph() -> None:
    sync = Synchronisation(
        ((2, 1), (0,)),
        (Collective(1.0), Collective(1.0)),
        closing=(Collective(0.5, 0.0),),
        delayed=True,
    )
    spans = simulate(ddp_program(STEP, sync), n_lanes=1).spans_s
    assert spans[0][0] == pytest.approx(0.03 + 1 + 5 + 0.22)  # all of the backward, and two copies


def test_unused_parameters_are_ready_with_the_first_gradient() -> None:
    sync = Synchronisation(((2, 3), (1, 0)), (Collective(1.0), Collective(1.0)), unused=(3,))
    assert simulate(ddp_program(STEP, sync)).spans_s[0][0] == pytest.approx(
        0.03 + 1 + 1 + 0.01 + 0.11
    )


def test_a_bucket_that_never_fills() -> None:
    with pytest.raises(
        DlperfError, match=r"bucket 1 waits for parameters that get no gradient: \[7\]"
    ):
        ddp_program(STEP, Synchronisation(((2, 1, 0), (7,)), (Collective(1.0), Collective(1.0))))


@pytest.mark.parametrize("seed", range(60))
def test_against_small_steps_of_time(seed: int) -> None:
    draw = random.Random(seed)
    program: list[Task] = []
    n = draw.randint(1, 6)
    for name in range(n):
        program.append(Compute(draw.choice([0.0, draw.random()])))
        duration = 0.02 + draw.random()
        program.append(
            Launch(
                name,
                Collective(
                    duration,
                    draw.random(),
                    draw.random() * duration,
                    draw.random() * 0.5,
                    draw.choice([0.0, draw.random()]),
                ),
            )
        )
    for name in range(n):
        program += [Wait(name), Compute(0.2 * draw.random())]
    lanes, bucket_s, dt = draw.randint(1, 3), draw.choice([0.0, 0.3]), 1e-4
    assert simulate(program, lanes, bucket_s).total_s == pytest.approx(
        step_through(program, lanes, dt, bucket_s), abs=dt * (3 * len(program) + 4)
    )

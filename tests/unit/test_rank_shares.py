"""Shares of a step by hand: what was waited for others, what the collective itself took, on clocks
that start anywhere.
"""

from __future__ import annotations

import pytest

from dlperf.core.communication import Communication, Event, RankStep
from dlperf.distributed.rank_shares import clock_offsets, rank_shares, step_shares


def reduced(
    number: int,
    launch_s: float,
    wait_s: float,
    end_s: float,
    kind: str = "all_reduce",
    peer: int | None = None,
    seen: bool = True,
) -> list[Event]:
    """A call launched in no time, waited for from `wait_s` until `end_s`, when it was complete."""
    return [
        Event("launch", number, kind, 8, 0, launch_s, launch_s, peer, end_s if seen else None),
        Event("wait", number, kind, 8, 0, wait_s, max(wait_s, end_s), peer),
    ]


def trace(*ranks: list[Event], origins: tuple[float, ...] = (0.0, 0.0, 0.0)) -> Communication:
    """One step of 10 s for each rank; each rank's clock has its own origin."""
    steps = tuple(
        (RankStep(origins[rank], origins[rank] + 10.0, tuple(events), first=False),)
        for rank, events in enumerate(ranks)
    )
    return Communication(
        tuple(f"host{rank}" for rank in range(len(ranks))), (tuple(range(len(ranks))),), steps
    )


@pytest.mark.parametrize("origin", [0.0, 1000.0, -3.0])
@pytest.mark.parametrize("seen", [True, False])
def test_waiting_ends_with_the_last_ranks_launch(origin: float, seen: bool) -> None:
    # rank 0 launches at 2 and waits from 3, rank 1 launches at 5; both are through at 6: rank 0
    # waits 2 s, then 1 s are the collective's own
    found = trace(
        reduced(0, 2.0, 3.0, 6.0, seen=seen),
        reduced(0, 5.0, 5.0, 6.0, seen=seen),
        origins=(0.0, origin),
    )
    assert clock_offsets(found) == (0.0, pytest.approx(-origin))
    (zero,), (one,) = step_shares(found)
    assert (
        zero.compute_s,
        zero.waiting_s,
        zero.exposed_s,
        zero.communication_frac,
    ) == pytest.approx((7.0, 2.0, 1.0, 0.3))
    assert (one.compute_s, one.waiting_s, one.exposed_s, one.communication_frac) == pytest.approx(
        (9.0, 0.0, 1.0, 0.1)
    )


def test_issuing_is_exposed_and_what_is_hidden_is_not() -> None:
    hidden = [
        Event("launch", 0, "all_reduce", 8, 0, 1.0, 1.5, None, 4.0),
        Event("wait", 0, "all_reduce", 8, 0, 6.0, 6.0),
    ]
    (zero,), (one,) = step_shares(trace(hidden, hidden))
    assert zero == one
    assert (zero.compute_s, zero.waiting_s, zero.exposed_s) == (9.5, 0.0, 0.5)


def test_late_looking_does_not_move_a_clock_beyond_what_can_be() -> None:
    # rank 1 asks for the result long after it is there, so the ends tell 4 s; rank 1's launch
    # before rank 0's end allows no more than 1
    found = trace(reduced(0, 1.0, 1.0, 2.0, seen=False), reduced(0, 1.0, 6.0, 2.0, seen=False))
    assert clock_offsets(found) == (0.0, -4.0)  # ends 2 and 6; the bounds are 1 - 6 and 2 - 1
    bounded = trace(
        [*reduced(0, 1.0, 1.0, 2.0, seen=False), *reduced(1, 3.0, 3.0, 3.5, seen=False)],
        [*reduced(0, 1.0, 1.0, 2.0, seen=False), *reduced(1, 3.0, 9.0, 3.5, seen=False)],
    )
    # the second collective's ends lie 5.5 s apart, the first one's 0 s: the median -2.75 is beyond
    # 1 - 2 = -1, where rank 0's first launch bounds it
    assert clock_offsets(bounded) == (0.0, -1.0)


def test_a_broadcast_waits_for_its_root_alone() -> None:
    both = reduced(0, 0.0, 0.0, 0.5)
    root, late = (
        reduced(1, 2.0, 2.0, 3.0, "broadcast", 0),
        reduced(1, 1.0, 1.0, 3.0, "broadcast", 0),
    )
    (zero,), (one,) = step_shares(trace([*both, *root], [*both, *late]))
    assert (zero.waiting_s, one.waiting_s) == pytest.approx((0.0, 1.0))


def test_ranks_that_share_no_collective_have_no_common_clock() -> None:
    send = [
        Event("launch", 0, "send", 8, 0, 1.0, 1.0, 1),
        Event("wait", 0, "send", 8, 0, 1.0, 3.0, 1),
    ]
    receive = [
        Event("launch", 0, "recv", 8, 0, 2.0, 2.0, 0),
        Event("wait", 0, "recv", 8, 0, 2.0, 3.0, 0),
    ]
    found = trace(send, receive)
    assert clock_offsets(found) == (0.0, None)
    assert [shares[0].waiting_s for shares in step_shares(found)] == [0.0, 0.0]
    with_barrier = trace(
        [*send, *reduced(1, 4.0, 4.0, 5.0, "barrier")],
        [*receive, *reduced(1, 4.0, 4.0, 5.0, "barrier")],
    )
    assert [shares[0].waiting_s for shares in step_shares(with_barrier)] == [1.0, 0.0]


def test_a_clock_is_known_through_a_third_rank() -> None:
    def pair(group: int) -> list[Event]:
        return [Event("launch", group, "all_reduce", 8, group, 1.0, 1.0, None, 2.0)]

    steps = (
        (RankStep(0.0, 10.0, tuple(pair(1)), first=False),),
        (
            RankStep(
                100.0,
                110.0,
                (*pair(1), Event("launch", 2, "all_reduce", 8, 2, 3.0, 3.0, None, 4.0)),
                first=False,
            ),
        ),
        (
            RankStep(
                50.0,
                60.0,
                (Event("launch", 2, "all_reduce", 8, 2, 3.0, 3.0, None, 4.0),),
                first=False,
            ),
        ),
    )
    found = Communication(("a", "b", "c"), ((0, 1, 2), (0, 1), (1, 2)), steps)
    assert clock_offsets(found) == (0.0, -100.0, -50.0)


def test_the_first_step_is_left_out_where_there_are_others() -> None:
    steps = (
        RankStep(0.0, 9.0, (), first=True),
        RankStep(9.0, 10.0, (), first=False),
        RankStep(10.0, 13.0, (), first=False),
        RankStep(13.0, 15.0, (), first=False),
    )
    (row,) = rank_shares(Communication(("a",), ((0,),), (steps,)))
    assert (row.step_s, row.compute_s, row.communication_frac, row.host) == (2.0, 2.0, 0.0, "a")
    (only,) = rank_shares(Communication(("a",), ((0,),), (steps[:1],)))
    assert only.step_s == 9.0

"""What must hold of ranks that meet, whatever they compute and send."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlperf.models.communication_replay import (
    Collective,
    Compute,
    Launch,
    Mark,
    Operation,
    Task,
    Wait,
    replay,
)

seconds = st.floats(0.0, 2.0, allow_nan=False).map(lambda x: round(x, 6))
Case = tuple[list[list[Task]], list[Operation]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_ranks, n_operations = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    world = tuple(range(n_ranks))
    operations = [Operation(world, Collective(draw(seconds)), queue=0) for _ in range(n_operations)]
    programs: list[list[Task]] = []
    for _ in range(n_ranks):
        program: list[Task] = []
        for number in range(n_operations):
            program += [Compute(draw(seconds)), Launch(number)]
            if draw(st.booleans()):
                program += [Wait(number), Mark()]
        programs.append([*program, Compute(draw(seconds)), Wait(n_operations - 1)])
    return programs, operations


def computing_s(program: list[Task]) -> float:
    return sum(task.seconds for task in program if isinstance(task, Compute))


@given(cases(), st.floats(1.0, 10.0))
def test_a_faster_network_is_never_slower(case: Case, factor: float) -> None:
    programs, operations = case
    faster = [
        replace(one, collective=Collective(one.collective.duration_s / factor))
        for one in operations
    ]
    assert (
        max(replay(programs, faster, 1).ends_s)
        <= max(replay(programs, operations, 1).ends_s) + 1e-9
    )


@given(cases())
def test_a_network_that_costs_nothing_leaves_computing_and_the_slowest_of_each_meeting(
    case: Case,
) -> None:
    programs, operations = case
    free = [replace(one, collective=Collective(0.0)) for one in operations]
    found = replay(programs, free)
    for program, end_s, waits in zip(programs, found.ends_s, found.waits):
        waited = sum(wait.until_s - wait.from_s for wait in waits)
        assert end_s == pytest.approx(computing_s(program) + waited, abs=1e-9)
        assert waited == pytest.approx(
            sum(wait.for_ranks_s(found.spans[wait.operation]) for wait in waits), abs=1e-9
        )
    if len(programs) == 1:
        assert found.ends_s[0] == pytest.approx(computing_s(programs[0]), abs=1e-9)
    assert max(found.ends_s) >= max(map(computing_s, programs)) - 1e-9


@given(cases(), seconds)
def test_waiting_for_a_slow_rank_stays(case: Case, late: float) -> None:
    """A rank that starts later makes all the others wait as much longer at a blocking meeting,
    whatever the network.
    """
    programs, operations = case
    begin = [Launch(len(operations)), Wait(len(operations))]
    meeting = Operation(tuple(range(len(programs))), Collective(0.1), queue=0)
    found = replay(
        [[Compute(late)] * (who == 0) + begin + program for who, program in enumerate(programs)],
        [*operations, meeting],
    )
    if late > 0:
        for waits in found.waits[1:]:
            assert waits[0].for_ranks_s(found.spans[-1]) == pytest.approx(late, abs=1e-9)


@given(cases())
def test_operations_of_one_lane_do_not_overlap_and_start_after_their_last_launch(
    case: Case,
) -> None:
    found = replay(*case, 1)
    for before, after in zip(found.spans, found.spans[1:]):
        assert after.start_s >= before.end_s
    assert all(span.ready_s <= span.start_s <= span.end_s for span in found.spans)


@given(cases(), st.floats(0.1, 10.0))
def test_everything_as_slow_takes_as_long(case: Case, factor: float) -> None:
    programs, operations = case
    slower = [
        [Compute(factor * task.seconds) if isinstance(task, Compute) else task for task in program]
        for program in programs
    ]
    longer = [
        replace(one, collective=Collective(factor * one.collective.duration_s))
        for one in operations
    ]
    assert replay(slower, longer).ends_s == pytest.approx(
        [factor * end for end in replay(programs, operations).ends_s], abs=1e-9
    )

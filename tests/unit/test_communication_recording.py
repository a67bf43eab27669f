"""Calls put into steps, by hand: what is kept, and how blocking in C++ is divided among the calls
it was for.
"""

from __future__ import annotations

import pytest

from dlperf.core.communication import Event
from dlperf.runner.communication_recording import (
    WHOLE_RUN,
    CollectiveCall,
    RecordedStep,
    StepMark,
    WaitRegion,
    assemble,
)


def marks(*ends: float, plain: tuple[int, ...] = (), optimizer: int = 1) -> list[StepMark]:
    """Optimizer steps that end at these times; the next begins 1 s later. The model is called 0.5 s
    after that.
    """
    return [
        StepMark(optimizer, end, end + 1, number in plain, end - 3.5, 3.0)
        for number, end in enumerate(ends)
    ]


def launched(*events: Event) -> list[tuple[str, int, float, float]]:
    return [(event.op, event.call, event.at_s, event.until_s) for event in events]


def test_the_first_step_and_the_plain_ones_are_kept() -> None:
    calls = [
        CollectiveCall("barrier", 0, "0", at, at + 0.1, waits=[(at + 0.1, at + 0.2)])
        for at in (1.0, 6.0, 12.0, 17.0)
    ]
    steps = assemble(calls, {}, marks(10.0, 15.0, 20.0, plain=(2,)), 1, 5.0, ["0"])
    assert [(s.number, s.step.begin_s, s.step.end_s, s.step.first) for s in steps] == [
        (0, 5.0, 10.0, True),
        (2, 16.0, 20.0, False),
    ]
    assert launched(*steps[0].step.events) == [
        ("launch", 1, 1.0, pytest.approx(1.1)),
        ("wait", 1, pytest.approx(1.1), pytest.approx(1.2)),
    ]
    assert [event.call for event in steps[1].step.events] == [3, 3]


def test_other_optimizers_and_unknown_beginnings_make_no_steps() -> None:
    assert assemble([], {}, marks(10.0, 15.0, plain=(1,), optimizer=7), 1, 5.0, []) == ()
    assert [s.number for s in assemble([], {}, marks(10.0, 15.0, plain=(1,)), 1, None, [])] == [1]


def test_a_program_without_optimizers_is_one_step_from_its_first_call_to_its_last() -> None:
    calls = [
        CollectiveCall("send", 8, "0", 12.0, 12.5, peer=1),
        CollectiveCall("all_reduce", 8, "0", 3.0, 3.5, done=5.0, waits=[(4.0, 6.0)]),
    ]
    (run,) = assemble(calls, {}, [], None, 1.0, ["0"])
    assert (run.number, run.step.begin_s, run.step.end_s, run.step.first) == (
        WHOLE_RUN,
        3.0,
        12.5,
        False,
    )
    assert launched(*run.step.events) == [
        ("launch", 0, 0.0, 0.5),
        ("wait", 0, 1.0, 3.0),
        ("launch", 1, 9.0, 9.5),
    ]
    assert assemble([], {}, [], None, 1.0, []) == ()


def test_blocking_in_cpp_is_for_its_calls_in_their_order() -> None:
    # launched at 1 and 2 in a backward that has its gradients at 4 and is over at 9; complete at 6
    # and 8, so 1 s of the end was copying
    calls = [
        CollectiveCall("all_reduce", 8, "0", 1.0, 1.1, region=("backward", 0), done=6.0),
        CollectiveCall("all_reduce", 8, "0", 2.0, 2.1, region=("backward", 0), done=8.0),
    ]
    (step,) = assemble(calls, {("backward", 0): WaitRegion(4.0, 9.0)}, marks(10.0), 1, 0.0, ["0"])
    assert launched(*step.step.waits) == [("wait", 0, 4.0, 6.0), ("wait", 1, 6.0, 8.0)]
    assert [event.done_s for event in step.step.launches] == [6.0, 8.0]


def test_a_call_that_was_complete_is_waited_for_in_no_time_and_one_unseen_until_the_end() -> None:
    calls = [
        CollectiveCall("all_reduce", 8, "0", 1.0, 1.1, region=("backward", 0), done=3.0),
        CollectiveCall("all_reduce", 8, "0", 2.0, 2.1, region=("backward", 0)),
    ]
    (step,) = assemble(calls, {("backward", 0): WaitRegion(4.0, 9.0)}, marks(10.0), 1, 0.0, ["0"])
    assert launched(*step.step.waits) == [("wait", 0, 4.0, 4.0), ("wait", 1, 4.0, 9.0)]


def test_what_python_waited_for_is_not_the_regions() -> None:
    call = CollectiveCall(
        "all_reduce", 8, "0", 1.0, 1.1, region=("backward", 0), done=6.0, waits=[(9.5, 9.6)]
    )
    (step,) = assemble([call], {("backward", 0): WaitRegion(4.0, 9.0)}, marks(10.0), 1, 0.0, ["0"])
    assert launched(*step.step.waits) == [("wait", 0, 9.5, 9.6)]


def test_a_backward_that_never_ended_leaves_its_calls_without_a_wait() -> None:
    (step,) = assemble(
        [CollectiveCall("all_reduce", 8, "0", 1.0, 1.1, region=("backward", 0))],
        {},
        marks(10.0),
        1,
        0.0,
        ["0"],
    )
    assert not list(step.step.waits)


def test_a_wait_may_come_a_step_later_but_not_from_a_step_that_is_not_kept() -> None:
    late = CollectiveCall("all_reduce", 8, "0", 13.0, 13.1, waits=[(17.0, 18.0)])
    lost = CollectiveCall("all_reduce", 8, "0", 12.0, 12.1, waits=[(23.0, 24.0)])
    steps = assemble([lost, late], {}, marks(10.0, 15.0, 20.0, 25.0, plain=(1, 2)), 1, None, ["0"])
    assert [launched(*s.step.events) for s in steps] == [
        [("launch", 0, 1.0, pytest.approx(1.1)), ("launch", 1, 2.0, pytest.approx(2.1))],
        [("wait", 1, 1.0, 2.0)],
    ]
    steps = assemble([lost, late], {}, marks(10.0, 15.0, 20.0, 25.0, plain=(3,)), 1, None, ["0"])
    assert [launched(*s.step.events) for s in steps] == [[]]


def test_events_of_several_threads_do_not_overlap() -> None:
    calls = [
        CollectiveCall("all_reduce", 8, "0", 1.0, 3.0),
        CollectiveCall("barrier", 0, "1", 2.0, 4.0),
        CollectiveCall("barrier", 0, "1", 2.5, 3.5),
    ]
    (step,) = assemble(calls, {}, marks(10.0), 1, 0.0, ["0", "1"])
    assert launched(*step.step.events) == [
        ("launch", 0, 1.0, 3.0),
        ("launch", 1, 3.0, 4.0),
        ("launch", 2, 4.0, 4.0),
    ]
    assert [event.group for event in step.step.events] == [0, 1, 1]


def test_own_communication_counts_from_the_models_call_on() -> None:
    # the step lasts from 11 to 15, its model is called at 11.5
    calls = [CollectiveCall("barrier", 0, "0", at, at + 0.25) for at in (11.1, 12.0, 13.0)]
    (step,) = assemble(calls, {}, marks(10.0, 15.0, plain=(1,)), 1, None, ["0"])
    assert (step.own_s, step.own_communication_s) == (3.0, pytest.approx(0.5))
    assert RecordedStep.from_json(step.to_json()).own_communication_s == step.own_communication_s

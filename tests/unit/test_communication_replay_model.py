"""Ranks that meet: sums that can be done in the head, and every program against small steps of time
and against the time line of a single rank.
"""

from __future__ import annotations

import random

import pytest
from time_stepping import step_ranks_through

from dlperf.core.errors import DlperfError
from dlperf.models import overlap
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

WORLD = Operation((0, 1), Collective(2.0), queue=0)


def test_the_fast_rank_waits_for_the_slow_one_and_both_for_the_network() -> None:
    found = replay(
        [
            [Compute(1.0), Launch(0), Wait(0), Compute(1.0)],
            [Compute(4.0), Launch(0), Wait(0), Compute(0.5)],
        ],
        [WORLD],
    )
    assert found.ends_s == (7.0, 6.5)  # both have launched at 4, the collective takes 2
    span = found.spans[0]
    assert (span.ready_s, span.start_s, span.end_s) == (4.0, 4.0, 6.0)
    (fast,), (slow,) = found.waits
    assert (fast.from_s, fast.until_s, fast.for_ranks_s(span)) == (1.0, 6.0, 3.0)
    assert (slow.from_s, slow.until_s, slow.for_ranks_s(span)) == (4.0, 6.0, 0.0)


def test_computing_hides_a_collective_from_its_last_launch_on() -> None:
    found = replay(
        [[Launch(0), Compute(5.0), Wait(0)], [Compute(1.0), Launch(0), Compute(1.0), Wait(0)]],
        [WORLD],
    )
    assert found.ends_s == (5.0, 3.0)  # from 1 to 3
    assert found.waits[0] == ()


def test_a_queue_is_kept_in_order_and_has_so_many_lanes() -> None:
    operations = [
        Operation((0,), Collective(seconds, link_frac=0.0), queue=0) for seconds in (3.0, 1.0, 1.0)
    ]
    program: list[Task] = [Launch(0), Launch(1), Launch(2), Wait(2)]
    assert [span.start_s for span in replay([program], operations, 1).spans] == [0.0, 3.0, 4.0]
    assert [span.start_s for span in replay([program], operations, 2).spans] == [0.0, 0.0, 1.0]
    apart = [Operation((0,), Collective(3.0, link_frac=0.0), queue=queue) for queue in (0, 1, 2)]
    assert replay([program], apart, 1).ends_s == (3.0,)


def test_what_is_first_in_a_queue_holds_up_the_next_though_that_is_complete() -> None:
    operations = [
        Operation((0, 1), Collective(1.0), queue=0),
        Operation((0,), Collective(1.0), queue=0),
    ]
    found = replay([[Launch(0), Launch(1), Wait(1)], [Compute(5.0), Launch(0)]], operations, 1)
    assert found.spans[1].start_s == 6.0


def test_operations_share_a_port_and_none_share_two() -> None:
    pairs = [Operation((0, 1), Collective(2.0)), Operation((2, 3), Collective(2.0))]
    programs = [
        [Launch(0), Wait(0)],
        [Launch(0), Wait(0)],
        [Launch(1), Wait(1)],
        [Launch(1), Wait(1)],
    ]
    assert replay(programs, pairs).ends_s == (2.0,) * 4
    crowded = [
        Operation(one.ranks, one.collective, ports=(7,)) for one in pairs
    ]  # the link of one node
    assert replay(programs, crowded).ends_s == (4.0,) * 4
    both_ways = [
        Operation(one.ranks, one.collective, ports=ports)
        for one, ports in zip(pairs, ((0, 3), (2, 1)))
    ]  # out of one node, into the other, and back
    assert replay(programs, both_ways).ends_s == (2.0,) * 4


def test_a_collective_slows_the_ranks_that_compute_and_those_delay_it() -> None:
    stealing = Operation((0, 1), Collective(2.0, stolen_s=0.5))
    found = replay([[Launch(0), Compute(2.0)], [Launch(0), Wait(0)]], [stealing])
    assert found.ends_s == (2.5, 2.0)  # 3/4 of the processor for 2 s, then the 0.5 s that are left
    delayed = Operation((0, 1), Collective(2.0, delayed_s=1.0))
    # one of two computes: 2.5 s in all
    assert replay([[Launch(0), Compute(9.0)], [Launch(0), Wait(0)]], [delayed]).ends_s == (9.0, 2.5)


def test_marks_and_later_starts() -> None:
    found = replay([[Mark(), Compute(1.0), Mark()], [Mark(), Mark()]], [], starts_s=(0.5, 2.0))
    assert found.marks_s == ((0.5, 1.5), (2.0, 2.0))
    assert found.ends_s == (1.5, 2.0)


def test_nothing_to_do_and_nothing_to_send() -> None:
    assert replay([[], []], []).ends_s == (0.0, 0.0)
    empty = [Operation((0, 1), Collective(0.0), queue=0) for _ in range(3)]
    found = replay(
        [
            [Launch(0), Launch(1), Launch(2), Wait(2)],
            [Compute(1.0), Launch(0), Launch(1), Launch(2)],
        ],
        empty,
        1,
    )
    assert found.ends_s == (1.0, 1.0)


@pytest.mark.parametrize(
    ("programs", "operations", "message"),
    [
        (
            [[Launch(0), Wait(0)], []],
            [WORLD],
            r"rank 0 waits for ever for operation 0, which rank 1 never launch",
        ),
        (
            [[Wait(0)], [Launch(0)]],
            [WORLD],
            "rank 0 waits for operation 0, which it did not launch",
        ),
        ([[Launch(0), Launch(0)], []], [WORLD], "once too often"),
        ([[Launch(0)]], [WORLD], "there are 1 programs"),
        ([[Compute(-1.0)]], [], "work is -1.0"),
    ],
)
def test_programs_that_make_no_sense(
    programs: list[list[Task]], operations: list[Operation], message: str
) -> None:
    with pytest.raises(DlperfError, match=message):
        replay(programs, operations)


def test_lanes_starts_and_ranks_that_make_no_sense() -> None:
    with pytest.raises(DlperfError, match="n_lanes is 0"):
        replay([], [], 0)
    with pytest.raises(DlperfError, match="starts_s has 1 times for 2 programs"):
        replay([[], []], [], starts_s=(0.0,))
    with pytest.raises(DlperfError, match="needs one at least, each once"):
        Operation((1, 1), Collective(0.0))


def draw(random_: random.Random, n_ranks: int) -> tuple[list[list[Task]], list[Operation]]:
    """Programs that end: all ranks launch in one order, each waits where it likes."""
    operations = []
    for _ in range(random_.randint(1, 6)):
        ranks = tuple(sorted(random_.sample(range(n_ranks), random_.randint(1, n_ranks))))
        own = (
            random_.choice(some)
            for some in (
                (0.0, 0.4, 1.0),
                (0.0, 0.5, 1.0),
                (0.0, 0.2, 0.8),
                (0.0, 0.3),
                (0.0, 0.2, 0.9),
            )
        )
        operations.append(
            Operation(
                ranks,
                Collective(*own),
                random_.choice((None, 0, 1)),
                random_.choice((None, (7,), (7, 8))),
            )
        )
    programs: list[list[Task]] = []
    for rank in range(n_ranks):
        program: list[Task] = []
        unseen: list[int] = []
        for number, one in enumerate(operations):
            program.append(Compute(random_.choice((0.0, 0.3, 1.0))))
            if rank in one.ranks:
                program.append(Launch(number))
                unseen.append(number)
            while unseen and random_.random() < 0.4:
                program.append(Wait(unseen.pop(0)))
        programs.append([*program, Compute(0.2), *(Wait(number) for number in unseen)])
    return programs, operations


@pytest.mark.parametrize("seed", range(40))
def test_any_program_against_small_steps(seed: int) -> None:
    random_ = random.Random(seed)
    programs, operations = draw(random_, random_.randint(1, 4))
    # a queue belongs to one set of ranks, as a process group does
    operations = [
        Operation(
            one.ranks,
            one.collective,
            None if one.queue is None else hash((one.queue, one.ranks)),
            one.ports,
        )
        for one in operations
    ]
    lanes, bucket_s = random_.randint(1, 2), random_.choice((0.0, 0.3))
    ends = replay(programs, operations, lanes, bucket_s=bucket_s).ends_s
    assert list(ends) == pytest.approx(
        step_ranks_through(programs, operations, lanes, 2e-4, bucket_s), abs=0.01
    )


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_are_alike_take_as_long_as_one_alone(seed: int) -> None:
    random_ = random.Random(seed)
    n_ranks, lanes = random_.randint(1, 3), random_.randint(1, 2)
    collectives = [
        Collective(
            random_.random(),
            random_.random(),
            random_.random() / 2,
            random_.random() / 3,
            random_.random(),
        )
        for _ in range(5)
    ]
    program: list[Task] = []
    single: list[overlap.Task] = []
    for number, collective in enumerate(collectives):
        seconds = random_.random()
        program += [Compute(seconds), Launch(number)]
        single += [Compute(seconds), overlap.Launch(number, collective)]
        if random_.random() < 0.3:
            program.append(Wait(number))
            single.append(Wait(number))
    program.append(Wait(4))
    single.append(Wait(4))
    world = tuple(range(n_ranks))
    found = replay(
        [program] * n_ranks,
        [Operation(world, one, 0, (0,)) for one in collectives],
        lanes,
        bucket_s=0.4,
    )
    line = overlap.simulate(single, lanes, 0.4)
    assert found.ends_s == pytest.approx([line.total_s] * n_ranks, abs=1e-9)
    assert [(span.start_s, span.end_s) for span in found.spans] == [
        pytest.approx(span, abs=1e-9) for span in line.spans_s
    ]

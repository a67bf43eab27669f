"""Traces of communication: round trip, which calls belong together, and the one line that each
mistake gets.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlperf.core.communication import Communication, Event, RankStep
from dlperf.core.errors import DlperfError


def call(
    number: int,
    kind: str,
    at_s: float,
    n_bytes: int = 8,
    group: int = 0,
    peer: int | None = None,
    blocked_s: float = 0.1,
) -> tuple[Event, Event]:
    """A blocking call: a launch of 0.01 s, and its wait."""
    launched = at_s + 0.01
    return (
        Event("launch", number, kind, n_bytes, group, at_s, launched, peer, launched + blocked_s),
        Event("wait", number, kind, n_bytes, group, launched, launched + blocked_s, peer),
    )


def two_ranks() -> Communication:
    """Two steps each; rank 0 sends a message to rank 1 in the second."""
    first = RankStep(5.0, 6.0, call(0, "all_reduce", 0.2), first=True)
    zero = RankStep(
        6.0, 7.0, (*call(1, "all_reduce", 0.2), *call(2, "send", 0.5, peer=1)), first=False
    )
    one = RankStep(
        6.0,
        7.0,
        (*call(1, "recv", 0.1, peer=0), *call(2, "all_reduce", 0.5, n_bytes=16)),
        first=False,
    )
    return Communication(
        ("a", "b"),
        ((0, 1),),
        ((first, zero), (first, one)),
        script="train.py",
        threads=2,
        machine="cpu",
        notes=("busy",),
        versions={"torch": "2"},
        created="today",
    )


def write(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "communication.json"
    path.write_text(json.dumps(data))
    return path


def changed(place: list[str | int], value: Any) -> dict[str, Any]:
    data: Any = json.loads(json.dumps(two_ranks().to_json()))
    inner = data
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return data  # type: ignore[no-any-return]


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    two_ranks().save(path)
    back = Communication.load(path)
    assert back.path == str(path)
    assert back.to_json() == two_ranks().to_json()
    assert (back.n_ranks, back.n_steps) == (2, 2)
    assert back.steps[0][0].first
    assert not back.steps[0][1].first


def test_the_nth_call_on_a_group_is_the_same_collective_and_messages_meet_by_their_ends() -> None:
    meetings = two_ranks().meetings
    assert [
        (
            m.kind,
            m.n_bytes,
            [(rank, step, event.call) for rank, step, event in m.launches],
            m.complete,
        )
        for m in meetings
    ] == [
        ("all_reduce", 8, [(0, 0, 0), (1, 0, 0)], True),
        ("all_reduce", 16, [(0, 1, 1), (1, 1, 2)], True),
        ("send", 8, [(0, 1, 2), (1, 1, 1)], True),
    ]


def test_groups_count_their_calls_apart_and_a_missing_partner_leaves_a_meeting_incomplete() -> None:
    zero = RankStep(
        0.0,
        1.0,
        (
            *call(0, "barrier", 0.1, 0, group=1),
            *call(1, "broadcast", 0.3, peer=1),
            *call(2, "send", 0.5, 0, peer=1),
        ),
        first=False,
    )
    one = RankStep(
        0.0,
        1.0,
        (
            *call(0, "broadcast", 0.1, peer=1),
            *call(1, "barrier", 0.3, 0, group=1),
            *call(2, "recv", 0.5, 0),
        ),
        first=False,
    )
    meetings = Communication(("a", "a"), ((0, 1), (0, 1)), ((zero,), (one,))).meetings
    assert [(m.kind, m.group, len(m.launches), m.complete, m.root) for m in meetings] == [
        ("barrier", 1, 2, True, None),
        ("broadcast", 0, 2, True, 1),
        ("send", 0, 1, False, None),
        ("send", 0, 1, False, None),
    ]


def test_calls_that_cannot_belong_together_are_refused() -> None:
    zero, one = (
        RankStep(0.0, 1.0, call(0, kind, 0.1), first=False) for kind in ("all_reduce", "all_gather")
    )
    with pytest.raises(
        DlperfError, match="call 0 on group 0 is all_reduce on rank 0 and all_gather on rank 1"
    ):
        Communication(("a", "b"), ((0, 1),), ((zero,), (one,))).meetings  # noqa: B018


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        (["ranks", 1, "steps"], [], "ranks[1].steps has 0 steps; expected 2, as ranks[0] has"),
        (["ranks"], [], "ranks is []; expected one rank at least"),
        (
            ["ranks", 1, "rank"],
            3,
            "ranks[1].rank is 3; expected 1: ranks stand in order, none is left out",
        ),
        (["hosts"], ["a"], "hosts is ['a']; expected one host name for each of the 2 ranks"),
        (["hosts"], ["a", ""], "hosts[1] is ''; expected text that is not empty"),
        (["groups"], [[0]], "groups is [[0]]; expected the world first, with the ranks 0 to 1"),
        (
            ["groups"],
            [[0, 1], [1, 1]],
            "groups[1] is [1, 1]; expected some of the ranks 0 to 1, each once",
        ),
        (
            ["groups"],
            [[0, 1], [2]],
            "groups[1] is [2]; expected some of the ranks 0 to 1, each once",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "op"],
            "go",
            "ranks[0].steps[0].events[0].op is 'go'; expected one of launch, wait",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "kind"],
            "gossip",
            "events[0].kind is 'gossip'; expected one of all_gather, all_reduce, ",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "bytes"],
            -1,
            "ranks[0].steps[0].events[0].bytes is -1; expected a whole number of at least 0",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "group"],
            4,
            "ranks[0].steps[0].events[0].group is 4; expected the number of a group with rank 0",
        ),
        (
            ["ranks", 0, "steps", 1, "events", 2, "peer"],
            7,
            "ranks[0].steps[1].events[2].peer is 7; expected a rank of group 0",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "at_s"],
            "soon",
            "ranks[0].steps[0].events[0].at_s is 'soon'; expected a finite number",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 0, "until_s"],
            0.1,
            "ranks[0].steps[0].events[0].until_s is 0.1; expected at least at_s, 0.2",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 1, "at_s"],
            0.205,
            "events[1].at_s is 0.205; expected at least the end of the event before, 0.21",
        ),
        (
            ["ranks", 0, "steps", 0, "events", 1, "call"],
            9,
            "ranks[0].steps[0].events[1].call is 9; expected a call that was launched before",
        ),
        (
            ["ranks", 0, "steps", 1, "events", 0, "call"],
            0,
            "ranks[0].steps[1].events[0].call is 0; expected more than 0",
        ),
        (
            ["ranks", 0, "steps", 1, "begin_s"],
            5.5,
            "ranks[0].steps[1].begin_s is 5.5; expected at least the end of the step before, 6.0",
        ),
        (
            ["ranks", 0, "steps", 0, "end_s"],
            1.0,
            "ranks[0].steps[0].end_s is 1.0; expected at least begin_s, 5.0",
        ),
        (
            ["ranks", 0, "steps", 0, "first"],
            1,
            "ranks[0].steps[0].first is 1; expected true or false",
        ),
        (
            ["ranks", 0, "steps", 0, "events"],
            None,
            "ranks[0].steps[0].events is null; expected a list",
        ),
        (["threads"], 0, "threads is 0; expected a whole number of at least 1"),
    ],
    ids=str,
)
def test_a_mistake_in_a_file_is_named(
    tmp_path: Path, place: list[str | int], value: Any, line: str
) -> None:
    path = write(tmp_path, changed(place, value))
    with pytest.raises(DlperfError) as error:
        Communication.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert line in str(error.value)
    assert ". Record it again." in str(error.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"schema": "dlperf.cluster", "schema_version": 2})
    with pytest.raises(DlperfError, match=r"is no dlperf\.communication file"):
        Communication.load(path)

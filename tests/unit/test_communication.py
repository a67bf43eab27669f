"""Traces of communication: round trip, which calls belong together, and the one line that each mistake gets."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlperf.communication import Communication, Event, Step
from dlperf.errors import DlperfError


def call(number: int, kind: str, at_s: float, n_bytes: int = 8, group: int = 0, peer: int | None = None, blocked_s: float = 0.1) -> tuple[Event, Event]:
    """A blocking call: a launch of 0.01 s, and its wait."""
    launched = at_s + 0.01
    return (
        Event("launch", number, kind, n_bytes, group, at_s, launched, peer, launched + blocked_s),
        Event("wait", number, kind, n_bytes, group, launched, launched + blocked_s, peer),
    )  # fmt: skip


def two_ranks() -> Communication:
    """Two steps each; rank 0 sends a message to rank 1 in the second."""
    first = Step(5.0, 6.0, call(0, "all_reduce", 0.2), first=True)
    zero = Step(6.0, 7.0, (*call(1, "all_reduce", 0.2), *call(2, "send", 0.5, peer=1)))
    one = Step(6.0, 7.0, (*call(1, "recv", 0.1, peer=0), *call(2, "all_reduce", 0.5, n_bytes=16)))
    return Communication(("a", "b"), ((0, 1),), ((first, zero), (first, one)), script="train.py", threads=2, machine="cpu", notes=("busy",),
                         versions={"torch": "2"}, created="today")  # fmt: skip


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
    assert [(m.kind, m.n_bytes, [(rank, step, event.call) for rank, step, event in m.launches], m.complete) for m in meetings] == [
        ("all_reduce", 8, [(0, 0, 0), (1, 0, 0)], True), ("all_reduce", 16, [(0, 1, 1), (1, 1, 2)], True), ("send", 8, [(0, 1, 2), (1, 1, 1)], True)
    ]  # fmt: skip


def test_groups_count_their_calls_apart_and_a_missing_partner_leaves_a_meeting_incomplete() -> None:
    zero = Step(0.0, 1.0, (*call(0, "barrier", 0.1, 0, group=1), *call(1, "broadcast", 0.3, peer=1), *call(2, "send", 0.5, 0, peer=1)))
    one = Step(0.0, 1.0, (*call(0, "broadcast", 0.1, peer=1), *call(1, "barrier", 0.3, 0, group=1), *call(2, "recv", 0.5, 0)))
    meetings = Communication(("a", "a"), ((0, 1), (0, 1)), ((zero,), (one,))).meetings
    assert [(m.kind, m.group, len(m.launches), m.complete, m.root) for m in meetings] == [
        ("barrier", 1, 2, True, None), ("broadcast", 0, 2, True, 1), ("send", 0, 1, False, None), ("send", 0, 1, False, None)
    ]  # fmt: skip


def test_calls_that_cannot_belong_together_are_refused() -> None:
    zero, one = (Step(0.0, 1.0, call(0, kind, 0.1)) for kind in ("all_reduce", "all_gather"))
    with pytest.raises(DlperfError, match="call 0 on group 0 is all_reduce on rank 0 and all_gather on rank 1"):
        Communication(("a", "b"), ((0, 1),), ((zero,), (one,))).meetings  # noqa: B018


@pytest.mark.parametrize(
    ("place", "value", "line"),
    [
        (["ranks", 1, "steps"], [], "rank 1 has 0 steps and rank 0 has 2; all have the same"),
        (["ranks"], [], "ranks is empty"),
        (["ranks", 1, "rank"], 3, "ranks[1] is rank 3; ranks stand in order, none is left out"),
        (["hosts"], ["a"], "hosts names 1 hosts for 2 ranks"),
        (["hosts"], ["a", ""], "hosts is ['a', '']; it has a host name for each rank"),
        (["groups"], [[0]], "groups[0] is the world; it must hold the ranks 0 to 1"),
        (["groups"], [[0, 1], [1, 1]], "groups[1] is [1, 1]; it must hold some of the ranks 0 to 1, each once"),
        (["groups"], [[0, 1], [2]], "groups[1] is [2]; it must hold some of the ranks 0 to 1, each once"),
        (["ranks", 0, "steps", 0, "events", 0, "op"], "go", "ranks[0].steps[0].events[0].op is 'go'; known are launch, wait"),
        (["ranks", 0, "steps", 0, "events", 0, "kind"], "gossip", "ranks[0].steps[0].events[0].kind is 'gossip'; known are all_reduce"),
        (["ranks", 0, "steps", 0, "events", 0, "bytes"], -1, "ranks[0].steps[0].events[0].bytes is -1; it must be a whole number of at least 0"),
        (["ranks", 0, "steps", 0, "events", 0, "group"], 4, "rank 0, step 0, event 0 (launch of all_reduce) is in group 4, which rank 0 is no part of"),
        (["ranks", 0, "steps", 1, "events", 2, "peer"], 7, "rank 0, step 1, event 2 (launch of send) has peer 7, which is no part of group 0"),
        (["ranks", 0, "steps", 0, "events", 0, "at_s"], "soon", "ranks[0].steps[0].events[0].at_s is 'soon'; it must be a finite number of seconds"),
        (["ranks", 0, "steps", 0, "events", 0, "until_s"], 0.1, "ranks[0].steps[0].events[0] lasts until 0.1 s and begins at 0.2 s"),
        (["ranks", 0, "steps", 0, "events", 1, "at_s"], 0.205, "rank 0, step 0, event 1 (wait of all_reduce) begins before the one before it ends"),
        (["ranks", 0, "steps", 0, "events", 1, "call"], 9, "rank 0, step 0, event 1 (wait of all_reduce) waits for call 9, which was not launched before"),
        (["ranks", 0, "steps", 1, "events", 0, "call"], 0, "has call 0, which was launched before"),
        (["ranks", 0, "steps", 1, "begin_s"], 5.5, "rank 0, step 1 begins before the one before it ends"),
        (["ranks", 0, "steps", 0, "end_s"], 1.0, "ranks[0].steps[0] ends at 1.0 s and begins at 5.0 s"),
        (["ranks", 0, "steps", 0, "first"], 1, "ranks[0].steps[0].first is 1; it must be true or false"),
        (["ranks", 0, "steps", 0, "events"], None, "is damaged (TypeError"),
        (["threads"], 0, "threads is 0; it must be a whole number of at least 1"),
    ],
    ids=str,
)  # fmt: skip
def test_a_mistake_in_a_file_is_named(tmp_path: Path, place: list[str | int], value: Any, line: str) -> None:
    path = write(tmp_path, changed(place, value))
    with pytest.raises(DlperfError) as error:
        Communication.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert line in str(error.value)
    assert "record it again" in str(error.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"schema": "dlperf.cluster", "schema_version": 1})
    with pytest.raises(DlperfError, match=r"is no dlperf\.communication file"):
        Communication.load(path)

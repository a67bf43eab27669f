"""What the ranks of a training sent one another in a few of its steps: the collectives and messages it really issued, and when it waited for them.

Nothing here imports torch. `dlperf run` under torchrun records such a trace; :mod:`dlperf.exposure` says what of each rank's step was computation,
exposed communication and waiting for others.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dlperf.errors import DlperfError
from dlperf.files import read_json, write_json

SCHEMA, SCHEMA_VERSION = "dlperf.communication", 1
LAUNCH, WAIT = "launch", "wait"
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send", "recv", "barrier")
MESSAGES = ("send", "recv")
"""The kinds that join two ranks; the others are collectives of their whole group."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""The collectives that have a root."""


@dataclass(frozen=True, slots=True)
class Event:
    """A rank issues a call (`launch`), or blocks for one (`wait`); seconds from the start of its step.

    `call` numbers the rank's calls from 0 on, in the order of their launches; a wait bears the number of its launch, which may lie in a step before.
    A blocking call is a launch followed by its wait; a call may be waited for more than once, or never. `n_bytes` is the whole vector, as in a
    cluster file: what each rank puts into an all-reduce, reduce-scatter, broadcast, reduce or all-to-all, and what comes of an all-gather or gather
    or goes into a scatter; of a message its own size. `group` is a place in :attr:`Communication.groups`. `peer` is the rank at
    the other end of a message (None: any sender) or the root of a rooted collective, both numbered as in the world; None elsewhere. `done_s` of a launch
    is when the call was complete, None where that could not be seen.
    """

    op: str
    call: int
    kind: str
    n_bytes: int
    group: int
    at_s: float
    until_s: float
    peer: int | None = None
    done_s: float | None = None

    @property
    def seconds(self) -> float:
        """How long the rank issued, or blocked."""
        return self.until_s - self.at_s


@dataclass(frozen=True, slots=True)
class Step:
    """A rank's step from the end of the optimizer's step before to the end of its own, on the rank's own clock (seconds, from any origin).

    A program without optimizers has one: from its first call to the end of its last.

    `events` are in the order of their starts and do not overlap; what lies between them is the rank's computation, and whatever else it does. `first`: the
    first step after the model was wrapped, in which DistributedDataParallel has not found its buckets yet.
    """

    begin_s: float
    end_s: float
    events: tuple[Event, ...] = ()
    first: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s

    @property
    def launches(self) -> Iterator[Event]:
        """The calls issued."""
        return (event for event in self.events if event.op == LAUNCH)

    @property
    def waits(self) -> Iterator[Event]:
        """The blocking."""
        return (event for event in self.events if event.op == WAIT)


@dataclass(frozen=True)
class Meeting:
    """One collective with the launches of all its ranks, or one message with those of its two; :attr:`launches` is (rank, step, launch).

    Seconds of the launches are from the start of each one's own step on its own clock. It is not `complete` where the recording ended before all came.
    """

    kind: str
    group: int
    launches: tuple[tuple[int, int, Event], ...]
    complete: bool = True

    @property
    def n_bytes(self) -> int:
        """The most that one of its ranks named."""
        return max(event.n_bytes for _, _, event in self.launches)

    @property
    def root(self) -> int | None:
        """The root of a rooted collective, numbered as in the world."""
        return self.launches[0][2].peer if self.kind in ROOTED else None


@dataclass(frozen=True)
class Communication:
    """The trace of a training's communication: `steps[rank]` are the watched steps of each rank, in order, equally many for all.

    `hosts` has the host name of each rank (ranks with the same one share a node). `groups` are process groups as ranks of the world, the world first; a
    group may occur twice, since two groups of the same ranks keep their calls apart. `threads` is what each rank computed with.

    Raises DlperfError where hosts, groups and ranks do not fit together.
    """

    hosts: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Step, ...], ...]
    script: str = ""
    backend: str = "gloo"
    threads: int = 1
    machine: str = ""
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    path: str = ""

    def __post_init__(self) -> None:
        n = len(self.steps)
        if not n:
            raise DlperfError("ranks is empty; a trace of communication has one rank at least")
        if len(self.hosts) != n:
            raise DlperfError(f"hosts names {len(self.hosts)} hosts for {n} ranks; it has one for each")
        if not self.groups or self.groups[0] != tuple(range(n)):
            raise DlperfError(f"groups[0] is the world; it must hold the ranks 0 to {n - 1}")
        for place, group in enumerate(self.groups):
            if not group or len(set(group)) != len(group) or not set(group) <= set(range(n)):
                raise DlperfError(f"groups[{place}] is {list(group)}; it must hold some of the ranks 0 to {n - 1}, each once")
        for rank, steps in enumerate(self.steps):
            if len(steps) != len(self.steps[0]):
                raise DlperfError(f"rank {rank} has {len(steps)} steps and rank 0 has {len(self.steps[0])}; all have the same")
            self._check_rank(rank, steps)

    def _check_rank(self, rank: int, steps: tuple[Step, ...]) -> None:
        launched: set[int] = set()
        newest = -1
        for place, step in enumerate(steps):
            if place and step.begin_s < steps[place - 1].end_s:
                raise DlperfError(f"rank {rank}, step {place} begins before the one before it ends")
            for number, event in enumerate(step.events):
                where = f"rank {rank}, step {place}, event {number} ({event.op} of {event.kind})"
                if number and event.at_s < step.events[number - 1].until_s:
                    raise DlperfError(f"{where} begins before the one before it ends")
                if event.group >= len(self.groups) or rank not in self.groups[event.group]:
                    raise DlperfError(f"{where} is in group {event.group}, which rank {rank} is no part of")
                if event.peer is not None and event.peer not in self.groups[event.group]:
                    raise DlperfError(f"{where} has peer {event.peer}, which is no part of group {event.group}")
                if event.op == LAUNCH:
                    if event.call <= newest:
                        raise DlperfError(f"{where} has call {event.call}, which was launched before; calls are numbered in the order of their launches")
                    launched.add(newest := event.call)
                elif event.call not in launched:
                    raise DlperfError(f"{where} waits for call {event.call}, which was not launched before")

    @property
    def n_ranks(self) -> int:
        """How many ranks were recorded."""
        return len(self.steps)

    @property
    def n_steps(self) -> int:
        """How many steps of each."""
        return len(self.steps[0])

    @cached_property
    def meetings(self) -> tuple[Meeting, ...]:
        """Every collective and message with all its launches: the n-th call on a group is the same collective on all its ranks, and the n-th message from
        one rank to another in a group is the one that the other receives as its n-th from there.

        Raises DlperfError where the ranks' calls are of different kinds, so that they cannot belong together.
        """
        found: dict[tuple[int, tuple[int | None, ...], int], list[tuple[int, int, Event]]] = {}
        for rank, steps in enumerate(self.steps):
            counts: dict[tuple[int, tuple[int | None, ...], str], int] = {}
            for place, event in ((place, event) for place, step in enumerate(steps) for event in step.launches):
                ends = {"send": (rank, event.peer), "recv": (event.peer, rank)}.get(event.kind, ())
                side = event.kind if ends else ""
                number = counts.get((event.group, ends, side), 0)
                counts[event.group, ends, side] = number + 1
                found.setdefault((event.group, ends, number), []).append((rank, place, event))
        return tuple(
            Meeting("send", group, tuple(launches), len(launches) == 2) if ends else self._collective(group, number, launches)
            for (group, ends, number), launches in found.items()
        )

    def _collective(self, group: int, number: int, launches: list[tuple[int, int, Event]]) -> Meeting:
        (rank, _, first), *others = launches
        for other, _, event in others:
            if (event.kind, event.peer) != (first.kind, first.peer):
                a, b = (f"{e.kind}{'' if e.peer is None else f' with root {e.peer}'}" for e in (first, event))
                raise DlperfError(f"call {number} on group {group} is {a} on rank {rank} and {b} on rank {other}; the recording does not fit together")
        return Meeting(first.kind, group, tuple(launches), len(launches) == len(self.groups[group]))

    # -- as a file ------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, whole or not at all."""
        write_json(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Communication:
        """Read a trace. Raises DlperfError naming the file and the entry where it is missing, truncated, newer, damaged or no such trace."""
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return replace(cls.from_json(data), path=str(path))
        except DlperfError as error:
            raise DlperfError(f"{path}: {error}; record it again") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DlperfError(f"{path}: is damaged ({type(error).__name__}: {error}); record it again") from error

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON data."""
        return {
            "schema": SCHEMA, "schema_version": SCHEMA_VERSION, "created": self.created, "versions": dict(self.versions), "machine": self.machine,
            "script": self.script, "backend": self.backend, "threads": self.threads, "notes": list(self.notes), "hosts": list(self.hosts),
            "groups": [list(group) for group in self.groups],
            "ranks": [{"rank": rank, "steps": [step_to_json(step) for step in steps]} for rank, steps in enumerate(self.steps)],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Communication:
        """The trace that :meth:`to_json` wrote. Raises DlperfError naming the entry that no recording can have made."""
        for place, row in enumerate(data["ranks"]):
            if row["rank"] != place:
                raise DlperfError(f"ranks[{place}] is rank {row['rank']!r}; ranks stand in order, none is left out")
        if any(not isinstance(host, str) or not host for host in data["hosts"]):
            raise DlperfError(f"hosts is {data['hosts']!r}; it has a host name for each rank")
        return cls(
            hosts=tuple(data["hosts"]), groups=tuple(tuple(_whole(rank, f"groups[{n}]") for rank in group) for n, group in enumerate(data["groups"])),
            steps=tuple(
                tuple(step_from_json(step, f"ranks[{rank}].steps[{place}]") for place, step in enumerate(row["steps"]))
                for rank, row in enumerate(data["ranks"])
            ),
            script=str(data.get("script", "")), backend=str(data.get("backend", "gloo")), threads=_whole(data.get("threads", 1), "threads", 1),
            machine=str(data.get("machine", "")), notes=tuple(data.get("notes", ())), versions=dict(data.get("versions", {})),
            created=str(data.get("created", "")),
        )  # fmt: skip


def step_to_json(step: Step) -> dict[str, Any]:
    """A step as JSON data; times are rounded to the nanosecond."""
    return {
        "begin_s": round(step.begin_s, 9), "end_s": round(step.end_s, 9), "first": step.first,
        "events": [
            {
                "op": e.op, "call": e.call, "kind": e.kind, "bytes": e.n_bytes, "group": e.group, "peer": e.peer,
                "at_s": round(e.at_s, 9), "until_s": round(e.until_s, 9), "done_s": None if e.done_s is None else round(e.done_s, 9),
            }
            for e in step.events
        ],
    }  # fmt: skip


def step_from_json(row: dict[str, Any], where: str = "step") -> Step:
    """The step that :func:`step_to_json` wrote. Raises DlperfError naming the entry that is none."""
    begin_s, end_s = _time(row["begin_s"], f"{where}.begin_s"), _time(row["end_s"], f"{where}.end_s")
    if end_s < begin_s:
        raise DlperfError(f"{where} ends at {end_s} s and begins at {begin_s} s")
    if not isinstance(row["first"], bool):
        raise DlperfError(f"{where}.first is {row['first']!r}; it must be true or false")
    return Step(begin_s, end_s, tuple(_event_from_json(event, f"{where}.events[{n}]") for n, event in enumerate(row["events"])), row["first"])


def _event_from_json(row: dict[str, Any], where: str) -> Event:
    for name, known in (("op", (LAUNCH, WAIT)), ("kind", KINDS)):
        if row[name] not in known:
            raise DlperfError(f"{where}.{name} is {row[name]!r}; known are {', '.join(known)}")
    at_s, until_s = _time(row["at_s"], f"{where}.at_s"), _time(row["until_s"], f"{where}.until_s")
    if until_s < at_s:
        raise DlperfError(f"{where} lasts until {until_s} s and begins at {at_s} s")
    peer, done = row.get("peer"), row.get("done_s")
    return Event(
        row["op"], _whole(row["call"], f"{where}.call"), row["kind"], _whole(row["bytes"], f"{where}.bytes"), _whole(row["group"], f"{where}.group"),
        at_s, until_s, None if peer is None else _whole(peer, f"{where}.peer"), None if done is None else _time(done, f"{where}.done_s"),
    )  # fmt: skip


def _whole(value: Any, where: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DlperfError(f"{where} is {value!r}; it must be a whole number of at least {least}")
    return value


def _time(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DlperfError(f"{where} is {value!r}; it must be a finite number of seconds")
    return float(value)

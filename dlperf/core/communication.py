"""What the ranks of a training sent one another in a few of its steps: the collectives and messages
it really issued, and when it waited for them.

Nothing here imports torch. `dlperf run` under torchrun records such a trace;
:mod:`dlperf.distributed.rank_shares` states what of each rank's step was computation, exposed
communication and waiting for others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, get_args

from dlperf.core import files
from dlperf.core.conversion import convert, refuse
from dlperf.core.errors import DlperfError
from dlperf.core.records.communication import CommunicationRecord, Kind
from dlperf.core.records.communication import Event as Event
from dlperf.core.records.communication import RankStep as RankStep

SCHEMA, SCHEMA_VERSION = "dlperf.communication", 1
LAUNCH: Final = "launch"
WAIT: Final = "wait"
KINDS: tuple[str, ...] = get_args(Kind)
MESSAGES = ("send", "recv")
"""The kinds that join two ranks; the others are collectives of their whole group."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""The collectives that have a root."""


@dataclass(frozen=True)
class Meeting:
    """One collective with the launches of all its ranks, or one message with those of its two;
    :attr:`launches` is (rank, step, launch).

    Seconds of the launches are from the start of each one's own step on its own clock. It is not
    `complete` where the recording ended before all came.
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
    """The trace of a training's communication: `steps[rank]` are the watched steps of each rank, in
    order, equally many for all.

    `hosts` has the host name of each rank (ranks with the same one share a node). `groups` are
    process groups as ranks of the world, the world first; a group may occur twice, since two groups
    of the same ranks keep their calls apart. `threads` is what each rank computed with.

    Raises DlperfError where hosts, groups and ranks do not fit together.
    """

    hosts: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[RankStep, ...], ...]
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
            refuse("ranks", [], "one rank at least")
        if len(self.hosts) != n:
            refuse("hosts", list(self.hosts), f"one host name for each of the {n} ranks")
        if not self.groups or self.groups[0] != tuple(range(n)):
            refuse(
                "groups",
                [list(group) for group in self.groups],
                f"the world first, with the ranks 0 to {n - 1}",
            )
        for index, group in enumerate(self.groups):
            if not group or len(set(group)) != len(group) or not set(group) <= set(range(n)):
                refuse(
                    f"groups[{index}]", list(group), f"some of the ranks 0 to {n - 1}, each once"
                )
        for rank, steps in enumerate(self.steps):
            if len(steps) != len(self.steps[0]):
                raise DlperfError(
                    f"ranks[{rank}].steps has {len(steps)} steps; expected {len(self.steps[0])}, as"
                    " ranks[0] has"
                )
            self._check_rank(rank, steps)

    def _check_rank(self, rank: int, steps: tuple[RankStep, ...]) -> None:
        launched: set[int] = set()
        newest = -1
        for index, step in enumerate(steps):
            entry = f"ranks[{rank}].steps[{index}]"
            if step.end_s < step.begin_s:
                refuse(f"{entry}.end_s", step.end_s, f"at least begin_s, {step.begin_s}")
            if index and step.begin_s < steps[index - 1].end_s:
                refuse(
                    f"{entry}.begin_s",
                    step.begin_s,
                    f"at least the end of the step before, {steps[index - 1].end_s}",
                )
            for number, event in enumerate(step.events):
                where = f"{entry}.events[{number}]"
                if event.until_s < event.at_s:
                    refuse(f"{where}.until_s", event.until_s, f"at least at_s, {event.at_s}")
                if number and event.at_s < step.events[number - 1].until_s:
                    refuse(
                        f"{where}.at_s",
                        event.at_s,
                        f"at least the end of the event before, {step.events[number - 1].until_s}",
                    )
                if event.group >= len(self.groups) or rank not in self.groups[event.group]:
                    refuse(f"{where}.group", event.group, f"the number of a group with rank {rank}")
                if event.peer is not None and event.peer not in self.groups[event.group]:
                    refuse(f"{where}.peer", event.peer, f"a rank of group {event.group}")
                if event.op == LAUNCH:
                    if event.call <= newest:
                        refuse(
                            f"{where}.call",
                            event.call,
                            f"more than {newest}: calls are numbered in the order of their"
                            " launches",
                        )
                    launched.add(newest := event.call)
                elif event.call not in launched:
                    refuse(f"{where}.call", event.call, "a call that was launched before")

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
        """Every collective and message with all its launches: the n-th call on a group is the same
        collective on all its ranks, and the n-th message from one rank to another in a group is the
        one that the other receives as its n-th from there.

        Raises DlperfError where the ranks' calls are of different kinds, so that they cannot belong
        together.
        """
        found: dict[tuple[int, tuple[int | None, ...], int], list[tuple[int, int, Event]]] = {}
        for rank, steps in enumerate(self.steps):
            counts: dict[tuple[int, tuple[int | None, ...], str], int] = {}
            for index, event in (
                (index, event) for index, step in enumerate(steps) for event in step.launches
            ):
                ends = {"send": (rank, event.peer), "recv": (event.peer, rank)}.get(event.kind, ())
                side = event.kind if ends else ""
                number = counts.get((event.group, ends, side), 0)
                counts[event.group, ends, side] = number + 1
                found.setdefault((event.group, ends, number), []).append((rank, index, event))
        return tuple(
            (
                Meeting("send", group, tuple(launches), len(launches) == 2)
                if ends
                else self._collective(group, number, launches)
            )
            for (group, ends, number), launches in found.items()
        )

    def _collective(
        self, group: int, number: int, launches: list[tuple[int, int, Event]]
    ) -> Meeting:
        (rank, _, first), *others = launches
        for other, _, event in others:
            if (event.kind, event.peer) != (first.kind, first.peer):
                a, b = (
                    f"{e.kind}{'' if e.peer is None else f' with root {e.peer}'}"
                    for e in (first, event)
                )
                raise DlperfError(
                    f"call {number} on group {group} is {a} on rank {rank} and {b} on rank {other};"
                    " expected one call on all ranks"
                )
        return Meeting(first.kind, group, tuple(launches), len(launches) == len(self.groups[group]))

    # -- as a file ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON, whole or not at all."""
        files.write_json(path, self.to_json(), indent=None)

    @classmethod
    def load(cls, path: str | Path) -> Communication:
        """Read a trace. Raises DlperfError naming the file and the entry where it is missing,
        truncated, newer, damaged or no such trace.
        """

        def read(data: dict[str, Any]) -> Communication:
            found = replace(cls.from_json(data), path=str(path))
            _ = found.meetings  # which must fit together
            return found

        return files.load(path, SCHEMA, SCHEMA_VERSION, read, "Record it again.")

    def to_json(self) -> dict[str, Any]:
        """The trace as JSON data."""
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "versions": dict(self.versions),
            "machine": self.machine,
            "script": self.script,
            "backend": self.backend,
            "threads": self.threads,
            "notes": list(self.notes),
            "hosts": list(self.hosts),
            "groups": [list(group) for group in self.groups],
            "ranks": [
                {"rank": rank, "steps": [step_to_json(step) for step in steps]}
                for rank, steps in enumerate(self.steps)
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Communication:
        """The trace that :meth:`to_json` wrote. Raises DlperfError naming the entry that no
        recording can have made.
        """
        record = convert(data, CommunicationRecord)
        for index, row in enumerate(record.ranks):
            if row.rank != index:
                refuse(
                    f"ranks[{index}].rank",
                    row.rank,
                    f"{index}: ranks stand in order, none is left out",
                )
        return cls(
            hosts=record.hosts,
            groups=record.groups,
            steps=tuple(row.steps for row in record.ranks),
            script=record.script,
            backend=record.backend,
            threads=record.threads,
            machine=record.machine,
            notes=record.notes,
            versions=record.versions,
            created=record.created,
        )


def step_to_json(step: RankStep) -> dict[str, Any]:
    """A step as JSON data; times are rounded to the nanosecond."""
    return {
        "begin_s": round(step.begin_s, 9),
        "end_s": round(step.end_s, 9),
        "first": step.first,
        "events": [
            {
                "op": e.op,
                "call": e.call,
                "kind": e.kind,
                "bytes": e.n_bytes,
                "group": e.group,
                "peer": e.peer,
                "at_s": round(e.at_s, 9),
                "until_s": round(e.until_s, 9),
                "done_s": None if e.done_s is None else round(e.done_s, 9),
            }
            for e in step.events
        ],
    }


def step_from_json(row: dict[str, Any]) -> RankStep:
    """The step of :func:`step_to_json`. Raises DlperfError naming an entry that does not fit."""
    return convert(row, RankStep)

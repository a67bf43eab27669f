"""The format of a trace of communication."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dlperf.core.conversion import Name, Text, Threads, Whole

Kind = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
]
Time = Annotated[float, Meta(ge=-1e12, le=1e12)]
"""Seconds from any origin."""


class EventRecord(Struct, gc=False):
    """A call, or the wait for one."""

    op: Literal["launch", "wait"]  #: A call is issued, or waited for.
    call: Whole  #: Number of the rank's call.
    kind: Kind  #: The collective or message.
    bytes: Whole  #: The whole vector, or the message.
    group: Whole  #: Number in `groups`.
    at_s: Time  #: Begin, from the step's start.
    until_s: Time  #: End.
    peer: Whole | None = None  #: Other rank of a message, or the root.
    done_s: Time | None = None  #: When the call was complete.


class RankStepRecord(Struct, gc=False):
    """A rank's step."""

    begin_s: Time
    end_s: Time
    first: bool
    events: list[EventRecord]


class RankStepsRecord(Struct, gc=False):
    """A rank's steps."""

    rank: Whole
    steps: list[RankStepRecord]


class CommunicationRecord(Struct, gc=False):
    """The communication of a training."""

    hosts: list[Name]  #: Host of each rank.
    groups: list[list[Whole]]  #: Ranks of each process group.
    ranks: list[RankStepsRecord]  #: Ranks with their steps.
    script: Text = ""  #: The training script.
    backend: Text = "gloo"  #: Library of the collectives.
    threads: Threads = 1  #: Threads of a rank.
    machine: Text = ""  #: Processor.
    notes: list[Text] = []  #: Remarks of the recording.
    versions: dict[str, Text] = {}  #: dlperf, Python, system, torch, numpy.
    created: Text = ""  #: Time of the recording, ISO 8601.

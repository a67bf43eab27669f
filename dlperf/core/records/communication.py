"""The format of a trace of communication."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dlperf.core.records.conversion import Name, Text, Threads, Whole

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

    op: Literal["launch", "wait"]
    call: Whole
    kind: Kind
    bytes: Whole
    group: Whole
    at_s: Time
    until_s: Time
    peer: Whole | None = None
    done_s: Time | None = None


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

    hosts: list[Name]
    groups: list[list[Whole]]
    ranks: list[RankStepsRecord]
    script: Text = ""
    backend: Text = "gloo"
    threads: Threads = 1
    machine: Text = ""
    notes: list[Text] = []
    versions: dict[str, Text] = {}
    created: Text = ""

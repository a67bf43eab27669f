"""The format of a trace of communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from dlperf.core.conversion import Name, Text, Threads, Whole

Operation = Literal["launch", "wait"]
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


class Event(Struct, frozen=True, gc=False):
    """A rank issues a call (`launch`), or blocks for one (`wait`); seconds from the start of its
    step.

    `call` numbers the rank's calls from 0 on, in the order of their launches; a wait bears the
    number of its launch, which may lie in a step before. A blocking call is a launch followed by
    its wait; a call may be waited for more than once, or never. `n_bytes` is the whole vector, as
    in a cluster file: what each rank puts into an all-reduce, reduce-scatter, broadcast, reduce or
    all-to-all, and what comes of an all-gather or gather or goes into a scatter; of a message its
    own size. `group` is an index in the file's `groups`. `peer` is the rank at the other
    end of a message (None: any sender) or the root of a rooted collective, both numbered as in the
    world; None elsewhere. `done_s` of a launch is when the call was complete, None where that could
    not be seen.
    """

    op: Operation  #: A call is issued, or waited for.
    call: Whole  #: Number of the rank's call.
    kind: Kind  #: The collective or message.
    n_bytes: Whole = field(name="bytes")  #: The whole vector, or the message.
    group: Whole  #: Number in `groups`.
    at_s: Time  #: Begin, from the step's start.
    until_s: Time  #: End.
    peer: Whole | None = None  #: Other rank of a message, or the root.
    done_s: Time | None = None  #: When the call was complete.

    @property
    def seconds(self) -> float:
        """How long the rank issued, or blocked."""
        return self.until_s - self.at_s


@dataclass(frozen=True, slots=True)
class RankStep:
    """A rank's step from the end of the optimizer's step before to the end of its own, on the
    rank's own clock (seconds, from any origin).

    A program without optimizers has one: from its first call to the end of its last.

    `events` are in the order of their starts and do not overlap; what lies between them is the
    rank's computation, and whatever else it does. `first`: the first step after the model was
    wrapped, in which DistributedDataParallel has not found its buckets yet.
    """

    begin_s: Time
    end_s: Time
    events: tuple[Event, ...]
    first: bool

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s

    @property
    def launches(self) -> Iterator[Event]:
        """The calls issued."""
        return (event for event in self.events if event.op == "launch")

    @property
    def waits(self) -> Iterator[Event]:
        """The blocking."""
        return (event for event in self.events if event.op == "wait")


class RankStepsRecord(Struct, gc=False):
    """A rank's steps."""

    rank: Whole
    steps: tuple[RankStep, ...]


class CommunicationRecord(Struct, gc=False):
    """The communication of a training."""

    hosts: tuple[Name, ...]  #: Host of each rank.
    groups: tuple[tuple[Whole, ...], ...]  #: Ranks of each process group.
    ranks: list[RankStepsRecord]  #: Ranks with their steps.
    script: Text = ""  #: The training script.
    backend: Text = "gloo"  #: Library of the collectives.
    threads: Threads = 1  #: Threads of a rank.
    machine: Text = ""  #: Processor.
    notes: tuple[Text, ...] = ()  #: Remarks of the recording.
    versions: dict[str, Text] = {}  #: dlperf, Python, system, torch, numpy.
    created: Text = ""  #: Time of the recording, ISO 8601.

"""The format of a cluster file, measured or written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dlperf.core.conversion import (
    CoRunRecord,
    IndexOrNone,
    Name,
    Positive,
    PositiveSamplesRecord,
    Seconds,
    Text,
    Threads,
    Whole,
)

Distance = Literal["socket", "node", "network"]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
BytesPerSecond = Annotated[float, Meta(ge=1e-3, le=1e18)]
Ranks = Annotated[int, Meta(ge=1, le=2**24)]
SeveralRanks = Annotated[int, Meta(ge=2, le=2**24)]


@dataclass(frozen=True)
class Rank:
    """Where one rank of the measurement ran: host name, and socket of the host (-1 where it may use
    several).

    `system` names the running kernel (Linux: its boot id): hosts that have it in common are
    containers or namespaces of one computer, whose ranks share cores and memory. Empty where it is
    not known.
    """

    host: Name  #: Host name.
    socket: IndexOrNone = -1  #: Socket; -1 for several.
    system: Text = ""  #: Boot id of the kernel.


class MessageRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """Messages of one size over a link."""

    #: Half a round trip, one-way train, or the sender's call.
    what: Literal["ping_pong", "train", "send"]
    bytes: Whole  #: Size of a message.
    pairs: Ranks  #: Pairs of ranks at once.
    messages: Positive  #: Messages of a train.


class LinkRecord(Struct, gc=False, forbid_unknown_fields=True):
    """A link: measured messages, a data sheet's numbers, or both."""

    distance: Distance  #: Where the other rank is.
    latency_s: Seconds | None = None  #: From a data sheet.
    bandwidth_bytes_per_s: BytesPerSecond | None = None  #: From a data sheet, one direction.
    messages: list[MessageRecord] = []  #: Measured messages.


class CollectiveRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """A collective at one size."""

    kind: Kind  #: The collective.
    bytes: Whole  #: The whole vector.
    ranks: SeveralRanks  #: Number of ranks.
    ranks_per_node: Ranks  #: Ranks of a node.


class ReductionRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """The sum of two vectors."""

    bytes: Positive  #: Size of a vector.


class InterferenceRecord(Struct, gc=False):
    """A computation and a collective, alone and together."""

    kernel: Name  #: `gemm` or `stream`.
    threads: Threads  #: Number of threads.
    bytes: Positive  #: Size of the all-reduce.
    ranks: Ranks  #: Number of ranks.
    ranks_per_node: Ranks  #: Ranks of a node.
    alone: PositiveSamplesRecord  #: The computation alone.
    together: PositiveSamplesRecord  #: The computation beside the all-reduce.
    collective_alone: PositiveSamplesRecord  #: The all-reduce alone.
    collective_together: PositiveSamplesRecord  #: The all-reduce beside the computation.


class ClusterRecord(Struct, gc=False, forbid_unknown_fields=True):
    """Measured links between ranks."""

    schema: str  #: `dlperf.cluster`.
    schema_version: int  #: 2.
    created: Text = ""  #: Time of the measurement, ISO 8601.
    versions: dict[str, Text] = {}  #: dlperf, Python, system, torch, numpy.
    backend: Literal["gloo", "nccl"] = "gloo"  #: Library of the collectives.
    threads: Threads = 1  #: Threads of a rank.
    mode: Text = "hand-written"  #: `quick`, `full` or `hand-written`.
    groups: tuple[Text, ...] = ()  #: Finished groups.
    complete: bool = False  #: Whether every group is finished.
    notes: tuple[Text, ...] = ()  #: Remarks of the measurement.
    ranks: tuple[Rank, ...] = ()  #: Where the ranks ran.
    links: list[LinkRecord] = []  #: Links by distance.
    collectives: list[CollectiveRecord] = []  #: Measured collectives.
    reductions: list[ReductionRecord] = []  #: Sums of vectors.
    interferences: list[InterferenceRecord] = []  #: Computation beside communication.
    co_runs: list[CoRunRecord] = []  #: Ranks of one computer at once.

"""The format of a cluster file, measured or written by hand."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from dlperf.core.records.conversion import (
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


class RankRecord(Struct, gc=False):
    """Where a rank ran."""

    host: Name
    socket: IndexOrNone = -1
    system: Text = ""


class MessageRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """Messages of one size over a link."""

    what: Literal["ping_pong", "train", "send"]
    bytes: Whole
    pairs: Ranks
    messages: Positive


class LinkRecord(Struct, gc=False, forbid_unknown_fields=True):
    """A link: measured messages, a data sheet's numbers, or both."""

    distance: Distance
    latency_s: Seconds | None = None
    bandwidth_bytes_per_s: BytesPerSecond | None = None
    messages: list[MessageRecord] = []


class CollectiveRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """A collective at one size."""

    kind: Kind
    bytes: Whole
    ranks: SeveralRanks
    ranks_per_node: Ranks


class ReductionRecord(PositiveSamplesRecord, gc=False, kw_only=True):
    """The sum of two vectors."""

    bytes: Positive


class InterferenceRecord(Struct, gc=False):
    """A computation and a collective, alone and together."""

    kernel: Name
    threads: Threads
    bytes: Positive
    ranks: Ranks
    ranks_per_node: Ranks
    alone: PositiveSamplesRecord
    together: PositiveSamplesRecord
    collective_alone: PositiveSamplesRecord
    collective_together: PositiveSamplesRecord


class ClusterRecord(Struct, gc=False, forbid_unknown_fields=True):
    """Measured links between ranks."""

    schema: str
    schema_version: int
    created: Text = ""
    versions: dict[str, Text] = {}
    backend: Literal["gloo", "nccl"] = "gloo"
    threads: Threads = 1
    mode: Text = "hand-written"
    groups: list[Text] = []
    complete: bool = False
    notes: list[Text] = []
    ranks: list[RankRecord] = []
    links: list[LinkRecord] = []
    collectives: list[CollectiveRecord] = []
    reductions: list[ReductionRecord] = []
    interferences: list[InterferenceRecord] = []
    co_runs: list[CoRunRecord] = []

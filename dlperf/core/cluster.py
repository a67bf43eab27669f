"""Measured links between ranks as data: messages, collectives, interference with computation, and
co-run slowdowns of ranks.

Nothing here imports torch. A cluster file keeps raw samples, as a machine file does; postal, LogGP
and max-rate parameters are fitted from them when the file is used
(:mod:`dlperf.distributed.link_fits`), so that a better model needs no new measurement. A file
written by hand from data sheets holds the two numbers of each link instead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from msgspec import Meta, Struct, structs, to_builtins
from msgspec import field as entry

from dlperf.core import files
from dlperf.core.clock import Samples
from dlperf.core.co_run import CoRun, co_run_from_record, co_run_to_json
from dlperf.core.conversion import (
    CoRunRecord,
    IndexOrNone,
    Name,
    Positive,
    PositiveSeconds,
    Seconds,
    Text,
    Threads,
    Whole,
    check_unique,
    convert,
    refuse,
)
from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError

SCHEMA, SCHEMA_VERSION = "dlperf.cluster", 2
Distance = Literal["socket", "node", "network"]
What = Literal["ping_pong", "train", "send"]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
BytesPerSecond = Annotated[float, Meta(ge=1e-3, le=1e18)]
Ranks = Annotated[int, Meta(ge=1, le=2**24)]
SeveralRanks = Annotated[int, Meta(ge=2, le=2**24)]
DISTANCES: tuple[Distance, ...] = get_args(Distance)
"""Where the other end of a link is: on the same socket, on another socket of the same node, on
another node (host name).
"""
KINDS: tuple[Kind, ...] = get_args(Kind)
PING_PONG: Final = "ping_pong"
TRAIN: Final = "train"
SEND: Final = "send"


class Timed(Struct, frozen=True, kw_only=True, gc=False):
    """Samples in seconds, and the number of disturbed ones."""

    samples_s: Annotated[tuple[PositiveSeconds, ...], Meta(min_length=1)]  #: Raw samples.
    disturbed: Whole = 0  #: Samples that were dropped.

    def __post_init__(self) -> None:
        structs.force_setattr(self, "samples_s", tuple(self.samples_s))  # hashable

    @property
    def samples(self) -> Samples:
        """The samples with their statistics."""
        return Samples(self.samples_s, self.disturbed)


class Message(Timed, frozen=True, gc=False):
    """Messages of one size over a link, while `n_pairs` pairs of ranks do the same at once.

    `what` is ``ping_pong`` (half a round trip), ``train`` (`n_messages` one after another in one
    direction, until the last is known to have arrived) or ``send`` (what the sender's call takes
    before it returns: LogGP's overhead). Of several pairs, the slowest counts.
    """

    what: What  #: Half a round trip, one-way train, or the sender's call.
    n_bytes: Whole = entry(name="bytes")  #: Size of a message.
    n_pairs: Ranks = entry(name="pairs")  #: Pairs of ranks at once.
    n_messages: Positive = entry(name="messages")  #: Messages of a train.


class Link(Struct, frozen=True, gc=False, forbid_unknown_fields=True, omit_defaults=True):
    """What joins two ranks at one distance: measured messages, `latency_s` and
    `bandwidth_bytes_per_s` from a data sheet, or both.
    """

    distance: Distance  #: Where the other rank is.
    messages: tuple[Message, ...] = ()  #: Measured messages.
    latency_s: Seconds | None = None  #: From a data sheet.
    bandwidth_bytes_per_s: BytesPerSecond | None = None  #: From a data sheet, one direction.


class Collective(Timed, frozen=True, gc=False):
    """One collective at one size: seconds from a common start, the mean over its ranks (of a
    broadcast, the last rank).

    `n_bytes` is the whole vector: what each rank puts into an all-reduce, reduce-scatter or
    broadcast, and what each gets from an all-gather.
    """

    kind: Kind  #: The collective.
    n_bytes: Whole = entry(name="bytes")  #: The whole vector.
    n_ranks: SeveralRanks = entry(name="ranks")  #: Number of ranks.
    ranks_per_node: Ranks  #: Ranks of a node.


class Reduction(Timed, frozen=True, gc=False):
    """The sum of two vectors in one thread, as a ring adds a segment that has arrived."""

    n_bytes: Positive = entry(name="bytes")  #: Size of a vector.


class Interference(Struct, frozen=True, gc=False):
    """A computation while a collective runs in the background of every rank, and the collective
    meanwhile.

    `alone` and `together` are calls of the computation without and with an all-reduce of `n_bytes`;
    `collective_alone` and `collective_together` that all-reduce without and with the computation.
    """

    kernel: Name  #: `gemm` or `stream`.
    threads: Threads  #: Number of threads.
    n_bytes: Positive = entry(name="bytes")  #: Size of the all-reduce.
    n_ranks: Ranks = entry(name="ranks")  #: Number of ranks.
    ranks_per_node: Ranks  #: Ranks of a node.
    alone: Timed  #: The computation alone.
    together: Timed  #: The computation beside the all-reduce.
    collective_alone: Timed  #: The all-reduce alone.
    collective_together: Timed  #: The all-reduce beside the computation.

    @property
    def compute_factor(self) -> float:
        """Slowdown of the computation by the collective, at the rate of this link."""
        return self.together.samples.median / self.alone.samples.median

    @property
    def collective_factor(self) -> float:
        """Slowdown of the collective while every rank computes."""
        return self.collective_together.samples.median / self.collective_alone.samples.median

    @property
    def stolen_s_per_byte(self) -> float:
        """Seconds of computation that each byte of the collective costs a rank.

        The processor is taken by moving and adding bytes, not by waiting for a link, so this
        carries over to a slower link where `compute_factor` does not: (1 - alone / together) x
        duration / bytes, not below 0.
        """
        lost = max(0.0, 1 - self.alone.samples.median / self.together.samples.median)
        return lost * self.collective_together.samples.median / self.n_bytes


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
    links: tuple[Link, ...] = ()  #: Links by distance.
    collectives: tuple[Collective, ...] = ()  #: Measured collectives.
    reductions: tuple[Reduction, ...] = ()  #: Sums of vectors.
    interferences: tuple[Interference, ...] = ()  #: Computation beside communication.
    co_runs: list[CoRunRecord] = []  #: Ranks of one computer at once.


@dataclass(frozen=True, repr=False)
class Cluster(Displayed, by="dlperf.report.summaries"):
    """Everything known of the links between ranks.

    `backend` is that of torch.distributed, `threads` what each rank computed with, `mode` the depth
    (``quick``, ``full``, ``hand-written``), `groups` the finished parts, `notes` what the measuring
    noticed. `co_runs` are slowdowns of ranks of one computer, one thread each, by kind of work;
    empty where each rank had a computer of its own.
    """

    links: tuple[Link, ...] = ()
    collectives: tuple[Collective, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    interferences: tuple[Interference, ...] = ()
    ranks: tuple[Rank, ...] = ()
    backend: str = "gloo"
    threads: int = 1
    mode: str = "hand-written"
    groups: tuple[str, ...] = ()
    complete: bool = False
    notes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    path: str = ""
    co_runs: tuple[CoRun, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def ranks_per_system(self) -> int:
        """The most measured ranks that one computer ran, whatever it calls its hosts; 1 where
        nothing is known.
        """
        return max(Counter(rank.system or rank.host for rank in self.ranks).values(), default=1)

    @property
    def ranks_per_host(self) -> int:
        """The most measured ranks with one host name; 1 where nothing is known."""
        return max(Counter(rank.host for rank in self.ranks).values(), default=1)

    def link(self, distance: str) -> Link | None:
        """The link at one distance; None where the file holds none."""
        return next((link for link in self.links if link.distance == distance), None)

    def save(self, path: str | Path) -> None:
        """Write the cluster file, whole or not at all."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, measured or written by hand.

        Raises DlperfError naming the file, the entry and the way out: missing, truncated, an
        unknown field or distance, a value that is no time or rate, no link at all.
        """
        return replace(
            files.load(
                path, SCHEMA, SCHEMA_VERSION, cls.from_json, "Measure again, or edit the file."
            ),
            path=str(path),
        )

    def to_json(self) -> dict[str, Any]:
        """The cluster as JSON data."""
        shared = ClusterRecord.__struct_fields__[2:-1]
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            **{name: to_builtins(getattr(self, name)) for name in shared},
            "co_runs": [co_run_to_json(co_run) for co_run in self.co_runs],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        """The cluster that :meth:`to_json` wrote, or that a person did: only `links` must be there.
        Raises DlperfError naming the entry.
        """
        record = convert(data, ClusterRecord)
        if not record.links and not record.groups and record.mode == "hand-written":
            refuse(
                "links",
                [],
                "at least one, with distance, latency_s and bandwidth_bytes_per_s",
            )
        check_unique("links[{}].distance", [link.distance for link in record.links])
        for index, link in enumerate(record.links):
            for name in ("latency_s", "bandwidth_bytes_per_s"):
                if not link.messages and getattr(link, name) is None:
                    raise DlperfError(
                        f"links[{index}] ({link.distance}) has neither messages nor {name};"
                        " expected both latency_s and bandwidth_bytes_per_s"
                    )
        for index, row in enumerate(record.collectives):
            if row.ranks_per_node > row.n_ranks:
                refuse(
                    f"collectives[{index}].ranks_per_node",
                    row.ranks_per_node,
                    f"at most its {row.n_ranks} ranks",
                )
        entries = structs.asdict(record)
        del entries["schema"], entries["schema_version"]
        entries["co_runs"] = tuple(
            co_run_from_record(row, f"co_runs[{index}]") for index, row in enumerate(record.co_runs)
        )
        return cls(**entries)

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
from typing import Any, get_args

from dlperf.core import files
from dlperf.core.clock import Samples, samples_from_record, samples_to_json
from dlperf.core.co_run import CoRun, co_run_from_record, co_run_to_json
from dlperf.core.conversion import check_unique, convert, refuse
from dlperf.core.display import Displayed
from dlperf.core.errors import DlperfError
from dlperf.core.records.cluster import (
    ClusterRecord,
    Distance,
    InterferenceRecord,
    Kind,
    LinkRecord,
)
from dlperf.core.records.cluster import Rank as Rank

SCHEMA, SCHEMA_VERSION = "dlperf.cluster", 2
DISTANCES: tuple[str, ...] = get_args(Distance)
"""Where the other end of a link is: on the same socket, on another socket of the same node, on
another node (host name).
"""
KINDS: tuple[str, ...] = get_args(Kind)
PING_PONG, TRAIN, SEND = "ping_pong", "train", "send"


@dataclass(frozen=True)
class Message:
    """Messages of one size over a link, while `n_pairs` pairs of ranks do the same at once; samples
    in seconds.

    `what` is ``ping_pong`` (half a round trip), ``train`` (`n_messages` one after another in one
    direction, until the last is known to have arrived) or ``send`` (what the sender's call takes
    before it returns: LogGP's overhead). Of several pairs, the slowest counts.
    """

    what: str
    n_bytes: int
    n_pairs: int
    n_messages: int
    samples: Samples


@dataclass(frozen=True)
class Link:
    """What joins two ranks at one distance: raw samples, or `latency_s` and `bandwidth_bytes_per_s`
    (one direction) from a data sheet, or both.
    """

    distance: str
    messages: tuple[Message, ...] = ()
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Collective:
    """One collective at one size: seconds from a common start, the mean over its ranks (of a
    broadcast, the last rank).

    `n_bytes` is the whole vector: what each rank puts into an all-reduce, reduce-scatter or
    broadcast, and what each gets from an all-gather.
    """

    kind: str
    n_bytes: int
    n_ranks: int
    ranks_per_node: int
    samples: Samples


@dataclass(frozen=True)
class Reduction:
    """The sum of two vectors of `n_bytes` in one thread, as a ring adds a segment that has arrived;
    seconds.
    """

    n_bytes: int
    samples: Samples


@dataclass(frozen=True)
class Interference:
    """A computation while a collective runs in the background of every rank, and the collective
    meanwhile.

    `kernel` is ``gemm`` or ``stream``; `alone` and `together` are seconds of one call of it,
    without and with an all-reduce of `n_bytes`; `collective_alone` and `collective_together`
    seconds of that all-reduce, without and with the computation.
    """

    kernel: str
    threads: int
    n_bytes: int
    n_ranks: int
    ranks_per_node: int
    alone: Samples
    together: Samples
    collective_alone: Samples
    collective_together: Samples

    @property
    def compute_factor(self) -> float:
        """Slowdown of the computation by the collective, at the rate of this link."""
        return self.together.median / self.alone.median

    @property
    def collective_factor(self) -> float:
        """Slowdown of the collective while every rank computes."""
        return self.collective_together.median / self.collective_alone.median

    @property
    def stolen_s_per_byte(self) -> float:
        """Seconds of computation that each byte of the collective costs a rank.

        The processor is taken by moving and adding bytes, not by waiting for a link, so this
        carries over to a slower link where `compute_factor` does not: (1 - alone / together) x
        duration / bytes, not below 0.
        """
        lost = max(0.0, 1 - self.alone.median / self.together.median)
        return lost * self.collective_together.median / self.n_bytes


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
        return {
            "schema": SCHEMA,
            "schema_version": SCHEMA_VERSION,
            "created": self.created,
            "versions": dict(self.versions),
            "backend": self.backend,
            "threads": self.threads,
            "mode": self.mode,
            "groups": list(self.groups),
            "complete": self.complete,
            "notes": list(self.notes),
            "ranks": [vars(rank) for rank in self.ranks],
            "links": [_link_to_json(link) for link in self.links],
            "collectives": [
                {
                    "kind": c.kind,
                    "bytes": c.n_bytes,
                    "ranks": c.n_ranks,
                    "ranks_per_node": c.ranks_per_node,
                    **samples_to_json(c.samples),
                }
                for c in self.collectives
            ],
            "reductions": [
                {"bytes": r.n_bytes, **samples_to_json(r.samples)} for r in self.reductions
            ],
            "interferences": [
                {
                    "kernel": i.kernel,
                    "threads": i.threads,
                    "bytes": i.n_bytes,
                    "ranks": i.n_ranks,
                    "ranks_per_node": i.ranks_per_node,
                    **{name: samples_to_json(getattr(i, name)) for name in _SERIES},
                }
                for i in self.interferences
            ],
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
                record.links,
                "at least one, with distance, latency_s and bandwidth_bytes_per_s",
            )
        check_unique("links[{}].distance", [link.distance for link in record.links])
        for index, row in enumerate(record.collectives):
            if row.ranks_per_node > row.ranks:
                refuse(
                    f"collectives[{index}].ranks_per_node",
                    row.ranks_per_node,
                    f"at most its {row.ranks} ranks",
                )
        return cls(
            links=tuple(
                _link_from_record(link, f"links[{index}]")
                for index, link in enumerate(record.links)
            ),
            collectives=tuple(
                Collective(c.kind, c.bytes, c.ranks, c.ranks_per_node, samples_from_record(c))
                for c in record.collectives
            ),
            reductions=tuple(
                Reduction(row.bytes, samples_from_record(row)) for row in record.reductions
            ),
            interferences=tuple(map(_interference_from_record, record.interferences)),
            ranks=record.ranks,
            backend=record.backend,
            threads=record.threads,
            mode=record.mode,
            groups=record.groups,
            complete=record.complete,
            notes=record.notes,
            versions=record.versions,
            created=record.created,
            co_runs=tuple(
                co_run_from_record(row, f"co_runs[{index}]")
                for index, row in enumerate(record.co_runs)
            ),
        )


_SERIES = ("alone", "together", "collective_alone", "collective_together")


def _link_to_json(link: Link) -> dict[str, Any]:
    sheet = {
        name: value
        for name in ("latency_s", "bandwidth_bytes_per_s")
        if (value := getattr(link, name)) is not None
    }
    messages = [
        {
            "what": m.what,
            "bytes": m.n_bytes,
            "pairs": m.n_pairs,
            "messages": m.n_messages,
            **samples_to_json(m.samples),
        }
        for m in link.messages
    ]
    return {"distance": link.distance, **sheet, **({"messages": messages} if messages else {})}


def _link_from_record(record: LinkRecord, entry: str) -> Link:
    if not record.messages:
        for name in ("latency_s", "bandwidth_bytes_per_s"):
            if getattr(record, name) is None:
                raise DlperfError(
                    f"{entry} ({record.distance}) has neither messages nor {name}; expected both"
                    " latency_s and bandwidth_bytes_per_s"
                )
    messages = tuple(
        Message(m.what, m.bytes, m.pairs, m.messages, samples_from_record(m))
        for m in record.messages
    )
    return Link(record.distance, messages, record.latency_s, record.bandwidth_bytes_per_s)


def _interference_from_record(record: InterferenceRecord) -> Interference:
    series = (samples_from_record(getattr(record, name)) for name in _SERIES)
    return Interference(
        record.kernel, record.threads, record.bytes, record.ranks, record.ranks_per_node, *series
    )

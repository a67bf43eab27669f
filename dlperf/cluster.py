"""Measured links between ranks as data: what joins them, how long messages and collectives take, what computing loses meanwhile, and beside other ranks.

Nothing here imports torch. A cluster file keeps raw samples, as a machine file does; postal, LogGP and max-rate parameters are fitted from them
when the file is used (:mod:`dlperf.network`), so that a better law needs no new measurement. A file written by hand from data sheets
holds the two numbers of each link instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from dlperf.clock import Samples
from dlperf.display import Displayed
from dlperf.errors import DlperfError
from dlperf.files import read_json, write_json
from dlperf.sharing import Sharing, sharing_from_json, sharing_to_json

SCHEMA, SCHEMA_VERSION = "dlperf.cluster", 1
DISTANCES = ("socket", "node", "network")
"""Where the other end of a link is: on the same socket, on another socket of the same node, on another node (host name)."""
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
PING_PONG, TRAIN, SEND = "ping_pong", "train", "send"
_FIELDS = ("schema", "schema_version", "created", "versions", "backend", "threads", "mode", "groups", "complete", "notes", "ranks", "links", "collectives",
           "reductions", "interferences", "sharings")  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """Where one rank of the measurement ran: host name, and socket of the host (-1 where it may use several).

    `system` names the running kernel (Linux: its boot id): hosts that have it in common are containers or namespaces of one computer, whose ranks share cores
    and memory. Empty where it is not known.
    """

    host: str
    socket: int = -1
    system: str = ""


@dataclass(frozen=True)
class Message:
    """Messages of one size over a link, while `n_pairs` pairs of ranks do the same at once; samples in seconds.

    `what` is ``ping_pong`` (half a round trip), ``train`` (`n_messages` one after another in one direction, until the last is known to have
    arrived) or ``send`` (what the sender's call takes before it returns: LogGP's overhead). Of several pairs, the slowest counts.
    """

    what: str
    n_bytes: int
    n_pairs: int
    n_messages: int
    samples: Samples


@dataclass(frozen=True)
class Link:
    """What joins two ranks at one distance: raw samples, or `latency_s` and `bandwidth_bytes_per_s` (one direction) from a data sheet, or both."""

    distance: str
    messages: tuple[Message, ...] = ()
    latency_s: float | None = None
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Collective:
    """One collective at one size: seconds from a common start, the mean over its ranks (of a broadcast, the last rank).

    `n_bytes` is the whole vector: what each rank puts into an all-reduce, reduce-scatter or broadcast, and what each gets from an all-gather.
    """

    kind: str
    n_bytes: int
    n_ranks: int
    ranks_per_node: int
    samples: Samples


@dataclass(frozen=True)
class Reduction:
    """The sum of two vectors of `n_bytes` in one thread, as a ring adds a segment that has arrived; seconds."""

    n_bytes: int
    samples: Samples


@dataclass(frozen=True)
class Interference:
    """A computation while a collective runs in the background of every rank, and the collective meanwhile.

    `kernel` is ``gemm`` or ``stream``; `alone` and `together` are seconds of one call of it, without and with an all-reduce of `n_bytes`;
    `collective_alone` and `collective_together` seconds of that all-reduce, without and with the computation.
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
        """How many times as long the computation takes meanwhile, at the rate of this link."""
        return self.together.median / self.alone.median

    @property
    def collective_factor(self) -> float:
        """How many times as long the collective takes while every rank computes."""
        return self.collective_together.median / self.collective_alone.median

    @property
    def stolen_s_per_byte(self) -> float:
        """Seconds of computation that each byte of the collective costs a rank.

        The processor is taken by moving and adding bytes, not by waiting for a link, so this carries over to a slower link where
        `compute_factor` does not: (1 - alone / together) x duration / bytes, not below 0.
        """
        lost = max(0.0, 1 - self.alone.median / self.together.median)
        return lost * self.collective_together.median / self.n_bytes


@dataclass(frozen=True, repr=False)
class Cluster(Displayed, by="dlperf.report.summaries"):
    """Everything known of the links between ranks.

    `backend` is that of torch.distributed, `threads` what each rank computed with, `mode` the depth (``quick``, ``full``, ``hand-written``),
    `groups` the finished parts, `notes` what the measuring noticed. `sharings` say what ranks of one computer, computing at once with one thread each, cost one
    another by kind of work; empty where each had a computer of its own.
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
    sharings: tuple[Sharing, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host names, in the order of their ranks."""
        return tuple(dict.fromkeys(rank.host for rank in self.ranks))

    @property
    def ranks_per_system(self) -> int:
        """The most measured ranks that one computer ran, whatever it calls its hosts; 1 where nothing is known."""
        names = [rank.system or rank.host for rank in self.ranks]
        return max((names.count(name) for name in names), default=1)

    @property
    def ranks_per_host(self) -> int:
        """The most measured ranks with one host name; 1 where nothing is known."""
        names = [rank.host for rank in self.ranks]
        return max((names.count(name) for name in names), default=1)

    def link(self, distance: str) -> Link | None:
        """The link at one distance; None where the file holds none."""
        return next((link for link in self.links if link.distance == distance), None)

    def save(self, path: str | Path) -> None:
        """Write the cluster file, whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a cluster file, measured or written by hand.

        Raises DlperfError naming the file, the entry and the way out: missing, truncated, an unknown field or distance, a value that is no
        time or rate, no link at all.
        """
        data = read_json(path, SCHEMA, SCHEMA_VERSION)
        try:
            return replace(cls.from_json(data), path=str(path))
        except DlperfError as error:
            raise DlperfError(f"{path}: {error}. Measure again, or edit the file.") from error
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise DlperfError(f"{path}: is damaged ({type(error).__name__}: {error}). Measure again, or edit the file.") from error

    def to_json(self) -> dict[str, Any]:
        """The cluster as JSON data."""
        return {
            "schema": SCHEMA, "schema_version": SCHEMA_VERSION, "created": self.created, "versions": dict(self.versions), "backend": self.backend,
            "threads": self.threads, "mode": self.mode, "groups": list(self.groups), "complete": self.complete, "notes": list(self.notes),
            "ranks": [{"host": rank.host, "socket": rank.socket, "system": rank.system} for rank in self.ranks],
            "links": [_link_to_json(link) for link in self.links],
            "collectives": [
                {"kind": c.kind, "bytes": c.n_bytes, "ranks": c.n_ranks, "ranks_per_node": c.ranks_per_node, **_samples_to_json(c.samples)}
                for c in self.collectives
            ],
            "reductions": [{"bytes": r.n_bytes, **_samples_to_json(r.samples)} for r in self.reductions],
            "interferences": [
                {
                    "kernel": i.kernel, "threads": i.threads, "bytes": i.n_bytes, "ranks": i.n_ranks, "ranks_per_node": i.ranks_per_node,
                    **{name: _samples_to_json(getattr(i, name)) for name in _SERIES},
                }
                for i in self.interferences
            ],
            "sharings": [sharing_to_json(sharing) for sharing in self.sharings],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Cluster:
        """The cluster that :meth:`to_json` wrote, or that a person did: only `links` must be there. Raises DlperfError naming the entry."""
        if unknown := sorted(set(data) - set(_FIELDS)):
            raise DlperfError(f"holds {unknown[0]!r}, which no cluster file has; known are {', '.join(_FIELDS)}")
        links = _rows(data, "links", _link_from_json)
        if not links and not data.get("groups") and data.get("mode", "hand-written") == "hand-written":
            raise DlperfError("links is empty; write at least one with distance, latency_s and bandwidth_bytes_per_s")
        distances = [link.distance for link in links]
        for distance in distances:
            if distances.count(distance) > 1:
                raise DlperfError(f"links holds {distance!r} twice; keep one")
        backend = data.get("backend", "gloo")
        if backend not in ("gloo", "nccl"):
            raise DlperfError(f"backend is {backend!r}; known are gloo, nccl")
        return cls(
            links=links, collectives=_rows(data, "collectives", _collective_from_json), reductions=_rows(data, "reductions", _reduction_from_json),
            interferences=_rows(data, "interferences", _interference_from_json), ranks=_rows(data, "ranks", _rank_from_json), backend=backend,
            threads=_whole(data.get("threads", 1), "threads", 1), mode=data.get("mode", "hand-written"), groups=tuple(data.get("groups", ())),
            complete=bool(data.get("complete", False)), notes=tuple(data.get("notes", ())), versions=dict(data.get("versions", {})),
            created=data.get("created", ""), sharings=_rows(data, "sharings", sharing_from_json),
        )  # fmt: skip


_SERIES = ("alone", "together", "collective_alone", "collective_together")
_T = TypeVar("_T")


def _rows(data: dict[str, Any], name: str, read: Callable[[dict[str, Any], str], _T]) -> tuple[_T, ...]:
    rows = data.get(name, [])
    if not isinstance(rows, list):
        raise DlperfError(f"{name} is {rows!r}; expected a list")
    for place, row in enumerate(rows):
        if not isinstance(row, dict):
            raise DlperfError(f"{name}[{place}] is {row!r}; expected an object")
    return tuple(read(row, f"{name}[{place}]") for place, row in enumerate(rows))


def _link_to_json(link: Link) -> dict[str, Any]:
    sheet = {name: value for name in ("latency_s", "bandwidth_bytes_per_s") if (value := getattr(link, name)) is not None}
    messages = [
        {"what": m.what, "bytes": m.n_bytes, "pairs": m.n_pairs, "messages": m.n_messages, **_samples_to_json(m.samples)} for m in link.messages
    ]
    return {"distance": link.distance, **sheet, **({"messages": messages} if messages else {})}


def _link_from_json(row: dict[str, Any], where: str) -> Link:
    distance = _one_of(row.get("distance"), f"{where}.distance", DISTANCES)
    for name in row:
        if name not in ("distance", "latency_s", "bandwidth_bytes_per_s", "messages"):
            raise DlperfError(f"{where} holds {name!r}; a link has distance, latency_s and bandwidth_bytes_per_s, and messages where it was measured")
    messages = _rows(row, "messages", lambda one, place: _message_from_json(one, f"{where}.{place}"))
    latency, bandwidth = row.get("latency_s"), row.get("bandwidth_bytes_per_s")
    if latency is not None:
        _number(latency, f"{where}.latency_s")
    if bandwidth is not None:
        _number(bandwidth, f"{where}.bandwidth_bytes_per_s", positive=True)
    if not messages:
        for name, value in (("latency_s", latency), ("bandwidth_bytes_per_s", bandwidth)):
            if value is None:
                raise DlperfError(f"{where} ({distance}) has neither messages nor {name}; write both latency_s and bandwidth_bytes_per_s")
    return Link(distance, messages, latency, bandwidth)


def _message_from_json(row: dict[str, Any], where: str) -> Message:
    what = _one_of(row["what"], f"{where}.what", (PING_PONG, TRAIN, SEND))
    n_bytes, n_pairs = _whole(row["bytes"], f"{where}.bytes", 0), _whole(row["pairs"], f"{where}.pairs", 1)
    return Message(what, n_bytes, n_pairs, _whole(row["messages"], f"{where}.messages", 1), _samples_from_json(row, where))


def _collective_from_json(row: dict[str, Any], where: str) -> Collective:
    kind = _one_of(row["kind"], f"{where}.kind", KINDS)
    n_ranks = _whole(row["ranks"], f"{where}.ranks", 2)
    per_node = _whole(row["ranks_per_node"], f"{where}.ranks_per_node", 1)
    if per_node > n_ranks:
        raise DlperfError(f"{where}.ranks_per_node is {per_node}, more than its {n_ranks} ranks")
    return Collective(kind, _whole(row["bytes"], f"{where}.bytes", 0), n_ranks, per_node, _samples_from_json(row, where))


def _reduction_from_json(row: dict[str, Any], where: str) -> Reduction:
    return Reduction(_whole(row["bytes"], f"{where}.bytes", 1), _samples_from_json(row, where))


def _interference_from_json(row: dict[str, Any], where: str) -> Interference:
    numbers = [_whole(row[name], f"{where}.{name}", 1) for name in ("threads", "bytes", "ranks", "ranks_per_node")]
    series = [_samples_from_json(row[name], f"{where}.{name}") for name in _SERIES]
    return Interference(row["kernel"], *numbers, *series)  # type: ignore[arg-type]


def _rank_from_json(row: dict[str, Any], where: str) -> Rank:
    if not isinstance(row["host"], str) or not row["host"]:
        raise DlperfError(f"{where}.host is {row['host']!r}; expected a host name")
    return Rank(row["host"], _whole(row.get("socket", -1), f"{where}.socket", -1), str(row.get("system", "")))


def _samples_to_json(samples: Samples) -> dict[str, Any]:
    return {"samples_s": [float(f"{value:.6g}") for value in samples.values], "disturbed": samples.n_disturbed}


def _samples_from_json(row: dict[str, Any], where: str) -> Samples:
    values = row["samples_s"]
    if not isinstance(values, list) or not values:
        raise DlperfError(f"{where}.samples_s is {values!r}; expected a list of seconds")
    for place, value in enumerate(values):
        _number(value, f"{where}.samples_s[{place}]", positive=True)
    return Samples(tuple(float(value) for value in values), _whole(row.get("disturbed", 0), f"{where}.disturbed", 0))


def _one_of(value: Any, where: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise DlperfError(f"{where} is {value!r}; known are {', '.join(known)}")
    return str(value)


def _whole(value: Any, where: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DlperfError(f"{where} is {value!r}; it must be a whole number of at least {least}")
    return value


def _number(value: Any, where: str, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise DlperfError(f"{where} is {value!r}; it must be a finite {'positive' if positive else 'non-negative'} number")

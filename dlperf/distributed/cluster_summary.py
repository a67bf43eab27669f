"""A cluster file as a page to read."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlperf.core import text
from dlperf.core.cluster import Cluster, Collective
from dlperf.core.units import format_bytes, format_percent, format_seconds, format_si
from dlperf.distributed.collective_times import find_path, model_s
from dlperf.distributed.link_fits import Band, fit_link

_PLACES = {"socket": "same socket", "node": "other socket of the node", "network": "other node"}


@dataclass(frozen=True)
class ClusterSummary:
    """The links of a cluster file with their fitted parameters, its collectives, what computing
    loses meanwhile and beside other ranks.
    """

    cluster: Cluster

    def to_text(self, width: int | None = None) -> str:
        """A page to read, at most `width` columns wide (default: the terminal's)."""
        cluster = self.cluster
        state = (
            "written by hand"
            if cluster.mode == "hand-written"
            else f"{cluster.mode} measurement, {'complete' if cluster.complete else 'incomplete'}"
        )
        lines = [
            (
                f"{cluster.path or 'cluster'}: {state}, made"
                f" {cluster.created or 'at an unknown time'}, backend {cluster.backend}"
            )
        ]
        if cluster.ranks:
            counts = {
                host: sum(rank.host == host for rank in cluster.ranks) for host in cluster.hosts
            }
            lines.append(
                f"  {len(cluster.ranks)} ranks: "
                + ", ".join(f"{count} on {host}" for host, count in counts.items())
            )
        if cluster.versions:
            lines.append(
                "  " + ", ".join(f"{name} {version}" for name, version in cluster.versions.items())
            )
        for fit in map(fit_link, cluster.links):
            rate = format_si(1 / fit.s_per_byte if fit.s_per_byte else None, "B/s")
            lines.append(
                f"link, {_PLACES[fit.distance]}: latency {format_seconds(fit.latency_s)}, bandwidth"
                f" {rate}"
            )
            lines += [f"  {_band_text(band)}" for band in fit.bands]
        lines += self._collectives_text()
        lines += [
            (
                f"{i.kernel} ({text.counted(i.threads, 'thread')}) during an all-reduce of"
                f" {format_bytes(i.n_bytes)} over {i.n_ranks} ranks: takes {i.compute_factor:.2f}"
                f" times as long, the all-reduce {i.collective_factor:.2f} times;"
                f" {i.stolen_s_per_byte * 1e9:.2f} s lost per GB"
            )
            for i in cluster.interferences
        ]
        lines += [
            (
                f"{s.work} by {s.workers} ranks of one computer at once: each takes"
                f" {s.slowdown:.2f} times as long as alone"
            )
            for s in cluster.co_runs
        ]
        return text.fit("\n".join([*lines, *(f"note: {note}" for note in cluster.notes)]), width)

    def _collectives_text(self) -> list[str]:
        lines: list[str] = []
        groups: dict[tuple[str, int, int], list[Collective]] = defaultdict(list)
        for c in self.cluster.collectives:
            groups[c.kind, c.n_ranks, c.ranks_per_node].append(c)
        for (kind, n_ranks, per_node), alike in groups.items():
            lines.append(
                f"{kind}, {n_ranks} ranks, {per_node} a node (measured; model; measured / model)"
            )
            path = find_path(self.cluster, n_ranks > per_node)
            sizes = np.array([float(c.n_bytes) for c in alike])
            for c, model in zip(
                alike, model_s(self.cluster.backend, kind, sizes, float(n_ranks), path)
            ):
                ratio = c.samples.median / model if model else float("nan")
                lines.append(
                    f"  {format_bytes(c.n_bytes):>9} {format_seconds(c.samples.median):>8} (spread"
                    f" {format_percent(c.samples.spread_frac)}) {format_seconds(model):>8}"
                    f" {ratio:6.2f}"
                )
        return lines

    def to_json(self) -> dict[str, Any]:
        """The page as data."""
        return {
            "schema": "dlperf.cluster-summary",
            "schema_version": 1,
            "cluster": self.cluster.path,
            "backend": self.cluster.backend,
            "links": [
                {
                    "distance": fit.distance,
                    "latency_s": fit.latency_s,
                    "s_per_byte": fit.s_per_byte,
                    "bands": [vars(band) for band in fit.bands],
                }
                for fit in map(fit_link, self.cluster.links)
            ],
            "interferences": [
                {
                    "kernel": i.kernel,
                    "threads": i.threads,
                    "bytes": i.n_bytes,
                    "ranks": i.n_ranks,
                    "compute_factor": i.compute_factor,
                    "collective_factor": i.collective_factor,
                    "stolen_s_per_byte": i.stolen_s_per_byte,
                }
                for i in self.cluster.interferences
            ],
            "co_runs": [
                {"work": s.work, "workers": s.workers, "slowdown": s.slowdown}
                for s in self.cluster.co_runs
            ],
            "notes": list(self.cluster.notes),
        }


def _band_text(band: Band) -> str:
    rate = format_si(1 / band.s_per_byte if band.s_per_byte else None, "B/s")
    parts = [
        (
            f"{band.name}: postal {format_seconds(band.latency_s)} + n / ({rate}), off by"
            f" {format_percent(band.residual_frac)}"
        )
    ]
    if band.burst_bytes:
        parts.append(f"the first {format_bytes(band.burst_bytes)} faster")
    if band.overhead_s is not None:
        gap = "" if band.gap_s is None else f", g {format_seconds(band.gap_s)}"
        parts.append(
            f"LogGP L {format_seconds(band.wire_latency_s)}, o"
            f" {format_seconds(band.overhead_s)}{gap}"
        )
    if band.base_bytes_per_s is not None:
        rates = (
            f"R_Cb {format_si(band.base_bytes_per_s, 'B/s')}, R_Ci"
            f" {format_si(band.added_bytes_per_s, 'B/s')}"
        )
        parts.append(f"max-rate {rates}, off by {format_percent(band.max_rate_residual_frac)}")
    return "; ".join(parts)

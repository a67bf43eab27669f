"""Cluster files: round trip, hand-written ones, and the one line that each mistake gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlperf.core.clock import Samples
from dlperf.core.cluster import (
    Cluster,
    Collective,
    Interference,
    Link,
    Message,
    Rank,
    Reduction,
    Timed,
)
from dlperf.core.co_run import CoRun
from dlperf.core.errors import DlperfError
from dlperf.distributed.cluster_summary import ClusterSummary

SHEET: dict[str, Any] = {
    "schema": "dlperf.cluster",
    "schema_version": 2,
    "links": [{"distance": "network", "latency_s": 2e-5, "bandwidth_bytes_per_s": 1.25e9}],
}


def interference(
    alone: float, together: float, collective: float, meanwhile: float
) -> Interference:
    return Interference(
        "gemm",
        1,
        1000,
        2,
        1,
        *(Timed(samples_s=[value]) for value in (alone, together, collective, meanwhile)),
    )


def full() -> Cluster:
    message = Message("ping_pong", 0, 1, 1, samples_s=[1e-4, 2e-4], disturbed=1)
    return Cluster(
        links=(
            Link("network", (message,)),
            Link("socket", latency_s=1e-6, bandwidth_bytes_per_s=1e10),
        ),
        collectives=(Collective("all_reduce", 4, 2, 1, samples_s=[3e-4]),),
        reductions=(Reduction(1024, samples_s=[1e-7]),),
        interferences=(interference(1e-3, 2e-3, 0.1, 0.2),),
        ranks=(Rank("a", 0), Rank("b")),
        threads=2,
        mode="quick",
        groups=("links",),
        complete=True,
        notes=("busy",),
        versions={"torch": "2"},
        created="today",
        co_runs=(CoRun("compute", 2, Samples((2.0, 3.0), 1), Samples((1.0, 2.0))),),
    )


def write(tmp_path: Path, data: dict[str, Any]) -> Path:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    return path


def test_a_file_comes_back_as_it_went(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    full().save(path)
    loaded = Cluster.load(path)
    assert loaded.path == str(path)
    assert loaded.to_json() == full().to_json()
    assert loaded.hosts == ("a", "b")
    assert loaded.link("network") == full().links[0]
    assert loaded.link("node") is None
    assert loaded.co_runs == full().co_runs
    assert Cluster.load(write(tmp_path, SHEET)).co_runs == ()


def test_a_page_says_what_ranks_cost_one_another() -> None:
    page = ClusterSummary(full())
    line = (  # the median of 2 / 1 and 3 / 2
        "compute by 2 ranks of one computer at once: each takes 1.75 times as long as alone"
    )
    assert line in " ".join(page.to_text().split())
    assert page.to_json()["co_runs"] == [{"work": "compute", "workers": 2, "slowdown": 1.75}]


def test_two_numbers_make_a_link(tmp_path: Path) -> None:
    cluster = Cluster.load(write(tmp_path, SHEET))
    assert cluster.links == (Link("network", (), 2e-5, 1.25e9),)
    assert (cluster.backend, cluster.mode) == ("gloo", "hand-written")


def test_what_computing_loses() -> None:
    found = interference(alone=1e-3, together=2e-3, collective=0.1, meanwhile=0.2)
    assert (found.compute_factor, found.collective_factor) == (2.0, 2.0)
    assert found.stolen_s_per_byte == pytest.approx((1 - 1 / 2) * 0.2 / 1000)
    assert (
        interference(alone=2e-3, together=1e-3, collective=0.1, meanwhile=0.2).stolen_s_per_byte
        == 0
    )


LINK = SHEET["links"][0]
CO_RUN = {
    "work": "DRAM",
    "workers": 2,
    "samples_s": [2.0],
    "disturbed": 0,
    "alone": {"samples_s": [1.0], "disturbed": 0},
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"links": []}, "links is []; expected at least one"),
        ({"links": "network"}, "links is 'network'"),
        ({"links": [7]}, "links[0] is 7"),
        (
            {"links": [{"distance": "rack"}]},
            "links[0].distance is 'rack'; expected one of network, node, socket",
        ),
        (
            {"links": [{"distance": "network", "latency_s": 1e-6}]},
            "neither messages nor bandwidth_bytes_per_s",
        ),
        (
            {"links": [{**LINK, "latency_us": 3}]},
            "links[0].latency_us is unknown; expected one of distance, messages",
        ),
        ({"links": [{**LINK, "latency_s": -1}]}, "links[0].latency_s is -1"),
        ({"links": [{**LINK, "latency_s": True}]}, "links[0].latency_s is true"),
        (
            {"links": [{**LINK, "bandwidth_bytes_per_s": 0}]},
            "bandwidth_bytes_per_s is 0; expected a finite number greater than 0",
        ),
        ({"links": [LINK, LINK]}, "links[1].distance is 'network'; expected each of them once"),
        ({"link": 1}, "link is unknown; expected one of schema, "),
        ({"backend": "mpi"}, "backend is 'mpi'"),
        (
            {
                "collectives": [
                    {"kind": "scan", "bytes": 4, "ranks": 2, "ranks_per_node": 1, "samples_s": [1]}
                ]
            },
            "collectives[0].kind is 'scan'",
        ),
        (
            {
                "collectives": [
                    {
                        "kind": "broadcast",
                        "bytes": 4,
                        "ranks": 2,
                        "ranks_per_node": 4,
                        "samples_s": [1],
                    }
                ]
            },
            "is 4; expected at most its 2 ranks",
        ),
        (
            {
                "collectives": [
                    {
                        "kind": "broadcast",
                        "bytes": 4,
                        "ranks": 2,
                        "ranks_per_node": 1,
                        "samples_s": [],
                    }
                ]
            },
            "samples_s is []",
        ),
        (
            {
                "collectives": [
                    {
                        "kind": "broadcast",
                        "bytes": 4,
                        "ranks": 2,
                        "ranks_per_node": 1,
                        "samples_s": [0],
                    }
                ]
            },
            "samples_s[0] is 0",
        ),
        (
            {"collectives": [{"kind": "broadcast", "bytes": 4, "ranks": 2, "ranks_per_node": 1}]},
            "collectives[0].samples_s is missing; expected a list of at least 1",
        ),
        ({"co_runs": {"compute": 1.1}}, "co_runs is {'compute': 1.1}; expected a list"),
        ({"co_runs": [{**CO_RUN, "workers": 0}]}, "co_runs[0].workers is 0"),
        (
            {"co_runs": [{**CO_RUN, "workers": 2.5}]},
            "co_runs[0].workers is 2.5; expected a whole number of at least 1",
        ),
        ({"co_runs": [{**CO_RUN, "work": 7}]}, "co_runs[0].work is 7"),
        ({"co_runs": [{**CO_RUN, "samples_s": [-1.0]}]}, "co_runs[0].samples_s[0] is -1.0"),
        (
            {"co_runs": [CO_RUN, {**CO_RUN, "alone": {"samples_s": [], "disturbed": 0}}]},
            "co_runs[1].alone.samples_s is []",
        ),
        (
            {"co_runs": [{**CO_RUN, "samples_s": [1.0, 2.0]}]},
            "co_runs[0].samples_s is [1.0, 2.0]; expected as many samples as alone, 1",
        ),
        ({"co_runs": [{"work": "DRAM"}]}, "co_runs[0].samples_s is missing"),
    ],
)
def test_a_mistake_is_named_in_one_line(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = write(tmp_path, {**SHEET, **change})
    with pytest.raises(DlperfError) as caught:
        Cluster.load(path)
    assert words in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)

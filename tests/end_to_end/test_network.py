"""dlperf.microbench.network over loopback: a file that loads, and one clear line in time where a
rank dies, hangs or is interrupted.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlperf.core.cluster import KINDS, Cluster
from dlperf.distributed.collective_times import collective_s
from dlperf.distributed.link_fits import fit_link
from tests.end_to_end.conftest import Done

ROOT = Path(__file__).resolve().parents[2]
MODULE = [sys.executable, "-m", "dlperf.microbench.network"]
LIMIT_S = 8  # ranks of another test may share the cores
PATIENCE_S = 60


def environment(**own: object) -> dict[str, str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return {
        **clean,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in own.items()},
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], list[subprocess.Popen[str]]]]:
    """Two ranks without a launcher that would end them; nothing is left of them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def ranks(n_ranks: int = 2) -> list[subprocess.Popen[str]]:
        port = free_port()
        for rank in range(n_ranks):
            env = environment(
                RANK=rank,
                WORLD_SIZE=n_ranks,
                LOCAL_RANK=rank,
                LOCAL_WORLD_SIZE=n_ranks,
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            command = [*MODULE, "-o", str(tmp_path / "cluster.json"), "--limit", str(LIMIT_S)]
            started.append(
                subprocess.Popen(
                    command,
                    env=env,
                    cwd=tmp_path,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        return started

    yield ranks
    for process in started:
        process.kill()
        process.wait()


def wait_for_links(path: Path) -> None:
    """Until the first group is in the file: the ranks are in the middle of the second."""
    end = time.monotonic() + PATIENCE_S
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert path.exists()
    time.sleep(1)


def errors(process: subprocess.Popen[str]) -> list[str]:
    _, text = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in text
    return [line for line in text.splitlines() if "error:" in line or "interrupted" in line]


@pytest.mark.process
def test_torchrun_writes_a_file_that_loads(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "dlperf.microbench.network",
        "-o",
        str(path),
        "--quick",
    ]
    done = subprocess.run(
        launch,
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == [str(path)]
    cluster = Cluster.load(path)
    assert cluster.complete
    assert cluster.groups == ("local", "links", "collectives", "interference", "co_run")
    assert [link.distance for link in cluster.links] == ["socket"]
    assert fit_link(cluster.links[0]).s_per_byte > 0
    assert {c.kind for c in cluster.collectives} == set(KINDS)
    assert {i.kernel for i in cluster.interferences} == {"gemm", "stream"}
    assert {"compute", "DRAM", "overhead", "page-faults"} <= {
        co_run.work for co_run in cluster.co_runs
    }  # both ranks are on this computer
    assert {co_run.workers for co_run in cluster.co_runs} == {2}
    assert all(co_run.slowdown > 0 for co_run in cluster.co_runs)
    assert all(collective_s(cluster, kind, 2**20, 2, 2) > 0 for kind in KINDS)


def test_machine_show_prints_a_cluster_file(dlperf: Callable[..., Done], tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(
        '{"schema": "dlperf.cluster", "schema_version": 2, "links": [{"distance": "network",'
        ' "latency_s": 2e-5, "bandwidth_bytes_per_s": 1.25e9}]}'
    )
    done = dlperf("machine", "show", path)
    assert done.status == 0
    assert "link, other node: latency 20.0 us, bandwidth 1.25 GB/s" in done.out
    path.write_text(path.read_text().replace("network", "moon"))
    done = dlperf("machine", "show", path)
    assert done.status == 2
    assert "links[0].distance is 'moon'" in done.line


@pytest.mark.network
@pytest.mark.process
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_dies_ends_the_other_in_time(
    start: Callable[[], list[subprocess.Popen[str]]], tmp_path: Path, dead: int
) -> None:
    ranks = start()
    wait_for_links(tmp_path / "cluster.json")
    ranks[dead].kill()
    assert len(errors(ranks[1 - dead])) == 1
    assert ranks[1 - dead].returncode == 1
    assert "local" in Cluster.load(tmp_path / "cluster.json").groups


@pytest.mark.network
@pytest.mark.process
def test_a_rank_that_hangs_ends_the_other_in_time(
    start: Callable[[], list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    ranks = start()
    wait_for_links(tmp_path / "cluster.json")
    ranks[1].send_signal(signal.SIGSTOP)
    found = errors(ranks[0])
    assert ranks[0].returncode == 1
    assert len(found) == 1
    assert "cluster.json" in found[0]


@pytest.mark.network
@pytest.mark.process
def test_an_interrupt_ends_with_130(
    start: Callable[[], list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    ranks = start()
    wait_for_links(tmp_path / "cluster.json")
    for process in ranks:
        process.send_signal(signal.SIGINT)
    lines = [line for process in ranks for line in errors(process)]
    assert [process.returncode for process in ranks] == [130, 130]
    assert len(lines) == 1
    assert lines[0].startswith("dlperf.microbench.network: interrupted; ")


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "own", "words"),
    [
        (["-o", "c.json"], {}, "RANK is not set; start it with torchrun"),
        ([], {}, "-o/--output"),
        (["-o", "c.json", "--limit", "never"], {}, "--limit"),
        (
            ["-o", "c.json"],
            {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1},
            "one rank has no link",
        ),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, arguments: list[str], own: dict[str, object], words: str
) -> None:
    done = subprocess.run(
        [*MODULE, *arguments],
        env=environment(**own),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1

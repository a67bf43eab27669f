"""``dlperf scale`` as it is typed: its page, its JSON, its folder, and every bad input on one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from dlperf.core.communication import Communication, Event, RankStep

UNUSABLE = 2


@pytest.fixture
def net(targets_file: Path) -> str:
    return f"{targets_file}:net"


@pytest.fixture
def cluster_file(tmp_path: Path) -> Path:
    link = {"latency_s": 5e-5, "bandwidth_bytes_per_s": 1.25e8}
    path = tmp_path / "cluster.json"
    path.write_text(
        json.dumps(
            {
                "schema": "dlperf.cluster",
                "schema_version": 2,
                "links": [{"distance": "network", **link}],
            }
        )
    )
    return path


def test_scale_prints_a_table(
    dlperf: Callable, net: str, machine_file: Path, cluster_file: Path
) -> None:
    done = dlperf(
        "scale",
        net,
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--ranks",
        "1,2,16384",
        "--threads",
        "1",
    )
    assert done.status == 0
    assert "weak scaling, batch size 32 per rank, 1 thread a rank, 1 rank a node" in " ".join(
        done.out.split()
    )
    assert "16384" in done.out
    assert "100.0 %" in done.out


def test_scale_json_is_alone_on_stdout(
    dlperf: Callable, net: str, machine_file: Path, cluster_file: Path
) -> None:
    options = (
        "--what-if",
        "link_bandwidth=2",
        "flops=2",
        "--samples",
        "1000",
        "--accumulate",
        "2",
        "--json",
        "-",
    )
    done = dlperf(
        "scale",
        net,
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--ranks",
        "2",
        "--threads",
        "1",
        *options,
    )
    data = json.loads(done.out)
    assert (data["schema"], data["what_if"]) == (
        "dlperf.scaling",
        {"flops": 2.0, "link_bandwidth": 2.0},
    )
    (row,) = data["rows"]
    assert row["exposed_communication_s"] == pytest.approx(row["step_s"] - row["compute_s"])
    assert row["samples_per_s"] == pytest.approx(2 * 2 * 32 / row["step_s"])
    assert row["low_s"] <= row["step_s"] <= row["high_s"]


def test_scale_writes_a_timeline_of_ranks(
    dlperf: Callable, net: str, machine_file: Path, cluster_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "timeline.json"
    known = ("--machine", machine_file, "--cluster", cluster_file, "--threads", "1")
    done = dlperf("scale", net, *known, "--ranks", "1,2", "--timeline", path)
    assert done.status == 0, done.err
    data = json.loads(path.read_text(encoding="utf-8"))
    names = [e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 of 2: predicted", "rank 1 of 2: predicted"]
    assert {e["cat"] for e in data["traceEvents"] if e["ph"] == "X"} >= {"compute", "collective"}
    refused = dlperf(
        "scale", "--trace", "t.json", "--cluster", cluster_file, "--timeline", tmp_path / "t"
    )
    assert refused.status == UNUSABLE
    assert "--timeline is for a target" in refused.err


@pytest.mark.slow
def test_strong_scaling_into_a_folder(
    dlperf: Callable, net: str, machine_file: Path, cluster_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    command = (
        "scale",
        net,
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--threads",
        "1",
        "--scaling",
        "strong",
        "--batch-size",
        "8",
    )
    done = dlperf(*command, "--ranks", "1,2,4,8", "-o", folder)
    assert done.status == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "communication.png",
        "ridgeline.png",
        "scaling.csv",
        "scaling.json",
        "scaling.txt",
        "step.png",
    ]
    assert [
        row["batch_size"] for row in json.loads((folder / "scaling.json").read_text())["rows"]
    ] == [8, 4, 2, 1]
    assert (
        dlperf(*command, "--ranks", "1,2", "-o", folder).status == 0
    )  # its own files are replaced


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--ranks", "3", "--ranks-per-node", "2"], "3 ranks do not fill nodes of 2"),
        (["--ranks", "2", "--ranks-per-node", "2"], "contains no link inside a node"),
        (["--ranks", "64", "--scaling", "strong"], "a batch of 32 is smaller than 64 ranks"),
        (
            ["--ranks", "2", "--what-if", "speed=2"],
            "'speed' is unknown; known are flops, memory_bandwidth, l3_bandwidth, overhead",
        ),
        (
            ["--ranks", "2", "--what-if", "flops=0"],
            "flops=0: the factor must be finite and above 0",
        ),
        (["--ranks", "2", "--what-if", "flops=-2"], "flops=-2"),
        (["--ranks", "2", "--what-if", "flops"], "'flops' is no NAME=FACTOR"),
        (["--ranks", "2", "--bucket-cap-mb", "0"], "--bucket-cap-mb: '0'"),
        (["--ranks", "0"], "--ranks: '0'"),
        ([], "names no --ranks"),
        (
            ["--ranks", "2", "--recorded-on", "c.json"],
            "--recorded-on is for a --trace",
        ),
        (["--ranks", "2", "--trace", "t.json"], "give one of them"),
        (["--ranks", "2", "-o", "-"], "-o - is no folder"),
    ],
    ids=" ".join,
)
def test_bad_questions(
    dlperf: Callable,
    net: str,
    machine_file: Path,
    cluster_file: Path,
    options: list[str],
    names: str,
) -> None:
    done = dlperf(
        "scale",
        net,
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--threads",
        "1",
        *options,
    )
    assert done.status == UNUSABLE
    assert names in done.line
    assert done.out == ""


def test_several_ranks_need_a_cluster(
    dlperf: Callable, net: str, machine_file: Path, tmp_path: Path
) -> None:
    command = ("scale", net, "--machine", machine_file, "--threads", "1")
    assert "dlperf.microbench.network -o cluster.json" in dlperf(*command, "--ranks", "2").line
    assert dlperf(*command, "--ranks", "1").status == 0
    missing = dlperf(*command, "--ranks", "2", "--cluster", tmp_path / "none.json")
    assert missing.status == UNUSABLE
    assert "none.json" in missing.line


def test_a_model_without_parameters(
    dlperf: Callable, machine_file: Path, cluster_file: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bare.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Bare(nn.Module):\n    def forward(self,"
        " x):\n        return x * 2\n\n\ndef bare(batch_size):\n    x = torch.zeros(batch_size, 3,"
        " requires_grad=True)\n    return Bare(), (x,), lambda y: y.mean(), torch.optim.SGD([x],"
        " lr=0.1)\n"
    )
    done = dlperf(
        "scale",
        f"{file}:bare",
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--threads",
        "1",
        "--ranks",
        "2",
    )
    assert done.status == UNUSABLE
    assert "the model has no parameters to train" in done.line


def test_strong_scaling_of_a_trace_file(
    dlperf: Callable, net: str, machine_file: Path, cluster_file: Path, tmp_path: Path
) -> None:
    assert dlperf("trace", net, "-o", tmp_path / "net.json").status == 0
    command = (
        "scale",
        tmp_path / "net.json",
        "--machine",
        machine_file,
        "--cluster",
        cluster_file,
        "--threads",
        "1",
        "--ranks",
        "1,2",
    )
    assert dlperf(*command).status == 0
    done = dlperf(*command, "--scaling", "strong")
    assert done.status == UNUSABLE
    assert "is a step at batch size 32, and strong scaling needs it at 16" in done.line


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """Two ranks on two hosts, three steps of 30 ms: 10 ms of computing, an all-reduce of 1 MiB in
    15 ms, 5 ms of computing.
    """
    events = (
        Event("launch", 0, "all_reduce", 2**20, 0, 0.01, 0.01, None, 0.025),
        Event("wait", 0, "all_reduce", 2**20, 0, 0.01, 0.025),
    )
    steps = tuple(
        RankStep(
            0.03 * n,
            0.03 * (n + 1),
            tuple(structs.replace(event, call=n) for event in events),
            n == 0,
        )
        for n in range(3)
    )
    path = tmp_path / "communication.json"
    Communication(("a", "b"), ((0, 1),), (steps, steps), "train.py").save(path)
    return path


def test_a_trace_is_replayed(
    dlperf: Callable, trace_file: Path, cluster_file: Path, tmp_path: Path
) -> None:
    command = ("scale", "--trace", trace_file, "--cluster", cluster_file)
    done = dlperf(
        *command,
        "--recorded-on",
        cluster_file,
        "--what-if",
        "link_bandwidth=0.5",
        "-o",
        tmp_path / "out",
    )
    assert done.status == 0
    assert "train.py: recorded on 2 ranks, 2 steps" in done.out  # the first is apart
    assert "carried over" in done.out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "replay.png",
        "scaling.csv",
        "scaling.json",
        "scaling.txt",
    ]
    (row,) = json.loads((tmp_path / "out" / "scaling.json").read_text())["rows"]
    assert row["step_s"] == pytest.approx(
        0.03 + 2**20 / 1.25e8, rel=1e-3
    )  # half the rate: 8.4 ms more
    assert row["first_step_s"] == pytest.approx(row["step_s"])
    done = dlperf(*command, "--ranks", "1,2,4", "--json", "-")
    assert [row["ranks"] for row in json.loads(done.out)["rows"]] == [1, 2, 4]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--batch-size", "8"], "--batch-size is for a target"),
        (["--scaling", "weak"], "--scaling is for a target"),
        (["--static-graph"], "--static-graph is for a target"),
        (["--what-if", "flops=2"], "--what-if flops: a trace does not contain"),
        (["--ranks-per-node", "2"], "contains no link inside a node"),
        (["--recorded-on", "none.json"], "none.json"),
        (["--ranks", "3", "--ranks-per-node", "2"], "3 ranks do not fill nodes of 2"),
    ],
    ids=" ".join,
)
def test_bad_questions_to_a_trace(
    dlperf: Callable, trace_file: Path, cluster_file: Path, options: list[str], names: str
) -> None:
    done = dlperf("scale", "--trace", trace_file, "--cluster", cluster_file, *options)
    assert done.status == UNUSABLE
    assert names in done.line
    assert done.out == ""


def test_a_trace_that_is_none_and_one_without_a_cluster(
    dlperf: Callable, trace_file: Path, cluster_file: Path
) -> None:
    assert "give it with --cluster" in dlperf("scale", "--trace", trace_file).line
    assert (
        "is no dlperf.communication file"
        in dlperf("scale", "--trace", cluster_file, "--cluster", cluster_file).line
    )
    trace_file.write_text(trace_file.read_text()[:200])
    assert "truncated" in dlperf("scale", "--trace", trace_file, "--cluster", cluster_file).line
    assert "names no target" in dlperf("scale", "--ranks", "2").line

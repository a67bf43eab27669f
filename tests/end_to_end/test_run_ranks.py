"""`dlperf run` on several ranks, under torchrun and under another launcher, with and without
dlperf.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import preloaded
import pytest

from dlperf.core.cluster import Cluster, Link
from dlperf.core.communication import Communication
from dlperf.distributed.communication_replay import replay_communication

pytestmark = pytest.mark.process

TORCHRUN = (
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    "127.0.0.1:0",
    "--local-addr",
    "127.0.0.1",
)

HEAD = """
    import os, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    torch.manual_seed(0)
    def say(*words):
        # at once: both ranks write to one pipe
        sys.stdout.write(" ".join(map(str, words)) + chr(10))
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm, self.outer = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 2)
        def forward(self, x):
            return self.outer(torch.relu(self.norm(self.inner(x))))
"""
TRAIN = (
    HEAD
    + """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(rank)
    for step in range(30):
        ending = dict(zip(("at", "how"), sys.argv[1:]))
        if rank == 1 and str(step) == ending.get("at"):
            if ending["how"] == "raise":
                raise ValueError("tired")
            if ending["how"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            sys.exit(5)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(torch.randn(8, 16)), torch.randn(8, 2))
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
        work.wait()
        said = [None, None]
        dist.all_gather_object(said, step)
        say(f"rank {rank} step {step} {float(total).hex()} {said}")
    say(f"rank {rank} random {torch.rand(1).item().hex()}")
    module = nn.modules.module
    say(f"rank {rank} hooks", len(module._global_forward_hooks), len(module._global_forward_pre_hooks))
    table = torch._C._dispatch_dump_table("c10d::allreduce_")
    say(f"rank {rank} kernels", table.count("BackendSelect: fallthrough"), dist.Work.wait.__module__)
    dist.destroy_process_group()
    # a thread of gloo's that lets go of a gathered object while Python ends, aborts the process:
    # pytorch/pytorch#179291
    time.sleep(1)
"""
)
ALONE = (
    HEAD
    + """
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    say("done")
"""
)
SHARDED = (
    HEAD
    + """
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2))
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for step in range(30):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        say(f"rank {dist.get_rank()} step {step} {float(loss).hex()}")
    dist.destroy_process_group()
"""
)


SUMMING = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    vector = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(vector)
    dist.destroy_process_group()
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine file that is readable and holds nothing: the run goes on without predictions."""
    from dlperf.core.host import this_cpu
    from dlperf.core.machine import Machine

    path = tmp_path / "machine.json"
    Machine(cpu=this_cpu(), complete=True).save(path)
    return path


def environment(**own: object) -> dict[str, str]:
    fixed = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "200",
    }
    return {**os.environ, **fixed, **{name: str(value) for name, value in own.items()}}


def script(tmp_path: Path, text: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return str(path)


def torchrun(cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """The launcher begins where torch is imported already; its ranks are processes of their own."""
    return preloaded.run(
        [sys.executable, *TORCHRUN, *command], cwd=cwd, env=environment(), timeout=240
    )


def run(machine: Path, *options: str) -> tuple[str, ...]:
    return ("-m", "dlperf", "run", "--machine", str(machine), *options)


def by_rank(text: str) -> list[list[str]]:
    """What each rank printed, in its own order; both write to one pipe."""
    pieces = [piece.strip() for piece in text.replace("rank ", "\nrank ").splitlines()]
    return [[piece for piece in pieces if piece.startswith(f"rank {rank}")] for rank in range(2)]


def found(cwd: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((cwd / "found.json").read_text(encoding="utf-8"))
    return data


def test_every_rank_is_watched_and_trains_to_the_bit_as_without(
    tmp_path: Path, machine: Path
) -> None:
    path = script(tmp_path, TRAIN)
    plain = torchrun(tmp_path, path)
    watched = torchrun(
        tmp_path,
        *run(machine, "--json", "found.json", "-o", "report.md", "--communication", "sent.json"),
        path,
    )
    assert plain.returncode == 0, plain.stderr
    assert watched.returncode == 0, watched.stderr
    assert by_rank(watched.stdout) == by_rank(plain.stdout)
    assert len(by_rank(plain.stdout)[1]) == 33

    data = found(tmp_path)
    rows = data["ranks"]["rows"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        assert row["step_s"] > row["compute_s"] > 0
        assert 0 < row["communication_frac"] < 1
    assert data["parallel_step"]["predicted"] is None
    assert data["parallel_step"]["actual"]["step_s"] > 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "communication share" in report
    said = [line for line in watched.stderr.splitlines() if "dlperf:" in line]
    # rank 0's forecast and file, and nothing of rank 1
    assert all("steps" in line or "wrote" in line for line in said), said

    trace = Communication.load(tmp_path / "sent.json")
    assert (trace.n_ranks, trace.script, trace.backend, trace.groups) == (
        2,
        "train.py",
        "gloo",
        ((0, 1),),
    )
    assert [step.first for step in trace.steps[0]] == [True] + [False] * (trace.n_steps - 1)
    assert trace.n_steps > 4
    assert all(meeting.complete for meeting in trace.meetings)
    n_bytes = 4 * (16 * 64 + 64 + 64 + 64 + 64 * 2 + 2)
    for steps in trace.steps:
        for step in steps:
            assert all(0 <= event.at_s <= event.until_s <= step.seconds for event in step.events)
        last = steps[-1]
        # in one step, from one optimizer's end to the next: the script's own calls of the step
        # before, then DDP's buffers and gradients
        assert [event.kind for event in last.launches][:2] == [
            "all_reduce",
            "send" if steps is trace.steps[0] else "recv",
        ]
        kinds = [event.kind for event in last.launches][2:]
        assert kinds == ["all_gather", "all_gather", "broadcast", "broadcast"] + ["all_reduce"] * (
            len(kinds) - 4
        )
        assert sum(event.n_bytes for event in list(last.launches)[6:]) == n_bytes
        assert {event.call for event in last.waits} == {event.call for event in last.launches}


@pytest.mark.parametrize(
    ("how", "status"),
    [("raise", "exitcode  : 1"), ("kill", "exitcode  : -9"), ("exit", "exitcode  : 5")],
)
def test_a_rank_that_dies_ends_the_others_under_torchrun(
    tmp_path: Path, machine: Path, how: str, status: str
) -> None:
    got = torchrun(
        tmp_path, *run(machine, "--communication", "sent.json"), script(tmp_path, TRAIN), "8", how
    )
    assert got.returncode == 1
    assert status in got.stderr
    assert "internal error" not in got.stderr
    if how == "raise":
        assert "ValueError: tired" in got.stderr
    assert (
        not (tmp_path / "sent.json").exists() or Communication.load(tmp_path / "sent.json").n_steps
    )


def by_hand(tmp_path: Path, *command: str) -> list[tuple[int, str, str]]:
    """Two ranks without torchrun, so without an agent's store."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(
                RANK=rank, WORLD_SIZE=2, LOCAL_RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
        )
        for rank in range(2)
    ]
    try:
        return [
            (process.returncode, out, err)
            for process in processes
            for out, err in [process.communicate(timeout=240)]
        ]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.network
def test_another_launcher_does_too(tmp_path: Path, machine: Path) -> None:
    zero, one = by_hand(
        tmp_path,
        *run(machine, "--json", "found.json", "--communication", "sent.json"),
        script(tmp_path, TRAIN),
    )
    assert (zero[0], one[0], one[2]) == (0, 0, ""), one
    assert len(found(tmp_path)["ranks"]["rows"]) == 2
    assert Communication.load(tmp_path / "sent.json").n_ranks == 2


@pytest.mark.network
def test_a_rank_that_raises_has_its_own_status_and_the_other_one_says_so(
    tmp_path: Path, machine: Path
) -> None:
    zero, one = by_hand(
        tmp_path, *run(machine, "--json", "found.json"), script(tmp_path, TRAIN), "27", "raise"
    )
    assert (zero[0], one[0]) == (1, 1)
    assert "ValueError: tired" in one[2]
    assert "dlperf" not in one[2]
    assert one[1].count("\n") == 27
    data = found(tmp_path)
    assert {"rank 0 ended with status 1", "rank 1 ended with status 1"} <= set(data["notes"])
    assert len(data["ranks"]["rows"]) == 2  # the watched steps were over by then


@pytest.mark.network
def test_a_rank_that_is_killed_is_missed_in_time(tmp_path: Path, machine: Path) -> None:
    zero, one = by_hand(
        tmp_path,
        *run(machine, "--communication", "sent.json"),
        script(tmp_path, TRAIN),
        "27",
        "kill",
    )
    assert (zero[0], one[0]) == (1, -9)
    assert "rank 1 left no findings" in zero[2]
    assert not (tmp_path / "sent.json").exists()


def test_ranks_that_send_nothing_are_compared_all_the_same(tmp_path: Path, machine: Path) -> None:
    got = torchrun(
        tmp_path,
        *run(machine, "--json", "found.json", "--communication", "sent.json"),
        script(tmp_path, ALONE),
    )
    assert got.returncode == 0, got.stderr
    assert [row["communication_frac"] for row in found(tmp_path)["ranks"]["rows"]] == [0.0, 0.0]
    assert Communication.load(tmp_path / "sent.json").meetings == ()


def test_a_program_that_never_trains_is_recorded_from_its_first_call_to_its_last(
    tmp_path: Path, machine: Path
) -> None:
    got = torchrun(
        tmp_path, *run(machine, "--communication", "sent.json"), script(tmp_path, SUMMING)
    )
    assert got.returncode == 0, got.stderr
    assert "the run from its first call to its last, as one step" in got.stdout
    assert got.stderr.count("no optimizer stepped: these are the run's own calls") == 1
    trace = Communication.load(tmp_path / "sent.json")
    assert (trace.n_steps, [event.n_bytes for event in trace.steps[0][0].launches]) == (
        1,
        [4000] * 5,
    )
    links = (Link("socket", latency_s=1e-4, bandwidth_bytes_per_s=1e9),)
    assert replay_communication(trace, Cluster(links=links)).rows[0].step_s > 5 * 1e-4


def test_one_rank_is_as_without_torchrun(tmp_path: Path, machine: Path) -> None:
    command = [
        *TORCHRUN[:3],
        "1",
        *TORCHRUN[4:],
        *run(machine, "--json", "found.json", "--communication", "sent.json"),
    ]
    done = subprocess.run(
        [sys.executable, *command, script(tmp_path, ALONE)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert found(tmp_path)["ranks"] is None
    assert done.stderr.count("one rank sends nothing") == 1
    assert not (tmp_path / "sent.json").exists()


def test_a_sharded_model_is_recorded_and_not_predicted(tmp_path: Path, machine: Path) -> None:
    path = script(tmp_path, SHARDED)
    plain = torchrun(tmp_path, path)
    watched = torchrun(
        tmp_path, *run(machine, "--json", "found.json", "--communication", "sent.json"), path
    )
    assert watched.returncode == 0, watched.stderr
    assert by_rank(watched.stdout)[1] == by_rank(plain.stdout)[1]
    kinds = {meeting.kind for meeting in Communication.load(tmp_path / "sent.json").meetings}
    assert {"all_gather", "reduce_scatter"} <= kinds
    assert (
        "no prediction: the model is sharded, and no rank can take a step alone"
        in found(tmp_path)["notes"]
    )


def test_wrong_files_are_one_line(tmp_path: Path, machine: Path) -> None:
    path = script(tmp_path, ALONE)
    for options, words in (
        (("--communication", "-"), "--communication - is no file"),
        (("--communication", "nowhere/sent.json"), "its folder does not exist"),
        (("--cluster", "nowhere.json"), "nowhere.json: No such file"),
        (("--cluster", str(machine)), "is no dlperf.cluster file"),
    ):
        done = subprocess.run(
            [sys.executable, *run(machine, *options), path],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert words in done.stderr

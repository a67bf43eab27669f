"""The study around the seven algorithms: its clock, its comparison, its page, its watch; and once
on two real ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlperf.core.rank_program import GRACE_S, Watch
from dlperf.models import parallel_algorithms as counts
from dlperf.studies.cardwell_kernels.algorithms import Meter, Wire
from dlperf.studies.cardwell_kernels.findings import (
    Comparison,
    Findings,
    Peaks,
    Run,
    to_markdown,
    write_findings,
)
from dlperf.studies.cardwell_kernels.study import KernelCase, time_case

ROOT = Path(__file__).resolve().parents[2]
PEAKS = Peaks(20.0, 10.0, "triad", 4.0, 1024, 0.5)
RUN = Run(
    "DDOT",
    64,
    flops=40.0,
    memory_bytes=10.0,
    network_bytes=12.0,
    n_messages=2,
    metered_bytes=12.0,
    communication_s=1.0,
    samples_s=(4.0, 10.0, 2.0, 6.0),
)


def findings(*runs: Run) -> Findings:
    return Findings(PEAKS, runs, 2, "gloo", "a processor", (("dlperf", "0"),))


def test_what_each_model_predicts() -> None:
    # 40 / 20 = 2 s, 10 / 10 = 1 s, 12 / 4 = 3 s and 2 messages of 0.5 s: max(2, 1), max(2, 3),
    # max(2, 1, 3), 2 + 4 seconds for 40 FLOP
    assert RUN.predicted_flops_per_s(PEAKS) == pytest.approx((20.0, 40 / 3, 40 / 3, 40 / 6))
    assert RUN.seconds == 5.0
    assert RUN.flops_per_s == 8.0


def test_the_comparison_of_table_2_6() -> None:
    # measured 8 against 20: 150 %; against 13.33: 66.7 %, an improvement of 55.6 %
    (found,) = findings(RUN).comparisons()
    assert found.mape == pytest.approx((150.0, 200 / 3, 200 / 3, 100 / 6))
    assert found.changes == pytest.approx((500 / 9, 500 / 9, 800 / 9))
    slower = replace(RUN, size=128, samples_s=(10.0,))  # 4 FLOP/s: 400 %, so (150 + 400) / 2
    assert findings(RUN, slower).comparisons()[0].mape[0] == pytest.approx(275.0)
    assert Comparison("x", (50.0, 55.0)).changes == pytest.approx((-10.0,))


@pytest.mark.slow
def test_the_page_says_it_all(tmp_path: Path) -> None:
    found = findings(RUN, replace(RUN, algorithm="MST", size=2048, flops=4.0))
    text = to_markdown(found)
    assert "| DDOT | 150 % | 67 % |" in text
    assert "| 20 FLOP/s | 10 B/s (triad) | 4 B/s (at 1,024 B) |" in text
    names = [path.name for path in write_findings(found, tmp_path / "new")]
    assert names == [
        "cardwell.md",
        "cardwell.json",
        *(f"cardwell-{n}.png" for n in ("rooflines", "surface", "ridgeline", "communication")),
    ]
    data = json.loads((tmp_path / "new" / "cardwell.json").read_text())
    assert (data["schema"], data["comparisons"][0]["percentage_change"]["communication"]) == (
        "dlperf.cardwell-kernels",
        pytest.approx(500 / 9),
    )


class Clock:
    """Every reading is a second later; a call may take more."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize(("budget_s", "n_samples"), [(0.0, 3), (55.0, 5), (10_000.0, 30)])
def test_repeats_fit_the_budget(budget_s: float, n_samples: int) -> None:
    clock, meter = Clock(), Meter()
    wire = Wire([0], None, 0, meter, clock)
    run = time_case(
        wire, meter, KernelCase(8, lambda: clock.spend(10.0), counts.ddot(8, 1)), budget_s, clock
    )
    assert run.samples_s == (11.0,) * n_samples  # ten seconds, and the one that the reading takes
    assert (run.flops, run.memory_bytes, run.metered_bytes, run.n_messages) == (
        15.0,
        136.0,
        0.0,
        0.0,
    )


def test_the_watch_ends_what_waits_too_long() -> None:
    clock = Clock()
    watch = Watch("study", 0, 10.0, "nothing was written", now=clock)
    watch.begin("DDOT of size 8")
    assert watch.trouble() == ""
    clock.spend(10.0 + GRACE_S)
    assert watch.trouble() == "no answer from another rank within 10 s"


# -- processes -------------------------------------------------------------------------------------


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "dlperf.studies.cardwell_kernels",
        *arguments,
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def as_rank(rank: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


GLOO = """
import sys, os, torch, torch.distributed as dist
from dlperf.studies.cardwell_kernels import algorithms
from dlperf.studies.cardwell_kernels.algorithms import Meter, Wire
dist.init_process_group("gloo")
rank, meter = dist.get_rank(), Meter()
wire = Wire(range(2), dist.group.WORLD, rank, meter)
torch.manual_seed(0)
a, b, x, z = torch.rand(8, 8).double(), torch.rand(8, 8).double(), torch.rand(8).double(), torch.rand(16, dtype=torch.complex128)
grid, half = algorithms.make_grid(wire), slice(4 * rank, 4 * rank + 4)
c = algorithms.summa(grid, a[:, half].contiguous(), b[:, half].contiguous(), torch.zeros(8, 4).double(), 1.0, 0.0)
assert torch.allclose(c, (a @ b)[:, half])
assert meter.n_bytes == 8 * 8 * 8, meter  # both panels of A, half a matrix of doubles each
assert torch.allclose(algorithms.dgemv(wire, a[half], x[half], torch.zeros(4).double(), 1.0, 0.0), (a @ x)[half])
assert abs(algorithms.ddot(wire, x[half], x[half]) - float(x @ x)) < 1e-12
y = algorithms.fft(wire, z[8 * rank : 8 * rank + 8], algorithms.twiddles(wire, 16))
assert torch.allclose(y, torch.fft.fft(z).reshape(4, 4).t()[2 * rank : 2 * rank + 2])
rows = torch.cat((a[3 * rank : 3 * rank + 5],))
swept = algorithms.stencil(wire, rows.clone(), rows.clone(), 1)[1:-1, 1:-1]
assert torch.allclose(swept, ((a[:-2, 1:-1] + a[2:, 1:-1] + a[1:-1, :-2] + a[1:-1, 2:]) / 4)[3 * rank : 3 * rank + 3])
path = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0]])[2 * rank : 2 * rank + 2]
assert algorithms.boruvka(wire, 4, path, torch.tensor([5, 1, 1, 9])[2 * rank : 2 * rank + 2], 2 * rank).weight == 7
ring = torch.full((4, 4), torch.inf).double(); ring[1, 0] = ring[2, 1] = ring[3, 2] = 1.0
assert algorithms.dijkstra(wire, ring[2 * rank : 2 * rank + 2], 0, 4).tolist() == [0, 1, 2, 3]
print("right", flush=True); os._exit(0)
"""


@pytest.mark.network
@pytest.mark.process
def test_two_ranks_of_gloo_agree_with_the_oracles(port: int) -> None:
    pipes: dict[str, Any] = {
        "text": True,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "cwd": ROOT,
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", GLOO], env={**os.environ, **as_rank(rank, port)}, **pipes
        )
        for rank in range(2)
    ]
    for process in started:
        out, err = process.communicate(timeout=90)
        assert (process.returncode, out.strip()) == (0, "right"), err


@pytest.mark.network
@pytest.mark.process
def test_a_rank_that_is_gone_ends_the_other_with_one_line(port: int, tmp_path: Path) -> None:
    process = start(
        ["-o", str(tmp_path / "new"), "--limit", "3"], **as_rank(0, port)
    )  # rank 1 never comes
    _, err = process.communicate(timeout=60)
    lines = [line for line in err.splitlines() if line.startswith("cardwell_kernels: error:")]
    assert process.returncode == 1
    assert len(lines) == 1
    assert "starting" in lines[0]
    assert "Traceback" not in err
    assert not (tmp_path / "new").exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["-o", "x"], {}, "RANK is not set; start it with torchrun"),
        ([], {}, "the following arguments are required: -o"),
        (["-o", "x", "--seconds", "0"], {}, "invalid number of seconds from 1 to 3600"),
        (["-o", "x"], as_rank(0, 1) | {"WORLD_SIZE": "1"}, "1 rank has no network"),
        (["-o", "README.md"], as_rank(0, 1), "README.md: is a file"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    process = start(arguments, **variables)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1

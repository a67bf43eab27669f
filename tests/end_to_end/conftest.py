"""A small machine file of invented but consistent rates, a target's source, and the command line in
this process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dlperf.core.clock import Samples
from dlperf.core.costs import KINDS, STEP_COSTS, Cost, CostKey
from dlperf.core.host import this_cpu, versions
from dlperf.core.machine import Bandwidth, Kernel, Machine
from dlperf.core.state import Reading
from dlperf.core.trace import Op, TensorSpec
from dlperf.core.verification import SelfTest
from dlperf.forecast.loading import _NEEDED, _NEEDED_BY_WORKERS

TARGETS = """
import torch
from torch import nn


def net(batch_size):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    labels = torch.zeros(batch_size, dtype=torch.long)
    return model, (torch.zeros(batch_size, 8),), lambda output: nn.functional.cross_entropy(output, labels)


def talkative(batch_size):
    print("built")
    return net(batch_size)


class Chatty(nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)


def chatty(batch_size):
    return Chatty(8, 4), (torch.zeros(batch_size, 8),), torch.sum


def half(batch_size):
    return nn.Linear(8, 4, dtype=torch.float16), (torch.zeros(batch_size, 8, dtype=torch.float16),), torch.sum


def raises(batch_size):
    raise RuntimeError("no such weather")


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        raise ValueError("the model is tired\\nvery tired")


def broken(batch_size):
    return Broken(), (torch.zeros(batch_size, 8),), torch.sum


def wrong_shape(batch_size):
    return nn.Linear(7, 2), (torch.zeros(batch_size, 8),), torch.sum


def pair(batch_size):
    return nn.Linear(8, 2), (torch.zeros(batch_size, 8),)


def nothing(batch_size):
    return None


def no_parameters(batch_size):
    return nn.ReLU(), (torch.zeros(batch_size, 8),), torch.sum


def frozen(batch_size):
    model, inputs, loss = net(batch_size)
    return model.requires_grad_(False), inputs, loss


def vector_loss(batch_size):
    model, inputs, _ = net(batch_size)
    return model, inputs, lambda output: output


def no_arguments():
    return net(1)


class Bare(nn.Linear):
    def __init__(self):
        super().__init__(8, 4)


number = 7
"""


def gemm(n: int) -> Op:
    square = TensorSpec.contiguous(n, n)
    return Op("aten.mm.default", (square, square))


def sample_machine() -> Machine:
    """100 GFLOP/s, 10 GB/s from every level, 1 us a dispatch: numbers to check with, not measured
    ones.
    """
    kernels = tuple(Kernel(gemm(n), "gemm", 1, Samples((2 * n**3 / 100e9,) * 3)) for n in (64, 512))
    sweep = tuple(
        Bandwidth(kernel, 1, size, size, Samples((size / 10e9,) * 3))
        for kernel in ("copy", "scale", "add", "triad")
        for size in (2**14, 2**19, 2**23, 2**29)
    )
    costs = (
        Cost(CostKey("fork_join"), 1, Samples((1e-6,))),
        *(
            Cost(key._replace(at=8 if KINDS[key.kind].at else 0), 1, Samples((0.0,)))
            for keys in STEP_COSTS.values()  # all that a step takes, for nothing
            for key in keys
        ),
    )
    tests = (SelfTest("MLP", 1, 7, 1e-3, 0.9e-3, 1.1e-3, 1e-3),)
    made = "2026-01-01T00:00:00"
    return Machine(
        this_cpu(),
        kernels,
        sweep,
        costs,
        complete=True,
        versions=versions(),
        created=made,
        self_tests=tests,
    )


@pytest.fixture
def machine_file(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    sample_machine().save(path)
    return path


@pytest.fixture
def referenced(machine_file: Path) -> Path:
    """The made-up machine with a reference, and readings whose median has the core at 1.1."""
    reference = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)
    readings = tuple(replace(reference, core_s=core * 1e-4) for core in (1.0, 1.1, 1.2))
    replace(Machine.load(machine_file), reference=reference, readings=readings).save(machine_file)
    return machine_file


@pytest.fixture
def loading_file(machine_file: Path) -> Path:
    """The made-up machine with every cost of loading and of a loop, 1 us each."""
    keys = [CostKey("loader_byte", at=at) for at in (4096, 65536)]
    keys += [CostKey(f"loader_{name}") for name in (*_NEEDED, *_NEEDED_BY_WORKERS)]
    keys += [
        CostKey(f"loop_{name}")
        for name in (
            "item",
            "accuracy",
            "scheduler",
            "clip_call",
            "clip_tensor",
            "clip_byte",
            "save_call",
            "save_tensor",
            "save_byte",
        )
    ]
    machine = Machine.load(machine_file)
    replace(
        machine,
        costs=(
            *machine.costs,
            *(Cost(key, 1, Samples((1e-9 if "byte" in key.kind else 1e-6,))) for key in keys),
        ),
    ).save(machine_file)
    return machine_file


@pytest.fixture
def targets_file(tmp_path: Path) -> Path:
    path = tmp_path / "sample_targets.py"
    path.write_text(TARGETS)
    return path


@dataclass(frozen=True)
class Done:
    """What a command left: exit status, stdout, stderr."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr that an error may have."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"expected one line on stderr, got: {self.err}"
        assert "Traceback" not in self.err
        return lines[0]


@pytest.fixture
def dlperf(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Done]]:
    """``dlperf("predict", ...)`` in this process, in an empty working directory, without a machine
    of one's own.
    """
    import torch

    from dlperf.cli.main import main

    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DLPERF_MACHINE", str(tmp_path / "home" / "machine.json"))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    threads = torch.get_num_threads()

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        status = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Done(status, captured.out, captured.err)

    yield run
    torch.set_num_threads(threads)

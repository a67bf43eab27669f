"""The commands with a device, on an accelerator that is emulated on the CPU. No GPU takes part."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlperf.core.machine import Machine
from dlperf.core.measurement import Measurement

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "emulated_accelerator"
NET = """
import torch
from torch import nn


def net(batch_size):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(8 * 15 * 15, 64), nn.ReLU(), nn.Linear(64, 10),
    )
    labels = torch.randint(0, 10, (batch_size,))
    loss = lambda output: nn.functional.cross_entropy(output, labels)
    return model, (torch.randn(batch_size, 3, 32, 32),), loss
"""
TRAINING = """
import torch
from net import net

torch.manual_seed(0)
model, (images,), _ = net(8)
model.to("emulated")
labels = torch.randint(0, 10, (8,))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(22):
    optimizer.zero_grad()
    output = model(images.to("emulated"))
    torch.nn.functional.cross_entropy(output, labels.to("emulated")).backward()
    optimizer.step()
print(sum(p.double().sum().item() for p in model.parameters()))
"""
pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a training, and the accelerator for whatever runs with it."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        pytest.skip("the accelerator is built with g++ on Linux")
    folder = tmp_path_factory.mktemp("emulated")
    home = Path(torch.__file__).parent
    include, library = home / "include", home / "lib"
    subprocess.run(
        [
            *(compiler, "-O0", "-std=c++20", "-shared", "-fPIC", "-w", SOURCES / "accelerator.cpp"),
            *("-DAT_PER_OPERATOR_HEADERS", "-I", include, "-L", library, "-ltorch_cpu", "-lc10"),
            *("-I", include / "torch" / "csrc" / "api" / "include"),
            *("-o", folder / "accelerator.so"),
            f"-Wl,-rpath,{library}",
        ],
        check=True,
    )
    shutil.copy(SOURCES / "emulated.py", folder)
    metadata = folder / "emulated-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nemulated = emulated:load\n")
    (folder / "net.py").write_text(NET)
    (folder / "train.py").write_text(TRAINING)
    return folder


def run(place: Path, *command: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, (place, ROOT)))
    machine = str(place / "machines" / "machine.json")
    done = subprocess.run(
        [sys.executable, *command],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, "DLPERF_MACHINE": machine, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == status, done.stderr
    return done


def dlperf(place: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return run(place, "-m", "dlperf", *command)


@pytest.fixture(scope="module")
def machine(place: Path) -> Path:
    """The machine file of the accelerator, where a calibration puts it."""
    done = dlperf(place, "calibrate", "--quick", "--device", "emulated")
    assert "Emulated accelerator, accelerator as measured, quick" in done.stdout
    return place / "machines" / "emulated.json"


def test_a_calibration_has_roofs_and_kernel_models(machine: Path) -> None:
    found: Any = Machine.load(machine)
    assert found.complete
    assert set(found.data_sheet.matrix_flops_per_s) == {"float16", "bfloat16"}
    assert {kernel.family for kernel in found.kernels} == {"conv2d", "gemm", "relu"}
    assert found.kernel_models


def test_a_step_is_measured_on_the_device(place: Path) -> None:
    command = ("--device", "emulated", "--seconds", "0.5", "-o", "m.json")
    done = dlperf(place, "measure", "net.py:net", "--batch-size", "8", *command)
    assert "on Emulated accelerator" in done.stdout
    found = Measurement.load(place / "m.json")
    assert found.trace is not None
    assert found.device_memory is not None
    assert found.device_memory.allocated_bytes > 4 * 64 * 8 * 15 * 15
    rows = {row.layer: row for row in found.layers}
    assert {"0", "1", "2", "3", "6", "8"} <= set(rows)
    for name in ("0", "6"):
        for samples in (rows[name].forward, rows[name].backward):
            assert samples is not None
            assert samples.median > 0.0


@pytest.mark.usefixtures("machine")
def test_a_report_compares_times_and_memory(place: Path) -> None:
    command = ("--device", "emulated", "--seconds", "0.5", "--json", "-")
    done = dlperf(place, "report", "net.py:net", "--batch-size", "8", *command)
    report = json.loads(done.stdout)
    assert report["machine"] == "Emulated accelerator"
    assert report["predicted"][0]["step"]["total_s"] > 0.0
    assert report["measured"]["device_memory"]["reserved_bytes"] > 0


@pytest.mark.usefixtures("machine")
def test_a_training_on_the_device_is_watched_and_its_result_stays(place: Path) -> None:
    alone = run(place, "train.py").stdout.strip()
    cpu = ("machine", "new", "--device", "epyc-7763", "-o", "cpu.json")
    dlperf(place, *cpu)
    done = dlperf(place, "run", "--machine", "cpu.json", "--json", "run.json", "train.py")
    assert done.stdout.splitlines()[0] == alone
    found = json.loads((place / "run.json").read_text())
    assert found["measurement"]["machine"] == "Emulated accelerator"
    assert found["measurement"]["layers"]
    assert found["report"]["predicted"][0]["machine"] == "Emulated accelerator"


def test_a_model_on_the_device_is_recorded_and_measured_from_python(place: Path) -> None:
    (place / "own.py").write_text(
        "import dlperf, net, torch\n"
        "model, inputs, _ = net.net(4)\n"
        "model, inputs = model.to('emulated'), (inputs[0].to('emulated'),)\n"
        "before = [p.cpu() for p in model.parameters()]\n"
        "found = dlperf.measure(model, inputs, seconds=0.2)\n"
        "assert found.machine == 'Emulated accelerator', found.machine\n"
        "assert found.trace is not None, found.notes\n"
        "assert all(torch.equal(a, p.cpu()) for a, p in zip(before, model.parameters()))\n"
        "with dlperf.profile(model) as profile:\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "    for _ in range(22):\n"
        "        optimizer.zero_grad()\n"
        "        model(*inputs).square().mean().backward()\n"
        "        optimizer.step()\n"
        "assert profile.measurement.machine == 'Emulated accelerator'\n"
    )
    run(place, "own.py")

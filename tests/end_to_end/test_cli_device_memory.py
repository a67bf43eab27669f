"""``predict --device-memory``: what fits, what does not, which batch size would."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from dlperf import Trace, record
from dlperf.predictors.allocator.device_memory import CONTEXT_BYTES, DeviceMemory, device_memory

NET = """
import torch
from torch import nn

def net(batch_size):
    model = nn.Sequential(nn.Linear(300, 3000), nn.BatchNorm1d(3000), nn.Linear(3000, 10))
    return model, (torch.randn(batch_size, 300),), torch.Tensor.mean, torch.optim.Adam(
        model.parameters())
"""
ON = ("--threads", "1")


@pytest.fixture
def predicted(dlperf: Callable, machine_file: Path, tmp_path: Path) -> Callable:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")

    def predict(*options: object, target: object = tmp_path / "net.py:net") -> dict:
        on = ("predict", target, "--machine", machine_file, *ON, "--json", "-")
        done = dlperf(*on, *options)
        assert done.status == 0, done.err
        return dict(json.loads(done.out)) | {"said": done.err}

    return predict


def recorded(batch_size: int) -> Trace:
    """The same network, with what PyTorch chooses on a device."""
    model = nn.Sequential(nn.Linear(300, 3000), nn.BatchNorm1d(3000), nn.Linear(3000, 10))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    return record(model, torch.randn(batch_size, 300), optimizer=optimizer)


def expected(batch_size: int) -> DeviceMemory:
    return device_memory(recorded(batch_size))


def test_a_step_that_fits(predicted: Callable) -> None:
    found, memory = predicted("--batch-size", 64, "--device-memory", "24GiB"), expected(64)
    assert found["step"]["peak_allocated_bytes"] == memory.peak_allocated_bytes
    assert found["step"]["peak_reserved_bytes"] == memory.peak_reserved_bytes
    assert found["device_memory"] == {
        "capacity_bytes": 24 * 2**30,
        "context_bytes": CONTEXT_BYTES,
        "needed_bytes": memory.peak_reserved_bytes,
        "lacking_bytes": 0,
        "fitting_batch_size": None,
        "peak_bytes": dict(memory.peak_bytes),
        "notes": [],
    }


def test_the_batch_size_that_fits(predicted: Callable) -> None:
    room = 200 * 2**20
    found = predicted("--batch-size", 12000, "--device-memory", CONTEXT_BYTES + room)
    fitting = found["device_memory"]["fitting_batch_size"]
    assert found["device_memory"]["lacking_bytes"] > 0
    assert "batch size 12000: needs" in found["said"]
    fits = [
        device_memory(trace, room, context_bytes=0).fits
        for trace in (recorded(fitting), recorded(fitting + 1))
    ]
    assert fits == [True, False]


def test_not_even_one_sample(predicted: Callable) -> None:
    found = predicted("--inference", "--device-memory", CONTEXT_BYTES + 2**20)
    assert found["device_memory"]["fitting_batch_size"] == 0


def test_a_batch_size_that_the_model_refuses(predicted: Callable) -> None:
    # Batch normalisation trains on no single sample.
    found = predicted("--batch-size", 2, "--device-memory", CONTEXT_BYTES + 2**20)
    assert found["device_memory"]["fitting_batch_size"] is None
    assert "warning: the batch size that fits is unknown:" in found["said"]


def test_a_trace_file_has_one_batch_size(predicted: Callable, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    recorded(64).save(path)
    found = predicted("--device-memory", CONTEXT_BYTES + 2**20, target=path)
    assert found["device_memory"]["fitting_batch_size"] is None
    assert found["step"]["peak_reserved_bytes"] == expected(64).peak_reserved_bytes


def test_a_device_of_the_shelf_has_its_own_memory(dlperf: Callable, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, encoding="utf-8")
    on = ("predict", tmp_path / "net.py:net", "--json", "-", "--device", "h100", "--batch-size")
    done = dlperf(*on, 64)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    memory = device_memory(recorded(64), workspace_bytes=32 * 2**20)
    assert found["step"]["peak_allocated_bytes"] == memory.peak_allocated_bytes
    assert found["step"]["peak_memory_bytes"] == found["step"]["peak_reserved_bytes"]
    assert found["device_memory"]["capacity_bytes"] == 80 * 10**9
    done = dlperf(*on, 12000, "--device-memory", CONTEXT_BYTES + 200 * 2**20)
    assert 0 < json.loads(done.out)["device_memory"]["fitting_batch_size"] < 12000


def test_a_processor_of_the_shelf_is_no_device(dlperf: Callable) -> None:
    done = dlperf("predict", "mlp", "--json", "-", "--device", "epyc-7763")
    assert json.loads(done.out)["device_memory"] is None


def test_without_a_device_there_is_nothing(predicted: Callable) -> None:
    found = predicted("--batch-size", 8)
    assert (found["device_memory"], found["step"]["peak_reserved_bytes"]) == (None, None)


def test_the_text_ends_with_the_verdict(dlperf: Callable, machine_file: Path) -> None:
    on = ("predict", "mlp", "--machine", machine_file, *ON)
    facts = [line for line in dlperf(*on, "--device-memory", "8GiB").out.splitlines() if line]
    last = next(line for line in reversed(facts) if not line.startswith((" ", "-")))
    assert last.startswith("device memory  16.7 MiB allocated, 22.0 MiB reserved at the peak; fits")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--device-memory", "0"), "'0'"),
        (("--device-memory", "-1"), "-1"),
        (("--device-memory", "nan"), "'nan'"),
        (("--device-memory", "24,5GiB"), "'24,5GiB'"),
        (("--device-memory", "big"), "'big'"),
        (("--device-memory", "8GiB", "--workers", "2"), "--workers are processes on a CPU"),
    ],
)
def test_what_is_no_memory_is_refused(
    dlperf: Callable, machine_file: Path, options: tuple[str, ...], said: str
) -> None:
    done = dlperf("predict", "mlp", "--machine", machine_file, *options)
    assert (done.status, done.out) == (2, "")
    (line,) = done.err.splitlines()
    assert line.startswith("dlperf predict: error: ")
    assert said in line

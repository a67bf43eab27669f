"""Memory of a step on a device: published figures, torch's MemTracker, traces by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import dlperf
from dlperf.core.errors import DlperfError
from dlperf.core.trace import Op, Storage, TensorSpec, Trace
from dlperf.core.units import MIB
from dlperf.predictors.allocator.caching import CachingAllocator, SegmentSizes
from dlperf.predictors.allocator.device_memory import (
    CUBLAS_WORKSPACE_BYTES,
    device_memory,
    largest_batch_size,
)
from dlperf.predictors.allocator.process import Script
from dlperf.recorder.device_defaults import with_device_defaults
from dlperf.recorder.targets import Built

# -- published figures -----------------------------------------------------------------------------


def test_reserved_memory_of_a_forward() -> None:
    """discuss.pytorch.org/t/138814 prints 5014 MiB reserved after this forward (2021)."""
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(3, 28, (3, 3)), nn.MaxPool2d(3, 2, padding=1), nn.MaxPool2d(3, 2, padding=1)
        )
        images = torch.empty(512, 3, 224, 224)
    found = device_memory(dlperf.record(model, images, inference=True))
    assert found.peak_reserved_bytes == 5014 * MIB


def test_a_workspace_stays_after_a_product() -> None:
    """pytorch issue 95668: a forward of ``nn.Linear(1, 1)`` leaves 8519680 bytes allocated (A10G)."""
    trace = dlperf.record(nn.Linear(1, 1), torch.empty(1, 1), inference=True)
    assert dict(device_memory(trace).peak_bytes)["workspace"] == 8_519_680


# -- torch's own count -----------------------------------------------------------------------------

Parts = tuple[nn.Module, torch.Tensor, Callable[[Any], torch.Tensor], Any]


def _mlp() -> Parts:
    model = nn.Sequential(nn.Linear(784, 256), nn.GELU(), nn.Linear(256, 256), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    return model, torch.randn(32, 784), lambda y: y.square().mean(), optimizer


def _cnn() -> Parts:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(32, 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, torch.randn(32, 3, 32, 32), lambda y: y.square().mean(), optimizer


def _transformer() -> Parts:
    layers = (nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2))
    model = nn.Sequential(nn.Embedding(500, 64), *layers, nn.Linear(64, 500))
    tokens = torch.randint(0, 500, (8, 32))
    optimizer = torch.optim.Adam(model.parameters())
    return model, tokens, lambda y: functional.log_softmax(y, -1).mean(), optimizer


def _tracked_bytes(parts: Callable[[], Parts], inference: bool) -> int:
    """The peak that MemTracker counts over three steps."""
    tools = pytest.importorskip("torch.distributed._tools.mem_tracker")
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs, loss, optimizer = parts()
        model.train(not inference)
        tracker = tools.MemTracker()
        tracker.track_external(model, optimizer)
        with torch.set_grad_enabled(not inference), tracker:
            tracker.track_external(inputs)
            for _ in range(3):
                tracker.reset_mod_stats()
                optimizer.zero_grad()
                output = model(inputs)
                if not inference:
                    loss(output).backward()
                    optimizer.step()
                del output
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.slow
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("parts", [_mlp, _cnn, _transformer])
def test_as_mem_tracker_counts(parts: Callable[[], Parts], inference: bool) -> None:
    model, inputs, loss, optimizer = parts()
    trace = dlperf.record(model, inputs, loss=loss, optimizer=optimizer, inference=inference)
    # One pool without rounding: the allocated bytes are those of the tensors.
    heap = CachingAllocator(
        sizes=SegmentSizes(rounding_bytes=1, small_bytes=2**50, small_segment_bytes=2**50)
    )
    Script(trace, lambda _: ()).run_on(heap)
    assert heap.peak_allocated_bytes == pytest.approx(_tracked_bytes(parts, inference), abs=64)


# -- what PyTorch chooses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "foreach"),
    [
        ({}, True),
        ({"foreach": False}, False),
        ({"fused": True}, None),
        ({"differentiable": True}, None),
        ({"lr": torch.tensor(0.1)}, None),
    ],
)
def test_an_optimizer_without_a_choice_runs_foreach(
    options: dict[str, Any], foreach: bool | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    with_device_defaults(Built(model, (), torch.mean, optimizer))
    assert [group["foreach"] for group in optimizer.param_groups] == [foreach]


def test_an_optimizer_of_ones_own_stays() -> None:
    class Own(torch.optim.Optimizer):
        pass

    optimizer = Own(nn.Linear(2, 2).parameters(), {})
    with_device_defaults(Built(nn.Linear(2, 2), (), torch.mean, optimizer))
    assert "foreach" not in optimizer.param_groups[0]


# -- by hand ---------------------------------------------------------------------------------------


def op(name: str, phase: str = "forward") -> Op:
    return Op(name, (TensorSpec.contiguous(1),), phase=phase)


def step(*storages: Storage, ops: tuple[Op, ...]) -> Trace:
    return Trace("t", 1, (), ops, storages)


def test_memory_by_kind() -> None:
    found = device_memory(
        step(
            Storage(4 * MIB, -1, None, "parameter"),
            Storage(100, 0, 2),
            Storage(4 * MIB, 1, None, "gradient"),
            Storage(2 * MIB, 1, 2),
            Storage(8 * MIB, -1, None, "optimizer"),
            ops=(
                op("aten.mm.default"),
                op("aten.mm.default", "backward"),
                op("aten.add_.Tensor", "optimizer"),
            ),
        )
    )
    # From the second step on the state is there in the backward, too.
    assert dict(found.peak_bytes) == {
        "parameter": 4 * MIB,
        "buffer": 0,
        "input": 0,
        "gradient": 4 * MIB,
        "optimizer": 8 * MIB,
        "activation": 100,
        "temporary": 2 * MIB,
        "workspace": 2 * CUBLAS_WORKSPACE_BYTES,  # of the forward's thread and the backward's
        "rounding": 412,
    }
    assert sum(n_bytes for _, n_bytes in found.peak_bytes) == found.peak_allocated_bytes


def test_a_step_that_fits_only_without_cached_segments() -> None:
    # 30 MiB, freed before 31 MiB are made: segments of 30 and 32 MiB, or the second alone.
    trace = step(
        Storage(30 * MIB, 0, 1),
        Storage(31 * MIB, 1, 2),
        ops=(op("aten.relu.default"), op("aten.relu.default")),
    )
    ample = device_memory(trace, 100 * MIB, context_bytes=0)
    assert (ample.peak_reserved_bytes, ample.needed_bytes) == (62 * MIB, 62 * MIB)
    tight = device_memory(trace, 50 * MIB, context_bytes=0)
    assert (tight.peak_reserved_bytes, tight.needed_bytes) == (62 * MIB, 32 * MIB)
    assert tight.fits
    short = device_memory(trace, 50 * MIB, context_bytes=20 * MIB)
    assert (short.fits, short.lacking_bytes) == (False, 2 * MIB)
    assert str(short) == (
        "32.0 MiB allocated, 62.0 MiB reserved at the peak; lacks 2.00 MiB in 50.0 MiB less 20.0"
        " MiB of the CUDA context"
    )


def test_a_mask_of_dropout_has_a_byte_an_element() -> None:
    model = nn.Sequential(nn.Linear(8, 1000, bias=False), nn.Dropout(0.5))
    trace = dlperf.record(model, torch.empty(512, 8))
    by_kind = dict(device_memory(trace).peak_bytes)
    n_elements = 512 * 1000
    # In the backward live the mask, the output, which the caller holds, and the loss.
    assert by_kind["activation"] == n_elements + 4 * n_elements + 4


def test_a_backward_scatters_into_zeros_in_place() -> None:
    """A table of 4 MB: its gradient is one table, though a recording makes zeros and a copy."""
    table = nn.ParameterList([torch.randn(1000, 1000)])

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.table[0][rows]

    trace = dlperf.record(Rows(), torch.tensor([1, 2]), optimizer=torch.optim.SGD(table, lr=0.1))
    names = [op.packet for op in trace.ops]
    assert names[names.index("aten.new_zeros") + 1] == "aten.index_put"
    by_kind = dict(device_memory(trace).peak_bytes)
    assert (by_kind["parameter"], by_kind["gradient"]) == (4_000_000, 4_000_000)
    assert by_kind["temporary"] < 20_000


def test_foreach_holds_temporaries_of_all_parameters() -> None:
    def temporary_bytes(foreach: bool) -> int:
        model = nn.Sequential(*(nn.Linear(500, 500, bias=False) for _ in range(8)))
        optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)
        trace = dlperf.record(model, torch.empty(1, 500), optimizer=optimizer)
        return dict(device_memory(trace).peak_bytes)["temporary"]

    assert temporary_bytes(True) >= 8 * 500 * 500 * 4 > 2 * temporary_bytes(False)


def test_notes_name_what_is_not_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2))
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    notes = device_memory(dlperf.record(model, torch.empty(2, 3, 8, 8), optimizer=optimizer)).notes
    assert [note.split(" ")[0] for note in notes] == ["workspaces", "Adam"]
    assert "2 convolutions" in notes[0]  # its backward is one, too


@pytest.mark.parametrize("wrong", [0, -1, 1e9])
def test_what_is_no_capacity_is_refused(wrong: Any) -> None:
    with pytest.raises(DlperfError, match=r"the capacity is .*; give a positive whole number"):
        device_memory(step(ops=()), wrong)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("free_bytes", [90, 101, 500, 5_000, 10**9])
def test_the_largest_batch_size(power: float, free_bytes: int) -> None:
    calls = []

    def needed(batch_size: int) -> int:
        calls.append(batch_size)
        return 100 + int(batch_size**power)

    fitting = [size for size in range(1, 1001) if needed(size) <= free_bytes]
    calls.clear()
    assert largest_batch_size(needed, 1000, free_bytes) == max(fitting, default=None)
    assert len(calls) <= 20

"""What loading and the loop around a step cost: made-up models come back through a clock held by
hand; once everything for real.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch

from dlperf.core.clock import Clock, Repeats, Samples
from dlperf.core.costs import CostKey
from dlperf.core.machine import Cpu, Machine
from dlperf.forecast.loading import LoaderCosts, has_costs
from dlperf.microbench import loader, loop

US = 1e-6


class Hand:
    """A clock that goes on only when told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def clock(self) -> Clock:
        return Clock(now=lambda: self.time, switches=lambda: 0)

    def takes(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.time += seconds

        return call


def test_in_process_costs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()

    def next_of(
        dataset: torch.utils.data.TensorDataset, batch_size: int, shuffled: bool
    ) -> Callable[[], None]:
        n_tensors, row_bytes = len(dataset.tensors), 4 * dataset.tensors[0].shape[1]
        byte_s = 0.0 if row_bytes == 4 else 1e-10 if row_bytes == 4096 else 3e-10
        each_s = (1 + 2 * n_tensors + (0.5 if shuffled else 0)) * US + byte_s * row_bytes
        return hand.takes((30 + 6 * n_tensors) * US + batch_size * each_s)

    monkeypatch.setattr(loader, "_next_of", next_of)
    found = {
        name: samples.median
        for name, samples in loader.in_process(Repeats(1e-6, 3), 2**22, hand.clock()).items()
    }
    expected = {
        "batch": 30 * US,
        "batch_tensor": 6 * US,
        "sample": 1 * US,
        "tensor": 2 * US,
        "shuffle": 0.5 * US,
    }
    assert found == pytest.approx(
        {CostKey(f"loader_{name}"): s for name, s in expected.items()}
        | dict(zip(list(found)[5:], (1e-10, 3e-10, 3e-10)))
    )


def test_costs_of_handing_over_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = {
        "batch": 30 * US,
        "batch_tensor": 6 * US,
        "sample": 1 * US,
        "tensor": 2 * US,
    }

    def handed_over(
        n_tensors: int, row_bytes: int, batch_size: int, *_: object
    ) -> tuple[Samples, float]:
        n_bytes = 0 if row_bytes == 4 else n_tensors * row_bytes * batch_size
        fetch_s = (30 + 6 * n_tensors + batch_size * (1 + 2 * n_tensors)) * US
        return (
            Samples(((500 + 300 * n_tensors) * US + 4e-10 * n_bytes,)),
            fetch_s + (700 + 200 * n_tensors) * US + (2e-10 + 1e-9) * n_bytes,
        )

    monkeypatch.setattr(loader, "_handed_over", handed_over)
    found = loader.with_worker(
        {
            **{CostKey(f"loader_{name}"): Samples((s,)) for name, s in fetched.items()},
            CostKey("loader_byte", at=65536): Samples((2e-10,)),
        },
        3,
        Hand().clock(),
    )
    assert {name: samples.median for name, samples in found.items()} == pytest.approx(
        {
            CostKey("loader_receive_batch"): 500 * US,
            CostKey("loader_receive_tensor"): 300 * US,
            CostKey("loader_receive_byte"): 4e-10,
            CostKey("loader_send_batch"): 700 * US,
            CostKey("loader_send_tensor"): 200 * US,
            CostKey("loader_send_byte"): 1e-9,
        }
    )


def test_costs_of_starting_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loader,
        "_lives",
        lambda n, persistent, clock: (
            0.02 + 0.015 * n,
            0.007 + 0.001 * n,
            0.002 if persistent else 0.0,
        ),
    )
    monkeypatch.setattr(loader, "_fork_byte_s", lambda n_bytes, clock: 1e-9)
    found = {
        name: samples.median for name, samples in loader.starts("quick", Hand().clock()).items()
    }
    assert found == pytest.approx(
        {
            CostKey("loader_start_call"): 0.02,
            CostKey("loader_start_worker"): 0.015,
            CostKey("loader_stop_call"): 0.007,
            CostKey("loader_stop_worker"): 0.001,
            CostKey("loader_resume"): 0.002,
            CostKey("loader_fork_byte"): 1e-9,
        }
    )


def test_a_system_without_workers_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("unable to open shared memory object\nin read-write mode")

    monkeypatch.setattr(loader, "_handed_over", refuse)
    costs, refused = loader.measure(1, "quick")
    assert {cost.key for cost in costs} >= {
        CostKey("loader_batch"),
        CostKey("loader_byte", at=4096),
    }
    assert not any(cost.key.kind.startswith("loader_receive") for cost in costs)
    assert refused == [
        (
            "worker processes of a data loader (RuntimeError: unable to open shared memory object in"
            " read-write mode)"
        )
    ]


@pytest.mark.process
def test_everything_for_real_leaves_no_process() -> None:
    costs, refused = loader.measure(1, "quick")
    assert refused == []
    assert multiprocessing.active_children() == []
    machine = Machine(Cpu("this", 2), costs=tuple(costs))
    assert has_costs(machine)
    found = LoaderCosts(machine, 1)
    assert found.fetch_s(64, (4096,), shuffled=True) > found.fetch_s(8, (4096,), shuffled=True) > 0
    assert found.starts(2, 0).start_s > found.batches(0.0, (4096,), 2).take_over_s > 0


def test_a_call_a_tensor_and_a_byte_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping takes 40 us, 2 us for each tensor, and 0.1 ns for each byte beyond 16 a tensor."""
    hand = Hand()

    def clip(gradients: list[torch.Tensor], _most: float) -> None:
        n_bytes = sum(4 * gradient.numel() for gradient in gradients if gradient.numel() > 4)
        hand.time += (40 + 2 * len(gradients)) * US + 1e-10 * n_bytes

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
    found = loop._clipping(Repeats(1e-6, 3), hand.clock())
    assert {name: samples.median for name, samples in found.items()} == pytest.approx(
        {"loop_clip_call": 40 * US, "loop_clip_tensor": 2 * US, "loop_clip_byte": 1e-10}
    )


def test_the_loop_for_real() -> None:
    """Differences of times may vanish on a busy machine; what is measured does not depend on it."""
    found = {str(cost.key): cost.samples for cost in loop.measure(1, "quick")}
    assert set(found) == {  # the first step takes a process of its own
        f"loop_{name}"
        for name in (
            "item accuracy scheduler clip_call clip_tensor clip_byte save_call save_tensor"
            " save_byte first_convolution"
        ).split()
    }
    assert found["loop_item"].minimum > 0
    assert found["loop_accuracy"].minimum > 0

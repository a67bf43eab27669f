"""A user's loader, sampled: how long its batches take by a clock held by hand, and loaders that
fail in every way.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from dlperf.core.clock import Clock
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.profiler import loader_sampling
from dlperf.profiler.loader_sampling import load, sample_loader

HAND = [0.0]
CLOCK = Clock(now=lambda: HAND[0], switches=lambda: 0)


class Slow(Dataset[tuple[torch.Tensor, int]]):
    """Each sample takes 3 ms by the clock that the test holds."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        HAND[0] += 0.003
        return torch.zeros(5), index


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            HAND[0] += 0.25
            yield torch.zeros(3)


def test_a_batch_is_timed() -> None:
    found = sample_loader(DataLoader(Slow(400), 8, shuffle=True), 8, clock=CLOCK)
    assert found.batch_s == pytest.approx(8 * 0.003)
    assert found.tensor_bytes == (8 * 5 * 4, 8 * 8)
    assert (found.n_sampled, found.n_batches, found.n_samples) == (40, 50, 400)


def test_workers_are_not_started() -> None:
    found = sample_loader(
        DataLoader(Slow(40), 8, num_workers=2, persistent_workers=True, drop_last=True),
        8,
        clock=CLOCK,
    )
    assert found.batch_s == pytest.approx(
        8 * 0.003
    )  # in a worker the clock of this process would not have moved
    assert found.persistent_workers
    assert found.drop_last


def test_an_endless_loader_is_left_after_its_time() -> None:
    # a batch takes 1 s; two to warm up and three more, as the limit is looked at after each
    found = sample_loader(DataLoader(Endless(), 4), 4, clock=CLOCK, longest_s=4.5)
    assert (found.batch_s, found.n_sampled, found.n_batches) == (pytest.approx(1.0), 3, None)
    assert found.notes == ("loader loader: has no length; the samples that were asked for count",)


def test_what_needs_no_processor_is_told_apart() -> None:
    # a batch of four samples takes 12 ms of the clock, and the processor for 3 of them
    used = iter(range(1000))
    assert sample_loader(
        DataLoader(Slow(40), 4), 4, clock=CLOCK, processor_s=lambda: 0.003 * next(used)
    ).waiting_frac == pytest.approx(0.75)


def test_a_short_loader_is_taken_as_it_is() -> None:
    assert sample_loader(DataLoader(Slow(8), 8), 8, clock=CLOCK).n_sampled == 1


def test_batches_of_another_size() -> None:
    with pytest.raises(
        DlperfError,
        match="loader loader: gives batches of 4, the target has 8; give it as --batch-size",
    ):
        sample_loader(DataLoader(Slow(40), 4), 8, clock=CLOCK)


def test_an_empty_loader() -> None:
    with pytest.raises(WorkFailed, match="loader loader: is empty; nothing can be trained with it"):
        sample_loader(DataLoader([], 4), 4)


def test_a_batch_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Slow):
        def __getitem__(self, index: int) -> Any:
            time.sleep(60)

    monkeypatch.setattr(loader_sampling, "LONGEST_BATCH_S", 0.05)
    with pytest.raises(
        WorkFailed, match="loader loader: took more than 1 s over one batch; it was given up"
    ):
        sample_loader(DataLoader(Stuck(8), 4), 4)


LOADERS = """
from torch.utils.data import DataLoader
def whole(batch_size, num_workers):
    return [(0.0, 1)] * 100
def loader(batch_size, num_workers):
    return DataLoader([(0.0, 1)] * 100, batch_size, num_workers=num_workers)
def raises(batch_size, num_workers):
    raise OSError("no such disk")
class Broken(list):
    def __getitem__(self, index):
        raise ValueError("sample is torn")
def broken(batch_size, num_workers):
    return DataLoader(Broken([1] * 100), batch_size)
def alone(batch_size):
    pass
number = 3
"""


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("whole", DlperfError, "returned list; expected a torch.utils.data.DataLoader or Dataset"),
        ("raises", WorkFailed, "raises OSError: no such disk"),
        ("broken", WorkFailed, "raises ValueError: sample is torn"),
        (
            "alone",
            DlperfError,
            r"is called as CALLABLE\(batch_size, num_workers\), but takes \(batch_size\)",
        ),
        ("number", DlperfError, "is of type int, which cannot be called"),
        ("nothing", DlperfError, "has no 'nothing'"),
    ],
)
def test_loaders_that_fail_are_named(
    tmp_path: Path, name: str, kind: type[DlperfError], message: str
) -> None:
    path = tmp_path / "my_loaders.py"
    path.write_text(LOADERS)
    with pytest.raises(DlperfError, match=rf"loader {path}:{name}.*{message}") as raised:
        load(f"{path}:{name}", 10, 0)
    assert type(raised.value) is kind


def test_a_named_loader(tmp_path: Path) -> None:
    path = tmp_path / "my_loaders.py"
    path.write_text(LOADERS)
    assert load(f"{path}:loader", 10, 2).n_batches == 10

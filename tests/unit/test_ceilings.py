"""The kernels behind the roofs compute what they say and count what they move; the measuring is
held by a clock of the test's own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dlperf.core.clock import Clock
from dlperf.core.costs import CostKey
from dlperf.core.machine import Cpu, Kernel, Machine
from dlperf.microbench import ceilings
from dlperf.microbench.worker import SYSTEM_GROUPS

CACHES = (32 * 2**10, 2**20, 2**25)


def test_reductions_go_over_their_set_again_and_again() -> None:
    call, n_elements = ceilings.reduction("sum", 8 * 2**10, torch.float64, threads=2)
    sums = call()
    assert isinstance(sums, torch.Tensor)
    assert n_elements == 1024 * 2 * 2**22 // (8 * 2**10)  # 8 KiB are 1024 elements; 4 MiB a thread
    assert sums.shape == (2 * 512,)
    assert torch.all(sums == sums[0])
    columns, _ = ceilings.reduction("sum", 8 * 2**10, torch.float64, threads=1, dim=0)
    assert float(columns().sum()) == pytest.approx(512 * float(sums[0]), rel=0.05)  # type: ignore[attr-defined]  # other random numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_products_neither_vanish_nor_overflow(dtype: torch.dtype) -> None:
    """Zeros, denormals and infinities take other times than numbers do."""
    call, _ = ceilings.reduction("prod", 16 * 2**10, dtype, threads=1)
    value = float(call()[0])  # type: ignore[index]
    assert 1e-30 < value < 1e30


@pytest.mark.parametrize("set_bytes", [8 * 2**10, 2**20, 2**26])
def test_bags_see_every_row(set_bytes: int) -> None:
    call, n_elements = ceilings.bag(set_bytes, threads=1)
    sums = call()[0]  # type: ignore[index]
    assert sums.shape[1] * 4 <= set_bytes
    assert n_elements * 4 >= set_bytes
    n_looked_up = n_elements // sums.shape[1]
    # values are uniform in 0..1, so each of the sums is about half the rows that went into it
    assert float(sums.sum()) == pytest.approx(n_elements / 2, rel=0.2)
    assert n_looked_up >= set_bytes // (4 * sums.shape[1])


def test_updates_accumulate() -> None:
    call, n_elements = ceilings.update(8 * 2**10)
    n_rows = n_elements // 1024  # half of 8 KiB in float32
    first = call().clone()  # type: ignore[attr-defined]
    second = call()
    assert n_rows == 512
    assert torch.allclose(second, 2 * first, rtol=1e-3)
    assert float(first.mean()) == pytest.approx(
        0.5 * n_rows * 0.5, rel=0.1
    )  # 0.5 a, a uniform in 0..1


def test_sets_lie_well_inside_each_cache_and_beyond_the_last() -> None:
    machine = Machine(Cpu("x", 1, CACHES))
    for mode in ("quick", "full"):
        sets = ceilings.working_sets(mode, CACHES)
        levels = [machine.level_of(size) for size in sets]
        assert set(levels) == {"L1", "L2", "L3", "DRAM"}
        assert sets[-1] == 4 * CACHES[2]
    assert ceilings.working_sets("quick", (0, 0, 0)) == [2**26]


def test_what_is_measured_is_what_the_roofs_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from dlperf.ops.roofs import roofs_of

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 1e-3

    monkeypatch.setattr(ceilings, "working_sets", lambda mode, caches: [16 * 2**10, 512 * 2**10])
    clock = Clock(now=ticks().__next__, switches=lambda: 0)  # every sample takes a millisecond
    bandwidths, costs = ceilings.measure(1, "quick", CACHES, clock)
    sums = next(b for b in bandwidths if b.kernel == "sum" and b.working_set_bytes == 16 * 2**10)
    assert sums.best_bytes_per_s == pytest.approx(2**22 / 1e-3)  # a call goes over 4 MiB
    updates = next(
        b for b in bandwidths if b.kernel == "update" and b.working_set_bytes == 16 * 2**10
    )
    assert updates.moved_bytes == 12 * 2048 * (
        2**22 // (16 * 2**10)
    )  # 2048 elements of c, read, added to and written
    assert {cost.key for cost in costs} == {
        CostKey("arithmetic", kind, variant=dtype)
        for kind in ("add", "mul")
        for dtype in ceilings.DTYPES
    }
    product = torch_product()
    roofs = roofs_of(Machine(Cpu("x", 1, CACHES), (product,), tuple(bandwidths), tuple(costs)), 1)
    assert {roof.level for roof in roofs.bandwidths} == {"L1", "L2"}
    assert roofs.ceilings[0].is_measured


def torch_product() -> Kernel:
    from dlperf.core.clock import Samples
    from dlperf.core.trace import Op, TensorSpec

    square = TensorSpec.contiguous(64, 64)
    return Kernel(
        Op("aten.mm.default", (square, square), outputs=(square,)), "gemm", 1, Samples((1e-3,))
    )


def test_a_calibration_measures_them() -> None:
    assert "ceilings" in SYSTEM_GROUPS

"""``calibrate --refresh``: which kernels are timed again, how, and what is said of them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import cast

import pytest
from report_cases import machine, mm, relu

from dlperf.core.clock import Clock, Samples
from dlperf.core.machine import Kernel, Machine
from dlperf.core.state import Reading
from dlperf.core.state_probe import StateProbe
from dlperf.microbench import refresh
from dlperf.ops.reference_state import bound_of
from dlperf.report.machine_refresh import compare

ONE = Reading(1e-4, 1e-4, 1e-5, 1e-4, 1e-2, 1e-4)


def kernel(n: int, seconds: float, family: str = "gemm") -> Kernel:
    op = mm(n, n, n) if family == "gemm" else relu(n, "")
    return Kernel(op, family, 1, Samples((seconds, 1.5 * seconds)))


def test_anchors_are_spread_over_the_lengths_and_families_take_turns() -> None:
    products = [kernel(n, n * 1e-4) for n in range(1, 12)]  # 0.1 ms .. 1.1 ms
    long = kernel(64, 1.0)  # longer than LONGEST_S
    short = [kernel(n, n * 1e-6, "rows") for n in (1, 2)]
    found = refresh.anchors(replace(machine(), kernels=(*products, long, *short)), 1)
    times = [k.seconds for k in found if k.family == "gemm"]
    assert times == pytest.approx([1e-4, 3e-4, 5e-4, 7e-4, 9e-4, 11e-4])
    assert [k.family for k in found[:4]] == ["gemm", "rows", "gemm", "rows"]
    assert len(found) == 6 + 2


class FakeProbe:
    def __init__(self) -> None:
        self.n_read = 0

    def rounds(self, count: int) -> list[Reading]:
        self.n_read += 1
        return [replace(ONE, core_s=(self.n_read + n) * 1e-4) for n in range(count)]


def test_samples_are_taken_in_rounds_between_readings() -> None:
    ticks = itertools.count()
    probe = FakeProbe()
    clock = Clock(now=lambda: float(next(ticks)), switches=lambda: 0)
    found = refresh.time_anchors([kernel(4, 1e-3), kernel(8, 1e-3)], cast(StateProbe, probe), clock)
    assert len(found["readings"]) == len(found["least"]) == probe.n_read == refresh.ROUNDS + 1
    # 16 rounds from 0.1 ms on: the median is the mean of 0.8 and 0.9, the 0.05 quantile 0.175
    assert found["readings"][0]["core_s"] == pytest.approx(8.5e-4)
    assert found["least"][0]["core_s"] == pytest.approx(1.75e-4)
    # a second between any two looks at the clock; the first of equal samples counts
    assert [(index, number) for index, _, number in found["rows"]] == [(0, 0), (1, 0)]
    assert all(seconds == 1.0 for _, seconds, _ in found["rows"])


def test_rounds_end_when_the_time_is_over() -> None:
    ticks = itertools.count()
    clock = Clock(now=lambda: float(next(ticks)), switches=lambda: 0).within(3.0)
    probe = FakeProbe()
    found = refresh.time_anchors(
        [kernel(4, 1e-3) for _ in range(50)], cast(StateProbe, probe), clock
    )
    assert len(found["readings"]) == 2
    assert len(found["rows"]) < 50


def _timed(file: Machine, core: float, factors: list[float]) -> list:
    around = (replace(ONE, core_s=core * 1e-4),) * 2
    return [(k, f * k.seconds, around) for k, f in zip(file.kernels, factors)]


def test_what_the_state_explains_is_no_movement() -> None:
    kernels = tuple(kernel(n, n * 1e-4) for n in range(1, 6))
    file = replace(machine(), kernels=kernels, reference=ONE)
    slower = _timed(file, 1.25, [1.25] * 5)
    page = compare(file, slower, [reading for _, _, own in slower for reading in own])
    (family,) = page.movements
    assert family.ratio == pytest.approx(1.0)
    assert not page.moved
    assert "core 1.25 of the reference" in page.to_text()
    assert "no family moved" in page.to_text()
    assert re.search(r"spread +threshold\n", page.to_text())


def test_a_slowdown_that_ended_before_a_sample_makes_it_no_shorter() -> None:
    file = replace(machine(), kernels=(kernel(2, 1e-3),), reference=ONE)
    around = (replace(ONE, core_s=1.5e-4), replace(ONE, core_s=1.1e-4))
    (family,) = compare(file, [(file.kernels[0], 1.1e-3, around)], around).movements
    assert family.ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("factors", "has_moved"),
    [
        ([1.2] * 5, True),
        ([0.85] * 5, True),
        ([1.07] * 5, False),  # less than 8 %
        ([0.8, 1.0, 1.2, 1.5, 1.8], False),  # the spread, (1.68 - 0.88) / 2, is larger
    ],
)
def test_a_family_moves_beyond_the_state_and_its_spread(
    factors: list[float], has_moved: bool
) -> None:
    kernels = tuple(kernel(n, n * 1e-4) for n in range(1, 6))
    file = replace(machine(), kernels=kernels, reference=ONE)
    timed = _timed(file, 1.0, factors)
    page = compare(file, timed, [ONE])
    assert [one.has_moved for one in page.movements] == [has_moved]
    assert page.movements[0].ratio == pytest.approx(sorted(factors)[2])
    (family,) = page.to_json()["families"]
    assert family["has_moved"] is has_moved
    threshold_frac = max(0.08, family["spread"])
    assert family["threshold_frac"] == pytest.approx(threshold_frac)
    assert f" {100 * threshold_frac:.1f} %" in page.to_text().splitlines()[-3]


def test_without_a_reference_times_alone_count() -> None:
    file = replace(machine(), kernels=(kernel(2, 1e-3),))
    page = compare(file, [(file.kernels[0], 2e-3, (ONE, ONE))], [ONE])
    assert page.movements[0].ratio == pytest.approx(2.0)
    assert page.state is None
    assert "state now" not in page.to_text()


def test_bounds() -> None:
    file = machine()  # L1 32 KiB, L2 1 MiB, L3 32 MiB
    assert bound_of(kernel(8, 1e-6), file) == "compute"
    assert bound_of(kernel(8, 1e-6, "rows"), file) == "overhead"
    assert bound_of(kernel(2**17, 1e-4, "rows"), file) == "L2"  # 2**17 floats are 512 KiB
    assert bound_of(kernel(2**24, 1e-2, "rows"), file) == "DRAM"

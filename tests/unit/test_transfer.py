"""Kernels that were profiled on another machine, carried over: each time with its sum in sight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrated_cases import (
    CALL_S,
    ELEMENTS_PER_S,
    LEVELS,
    PEAK_FLOPS_PER_S,
    machine,
    mm,
    relu,
    step_keys,
    trace,
)
from hypothesis import given
from hypothesis import strategies as st

import dlperf
from dlperf.core.clock import Samples
from dlperf.core.data_sheet import DataSheet
from dlperf.core.machine import Cpu, Kernel, Machine
from dlperf.core.shelf import data_sheet_machine
from dlperf.ops.roofs import roofs_of
from dlperf.predictors.transfer import Roofline, carried_s, roofs_of_sheet

SECONDS = st.floats(1e-7, 1.0)
NEEDS = st.builds(Roofline, SECONDS, SECONDS, st.floats(0.0, 1e-5))


def bare(factor: float = 1.0, **costs: float) -> Machine:
    """A machine of which the peak and the bandwidths are known, every time times `factor`."""
    found = machine(costs, factor=factor)
    peak = Kernel(mm(256, 256, 256), "gemm", 1, Samples((factor * 2 * 256**3 / PEAK_FLOPS_PER_S,)))
    return replace(found, kernels=(peak,), cpu=replace(found.cpu, model="Another CPU"))


def total_s(step: dlperf.Trace, on: Machine, source: Machine | None) -> float:
    found = dlperf.predict(step, on, 1, profiled_on=source).step
    assert found.low_s is not None
    assert found.low_s < found.total_s < found.high_s  # type: ignore[operator]
    return found.total_s or 0.0


# -- one kernel ------------------------------------------------------------------------------------


def test_a_computing_kernel_keeps_its_share_of_the_peak() -> None:
    there, here = Roofline(2.0, 1.0, 0.0), Roofline(1.0, 0.5, 0.0)
    assert carried_s(4.0, there, here, 0.5, 1.0) == 2.0  # half of the peak, there and here


def test_a_moving_kernel_keeps_its_share_of_the_bandwidth() -> None:
    there, here = Roofline(0.1, 2.0, 0.0), Roofline(0.1, 6.0, 0.0)
    assert carried_s(4.0, there, here, 1.0, 1.0) == 12.0


def test_another_roof_here_is_a_lower_bound() -> None:
    there, here = Roofline(2.0, 1.0, 0.0), Roofline(1.0, 3.0, 0.0)
    assert carried_s(4.0, there, here, 0.5, 1.0) == 3.0


def test_the_call_moves_with_calls() -> None:
    there, here = Roofline(1e-9, 1e-9, 2e-6), Roofline(1e-9, 1e-9, 4e-6)
    assert carried_s(3e-6, there, here, 9.0, 2.0) == 6e-6  # a call and little else
    there = Roofline(1.0, 0.1, 1.0)
    assert carried_s(3.0, there, there, 1.0, 4.0) == 4.0 + 2.0


@given(SECONDS, NEEDS)
def test_nothing_moves_to_the_same_machine(seconds: float, roofline: Roofline) -> None:
    least = max(roofline.compute_s, roofline.memory_s)
    found = carried_s(seconds, roofline, roofline, 1.0, 1.0)
    assert found >= seconds * (1 - 1e-12)
    if seconds >= roofline.call_s + least:
        assert found == pytest.approx(seconds)


@given(SECONDS, NEEDS, NEEDS, st.floats(0.01, 100.0), st.floats(0.01, 100.0))
def test_no_kernel_beats_the_roofs_but_calls(
    seconds: float, there: Roofline, here: Roofline, core: float, call: float
) -> None:
    found = carried_s(seconds, there, here, core, call)
    assert found >= min(call * seconds, max(here.compute_s, here.memory_s)) * (1 - 1e-12)


# -- steps -----------------------------------------------------------------------------------------


def test_a_machine_twice_as_slow_takes_twice_as_long() -> None:
    keys = {str(key.kind): CALL_S for key in step_keys() if not key.at and not key.of}
    source = machine(keys)
    step = trace(mm(512, 512, 512), relu(2**20))
    usual = total_s(step, source, None)
    slow = {name: 2 * seconds for name, seconds in keys.items()}
    assert total_s(step, bare(2.0, **slow), source) == pytest.approx(2 * usual, rel=0.02)
    assert total_s(step, bare(1.0, **keys), source) == pytest.approx(usual, rel=0.02)


def test_measured_kernels_here_count_before_roofs() -> None:
    """Here relu takes three times as long as there, whatever the roofs say: 3 x 2^19 ns."""
    source, n = machine(), 2**19
    here = bare()
    own = [
        Kernel(relu(size), "pointwise", 1, Samples((3 * (CALL_S + size / ELEMENTS_PER_S),)))
        for size in (2**10, 2**15, 2**20)
    ]
    here = replace(here, kernels=(*here.kernels, *own))
    found = dlperf.predict(trace(relu(n)), here, 1, profiled_on=source)
    assert found.step.total_s == pytest.approx(3 * n / ELEMENTS_PER_S, rel=0.05)
    assert set(found.ops["source"]) <= {"extrapolated", "measured"}
    exact = dlperf.predict(trace(relu(2**15)), here, 1, profiled_on=source)
    assert exact.ops["source"].iloc[-1] == "measured"


def test_caches_are_those_of_the_machine() -> None:
    """32 MiB of relu lie in the source's L3 of 64 MiB, and in DRAM here: 4 times as far."""
    n = 2**22
    there_s = 2 * 4 * n / LEVELS["L3"]
    large = Cpu("Large", 4, (32 * 2**10, 2**20, 2**26))
    kernels = [
        Kernel(relu(size), "pointwise", 1, Samples((max(CALL_S, 8 * size / LEVELS["L3"]),)))
        for size in (2**18, 2**20, 2**22)
    ]
    source = machine()
    gemm = [one for one in source.kernels if one.family == "gemm"]
    source = replace(source, cpu=large, kernels=(*gemm, *kernels))
    here = replace(bare(), cpu=Cpu("Small", 4, (32 * 2**10, 2**20, 2**23)))
    ratio = LEVELS["L3"] / LEVELS["DRAM"]
    assert total_s(trace(relu(n)), here, source) == pytest.approx(ratio * there_s, rel=0.05)


def test_a_data_sheet_has_a_part_of_its_peak() -> None:
    """8 cores of 16 GFLOP/s together, 80 % of the clock: 1.6 GFLOP/s a core, a sixth of 10."""
    sheet = DataSheet("processor", {"float32": 1.6e10}, 1e11, sustained_frac=0.8)
    here = data_sheet_machine(Cpu("By its sheet", 8, (32 * 2**10, 2**20, 2**25)), sheet)
    source, step = machine(), trace(mm(512, 512, 512))
    usual = total_s(step, source, None)
    assert total_s(step, here, source) == pytest.approx(usual * 10 / 1.6, rel=0.05)
    roofs = roofs_of_sheet(here, roofs_of(source, 1), 1)
    rates = {roof.level: roof.bytes_per_s for roof in roofs.bandwidths}
    assert rates == pytest.approx({**LEVELS, "DRAM": max(LEVELS["DRAM"], 1e11 / 8)})
    found = dlperf.predict(step, here, 1, profiled_on=source)
    assert found.predictor == "calibrated"
    with pytest.raises(dlperf.DlperfError, match="on which nothing was profiled"):
        dlperf.predict(step, source, 1, profiled_on=here)
    gpu = replace(here, data_sheet=replace(sheet, kind="accelerator"))
    with pytest.raises(dlperf.DlperfError, match="is an accelerator"):
        dlperf.predict(step, gpu, 1, profiled_on=source)


def test_the_answer_names_the_source() -> None:
    source = replace(machine(), path="there.json")
    found = dlperf.predict(trace(relu(2**20)), bare(), 1, profiled_on=source)
    assert found.to_json()["profiled_on"] == "there.json"
    assert "kernels as profiled on Made-up CPU, carried over to Another CPU" in str(found)
    assert dlperf.predict(trace(relu(64)), machine(), 1).to_json()["profiled_on"] is None


def test_the_interval_is_wider_by_the_roofs() -> None:
    step, source = trace(mm(256, 256, 128), relu(2**20)), machine()
    own, carried = (
        dlperf.predict(step, on, 1, profiled_on=profiled).step
        for on, profiled in ((source, None), (bare(), source))
    )
    assert carried.high_s / carried.total_s > own.high_s / own.total_s + 0.3  # type: ignore[operator]


def test_another_torch_is_warned_of() -> None:
    source, here = (
        replace(one, versions={"torch": version})
        for one, version in ((machine(), "2.6"), (bare(), "2.7"))
    )
    found = dlperf.predict(trace(relu(64)), here, 1, profiled_on=source)
    assert any("profiled with torch 2.6, the machine file has 2.7" in w for w in found.warnings)


def test_other_kinds_of_arguments_are_refused() -> None:
    step = trace(relu(64))
    with pytest.raises(dlperf.DlperfError, match=r"the profiled_on is 'a\.json'"):
        dlperf.predict(step, machine(), 1, profiled_on="a.json")  # type: ignore[arg-type]
    with pytest.raises(dlperf.DlperfError, match="'roofline' takes no kernels of another machine"):
        dlperf.predict(step, machine(), 1, "roofline", profiled_on=machine())
    empty = replace(bare(), kernels=machine().kernels[-1:])
    with pytest.raises(dlperf.DlperfError, match="holds no matrix products"):
        dlperf.predict(step, empty, 1, profiled_on=machine())
    with pytest.raises(dlperf.DlperfError, match="the point is 3"):
        dlperf.predict(step, machine(), 1, point=3)  # type: ignore[arg-type]

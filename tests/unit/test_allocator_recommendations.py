"""What page faults cost, where, and what would cure them: on a made-up machine whose pages have
round prices.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from calibrated_cases import MIB, T, machine, relu, trace

import dlperf
from dlperf.core.machine import Footprint, Machine
from dlperf.core.trace import Op, OptimizerInfo, Storage, TensorSpec, Trace
from dlperf.forecast.prediction import AllocatorRecommendation, PageFaults, Prediction

FAULT_S, RELEASE_S, HUGE_S = 1e-6, 2.5e-7, 1e-4
COSTS = {"page_fault": FAULT_S, "page_release": RELEASE_S, "huge_page_fault": HUGE_S}
PAGES = 40 * 256 + 1
"""Of a tensor of 40 MiB: a mapping of its own, with a page for the alignment."""


def forward_of_40_mib() -> Trace:
    """Op 0 makes 40 MiB, op 1 reads them, then they are freed."""
    spec = TensorSpec.contiguous(10 * MIB, storage=0)
    ops = (
        Op("aten.relu.default", (T(10 * MIB),), outputs=(spec,), phase="forward", layer="a"),
        Op("aten.relu.default", (spec,), outputs=(), phase="forward", layer="b"),
    )
    return trace(*ops, storages=(Storage(40 * MIB, 0, 2),))


def seconds_of(prediction: Prediction, what: str) -> dict[tuple[str, str], float]:
    return {
        (item.layer, item.phase): item.seconds
        for item in prediction.prices.items
        if item.what == what
    }


def test_a_page_is_paid_where_it_is_touched_and_where_it_is_given_back() -> None:
    found = dlperf.predict(forward_of_40_mib(), machine(COSTS))
    assert seconds_of(found, "page faults") == {("a", "forward"): pytest.approx(PAGES * FAULT_S)}
    assert seconds_of(found, "page release") == {("b", "forward"): pytest.approx(PAGES * RELEASE_S)}


def test_gradients_are_given_back_in_zero_grad() -> None:
    ops = (relu(64, layer="a"), relu(64, layer="a", phase="backward"))
    storages = (Storage(40 * MIB, -1, 0, "gradient"), Storage(40 * MIB, 1, None, "gradient"))
    step = trace(
        *ops, inference=False, storages=storages, optimizer=OptimizerInfo("SGD", "for-loop", 0)
    )
    found = dlperf.predict(step, machine(COSTS))
    assert seconds_of(found, "page release") == {
        ("(loss)", "zero_grad"): pytest.approx(PAGES * RELEASE_S)
    }
    assert seconds_of(found, "page faults") == {("a", "backward"): pytest.approx(PAGES * FAULT_S)}
    assert found.step.zero_grad_s == pytest.approx(PAGES * RELEASE_S)


def test_huge_pages_have_their_own_price() -> None:
    """40 MiB are 19 huge pages and 513 small ones (tests/unit/test_allocator.py); where a huge one
    was not measured it counts as its 512.
    """
    found = dlperf.predict(forward_of_40_mib(), machine(COSTS), malloc="huge-pages")
    assert seconds_of(found, "page faults")["a", "forward"] == pytest.approx(
        513 * FAULT_S + 19 * HUGE_S
    )
    assert seconds_of(found, "page release")["b", "forward"] == pytest.approx(513 * RELEASE_S)
    without = dlperf.predict(
        forward_of_40_mib(), machine({"page_fault": FAULT_S}), malloc="huge-pages"
    )
    assert seconds_of(without, "page faults")["a", "forward"] == pytest.approx(
        (513 + 19 * 512) * FAULT_S
    )


def test_the_cure_is_what_another_policys_prediction_saves() -> None:
    found = dlperf.predict(forward_of_40_mib(), machine(COSTS))
    assert found.page_faults is not None
    assert found.page_faults.seconds == pytest.approx(PAGES * (FAULT_S + RELEASE_S))
    saved = {one.malloc: one.saved_s for one in found.page_faults.recommendations}
    assert "jemalloc" not in saved  # it purges 40 MiB as well
    for name in ("tuned", "huge-pages", "tcmalloc"):
        total = dlperf.predict(forward_of_40_mib(), machine(COSTS), malloc=name).step.total_s
        assert saved[name] == pytest.approx(found.step.total_s - total)
    assert [one.saved_s for one in found.page_faults.recommendations] == sorted(
        saved.values(), reverse=True
    )
    assert found.to_json()["page_faults"] is None  # writing predicts nothing
    data = found.to_json(page_faults=found.page_faults)
    assert (data["malloc"], data["page_faults"]["recommendations"][0]["saved_s"]) == (
        "default",
        found.page_faults.recommendations[0].saved_s,
    )


def test_where_little_is_lost_nothing_is_said() -> None:
    assert dlperf.predict(forward_of_40_mib(), machine(COSTS), malloc="tuned").page_faults is None
    assert dlperf.predict(trace(relu(64)), machine(COSTS)).page_faults is None


def test_the_sentence_names_what_needs_nothing_installed() -> None:
    recommendations = (
        AllocatorRecommendation("tcmalloc", "LD_PRELOAD=libtcmalloc_minimal.so.4", 0.011),
        AllocatorRecommendation("tuned", "MALLOC_MMAP_MAX_=0", 0.010),
    )
    assert (
        PageFaults(0.012, 0.08, recommendations).sentence()
        == "12.0 ms of 80.0 ms; with MALLOC_MMAP_MAX_=0 the step would take 70.0 ms"
    )
    assert PageFaults(0.012, 0.08, ()).sentence() == "12.0 ms of 80.0 ms"


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(
        dlperf.DlperfError, match=r"malloc 'hoard' is unknown; known are default, tuned"
    ):
        dlperf.predict(forward_of_40_mib(), machine(COSTS), malloc="hoard")


def with_footprints() -> Machine:
    return replace(
        machine(COSTS),
        footprints=(
            Footprint("forward", 5 * MIB),
            Footprint("training", 70 * MIB),
            Footprint("convolution", 8 * MIB),
        ),
    )


def test_peak_memory_holds_what_torch_takes_for_itself() -> None:
    alone = dlperf.predict(forward_of_40_mib(), machine(COSTS)).step.peak_memory_bytes
    beside = dlperf.predict(forward_of_40_mib(), with_footprints()).step.peak_memory_bytes
    assert alone is not None
    assert beside == alone + 5 * MIB  # a forward pass; no convolution
    assert (
        dlperf.predict(
            replace(forward_of_40_mib(), inference=False), with_footprints()
        ).step.peak_memory_bytes
        == alone + 75 * MIB
    )


def test_a_step_that_does_not_fit_is_a_warning() -> None:
    fits = with_footprints()
    small = replace(fits, cpu=replace(fits.cpu, memory_bytes=44 * MIB))  # 45 MiB are needed
    found = dlperf.predict(forward_of_40_mib(), small)
    assert any("the machine has 44.0 MiB: it does not fit" in line for line in found.warnings)
    large = replace(fits, cpu=replace(fits.cpu, memory_bytes=50 * MIB))
    assert not any("fit" in line for line in dlperf.predict(forward_of_40_mib(), large).warnings)


def test_footprints_are_kept_with_the_machine() -> None:
    found = Machine.from_json(with_footprints().to_json())
    assert found.footprints == with_footprints().footprints

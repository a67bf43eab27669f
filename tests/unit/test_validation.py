"""The accuracy study's arithmetic and its course, on made-up measurements; expected numbers are
worked out beside them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
import pytest
from calibrated_cases import machine as law_machine
from calibrated_cases import relu as law_relu
from calibrated_cases import relu_s
from report_cases import (
    US,
    around,
    cnn_items,
    cnn_measurement,
    cnn_trace,
    gemm_table,
    machine,
    prediction,
)

from dlperf.core import child_process
from dlperf.core.clock import Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.errors import DlperfError, WorkFailed
from dlperf.core.machine import EXACT, Kernel
from dlperf.core.measurement import LayerTimes, Measurement
from dlperf.core.prediction import Item
from dlperf.core.trace import LOSS, Trace
from dlperf.studies.accuracy.ablation import (
    TERMS,
    ablate,
    intervals,
    near_operands,
    with_rooflines,
    without_calls,
    without_page_faults,
)
from dlperf.studies.accuracy.archive import Archive
from dlperf.studies.accuracy.baselines import (
    BASELINES,
    REPLAY,
    BaselineEstimate,
    ask_baselines,
    problems,
    score_baseline,
)
from dlperf.studies.accuracy.cases import OWN_OPS, Case, CaseScore, SourceShares, join
from dlperf.studies.accuracy.page import study_to_markdown, study_to_text, write_study
from dlperf.studies.accuracy.scoring import (
    is_leaf,
    layer_groups,
    mape_frac,
    score,
    source_shares,
    summaries,
    summarize,
)
from dlperf.studies.accuracy.study import (
    WITH_EXACT,
    Provenance,
    Study,
    Variant,
    run_study,
    variants,
)

CASE = Case("nets.py:cnn", 32, 1)


def scaled(factor: float) -> Measurement:
    """The CNN's measurement, every time multiplied."""
    whole = cnn_measurement()

    def times(samples: Samples | None) -> Samples | None:
        return (
            None if samples is None else Samples(tuple(factor * value for value in samples.values))
        )

    layers = tuple(
        replace(
            row,
            forward=times(row.forward),
            backward=times(row.backward),
            optimizer=times(row.optimizer),
        )
        for row in whole.layers
    )
    return replace(
        whole,
        step={
            name: Samples(tuple(factor * v for v in samples.values))
            for name, samples in whole.step.items()
        },
        layers=layers,
    )


def provenance() -> Provenance:
    return Provenance(
        "Made-up CPU",
        "machine.json",
        "full",
        "2020-01-01",
        {"torch": "0.0"},
        "dlperf validate",
        "2020-01-02",
        ((1, 2),),
        4.0,
    )


# -- the reference -------------------------------------------------------------------------------------


def test_joined_runs_give_medians_and_floors() -> None:
    reference = join([scaled(1.0), scaled(1.2), scaled(0.9)])
    assert reference.total_s == pytest.approx(1235 * US)  # of 1235 x (0.9, 1, 1.2)
    assert reference.repeatability_frac == pytest.approx(0.3)  # (1.2 - 0.9) / 1
    assert reference.forward_s == pytest.approx(430 * US)
    conv = reference.layers[reference.layers.layer == "features.0"]
    assert conv.phase.tolist() == ["forward", "backward"]
    assert conv.actual_s.tolist() == pytest.approx([250 * US, 500 * US])
    assert conv.repeatability_frac.tolist() == pytest.approx([0.3, 0.3])


def test_one_run_has_no_layer_floor_and_a_layer_that_a_run_lacks_has_none() -> None:
    assert join([scaled(1.0)]).layers.repeatability_frac.isna().all()
    reference = join([scaled(1.0), cnn_measurement(without=("classifier",))])
    rows = reference.layers[reference.layers.phase == "forward"].set_index("layer")
    assert rows.actual_s["classifier"] == pytest.approx(110 * US)
    assert math.isnan(rows.repeatability_frac["classifier"])
    assert rows.repeatability_frac["features.0"] == 0.0


def test_runs_of_different_cases_are_not_joined() -> None:
    with pytest.raises(DlperfError, match="different cases"):
        join([cnn_measurement(), cnn_measurement(batch_size=64)])
    with pytest.raises(DlperfError, match="never measured"):
        join([])


# -- scores ----------------------------------------------------------------------------------------


def test_a_case_is_scored_as_the_yardstick_does() -> None:
    found, layers = score(
        CASE, join([scaled(1.0)]), prediction(cnn_trace(), cnn_items()), "calibrated"
    )
    # Predicted: forward 450, backward 865, optimizer 60, zero_grad 15 = 1390 us; measured 1235 us.
    assert found.predicted_s == pytest.approx(1390 * US)
    assert found.step_error_frac == pytest.approx(1390 / 1235 - 1)
    assert found.forward_error_frac == pytest.approx(450 / 430 - 1)
    # Leaves: 300 for 250, 40 for 50, 100 for 110; backward 600 for 500, 60 for 50, 200 for 160. The
    # loss is no leaf.
    assert found.forward_mape_frac == pytest.approx((0.2 + 0.2 + 1 / 11) / 3)
    assert found.backward_mape_frac == pytest.approx((0.2 + 0.2 + 0.25) / 3)
    assert found.weighted_frac == pytest.approx((50 + 10 + 10) / 410)
    assert found.seen_frac == pytest.approx(1.0)  # 500 + 50 + 160 + 10 of 720
    assert (found.low_s, found.high_s) == (
        pytest.approx(0.9 * 1390 * US),
        pytest.approx(1.1 * 1390 * US),
    )
    assert found.width_frac == pytest.approx(0.1)
    assert found.inside is False  # 1235 < 1251
    assert found.unpriced_frac == 0.0
    others = layers[~is_leaf(layers)]
    assert set(zip(others.layer, others.family)) == {(LOSS, LOSS)}


def test_a_layer_without_a_row_counts_as_zero_and_a_silent_predictor_has_no_error() -> None:
    items = [item for item in cnn_items() if item.layer != "features.1"]
    found, layers = score(CASE, join([scaled(1.0)]), prediction(cnn_trace(), items), "calibrated")
    (missing,) = layers[(layers.layer == "features.1") & (layers.phase == "forward")].itertuples()
    assert (missing.predicted_s, missing.source) == (0.0, "missing")
    assert found.forward_mape_frac == pytest.approx((0.2 + 1.0 + 1 / 11) / 3)
    silent, rows = score(CASE, join([scaled(1.0)]), gemm_table(), "gemm-table")
    assert (silent.step_error_frac, silent.backward_mape_frac, silent.inside) == (None, None, None)
    assert set(rows.layer) == {"classifier"}
    assert silent.forward_mape_frac == pytest.approx(20 / 110)  # 90 for 110 us


def test_own_ops_of_a_container_are_no_leaf() -> None:
    extra = LayerTimes("features", "Sequential", around(40 * US))
    _, layers = score(
        CASE,
        join([cnn_measurement(extra=(extra,))]),
        prediction(cnn_trace(), cnn_items()),
        "calibrated",
    )
    assert layers.family[layers.layer == "features"].tolist() == [OWN_OPS]
    assert mape_frac(layers) == pytest.approx((0.2 + 0.2 + 1 / 11 + 0.2 + 0.2 + 0.25) / 6)


def test_a_layer_below_a_hundredth_of_its_phase_is_not_judged() -> None:
    layers = pd.DataFrame(
        {
            "family": "Linear",
            "phase_share_frac": [0.5, 0.0099, 0.01],
            "error_frac": [0.1, 8.0, 0.3],
        }
    )
    assert mape_frac(layers) == pytest.approx(0.2)
    assert mape_frac(layers[1:2]) is None


def test_unpriced_is_the_measured_share_of_unpriced_layers() -> None:
    items = [
        replace(item, source="unpriced") if item.layer == "classifier" else item
        for item in cnn_items()
    ]
    found, _ = score(CASE, join([scaled(1.0)]), prediction(cnn_trace(), items), "calibrated")
    assert found.unpriced_frac == pytest.approx(110 / 430)


def test_shares_of_sources_tell_ops_from_the_framework() -> None:
    items = [
        Item("a", "forward", 6.0, "compute", "measured", op=0),
        Item("a", "forward", 2.0, "compute", "interpolated", op=1),
        Item("a", "forward", 1.0, "overhead", "measured", "module call"),
        Item("a", "forward", 1.0, "L2", "unpriced", op=2),
    ]
    assert source_shares(items) == SourceShares(
        measured=0.6, interpolated=0.2, unpriced=0.1, framework=0.1
    )
    assert not source_shares(items).all_measured
    assert source_shares([items[0], items[2]]).all_measured  # what is no op does not count
    assert not source_shares([items[2]]).all_measured


def scores() -> list[CaseScore]:
    def one(
        batch: int,
        error: float,
        repeatability: float,
        threads: int = 1,
        measured: float = 0.0,
        **rest: float,
    ) -> CaseScore:
        case = Case("net", batch, threads)
        sources = SourceShares(measured=measured, interpolated=1 - measured)
        return CaseScore(
            case,
            "calibrated",
            1.0,
            repeatability,
            1 + error,
            (1 + error) * 0.9,
            (1 + error) * 1.1,
            error,
            sources=sources,
            unpriced_frac=0.0,
            **rest,
        )

    return [
        one(1, 0.05, 0.01, forward_mape_frac=0.1, backward_mape_frac=0.3),
        one(2, -0.3, 0.2),
        one(4, 0.12, 0.02, measured=1.0),
        one(8, -0.1, 0.01, 2),
    ]


def test_a_summary_holds_median_worst_and_worst_beyond_twice_the_floor() -> None:
    found = summarize(scores(), "calibrated")
    assert found.step_median_frac == pytest.approx(0.11)  # of 0.05, 0.1, 0.12, 0.3
    assert found.step_worst_frac == pytest.approx(0.3)
    assert found.step_worst_beyond_repeatability_frac == pytest.approx(
        0.12
    )  # 0.3 lies within twice its repeatability of 0.2
    assert found.step_bias_frac == pytest.approx(-0.025)  # of -0.3, -0.1, 0.05, 0.12
    assert found.layer_mape_frac == pytest.approx(0.2)
    # Intervals: 0.945..1.155 and 0.81..0.99: 1 lies in the first alone (1.008..1.232, 0.63..0.77).
    assert found.inside_frac == pytest.approx(0.25)
    assert found.width_median_frac == pytest.approx(0.1)


def test_summaries_stand_apart_by_threads_and_by_measured_ops() -> None:
    assert {(s.what, s.n_cases) for s in summaries(scores())} == {
        ("all", 4),
        ("1 thread", 3),
        ("2 threads", 1),
        ("ops measured", 1),
        ("ops interpolated", 3),
    }


def test_layers_are_grouped_by_source_and_family() -> None:
    _, layers = score(CASE, join([scaled(1.0)]), prediction(cnn_trace(), cnn_items()), "calibrated")
    groups = {(g.kind, g.name, g.phase): g for g in layer_groups(layers).itertuples()}
    assert groups["family", "Conv2d", "backward"].mape_frac == pytest.approx(0.2)
    assert groups["family", LOSS, "forward"].bias_frac == pytest.approx(-0.5)  # 10 for 20 us
    by_source = groups["source", "framework", "forward"]  # these made-up items belong to no op
    assert by_source.n_layers == 3  # leaves alone
    assert by_source.p90_frac == pytest.approx(0.2)


# -- ablation, intervals ---------------------------------------------------------------------------


def test_terms_are_dropped_from_the_sums() -> None:
    items = [
        Item("features.0", "forward", 5.0, "compute", "measured", op=0),
        Item("features.0", "forward", 2.0, "page-faults", "interpolated", "page faults"),
        Item("Net", "forward", 1.0, "overhead", "measured", "module call"),
    ]
    whole = prediction(cnn_trace(), items)
    assert without_page_faults(whole).step.total_s == 6.0
    assert without_calls(whole).step.total_s == 7.0


def test_rooflines_replace_the_ops_alone() -> None:
    trace = cnn_trace(inference=True)
    items = [
        Item(op.layer, "forward", 1.0, "compute", "measured", op=index)
        for index, op in enumerate(trace.ops)
    ]
    changed = with_rooflines(
        prediction(
            trace, [*items, Item("Net", "forward", 0.5, "overhead", "measured", "module call")]
        )
    )
    # Products: 2*32*64*128 and 2*32*10*64 FLOP at 80 GFLOP/s or 4 B x (32*128 + 128*64 + 32*64), 4
    # B x (32*64 + 64*10 + 32*10) at 30 GB/s (3 x 10 GB/s moved); relu: 2 x 4 B an element.
    memory_s = [
        4 * (32 * 128 + 128 * 64 + 32 * 64) / 30e9,
        8 * 4096 / 30e9,
        4 * (32 * 64 + 64 * 10 + 32 * 10) / 30e9,
        8 * 32 / 30e9,
    ]
    compute_s = [2 * 32 * 64 * 128 / 80e9, 0, 2 * 32 * 10 * 64 / 80e9, 0]
    rates = machine().dram_bytes_per_s(1)
    expected = 0.5 + sum(max(c, m * 30e9 / rates) for c, m in zip(compute_s, memory_s))
    assert changed.step.total_s == pytest.approx(expected)


def test_operands_are_near_where_the_term_is_left_out() -> None:
    kept = Cost(CostKey("cold_start", "next", 1048576), 1, Samples((1e-6,)))
    found = near_operands(
        replace(
            machine(),
            costs=(
                kept,
                Cost(CostKey("cache_miss", "next", 1048576), 1, Samples((1e-11,))),
                Cost(CostKey("cold_start", "operand", 1048576), 1, Samples((1e-7,))),
            ),
        )
    )
    assert found.costs == (kept,)


def test_ablation_says_what_a_term_is_worth() -> None:
    items = [
        *cnn_items(),
        Item("features.0", "forward", 278 * US, "page-faults", "interpolated", "page faults"),
    ]
    whole = prediction(cnn_trace(), items)  # 1390 + 278 = 1668 us
    found = ablate([(CASE, join([scaled(1.0)]), whole)], [TERMS[0]])
    assert found[0].share_frac == pytest.approx(278 / 1668)
    assert found[0].whole.step_median_frac == pytest.approx(1668 / 1235 - 1)
    assert found[0].without.step_median_frac == pytest.approx(1390 / 1235 - 1)
    assert ablate([]) == ()


def test_a_term_on_the_machine_is_predicted_anew() -> None:
    from dlperf.forecast.prediction import predict

    costs = {"module_call": 3e-6, "page_fault": 1e-6}
    on = law_machine(costs)
    trace = Trace("t", 1, cnn_trace().layers, (law_relu(1024, "features.1"),), inference=True)
    whole = predict(trace, on, 1)
    runs = Measurement(
        "t", 1, 1, {"forward": around(1e-5), "total": around(1e-5)}, (), inference=True
    )
    framework = next(term for term in TERMS if term.name == "framework")
    (found,) = ablate([(Case("t", 1, 1, True), join([runs]), whole)], [framework])
    # Five calls of modules (the root's is one) at 3 us; without them the op is left.
    assert found.share_frac == pytest.approx(15e-6 / (15e-6 + relu_s(1024)), rel=1e-3)


def test_intervals_say_what_they_are_worth() -> None:
    cases = [
        (1.0, 1.1, 0.9, 1.3),
        (1.0, 2.0, 1.6, 2.4),
        (1.0, 0.8, 0.6, 1.2),
        (3.0, 2.0, 1.5, 2.25),
    ]
    found = intervals(cases)
    assert found is not None
    assert (found.n_cases, found.inside_frac) == (4, 0.5)
    assert found.constant_frac == pytest.approx(
        0.25
    )  # off by 1/11, 0.25, 0.5, 0.5 of the prediction: 0.25 holds two
    assert found.needed_factor == pytest.approx(4.0)  # 0.5, 2.5, 0.5 and 4 half widths
    assert intervals([]) is None


# -- keeping ---------------------------------------------------------------------------------------


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def take() -> Measurement:
        calls.append(1)
        return scaled(float(len(calls)))

    first = Archive(tmp_path / "kept")
    one = first.measurement(CASE, cnn_trace(), 1, 4.0, take)
    assert first.remark == ""
    again = Archive(tmp_path / "kept")
    assert again.measurement(CASE, cnn_trace(), 1, 4.0, take).step["total"].median == pytest.approx(
        one.step["total"].median
    )
    assert len(calls) == 1
    assert again.remark.startswith("1 of 1 measurements were kept")
    again.measurement(CASE, cnn_trace(), 2, 4.0, take)
    again.measurement(CASE, cnn_trace(), 1, 2.0, take)
    again.measurement(replace(CASE, threads=2), cnn_trace(), 1, 4.0, take)
    assert len(calls) == 4
    assert Archive(tmp_path / "kept", fresh=True).measurement(CASE, cnn_trace(), 1, 4.0, take)
    assert len(calls) == 5


def test_a_network_that_has_changed_is_measured_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    trace = cnn_trace()
    archive.measurement(CASE, trace, 1, 4.0, cnn_measurement)
    changed = replace(trace, ops=trace.ops[:-1] + (law_relu(7),))
    with pytest.raises(ZeroDivisionError):
        archive.measurement(CASE, changed, 1, 4.0, lambda: 1 // 0)  # type: ignore[arg-type, return-value]


def test_a_damaged_file_is_measured_again(tmp_path: Path) -> None:
    archive = Archive(tmp_path)
    archive.measurement(CASE, cnn_trace(), 1, 4.0, cnn_measurement)
    (kept,) = tmp_path.iterdir()
    kept.write_text("{")
    assert Archive(tmp_path).measurement(CASE, cnn_trace(), 1, 4.0, lambda: scaled(3.0)).step[
        "total"
    ].median == pytest.approx(3 * 1235 * US)
    assert Measurement.load(kept).target == "nets.py:cnn"


def test_what_peers_said_is_kept(tmp_path: Path) -> None:
    predicted = (
        BaselineEstimate(REPLAY, 1.0, 2.0, None, 3.0, (("a", 0.5, None),)),
        BaselineEstimate("other", problem="not installed"),
    )
    assert (
        Archive(tmp_path).estimates(CASE, cnn_trace(), "80 GFLOP/s", lambda: predicted) == predicted
    )
    assert Archive(tmp_path).estimates(CASE, cnn_trace(), "80 GFLOP/s", list) == predicted
    assert Archive(tmp_path).estimates(CASE, cnn_trace(), "90 GFLOP/s", list) == ()


# -- the course of a study -------------------------------------------------------------------------


def cases() -> list[Case]:
    return [Case(name, 32, threads) for name in ("nets.py:a", "nets.py:b") for threads in (1, 2)]


def studied(measure: Callable[[Case, Trace, int], Measurement], **options: object) -> Study:
    asked = (Variant("roofline", "roofline", machine()),)
    return run_study(
        cases(),
        asked,
        lambda threads: threads,
        lambda case: cnn_trace(target=case.target),
        measure,
        lambda line: None,
        provenance=provenance(),
        **options,
    )  # type: ignore[arg-type]


def named(case: Case, factor: float = 1.0) -> Measurement:
    return replace(scaled(factor), target=case.target, threads=case.threads)


def test_all_cases_are_measured_once_before_any_is_measured_twice() -> None:
    order: list[tuple[str, int, int]] = []

    def measure(case: Case, trace: Trace, run: int) -> Measurement:
        order.append((case.network[-1], case.threads, run))
        assert trace.target == case.target
        return named(case, 1 + 0.1 * run)

    study = studied(measure)
    assert order == [("a", 1, 1), ("a", 2, 1), ("b", 1, 1), ("b", 2, 1), ("a", 2, 2), ("b", 2, 2)]
    assert [reference.repeatability_frac for _, reference in study.references] == [
        None,
        pytest.approx(0.1 / 1.15),
        None,
        pytest.approx(0.1 / 1.15),
    ]
    assert len(study.scores) == 4
    assert not study.failures


def test_a_case_that_fails_leaves_the_others() -> None:
    taken: list[str] = []

    def measure(case: Case, trace: Trace, run: int) -> Measurement:
        taken.append(case.label)
        if case == cases()[1]:
            raise WorkFailed("the model is tired")
        return named(case)

    study = studied(measure)
    assert [(failure.case, failure.reason) for failure in study.failures] == [
        (cases()[1], "the model is tired")
    ]
    assert {score.case for score in study.scores} == set(cases()) - {cases()[1]}
    assert taken.count(cases()[1].label) == 1  # its second run is not tried
    assert "could not be measured: the model is tired" in study_to_text(study, 160)


def test_an_interrupted_study_loses_nothing(tmp_path: Path) -> None:
    taken: list[tuple[Case, int]] = []
    promises: list[str] = []

    def measure_until(limit: int) -> Callable[[Case, Trace, int], Measurement]:
        archive = Archive(tmp_path)

        def measure(case: Case, trace: Trace, run: int) -> Measurement:
            def take() -> Measurement:
                if len(taken) == limit:
                    raise KeyboardInterrupt
                taken.append((case, run))
                return named(case)

            try:
                return archive.measurement(case, trace, run, 4.0, take)
            finally:
                promises.append(archive.kept)

        return measure

    assert Archive(tmp_path).kept == ""
    with pytest.raises(KeyboardInterrupt):
        studied(measure_until(3))
    assert (
        promises[-1]
        == f"3 finished measurements are kept in {tmp_path}, and the same command goes on from"
        " there"
    )
    study = studied(measure_until(100))
    assert len(taken) == len(set(taken)) == 6
    assert len(study.scores) == 4


def test_a_target_that_cannot_be_recorded_stops_before_anything_is_measured() -> None:
    def record(case: Case) -> Trace:
        if case.network.endswith("b"):
            raise DlperfError("b has no builder")
        return cnn_trace(target=case.target)

    def measure(*_: object) -> Measurement:
        raise AssertionError("measured")

    with pytest.raises(DlperfError, match="b has no builder"):
        run_study(
            cases(),
            (),
            lambda threads: 1,
            record,
            measure,
            lambda line: None,
            provenance=provenance(),
        )


def test_measured_and_interpolated_stand_apart() -> None:
    exact = Kernel(law_relu(333), EXACT, 1, Samples((1e-6,)))
    whole = law_machine(extra=(exact,))
    asked = {variant.name: variant for variant in variants(whole, ("calibrated", "roofline"))}
    assert list(asked) == ["calibrated", WITH_EXACT, "roofline"]
    assert asked["calibrated"].machine.exact(exact.op, 1) is None
    assert asked[WITH_EXACT].machine.exact(exact.op, 1) == exact
    assert [variant.name for variant in variants(law_machine(), ("calibrated",))] == ["calibrated"]
    on = (*variants(whole, ("calibrated",)),)
    trace = Trace("t", 1, (), (law_relu(333, "features.0"),), inference=True)
    other = Trace("u", 1, (), (law_relu(500, "features.0"),), inference=True)
    measured = Measurement(
        "t", 1, 1, {"forward": around(1e-5), "total": around(1e-5)}, (), inference=True
    )
    both = [Case("t", 1, 1, True), Case("u", 1, 1, True)]
    study = run_study(
        both,
        on,
        lambda threads: 1,
        lambda case: trace if case.target == "t" else other,
        lambda case, _, run: replace(measured, target=case.target),
        lambda line: None,
        provenance=provenance(),
    )
    assert [(score.predictor, score.case.target) for score in study.scores] == [
        ("calibrated", "t"),
        ("calibrated", "u"),
        (WITH_EXACT, "t"),
    ]


# -- peers -----------------------------------------------------------------------------------------


def test_a_peer_is_scored_on_what_it_speaks_of() -> None:
    estimate = BaselineEstimate(
        REPLAY,
        387 * US,
        900 * US,
        None,
        1358.5 * US,
        (("features.0", 200 * US, 600 * US), ("classifier", 121 * US, None)),
    )
    found, layers = score_baseline(CASE, join([scaled(1.0)]), estimate)
    assert found.step_error_frac == pytest.approx(0.1)  # 1358.5 / 1235
    assert found.forward_error_frac == pytest.approx(-0.1)  # 387 / 430
    assert found.optimizer_error_frac is None
    assert found.forward_mape_frac == pytest.approx((0.2 + 0.1) / 2)
    assert found.backward_mape_frac == pytest.approx(0.2)
    assert len(layers) == 3


def test_problems_of_peers_are_said_once() -> None:
    other = replace(CASE, batch_size=64)
    predicted = [
        (CASE, BaselineEstimate("a", problem="not installed")),
        (other, BaselineEstimate("a", problem="not installed")),
        (CASE, BaselineEstimate("b", problem="fails")),
        (other, BaselineEstimate("b", 1.0)),
    ]
    assert problems(predicted) == ("a: not installed (every case)", f"b: fails ({CASE.label})")


def test_a_dead_process_is_every_peers_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        """A child that ends after its first answer."""

        returncode = -11

        def __init__(self, module: str, threads: int) -> None:
            pass

        def __enter__(self) -> Dead:
            return self

        def __exit__(self, *raised: object) -> None:
            pass

        def communicate(self, job: str, timeout: float) -> tuple[str, str]:
            line = json.dumps(asdict(BaselineEstimate(BASELINES[0], total_s=1.0)))
            return line + "\n", "core dumped"

    monkeypatch.setattr(child_process, "Child", Dead)
    found = ask_baselines(CASE, 1e11, 1e10, None)
    assert [estimate.baseline for estimate in found] == list(BASELINES)
    assert (found[0].total_s, found[0].problem) == (1.0, "")
    assert all("status -11: core dumped" in estimate.problem for estimate in found[1:])


# -- written down ----------------------------------------------------------------------------------


def whole_study() -> Study:
    asked = (
        Variant("calibrated", "calibrated", law_machine()),
        Variant("roofline", "roofline", law_machine()),
    )
    predicted = [
        BaselineEstimate(
            REPLAY, 387 * US, 900 * US, None, 1358.5 * US, (("features.0", 200 * US, None),)
        ),
        BaselineEstimate("x", problem="not installed"),
    ]
    return run_study(
        cases(),
        asked,
        lambda threads: 2,
        lambda case: cnn_trace(target=case.target),
        lambda case, _, run: named(case, 1 + 0.1 * run),
        lambda line: None,
        ask_baselines=lambda case, trace: predicted,
        with_ablation=True,
        provenance=provenance(),
    )


@pytest.mark.slow
def test_a_study_is_written_and_written_again(tmp_path: Path) -> None:
    study = whole_study()
    folder = tmp_path / "accuracy"
    names = {path.name for path in write_study(study, folder)}
    assert names == {
        "accuracy.md",
        "cases.csv",
        "layers.csv",
        "steps.png",
        "cases.png",
        "layers.png",
    }
    write_study(study, folder)  # its own files are replaced
    (folder / "mine.txt").write_text("keep")
    with pytest.raises(DlperfError, match=r"mine\.txt"):
        write_study(study, folder)
    page = (folder / "accuracy.md").read_text()
    for text in (
        "a@32 t2",
        "page faults",
        "RuntimeEstimator replay",
        "not installed",
        "Made-up CPU",
        "(steps.png)",
    ):
        assert text in page, text
    assert (
        (folder / "cases.csv")
        .read_text()
        .splitlines()[0]
        .startswith("target,batch_size,threads,inference,network,predictor,")
    )
    assert (
        len((folder / "cases.csv").read_text().splitlines()) == 1 + 4 * 3
    )  # two predictors and one baseline that speaks


def test_json_has_no_nan_and_adds_up() -> None:
    study = whole_study()
    data = json.loads(json.dumps(study.to_json(), allow_nan=False))
    assert data["schema"] == "dlperf.validation"
    calibrated = [row for row in data["cases"] if row["predictor"] == "calibrated"]
    for row in calibrated:
        assert sum(row["sources"].values()) == pytest.approx(1.0)
        assert row["step_error_frac"] == pytest.approx(row["predicted_s"] / row["actual_s"] - 1)
    assert len(data["ablation"]) == len(TERMS)
    assert data["intervals"]["n_cases"] == 4
    assert [row["reason"] for row in data["failures"]] == []


def test_a_busy_machine_is_told() -> None:
    quiet = whole_study()  # its runs differ by 0.1 / 1.15 = 8.7 %
    assert quiet.variation_remarks == ()
    variation_remark = replace(
        quiet,
        references=tuple(
            (case, replace(reference, repeatability_frac=0.3))
            for case, reference in quiet.references
        ),
    )
    assert len(variation_remark.variation_remarks) == 1
    assert "same step differ by 30 %" in study_to_text(variation_remark, 160)


def test_a_study_of_nothing_still_has_a_page() -> None:
    assert "How right" in study_to_markdown(Study(provenance()))
    assert study_to_text(Study(provenance()), 100) == ""

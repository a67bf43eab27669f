"""Items of time gathered into ops, rows and the step."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from report_cases import (
    CNN,
    US,
    ZERO_GRAD_US,
    cnn,
    cnn_items,
    cnn_trace,
    gemm_table,
    machine,
    mm,
    prediction,
    relu,
    single,
)

from dlperf import predict
from dlperf.core import host
from dlperf.core.errors import DlperfError
from dlperf.core.machine import Machine
from dlperf.core.machine_doubts import find_mismatches
from dlperf.core.prediction import SOURCES, Item
from dlperf.core.trace import LOSS, Layer, Op, TensorSpec, Trace
from dlperf.predictors.base import register
from dlperf.predictors.registry import get, names

PHASES = ["forward_s", "backward_s", "optimizer_s"]


def layer(name: str, leaf: bool = True) -> Layer:
    return Layer(name, "Linear", leaf, (("", 1),))


# -- the step and its rows -------------------------------------------------------------------------


def test_the_step_is_the_sum_of_its_phases() -> None:
    step = cnn()[0].step
    assert step.forward_s == pytest.approx(450 * US)  # 300 + 40 + 100 + 10
    assert step.backward_s == pytest.approx(865 * US)  # 600 + 60 + 200 + 5
    assert step.optimizer_s == pytest.approx(60 * US)  # 20 + 40
    assert step.zero_grad_s == pytest.approx(15 * US)
    assert step.total_s == pytest.approx(1390 * US)
    assert (step.low_s, step.high_s) == (
        pytest.approx(0.9 * 1390 * US),
        pytest.approx(1.1 * 1390 * US),
    )


def test_rows_add_up_to_the_step_less_zero_grad() -> None:
    found = cnn()[0]
    assert found.step.total_s is not None
    assert found.layers[PHASES].to_numpy().sum() == pytest.approx(
        found.step.total_s - ZERO_GRAD_US[0] * US
    )
    assert found.ops["seconds"].sum() == pytest.approx(found.step.total_s)


def test_rows_stand_in_the_order_of_execution_with_the_loss_last() -> None:
    items = cnn_items()
    found = prediction(cnn_trace(), items[::-1])
    assert list(found.layers["layer"]) == list(CNN)
    assert list(found.layers["type"]) == [row[0] for row in CNN.values()]
    assert list(found.layers.columns) == [
        "layer",
        "type",
        *PHASES,
        "flops",
        "bytes",
        "bound",
        "source",
    ]


def test_an_owner_without_work_has_no_row() -> None:
    assert "features" not in set(
        cnn()[0].layers["layer"]
    )  # a Sequential whose call belongs to its caller


def test_bound_and_source_are_those_of_the_largest_share() -> None:
    shares = [
        ("compute", "measured", 3),
        ("L2", "extrapolated", 2),
        ("overhead", "extrapolated", 2),
    ]
    items = [Item("a", "forward", us * US, bound, source) for bound, source, us in shares]
    row = prediction(Trace("t", 1, (layer("a"),), ()), items).layers.iloc[0]
    assert (row["bound"], row["source"]) == ("compute", "extrapolated")  # 3 of 7 us; 4 of 7 us


def test_elsewhere_nothing_is_measured_in_layers_ops_or_json() -> None:
    here = cnn()[0]
    assert {"measured", "interpolated"} & set(here.ops["source"])
    there = here.cross_machine()
    assert (
        set(there.ops["source"])
        == set(there.layers["source"])
        == {row["source"] for row in there.to_json()["layers"]}
        == {"extrapolated"}
    )
    assert there.step.total_s == here.step.total_s
    assert (there.step.low_s, there.step.high_s) == (
        pytest.approx(0.8 * 1390 * US),
        pytest.approx(1.2 * 1390 * US),
    )  # 0.9 and 1.1 twice as far off
    assert there.cross_machine() is there
    unpriced = prediction(
        Trace("t", 1, (layer("a"),), ()), [Item("a", "forward", US, "overhead", "unpriced")]
    ).cross_machine()
    assert set(unpriced.layers["source"]) == {"unpriced"}  # worse than extrapolated stays as it is


def test_work_is_counted_over_all_phases_but_zero_grad() -> None:
    ops = (
        mm(2, 3, 4, "a"),
        mm(4, 3, 2, "a", "backward"),
        relu(10, "a"),
        mm(9, 9, 9, "a", "zero_grad"),
    )
    items = [Item("a", "forward", US, "compute", "measured", op=0)]
    row = prediction(Trace("t", 1, (layer("a"),), ops), items).layers.iloc[0]
    assert row["flops"] == 2 * (2 * 2 * 3 * 4) + 10
    assert row["bytes"] == 4 * (2 * 4 + 4 * 3 + 2 * 3 + 4 * 2 + 2 * 3 + 4 * 3 + 20)


def test_an_op_that_serves_several_layers_is_shared() -> None:
    spec = TensorSpec.contiguous(100)
    shares = (("a", 0.25), ("b", 0.75))
    op = Op("aten.add_.Tensor", (spec, spec), outputs=(spec,), phase="optimizer", shares=shares)
    items = [
        Item(name, "optimizer", 8 * US * part, "L1", "measured", op=0, share=part)
        for name, part in shares
    ]
    found = prediction(Trace("t", 1, (layer("a"), layer("b")), (op,)), items)
    a, b = found.layers.to_dict("records")
    assert (a["optimizer_s"], b["optimizer_s"]) == (pytest.approx(2 * US), pytest.approx(6 * US))
    assert (a["flops"], b["flops"]) == (25, 75)
    assert list(found.ops["flops"]) == [25, 75]


# -- what a predictor does not say -----------------------------------------------------------------


def test_phases_that_are_not_spoken_of_are_null() -> None:
    found = gemm_table()
    assert (found.step.forward_s, found.step.backward_s, found.step.total_s, found.step.low_s) == (
        None,
    ) * 4
    rows = found.layers.set_index("layer")
    assert rows.loc["classifier", "forward_s"] == 90 * US
    assert math.isnan(rows.loc["classifier", "backward_s"])
    assert rows.loc["features.0", PHASES].isna().all()
    assert pd.isna(rows.loc["features.0", "source"])
    assert set(rows.index) == set(CNN)


def test_forward_alone_is_known_where_every_layer_is() -> None:
    items = [item for item in cnn_items() if item.phase == "forward"]
    found = prediction(cnn_trace(), items, phases=("forward",))
    assert found.step.forward_s == pytest.approx(450 * US)
    assert found.step.total_s is None
    inference = prediction(cnn_trace(inference=True), items, phases=("forward",))
    assert inference.step.total_s == pytest.approx(450 * US)


def test_unpriced_ops_are_named_and_counted_once_each() -> None:
    ops = (
        relu(8, "a"),
        Op("mine.odd.default", layer="a"),
        Op("mine.odd.other", layer="a"),
        Op("aten.foo.default", phase="optimizer"),
    )
    items = [
        Item("a", "forward", 6 * US, "L1", "measured", op=0),
        Item("a", "forward", US, "L1", "unpriced", op=1),
        Item("a", "forward", US, "L1", "unpriced", op=2),
        Item("a", "optimizer", US, "L1", "unpriced", op=3, share=0.5),
        Item("b", "optimizer", US, "L1", "unpriced", op=3, share=0.5),
    ]
    found = prediction(Trace("t", 1, (layer("a"), layer("b")), ops), items)
    assert found.unpriced == {"aten.foo": 1, "mine.odd": 2}
    assert found.priced_time_frac == pytest.approx(0.6)


def test_nothing_to_price_is_all_priced() -> None:
    found = prediction(Trace("t", 1, (), ()), [])
    assert found.priced_time_frac == 1.0
    assert found.unpriced == {}
    assert found.step.total_s == 0.0
    assert found.layers.empty


# -- JSON ------------------------------------------------------------------------------------------


def test_json_is_as_the_readme_says(tmp_path: Path) -> None:
    found, _ = cnn()
    found.save(tmp_path / "p.json")
    data = json.loads((tmp_path / "p.json").read_text(), parse_constant=pytest.fail)
    assert (data["schema"], data["schema_version"]) == ("dlperf.prediction", 1)
    assert (
        data["target"],
        data["batch_size"],
        data["threads"],
        data["inference"],
        data["predictor"],
    ) == ("nets.py:cnn", 32, 1, False, "calibrated")
    assert set(data["step"]) >= {
        "forward_s",
        "backward_s",
        "optimizer_s",
        "total_s",
        "low_s",
        "high_s",
        "peak_memory_bytes",
    }
    assert [set(row) for row in data["layers"]] == [
        {"layer", "type", *PHASES, "flops", "bytes", "bound", "source"}
    ] * len(CNN)
    assert all(
        isinstance(row["flops"], int) and isinstance(row["bytes"], int) for row in data["layers"]
    )
    assert data["step"]["total_s"] == pytest.approx(
        sum(row[phase] for row in data["layers"] for phase in PHASES) + 15 * US
    )
    assert data["coverage"] == {"priced_time_frac": 1.0, "unpriced": [], "unsupported": []}
    assert data["epoch"] is None


def test_json_of_an_epoch() -> None:
    found, _ = cnn()
    assert found.step.total_s is not None
    data = found.to_json(found.epoch(60000, epochs=2))
    assert data["epoch"]["samples"] == 60000
    assert (
        data["epoch"]["epoch_s"]
        == data["epoch"]["steps_s"]
        == pytest.approx(1875 * found.step.total_s)
    )
    assert data["epoch"]["total_s"] == pytest.approx(3750 * found.step.total_s)
    assert data["epoch"]["loading_s"] is None  # the made-up machine says nothing of loading


def test_what_is_unknown_is_null_in_json() -> None:
    data = json.loads(json.dumps(gemm_table().to_json(), allow_nan=False))
    assert data["step"]["total_s"] is None
    assert data["layers"][0]["forward_s"] is None
    assert data["layers"][0]["source"] is None


def test_unpriced_ops_in_json() -> None:
    ops = (Op("aten.foo.default", layer="a"),) * 2
    items = [Item("a", "forward", US, "L1", "unpriced", op=index) for index in range(2)]
    data = prediction(Trace("t", 1, (layer("a"),), ops), items).to_json()
    assert data["coverage"] == {
        "priced_time_frac": 0.0,
        "unpriced": [{"op": "aten.foo", "count": 2}],
        "unsupported": [],
    }


def test_inference_has_a_forward_alone() -> None:
    found, _ = single()
    assert found.step.total_s == found.step.forward_s == 8 * US
    assert list(found.layers["layer"]) == ["Linear"]


# -- predict ---------------------------------------------------------------------------------------


def test_threads_default_to_the_fewest_measured() -> None:
    assert predict(cnn_trace(), machine(), predictor="roofline").threads == 1


@pytest.mark.parametrize("threads", [0, -2])
def test_impossible_threads(threads: int) -> None:
    with pytest.raises(DlperfError, match=f"threads is {threads}; it must be at least 1"):
        predict(cnn_trace(), machine(), threads=threads)


def test_threads_that_were_not_measured_are_warned_of() -> None:
    assert predict(cnn_trace(), machine(), threads=1, predictor="roofline").warnings == ()
    (warning,) = predict(cnn_trace(), machine(), threads=2, predictor="roofline").warnings
    assert (
        warning
        == "the machine file was measured with 1 thread, not with 2: extrapolated; dlperf calibrate --threads 2"
        " measures it"
    )
    assert (
        "the machine has 2 cores"
        in predict(cnn_trace(), machine(), threads=3, predictor="roofline").warnings[0]
    )


def test_an_unknown_predictor_is_told_the_known_ones() -> None:
    with pytest.raises(
        DlperfError,
        match="predictor 'oracle' is unknown; known are calibrated, data-sheet, gemm-table",
    ):
        predict(cnn_trace(), machine(), predictor="oracle")
    assert set(names()) >= {"calibrated", "gemm-table", "roofline"}


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(DlperfError, match="predictor 'calibrated' is registered twice"):
        register(type(get("calibrated")))


def test_sources_of_the_frames_are_known() -> None:
    found = predict(cnn_trace(), machine(), predictor="roofline")
    assert set(found.layers["source"]) | set(found.ops["source"]) <= set(SOURCES)
    assert isinstance(found.ops, pd.DataFrame)
    assert LOSS in set(found.layers["layer"])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"threads": "2"},
            r"^threads is '2' \(of type str\); it must be a whole number of at least 1$",
        ),
        ({"threads": 1.5}, r"^threads is 1.5 \(of type float\)"),
        ({"threads": True}, r"^threads is True \(of type bool\)"),
        (
            {"predictor": ["roofline"]},
            r"the predictor is \['roofline'\] \(of type list\); expected a str: one of calibrated",
        ),
        (
            {"malloc": ["tuned"]},
            r"the malloc is \['tuned'\] \(of type list\); expected a str: one of default",
        ),
    ],
)
def test_options_of_other_types_are_named(changes, said):
    with pytest.raises(DlperfError, match=said):
        predict(cnn_trace(), machine(), **changes)


def test_a_number_of_samples_is_whole():
    with pytest.raises(DlperfError, match="samples is '60000'"):
        cnn()[0].epoch("60000")


@pytest.mark.parametrize(
    ("arguments", "said"), [(("a", "b"), "the trace is 'a'"), ((None, "b"), "the trace is None")]
)
def test_arguments_of_other_types_are_named(arguments, said):
    with pytest.raises(DlperfError, match=said):
        predict(*arguments)


def test_a_machine_given_by_its_path_is_told_how_to_read_it():
    with pytest.raises(
        DlperfError, match=r"the machine is 'x' \(of type str\); expected a Machine: Machine.load"
    ):
        predict(Trace("t", 1, (), ()), "x")


def test_a_machine_file_of_another_machine_is_warned_of_and_extrapolated() -> None:
    """The same for Python and the command line; a machine without a file is taken as it is."""
    found = predict(cnn_trace(), replace(machine(), path="m.json"), threads=1)
    plain = predict(cnn_trace(), machine(), threads=1)
    assert found.warnings[0].startswith("m.json was measured on another CPU (Made-up CPU; this is ")
    sibling = replace(host.this_cpu(), family="Made-up/1/2/3")
    (line,) = find_mismatches(Machine(sibling), host.this_cpu(), {})
    assert f"({sibling.model}, family Made-up/1/2/3; this is {sibling.model}, family " in line
    assert "m.json contains no self-test" in "\n".join(found.warnings)
    assert set(found.layers["source"]) <= {"extrapolated", "unpriced"}
    assert found.is_cross_machine
    assert found.step == plain.cross_machine().step != plain.step
    assert not any("CPU" in warning for warning in plain.warnings)

"""Which changes are said to pay: on made-up machines whose costs decide it, and with targets of
every kind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import calibrated_cases as cases
import pytest
import torch
from torch import nn

from dlperf.advice.batch_sizes import BatchPoint, knee_line, knee_of
from dlperf.advice.explanation import (
    explain,
    explanation_to_json,
    parts_to_csv,
    suggestions_to_csv,
)
from dlperf.advice.explanation_page import explanation_page
from dlperf.advice.trials import ChangeRun, ChangeTrial, ChangeTrials
from dlperf.advice.variants import DOES_NOT_APPLY, DOES_NOT_PAY, LEAST_GAIN_FRAC, PAYS, UNSURE
from dlperf.core.clock import Samples
from dlperf.core.costs import Cost, CostKey
from dlperf.core.machine import Kernel, Machine
from dlperf.forecast.prediction import predict
from dlperf.predictors.allocator import simulation
from dlperf.recorder import recording
from dlperf.recorder.targets import Target
from dlperf.report.document import to_markdown, to_text


def mlp(batch_size: int, inplace: bool = False):
    model = nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(inplace), nn.Linear(64, 20), nn.ReLU(inplace), nn.Linear(20, 16)
    )
    return model, (torch.randn(batch_size, 64),), torch.mean


@pytest.fixture(autouse=True, scope="module")
def one_process() -> Iterator[None]:
    """Page faults of one simulated process in place of fifteen, since many changes are predicted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "N_PROCESSES", 1)
        yield


def make_target(builder, batch_size: int = 8, inference: bool = False) -> Target:
    return Target("made-up", batch_size, inference, builder)


def machine(**costs: float) -> Machine:
    """The made-up machine with kernels for linear layers (bias included), and costs by kind."""
    return cases.machine(costs)


def optimizers(loop_s: float, fused_s: float) -> Machine:
    """An optimizer's loop that takes `loop_s` a tensor, fused `fused_s`."""
    costs = {
        CostKey("optimizer_tensor", "SGD", 1, "for-loop"): loop_s,
        CostKey("optimizer_tensor", "SGD", 1, "fused"): fused_s,
        CostKey("optimizer_tensor", "SGD", 2, "foreach"): loop_s,
    }
    return cases.machine(costs)


def explained(on: Machine, target: Target, threads: int = 1):
    return explain(predict(recording.record_target(target), on, threads), target)


def found(explanation, name):
    (suggestion,) = [s for s in explanation.advice.suggestions if s.variant.name == name]
    return suggestion


def test_a_fused_optimizer_pays_where_the_loop_is_dear():
    explanation = explained(optimizers(1e-3, 1e-6), make_target(mlp))
    suggestion = found(explanation, "fused optimizer")
    assert suggestion.verdict == PAYS
    # Six tensors of 1 ms, against one of some us a tensor: what is left is the rest of the step, of
    # which the optimizer is no part.
    rest_s = explanation.breakdown.total_s - dict(explanation.breakdown.parts_s)["optimizer"]
    assert rest_s < suggestion.step_s < rest_s + 1e-4
    assert suggestion.gain_frac == pytest.approx(
        explanation.breakdown.total_s / suggestion.step_s - 1
    )
    assert explanation.advice.with_verdict(PAYS)[0].variant.name in (
        "fused optimizer",
        "together",
        *(f"batch size {n}" for n in (16, 32, 64, 128, 256)),
    )


def test_a_fused_optimizer_does_not_pay_where_its_kernel_is_dear():
    suggestion = found(explained(optimizers(1e-6, 1e-3), make_target(mlp)), "fused optimizer")
    assert suggestion.verdict == DOES_NOT_PAY
    assert suggestion.gain_frac < -0.5
    assert "slower" in suggestion.reason


@pytest.mark.slow
def test_a_machine_whose_threads_help_says_so():
    both = cases.machine()
    faster = cases.machine(threads=2, factor=0.5)
    both = replace(
        both, kernels=both.kernels + faster.kernels, bandwidths=both.bandwidths + faster.bandwidths
    )
    suggestion = found(explained(both, make_target(mlp)), "threads 2")
    assert (suggestion.verdict, suggestion.threads) == (PAYS, 2)
    assert (
        0.5 < suggestion.gain_frac <= 1.0 + 1e-9
    )  # every kernel takes half; costs that were never measured are none
    assert found(explained(both, make_target(mlp), threads=2), "threads 1").verdict == DOES_NOT_PAY


def test_batch_size_pays_where_a_step_costs_much_whatever_its_size():
    def fixed(seconds):
        return explained(machine(backward_call=seconds), make_target(mlp))

    explanation = fixed(1.0)  # a second a step: throughput doubles with the batch
    knee = knee_of(explanation.advice.sweep)
    assert knee.batch_size == 256
    assert found(explanation, "batch size 256").gain_frac == pytest.approx(
        31, rel=0.1
    )  # 32 times the samples in the same second
    assert [p.batch_size for p in explanation.advice.sweep] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert all(
        s.variant.batch_size is None
        for s in explanation.advice.suggestions
        if s.variant.name == "together"
    )


def test_the_knee_is_the_least_batch_size_near_the_best():
    points = tuple(
        BatchPoint(size, size / rate, None)
        for size, rate in ((8, 100.0), (16, 180.0), (32, 196.0), (64, 200.0))
    )
    assert knee_of(points).batch_size == 32  # 196 >= 0.95 * 200 = 190 > 180
    assert knee_of(()) is None


def test_a_builder_that_ignores_the_batch_size_is_noticed():
    explanation = explained(cases.machine(), make_target(lambda size: mlp(8)))
    assert any("ignores" in note for note in explanation.advice.notes)
    assert not explanation.advice.sweep


def test_a_model_that_is_handed_out_again_is_not_changed():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    explanation = explained(
        cases.machine(), make_target(lambda size: (model, (torch.randn(size, 64),), torch.mean))
    )
    assert not model[1].inplace
    assert any(
        "same modules" in s.reason
        for s in explanation.advice.suggestions
        if s.verdict == DOES_NOT_APPLY
    )


def test_a_knee_that_page_faults_make_names_malloc():
    # 90, 100, 110 samples/s if no page were new; from 16 on, half of the step is page faults
    sweep = (
        BatchPoint(8, 8 / 90, None),
        BatchPoint(16, 16 / 50, None, 16 / 50 - 16 / 100),
        BatchPoint(32, 32 / 55, None, 32 / 55 - 32 / 110),
    )
    assert knee_of(sweep).batch_size == 8
    assert knee_line(sweep).startswith(
        "page faults decide where the knee is: malloc gets memory anew from the system in each step"
        " (50.0 % of the step"
    )
    assert "without them it would be at 32 (MALLOC_MMAP_MAX_=0 " in knee_line(
        sweep
    )  # 0.95 * 110 = 104.5
    alike = [replace(point, page_faults_s=0.5 * point.step_s) for point in sweep]
    assert knee_line(alike) == ""  # every batch size pays the same share
    assert knee_line(()) == ""


def test_a_jump_of_page_faults_neither_ends_the_sweep_nor_goes_unnamed():
    def wide(size):
        return (
            nn.Sequential(nn.Linear(4096, 4096, bias=False)),
            (torch.randn(size, 4096),),
            torch.mean,
        )  # a gradient of 64 MiB: a mapping in each step

    explanation = explained(machine(page_fault=1e-3, backward_call=100.0), make_target(wide))
    advice = explanation.advice
    assert [p.batch_size for p in advice.sweep] == [
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
    ]  # what is fixed halves with each doubling
    assert max(p.page_faults_s for p in advice.sweep) > 0
    assert [row["page_faults_s"] for row in explanation_to_json(explanation)["batch_sizes"]] == [
        p.page_faults_s for p in advice.sweep
    ]
    assert (knee_line(advice.sweep) != "") == any(
        "page faults decide" in note for note in advice.notes
    )
    assert "page faults" in to_text(explanation_page(explanation))


def test_page_faults_gone_are_what_a_tuned_malloc_brings():
    trace = recording.record_target(
        make_target(
            lambda size: (nn.Linear(4096, 4096), (torch.randn(size, 4096),), torch.mean), 64
        )
    )
    on = cases.machine({"page_fault": 1e-5})
    base, tuned = predict(trace, on, 1), predict(trace, on, 1, malloc="tuned")
    # The weight's gradient takes 64 MiB, a mapping of its own in each step: 16,384 pages.
    faults_s = math.fsum(item.seconds for item in base.prices.items if item.bound == "page-faults")
    assert faults_s > 16_384 * 1e-5
    # beside the faults, the operands of a kept heap lie elsewhere than those of fresh pages
    assert tuned.step.total_s == pytest.approx(base.step.total_s - faults_s, rel=0.01)
    suggestion = next(s for s in explain(base).advice.suggestions if s.variant.malloc == "tuned")
    assert suggestion.gain_frac == pytest.approx(base.step.total_s / tuned.step.total_s - 1)


def test_a_trace_alone_leaves_threads_and_malloc():
    trace = recording.record_target(make_target(mlp))
    explanation = explain(predict(trace, cases.machine(), 1))
    assert {s.variant.name.split()[0] for s in explanation.advice.suggestions} == {"malloc"}
    assert any("trace file" in note for note in explanation.advice.notes)


def test_widths_between_the_blocks_are_named():
    widths = {w.layer: w for w in explained(cases.machine(), make_target(mlp)).advice.widths}
    assert set(widths) == {"2"}  # 64 and 16 are multiples of 16
    assert (widths["2"].width, widths["2"].wider) == (20, 32)
    assert (
        widths["2"].cost_frac > 0
    )  # the made-up products take a time of their size: 12 columns more are not free


def test_what_the_machine_file_does_not_know_is_not_judged():
    explanation = explained(with_linear_layers(cases.machine()), make_target(mlp))
    assert found(explanation, "fused optimizer").verdict != UNSURE
    suggestion = found(explanation, "pure bf16")
    assert suggestion.verdict == UNSURE
    assert "bfloat16" in suggestion.reason


def with_linear_layers(on: Machine) -> Machine:
    """Every op of the little network measured, in float32 alone."""
    trace = recording.record_target(make_target(mlp))
    return on.with_kernels(Kernel(op, "exact", 1, Samples((1e-4,))) for op in trace.ops)


@pytest.mark.slow
def test_in_place_activations_are_those_that_autograd_allows():
    def build(size):
        layers = (
            nn.Linear(64, 64),
            nn.Tanh(),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.LeakyReLU(),
            nn.Linear(64, 16),
        )
        return nn.Sequential(*layers), (torch.randn(size, 64),), torch.mean

    explanation = explained(cases.machine(), make_target(build))
    (edit,) = found(explanation, "in-place activations").variant.edits
    assert edit.layers == (
        "4",
        "6",
    )  # the backward of Tanh reads its output, which the first ReLU would have overwritten
    assert any("cannot work in place" in note for note in explanation.advice.notes)
    done = explained(cases.machine(), make_target(lambda size: mlp(size, inplace=True)))
    assert not [s for s in done.advice.suggestions if s.variant.name == "in-place activations"]


def test_inference_has_no_optimizer_and_an_inference_mode():
    names = {
        s.variant.name
        for s in explained(cases.machine(), make_target(mlp, inference=True)).advice.suggestions
    }
    assert "inference_mode" in names
    assert not {"fused optimizer", "foreach optimizer", "gradients to None"} & names


@pytest.mark.slow
def test_gradients_that_are_zeroed_could_be_none():
    class Zeroing(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none=False)

    def build(size):
        model, inputs, loss = mlp(size)
        return model, inputs, loss, Zeroing(model.parameters(), lr=0.1)

    suggestion = found(explained(cases.machine(), make_target(build)), "gradients to None")
    assert suggestion.gain_frac > 0
    assert (
        found(explained(cases.machine(), make_target(mlp)), "gradients to None").verdict
        == DOES_NOT_APPLY
    )


def test_together_takes_one_optimizer_and_gains_more_than_each():
    on = optimizers(0.1, 1e-6)
    on = replace(on, costs=(*on.costs, Cost(CostKey("page_fault"), 1, Samples((1e-5,)))))

    def build(size):
        return (
            nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 16)),
            (torch.randn(size, 4096),),
            torch.mean,
        )

    explanation = explained(on, make_target(build, 64))
    together = found(explanation, "together")
    singles = [found(explanation, name).gain_frac for name in ("fused optimizer", "malloc tuned")]
    assert min(singles) >= LEAST_GAIN_FRAC
    assert together.gain_frac > max(singles)
    assert [edit.kind for edit in together.variant.edits if edit.kind in ("fused", "foreach")] == [
        "fused"
    ]


# -- telling ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told():
    explanation = explained(optimizers(1e-3, 1e-6), make_target(mlp))
    pairs = (ChangeRun(1.0, (1.5, 1.5)), ChangeRun(1.0, (2.0, 2.0)), ChangeRun(1.0, (3.0, 3.0)))
    trials = ChangeTrials(
        8,
        (1.5, 1.5, 2.0),
        (
            ChangeTrial("fused optimizer", 8, pairs),
            ChangeTrial("channels_last", error="it | broke"),
        ),
        0.5,
        3,
        notes=("a note",),
    )
    return replace(explanation, trials=trials)


def test_json_holds_everything_and_adds_up(told):
    data = json.loads(json.dumps(explanation_to_json(told), allow_nan=False))
    assert (
        data["schema"],
        data["schema_version"],
        data["target"],
        data["batch_size"],
        data["threads"],
    ) == ("dlperf.explanation", 2, "made-up", 8, 1)
    total_s = data["step"]["total_s"]
    assert math.fsum(row["time_s"] for row in data["parts"]) == pytest.approx(total_s)
    assert math.fsum(row["share_frac"] for row in data["parts"]) == pytest.approx(1)
    for row in data["layers"]:
        assert math.fsum(
            value for name, value in row.items() if name.endswith("_s") and name != "total_s"
        ) == pytest.approx(row["total_s"])
    (fused,) = [row for row in data["suggestions"] if row["change"] == "fused optimizer"]
    assert fused["measured_gain_frac"] == pytest.approx(
        1.0
    )  # gains of 0.5, 1 and 2: the middle one
    assert fused["measured_step_s"] == pytest.approx(8.0)
    assert data["trials"]["repeatability_frac"] == pytest.approx((0 + 0.5 / 1.75) / 2)
    assert data["trials"]["agreement"]["n_right"] == 1


def test_csv_has_a_row_for_each(told):
    lines = parts_to_csv(told).splitlines()
    assert lines[0].startswith("target,batch_size,threads,layer,type,total_s,")
    assert len(lines) == 1 + len(told.breakdown.layers)
    assert len(suggestions_to_csv(told).splitlines()) == 1 + len(told.advice.suggestions)


def test_text_and_markdown_name_gain_floor_and_what_failed(told):
    blocks = explanation_page(told)
    for text in (to_text(blocks, 100), to_markdown("explanation", blocks)):
        flat = " ".join(text.split())
        assert "fused optimizer" in flat
        assert "+100 %" in flat
        assert "differ by 14.3 %" in flat
        assert "SGD(..., fused=True)" in flat.replace("\\", "")
        assert "broke" in flat
        assert "a note" in flat
    assert max(map(len, to_text(blocks, 80).splitlines())) <= 80


def test_plots_are_drawn(told):
    from dlperf.advice.plots import pngs_of

    pngs = pngs_of(told, dpi=40)
    assert set(pngs) == {"breakdown", "gains"}
    assert all(png.startswith(b"\x89PNG") for png in pngs.values())
    assert set(pngs_of(replace(told, trials=None), dpi=40)) == {"breakdown"}

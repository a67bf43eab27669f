"""Changes of what a target builds: they are recorded under fake tensors, and on real ones they
compute what the unchanged model computes.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dlperf.advice.transformations import edit_built
from dlperf.advice.variants import (
    Edit,
    NotApplicable,
    Variant,
    activations,
    linears_of_one_input,
)
from dlperf.recorder import recording
from dlperf.recorder.targets import Built, Target


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        scores = torch.softmax(self.q(x) @ self.k(x).transpose(-1, -2), -1)
        return self.out(scores @ self.v(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 20, 3, padding=1), nn.Conv2d(20, 20, 3, padding=1)
        self.norm, self.depthwise = nn.BatchNorm2d(20), nn.Conv2d(20, 20, 3, groups=20)
        self.relu, self.late = nn.ReLU(), nn.ReLU()
        self.flatten, self.head = nn.Flatten(), nn.Linear(20 * 6 * 6, 5)

    def forward(self, x):
        x = self.first(x)
        x = x + self.norm(self.second(self.relu(x)))
        return self.head(self.flatten(self.late(self.depthwise(x))))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(72, 20),
        nn.ReLU(),
        nn.Linear(20, 4),
    )


SHAPES = {"attention": (2, 5, 12), "residual": (2, 3, 8, 8), "cnn": (2, 3, 8, 8)}
MODELS = {"attention": Attention, "residual": Residual, "cnn": cnn}


def built(
    name: str, kind: type[torch.optim.Optimizer] = torch.optim.SGD, **options: object
) -> Built:
    torch.manual_seed(0)
    model = MODELS[name]()
    inputs = torch.randn(*SHAPES[name])
    return Built(
        model,
        (inputs,),
        lambda output: (output**2).mean(),
        kind(model.parameters(), **{"lr": 0.1, **options}),
    )


def target(name: str, *edits: Edit, inference: bool = False, **options: object) -> Target:
    def make(_):
        made = built(name, **options)
        return made.model, made.inputs, made.loss, made.optimizer

    return Target(name, 2, inference, make).changed(lambda one: edit_built(one, edits))


def trained(made: Built, steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        made.optimizer.zero_grad()
        loss = made.loss(made.model(*made.inputs))
        loss.backward()
        made.optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("cnn", Edit("fused")),
        ("cnn", Edit("foreach")),
        ("cnn", Edit("channels-last")),
        ("residual", Edit("channels-last")),
        ("cnn", Edit("set-to-none")),
        ("cnn", Edit("in-place", ("1", "5"))),
        ("attention", Edit("merge", ("q", "k", "v"))),
    ],
    ids=lambda value: value if isinstance(value, str) else value.kind,
)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_goes_on_as_before(name, edit, kind):
    expected = trained(built(name, kind))
    assert trained(edit_built(built(name, kind), [edit])) == pytest.approx(expected, rel=1e-4)
    assert expected[0] != expected[-1]


@pytest.mark.parametrize("edit", [Edit("autocast"), Edit("bfloat16")], ids=lambda edit: edit.kind)
def test_bfloat16_changes_results_a_little(edit):
    expected = trained(built("cnn"))
    found = trained(edit_built(built("cnn"), [edit]))
    assert found == pytest.approx(expected, rel=0.05)
    assert found != pytest.approx(expected, rel=1e-5)


def test_fused_optimizer_is_recorded():
    trace = recording.record_target(
        target("cnn", Edit("fused"), kind=torch.optim.AdamW, weight_decay=0.3)
    )
    assert trace.optimizer.implementation == "fused"
    assert {op.packet for op in trace.ops if op.phase == "optimizer"} >= {"aten._fused_adamw_"}
    assert trace.recorded_on == "fake tensors"


def test_options_of_an_optimizer_are_kept():
    made = built("cnn")
    first, *others = made.model.parameters()
    groups = [{"params": [first], "lr": 0.5, "weight_decay": 0.25}, {"params": others}]
    made = Built(
        made.model,
        made.inputs,
        made.loss,
        torch.optim.SGD(groups, lr=0.125, momentum=0.75, nesterov=True),
    )
    fused = edit_built(made, [Edit("fused")]).optimizer
    assert [
        (g["lr"], g["weight_decay"], g["momentum"], g["nesterov"], g["fused"])
        for g in fused.param_groups
    ] == [(0.5, 0.25, 0.75, True, True), (0.125, 0, 0.75, True, True)]
    assert fused.param_groups[0]["params"][0] is first


def test_what_an_optimizer_does_not_know_does_not_apply():
    with pytest.raises(NotApplicable, match="RMSprop knows no fused"):
        edit_built(built("cnn", torch.optim.RMSprop), [Edit("fused")])
    with pytest.raises(NotApplicable, match="already"):
        edit_built(built("cnn", fused=True), [Edit("fused")])


def test_channels_last_is_recorded():
    plain = recording.record_target(target("cnn"))
    found = recording.record_target(target("cnn", Edit("channels-last")))

    def strides(trace):
        return next(op.outputs[0].strides for op in trace.ops if op.packet == "aten.convolution")

    assert strides(plain) == (8 * 36, 36, 6, 1)  # (2, 8, 6, 6): rows innermost
    assert strides(found) == (8 * 36, 1, 6 * 8, 8)  # channels innermost
    assert {op.layer for op in found.ops if op.phase == "optimizer"} == {
        "0",
        "4",
        "6",
    }  # the optimizer follows the parameters
    with pytest.raises(NotApplicable, match="no Conv2d"):
        edit_built(built("attention"), [Edit("channels-last")])


@pytest.mark.parametrize(
    ("edit", "matrices"),
    [(Edit("autocast"), {"bfloat16"}), (Edit("bfloat16"), {"bfloat16"}), (None, {"float32"})],
)
def test_products_are_recorded_in_the_precision_asked_for(edit, matrices):
    trace = recording.record_target(target("attention", *([edit] if edit else [])))
    assert {
        op.inputs[0].dtype for op in trace.ops if op.packet in ("aten.addmm", "aten.mm", "aten.bmm")
    } == matrices
    parameters = {spec.dtype for layer in trace.layers for _, spec in layer.parameters}
    assert parameters == ({"bfloat16"} if edit == Edit("bfloat16") else {"float32"})


def test_merged_layers_are_one_product():
    plain = recording.record_target(target("attention"))
    merged = recording.record_target(target("attention", Edit("merge", ("q", "k", "v"))))
    assert linears_of_one_input(plain) == [("q", "k", "v")]

    def products(trace):
        return [
            op.outputs[0].shape
            for op in trace.ops
            if op.packet == "aten.addmm" and op.phase == "forward"
        ]

    assert products(plain) == [(10, 12)] * 3 + [(10, 3)]
    assert products(merged) == [(10, 36), (10, 3)]
    assert merged.n_parameters == plain.n_parameters


def test_layers_of_different_inputs_are_not_merged():
    with pytest.raises(NotApplicable, match="same tensor"):
        recording.record_target(target("attention", Edit("merge", ("q", "out"))))
    with pytest.raises(NotApplicable, match=r"not several nn.Linear"):
        edit_built(built("cnn"), [Edit("merge", ("0", "4"))])


def test_activations_whose_input_is_read_again_stay_as_they_are():
    residual, plain = (
        activations(recording.record_target(target(name))) for name in ("residual", "cnn")
    )
    assert "late" in residual
    assert "early" not in residual  # its input goes around it as well
    assert [name for name in plain if name in ("1", "5")] == ["1", "5"]


def test_a_first_activation_may_not_change_the_batch():
    trace = recording.record_target(
        Target(
            "t",
            2,
            False,
            lambda size: (
                nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
                (torch.randn(2, 4),),
                torch.sum,
            ),
        )
    )
    assert activations(trace) == []


def test_in_place_is_recorded():
    trace = recording.record_target(target("cnn", Edit("in-place", ("1", "5"))))
    assert [op.packet for op in trace.ops if "relu" in op.packet and op.phase == "forward"] == [
        "aten.relu_",
        "aten.relu_",
    ]


# -- widths ----------------------------------------------------------------------------------------


def test_a_wider_layer_takes_its_readers_along():
    made = edit_built(built("cnn"), [Edit("widen", ("0", "4"))])
    conv, first, last = made.model[0], made.model[4], made.model[6]
    assert (conv.out_channels, conv.weight.shape) == (16, (16, 3, 3, 3))
    assert (first.in_features, first.out_features) == (16 * 9, 32)
    assert (last.in_features, last.out_features) == (32, 4)
    assert {id(p) for p in made.model.parameters()} == {
        id(p) for g in made.optimizer.param_groups for p in g["params"]
    }
    assert trained(made)[0] > 0
    trace = recording.record_target(target("cnn", Edit("widen", ("0", "4"))))
    assert trace.recorded_on == "fake tensors"
    assert next(op.outputs[0].shape for op in trace.ops if op.packet == "aten.convolution") == (
        2,
        16,
        6,
        6,
    )


def test_the_ends_of_a_skip_connection_are_widened_together():
    with pytest.raises(NotApplicable, match="insists on the old width"):
        edit_built(built("residual"), [Edit("widen", ("second",))])
    made = edit_built(built("residual"), [Edit("widen", ("first", "second"))])
    model = made.model
    assert (model.norm.num_features, model.norm.running_var.shape) == (32, (32,))
    assert (model.depthwise.groups, model.depthwise.weight.shape) == (32, (32, 1, 3, 3))
    assert model.head.in_features == 32 * 36
    trained(made)


def test_the_output_keeps_its_width():
    with pytest.raises(NotApplicable, match="output would change"):
        edit_built(built("cnn"), [Edit("widen", ("6",))])
    with pytest.raises(NotApplicable, match="no width"):
        edit_built(built("residual"), [Edit("widen", ("depthwise",))])


def test_shared_parameters_are_left_alone():
    made = built("attention")
    made.model.q.weight = made.model.k.weight
    with pytest.raises(NotApplicable, match="shares"):
        edit_built(made, [Edit("widen", ("q",))])


# -- data ------------------------------------------------------------------------------------------


def test_code_is_needed_for_edits_and_batch_sizes():
    assert Variant("x", (Edit("fused"),)).needs_code
    assert Variant("x", batch_size=64).needs_code
    assert not Variant("x", threads=2, malloc="tuned").needs_code


def test_changes_follow_each_other():
    one = Target("cnn", 2, False, lambda size: (cnn(), (torch.randn(2, 3, 8, 8),), torch.mean))
    both = one.changed(lambda made: edit_built(made, [Edit("widen", ("0",))])).changed(
        lambda made: edit_built(made, [Edit("channels-last")])
    )
    weight = both.build().model[0].weight
    assert weight.shape[0] == 16
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert copy.deepcopy(one).build().model[0].weight.shape[0] == 8

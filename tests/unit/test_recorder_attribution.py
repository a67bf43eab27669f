"""Whose work an operation is. The expected lists are what autograd's formulas give for each layer,
written out by hand.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from recorder_zoo import CASES, Branching, Checkpointed, Custom
from torch import nn

from dlperf.core.trace import LOSS
from dlperf.recorder.recording import record

VIEWS = {"aten.t", "aten.detach", "aten.view", "aten.expand"}


def work(trace, phase):
    """(layer, packet) of what moves data in a phase."""
    return [
        (op.layer, op.packet[5:])
        for op in trace.ops
        if op.phase == phase and op.packet not in VIEWS
    ]


def layer(trace, name):
    return next(row for row in trace.layers if row.name == name)


def test_a_chain():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))
    trace = record(model, torch.randn(4, 3))
    assert work(trace, "forward") == [
        ("0", "addmm"),
        ("1", "relu_"),
        ("2", "addmm"),
        (LOSS, "mean"),
    ]
    assert work(trace, "backward") == [
        (LOSS, "ones_like"),
        (LOSS, "div"),
        ("2", "mm"),
        ("2", "mm"),
        ("2", "sum"),
        ("1", "threshold_backward"),
        ("0", "mm"),
        ("0", "sum"),
    ]
    assert [row.name for row in trace.layers] == ["Sequential", "0", "1", "2"]
    assert [row.callers for row in trace.layers] == [(("", 1),), *[(("Sequential", 1),)] * 3]
    assert [row.is_leaf for row in trace.layers] == [False, True, True, True]
    assert layer(trace, "2").inputs[0].shape == (4, 5)
    assert layer(trace, "2").outputs[0].shape == (4, 2)
    assert [(name, spec.shape) for name, spec in layer(trace, "2").parameters] == [
        ("weight", (2, 5)),
        ("bias", (2,)),
    ]
    assert trace.batch_size == 4
    assert trace.n_parameters == 3 * 5 + 5 + 5 * 2 + 2


def test_sizes_tell_the_layer():
    # every Linear has sizes of its own, so that the shapes of a product say whose it is
    sizes = [3, 5, 7, 11, 13]
    model = nn.Sequential(
        *[part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Sigmoid())]
    )
    trace = record(model, torch.randn(2, 3))
    seen = set()
    for op in trace.ops:
        if op.packet in ("aten.mm", "aten.addmm", "aten.sum"):
            numbers = {n for t in (*op.inputs, *op.outputs) for n in t.shape} & set(sizes)
            index = max(sizes.index(n) for n in numbers) - 1
            assert op.layer == str(2 * index), op
            seen.add((op.phase, op.layer))
    assert len(seen) == 8


def test_a_module_used_twice_and_functional_work_around_it():
    trace = record(Branching(), torch.randn(5, 6))
    assert [name for name, op in work(trace, "forward") if op == "addmm"] == [
        "a",
        "shared",
        "b",
        "shared",
    ]
    assert [name for name, op in work(trace, "forward") if op != "addmm"] == ["Branching"] * 5 + [
        LOSS
    ]  # tanh gelu sum cat mul
    assert layer(trace, "shared").callers == (("Branching", 2),)
    backward = work(trace, "backward")
    # each use gives two products, a bias sum; the second weight and bias gradient are added to the
    # first
    assert [op for name, op in backward if name == "shared"].count("mm") == 4
    assert [op for name, op in backward if name == "shared"].count("add") == 2
    assert {op for name, op in backward if name == "Branching"} >= {
        "tanh_backward",
        "gelu_backward",
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_backward_of_the_layer_recomputed(reentrant):
    trace = record(Checkpointed(reentrant), torch.randn(3, 6))
    assert [op for op in work(trace, "forward") if op[1] in ("addmm", "tanh")] == [
        ("first", "addmm"),
        ("blocks.0.0", "addmm"),
        ("blocks.0.1", "tanh"),
        ("blocks.1.0", "addmm"),
        ("blocks.1.1", "tanh"),
    ]
    backward = [
        op for op in work(trace, "backward") if op[1] in ("addmm", "tanh", "tanh_backward", "mm")
    ]
    expected = []
    for block in ("blocks.1", "blocks.0"):
        expected += [
            (f"{block}.0", "addmm"),
            (f"{block}.1", "tanh"),
            (f"{block}.1", "tanh_backward"),
            (f"{block}.0", "mm"),
            (f"{block}.0", "mm"),
        ]
    # without reentry autograd stops the recomputation as soon as it has what it saved: tanh's
    # result is one of those
    assert backward == [*expected, ("first", "mm")]
    assert layer(trace, "blocks.0.0").n_calls == 1  # calls of the forward


def test_a_custom_function_belongs_to_its_module():
    trace = record(Custom(), torch.randn(3, 4))
    assert [op for name, op in work(trace, "forward") if name == "cube"] == ["mul", "mul"]
    assert [op for name, op in work(trace, "backward") if name == "cube"] == ["mul", "mul", "mul"]


def test_attention_keeps_its_projection_for_itself():
    trace = record(
        nn.MultiheadAttention(16, 2, batch_first=True),
        (torch.randn(2, 5, 16),) * 3,
        loss=lambda out: out[0].mean(),
    )
    assert {name for name, _ in work(trace, "forward")} == {"MultiheadAttention", LOSS}
    # out_proj is not called, its weight is used by the attention itself; the optimizer's work still
    # is its owner's
    assert {op.layer for op in trace.ops if op.phase == "optimizer"} == {
        "MultiheadAttention",
        "out_proj",
    }
    assert layer(trace, "out_proj").n_calls == 0


def test_nodes_are_counted_and_what_autograd_records_is_marked():
    trace = record(nn.Sequential(nn.Linear(3, 5), nn.Tanh()), torch.randn(4, 3))
    nodes = [op.node for op in trace.ops if op.phase == "backward" and op.node >= 0]
    assert nodes == sorted(nodes)
    # mean, tanh, addmm, accumulation of the bias, transposition of the weight, accumulation of the
    # weight
    assert len(set(nodes)) == 6
    assert all(op.node == -1 for op in trace.ops if op.phase != "backward")
    # addmm, tanh and mean make a node each, and so does the transposition of the weight
    assert [op.packet for op in trace.ops if op.grad] == [
        "aten.t",
        "aten.addmm",
        "aten.tanh",
        "aten.mean",
    ]


def test_memory_is_born_and_dies():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    trace = record(model, torch.randn(4, 3))
    ops = trace.ops
    index = {(op.phase, op.layer, op.packet): number for number, op in enumerate(ops)}
    hidden = trace.storages[ops[index["forward", "0", "aten.addmm"]].outputs[0].storage]
    # tanh's backward needs its result, not its input: the first product dies when the next layer
    # has read it
    assert hidden.nbytes == 4 * 4 * 5
    assert hidden.born == index["forward", "0", "aten.addmm"]
    assert (
        index["forward", "1", "aten.tanh"] < hidden.dies <= index["forward", "2", "aten.addmm"] + 1
    )
    kept = trace.storages[ops[index["forward", "1", "aten.tanh"]].outputs[0].storage]
    assert kept.dies > index["backward", "1", "aten.tanh_backward"]
    gradients = [s for s in trace.storages if s.kind == "gradient"]
    # those of the step before die in zero_grad, before the first operation; the new ones stay
    assert (
        sorted(s.nbytes for s in gradients if s.born == -1)
        == sorted(s.nbytes for s in gradients if s.born >= 0)
        == [8, 20, 40, 60]
    )
    assert all(s.dies == 0 for s in gradients if s.born == -1)
    assert all(s.dies is None for s in gradients if s.born >= 0)
    assert {s.kind for s in trace.storages} == {"parameter", "gradient", "input", ""}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "branching_with_a_module_used_twice",
        "tied_weights",
        "checkpointing",
        "transformer_encoder_layer",
        "custom_autograd_function",
    ],
)
def test_fake_tensors_live_as_long_as_real_ones(name, monkeypatch):
    """The lifetimes under fake tensors against those of real memory, taken by the same step on real
    tensors.
    """
    model, inputs, loss, optimizer = CASES[name]()
    fake = record(model, inputs, loss=loss, optimizer=optimizer)
    model, inputs, loss, optimizer = CASES[name]()
    real = record(
        model,
        inputs,
        loss=lambda output: loss(output) + 0 * float(output.sum()),
        optimizer=optimizer,
    )
    assert real.recorded_on == "real tensors"
    assert "reads the value" in real.notes[0]

    def lives(trace):
        return sorted(
            (s.nbytes, s.kind, s.born >= 0, s.dies is None) for s in trace.storages if s.nbytes > 8
        )

    assert lives(fake) == lives(real)


class Loops(nn.Module):
    """Operators that Python calls one by one, and one that consists of many."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(3, 3) for _ in range(3))
        self.cell = nn.RNNCell(3, 3)

    def forward(self, x):
        for weight in self.weights:
            x = torch.mm(x, weight)
        return self.cell(x + 1.0)


def test_what_cpp_code_calls_is_told_from_what_python_calls():
    trace = record(Loops(), torch.randn(4, 3))
    forward = [op for op in trace.ops if op.phase == "forward" and op.layer != LOSS]
    assert [op.packet[5:] for op in forward if not op.from_cpp] == [
        *3 * ["mm"],
        "add",
        "zeros",
        "t",
        "t",  # as in a loop of one call: the first of the call's operators comes again
    ]
    assert [op.packet[5:] for op in forward if op.from_cpp and op.packet != "aten.detach"] == [
        "addmm",
        "addmm",
        "add_",
        "tanh",
    ]
    backward = [op for op in trace.ops if op.phase == "backward"]
    assert [op.packet[5:] for op in backward if not op.from_cpp] == ["ones_like"]
    assert all(not op.from_cpp for op in trace.ops if op.phase == "optimizer")


def test_nodes_without_an_operation_are_counted():
    trace = record(Loops(), torch.randn(4, 3))
    # of x + 1 and of the sum of both products
    assert {row.name: row.n_silent_nodes for row in trace.layers if row.n_silent_nodes} == {
        "Loops": 1,
        "cell": 1,
    }

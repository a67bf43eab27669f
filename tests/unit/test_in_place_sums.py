"""Sums, recorded as torch forms them outside of a recording."""

from __future__ import annotations

import pytest
import torch
from recorder_zoo import CASES
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dlperf
from dlperf.core.trace import Trace


class _Shared(nn.Module):
    """A tensor that three layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        state = self.first(state)
        return torch.stack([layer(state) for layer in self.others])


class _Residual(nn.Module):
    """Adds what follows a norm; where it `turns`, the gradient comes back as a view."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.turns = nn.LayerNorm(8), nn.Linear(8, 8), turns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.turns:
            return x + self.linear(self.norm(x))
        turned = x.transpose(0, 1)
        return (turned + self.linear(turned)).transpose(0, 1)


def _check_sums(trace: Trace, found: torch.Tensor) -> list[str]:
    """The names of what runs in the backward of `found`, which has the additions of the trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        found.backward()  # type: ignore[no-untyped-call]
    recorded = [op.packet for op in trace.ops if op.phase == "backward"]
    names = [event.name for event in profiled.events()]
    for packet in ("add", "add_"):
        assert recorded.count(f"aten.{packet}") == names.count(f"aten::{packet}"), packet
    return names


@pytest.mark.parametrize(
    "name",
    [
        "residual",
        "branching_with_a_module_used_twice",
        "tied_weights",
        "transformer_encoder_layer",
        "gru",
        "rnn",
        "lstm_cell",
        "norms_and_pools",
    ],
)
def test_sums_are_in_place_where_the_engine_forms_them_so(name: str) -> None:
    model, inputs, loss, optimizer = CASES[name]()
    trace = dlperf.record(model, inputs, loss=loss, optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        found = loss(model(**inputs) if isinstance(inputs, dict) else model(*inputs))
        names = _check_sums(trace, found)
    assert "aten::add_" in names or "aten::add" in names


@pytest.mark.parametrize(("turns", "n_in_place"), [(False, 1), (True, 0)])
def test_a_gradient_that_a_view_has_read_is_summed_in_place(turns: bool, n_in_place: int) -> None:
    model = nn.Sequential(*(_Residual(turns) for _ in range(3)))
    x = torch.randn(4, 5, 8)
    trace = dlperf.record(model, (x,), loss=lambda output: output.sum())
    assert _check_sums(trace, model(x).sum()).count("aten::add_") == n_in_place


def test_a_sum_in_place_is_the_memory_of_its_first_operand() -> None:
    trace = dlperf.record(_Shared(), torch.rand(4, 8))
    in_backward = [
        (index, op)
        for index, op in enumerate(trace.ops)
        if op.packet == "aten.add_" and op.phase == "backward"
    ]
    (one, first), (another, second) = in_backward
    assert first.outputs == (first.inputs[0],)
    assert first.outputs[0].storage == second.inputs[0].storage
    held = trace.storages[first.outputs[0].storage]
    assert held.born < one < another
    assert held.dies is not None
    assert held.dies > another


class _Turned(nn.Module):
    """A linear layer whose input is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.transpose(0, 1))


class _Written(nn.Module):
    """The same arithmetic, written out: the sum is memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(5, 6)), nn.Parameter(torch.rand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1) @ self.weight.t() + self.bias


def _sums(model: nn.Module, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """The additions of a forward as recorded, and as they ran."""
    trace = dlperf.record(model, x)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        model(x)
    recorded = [op.packet for op in trace.ops if op.phase == "forward"]
    ran = [event.name.replace("aten::", "aten.") for event in profiled.events()]
    add = ("aten.add", "aten.add_")
    return [name for name in recorded if name in add], [name for name in ran if name in add]


@pytest.mark.parametrize(("model", "name"), [(_Turned(), "aten.add_"), (_Written(), "aten.add")])
def test_a_linear_layers_bias_is_added_in_place(model: nn.Module, name: str) -> None:
    assert _sums(model, torch.rand(4, 3, 6)) == ([name], [name])

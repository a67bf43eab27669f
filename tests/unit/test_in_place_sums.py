"""Sums of gradients that autograd's engine forms in place, against what torch itself says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import dlperf


class Residual(nn.Module):
    """Adds what follows a norm; where it `turns`, the gradient comes back as a view."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.norm, self.linear, self.turns = nn.LayerNorm(8), nn.Linear(8, 8), turns

    def forward(self, x: Tensor) -> Tensor:
        if not self.turns:
            return x + self.linear(self.norm(x))
        turned = x.transpose(0, 1)
        return (turned + self.linear(turned)).transpose(0, 1)


def sums_in_backward(model: nn.Module, x: Tensor) -> Counter[str]:
    """As the profiler sees them, without those of the parameters' gradients."""
    loss = model(x).sum()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    return Counter(event.name for event in seen.events() if event.name.startswith("aten::add"))


@pytest.mark.parametrize(("turns", "n_in_place"), [(False, 1), (True, 0)])
def test_a_gradient_that_a_view_has_read_is_summed_in_place(turns: bool, n_in_place: int) -> None:
    model = nn.Sequential(*(Residual(turns) for _ in range(3)))
    x = torch.randn(4, 5, 8)
    trace = dlperf.record(model, (x,), loss=lambda output: output.sum())
    found = Counter(
        op.packet.replace("aten.", "aten::")
        for op in trace.ops
        if op.phase == "backward" and op.packet.startswith("aten.add")
    )
    assert found["aten::add_"] == n_in_place
    assert found == sums_in_backward(model, x)

"""A program that compiles is watched without a change of what is compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from dlperf.core.errors import DlperfError
from dlperf.runner.compilation import COMPILED, module_stepped_by
from dlperf.runner.findings import Findings
from dlperf.runner.watcher import Watcher

pytestmark = pytest.mark.usefixtures("_fresh_dynamo")


@pytest.fixture
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.body(x)
        return output, nn.functional.cross_entropy(output, y)


def train(how: str, n: int = 20) -> tuple[list[str], dict[str, dict[str, int]]]:
    """Train a model that is compiled; returns the losses, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model: Any = Net()
    optimizer = torch.optim.Adam(model.parameters())
    if how == "wrapped":
        model = torch.compile(model, backend="aot_eager")
    elif how == "in place":
        model.compile(backend="aot_eager")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    called = torch.compile(step, backend="aot_eager") if how == "step" else step
    losses = [
        float(called(torch.randn(5, 6), torch.randint(3, (5,))).item()).hex() for _ in range(n)
    ]
    return losses, {name: dict(values) for name, values in counters.items() if values}


@pytest.mark.parametrize("how", ["wrapped", "in place", "step"])
def test_graphs_breaks_recompilations_and_losses_are_the_same(how: str) -> None:
    train(how)  # the first compilation of a process has further frames
    alone = train(how)
    watcher = Watcher()
    watcher.install()
    try:
        watched = train(how)
    finally:
        watcher.remove()
    assert watcher.error is None
    assert watched == alone
    assert alone[1]["stats"]["unique_graphs"] >= 1
    if how == "step":
        with pytest.raises(DlperfError, match="a function is compiled"):
            Findings(watcher)
        return
    findings = Findings(watcher)
    assert findings.measurement.layers == ()
    assert set(findings.measurement.step) == {"optimizer", "total"}
    assert COMPILED in findings.notes
    trace = findings.trace  # eager, with the loss that the model returned
    assert trace is not None
    assert (trace.batch_size, trace.layers[0].name) == (5, "Net")
    assert "aten.nll_loss_backward.default" in [op.name for op in trace.ops]


def test_a_model_that_was_compiled_before_is_noticed() -> None:
    for compile_it in (False, True):
        torch.manual_seed(0)
        model: Any = Net()
        compiled = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(5, 6), torch.randint(3, (5,)))
        watcher = Watcher(compiled if compile_it else Net())
        watcher.install()
        try:
            n_hooks = len(nn.modules.module._global_forward_pre_hooks)
            assert n_hooks == (0 if compile_it else 1)
        finally:
            watcher.remove()
            nn.modules.module._global_forward_pre_hooks.clear()


def test_the_stepped_module_is_the_outermost_one() -> None:
    holder = nn.ModuleDict({"net": Net()})
    assert module_stepped_by(torch.optim.SGD(holder.parameters(), lr=0.1)) is holder
    assert module_stepped_by(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)) is None
